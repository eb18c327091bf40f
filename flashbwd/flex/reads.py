"""What a call reads in its forward, because its backward reads it again."""

from __future__ import annotations

from collections.abc import Sequence
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

    def besides(self, captured: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that the functions read, except ``captured``, and the lists, for autograd to save.

        Autograd raises an error in the backward if one of them was written to.
        """
        of_call = set(map(id, captured))
        read = [*(tensor for *_, reading in self._read for tensor in reading.tensors), *self._parts[1:]]
        return [t.detach() for t in read if id(t) not in of_call and not t.is_inference()]

    def now(self, query: Tensor, captured: list[Tensor]) -> list[Tensor]:
        """Return the tensors that the functions read now in place of ``captured``: the same, or equal views of them.

        (Sharded training makes new views of a parameter for each forward.) Raises RuntimeError if a function reads
        something else now, or ``block_mask`` has another part.
        """
        now = _parts(self._block_mask)
        if len(now) != len(self._parts) or any(a is not b for a, b in zip(now, self._parts, strict=True)):
            raise RuntimeError(
                "flashbwd: an attribute of block_mask was assigned between the forward and the backward, expected the "
                "same mask_mod and lists"
            )
        views: dict[int, Tensor] = {}
        for name, mod, reading in self._read:
            new = reading_of(name, mod, query)
            if name == "score_mod":  # a mask gives no gradients
                views = {id(tensor): view for tensor, view in zip(reading.tensors, new.tensors, strict=False)}
            if not reading.is_same_as(new):
                raise RuntimeError(
                    f"flashbwd: {name} reads a variable or an attribute that was assigned between the forward and the "
                    "backward, expected the same value (a default argument, as in n=n, keeps it; a parametrization "
                    "such as weight_norm assigns its result in each forward)"
                )
        return [views.get(id(tensor), tensor) for tensor in captured]


def _parts(block_mask: Any) -> list[Any]:
    """Return the function of a block mask, and its lists."""
    return [] if block_mask is None else [block_mask.mask_mod, *tensors_of(block_mask)]
