"""Numbers that a kernel gets as arguments, so that modifications with other numbers have the same source."""

from __future__ import annotations

import math
import struct

import torch

__all__ = ["NumberSlots"]

_MOST = 16  # kMaxNumbers in csrc/mods/captured_tensor.h
_INTEGERS = (torch.int32, torch.int64)


class NumberSlots:
    """The numbers of a modification, such as a length or a temperature, that are not part of its source.

    Attributes
    ----------
    values : list of int
        For each slot an int32, or the bits of a float32.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self._known: dict[tuple[type, float], int] = {}

    def expression(self, number: float, dtype: torch.dtype) -> str | None:
        """Return the C++ expression of a number that is computed with in ``dtype``, or None if it has no slot.

        0, 1 and -1 have none, because operations with them are simplified. Nor have numbers that 32 bits do not hold.
        """
        if isinstance(number, bool) or number in (0, 1, -1) or not math.isfinite(number):
            return None
        if dtype == torch.float32:
            slot = self._slot(float(number), "f")
            return None if slot is None else f"__int_as_float(p.numbers[{slot}])"
        if dtype in _INTEGERS and isinstance(number, int):
            slot = self._slot(number, "i")
            return None if slot is None else f"p.numbers[{slot}]"
        return None

    def _slot(self, number: float, kind: str) -> int | None:
        key = (type(number), number)
        if key not in self._known:
            try:
                (value,) = struct.unpack("i", struct.pack(kind, number))
            except (OverflowError, struct.error):
                return None
            if len(self.values) == _MOST:
                return None
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]
