"""FlexAttention and flex decoding within checkpoints, transforms, dispatch modes and compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flashbwd

SHAPE = Shape(seqlen_q=24, seqlen_k=24)
Attention = Callable[..., Any]
FUNCTIONS = pytest.mark.parametrize("attention", [flashbwd.flex_attention, flashbwd.flex_decoding])
LENGTH = 24
SCALES = torch.ones(4)


def inputs() -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in SHAPE.tensors(torch.float64)]


def causal() -> BlockMask:
    return kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=8)


@FUNCTIONS
def test_a_selective_checkpoint_repeats_a_first_call(attention: Attention) -> None:
    """The first call checks its function and its mask, which a repeated one does not."""
    bias, (q, k, v) = torch.zeros(24, requires_grad=True), inputs()
    mask = causal()

    def layer(x: Tensor) -> Tensor:
        out = attention(x, k, v, lambda s, b, h, q, k: s + bias[k] * 2, mask, enable_gqa=True)
        return (x + out * 3).sum(-1)

    def kept(*_: Any) -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList])

    got = checkpoint(layer, q, use_reentrant=False, context_fn=kept).sin().sum()
    plain = layer(q).sin().sum()
    torch.testing.assert_close(torch.autograd.grad(got, (q, bias)), torch.autograd.grad(plain, (q, bias)))


@FUNCTIONS
def test_a_checkpoint_may_create_a_graph(attention: Attention) -> None:
    q, k, v = inputs()
    out = checkpoint(lambda x: attention(x, k, v, enable_gqa=True), q, use_reentrant=False)
    got = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(attention(q, k, v, enable_gqa=True).sin().sum(), q))


@FUNCTIONS
def test_a_backward_that_failed_may_be_repeated(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    given = inputs()
    out = attention(*given, lambda s, b, h, q, k: s * 2, enable_gqa=True)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr("flashbwd.decoding._backward", fail)
        patch.setattr("flashbwd.flex.attention.gradients", fail)
        out.sum().backward()
    out.sum().backward()
    assert given[0].grad is not None


@FUNCTIONS
def test_operators_are_counted_around_a_compiled_function(attention: Attention) -> None:
    scales, (q, k, v) = torch.ones(4, requires_grad=True), inputs()
    mask = causal()

    def attend(x: Tensor) -> Any:
        return attention(x, k, v, lambda s, b, h, q, k: s * scales[h], mask, enable_gqa=True)

    with FlopCounterMode(display=False):
        got = torch.compile(attend, backend="eager")(q)
    torch.testing.assert_close(got, attend(q))


@FUNCTIONS
def test_a_function_is_compiled_again_after_a_dispatch_mode(attention: Attention) -> None:
    """Dynamo keeps the frames that it skipped under the mode, and would compile those that they call."""
    torch._dynamo.reset()
    q, k, v = SHAPE.tensors(torch.float32)

    def attend(x: Tensor) -> Any:
        return attention(x, k, v, lambda s, b, h, q, k: s * SCALES[h], enable_gqa=True)

    with FlopCounterMode(display=False):
        torch.compile(attend, backend="eager")(q)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q), attend(q))


@FUNCTIONS
def test_a_transform_may_make_the_mask(attention: Attention) -> None:
    q, k, v = (tensor.detach() for tensor in inputs())

    def loss(x: Tensor) -> Tensor:
        return attention(x, k, v, block_mask=causal(), enable_gqa=True).sin().sum()

    x = q.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(loss(x), x)[0])


@FUNCTIONS
def test_batched_gradients_are_refused(attention: Attention) -> None:
    q, k, v = inputs()
    out = attention(q, k, v, enable_gqa=True)
    with pytest.raises(RuntimeError, match=f"flashbwd: {attention.__name__}_backward has no batching rule"):  # type: ignore[attr-defined]
        torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


@FUNCTIONS
def test_a_compiled_function_runs_as_it_was_written(attention: Attention) -> None:
    bias, given = torch.randn(4, 2 * 24, dtype=torch.float64), inputs()
    mod = lambda s, b, h, q, k: s + bias[h, q - k + LENGTH - 1]  # noqa: E731
    want = attention(*given, mod, enable_gqa=True)
    got = attention(*given, torch.compile(mod, backend="eager"), enable_gqa=True)
    torch.testing.assert_close(got, want)
