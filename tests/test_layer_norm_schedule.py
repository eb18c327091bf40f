"""The assignment of rows and columns to threads in the backward of LayerNorm agrees with plain enumeration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.host import load_host

host = load_host()

MAX_THREADS, MAX_COLUMNS_A_THREAD = 512, 32
FEWEST_THREADS_FOR_COLUMNS = 128
SMEM = {(9, 0): 232448, (8, 0): 166912, (8, 6): 101376}


def device(capability: tuple[int, int], sm_count: int) -> Any:
    info = host.DeviceInfo()
    info.cc_major, info.sm_count, info.smem_per_block = capability[0], sm_count, SMEM[capability]
    return info


def shape(rows: int, columns: int, x_bytes: int = 2, dz_bytes: int = 2, **options: Any) -> Any:
    result = host.BackwardShape()
    result.rows, result.columns, result.x_bytes, result.dz_bytes = rows, columns, x_bytes, dz_bytes
    for name, value in options.items():
        setattr(result, name, value)
    return result


columns = st.one_of(st.integers(1, 300), st.integers(1, 20000), st.integers(1, 2_000_000))
capabilities = st.sampled_from(sorted(SMEM))
sizes = st.sampled_from([2, 4])


@given(
    rows=st.integers(1, 10**7),
    columns=columns,
    x_bytes=sizes,
    dz_bytes=sizes,
    from_output=st.booleans(),
    residual=st.booleans(),
    keep=st.booleans(),
    draws=st.booleans(),
    shifted=st.booleans(),
    beside_columns=st.booleans(),
    column_threads=st.sampled_from([0, FEWEST_THREADS_FOR_COLUMNS]),
    most_cluster=st.sampled_from([1, 2, 4, 8, 16]),
    capability=capabilities,
    sm_count=st.integers(1, 160),
)
def test_every_shape_has_a_tile_that_fits(
    rows: int,
    columns: int,
    x_bytes: int,
    dz_bytes: int,
    capability: tuple[int, int],
    sm_count: int,
    **options: Any,
) -> None:
    gpu = device(capability, sm_count)
    problem = shape(rows, columns, x_bytes, dz_bytes, **options)
    tile = host.choose_tile(problem, gpu)
    assert tile.elements == 16 // min(x_bytes, dz_bytes)
    assert 0 < tile.threads <= MAX_THREADS - problem.column_threads
    assert tile.threads % 32 == 0
    assert tile.vectors * tile.elements <= MAX_COLUMNS_A_THREAD
    assert tile.smem_bytes <= gpu.smem_per_block
    # Every column has a thread, even if rows start between vector boundaries.
    assert tile.vectors * tile.lanes >= tile.cta_vectors
    assert tile.ctas_per_row * tile.cta_vectors * tile.elements >= columns + (
        tile.elements - 1 if options["shifted"] else 0
    )
    # For shuffles, the number of lanes must divide a warp or be a multiple of it. There are 16 named barriers.
    assert 32 % tile.lanes == 0 or tile.lanes % 32 == 0
    assert tile.lanes <= 32 or tile.groups <= 15
    assert tile.cluster == (
        tile.ctas_per_row > 1 and capability[0] >= 9 and tile.ctas_per_row <= options["most_cluster"]
    )
    assert tile.ctas_per_row == 1 or tile.cluster or tile.groups == 1


@given(
    rows=st.one_of(st.integers(1, 3000), st.integers(1, 100_000)),
    columns=st.one_of(st.integers(1, 300), st.integers(1, 20000)),
    x_bytes=sizes,
    base=st.integers(0, 7),
    capability=capabilities,
    sm_count=st.integers(1, 160),
)
def test_every_row_has_one_worker_and_its_columns_stay_aligned(
    rows: int, columns: int, x_bytes: int, base: int, capability: tuple[int, int], sm_count: int
) -> None:
    elements = 16 // x_bytes
    step, base = columns % elements, base % elements
    problem = shape(rows, columns, x_bytes, x_bytes, shifted=step != 0 or base != 0)
    tile = host.choose_tile(problem, device(capability, sm_count))
    schedule = host.schedule_rows(problem, tile, max(1, sm_count // tile.ctas_per_row), base, step)
    assert schedule.workers % schedule.period == 0
    seen = bytearray(rows)
    for worker in range(schedule.workers):
        residue = worker % schedule.period
        for group in range(tile.groups):
            first = (worker // schedule.period * tile.groups + group) * schedule.period + residue
            for row in range(first, rows, schedule.workers * tile.groups):
                seen[row] += 1
                assert (base + row * step) % elements == (base + residue * step) % elements
    assert set(seen) == {1}


def test_workers_are_throttled_if_there_are_several_rounds() -> None:
    gpu = device((9, 0), 132)
    for rows, columns, waits in ((300, 8192, False), (32768, 8192, True), (32768, 7919, True), (4096, 65536, True)):
        problem = shape(rows, columns)
        tile = host.choose_tile(problem, gpu)
        schedule = host.schedule_rows(problem, tile, 132 // tile.ctas_per_row, 0, 0)
        assert schedule.workers * schedule.rounds * tile.groups >= rows
        assert (schedule.ahead > 0) == waits


def test_the_lead_of_a_worker_depends_on_the_bytes_per_round() -> None:
    gpu = device((9, 0), 132)
    for rows, columns, size, output, rounds in (
        (65536, 4096, 2, False, 1.5),  # 64 KB of x and dz per round
        (32768, 4096, 4, False, 1.5),
        (16384, 16384, 2, False, 1.5),
        (65536, 4096, 2, True, 2.0),
        (349525, 768, 2, False, 2.0),  # 48 KB
        (21845, 12288, 2, False, 2.0),
        (10**6, 64, 2, False, 2.0),
        (4096, 65536, 2, False, 2.0),  # clusters of 8
        (33897, 7919, 2, False, 2.0),  # 8 workers share vectors
    ):
        shifted = columns % (16 // size) != 0
        problem = shape(rows, columns, size, size, shifted=shifted, from_output=output)
        tile = host.choose_tile(problem, gpu)
        schedule = host.schedule_rows(problem, tile, 132 // tile.ctas_per_row, 0, columns % (16 // size))
        assert schedule.ahead == int(rounds * schedule.workers)


# The throttle counts the rounds of all workers in one int, and compares it with workers * round - ahead.
@pytest.mark.parametrize(("columns", "x_bytes"), [(8, 2), (768, 2), (4096, 2), (8192, 4), (7919, 2)])
def test_workers_are_throttled_only_while_32_bits_count_the_rounds_of_all(columns: int, x_bytes: int) -> None:
    shifted = columns % (16 // x_bytes) != 0
    workers = 128
    tile = host.choose_tile(shape(1, columns, x_bytes, x_bytes, shifted=shifted), device((9, 0), workers))
    most = 2**31 // workers  # with this many rounds, the sum reaches 2**31
    for rounds, counted in ((most - 1, True), (most, False), (most + 1, False), (2 * most, False), (2**30, False)):
        for rows in (rounds * workers * tile.groups, (rounds - 1) * workers * tile.groups + 1):
            problem = shape(rows, columns, x_bytes, x_bytes, shifted=shifted)
            schedule = host.schedule_rows(problem, tile, workers, 0, columns % (16 // x_bytes))
            assert (schedule.workers, schedule.rounds) == (workers, rounds)
            assert (schedule.ahead > 0) == counted


@given(
    rows=st.one_of(st.integers(1, 2**24), st.integers(2**30, 2**42)),
    columns=columns,
    x_bytes=sizes,
    sm_count=st.integers(1, 160),
    output=st.booleans(),
)
def test_the_round_count_of_throttled_workers_fits_in_32_bits(
    rows: int, columns: int, x_bytes: int, sm_count: int, output: bool
) -> None:
    step = columns % (16 // x_bytes)
    problem = shape(rows, columns, x_bytes, x_bytes, shifted=step != 0, from_output=output)
    tile = host.choose_tile(problem, device((9, 0), sm_count))
    rounds = -(-rows // (max(1, sm_count // tile.ctas_per_row) * tile.groups))
    assume(rounds < 2**30)
    schedule = host.schedule_rows(problem, tile, max(1, sm_count // tile.ctas_per_row), 0, step)
    assert schedule.rounds >= 1
    assert schedule.workers * schedule.rounds * tile.groups >= rows
    assert 0 <= schedule.ahead <= 2 * schedule.workers
    if schedule.ahead > 0:
        assert schedule.workers * schedule.rounds < 2**31


@given(rows=st.integers(1, 10**6), columns=columns, x_bytes=sizes, dz_bytes=sizes, sm_count=st.integers(1, 160))
def test_separate_ctas_sum_columns_only_if_the_rows_stay_in_l2(
    rows: int, columns: int, x_bytes: int, dz_bytes: int, sm_count: int
) -> None:
    gpu = device((9, 0), sm_count)
    gpu.l2_bytes = 50 * 2**20
    ctas = host.column_ctas(shape(rows, columns, x_bytes, dz_bytes), gpu)
    assert 0 <= ctas <= sm_count // 2
    if ctas > 0:
        assert rows * columns * (x_bytes + dz_bytes) <= gpu.l2_bytes / 2
        columns_at_a_time = 4 * 16 // min(x_bytes, dz_bytes)
        assert (ctas - 1) * columns_at_a_time < columns <= sm_count * columns_at_a_time
        # With one CTA fewer, the last CTA would end later.
        blocks = -(-columns // columns_at_a_time)
        blocks_per_cta = -(-blocks // ctas)
        assert blocks_per_cta == -(-blocks // (sm_count // 2))
        assert ctas == 1 or -(-blocks // (ctas - 1)) > blocks_per_cta


def test_the_ctas_of_rows_sum_columns_if_that_halves_their_rounds() -> None:
    gpu = device((9, 0), 132)
    gpu.l2_bytes = 50 * 2**20
    for rows, columns, size, within in (
        (1024, 3072, 2, True),
        (1024, 1536, 4, True),
        (1024, 4096, 2, False),
        (1024, 1024, 2, False),
        (132, 3072, 2, False),
    ):
        problem = shape(rows, columns, size, size, beside_columns=True)
        ctas = host.column_ctas(problem, gpu)
        beside = host.choose_tile(problem, device((9, 0), 132 - ctas))
        tile = host.tile_with_columns(problem, beside, ctas, gpu)
        assert (tile.threads > 0) == within
        assert tile.threads <= MAX_THREADS - FEWEST_THREADS_FOR_COLUMNS


@given(p=st.floats(0.0, 1.0, exclude_max=True))
def test_the_threshold_of_kept_random_words_is_exact(p: float) -> None:
    def kept(word: int) -> bool:
        uniform = torch.tensor(word, dtype=torch.int64).to(torch.float32) * 2.0**-32 + 2.0**-33
        return bool(uniform > torch.tensor(p, dtype=torch.float32))

    least = host.keep_from(p)
    assert least == 0 or not kept(least - 1)
    assert least == 2**32 - 1 or kept(least)
