"""Differentiable attention, and the public names of its backward and its plan."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from flashbwd import _arguments, _forward, _ops
from flashbwd._attention_arguments import RngState, autocast_dtype, default_scale, operator_options, use_backend
from flashbwd._attention_backward import AttentionGrads, attention_backward
from flashbwd._attention_plan import Plan, plan_attention_backward
from flashbwd.options import AttentionOptions

__all__ = [
    "AttentionGrads",
    "Plan",
    "RngState",
    "attention",
    "attention_backward",
    "plan_attention_backward",
    "use_backend",
]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Differentiable softmax attention: PyTorch's forward where it supports the case, and this library's backward.

    Cases without a forward in PyTorch use the reference forward. Under ``torch.autocast`` q, k and v are cast as in
    PyTorch's own attention. Tensors are (batch, sequence, heads, head dimension); those of
    ``scaled_dot_product_attention`` need ``transpose(1, 2)``, and most calls in its order cannot be told from valid
    ones. Gradients flow to q, k, v, attn_bias and sink, and also from the returned LSE. Double
    backward raises ``RuntimeError``.

    Parameters
    ----------
    q : Tensor, (B, Sq, H, D) or packed (total_q, H, D)
    k : Tensor, (B, Sk, Hkv, D) or (total_k, Hkv, D)
    v : Tensor, (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
    softmax_scale, causal, window_size, softcap, attn_bias, key_mask, alibi_slopes, sink
        As for :func:`attention_backward`. ``sink`` adds one logit per query head to the softmax denominator; it has no
        value row.
    dropout_p : float
        Probability of dropping an attention weight, in [0, 1). The mask is drawn from PyTorch's generator of q's
        device.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        For packed sequences, as for :func:`attention_backward`.
    deterministic : bool
        Require a deterministic backward. Implied by ``torch.use_deterministic_algorithms(True)``.
    return_lse : bool
        Also return the natural-log LSE: float32 (float64 for float64 inputs), (B, H, Sq) or (H, total_q).

    Returns
    -------
    out : Tensor, (B, Sq, H, Dv) or (total_q, H, Dv)
        Contiguous, in q's dtype. A row that sees no key is 0.
    softmax_lse : Tensor, (B, H, Sq) or (H, total_q)
        Only with ``return_lse``. Without a sink, a row that sees no key has -inf or +inf.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _arguments.tensor(name, tensor)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(autocast_dtype(t)) for t in (q, k, v))
    _arguments.flag("return_lse", return_lse)
    given = operator_options(
        q,
        softmax_scale=default_scale(q) if softmax_scale is None else softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attn_bias=attn_bias,
        key_mask=key_mask,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
    )
    options = AttentionOptions._field_defaults | given
    forward_options = [options[name] for name in _forward.OPTIONS]
    out, lse, _ = _ops.call(torch.ops.flashbwd.attention, q, k, v, *forward_options)
    return (out, lse) if return_lse else out
