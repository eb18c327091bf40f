"""evoformer_attention agrees with the plain formula, and both biases get their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.targets import TARGETS, TOLERANCE
from torch import Tensor

import flashbwd

SHAPES = [(1, 5, 9, 4), (2, 3, 33, 2), (3, 1, 65, 2), (2, 4, 1, 1), (1, 2, 129, 2)]
SHAPES += [(0, 2, 3, 1), (2, 0, 3, 1), (2, 2, 0, 1)]
HIDDEN = -1e9


def expected_of(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    scores = q.shape[-1] ** -0.5 * q @ k.mT
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ v).transpose(2, 3)


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return q, k, v, the bias of keys and the bias of pairs."""
    batch, rows, length, heads = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(batch, rows, length, heads, d) for d in (16, 16, 24)]
    sizes += [(batch, rows, 1, 1, length), (batch, 1, heads, length, length)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in sizes]


def compare(leaves: list[Tensor], which: tuple[bool, bool]) -> None:
    def chosen(biases: list[Tensor]) -> list[Tensor | None]:
        return [bias if wanted else None for bias, wanted in zip(biases, which, strict=True)]

    out = flashbwd.evoformer_attention(*leaves[:3], chosen(leaves[3:]))
    assert out.dtype == leaves[0].dtype
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = expected_of(*exact[:3], chosen(exact[3:]))
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    used = [True, True, True, *which]
    grads, wanted = (
        torch.autograd.grad(result, [leaf for leaf, use in zip(of, used, strict=True) if use], dout.to(result))
        for result, of in ((out, leaves), (expected, exact))
    )
    for a, b in zip(grads, wanted, strict=True):
        limit = tolerance * max(float(b.abs().max()), 1.0) if b.numel() else tolerance
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=limit)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_agree_with_the_plain_formula(shape: Any, which: Any, target: Any) -> None:
    compare(draw(shape, target[1], target[0]), which)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("lowest", [HIDDEN, -torch.inf])
def test_a_low_bias_hides_keys(lowest: float, target: Any) -> None:
    leaves = draw((2, 3, 33, 2), target[1], target[0])
    if lowest == HIDDEN:
        lowest = max(lowest, torch.finfo(target[1]).min)  # -1e9 is no float16
    leaves[3] = leaves[3].detach().masked_fill(torch.arange(33, device=leaves[3].device) % 3 == 0, lowest)
    leaves[3].requires_grad_()
    compare(leaves, (True, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bias_of_keys_is_not_rounded_to_16_bits_again(dtype: torch.dtype) -> None:
    """With a head dimension of 8, the scale is not a power of 2. The biases and all other operands are exact."""
    bias = torch.tensor([50.25, 48.5, 49.75, 51.0], dtype=dtype).reshape(1, 1, 1, 1, 4)
    q = torch.zeros(1, 1, 4, 1, 8, dtype=dtype)
    values = torch.eye(4, dtype=dtype).reshape(1, 1, 4, 1, 4)
    out = flashbwd.evoformer_attention(q, q, values, [bias, torch.zeros(1, 1, 1, 4, 4, dtype=dtype)])
    want = bias.double().softmax(-1).expand(1, 1, 4, 1, 4)
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 8)


def test_the_gradient_of_a_wider_bias_has_its_dtype() -> None:
    leaves = draw((2, 3, 5, 2), torch.bfloat16, "cpu")
    biases = [leaf.detach().float().requires_grad_() for leaf in leaves[3:]]
    flashbwd.evoformer_attention(*leaves[:3], biases).sum().backward()
    assert [bias.grad.dtype for bias in biases if bias.grad is not None] == [torch.float32] * 2


def test_autocast_computes_in_its_dtype() -> None:
    leaves = [leaf.float() for leaf in draw((2, 3, 33, 2), torch.bfloat16, "cpu")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashbwd.evoformer_attention(*leaves[:3], leaves[3:])
    assert out.dtype == torch.bfloat16
    narrow = [leaf.bfloat16() for leaf in leaves]
    torch.testing.assert_close(out, flashbwd.evoformer_attention(*narrow[:3], narrow[3:]))


def test_a_list_of_biases_is_not_changed() -> None:
    leaves = draw((1, 2, 5, 2), torch.float64, "cpu")
    biases = [leaves[3]]
    flashbwd.evoformer_attention(*leaves[:3], biases)
    assert len(biases) == 1


def test_a_compiled_call_has_the_same_gradients() -> None:
    leaves = draw((2, 3, 5, 2), torch.float64, "cpu")
    compiled = torch.compile(flashbwd.evoformer_attention, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves[:3], leaves[3:]).square().sum(), leaves)
    want = torch.autograd.grad(expected_of(*leaves[:3], list(leaves[3:])).square().sum(), leaves)
    torch.testing.assert_close(got, want)


Q, K, V = torch.zeros(2, 3, 5, 4, 8), torch.zeros(2, 3, 5, 4, 8), torch.zeros(2, 3, 5, 4, 6)
KEYS, PAIRS = torch.zeros(2, 3, 1, 1, 5), torch.zeros(2, 1, 4, 5, 5)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q_dim": ({"q": Q[0]}, "q has shape (3, 5, 4, 8), expected (B, N, L, H, D)"),
    "k_shape": ({"k": K[:, :, :4]}, "k has shape (2, 3, 4, 4, 8), expected (2, 3, 5, 4, 8)"),
    "v_shape": ({"v": V[:, :2]}, "v has shape (2, 2, 5, 4, 6), expected (2, 3, 5, 4, 6)"),
    "keys_shape": ({"biases": [KEYS[0]]}, "biases[0] has shape (3, 1, 1, 5), expected (2, 3, 1, 1, 5)"),
    "pairs_shape": ({"biases": [None, PAIRS[:1]]}, "biases[1] has shape (1, 1, 4, 5, 5), expected (2, 1, 4, 5, 5)"),
    "keys_dtype": ({"biases": [KEYS.bool(), PAIRS]}, "biases[0] is bool, expected a floating-point dtype"),
    "pairs_type": ({"biases": [KEYS, 3.0]}, "biases[1] is 3.0, expected a tensor"),
    "pairs_device": ({"biases": [KEYS, PAIRS.to("meta")]}, "biases[1] is on meta, expected q's cpu"),
    "three": ({"biases": [KEYS, PAIRS, PAIRS]}, "biases has 3 entries, expected at most 2"),
    "k_dtype": ({"k": K.half()}, "k is float16, expected float32 as q"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_argument_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError) as caught:  # the whole message is compared
        flashbwd.evoformer_attention(**{"q": Q, "k": K, "v": V, "biases": [KEYS, PAIRS]} | changes)
    assert str(caught.value) == f"flashbwd: {message}"
