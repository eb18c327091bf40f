"""Reference implementation of ``flashbwd::attention_backward``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashbwd.options import AttentionOptions
from flashbwd.reference.bias_gradient import BiasGradient
from flashbwd.reference.blocks import Task, split_into_tasks
from flashbwd.reference.operands import Call, KeySide, Scratch, Strip, write_scaled
from flashbwd.reference.scores import LOG2E, AdditiveTerms, Dropout, accumulation_dtype, without_autocast
from flashbwd.reference.sink import keyless_sink_gradient
from flashbwd.reference.spans import narrow, split_spans
from flashbwd.reference.workers import run_all


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    options: AttentionOptions,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
    dsink: Tensor | None,
) -> None:
    """Write the gradients of an attention call into dq, dk, dv, dbias and dsink.

    The caller has checked the arguments; ``options`` holds the scale and the lengths. The function writes every element
    of the outputs: rows beyond ``seqused`` and keys that no query sees get zeros. dq, dk and dv have any strides, and
    the inputs' dtype or float32. dbias has the shape of attn_bias. dsink is (H,).

    Dense calls without ``seqused`` do not synchronise with the GPU. Calls with ``cu_seqlens`` or ``seqused`` read the
    lengths on the host, and raise RuntimeError while a CUDA graph is captured. Results are bitwise identical from run
    to run on one machine with one thread count.
    """
    with torch.no_grad(), without_autocast(q.device):
        dtype = accumulation_dtype(q.dtype)
        spans = split_spans(q, k, options)
        max_seqlen_q, max_seqlen_k = options.max_seqlen_q, options.max_seqlen_k
        assert max_seqlen_q is not None and max_seqlen_k is not None
        full = (sum(span.batches for span in spans), q.shape[-2], max_seqlen_q, max_seqlen_k)
        call = Call(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            options,
            Dropout.of(q, options, max_seqlen_q, max_seqlen_k),
            dq,
            dk,
            dv,
            None if dbias is None else BiasGradient(dbias, full, spans, dtype),
        )
        tasks, threads = split_into_tasks(
            spans,
            q,
            k,
            options.causal,
            options.window,
            shared_sums=call.dbias is not None and call.dbias.shared,
            one_chunk=call.dbias is not None and call.dbias.one_chunk,
        )
        if not _cover(tasks, q, k):
            for gradient in (dq, dk, dv):
                gradient.zero_()
        results = run_all([functools.partial(_task_backward, call, task) for task in tasks], threads)
        _sum_parts(tasks, [key_side for key_side, _ in results])
        if call.dbias is not None:
            call.dbias.finish()
        if dsink is not None:
            total = torch.zeros_like(dsink, dtype=dtype)
            for task, (_, share) in zip(tasks, results, strict=True):
                if share is not None:
                    total[task.chunk.query_range] -= share
            dsink.copy_(total + keyless_sink_gradient(call, spans))


def _cover(tasks: list[Task], q: Tensor, k: Tensor) -> bool:
    """Return whether the tasks write every row of the gradients: the batch is dense and no row or key is hidden."""
    if not tasks or tasks[0].span.packed:
        return False
    span, band = tasks[0].span, tasks[0].band
    whole = (span.batches, span.sq, span.sk) == (q.shape[0], q.shape[1], k.shape[1])
    return whole and band.rows == (0, span.sq) and band.keys(band.rows) == (0, span.sk)


def _sum_parts(tasks: list[Task], key_sides: list[KeySide | None]) -> None:
    """Sum and write dk and dv of heads whose queries are split over several tasks. Such tasks are adjacent."""
    first = None
    for task, key_side in zip(tasks, key_sides, strict=True):
        if key_side is None:
            continue
        if task.part == 0 or first is None:
            first = key_side
        else:
            first.add(key_side)
        if task.part == task.parts - 1:
            first.write()


def _task_backward(call: Call, task: Task) -> tuple[KeySide | None, Tensor | None]:
    """Compute the gradients of one task. The rows of a tile are the queries of all query heads of a KV head.

    The function writes dq. It writes dk and dv if the task has all queries of its heads, and otherwise returns them as
    partial sums. It also returns the task's sum for dsink, (query heads,), if dsink was requested.
    """
    options, span, band, cut, chunk = call.options, task.span, task.band, task.cut, task.chunk
    key_side = KeySide(call, task)
    scratch = Scratch(call, task)
    terms = AdditiveTerms.of(span, chunk, band, options, call.dtype)
    dq_heads = chunk.of_queries(span.queries(call.dq))
    sink_share: Tensor | None = None

    for rows in task.strips():
        strip = Strip.of(call, task, rows, terms.dead_rows(rows, cut.block_k))
        if options.sink is not None:
            share = strip.sink_share(options.sink[chunk.query_range], chunk.batches)
            sink_share = share if sink_share is None else sink_share + share
        dq = strip.q.new_zeros(strip.q_factor.shape)
        for cols in band.tiles(rows, cut.block_k):
            keys, tile = key_side.block(cols), scratch.tile(rows[1] - rows[0], cols[1] - cols[0])
            p, ds = tile.p, tile.ds

            torch.bmm(strip.q, keys.k_transposed, out=p)
            if options.softcap:
                torch.tanh(p, out=tile.capped)
                torch.mul(tile.capped, options.softcap * LOG2E, out=p)
                p.sub_(strip.lse)
            terms.add_(tile.p_by_head, rows, cols)
            p.exp2_()
            band.zero_hidden_(tile.p_by_head, rows, cols)

            torch.bmm(strip.dout, keys.v_transposed, out=ds)
            if call.dropout:
                keep = call.dropout.keep(span, chunk, rows, cols, p.device)
                tile.ds_by_head.mul_(keep)
                ds.mul_(call.dropout.scale).sub_(strip.delta)
            ds.mul_(p)
            if call.dropout:
                tile.p_by_head.mul_(keep)
                p.mul_(call.dropout.scale)
            if call.dbias is not None:
                call.dbias.add(tile.ds_by_head, span, chunk, rows, cols)
            if options.softcap:
                ds.addcmul_(ds, tile.capped.square_(), value=-1.0)

            tile.add_products(strip, keys, dq)
        write_scaled(dq, call.scale, narrow(dq_heads, 2, rows[0], rows[1] - rows[0]))
    if task.parts > 1:
        return key_side, sink_share
    key_side.write()
    return None, sink_share
