"""Operands of the backward's tiles: a block of queries, blocks of keys with their accumulators, and scratch memory.

Views are cached, because a tile runs ten operators of about 50 us, and creating its views takes a third of that time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashbwd.options import AttentionOptions
from flashbwd.reference.bias_gradient import BiasGradient
from flashbwd.reference.blocks import Task
from flashbwd.reference.scores import LOG2E, Dropout, accumulation_dtype, hidden_keys, operand, sees_nothing
from flashbwd.reference.spans import narrow


@dataclass(frozen=True)
class Call:
    """The arguments of one backward call."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    options: AttentionOptions
    dropout: Dropout | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: BiasGradient | None

    @functools.cached_property
    def narrow(self) -> torch.dtype | None:
        """The dtype of the three products that give dq, dk and dv, or None for the accumulation dtype.

        A CPU with bfloat16 instructions multiplies bfloat16 four times as fast as fp32, but rounds the results. This is
        accurate enough for gradients, which are rounded to bfloat16 anyway, but not for scores.
        """
        gradients = (self.dq.dtype, self.dk.dtype, self.dv.dtype)
        if self.q.device.type != "cpu" or {self.q.dtype, *gradients} != {torch.bfloat16}:
            return None
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else None

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Accumulation dtype."""
        return accumulation_dtype(self.q.dtype)

    @property
    def scale(self) -> float:
        assert self.options.softmax_scale is not None
        return self.options.softmax_scale

    @property
    def scale_in_product(self) -> float:
        """The factor of q in its product with k. The product is the score in units of ln 2, or tanh's argument."""
        return self.scale / self.options.softcap if self.options.softcap else self.scale * LOG2E


class Strip(NamedTuple):
    """A block of queries. Its rows are (query heads of a KV head, queries)."""

    q: Tensor  # (items, rows, D + 1), times scale_in_product; the column is -lse, absent with softcap
    q_factor: Tensor  # (items, rows, D), for dk
    dout: Tensor  # (items, rows, Dv + 1); the column is -delta, absent with dropout
    dout_factor: Tensor  # (items, rows, Dv), for dv
    lse: Tensor  # (items, rows, 1), in units of ln 2
    delta: Tensor  # (items, rows, 1)

    @staticmethod
    def of(call: Call, task: Task, rows: tuple[int, int], dead: Tensor | None) -> Strip:
        """Copy the rows of a task. `dead` rows become zeros, even if they hold NaN."""
        dtype, span, chunk = call.dtype, task.span, task.chunk
        first, count = rows[0], rows[1] - rows[0]

        def heads(tensor: Tensor) -> Tensor:  # (batches, query heads, rows, dim)
            return narrow(chunk.of_queries(span.queries(tensor)), 2, first, count)

        def statistics(tensor: Tensor) -> Tensor:  # (batches, query heads, rows, 1)
            return narrow(chunk.of_plane(span.statistics(tensor)), 2, first, count).unsqueeze(-1)

        q, dout, out = heads(call.q), heads(call.dout), heads(call.out)
        lse = statistics(call.lse)
        blind = sees_nothing(lse)
        # A huge but finite LSE gives p = 0 without an infinity in the matrix product.
        lse = (lse.to(dtype) * LOG2E).masked_fill_(blind, torch.finfo(dtype).max / 4)
        # dp - delta cancels: if delta were summed in fp32, its rounding would be half of the error of ds.
        delta = (dout.to(torch.float64) * out).sum(-1, keepdim=True).to(dtype)
        if call.options.dlse is not None:
            delta = delta.sub_(statistics(call.options.dlse))
        delta = delta.masked_fill_(blind, 0.0)
        if dead is not None:
            q, dout = q.masked_fill(dead, 0.0), dout.masked_fill(dead, 0.0)
            lse, delta = lse.masked_fill(dead, torch.finfo(dtype).max / 4), delta.masked_fill(dead, 0.0)

        q_rows, dout_rows = q, dout
        q = operand(q, dtype, call.scale_in_product, column=None if call.options.softcap else -lse)
        dout = operand(dout, dtype, column=None if call.dropout else -delta)
        if call.narrow is None:
            q_rows, dout_rows = q[..., : q_rows.shape[-1]], dout[..., : dout_rows.shape[-1]]
        parts = (q, q_rows, dout, dout_rows, lse, delta)
        return Strip(*(x.reshape(chunk.items, -1, x.shape[-1]) for x in parts))

    def sink_share(self, sink: Tensor, batches: int) -> Tensor:
        """Sum exp(sink - lse) * delta over batches and the rows that see a key: (query heads,)."""
        lse, delta = (rows.view(batches, len(sink), -1) for rows in (self.lse, self.delta))
        return (torch.exp2(sink.to(lse.dtype)[:, None] * LOG2E - lse) * delta).sum((0, 2))


def write_scaled(total: Tensor, scale: float, target: Tensor) -> None:
    """Write ``scale * total`` to a gradient of another dtype or shape. May change ``total``."""
    total = total.view(target.shape)
    if total.dtype == target.dtype and scale != 1.0:
        torch.mul(total, scale, out=target)
    else:
        target.copy_(total if scale == 1.0 else total.mul_(scale))


class KeyBlock(NamedTuple):
    """A block of keys, and the accumulators of its gradients."""

    k_factor: Tensor  # (items, keys, D), for dq
    k_transposed: Tensor  # (items, D + 1, keys); the row is ones, absent with softcap
    v_transposed: Tensor  # (items, Dv + 1, keys); the row is ones, absent with dropout
    dk: Tensor  # (items, keys, D)
    dv: Tensor  # (items, keys, Dv)


class KeySide:
    """The keys and values that a task sees, and their gradients."""

    def __init__(self, call: Call, task: Task) -> None:
        self._call, self._task = call, task
        self._first, self._last = task.band.keys(task.band.rows)
        k, v = self._seen(call.k), self._seen(call.v)
        hidden = hidden_keys(task.span, call.options)
        if hidden is not None:  # NaN there would reach dq
            hidden = narrow(task.chunk.of_plane(hidden), 3, self._first, self._last - self._first).mT
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        self._k = operand(k, call.dtype, column=None if call.options.softcap else 1.0).flatten(0, 1)
        self._v = operand(v, call.dtype, column=None if call.dropout else 1.0).flatten(0, 1)
        self._k_factor = self._k[..., : k.shape[-1]] if call.narrow is None else k.contiguous().flatten(0, 1)
        self._dk = k.new_zeros(k.shape, dtype=call.dtype).flatten(0, 1)
        self._dv = v.new_zeros(v.shape, dtype=call.dtype).flatten(0, 1)
        self._blocks: dict[tuple[int, int], KeyBlock] = {}

    def _seen(self, tensor: Tensor) -> Tensor:
        """Return the keys or values that the task sees, (batches, KV heads, keys, dim)."""
        keys = self._task.chunk.of_keys(self._task.span.keys(tensor))
        return narrow(keys, 2, self._first, self._last - self._first)

    def block(self, cols: tuple[int, int]) -> KeyBlock:
        if cols not in self._blocks:
            first, count = cols[0] - self._first, cols[1] - cols[0]
            of_all = (self._k_factor, self._k, self._v, self._dk, self._dv)
            k_factor, k, v, dk, dv = (narrow(x, 1, first, count) for x in of_all)
            self._blocks[cols] = KeyBlock(k_factor, k.mT, v.mT, dk, dv)
        return self._blocks[cols]

    def add(self, other: KeySide) -> None:
        """Add the gradients of the same keys from other queries."""
        self._dk.add_(other._dk)
        self._dv.add_(other._dv)

    def write(self) -> None:
        """Scale dk and write dk and dv to the outputs."""
        # Without narrow products, q already had scale_in_product as a factor.
        scale = self._call.scale if self._call.narrow is not None else self._call.options.softcap or 1.0 / LOG2E
        write_scaled(self._dk, scale, self._seen(self._call.dk))
        write_scaled(self._dv, 1.0, self._seen(self._call.dv))


class Tile(NamedTuple):
    """Scratch memory for one tile shape, (items, rows, keys)."""

    p: Tensor
    p_by_head: Tensor  # (batches, query heads, queries, keys)
    ds: Tensor
    ds_by_head: Tensor
    capped: Tensor  # tanh; empty without softcap
    p_factor: Tensor  # p itself, or a copy in the narrow dtype
    ds_factor: Tensor
    p_factor_transposed: Tensor
    ds_factor_transposed: Tensor
    products: tuple[Tensor, Tensor, Tensor] | None  # products for dv, dk and dq in the narrow dtype

    def add_products(self, strip: Strip, keys: KeyBlock, dq: Tensor) -> None:
        """Add the contributions of a finished tile to dv, dk and dq."""
        if self.products is None:
            keys.dv.baddbmm_(self.p_factor_transposed, strip.dout_factor)
            keys.dk.baddbmm_(self.ds_factor_transposed, strip.q_factor)
            dq.baddbmm_(self.ds_factor, keys.k_factor)
            return
        dv_part, dk_part, dq_part = self.products
        self.p_factor.copy_(self.p)
        self.ds_factor.copy_(self.ds)
        keys.dv.add_(torch.bmm(self.p_factor_transposed, strip.dout_factor, out=dv_part))
        keys.dk.add_(torch.bmm(self.ds_factor_transposed, strip.q_factor, out=dk_part))
        dq.add_(torch.bmm(self.ds_factor, keys.k_factor, out=dq_part))


class Scratch:
    """Scratch memory that tiles of all shapes of a task share."""

    def __init__(self, call: Call, task: Task) -> None:
        self._call, self._chunk = call, task.chunk
        size = task.chunk.items * task.chunk.group * task.cut.block_q * task.cut.block_k
        self._buffers = [call.q.new_empty(size, dtype=call.dtype) for _ in range(3 if call.options.softcap else 2)]
        self._narrow = [] if call.narrow is None else [call.q.new_empty(size, dtype=call.narrow) for _ in range(2)]
        self._tiles: dict[tuple[int, int], Tile] = {}

    def tile(self, queries: int, keys: int) -> Tile:
        if (queries, keys) not in self._tiles:
            self._tiles[queries, keys] = self._make(queries, keys)
        return self._tiles[queries, keys]

    def _make(self, queries: int, keys: int) -> Tile:
        items, rows = self._chunk.items, self._chunk.group * queries
        by_head = (self._chunk.batches, self._chunk.query_heads, queries, keys)
        p, ds, *capped = (buffer[: items * rows * keys].view(items, rows, keys) for buffer in self._buffers)
        p_factor, ds_factor, products = p, ds, None
        if self._narrow:
            p_factor, ds_factor = (buffer[: p.numel()].view(p.shape) for buffer in self._narrow)
            head_dim, head_dim_v = self._call.k.shape[-1], self._call.v.shape[-1]
            shapes = ((items, keys, head_dim_v), (items, keys, head_dim), (items, rows, head_dim))
            dv_part, dk_part, dq_part = (p_factor.new_empty(shape) for shape in shapes)
            products = (dv_part, dk_part, dq_part)
        return Tile(
            p,
            p.view(by_head),
            ds,
            ds.view(by_head),
            capped[0] if capped else p[:0],
            p_factor,
            ds_factor,
            p_factor.mT,
            ds_factor.mT,
            products,
        )
