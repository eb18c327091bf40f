"""Plans which rows of a long sequence each device holds, and which keys its queries read.

All functions run on the host and need no process group. Their results depend only on the lengths of the documents, the
mask and the number of devices, so every process computes the same split.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

Range = tuple[int, int]  # start and stop

# More chunks per device balance the work of packed documents better, but cost more attention calls per device.
_CHUNKS_PER_DEVICE = (2, 4, 8, 16)
_BALANCED = 1.02  # at this ratio of the largest to the mean work of a device, more chunks are not tried


@dataclass(frozen=True)
class Call:
    """One attention call of a device: a range of its rows against a range of the keys that it received.

    ``queries`` and ``keys`` have one length per document; a single document is a dense call. Masks are aligned with the
    last query and the last key of each document.
    """

    rows: Range  # among the rows of the device
    key_rows: Range  # among the received rows
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: tuple[int, int]  # visible keys to the left and right of the diagonal, -1 is unbounded

    @property
    def causal(self) -> bool:
        return self.window[1] == 0


@dataclass(frozen=True)
class Plan:
    """The attention calls of one device, and its part of the exchange of keys.

    ``sent[p]`` holds the ranges of this device's rows that device p reads. ``counts[p]`` is the number of rows that
    arrive from device p. Arriving rows are ordered by device; ``received`` holds their ranges in the order of the
    sequence.
    """

    sent: tuple[tuple[Range, ...], ...]
    received: tuple[Range, ...]
    counts: tuple[int, ...]
    calls: tuple[Call, ...]


def visible_bounds(bounds: Sequence[int], window: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last key that each row sees, (total,) int64 each.

    ``bounds`` holds the cumulative lengths of the documents.
    """
    cumulative = torch.tensor(bounds, dtype=torch.int64, device="cpu")
    lengths = cumulative.diff()
    first = cumulative[:-1].repeat_interleave(lengths)
    last = cumulative[1:].repeat_interleave(lengths) - 1
    row = torch.arange(len(first), device="cpu")
    left, right = window
    if left >= 0:
        first = torch.maximum(first, row - left)
    if right >= 0:
        last = torch.minimum(last, row + right)
    return first, last


@functools.lru_cache(maxsize=64)
def balanced_chunks(bounds: tuple[int, ...], window: tuple[int, int], size: int) -> tuple[tuple[Range, ...], ...]:
    """Return ranges of rows for each of ``size`` devices, with almost equal lengths and almost equal attention work.

    For a long causal sequence, each device gets the usual pair of one early and one late chunk.
    """
    first, last = visible_bounds(bounds, window)
    return balanced(last - first + 1, size)


def balanced(work: torch.Tensor, size: int) -> tuple[tuple[Range, ...], ...]:
    """Return ranges of items for each of ``size`` devices, with almost equally many items and almost equal work.

    The function cuts the items into equally long chunks and gives every device equally many of them, at most 16. Chunks
    differ by at most one item, and none is empty if there are at least as many items as devices. ``work`` is int64, one
    element per item, on the CPU.
    """
    sums = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), work.cumsum(0)])
    total = len(work)
    best: tuple[float, list[list[int]], list[int]] | None = None
    for per_device in [n for n in _CHUNKS_PER_DEVICE if n * size <= total] or [1]:
        count = per_device * size
        cuts = [total * i // count for i in range(count + 1)]
        chunks = sums[torch.tensor(cuts, device="cpu")].diff().tolist()
        owned = _assign(chunks, size)
        largest = max(sum(chunks[i] for i in mine) for mine in owned)
        imbalance = largest * size / max(1, sum(chunks))
        if best is None or imbalance < best[0]:
            best = imbalance, owned, cuts
        if imbalance <= _BALANCED or size == 1:
            break
    assert best is not None
    _, owned, cuts = best
    return tuple(joined((cuts[i], cuts[i + 1]) for i in sorted(mine)) for mine in owned)


def _assign(work: Sequence[int], size: int) -> list[list[int]]:
    """Give each of ``size`` devices equally many items, the largest item first, to the device with the least work."""
    owned: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for item in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        open_ones = (r for r in range(size) if len(owned[r]) < len(work) // size)
        device = min(open_ones, key=lambda r: (loads[r], r))
        owned[device].append(item)
        loads[device] += work[item]
    return owned


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Join ranges that touch or overlap, and drop empty ones. The ranges must be ordered by their starts."""
    found: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


# ---- the keys that queries read ----


@dataclass(frozen=True)
class _Segment:
    """Adjacent rows of one document, and the keys that they see."""

    rows: Range
    keys: Range


def _segments(chunk: Range, bounds: Sequence[int], window: tuple[int, int]) -> Iterator[_Segment]:
    left, right = window
    document = bisect.bisect_right(bounds, chunk[0]) - 1
    for start, stop in itertools.pairwise(bounds[document:]):
        if start >= chunk[1]:
            break
        a, b = max(chunk[0], start), min(chunk[1], stop)
        if a < b:
            first = start if left < 0 else max(start, a - left)
            last = stop if right < 0 else min(stop, b + right)
            yield _Segment((a, b), (first, last))


def _groups(segments: Iterator[_Segment], window: tuple[int, int]) -> Iterator[tuple[list[_Segment], tuple[int, int]]]:
    """Yield segments that one call can compute, and the window of that call.

    A mask is aligned with the last key of a call. If a document has keys after the last row of a segment, the window
    moves by the number of these keys. The last document of a chunk may therefore need a call with another window.
    """
    left, right = window
    group: list[_Segment] = []
    current = window
    for segment in segments:
        after = segment.keys[1] - segment.rows[1]
        moved = (left + after if left >= 0 else -1, right - after if right >= 0 else -1)
        if group and moved != current:
            yield group, current
            group = []
        group.append(segment)
        current = moved
    if group:
        yield group, current


@functools.lru_cache(maxsize=256)
def plan(bounds: tuple[int, ...], window: tuple[int, int], chunks: tuple[tuple[Range, ...], ...], rank: int) -> Plan:
    """Plan the exchange and the calls of one device."""
    needed = tuple(_needed(bounds, window, mine) for mine in chunks)
    calls = tuple(_calls(bounds, window, chunks[rank], needed[rank]))
    return replace(exchange_of(needed, chunks, rank), calls=calls)


def exchange_of(needed: tuple[tuple[Range, ...], ...], chunks: tuple[tuple[Range, ...], ...], rank: int) -> Plan:
    """Plan the exchange of one device, without calls. ``needed`` holds the ranges of keys that each device reads."""
    arrivals: list[tuple[Range, Range]] = []  # rows of the sequence, and their range among the arriving rows
    counts = []
    arrived = 0
    for owned in chunks:
        first = arrived
        for rows in _intersection(needed[rank], owned):
            arrivals.append((rows, (arrived, arrived + rows[1] - rows[0])))
            arrived += rows[1] - rows[0]
        counts.append(arrived - first)
    arrivals.sort()
    return Plan(
        tuple(_local(chunks[rank], _intersection(theirs, chunks[rank])) for theirs in needed),
        tuple(where for _, where in arrivals),
        tuple(counts),
        (),
    )


def _needed(bounds: Sequence[int], window: tuple[int, int], chunks: Sequence[Range]) -> tuple[Range, ...]:
    """Return the ranges of keys that the queries in ``chunks`` see."""
    keys = sorted(segment.keys for chunk in chunks for segment in _segments(chunk, bounds, window))
    return joined(keys)


def _intersection(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return sorted((start, stop) for start, stop in both if start < stop)


def _local(chunks: Sequence[Range], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Convert ranges of the sequence, each within one chunk, to ranges of the concatenated rows of ``chunks``."""
    found = []
    for start, stop in ranges:
        before = 0
        for a, b in chunks:
            if a <= start and stop <= b:
                found.append((before + start - a, before + stop - a))
            before += b - a
    return tuple(found)


def _calls(
    bounds: Sequence[int], window: tuple[int, int], chunks: Sequence[Range], needed: Sequence[Range]
) -> Iterator[Call]:
    for chunk in chunks:
        for group, moved in _groups(_segments(chunk, bounds, window), window):
            (rows,) = _local(chunks, [(group[0].rows[0], group[-1].rows[1])])
            (key_rows,) = _local(needed, [(group[0].keys[0], group[-1].keys[1])])
            keys = tuple(segment.keys[1] - segment.keys[0] for segment in group)
            left = moved[0] if 0 <= moved[0] < max(keys) else -1  # a window that reaches every key masks nothing
            queries = tuple(segment.rows[1] - segment.rows[0] for segment in group)
            yield Call(rows, key_rows, queries, keys, (left, moved[1]))
