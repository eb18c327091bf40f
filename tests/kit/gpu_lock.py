"""How test processes share the GPUs of a machine: each starts with another one, and a lock lets one run alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def devices_from(first: int, count: int) -> dict[str, str]:
    """Return an environment in which device 0 is GPU ``first`` modulo ``count``, followed by all others.

    It has an effect in processes that have not used CUDA yet. With fewer than two GPUs it is empty.
    """
    if count < 2:
        return {}
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    first %= len(devices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first:] + devices[:first])}


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
