"""The workspace layout, row by row of its table, against sums written out here."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.host import load_host

host = load_host()
Mode = host.DqMode
LENGTHS = (0, 1, 2, 63, 64, 65, 79, 80, 81, 97, 127, 128, 129, 251, 256, 257, 1021)
HEAD_DIMS = (1, 2, 3, 4, 5, 31, 64, 96, 127, 128, 129, 192, 256, 1000)
BLOCKS = (1, 16, 64, 80, 96, 112, 128, 256)


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


def request(mode: Any, block_n: int = 128, sm_count: int = 132, **more: Any) -> Any:
    wanted = host.WorkspaceRequest()
    wanted.dq_mode, wanted.block_n, wanted.sm_count = mode, block_n, sm_count
    for name, value in more.items():
        setattr(wanted, name, value)
    return wanted


def blocks_by_counting(length: int, block: int) -> int:
    return len(range(0, length, block))


def padded(head_dim: int) -> int:
    return next(n for n in range(head_dim, head_dim + 4) if n % 4 == 0)


def persistent_nsplits(batch: int, heads: int, seqlen_k: int, block_n: int, workers: int) -> int:
    """The rule of the table, as it is written there."""
    per_head = blocks_by_counting(seqlen_k, block_n)
    if per_head == 0:
        return 0
    per_worker = max(1, -(-batch * heads * per_head // workers))
    if per_head % per_worker == 0:
        return per_head // per_worker
    if per_worker % per_head == 0:
        return 1
    return 1 + -(-(per_head - 1) // per_worker)


def regions_of(layout: Any, batch: int) -> list[tuple[int, int, int]]:
    """(offset, bytes, alignment) of every region that has bytes."""
    regions = [
        (layout.nsplits_offset, layout.tables * 4, 16),
        (layout.offsets_offset, (batch + 1) * 8 if layout.has_offsets else 0, 16),
        (layout.accumulator_offset, layout.accumulator_bytes, 256),
        (layout.semaphore_offset, layout.semaphore_bytes, 256),
        (layout.delta_offset, layout.delta_bytes, 256),
        (layout.partial_offset, layout.partial_bytes, 256),
        (layout.lengths_offset, layout.lengths_bytes, 16),
    ]
    return [region for region in regions if region[1]]


def assert_laid_out(layout: Any, batch: int) -> None:
    """Regions are aligned, do not overlap, waste less than an alignment each, and end at ``bytes``."""
    end = 0
    for offset, size, alignment in regions_of(layout, batch):
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + size
    assert layout.bytes == end


def random_dense(rng: random.Random, **more: Any) -> Any:
    shape = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(HEAD_DIMS)
    return dense(rng.randrange(0, 5), rng.randrange(1, 9), *shape, **more)


def random_lengths(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.choice(LENGTHS), rng.choice(LENGTHS)) for _ in range(rng.randrange(0, 12))]


def test_direct_needs_nothing_but_the_bounded_lengths_of_packed_sequences() -> None:
    for problem, lengths_bytes in ((dense(2, 3, 64, 64, 64), 0), (varlen([(5, 7)], 3, 64, known=False), 2 * 2 * 4)):
        layout = host.plan_workspace(problem, request(Mode.kDirect))
        assert (layout.bytes, layout.lengths_bytes) == (lengths_bytes, lengths_bytes)
        assert (layout.accumulator_bytes, layout.tables, layout.nsplits) == (0, 0, 0)
        assert not layout.zero_accumulator
        assert host.make_tables(problem, request(Mode.kDirect), [5], [7]) == ([], [])


@pytest.mark.parametrize("field", ["semaphore_bytes", "delta_rows", "partial_bytes"])
def test_direct_with_other_scratch_has_bytes(field: str) -> None:
    layout = host.plan_workspace(dense(2, 3, 64, 64, 64), request(Mode.kDirect, **{field: 1}))
    assert layout.bytes == {"semaphore_bytes": 16, "delta_rows": 4, "partial_bytes": 1}[field]
    assert_laid_out(layout, 2)


@pytest.mark.parametrize("mode", [mode for mode in Mode.__members__.values() if mode != Mode.kDirect])
def test_modes_with_tables_have_bytes_even_without_queries(mode: Any) -> None:
    for problem in (dense(1, 1, 0, 64, 64), dense(1, 1, 64, 0, 64), dense(0, 1, 64, 64, 64)):
        assert host.plan_workspace(problem, request(mode)).bytes >= 4


@pytest.mark.parametrize("mode", [Mode.kAtomic, Mode.kOrdered])
def test_one_slot_dense_has_every_row_of_dq_once(mode: Any) -> None:
    rng = random.Random(0)
    for _ in range(500):
        p = random_dense(rng)
        layout = host.plan_workspace(p, request(mode))
        assert layout.accumulator_bytes == p.batch * p.heads * p.seqlen_q * padded(p.head_dim) * 4
        assert (layout.tables, layout.nsplits, layout.has_offsets) == (1, 1, False)
        assert host.make_tables(p, request(mode), [], []) == ([1], [])
        assert_laid_out(layout, p.batch)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", [Mode.kAtomic, Mode.kOrdered])
def test_one_slot_varlen_has_every_packed_row_once(mode: Any, known: bool) -> None:
    rng = random.Random(1)
    for _ in range(500):
        lengths = random_lengths(rng)
        p = varlen(lengths, rng.randrange(1, 9), rng.choice(HEAD_DIMS), known)
        layout = host.plan_workspace(p, request(mode))
        assert layout.accumulator_bytes == p.heads * sum(q for q, _ in lengths) * padded(p.head_dim) * 4
        assert (layout.tables, layout.nsplits, layout.has_offsets) == (len(lengths), 1, False)
        assert host.make_tables(p, request(mode), *split(lengths)) == ([1] * len(lengths), [])
        assert_laid_out(layout, p.batch)


def split(lengths: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [q for q, _ in lengths], [k for _, k in lengths]


def test_split_slots_dense_has_a_slot_for_each_key_block() -> None:
    rng = random.Random(2)
    for _ in range(1000):
        p, block_n = random_dense(rng), rng.choice(BLOCKS)
        wanted = request(Mode.kSplitSlots, block_n)
        layout = host.plan_workspace(p, wanted)
        nsplits = blocks_by_counting(p.seqlen_k, block_n)
        assert layout.nsplits == nsplits
        assert layout.accumulator_bytes == p.batch * p.heads * nsplits * p.seqlen_q * padded(p.head_dim) * 4
        assert host.make_tables(p, wanted, [], []) == ([nsplits], [])
        assert_laid_out(layout, p.batch)


def test_split_slots_varlen_is_exact_where_lengths_are_known() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        lengths, block_n = random_lengths(rng), rng.choice(BLOCKS)
        p = varlen(lengths, rng.randrange(1, 9), rng.choice(HEAD_DIMS), known=True)
        wanted = request(Mode.kSplitSlots, block_n)
        layout = host.plan_workspace(p, wanted)
        nsplits, offsets = host.make_tables(p, wanted, *split(lengths))
        assert nsplits == [blocks_by_counting(k, block_n) for _, k in lengths]
        expected = [0]
        for n, (q, _) in zip(nsplits, lengths, strict=True):
            expected.append(expected[-1] + p.heads * n * q * padded(p.head_dim))
        assert offsets == expected
        assert layout.accumulator_bytes == 4 * offsets[-1]
        assert (layout.tables, layout.has_offsets) == (len(lengths), True)
        assert_laid_out(layout, p.batch)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=20),
    slack=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    heads=st.integers(1, 9),
    head_dim=st.integers(1, 260),
    block_n=st.integers(1, 300),
)
@settings(max_examples=2000, deadline=None)
def test_split_slots_varlen_bound_holds_every_batch_of_that_total_and_maximum(
    lengths: list[tuple[int, int]], slack: tuple[int, int], heads: int, head_dim: int, block_n: int
) -> None:
    p = varlen(lengths, heads, head_dim, known=False)
    p.total_q += slack[0]  # rows of q that belong to no sequence
    p.seqlen_k += slack[1]  # a maximum that no sequence reaches
    wanted = request(Mode.kSplitSlots, block_n)
    layout = host.plan_workspace(p, wanted)
    _, offsets = host.make_tables(p, wanted, *split(lengths))
    assert layout.accumulator_bytes >= 4 * offsets[-1]
    assert (
        layout.accumulator_bytes == heads * p.total_q * blocks_by_counting(p.seqlen_k, block_n) * padded(head_dim) * 4
    )
    assert_laid_out(layout, p.batch)


def test_split_slots_varlen_bound_is_reached_by_equal_sequences() -> None:
    p = varlen([(33, 200)] * 7, 3, 65, known=False)
    wanted = request(Mode.kSplitSlots, 64)
    _, offsets = host.make_tables(p, wanted, [33] * 7, [200] * 7)
    assert host.plan_workspace(p, wanted).accumulator_bytes == 4 * offsets[-1]


def test_tables_never_leave_the_bound_when_a_sequence_is_longer_than_the_maximum() -> None:
    p = varlen([(10, 100), (10, 100)], 2, 64, known=False)
    wanted = request(Mode.kSplitSlots, 64)
    nsplits, offsets = host.make_tables(p, wanted, [10, 10], [5000, 100])
    assert nsplits == [2, 2]
    assert 4 * offsets[-1] <= host.plan_workspace(p, wanted).accumulator_bytes


def test_persistent_slots_come_from_the_worker_count() -> None:
    rng = random.Random(4)
    for _ in range(3000):
        p, block_n, workers = random_dense(rng), rng.choice(BLOCKS), rng.choice((1, 2, 3, 7, 16, 108, 114, 132, 1000))
        wanted = request(Mode.kPersistentSlots, block_n, workers)
        layout = host.plan_workspace(p, wanted)
        nsplits = persistent_nsplits(p.batch, p.heads, p.seqlen_k, block_n, workers)
        assert layout.nsplits == nsplits
        assert layout.accumulator_bytes == p.batch * p.heads * nsplits * p.seqlen_q * padded(p.head_dim) * 4
        assert host.make_tables(p, wanted, [], []) == ([nsplits], [])
        assert_laid_out(layout, p.batch)


@pytest.mark.parametrize("mode", [Mode.kAtomic, Mode.kPersistentSlots])
def test_accumulators_that_are_added_into_are_zeroed(mode: Any) -> None:
    assert host.plan_workspace(dense(1, 1, 8, 8, 8), request(mode)).zero_accumulator


@pytest.mark.parametrize("zeros", [True, False])
def test_ordered_accumulator_is_zeroed_as_its_schedule_asks(zeros: bool) -> None:
    wanted = request(Mode.kOrdered, adds_into_zeros=zeros)
    assert host.plan_workspace(dense(1, 1, 8, 8, 8), wanted).zero_accumulator is zeros


@pytest.mark.parametrize(
    ("more", "zeroed"),
    [
        ({}, False),
        ({"window_left": 0}, True),
        ({"window_left": 5}, True),
        ({"window_right": 0}, True),
        ({"has_seqused": True}, True),
    ],
)
def test_split_slots_are_zeroed_where_a_mask_or_seqused_leaves_rows_unwritten(
    more: dict[str, Any], zeroed: bool
) -> None:
    for problem in (dense(2, 2, 70, 70, 8, **more), varlen([(0, 5), (5, 0), (70, 70)], 2, 8, known=True, **more)):
        assert host.plan_workspace(problem, request(Mode.kSplitSlots)).zero_accumulator is zeroed


@pytest.mark.parametrize("mode", Mode.__members__.values())
def test_nothing_is_zeroed_where_there_is_no_accumulator(mode: Any) -> None:
    layout = host.plan_workspace(dense(2, 2, 0, 70, 8, window_right=0), request(mode))
    assert (layout.accumulator_bytes, layout.zero_accumulator) == (0, False)


@pytest.mark.parametrize("mode", Mode.__members__.values())
def test_every_region_has_its_bytes_and_its_alignment(mode: Any) -> None:
    rng = random.Random(5)
    for _ in range(500):
        sizes = [rng.choice((0, 1, 4, 15, 16, 17, 255, 256, 257, 4001)) for _ in range(3)]
        wanted = request(mode, semaphore_bytes=sizes[0], delta_rows=sizes[1], partial_bytes=sizes[2])
        problem = random_dense(rng)
        if mode != Mode.kPersistentSlots and rng.random() < 0.5:
            problem = varlen(random_lengths(rng), 3, 5, known=rng.random() < 0.5)
        layout = host.plan_workspace(problem, wanted)
        assert layout.semaphore_bytes in range(sizes[0], sizes[0] + 16) and layout.semaphore_bytes % 16 == 0
        assert (layout.delta_bytes, layout.partial_bytes) == (4 * sizes[1], sizes[2])
        assert_laid_out(layout, problem.batch)


def test_rows_are_whole_16_byte_vectors() -> None:
    for head_dim in range(1, 300):
        layout = host.plan_workspace(dense(1, 1, 1, 1, head_dim), request(Mode.kAtomic))
        assert layout.row_stride == padded(head_dim)
        assert layout.row_stride * 4 % 16 == 0 and 0 <= layout.row_stride - head_dim < 4


def test_every_row_of_every_slot_has_an_address_of_its_own_and_none_is_left_over() -> None:
    rng = random.Random(6)
    for _ in range(100):
        lengths = [(rng.randrange(0, 6), rng.randrange(0, 9)) for _ in range(rng.randrange(0, 5))]
        p = varlen(lengths, rng.randrange(1, 4), rng.randrange(1, 10), known=True)
        wanted = request(Mode.kSplitSlots, rng.randrange(1, 4))
        layout = host.plan_workspace(p, wanted)
        nsplits, offsets = host.make_tables(p, wanted, *split(lengths))
        stride = layout.row_stride
        addresses = [
            offsets[b] + host.dq_row_offset(h, s, i, nsplits[b], q, stride)
            for b, (q, _) in enumerate(lengths)
            for h in range(p.heads)
            for s in range(nsplits[b])
            for i in range(q)
        ]
        assert addresses == list(range(0, layout.accumulator_bytes // 4, stride))


def test_rows_lie_in_blocks_only_where_they_are_asked_for_and_whole() -> None:
    for head_dim in range(1, 300):
        for asked in (False, True):
            layout = host.plan_workspace(dense(1, 1, 1, 1, head_dim), request(Mode.kAtomic, dq_blocks=asked))
            assert layout.dq_blocks == (asked and padded(head_dim) % 8 == 0)
            assert layout.accumulator_bytes == padded(head_dim) * 4


def test_blocks_give_eight_rows_the_elements_that_they_have_as_rows() -> None:
    for columns in (8, 64, 136):
        places = [host.dq_block_offset(row, column) for row in range(8) for column in range(columns)]
        assert sorted(places) == list(range(8 * columns))
    # An accumulator of 16 x 8 of a warp: lane has row lane / 4, columns lane % 4 * 2 and the next.
    for odd in range(2):
        places = [host.dq_block_offset(lane // 4, 24 + lane % 4 * 2 + odd) for lane in range(32)]
        assert places == list(range(places[0], places[0] + 32)) and places[0] % 32 == 0


def test_parted_rows_have_the_same_places_in_another_order() -> None:
    for columns in range(4, 300, 4):
        places = [host.parted_place(column, columns) for column in range(0, columns, 4)]
        assert sorted(places) == list(range(0, columns, 4))
        assert [host.parted_column(place, columns) for place in places] == list(range(0, columns, 4))
        rest = columns // 32 * 32  # columns that make no block of 32 stay where they are
        assert places[rest // 4 :] == list(range(rest, columns, 4))


def test_a_store_to_parted_rows_meets_every_bank_once_in_each_half_of_a_warp() -> None:
    for group in range(4):  # of 8 columns; lane has row lane / 4, two columns from lane % 4 * 2 on
        for half in (range(16), range(16, 32)):
            banks = set()
            for lane in half:
                column = group * 8 + lane % 4 * 2
                place = host.parted_place(column // 4 * 4, 32) + column % 4
                piece = place // 4 ^ lane // 4  # as the copy engine swizzles rows of 128 bytes
                banks |= {piece * 4 + place % 4, piece * 4 + place % 4 + 1}
            assert banks == set(range(32))


def test_rows_are_parted_where_that_is_asked_for() -> None:
    for asked in (False, True):
        assert host.plan_workspace(dense(1, 1, 1, 1, 64), request(Mode.kAtomic, dq_parted=asked)).dq_parted == asked


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        (Mode.kAtomic, (65536, 2, 1024, 1024, 128)),  # batch * heads above 65535, 2^34 elements
        (Mode.kAtomic, (1, 1, 2**31 - 1, 1, 256)),
        (Mode.kSplitSlots, (8, 128, 2**20, 2**20, 256)),  # 2^51 elements
        (Mode.kPersistentSlots, (70000, 1, 4096, 4096, 512)),
        (Mode.kAtomic, (2**15, 2**15, 2**20, 1, 256)),  # 2^60 bytes
    ],
)
def test_sizes_are_64_bit(mode: Any, shape: tuple[int, int, int, int, int]) -> None:
    batch, heads, seqlen_q, seqlen_k, head_dim = shape
    nsplits = {
        Mode.kAtomic: 1,
        Mode.kSplitSlots: blocks_by_counting(seqlen_k, 128),
        Mode.kPersistentSlots: persistent_nsplits(batch, heads, seqlen_k, 128, 132),
    }[mode]
    layout = host.plan_workspace(dense(*shape), request(mode))
    assert layout.accumulator_bytes == batch * heads * nsplits * seqlen_q * head_dim * 4
    assert layout.bytes == 256 + layout.accumulator_bytes


def test_offsets_table_is_64_bit() -> None:
    lengths = [(2**20, 2**20), (1, 1)]
    p = varlen(lengths, 64, 128, known=True)
    _, offsets = host.make_tables(p, request(Mode.kSplitSlots), *split(lengths))
    assert offsets == [0, 2 ** (6 + 13 + 20 + 7), 2**46 + 64 * 128]


@pytest.mark.parametrize("mode", [Mode.kAtomic, Mode.kSplitSlots, Mode.kPersistentSlots, Mode.kOrdered])
def test_a_size_beyond_64_bits_raises(mode: Any) -> None:
    huge = 2**31 - 1
    with pytest.raises(ValueError, match=r"flashbwd: .*2\^63"):
        host.plan_workspace(dense(huge, huge, huge, huge, huge), request(mode))
    with pytest.raises(ValueError, match=r"flashbwd: .*2\^63"):
        host.plan_workspace(dense(1, 1, 1, 1, 1), request(mode, partial_bytes=2**63 - 1))


def test_a_varlen_sum_beyond_64_bits_raises() -> None:
    huge = 2**31 - 1
    p = varlen([(huge, huge)] * 8, 2**20, 256, known=True)
    with pytest.raises(ValueError, match=r"flashbwd: .*2\^63"):
        host.plan_workspace(p, request(Mode.kSplitSlots, 1))
    with pytest.raises(ValueError, match=r"flashbwd: .*2\^63"):
        host.make_tables(p, request(Mode.kSplitSlots, 1), [huge] * 8, [huge] * 8)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (request(Mode.kSplitSlots, 0), "block_n 0, expected at least 1"),
        (request(Mode.kPersistentSlots, 0), "block_n 0, expected at least 1"),
        (request(Mode.kPersistentSlots, 64, 0), "sm_count 0, expected at least 1"),
        (request(Mode.kAtomic, semaphore_bytes=-1), "semaphore_bytes -1, expected at least 0"),
        (request(Mode.kAtomic, delta_rows=-2), "delta_rows -2, expected at least 0"),
        (request(Mode.kAtomic, partial_bytes=-3), "partial_bytes -3, expected at least 0"),
    ],
)
def test_a_request_without_sense_raises(wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        host.plan_workspace(dense(1, 1, 8, 8, 8), wanted)


def test_persistent_slots_refuse_variable_lengths() -> None:
    with pytest.raises(ValueError, match="dense"):
        host.plan_workspace(varlen([(5, 5)], 1, 8, known=True), request(Mode.kPersistentSlots))
