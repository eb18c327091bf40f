"""A score_mod that adds an element per pair of a captured tensor has the kernels of the build, which have its gradient.

GPU tests compare all gradients with float64 autograd of the dense formula.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_flex_compiled_choice import SHAPE, _on_the_cpu, attention, counted, leaves, planned, softcap  # noqa: F401
from test_flex_generated import source_of
from torch import Tensor, fx
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flashbwd.flex import backends
from flashbwd.flex.captured_bias import CapturedBias
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError
from flashbwd.flex.score_change import Slopes, score_change_of
from flashbwd.flex.tile import Tile
from flashbwd.integrations import flex_node, flex_pass
from flashbwd.mods.captures import CannotEmitError
from flashbwd.mods.in_graph import text_of
from flashbwd.reference.decoding import DecodingCall

Mod = Callable[..., Tensor]
B, H, SQ, SK = SIZES = (2, 3, 5, 7)
ALL = [[torch.tensor(i) for i in indices] for indices in itertools.product(*map(range, SIZES))]


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


PAIR, BY_HEAD, BY_BATCH, BOTH = random(SQ, SK), random(H, SQ, SK), random(B, SQ, SK), random(*SIZES)
REORDERED, ONE, LARGER = random(SK, H, SQ), random(1, H, SQ, SK), random(4, H + 1, SQ + 3, SK + 2)
HALF = PAIR.half()
SLOPES = random(H).abs()

# name: (score_mod, the tensor)
FORMS: dict[str, tuple[Mod, Tensor]] = {
    "pair": (lambda s, b, h, q, k: s + PAIR[q, k], PAIR),
    "bias_first": (lambda s, b, h, q, k: PAIR[q, k] + s, PAIR),
    "by_head": (lambda s, b, h, q, k: s + BY_HEAD[h, q, k], BY_HEAD),
    "by_batch": (lambda s, b, h, q, k: s + BY_BATCH[b, q, k], BY_BATCH),
    "both": (lambda s, b, h, q, k: s + BOTH[b, h, q, k], BOTH),
    "in_steps": (lambda s, b, h, q, k: s + BOTH[b][h][q][k], BOTH),
    "in_two_steps": (lambda s, b, h, q, k: s + BOTH[b, h][q, k], BOTH),
    "reordered": (lambda s, b, h, q, k: s + REORDERED[k, h, q], REORDERED),
    "number_of_one": (lambda s, b, h, q, k: s + ONE[0, h, q, k], ONE),
    "number": (lambda s, b, h, q, k: s + LARGER[3, h, q, k], LARGER),
    "larger": (lambda s, b, h, q, k: s + LARGER[b, h, q, k], LARGER),
    "half": (lambda s, b, h, q, k: s + HALF[q, k].float(), HALF),
    "half_promoted": (lambda s, b, h, q, k: s + HALF[q, k], HALF),
    "after_a_softcap": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + PAIR[q, k], PAIR),
    "with_alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q + 2 - k).abs() + PAIR[q, k], PAIR),
}


def without_gradient(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        element = PAIR[q, k]
    return s + element


def in_inference_mode(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.inference_mode():
        element = PAIR[q, k]
    return s + element


class Rounded(torch.autograd.Function):
    """A rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Fixed(torch.autograd.Function):
    """The identity with a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0


def straight_through(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return Rounded.apply(s)  # type: ignore[no-any-return]


def with_its_own_gradient(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + Fixed.apply(PAIR[q, k])  # type: ignore[no-any-return]


OTHERS: dict[str, Mod] = {
    "scaled": lambda s, b, h, q, k: s + 2 * PAIR[q, k],
    "subtracted": lambda s, b, h, q, k: s - PAIR[q, k],
    "before_a_softcap": lambda s, b, h, q, k: 5 * torch.tanh((s + PAIR[q, k]) / 5),
    "two": lambda s, b, h, q, k: s + PAIR[q, k] + BY_HEAD[h, q, k],
    "keys": lambda s, b, h, q, k: s + BY_HEAD[h, 0, k],
    "queries": lambda s, b, h, q, k: s + BY_HEAD[h, q, 0],
    "shifted": lambda s, b, h, q, k: s + PAIR[q - 1, k],
    "diagonal": lambda s, b, h, q, k: s + PAIR[q, q],
    "detached": lambda s, b, h, q, k: s + PAIR[q, k].detach(),
    "tensor_detached": lambda s, b, h, q, k: s + PAIR.detach()[q, k],
    "data": lambda s, b, h, q, k: s + PAIR.data[q, k],
    "without_gradient": without_gradient,
    "in_inference_mode": in_inference_mode,
    "with_its_own_gradient": with_its_own_gradient,
    "beside_a_number_times_the_distance": lambda s, b, h, q, k: s - 0.5 * (q + 2 - k).abs() + PAIR[q, k],
    "beside_a_formula_of_the_head": lambda s, b, h, q, k: s - torch.exp2(-h * 0.5) * (q + 2 - k).abs() + PAIR[q, k],
    "beside_slopes_by_batch": lambda s, b, h, q, k: s - BOTH[b, h, 0, 0] * (q + 2 - k).abs() + PAIR[q, k],
    "its_own_slope": lambda s, b, h, q, k: s - BY_HEAD[h, 0, 0] * (q + 2 - k).abs() + BY_HEAD[h, q, k],
    "score_detached": lambda s, b, h, q, k: s.detach() + PAIR[q, k],
    "rounded": lambda s, b, h, q, k: s + PAIR[q, k].half(),
    "double": lambda s, b, h, q, k: s + PAIR.double()[q, k],
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s + PAIR[q, k], -torch.inf),
    "made_in_the_function": lambda s, b, h, q, k: s + torch.ones(SQ, SK)[q, k],
}


def of_all_pairs(mod: Mod) -> Tensor:
    """The modified scores of 0."""
    return torch.stack([mod(torch.tensor(0.0), *indices) for indices in ALL]).view(SIZES)


def bias_of(mod: Mod, has_gradient: bool = True) -> CapturedBias:
    change = score_change_of(mod)
    assert change is not None and change.addend is not None
    return change.addend.bias(mod, SIZES, has_gradient)


@pytest.mark.parametrize("name", FORMS)
def test_a_bias_of_a_pair_is_recognised_and_viewed(name: str) -> None:
    mod, tensor = FORMS[name]
    bias = bias_of(mod)
    assert bias.tensor is tensor and bias.fits(torch.float16)
    view = bias.view(tensor.device)
    if name != "with_alibi":
        torch.testing.assert_close(view.expand(SIZES).float(), of_all_pairs(mod))
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    like = bias.view(torch.device("meta"))
    assert (like.shape, like.stride(), like.dtype) == (view.shape, view.stride(), view.dtype)


def test_the_slopes_beside_a_bias_are_those_that_the_function_captures() -> None:
    mod, _ = FORMS["with_alibi"]
    change = score_change_of(mod)
    assert change is not None and change.alibi is not None
    assert torch.equal(Slopes(change.alibi, mod, B, H).tensor(SLOPES.device), SLOPES)


@pytest.mark.parametrize("mod", [without_gradient, in_inference_mode, straight_through, with_its_own_gradient])
def test_no_derivative_is_written_for_a_function_with_one_of_its_own(mod: Mod) -> None:
    with pytest.raises(CannotEmitError, match="score_mod has a derivative of its own"):
        source_of(mod, [])


def test_a_trace_within_a_custom_function_does_not_count() -> None:
    """flashbwd.flex_attention traces within its own one."""

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            source_of(FORMS["pair"][0], [])
            return x.clone()

    Outer.apply(torch.zeros(3, requires_grad=True))


def test_a_trace_in_inference_mode_does_not_count() -> None:
    with torch.inference_mode():
        source_of(FORMS["pair"][0], [])


@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_of_the_view_becomes_that_of_the_tensor(name: str) -> None:
    mod, tensor = FORMS[name]
    bias = bias_of(mod)
    of_pairs = random(*SIZES).to(tensor.dtype)
    view = bias.view(tensor.device)
    tensor.requires_grad_()
    try:
        scores = of_all_pairs(mod)
        (expected,) = torch.autograd.grad(scores, tensor, of_pairs.to(scores.dtype))
    finally:
        tensor.requires_grad_(False)
    found = bias.gradient(of_pairs.float().sum_to_size(view.shape).to(tensor.dtype))
    assert found.shape == tensor.shape
    close = 2e-2 if tensor is HALF else 1e-6  # autograd adds in the tensor's dtype
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("name", OTHERS)
def test_other_additions_are_not_biases(name: str) -> None:
    change = score_change_of(OTHERS[name])
    assert change is None or change.addend is None


def test_a_function_without_a_key_keeps_its_tensor() -> None:
    biases = [PAIR]
    assert bias_of(lambda s, b, h, q, k: s + biases[0][q, k]).tensor is PAIR


def test_the_bias_follows_the_captured_variable() -> None:
    def adds(bias: Tensor) -> Mod:
        return lambda s, b, h, q, k: s + bias[q, k]

    first, second = adds(PAIR), adds(PAIR.clone())
    assert bias_of(first).tensor is PAIR and bias_of(second).tensor is not PAIR


# ---- the kernel that computes a call ----


ANY_LISTS = KernelLists(*[torch.empty(0)] * 3, True, Tile())


def chosen(
    mod: Mod | None,
    captured: list[Tensor],
    mask: Any = None,
    dtype: torch.dtype = torch.float16,
    lists: KernelLists = ANY_LISTS,
) -> Any:
    with FakeTensorMode():
        query, key = (torch.empty(B, H, rows, 64, device="cuda", dtype=dtype) for rows in (SQ, SK))
    return backends.choose(DecodingCall(mod, mask, 0.1), query, key, key, captured, False, lambda *_: lists)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Mod]:
    """The score_mods that were compiled at run time."""
    mods: list[Mod] = []
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    monkeypatch.setattr(backends, "generated", lambda mod, *_: mods.append(mod))
    return mods


def test_a_trained_bias_has_the_kernel_of_the_build(compiled: list[Mod]) -> None:
    mod, tensor = FORMS["by_head"]
    call = chosen(mod, [tensor])
    assert call.operator is torch.ops.flashbwd.attention_backward and compiled == []
    assert call.bias.tensor is tensor and call.bias.has_gradient


def test_a_fixed_bias_has_the_kernel_of_the_build_if_tma_loads_it(compiled: list[Mod]) -> None:
    wide = random(B, H, SQ, 24).half()
    tma = [wide[..., :SK], wide[:, :, :, 8:], wide[:1].expand(B, -1, -1, -1)]
    others = [wide[..., 1:], wide.float(), wide[..., :SK].contiguous(), wide[..., ::2], wide.mT.contiguous().mT]
    for bias in (*tma, *others):
        mod = lambda s, b, h, q, k, bias=bias: s + bias[b, h, q, k]  # noqa: E731
        call = chosen(mod, [])
        expected = "attention_backward" if any(bias is t for t in tma) else "score_mod_attention_backward"
        assert call.operator is getattr(torch.ops.flashbwd, expected)
    assert len(compiled) == len(others)


def test_a_fixed_bias_that_tma_cannot_load_has_the_kernel_of_the_build_if_no_other_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedError("the head dimension")

    monkeypatch.setattr(backends, "_tile", refuse)
    assert chosen(FORMS["pair"][0], []).operator is torch.ops.flashbwd.attention_backward


def test_a_call_that_the_bias_does_not_fit_is_compiled(compiled: list[Mod]) -> None:
    short, integers = random(SQ - 1, SK), torch.ones(SQ, SK, dtype=torch.int32)
    slope, pair = FORMS["with_alibi"]
    calls: list[tuple[Mod, list[Tensor], Any, torch.dtype]] = [
        (FORMS["pair"][0], [PAIR], object(), torch.float16),  # a block mask
        (slope, [SLOPES], None, torch.float16),  # the gradient of another tensor
        (slope, [SLOPES, pair], None, torch.float16),
        (FORMS["half"][0], [HALF], None, torch.bfloat16),
        (lambda s, b, h, q, k: s + short[q, k], [short], None, torch.float16),
        (lambda s, b, h, q, k: s + integers[q, k], [], None, torch.float16),
    ]
    for mod, captured, mask, dtype in calls:
        assert chosen(mod, captured, mask, dtype).operator is torch.ops.flashbwd.score_mod_attention_backward
    assert compiled == [mod for mod, *_ in calls]


@pytest.mark.parametrize(("masked", "capped"), [(False, False), (False, True), (True, False)])
def test_compiled_models_get_the_gradient_of_a_kernel_that_is_faster(
    masked: bool,
    capped: bool,
    planned: list[Any],  # noqa: F811
) -> None:
    bias = torch.zeros(96, 96, dtype=torch.bfloat16, requires_grad=True)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (softcap(s, b, h, i, j) if capped else s) + bias[i, j]

    compiled = attention(mod, masked)
    inputs = leaves(SHAPE)
    torch.autograd.grad(compiled(*inputs).float().sin().sum(), [*inputs, bias])
    if masked or capped:
        assert counted().hits == 0 and not planned
    else:
        ((call, _),) = planned
        assert counted() == (1, {})
        assert call.operator is torch.ops.flashbwd.attention_backward and call.bias.has_gradient


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_cuda_graph_is_declined_if_a_fixed_bias_may_need_lists(
    trained: bool, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[backends.KernelCall] = []
    monkeypatch.setattr(backends.KernelCall, "plan", lambda call, *_: calls.append(call))
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    element = torch.ops.aten.index.Tensor
    traced = make_fx(lambda s, b, h, q, k, t: s + element(t, [h, q, k]))(
        torch.zeros(()), *indices, torch.zeros(H, 4, 4)
    )
    with FakeTensorMode():
        query = torch.empty(B, H, 640, 64, device="cuda", dtype=torch.float16)
        bias = torch.empty(H, 640, 640, device="cuda", dtype=torch.float16)
        lse = torch.empty(B, H, 640, device="cuda")
    node = fx.Graph().placeholder("bias")
    node.meta["val"] = bias
    score = flex_node.Score(text_of("score_mod", traced), [node], [trained], [0])
    tensors = (query, query, query, query, query, lse, None)
    declines = cuda_graphs and not trained
    outcome = pytest.raises(UnsupportedError, match="CUDA graphs") if declines else contextlib.nullcontext()
    with config.patch("triton.cudagraphs", cuda_graphs), outcome:
        flex_pass._plan(0.1, flex_node._NO_MASK, score, tensors)
    assert [call.score_mod is None for call in calls] == ([] if declines else [True])
