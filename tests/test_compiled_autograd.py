"""Compiled autograd runs the backwards of this library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import flashbwd

BIAS = torch.nn.Parameter(torch.linspace(-1, 1, 62).view(2, 31))


def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + BIAS[h, q - k + 15]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: flashbwd.attention(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2)),
    "rms_norm": lambda x: flashbwd.rms_norm(x, torch.ones(8)),
    "layer_norm": lambda x: flashbwd.layer_norm(x, torch.ones(8)),
    "flex_attention": lambda x: flashbwd.flex_attention(x, x, x, biased),  # type: ignore[return-value]
    "flex_decoding": lambda x: flashbwd.flex_decoding(x, x, x, biased),  # type: ignore[return-value]
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_autograd_gives_the_gradients(name: str) -> None:
    x = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (want,) = torch.autograd.grad(FUNCTIONS[name](x).square().sum(), x)
    loss = FUNCTIONS[name](x).square().sum()
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    BIAS.grad = None
    torch.testing.assert_close(x.grad, want)
