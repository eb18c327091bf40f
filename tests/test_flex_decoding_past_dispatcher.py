"""Warm calls past PyTorch's dispatcher: when they leave a call to it, and that they do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from kit.decoding import Shape
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashbwd
from flashbwd import _ops
from flashbwd.mods import run, steps

built = pytest.mark.skipif(_ops.past_dispatcher is None, reason=f"no _C_python: {_ops.not_loaded.get('_C_python')}")
UNKNOWN = -1  # a step's number


def asked(*tensors: Tensor, lengths: Any = None, number: Any = UNKNOWN) -> bool:
    """Whether a call with these tensors goes past the dispatcher; with no such step, nothing comes of it."""
    assert _ops.past_dispatcher is not None
    tensors = tensors or (torch.zeros(1, 1, 1, 8),) * 3
    result = _ops.past_dispatcher.decoding_step(number, lengths, *tensors)
    assert result is None or result is NotImplemented
    return result is None


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@built
@pytest.mark.parametrize(
    "context", [nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad, torch._C.DisableTorchFunction]
)
def test_ordinary_tensors_go_past_the_dispatcher(context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        assert asked()
        assert asked(*(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16) for _ in range(11)))
        assert asked(lengths=(1, 2))


@built
@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu"),
        Functions,
        Operators,
        FakeTensorMode,
        lambda: torch.device("cpu"),
        lambda: torch.autograd.profiler.profile(use_kineto=False),
        torch._C._AutoDispatchBelowAutograd,
    ],
    ids=["autocast", "functions", "operators", "fake", "device", "profiler", "below_autograd"],
)
def test_what_listens_is_asked(context: Callable[[], AbstractContextManager[Any]]) -> None:
    tensors = tuple(torch.zeros(1, 1, 1, 8) for _ in range(3))
    with context():
        assert not asked(*tensors)
    assert asked(*tensors)


@built
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_transforms_are_asked(transform: Callable[..., Any]) -> None:
    went: list[bool] = []
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        went.append(asked(x, x, x))
        went.append(asked())  # the transform is on, whatever the tensors are
        kept.append(x)
        return x.sum()

    transform(function)(torch.zeros(4))
    assert went == [False, False]
    assert asked() and not asked(*kept * 3)


@built
def test_a_trace_is_asked() -> None:
    went: list[bool] = []

    def function(x: Tensor) -> Tensor:
        went.append(asked(x, x, x))
        return x + 1

    torch.jit.trace(function, torch.zeros(4), check_trace=False)
    assert went == [False]


@built
@pytest.mark.parametrize(
    "other",
    [
        lambda x: nn.Parameter(x, requires_grad=False),
        lambda x: x.as_subclass(Subclass),
        lambda x: x.to("meta"),
        torch._neg_view,
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: torch._efficientzerotensor((2, 2)),
        lambda x: FakeTensorMode().from_tensor(x),
        lambda _: None,
        lambda _: 1.0,
    ],
    ids=[
        "parameter",
        "subclass",
        "meta",
        "negative",
        "conjugate",
        "sparse",
        "nested",
        "zero",
        "fake",
        "none",
        "number",
    ],
)
def test_other_tensors_go_through_the_dispatcher(other: Callable[[Tensor], Any]) -> None:
    plain = torch.ones(2, 2)
    for place in range(5):
        tensors = [plain] * 5
        tensors[place] = other(plain)
        assert not asked(*tensors)


@built
def test_gradients_go_through_the_dispatcher() -> None:
    plain, learned = torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)
    for place in range(4):
        tensors = [plain] * 4
        tensors[place] = learned
        assert not asked(*tensors)
        assert not asked(*(t * 1 for t in tensors))
        with torch.no_grad():
            assert asked(*tensors)


@built
def test_a_mode_of_another_thread_is_its_own() -> None:
    inside, done = threading.Event(), threading.Event()
    went: list[bool] = []

    def other() -> None:
        with Operators():
            went.append(asked())
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    assert asked()
    done.set()
    thread.join()
    assert went == [False]


@built
def test_arguments_that_are_none_go_through_the_dispatcher() -> None:
    plain = torch.zeros(2, 2)
    assert _ops.past_dispatcher is not None
    for arguments in ((), (0,), (0, None, plain, plain), (0, None, *(plain,) * 12)):
        assert _ops.past_dispatcher.decoding_step(*arguments) is NotImplemented
    for lengths in ((), (1,), (1, "2"), [1, 2], 5, (1, 1 << 80)):
        assert not asked(lengths=lengths)
    assert not asked(number="1") and not asked(number=1 << 80)


def test_a_step_asks_the_operator_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_steps", {})
    answers: list[Any] = []
    tensors = tuple(torch.zeros(1, 1, 1, 8) for _ in range(3))
    monkeypatch.setattr(steps, "_at_once", lambda number, lengths, *given: answers[-1])
    monkeypatch.setattr(steps, "_operators", [[lambda *_: "of the operator"] * 3] * 9)
    wanted = (True, 0, False, False, False)
    steps.remember(None, None, None, wanted, run._settings_of(0, None, wanted), [], [])
    for answer, found in ((tensors[0], tensors[0]), (None, None), (NotImplemented, "of the operator")):
        answers.append(answer)
        result = steps.run_step(*tensors, None, None, None, True, False)
        assert result is found or result == found


# ---- on a GPU ----


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By which way the calls went that a step served."""
    taken: list[str] = []
    at_once = steps._at_once
    if at_once is None:
        pytest.skip(f"no _C_python: {_ops.not_loaded.get('_C_python')}")

    def noted(*arguments: Any) -> Any:
        results = at_once(*arguments)
        taken.append("refused" if results is None else "dispatcher" if results is NotImplemented else "past")
        return results

    monkeypatch.setattr(steps, "_steps", {})
    monkeypatch.setattr(steps, "_at_once", noted)
    real = run._decoding_forward
    monkeypatch.setattr(run, "_decoding_forward", lambda *a: taken.append("longer") or real(*a))
    return taken


def warmed_up(call: Callable[[], Any], ways: list[str]) -> Any:
    for _ in range(3):  # one compiles, one is remembered
        result = call()
    ways.clear()
    return result


def call_on_gpu(**options: Any) -> Callable[[], Any]:
    tensors = Shape(seqlen_q=1).tensors(torch.bfloat16, "cuda")
    weight = torch.rand(4, device="cuda")
    mod = lambda s, b, h, q, k: s * weight[h]  # noqa: E731
    return lambda: flashbwd.flex_decoding(*tensors, mod, enable_gqa=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["out", "lse"])
def test_both_ways_lead_to_the_same(options: dict[str, Any], ways: list[str]) -> None:
    call = call_on_gpu(**options)
    first = warmed_up(call, ways)
    past = call()
    with torch.device("cuda"):
        through = call()
    assert ways == ["past", "dispatcher"]
    for got, want, other in zip(*(r if options else (r,) for r in (past, through, first)), strict=True):
        assert torch.equal(got, want) and torch.equal(got, other)
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert not got.requires_grad and not got.is_inference() and got.is_leaf


@pytest.mark.gpu
def test_modes_see_the_operator(ways: list[str]) -> None:
    call = call_on_gpu()
    expected = warmed_up(call, ways)
    with Operators() as mode:
        assert torch.equal(call(), expected)
    assert any("flashbwd.decoding_step" in name for name in mode.seen)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        call()
    assert any("flashbwd::decoding_step" in event.name for event in profile.function_events)
    with torch.autocast("cuda", torch.float16):
        assert call().dtype == torch.float16
    assert "past" not in ways
    with torch.inference_mode():
        out = call()
    assert out.is_inference() and torch.equal(out, expected)
    assert ways[-1] == "past"


@pytest.mark.gpu
def test_another_mask_is_checked_for_its_lengths(ways: list[str]) -> None:
    shape = Shape(seqlen_q=1)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    number = torch.tensor([[[1]]], dtype=torch.int32, device="cuda")
    indices = torch.arange(4, dtype=torch.int32, device="cuda").view(1, 1, 1, 4)
    mask_mod = lambda b, h, q, k: k < 33  # noqa: E731

    def call(seqlen_k: int = shape.seqlen_k) -> Tensor:
        sizes = {"BLOCK_SIZE": (1, 64), "seq_lengths": (1, seqlen_k)}
        mask = BlockMask.from_kv_blocks(number.clone(), indices.clone(), mask_mod=mask_mod, **sizes)
        return flashbwd.flex_decoding(*tensors, None, mask, enable_gqa=True)

    expected = warmed_up(call, ways)
    assert torch.equal(call(), expected)
    assert ways == ["past"]
    with pytest.raises(ValueError, match="made for lengths"):
        call(shape.seqlen_k + 1)
    assert torch.equal(call(), expected)


@pytest.mark.gpu
def test_threads_and_streams_do_not_meet(ways: list[str]) -> None:
    call = call_on_gpu()
    expected = warmed_up(call, ways)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def many() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong.append(sum(not torch.equal(call(), expected) for _ in range(100)))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 4
    assert ways.count("past") == 400
