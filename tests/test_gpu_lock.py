"""The lock that lets tests which need much GPU memory run alone."""

from __future__ import annotations

import threading
from pathlib import Path

from kit.gpu_lock import GpuLock

PATIENCE_S = 10.0


def test_several_processes_share_the_lock(tmp_path: Path) -> None:
    with GpuLock(tmp_path).shared(), GpuLock(tmp_path).shared():
        pass


def test_an_exclusive_holder_waits_and_is_not_overtaken(tmp_path: Path) -> None:
    """A file lock belongs to the open file, so threads with separate locks behave like processes."""
    events: list[str] = []
    at_gate = threading.Event()

    def exclusive() -> None:
        at_gate.set()
        with GpuLock(tmp_path).exclusive():
            events.append("exclusive")

    def late() -> None:
        with GpuLock(tmp_path).shared():
            events.append("late")

    first, second = threading.Thread(target=exclusive), threading.Thread(target=late)
    with GpuLock(tmp_path).shared():
        first.start()
        assert at_gate.wait(PATIENCE_S)
        first.join(0.2)  # by then it holds the gate
        second.start()
        second.join(0.2)
        events.append("leaving")
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert events == ["leaving", "exclusive", "late"]
