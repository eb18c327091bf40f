"""Who may use a GPU beside whom, among processes that run tests side by side."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turnstile:
    """A room for many or for one. Who wants it alone holds the gate while it empties, so that nobody is overtaken.

    Two lock files in ``folder``; a process that dies leaves no lock.
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
