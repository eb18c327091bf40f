"""Numbers as PyTorch computes them.

Inductor's passes run while FakeTensorMode is active, where new tensors have no values. So a number must not come from a
tensor that is created in this mode.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily


def number_of(make: Callable[[], Tensor]) -> bool | int | float | complex:
    """Return the only element of the tensor on the CPU that ``make`` returns."""
    with unset_fake_temporarily():
        return make().item()
