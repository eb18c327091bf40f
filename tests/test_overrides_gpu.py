"""Overrides on a GPU: gradients of PyTorch's functions agree with float64, and come from kernels of this library."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit import cases, inputs, tolerance
from kit.summary import DECLARED, NO_CASE
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import flashbwd
from flashbwd.bench import block_peers
from flashbwd.bench.cases import BlockCase
from flashbwd.integrations import overrides
from flashbwd.integrations.transformers import swap_norms

pytestmark = pytest.mark.gpu

OPERATORS = {
    SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention_backward",
    SDPBackend.FLASH_ATTENTION: "aten::_flash_attention_backward",
    SDPBackend.EFFICIENT_ATTENTION: "aten::_efficient_attention_backward",
}
FORWARDS = [pytest.param(backend, id=backend.name.split("_")[0].lower()) for backend in OPERATORS]


@pytest.fixture(autouse=True)
def _overridden() -> Iterator[None]:
    flashbwd.stats(reset=True)
    with flashbwd.enable():
        yield


def skip_without_kernels() -> None:
    x = inputs.build(cases.BY_NAME["heads_4to2"], torch.bfloat16, "cuda")
    arguments = {name: value for name, value in x.arguments.items() if name not in ("dq", "dk", "dv")}
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(DECLARED + "no attention kernel runs below compute capability 8.0")
    assert flashbwd.plan_attention_backward(**arguments).backend != "reference"


def heads_first(
    *, heads: int = 4, heads_kv: int | None = None, seqlen: int = 200, head_dim: int = 64, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v (B, H, S, D) and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, heads if i in (0, 3) or heads_kv is None else heads_kv, seqlen, head_dim) for i in range(4)]
    return [torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes]


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves, dout)


def check(actual: tuple[Tensor, ...], function: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor) -> None:
    """Apply the tolerance rule: compare with PyTorch's unfused attention in float64 and in the inputs' precision."""
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(function, [t.double() for t in tensors], dout.double())
        naive = gradients(function, tensors, dout)
    for i, (got, want, plain) in enumerate(zip(actual, expected, naive, strict=True)):
        tolerance.assert_close(got, want, [plain.double()], f"gradient {i}")


def only(operator: str) -> flashbwd.OperatorStats:
    """The statistics of the one operator that was called."""
    called = {name: stats for name, stats in flashbwd.stats().items() if stats != (0, {})}
    assert list(called) == [operator], called
    return called[operator]


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_gradients_of_each_forward_come_from_a_kernel(
    forward: SDPBackend, dtype: torch.dtype, causal: bool, heads_kv: int
) -> None:
    if heads_kv != 4 and forward is SDPBackend.EFFICIENT_ATTENTION:
        pytest.skip(NO_CASE + "PyTorch's memory-efficient attention takes no grouped heads")
    skip_without_kernels()
    *tensors, dout = heads_first(heads_kv=heads_kv, dtype=dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads_kv != 4)

    with sdpa_kernel(forward):
        actual = gradients(attend, tensors, dout)
    assert only(OPERATORS[forward]) == (1, {})
    check(actual, attend, tensors, dout)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("layout", ["heads_first", "rows_first", "packed"])
def test_gradients_have_the_strides_of_pytorchs_gradients(forward: SDPBackend, layout: str) -> None:
    *tensors, dout = heads_first(dtype=torch.bfloat16)
    if layout != "heads_first":
        rows = [t.transpose(1, 2).contiguous() for t in tensors]
        rows = rows if layout == "rows_first" else list(torch.stack(rows, 2).unbind(2))
        tensors = [t.transpose(1, 2) for t in rows]

    def strides() -> list[tuple[int, ...]]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        with sdpa_kernel(forward):
            return [g.stride() for g in torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, dout)]

    ours = strides()
    only(OPERATORS[forward])
    flashbwd.disable()
    assert ours == strides()


@pytest.mark.parametrize("forward", [FORWARDS[0], FORWARDS[2]])
def test_gradients_with_a_bias_agree_with_float64(forward: SDPBackend) -> None:
    *tensors, dout = heads_first(seqlen=136, dtype=torch.bfloat16)
    bias = torch.randn(1, 4, 136, 136, device="cuda", dtype=torch.bfloat16)
    with_gradient = forward is SDPBackend.EFFICIENT_ATTENTION

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = bias) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))

    tensors = [*tensors, bias] if with_gradient else tensors
    with sdpa_kernel(forward):
        actual = gradients(attend, tensors, dout)
    stats = only(OPERATORS[forward])
    assert stats.hits + sum(stats.fallbacks.values()) == 1
    check(actual, attend, tensors, dout)


@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients_with_dropout_use_the_mask_of_pytorch(forward: SDPBackend) -> None:
    *tensors, dout = heads_first(dtype=torch.bfloat16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.2)

    with sdpa_kernel(forward):
        actual = gradients(attend, tensors, dout)
        stats = only(OPERATORS[forward])
        flashbwd.disable()
        expected = gradients(attend, tensors, dout)
    assert stats.hits + sum(stats.fallbacks.values()) == 1
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_a_call_that_is_passed_on_gets_the_results_of_pytorch(forward: SDPBackend, dropout_p: float) -> None:
    *tensors, dout = heads_first(dtype=torch.bfloat16, seqlen=136)
    if forward is SDPBackend.EFFICIENT_ATTENTION:
        tensors.append(torch.randn(1, 4, 136, 136, device="cuda", dtype=torch.bfloat16))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        torch.manual_seed(3)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None)

    with sdpa_kernel(forward), flashbwd.use_backend("sm90"):
        torch.ops.flashbwd.force_backend("none")
        actual = gradients(attend, tensors, dout)
    with sdpa_kernel(forward):
        stats = only(OPERATORS[forward])
        flashbwd.disable()
        expected = gradients(attend, tensors, dout)
    assert stats.hits == 0 and sum(stats.fallbacks.values()) == 1
    for got, want in zip(actual, expected, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)  # atomics add in a different order


def test_float64_calls_no_overridden_operator() -> None:
    *tensors, dout = heads_first(dtype=torch.float64, seqlen=20)
    gradients(scaled_dot_product_attention, tensors, dout)
    assert all(stats == (0, {}) for stats in flashbwd.stats().values())


def test_a_head_dimension_without_a_kernel_falls_back_and_is_right() -> None:
    *tensors, dout = heads_first(head_dim=256, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        actual = gradients(scaled_dot_product_attention, tensors, dout)
    stats = only(OPERATORS[SDPBackend.FLASH_ATTENTION])
    assert stats.hits + sum(stats.fallbacks.values()) == 1
    check(actual, scaled_dot_product_attention, tensors, dout)


@pytest.mark.parametrize("window", [None, 30])
def test_gradients_of_packed_sequences_come_from_a_kernel(window: int | None) -> None:
    skip_without_kernels()
    lengths = [70, 1, 129]
    cu_seqlens = torch.tensor([0, 70, 71, 200], dtype=torch.int32, device="cuda")
    tensors = [torch.randn(200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    *tensors, dout = tensors

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, 129, 129, 0.0, True, False, window_size_left=window
        )[0]

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for sequence in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
            n = sequence[0].shape[0]
            back = torch.arange(n, device="cuda")[:, None] - torch.arange(n, device="cuda")
            seen = (back >= 0) & (back <= (n if window is None else window))
            each = (t.transpose(0, 1).unsqueeze(0) for t in sequence)
            parts.append(scaled_dot_product_attention(*each, attn_mask=seen)[0].transpose(0, 1))
        return torch.cat(parts)

    actual = gradients(packed, tensors, dout)
    assert only("aten::_flash_attention_backward") == (1, {})
    check(actual, one_by_one, tensors, dout)


@pytest.mark.parametrize("forward", [FORWARDS[1], FORWARDS[2]])
def test_gradients_of_nested_tensors_come_from_a_kernel(forward: SDPBackend) -> None:
    skip_without_kernels()
    offsets = torch.tensor([0, 70, 71, 200], device="cuda")
    *values, dout = (torch.randn(200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = (torch.nested.nested_tensor_from_jagged(t, offsets, max_seqlen=129).transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(*each).transpose(1, 2).values()

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(t.split([70, 1, 129]) for t in (q, k, v)), strict=True)
        each = ((t.transpose(0, 1).unsqueeze(0) for t in sequence) for sequence in parts)
        return torch.cat([scaled_dot_product_attention(*x)[0].transpose(0, 1) for x in each])

    with sdpa_kernel(forward):
        actual = gradients(nested, values, dout)
    assert only(OPERATORS[forward]) == (1, {})
    check(actual, one_by_one, values, dout)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 320])
def test_float32_scores_equal_those_of_the_forward(head_dim: int) -> None:
    """With a single key the probability is 1 and dv is dout, if the backward computes the same scores as the LSE."""
    skip_without_kernels()
    x = torch.randn(512, 2, 1, head_dim, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        _, _, dv = gradients(scaled_dot_product_attention, [x, x, x], torch.ones_like(x))
    assert only("aten::_efficient_attention_backward") == (1, {})
    assert float((dv - 1).abs().max()) < 4e-6  # LSEs up to 25 are rounded twice, by 1e-6 and 7e-7


@pytest.mark.parametrize("forward", FORWARDS[1:])
def test_deterministic_algorithms_give_bitwise_equal_gradients(forward: SDPBackend) -> None:
    """PyTorch does not offer cuDNN's forward in deterministic mode."""
    skip_without_kernels()
    *tensors, dout = heads_first(seqlen=1100, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(forward):
            runs = [gradients(scaled_dot_product_attention, tensors, dout) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert only(OPERATORS[forward]) == (4, {})
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_compiled_block_calls_the_override(forward: SDPBackend) -> None:
    skip_without_kernels()
    *tensors, dout = heads_first(dtype=torch.bfloat16)

    # For equal code, the compiler would reuse the graph with another forward.
    factor = 1.5 + list(OPERATORS).index(forward)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * factor, k + 1, v, is_causal=True).sin()

    torch._dynamo.reset()
    with sdpa_kernel(forward):
        actual = gradients(torch.compile(block, fullgraph=True), tensors, dout)
    assert only(OPERATORS[forward]) == (1, {})
    check(actual, block, tensors, dout)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_norms_agree_with_float64(kind: str, dtype: torch.dtype) -> None:
    x, dz = (torch.randn(37, 5, 768, device="cuda", dtype=dtype) for _ in range(2))
    parameters = [torch.randn(768, device="cuda", dtype=dtype) for _ in range(2 if kind == "layer_norm" else 1)]

    def normalise(x: Tensor, *rest: Any) -> Tensor:
        return getattr(torch.nn.functional, kind)(x, (768,), *rest, eps=1e-5)

    actual = gradients(normalise, [x, *parameters], dz)
    stats = only("aten::native_layer_norm_backward" if kind == "layer_norm" else "aten::_fused_rms_norm_backward")
    assert stats.hits + sum(stats.fallbacks.values()) == 1
    flashbwd.disable()
    expected = gradients(normalise, [t.double() for t in (x, *parameters)], dz.double())
    naive = gradients(normalise, [x, *parameters], dz)
    for i, (got, want, plain) in enumerate(zip(actual, expected, naive, strict=True)):
        tolerance.assert_close(got, want, [plain.double()], f"gradient {i}")


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_a_norm_that_is_passed_on_gets_the_results_of_pytorch(
    kind: str, parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The override calls PyTorch's kernel from C++. The tensors that the kernel allocates must be freed."""
    if parameters == 2 and kind == "rms_norm":
        pytest.skip(NO_CASE + "RMSNorm has no bias")
    x, dz = (torch.randn(37, 5, 48, 2, device="cuda", dtype=torch.float64) for _ in range(2))
    weights = [torch.randn(48, 2, device="cuda", dtype=torch.float64) for _ in range(parameters)]

    def normalise(x: Tensor, *rest: Tensor) -> Tensor:
        return getattr(torch.nn.functional, kind)(x, (48, 2), *rest, eps=1e-5)

    operator = "native_layer_norm_backward" if kind == "layer_norm" else "_fused_rms_norm_backward"
    monkeypatch.setattr(overrides._ALL[operator], "_original", None)
    actual = gradients(normalise, [x, *weights], dz)
    stats = only(f"aten::{operator}")
    assert stats.hits == 0 and sum(stats.fallbacks.values()) == 1
    in_use = torch.cuda.memory_allocated()
    for _ in range(3):
        gradients(normalise, [x, *weights], dz)
    deadline = time.monotonic() + 5  # autograd's thread may free a graph after it returned the gradients
    while torch.cuda.memory_allocated() > in_use and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= in_use
    flashbwd.disable()
    for got, want in zip(actual, gradients(normalise, [x, *weights], dz), strict=True):
        assert got.stride() == want.stride() and torch.equal(got, want)


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """Names of the GPU kernels that a call launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_a_transformer_block_runs_kernels_of_this_library(shape: str, compiled: bool) -> None:
    """The override computes attention. It also computes norms in eager mode; the compiled model has swapped norms."""
    skip_without_kernels()
    case = BlockCase("test", shape, 2, 256, 256, 4, 4 if shape == "gpt" else 2, 512)
    x = block_peers.make_inputs(case, torch.device("cuda"), 0)

    def gradients_of(block: torch.nn.Module, parameters: torch.nn.Module, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaf = x.x.detach().to(dtype).requires_grad_()
        return torch.autograd.grad(block(leaf), [leaf, *parameters.parameters()], x.dout.to(dtype))

    model = block = copy.deepcopy(x.block)
    expected = {OPERATORS[SDPBackend.CUDNN_ATTENTION]: (1, {})}
    if compiled:
        assert swap_norms(model) == 2
        block = torch.compile(model, fullgraph=True)
    else:
        norm = "native_layer_norm" if shape == "gpt" else "_fused_rms_norm"
        expected[f"aten::{norm}_backward"] = (2, {})
    gradients_of(block, model, torch.bfloat16)  # compiles
    flashbwd.stats(reset=True)
    actual: list[tuple[Tensor, ...]] = []
    kernels = kernels_of(lambda: actual.append(gradients_of(block, model, torch.bfloat16)))
    assert {name: stats for name, stats in flashbwd.stats().items() if stats != (0, {})} == expected
    for family in ("flashbwd::(sm90|sm80|short_sequences)::backward_kernel", "flashbwd::layer_norm::backward_kernel"):
        assert any(re.search(family, name) for name in kernels), kernels
    flashbwd.disable()
    naive = gradients_of(x.block, x.block, torch.bfloat16)
    wide = copy.deepcopy(x.block).double()
    for i, (got, want, plain) in enumerate(zip(actual[0], gradients_of(wide, wide, torch.float64), naive, strict=True)):
        tolerance.assert_close(got, want, [plain.double()], f"gradient {i}")
