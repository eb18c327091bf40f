"""How the work is cut: which heads go together, how big a tile is, and what the mask leaves of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.reference.spans import narrow_broadcast

# Queries (of all heads of a group together) and keys of a tile, and elements of a tile over all heads that are worked
# on together. docs/kernels/reference.md has the measurements.
_CPU_TILE = (256, 256, 8 * 256 * 256)
_CUDA_TILE = (512, 1024, 32 * 512 * 1024)


@dataclass(frozen=True)
class Cut:
    """Sizes of the blocks of one span."""

    block_q: int
    block_k: int
    batches: int  # sequences and KV heads of one chunk
    heads_kv: int

    @staticmethod
    def of(device: torch.device, batches: int, heads_kv: int, group: int, sq: int, sk: int, whole: bool = False) -> Cut:
        """Choose for a span; `whole` asks for all its heads in one chunk."""
        rows, block_k, elements = _CPU_TILE if device.type == "cpu" else _CUDA_TILE
        block_q = min(max(rows // group, 1), sq)
        block_k = min(block_k, sk)
        items = max(elements // (block_q * group * block_k), 1)
        if whole:
            while batches * heads_kv > items and (block_q > 16 or block_k > 64):
                if block_q * group >= block_k and block_q > 16:
                    block_q = -(-block_q // 2)
                else:
                    block_k = -(-block_k // 2)
                items = max(elements // (block_q * group * block_k), 1)
            return Cut(block_q, block_k, batches, heads_kv)
        if items < heads_kv:
            return Cut(block_q, block_k, 1, items)
        return Cut(block_q, block_k, min(items // heads_kv, batches), heads_kv)


@dataclass(frozen=True)
class Chunk:
    """The sequences and heads that are worked on together: half-open ranges within a span."""

    batch0: int
    batches: int
    head0: int  # of KV heads
    heads: int
    group: int  # query heads a KV head

    @property
    def items(self) -> int:
        return self.batches * self.heads

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    def of_queries(self, tensor: Tensor) -> Tensor:
        """(batches, query heads, rows, dim) of (batches, rows, H, dim)."""
        tensor = tensor.narrow(0, self.batch0, self.batches)
        return tensor.narrow(2, self.head0 * self.group, self.query_heads).transpose(1, 2)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """(batches, KV heads, rows, dim) of (batches, rows, Hkv, dim)."""
        return tensor.narrow(0, self.batch0, self.batches).narrow(2, self.head0, self.heads).transpose(1, 2)

    def of_plane(self, tensor: Tensor) -> Tensor:
        """The chunk's part of a tensor whose first dimensions broadcast to (batches, query heads)."""
        ranges = ((self.batch0, self.batches), (self.head0 * self.group, self.query_heads))
        return narrow_broadcast(tensor, ranges)


def chunks(batches: int, heads_kv: int, group: int, cut: Cut) -> Iterator[Chunk]:
    for batch0, head0 in itertools.product(range(0, batches, cut.batches), range(0, heads_kv, cut.heads_kv)):
        yield Chunk(batch0, min(cut.batches, batches - batch0), head0, min(cut.heads_kv, heads_kv - head0), group)


@dataclass(frozen=True)
class Band:
    """The visible keys of one sequence: j in [i + offset - left, i + offset + right], None being unbounded."""

    sq: int
    sk: int
    offset: int
    left: int | None
    right: int | None

    @staticmethod
    def of(sq: int, sk: int, causal: str, window_left: int, window_right: int) -> Band:
        offset = 0 if causal == "top_left" else sk - sq
        right = 0 if causal != "none" else window_right
        return Band(sq, sk, offset, None if window_left < 0 else window_left, None if right < 0 else right)

    def rows(self) -> tuple[int, int]:
        """Half-open range of the queries that see a key."""
        if self.sk == 0:
            return 0, 0
        first = 0 if self.right is None else max(0, -(self.offset + self.right))
        last = self.sq if self.left is None else min(self.sq, self.sk - self.offset + self.left)
        return (first, last) if first < last else (0, 0)

    def keys(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Half-open range of the keys that queries of a non-empty range see."""
        first = 0 if self.left is None else max(0, rows[0] + self.offset - self.left)
        last = self.sk if self.right is None else min(self.sk, rows[1] + self.offset + self.right)
        return first, last

    def tiles(self, rows: tuple[int, int], block_k: int) -> Iterator[tuple[int, int]]:
        """Ranges of keys, of at most `block_k`, that cover what the rows see."""
        first, last = self.keys(rows)
        for start in range(first, last, block_k):
            yield start, min(start + block_k, last)

    def cuts(self, rows: tuple[int, int], cols: tuple[int, int]) -> tuple[int | None, int | None]:
        """Diagonals that bound the visible part of a tile below and above; None where the tile does not reach them.

        Element (r, c) of the tile is visible iff lower <= c - r <= upper.
        """
        shift = rows[0] + self.offset - cols[0]
        lower = upper = None
        if self.left is not None and cols[0] < rows[1] - 1 + self.offset - self.left:
            lower = shift - self.left
        if self.right is not None and cols[1] - 1 > rows[0] + self.offset + self.right:
            upper = shift + self.right
        return lower, upper

    def hidden(self, rows: tuple[int, int], cols: tuple[int, int], device: torch.device) -> Tensor | None:
        """(rows, cols) bool, True where masked; None if nothing is."""
        lower, upper = self.cuts(rows, cols)
        if lower is None and upper is None:
            return None
        distance = arange((0, cols[1] - cols[0]), device) - arange((0, rows[1] - rows[0]), device)[:, None]  # c - r
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if lower is not None:
            hidden |= distance < lower
        if upper is not None:
            hidden |= distance > upper
        return hidden

    def zero_hidden_(self, tile: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> None:
        """Write zeros where a (..., rows, cols) tile is masked, whatever is there."""
        lower, upper = self.cuts(rows, cols)
        if upper is not None:
            tile.tril_(upper)
        if lower is not None:
            tile.triu_(lower)


def arange(bounds: tuple[int, int], device: torch.device) -> Tensor:
    return torch.arange(bounds[0], bounds[1], device=device)
