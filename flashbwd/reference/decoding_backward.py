"""The gradients of flex decoding and FlexAttention by the reference, one tile of scores at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from flashbwd.reference.decoding import DecodingCall, Operands, Tile
from flashbwd.reference.modifications import LeavesFor, sum_dtype

__all__ = ["decoding_backward"]


@torch.inference_mode(False)  # score_mod is differentiated, which inference mode would silently prevent
@torch.no_grad()
def decoding_backward(
    call: DecodingCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    captured: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute the gradients of q, k and v in the accumulation dtype, and of the captured tensors in their own dtypes.

    ::

        p  = exp(score_mod(s) - lse);  dp = dout @ v.T
        ds = vjp of score_mod at s applied to p * (dp - rowsum(dout * out) + dlse)

    (Differentiated from the forward, as in Dao et al., "FlashAttention", 2022, section B.2.) ``out`` and ``lse`` are
    results of the forward.
    """
    x = Operands(call, q, k, v)
    dq, dk, dv = (torch.zeros_like(t, dtype=x.dtype) for t in (q, k, v))
    dcaptured = [torch.zeros_like(t, dtype=sum_dtype(t)) for t in captured]
    leaves = LeavesFor(captured, not call.unrounded)
    delta = _delta(x.dtype, out, lse, dout, dlse)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees no key gets p = exp(-inf) = 0
    for tile in (tile for _, tiles in x.tiles() for tile in tiles):
        rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        visible = x.visible(tile)
        raw = x.raw_scores(tile, visible).requires_grad_(call.score_mod is not None)
        with torch.enable_grad() if call.score_mod is not None else nullcontext(), leaves:
            modified = _Modified(x, raw, tile, visible, bool(captured))
        p = torch.exp(modified.scores() - lse[:, :, rows, None])
        if visible is not None:
            p = torch.where(visible, p, 0.0)
        ds = p * -delta[:, :, rows, None]
        if dout is not None:
            dout_rows = x.rows(dout, tile, visible)
            ds = ds + p * x.unfold(dout_rows @ x.keys(x.v, tile, visible).mT)
            _add(dv[:, :, keys], x.fold(p).mT @ dout_rows)
        ds, dtile = modified.gradients(ds, leaves.of(captured))
        for total, part in zip(dcaptured, dtile, strict=True):
            if part is not None:
                total += part
        ds = x.fold(ds) * call.scale
        dq[:, :, rows] += x.unfold(ds @ x.keys(x.k, tile, visible))
        _add(dk[:, :, keys], ds.mT @ x.rows(x.q, tile, visible))
    return dq, dk, dv, [total.to(t.dtype) for total, t in zip(dcaptured, captured, strict=True)]


def _delta(dtype: torch.dtype, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> Tensor:
    """Return rowsum(dout * out) - dlse, (B, H, Sq)."""
    delta = lse.new_zeros(lse.shape, dtype=dtype)
    if dout is not None:
        delta = delta + (dout.to(dtype) * out.to(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse.to(dtype)


class _Modified:
    """The scores of a tile after ``score_mod``, and their derivative.

    At a hidden pair, the derivative may be infinite, and 0 * inf is NaN. A captured tensor would sum that up. So if one
    gets a gradient, ``score_mod`` is called for the visible pairs only. A CUDA graph can't do so: it calls all.
    """

    def __init__(self, x: Operands, raw: Tensor, tile: Tile, visible: Tensor | None, has_captured: bool) -> None:
        self._raw, self._visible = raw, visible
        capturing = raw.is_cuda and torch.cuda.is_current_stream_capturing()
        self._pairs = visible if has_captured and not capturing else None
        self._result = x.modified(raw, tile) if self._pairs is None else x.modified_pairs(raw, tile, self._pairs)

    def scores(self) -> Tensor:
        """Return the scores, (B, H, rows, n), without their derivative. -inf where a pair is hidden."""
        scores = self._result.detach()
        if self._pairs is not None:
            return torch.full_like(self._raw, -torch.inf, requires_grad=False).masked_scatter_(self._pairs, scores)
        return scores if self._visible is None else torch.where(self._visible, scores, -torch.inf)

    def gradients(self, ds: Tensor, captured: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of the scores before ``score_mod`` and of captured tensors. ``ds``: of those after."""
        if self._visible is not None:
            ds = torch.where(self._visible, ds, 0.0)
        of_result = ds if self._pairs is None else ds[self._pairs]
        ds, of_captured = _through_mod(self._result, self._raw, of_result, captured)
        return ds if self._visible is None else torch.where(self._visible, ds, 0.0), of_captured


def _through_mod(
    modified: Tensor, raw: Tensor, ds: Tensor, captured: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of the unmodified scores and of the captured tensors."""
    if not raw.requires_grad:
        return ds, []
    if not modified.requires_grad:  # the result depends on neither the score nor a captured tensor
        return torch.zeros_like(raw), [None] * len(captured)
    grad, *rest = torch.autograd.grad(modified, [raw, *captured], ds, allow_unused=True)
    return torch.zeros_like(raw) if grad is None else grad, list(rest)


def _add(total: Tensor, part: Tensor) -> None:
    """Add a gradient of the full batch to a total whose batch size may be 1."""
    total += part.sum(0, keepdim=True) if total.shape[0] < part.shape[0] else part
