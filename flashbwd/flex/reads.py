"""What a call reads in its forward, because its backward reads it again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashbwd.flex.cache import tensors_of
from flashbwd.mods.reading import Reading, reading_of
from flashbwd.reference.modifications import Mod

__all__ = ["Reads"]


class Reads:
    """What ``score_mod`` and ``block_mask`` read when this object is made, and the lists of ``block_mask``."""

    def __init__(self, score_mod: Mod | None, block_mask: Any, query: Tensor) -> None:
        self._block_mask = block_mask
        self._parts = _parts(block_mask)
        mods = {"score_mod": score_mod, "mask_mod": None if block_mask is None else block_mask.mask_mod}
        self._read: list[tuple[str, Mod, Reading]] = [
            (name, mod, reading_of(name, mod, query)) for name, mod in mods.items() if mod is not None
        ]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the functions capture, and the lists."""
        return [*(tensor for *_, reading in self._read for tensor in reading.tensors), *self._parts[1:]]

    def check(self, query: Tensor) -> None:
        """Raise RuntimeError if a function reads something else now, or ``block_mask`` has another part."""
        now = _parts(self._block_mask)
        if len(now) != len(self._parts) or any(a is not b for a, b in zip(now, self._parts, strict=True)):
            raise RuntimeError(
                "flashbwd: an attribute of block_mask was assigned between the forward and the backward, expected the "
                "same mask_mod and lists"
            )
        for name, mod, reading in self._read:
            if not reading.is_same_as(reading_of(name, mod, query)):
                raise RuntimeError(
                    f"flashbwd: {name} reads a variable or an attribute that was assigned between the forward and the "
                    "backward, expected the same value (a default argument, as in n=n, keeps it)"
                )


def _parts(block_mask: Any) -> list[Any]:
    """Return the function of a block mask, and its lists."""
    return [] if block_mask is None else [block_mask.mask_mod, *tensors_of(block_mask)]
