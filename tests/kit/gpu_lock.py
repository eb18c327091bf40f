"""A lock that lets test processes share a GPU, or use it alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class GpuLock:
    """A fair reader-writer lock between processes.

    A process that wants exclusive access holds the gate file while the current users finish, so that later processes
    cannot overtake it. The locks are two files in ``folder``; the lock of a process that dies is released.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.gate, self.users = folder / "gate", folder / "users"

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self.users.open("w") as users:
            with self.gate.open("w") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(users, fcntl.LOCK_SH)
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self.gate.open("w") as gate, self.users.open("w") as users:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_EX)
            yield
