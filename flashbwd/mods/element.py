"""An element of a captured tensor, as the C++ code of a modification addresses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashbwd.mods.operators import c_type

_LOADS = {torch.float16: "load_half", torch.bfloat16: "load_bfloat16"}


@dataclass(frozen=True)
class Element:
    """A captured tensor with an index for some or all of its dimensions.

    Attributes
    ----------
    slot : int
        Position of the tensor among the kernel's captured tensors.
    indices : tuple of str or None
        For each dimension, the C++ expression of its index; None if the dimension has no index yet.
    """

    slot: int
    indices: tuple[str | None, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every dimension has an index."""
        return None not in self.indices

    def select(self, chosen: Mapping[int, str]) -> Element:
        """Return the element with more indices. Keys of ``chosen`` count the dimensions without an index."""
        open_dims = [dim for dim, index in enumerate(self.indices) if index is None]
        indices = list(self.indices)
        for position, index in chosen.items():
            indices[open_dims[position]] = index
        return Element(self.slot, tuple(indices))

    def load(self, dtype: torch.dtype) -> str:
        """Return the C++ expression that reads the element of a tensor with dtype ``dtype`` and any strides."""
        captured = f"p.captured[{self.slot}]"
        terms = [
            f"wrap({index}, {captured}.sizes[{dim}]) * {captured}.strides[{dim}]"
            for dim, index in enumerate(self.indices)
        ]
        function = _LOADS.get(dtype, f"load_captured<{c_type(dtype)}>")
        return f"{function}({captured}.data, {' + '.join(terms) or '0'})"

    def contiguous_offset(self) -> str:
        """Return the C++ expression of the element's offset in a contiguous tensor of the same shape."""
        offset = "0ll"
        for dim, index in enumerate(self.indices):
            size = f"p.captured[{self.slot}].sizes[{dim}]"
            offset = f"({offset} * {size} + wrap({index}, {size}))"
        return offset
