"""The index arithmetic that host and kernels share agrees with plain enumeration."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.host import load_host

host = load_host()
Causal = host.CausalAlignment
INT_MAX = 2**31 - 1
WINDOWS = (-1, 0, 1, 2, 5, 17, 1000, INT_MAX)


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int, causal: Any) -> np.ndarray:
    """(seqlen_q, seqlen_k) bool: i + off - left <= j <= i + off + right, -1 unbounded."""
    off = 0 if causal == Causal.kTopLeft else seqlen_k - seqlen_q
    i, j = np.arange(seqlen_q, dtype=np.int64)[:, None], np.arange(seqlen_k, dtype=np.int64)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if left >= 0:
        seen &= i + off - left <= j
    if right >= 0:
        seen &= j <= i + off + right
    return seen


def tiles_of(seen: np.ndarray, block_m: int, block_n: int, beyond: int = 2) -> dict[tuple[int, int], np.ndarray]:
    """Every tile, clipped at the lengths, and a few tiles beyond the ends."""
    rows, keys = seen.shape
    return {
        (m, n): seen[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
        for m in range(-(-rows // block_m) + beyond)
        for n in range(-(-keys // block_n) + beyond)
    }


def as_range(blocks: list[int]) -> tuple[int, int]:
    """Half-open range of consecutive blocks."""
    if not blocks:
        return (0, 0)
    assert blocks == list(range(blocks[0], blocks[-1] + 1))
    return (blocks[0], blocks[-1] + 1)


def masks(max_length: int = 70) -> st.SearchStrategy[tuple[int, int, int, int, Any]]:
    window = st.one_of(st.sampled_from(WINDOWS), st.integers(-1, 2 * max_length))
    kinds = st.sampled_from([Causal.kNone, Causal.kBottomRight, Causal.kTopLeft])
    lengths = st.integers(0, max_length)
    masks = st.tuples(lengths, lengths, window, window, kinds)
    return masks.map(lambda m: (*m[:3], m[3] if m[4] == Causal.kNone else 0, m[4]))


blocks = st.sampled_from([1, 2, 3, 7, 16, 64])


@given(mask=masks())
@settings(max_examples=500, deadline=None)
def test_visible_agrees_with_the_definition(mask: tuple[int, int, int, int, Any]) -> None:
    v, seen = host.make_visibility(*mask), visible_pairs(*mask)
    got = [[v.visible(i, j) for j in range(-2, mask[1] + 2)] for i in range(-2, mask[0] + 2)]
    np.testing.assert_array_equal(np.array(got), np.pad(seen, 2))
    assert v.full() == bool(seen.all()) or seen.size == 0


@given(mask=masks(), block_m=blocks, block_n=blocks)
@settings(max_examples=1500, deadline=None)
def test_a_tile_is_visited_iff_it_contains_a_visible_pair(
    mask: tuple[int, int, int, int, Any], block_m: int, block_n: int
) -> None:
    v = host.make_visibility(*mask)
    tiles = tiles_of(visible_pairs(*mask), block_m, block_n)
    by_row, by_column = defaultdict(list), defaultdict(list)
    for (m, n), tile in tiles.items():
        if tile.any():
            by_row[m].append(n)
            by_column[n].append(m)
    for m in {m for m, _ in tiles}:
        assert host.key_blocks(v, m, block_m, block_n) == as_range(by_row[m])
    for n in {n for _, n in tiles}:
        assert host.query_blocks(v, n, block_m, block_n) == as_range(by_column[n])


@given(mask=masks())
@settings(max_examples=500, deadline=None)
def test_a_row_sees_a_key_iff_one_of_its_pairs_is_visible(mask: tuple[int, int, int, int, Any]) -> None:
    v = host.make_visibility(*mask)
    seen = visible_pairs(*mask).any(axis=1)
    assert [host.sees_a_key(v, i) for i in range(mask[0])] == seen.tolist()
    assert not host.sees_a_key(v, mask[0])


@given(mask=masks(), block_m=blocks, block_n=blocks)
@settings(max_examples=1500, deadline=None)
def test_a_tile_is_interior_iff_all_of_it_is_visible(
    mask: tuple[int, int, int, int, Any], block_m: int, block_n: int
) -> None:
    v = host.make_visibility(*mask)
    for (m, n), tile in tiles_of(visible_pairs(*mask), block_m, block_n).items():
        begin, end = host.interior_query_blocks(v, n, block_m, block_n)
        assert (begin <= m < end) == (tile.shape == (block_m, block_n) and bool(tile.all()))


@given(
    mask=masks(300),
    first_key=st.integers(0, 5),
    first_query=st.integers(0, 5),
    row=st.integers(0, 127),
    lane=st.integers(0, 3),
    block_m=st.sampled_from([64, 128]),
)
@settings(max_examples=1500, deadline=None)
def test_the_bit_of_a_column_is_set_iff_its_pair_is_visible(
    mask: tuple[int, int, int, int, Any], first_key: int, first_query: int, row: int, lane: int, block_m: int
) -> None:
    v = host.make_visibility(*mask)
    key, query, column = 64 * first_key, block_m * first_query, 2 * lane
    bits = getattr(host, f"columns_that_see_{block_m}")(v, key, query, row, column)
    for n in range(block_m // 4):
        i = query + column + n // 2 * 8 + n % 2
        assert bits >> n & 1 == v.visible(i, key + row), (n, i)


@given(mask=masks(), block_m=blocks, block_n=blocks)
@settings(max_examples=500, deadline=None)
def test_a_transposed_mask_has_the_same_pairs(mask: tuple[int, int, int, int, Any], block_m: int, block_n: int) -> None:
    v, seen = host.transposed(host.make_visibility(*mask)), visible_pairs(*mask).T
    got = [[v.visible(i, j) for j in range(-2, mask[0] + 2)] for i in range(-2, mask[1] + 2)]
    np.testing.assert_array_equal(np.array(got), np.pad(seen, 2))
    visited = defaultdict(list)
    for (m, n), tile in tiles_of(seen, block_m, block_n).items():
        visited[n] += [m] if tile.any() else []
        begin, end = host.interior_query_blocks(v, n, block_m, block_n)
        assert (begin <= m < end) == (tile.shape == (block_m, block_n) and bool(tile.all()))
    for n, tiles in visited.items():
        assert host.query_blocks(v, n, block_m, block_n) == as_range(tiles)


@given(mask=masks(300), first_row=st.integers(0, 5), first_column=st.integers(0, 5), row=st.integers(0, 63))
@settings(max_examples=500, deadline=None)
def test_bits_of_a_transposed_mask_belong_to_keys(
    mask: tuple[int, int, int, int, Any], first_row: int, first_column: int, row: int
) -> None:
    v = host.make_visibility(*mask)
    query, key = 64 * first_row, 64 * first_column
    for column in range(0, 8, 2):
        bits = host.columns_that_see_64(host.transposed(v), query, key, row, column)
        for n in range(16):
            assert bits >> n & 1 == v.visible(query + row, key + column + n // 2 * 8 + n % 2)


LOOPS = {
    "first_index": st.integers(0, 9),
    "heads": st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda h: (h[0], h[0] + h[1])),
    "blocks": st.tuples(st.integers(0, 5), st.integers(0, 6)).map(lambda b: (b[0], b[0] + b[1])),
}


@given(**LOOPS, descending=st.booleans(), by_heads=st.booleans())
def test_a_query_loop_visits_the_blocks_of_all_heads_in_order(
    first_index: int, heads: tuple[int, int], blocks: tuple[int, int], descending: bool, by_heads: bool
) -> None:
    in_order = list(range(*blocks))[::-1] if descending else list(range(*blocks))
    if by_heads:
        expected = [(head, block) for head in range(*heads) for block in in_order]
    else:
        expected = [(head, block) for block in in_order for head in range(*heads)]
    positions = host.query_positions_by_heads if by_heads else host.query_positions
    first_block = blocks[1] - 1 if descending else blocks[0]
    assert positions(first_index, heads, blocks, first_block, descending) == [expected] * 3


@given(**LOOPS, start=st.integers(0, 5))
def test_a_staggered_loop_wraps_around_after_the_last_block(
    first_index: int, heads: tuple[int, int], blocks: tuple[int, int], start: int
) -> None:
    size = blocks[1] - blocks[0]
    first_block = blocks[0] + start % size if size > 0 else blocks[0]
    in_order = [blocks[0] + (first_block - blocks[0] + step) % size for step in range(size)]
    expected = [(head, block) for block in in_order for head in range(*heads)]
    assert host.query_positions_staggered(first_index, heads, blocks, first_block, False) == [expected] * 3


@given(
    first_index=st.integers(0, 9),
    first_head=st.integers(0, 9),
    entries=st.lists(st.tuples(*[st.integers(-1, 2**20)] * 4), max_size=6),
    backwards=st.booleans(),
)
def test_a_listed_loop_visits_the_entries_of_its_list_in_order(
    first_index: int, first_head: int, entries: list[tuple[int, int, int, int]], backwards: bool
) -> None:
    expected = [
        [first_index + i, first_head + head, block, bits, turns % 2**16, turns % 2**32 // 2**16]
        for i, (block, head, bits, turns) in enumerate(entries[::-1] if backwards else entries)
    ]
    assert host.listed_positions(first_index, first_head, entries, backwards) == expected


@pytest.mark.parametrize("length", [2**30, INT_MAX])
@pytest.mark.parametrize("window", [-1, 0, 4096, INT_MAX, 2**62])
def test_lengths_and_windows_up_to_the_integer_limit_do_not_overflow(length: int, window: int) -> None:
    block = 128
    last = -(-length // block) - 1
    v = host.make_visibility(length, length, window, 0, Causal.kBottomRight)
    reach = last + 1 if window < 0 else min(-(-window // block), last)
    first = 0 if window < 0 or window >= length else max(0, (last * block - window) // block)
    assert host.key_blocks(v, last, block, block) == (first, last + 1)
    assert host.query_blocks(v, 0, block, block)[0] == 0
    assert host.query_blocks(v, 0, block, block)[1] in (min(reach + 2, last + 1), min(reach + 1, last + 1))
    full = host.make_visibility(length, length, -1, -1, Causal.kNone)
    assert full.full() and host.key_blocks(full, last, block, block) == (0, last + 1)
    assert host.interior_query_blocks(full, last - 1, block, block)[0] == 0


# Splits


def test_every_iteration_of_a_query_loop_belongs_to_one_split_and_splits_are_even() -> None:
    for steps in range(40):
        for num_splits in range(1, 45):
            loops = [range(*host.split_query_loop(steps, s, num_splits)) for s in range(num_splits)]
            assert [step for loop in loops for step in loop] == list(range(steps))
            assert max(map(len, loops)) - min(map(len, loops)) <= 1
    assert host.split_query_loop(INT_MAX, 98, 99) == (INT_MAX * 98 // 99, INT_MAX)


@given(mask=masks(), block_m=blocks, block_n=blocks, heads_per_kv=st.integers(1, 6), num_splits=st.integers(1, 12))
@settings(max_examples=2000, deadline=None)
def test_each_key_block_adds_to_a_dq_tile_once(
    mask: tuple[int, int, int, int, Any], block_m: int, block_n: int, heads_per_kv: int, num_splits: int
) -> None:
    """Each key block adds to a dq tile once, whatever the number of CTAs that share its query loop."""
    v = host.make_visibility(*mask)
    touched: dict[tuple[int, int], list[int]] = defaultdict(list)
    per_pass = host.heads_per_pass(heads_per_kv, num_splits)
    for n in range(-(-mask[1] // block_n)):
        begin, end = host.query_blocks(v, n, block_m, block_n)
        for split in range(num_splits):
            first, last = host.split_query_loop((end - begin) * heads_per_kv, split, num_splits)
            position = host.QueryLoopPosition(first, end - begin, per_pass)
            for _ in range(first, last):
                touched[position.head, begin + position.tile].append(n)
                position.advance(end - begin, per_pass)
    for m in range(-(-mask[0] // block_m)):
        for head in range(heads_per_kv):
            assert touched[head, m] == list(range(*host.key_blocks(v, m, block_m, block_n)))


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_a_query_loop_visits_the_heads_of_a_group_tile_by_tile(tiles: int) -> None:
    for heads in range(1, 9):
        for num_splits in range(1, 12):
            per_pass = host.heads_per_pass(heads, num_splits)
            assert heads % per_pass == 0 and per_pass == max(
                d for d in range(1, heads + 1) if heads % d == 0 and (d == 1 or d * num_splits <= heads)
            )
            loop = [
                (head, tile)
                for first in range(0, heads, per_pass)
                for tile in range(tiles)
                for head in range(first, first + per_pass)
            ]
            position = host.QueryLoopPosition(0, tiles, per_pass)
            for step, place in enumerate(loop):
                started_here = host.QueryLoopPosition(step, tiles, per_pass)
                assert (position.head, position.tile) == (started_here.head, started_here.tile) == place
                position.advance(tiles, per_pass)


def greedy(loops: list[int], at_once: int) -> int:
    """The time at which the last CTA ends, if each takes one iteration more than its loop and starts when it can."""
    free = [0] * at_once
    for loop in loops:
        heapq.heapreplace(free, free[0] + loop + 1)
    return max(free)


@pytest.mark.parametrize("causal", [False, True])
def test_query_loops_are_split_if_that_saves_time_and_takes_little_memory(causal: bool) -> None:
    for at_once in (1, 2, 8, 108, 132):
        for work_tiles in (1, 2, 3, 5, 8, 16, 31, 66, 67, 107, 108, 131, 132, 133, 200, 264, 265, 5000):
            for steps in (1, 2, 3, 7, 16, 128, 1000):
                loops = [steps - steps * n // work_tiles for n in range(work_tiles)] if causal else [steps] * work_tiles
                splits = host.split_count(work_tiles, loops[work_tiles // 2], steps, at_once)
                assert 1 <= splits <= steps
                if splits == 1:
                    continue
                assert work_tiles * splits <= 3 * at_once
                shared = [
                    end - begin
                    for loop in loops
                    for begin, end in (host.split_query_loop(loop, split, splits) for split in range(splits))
                ]
                # The rule knows only the mean and the longest of unequal loops.
                assert greedy(shared, at_once) <= (1.05 if causal else 0.95) * greedy(loops, at_once)


def test_one_key_block_of_many_queries_fills_the_device() -> None:
    assert host.split_count(1, 256, 256, 132) == 128  # two iterations each; with 132 splits, some would still have two
    assert host.split_count(16, 256, 256, 132) == 8
    assert host.split_count(16, 272, 512, 132) == 16  # causal: the longest loop counts
    assert host.split_count(100, 64, 64, 132) == 1
    assert host.split_count(80, 64, 64, 132) == 3  # in two waves, with a third of a loop each
    assert host.split_count(5000, 64, 64, 132) == 1


# Ordered accumulation


class Ordered:
    """Work tiles of `heads` (batch, head) with the same mask, in the order of the schedule, run by `workers` CTAs."""

    def __init__(self, v: Any, block_m: int, block_n: int, heads: int, head_group: int, reverse: bool = False) -> None:
        self.v, self.block_m, self.block_n, self.reverse = v, block_m, block_n, reverse
        num_blocks = -(-v.seqlen_k // block_n)
        order = [host.dense_work_tile(index, heads, 1, num_blocks, head_group) for index in range(heads * num_blocks)]
        self.work_tiles = [(batch, self.steps(num_blocks - 1 - n if reverse else n)) for batch, _, n in order]
        self.semaphores: dict[tuple[int, int], int] = defaultdict(int)

    def steps(self, n: int) -> list[tuple[int, int]]:
        """(query block, adds before) of each iteration of key block n, as the kernels loop."""
        blocks = range(*host.query_blocks(self.v, n, self.block_m, self.block_n))
        before = host.adds_before_descending if self.reverse else host.adds_before_ascending
        ascending = self.reverse or self.v.full()
        return [(m, before(self.v, m, n, self.block_m, self.block_n)) for m in (blocks if ascending else blocks[::-1])]

    def run(self, workers: int, rng: random.Random) -> bool:
        """Whether all work tiles end if CTAs take them from a counter and advance in random order."""
        waiting = list(reversed(self.work_tiles))
        busy: list[list[Any]] = []
        while True:
            while waiting and len(busy) < workers:
                busy.append([*waiting.pop(), 0])
            if not busy:
                return True
            rng.shuffle(busy)
            moved = False
            for worker in list(busy):
                head, steps, step = worker
                if step == len(steps):
                    busy.remove(worker)
                    moved = True
                elif self.semaphores[head, steps[step][0]] == steps[step][1]:
                    self.semaphores[head, steps[step][0]] += 1
                    worker[2] += 1
                    moved = True
                if moved:
                    break
            if not moved:
                return False


@given(mask=masks(60), block_m=st.sampled_from([3, 7, 16]), block_n=st.sampled_from([3, 7, 16]))
@settings(max_examples=1000, deadline=None)
def test_adds_to_a_dq_tile_are_numbered_by_its_key_blocks(
    mask: tuple[int, int, int, int, Any], block_m: int, block_n: int
) -> None:
    v = host.make_visibility(*mask)
    for m in range(-(-mask[0] // block_m)):
        seen = range(*host.key_blocks(v, m, block_m, block_n))
        orders = [host.adds_before_ascending(v, m, n, block_m, block_n) for n in seen]
        assert orders == list(range(len(seen)))
        # The kernels compute the same numbers in this way.
        assert orders == [n - max(m * block_m + v.lo, 0) // block_n for n in seen]
        orders = [host.adds_before_descending(v, m, n, block_m, block_n) for n in seen]
        assert orders == list(reversed(range(len(seen))))
        last_query = min((m + 1) * block_m, v.seqlen_q) - 1
        assert orders == [(min(last_query + v.hi, v.seqlen_k) - 1) // block_n - n for n in seen]


@given(
    mask=masks(40),
    block_m=st.sampled_from([3, 7, 16]),
    block_n=st.sampled_from([3, 7, 16]),
    workers=st.integers(1, 12),
    heads=st.integers(1, 5),
    head_group=st.integers(1, 5),
    reverse=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=1000, deadline=None)
def test_ordered_adds_never_deadlock_whatever_the_number_of_ctas(
    mask: tuple[int, int, int, int, Any],
    block_m: int,
    block_n: int,
    workers: int,
    heads: int,
    head_group: int,
    reverse: bool,
    seed: int,
) -> None:
    v = host.make_visibility(*mask)
    ordered = Ordered(v, block_m, block_n, heads, head_group, reverse)
    assert ordered.run(workers, random.Random(seed))
    for m in range(-(-mask[0] // block_m)):
        begin, end = host.key_blocks(v, m, block_m, block_n)
        assert all(ordered.semaphores[head, m] == end - begin for head in range(heads))


def test_the_simulation_detects_a_deadlock() -> None:
    """A single CTA that takes the key blocks in the wrong order waits forever."""
    ordered = Ordered(host.make_visibility(64, 64, -1, -1, Causal.kNone), 8, 8, heads=1, head_group=1)
    ordered.work_tiles.reverse()
    assert not ordered.run(1, random.Random(0))


def makespan(ordered: Ordered) -> int:
    """The time until all work tiles end, if each has a CTA and an iteration takes one unit."""
    progress = [0] * len(ordered.work_tiles)
    for now in range(10_000):
        if all(done == len(steps) for done, (_, steps) in zip(progress, ordered.work_tiles, strict=True)):
            return now
        ready = [
            index
            for index, (head, steps) in enumerate(ordered.work_tiles)
            if progress[index] < len(steps)
            and ordered.semaphores[head, steps[progress[index]][0]] == steps[progress[index]][1]
        ]
        for index in ready:
            ordered.semaphores[ordered.work_tiles[index][0], ordered.work_tiles[index][1][progress[index]][0]] += 1
            progress[index] += 1
    raise AssertionError("deadlock")


@pytest.mark.parametrize("tiles", [1, 2, 5, 16])
def test_under_a_mask_ordered_adds_take_no_longer_than_the_longest_query_loop(tiles: int) -> None:
    length = 8 * tiles
    causal = host.make_visibility(length, length, -1, 0, Causal.kBottomRight)
    window = host.make_visibility(length, length, 15, 0, Causal.kBottomRight)
    assert makespan(Ordered(causal, 8, 8, 1, 1)) == tiles
    assert makespan(Ordered(causal, 8, 8, 1, 1, reverse=True)) == tiles
    assert makespan(Ordered(window, 8, 8, 1, 1)) == min(tiles, 3)


@given(blocks_apart=st.integers(1, 8), query_blocks=st.integers(1, 6000))
@settings(max_examples=500, deadline=None)
def test_staggered_starts_have_a_constant_distance_until_they_begin_again(blocks_apart: int, query_blocks: int) -> None:
    starts = [host.staggered_start(n, blocks_apart, query_blocks) for n in range(3000)]
    once = [start for start in range(0, query_blocks, blocks_apart) if start + blocks_apart <= query_blocks] or [0]
    assert starts == list(itertools.islice(itertools.cycle(once), len(starts)))


# Waves of a static scheduler


class Waves:
    """Work tiles that a static scheduler assigns to CTAs: (head, [(tile, adds before) of each iteration])."""

    def __init__(self, workers: int, work_tiles: list[tuple[Any, list[tuple[int, int]]]]) -> None:
        self.workers, self.work_tiles = workers, work_tiles
        self.semaphores: dict[tuple[Any, int], int] = defaultdict(int)

    def _loops(self) -> list[list[Any]]:
        """The iterations of each worker, in reverse order."""
        queues = [self.work_tiles[worker :: self.workers] for worker in range(self.workers)]
        return [[(head, *step) for head, steps in queue for step in steps][::-1] for queue in queues]

    def _may_add(self, loop: list[Any]) -> bool:
        return bool(loop) and self.semaphores[loop[-1][:2]] == loop[-1][2]

    def _add(self, loop: list[Any]) -> None:
        head, tile, _ = loop.pop()
        self.semaphores[head, tile] += 1

    def run(self, rng: random.Random) -> bool:
        """Whether all work tiles end if workers advance in random order."""
        loops = self._loops()
        while any(loops):
            able = list(filter(self._may_add, loops))
            if not able:
                return False
            self._add(rng.choice(able))
        return True

    def makespan(self) -> int:
        """The time until all work tiles end, if an iteration takes one unit."""
        loops = self._loops()
        for now in range(100_000):
            if not any(loops):
                return now
            able = list(filter(self._may_add, loops))
            assert able, "deadlock"
            for loop in able:
                self._add(loop)
        raise AssertionError("too long")


def paired_waves(
    workers: int, heads: int, head_group: int, v: Any, block_m: int, block_n: int, group: int, spare_blocks: int
) -> Waves:
    """Mirrored tile pairs. The last `spare_blocks` key blocks contain no keys of the sequence."""
    key_blocks = -(-v.seqlen_k // block_n) + spare_blocks
    pairs = -(-key_blocks // 2)
    work_tiles = []
    for index in range(heads * pairs):
        _, head, number = host.dense_work_tile(index, 1, heads, pairs, head_group)
        first_head = head // head_group * head_group
        first, end = first_head * pairs, min((first_head + head_group) * pairs, heads * pairs)
        wave = host.tiles_in_wave(index, first, end, min(head_group, heads - first_head), workers)
        assert wave.before + wave.rank == number

        def steps_of(n: int, second: bool, wave: Any) -> list[Any]:
            loop = range(*host.query_blocks(v, n, block_m, block_n))
            return [
                (
                    (m, h),
                    host.adds_before_in_pairs(wave, second, host.key_blocks(v, m, block_m, block_n)[1], key_blocks),
                )
                for m in (loop if second else reversed(loop))
                for h in range(group)
            ]

        both = steps_of(key_blocks - pairs + number, False, wave)
        if 2 * (pairs - number) - 1 != key_blocks:
            both += steps_of(pairs - 1 - number, True, wave)
        work_tiles.append((head, both))
    return Waves(workers, work_tiles)


def assert_adds_are_numbered(waves: Waves) -> None:
    """Assert that the numbers of adds before an add to a tile are 0, 1, 2, ..., each once."""
    orders: dict[Any, list[int]] = defaultdict(list)
    for head, steps in waves.work_tiles:
        for tile, before in steps:
            orders[head, tile].append(before)
    assert all(sorted(seen) == list(range(len(seen))) for seen in orders.values())


# CTAs, heads and their groups, and sequences with a causal mask.
PAIRS: dict[str, Any] = {
    "workers": st.integers(1, 20),
    "heads": st.integers(1, 6),
    "head_group": st.integers(1, 6),
    "lengths": st.tuples(st.integers(1, 150), st.integers(1, 150)),
    "kind": st.sampled_from([Causal.kBottomRight, Causal.kTopLeft]),
    "right": st.integers(0, 20),
    "blocks": st.tuples(st.sampled_from([3, 7, 16]), st.sampled_from([3, 7, 16])),
    "seed": st.integers(0, 2**32),
}


@given(**PAIRS, group=st.integers(1, 12), spare_blocks=st.integers(0, 3))
@settings(max_examples=500, deadline=None)
def test_waves_of_mirrored_pairs_add_in_order_and_never_deadlock(
    workers: int,
    heads: int,
    head_group: int,
    lengths: tuple[int, int],
    kind: Any,
    right: int,
    blocks: tuple[int, int],
    seed: int,
    group: int,
    spare_blocks: int,
) -> None:
    v = host.make_visibility(*lengths, -1, right, kind)
    waves = paired_waves(workers, heads, head_group, v, *blocks, group, spare_blocks)
    assert_adds_are_numbered(waves)
    assert waves.run(random.Random(seed))
    for m in range(-(-lengths[0] // blocks[0])):
        begin, end = host.key_blocks(v, m, *blocks)
        assert all(
            waves.semaphores[head, (m, h)] == end - begin for head, h in itertools.product(range(heads), range(group))
        )


@given(**PAIRS)
@settings(max_examples=500, deadline=None)
def test_mirrored_pairs_from_a_counter_never_deadlock_with_last_arriver_finalization(
    workers: int,
    heads: int,
    head_group: int,
    lengths: tuple[int, int],
    kind: Any,
    right: int,
    blocks: tuple[int, int],
    seed: int,
) -> None:
    """CTAs take work tiles one by one from a counter. All work tiles of a head form one wave."""
    v = host.make_visibility(*lengths, -1, right, kind)
    pairs = -(-lengths[1] // (2 * blocks[1]))
    work_tiles = paired_waves(heads * pairs, heads, head_group, v, *blocks, 1, 0).work_tiles
    last: dict[Any, int] = defaultdict(int)
    for head, steps in work_tiles:
        for tile, before in steps:
            last[head, tile] = max(last[head, tile], before)
    added: dict[Any, int] = defaultdict(int)
    loops: list[list[Any]] = [[] for _ in range(workers)]
    taken = 0
    rng = random.Random(seed)
    while taken < len(work_tiles) or any(loops):
        able = []
        for worker, loop in enumerate(loops):
            if not loop:
                if taken < len(work_tiles):
                    able.append(worker)
                continue
            head, tile, before = loop[-1]
            able += [worker] * (added[head, tile] >= (before if before == last[head, tile] else min(before, 1)))
        assert able, "deadlock"
        worker = rng.choice(able)
        if loops[worker]:
            head, tile, _ = loops[worker].pop()
            added[head, tile] += 1
        else:
            head, steps = work_tiles[taken]
            loops[worker] = [(head, *step) for step in reversed(steps)]
            taken += 1
    assert all(added[tile] == before + 1 for tile, before in last.items())


@pytest.mark.parametrize("group", [2, 4, 8])
def test_in_a_wave_of_mirrored_pairs_work_tiles_wait_only_at_the_beginning(group: int) -> None:
    v = host.make_visibility(128, 128, -1, 0, Causal.kBottomRight)
    assert paired_waves(64, 2, 2, v, 1, 2, group, 0).makespan() == group * 2 * (64 + 1) + 31


def ring_waves(workers: int, heads: int, head_group: int, key_blocks: int, query_blocks: int, apart: int) -> Waves:
    """Key blocks of full masks with a staggered start."""
    work_tiles = []
    for index in range(heads * key_blocks):
        _, head, number = host.dense_work_tile(index, 1, heads, key_blocks, head_group)
        first_head = head // head_group * head_group
        first, end = first_head * key_blocks, min(first_head + head_group, heads) * key_blocks
        wave = host.tiles_in_wave(index, first, end, min(head_group, heads - first_head), workers)
        assert wave.before + wave.rank == number
        start = host.staggered_start(wave.rank, apart, query_blocks)
        loop = [(start + i) % query_blocks for i in range(query_blocks)]
        work_tiles.append((head, [(m, host.adds_before_in_ring(wave, m, apart, query_blocks)) for m in loop]))
    return Waves(workers, work_tiles)


@given(
    workers=st.integers(1, 20),
    heads=st.integers(1, 5),
    head_group=st.integers(1, 5),
    key_blocks=st.integers(1, 30),
    query_blocks=st.integers(1, 60),
    apart=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=1000, deadline=None)
def test_waves_of_a_staggered_start_add_in_order_and_never_deadlock(
    workers: int, heads: int, head_group: int, key_blocks: int, query_blocks: int, apart: int, seed: int
) -> None:
    waves = ring_waves(workers, heads, head_group, key_blocks, query_blocks, apart)
    assert_adds_are_numbered(waves)
    assert waves.run(random.Random(seed))
    assert all(waves.semaphores[head, m] == key_blocks for head in range(heads) for m in range(query_blocks))


def test_in_a_wave_of_a_staggered_start_no_key_block_waits() -> None:
    assert ring_waves(16, 2, 1, 32, 40, 2).makespan() == 2 * 2 * 40


def test_key_blocks_that_share_a_start_wait_once_for_each_of_them() -> None:
    assert ring_waves(16, 1, 1, 16, 32, 4).makespan() == 32 + 1
    assert ring_waves(16, 2, 1, 32, 32, 4).makespan() == 2 * 2 * 32 + 1


# The order of work


def test_every_dense_work_tile_occurs_once() -> None:
    for batch in (0, 1, 2, 3):
        for heads in (1, 2, 5):
            for num_blocks in (0, 1, 3, 4):
                for head_group in (1, 2, 3, 4, 100):
                    total = batch * heads * num_blocks
                    work_tiles = [host.dense_work_tile(i, batch, heads, num_blocks, head_group) for i in range(total)]
                    every = {(b, h, n) for b in range(batch) for h in range(heads) for n in range(num_blocks)}
                    assert len(work_tiles) == len(every) and set(work_tiles) == every


def test_key_blocks_of_a_head_are_ascending_and_heads_form_groups() -> None:
    for head_group in (1, 2, 3, 7):
        work_tiles = [host.dense_work_tile(i, 2, 5, 4, head_group) for i in range(40)]
        for index, (b, h, n) in enumerate(work_tiles):
            assert (b * 5 + h) // head_group == index // (head_group * 4)
            assert n == sum((b, h) == other[:2] for other in work_tiles[:index])
        for group in range(0, 40, head_group * 4):
            within = [n for _, _, n in work_tiles[group : group + head_group * 4]]
            assert within == sorted(within)


@pytest.mark.parametrize("last_head", [0, 2, 6, 8])
def test_the_last_group_has_all_heads_that_are_left(last_head: int) -> None:
    batch, heads, blocks, group = 2, 5, 4, 2
    found = [host.dense_work_tile(i, batch, heads, blocks, group, last_head * blocks) for i in range(40)]
    before = [host.dense_work_tile(i, batch, heads, blocks, group) for i in range(last_head * blocks)]
    last = [(head // heads, head % heads, n) for n in range(blocks) for head in range(last_head, batch * heads)]
    assert found == before + last


def test_dense_work_tiles_are_64_bit() -> None:
    batch, heads, num_blocks = 65536, 128, 8192
    last = batch * heads * num_blocks - 1
    assert host.dense_work_tile(last, batch, heads, num_blocks, 16) == (batch - 1, heads - 1, num_blocks - 1)
    assert host.dense_work_tile(last, batch, heads, num_blocks, 2**40) == (batch - 1, heads - 1, num_blocks - 1)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    slack=st.integers(0, 50),
    heads=st.integers(1, 5),
    block_n=st.sampled_from([1, 3, 7, 16, 64]),
    head_group=st.integers(1, 6),
    list_blocks=st.integers(0, 30),
)
@settings(max_examples=1500, deadline=None)
def test_every_packed_work_tile_occurs_once_with_at_most_one_idle_block_per_sequence(
    lengths: list[int], slack: int, heads: int, block_n: int, head_group: int, list_blocks: int
) -> None:
    cu_seqlens = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    total = host.varlen_work_tiles(cu_seqlens[-1], len(lengths), heads, block_n)
    work_tiles = [host.varlen_work_tile(i, cu_seqlens, heads, block_n, head_group, list_blocks) for i in range(total)]
    every = [(b, h, n) for b, k in enumerate(lengths) for h in range(heads) for n in range(len(range(0, k, block_n)))]
    idle = [work_tile for work_tile in work_tiles if work_tile not in set(every)]
    assert sorted(set(work_tiles) - set(idle)) == sorted(every) and len(work_tiles) == len(every) + len(idle) == len(
        set(work_tiles)
    )
    assert len(idle) <= heads * len(lengths)
    assert all(b >= 0 and n == len(range(0, lengths[b], block_n)) for b, _, n in idle)
    # If the grid also covers spare rows after the last sequence, these have no work tiles.
    bound = host.varlen_work_tiles(cu_seqlens[-1] + slack, len(lengths), heads, block_n)
    beyond = [
        host.varlen_work_tile(i, cu_seqlens, heads, block_n, head_group, list_blocks) for i in range(total, bound)
    ]
    assert all(batch == -1 for batch, _, _ in beyond)
    for b in range(len(lengths)):
        for h in range(heads):
            order = [n for other_b, other_h, n in work_tiles if (other_b, other_h) == (b, h)]
            assert order == sorted(order)


@given(
    given_cu_seqlens=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 300), min_size=1, max_size=8),
    total=st.integers(0, 250),
    longest=st.integers(0, 250),
    heads=st.integers(1, 3),
    block_n=st.sampled_from([1, 7, 64]),
)
@settings(max_examples=1500, deadline=None)
def test_the_dq_postprocess_waits_for_the_right_number_of_key_blocks_for_any_cu_seqlens(
    given_cu_seqlens: list[int], total: int, longest: int, heads: int, block_n: int
) -> None:
    """cu_seqlens are bounded as in bounded_lengths.h, and sequences are clipped as in load_sequence."""
    cu_seqlens = np.maximum.accumulate(np.clip([0, *given_cu_seqlens], 0, total)).tolist()
    rows = [min(end - begin, longest) for begin, end in itertools.pairwise(cu_seqlens)]
    found: Counter[tuple[int, int]] = Counter()
    for index in range(host.varlen_work_tiles(total, len(rows), heads, block_n)):
        batch, head, key_block = host.varlen_work_tile(index, cu_seqlens, heads, block_n, 2, 0)
        if batch >= 0 and key_block * block_n < rows[batch]:
            found[batch, head] += 1
    awaited = {(b, h): -(-n // block_n) for b, n in enumerate(rows) for h in range(heads)}
    assert found == Counter(awaited)


def test_longest_work_tiles_of_a_causal_head_come_first() -> None:
    v = host.make_visibility(1000, 1000, -1, 0, Causal.kBottomRight)
    work_tiles = [host.dense_work_tile(i, 1, 4, 8, 2) for i in range(32)]
    for group in (work_tiles[:16], work_tiles[16:]):
        steps = [host.query_blocks(v, n, 64, 128) for _, _, n in group]
        sizes = [end - begin for begin, end in steps]
        assert sizes == sorted(sizes, reverse=True)


def test_the_group_size_of_the_head_swizzle_divides_the_heads_and_is_bounded() -> None:
    for workers, heads, key_blocks in itertools.product((1, 60, 132), (1, 7, 16, 48, 256), (1, 8, 64, 1000)):
        per_pass = host.heads_at_once(workers, heads, key_blocks)
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n * key_blocks <= workers]
        assert per_pass == max(fitting, default=1)


def test_heads_of_a_group_fit_in_the_cache_and_one_more_would_not() -> None:
    rng = random.Random(7)
    for _ in range(500):
        cache, rows = rng.randrange(0, 50 << 20), rng.randrange(0, 20000)
        head_dim, head_dim_v, size, group = (
            rng.randrange(1, 300),
            rng.randrange(1, 300),
            rng.choice((2, 4)),
            rng.choice((1, 8)),
        )
        heads = host.heads_in_l2(cache, rows, head_dim, head_dim_v, size, group)
        one = max(1, group * rows * (size * (head_dim + head_dim_v) + 4 * ((head_dim + 3) // 4 * 4)))
        assert heads >= 1
        assert heads == 1 or heads * one <= cache
        assert (heads + 1) * one > cache
