"""A host simulation of the warp roles of the sm90 kernel for large head dimensions and features. The roles pass work
tiles, keys, queries, P, dS and dq to each other. They must end for all work tiles and every order of execution."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.barriers import Barrier, Role, run

STAGES = 2  # stages of q, dout and dS
ADDERS = 2
DQ_BUFFERS = 2
SLOTS = 2  # slots for work tiles in shared memory


@dataclass(frozen=True)
class Tile:
    steps: int  # iterations: query blocks that see these keys
    first_step: int  # iterations of the work tiles before this one
    stepping: int  # work tiles before this one that have iterations


def tiles_of(steps: list[int]) -> list[Tile]:
    return [Tile(n, sum(steps[:i]), sum(s > 0 for s in steps[:i])) for i, n in enumerate(steps)]


class LargeHeadDimCta:
    """One CTA, with one arrival per role where the kernel has one per thread or warp.

    With ``zero_tiles_arrive``, the warpgroup of dS also arrives at v_empty after a work tile without query blocks,
    whose zeros it stages in the buffer of v, and the warp that loads keys waits for it there.
    """

    def __init__(self, steps: list[int], zero_tiles_arrive: bool = False) -> None:
        self.tiles, self.zero_tiles_arrive = tiles_of(steps), zero_tiles_arrive
        self.work_full = [Barrier() for _ in range(SLOTS)]
        self.work_empty = [Barrier(4 + ADDERS) for _ in range(SLOTS)]
        self.work_wanted, self.k_empty, self.v_empty = Barrier(), Barrier(2), Barrier()
        self.k_full, self.v_full = Barrier(), Barrier()
        self.q_full, self.q_empty = self._ring(1), self._ring(2)
        self.dout_full, self.dout_empty = self._ring(1), self._ring(2)
        self.p_full, self.p_empty = Barrier(), Barrier()
        self.ds_full, self.ds_empty = self._ring(1), self._ring(1)
        self.dq_full = [[Barrier() for _ in range(DQ_BUFFERS)] for _ in range(ADDERS)]
        self.dq_empty = [Barrier() for _ in range(DQ_BUFFERS)]
        self.busy = Barrier(phase=1)  # a wait for parity 0 passes, but the simulation may delay the role here

    @staticmethod
    def _ring(count: int) -> list[Barrier]:
        return [Barrier(count) for _ in range(STAGES)]

    def roles(self) -> list[Role]:
        adders = [self.adder(number) for number in range(ADDERS)]
        return [
            self.keys(),
            self.queries(),
            self.probabilities(),
            self.score_gradients(),
            self.query_gradients(),
            *adders,
        ]

    def keys(self) -> Role:
        """The warp that finds work tiles and loads k and v."""
        for i, tile in enumerate(self.tiles):
            yield self.work_empty[i % SLOTS], i // SLOTS % 2 ^ 1
            yield self.work_wanted, (i + 1) % 2
            self.work_full[i % SLOTS].arrive()
            yield self.busy, 0
            if tile.steps > 0:
                yield self.k_empty, tile.stepping % 2 ^ 1
                self.k_full.arrive()
            if self.zero_tiles_arrive:
                yield self.v_empty, (i + 1) % 2
            elif tile.steps > 0:
                yield self.v_empty, tile.stepping % 2 ^ 1
            if tile.steps > 0:
                self.v_full.arrive()
            yield self.busy, 0

    def tile(self, i: int) -> tuple[Barrier, int]:
        """The wait for work tile i."""
        return self.work_full[i % SLOTS], i // SLOTS % 2

    def queries(self) -> Role:
        for i, tile in enumerate(self.tiles):
            yield self.tile(i)
            for step in range(tile.first_step, tile.first_step + tile.steps):
                stage, phase = step % STAGES, step // STAGES % 2
                yield self.q_empty[stage], phase ^ 1
                self.q_full[stage].arrive()
                yield self.dout_empty[stage], phase ^ 1
                self.dout_full[stage].arrive()
            self.work_wanted.arrive()
            self.work_empty[i % SLOTS].arrive()

    def probabilities(self) -> Role:
        for i, tile in enumerate(self.tiles):
            yield self.tile(i)
            end = tile.first_step + tile.steps
            if tile.steps > 0:
                yield self.k_full, tile.stepping % 2
            for step in range(tile.first_step, end):
                stage, phase = step % STAGES, step // STAGES % 2
                yield self.q_full[stage], phase
                yield self.p_empty, step % 2 ^ 1
                self.q_empty[stage].arrive()
                self.p_full.arrive()
                yield self.dout_full[stage], phase
                self.dout_empty[stage].arrive()
            if tile.steps > 0:
                self.k_empty.arrive()
                yield self.p_empty, end % 2 ^ 1  # dv is staged in the buffer of P
            self.work_empty[i % SLOTS].arrive()

    def score_gradients(self) -> Role:
        for i, tile in enumerate(self.tiles):
            yield self.tile(i)
            if tile.steps > 0:
                yield self.v_full, tile.stepping % 2
            for step in range(tile.first_step, tile.first_step + tile.steps):
                stage, phase = step % STAGES, step // STAGES % 2
                yield self.dout_full[stage], phase
                yield self.p_full, step % 2
                self.p_empty.arrive()
                self.dout_empty[stage].arrive()
                yield self.ds_empty[stage], phase ^ 1
                self.ds_full[stage].arrive()
                yield self.q_full[stage], phase
                self.q_empty[stage].arrive()
            if tile.steps > 0 or self.zero_tiles_arrive:
                self.v_empty.arrive()
            self.work_empty[i % SLOTS].arrive()

    def query_gradients(self) -> Role:
        for i, tile in enumerate(self.tiles):
            yield self.tile(i)
            if tile.steps > 0:
                yield self.k_full, tile.stepping % 2
            for step in range(tile.first_step, tile.first_step + tile.steps):
                stage, buffer = step % STAGES, step % DQ_BUFFERS
                yield self.ds_full[stage], step // STAGES % 2
                self.ds_empty[stage].arrive()
                yield self.dq_empty[buffer], step // DQ_BUFFERS % 2 ^ 1
                self.dq_full[step % ADDERS][buffer].arrive()
            if tile.steps > 0:
                self.k_empty.arrive()
            self.work_empty[i % SLOTS].arrive()

    def adder(self, number: int) -> Role:
        phases = [0] * DQ_BUFFERS
        for i, tile in enumerate(self.tiles):
            yield self.tile(i)
            for step in range(tile.first_step, tile.first_step + tile.steps):
                if step % ADDERS != number:
                    continue
                buffer = step % DQ_BUFFERS
                yield self.dq_full[number][buffer], phases[buffer]
                phases[buffer] ^= 1
                self.dq_empty[buffer].arrive()
            self.work_empty[i % SLOTS].arrive()


WALKS = st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 5]), max_size=12)


@given(WALKS, st.randoms(use_true_random=False))
def test_roles_end_for_all_work_tiles(steps: list[int], rng: random.Random) -> None:
    assert run(LargeHeadDimCta(steps).roles(), rng)


@pytest.mark.parametrize("steps", [[2, 0, 0], [0, 0, 1], [1, 0, 2], [0, 0, 0, 0]], ids=str)
def test_the_simulation_finds_the_deadlock_of_empty_work_tiles_that_arrive(steps: list[int]) -> None:
    """The simulation finds the known deadlock of this protocol, so it would also find one in the kernel's protocol."""
    ends = [run(LargeHeadDimCta(steps, zero_tiles_arrive=True).roles(), random.Random(seed)) for seed in range(300)]
    assert not all(ends)
    assert any(ends)
