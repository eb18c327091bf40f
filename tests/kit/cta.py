"""What the host simulations of both sm90 kernels share: work tiles, the grid, and a CTA's adds to dq tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kit.barriers import Barrier, Role, Semaphore

ADDERS = 2
SLOTS = 2  # for work tiles in shared memory
ARRIVED, STORED = 1, 2  # states of a semaphore of unordered adds


@dataclass(frozen=True)
class WorkTile:
    number: int = 0
    queries: tuple[int, ...] = ()  # the query blocks that it visits
    first_index: int = 0  # iterations of this cluster's work tiles before
    keys_phase: int = 0  # parity of this cluster's work tiles before that have iterations
    taken: int = 0  # work tiles that this cluster has taken before
    exhausted: bool = False

    def iterations(self) -> Iterator[tuple[int, int]]:
        """Yield (index of the iteration, query block)."""
        yield from enumerate(self.queries, self.first_index)


@dataclass
class Grid:
    """What clusters share: the work tiles and their counter, the semaphores of dq tiles, and a record of the adds.

    ``tiles[n]`` holds the query blocks of work tile n. ``adds_before(n, query_block)`` is the number of adds to a dq
    tile that come before that of work tile n, or None if adds are unordered.
    """

    tiles: list[tuple[int, ...]]
    adds_before: Callable[[int, int], int] | None = None
    clusters: int = 1
    static: bool = False  # clusters take work tiles in turn, not from the counter
    taken: int = 0
    semaphores: dict[tuple[int, int], Semaphore] = field(default_factory=dict)
    adds: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # the work tiles that have added
    stores: list[tuple[int, int]] = field(default_factory=list)  # the dq tiles that were stored instead
    # By query block and warp (warpgroup, number).
    bias_semaphores: dict[tuple[int, tuple[int, int]], Semaphore] = field(default_factory=dict)
    bias_adds: dict[tuple[int, tuple[int, int]], list[int]] = field(default_factory=dict)

    def take(self, cluster: int, taken: int) -> int:
        if self.static:
            return cluster + taken * self.clusters
        self.taken += 1
        return self.taken - 1


@dataclass
class Add:
    """An add to a dq tile. Without a semaphore, no other add waits for it."""

    semaphore: Semaphore | None = None
    required: int = STORED


def ring(buffers: int, count: int) -> list[Barrier]:
    """Return a barrier for each buffer of a ring."""
    return [Barrier(count) for _ in range(buffers)]


def stage(index: int, stages: int) -> tuple[int, int]:
    """Return the stage of a ring, and its phase."""
    return index % stages, index // stages % 2


class Cta:
    """A CTA's slots for work tiles, and its adds to dq tiles. ``readers`` roles read each work tile."""

    def __init__(self, grid: Grid, cluster: int, rank: int, readers: int) -> None:
        self.grid, self.cluster, self.rank = grid, cluster, rank
        self.work = [WorkTile() for _ in range(SLOTS)]
        self.work_full, self.work_empty, self.work_wanted = ring(SLOTS, 1), ring(SLOTS, readers), Barrier()
        self.busy = Barrier(phase=1)  # a wait for parity 0 passes, but the simulation may delay the role here
        self.last: WorkTile | None = None

    def wait_slot(self, taken: int) -> Role:
        """The scheduler waits until it may find its next work tile."""
        yield self.work_empty[taken % SLOTS], taken // SLOTS % 2 ^ 1
        yield self.work_wanted, (taken + 1) % 2

    def publish(self, number: int, taken: int) -> WorkTile:
        """Put a work tile into its slot."""
        exhausted = number >= len(self.grid.tiles)
        queries = () if exhausted else self.grid.tiles[number]
        last = self.last or WorkTile()
        first_index, keys_phase = last.first_index + len(last.queries), last.keys_phase ^ (len(last.queries) > 0)
        work = self.last = self.work[taken % SLOTS] = WorkTile(
            number, queries, first_index, keys_phase, taken, exhausted
        )
        self.work_full[taken % SLOTS].arrive()
        return work

    def for_each_work_tile(self, body: Callable[[WorkTile], Role]) -> Role:
        for taken in itertools.count():
            slot = taken % SLOTS
            yield self.work_full[slot], taken // SLOTS % 2
            work = self.work[slot]
            if work.exhausted:
                return
            yield from body(work)
            self.work_empty[slot].arrive()

    def semaphore(self, query_block: int) -> Semaphore:
        return self.grid.semaphores.setdefault((query_block, self.rank), Semaphore())

    def next_add(self, work: WorkTile, query_block: int) -> Add:
        before = self.grid.adds_before
        required = STORED if before is None else before(work.number, query_block)
        return Add(self.semaphore(query_block), required)

    def begin_add(self, add: Add, work: WorkTile, query_block: int) -> Role:
        assert add.semaphore is not None
        if self.grid.adds_before is not None:
            yield add.semaphore, add.required
            self.record(work, query_block, stores=add.required == 0)
            return
        stores = add.semaphore.value == 0
        add.semaphore.value = max(add.semaphore.value, ARRIVED)
        if not stores:
            yield add.semaphore, STORED
            add.semaphore = None
        self.record(work, query_block, stores)

    def record(self, work: WorkTile, query_block: int, stores: bool) -> None:
        """An add begins."""
        self.grid.adds.setdefault((query_block, self.rank), []).append(work.number)
        if stores:
            self.grid.stores.append((query_block, self.rank))

    @staticmethod
    def finish_add(add: Add) -> None:
        if add.semaphore is not None:
            add.semaphore.value += 1
