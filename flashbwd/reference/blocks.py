"""Partitions a call into chunks of heads and blocks of queries and keys, and finds the visible part of a tile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashbwd.reference.spans import Span, narrow, narrow_broadcast


@dataclass(frozen=True)
class TileSize:
    """Limits of the work that one thread, or one CUDA stream, does at a time.

    Attributes
    ----------
    rows, keys : int
        Size of a tile: queries (counted over all query heads of a KV head) and keys.
    elements : int
        Largest number of elements that one operator call processes: the elements of the tiles of several heads.
    held : int
        Largest number of keys, summed over heads, whose operands and gradients are in memory at a time. A single head
        with more keys may exceed it.
    """

    rows: int
    keys: int
    elements: int
    held: int


# See docs/kernels/reference.md for the measurements.
_CPU_TILE = TileSize(256, 256, 4 * 256 * 256, 8192)  # for one thread
_CPU_SHARED_TILE = TileSize(256, 256, 8 * 256 * 256, 32768)  # for all threads
_CUDA_TILE = TileSize(512, 1024, 32 * 512 * 1024, 131072)

# The least work of a thread with tasks of its own, in scores times head dimension. With less, threads that run Python
# wait for each other longer than the threads of an operator do.
_LEAST_WORK = 2**26


class Cut(NamedTuple):
    """Block and chunk sizes for one span."""

    block_q: int
    block_k: int
    batches: int  # sequences per chunk
    heads_kv: int  # KV heads per chunk

    @staticmethod
    def of(tile: TileSize, span: Span, heads_kv: int, group: int, most_items: int) -> Cut:
        """Choose sizes such that a chunk has at most `most_items` (sequence, KV head) pairs."""
        block_q = min(max(tile.rows // group, 1), span.sq)
        block_k = min(tile.keys, span.sk)
        items = max(min(tile.elements // (block_q * group * block_k), tile.held // span.sk, most_items), 1)
        if items < heads_kv:
            return Cut(block_q, block_k, 1, items)
        return Cut(block_q, block_k, min(items // heads_kv, span.batches), heads_kv)

    @staticmethod
    def whole(tile: TileSize, span: Span, heads_kv: int, group: int) -> Cut:
        """Choose sizes such that one chunk has all heads. Smaller blocks then keep the work within the limits."""
        block_q, block_k = min(max(tile.rows // group, 1), span.sq), min(tile.keys, span.sk)
        while span.batches * heads_kv * block_q * group * block_k > tile.elements and max(block_q, block_k) > 16:
            if block_q * group >= block_k and block_q > 16:
                block_q = -(-block_q // 2)
            else:
                block_k = -(-block_k // 2)
        return Cut(block_q, block_k, span.batches, heads_kv)


class Chunk(NamedTuple):
    """Sequences and heads that are processed together, as ranges within a span."""

    batch0: int
    batches: int
    head0: int  # first KV head
    heads: int  # KV heads
    group: int  # query heads per KV head

    @property
    def items(self) -> int:
        return self.batches * self.heads

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    @property
    def query_range(self) -> slice:
        """The chunk's query heads as a slice of all query heads."""
        return slice(self.head0 * self.group, self.head0 * self.group + self.query_heads)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return the chunk's (batches, query heads, rows, dim) of a (batches, rows, H, dim) tensor."""
        tensor = narrow(tensor, 0, self.batch0, self.batches)
        return narrow(tensor, 2, self.head0 * self.group, self.query_heads).transpose(1, 2)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return the chunk's (batches, KV heads, rows, dim) of a (batches, rows, Hkv, dim) tensor."""
        return narrow(narrow(tensor, 0, self.batch0, self.batches), 2, self.head0, self.heads).transpose(1, 2)

    def of_plane(self, tensor: Tensor) -> Tensor:
        """Return the chunk's part of a tensor whose first two dimensions broadcast to (batches, query heads)."""
        ranges = ((self.batch0, self.batches), (self.head0 * self.group, self.query_heads))
        return narrow_broadcast(tensor, ranges)


def chunks(batches: int, heads_kv: int, group: int, cut: Cut) -> Iterator[Chunk]:
    for batch0, head0 in itertools.product(range(0, batches, cut.batches), range(0, heads_kv, cut.heads_kv)):
        yield Chunk(batch0, min(cut.batches, batches - batch0), head0, min(cut.heads_kv, heads_kv - head0), group)


@dataclass(frozen=True)
class Band:
    """The visible keys j of query i: j in [i + offset - left, i + offset + right]. None is unbounded."""

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

    @functools.cached_property
    def rows(self) -> tuple[int, int]:
        """The half-open range of the queries that see a key."""
        if self.sk == 0:
            return 0, 0
        first = 0 if self.right is None else max(0, -(self.offset + self.right))
        last = self.sq if self.left is None else min(self.sq, self.sk - self.offset + self.left)
        return (first, last) if first < last else (0, 0)

    def keys(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Return the half-open range of the keys that a non-empty range of queries sees."""
        first = 0 if self.left is None else max(0, rows[0] + self.offset - self.left)
        last = self.sk if self.right is None else min(self.sk, rows[1] + self.offset + self.right)
        return first, last

    def tiles(self, rows: tuple[int, int], block_k: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of at most `block_k` keys that cover all keys that the rows see."""
        first, last = self.keys(rows)
        for start in range(first, last, block_k):
            yield start, min(start + block_k, last)

    def cuts(self, rows: tuple[int, int], cols: tuple[int, int]) -> tuple[int | None, int | None]:
        """Return the lower and upper diagonal of the visible part of a tile; None for one that does not cross the tile.

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
        """Return a (rows, cols) bool tensor, True where masked; None if the whole tile is visible."""
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
        """Zero the masked elements of a (..., rows, cols) tile, including infinities and NaN."""
        lower, upper = self.cuts(rows, cols)
        if upper is not None:
            tile.tril_(upper)
        if lower is not None:
            tile.triu_(lower)


class Task(NamedTuple):
    """The work of one thread: the query blocks `part`, `part + parts`, `part + 2 * parts`, ... of one chunk."""

    span: Span
    band: Band
    cut: Cut
    chunk: Chunk
    part: int
    parts: int

    def strips(self) -> Iterator[tuple[int, int]]:
        """Yield the query ranges of the task's blocks."""
        first, last = self.band.rows
        step = self.cut.block_q
        for row in range(first + self.part * step, last, self.parts * step):
            yield row, min(row + step, last)


def split_into_tasks(
    spans: Sequence[Span],
    q: Tensor,
    k: Tensor,
    causal: str,
    window: tuple[int, int],
    *,
    shared_sums: bool = False,
    one_chunk: bool = False,
) -> tuple[list[Task], int]:
    """Return the tasks of a call in which a key is visible, and the number of CPU threads that run them.

    Each thread gets different heads or, if there are fewer heads than threads, different query blocks. `shared_sums`
    says that several heads add to the same elements. Tasks then run one after another, and each operator uses all
    threads. Small calls do the same. `one_chunk` requests all heads of a span in one task.
    """
    heads_kv = k.shape[-2]
    group = q.shape[-2] // max(heads_kv, 1)
    items = sum(span.batches for span in spans) * heads_kv
    available = torch.get_num_threads() if q.device.type == "cpu" else 1
    work = sum(span.batches * q.shape[-2] * span.sq * span.sk for span in spans) * q.shape[-1]
    threads = available if not shared_sums and work >= available * _LEAST_WORK else 1
    operators_share = shared_sums or threads == 1 < available
    tile = _CUDA_TILE if q.is_cuda else _CPU_SHARED_TILE if operators_share else _CPU_TILE
    tasks = []
    for span in spans:
        band = Band.of(span.sq, span.sk, causal, *window)
        if band.rows == (0, 0) or span.batches * heads_kv == 0:
            continue
        if one_chunk:
            cut = Cut.whole(tile, span, heads_kv, group)
        else:
            cut = Cut.of(tile, span, heads_kv, group, items // threads)
        blocks = -(-(band.rows[1] - band.rows[0]) // cut.block_q)
        parts = min(-(-threads // items), blocks)
        tasks += [
            Task(span, band, cut, chunk, part, parts)
            for chunk in chunks(span.batches, heads_kv, group, cut)
            for part in range(parts)
        ]
    return tasks, threads


def arange(bounds: tuple[int, int], device: torch.device) -> Tensor:
    return torch.arange(bounds[0], bounds[1], device=device)
