"""A lock that lets test processes share a GPU, or use it alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turnstile:
    """A fair reader-writer lock between processes.

    A process that wants exclusive access holds the gate while the room empties, so that later processes cannot overtake
    it. The locks are two files in ``folder``; the lock of a process that dies is released.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.gate, self.room = folder / "gate", folder / "room"

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        with self.room.open("w") as room:
            with self.gate.open("w") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(room, fcntl.LOCK_SH)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.gate.open("w") as gate, self.room.open("w") as room:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX)
            yield
