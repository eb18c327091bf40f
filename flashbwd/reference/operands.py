"""What the tiles of a backward work on: a block of queries, blocks of keys with their accumulators, scratch.

Views are made once and kept: a tile is ten operators of some 50 us, of which making views anew would take a third.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.reference.bias_gradient import BiasGradient
from flashbwd.reference.blocks import Piece
from flashbwd.reference.scores import Dropout, accumulation_dtype, operand


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    dlse: Tensor | None
    scale: float
    causal: str
    window: tuple[int, int]
    softcap: float
    dropout: Dropout | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: BiasGradient | None

    @property
    def dtype(self) -> torch.dtype:
        """Accumulation dtype."""
        return accumulation_dtype(self.q.dtype)

    @property
    def scale_in_product(self) -> float:
        """What the queries carry into their products with the keys."""
        return self.scale / self.softcap if self.softcap else self.scale


@dataclass(frozen=True)
class Strip:
    """A block of queries; rows are (query heads of the group, queries)."""

    q: Tensor  # (items, rows, D + 1), scaled; the column is -lse, absent with softcap
    q_values: Tensor  # (items, rows, D)
    dout: Tensor  # (items, rows, Dv + 1); the column is -delta, absent with dropout
    dout_values: Tensor  # (items, rows, Dv)
    lse: Tensor  # (items, rows, 1)
    delta: Tensor  # (items, rows, 1)

    @staticmethod
    def of(call: Call, piece: Piece, rows: tuple[int, int], dead: Tensor | None) -> Strip:
        """Copies of the rows; `dead` ones bring zeros, whatever they hold."""
        dtype, span, chunk = call.dtype, piece.span, piece.chunk
        here = slice(*rows)

        def heads(tensor: Tensor) -> Tensor:  # (batches, query heads, rows, dim)
            return chunk.of_queries(span.queries(tensor))[:, :, here]

        def statistics(tensor: Tensor) -> Tensor:  # (batches, query heads, rows, 1)
            return chunk.of_plane(span.statistics(tensor))[:, :, here, None].to(dtype)

        q, dout, out = heads(call.q), heads(call.dout), heads(call.out)
        lse = statistics(call.lse)
        # A row without a visible key has an infinite LSE; a finite one as large keeps infinities out of the product.
        lse = lse.masked_fill(lse.isinf(), torch.finfo(dtype).max / 4)
        # dp - delta cancels: in fp32 the rounding of this sum would be half of the error of ds.
        delta = (dout.to(torch.float64) * out).sum(-1, keepdim=True).to(dtype)
        if call.dlse is not None:
            delta = delta.sub_(statistics(call.dlse))
        if dead is not None:
            q, dout = q.masked_fill(dead, 0.0), dout.masked_fill(dead, 0.0)
            lse, delta = lse.masked_fill(dead, torch.finfo(dtype).max / 4), delta.masked_fill(dead, 0.0)

        head_dim, head_dim_v = q.shape[-1], dout.shape[-1]
        q = operand(q, dtype, call.scale_in_product, column=None if call.softcap else -lse)
        dout = operand(dout, dtype, column=None if call.dropout else -delta)
        q, dout, lse, delta = (x.reshape(chunk.items, -1, x.shape[-1]) for x in (q, dout, lse, delta))
        return Strip(q, q[..., :head_dim], dout, dout[..., :head_dim_v], lse, delta)

    def sink_share(self, sink: Tensor, batches: int) -> Tensor:
        """(query heads,): sum over batches and rows of exp(sink - lse) * delta."""
        lse, delta = (rows.view(batches, len(sink), -1) for rows in (self.lse, self.delta))
        return (torch.exp(sink.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2))


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys, and where its gradients add up."""

    k: Tensor  # (items, keys, D)
    k_transposed: Tensor  # (items, D + 1, keys); the row is ones, absent with softcap
    v_transposed: Tensor  # (items, Dv + 1, keys); the row is ones, absent with dropout
    dk: Tensor  # (items, keys, D)
    dv: Tensor  # (items, keys, Dv)


class KeySide:
    """The keys and values that a piece sees, and their gradients."""

    def __init__(self, call: Call, piece: Piece) -> None:
        self._call, self._piece = call, piece
        self._first, self._last = piece.band.keys(piece.band.rows())
        k, v = self._seen(call.k), self._seen(call.v)
        self._k = operand(k, call.dtype, column=None if call.softcap else 1.0).flatten(0, 1)
        self._v = operand(v, call.dtype, column=None if call.dropout else 1.0).flatten(0, 1)
        self._dk = k.new_zeros(k.shape, dtype=call.dtype).flatten(0, 1)
        self._dv = v.new_zeros(v.shape, dtype=call.dtype).flatten(0, 1)
        self._blocks: dict[tuple[int, int], KeyBlock] = {}

    def _seen(self, tensor: Tensor) -> Tensor:
        """(batches, KV heads, keys, dim)."""
        return self._piece.chunk.of_keys(self._piece.span.keys(tensor))[:, :, self._first : self._last]

    def block(self, cols: tuple[int, int]) -> KeyBlock:
        if cols not in self._blocks:
            here = slice(cols[0] - self._first, cols[1] - self._first)
            k, v, dk, dv = (x[:, here] for x in (self._k, self._v, self._dk, self._dv))
            self._blocks[cols] = KeyBlock(k[..., : dk.shape[-1]], k.mT, v.mT, dk, dv)
        return self._blocks[cols]

    def write(self) -> None:
        """Hand the gradients over."""
        if self._call.softcap:
            self._dk.mul_(self._call.softcap)  # the queries carried scale / softcap
        for total, gradient in ((self._dk, self._call.dk), (self._dv, self._call.dv)):
            target = self._seen(gradient)
            target.copy_(total.view(target.shape))


@dataclass(frozen=True)
class Tile:
    """Scratch of one shape, (items, rows, keys)."""

    p: Tensor
    p_transposed: Tensor
    p_by_head: Tensor  # (batches, query heads, queries, keys)
    ds: Tensor
    ds_transposed: Tensor
    ds_by_head: Tensor
    capped: Tensor  # tanh; empty without softcap


class Scratch:
    """The tiles of a piece, all in the same memory."""

    def __init__(self, call: Call, piece: Piece) -> None:
        self._chunk = piece.chunk
        size = piece.chunk.items * piece.chunk.group * piece.cut.block_q * piece.cut.block_k
        self._buffers = [call.q.new_empty(size, dtype=call.dtype) for _ in range(3 if call.softcap else 2)]
        self._tiles: dict[tuple[int, int], Tile] = {}

    def tile(self, queries: int, keys: int) -> Tile:
        if (queries, keys) not in self._tiles:
            shape = (self._chunk.items, self._chunk.group * queries, keys)
            by_head = (self._chunk.batches, self._chunk.query_heads, queries, keys)
            size = shape[0] * shape[1] * shape[2]
            p, ds, *capped = (buffer[:size].view(shape) for buffer in self._buffers)
            self._tiles[queries, keys] = Tile(
                p, p.mT, p.view(by_head), ds, ds.mT, ds.view(by_head), capped[0] if capped else p[:0]
            )
        return self._tiles[queries, keys]
