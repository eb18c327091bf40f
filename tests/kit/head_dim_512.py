"""A host simulation of the sm90 kernels for head dimensions 257 to 512: the roles, their barriers and their buffers.

Each role is a function with the waits and arrivals of its counterpart in ``csrc/attention/sm90/head_dim_512/``, in the
same order. One arrival stands for those of all threads or warps of a role. Buffers hold what was written to them last,
and a read asserts before and after a delay that this is what the reader expects.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kit.barriers import Barrier, BytesBarrier, Role
from kit.cta import ring, stage

STAGES = 2
RANK_OF_DK, RANK_OF_DV = 0, 1
LEFT, RIGHT = 0, 1


@dataclass(frozen=True)
class Faults:
    """Planted faults; each must make a simulation fail."""

    releases_early: bool = False  # a warpgroup releases its half of a tile before its product has read it
    skips_full: bool = False  # a warpgroup does not wait for the tile itself before its product over the rows
    sends_at_once: bool = False  # a CTA sends without a wait for the other CTA to have read
    keys_by_scores: bool = False  # dq: the warpgroup of S releases both halves of k before it has used the left one
    dout_is_empty: bool = False  # dq: the loader takes slots in dout for empty from the start


@dataclass
class Buffers:
    """What each buffer holds."""

    rng: random.Random
    held: dict[object, object] = field(default_factory=dict)
    delay: Barrier = field(default_factory=lambda: Barrier(phase=1))  # a wait for parity 0 passes

    def write(self, buffer: object, value: object) -> None:
        self.held[buffer] = value

    def read(self, buffer: object, expected: object) -> Role:
        """A read that takes a short or a long time."""
        for _ in range(self.rng.choice((2, 2, 2, 60))):
            held = self.held.get(buffer)
            assert held == expected, f"{buffer} holds {held}, and its reader expects {expected}"
            yield self.delay, 0


class KeyGradientsCta:
    """A CTA of the cluster that computes dk (rank 0) and dv (rank 1) of a work tile."""

    def __init__(self, rank: int, iterations: int, rng: random.Random, faults: Faults) -> None:
        self.rank, self.iterations, self.faults = rank, iterations, faults
        self.other = self
        self.buffers = Buffers(rng)
        self.kept_full = Barrier()
        self.full = [ring(2, 1) for _ in range(STAGES)]
        self.empty = [[Barrier(1 if half == s else 2) for half in (LEFT, RIGHT)] for s in range(STAGES)]
        self.received = [BytesBarrier() for _ in range(STAGES)]
        self.sent_empty, self.ds_full = ring(STAGES, 2), ring(STAGES, 1)
        self.results: list[tuple[int, int]] = []  # (half, iteration) of each product that adds to the gradient
        for barrier in self.received:
            barrier.expect()

    def roles(self) -> list[Role]:
        return [self.load(), self.consume(LEFT), self.consume(RIGHT)]

    def load(self) -> Role:
        if self.iterations == 0:
            return
        self.kept_full.arrive()
        for index in range(self.iterations):
            slot, phase = stage(index, STAGES)
            for half in (LEFT, RIGHT):
                yield self.empty[slot][half], phase ^ 1
                self.buffers.write(("streamed", slot, half), index)
                if self.rank == RANK_OF_DK and half == LEFT:
                    self.buffers.write(("row values", slot), index)
                yield self.buffers.delay, 0
                self.full[slot][half].arrive()

    def consume(self, half: int) -> Role:
        if self.iterations == 0:
            return
        yield self.kept_full, 0
        for index in range(0, self.iterations, STAGES):
            phase = index // STAGES & 1
            own = index + half
            if own < self.iterations:
                yield from self.multiply(half, own, phase)
                yield from (self.compute_ds if self.rank == RANK_OF_DK else self.compute_dp)(half, own, phase)
            count = min(STAGES, self.iterations - index)
            for slot in range(count):
                yield from self.issue(half, slot, index + slot, phase)
            for slot in range(count):  # the products complete
                if self.faults.releases_early:
                    self.empty[slot][half].arrive()
                yield from self.buffers.read(("streamed", slot, half), index + slot)
                self.results.append((half, index + slot))
                if not self.faults.releases_early:
                    self.empty[slot][half].arrive()

    def multiply(self, half: int, index: int, phase: int) -> Role:
        for side in (LEFT, RIGHT):
            yield self.full[half][side], phase
        for side in (LEFT, RIGHT):
            yield from self.buffers.read(("streamed", half, side), index)

    def compute_ds(self, half: int, index: int, phase: int) -> Role:
        yield from self.buffers.read(("row values", half), index)
        yield from self.send(half, ("P", index), phase)
        yield from self.wait_received(half, half, phase)
        yield from self.buffers.read(("exchange", half), ("dP", index))
        yield from self.buffers.read(("row values", half), index)
        self.buffers.write(("exchange", half), ("dS", index))
        self.ds_full[half].arrive()
        self.empty[half][1 - half].arrive()

    def compute_dp(self, half: int, index: int, phase: int) -> Role:
        self.empty[half][1 - half].arrive()
        yield from self.send(half, ("dP", index), phase)

    def send(self, half: int, value: object, phase: int) -> Role:
        if not self.faults.sends_at_once:
            yield self.sent_empty[half], phase ^ 1
        self.other.buffers.write(("exchange", half), value)
        yield self.buffers.delay, 0
        self.other.received[half].deliver()

    def wait_received(self, half: int, slot: int, phase: int) -> Role:
        yield self.received[slot], phase
        if slot == half:
            self.received[slot].expect()

    def issue(self, half: int, slot: int, index: int, phase: int) -> Role:
        if self.rank == RANK_OF_DK:
            yield self.ds_full[slot], phase
            yield from self.buffers.read(("exchange", slot), ("dS", index))
        else:
            yield from self.wait_received(half, slot, phase)
            yield from self.buffers.read(("exchange", slot), ("P", index))
        if not self.faults.skips_full:
            yield self.full[slot][half], phase
        self.other.sent_empty[slot].arrive()


def key_gradients_ctas(iterations: int, rng: random.Random, faults: Faults) -> list[KeyGradientsCta]:
    """Return both CTAs of a cluster."""
    ctas = [KeyGradientsCta(rank, iterations, rng, faults) for rank in (RANK_OF_DK, RANK_OF_DV)]
    ctas[0].other, ctas[1].other = ctas[1], ctas[0]
    return ctas


class QueryGradientsCta:
    """The CTA that computes dq of a work tile.

    The ``atoms`` of v pass through ``free_slots`` slots, and through as many slots in dout as ``register_atoms``.
    """

    def __init__(
        self, iterations: int, atoms: int, free_slots: int, register_atoms: int, rng: random.Random, faults: Faults
    ) -> None:
        self.iterations, self.atoms, self.faults = iterations, atoms, faults
        self.buffers = Buffers(rng)
        self.q_full, self.dout_full = Barrier(), Barrier()
        self.k_full, self.k_empty = ring(2, 1), [Barrier(1), Barrier(2)]
        self.free_slots, self.register_atoms = free_slots, register_atoms
        slots = free_slots + register_atoms
        self.v_full, self.v_empty = ring(slots, 1), ring(slots, 1)
        self.dp_full, self.ds_full = Barrier(), Barrier()
        self.results: list[tuple[int, int]] = []

    def roles(self) -> list[Role]:
        return [self.load_keys(), self.load_values(), self.scores(), self.values()] if self.iterations else []

    def load_keys(self) -> Role:
        self.q_full.arrive()
        for index in range(self.iterations):
            for half in (LEFT, RIGHT):
                yield self.k_empty[half], index & 1 ^ 1
                self.buffers.write(("k", half), index)
                yield self.buffers.delay, 0
                self.k_full[half].arrive()

    def load_values(self) -> Role:
        for atom in range(self.register_atoms):
            self.buffers.write(("v", self.free_slots + atom), "dout")
        yield self.buffers.delay, 0
        self.dout_full.arrive()
        for count in range(self.iterations * self.atoms):
            slot, phase = stage(count, len(self.v_full))
            starts_empty = slot < self.free_slots or self.faults.dout_is_empty
            yield self.v_empty[slot], phase ^ 1 if starts_empty else phase
            self.buffers.write(("v", slot), count)
            yield self.buffers.delay, 0
            self.v_full[slot].arrive()

    def scores(self) -> Role:
        yield self.q_full, 0
        for index in range(self.iterations):
            phase = index & 1
            for half in (LEFT, RIGHT):
                yield self.k_full[half], phase
            for half in (LEFT, RIGHT):
                yield from self.buffers.read(("k", half), index)
            self.k_empty[RIGHT].arrive()
            if self.faults.keys_by_scores:
                self.k_empty[LEFT].arrive()
            yield self.dp_full, phase
            yield from self.buffers.read("exchange", ("dP", index))
            self.buffers.write("exchange", ("dS", index))
            self.ds_full.arrive()
            yield from self.buffers.read(("k", LEFT), index)
            self.results.append((LEFT, index))
            if not self.faults.keys_by_scores:
                self.k_empty[LEFT].arrive()

    def values(self) -> Role:
        yield self.dout_full, 0
        for slot in range(self.free_slots, self.free_slots + self.register_atoms):
            yield from self.buffers.read(("v", slot), "dout")
            self.v_empty[slot].arrive()
        for index in range(self.iterations):
            phase = index & 1
            for atom in range(self.atoms):
                count = index * self.atoms + atom
                slot, slot_phase = stage(count, len(self.v_full))
                yield self.v_full[slot], slot_phase
                if atom > 0:  # the product before completes
                    yield from self.finish_value(count - 1)
            yield from self.finish_value((index + 1) * self.atoms - 1)
            self.buffers.write("exchange", ("dP", index))
            self.dp_full.arrive()
            yield self.ds_full, phase
            yield from self.buffers.read("exchange", ("dS", index))
            yield self.k_full[RIGHT], phase
            yield from self.buffers.read(("k", RIGHT), index)
            self.results.append((RIGHT, index))
            self.k_empty[RIGHT].arrive()

    def finish_value(self, count: int) -> Role:
        slot = count % len(self.v_full)
        yield from self.buffers.read(("v", slot), count)
        self.v_empty[slot].arrive()
