"""Counts the elements that differ between repeated runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differing_elements(
    run: Callable[[], Sequence[Tensor]], times: int = 1000, beside: Callable[[], object] | None = None
) -> int:
    """Number of elements that differ from those of the first run, over ``times`` more runs without synchronization.

    ``beside`` is GPU work that starts with every run on a second stream.
    """
    first = run()
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    stream = torch.cuda.Stream() if beside else None
    if stream:
        stream.wait_stream(torch.cuda.current_stream())  # `beside` may read results of earlier work
    for _ in range(times):
        if beside:
            with torch.cuda.stream(stream):
                beside()
        for again, before in zip(run(), first, strict=True):
            different += torch.ne(again, before).sum()
    if stream:
        torch.cuda.current_stream().wait_stream(stream)  # `beside` must end before its inputs are freed
    return int(different)
