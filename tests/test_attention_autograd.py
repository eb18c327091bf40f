"""flashbwd.attention: its forward, its gradients through autograd, and its refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from kit import cases, inputs, oracle
from torch import Tensor

import flashbwd

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal_more_keys": {"causal": True, "seqlen_k": 9},
    "top_left": {"causal": "top_left", "seqlen_k": 9},
    "empty_rows": {"causal": True, "seqlen_q": 9, "seqlen_k": 4},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.7},
    "grouped": {"heads": 4, "heads_kv": 2},
    "unequal_head_dims": {"head_dim": 3, "head_dim_v": 5},
    "bias": {"bias": "bhqk"},
    "bias_broadcast": {"bias": "1h1k"},
    "key_mask": {"key_mask": "random", "heads": 4, "heads_kv": 2},
    "key_mask_of_no_key": {"key_mask": "empty", "bias": "1hqk", "sink": "finite", "causal": True},
    "alibi": {"alibi": "batch"},
    "sink": {"sink": "finite"},
    "varlen": {"seqlens_q": (3, 0, 5), "seqlens_k": (4, 2, 5), "causal": True},
    "varlen_bias_sink": {"seqlens_q": (3, 5), "seqlens_k": (4, 5), "bias": "bhqk", "sink": "finite"},
    "everything": {"causal": True, "softcap": 2.0, "bias": "b1qk", "sink": "finite", "alibi": "heads", "heads": 4},
}
FORWARD = ("softmax_scale", "causal", "window_size", "softcap", "key_mask", "alibi_slopes")
FORWARD += ("cu_seqlens_q", "cu_seqlens_k")


def small(name: str, dtype: torch.dtype = torch.float64) -> inputs.Inputs:
    defaults: dict[str, Any] = {"seqlen_q": 6, "seqlen_k": 6, "head_dim": 4, "head_dim_v": 4}
    return inputs.build(cases.Case(name, **(defaults | FEATURES[name])), dtype)


def clean(tensor: Tensor | None) -> Tensor | None:
    """A leaf without the NaN in the padding of a bias, which finite differences would read."""
    return None if tensor is None else tensor.nan_to_num(0.0).clone().requires_grad_()


def call(x: inputs.Inputs, leaves: list[Tensor | None], **more: Any) -> Any:
    q, k, v, bias, sink = leaves
    assert q is not None
    lengths = {name: x.arguments[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in x.arguments}
    options = {name: x.arguments[name] for name in FORWARD}
    return flashbwd.attention(q, k, v, attn_bias=bias, sink=sink, **options, **lengths, **more)


def leaves_of(x: inputs.Inputs) -> list[Tensor | None]:
    return [clean(x.arguments[name]) for name in ("q", "k", "v", "attn_bias", "sink")]


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_pass_gradcheck(name: str) -> None:
    x = small(name)
    leaves = leaves_of(x)
    given = [leaf for leaf in leaves if leaf is not None]
    blind = x.reference.empty

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        rest = iter(tensors)
        out, lse = call(x, [None if leaf is None else next(rest) for leaf in leaves], return_lse=True)
        return out, lse.masked_fill(blind, 0.0)  # the LSE of a row without keys is infinite

    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEATURES)
def test_out_and_lse_agree_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    x = small(name, dtype)
    out, lse = call(x, leaves_of(x), return_lse=True)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert (out.dtype, lse.dtype) == (dtype, inputs.lse_dtype(dtype))
    assert out.is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close(out.double(), x.reference.out, rtol=tolerance, atol=tolerance)
    seen = ~x.reference.empty
    torch.testing.assert_close(lse.double()[seen], x.reference.lse[seen], rtol=tolerance, atol=tolerance)
    assert bool((out.transpose(-3, -2)[~seen] == 0).all())


@pytest.mark.parametrize("name", FEATURES)
def test_backward_through_autograd_is_attention_backward(name: str) -> None:
    x = small(name)
    leaves = leaves_of(x)
    out, lse = call(x, leaves, return_lse=True)
    given = [leaf for leaf in leaves if leaf is not None]
    dout = x.arguments["dout"]
    grads = torch.autograd.grad(out, given, dout)
    q, k, v, bias, sink = (None if leaf is None else leaf.detach() for leaf in leaves)
    options = {key: x.arguments[key] for key in (*FORWARD, "max_seqlen_q", "max_seqlen_k") if key in x.arguments}
    direct = flashbwd.attention_backward(
        dout, q, k, v, out.detach(), lse.detach(), attn_bias=bias, sink=sink, **options
    )
    for a, b in zip(grads, [grad for grad in direct if grad is not None], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_lse_alone_has_gradients() -> None:
    x = small("causal")
    q, k, v = leaves_of(x)[:3]
    _, lse = call(x, [q, k, v, None, None], return_lse=True)
    weights = torch.randn(lse.shape, dtype=lse.dtype, generator=torch.Generator().manual_seed(0))
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), weights, allow_unused=True)
    main = [x.canonical[name] for name in ("q", "k", "v")]
    expected = oracle.attention(*main, torch.zeros_like(x.canonical["dout"]), causal=True, dlse=weights)
    torch.testing.assert_close(dq, expected.dq)
    torch.testing.assert_close(dk, expected.dk)
    assert dv is None or not dv.any()


def test_only_out_is_returned_unless_asked() -> None:
    x = small("plain")
    out = call(x, leaves_of(x))
    assert isinstance(out, Tensor)
    assert torch.equal(out, call(x, leaves_of(x), return_lse=True)[0])


def test_frozen_inputs_get_no_gradient() -> None:
    x = small("bias")
    leaves = leaves_of(x)
    for frozen in (1, 3):
        leaf = leaves[frozen]
        assert leaf is not None
        leaf.requires_grad_(False)
    call(x, leaves).sum().backward()
    assert [leaf.grad is not None for leaf in leaves if leaf is not None] == [True, False, True, False]


def test_autograd_records_nothing_without_grad() -> None:
    x = small("plain")
    with torch.no_grad():
        assert not call(x, leaves_of(x)).requires_grad
    assert not call(x, [None if leaf is None else leaf.detach() for leaf in leaves_of(x)]).requires_grad


def test_double_backward_is_refused_by_name() -> None:
    x = small("plain")
    q, k, v = (leaf for leaf in leaves_of(x) if leaf is not None)
    dq = torch.autograd.grad(flashbwd.attention(q, k, v).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="flashbwd: attention_backward has no gradient: double backward is not supp"):
        dq.sum().backward()


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_the_seed_determines_the_dropout_mask_of_forward_and_backward(p: float) -> None:
    x = small("grouped", torch.float64)
    leaves = leaves_of(x)
    values = leaves[2]
    assert values is not None
    torch.manual_seed(5)
    first = call(x, leaves, dropout_p=p)
    torch.manual_seed(5)
    again = call(x, leaves, dropout_p=p)
    assert torch.equal(first, again)
    assert not torch.equal(first, call(x, leaves, dropout_p=p))
    # out is linear in v, so its derivative along v equals out, but only if forward and backward used one mask.
    (dv,) = torch.autograd.grad(first, values, torch.ones_like(first))
    torch.testing.assert_close((dv * values.detach()).sum(), first.detach().sum())


def test_gradients_with_dropout_pass_gradcheck() -> None:
    x = small("causal")
    q, k, v = (leaf for leaf in leaves_of(x) if leaf is not None)

    def function(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return flashbwd.attention(*tensors, causal=True, dropout_p=0.3)

    assert torch.autograd.gradcheck(function, (q, k, v))


def test_autocast_casts_q_k_v_and_returns_gradients_in_their_dtype() -> None:
    x = small("causal", torch.float32)
    q, k, v = (leaf for leaf in leaves_of(x) if leaf is not None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashbwd.attention(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {leaf.grad.dtype for leaf in (q, k, v) if leaf.grad is not None} == {torch.float32}


def test_an_optimiser_step_lowers_a_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, goal = (torch.randn(1, 12, 2, 8, generator=generator) for _ in range(4))
    leaves = [leaf.requires_grad_() for leaf in (q, k, v)]
    optimiser = torch.optim.SGD(leaves, lr=0.5)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = (flashbwd.attention(*leaves, causal=True) - goal).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(b < a for a, b in pairwise(losses))
