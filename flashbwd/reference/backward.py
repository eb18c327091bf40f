"""The reference of ``flashbwd::attention_backward``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.reference.blocks import Band, Chunk, Cut, chunks
from flashbwd.reference.scores import AdditiveTerms, Dropout, accumulation_dtype, bias_tile, operand
from flashbwd.reference.spans import Span, split_spans


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, and its accumulators."""

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
    dbias: _BiasGradient | None
    dsink: Tensor | None  # (H,) in the accumulation dtype

    @property
    def group(self) -> int:
        return self.q.shape[-2] // self.k.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        """Accumulation dtype."""
        return accumulation_dtype(self.q.dtype)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    dlse: Tensor | None,
    rng_seed: Tensor | None,
    rng_offset: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    causal: str,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    rng_layout: str,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
    dsink: Tensor | None,
) -> None:
    """Write the gradients of an attention call into dq, dk, dv, dbias and dsink.

    Arguments are those of :func:`flashbwd.attention_backward`, already checked. The outputs may hold anything before;
    every element is written, zeros outside the logical lengths and where no query sees a key. dq, dk and dv have any
    strides and the inputs' dtype or float32; dbias has the shape of attn_bias; dsink is (H,).

    Dense calls do not wait for the GPU. Packed ones read cu_seqlens on the host, and raise RuntimeError when a CUDA
    graph is being captured. Results are the same bit for bit from run to run on one machine with one thread count.
    """
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dtype = accumulation_dtype(q.dtype)
        for gradient in (dq, dk, dv):
            gradient.zero_()
        spans = split_spans(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        full = (sum(span.batches for span in spans), q.shape[-2], max_seqlen_q, max_seqlen_k)
        call = _Call(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            attn_bias,
            alibi_slopes,
            sink,
            dlse,
            softmax_scale,
            causal,
            (window_left, window_right),
            softcap,
            Dropout.of(q, rng_layout, rng_seed, rng_offset, dropout_p, max_seqlen_q, max_seqlen_k),
            dq,
            dk,
            dv,
            None if dbias is None else _BiasGradient(dbias, full, spans, dtype),
            None if dsink is None else torch.zeros_like(dsink, dtype=dtype),
        )
        for span in spans:
            _span_backward(call, span)
        if call.dbias is not None:
            call.dbias.finish()
        if dsink is not None and call.dsink is not None:
            dsink.copy_(call.dsink)


def _span_backward(call: _Call, span: Span) -> None:
    band = Band.of(span.sq, span.sk, call.causal, *call.window)
    if band.rows() == (0, 0) or span.batches == 0 or call.q.shape[-2] == 0:
        return
    heads_kv = call.k.shape[-2]
    whole = call.dbias is not None and call.dbias.one_chunk
    cut = Cut.of(call.q.device, span.batches, heads_kv, call.group, span.sq, span.sk, whole)
    for chunk in chunks(span.batches, heads_kv, call.group, cut):
        _chunk_backward(call, span, chunk, band, cut)


def _chunk_backward(call: _Call, span: Span, chunk: Chunk, band: Band, cut: Cut) -> None:
    """All queries of a few heads. Rows of a tile are the queries of all heads of a group, one after another."""
    dtype, items = call.dtype, chunk.items
    first_row, last_row = band.rows()
    key0, key1 = band.keys((first_row, last_row))
    seen = slice(key0, key1)
    k_heads = operand(chunk.of_keys(span.keys(call.k))[:, :, seen], dtype, column=None if call.softcap else 1.0)
    v_heads = operand(chunk.of_keys(span.keys(call.v))[:, :, seen], dtype, column=None if call.dropout else 1.0)
    keys = k_heads.flatten(0, 1)  # (items, keys, D + 1); no further column with softcap
    values = v_heads.flatten(0, 1)  # (items, keys, Dv + 1); no further column with dropout
    head_dim, head_dim_v = call.k.shape[-1], call.v.shape[-1]
    dk = keys.new_zeros(items, key1 - key0, head_dim)
    dv = values.new_zeros(items, key1 - key0, head_dim_v)

    size = items * cut.block_q * chunk.group * cut.block_k
    tiles = [keys.new_empty(size) for _ in range(3 if call.softcap else 2)]
    terms = AdditiveTerms.of(span, chunk, band, call.bias, call.slopes, dtype)
    dq_heads = chunk.of_queries(span.queries(call.dq))
    scale = call.scale / call.softcap if call.softcap else call.scale  # of the scores within the product

    for row0 in range(first_row, last_row, cut.block_q):
        rows = (row0, min(row0 + cut.block_q, last_row))
        strip = _Strip.of(call, span, chunk, rows, terms.dead_rows(rows, cut.block_k), scale)
        dq = strip.q.new_zeros(items, strip.q.shape[1], head_dim)
        for cols in band.tiles(rows, cut.block_k):
            here = slice(cols[0] - key0, cols[1] - key0)
            shape = (items, strip.q.shape[1], cols[1] - cols[0])
            by_head = (chunk.batches, chunk.query_heads, rows[1] - rows[0], cols[1] - cols[0])
            p, ds = (tile[: shape[0] * shape[1] * shape[2]].view(shape) for tile in tiles[:2])

            torch.bmm(strip.q, keys[:, here].mT, out=p)
            if call.softcap:
                capped = tiles[2][: p.numel()].view(shape)
                torch.tanh(p, out=capped)
                torch.mul(capped, call.softcap, out=p)
                p.sub_(strip.lse)
            terms.add_(p.view(by_head), rows, cols)
            p.exp_()
            band.zero_hidden_(p.view(by_head), rows, cols)

            torch.bmm(strip.dout, values[:, here].mT, out=ds)
            if call.dropout:
                keep = call.dropout.keep(span, chunk, rows, cols, p.device)
                ds.view(by_head).mul_(keep)
                ds.mul_(call.dropout.scale).sub_(strip.delta)
            ds.mul_(p)
            if call.dropout:
                p.view(by_head).mul_(keep)
                p.mul_(call.dropout.scale)
            if call.dbias is not None:
                call.dbias.add(ds.view(by_head), span, chunk, rows, cols)
            if call.softcap:
                ds.addcmul_(ds, capped.square_(), value=-1.0)

            dv[:, here].baddbmm_(p.mT, strip.dout[..., :head_dim_v])
            dk[:, here].baddbmm_(ds.mT, strip.q[..., :head_dim])
            dq.baddbmm_(ds, keys[:, here, :head_dim])
        dq.mul_(call.scale)
        dq_heads[:, :, rows[0] : rows[1]].copy_(dq.view(chunk.batches, chunk.query_heads, -1, head_dim))

    if call.softcap:
        dk.mul_(call.softcap)  # the queries carried scale / softcap
    chunk.of_keys(span.keys(call.dk))[:, :, seen].copy_(dk.view_as(k_heads[..., :head_dim]))
    chunk.of_keys(span.keys(call.dv))[:, :, seen].copy_(dv.view_as(v_heads[..., :head_dim_v]))


@dataclass(frozen=True)
class _Strip:
    """What a block of queries brings to each of its tiles; rows are (query heads of the group, queries)."""

    q: Tensor  # (items, rows, D + 1), scaled; the column is -lse, absent with softcap
    dout: Tensor  # (items, rows, Dv + 1); the column is -delta, absent with dropout
    lse: Tensor  # (items, rows, 1)
    delta: Tensor  # (items, rows, 1)

    @staticmethod
    def of(call: _Call, span: Span, chunk: Chunk, rows: tuple[int, int], dead: Tensor | None, scale: float) -> _Strip:
        """Also adds the rows' part of dsink. `dead` rows bring zeros, whatever they hold."""
        dtype = call.dtype
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
        if call.sink is not None and call.dsink is not None:
            mine = slice(chunk.head0 * chunk.group, chunk.head0 * chunk.group + chunk.query_heads)
            sink = call.sink[mine].to(dtype)[:, None, None]
            call.dsink[mine].sub_((torch.exp(sink - lse) * delta).sum((0, 2, 3)))

        q = operand(q, dtype, scale, column=None if call.softcap else -lse)
        dout = operand(dout, dtype, column=None if call.dropout else -delta)
        by_row = (chunk.items, -1, 1)
        fold = (chunk.items, chunk.group * (rows[1] - rows[0]))
        return _Strip(
            q.view(*fold, q.shape[-1]), dout.view(*fold, dout.shape[-1]), lse.reshape(by_row), delta.reshape(by_row)
        )


class _BiasGradient:
    """Sums score gradients into the shape of the bias.

    Where each element gets its whole sum from one tile it is written once, in its dtype. Otherwise tiles add up in the
    accumulation dtype. To be of the first kind, a dense bias that only broadcasts over batch or heads has all heads
    worked on in one chunk.
    """

    def __init__(self, dbias: Tensor, full: tuple[int, int, int, int], spans: list[Span], dtype: torch.dtype) -> None:
        self._dbias = dbias
        summed = [size != all_of for size, all_of in zip(dbias.shape, full, strict=True)]
        self.one_chunk = (summed[0] or summed[1]) and not (summed[2] or summed[3]) and len(spans) == 1
        self._once = self.one_chunk or not any(summed)
        dbias.zero_()
        self._total = dbias if self._once or dbias.dtype == dtype else torch.zeros_like(dbias, dtype=dtype)

    def add(self, ds: Tensor, span: Span, chunk: Chunk, rows: tuple[int, int], cols: tuple[int, int]) -> None:
        target = bias_tile(chunk.of_plane(span.plane(self._total)), rows, cols)
        summed = [dim for dim in range(4) if target.shape[dim] == 1 and ds.shape[dim] != 1]
        part = ds.sum(summed, keepdim=True) if summed else ds
        if self._once:
            target.copy_(part)
        else:
            target.add_(part)

    def finish(self) -> None:
        if self._total is not self._dbias:
            self._dbias.copy_(self._total)
