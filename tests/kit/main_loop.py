"""A host simulation of the sm90 kernel with two consumer warpgroups: its warp roles, and its adds to common dq tiles.

Each role is a function with the waits and arrivals of its counterpart in ``csrc/attention/sm90/`` (``producer.cuh``,
``mainloop.cuh``, ``dq_accumulate.cuh``, ``epilogue.cuh``), in the same order. One arrival stands for those of all
threads of a role. Two of the four warps of a consumer warpgroup are roles of their own, because they may drift apart.
The simulation also checks that no warp overwrites dS that a product still reads, and that the bits of a block mask,
which the loader leaves where a warp will write dS, are still there when the warp reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from kit.barriers import AtLeast, Barrier, NamedBarrier, Role, Semaphore, Wait
from kit.cta import ADDERS, Add, Cta, Grid, WorkTile, ring, stage

CONSUMERS = 2  # warpgroups
WARPS = 2  # of a consumer warpgroup
CONSUMER_WARPS = CONSUMERS * WARPS


@dataclass(frozen=True)
class Config:
    """What a row of ``kTiles`` and a call decide, and the planted faults."""

    stages: int = 2
    dout_stages: int = 2
    early_dv: bool = False
    orders_scores: bool = False
    by_queries: bool = False
    meets_at_dq: bool = False  # the warps of a warpgroup meet before they write dq
    last_writes_dq: bool = False  # the kernel whose last add can write dq
    finishes: bool = False  # the last add does write dq
    first_and_last: bool = False  # adds between the first and the last have no order
    tma_dkdv: bool = False  # dk and dv pass through the buffers of dq
    shared_buffer: bool = False  # side by side, in one of them
    early_iterations: int = 0  # before its last one, the loader wants the next work tile
    poisoned: bool = False  # the consumers zero rows of every tile
    ds_buffers: int = 2
    loads_bits: bool = False  # the loader puts bits of a block mask into the dS buffer of the iteration
    batch_entries: int = 1  # of a work tile, each with dk and dv
    orders_bias: bool = False  # all work tiles add to the gradient of a bias, in the order of their numbers
    bias_published_late: bool = False  # fault: a consumer publishes its adds after it has waited for the next ones
    bits_before_q: bool = False  # fault: the loader puts bits into dS before the stage of q is empty
    zeros_after_signal: bool = False  # fault: a consumer waits for q, and zeroes it, after its wait for S


class Warp(NamedTuple):
    """A warp of the consumers."""

    warpgroup: int
    number: int


class DqPhases:
    """The parities of the buffers of dq that a consumer waits for next."""

    def __init__(self) -> None:
        self.empty = [0] * ADDERS
        self.sums = [0] * ADDERS


class MainLoopCta(Cta):
    """The barriers and roles of a CTA."""

    def __init__(self, config: Config, grid: Grid, cluster: int) -> None:
        super().__init__(grid, cluster, 0, readers=CONSUMER_WARPS + ADDERS + 1)
        self.config = c = config
        self.k_full, self.v_full = Barrier(), Barrier()
        self.k_empty, self.v_empty = Barrier(CONSUMER_WARPS), Barrier(CONSUMER_WARPS)
        self.q_full, self.q_empty = ring(c.stages, 1), ring(c.stages, CONSUMER_WARPS)
        self.dout_full, self.dout_empty = ring(c.dout_stages, 1), ring(c.dout_stages, CONSUMER_WARPS)
        self.sums_full = ring(ADDERS, 1)
        self.consumers = NamedBarrier(CONSUMER_WARPS)
        self.warpgroups = [NamedBarrier(WARPS) for _ in range(CONSUMERS)]
        self.scores = [NamedBarrier(CONSUMER_WARPS) for _ in range(CONSUMERS)]
        self.ds = [[NamedBarrier(CONSUMER_WARPS) for _ in range(CONSUMERS)] for _ in range(2)]
        self.dq_full = [NamedBarrier(CONSUMER_WARPS + 1) for _ in range(ADDERS)]
        self.dq_empty = ring(ADDERS, 1)
        self.warps = [Warp(warpgroup, number) for warpgroup in range(CONSUMERS) for number in range(WARPS)]
        self.ds_readers: list[set[Warp]] = [set() for _ in range(c.ds_buffers)]
        self.ds_written: set[tuple[int, Warp]] = set()  # with the iteration
        self.bits: list[dict[Warp, int]] = [{} for _ in range(c.ds_buffers)]  # iterations whose bits are in dS
        self.last_adds: set[int] = set()  # the iterations whose add writes dq
        self.late_bias: dict[Warp, Semaphore] = {}  # of a planted fault

    def roles(self) -> list[Role]:
        stores = [self.store_dq(buffer) for buffer in range(ADDERS)]
        return [self.schedule_tiles(), self.load_tiles(), *stores, *(self.consume(warp) for warp in self.warps)]

    # ---- the producer warpgroup ----

    def schedule_tiles(self) -> Role:
        for taken in itertools.count():
            yield from self.wait_slot(taken)
            if self.publish(self.grid.take(self.cluster, taken), taken).exhausted:
                return
            yield self.busy, 0

    def load_tiles(self) -> Role:
        early = self.config.early_iterations

        def load(work: WorkTile) -> Role:
            end = work.first_index + len(work.queries)
            for index, _ in work.iterations():
                if early > 0 and end - index == min(early, len(work.queries)):
                    self.work_wanted.arrive()
                if self.config.bits_before_q:
                    self.load_bits(index)
                slot, phase = stage(index, self.config.stages)
                yield self.q_empty[slot], phase ^ 1
                self.q_full[slot].arrive()
                if index == work.first_index:
                    yield self.v_empty, work.keys_phase ^ 1
                    self.v_full.arrive()
                    yield self.k_empty, work.keys_phase ^ 1
                    self.k_full.arrive()
                slot, phase = stage(index, self.config.dout_stages)
                yield self.dout_empty[slot], phase ^ 1
                if not self.config.bits_before_q:
                    self.load_bits(index)
                self.dout_full[slot].arrive()
            if early == 0 or not work.queries:
                self.work_wanted.arrive()

        return self.for_each_work_tile(load)

    def load_bits(self, index: int) -> None:
        if self.config.loads_bits:
            buffer = index % self.config.ds_buffers
            assert not self.ds_readers[buffer], "a product still reads dS, where bits are loaded"
            self.bits[buffer] = dict.fromkeys(self.warps, index)

    def store_dq(self, buffer: int) -> Role:
        me = "store warp"
        last_adds = 0

        def store(work: WorkTile) -> Role:
            nonlocal last_adds
            add = Add()
            for index, query_block in work.iterations():
                if index % ADDERS != buffer:
                    continue
                if self.config.last_writes_dq:
                    if self.is_last(work, query_block):
                        self.last_adds.add(index)
                        yield from self.load_sums(work, query_block, add, buffer, last_adds % 2)
                        last_adds += 1
                        add = Add()
                        self.offer(buffer)
                    else:
                        add = yield from self.offer_in_order(work, query_block, add, buffer)
                else:
                    self.offer(buffer)
                    yield self.busy, 0
                    self.finish_add(add)
                    add = self.next_add(work, query_block)
                    if self.grid.adds_before is not None:
                        yield from self.begin_add(add, work, query_block)
                yield from self.dq_full[buffer].sync(me)
                if not self.config.last_writes_dq and self.grid.adds_before is None:
                    yield from self.begin_add(add, work, query_block)
                yield self.busy, 0
            stores_dkdv = any(index % ADDERS == buffer for index in self.dkdv_indices(work))
            if stores_dkdv:
                self.offer(buffer)
            self.finish_add(add)
            if stores_dkdv:
                yield from self.dq_full[buffer].sync(me)

        return self.for_each_work_tile(store)

    def dkdv_indices(self, work: WorkTile) -> range:
        """The iterations that dk and dv of a work tile count for, in the buffers of dq."""
        end = work.first_index + len(work.queries)
        passes = self.config.batch_entries * (1 if self.config.shared_buffer else 2) if self.config.tma_dkdv else 0
        assert passes <= ADDERS, "each store warp has at most one"
        return range(end, end + passes)

    def offer(self, buffer: int) -> None:
        """A store warp offers its buffer of dq to both consumers."""
        self.dq_empty[buffer].arrive()

    def is_last(self, work: WorkTile, query_block: int) -> bool:
        assert self.grid.adds_before is not None
        visitors = sum(query_block in queries for queries in self.grid.tiles)
        return self.config.finishes and self.grid.adds_before(work.number, query_block) == visitors - 1

    def required(self, work: WorkTile, query_block: int) -> int:
        assert self.grid.adds_before is not None
        before = self.grid.adds_before(work.number, query_block)
        return min(before, 1) if self.config.first_and_last and not self.is_last(work, query_block) else before

    def offer_in_order(self, work: WorkTile, query_block: int, before: Add, buffer: int) -> Generator[Wait, None, Add]:
        self.offer(buffer)
        self.finish_add(before)
        required = self.required(work, query_block)
        yield AtLeast(self.semaphore(query_block)), required
        self.record(work, query_block, required == 0)
        return Add(self.semaphore(query_block), required)

    def load_sums(self, work: WorkTile, query_block: int, before: Add, buffer: int, parity: int) -> Role:
        """The last add to a dq tile: returns when the sums of all others are in the buffer."""
        semaphore, required = self.semaphore(query_block), self.required(work, query_block)
        self.finish_add(before)
        yield AtLeast(semaphore), required
        self.record(work, query_block, required == 0)
        self.sums_full[buffer].arrive()
        yield self.sums_full[buffer], parity

    # ---- the consumer warpgroups ----

    def consume(self, me: Warp) -> Role:
        if me.warpgroup == 0:
            self.signal_scores(me)
        phases = DqPhases()

        def body(work: WorkTile) -> Role:
            if work.queries:
                yield from self.compute(work, me, phases)
            yield from self.store(work, me, phases)

        return self.for_each_work_tile(body)

    def compute(self, work: WorkTile, me: Warp, phases: DqPhases) -> Role:
        yield self.k_full, work.keys_phase
        yield self.v_full, work.keys_phase
        yield from self.zero_rows(me)
        yield from self.zero_rows(me)
        last = work.first_index + len(work.queries) - 1
        yield from self.wait_q(work.first_index, me)
        yield from self.score_gradients(work.first_index, me)
        for index in range(work.first_index, last):
            yield from self.issue_dq(index, me)
            yield from self.add_bias(work, index, me)
            if not self.config.zeros_after_signal:
                yield from self.wait_q(index + 1, me)
            if self.config.orders_scores:
                yield from self.scores[me.warpgroup].sync(me)
            if self.config.zeros_after_signal:
                yield from self.wait_q(index + 1, me)
            if self.config.early_dv:
                yield from self.wait_buffer(index, me, phases)
                self.dq_is_done(index, me)
                self.signal_scores(me)
                self.release(index)
                yield from self.write_dq(index, me, phases)
            else:
                self.signal_scores(me)
                yield from self.wait_buffer(index, me, phases)
                self.dq_is_done(index, me)
                yield from self.write_dq(index, me, phases)
                self.release(index)
            yield from self.score_gradients(index + 1, me)
        self.v_empty.arrive()
        yield from self.issue_dq(last, me)
        yield from self.add_bias(work, last, me)
        yield from self.wait_buffer(last, me, phases)
        self.dq_is_done(last, me)
        self.release(last)
        self.k_empty.arrive()
        yield from self.write_dq(last, me, phases)

    def zero_rows(self, me: Warp) -> Role:
        if self.config.poisoned:
            yield from self.consumers.sync(me)

    def wait_q(self, index: int, me: Warp) -> Role:
        slot, phase = stage(index, self.config.stages)
        yield self.q_full[slot], phase
        yield from self.zero_rows(me)

    def signal_scores(self, me: Warp) -> None:
        if self.config.orders_scores:
            self.scores[me.warpgroup ^ 1].arrive(me)

    def score_gradients(self, index: int, me: Warp) -> Role:
        slot, phase = stage(index, self.config.dout_stages)
        yield self.dout_full[slot], phase
        yield from self.zero_rows(me)
        yield self.busy, 0
        buffer = index % self.config.ds_buffers
        if self.config.loads_bits:
            assert self.bits[buffer].pop(me, None) == index, "the bits of a warp were overwritten"
        readers = self.ds_readers[buffer]
        assert not any(self.share_ds(warp, me) for warp in readers), "a product still reads dS"
        self.ds_written.add((index, me))
        if not self.config.by_queries:
            self.signal_ds(index, me)

    def share_ds(self, one: Warp, other: Warp) -> bool:
        """With by_queries, a warpgroup reads and writes only its own half of dS."""
        return one.warpgroup == other.warpgroup or not self.config.by_queries

    def signal_ds(self, index: int, me: Warp) -> None:
        self.ds[index % 2][me.warpgroup ^ 1].arrive(me)

    def meet(self, me: Warp) -> Role:
        """The warps of a warpgroup wait for one another."""
        yield from self.warpgroups[me.warpgroup].sync(me)

    def issue_dq(self, index: int, me: Warp) -> Role:
        if self.config.by_queries:
            yield from self.meet(me)
        else:
            yield from self.ds[index % 2][me.warpgroup].sync(me)
        written = all((index, warp) in self.ds_written for warp in self.warps if self.share_ds(warp, me))
        assert written, "dQ reads dS before it is written"
        self.ds_readers[index % self.config.ds_buffers].add(me)
        yield self.busy, 0

    def add_bias(self, work: WorkTile, index: int, me: Warp) -> Role:
        """Add dS of an iteration to the gradient of a shared bias, when the work tiles before have added theirs."""
        if not self.config.orders_bias:
            return
        query_block = work.queries[index - work.first_index]
        semaphore = self.grid.bias_semaphores.setdefault((query_block, me), Semaphore())
        before = sum(query_block in queries for queries in self.grid.tiles[: work.number])
        if self.config.bias_published_late and me in self.late_bias:
            yield semaphore, before
            self.late_bias[me].value += 1
        yield semaphore, before
        self.grid.bias_adds.setdefault((query_block, me), []).append(work.number)
        yield self.busy, 0
        if self.config.bias_published_late:
            self.late_bias[me] = semaphore
        else:
            semaphore.value += 1

    def dq_is_done(self, index: int, me: Warp) -> None:
        self.ds_readers[index % self.config.ds_buffers].discard(me)

    def wait_buffer(self, index: int, me: Warp, phases: DqPhases) -> Role:
        if self.config.last_writes_dq:
            buffer = index % ADDERS
            yield from self.wait_empty(buffer, phases)
            is_last = self.sums_full[buffer].is_complete(phases.sums[buffer])
            phases.sums[buffer] ^= is_last
            assert is_last == (index in self.last_adds), "a consumer mistakes whether its add is the last"

    def wait_empty(self, buffer: int, phases: DqPhases) -> Role:
        yield self.dq_empty[buffer], phases.empty[buffer]
        phases.empty[buffer] ^= 1

    def write_dq(self, index: int, me: Warp, phases: DqPhases) -> Role:
        buffer = index % ADDERS
        if not self.config.last_writes_dq:
            yield from self.wait_empty(buffer, phases)
        if self.config.meets_at_dq:
            yield from self.meet(me)
        yield self.busy, 0
        self.dq_full[buffer].arrive(me)

    def release(self, index: int) -> None:
        self.dout_empty[index % self.config.dout_stages].arrive()
        self.q_empty[index % self.config.stages].arrive()

    def store(self, work: WorkTile, me: Warp, phases: DqPhases) -> Role:
        """The epilogue: dk and dv."""
        if self.config.by_queries:
            yield from self.meet(me)
            yield from self.consumers.sync(me)
            yield from self.consumers.sync(me)
        end = work.first_index + len(work.queries)
        if self.config.tma_dkdv:
            for index in self.dkdv_indices(work):
                yield from self.wait_empty(index % ADDERS, phases)
                self.dq_full[index % ADDERS].arrive(me)
        elif self.config.by_queries:
            yield from self.consumers.sync(me)
        else:
            for index in (end, end + 1):
                self.signal_ds(index, me)
                yield from self.ds[index % 2][me.warpgroup].sync(me)
        if not self.config.tma_dkdv:
            assert not any(self.ds_readers), "a product still reads dS, where dk and dv are staged"
            for bits in self.bits:
                bits.pop(me, None)


def main_loop_roles(config: Config, grid: Grid) -> list[Role]:
    """Return the roles of all CTAs."""
    return [role for cta in range(grid.clusters) for role in MainLoopCta(config, grid, cta).roles()]
