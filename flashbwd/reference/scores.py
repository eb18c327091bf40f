"""What the tiles of the forward and of the backward have in common: operands, additive terms, dropout, dead rows.

Scores are in units of ln 2, so that probabilities are powers of 2: ``torch.exp2`` takes a quarter of the time that
``torch.exp`` takes on a CPU, and a hundredth where results underflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd import philox
from flashbwd.reference.blocks import Band, Chunk, arange
from flashbwd.reference.spans import Span, narrow_broadcast

LOG2E = 1.0 / math.log(2.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sees_nothing(lse: Tensor) -> Tensor:
    """Where an LSE is that of a row without a visible key: infinite, or so low that its last bit is worth more than 1.

    The second is what a forward returns where a mask of the least finite numbers hides every key.
    """
    return lse.isinf() | (lse <= -2 / torch.finfo(lse.dtype).eps)


def operand(rows: Tensor, dtype: torch.dtype, scale: float = 1.0, column: Tensor | float | None = None) -> Tensor:
    """A contiguous (batches, heads, rows, dim [+ 1]) copy, scaled, with one more column where given.

    A column of ones on one side of a product and a column of row terms on the other add the terms within the product,
    which saves a pass over the tile.
    """
    dim = rows.shape[-1]
    if column is None:
        copy = rows.new_empty(rows.shape, dtype=dtype)
    else:
        # Leading dimensions of 16 bytes keep the vectorised kernels of cuBLAS; a CPU's products do not mind.
        width = dim + 1 if rows.device.type == "cpu" else -(-(dim + 1) // 4) * 4
        copy = rows.new_empty((*rows.shape[:-1], width), dtype=dtype)
        copy[..., dim + 1 :] = 0.0
        copy[..., dim : dim + 1] = column
    values = copy[..., :dim]
    values.copy_(rows)
    if scale != 1.0:
        values.mul_(scale)
    return copy


@dataclass(frozen=True)
class AdditiveTerms:
    """Bias and ALiBi of one chunk."""

    bias: Tensor | None  # broadcasts to (batches, query heads, sq, sk)
    minus_slopes: Tensor | None  # (batches or 1, query heads, 1, 1), in units of ln 2
    band: Band

    @staticmethod
    def of(
        span: Span, chunk: Chunk, band: Band, bias: Tensor | None, slopes: Tensor | None, dtype: torch.dtype
    ) -> AdditiveTerms:
        if bias is not None:
            bias = chunk.of_plane(span.plane(bias))
        if slopes is not None:
            slopes = chunk.of_plane(span.batch_rows(slopes)).to(dtype).mul(-LOG2E)[:, :, None, None]
        return AdditiveTerms(bias, slopes, band)

    def add_(self, tile: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> None:
        """Add to a (batches, query heads, rows, cols) tile of scores."""
        if self.bias is not None:
            tile.add_(bias_tile(self.bias, rows, cols), alpha=LOG2E)
        if self.minus_slopes is not None:
            diagonal = arange(rows, tile.device).add_(self.band.offset)
            distance = (diagonal[:, None] - arange(cols, tile.device)).abs_().to(tile.dtype)
            tile.addcmul_(distance, self.minus_slopes)

    def dead_rows(self, rows: tuple[int, int], block_k: int) -> Tensor | None:
        """(batches or 1, heads or 1, rows, 1) bool: rows whose bias is -inf at every visible key. None without bias."""
        if self.bias is None:
            return None
        alive = None
        for cols in self.band.tiles(rows, block_k):
            part = bias_tile(self.bias, rows, cols)
            hidden = self.band.hidden(rows, cols, part.device)
            if hidden is not None:
                part = part.masked_fill(hidden, -torch.inf)
            highest = part.amax(-1, keepdim=True) != -torch.inf  # (batches or 1, heads or 1, rows or 1, 1)
            alive = highest if alive is None else alive | highest
        assert alive is not None
        return alive.logical_not().expand(-1, -1, rows[1] - rows[0], -1)


def bias_tile(plane: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """Part of a tensor that broadcasts to (batches, heads, sq, sk)."""
    whole = ((0, plane.shape[0]), (0, plane.shape[1]))
    return narrow_broadcast(plane, (*whole, (rows[0], rows[1] - rows[0]), (cols[0], cols[1] - cols[0])))


@dataclass(frozen=True)
class Dropout:
    """The dropout of a call: which forward's mask, and the factor on what is kept."""

    layout: str
    seed: philox.Word
    offset: philox.Word
    p: float
    scale: float
    heads: int
    max_seqlen_q: int
    max_seqlen_k: int

    @staticmethod
    def of(
        q: Tensor,
        layout: str,
        seed: Tensor | int | None,
        offset: Tensor | int | None,
        p: float,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Dropout | None:
        if p == 0.0:
            return None
        if seed is None or offset is None:
            raise ValueError(f"flashbwd: dropout_p is {p}, which needs rng_state, got None")
        return Dropout(
            layout,
            philox.as_word64(seed, q.device),
            philox.as_word64(offset, q.device),
            p,
            philox.keep_scale(layout, p, q.dtype),
            q.shape[-2],
            max_seqlen_q,
            max_seqlen_k,
        )

    def keep(
        self, span: Span, chunk: Chunk, rows: tuple[int, int], cols: tuple[int, int], device: torch.device
    ) -> Tensor:
        """(batches, query heads, rows, cols) bool."""
        first = span.batch0 + chunk.batch0
        batches = arange((first, first + chunk.batches), device)
        head0 = chunk.head0 * chunk.group
        heads = arange((head0, head0 + chunk.query_heads), device)
        kept = philox.keep_mask(
            self.layout,
            self.seed,
            self.offset,
            self.p,
            (batches[:, None] * self.heads + heads).flatten(),
            rows,
            cols,
            seqlen_k=span.sk,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
        )
        return kept.unflatten(0, (chunk.batches, chunk.query_heads))
