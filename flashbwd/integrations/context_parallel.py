"""Attention over rows that are split over devices, for packed documents and for batches of sequences.

Each device keeps its queries and receives the keys and values that they see, in one all-to-all per group of KV heads.
The exchange of the next group runs while the device computes the current one. The backward exchanges keys and values
again. Each device then sends the gradients of received rows back to the device that holds the rows, which adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashbwd import _arguments
from flashbwd._autograd import differentiable_once
from flashbwd.attention import attention, attention_backward
from flashbwd.integrations.context_plan import Call, Plan, Range, plan
from flashbwd.integrations.context_split import ContextSplit, RowSplit, check_rows

KV_HEAD_GROUPS = 2  # that are exchanged one after another; more make calls too small (docs/lab/scale.md)


@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: ContextSplit,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute differentiable self-attention of rows that are split over devices.

    :func:`flashbwd.attention` on the whole sequence, with the mask of ``split``, gives the same output and gradients;
    each device gets its own rows of them. It receives only the keys and values that its queries see, so short documents
    and narrow windows need little communication. Under ``torch.autocast`` q, k and v are cast as in
    :func:`flashbwd.attention`. ``torch.compile`` calls this function without compiling it.

    Forward and backward exchange rows. Every device must therefore call this function, with equal shapes except for the
    rows, the same dtype and options, in the same order, and run the backward, even if its own loss is 0. Otherwise the
    others wait for it.

    Parameters
    ----------
    q : Tensor, (rows, H, D) for packed documents, or (B, rows, H, D)
        This device's rows, in the order of ``split.take``.
    k : Tensor, (rows, Hkv, D) or (B, rows, Hkv, D)
    v : Tensor, (rows, Hkv, Dv) or (B, rows, Hkv, Dv)
    split : ContextSplit
        From :func:`split_context`.
    softmax_scale, softcap
        As for :func:`flashbwd.attention_backward`.
    deterministic : bool
        Require gradients that are bitwise identical from run to run. Implied by
        ``torch.use_deterministic_algorithms(True)``.
    return_lse : bool
        Also return the natural-log LSE of this device's rows: float32 (float64 for float64 inputs).

    Returns
    -------
    out : Tensor, (rows, H, Dv) or (B, rows, H, Dv)
    softmax_lse : Tensor, (H, rows) or (B, H, rows)
        Only with ``return_lse``. Differentiable.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected. The function raises
        before it sends anything.
    """
    if not isinstance(split, ContextSplit):
        raise ValueError(f"flashbwd: split is {_arguments.came(split)}, expected a ContextSplit from split_context")
    _arguments.flag("return_lse", return_lse)
    tensors = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        dims = 3 if split.packed else 4
        if _arguments.tensor(name, tensor).dim() != dims:
            shape = "(rows, heads, head_dim)" if split.packed else "(batch, rows, heads, head_dim)"
            raise ValueError(f"flashbwd: {name} has {tensor.dim()} dimensions, expected {dims}: {shape}")
        check_rows(name, tensor, dims - 3, split.length())
        if tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type):
            dtype = torch.get_autocast_dtype(tensor.device.type)
            tensor = tensor.to(dtype) if tensor.dtype != torch.float64 else tensor
        tensors.append(tensor.unsqueeze(0) if split.packed else tensor)
    q, k, v = tensors
    options: dict[str, Any] = {
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "softcap": softcap,
        "deterministic": _arguments.flag("deterministic", deterministic)
        or torch.are_deterministic_algorithms_enabled(),
    }
    # Check all arguments before sending anything: after a later error the other devices would wait forever.
    empty = [x[:, :0].detach() for x in (q, k, v)]
    attention(empty[0], empty[1], empty[2], **options)
    out, lse = _ContextParallel.apply(q, k, v, split, options)
    if split.packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, split: ContextSplit, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        work = plan(split.bounds, split.window, split.chunks, split.rank)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=statistics)
        for heads, kv in _received(k, v, q.shape[2], split, work):
            for call in work.calls:
                rows = slice(*call.rows)
                key, value = kv[:, slice(*call.key_rows)].split([k.shape[-1], v.shape[-1]], dim=-1)
                out[:, rows, heads], lse[:, heads, rows] = _forward(call, q[:, rows, heads], key, value, options)
        ctx.split, ctx.options = split, options
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("context_parallel_attention_backward")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = saved
        split, options = ctx.split, ctx.options
        if dout is None:
            dout = torch.zeros_like(out)  # the other devices need this one in the exchange
        work = plan(split.bounds, split.window, split.chunks, split.rank)
        exact = accumulator_dtype(q)
        dq = torch.empty_like(q)
        dkv = torch.zeros(*k.shape[:-1], k.shape[-1] + v.shape[-1], dtype=exact, device=k.device)
        returning: list[tuple[slice, Exchange]] = []
        for heads, kv in _received(k, v, q.shape[2], split, work):
            of_group = q.shape[2] // k.shape[2]
            kv_heads = slice(heads.start // of_group, heads.stop // of_group)
            grads = torch.zeros(kv.shape, dtype=exact, device=kv.device)
            for call in work.calls:
                rows = slice(*call.rows)
                of_keys = slice(*call.key_rows)
                key, value = kv[:, of_keys].split([k.shape[-1], v.shape[-1]], dim=-1)
                of_rows = {name: x[:, rows, heads] for name, x in (("dout", dout), ("q", q), ("out", out), ("dq", dq))}
                statistics = {
                    "softmax_lse": lse[:, heads, rows],
                    "dlse": None if dlse is None else dlse[:, heads, rows],
                }
                grads[:, of_keys] += _backward(call, key, value, of_rows | statistics, options)
            returning.append((kv_heads, send_back(grads, split, work)))
        for kv_heads, exchange in returning:
            add_returned(dkv[:, :, kv_heads], exchange.wait(), work)
        dk, dv = dkv.split([k.shape[-1], v.shape[-1]], dim=-1)
        return dq, torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv), None, None


def accumulator_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


# ---- one call ----


def _lengths(call: Call, device: torch.device) -> dict[str, Any]:
    """Return the arguments that describe packed documents; empty for a single document."""
    if len(call.queries) == 1:
        return {}
    return {
        "cu_seqlens_q": _cumulative(call.queries, device),
        "cu_seqlens_k": _cumulative(call.keys, device),
        "max_seqlen_q": max(call.queries),
        "max_seqlen_k": max(call.keys),
    }


@functools.lru_cache(maxsize=128)  # all layers of a model use the same lengths
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    host = torch.tensor((0, *lengths), dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _mask(call: Call) -> dict[str, Any]:
    return {"causal": call.causal, "window_size": call.window}


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output (B, rows, H, Dv) and the LSE (B, H, rows) of one call."""
    lengths = _lengths(call, q.device)
    if lengths:
        q, k, v = (x[0] for x in (q, k, v))
        out, lse = attention(q, k, v, **lengths, **_mask(call), **options, return_lse=True)
        return out.unsqueeze(0), lse.unsqueeze(0)
    before = k.shape[1] - q.shape[1]
    if before == 0 or call.window != (-1, 0):
        return attention(q, k, v, **_mask(call), **options, return_lse=True)
    # PyTorch's fastest forwards support a causal mask only for as many keys as queries. A second call without a mask
    # therefore computes the keys before the rows.
    whole = attention(q, k[:, :before], v[:, :before], **options, return_lse=True)
    square = attention(q, k[:, before:], v[:, before:], causal=True, **options, return_lse=True)
    return _merged(whole, square)


def _merged(some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the outputs and LSEs of attention over two sets of keys; every row must see a key of each set."""
    lse = torch.logaddexp(some[1], others[1])
    shares = [torch.exp(part[1] - lse).transpose(1, 2).unsqueeze(-1) for part in (some, others)]
    return (some[0] * shares[0] + others[0] * shares[1]).to(some[0].dtype), lse


def _backward(
    call: Call, k: Tensor, v: Tensor, of_rows: Mapping[str, Tensor | None], options: dict[str, Any]
) -> Tensor:
    """Write dq of one call, and return its dk and dv in one tensor, (B, keys, Hkv, D + Dv).

    ``of_rows`` holds the rows of dout, q, out, softmax_lse, dlse and dq, by the names of ``attention_backward``.
    """
    dkv = torch.empty(*k.shape[:-1], k.shape[-1] + v.shape[-1], dtype=accumulator_dtype(k), device=k.device)
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], dim=-1)
    tensors: dict[str, Any] = {**of_rows, "k": k, "v": v, "dk": dk, "dv": dv}
    lengths = _lengths(call, k.device)
    if lengths:
        tensors = {name: None if x is None else x[0] for name, x in tensors.items()}
    attention_backward(**tensors, **lengths, **_mask(call), **options)
    return dkv


# ---- the exchange ----


@dataclass(frozen=True)
class Exchange:
    """A running all-to-all of rows. It keeps the sent tensor alive until the rows have arrived."""

    sent: Tensor
    arriving: Tensor
    work: Any

    @staticmethod
    def start(sent: Tensor, arrivals: Sequence[int], leaving: Sequence[int], split: RowSplit) -> Exchange:
        arriving = sent.new_empty(sum(arrivals), *sent.shape[1:])
        sizes = (list(arrivals), list(leaving))
        work = dist.all_to_all_single(arriving, sent, *sizes, group=split.mesh.get_group(), async_op=True)
        return Exchange(sent, arriving, work)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.arriving


def _received(k: Tensor, v: Tensor, heads: int, split: ContextSplit, work: Plan) -> Iterator[tuple[slice, Tensor]]:
    """Yield, for each group of KV heads, its query heads, and the keys and values that this device needs.

    Keys and values are in one tensor, (B, needed rows, KV heads, D + Dv). The exchange of the next group starts before
    this function yields the current one.
    """
    heads_kv = k.shape[2]
    count = min(KV_HEAD_GROUPS, heads_kv) if len(split.chunks) > 1 else 1
    cuts = [heads_kv * i // count for i in range(count + 1)]

    def start(group: int) -> Exchange:
        kv = torch.cat([x[:, :, cuts[group] : cuts[group + 1]] for x in (k, v)], dim=-1).transpose(0, 1)
        sent = rows_of(kv, [rows for theirs in work.sent for rows in theirs])
        return Exchange.start(sent, work.counts, departures(work), split)

    exchange = start(0)
    for group in range(count):
        arriving = exchange
        if group + 1 < count:
            exchange = start(group + 1)
        kv = rows_of(arriving.wait(), work.received).transpose(0, 1)
        of_group = heads // heads_kv
        yield slice(cuts[group] * of_group, cuts[group + 1] * of_group), kv


def rows_of(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the rows in ``ranges``, one range after another, as a contiguous tensor."""
    return torch.cat([tensor[start:stop] for start, stop in ranges] or [tensor[:0]])


def departures(work: Plan) -> list[int]:
    return [sum(stop - start for start, stop in theirs) for theirs in work.sent]


def send_back(grads: Tensor, split: RowSplit, work: Plan) -> Exchange:
    """Send the gradients of received rows (B, needed rows, ...) to the devices that hold these rows."""
    rows_first = grads.transpose(0, 1)
    sent = rows_first.new_empty(rows_first.shape)
    first = 0
    for start, stop in work.received:
        sent[start:stop] = rows_first[first : first + stop - start]
        first += stop - start
    return Exchange.start(sent, departures(work), work.counts, split)


def add_returned(grads: Tensor, returned: Tensor, work: Plan) -> None:
    """Add what every device returned to the gradients of this device's rows, in the order of the devices."""
    first = 0
    for theirs in work.sent:
        for start, stop in theirs:
            grads[:, start:stop] += returned[first : first + stop - start].transpose(0, 1)
            first += stop - start
