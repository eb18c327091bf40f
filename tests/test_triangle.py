"""triangle_attention agrees with the plain formula, and keeps one gradient of the bias for all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.targets import TARGETS, TOLERANCE
from torch import Tensor

import flashbwd

SHAPES = [(1, 5, 4, 9, 11), (2, 3, 4, 9, 11), (3, 1, 2, 70, 65), (2, 4, 1, 1, 1), (1, 2, 2, 130, 129)]
EMPTY = [(0, 3, 2, 4, 5), (2, 0, 2, 4, 5), (2, 3, 0, 4, 5), (2, 3, 2, 0, 5), (2, 3, 2, 4, 0), (0, 0, 1, 1, 1)]


def expected_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The plain formula, in which a row without keys is 0."""
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT + bias
    if mask is None:
        return torch.softmax(s, -1) @ v
    dead = ~mask.any(-1, keepdim=True)
    return torch.softmax(s.masked_fill(~mask, -torch.inf).masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ v


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str, masked: bool) -> tuple[list[Tensor], Tensor | None]:
    batch, rows, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(sum(shape))
    lengths = ((queries, 16), (keys, 16), (keys, 24))
    shapes = [(batch, rows, heads, *size) for size in lengths] + [(batch, 1, heads, queries, keys)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]
    mask = torch.rand(batch, rows, 1, 1, keys, generator=generator) < 0.6
    mask[:, :1] = False
    return [leaf.requires_grad_() for leaf in leaves], mask.to(device) if masked else None


def compare(leaves: list[Tensor], mask: Tensor | None, scale: float | None = None) -> None:
    out = flashbwd.triangle_attention(*leaves, mask, scale)
    assert out.dtype == leaves[0].dtype
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = expected_of(*exact, mask, scale)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, dout)
    wanted = torch.autograd.grad(expected, exact, dout.double())
    for name, a, b in zip(("q", "k", "v", "bias"), grads, wanted, strict=True):
        limit = tolerance * max(float(b.abs().max()), 1.0) if b.numel() else tolerance
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_agree_with_the_plain_formula(shape: Any, masked: bool, target: Any) -> None:
    compare(*draw(shape, target[1], target[0], masked), scale=None if masked else 0.3)


@pytest.mark.parametrize("shape", EMPTY)
def test_sizes_may_be_0(shape: Any) -> None:
    compare(*draw(shape, torch.float64, "cpu", True))


def test_the_batch_dimension_may_be_absent() -> None:
    leaves, mask = draw((1, 3, 2, 5, 7), torch.float64, "cpu", True)
    assert mask is not None
    without = flashbwd.triangle_attention(*(leaf[0] for leaf in leaves), mask[0])
    torch.testing.assert_close(without, flashbwd.triangle_attention(*leaves, mask)[0])


def test_operands_may_have_other_strides() -> None:
    leaves, mask = draw((2, 3, 4, 9, 11), torch.float64, "cpu", True)
    assert mask is not None
    moved = [leaf.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for leaf in leaves]
    compare(moved, torch.stack([mask, ~mask], -1)[..., 0])


def test_the_result_views_rows_with_adjacent_heads() -> None:
    for shape in SHAPES:
        out = flashbwd.triangle_attention(*draw(shape, torch.float32, "cpu", True)[0])
        assert out.transpose(2, 3).is_contiguous()


def test_a_float32_bias_gets_a_float32_gradient() -> None:
    leaves, mask = draw((2, 3, 2, 5, 7), torch.bfloat16, "cpu", True)
    bias = leaves[3].detach().float().requires_grad_()
    flashbwd.triangle_attention(*leaves[:3], bias, mask).sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32


def test_autocast_casts_the_bias_too() -> None:
    leaves, mask = draw((2, 3, 2, 5, 7), torch.float32, "cpu", True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashbwd.triangle_attention(*leaves, mask)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, flashbwd.triangle_attention(*(leaf.bfloat16() for leaf in leaves), mask))


def test_a_compiled_call_has_the_same_gradients() -> None:
    leaves, mask = draw((2, 3, 2, 5, 7), torch.float64, "cpu", True)
    compiled = torch.compile(flashbwd.triangle_attention, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(*leaves, mask).square().sum(), leaves) for f in (compiled, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def expected(*tensors: Tensor) -> Tensor:
    return expected_of(*tensors, scale=None)  # type: ignore[misc]


ONES = torch.ones(2, 3, 1, 1, 7, dtype=torch.bool)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q_dim": ({"q": torch.zeros(4, 5, 8)}, "q has shape (4, 5, 8), expected (B, N, H, Q, D) or (N, H, Q, D)"),
    "k_dim": ({"k": torch.zeros(3, 4, 7, 8)}, "k has shape (3, 4, 7, 8), expected 5 dimensions as q"),
    "k_shape": ({"k": torch.zeros(2, 3, 2, 7, 8)}, "k has shape (2, 3, 2, 7, 8), expected (2, 3, 4, 7, 8)"),
    "v_keys": ({"v": torch.zeros(2, 3, 4, 6, 8)}, "v has shape (2, 3, 4, 6, 8), expected (2, 3, 4, 7, 8)"),
    "k_dtype": ({"k": torch.zeros(2, 3, 4, 7, 8).half()}, "k is float16, expected float32 as q"),
    "bias_rows": ({"bias": torch.zeros(2, 3, 4, 5, 7)}, "bias has shape (2, 3, 4, 5, 7), expected (2, 1, 4, 5, 7)"),
    "bias_batch": ({"bias": torch.zeros(1, 1, 4, 5, 7)}, "bias has shape (1, 1, 4, 5, 7), expected (2, 1, 4, 5, 7)"),
    "bias_dtype": ({"bias": torch.zeros(2, 1, 4, 5, 7).int()}, "bias is int32, expected a floating-point dtype"),
    "mask_shape": ({"mask": ONES[:, :, 0]}, "mask has shape (2, 3, 1, 7), expected (2, 3, 1, 1, 7)"),
    "mask_dtype": ({"mask": ONES.float()}, "mask is float32, expected bool"),
    "mask_device": ({"mask": ONES.to("meta")}, "mask is on meta, expected q's cpu"),
    "scale": ({"scale": float("nan")}, "scale is nan, expected a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_argument_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    given: dict[str, Any] = {"q": torch.zeros(2, 3, 4, 5, 8), "k": torch.zeros(2, 3, 4, 7, 8)}
    given |= {"v": torch.zeros(2, 3, 4, 7, 8), "bias": torch.zeros(2, 1, 4, 5, 7), "mask": ONES}
    with pytest.raises(ValueError) as caught:  # the whole message is compared
        flashbwd.triangle_attention(**given | changes)
    assert str(caught.value) == f"flashbwd: {message}"


@pytest.mark.gpu
def test_the_gradient_of_the_bias_takes_no_memory_per_row() -> None:
    rows, heads, length = 256, 4, 256
    shapes = [(1, rows, heads, length, 32)] * 3 + [(1, 1, heads, length, length)]
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    mask = torch.rand(1, rows, 1, 1, length, device="cuda") < 0.9
    out = flashbwd.triangle_attention(*leaves, mask)
    dout = torch.randn_like(out)
    peaks = []
    for wanted in (leaves[:3], leaves):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, wanted, dout, retain_graph=True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del grads
    assert peaks[1] - peaks[0] <= 1.5 * 4 * heads * length * length + 2**21  # blocks of the allocator
