"""Tiles of the reference's flex decoding contain every visible pair of a block list once, and no absent block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashbwd.reference import decoding
from flashbwd.reference.decoding import ABSENT, FULL, PARTIAL, DecodingCall

BLOCK = (4, 8)


class Mask:
    BLOCK_SIZE = BLOCK


def tiles_of(states: Tensor | None, queries: int, keys: int, splits: int | None = None) -> list[decoding._Tile]:
    call = DecodingCall(None, None if states is None else Mask(), 1.0, splits=splits)
    q = torch.zeros(1, 2, queries, 4)
    return [tile for _, row in decoding._tiles(call, states, q, keys) for tile in row]


def states_of(rows: list[list[int]]) -> Tensor:
    """The block states of one head."""
    return torch.tensor(rows, dtype=torch.uint8)[None, None]


@pytest.fixture(params=[4, 8, 512], ids="{} queries per tile".format)
def rows_of_a_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(decoding, "_QUERIES", request.param)
    return int(request.param)


LISTS = st.lists(st.lists(st.sampled_from([ABSENT, PARTIAL, FULL]), min_size=3, max_size=3), min_size=1, max_size=4)


@given(LISTS, st.integers(0, 3), st.integers(0, 7))
def test_a_pair_is_in_one_tile_if_its_block_is_listed_and_in_none_otherwise(
    rows_of_a_tile: int, rows: list[list[int]], fewer_queries: int, fewer_keys: int
) -> None:
    queries, keys = len(rows) * BLOCK[0] - fewer_queries, 3 * BLOCK[1] - fewer_keys
    found = tiles_of(states_of(rows), queries, keys)
    for query in range(queries):
        for key in range(keys):
            state = rows[query // BLOCK[0]][key // BLOCK[1]]
            masked = [t.masked for t in found if t.q0 <= query < t.q1 and t.k0 <= key < t.k1]
            assert masked == ([] if state == ABSENT else [state != FULL])
    assert all(0 < tile.q1 - tile.q0 <= rows_of_a_tile and tile.k0 < tile.k1 <= keys for tile in found)


def test_neighbouring_blocks_of_one_kind_share_a_tile() -> None:
    found = tiles_of(states_of([[FULL, FULL, PARTIAL, ABSENT, PARTIAL, PARTIAL]]), 4, 48)
    assert [(tile.k0, tile.k1, tile.masked) for tile in found] == [(0, 16, False), (16, 24, True), (32, 48, True)]


def test_a_block_is_skipped_only_if_no_head_and_no_sequence_lists_it() -> None:
    states = torch.full((2, 2, 1, 3), ABSENT, dtype=torch.uint8)
    states[1, 0, 0, 1] = FULL
    assert [(tile.k0, tile.k1, tile.masked) for tile in tiles_of(states, 4, 24)] == [(8, 16, True)]


def test_no_key_is_skipped_if_the_lists_cannot_be_read_without_waiting() -> None:
    states = states_of([[ABSENT, FULL, ABSENT]]).to("meta")
    assert [(tile.k0, tile.k1, tile.masked) for tile in tiles_of(states, 4, 24)] == [(0, 24, True)]


def test_without_a_mask_all_keys_are_visible() -> None:
    assert [(tile.k0, tile.k1, tile.masked) for tile in tiles_of(None, 4, 24)] == [(0, 24, False)]


@pytest.mark.parametrize(("splits", "most"), [(1, 24), (2, 12), (5, 4), (24, 1), (60, 1)])
def test_splits_bound_the_keys_of_a_tile(splits: int, most: int) -> None:
    found = tiles_of(None, 4, 24, splits)
    assert [tile.k0 for tile in found] == list(range(0, 24, most))
    assert [tile.k1 for tile in found] == [*range(most, 24, most), 24]


@pytest.mark.parametrize(("scores", "most"), [(2 * 4 * 500, 500), (2 * 4 * 20, decoding._FEWEST_KEYS)])
def test_the_size_of_a_tile_is_bounded_by_its_scores_but_has_a_minimum_of_keys(
    scores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_SCORES", scores)
    assert {tile.k1 - tile.k0 for tile in tiles_of(None, 4, 6 * most)} == {most}
