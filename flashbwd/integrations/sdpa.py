"""PyTorch's attention backwards, as calls of this library's.

Each function takes one aten operator's arguments and returns that operator's results, or in words why no kernel of
this library computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops  # noqa: F401  (loads torch.ops.flashbwd)
from flashbwd.attention import current_backend

_backward = torch.ops.flashbwd.attention_backward_or_refusal.default

# PyTorch's memory-efficient kernel counted the elements of its dropout mask in 32 bits up to torch 2.11.
_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_EFFICIENT_DROPOUT = "efficient32" if _version <= (2, 11) else "efficient64"

_NO_GRADIENT = "the output has no gradient"
_EFFICIENT_MASKS = ("none", "top_left", "bottom_right")  # by custom_mask_type


def _run(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *,
    softmax_scale: float | None,
    causal: str,
    attn_bias: Tensor | None = None,
    need_dbias: bool = False,
    window: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    rng: tuple[Tensor, Tensor] | None = None,
    rng_layout: str = "",
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
    max_seqlens: tuple[int | None, int | None] = (None, None),
    heads_first: bool = False,
    contiguous_grads: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | str:
    """dq, dk, dv, dbias (empty without need_dbias), or the reason why not."""
    seed, offset = (None, None) if rng is None else rng
    dq, dk, dv, dbias, refusal = _backward(  # in the order of the schema, which is the quickest to pass
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        attn_bias,
        None,  # alibi_slopes
        None,  # sink
        None,  # dlse
        seed,
        offset,
        cu_seqlens[0],
        cu_seqlens[1],
        None,  # seqused_q
        None,  # seqused_k
        softmax_scale,
        causal,
        window[0],
        window[1],
        0.0,  # softcap
        dropout_p,
        rng_layout,
        max_seqlens[0],
        max_seqlens[1],
        need_dbias,
        torch.are_deterministic_algorithms_enabled(),
        current_backend(),
        heads_first,
        contiguous_grads,
    )
    return refusal or (dq, dk, dv, dbias)


def flash_attention_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor] | str:
    """``aten::_flash_attention_backward``: (B, S, H, D), or (total, H, D) with cum_seq; rng_state is (seed, offset)."""
    if grad_out is None:
        return _NO_GRADIENT
    varlen = cum_seq_q is not None
    rng = None
    if dropout_p > 0.0:
        if rng_state.numel() != 2:
            return f"rng_state has {rng_state.numel()} elements, expected a seed and an offset"
        rng = (rng_state[0], rng_state[1])
    grads = _run(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        softmax_scale=scale,
        causal="bottom_right" if is_causal else "none",
        window=(
            -1 if window_size_left is None or window_size_left < 0 else window_size_left,
            -1 if window_size_right is None or window_size_right < 0 else window_size_right,
        ),
        dropout_p=dropout_p,
        rng=rng,
        rng_layout="" if rng is None else "flash",
        cu_seqlens=(cum_seq_q, cum_seq_k),
        max_seqlens=(max_q, max_k) if varlen else (None, None),
    )
    return grads if isinstance(grads, str) else grads[:3]


def efficient_attention_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | str:
    """``aten::_efficient_attention_backward``: (B, S, H, D), or (1, total, H, D) with cu_seqlens; contiguous results.

    A window of w sees the query's own key and the w - 1 before it, on the diagonal of the causal mask it comes with.
    """
    if grad_out is None:
        return _NO_GRADIENT
    if shared_storage_dqdkdv:
        return "dq, dk and dv are asked for in one storage"
    if not 0 <= custom_mask_type < len(_EFFICIENT_MASKS):
        return f"custom_mask_type is {custom_mask_type}"
    causal = _EFFICIENT_MASKS[custom_mask_type]
    windowed = window_size is not None and window_size > 0
    if windowed and causal == "none":
        return "a window without a causal mask"
    varlen = cu_seqlens_q is not None
    need_dbias = bias is not None and bias_requires_grad
    with_dropout = dropout_p > 0.0
    packed = (grad_out, query, key, value, out)
    if varlen:
        packed = tuple(x.squeeze(0) for x in packed)  # type: ignore[assignment]
    grads = _run(
        *packed,
        logsumexp,
        softmax_scale=scale,
        causal=causal,
        attn_bias=bias,
        need_dbias=need_dbias,
        window=(window_size - 1 if windowed and window_size is not None else -1, -1),
        dropout_p=dropout_p,
        rng=(philox_seed, philox_offset) if with_dropout else None,
        rng_layout=_EFFICIENT_DROPOUT if with_dropout else "",
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        max_seqlens=(max_seqlen_q, max_seqlen_k) if varlen else (None, None),
        contiguous_grads=True,
    )
    if isinstance(grads, str):
        return grads
    dq, dk, dv, dbias = grads
    if varlen:
        dq, dk, dv = dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)
    return dq, dk, dv, dbias if need_dbias else None


def cudnn_attention_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor] | str:
    """``aten::_scaled_dot_product_cudnn_attention_backward``: (B, H, S, D); the bias has no gradient."""
    if grad_out is None:
        return _NO_GRADIENT
    if dropout_p > 0.0:
        return "cuDNN does not say how it draws its dropout mask, so it cannot be drawn again"
    if cum_seq_q is not None:
        return "cuDNN's packed sequences"
    while attn_bias is not None and attn_bias.dim() < 4:
        attn_bias = attn_bias.unsqueeze(0)
    grads = _run(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        softmax_scale=scale,
        causal="top_left" if is_causal else "none",
        attn_bias=attn_bias,
        heads_first=True,
    )
    return grads if isinstance(grads, str) else grads[:3]


ATTEMPTS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
    "_flash_attention_backward": flash_attention_backward,
    "_efficient_attention_backward": efficient_attention_backward,
}
