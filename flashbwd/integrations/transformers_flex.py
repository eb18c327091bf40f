"""The attention implementation for Transformers that calls FlexAttention, with a BlockMask for any mask function.

:func:`flashbwd.integrations.transformers.register` registers both functions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._triton import has_triton

from flashbwd.flex.attention import flex_attention
from flashbwd.integrations.transformers_shared import FLEX_NAME, NAME, OncePerTensor

__all__ = ["attention_forward", "block_mask"]


# ---- masks ----


_setting_the_stance = threading.Lock()


@torch.compiler.disable
def block_mask(**arguments: Any) -> BlockMask:
    """Return the BlockMask that Transformers' ``flex_attention_mask`` makes of these arguments.

    In a compiled model, it is made between two graphs. Without Triton it is made in eager mode, because compiling the
    function with a C++ compiler takes many seconds.

    Raises
    ------
    ImportError
        If Transformers has no such function.
    """
    # A static cache passes its own counter, and adds to it before the attention reads the mask.
    for name in ("q_offset", "kv_offset"):
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = arguments[name].clone()
    if torch.device(arguments.get("device") or "cpu").type == "cuda" and has_triton():
        return _transformers_mask(**arguments)
    # Transformers' function always calls torch.compile. The stance is that of all threads.
    with _setting_the_stance, torch.compiler.set_stance("force_eager"):
        return _transformers_mask(**arguments)


def _transformers_mask(**arguments: Any) -> BlockMask:
    try:
        from transformers.masking_utils import flex_attention_mask
    except ImportError as error:
        import transformers

        raise ImportError(
            f"flashbwd: attn_implementation is {FLEX_NAME!r}, which needs "
            f"transformers.masking_utils.flex_attention_mask; Transformers {transformers.__version__} does not have it"
        ) from error
    mask: BlockMask = flex_attention_mask(**arguments)
    return mask


def _causal_mask(seqlen_q: int, seqlen_k: int, window: int | None, device: torch.device) -> BlockMask:
    """Return a causal mask, with a window if one is given, which aligns the last query with the last key."""
    offset = seqlen_k - seqlen_q

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        last = q_idx + offset
        return (kv_idx <= last) if window is None else (kv_idx <= last) & (kv_idx > last - window)

    return create_block_mask(visible, None, None, seqlen_q, seqlen_k, device=device)


def _dense_mask(mask: Tensor, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Return the BlockMask of booleans (B or 1, H or 1, Sq or 1, at least Sk)."""

    return create_block_mask(_reader(mask), mask.shape[0], mask.shape[1], seqlen_q, seqlen_k, device=mask.device)


_kept_causal_mask = functools.lru_cache(maxsize=32)(_causal_mask)
_kept_dense_mask = OncePerTensor(_dense_mask)


def _reader(tensor: Tensor) -> Callable[..., Tensor]:
    """Return ``(b, h, q_idx, kv_idx) -> element of tensor``. A dimension of size 1 is broadcast."""
    flat = tensor.squeeze()  # not in the function, which becomes part of a kernel that reads single elements only
    varies = tuple(size > 1 for size in tensor.shape)

    def read(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        pairs = zip((b, h, q_idx, kv_idx), varies, strict=True)
        indices = tuple(index for index, selects in pairs if selects)
        return flat[indices] if indices else flat

    return read


def _score_mod(softcap: float | None, biases: list[Tensor]) -> Callable[..., Tensor] | None:
    """Return the score_mod that applies a softcap and then adds the biases; None if there are neither."""
    if not softcap and not biases:
        return None
    readers = tuple(map(_reader, biases))

    def modified(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        for read in readers:
            score = score + read(b, h, q_idx, kv_idx)
        return score

    return modified


# ---- attention ----


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    kernel_options: dict[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Call :func:`flashbwd.flex_attention` with the arguments that Transformers passes to attention implementations.

    Parameters
    ----------
    module : nn.Module
        The attention layer; ``module.is_causal`` is used if ``is_causal`` is not given.
    query, key, value : Tensor, (B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)
        Keys beyond those of the mask, which a static cache may have, are not read.
    attention_mask : BlockMask or Tensor, optional
        A tensor is (B or 1, H or 1, Sq, Sk): booleans, which become a BlockMask once per tensor, or a bias. A mask is
        the only mask: ``is_causal`` and ``sliding_window`` apply only without one. They then align the last query with
        the last key.
    dropout : float
        0; FlexAttention has no dropout.
    scaling, softcap
        The values that models pass.
    s_aux : Tensor, (H,), optional
        Attention sinks.
    position_bias : Tensor, (B or 1, H or 1, Sq, Sk), optional
        Added to the scores.
    kernel_options : dict, optional
        Options of PyTorch's forward kernel.

    Returns
    -------
    (Tensor, None)
        The output, (B, Sq, H, Dv), which is 0 in rows that see no key. Attention weights are not returned.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    if dropout:
        raise ValueError(
            f"flashbwd: dropout is {dropout}, expected 0: FlexAttention has no dropout. Set the attention dropout of "
            f"the model's config to 0, or use attn_implementation={NAME!r}"
        )
    _check_mask(attention_mask, query)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    arguments = (query, key, value, attention_mask, causal, sliding_window, scaling, softcap, s_aux, position_bias)
    # PyTorch has no compiled FlexAttention with gradients for a CPU, so a compiled model gets a graph break there.
    attend = _attend_in_eager_mode if query.device.type == "cpu" else _attend
    return attend(*arguments, kernel_options), None


def _check_mask(mask: Any, query: Tensor) -> None:
    if mask is None or isinstance(mask, BlockMask):
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"flashbwd: attention_mask is a {type(mask).__name__}, expected a BlockMask, a tensor or None")
    if mask.dim() != 4 or any(n not in (1, m) for n, m in zip(mask.shape[:3], query.shape[:3], strict=True)):
        expected = ", ".join(f"1 or {n}" for n in query.shape[:3])
        raise ValueError(f"flashbwd: attention_mask has shape {tuple(mask.shape)}, expected ({expected}, keys)")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    causal: bool,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
    kernel_options: dict[str, Any] | None,
) -> Tensor:
    tracing = is_dynamo_compiling()
    seqlen_q, seqlen_k = query.shape[2], min(key.shape[2], _keys_of(attention_mask, key.shape[2]))
    key, value = key[:, :, :seqlen_k], value[:, :, :seqlen_k]
    mask: BlockMask | None = None
    biases = [] if position_bias is None else [position_bias]
    if isinstance(attention_mask, BlockMask):
        mask = attention_mask
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = (_dense_mask if tracing else _kept_dense_mask)(attention_mask, seqlen_q, seqlen_k)
    elif attention_mask is not None:
        biases.append(attention_mask)
    elif causal and seqlen_q > 1:
        mask = (_causal_mask if tracing else _kept_causal_mask)(seqlen_q, seqlen_k, window, query.device)
    result = flex_attention(
        query,
        key,
        value,
        _score_mod(softcap, biases),
        mask,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        return_lse=sinks is not None,
        kernel_options=kernel_options,
    )
    out = cast("Tensor", result) if sinks is None else _with_sinks(*cast("tuple[Tensor, Tensor]", result), sinks)
    return out.transpose(1, 2).contiguous()


_attend_in_eager_mode = torch.compiler.disable(_attend)


def _keys_of(mask: BlockMask | Tensor | None, seqlen_k: int) -> int:
    """Return the number of keys that a mask has; ``seqlen_k`` if it fits every length."""
    if isinstance(mask, BlockMask):
        hides_nothing = min(mask.BLOCK_SIZE) >= 1 << 30  # PyTorch's mask for calls without one
        return seqlen_k if hides_nothing else int(mask.seq_lengths[1])
    return seqlen_k if mask is None else mask.shape[3]


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add sinks (H,) to the denominator of the softmax. The gradients pass through the LSE."""
    kept = torch.sigmoid(lse - sinks.to(lse.dtype).view(-1, 1))  # exp(lse) / (exp(lse) + exp(sink))
    return (out * kept.unsqueeze(-1)).to(out.dtype)
