"""How the work is cut: which heads go together, how big a tile is, and what the mask leaves of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.reference.spans import Span, narrow_broadcast


@dataclass(frozen=True)
class TileSize:
    """Limits of what one thread, or one stream, works on at a time.

    Attributes
    ----------
    rows, keys : int
        Of a tile: queries of all heads of a group together, and keys.
    elements : int
        Of the tiles, of several heads, that one operator call takes.
    held : int
        Keys of several heads whose operands and gradients are held, unless a single head has more.
    """

    rows: int
    keys: int
    elements: int
    held: int


# docs/kernels/reference.md has the measurements.
_CPU_TILE = TileSize(256, 256, 4 * 256 * 256, 8192)  # for one thread
_CPU_SHARED_TILE = TileSize(256, 256, 8 * 256 * 256, 32768)  # for all threads
_CUDA_TILE = TileSize(512, 1024, 32 * 512 * 1024, 131072)


@dataclass(frozen=True)
class Cut:
    """Sizes of the blocks of one span."""

    block_q: int
    block_k: int
    batches: int  # sequences and KV heads of one chunk
    heads_kv: int

    @staticmethod
    def of(tile: TileSize, span: Span, heads_kv: int, group: int, most_items: int) -> Cut:
        """Cut into chunks of at most `most_items` pairs of a sequence and a KV head."""
        block_q = min(max(tile.rows // group, 1), span.sq)
        block_k = min(tile.keys, span.sk)
        items = max(min(tile.elements // (block_q * group * block_k), tile.held // span.sk, most_items), 1)
        if items < heads_kv:
            return Cut(block_q, block_k, 1, items)
        return Cut(block_q, block_k, min(items // heads_kv, span.batches), heads_kv)

    @staticmethod
    def whole(tile: TileSize, span: Span, heads_kv: int, group: int) -> Cut:
        """One chunk of all heads, with smaller blocks to make up for it."""
        block_q, block_k = min(max(tile.rows // group, 1), span.sq), min(tile.keys, span.sk)
        while span.batches * heads_kv * block_q * group * block_k > tile.elements and max(block_q, block_k) > 16:
            if block_q * group >= block_k and block_q > 16:
                block_q = -(-block_q // 2)
            else:
                block_k = -(-block_k // 2)
        return Cut(block_q, block_k, span.batches, heads_kv)


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

    @property
    def query_range(self) -> slice:
        """Query heads, among all."""
        return slice(self.head0 * self.group, self.head0 * self.group + self.query_heads)

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


@dataclass(frozen=True)
class Piece:
    """Work that stands alone: every `parts`-th block of queries of a few heads of a span, from number `part` on."""

    span: Span
    band: Band
    cut: Cut
    chunk: Chunk
    part: int
    parts: int

    def strips(self) -> Iterator[tuple[int, int]]:
        """Ranges of queries."""
        first, last = self.band.rows()
        step = self.cut.block_q
        for row in range(first + self.part * step, last, self.parts * step):
            yield row, min(row + step, last)


def cut_into_pieces(
    spans: Sequence[Span],
    q: Tensor,
    k: Tensor,
    causal: str,
    window: tuple[int, int],
    *,
    shared_sums: bool = False,
    one_chunk: bool = False,
) -> tuple[list[Piece], int]:
    """The pieces of a call that see any keys, and on how many CPU threads to run them side by side.

    The threads get heads of their own, and where heads are too few, blocks of queries of their own. With
    `shared_sums`, when heads add to the same elements, pieces come one after the other and the threads share each
    operator. `one_chunk` asks for all heads of a span in one piece.
    """
    heads_kv = k.shape[-2]
    group = q.shape[-2] // max(heads_kv, 1)
    items = sum(span.batches for span in spans) * heads_kv
    threads = 1 if shared_sums or q.device.type != "cpu" else torch.get_num_threads()
    tile = _CUDA_TILE if q.is_cuda else _CPU_SHARED_TILE if shared_sums else _CPU_TILE
    pieces = []
    for span in spans:
        band = Band.of(span.sq, span.sk, causal, *window)
        if band.rows() == (0, 0) or span.batches * heads_kv == 0:
            continue
        if one_chunk:
            cut = Cut.whole(tile, span, heads_kv, group)
        else:
            cut = Cut.of(tile, span, heads_kv, group, items // threads)
        blocks = -(-(band.rows()[1] - band.rows()[0]) // cut.block_q)
        parts = min(-(-threads // items), blocks)
        pieces += [
            Piece(span, band, cut, chunk, part, parts)
            for chunk in chunks(span.batches, heads_kv, group, cut)
            for part in range(parts)
        ]
    return pieces, threads


def arange(bounds: tuple[int, int], device: torch.device) -> Tensor:
    return torch.arange(bounds[0], bounds[1], device=device)
