"""The CPU threads of the reference backend: the order of results, errors, and the number of threads."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from flashbwd.reference import workers
from flashbwd.reference.workers import run_all


def test_results_come_in_the_order_of_the_tasks() -> None:
    tasks = [functools.partial(divmod, n, 7) for n in range(50)]
    assert run_all(tasks, 3) == [divmod(n, 7) for n in range(50)]


def test_workers_run_operators_on_one_thread_and_the_caller_keeps_its_number() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        # A thread reports its number of threads only after it has run an operator.
        numbers = run_all([lambda: (torch.ones(1 << 17).exp_(), torch.get_num_threads())[1] for _ in range(12)], 3)
        assert numbers == [1] * 12
        assert torch.get_num_threads() == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)


def test_one_thread_is_the_thread_of_the_caller() -> None:
    assert set(run_all([threading.get_ident] * 4, 1)) == {threading.get_ident()}


def test_at_most_the_requested_number_of_threads_run() -> None:
    run_all([int] * 8, 4)
    assert len(set(run_all([threading.get_ident] * 40, 2))) <= 2


def test_threads_are_kept_for_later_calls_of_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_pool", None)
    pool = workers._pool_of(4)
    assert workers._pool_of(4) is workers._pool_of(2) is pool
    larger = workers._pool_of(5)
    assert larger is not pool
    assert workers._pool_of(4) is larger


def test_autograd_records_nothing_in_the_threads() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not any(result.requires_grad for result in run_all([lambda: weight * 2] * 4, 2))


@pytest.mark.parametrize("inference", [False, True])
def test_workers_create_inference_tensors_if_the_caller_does(inference: bool) -> None:
    with torch.inference_mode(inference):
        results = run_all([lambda: torch.ones(2)] * 4, 2)
    assert [result.is_inference() for result in results] == [inference] * 4


def test_an_error_in_a_task_is_raised() -> None:
    def fail() -> int:
        raise ValueError("of a task")

    with pytest.raises(ValueError, match="of a task"):
        run_all([fail] * 3, 2)
