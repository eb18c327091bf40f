"""What the functions of a call read in its forward, because its backward calls them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashbwd.mods.captures import Captures
from flashbwd.reference.modifications import Mod, accumulator, captured_tensors

__all__ = ["Reads"]


class Reads:
    """What ``score_mod`` and the ``mask_mod`` of a block mask read when this object is made.

    Parameters
    ----------
    captured : sequence of Tensor
        Tensors that ``score_mod`` captures and that get a gradient.
    """

    def __init__(self, score_mod: Mod | None, block_mask: Any, captured: Sequence[Tensor]) -> None:
        mask_mod = None if block_mask is None else block_mask.mask_mod
        self._read = [(name, mod, Captures(mod)) for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod))]
        self._captured = captured

    def tensors(self) -> list[Tensor]:
        """Return the tensors that functions with a key capture."""
        return [tensor for _, _, captures in self._read for tensor in captures.tensors]

    def check(self, query: Tensor) -> None:
        """Raise RuntimeError if a function reads something else now.

        Of a function without a key, only the captured tensors that get a gradient are checked.
        """
        for name, mod, captures in self._read:
            holds = captures.still_hold(mod)
            if captures.key is None and name == "score_mod":
                found = captured_tensors(mod, query.device, accumulator(query.dtype))
                holds = [id(tensor) for tensor in found] == [id(tensor) for tensor in self._captured]
            if not holds:
                raise RuntimeError(
                    f"flashbwd: {name} reads a variable or an attribute that was assigned between the forward and the "
                    "backward, expected the same value (a default argument, as in n=n, keeps it)"
                )
