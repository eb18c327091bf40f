"""A blockwise attention forward, for cases that PyTorch's forwards do not support."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashbwd.options import AttentionOptions
from flashbwd.reference.blocks import Task, split_into_tasks
from flashbwd.reference.scores import LOG2E, AdditiveTerms, Dropout, accumulation_dtype, operand, without_autocast
from flashbwd.reference.spans import split_spans
from flashbwd.reference.workers import run_all

_DEFAULTS = AttentionOptions()


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions = _DEFAULTS) -> tuple[Tensor, Tensor]:
    """Compute softmax attention with an online softmax over key blocks.

    The caller has checked the arguments. ``dlse`` and the options that choose a backward's algorithm have no effect.

    Returns
    -------
    out : Tensor, (B, Sq, H, Dv) or (total_q, H, Dv), q's dtype, contiguous
        A row that sees no key is 0.
    softmax_lse : Tensor, (B, H, Sq) or (H, total_q), float32 (float64 for float64 inputs)
        Natural logarithm, including the sink. A row that sees no key has the sink logit, or -inf without a sink.
    """
    with torch.no_grad(), without_autocast(q.device):
        dtype = accumulation_dtype(q.dtype)
        packed = options.cu_seqlens_q is not None
        max_seqlen_q, max_seqlen_k = options.max_seqlen_q, options.max_seqlen_k
        if max_seqlen_q is None or max_seqlen_k is None:
            if packed:
                raise ValueError("flashbwd: cu_seqlens need max_seqlen_q and max_seqlen_k, got None")
            max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
        scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        dropout = Dropout.of(q, options, max_seqlen_q, max_seqlen_k)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        rows_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
        lse = q.new_full(rows_shape, -torch.inf, dtype=dtype)

        spans = split_spans(q, k, options)
        if options.sink is not None:
            for span in spans:
                span.statistics(lse).copy_(options.sink[:, None])
        tasks, threads = split_into_tasks(spans, q, k, options.causal, options.window)

        def run(task: Task) -> None:
            terms = AdditiveTerms.of(task.span, task.chunk, task.band, options, dtype)
            _task_forward(q, k, v, out, lse, task, terms, scale, options.softcap, options.sink, dropout)

        run_all([functools.partial(run, task) for task in tasks], threads)
    return out, lse


def _task_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    task: Task,
    terms: AdditiveTerms,
    scale: float,
    softcap: float,
    sink: Tensor | None,
    dropout: Dropout | None,
) -> None:
    """Compute the query blocks of one task. Shapes are as in the backward."""
    span, band, cut, chunk = task.span, task.band, task.cut, task.chunk
    dtype, items = lse.dtype, chunk.items
    key0, key1 = band.keys(band.rows)
    keys = operand(chunk.of_keys(span.keys(k))[:, :, key0:key1], dtype).flatten(0, 1)  # (items, keys, D)
    values = operand(chunk.of_keys(span.keys(v))[:, :, key0:key1], dtype)
    if terms.hidden_keys is not None:  # NaN there would reach the output
        values.masked_fill_(terms.hidden_keys[..., key0:key1].mT, 0.0)
    values = values.flatten(0, 1)  # (items, keys, Dv)
    tile = keys.new_empty(items * cut.block_q * chunk.group * cut.block_k)
    out_heads = chunk.of_queries(span.queries(out))  # (batches, query heads, sq, Dv)
    lse_heads = chunk.of_plane(span.statistics(lse))  # (batches, query heads, sq)
    scale = scale / softcap if softcap else scale * LOG2E

    for rows in task.strips():
        by_row = (chunk.batches, chunk.query_heads, rows[1] - rows[0])
        folded = (items, chunk.group * by_row[2])
        queries = operand(chunk.of_queries(span.queries(q))[:, :, rows[0] : rows[1]], dtype, scale)
        highest = keys.new_full((*folded, 1), -torch.inf)
        total = keys.new_zeros(*folded, 1)
        weighted = keys.new_zeros(*folded, v.shape[-1])
        for cols in band.tiles(rows, cut.block_k):
            here = slice(cols[0] - key0, cols[1] - key0)
            shape = (*folded, cols[1] - cols[0])
            s = tile[: shape[0] * shape[1] * shape[2]].view(shape)
            torch.bmm(queries.view(*folded, -1), keys[:, here].mT, out=s)
            if softcap:
                s.tanh_().mul_(softcap * LOG2E)
            by_head = s.view(*by_row, shape[2])
            terms.add_(by_head, rows, cols)
            hidden = band.hidden(rows, cols, s.device)
            if hidden is not None:
                by_head.masked_fill_(hidden, -torch.inf)
            now = torch.maximum(highest, s.amax(-1, keepdim=True))
            shift = now.masked_fill(now == -torch.inf, 0.0)
            fade = (highest - shift).exp2_()
            p = s.sub_(shift).exp2_()
            total.mul_(fade).add_(p.sum(-1, keepdim=True))
            if dropout:
                p.view_as(by_head).mul_(dropout.keep(span, chunk, rows, cols, s.device)).mul_(dropout.scale)
            weighted.mul_(fade).baddbmm_(p, values[:, here])
            highest = now
        row_lse = (highest / LOG2E + total.log()).view(*by_row, 1)  # -inf + -inf for rows without a key
        # Rows with a total of 0 are divided by 1, so that they stay 0.
        weighted.div_(total.masked_fill(total == 0.0, 1.0))
        result = weighted.view(*by_row, -1)
        if sink is not None:
            with_sink = torch.logaddexp(row_lse, sink[chunk.query_range].to(dtype)[:, None, None])
            result = result * (row_lse - with_sink).exp().nan_to_num(0.0)
            row_lse = with_sink
        out_heads[:, :, rows[0] : rows[1]].copy_(result)
        lse_heads[:, :, rows[0] : rows[1]].copy_(row_lse.squeeze(-1))
