"""Rows that a block mask lists in no block, which kernels may load beside others."""

from __future__ import annotations

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor

from flashbwd.flex.listed_rows import ListedRows, listed_rows
from flashbwd.flex.tile import Tile

SHAPE = Shape(batch=2, heads=4, heads_kv=2, seqlen_q=100, seqlen_k=90)


def late(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= 32) & (k >= 48 + 16 * (h // 2))


@pytest.mark.parametrize("block", [16, (16, 48)])
def test_rows_in_no_listed_block_are_found(block: int | tuple[int, int]) -> None:
    mask = kit.block_mask(late, SHAPE, block=block)
    found = listed_rows(mask, (100, 90), 2, Tile(64, 128))
    assert found.queries is not None and found.keys is not None
    queries = (torch.arange(100) >= 32).view(1, -1, 1)
    assert torch.equal(found.queries.expand(2, 100, 4), queries.expand(2, 100, 4))
    first = torch.tensor([48, 64 if block == 16 else 48])
    assert torch.equal(found.keys.expand(2, 90, 2), (torch.arange(90).view(-1, 1) >= first).expand(2, 90, 2))


def test_blocks_of_whole_tiles_need_no_zeros() -> None:
    mask = kit.block_mask(late, SHAPE, block=16)
    assert listed_rows(mask, (100, 90), 2, Tile(16, 16)) == ListedRows()


def test_a_mask_that_lists_every_row_needs_no_zeros() -> None:
    mask = kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16)
    assert listed_rows(mask, (100, 90), 2, Tile(64, 128)) == ListedRows()


def test_unlisted_rows_become_zeros() -> None:
    listed = listed_rows(kit.block_mask(late, SHAPE, block=16), (100, 90), 2, Tile(64, 128))
    rows, numbers = torch.full((2, 100, 4, 8), torch.nan), torch.full((2, 4, 100), torch.nan)
    rows[:, 32:], numbers[:, :, 32:] = 1, 1
    assert torch.equal(listed.of_queries(rows), rows.nan_to_num(0.0))
    assert torch.equal(listed.of_statistics(numbers), numbers.nan_to_num(0.0))
    keys = torch.full((2, 90, 2, 8), torch.nan)
    keys[:, 48:, 0], keys[:, 64:, 1] = 1, 1
    assert torch.equal(listed.of_keys(keys), keys.nan_to_num(0.0))
