"""A host simulation of the sm90 kernel for large head dimensions: clusters whose warp roles pass tiles to each other,
and which add to common dq tiles.

Each role is a function with the waits and arrivals of its counterpart in ``csrc/attention/sm90/large_head_dim/``, in
the same order. One arrival stands for those of all threads or warps of a role.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass

from kit.barriers import Barrier, BytesBarrier, Role, Wait
from kit.cta import ADDERS, Add, Cta, Grid, WorkTile, ring, stage


@dataclass(frozen=True)
class Config:
    """The rings of a row of ``kTiles``, and the planted faults."""

    stages: int
    dout_stages: int
    ds_buffers: int
    dq_buffers: int
    ctas: int
    atoms: int  # of 64 columns of dq
    features: bool = False  # or a score_mod: P is computed when its buffer is free
    sends_scores: bool = False  # the dS role reads lse and the entry of a stage of q
    zero_tiles_arrive: bool = False  # fault: the dS role arrives at v_empty after a work tile without query blocks
    publishes_late: bool = False  # fault: an adder publishes an add only when it may begin the next one

    def atoms_of(self, rank: int, query_block: int) -> range:
        if self.ctas == 1:
            return range(self.atoms)
        middle = (self.atoms + query_block % 2) // 2
        return range(middle) if rank == 0 else range(middle, self.atoms)


class LargeHeadDimCta(Cta):
    """The barriers and roles of a CTA."""

    def __init__(self, config: Config, grid: Grid, cluster: int, rank: int) -> None:
        super().__init__(grid, cluster, rank, readers=4 + ADDERS)
        self.config = c = config
        self.other = self  # the other CTA of the cluster
        self.tile = -1
        self.tile_full, self.tile_empty = BytesBarrier(), Barrier()
        self.k_full, self.v_full, self.k_other_full = Barrier(), Barrier(), Barrier()
        self.k_empty, self.v_empty, self.k_other_empty = Barrier(2), Barrier(), Barrier()
        self.q_full, self.q_empty = ring(c.stages, 1), ring(c.stages, 2)
        self.dout_full, self.dout_empty = ring(c.dout_stages, 1), ring(c.dout_stages, 2)
        self.p_full, self.p_empty = Barrier(), Barrier()
        self.ds_full, self.ds_empty = ring(c.ds_buffers, 1), ring(c.ds_buffers, c.ctas)
        self.ds_other_full = [BytesBarrier() for _ in range(c.ds_buffers)]
        self.dq_full = [ring(c.dq_buffers, 1) for _ in range(ADDERS)]
        self.dq_empty = ring(c.dq_buffers, 1)

    def roles(self) -> list[Role]:
        consumers = [self.probabilities(), self.score_gradients(), self.query_gradients()]
        return [self.schedule_tiles(), self.load_queries(), *consumers, *(self.store_dq(i) for i in range(ADDERS))]

    # ---- the producer warpgroup ----

    def schedule_tiles(self) -> Role:
        for taken in itertools.count():
            yield from self.wait_slot(taken)
            work = self.publish((yield from self.take_tile(taken)), taken)
            yield self.busy, 0
            if work.exhausted:
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
                slot, phase = stage(index, self.config.stages)
                yield self.q_empty[slot], phase ^ 1
                self.q_full[slot].arrive()
                slot, phase = stage(index, self.config.dout_stages)
                yield self.dout_empty[slot], phase ^ 1
                self.dout_full[slot].arrive()
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

    # ---- the consumer warpgroups ----

    def probabilities(self) -> Role:
        def of_iteration(index: int) -> Role:
            slot, phase = stage(index, self.config.stages)
            yield self.q_full[slot], phase
            if self.config.features:
                yield self.p_empty, index % 2 ^ 1
                self.q_empty[slot].arrive()
            else:
                self.q_empty[slot].arrive()
                yield self.p_empty, index % 2 ^ 1
            self.p_full.arrive()

        def gradients_of_v(index: int) -> Role:
            slot, phase = stage(index, self.config.dout_stages)
            yield self.dout_full[slot], phase
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
            buffer, phase = stage(index, self.config.ds_buffers)
            yield self.ds_empty[buffer], phase ^ 1
            self.ds_full[buffer].arrive()
            if self.config.ctas == 2:
                self.other.ds_other_full[buffer].deliver()

        def body(work: WorkTile) -> Role:
            if work.queries:
                yield self.v_full, work.keys_phase
            for index, _ in work.iterations():
                slot, phase = stage(index, self.config.dout_stages)
                if index > work.first_index:
                    yield self.q_full[(index - 1) % self.config.stages], (index - 1) // self.config.stages % 2
                yield self.dout_full[slot], phase
                if index > work.first_index:
                    self.q_empty[(index - 1) % self.config.stages].arrive()
                yield self.p_full, index % 2
                if self.config.sends_scores:
                    slot, phase = stage(index, self.config.stages)
                    yield self.q_full[slot], phase
                self.p_empty.arrive()
                yield from of_iteration(index)
            if work.queries:
                last = work.first_index + len(work.queries) - 1
                slot, phase = stage(last, self.config.stages)
                yield self.q_full[slot], phase
                self.q_empty[slot].arrive()
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
                buffer, phase = stage(index, self.config.ds_buffers)
                yield self.ds_full[buffer], phase
                if pairs:
                    yield self.ds_other_full[buffer], phase
                    self.ds_other_full[buffer].expect()
                atoms = self.config.atoms_of(self.rank, query_block)
                for atom in atoms:
                    yield self.busy, 0
                    if atom == atoms[-1]:
                        self.release(buffer, is_last=index == work.first_index + len(work.queries) - 1)
                    dq_buffer, dq_phase = stage(count, self.config.dq_buffers)
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


def large_head_dim_roles(config: Config, grid: Grid) -> list[Role]:
    """Return the roles of all CTAs of all clusters."""
    found: list[Role] = []
    for cluster in range(grid.clusters):
        ctas = [LargeHeadDimCta(config, grid, cluster, rank) for rank in range(config.ctas)]
        ctas[0].other, ctas[-1].other = ctas[-1], ctas[0]
        found += [role for cta in ctas for role in cta.roles()]
    return found
