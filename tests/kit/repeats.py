"""What runs again gives the same bits, or does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differing_elements(run: Callable[[], Sequence[Tensor]], times: int = 1000) -> int:
    """How many elements differ from the first run's in so many more. Nothing waits for the device between them."""
    first = run()
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(times):
        for again, before in zip(run(), first, strict=True):
            different += torch.ne(again, before).sum()
    return int(different)
