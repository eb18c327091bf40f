"""The turnstile that keeps tests of much GPU memory apart from others."""

from __future__ import annotations

import threading
from pathlib import Path

from kit.turnstile import Turnstile

PATIENCE_S = 10.0


def test_many_are_in_the_room_together(tmp_path: Path) -> None:
    with Turnstile(tmp_path).beside_others(), Turnstile(tmp_path).beside_others():
        pass


def test_one_who_wants_the_room_alone_waits_and_is_not_overtaken(tmp_path: Path) -> None:
    """File locks are of the opened file, so threads with turnstiles of their own are as processes."""
    events: list[str] = []
    at_gate = threading.Event()

    def alone() -> None:
        at_gate.set()
        with Turnstile(tmp_path).alone():
            events.append("alone")

    def late() -> None:
        with Turnstile(tmp_path).beside_others():
            events.append("late")

    first, second = threading.Thread(target=alone), threading.Thread(target=late)
    with Turnstile(tmp_path).beside_others():
        first.start()
        assert at_gate.wait(PATIENCE_S)
        first.join(0.2)  # it has the gate by now
        second.start()
        second.join(0.2)
        events.append("leaving")
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert events == ["leaving", "alone", "late"]
