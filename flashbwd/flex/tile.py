"""The tile of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one tile. ``keys`` is a multiple of 32, because the bits of a row fill whole words."""

    queries: int = 64
    keys: int = 128

    @property
    def bytes(self) -> int:
        """Bytes of the bits of one tile."""
        return self.queries * self.keys // 8
