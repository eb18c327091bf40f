"""Rows of the inputs that a block mask lists.

Blocks in no list do not exist for a call: their rows may hold anything, NaN too. If a tile of a kernel covers parts of
several blocks, it also loads such rows, and their products with a weight of 0 would be NaN. So the call passes zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd.flex.lists import ABSENT, block_states_of_keys
from flashbwd.flex.tile import Tile

__all__ = ["ListedRows", "listed_rows"]


class ListedRows(NamedTuple):
    """Which rows are in a listed block: (B or 1, S, heads or 1) bool. None if no tile loads a row that is in none."""

    queries: Tensor | None = None
    keys: Tensor | None = None

    def of_queries(self, rows: Tensor) -> Tensor:
        """Return rows of queries, (B, S, H, D), with zeros where no block is listed."""
        return _with_zeros(rows, self.queries)

    def of_keys(self, rows: Tensor) -> Tensor:
        """Return rows of keys, (B, S, Hkv, D), with zeros where no block is listed."""
        return _with_zeros(rows, self.keys)

    def of_statistics(self, values: Tensor) -> Tensor:
        """Return a value per query, (B, H, S), with zeros where no block is listed."""
        return values if self.queries is None else torch.where(self.queries.transpose(1, 2), values, 0.0)


def listed_rows(block_mask: Any, lengths: tuple[int, int], heads_kv: int, tile: Tile) -> ListedRows:
    """Return the listed rows of a BlockMask. Reads values back from the device."""
    listed = block_states_of_keys(block_mask, lengths[0]) != ABSENT  # (B or 1, H or 1, query blocks, key blocks)
    keys = listed.any(2)
    if keys.shape[1] > 1:
        keys = keys.unflatten(1, (heads_kv, -1)).any(2)
    return ListedRows(
        _rows(listed.any(3), block_mask.BLOCK_SIZE[0], tile.queries, lengths[0]),
        _rows(keys, block_mask.BLOCK_SIZE[1], tile.keys, lengths[1]),
    )


def _rows(listed: Tensor, block: int, tile: int, length: int) -> Tensor | None:
    if block % tile == 0 or bool(listed.all()):
        return None
    row = torch.arange(length, device=listed.device)
    return listed.index_select(2, row // block).transpose(1, 2)


def _with_zeros(rows: Tensor, listed: Tensor | None) -> Tensor:
    return rows if listed is None else torch.where(listed.unsqueeze(-1), rows, 0.0)
