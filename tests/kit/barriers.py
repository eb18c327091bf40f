"""Thread roles that wait for one another at mbarriers, run on the host in every order that chance finds.

A role is a generator that yields each wait as (barrier, parity) and arrives by plain calls. A role that could go on may
be left alone for as long as the simulation likes, as a warp may be on a GPU. So a wait that a barrier can outrun, by
completing two phases, shows as a deadlock.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field


@dataclass
class Barrier:
    """An mbarrier: a phase completes when ``count`` arrivals have come."""

    count: int = 1
    phase: int = 0  # phases completed
    pending: int = field(default=0, init=False)

    def arrive(self) -> None:
        self.pending += 1
        if self.pending == self.count:
            self.pending = 0
            self.phase += 1

    def is_complete(self, parity: int) -> bool:
        """What ``mbarrier.try_wait.parity`` answers: the phase in progress has the other parity."""
        return self.phase % 2 != parity % 2


Role = Generator[tuple[Barrier, int], None, None]


def run(roles: Iterable[Role], rng: random.Random) -> bool:
    """True if every role ends; False if those that are left wait for ever. A favoured role runs as far as it can."""
    waits: dict[Role, tuple[Barrier, int] | None] = dict.fromkeys(roles)
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
            barrier, parity = waits[role]  # type: ignore[misc]
            if not barrier.is_complete(parity):
                break
    return True
