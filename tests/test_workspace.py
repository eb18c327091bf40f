"""The workspace layout agrees with sizes that the tests compute separately."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kit.host import load_host

host = load_host()
LENGTHS = (0, 1, 2, 63, 64, 65, 79, 80, 81, 97, 127, 128, 129, 251, 256, 257, 1021)
HEAD_DIMS = (1, 2, 3, 4, 5, 31, 64, 96, 127, 128, 129, 192, 256, 1000)


def dense(batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, **more: Any) -> Any:
    problem = host.AttentionProblem()
    problem.batch, problem.heads, problem.head_dim = batch, heads, head_dim
    problem.seqlen_q, problem.seqlen_k = seqlen_q, seqlen_k
    problem.total_q, problem.total_k = batch * seqlen_q, batch * seqlen_k
    for name, value in more.items():
        setattr(problem, name, value)
    return problem


def varlen(lengths: list[tuple[int, int]], heads: int, head_dim: int, known: bool, **more: Any) -> Any:
    lens_q, lens_k = [q for q, _ in lengths], [k for _, k in lengths]
    problem = dense(len(lengths), heads, max(lens_q, default=0), max(lens_k, default=0), head_dim, varlen=True)
    problem.total_q, problem.total_k = sum(lens_q), sum(lens_k)
    if known:
        problem.seqlens_q, problem.seqlens_k = lens_q, lens_k
    for name, value in more.items():
        setattr(problem, name, value)
    return problem


def request(accumulator: bool = True, **more: Any) -> Any:
    wanted = host.WorkspaceRequest()
    wanted.accumulator = accumulator
    for name, value in more.items():
        setattr(wanted, name, value)
    return wanted


def padded(head_dim: int) -> int:
    return next(n for n in range(head_dim, head_dim + 4) if n % 4 == 0)


def regions_of(layout: Any) -> list[tuple[int, int, int]]:
    """(offset, bytes, alignment) of every region that has bytes."""
    regions = [
        (layout.accumulator_offset, layout.accumulator_bytes, 256),
        (layout.semaphore_offset, layout.semaphore_bytes, 256),
        (layout.delta_offset, layout.delta_bytes, 256),
        (layout.partial_offset, layout.partial_bytes, 256),
        (layout.lengths_offset, layout.lengths_bytes, 16),
    ]
    return [region for region in regions if region[1]]


def assert_laid_out(layout: Any) -> None:
    """Regions are aligned, do not overlap, waste less than an alignment each, and end at ``bytes``."""
    end = 0
    for offset, size, alignment in regions_of(layout):
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + size
    assert layout.bytes == end


def random_dense(rng: random.Random, **more: Any) -> Any:
    shape = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(HEAD_DIMS)
    return dense(rng.randrange(0, 5), rng.randrange(1, 9), *shape, **more)


def random_lengths(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.choice(LENGTHS), rng.choice(LENGTHS)) for _ in range(rng.randrange(0, 12))]


def test_without_an_accumulator_only_packed_sequences_need_bytes_for_their_bounded_lengths() -> None:
    for problem, lengths_bytes in ((dense(2, 3, 64, 64, 64), 0), (varlen([(5, 7)], 3, 64, known=False), 2 * 2 * 4)):
        layout = host.plan_workspace(problem, request(accumulator=False))
        assert (layout.bytes, layout.lengths_bytes) == (lengths_bytes, lengths_bytes)
        assert (layout.accumulator_bytes, layout.has_accumulator, layout.zero_accumulator) == (0, False, False)


@pytest.mark.parametrize("field", ["semaphore_bytes", "delta_rows", "partial_bytes"])
def test_a_workspace_without_an_accumulator_may_have_other_scratch(field: str) -> None:
    layout = host.plan_workspace(dense(2, 3, 64, 64, 64), request(accumulator=False, **{field: 1}))
    assert layout.bytes == {"semaphore_bytes": 16, "delta_rows": 4, "partial_bytes": 1}[field]
    assert_laid_out(layout)


def test_a_dense_accumulator_has_every_row_of_dq_once() -> None:
    rng = random.Random(0)
    for _ in range(500):
        p = random_dense(rng)
        layout = host.plan_workspace(p, request())
        assert layout.accumulator_bytes == p.batch * p.heads * p.seqlen_q * padded(p.head_dim) * 4
        assert layout.has_accumulator
        assert_laid_out(layout)


@pytest.mark.parametrize("known", [True, False])
def test_a_packed_accumulator_has_every_packed_row_once(known: bool) -> None:
    rng = random.Random(1)
    for _ in range(500):
        lengths = random_lengths(rng)
        p = varlen(lengths, rng.randrange(1, 9), rng.choice(HEAD_DIMS), known)
        layout = host.plan_workspace(p, request())
        assert layout.accumulator_bytes == p.heads * sum(q for q, _ in lengths) * padded(p.head_dim) * 4
        assert_laid_out(layout)


@pytest.mark.parametrize("zeros", [True, False])
def test_the_accumulator_is_zeroed_if_the_schedule_asks(zeros: bool) -> None:
    assert host.plan_workspace(dense(1, 1, 8, 8, 8), request(zero_accumulator=zeros)).zero_accumulator is zeros


@pytest.mark.parametrize("accumulator", [True, False])
def test_nothing_is_zeroed_if_there_are_no_rows(accumulator: bool) -> None:
    layout = host.plan_workspace(dense(2, 2, 0, 70, 8, window_right=0), request(accumulator))
    assert (layout.accumulator_bytes, layout.zero_accumulator) == (0, False)


@pytest.mark.parametrize("accumulator", [True, False])
def test_every_region_has_its_bytes_and_its_alignment(accumulator: bool) -> None:
    rng = random.Random(5)
    for _ in range(500):
        sizes = [rng.choice((0, 1, 4, 15, 16, 17, 255, 256, 257, 4001)) for _ in range(3)]
        wanted = request(accumulator, semaphore_bytes=sizes[0], delta_rows=sizes[1], partial_bytes=sizes[2])
        problem = random_dense(rng)
        if rng.random() < 0.5:
            problem = varlen(random_lengths(rng), 3, 5, known=rng.random() < 0.5)
        layout = host.plan_workspace(problem, wanted)
        assert layout.semaphore_bytes in range(sizes[0], sizes[0] + 16) and layout.semaphore_bytes % 16 == 0
        assert (layout.delta_bytes, layout.partial_bytes) == (4 * sizes[1], sizes[2])
        assert_laid_out(layout)


def test_rows_consist_of_whole_16_byte_vectors() -> None:
    for head_dim in range(1, 300):
        layout = host.plan_workspace(dense(1, 1, 1, 1, head_dim), request())
        assert layout.row_stride == padded(head_dim)
        assert layout.row_stride * 4 % 16 == 0 and 0 <= layout.row_stride - head_dim < 4


def test_the_addresses_of_rows_are_distinct_and_fill_the_accumulator() -> None:
    rng = random.Random(6)
    for _ in range(100):
        lengths = [(rng.randrange(0, 6), rng.randrange(0, 9)) for _ in range(rng.randrange(0, 5))]
        p = varlen(lengths, rng.randrange(1, 4), rng.randrange(1, 10), known=True)
        layout = host.plan_workspace(p, request())
        stride = layout.row_stride
        begin = [sum(q for q, _ in lengths[:b]) * p.heads * stride for b in range(len(lengths))]
        addresses = [
            begin[b] + host.dq_row_offset(h, i, q, stride)
            for b, (q, _) in enumerate(lengths)
            for h in range(p.heads)
            for i in range(q)
        ]
        assert addresses == list(range(0, layout.accumulator_bytes // 4, stride))


def test_rows_are_stored_in_blocks_only_if_requested_and_if_blocks_are_whole() -> None:
    for head_dim in range(1, 300):
        for asked in (False, True):
            layout = host.plan_workspace(dense(1, 1, 1, 1, head_dim), request(dq_blocks=asked))
            assert layout.dq_blocks == (asked and padded(head_dim) % 8 == 0)
            assert layout.accumulator_bytes == padded(head_dim) * 4


def test_a_block_stores_each_element_of_eight_rows_once() -> None:
    for columns in (8, 64, 136):
        offsets = [host.dq_block_offset(row, column) for row in range(8) for column in range(columns)]
        assert sorted(offsets) == list(range(8 * columns))
    # In the 16 x 8 accumulator of a warp, a lane has row lane / 4 and the columns lane % 4 * 2 and lane % 4 * 2 + 1.
    for odd in range(2):
        offsets = [host.dq_block_offset(lane // 4, 24 + lane % 4 * 2 + odd) for lane in range(32)]
        assert offsets == list(range(offsets[0], offsets[0] + 32)) and offsets[0] % 32 == 0


def test_permuted_rows_are_permutations_of_rows() -> None:
    for columns in range(4, 300, 4):
        offsets = [host.permuted_offset(column, columns) for column in range(0, columns, 4)]
        assert sorted(offsets) == list(range(0, columns, 4))
        assert [host.permuted_column(offset, columns) for offset in offsets] == list(range(0, columns, 4))
        rest = columns // 32 * 32  # columns after the last whole block of 32 are not reordered
        assert offsets[rest // 4 :] == list(range(rest, columns, 4))


def test_a_half_warp_that_stores_to_permuted_rows_uses_every_bank_once() -> None:
    for group in range(4):  # groups of 8 columns; a lane has row lane / 4 and two columns from lane % 4 * 2 on
        for half in (range(16), range(16, 32)):
            banks = set()
            for lane in half:
                column = group * 8 + lane % 4 * 2
                offset = host.permuted_offset(column // 4 * 4, 32) + column % 4
                vector = offset // 4 ^ lane // 4  # TMA's swizzle of rows with 128 bytes
                banks |= {vector * 4 + offset % 4, vector * 4 + offset % 4 + 1}
            assert banks == set(range(32))


def test_rows_are_permuted_if_requested() -> None:
    for asked in (False, True):
        assert host.plan_workspace(dense(1, 1, 1, 1, 64), request(dq_permuted=asked)).dq_permuted == asked


@pytest.mark.parametrize(
    "shape",
    [
        (65536, 2, 1024, 1024, 128),  # batch * heads above 65535, 2^34 elements
        (1, 1, 2**31 - 1, 1, 256),
        (2**15, 2**15, 2**20, 1, 256),  # 2^60 bytes
    ],
)
def test_sizes_are_64_bit(shape: tuple[int, int, int, int, int]) -> None:
    batch, heads, seqlen_q, _, head_dim = shape
    layout = host.plan_workspace(dense(*shape), request())
    assert layout.bytes == layout.accumulator_bytes == batch * heads * seqlen_q * head_dim * 4


def test_a_size_beyond_64_bits_raises() -> None:
    huge = 2**31 - 1
    with pytest.raises(ValueError, match=r"flashbwd: .*2\^63"):
        host.plan_workspace(dense(huge, huge, huge, huge, huge), request())
    with pytest.raises(ValueError, match=r"flashbwd: .*2\^63"):
        host.plan_workspace(dense(1, 1, 1, 1, 1), request(partial_bytes=2**63 - 1))


@pytest.mark.parametrize(
    ("field", "value"), [("semaphore_bytes", -1), ("delta_rows", -2), ("partial_bytes", -3)], ids=str
)
def test_a_request_of_negative_size_raises(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} {value}, expected at least 0"):
        host.plan_workspace(dense(1, 1, 8, 8, 8), request(**{field: value}))


def padded_rows(lengths: list[int], heads: int, packed: bool) -> tuple[list[range], int]:
    """The rows of LSE and delta of each (sequence, head), padded to tiles of 128 rows, and the rows of one array."""
    longest, total = max(lengths, default=0), sum(lengths)
    layout = host.LseDelta(packed, len(lengths), heads, longest, total)
    blocks = []
    for b, length in enumerate(lengths):
        begin = sum(lengths[:b]) if packed else 0
        for head in range(heads):
            first = layout.index(b, head, begin)
            blocks.append(range(first, first + -(-length // 128) * 128))
    return blocks, layout.delta_offset


@pytest.mark.parametrize("packed", [False, True])
def test_padded_rows_of_lse_and_delta_do_not_overlap_and_stay_in_their_array(packed: bool) -> None:
    rng = random.Random(8)
    calls = [([1], 1), ([1] * 7, 1), ([1], 5), ([128, 1, 129, 0, 1], 3)]
    calls += [([rng.choice(LENGTHS) for _ in range(rng.randrange(1, 9))], rng.randrange(1, 5)) for _ in range(100)]
    for given, heads in calls:
        lengths = given if packed else [given[0]] * len(given)
        blocks, rows = padded_rows(lengths, heads, packed)
        taken = [row for block in blocks for row in block]
        assert len(taken) == len(set(taken)), "two (sequence, head) share a row"
        assert all(0 <= row < rows for row in taken)
        assert all(block.start % 128 == 0 for block in blocks)
        assert rows % 128 == 0  # delta follows the LSE and is loaded by the same aligned copies
