"""Finds out whether a block mask shows pairs above the diagonal."""

from __future__ import annotations

import torch

from flashbwd.flex.lists import KeyBlockLists
from flashbwd.flex.mask_bits import tiles_at_once, unpack

__all__ = ["hides_above"]


def hides_above(lists: KeyBlockLists, offset: int) -> bool:
    """Return whether the mask hides every pair with ``kv_idx > q_idx + offset``. Reads sizes back from the device.

    Only tiles across the diagonal or above it are looked at.
    """
    tile = lists.tile
    lengths = lists.offsets.diff().long()
    key_block = torch.arange(lengths.numel(), device=lengths.device) % lists.key_blocks
    first_key = torch.repeat_interleave(key_block, lengths) * tile.keys
    diagonal = lists.entries.long() // 2 * tile.queries + offset - first_key  # of the tile: key <= query + diagonal
    crossed = diagonal < tile.keys - 1
    tiles, diagonal = lists.bit_tiles[crossed].long(), diagonal[crossed]
    if not tiles.numel():
        return True
    if bool((tiles < 0).any()):  # a full tile shows the pair of its last key and first query
        return False
    query = torch.arange(tile.queries, device=tiles.device).view(1, -1, 1)
    key = torch.arange(tile.keys, device=tiles.device)
    at_once = tiles_at_once(tile)
    for some, diagonals in zip(tiles.split(at_once), diagonal.split(at_once), strict=True):
        above = key > query + diagonals.view(-1, 1, 1)
        if bool((unpack(lists.bits[some]) & above).any()):
            return False
    return True
