"""The host time of eager calls: ratios over PyTorch, the table of a report, and the rows of small backwards."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashbwd
from flashbwd.bench import backward_time, cases, host_time, report, results
from flashbwd.bench.backward_time import DIRECT, OVERRIDDEN, SIZES, HostTime, Row

CPU = torch.device("cpu")


def case_of(**host_us: float | None) -> results.CaseResult:
    peers = {
        name.replace("_", " "): results.PeerResult(results.OK, times_ms=[1.0] * 5, work=1e9, host_us=us)
        for name, us in host_us.items()
    }
    return results.CaseResult("c", "t", "TFLOP/s", 1e-2, {}, peers, [], {})


# ---- the column of a report -----------------------------------------------------------------------


def test_a_host_time_is_compared_with_the_least_of_pytorchs_operators():
    case = case_of(torch_flash=10.0, torch_cuDNN=20.0, flex=1.0, Liger=1.0, flashbwd_sm90=12.0)
    assert case.host_ratio("flashbwd sm90") == 1.2
    assert case_of(flex=30.0, flashbwd_flex=12.0).host_ratio("flashbwd flex") == 0.4


@pytest.mark.parametrize(("ours", "ratio"), [(cases.BLOCK, 1.5), (cases.BLOCK_COMPILED, 3.0)])
def test_the_host_time_of_a_block_is_compared_with_the_same_kind_of_model(ours, ratio):
    case = case_of(torch_eager=20.0, torch_compiled=10.0, flashbwd_eager=30.0, flashbwd_compiled=30.0)
    assert case.host_ratio(ours) == ratio


def test_there_is_no_ratio_of_host_times_that_were_not_measured():
    assert case_of(torch_flash=None, flashbwd_sm90=12.0).host_ratio("flashbwd sm90") is None
    assert case_of(torch_flash=10.0, flashbwd_sm90=None).host_ratio("flashbwd sm90") is None
    assert case_of(Liger=10.0, flashbwd=12.0).host_ratio("flashbwd") is None


def test_the_table_of_host_times_marks_ratios_above_the_limit():
    case = case_of(torch_flash=10.0, Liger=50.0, flashbwd_sm90=12.0, flashbwd_sm80=12.1)
    last = report.host_times([case]).splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == ["c", "10", "50", "12 (1.20)", "12 (1.21 MISSED)"]
    assert report.host_times([case_of(torch_flash=None, flashbwd_sm90=None)]) == ""


# ---- rows of small backwards ----------------------------------------------------------------------


def gradients(row: Row, call: Any) -> list[torch.Tensor]:
    grads = call()
    if grads is None:  # loss.backward() stores them
        inputs = next(cell.cell_contents for cell in call.__closure__ if isinstance(cell.cell_contents, tuple))
        return [tensor.grad for tensor in inputs]
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize(
    "row", list(backward_time.rows_of(CPU, SIZES["cpu"])), ids=lambda row: f"{row.name}, {row.how}"
)
def test_both_calls_of_a_row_compute_the_same_gradients(row):
    pytorchs = [grad.clone() for grad in gradients(row, row.pytorchs)]
    with flashbwd.enable():
        ours = gradients(row, row.ours)
    assert len(pytorchs) == len(ours)
    for expected, grad in zip(pytorchs, ours, strict=True):
        expected = expected.transpose(1, 2) if expected.shape != grad.shape else expected
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch built with CUDA")
def test_direct_rows_of_a_gpu_call_the_operators_by_their_schemas(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # seeding would initialise the GPU
    monkeypatch.setattr(backward_time, "F", mock.Mock())
    with FakeTensorMode():
        rows = [row for row in backward_time.rows_of(torch.device("cuda"), SIZES["cuda"]) if row.how == DIRECT]
        assert len(rows) == 8
        for row in rows:
            sizes = [[grad.numel() for grad in call() if grad is not None] for call in (row.pytorchs, row.ours)]
            assert sizes[0] == sizes[1], row.name


def test_rows_cover_attention_and_norms_directly_and_through_autograd():
    rows = [(row.name.split()[0], row.how) for row in backward_time.rows_of(CPU, SIZES["cpu"])]
    assert {how for _, how in rows} == {DIRECT, OVERRIDDEN}
    direct = {name for name, how in rows if how == DIRECT}
    assert direct == {"attention", "layer_norm"}
    overridden = {name for name, how in rows if how == OVERRIDDEN}
    assert overridden == {"F.scaled_dot_product_attention", "F.layer_norm", "F.rms_norm"}
    on_gpu = SIZES["cuda"]
    assert (on_gpu.seqlen, *on_gpu.head_dims, on_gpu.rows, *on_gpu.columns) == (512, 64, 128, 1024, 1024, 4096)


def test_rounds_alternate_and_only_this_librarys_calls_run_with_overrides(monkeypatch):
    active = []
    order: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def enable():
        active.append(True)
        yield
        active.pop()

    monkeypatch.setattr(flashbwd, "enable", enable)
    row = Row(
        "r", OVERRIDDEN, lambda: order.append(("PyTorch", bool(active))), lambda: order.append(("ours", bool(active)))
    )
    sizes = backward_time.Sizes(1, 1, (), 1, (), torch.float32, rounds=2, calls=3)
    ticks: list[None] = []
    found = backward_time.measure_rows([row], CPU, sizes, lambda: ticks.append(None))[0]
    assert set(order) == {("PyTorch", False), ("ours", True)}
    assert [name for name, _ in order[1::4]] == ["ours", "PyTorch", "PyTorch", "ours", "ours", "PyTorch"]
    assert len(found.ours) == len(found.pytorchs) == 2
    assert len(ticks) == 3


@pytest.mark.parametrize(
    ("ours", "fallbacks", "verdict"),
    [([12.0, 24.0, 1.0], 0, "reached"), ([12.1, 24.2, 1.0], 0, "MISSED"), ([1.0, 1.0, 1.0], 1, "PyTorch's kernel ran")],
)
def test_a_row_is_judged_by_the_median_of_its_ratios(ours, fallbacks, verdict):
    row = Row("r", DIRECT, lambda: None, lambda: None)
    of = HostTime(row, fallbacks, [10.0, 20.0, 1.0], ours)
    assert of.verdict == verdict
    assert backward_time.table([of]).splitlines()[-1].endswith(f"| {verdict} |")
    assert backward_time.table([of], judged=False).splitlines()[-1].endswith("| - |")


def test_the_command_measures_all_rows_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(host_time.machine, "default_device", lambda: CPU)
    host_time.main(["--backward"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == [row.name for row in backward_time.rows_of(CPU, SIZES["cpu"])]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)


@pytest.mark.gpu
def test_overrides_compute_the_rows_on_a_gpu():
    rows = list(backward_time.rows_of(torch.device("cuda"), SIZES["cuda"]))
    assert len(rows) == 14
    with flashbwd.enable():
        for row in rows:
            assert backward_time._fallbacks(row) == 0, row.name
            hits = sum(counts.hits for counts in flashbwd.stats().values())
            assert hits == (row.how == OVERRIDDEN), row.name
