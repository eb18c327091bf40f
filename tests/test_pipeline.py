"""Host simulations of the sm90 kernels. All CTAs must end, for all work tiles and every order of execution, and must
have added to every dq tile once per work tile that visits it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import large_head_dim, main_loop
from kit.barriers import run
from kit.cta import Grid
from kit.main_loop import CONSUMER_WARPS

Large, Main = large_head_dim.Config, main_loop.Config
ALONE = Large(stages=2, dout_stages=2, ds_buffers=2, dq_buffers=2, ctas=1, atoms=2, features=True)
PAIR = Large(stages=2, dout_stages=2, ds_buffers=2, dq_buffers=1, ctas=2, atoms=3)
PAIR_256 = Large(stages=2, dout_stages=1, ds_buffers=1, dq_buffers=1, ctas=2, atoms=4)
LARGE = {
    "features to 128": ALONE,
    "192, 128": replace(PAIR, dq_buffers=2),
    "192, 192": PAIR,
    "features to 192": replace(PAIR, features=True),
    "256": PAIR_256,
    "features to 256": replace(PAIR_256, features=True),
    "trained score_mod to 192": replace(PAIR, features=True, sends_scores=True),
    "trained score_mod to 256": replace(PAIR_256, features=True, sends_scores=True),
}
MAIN = {
    "32": Main(stages=4, dout_stages=3, by_queries=True, meets_at_dq=True, ds_buffers=1, shared_buffer=True),
    "32, short loops": Main(shared_buffer=True),
    "64": Main(orders_scores=True, early_iterations=2, shared_buffer=True),
    "96": Main(early_dv=True, early_iterations=2),
    "128": Main(early_dv=True, orders_scores=True, early_iterations=2, meets_at_dq=True),
    "128, not early": Main(early_dv=True, orders_scores=True, meets_at_dq=True),
}
BIAS = {
    "32, two batch entries": Main(batch_entries=2, shared_buffer=True),
    "64, bias": MAIN["64"],
    "128, bias": MAIN["128"],
}
LISTED = ["64", "128"]  # with kernels for block masks
LAST_WRITES = ["64", "128", "128, not early"]
Bands = list[tuple[int, int]]
BANDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=6)
RANDOM = st.randoms(use_true_random=False)


def tiles_of(bands: Bands) -> list[tuple[int, ...]]:
    """The query blocks of work tiles: ranges, of which many are empty."""
    return [tuple(range(begin, end)) for begin, end in bands]


def ascending(tiles: list[tuple[int, ...]]) -> Callable[[int, int], int]:
    return lambda number, query_block: sum(query_block in queries for queries in tiles[:number])


def descending(tiles: list[tuple[int, ...]]) -> Callable[[int, int], int]:
    return lambda number, query_block: sum(query_block in queries for queries in tiles[number + 1 :])


def ring(size: int, starts: int | None = None, static: bool = True) -> Grid:
    """A wave with a staggered start of ``size`` work tiles, which visit as many query blocks.

    Work tile n begins at one of ``starts`` query blocks (default: all) and wraps around. Work tiles add to a query
    block in the order in which they come to it; those that come to it in the same iteration add in ascending order.
    """
    starts = starts or size
    begins = [number % starts * (size // starts) for number in range(size)]
    tiles = [tuple((begin + i) % size for i in range(size)) for begin in begins]

    def adds_before(number: int, query_block: int) -> int:
        arrivals = [((query_block - begin) % size, other) for other, begin in enumerate(begins)]
        return sum(arrival < arrivals[number] for arrival in arrivals)

    return Grid(tiles, adds_before, size, static)


def ends(config: Large | Main, grid: Grid, rng: random.Random) -> bool:
    if isinstance(config, Main):
        return run(main_loop.main_loop_roles(config, grid), rng)
    return run(large_head_dim.large_head_dim_roles(config, grid), rng)


def check_adds(grid: Grid, ctas: int = 1, middle_in_order: bool = True) -> None:
    """Every dq tile has one add of each work tile that visits it; the first stores; counted adds are in order."""
    visits = {block: [n for n, tile in enumerate(grid.tiles) if block in tile] for tile in grid.tiles for block in tile}
    want = {(block, rank): numbers for block, numbers in visits.items() for rank in range(ctas)}
    assert {tile: sorted(numbers) for tile, numbers in grid.adds.items()} == want
    assert sorted(grid.stores) == sorted(want)
    if (before := grid.adds_before) is None:
        return
    for (block, _), numbers in grid.adds.items():
        order = [before(number, block) for number in numbers]
        if middle_in_order:
            assert order == list(range(len(order)))
        else:
            assert order[0] == 0


# ---- the kernel for large head dimensions ----


@pytest.mark.parametrize("name", LARGE)
@settings(max_examples=15)
@given(bands=BANDS, clusters=st.integers(1, 3), ordered=st.booleans(), rng=RANDOM)
def test_clusters_end_and_add_completely(
    name: str, bands: Bands, clusters: int, ordered: bool, rng: random.Random
) -> None:
    tiles = tiles_of(bands)
    grid = Grid(tiles, ascending(tiles) if ordered else None, clusters)
    assert ends(LARGE[name], grid, rng)
    check_adds(grid, LARGE[name].ctas)


@settings(max_examples=15)
@given(size=st.integers(1, 6), starts=st.integers(1, 6), rng=RANDOM)
def test_a_wave_with_a_staggered_start_ends_and_keeps_its_order(size: int, starts: int, rng: random.Random) -> None:
    grid = ring(size, min(starts, size))
    assert ends(PAIR_256, grid, rng)
    check_adds(grid, ctas=2)


# ---- the kernel with two consumer warpgroups ----


@pytest.mark.parametrize("name", MAIN)
@settings(max_examples=15)
@given(BANDS, st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), RANDOM)
def test_ctas_end_and_add_completely(
    name: str, bands: Bands, ctas: int, ordered: bool, tma_dkdv: bool, poisoned: bool, rng: random.Random
) -> None:
    tiles = tiles_of(bands)
    grid = Grid(tiles, ascending(tiles) if ordered else None, ctas)
    assert ends(replace(MAIN[name], tma_dkdv=tma_dkdv, poisoned=poisoned), grid, rng)
    check_adds(grid)


@pytest.mark.parametrize("name", BIAS)
@settings(max_examples=15)
@given(BANDS, st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), RANDOM)
def test_ctas_that_share_a_bias_end_and_add_completely(
    name: str, bands: Bands, ctas: int, ordered: bool, orders_bias: bool, tma_dkdv: bool, rng: random.Random
) -> None:
    tiles = tiles_of(bands)
    grid = Grid(tiles, ascending(tiles) if ordered else None, ctas)
    assert ends(replace(BIAS[name], orders_bias=orders_bias, tma_dkdv=tma_dkdv), grid, rng)
    check_adds(grid)
    for (block, _), numbers in grid.bias_adds.items():
        assert numbers == [n for n, tile in enumerate(tiles) if block in tile]
    assert not orders_bias or len(grid.bias_adds) == CONSUMER_WARPS * len({block for tile in tiles for block in tile})


@pytest.mark.parametrize("name", LAST_WRITES)
@settings(max_examples=15)
@given(BANDS, st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans(), RANDOM)
def test_ctas_whose_last_add_can_write_dq_end_and_add_completely(
    name: str,
    bands: Bands,
    ctas: int,
    finishes: bool,
    first_and_last: bool,
    tma_dkdv: bool,
    poisoned: bool,
    rng: random.Random,
) -> None:
    tiles = tiles_of(bands)
    grid = Grid(tiles, ascending(tiles), ctas)
    options = {"finishes": finishes, "first_and_last": first_and_last, "tma_dkdv": tma_dkdv, "poisoned": poisoned}
    assert ends(replace(MAIN[name], last_writes_dq=True, **options), grid, rng)
    check_adds(grid, middle_in_order=not first_and_last)


@pytest.mark.parametrize("name", LAST_WRITES)
@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 5), unique=True, max_size=5), max_size=6),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    RANDOM,
)
def test_ctas_with_query_blocks_in_any_order_end_and_add_completely(
    name: str, tiles: list[list[int]], ctas: int, finishes: bool, first_and_last: bool, rng: random.Random
) -> None:
    """As lists of a block mask are: an add waits for adds of earlier work tiles only."""
    listed = [tuple(tile) for tile in tiles]
    grid = Grid(listed, ascending(listed), ctas)
    config = replace(MAIN[name], last_writes_dq=True, finishes=finishes, first_and_last=first_and_last)
    assert ends(config, grid, rng)
    check_adds(grid, middle_in_order=not first_and_last)


@pytest.mark.parametrize("name", LISTED)
@settings(max_examples=15)
@given(BANDS, st.integers(1, 3), st.booleans(), st.booleans(), RANDOM)
def test_ctas_that_read_bits_from_ds_end_and_find_their_bits(
    name: str, bands: Bands, ctas: int, ordered: bool, last_writes_dq: bool, rng: random.Random
) -> None:
    tiles = tiles_of(bands)
    last_writes_dq = last_writes_dq and ordered
    grid = Grid(tiles, ascending(tiles) if ordered else None, ctas)
    options = {"loads_bits": True, "tma_dkdv": True, "last_writes_dq": last_writes_dq, "finishes": last_writes_dq}
    assert ends(replace(MAIN[name], **options), grid, rng)
    check_adds(grid)


# ---- planted faults, which show that the simulations can find a deadlock ----


@pytest.mark.parametrize("steps", [[2, 0, 0], [0, 0, 1], [1, 0, 2], [0, 0, 0, 0]], ids=str)
def test_the_simulation_finds_the_deadlock_of_empty_work_tiles_that_arrive(steps: list[int]) -> None:
    tiles = [tuple(range(count)) for count in steps]
    faulty = replace(ALONE, zero_tiles_arrive=True)
    results = [ends(faulty, Grid(tiles), random.Random(seed)) for seed in range(300)]
    assert not all(results)
    assert any(results)


@pytest.mark.parametrize("config", [PAIR_256, MAIN["128"], replace(MAIN["128"], last_writes_dq=True)], ids=str)
def test_the_simulation_finds_the_deadlock_of_adds_that_wait_for_later_work_tiles(config: Any) -> None:
    tiles = [(0, 1)] * 4
    assert not ends(config, Grid(tiles, descending(tiles)), random.Random(0))


def test_the_simulation_finds_the_deadlock_of_a_staggered_start_from_a_counter() -> None:
    """A cluster may take two work tiles of a wave, of which the first waits for the second."""
    results = [ends(PAIR_256, ring(2, static=False), random.Random(seed)) for seed in range(100)]
    assert not all(results)


def test_the_simulation_finds_the_deadlock_of_adds_that_are_published_too_late() -> None:
    assert not ends(replace(PAIR_256, publishes_late=True), ring(4), random.Random(0))


def test_the_simulation_finds_the_deadlock_of_bias_adds_that_are_published_too_late() -> None:
    """A CTA that publishes an add before its next one never publishes the last add, for which another CTA waits."""
    faulty = replace(BIAS["64, bias"], orders_bias=True, bias_published_late=True)
    assert not ends(faulty, Grid([(0, 1), (0, 1)], None, 2, static=True), random.Random(0))
    assert ends(
        replace(faulty, bias_published_late=False), Grid([(0, 1), (0, 1)], None, 2, static=True), random.Random(0)
    )


def test_the_simulation_finds_the_deadlock_of_consumers_that_zero_rows_after_they_wait_for_scores() -> None:
    """One consumer waits until the other has zeroed its rows with it, and that one for the first one's signal."""
    faulty = replace(MAIN["128"], poisoned=True, zeros_after_signal=True)
    assert not ends(faulty, Grid([(0, 1, 2)]), random.Random(0))


@pytest.mark.parametrize("name", MAIN)
def test_the_simulation_finds_a_product_that_still_reads_an_overwritten_ds(name: str) -> None:
    """With one buffer of dS that both consumers write, a product of the iteration before still reads it."""
    faulty = replace(MAIN[name], ds_buffers=1, by_queries=False)
    with pytest.raises(AssertionError, match="a product still reads dS"):
        for seed in range(100):
            ends(faulty, Grid([(0, 1, 2, 3)]), random.Random(seed))


def test_the_simulation_finds_warps_that_do_not_meet_before_they_write_the_only_ds() -> None:
    """A warp that is ahead writes dS of the next iteration while the product of the other warp reads it."""
    faulty = replace(MAIN["32"], meets_at_dq=False)
    with pytest.raises(AssertionError, match="a product still reads dS"):
        for seed in range(100):
            ends(faulty, Grid([(0, 1, 2, 3)]), random.Random(seed))


@pytest.mark.parametrize("name", LISTED)
def test_the_simulation_finds_gradients_that_are_staged_over_bits_of_the_next_work_tile(name: str) -> None:
    """The loader may be a work tile ahead of consumers that stage dk and dv in dS."""
    faulty = replace(MAIN[name], loads_bits=True, tma_dkdv=False)
    with pytest.raises(AssertionError, match="the bits of a warp were overwritten"):
        for seed in range(100):
            ends(faulty, Grid([(0, 1, 2, 3)] * 4), random.Random(seed))


@pytest.mark.parametrize("name", LISTED)
def test_the_simulation_finds_bits_that_are_loaded_before_ds_is_free(name: str) -> None:
    faulty = replace(MAIN[name], loads_bits=True, tma_dkdv=True, bits_before_q=True)
    with pytest.raises(AssertionError, match=r"where bits are loaded|were overwritten"):
        for seed in range(100):
            ends(faulty, Grid([(0, 1, 2, 3)]), random.Random(seed))
