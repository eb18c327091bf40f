"""The index arithmetic that host and kernels share, against plain enumeration."""

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
Kind, Causal = host.TileKind, host.CausalAlignment
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
    """Every tile, cut at the lengths, and a few beyond the ends."""
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
def test_visible_is_the_definition(mask: tuple[int, int, int, int, Any]) -> None:
    v, seen = host.make_visibility(*mask), visible_pairs(*mask)
    got = [[v.visible(i, j) for j in range(-2, mask[1] + 2)] for i in range(-2, mask[0] + 2)]
    np.testing.assert_array_equal(np.array(got), np.pad(seen, 2))
    assert v.full() == bool(seen.all()) or seen.size == 0


@given(mask=masks(), block_m=blocks, block_n=blocks)
@settings(max_examples=1500, deadline=None)
def test_tiles_are_visited_iff_they_hold_a_visible_pair(
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
        whole = tile.shape == (block_m, block_n) and tile.all()
        expected = Kind.kInterior if whole else Kind.kMasked if tile.any() else Kind.kEmpty
        assert host.tile_kind(v, m, n, block_m, block_n) == expected
        begin, end = host.interior_query_blocks(v, n, block_m, block_n)
        assert (begin <= m < end) == (expected == Kind.kInterior)


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
    assert host.tile_kind(full, 0, last - 1, block, block) == Kind.kInterior


# Splits


def test_every_step_of_a_walk_belongs_to_one_split_and_splits_are_even() -> None:
    for steps in range(40):
        for num_splits in range(1, 45):
            walks = [range(*host.split_walk(steps, s, num_splits)) for s in range(num_splits)]
            assert [step for walk in walks for step in walk] == list(range(steps))
            assert max(map(len, walks)) - min(map(len, walks)) <= 1
    assert host.split_walk(INT_MAX, 98, 99) == (INT_MAX * 98 // 99, INT_MAX)


@given(mask=masks(), block_m=blocks, block_n=blocks, heads_per_kv=st.integers(1, 6), num_splits=st.integers(1, 12))
@settings(max_examples=2000, deadline=None)
def test_each_key_block_of_a_dq_tile_is_one_ctas(
    mask: tuple[int, int, int, int, Any], block_m: int, block_n: int, heads_per_kv: int, num_splits: int
) -> None:
    """The CTAs that touch a dq tile are as many as its key blocks, however the walks are shared."""
    v = host.make_visibility(*mask)
    touched: dict[tuple[int, int], list[int]] = defaultdict(list)
    abreast = host.heads_of_walk(heads_per_kv, num_splits)
    for n in range(-(-mask[1] // block_n)):
        begin, end = host.query_blocks(v, n, block_m, block_n)
        for split in range(num_splits):
            first, last = host.split_walk((end - begin) * heads_per_kv, split, num_splits)
            position = host.WalkPosition(first, end - begin, abreast)
            for _ in range(first, last):
                touched[position.head, begin + position.tile].append(n)
                position.advance(end - begin, abreast)
    for m in range(-(-mask[0] // block_m)):
        for head in range(heads_per_kv):
            assert touched[head, m] == list(range(*host.key_blocks(v, m, block_m, block_n)))


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_a_walk_takes_the_heads_of_a_group_tile_by_tile(tiles: int) -> None:
    for heads in range(1, 9):
        for num_splits in range(1, 12):
            abreast = host.heads_of_walk(heads, num_splits)
            assert heads % abreast == 0 and abreast == max(
                d for d in range(1, heads + 1) if heads % d == 0 and (d == 1 or d * num_splits <= heads)
            )
            walk = [
                (head, tile)
                for first in range(0, heads, abreast)
                for tile in range(tiles)
                for head in range(first, first + abreast)
            ]
            position = host.WalkPosition(0, tiles, abreast)
            for step, place in enumerate(walk):
                started_here = host.WalkPosition(step, tiles, abreast)
                assert (position.head, position.tile) == (started_here.head, started_here.tile) == place
                position.advance(tiles, abreast)


def greedy(walks: list[int], at_once: int) -> int:
    """When the last CTA ends, if each takes a step more than its walk and starts as soon as there is room, in order."""
    free = [0] * at_once
    for walk in walks:
        heapq.heapreplace(free, free[0] + walk + 1)
    return max(free)


@pytest.mark.parametrize("causal", [False, True])
def test_walks_are_shared_where_that_saves_time_and_little_memory(causal: bool) -> None:
    for at_once in (1, 2, 8, 108, 132):
        for jobs in (1, 2, 3, 5, 8, 16, 31, 66, 67, 107, 108, 131, 132, 133, 200, 264, 265, 5000):
            for steps in (1, 2, 3, 7, 16, 128, 1000):
                walks = [steps - steps * n // jobs for n in range(jobs)] if causal else [steps] * jobs
                splits = host.split_count(jobs, walks[jobs // 2], steps, at_once)
                assert 1 <= splits <= steps
                if splits == 1:
                    continue
                assert jobs * splits <= 3 * at_once
                shared = [
                    end - begin
                    for walk in walks
                    for begin, end in (host.split_walk(walk, split, splits) for split in range(splits))
                ]
                # Of unequal walks the mean and the longest are what the rule knows.
                assert greedy(shared, at_once) <= (1.05 if causal else 0.95) * greedy(walks, at_once)


def test_one_key_block_of_many_queries_fills_the_device() -> None:
    assert host.split_count(1, 256, 256, 132) == 128  # two steps each; 132 splits would have no fewer
    assert host.split_count(16, 256, 256, 132) == 8
    assert host.split_count(16, 272, 512, 132) == 16  # causal: the longest walk counts
    assert host.split_count(100, 64, 64, 132) == 1
    assert host.split_count(80, 64, 64, 132) == 3  # in two rounds of a third each
    assert host.split_count(5000, 64, 64, 132) == 1


# Ordered accumulation


class Ordered:
    """Jobs of `heads` (batch, head) with the same mask, in the order of work, run by `workers` workers."""

    def __init__(self, v: Any, block_m: int, block_n: int, heads: int, head_group: int, group: int) -> None:
        self.v, self.block_m, self.block_n, self.group = v, block_m, block_n, group
        num_blocks = -(-v.seqlen_k // block_n)
        order = [host.dense_job(index, heads, 1, num_blocks, head_group) for index in range(heads * num_blocks)]
        self.jobs = [(batch, self.steps(n)) for batch, _, n in order]
        self.semaphores: dict[tuple[int, int], int] = defaultdict(int)

    def steps(self, n: int) -> list[tuple[int, int]]:
        """(query block, turn) of each step of key block n."""
        begin, end = host.query_blocks(self.v, n, self.block_m, self.block_n)
        tile = self.block_m, self.block_n, self.group
        walk = [host.ordered_query_block(self.v, n, *tile, step) for step in range(end - begin)]
        assert sorted(walk) == list(range(begin, end))
        return [(m, host.ordered_turn(self.v, m, n, *tile)) for m in walk]

    def run(self, workers: int, rng: random.Random) -> bool:
        """Whether all jobs end, when workers take jobs from a counter and advance in random order."""
        waiting = list(reversed(self.jobs))
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


class FromLast(Ordered):
    """The same, key blocks taken from the last one on."""

    def __init__(self, v: Any, block_m: int, block_n: int, heads: int, head_group: int) -> None:
        super().__init__(v, block_m, block_n, heads, head_group, group=1)
        num_blocks = -(-v.seqlen_k // block_n)
        order = [host.dense_job(index, heads, 1, num_blocks, head_group) for index in range(heads * num_blocks)]
        self.jobs = [(batch, self.steps(num_blocks - 1 - n)) for batch, _, n in order]

    def steps(self, n: int) -> list[tuple[int, int]]:
        walk = range(*host.query_blocks(self.v, n, self.block_m, self.block_n))
        return [(m, host.ordered_turn_from_last(self.v, m, n, self.block_m, self.block_n)) for m in walk]


@given(
    mask=masks(60), block_m=st.sampled_from([3, 7, 16]), block_n=st.sampled_from([3, 7, 16]), group=st.integers(1, 9)
)
@settings(max_examples=1000, deadline=None)
def test_turns_of_a_tile_count_up_to_its_number_of_key_blocks(
    mask: tuple[int, int, int, int, Any], block_m: int, block_n: int, group: int
) -> None:
    v = host.make_visibility(*mask)
    num_m = -(-mask[0] // block_m)
    group = host.ordered_group(group, 1, num_m)
    for m in range(num_m):
        seen = range(*host.key_blocks(v, m, block_m, block_n))
        turns = [host.ordered_turn(v, m, n, block_m, block_n, group) for n in seen]
        assert sorted(turns) == list(range(len(seen)))
        if not v.full() or group == 1:
            assert turns == sorted(turns)
            # What a kernel without registers to spare computes instead.
            assert turns == [n - max(m * block_m + v.lo, 0) // block_n for n in seen]
        turns = [host.ordered_turn_from_last(v, m, n, block_m, block_n) for n in seen]
        assert turns == list(reversed(range(len(seen))))
        last_query = min((m + 1) * block_m, v.seqlen_q) - 1
        assert turns == [(min(last_query + v.hi, v.seqlen_k) - 1) // block_n - n for n in seen]


@given(
    mask=masks(40),
    block_m=st.sampled_from([3, 7, 16]),
    block_n=st.sampled_from([3, 7, 16]),
    workers=st.integers(1, 12),
    heads=st.integers(1, 5),
    head_group=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=1000, deadline=None)
def test_ordered_adds_never_deadlock(
    mask: tuple[int, int, int, int, Any],
    block_m: int,
    block_n: int,
    workers: int,
    heads: int,
    head_group: int,
    seed: int,
) -> None:
    v = host.make_visibility(*mask)
    group = host.ordered_group(workers, min(heads, head_group), -(-mask[0] // block_m))
    ordered = Ordered(v, block_m, block_n, heads, head_group, group)
    assert ordered.run(workers, random.Random(seed))
    for m in range(-(-mask[0] // block_m)):
        begin, end = host.key_blocks(v, m, block_m, block_n)
        assert all(ordered.semaphores[head, m] == end - begin for head in range(heads))


@given(mask=masks(40), workers=st.integers(1, 6), seed=st.integers(0, 2**32))
@settings(max_examples=500, deadline=None)
def test_a_group_of_one_needs_no_neighbour(mask: tuple[int, int, int, int, Any], workers: int, seed: int) -> None:
    v = host.make_visibility(*mask)
    assert Ordered(v, 7, 7, heads=3, head_group=2, group=1).run(workers, random.Random(seed))
    assert FromLast(v, 7, 7, heads=3, head_group=2).run(workers, random.Random(seed))


def test_a_group_larger_than_the_workers_would_hang() -> None:
    """The simulation sees deadlocks, and heads abreast count in the bound."""
    v = host.make_visibility(64, 64, -1, -1, Causal.kNone)
    assert not Ordered(v, 8, 8, heads=1, head_group=1, group=8).run(7, random.Random(0))
    assert not Ordered(v, 8, 8, heads=2, head_group=2, group=4).run(6, random.Random(0))
    assert Ordered(v, 8, 8, heads=2, head_group=2, group=4).run(8, random.Random(0))


def makespan(ordered: Ordered) -> int:
    """Steps until all jobs end when every job has a worker and a step takes one unit."""
    progress = [0] * len(ordered.jobs)
    for now in range(10_000):
        if all(done == len(steps) for done, (_, steps) in zip(progress, ordered.jobs, strict=True)):
            return now
        ready = [
            index
            for index, (head, steps) in enumerate(ordered.jobs)
            if progress[index] < len(steps)
            and ordered.semaphores[head, steps[progress[index]][0]] == steps[progress[index]][1]
        ]
        for index in ready:
            ordered.semaphores[ordered.jobs[index][0], ordered.jobs[index][1][progress[index]][0]] += 1
            progress[index] += 1
    raise AssertionError("deadlock")


@pytest.mark.parametrize("tiles", [1, 2, 5, 16])
def test_nobody_waits_longer_than_the_longest_job_takes(tiles: int) -> None:
    length = 8 * tiles
    full = host.make_visibility(length, length, -1, -1, Causal.kNone)
    causal = host.make_visibility(length, length, -1, 0, Causal.kBottomRight)
    window = host.make_visibility(length, length, 15, 0, Causal.kBottomRight)
    assert makespan(Ordered(full, 8, 8, 1, 1, group=tiles)) == tiles
    assert makespan(Ordered(causal, 8, 8, 1, 1, group=tiles)) == tiles
    assert makespan(FromLast(causal, 8, 8, 1, 1)) == tiles
    assert makespan(Ordered(window, 8, 8, 1, 1, group=tiles)) == min(tiles, 3)


# Waves


class Waves:
    """Jobs dealt to workers in advance: (head, steps of (tile, turn)), in lists of `head_group` heads."""

    def __init__(self, workers: int, jobs: list[tuple[Any, list[tuple[int, int]]]]) -> None:
        self.workers, self.jobs = workers, jobs
        self.semaphores: dict[tuple[Any, int], int] = defaultdict(int)

    def _walks(self) -> list[list[Any]]:
        """What each worker has to do, its first step last."""
        queues = [self.jobs[worker :: self.workers] for worker in range(self.workers)]
        return [[(head, *step) for head, steps in queue for step in steps][::-1] for queue in queues]

    def _may_add(self, walk: list[Any]) -> bool:
        return bool(walk) and self.semaphores[walk[-1][:2]] == walk[-1][2]

    def _add(self, walk: list[Any]) -> None:
        head, tile, _ = walk.pop()
        self.semaphores[head, tile] += 1

    def run(self, rng: random.Random) -> bool:
        """Whether all jobs end, when workers advance in random order."""
        walks = self._walks()
        while any(walks):
            able = list(filter(self._may_add, walks))
            if not able:
                return False
            self._add(rng.choice(able))
        return True

    def run_from_counter(self, early: int, rng: random.Random) -> bool:
        """The same where workers take jobs from a counter, one of each wave, and the next one when no more than `early`
        steps of theirs are left."""
        taken, numbers = 0, [0] * self.workers
        walks: list[list[Any]] = [[] for _ in range(self.workers)]
        while taken < len(self.jobs) or any(walks):
            takes = [
                (worker, True)
                for worker, walk in enumerate(walks)
                if len(walk) <= early and numbers[worker] * self.workers <= taken < len(self.jobs)
            ]
            adds = [(worker, False) for worker, walk in enumerate(walks) if self._may_add(walk)]
            if not takes + adds:
                return False
            worker, is_take = rng.choice(takes + adds)
            if is_take:
                head, steps = self.jobs[taken]
                walks[worker][:0] = [(head, *step) for step in reversed(steps)]
                numbers[worker] += 1
                taken += 1
            else:
                self._add(walks[worker])
        return True

    def makespan(self) -> int:
        """Steps until all jobs end, where a step takes one unit."""
        walks = self._walks()
        for now in range(100_000):
            if not any(walks):
                return now
            able = list(filter(self._may_add, walks))
            assert able, "deadlock"
            for walk in able:
                self._add(walk)
        raise AssertionError("too long")


def cyclic_waves(
    workers: int,
    heads: int,
    head_group: int,
    key_blocks: int,
    tiles: int,
    gap: int = 2,
    cut: int = 0,
    parts: int = 1,
    late_wait: bool = False,
) -> Waves:
    """A full mask; the last `cut` key blocks of the heads of the last list are walked in parts of the tiles."""
    group = min(head_group, heads)
    whole = heads * key_blocks - cut * group
    jobs = []
    for index in range(whole + cut * group * parts):
        part = (index - whole) % parts if index >= whole else 0
        number = index if index < whole else whole + (index - whole) // parts
        _, head, n = host.dense_job(number, 1, heads, key_blocks, group)
        first_list = head // group * group
        first, end = first_list * key_blocks, min((first_list + group) * key_blocks, whole)
        stride, begin, size, before = min(group, heads - first_list), 0, tiles, 0
        if index >= whole:
            first, end, stride = whole, whole + cut * group * parts, group * parts
            begin, size, before = tiles * part // parts, 0, key_blocks - cut
            size = tiles * (part + 1) // parts - begin
        abreast = host.abreast_in_wave(index, first, end, stride, workers)
        assert before + abreast.before + abreast.place == n
        ring = host.ring_of(abreast, size)
        if late_wait:
            ring.place = ring.size - 1 - ring.place
        starts = host.Starts.of(ring.size, size, gap)
        walk = [(starts.tile(ring.place) + step) % size for step in range(size)]
        jobs.append((head, [(begin + m, before + host.cyclic_turn(ring, starts, m)) for m in walk]))
    return Waves(workers, jobs)


def paired_waves(
    workers: int, heads: int, head_group: int, v: Any, block_m: int, block_n: int, group: int, spare_blocks: int
) -> Waves:
    """Pairs of key blocks, of which the last `spare_blocks` hold no keys of the sequence."""
    key_blocks = -(-v.seqlen_k // block_n) + spare_blocks
    pairs = -(-key_blocks // 2)
    jobs = []
    for index in range(heads * pairs):
        _, head, number = host.dense_job(index, 1, heads, pairs, head_group)
        first_list = head // head_group * head_group
        first, end = first_list * pairs, min((first_list + head_group) * pairs, heads * pairs)
        abreast = host.abreast_in_wave(index, first, end, min(head_group, heads - first_list), workers)
        assert abreast.before + abreast.place == number
        apart = abreast.size == pairs and host.begins_heads_apart(group, pairs)

        def steps_of(n: int, second: bool, abreast: Any, apart: bool) -> list[Any]:
            walk = range(*host.query_blocks(v, n, block_m, block_n))
            steps = []
            for m in walk if second else reversed(walk):
                seen = host.key_blocks(v, m, block_m, block_n)[1]
                number = abreast.before + abreast.place
                for h in ((step + (2 * number if apart else 0)) % group for step in range(group)):
                    steps.append(((m, h), host.pair_turn(abreast, second, seen, key_blocks, h, apart)))
            return steps

        both = steps_of(key_blocks - pairs + number, False, abreast, apart)
        if 2 * (pairs - number) - 1 != key_blocks:
            both += steps_of(pairs - 1 - number, True, abreast, apart)
        jobs.append((head, both))
    return Waves(workers, jobs)


def assert_turns_are_complete(waves: Waves) -> None:
    """Turns of each tile are 0, 1, 2, ... once each."""
    turns: dict[Any, list[int]] = defaultdict(list)
    for head, steps in waves.jobs:
        for tile, turn in steps:
            turns[head, tile].append(turn)
    assert all(sorted(seen) == list(range(len(seen))) for seen in turns.values())


@given(
    workers=st.integers(1, 20),
    heads=st.integers(1, 6),
    head_group=st.integers(1, 6),
    key_blocks=st.integers(1, 24),
    tiles=st.integers(1, 24),
    gap=st.integers(1, 30),
    cut=st.integers(0, 24),
    parts=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=1000, deadline=None)
def test_cyclic_waves_take_turns_and_never_deadlock(
    workers: int, heads: int, head_group: int, key_blocks: int, tiles: int, gap: int, cut: int, parts: int, seed: int
) -> None:
    cut = min(cut, key_blocks) if heads % min(head_group, heads) == 0 else 0
    waves = cyclic_waves(workers, heads, head_group, key_blocks, tiles, gap, cut, min(parts, tiles))
    assert_turns_are_complete(waves)
    assert waves.run(random.Random(seed))
    assert all(waves.semaphores[head, m] == key_blocks for head in range(heads) for m in range(tiles))


@given(
    workers=st.integers(1, 20),
    early=st.integers(0, 5),
    heads=st.integers(1, 6),
    head_group=st.integers(1, 6),
    key_blocks=st.integers(1, 24),
    tiles=st.integers(1, 24),
    gap=st.integers(1, 30),
    late_wait=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=1000, deadline=None)
def test_cyclic_waves_from_a_counter_never_deadlock(
    workers: int,
    early: int,
    heads: int,
    head_group: int,
    key_blocks: int,
    tiles: int,
    gap: int,
    late_wait: bool,
    seed: int,
) -> None:
    waves = cyclic_waves(workers, heads, head_group, key_blocks, tiles, gap, late_wait=late_wait)
    assert_turns_are_complete(waves)
    assert waves.run_from_counter(early, random.Random(seed))
    assert all(waves.semaphores[head, m] == key_blocks for head in range(heads) for m in range(tiles))


# Workers, heads and lists of them, and what a causal mask leaves of a sequence.
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
@settings(max_examples=1000, deadline=None)
def test_waves_of_pairs_take_turns_and_never_deadlock(
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
    assert_turns_are_complete(waves)
    assert waves.run(random.Random(seed))
    for m in range(-(-lengths[0] // blocks[0])):
        begin, end = host.key_blocks(v, m, *blocks)
        assert all(
            waves.semaphores[head, (m, h)] == end - begin for head, h in itertools.product(range(heads), range(group))
        )


@pytest.mark.parametrize("key_blocks", [4, 8, 16, 24, 64])
def test_nobody_waits_in_whole_waves_of_rings(key_blocks: int) -> None:
    for tiles in (64, 65, 127, 128):
        waves = cyclic_waves(16, 8, max(16 // key_blocks, 1), key_blocks, tiles)
        assert waves.makespan() == -(-8 * key_blocks // 16) * tiles


@given(**PAIRS)
@settings(max_examples=500, deadline=None)
def test_pairs_from_a_counter_never_deadlock_where_adds_wait_for_the_first_and_the_last_for_all(
    workers: int,
    heads: int,
    head_group: int,
    lengths: tuple[int, int],
    kind: Any,
    right: int,
    blocks: tuple[int, int],
    seed: int,
) -> None:
    """Jobs are taken one by one, as soon as one is done; all of a head are one wave."""
    v = host.make_visibility(*lengths, -1, right, kind)
    pairs = -(-lengths[1] // (2 * blocks[1]))
    jobs = paired_waves(heads * pairs, heads, head_group, v, *blocks, 1, 0).jobs
    last: dict[Any, int] = defaultdict(int)
    for head, steps in jobs:
        for tile, turn in steps:
            last[head, tile] = max(last[head, tile], turn)
    added: dict[Any, int] = defaultdict(int)
    walks: list[list[Any]] = [[] for _ in range(workers)]
    taken = 0
    rng = random.Random(seed)
    while taken < len(jobs) or any(walks):
        able = []
        for worker, walk in enumerate(walks):
            if not walk:
                if taken < len(jobs):
                    able.append(worker)
                continue
            head, tile, turn = walk[-1]
            able += [worker] * (added[head, tile] >= (turn if turn == last[head, tile] else min(turn, 1)))
        assert able, "deadlock"
        worker = rng.choice(able)
        if walks[worker]:
            head, tile, _ = walks[worker].pop()
            added[head, tile] += 1
        else:
            head, steps = jobs[taken]
            walks[worker] = [(head, *step) for step in reversed(steps)]
            taken += 1
    assert all(added[tile] == turn + 1 for tile, turn in last.items())


@pytest.mark.parametrize("group", [2, 4, 8])
def test_in_a_wave_of_pairs_jobs_wait_in_the_beginning_only(group: int) -> None:
    v = host.make_visibility(128, 128, -1, 0, Causal.kBottomRight)
    assert paired_waves(64, 2, 2, v, 1, 2, group, 0).makespan() == group * 2 * (64 + 1) + 31


@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 16),
    lengths=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    heads_of_list=st.integers(1, 20),
    workers=st.integers(1, 66),
)
@settings(max_examples=300, deadline=None)
def test_ordinary_jobs_at_head_dimension_256_that_begin_together_are_in_as_few_of_a_tile_as_can_be(
    batch: int, heads: int, lengths: tuple[int, int], heads_of_list: int, workers: int
) -> None:
    """In whole waves, which take as many rounds as all clusters would."""
    tiles, key_blocks = -(-lengths[0] // 64), -(-lengths[1] // 128)
    wave, width, gap = host.wide_waves(batch, heads, *lengths, 256, False, heads_of_list, workers)
    jobs = batch * heads * key_blocks
    assert width == heads_of_list and 1 <= wave <= min(workers, jobs)
    assert -(-jobs // wave) == -(-jobs // workers)
    assert jobs <= workers or jobs % wave == 0 or wave - jobs % wave < -(-jobs // wave)  # none idles two rounds
    group = min(width, batch * heads)
    for begin in {0, (jobs - 1) // wave * wave}:
        first_tiles: dict[Any, list[int]] = defaultdict(list)
        for index in range(begin, min(begin + wave, jobs)):
            b, head, _ = host.dense_job(index, batch, heads, key_blocks, width)
            head += b * heads
            first_list = head // group * group
            first, end = first_list * key_blocks, min(first_list + group, batch * heads) * key_blocks
            abreast = host.abreast_in_wave(index, first, end, min(group, batch * heads - first_list), wave)
            ring = host.ring_of(abreast, tiles)
            first_tiles[head].append(host.Starts.of(ring.size, tiles, gap).tile(ring.place))
        for starts in first_tiles.values():
            # All go on by a tile a step, so who begins apart stays apart.
            assert max(map(starts.count, starts)) == -(-len(starts) // tiles)


@pytest.mark.parametrize("head_dim", [136, 192])
def test_ordinary_jobs_at_head_dimensions_up_to_192_all_begin_at_the_first_tile(head_dim: int) -> None:
    assert host.wide_waves(4, 16, 4096, 4096, head_dim, False, 2, 66)[0] == 0
    assert host.wide_waves(4, 16, 4096, 4096, head_dim, True, 2, 66)[0] > 0


def test_jobs_of_a_ring_begin_at_tiles_of_their_own_as_far_apart_as_they_may() -> None:
    for tiles, gap in itertools.product((1, 2, 63, 64, 1000, 2**24), (1, 2, 7)):
        for size in {1, min(2, tiles), max(tiles // 2, 1), max(tiles // 3, 1), tiles} - {2**24, 2**23, 2**24 // 3}:
            starts = host.Starts.of(size, tiles, gap)
            first = [starts.tile(place) for place in range(size)]
            gaps = [after - before for before, after in itertools.pairwise(first)]
            assert first[0] == 0 and first[-1] < tiles
            assert all(min(tiles // size, gap) <= between <= gap for between in gaps)


# Persistent slots


def persistent_cases() -> list[tuple[int, int, int, int, int]]:
    rng = random.Random(0)
    small = [(1, heads, keys, 1, workers) for heads in range(1, 6) for keys in range(14) for workers in range(1, 16)]
    large = [
        (rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(0, 3000), rng.choice((64, 80, 128)), workers)
        for workers in (1, 2, 7, 108, 132)
        for _ in range(100)
    ]
    return small + large


def test_persistent_jobs_are_dealt_once_and_no_worker_has_more_than_its_share() -> None:
    for batch, heads, seqlen_k, block_n, workers in persistent_cases():
        slots = host.persistent_slots(batch, heads, seqlen_k, block_n, workers)
        assert slots.jobs == batch * heads * len(range(0, seqlen_k, block_n))
        dealt = [(job, w) for w in range(workers) for job in range(slots.first_job(w), slots.first_job(w + 1))]
        assert [job for job, _ in dealt] == list(range(slots.jobs))
        assert all(slots.worker_of(job) == w for job, w in dealt)
        assert slots.jobs_per_worker == max(1, -(-slots.jobs // workers))


def test_one_worker_owns_each_persistent_slot() -> None:
    for case in persistent_cases():
        slots = host.persistent_slots(*case)
        owners: dict[tuple[int, int], set[int]] = defaultdict(set)
        for job in range(slots.jobs):
            owners[job // slots.jobs_per_head, slots.slot_of(job)].add(slots.worker_of(job))
        assert all(len(workers) == 1 for workers in owners.values())
        assert all(0 <= slot < slots.num_splits() for _, slot in owners)
        for head in range(case[0] * case[1] if slots.jobs else 0):
            for slot in range(slots.num_splits()):
                assert {slots.owner_of(head, slot)} == owners.get((head, slot), {-1})


def test_a_worker_has_one_slot_in_a_head() -> None:
    for case in persistent_cases():
        slots = host.persistent_slots(*case)
        seen: dict[tuple[int, int], set[int]] = defaultdict(set)
        for job in range(slots.jobs):
            seen[job // slots.jobs_per_head, slots.worker_of(job)].add(slots.slot_of(job))
        assert all(len(slot) == 1 for slot in seen.values())


def test_persistent_slot_is_the_rounded_up_place_of_the_workers_first_job_in_the_head() -> None:
    for case in persistent_cases():
        slots = host.persistent_slots(*case)
        per_head, per_worker = slots.jobs_per_head, slots.jobs_per_worker
        for job in range(slots.jobs):
            first = max(job // per_worker * per_worker, job // per_head * per_head)
            assert slots.slot_of(job) == -(-(first % per_head) // per_worker)


def test_persistent_splits_exceed_the_workers_that_meet_by_one_at_most() -> None:
    for case in persistent_cases():
        slots = host.persistent_slots(*case)
        used = max((slots.slot_of(job) + 1 for job in range(slots.jobs)), default=0)
        if slots.jobs:
            assert used <= slots.num_splits() <= used + 1


# The order of work


def test_every_dense_job_comes_once() -> None:
    for batch in (0, 1, 2, 3):
        for heads in (1, 2, 5):
            for num_blocks in (0, 1, 3, 4):
                for head_group in (1, 2, 3, 4, 100):
                    total = batch * heads * num_blocks
                    jobs = [host.dense_job(i, batch, heads, num_blocks, head_group) for i in range(total)]
                    every = {(b, h, n) for b in range(batch) for h in range(heads) for n in range(num_blocks)}
                    assert len(jobs) == len(every) and set(jobs) == every


def test_the_last_heads_may_be_one_list() -> None:
    for batch, heads, num_blocks, head_group in itertools.product((1, 2, 3), (1, 2, 5), (1, 3, 4), (1, 2, 3, 100)):
        total = batch * heads * num_blocks
        plain = [host.dense_job(i, batch, heads, num_blocks, head_group) for i in range(total)]
        for before in range(0, total + 1, head_group * num_blocks):
            sizes = batch, heads, num_blocks, head_group, before
            jobs = [host.dense_job_of_last_list(i, *sizes) for i in range(total)]
            assert jobs[:before] == plain[:before]
            # Key blocks in order, each of all heads in order.
            assert jobs[before:] == sorted(plain[before:], key=lambda job: (job[2], job[:2]))


def test_key_blocks_of_a_head_come_in_ascending_order_and_heads_in_groups() -> None:
    for head_group in (1, 2, 3, 7):
        jobs = [host.dense_job(i, 2, 5, 4, head_group) for i in range(40)]
        for index, (b, h, n) in enumerate(jobs):
            assert (b * 5 + h) // head_group == index // (head_group * 4)
            assert n == sum((b, h) == other[:2] for other in jobs[:index])
        for group in range(0, 40, head_group * 4):
            within = [n for _, _, n in jobs[group : group + head_group * 4]]
            assert within == sorted(within)


def test_dense_jobs_are_64_bit() -> None:
    batch, heads, num_blocks = 65536, 128, 8192
    last = batch * heads * num_blocks - 1
    assert host.dense_job(last, batch, heads, num_blocks, 16) == (batch - 1, heads - 1, num_blocks - 1)
    assert host.dense_job(last, batch, heads, num_blocks, 2**40) == (batch - 1, heads - 1, num_blocks - 1)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    slack=st.integers(0, 50),
    heads=st.integers(1, 5),
    block_n=st.sampled_from([1, 3, 7, 16, 64]),
    head_group=st.integers(1, 6),
    list_blocks=st.integers(0, 30),
)
@settings(max_examples=1500, deadline=None)
def test_every_varlen_job_comes_once_with_at_most_one_idle_block_a_sequence(
    lengths: list[int], slack: int, heads: int, block_n: int, head_group: int, list_blocks: int
) -> None:
    cu_seqlens = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    total = host.varlen_jobs(cu_seqlens[-1], len(lengths), heads, block_n)
    jobs = [host.varlen_job(i, cu_seqlens, heads, block_n, head_group, list_blocks) for i in range(total)]
    every = [(b, h, n) for b, k in enumerate(lengths) for h in range(heads) for n in range(len(range(0, k, block_n)))]
    idle = [job for job in jobs if job not in set(every)]
    assert sorted(set(jobs) - set(idle)) == sorted(every) and len(jobs) == len(every) + len(idle) == len(set(jobs))
    assert len(idle) <= heads * len(lengths)
    assert all(b >= 0 and n == len(range(0, lengths[b], block_n)) for b, _, n in idle)
    # A grid sized with spare rows behind the last sequence finds nothing there.
    bound = host.varlen_jobs(cu_seqlens[-1] + slack, len(lengths), heads, block_n)
    beyond = [host.varlen_job(i, cu_seqlens, heads, block_n, head_group, list_blocks) for i in range(total, bound)]
    assert all(batch == -1 for batch, _, _ in beyond)
    for b in range(len(lengths)):
        for h in range(heads):
            order = [n for other_b, other_h, n in jobs if (other_b, other_h) == (b, h)]
            assert order == sorted(order)


@given(
    given_cu_seqlens=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 300), min_size=1, max_size=8),
    total=st.integers(0, 250),
    longest=st.integers(0, 250),
    heads=st.integers(1, 3),
    block_n=st.sampled_from([1, 7, 64]),
)
@settings(max_examples=1500, deadline=None)
def test_the_conversion_of_dq_waits_for_as_many_key_blocks_as_there_are_whatever_cu_seqlens_holds(
    given_cu_seqlens: list[int], total: int, longest: int, heads: int, block_n: int
) -> None:
    """cu_seqlens as bounded_lengths.h says, sequences cut to the host's longest as load_sequence does."""
    cu_seqlens = np.maximum.accumulate(np.clip([0, *given_cu_seqlens], 0, total)).tolist()
    rows = [min(end - begin, longest) for begin, end in itertools.pairwise(cu_seqlens)]
    found: Counter[tuple[int, int]] = Counter()
    for index in range(host.varlen_jobs(total, len(rows), heads, block_n)):
        batch, head, key_block = host.varlen_job(index, cu_seqlens, heads, block_n, 2, 0)
        if batch >= 0 and key_block * block_n < rows[batch]:
            found[batch, head] += 1
    awaited = {(b, h): -(-n // block_n) for b, n in enumerate(rows) for h in range(heads)}
    assert found == Counter(awaited)


def test_longest_jobs_of_a_causal_head_come_first() -> None:
    v = host.make_visibility(1000, 1000, -1, 0, Causal.kBottomRight)
    jobs = [host.dense_job(i, 1, 4, 8, 2) for i in range(32)]
    for group in (jobs[:16], jobs[16:]):
        steps = [host.query_blocks(v, n, 64, 128) for _, _, n in group]
        sizes = [end - begin for begin, end in steps]
        assert sizes == sorted(sizes, reverse=True)


def test_heads_abreast_divide_all_heads_and_fill_the_workers_at_most_once() -> None:
    for workers, heads, key_blocks in itertools.product((1, 60, 132), (1, 7, 16, 48, 256), (1, 8, 64, 1000)):
        abreast = host.heads_abreast(workers, heads, key_blocks)
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n * key_blocks <= workers]
        assert abreast == max(fitting, default=1)


def test_heads_of_a_group_fit_the_cache_and_one_more_would_not() -> None:
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
