"""A host simulation of the sm90 kernel for large head dimensions. All clusters must end, for all work tiles and every
order of execution, and must have added to every dq tile once per work tile that visits it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.barriers import run
from kit.large_head_dim import Config, Grid

CONFIGS = {
    "features to 128": Config(stages=2, dout_stages=2, ds_buffers=2, dq_buffers=2, ctas=1, atoms=2, features=True),
    "192, 128": Config(stages=2, dout_stages=2, ds_buffers=2, dq_buffers=2, ctas=2, atoms=3),
    "192, 192": Config(stages=2, dout_stages=2, ds_buffers=2, dq_buffers=1, ctas=2, atoms=3),
    "features to 192": Config(stages=2, dout_stages=2, ds_buffers=2, dq_buffers=1, ctas=2, atoms=3, features=True),
    "256": Config(stages=2, dout_stages=1, ds_buffers=1, dq_buffers=1, ctas=2, atoms=4),
    "features to 256": Config(stages=2, dout_stages=1, ds_buffers=1, dq_buffers=1, ctas=2, atoms=4, features=True),
}
BANDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=6)
RANDOM = st.randoms(use_true_random=False)


def bands(ends: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The query blocks of work tiles: ranges, of which many are empty."""
    return [tuple(range(begin, end)) for begin, end in ends]


def ascending(tiles: list[tuple[int, ...]]) -> Callable[[int, int], int]:
    return lambda number, query_block: sum(query_block in queries for queries in tiles[:number])


def descending(tiles: list[tuple[int, ...]]) -> Callable[[int, int], int]:
    return lambda number, query_block: sum(query_block in queries for queries in tiles[number + 1 :])


def ring(size: int, static: bool = True) -> Grid:
    """A wave with a staggered start.

    Work tile n visits query blocks n, n + 1, ..., n - 1 (mod size), and adds to each
    after those that begin behind it.
    """
    tiles = [tuple((number + i) % size for i in range(size)) for number in range(size)]
    return Grid(tiles, lambda number, query_block: (query_block - number) % size, size, static)


def ends(config: Config, grid: Grid, rng: random.Random) -> bool:
    return run(grid.roles(config), rng)


def check_adds(config: Config, grid: Grid) -> None:
    visits = {block: [n for n, tile in enumerate(grid.tiles) if block in tile] for tile in grid.tiles for block in tile}
    want = {(block, rank): numbers for block, numbers in visits.items() for rank in range(config.ctas)}
    assert {tile: sorted(numbers) for tile, numbers in grid.adds.items()} == want
    assert sorted(grid.stores) == sorted(want)
    if (before := grid.adds_before) is not None:
        for (block, _), numbers in grid.adds.items():
            assert [before(number, block) for number in numbers] == list(range(len(numbers)))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15)
@given(ends_of=BANDS, clusters=st.integers(1, 3), rng=RANDOM)
def test_unordered_adds_end_and_are_complete(
    name: str, ends_of: list[tuple[int, int]], clusters: int, rng: random.Random
) -> None:
    grid = Grid(bands(ends_of), clusters=clusters)
    assert ends(CONFIGS[name], grid, rng)
    check_adds(CONFIGS[name], grid)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15)
@given(ends_of=BANDS, clusters=st.integers(1, 3), rng=RANDOM)
def test_ordered_adds_end_and_keep_their_order(
    name: str, ends_of: list[tuple[int, int]], clusters: int, rng: random.Random
) -> None:
    tiles = bands(ends_of)
    grid = Grid(tiles, ascending(tiles), clusters)
    assert ends(CONFIGS[name], grid, rng)
    check_adds(CONFIGS[name], grid)


@settings(max_examples=15)
@given(size=st.integers(1, 5), rng=RANDOM)
def test_a_wave_with_a_staggered_start_ends_and_keeps_its_order(size: int, rng: random.Random) -> None:
    grid = ring(size)
    assert ends(CONFIGS["256"], grid, rng)
    check_adds(CONFIGS["256"], grid)


# ---- planted faults, which show that the simulation can find a deadlock ----


@pytest.mark.parametrize("steps", [[2, 0, 0], [0, 0, 1], [1, 0, 2], [0, 0, 0, 0]], ids=str)
def test_the_simulation_finds_the_deadlock_of_empty_work_tiles_that_arrive(steps: list[int]) -> None:
    config = replace(CONFIGS["features to 128"], zero_tiles_arrive=True)
    tiles = [tuple(range(count)) for count in steps]
    results = [ends(config, Grid(tiles), random.Random(seed)) for seed in range(300)]
    assert not all(results)
    assert any(results)


def test_the_simulation_finds_the_deadlock_of_adds_that_wait_for_later_work_tiles() -> None:
    tiles = [(0, 1)] * 4
    assert not ends(CONFIGS["256"], Grid(tiles, descending(tiles)), random.Random(0))


def test_the_simulation_finds_the_deadlock_of_a_staggered_start_from_a_counter() -> None:
    """A cluster may take two work tiles of a wave, of which the first waits for the second."""
    results = [ends(CONFIGS["256"], ring(2, static=False), random.Random(seed)) for seed in range(100)]
    assert not all(results)


def test_the_simulation_finds_the_deadlock_of_adds_that_are_published_too_late() -> None:
    assert not ends(replace(CONFIGS["256"], publishes_late=True), ring(4), random.Random(0))


@pytest.mark.parametrize("field", ["dq_buffers", "ds_buffers"])
def test_the_simulation_runs_with_more_buffers_too(field: str) -> None:
    config = replace(CONFIGS["256"], **{field: 3})
    tiles = [(0, 1, 2), (), (1, 2), (0,)]
    grid = Grid(tiles, clusters=2)
    assert ends(config, grid, random.Random(0))
    check_adds(config, grid)
