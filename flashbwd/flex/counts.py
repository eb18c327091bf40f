"""Counts the FlexAttention backwards of compiled graphs, for :func:`flashbwd.stats`."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Counts", "compiled"]


class Counts:
    """Thread-safe counts of calls that this library computed, and of those that it left to PyTorch, by reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits = 0
        self._fallbacks: Counter[str] = Counter()

    def hit(self) -> None:
        with self._lock:
            self._hits += 1

    def fall_back(self, reason: str) -> None:
        with self._lock:
            self._fallbacks[reason] += 1

    def read(self, *, reset: bool) -> tuple[int, dict[str, int]]:
        with self._lock:
            counts = self._hits, dict(self._fallbacks)
            if reset:
                self._hits = 0
                self._fallbacks.clear()
        return counts


compiled = Counts()
