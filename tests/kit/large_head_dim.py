"""A host simulation of the sm90 kernel for large head dimensions: clusters whose warp roles pass tiles to each other,
and which add to common dq tiles.

Each role is a function with the waits and arrivals of its counterpart in ``csrc/attention/sm90/large_head_dim/``, in
the same order. One arrival stands for those of all threads or warps of a role.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from kit.barriers import Barrier, BytesBarrier, Role, Semaphore, Wait

ADDERS = 2
SLOTS = 2  # for work tiles in shared memory
ARRIVED, STORED = 1, 2  # states of a semaphore of unordered adds


@dataclass(frozen=True)
class Config:
    """The rings of a row of ``kTiles``, and the planted faults."""

    stages: int
    dout_stages: int
    ds_buffers: int
    dq_buffers: int
    ctas: int
    atoms: int  # of 64 columns of dq
    features: bool = False
    zero_tiles_arrive: bool = False  # fault: the dS role arrives at v_empty after a work tile without query blocks
    publishes_late: bool = False  # fault: an adder publishes an add only when it may begin the next one

    def atoms_of(self, rank: int, query_block: int) -> range:
        if self.ctas == 1:
            return range(self.atoms)
        middle = (self.atoms + query_block % 2) // 2
        return range(middle) if rank == 0 else range(middle, self.atoms)


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

    def take(self, cluster: int, taken: int) -> int:
        if self.static:
            return cluster + taken * self.clusters
        self.taken += 1
        return self.taken - 1

    def roles(self, config: Config) -> list[Role]:
        """Return the roles of all CTAs of all clusters."""
        found: list[Role] = []
        for cluster in range(self.clusters):
            ctas = [Cta(config, self, cluster, rank) for rank in range(config.ctas)]
            ctas[0].other, ctas[-1].other = ctas[-1], ctas[0]
            found += [role for cta in ctas for role in cta.roles()]
        return found


@dataclass
class Add:
    """An add to a dq tile. Without a semaphore, no other add waits for it."""

    semaphore: Semaphore | None = None
    required: int = STORED
    may_begin: bool = True


class Cta:
    """The shared memory of a CTA: its barriers and its slots for work tiles."""

    def __init__(self, config: Config, grid: Grid, cluster: int, rank: int) -> None:
        def ring(buffers: int, count: int) -> list[Barrier]:
            return [Barrier(count) for _ in range(buffers)]

        c = config
        self.config, self.grid, self.cluster, self.rank = config, grid, cluster, rank
        self.other = self  # the other CTA of the cluster
        self.work = [WorkTile() for _ in range(SLOTS)]
        self.tile = -1
        self.tile_full, self.tile_empty = BytesBarrier(), Barrier()
        self.work_full, self.work_empty, self.work_wanted = ring(SLOTS, 1), ring(SLOTS, 4 + ADDERS), Barrier()
        self.k_full, self.v_full, self.k_other_full = Barrier(), Barrier(), Barrier()
        self.k_empty, self.v_empty, self.k_other_empty = Barrier(2), Barrier(), Barrier()
        self.q_full, self.q_empty = ring(c.stages, 1), ring(c.stages, 2)
        self.dout_full, self.dout_empty = ring(c.dout_stages, 1), ring(c.dout_stages, 2)
        self.p_full, self.p_empty = Barrier(), Barrier()
        self.ds_full, self.ds_empty = ring(c.ds_buffers, 1), ring(c.ds_buffers, c.ctas)
        self.ds_other_full = [BytesBarrier() for _ in range(c.ds_buffers)]
        self.dq_full = [ring(c.dq_buffers, 1) for _ in range(ADDERS)]
        self.dq_empty = ring(c.dq_buffers, 1)
        self.busy = Barrier(phase=1)  # a wait for parity 0 passes, but the simulation may delay the role here

    def roles(self) -> list[Role]:
        consumers = [self.probabilities(), self.score_gradients(), self.query_gradients()]
        return [self.schedule_tiles(), self.load_queries(), *consumers, *(self.store_dq(i) for i in range(ADDERS))]

    def for_each_work_tile(self, body: Callable[[WorkTile], Role]) -> Role:
        for taken in itertools.count():
            slot = taken % SLOTS
            yield self.work_full[slot], taken // SLOTS % 2
            work = self.work[slot]
            if work.exhausted:
                return
            yield from body(work)
            self.work_empty[slot].arrive()

    # ---- the producer warpgroup ----

    def schedule_tiles(self) -> Role:
        first_index = keys_phase = 0
        for taken in itertools.count():
            slot = taken % SLOTS
            yield self.work_empty[slot], taken // SLOTS % 2 ^ 1
            yield self.work_wanted, (taken + 1) % 2
            number = yield from self.take_tile(taken)
            exhausted = number >= len(self.grid.tiles)
            queries = () if exhausted else self.grid.tiles[number]
            work = self.work[slot] = WorkTile(number, queries, first_index, keys_phase, taken, exhausted)
            first_index += len(queries)
            keys_phase ^= len(queries) > 0
            self.work_full[slot].arrive()
            yield self.busy, 0
            if exhausted:
                return
            yield from self.load_keys(work)

    def take_tile(self, taken: int) -> Generator[Wait, None, int]:
        if self.rank == 0 or self.grid.static:
            number = self.grid.take(self.cluster, taken)
            if self.config.ctas == 2 and not self.grid.static:
                yield self.tile_empty, (taken + 1) % 2
                self.other.tile = number
                self.other.tile_full.deliver()
            return number
        self.tile_full.expect()
        yield self.tile_full, taken % 2
        number = self.tile
        self.other.tile_empty.arrive()
        return number

    def load_keys(self, work: WorkTile) -> Role:
        if work.queries:
            yield self.k_empty, work.keys_phase ^ 1
            self.k_full.arrive()
            if self.config.ctas == 2:
                yield self.k_other_empty, work.keys_phase ^ 1
                self.k_other_full.arrive()
        if self.config.zero_tiles_arrive:
            yield self.v_empty, (work.taken + 1) % 2
        elif work.queries:
            yield self.v_empty, work.keys_phase ^ 1
        if work.queries:
            self.v_full.arrive()

    def load_queries(self) -> Role:
        def load(work: WorkTile) -> Role:
            for index, _ in work.iterations():
                stage, phase = self.stage(index, self.config.stages)
                yield self.q_empty[stage], phase ^ 1
                self.q_full[stage].arrive()
                stage, phase = self.stage(index, self.config.dout_stages)
                yield self.dout_empty[stage], phase ^ 1
                self.dout_full[stage].arrive()
            self.work_wanted.arrive()

        return self.for_each_work_tile(load)

    def store_dq(self, adder: int) -> Role:
        count, phases = 0, [0] * self.config.dq_buffers

        def store(work: WorkTile) -> Role:
            nonlocal count
            add = Add()
            for index, query_block in work.iterations():
                atoms = self.config.atoms_of(self.rank, query_block)
                if index % ADDERS != adder:
                    count += len(atoms)
                    continue
                if not self.config.publishes_late:
                    self.finish_add(add)
                last, add = add, self.next_add(work, query_block)
                if self.grid.adds_before is not None:
                    yield from self.begin_add(add, work, query_block)
                for atom in atoms:
                    buffer = count % self.config.dq_buffers
                    count += 1
                    yield self.dq_full[adder][buffer], phases[buffer]
                    phases[buffer] ^= 1
                    if atom == atoms[0] and self.grid.adds_before is None:
                        yield from self.begin_add(add, work, query_block)
                    yield self.busy, 0
                    self.dq_empty[buffer].arrive()
                if self.config.publishes_late:
                    self.finish_add(last)
            self.finish_add(add)

        return self.for_each_work_tile(store)

    def next_add(self, work: WorkTile, query_block: int) -> Add:
        semaphore = self.grid.semaphores.setdefault((query_block, self.rank), Semaphore())
        before = self.grid.adds_before
        required = STORED if before is None else before(work.number, query_block)
        return Add(semaphore, required, semaphore.is_complete(required))

    def begin_add(self, add: Add, work: WorkTile, query_block: int) -> Role:
        assert add.semaphore is not None
        tile, stores = (query_block, self.rank), False
        if self.grid.adds_before is not None:
            yield add.semaphore, add.required
            stores = add.required == 0
        else:
            stores = add.semaphore.value == 0
            add.semaphore.value = max(add.semaphore.value, ARRIVED)
            if not stores:
                yield add.semaphore, STORED
                add.semaphore = None
        self.grid.adds.setdefault(tile, []).append(work.number)
        if stores:
            self.grid.stores.append(tile)

    @staticmethod
    def finish_add(add: Add) -> None:
        if add.semaphore is not None:
            add.semaphore.value += 1

    # ---- the consumer warpgroups ----

    @staticmethod
    def stage(index: int, stages: int) -> tuple[int, int]:
        """Return the stage of a ring, and its phase."""
        return index % stages, index // stages % 2

    def probabilities(self) -> Role:
        def of_iteration(index: int) -> Role:
            stage, phase = self.stage(index, self.config.stages)
            yield self.q_full[stage], phase
            if self.config.features:
                yield self.p_empty, index % 2 ^ 1
                self.q_empty[stage].arrive()
            else:
                self.q_empty[stage].arrive()
                yield self.p_empty, index % 2 ^ 1
            self.p_full.arrive()

        def gradients_of_v(index: int) -> Role:
            stage, phase = self.stage(index, self.config.dout_stages)
            yield self.dout_full[stage], phase
            yield self.busy, 0

        def body(work: WorkTile) -> Role:
            if not work.queries:
                return
            yield self.k_full, work.keys_phase
            first, end = work.first_index, work.first_index + len(work.queries)
            yield from of_iteration(first)
            for index in range(first + 1, end):
                yield from gradients_of_v(index - 1)
                yield self.q_full[index % self.config.stages], index // self.config.stages % 2
                self.dout_empty[(index - 1) % self.config.dout_stages].arrive()
                yield from of_iteration(index)
            self.k_empty.arrive()
            yield from gradients_of_v(end - 1)
            self.dout_empty[(end - 1) % self.config.dout_stages].arrive()
            yield self.p_empty, end % 2 ^ 1  # dv is staged in the buffer of P

        return self.for_each_work_tile(body)

    def score_gradients(self) -> Role:
        def of_iteration(index: int) -> Role:
            self.dout_empty[index % self.config.dout_stages].arrive()
            buffer, phase = self.stage(index, self.config.ds_buffers)
            yield self.ds_empty[buffer], phase ^ 1
            self.ds_full[buffer].arrive()
            if self.config.ctas == 2:
                self.other.ds_other_full[buffer].deliver()

        def body(work: WorkTile) -> Role:
            if work.queries:
                yield self.v_full, work.keys_phase
            for index, _ in work.iterations():
                stage, phase = self.stage(index, self.config.dout_stages)
                if index > work.first_index:
                    yield self.q_full[(index - 1) % self.config.stages], (index - 1) // self.config.stages % 2
                yield self.dout_full[stage], phase
                if index > work.first_index:
                    self.q_empty[(index - 1) % self.config.stages].arrive()
                yield self.p_full, index % 2
                self.p_empty.arrive()
                yield from of_iteration(index)
            if work.queries:
                last = work.first_index + len(work.queries) - 1
                stage, phase = self.stage(last, self.config.stages)
                yield self.q_full[stage], phase
                self.q_empty[stage].arrive()
            if work.queries or self.config.zero_tiles_arrive:
                self.v_empty.arrive()

        return self.for_each_work_tile(body)

    def query_gradients(self) -> Role:
        pairs, count = self.config.ctas == 2, 0
        if pairs:
            for barrier in self.ds_other_full:
                barrier.expect()

        def body(work: WorkTile) -> Role:
            nonlocal count
            if work.queries:
                yield self.k_full, work.keys_phase
                if pairs:
                    yield self.k_other_full, work.keys_phase
            for index, query_block in work.iterations():
                buffer, phase = self.stage(index, self.config.ds_buffers)
                yield self.ds_full[buffer], phase
                if pairs:
                    yield self.ds_other_full[buffer], phase
                    self.ds_other_full[buffer].expect()
                atoms = self.config.atoms_of(self.rank, query_block)
                for atom in atoms:
                    yield self.busy, 0
                    if atom == atoms[-1]:
                        self.release(buffer, is_last=index == work.first_index + len(work.queries) - 1)
                    dq_buffer, dq_phase = self.stage(count, self.config.dq_buffers)
                    yield self.dq_empty[dq_buffer], dq_phase ^ 1
                    self.dq_full[index % ADDERS][dq_buffer].arrive()
                    count += 1

        return self.for_each_work_tile(body)

    def release(self, buffer: int, is_last: bool) -> None:
        """The dq role has read dS of both CTAs, and if it is the last of a work tile, the keys."""
        self.ds_empty[buffer].arrive()
        if self.config.ctas == 2:
            self.other.ds_empty[buffer].arrive()
        if is_last:
            self.k_empty.arrive()
            if self.config.ctas == 2:
                self.k_other_empty.arrive()
