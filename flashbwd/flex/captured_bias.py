"""A captured tensor with an element for each pair of a query and a key, as a bias of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CapturedBias"]

_NAMES = "bhqk"


@dataclass(frozen=True, eq=False)
class CapturedBias:
    """What a ``score_mod`` adds to the scores of a call: ``tensor[indices]``.

    Attributes
    ----------
    indices : tuple
        For each dimension of ``tensor``: the index that selects from it ("b", "h", "q" or "k"), or a number. "q" and
        "k" occur once; "b" and "h" at most once.
    sizes : tuple of int
        (B, H, Sq, Sk)
    has_gradient : bool
    """

    tensor: Tensor
    indices: tuple[str | int, ...]
    sizes: tuple[int, int, int, int]
    has_gradient: bool

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels take it in a call with inputs of ``dtype``."""
        enough = (size >= self._size(index) for size, index in zip(self.tensor.shape, self.indices, strict=True))
        return self.tensor.dtype in (dtype, torch.float32) and all(enough)

    def is_faster_compiled(self, dtype: torch.dtype) -> bool:
        """Return whether a compiled kernel is faster: without a gradient, if TMA cannot load the rows."""
        if self.has_gradient:
            return False
        view = self._view(self.tensor.detach())
        elements = 16 // view.element_size()
        steps = [stride for size, stride in zip(view.shape[:3], view.stride()[:3], strict=True) if size > 1]
        aligned = view.stride(3) == 1 and not any(step % elements for step in (view.storage_offset(), *steps))
        return self.tensor.dtype != dtype or not aligned

    def view(self, device: torch.device) -> Tensor:
        """Return what the call reads: (B or 1, H or 1, Sq, Sk). For the device "meta", a tensor of the same layout."""
        view = self._view(self.tensor.detach())
        if device.type != "meta":
            return view
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device)

    def gradient(self, of_view: Tensor) -> Tensor:
        """Return the gradient of ``tensor`` for that of :meth:`view`. It is 0 where the call reads nothing."""
        if of_view.numel() < self.tensor.numel():
            whole = of_view.new_zeros(self.tensor.shape)
            self._view(whole).copy_(of_view)
            return whole
        used = self._used
        absent = [dim for dim, name in enumerate(_NAMES) if name not in used]
        order = sorted(used, key=_NAMES.index)
        grad = of_view.squeeze(absent).permute([order.index(name) for name in used])
        return grad.view(self.tensor.shape)  # adds the dimensions of size 1 from which a number selects

    @property
    def _used(self) -> list[str]:
        return [index for index in self.indices if isinstance(index, str)]

    def _size(self, index: str | int) -> int:
        return self.sizes[_NAMES.index(index)] if isinstance(index, str) else 1

    def _view(self, tensor: Tensor) -> Tensor:
        for dim, index in reversed(list(enumerate(self.indices))):
            tensor = tensor.select(dim, index) if isinstance(index, int) else tensor.narrow(dim, 0, self._size(index))
        used = self._used
        tensor = tensor.permute([used.index(name) for name in sorted(used, key=_NAMES.index)])
        for dim, name in enumerate(_NAMES):
            if name not in used:
                tensor = tensor.unsqueeze(dim)
        return tensor
