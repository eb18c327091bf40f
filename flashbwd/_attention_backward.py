"""The gradients of attention, without autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd import _arguments, _ops
from flashbwd._attention_arguments import RngState, operator_options


class AttentionGrads(NamedTuple):
    """Gradients of an attention call.

    Attributes
    ----------
    dq : Tensor, (B, Sq, H, D) or packed (total_q, H, D)
    dk : Tensor, (B, Sk, Hkv, D) or (total_k, Hkv, D)
    dv : Tensor, (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
    dbias : Tensor, optional
        Shape and dtype of ``attn_bias``; ``None`` if the call had no bias.
    dsink : Tensor, (H,), optional
        Dtype of ``sink``; ``None`` if the call had no sink.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dlse: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: RngState | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    workspace: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> AttentionGrads:
    """Compute the gradients of softmax attention with respect to its inputs.

    For each batch and query head, with ``c = 1`` unless softcap is used::

        s     = scale * q @ k.T                       # scale = softmax_scale
        c     = 1 - tanh(s / softcap)**2              # with softcap only
        s     = softcap * tanh(s / softcap)           # with softcap only
        p     = exp(s + bias + alibi - lse)           # 0 where masked, also by key_mask
        z     = 1 / (1 - dropout_p) where dropout kept the element, else 0
        delta = rowsum(dout * out) - dlse
        ds    = p * (z * (dout @ v.T) - delta)
        dq    = scale * (c * ds) @ k
        dk    = scale * (c * ds).T @ q                # summed over the query heads of a KV head, like dv
        dv    = (p * z).T @ dout
        dbias = ds                                    # summed over the dimensions that the bias broadcasts
        dsink = -sum over batch and rows of exp(sink - lse) * delta

    (Dao et al., "FlashAttention", 2022, section B.2, extended by bias, softcap, sink and the gradient of the LSE.)

    Parameters
    ----------
    dout, out : Tensor, (B, Sq, H, Dv) or packed (total_q, H, Dv)
        Gradient of the forward's output, and the output itself. dout may have any strides.
    q : Tensor, (B, Sq, H, D) or (total_q, H, D)
        float16, bfloat16, float32 or float64; k, v, out and dout must have the same dtype. The last dimension of q, k,
        v and out must be contiguous; all other strides are free.
    k : Tensor, (B, Sk, Hkv, D) or (total_k, Hkv, D)
        H must be a multiple of Hkv. Query head h reads KV head ``h // (H // Hkv)``.
    v : Tensor, (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
    softmax_lse : Tensor, float32 (float64 for float64 inputs)
        Natural-log LSE from the forward: (B, H, Sq), (B, H, Sq, 1) or (B, H, roundup(Sq, 32)); for packed inputs
        (H, total_q) or (B, H, roundup(max_seqlen_q, 32)). It is used as given and never recomputed.
    softmax_scale : float, optional
        Default ``D ** -0.5``.
    causal : bool or "top_left"
        True aligns the diagonal with the last query and the last key (FlashAttention >= 2.1). ``"top_left"`` aligns it
        with the first query and the first key (PyTorch's ``is_causal``).
    window_size : (int, int)
        Number of visible keys to the left and right of the diagonal; -1 is unbounded. Causal masking sets right to 0.
    softcap : float
        0 disables it.
    attn_bias : Tensor, optional
        Added to the scores. Shape (B, H, Sq, Sk), or (B, H, max_seqlen_q, max_seqlen_k) for packed inputs; any
        dimension may be 1. q's dtype or float32. Passing it requests dbias.
    key_mask : Tensor, (B, Sk), bool, optional
        True where a key is visible to all queries and heads of its batch entry. Hidden keys get zero dk, dv and dbias;
        k, v and attn_bias may hold NaN there. Any strides. Dense inputs only.
    alibi_slopes : Tensor, (H,) or (B, H), float32, optional
        Adds ``-slope * |i + off - j|`` to the score of query i and key j, with ``off = Sk - Sq`` of its
        sequence (0 for ``"top_left"``). The slopes get no gradient.
    sink : Tensor, (H,), optional
        One unscaled logit per query head that ``softmax_lse`` already includes. Passing it requests dsink. If the keys
        are split over several calls, pass it in only one of them.
    dlse : Tensor, optional
        Gradient with respect to ``softmax_lse``, in any shape that is allowed there.
    dropout_p : float
        Dropout probability of the forward, in [0, 1). Above 0 it requires ``rng_state``.
    rng_state : RngState, optional
        Philox state of the forward. The backward regenerates exactly the same mask from it.
    cu_seqlens_q, cu_seqlens_k : Tensor, (B + 1,), int32, optional
        Cumulative sequence lengths of packed inputs, as in FlashAttention. Pass both or neither; they require
        ``max_seqlen_q`` and ``max_seqlen_k``.
    seqused_q, seqused_k : Tensor, (B,), int32, optional
        Number of rows in use in each sequence. The rows after them get zero gradients.
    max_seqlen_q, max_seqlen_k : int, optional
        Upper bound of the lengths of packed sequences, as passed to the forward.
    deterministic : bool
        Require gradients that are bitwise identical from run to run; a call that cannot provide them raises. Implied by
        ``torch.use_deterministic_algorithms(True)``.
    workspace : Tensor, (bytes,), uint8, optional
        Scratch memory: at least ``plan_attention_backward(...).workspace_bytes`` bytes, 256-byte aligned. Allocated
        internally by default.
    dq, dk, dv : Tensor, optional
        Output tensors, with the inputs' dtype, or float32 for 16-bit inputs. Their old contents are overwritten.

    Returns
    -------
    AttentionGrads
        dq, dk and dv: the tensors that were passed in, or new ones with the strides of ``torch.empty_like`` of q, k and
        v. dbias and dsink: shape and dtype of ``attn_bias`` and ``sink``, or ``None`` without them.

    Raises
    ------
    ValueError
        If an argument is invalid, or the backend forced by :func:`use_backend` does not support the call. The message
        names the argument, its value and what was expected. The function raises before it launches a kernel.
    """
    given = _given(
        softmax_scale,
        causal,
        window_size,
        softcap,
        attn_bias,
        key_mask,
        alibi_slopes,
        sink,
        dlse,
        dropout_p,
        rng_state,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        deterministic,
    )
    options = operator_options(q, **given)
    if _ops.allow_tf32(q):
        options["allow_tf32"] = True
    if workspace is None and dq is None and dk is None and dv is None:
        dq, dk, dv, dbias, dsink = _ops.call_below_autograd(
            torch.ops.flashbwd.attention_backward, dout, q, k, v, out, softmax_lse, **options
        )
    else:
        dq = torch.empty_like(q) if dq is None else dq
        dk = torch.empty_like(_arguments.tensor("k", k)) if dk is None else dk
        dv = torch.empty_like(_arguments.tensor("v", v)) if dv is None else dv
        dbias, dsink = _ops.call(
            torch.ops.flashbwd.attention_backward_out,
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            **options,
            dq=dq,
            dk=dk,
            dv=dv,
            workspace=workspace,
        )
    return AttentionGrads(
        dq,
        dk,
        dv,
        None if attn_bias is None else dbias,
        None if sink is None else dsink.to(sink.dtype),
    )


#: The defaults of the options, which are all keyword arguments except the workspace and the outputs.
DEFAULTS: dict[str, Any] = {
    name: value
    for name, value in (attention_backward.__kwdefaults__ or {}).items()
    if name not in ("workspace", "dq", "dk", "dv")
}
_NAMES, _VALUES = tuple(DEFAULTS), tuple(DEFAULTS.values())


def _given(*values: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name. ``values`` are in the order of the signature.

    PyTorch takes about 0.3 us to read an option that a caller passes. Only floats are compared by value, so that an
    option of a wrong type reaches the operator, which refuses it.
    """
    if torch.compiler.is_compiling():
        return dict(zip(_NAMES, values, strict=True))
    return {
        name: value
        for name, value, default in zip(_NAMES, values, _VALUES, strict=True)
        if value is not default and (type(value) is not float or value != default)
    }
