"""The part of dsink that comes from rows without a visible key."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flashbwd.reference.blocks import Band
from flashbwd.reference.operands import Call
from flashbwd.reference.scores import AdditiveTerms, hidden_keys, sees_nothing
from flashbwd.reference.spans import Span

BLOCK = 1024  # queries and keys per tile of the bias


def keyless_sink_gradient(call: Call, spans: Iterable[Span]) -> Tensor:
    """Return the sum of dlse over the rows that see no key, (H,).

    With a sink, the LSE of such a row is the sink logit itself, so the row's dlse is a gradient of the sink. A sink of
    -inf gets 0.
    """
    options = call.options
    assert options.sink is not None
    total = torch.zeros(len(options.sink), dtype=call.dtype, device=call.q.device)
    if options.dlse is None:
        return total
    for span in spans:
        rows = span.statistics(options.dlse).to(call.dtype)  # (batches, H, sq)
        keyless = _keyless_rows(call, span) | sees_nothing(span.statistics(call.lse))
        total += rows.masked_fill(~keyless, 0.0).sum((0, 2))
    return total.masked_fill_(options.sink == -torch.inf, 0.0)


def _keyless_rows(call: Call, span: Span) -> Tensor:
    """Return rows in which every key is masked or has a bias of -inf, as bool: (batches or 1, H or 1, sq)."""
    options = call.options
    band = Band.of(span.sq, span.sk, options.causal, *options.window)
    first, last = band.rows
    bias = None if options.attn_bias is None else span.plane(options.attn_bias)
    terms = AdditiveTerms(bias, hidden_keys(span, options), None, band)
    blocks = [(row, min(row + BLOCK, last)) for row in range(first, last, BLOCK)]
    hidden = [terms.dead_rows(block, BLOCK) for block in blocks]
    inside = [block.squeeze(-1) for block in hidden if block is not None]
    keyless = torch.ones((1, 1, span.sq), dtype=torch.bool, device=call.q.device)
    if not inside:
        keyless[..., first:last] = False
        return keyless
    seen = torch.cat(inside, -1)
    outside = keyless.expand(*seen.shape[:2], span.sq)
    return torch.cat([outside[..., :first], seen, outside[..., last:]], -1)
