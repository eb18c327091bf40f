"""Attention backward, its execution plan, and a differentiable attention function."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from flashbwd import _arguments, _forward, _ops

__all__ = [
    "AttentionGrads",
    "Plan",
    "RngState",
    "attention",
    "attention_backward",
    "plan_attention_backward",
    "use_backend",
]


class AttentionGrads(NamedTuple):
    """Gradients of an attention call. ``dbias`` and ``dsink`` are ``None`` if the call had no bias or no sink."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


class RngState(NamedTuple):
    """Random number generator state from which a forward drew its dropout mask.

    Attributes
    ----------
    seed, offset : int or Tensor
        Philox seed and offset. A tensor has one element, int64 or uint64, on the CPU or on q's device.
    layout : {"flash", "efficient32", "efficient64"}
        How the forward assigned random numbers to elements: ``"flash"`` for FlashAttention-2 and PyTorch's flash
        attention; ``"efficient32"`` (torch <= 2.11) or ``"efficient64"`` for PyTorch's memory-efficient attention,
        which numbers elements in 32 or 64 bits. docs/numerics.md defines all three.
    """

    seed: int | Tensor
    offset: int | Tensor
    layout: str


@dataclass(frozen=True)
class Plan:
    """How an attention backward will run on a device.

    Attributes
    ----------
    backend : str
        ``"sm90"``, ``"sm80"`` or ``"reference"``.
    tile : tuple of int or None
        Tile size as (queries, keys); ``None`` for the reference backend.
    schedule : str
        Human-readable description of how tiles are scheduled and how dq is accumulated.
    workspace_bytes : int
        Minimum size in bytes of a ``workspace`` tensor passed to :func:`attention_backward`.
    deterministic : bool
        True if runs on GPUs with the same model and SM count give bitwise identical gradients.
    cooperative : bool
        True if the kernel needs a cooperative launch, with all CTAs resident at once. Such a launch fails in a context
        with fewer SMs than the device (a green context). Only deterministic plans need it.
    sm_count : int
        Number of SMs of the device that the plan is for; 0 on a CPU.
    splits : int
        Number of CTAs that share one key block, for the key blocks that are shared; 1 if none is.
    accumulator_bytes : int
        Size in bytes of the fp32 dq accumulator, which is part of the workspace; 0 if the kernel needs none.
    reasons : Mapping[str, str]
        For each backend that was not chosen, the reason.
    """

    backend: str
    tile: tuple[int, int] | None
    schedule: str
    workspace_bytes: int
    deterministic: bool
    cooperative: bool
    sm_count: int
    splits: int
    accumulator_bytes: int
    reasons: Mapping[str, str]


_backend = "auto"


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside a ``with`` block. A call that it cannot run raises ``ValueError`` with the reason.

    Parameters
    ----------
    name : {"auto", "sm90", "sm80", "reference"}
        Applies to the whole process, not only to the current thread. The backward of :func:`attention` uses the
        backend that was set when its forward ran.
    """
    if not isinstance(name, str):
        raise ValueError(f"flashbwd: backend is {_arguments.came(name)}, expected a string")
    before = _backend
    _set_backend(name)
    try:
        yield
    finally:
        _set_backend(before)


def _set_backend(name: str) -> None:
    global _backend
    _backend = name
    torch.ops.flashbwd.force_backend(name)  # read by the operator overrides in C++


def _causal_name(causal: bool | str) -> str:
    if isinstance(causal, str):
        return causal
    if causal is True or causal is False:
        return "bottom_right" if causal else "none"
    raise ValueError(f'flashbwd: causal is {_arguments.came(causal)}, expected False, True or "top_left"')


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)):
        raise ValueError(f"flashbwd: window_size is {_arguments.came(window_size)}, expected a pair (left, right)")
    if len(window_size) != 2:
        raise ValueError(f"flashbwd: window_size is {window_size!r}, expected a pair (left, right)")
    return window_size[0], window_size[1]


def _sink_logits(q: Tensor, sink: Tensor | None) -> Tensor | None:
    """Convert sink logits to the dtype that the operators expect: float64 for float64 inputs, else float32."""
    if sink is None:
        return None
    if not _arguments.tensor("sink", sink).is_floating_point():
        dtype = str(sink.dtype).removeprefix("torch.")
        raise ValueError(f"flashbwd: sink is {dtype}, expected a floating-point dtype")
    return sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _default_scale(q: Tensor) -> float:
    """Return ``D ** -0.5``, or 1 if q has no head dimension; the operator then reports the error."""
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def _deterministic(asked: bool) -> bool:
    return _arguments.flag("deterministic", asked) or torch.are_deterministic_algorithms_enabled()


def _options(q: Tensor, *, rng_state: RngState | None = None, **given: Any) -> dict[str, Any]:
    """Translate the public options to those of the operators (:class:`flashbwd.options.AttentionOptions`)."""
    _arguments.tensor("q", q)
    if rng_state is not None and _arguments.number("dropout_p", given["dropout_p"]) != 0.0:
        given["rng_seed"], given["rng_offset"], given["rng_layout"] = _arguments.rng_words(rng_state)
    given["window_left"], given["window_right"] = _window(given.pop("window_size"))
    given["sink"] = _sink_logits(q, given["sink"])
    given["causal"] = _causal_name(given["causal"])
    given["deterministic"] = _deterministic(given["deterministic"])
    given["backend"] = _backend
    return given


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
        p     = exp(s + bias + alibi - lse)           # 0 where masked
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
        If an argument is invalid, or the backend forced by :func:`use_backend` cannot run the call. The message names
        the argument, its value and what was expected. No kernel has been launched then.
    """
    options = _options(
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attn_bias=attn_bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dlse=dlse,
        dropout_p=dropout_p,
        rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
    )
    options["allow_tf32"] = _ops.allow_tf32(q)
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


def plan_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *,
    workspace: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Plan:
    """Describe what :func:`attention_backward` would do with the same arguments, without running it.

    Parameters
    ----------
    dout, q, k, v, out, softmax_lse, workspace, dq, dk, dv, **options
        As for :func:`attention_backward`. Meta tensors suffice, because contents are not read. The exception is
        ``cu_seqlens`` on the CPU, which is checked.
    device : torch.device or str, optional
        Device to plan for if the tensors are meta tensors. Default: the current CUDA device, or the CPU without one.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        As :func:`attention_backward`.
    TypeError
        For an option that :func:`attention_backward` does not have.
    """
    defaults: dict[str, Any] = dict(_PLAN_DEFAULTS)
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TypeError(f"flashbwd: plan_attention_backward has no argument {unknown[0]!r}")
    described = _ops.call(
        torch.ops.flashbwd.plan_attention_backward,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        **_options(q, **(defaults | options)),
        allow_tf32=_ops.allow_tf32(q),
        dq=dq,
        dk=dk,
        dv=dv,
        workspace=workspace,
        plan_device=_plan_device(device),
    )
    fields = json.loads(described)
    tile = fields.pop("tile")
    reasons = MappingProxyType(fields.pop("refusals"))
    return Plan(tile=None if tile is None else (tile[0], tile[1]), reasons=reasons, **fields)


_PLAN_DEFAULTS = {
    name: value
    for name, value in (attention_backward.__kwdefaults__ or {}).items()
    if name not in ("workspace", "dq", "dk", "dv")
}


def _plan_device(device: torch.device | str | None) -> int:
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else -1
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"flashbwd: device is {_arguments.came(device)}, expected a torch.device or its name"
        ) from error
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


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
    PyTorch's own attention. Gradients flow to q, k, v, attn_bias and sink, and also from the returned LSE. Double
    backward raises ``RuntimeError``.

    Parameters
    ----------
    q : Tensor, (B, Sq, H, D) or packed (total_q, H, D)
    k : Tensor, (B, Sk, Hkv, D) or (total_k, Hkv, D)
    v : Tensor, (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
    softmax_scale, causal, window_size, softcap, attn_bias, alibi_slopes, sink
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
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(dtype) if t.dtype != torch.float64 else t for t in (q, k, v))
    _arguments.flag("return_lse", return_lse)
    options = _options(
        q,
        softmax_scale=_default_scale(q) if softmax_scale is None else softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        attn_bias=attn_bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
    )
    forward_options = [options[name] for name in _forward.OPTIONS]
    out, lse, _ = _ops.call(torch.ops.flashbwd.attention, q, k, v, *forward_options)
    return (out, lse) if return_lse else out
