"""Splitting rows over devices: each row is on one device, the work is equal, and the calls cover the visible pairs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from kit.oracle import visible_pairs
from kit.summary import NO_CASE
from torch import Tensor

from flashbwd.integrations import context_plan
from flashbwd.integrations.context_plan import Call, Range

WINDOWS = {
    "causal": (-1, 0),
    "full": (-1, -1),
    "sliding": (7, 0),
    "both sides": (5, 3),
    "right": (-1, 9),
    "left": (4, -1),
}
DOCUMENTS = {
    "one": (67,),
    "short": (3, 2),
    "empty among long": (0, 5, 0, 33, 1, 90, 0),
    "equal": (64, 64),
    "nothing": (0, 0),
}


def bounds_of(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def visible(lengths: Sequence[int], window: tuple[int, int]) -> Tensor:
    """(total, total) bool: the pairs of queries and keys of the whole sequence."""
    seen = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    for start, length in zip(bounds_of(lengths), lengths, strict=False):
        seen[start : start + length, start : start + length] = visible_pairs(length, length, False, window)
    return seen


def rows_in(ranges: Sequence[Range]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


def pairs_of_call(call: Call, queries: Tensor, keys: Tensor, into: Tensor) -> None:
    """Count the pairs that one packed call computes; ``queries`` and ``keys`` are its rows of the sequence."""
    first_q = first_k = 0
    for length_q, length_k in zip(call.queries, call.keys, strict=True):
        seen = visible_pairs(length_q, length_k, False, call.window)
        rows, columns = queries[first_q : first_q + length_q], keys[first_k : first_k + length_k]
        into[rows[:, None], columns[None, :]] += seen.long()
        first_q, first_k = first_q + length_q, first_k + length_k


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_calls_of_all_devices_see_each_visible_pair_once(
    lengths: tuple[int, ...], window: tuple[int, int], size: int
) -> None:
    bounds = bounds_of(lengths)
    chunks = context_plan.balanced_chunks(bounds, window, size)
    plans = [context_plan.plan(bounds, window, chunks, rank) for rank in range(size)]
    counted = torch.zeros(sum(lengths), sum(lengths), dtype=torch.long)
    for rank, plan in enumerate(plans):
        mine = torch.tensor(rows_in(chunks[rank]), dtype=torch.long)
        sent = [torch.tensor(rows_in(chunks[p]), dtype=torch.long)[rows_in(plans[p].sent[rank])] for p in range(size)]
        assert [len(rows) for rows in sent] == list(plan.counts)
        keys = torch.cat(sent)[rows_in(plan.received)]
        for call in plan.calls:
            pairs_of_call(call, mine[slice(*call.rows)], keys[slice(*call.key_rows)], counted)
    assert torch.equal(counted, visible(lengths, window).long())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_long_causal_sequence_is_split_into_pairs_of_an_early_and_a_late_chunk(size: int) -> None:
    chunks = context_plan.balanced_chunks((0, 64 * size), (-1, 0), size)
    pairs = {(32 * r, 32 * (2 * size - 1 - r)) for r in range(size)}
    found = {(mine[0][0], mine[-1][1] - 32) for mine in chunks}
    assert found == pairs


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_packed_documents_give_every_device_equal_rows_and_work(size: int, seed: int) -> None:
    generator = random.Random(seed)
    lengths = [min(40_000, int(generator.lognormvariate(7.0, 1.5))) for _ in range(40)]
    bounds = bounds_of(lengths)
    chunks = context_plan.balanced_chunks(bounds, (-1, 0), size)
    rows = [len(rows_in(mine)) for mine in chunks]
    first, last = context_plan.visible_bounds(bounds, (-1, 0))
    work = [(last - first + 1)[rows_in(mine)].sum().item() for mine in chunks]
    assert max(rows) - min(rows) <= 16
    assert max(work) <= 1.1 * sum(work) / size


def test_rows_that_no_query_of_another_device_sees_are_not_sent() -> None:
    bounds = bounds_of([64] * 16)
    chunks = context_plan.balanced_chunks(bounds, (-1, 0), 4)
    for rank in range(4):
        plan = context_plan.plan(bounds, (-1, 0), chunks, rank)
        assert [count for p, count in enumerate(plan.counts) if p != rank] == [0, 0, 0]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("work", [[5, 0, 0], [3, 3, 0, 0, 4, 0, 0, 0], [9] + 63 * [1], list(range(40))], ids=str)
def test_no_device_is_without_items_if_there_are_enough(work: list[int], size: int) -> None:
    if len(work) < size:
        pytest.skip(NO_CASE + "fewer items than devices")
    owned = context_plan.balanced(torch.tensor(work), size)
    counts = [sum(stop - start for start, stop in mine) for mine in owned]
    assert sum(counts) == len(work)
    assert min(counts) > 0
    assert max(counts) - min(counts) <= 16
