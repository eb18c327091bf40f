"""Attention: its backward, the plan of a backward, and a differentiable form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd import _arguments, _forward, _ops  # noqa: F401  (_forward defines torch.ops.flashbwd.attention)

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
    """Gradients of an attention call; ``None`` where not asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


class RngState(NamedTuple):
    """Where a forward's dropout mask comes from.

    Attributes
    ----------
    seed, offset : int or Tensor
        Philox seed and offset of the forward; tensors have one element, int64 or uint64, on the CPU or beside q.
    layout : {"flash", "efficient32", "efficient64"}
        Which forward numbered the elements: FlashAttention-2 (PyTorch's flash too), or PyTorch's memory-efficient
        kernel in its 32-bit (torch <= 2.11) or 64-bit numbering. docs/numerics.md defines all three.
    """

    seed: int | Tensor
    offset: int | Tensor
    layout: str


@dataclass(frozen=True)
class Plan:
    """How an attention backward runs on a device.

    Attributes
    ----------
    backend : str
        ``"sm90"``, ``"sm80"`` or ``"reference"``.
    tile : tuple of int or None
        (queries, keys) a thread block works on; ``None`` for the reference.
    schedule : str
        How the work is laid out, in words.
    workspace_bytes : int
        Least size of a ``workspace`` tensor given to :func:`attention_backward`.
    deterministic : bool
        Whether two runs on GPUs of one model and SM count agree bitwise.
    cooperative : bool
        Whether the kernel is launched cooperatively, with all of its thread blocks resident at once. A context with
        fewer SMs than the device (a green context) refuses such a launch. Only deterministic plans ask for it.
    sm_count : int
        Multiprocessors of the device that was planned for; 0 on a CPU.
    splits : int
        Thread blocks that share the work on one block of keys, where any do.
    accumulator_bytes, nsplits : int
        Size of the fp32 dq accumulator in the workspace, and its slots (dense modes).
    reasons : Mapping[str, str]
        For each backend that was not chosen, why.
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
    nsplits: int
    reasons: Mapping[str, str]


_backend = "auto"


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend within a ``with`` block; a call that it cannot run raises with the reason.

    Parameters
    ----------
    name : {"auto", "sm90", "sm80", "reference"}
        Holds for the whole process, not for one thread. :func:`attention` keeps, for its backward, the backend that
        was in force when its forward ran.
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
    torch.ops.flashbwd.force_backend(name)  # for the overrides, which are C++


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
    """Sink logits as the operators take them: fp32, or fp64 for fp64 inputs."""
    if sink is None:
        return None
    if not _arguments.tensor("sink", sink).is_floating_point():
        dtype = str(sink.dtype).removeprefix("torch.")
        raise ValueError(f"flashbwd: sink is {dtype}, expected a floating-point dtype")
    return sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _default_scale(q: Tensor) -> float:
    """1 for a q without a head dimension, which the operator refuses."""
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def _deterministic(asked: bool) -> bool:
    return _arguments.flag("deterministic", asked) or torch.are_deterministic_algorithms_enabled()


def _options(
    q: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool | str,
    window_size: tuple[int, int],
    softcap: float,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    dlse: Tensor | None,
    dropout_p: float,
    rng_state: RngState | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    deterministic: bool,
) -> dict[str, Any]:
    """The public arguments as the operators name them."""
    _arguments.tensor("q", q)
    seed = offset = None
    layout = ""
    if rng_state is not None and _arguments.number("dropout_p", dropout_p) != 0.0:
        seed, offset, layout = _arguments.rng_words(rng_state)
    left, right = _window(window_size)
    return {
        "attn_bias": attn_bias,
        "alibi_slopes": alibi_slopes,
        "sink": _sink_logits(q, sink),
        "dlse": dlse,
        "rng_seed": seed,
        "rng_offset": offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "softmax_scale": softmax_scale,
        "causal": _causal_name(causal),
        "window_left": left,
        "window_right": right,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "rng_layout": layout,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "deterministic": _deterministic(deterministic),
        "backend": _backend,
        "allow_tf32": q.dtype == torch.float32 and _ops.tf32_allowed(),
    }


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
    """Gradients of softmax attention with respect to its inputs.

    With ``scale = softmax_scale``, for each batch and head, ``s = scale * q @ k.T``, optionally capped
    (``softcap * tanh(s / softcap)``), plus bias and ALiBi, masked; ``p = exp(s - lse)``; ``z`` the dropout factor::

        delta = rowsum(dout * out) - dlse
        ds    = p * ((dout @ v.T) * z - delta)
        dv    = (p * z).T @ dout
        dbias = ds
        dsink = -sum over batch and rows of exp(sink - lse) * delta
        dq, dk = scale * c * ds @ k, scale * (c * ds).T @ q     # c = 1 - tanh(s / softcap)**2 with softcap, else 1

    (Dao et al., "FlashAttention", 2022, section B.2, extended by bias, cap, sink and LSE gradient.)

    Parameters
    ----------
    dout, out : Tensor, (B, Sq, H, Dv) or packed (total_q, H, Dv)
        Gradient of the output, and the output of the forward.
    q : Tensor, (B, Sq, H, D) or (total_q, H, D)
        float16, bfloat16, float32 or float64; k, v, out and dout have the same dtype. The last dimension is
        contiguous (dout's need not be), every other stride is free.
    k : Tensor, (B, Sk, Hkv, D) or (total_k, Hkv, D)
        ``H % Hkv == 0``: query head h reads KV head ``h // (H // Hkv)``.
    v : Tensor, (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
    softmax_lse : Tensor, float32 (float64 for float64 inputs)
        Natural-log LSE that the forward gave: (B, H, Sq), (B, H, Sq, 1), (B, H, roundup(Sq, 32)); packed (H, total_q)
        or (B, H, roundup(max_seqlen_q, 32)). Never recomputed.
    softmax_scale : float, optional
        Default ``D ** -0.5``.
    causal : bool or "top_left"
        True aligns the diagonal with the last query and key (FlashAttention >= 2.1); ``"top_left"`` with the first
        (``is_causal`` of PyTorch).
    window_size : (int, int)
        Keys visible left and right of the diagonal; -1 is unbounded. Causal forces right to 0.
    softcap : float
        0 is none.
    attn_bias : Tensor, optional
        Each dimension is that of (B, H, Sq, Sk), or of (B, H, max_seqlen_q, max_seqlen_k) when packed, or 1; q's dtype
        or float32. Its gradient is computed with its shape and dtype.
    alibi_slopes : Tensor, (H,) or (B, H), float32, optional
        Adds ``-slope * |i + off - j|``, ``off = Sk - Sq`` (0 for ``"top_left"``). No gradient.
    sink : Tensor, (H,), optional
        Raw logits that are already inside ``softmax_lse``; asks for dsink. Pass it in one call only when the keys are
        split over several calls.
    dlse : Tensor, optional
        Gradient of ``softmax_lse``, in one of its shapes.
    dropout_p : float
        In [0, 1).
    rng_state : RngState, optional
        The forward's Philox state; the mask is drawn again bit for bit.
    cu_seqlens_q, cu_seqlens_k : Tensor, (B + 1,), int32, optional
        First rows of packed sequences. ``max_seqlen_q`` and ``max_seqlen_k`` are needed with them.
    seqused_q, seqused_k : Tensor, (B,), int32, optional
        Logical lengths; rows beyond get zero gradients.
    deterministic : bool
        Bitwise equal results run to run, or an error; ``torch.use_deterministic_algorithms(True)`` implies it.
    workspace : Tensor, (bytes,), uint8, optional
        Scratch of at least ``plan_attention_backward(...).workspace_bytes``, 256-byte aligned; allocated by default.
    dq, dk, dv : Tensor, optional
        Where to write; the inputs' dtype or float32. May hold anything before.

    Returns
    -------
    AttentionGrads
        dq, dk, dv with the strides of ``empty_like`` of their inputs; dbias and dsink where asked for.

    Raises
    ------
    ValueError
        For bad arguments, before anything runs; the message names the argument, what was expected and what came.
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
    if workspace is None and dq is None and dk is None and dv is None:
        dq, dk, dv, dbias, dsink = _ops.call(
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
    """What :func:`attention_backward` would do with the same arguments, without doing it.

    Parameters
    ----------
    dout, q, k, v, out, softmax_lse, workspace, dq, dk, dv, **options
        As for :func:`attention_backward`. Meta tensors do. With ``cu_seqlens`` on the CPU the sizes are exact; from a
        GPU they are upper bounds, as nothing is read back.
    device : torch.device or str, optional
        What meta tensors are planned for: the current CUDA device if there is one, else the CPU.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        As :func:`attention_backward`, and for a forced backend that cannot run the call.
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
    """Differentiable softmax attention: the best forward PyTorch has for the case, then this library's backward.

    Under ``torch.autocast`` q, k and v are cast as for PyTorch's own attention. Gradients flow to q, k, v, attn_bias,
    sink, and through the returned LSE. Differentiating twice raises.

    Parameters
    ----------
    q : Tensor, (B, Sq, H, D) or packed (total_q, H, D)
    k : Tensor, (B, Sk, Hkv, D) or (total_k, Hkv, D)
    v : Tensor, (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
    softmax_scale, causal, window_size, softcap, attn_bias, alibi_slopes, sink
        As for :func:`attention_backward`. sink adds one logit a head to the softmax, and no value.
    dropout_p : float
        Probability of dropping an attention weight, in [0, 1), drawn from PyTorch's generator of q's device.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        For packed sequences.
    deterministic : bool
        Of the backward; ``torch.use_deterministic_algorithms(True)`` implies it.
    return_lse : bool
        Return also the natural-log LSE, float32 (float64 for float64 inputs), (B, H, Sq) or (H, total_q).

    Returns
    -------
    Tensor or (Tensor, Tensor)
        out, (B, Sq, H, Dv) or (total_q, H, Dv) contiguous; a row that sees no key is 0 (its LSE -inf or +inf).

    Raises
    ------
    ValueError
        For bad arguments, with a message that names the argument, what was expected and what came.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _arguments.tensor(name, tensor)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(dtype) if t.dtype != torch.float64 else t for t in (q, k, v))
    left, right = _window(window_size)
    _arguments.flag("return_lse", return_lse)
    out, lse, _ = _ops.call(
        torch.ops.flashbwd.attention,
        q,
        k,
        v,
        attn_bias,
        alibi_slopes,
        _sink_logits(q, sink),
        cu_seqlens_q,
        cu_seqlens_k,
        _default_scale(q) if softmax_scale is None else softmax_scale,
        _causal_name(causal),
        left,
        right,
        softcap,
        dropout_p,
        max_seqlen_q,
        max_seqlen_k,
        _deterministic(deterministic),
        _backend,
    )
    return (out, lse) if return_lse else out
