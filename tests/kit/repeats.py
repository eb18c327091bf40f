"""What runs again gives the same bits, or does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differing_elements(
    run: Callable[[], Sequence[Tensor]], times: int = 1000, beside: Callable[[], object] | None = None
) -> int:
    """How many elements differ from the first run's in so many more. Nothing waits for the device between them.

    ``beside``: work for the GPU that begins with every run, on a stream of its own.
    """
    first = run()
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    stream = torch.cuda.Stream() if beside else None
    if stream:
        stream.wait_stream(torch.cuda.current_stream())  # for what `beside` reads
    for _ in range(times):
        if beside:
            with torch.cuda.stream(stream):
                beside()
        for again, before in zip(run(), first, strict=True):
            different += torch.ne(again, before).sum()
    if stream:
        torch.cuda.current_stream().wait_stream(stream)  # before what it reads is freed
    return int(different)
