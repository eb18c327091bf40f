"""Block lists in the tiles of the kernels: for each key block, the query blocks that attend to it.

A kernel owns one key block and loops over query blocks. :func:`key_block_lists` rewrites a BlockMask of any block size
for a kernel's :class:`Tile`, by default 64 queries and 128 keys.

Layout
------
There is one list per (batch, query head, key block). Lists are shared by all batches (``batches == 1``) if neither the
BlockMask nor ``mask_mod`` distinguishes batches, and likewise by all heads. With GQA, lists belong to query heads, so
the work tile of a KV head visits the lists of all query heads of its group. For batch b, query head h and key block n::

    list    = ((b if batches > 1 else 0) * heads + (h if heads > 1 else 0)) * key_blocks + n
    entries = entries[offsets[list] : offsets[list + 1]]     # in ascending order of m
    tiles   = bit_tiles[offsets[list] : offsets[list + 1]]

    entry     = 2 * m + full     int32: queries [m * tile.queries, (m + 1) * tile.queries); full is 0 or 1
    bit tile  = index into bits  int32: -1 for a full tile
    bits      (tiles, tile.queries, tile.keys / 32) int32, 1 KB per tile of 64 by 128

Bit ``j % 32`` of word ``bits[t, i, j // 32]`` is 1 if query ``m * tile.queries + i`` sees key ``n * tile.keys + j``.

- A tile without a visible pair is in no list; a key block that no query sees has an empty list.
- In a full tile every pair is visible, and all of its queries and keys exist. A tile that reaches beyond the sequences
  is partial, and its bits there are 0. So a kernel that applies the bits needs no other bound.
- Each m occurs at most once in a list. All positions are in range, whatever the tensors of the BlockMask hold.

If the bits would take more than ``LIMIT`` bytes, the lists have every tile that touches a block of the BlockMask, and
show all of its pairs. The kernel's ``score_mod`` must then hide what ``block_states`` and ``mask_mod`` hide
(:mod:`flashbwd.flex.hidden_scores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd.flex import mask_bits
from flashbwd.flex.tile import Tile
from flashbwd.reference.decoding import ABSENT, FULL, PARTIAL, listed_blocks

__all__ = ["LIMIT", "KeyBlockLists", "key_block_lists", "longest_first", "tile_states"]

LIMIT = 512 * 2**20  # most bytes of mask bits per BlockMask


@dataclass(frozen=True, eq=False)
class KeyBlockLists:
    """The lists of a BlockMask, in the layout that the module describes.

    Attributes
    ----------
    tile : Tile
    batches, heads : int
        Batches and query heads with lists of their own. 1 if all of them share the lists.
    key_blocks, query_blocks : int
    offsets : Tensor, (batches * heads * key_blocks + 1,), int32
    entries, bit_tiles : Tensor, (offsets[-1],), int32
    bits : Tensor, (tiles, tile.queries, tile.keys // 32), int32
    block_states : Tensor, (B or 1, H or 1, query blocks, key blocks), uint8, optional
        ABSENT, PARTIAL or FULL for each block of the BlockMask. None if the lists hide everything that is hidden.
    """

    tile: Tile
    batches: int
    heads: int
    key_blocks: int
    query_blocks: int
    offsets: Tensor
    entries: Tensor
    bit_tiles: Tensor
    bits: Tensor
    block_states: Tensor | None = None

    def lengths(self) -> Tensor:
        """Return the number of query blocks per list, (batches, heads, key_blocks) int32."""
        return self.offsets.diff().view(self.batches, self.heads, self.key_blocks)


def key_block_lists(
    block_mask: Any,
    sizes: tuple[int, int, int, int],
    tile: Tile | None = None,
) -> KeyBlockLists:
    """Return the lists of a BlockMask. Reads sizes back from the device, so call it once per BlockMask.

    Parameters
    ----------
    block_mask : BlockMask
        With ``q_num_blocks`` and ``q_indices``.
    sizes : tuple of int
        Batch size, query heads, queries and keys of the call.
    tile : Tile, optional
        Default: 64 queries by 128 keys.
    """
    tile = tile or Tile()
    batch, heads, seqlen_q, seqlen_k = sizes
    lengths = (seqlen_q, seqlen_k)
    blocks = block_states_of_keys(block_mask, seqlen_q)
    tiles = tile_states(blocks, block_mask.BLOCK_SIZE, lengths, tile)
    by_batch, by_head = mask_bits.depends_on_batch_and_head(block_mask.mask_mod)
    states = tiles.transpose(2, 3).expand(batch if by_batch else -1, heads if by_head else -1, -1, -1).contiguous()
    partial = (states == PARTIAL).nonzero()  # (tiles, 4): list batch, list head, n, m
    block_states = None
    if partial.shape[0] * tile.bytes > LIMIT:
        block_states = blocks
        blocks = torch.full_like(blocks, FULL)
        whole = tile_states(blocks, block_mask.BLOCK_SIZE, lengths, tile)  # partial only at the end of a sequence
        states = (whole * (tiles != ABSENT)).transpose(2, 3).contiguous()
        partial = (states == PARTIAL).nonzero()
    bits = torch.empty((0, tile.queries, tile.keys // 32), dtype=torch.int32, device=states.device)
    if partial.shape[0]:
        at = partial[:, [0, 1, 3, 2]]
        bits, any_visible, all_visible = mask_bits.evaluate(block_mask, blocks, at, sizes, tile)
        found = torch.full_like(any_visible, PARTIAL, dtype=states.dtype)
        found = found.masked_fill(~any_visible, ABSENT).masked_fill(all_visible, FULL)
        states[tuple(partial.unbind(1))] = found
        bits = bits[any_visible & ~all_visible]
    present = states != ABSENT
    ends = present.flatten(0, 2).sum(-1).cumsum(0)
    full = (states == FULL)[present]
    return KeyBlockLists(
        tile=tile,
        batches=states.shape[0],
        heads=states.shape[1],
        key_blocks=states.shape[2],
        query_blocks=states.shape[3],
        offsets=torch.cat([ends.new_zeros(1), ends]).int(),
        entries=(present.nonzero()[:, 3] * 2 + full).int(),
        bit_tiles=((~full).cumsum(0) - 1).masked_fill(full, -1).int(),
        bits=bits,
        block_states=block_states,
    )


def tile_states(blocks: Tensor, block_size: Sequence[int], lengths: tuple[int, int], tile: Tile) -> Tensor:
    """Return ABSENT, PARTIAL or FULL for each tile: (B or 1, H or 1, query blocks, key blocks), uint8.

    A tile is full if all blocks that it touches are full and all of its queries and keys exist. It is absent if all
    blocks are absent.

    Parameters
    ----------
    blocks : Tensor, (B or 1, H or 1, query blocks, key blocks)
        State of each block of the BlockMask.
    """
    rows, columns = (
        _touched(length, size, block, blocks.device)
        for length, size, block in zip(lengths, (tile.queries, tile.keys), block_size, strict=True)
    )
    area = (rows[1] - rows[0]).unsqueeze(1) * (columns[1] - columns[0])
    present = _count(blocks != ABSENT, rows, columns)
    full = _count(blocks == FULL, rows, columns) == area
    full[..., lengths[0] // tile.queries :, :] = False
    full[..., lengths[1] // tile.keys :] = False
    states = present.new_full((), ABSENT).where(present == 0, PARTIAL)
    return states.masked_fill(full, FULL).to(torch.uint8)


def block_states_of_keys(block_mask: Any, seqlen_q: int) -> Tensor:
    """Return the state of each block of a BlockMask according to its ``q_indices`` and ``full_q_indices``.

    Returns
    -------
    Tensor, (B or 1, H or 1, query blocks, key blocks), uint8
    """
    blocks = -(-seqlen_q // block_mask.BLOCK_SIZE[0])
    states = listed_blocks(block_mask.q_num_blocks, block_mask.q_indices, blocks) * PARTIAL
    if block_mask.full_q_num_blocks is not None:
        full = listed_blocks(block_mask.full_q_num_blocks, block_mask.full_q_indices, blocks)
        states = states.maximum(full * FULL)
    return states.transpose(2, 3)


def _touched(length: int, tile: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each tile, the first block that it touches and the one after the last."""
    starts = torch.arange(0, length, tile, device=device)
    return starts // block, ((starts + tile).clamp(max=length) - 1) // block + 1


def _count(blocks: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> Tensor:
    """Return the number of True blocks that each tile touches, from prefix sums in both dimensions."""
    sums = torch.nn.functional.pad(blocks.int().cumsum(-2).cumsum(-1), (1, 0, 1, 0))
    by_rows = sums.index_select(-2, rows[1]) - sums.index_select(-2, rows[0])
    return by_rows.index_select(-1, columns[1]) - by_rows.index_select(-1, columns[0])


def longest_first(lists: KeyBlockLists, batch: int, heads: int, heads_kv: int, section: int | None = None) -> Tensor:
    """Return the work tiles in the order in which they should start, (batch * heads_kv * key_blocks,) int32.

    A work tile is one key block of one KV head: ``(b * heads_kv + h_kv) * key_blocks + n``. Its length is the sum of
    the lengths of the lists of the head's query heads. The longest start first, so that short ones fill the last wave.

    Parameters
    ----------
    section : int, optional
        Number of (batch, KV head) pairs that are ordered together. A later section starts after all tiles of the
        earlier ones, so that the queries of few heads are in the L2 cache at a time. Default: all.
    """
    group = heads // heads_kv
    per_head = lists.lengths().expand(batch, heads, -1)
    lengths = per_head.unflatten(1, (heads_kv, group)).sum(2).flatten(0, 1)  # (batch * heads_kv, key_blocks)
    pairs = lengths.shape[0]
    longest = lists.query_blocks * group + 1
    begins = torch.arange(pairs, device=lengths.device) // (section or max(pairs, 1))
    rank = begins.unsqueeze(1) * longest - lengths
    return rank.flatten().argsort(stable=True).int()
