"""The self-attention module gives the results and gradients of its parts."""

from __future__ import annotations

import re

import pytest
import torch
from kit import oracle
from torch import Tensor

import flashbwd


def parts(layer: flashbwd.SelfAttention, x: Tensor) -> list[Tensor]:
    """q, k and v of a layer, as leaves."""
    heads = (x @ layer.qkv.weight.T + layer.qkv.bias).unflatten(-1, (-1, layer.head_dim))
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    return [part.detach() for part in heads.split(sizes, dim=-2)]


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_the_projection_agrees_with_the_formula(kv_heads: int | None, causal: bool) -> None:
    torch.manual_seed(0)
    layer = flashbwd.SelfAttention(32, 4, num_kv_heads=kv_heads, causal=causal, dtype=torch.float64)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    dout = torch.randn(2, 9, 32, dtype=torch.float64)
    layer(x).backward(dout)
    want = oracle.attention(*parts(layer, x), (dout @ layer.proj.weight).unflatten(-1, (4, 8)), causal=causal)
    dheads = torch.cat([want.dq, want.dk, want.dv], dim=-2).flatten(-2)
    torch.testing.assert_close(layer.qkv.bias.grad, dheads.sum((0, 1)))


def test_packed_documents_do_not_see_one_another() -> None:
    torch.manual_seed(0)
    layer = flashbwd.SelfAttention(16, 2, causal=True, window_size=(3, 0), dtype=torch.float64)
    documents = [torch.randn(length, 16, dtype=torch.float64) for length in (5, 1, 7)]
    packed = layer(torch.cat(documents), cu_seqlens=torch.tensor([0, 5, 6, 13], dtype=torch.int32), max_seqlen=7)
    torch.testing.assert_close(packed, torch.cat([layer(document[None])[0] for document in documents]))


def test_dropout_is_applied_only_in_training() -> None:
    layer = flashbwd.SelfAttention(16, 2, dropout_p=0.5)
    x = torch.randn(1, 32, 16)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3, expected a divisor of embed_dim, 16"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads, 4"),
        ({"num_heads": 4, "dropout_p": 1.0}, r"dropout_p is 1.0, expected a number in \[0, 1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flashbwd.SelfAttention(16, **arguments)


SEQLENS = {"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32), "max_seqlen": 5}


@pytest.mark.parametrize(
    ("x", "lengths", "message"),
    [
        (torch.zeros(5, 16), {}, "x has shape (5, 16), expected (batch, seqlen, 16), or cu_seqlens for a packed x"),
        (torch.zeros(1, 5, 16), SEQLENS, "x has shape (1, 5, 16), expected (total, 16) with cu_seqlens"),
        (torch.zeros(1, 5, 8), {}, "x has shape (1, 5, 8), expected (batch, seqlen, 16), or cu_seqlens for a packed x"),
        (torch.zeros(1, 5, 16).half(), {}, "x is float16, expected the parameters' float32"),
        (None, {}, "x is None, expected a tensor"),
    ],
)
def test_an_input_that_does_not_fit_the_layer_is_refused(x: Tensor, lengths: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^flashbwd: {re.escape(message)}$"):
        flashbwd.SelfAttention(16, 2)(x, **lengths)


def test_autocast_accepts_an_input_of_another_dtype() -> None:
    layer, x = flashbwd.SelfAttention(16, 2), torch.randn(1, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x.bfloat16()), layer(x.bfloat16().float()))
