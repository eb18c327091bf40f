"""How the reference backend divides a call into chunks and blocks, and the defaults of its arguments."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit import decoding as kit
from kit.decoding import Shape

import flashbwd
from flashbwd import reference
from flashbwd.options import AttentionOptions
from flashbwd.reference import blocks as partition
from flashbwd.reference import norms
from flashbwd.reference.bias_gradient import BiasGradient
from flashbwd.reference.blocks import Band, Chunk, Cut, TileSize, split_into_tasks
from flashbwd.reference.modes import GatherByIndex
from flashbwd.reference.operands import write_scaled
from flashbwd.reference.scores import Dropout, operand, sees_nothing
from flashbwd.reference.spans import Span

LENGTHS = st.integers(1, 600)
FEWEST = 16  # blocks of at most this many rows or keys are not divided further
DEVICES = ("cpu", "meta")  # the meta device represents a GPU
WINDOW = st.integers(-1, 6)
GROUPS = st.sampled_from([1, 2, 8, 64])


def span(batches: int, sq: int, sk: int) -> Span:
    return Span(0, batches, sq, sk, packed=False)


@given(st.integers(1, 5), LENGTHS, LENGTHS, st.integers(1, 4), GROUPS, st.sampled_from([2**10, 2**14, 2**20]))
def test_blocks_of_a_single_chunk_fit_unless_they_have_the_minimum_size(
    batches: int, sq: int, sk: int, heads: int, group: int, elements: int
) -> None:
    tile = TileSize(256, 256, elements, 8192)
    cut = Cut.whole(tile, span(batches, sq, sk), heads, group)
    assert (cut.batches, cut.heads_kv) == (batches, heads)
    rows, keys = min(max(256 // group, 1), sq), min(256, sk)
    assert min(rows, FEWEST // 2 + 1) <= cut.block_q <= rows
    assert min(keys, FEWEST // 2 + 1) <= cut.block_k <= keys
    scores = batches * heads * group * cut.block_q * cut.block_k
    assert scores <= elements or max(cut.block_q, cut.block_k) <= FEWEST


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.integers(14, 20))
def test_blocks_of_one_chunk_are_cut_at_their_larger_side(batches: int, heads: int, group: int, bits: int) -> None:
    cut = Cut.whole(TileSize(256, 256, 2**bits, 8192), span(batches, 600, 600), heads, group)
    rows = cut.block_q * group
    assert cut.block_k <= 2 * rows
    assert rows <= 2 * cut.block_k or cut.block_q <= FEWEST


@given(st.integers(1, 5), LENGTHS, LENGTHS, st.integers(1, 4), GROUPS, st.integers(1, 9))
def test_a_chunk_is_within_the_limits_or_has_a_single_head(
    batches: int, sq: int, sk: int, heads: int, group: int, most: int
) -> None:
    tile = TileSize(64, 32, 2**14, 1000)
    cut = Cut.of(tile, span(batches, sq, sk), heads, group, most)
    items = cut.batches * cut.heads_kv
    assert 1 <= cut.heads_kv <= heads
    assert 1 <= cut.batches <= batches
    assert cut.batches == 1 or cut.heads_kv == heads
    assert items == 1 or items * group * cut.block_q * cut.block_k <= tile.elements
    assert items == 1 or items * sk <= tile.held
    assert items <= most
    assert group * cut.block_q <= max(tile.rows, group)
    assert cut.block_k <= tile.keys


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(-1, 9), st.integers(-1, 9), st.data())
def test_a_tile_is_masked_along_a_diagonal_only_if_that_hides_a_pair(
    sq: int, sk: int, causal: bool, left: int, right: int, data: st.DataObject
) -> None:
    band = Band.of(sq, sk, "bottom_right" if causal else "none", left, right)
    rows, cols = (tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in (sq, sk))
    assume(rows[0] < rows[1] and cols[0] < cols[1])
    lower, upper = band.cuts(rows, cols)
    # 0 is the diagonal that ends at the last query and key.
    distance = torch.arange(*cols) - torch.arange(*rows)[:, None] - (sk - sq)
    right = 0 if causal else right
    hidden_left = left >= 0 and bool((distance < -left).any())
    hidden_right = right >= 0 and bool((distance > right).any())
    assert (lower is not None, upper is not None) == (hidden_left, hidden_right)


@st.composite
def bands(draw: st.DrawFn) -> tuple[Band, torch.Tensor]:
    """A band, and which keys each query sees: (sq, sk) bool."""
    sq, sk = draw(st.integers(1, 12)), draw(st.integers(0, 12))
    causal, left, right = draw(st.sampled_from(["none", "top_left", "bottom_right"])), *draw(st.tuples(WINDOW, WINDOW))
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (0 if causal == "top_left" else sk - sq)
    visible = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if causal != "none":
        visible &= distance <= 0
    elif right >= 0:
        visible &= distance <= right
    return Band.of(sq, sk, causal, left, right), visible


def extent(seen: torch.Tensor) -> tuple[int, int]:
    """Return the slice from the first True element to the last, or (0, 0) if no element is True."""
    places = seen.nonzero().flatten().tolist()
    return (places[0], places[-1] + 1) if places else (0, 0)


@given(bands(), st.data())
def test_a_band_has_the_rows_that_see_a_key_and_the_keys_that_they_see(
    drawn: tuple[Band, torch.Tensor], data: st.DataObject
) -> None:
    band, visible = drawn
    assert band.rows == extent(visible.any(1))
    assume(band.rows != (0, 0))
    assert visible.any(1)[slice(*band.rows)].all()
    first = data.draw(st.integers(band.rows[0], band.rows[1] - 1))
    rows = first, data.draw(st.integers(first + 1, band.rows[1]))
    keys, block_k = extent(visible[slice(*rows)].any(0)), data.draw(st.integers(1, 5))
    assert band.keys(rows) == keys
    tiles = [(start, min(start + block_k, keys[1])) for start in range(*keys, block_k)]
    assert list(band.tiles(rows, block_k)) == tiles
    for cols in tiles:
        hidden = ~visible[slice(*rows), slice(*cols)]
        found = band.hidden(rows, cols, torch.device("cpu"))
        assert (found is None) == (not hidden.any())
        assert found is None or torch.equal(found, hidden)
        tile = torch.where(hidden, torch.nan, 1.0)[None]
        band.zero_hidden_(tile, rows, cols)
        assert torch.equal(tile[0], (~hidden).float())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700), st.integers(0, 700)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(1, 7),
)
def test_tasks_have_every_row_that_sees_a_key_once(
    sizes: list[tuple[int, int, int]], heads: int, group: int, causal: bool, one_chunk: bool, threads: int
) -> None:
    spans = [Span(10 * i, *size, packed=False) for i, size in enumerate(sizes)]
    q, k = torch.empty(1, 1, heads * group, 8), torch.empty(1, 1, heads, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        mode = "bottom_right" if causal else "none"
        tasks, used = split_into_tasks(spans, q, k, mode, (-1, -1), one_chunk=one_chunk)
    assert 1 <= used <= threads
    for of in spans:
        count = torch.zeros(of.batches, heads * group, of.sq, dtype=torch.int64)
        own = [task for task in tasks if task.span is of]
        for task in own:
            chunk = task.chunk
            for strip in task.strips():
                assert strip[1] - strip[0] <= task.cut.block_q
                batches = slice(chunk.batch0, chunk.batch0 + chunk.batches)
                count[batches, chunk.query_range, slice(*strip)] += 1
        keyless = of.sq if of.sk == 0 else max(of.sq - of.sk, 0) if causal else 0
        assert (count[..., :keyless] == 0).all() and (count[..., keyless:] == 1).all()
        assert not one_chunk or len({task.chunk for task in own}) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_sees_nothing_if_its_lse_is_infinite_or_has_a_last_bit_above_1(dtype: torch.dtype) -> None:
    least = -(2.0**24) if dtype == torch.float32 else -(2.0**53)  # from here on neighbours are 2 apart
    lse = torch.tensor([least, least + 1, 2 * least, least / 2, 0.0, -least, -torch.inf, torch.inf], dtype=dtype)
    assert sees_nothing(lse).tolist() == [True, False, True, False, False, False, True, True]


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_is_written_times_its_scale(dtype: torch.dtype, scale: float) -> None:
    total = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    target = torch.full((2, 3, 5), torch.nan, dtype=dtype)
    write_scaled(total.clone(), scale, target)
    assert torch.equal(target, (total * scale).view(2, 3, 5).to(dtype))


@pytest.mark.parametrize(
    ("shared_sums", "device", "threads"), [(False, "cpu", 3), (True, "cpu", 1), (False, "meta", 1), (True, "meta", 1)]
)
def test_tasks_run_in_parallel_on_a_cpu_unless_they_add_to_the_same_elements(
    shared_sums: bool, device: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(partition, "_LEAST_WORK", 48 * 70 * 70)
    x = torch.zeros(48, 70, 1, 8, device=device)
    tasks, found = split_into_tasks([span(48, 70, 70)], x, x, "none", (-1, -1), shared_sums=shared_sums)
    assert found == threads
    assert {task.parts for task in tasks} == {1}  # one block of queries cannot be divided


@pytest.mark.parametrize(("head_dim", "threads", "heads"), [(8, 1, 128), (191, 1, 128), (192, 3, 64), (256, 3, 64)])
def test_threads_have_tasks_of_their_own_only_in_large_calls(
    head_dim: int, threads: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.zeros(1, 1, 1, 1).expand(256, 64, 1, head_dim)  # 2^20 scores
    tasks, found = split_into_tasks([span(256, 64, 64)], x, x, "none", (-1, -1))
    assert found == threads
    assert max(task.chunk.items for task in tasks) == heads  # more at a time if the threads of an operator share them


@pytest.mark.parametrize(("blocks", "parts"), [(1, 1), (2, 2), (9, 3)])
def test_one_head_is_divided_into_as_many_parts_as_there_are_threads_and_blocks(
    blocks: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(partition, "_LEAST_WORK", 256 * 256 * 8)
    x = torch.zeros(1, 256 * blocks, 1, 8)
    tasks, _ = split_into_tasks([span(1, 256 * blocks, 256 * blocks)], x, x, "none", (-1, -1))
    assert [(task.part, task.parts) for task in tasks] == [(part, parts) for part in range(parts)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_a_shared_bias_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """1000 rows, one per tile, each add 1. In bf16 the sum would stay at 256."""
    dbias = torch.full((1, 1, 1, 3), torch.nan, dtype=dtype)
    all_rows, chunk = span(1, 1000, 3), Chunk(0, 1, 0, 1, 1)
    gradient = BiasGradient(dbias, (1, 1, 1000, 3), [all_rows], torch.float32)
    for row in range(1000):
        gradient.add(torch.ones(1, 1, 1, 3), all_rows, chunk, (row, row + 1), (0, 3))
    gradient.finish()
    assert dbias.flatten().tolist() == [1000.0] * 3


@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize("summed", list(itertools.product([False, True], repeat=4)), ids=str)
def test_a_dense_bias_that_only_batch_or_heads_share_asks_for_all_heads_at_once(
    summed: tuple[bool, ...], spans: int
) -> None:
    """The gradient of such a bias, and of one that nothing shares, is written to its place without a copy in fp32."""
    full = (4, 3, 5, 7)
    dbias = torch.full([1 if one else size for one, size in zip(summed, full, strict=True)], torch.nan).bfloat16()
    parts = [Span(4 // spans * i, 4 // spans, 5, 7, packed=False) for i in range(spans)]
    gradient = BiasGradient(dbias, full, parts, torch.float32)
    by_batch, by_head, by_query, by_key = summed
    assert gradient.one_chunk == ((by_batch or by_head) and not by_query and not by_key and spans == 1)
    assert gradient.shared == (by_batch or by_head or by_query)
    for part in parts:
        gradient.add(torch.ones(part.batches, 3, 5, 7), part, Chunk(0, part.batches, 0, 3, 1), (0, 5), (0, 7))
    sums = math.prod(size for one, size in zip(summed, full, strict=True) if one)
    assert bool((dbias == sums).all()) == (gradient.one_chunk or not any(summed))
    gradient.finish()
    assert bool((dbias == sums).all())


@pytest.mark.parametrize("given_one", ["max_seqlen_q", "max_seqlen_k"])
def test_packed_sequences_need_both_longest_lengths(given_one: str) -> None:
    x, starts = torch.zeros(5, 1, 8), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens need max_seqlen_q and max_seqlen_k"):
        options = AttentionOptions(cu_seqlens_q=starts, cu_seqlens_k=starts, **{given_one: 5})
        reference.attention_forward(x, x, x, options)


@pytest.mark.parametrize("given_one", ["max_seqlen_q", "max_seqlen_k"])
def test_dense_sequences_need_neither(given_one: str) -> None:
    q, k = torch.randn(1, 5, 1, 8), torch.randn(1, 7, 1, 8)
    for got, want in zip(
        reference.attention_forward(q, k, k, AttentionOptions(**{given_one: 5 if given_one[-1] == "q" else 7})),
        reference.attention_forward(q, k, k),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_by_default_a_norm_is_a_layer_norm_without_dropout() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, dz = (torch.randn(3, 20, generator=generator, dtype=torch.float64) for _ in range(3))
    z, h, mu, rs = reference.dropout_add_norm_forward(x, residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(z, torch.nn.functional.layer_norm(h, (20,)))
    from_output = reference.norm_backward_from_output(dz, z, rs)[0]
    torch.testing.assert_close(from_output, reference.layer_norm_backward(dz, h, mu, rs)[0])


def test_by_default_every_gradient_of_a_norm_is_computed() -> None:
    x, dz, gamma = torch.randn(3, 20), torch.randn(3, 20), torch.randn(20)
    _, h, mu, rs = reference.dropout_add_norm_forward(x, x, gamma)
    found = reference.dropout_add_norm_backward(dz, h, mu, rs, gamma)
    assert [gradient is not None for gradient in found] == [True] * 4
    assert [g is not None for g in reference.norm_backward_from_output(dz, h, rs, gamma, gamma)] == [True] * 3
    assert [g is not None for g in reference.layer_norm_backward(dz, x, mu, rs, gamma)] == [True] * 3
    assert [g is not None for g in reference.rms_norm_backward(dz, x, rs, gamma)] == [True] * 2


def test_gamma_is_not_zero_centred_by_default() -> None:
    x, dz, gamma = torch.randn(3, 20), torch.randn(3, 20), torch.randn(20)
    _, h, mu, rs = reference.dropout_add_norm_forward(x, x, gamma)
    found = reference.dropout_add_norm_backward(dz, h, mu, rs, gamma)[1]
    assert found is not None
    want = torch.autograd.grad(torch.nn.functional.layer_norm(h.requires_grad_(), (20,), gamma), h, dz)[0]
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_norm_without_dx_sums_the_rows_of_every_chunk(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_CPU_CHUNK", 2 * 20)  # 2 rows
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, dz, gamma = torch.randn(7, 20).double(), torch.randn(7, 20).double(), torch.ones(20).double()
    mu, rs = x.new_zeros(7, 1), x.new_ones(7, 1)
    _, dgamma, dbeta = reference.layer_norm_backward(dz, x, mu, rs, gamma, output_mask=(False, True, True))
    torch.testing.assert_close(dgamma, (dz * x).sum(0))
    torch.testing.assert_close(dbeta, dz.sum(0))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("column", [None, 3.0, torch.arange(2.0 * 5).view(1, 2, 5, 1)], ids=["none", "number", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_operand_is_its_rows_times_the_scale_and_the_column(dtype: torch.dtype, column: Any, scale: float) -> None:
    rows = torch.randn(1, 2, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = operand(rows, torch.float32, scale, column)
    assert torch.equal(found[..., :6], rows.float() * scale)
    if column is None:
        assert found.shape == rows.shape
    else:
        assert torch.equal(found[..., 6:], torch.as_tensor(column).expand(1, 2, 5, 1))


@pytest.mark.parametrize("dim", range(1, 9))
def test_an_operand_with_a_column_has_rows_of_whole_16_bytes_except_on_a_cpu(dim: int) -> None:
    rows = [torch.empty(1, 1, 2, dim, device=device) for device in DEVICES]
    widths = [operand(x, torch.float32, column=1.0).shape[-1] for x in rows]
    assert widths == [dim + 1, next(width for width in range(dim + 1, dim + 5) if width * 4 % 16 == 0)]


@pytest.mark.parametrize("given_one", ["rng_seed", "rng_offset"])
def test_dropout_needs_both_words_of_its_generators_state(given_one: str) -> None:
    options = AttentionOptions(dropout_p=0.25, **{given_one: 3})
    with pytest.raises(ValueError, match=r"rng_state is None, expected .* because dropout_p is 0\.25"):
        Dropout.of(torch.zeros(1, 2, 1, 8), options, 2, 2)


@pytest.mark.parametrize(
    ("device", "threads", "rows", "columns", "chunks"),
    [
        ("cpu", 2, 4, 100, [[1, 1], [1, 1]]),  # rows wider than a chunk
        ("cpu", 4, 4, 64, [[1], [1], [1], [1]]),
        ("cpu", 3, 9, 32, [[2, 2], [2, 2], [1]]),
        ("cpu", 2, 65, 1, [[64], [1]]),
        ("cpu", 2, 0, 32, [[]]),
        ("cpu", 2, 9, 0, [[]]),
        ("meta", 2, 9, 64, [[4, 4, 1]]),
    ],
)
def test_threads_share_the_chunks_of_a_norms_rows_only_on_a_cpu(
    device: str, threads: int, rows: int, columns: int, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has 64 elements here, and 256 on a GPU."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(norms, "_CPU_CHUNK", 64)
    monkeypatch.setattr(norms, "_CUDA_CHUNK", 256)
    monkeypatch.setattr(norms, "run_all", lambda tasks, most: ran_on.append(most) or [task() for task in tasks])
    ran_on: list[int] = []
    found = norms._run_on_chunks(torch.empty(rows, columns, device=device), lambda chunks: chunks)
    assert [[part.stop - part.start for part in share] for share in found] == chunks
    every = [part for share in found for part in share]
    assert [part.start for part in every] == [0, *(part.stop for part in every)][: len(every)]
    assert ran_on == [threads if device == "cpu" else 1]


def test_the_epsilon_of_a_norm_is_1e_5_by_default() -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    layer, rms = (norm(x, (20,), eps=1e-5) for norm in (torch.nn.functional.layer_norm, torch.nn.functional.rms_norm))
    nothing = torch.zeros_like(x)
    torch.testing.assert_close(norms.layer_norm_forward(x)[0], layer)
    torch.testing.assert_close(norms.rms_norm_forward(x)[0], rms)
    for is_rms, want in ((False, layer), (True, rms)):
        z, _, mu, rs = reference.dropout_add_norm_forward(nothing, x, rms=is_rms)
        torch.testing.assert_close(z, want)
        assert (mu.numel(), rs.shape) == (0 if is_rms else 3, (3, 1))


@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=3)), ids=str)
def test_a_norm_computes_only_the_requested_gradients(mask: tuple[bool, ...]) -> None:
    x, dz = torch.randn(7, 20, dtype=torch.float64), torch.randn(7, 20, dtype=torch.float64)
    gamma = torch.randn(20, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, gamma, torch.zeros_like(gamma))]
    want = torch.autograd.grad(torch.nn.functional.layer_norm(leaves[0], (20,), *leaves[1:]), leaves, dz)
    _, mu, rs = norms.layer_norm_forward(x, gamma)
    found = reference.layer_norm_backward(dz, x, mu, rs, gamma, output_mask=mask)
    assert [gradient is not None for gradient in found] == list(mask)
    for got, of in zip(found, want, strict=True):
        if got is not None:
            torch.testing.assert_close(got, of)


@pytest.mark.parametrize(
    "index", [(torch.tensor(1),), (torch.tensor(1), 2), (0, torch.tensor(3)), (slice(None), torch.tensor(2))], ids=str
)
def test_an_index_tensor_gathers_instead_of_making_a_view(index: tuple[Any, ...]) -> None:
    table = torch.arange(20.0).view(4, 5)
    want = table[tuple(int(entry) if isinstance(entry, torch.Tensor) else entry for entry in index)]
    with GatherByIndex():
        found = table[index]
    assert torch.equal(found, want)
    assert found.untyped_storage().data_ptr() != table.untyped_storage().data_ptr()


def test_a_bool_index_selects() -> None:
    table = torch.arange(4.0)
    with GatherByIndex():
        assert table[table > 1].tolist() == [2.0, 3.0]


def test_hidden_keys_of_a_head_do_not_matter_if_the_batch_shares_keys() -> None:
    shape = Shape(batch=2, batch_kv=1, heads=2, heads_kv=2, seqlen_q=1, seqlen_k=40)
    q, k, v = shape.tensors(torch.float64, "cpu")
    mask = kit.block_mask(lambda b, h, q, k: k >= 10 * (h + 1), shape, "cpu", 8)
    clean = flashbwd.flex_decoding(q, k, v, None, mask, enable_gqa=True)
    dirty_k, dirty_v = k.clone(), v.clone()
    for tensor in (dirty_k, dirty_v):
        tensor[:, 0, 8:10] = torch.nan  # head 0 sees these keys in no sequence
        tensor[:, 1, 16:20] = torch.nan  # head 0 sees its own keys at these positions, but head 1 does not
    assert torch.equal(flashbwd.flex_decoding(q, dirty_k, dirty_v, None, mask, enable_gqa=True), clean)
