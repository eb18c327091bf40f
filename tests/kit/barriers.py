"""Simulates thread roles that synchronize with mbarriers, on the host and in random order.

A role is a generator. It yields each wait as (barrier, parity), and it arrives by calling ``Barrier.arrive``. It waits
for a semaphore in global memory in the same way: (semaphore, value). The simulation may delay a runnable role for any
length of time, as a GPU may delay a warp. If a barrier can complete two phases before a waiting role sees the first,
the wait never ends, and the simulation reports a deadlock.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field


@dataclass
class Barrier:
    """An mbarrier: a phase completes after ``count`` arrivals."""

    count: int = 1
    phase: int = 0  # number of completed phases
    pending: int = field(default=0, init=False)

    def arrive(self) -> None:
        self.pending += 1
        if self.pending == self.count:
            self.pending = 0
            self.phase += 1

    def is_complete(self, parity: int) -> bool:
        """The result of ``mbarrier.try_wait.parity``: true if the current phase has the other parity."""
        return self.phase % 2 != parity % 2


@dataclass
class BytesBarrier(Barrier):
    """An mbarrier with one arrival, which expects bytes. The bytes may come before the arrival."""

    bytes_to_come: int = field(default=0, init=False)

    def expect(self) -> None:
        self._change(1, 1)

    def deliver(self) -> None:
        self._change(0, -1)

    def _change(self, arrivals: int, more_bytes: int) -> None:
        self.pending += arrivals
        self.bytes_to_come += more_bytes
        assert self.pending <= 1, "the receiver expects the next bytes before the last ones have come"
        assert self.bytes_to_come >= -1, "the sender overwrites bytes that the receiver has not read"
        if self.pending == 1 and self.bytes_to_come == 0:
            self.pending = 0
            self.phase += 1


@dataclass
class NamedBarrier:
    """A named barrier (``bar.arrive`` and ``bar.sync``): all participants arrive, and some of them wait."""

    count: int
    phase: int = field(default=0, init=False)
    arrived: set[object] = field(default_factory=set, init=False)

    def arrive(self, participant: object) -> None:
        assert participant not in self.arrived, f"{participant} arrives twice at one phase"
        self.arrived.add(participant)
        if len(self.arrived) == self.count:
            self.arrived.clear()
            self.phase += 1

    def sync(self, participant: object) -> Role:
        parity = self.phase % 2
        self.arrive(participant)
        yield self, parity

    def is_complete(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Semaphore:
    """An integer in global memory. A wait ends when it has exactly the required value."""

    value: int = 0

    def is_complete(self, required: int) -> bool:
        return self.value == required


@dataclass(frozen=True)
class AtLeast:
    """A wait for a semaphore that ends when it has the required value or a larger one."""

    semaphore: Semaphore

    def is_complete(self, required: int) -> bool:
        return self.semaphore.value >= required


Wait = tuple[Barrier | NamedBarrier | Semaphore | AtLeast, int]
Role = Generator[Wait, None, None]


def run(roles: Iterable[Role], rng: random.Random) -> bool:
    """Run all roles. True if every role ends; False if the remaining roles all wait forever (a deadlock).

    Each iteration runs a random role for one or two steps, or until it has to wait.
    """
    waits: dict[Role, Wait | None] = dict.fromkeys(roles)
    while waits:
        able = [role for role, wait in waits.items() if wait is None or wait[0].is_complete(wait[1])]
        if not able:
            return False
        role = rng.choice(able)
        for _ in range(rng.choice((1, 1, 2, 1000))):
            try:
                waits[role] = next(role)
            except StopIteration:
                del waits[role]
                break
            barrier, value = waits[role]  # type: ignore[misc]
            if not barrier.is_complete(value):
                break
    return True
