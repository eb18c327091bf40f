"""Operands, additive terms, dropout and fully masked rows, for the tiles of both forward and backward.

Scores are in units of ln 2, so that probabilities are powers of 2. On a CPU, ``torch.exp2`` is 4 times as fast as
``torch.exp``, and 100 times as fast for results that underflow.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashbwd import philox
from flashbwd.options import AttentionOptions
from flashbwd.reference.blocks import Band, Chunk, arange
from flashbwd.reference.spans import Span, narrow_broadcast

LOG2E = 1.0 / math.log(2.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators keep the dtypes of their inputs."""
    if torch.is_autocast_enabled(device.type):  # entering torch.autocast takes 20 us
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def sees_nothing(lse: Tensor) -> Tensor:
    """Return a mask of rows without a visible key: their LSE is infinite, or so low that its last bit exceeds 1.

    A forward returns such a low LSE if a bias with the lowest finite number hides every key.
    """
    return (lse <= -2 / torch.finfo(lse.dtype).eps) | (lse == torch.inf)


def operand(rows: Tensor, dtype: torch.dtype, scale: float = 1.0, column: Tensor | float | None = None) -> Tensor:
    """Return a scaled, contiguous (batches, heads, rows, dim [+ 1]) copy, with an extra column if it is given.

    If one operand has a column of ones and the other a column of row terms, the matrix product also adds the terms.
    This saves a pass over the tile.
    """
    dim = rows.shape[-1]
    if column is None:
        copy = rows.new_empty(rows.shape, dtype=dtype)
    else:
        # The vectorised kernels of cuBLAS need leading dimensions that are multiples of 16 bytes.
        width = dim + 1 if rows.device.type == "cpu" else -(-(dim + 1) // 4) * 4
        copy = rows.new_empty((*rows.shape[:-1], width), dtype=dtype)
        if width > dim + 1:
            copy.narrow(-1, dim + 1, width - dim - 1).zero_()
        if isinstance(column, Tensor):
            copy.narrow(-1, dim, 1).copy_(column)
        else:
            copy.narrow(-1, dim, 1).fill_(column)
    values = copy if column is None else copy.narrow(-1, 0, dim)
    if scale != 1.0 and rows.dtype == dtype:
        torch.mul(rows, scale, out=values)
        return copy
    values.copy_(rows)
    if scale != 1.0:
        values.mul_(scale)
    return copy


class AdditiveTerms(NamedTuple):
    """Bias and ALiBi terms of one chunk, and the keys that a key mask hides."""

    bias: Tensor | None  # broadcasts to (batches, query heads, sq, sk)
    hidden_keys: Tensor | None  # (batches, 1, 1, sk) bool, True where hidden
    minus_slopes: Tensor | None  # (batches or 1, query heads, 1, 1), in units of ln 2
    band: Band

    @staticmethod
    def of(span: Span, chunk: Chunk, band: Band, options: AttentionOptions, dtype: torch.dtype) -> AdditiveTerms:
        bias, slopes, hidden = options.attn_bias, options.alibi_slopes, hidden_keys(span, options)
        if bias is not None:
            bias = chunk.of_plane(span.plane(bias))
        if slopes is not None:
            slopes = chunk.of_plane(span.batch_rows(slopes)).to(dtype).mul(-LOG2E)[:, :, None, None]
        return AdditiveTerms(bias, None if hidden is None else chunk.of_plane(hidden), slopes, band)

    def add_(self, tile: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> None:
        """Add to a (batches, query heads, rows, cols) tile of scores."""
        if self.bias is not None:
            tile.add_(bias_tile(self.bias, rows, cols), alpha=LOG2E)
        if self.minus_slopes is not None:
            diagonal = arange(rows, tile.device).add_(self.band.offset)
            distance = (diagonal[:, None] - arange(cols, tile.device)).abs_().to(tile.dtype)
            tile.addcmul_(distance, self.minus_slopes)
        if self.hidden_keys is not None:
            tile.masked_fill_(bias_tile(self.hidden_keys, rows, cols), -torch.inf)

    def dead_rows(self, rows: tuple[int, int], block_k: int) -> Tensor | None:
        """Return the rows in which every visible key is hidden by the key mask or has a bias of -inf.

        The shape is (batches or 1, heads or 1, rows, 1). Returns None without a key mask and a bias.
        """
        if self.bias is None and self.hidden_keys is None:
            return None
        alive = None
        for cols in self.band.tiles(rows, block_k):
            part = self._bias_of_shown_keys(rows, cols)
            hidden = self.band.hidden(rows, cols, part.device)
            if hidden is not None:
                part = part.masked_fill(hidden, -torch.inf)
            highest = part.amax(-1, keepdim=True) != -torch.inf  # (batches or 1, heads or 1, rows or 1, 1)
            alive = highest if alive is None else alive | highest
        assert alive is not None
        return alive.logical_not().expand(-1, -1, rows[1] - rows[0], -1)

    def _bias_of_shown_keys(self, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Return a tile of the bias, or zeros without one, with -inf at the keys that the key mask hides."""
        hidden = None if self.hidden_keys is None else bias_tile(self.hidden_keys, rows, cols)
        if self.bias is not None:
            part = bias_tile(self.bias, rows, cols)
            return part if hidden is None else part.masked_fill(hidden, -torch.inf)
        assert hidden is not None
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def hidden_keys(span: Span, options: AttentionOptions) -> Tensor | None:
    """Return the keys of a span that the key mask hides, (batches, 1, 1, sk) bool; None without a key mask."""
    mask = options.key_mask
    return None if mask is None else span.plane(mask[:, None, None]).logical_not()


def bias_tile(plane: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """Return one tile of a tensor that broadcasts to (batches, heads, sq, sk)."""
    whole = ((0, plane.shape[0]), (0, plane.shape[1]))
    return narrow_broadcast(plane, (*whole, (rows[0], rows[1] - rows[0]), (cols[0], cols[1] - cols[0])))


@dataclass(frozen=True)
class Dropout:
    """The dropout of a call: layout and Philox state of the mask, and the factor of kept probabilities."""

    layout: str
    seed: philox.Word
    offset: philox.Word
    p: float
    scale: float
    heads: int
    max_seqlen_q: int
    max_seqlen_k: int

    @staticmethod
    def of(q: Tensor, options: AttentionOptions, max_seqlen_q: int, max_seqlen_k: int) -> Dropout | None:
        p, layout, seed, offset = options.dropout_p, options.rng_layout, options.rng_seed, options.rng_offset
        if p == 0.0:
            return None
        if seed is None or offset is None:
            raise ValueError(f"flashbwd: rng_state is None, expected the state of the forward because dropout_p is {p}")
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
        """Return one tile of the mask, (batches, query heads, rows, cols) bool, True where kept."""
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
