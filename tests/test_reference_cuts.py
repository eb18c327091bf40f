"""How the reference backend divides a call into chunks and blocks, and the defaults of its arguments."""

from __future__ import annotations

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
from flashbwd.reference import norms
from flashbwd.reference.bias_gradient import BiasGradient
from flashbwd.reference.blocks import Band, Chunk, Cut, TileSize, cut_into_pieces
from flashbwd.reference.modifications import GatherByIndex
from flashbwd.reference.spans import Span

LENGTHS = st.integers(1, 600)
FEWEST = 16  # blocks of at most this many rows or keys are not divided further
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


@pytest.mark.parametrize(
    ("shared_sums", "device", "threads"), [(False, "cpu", 3), (True, "cpu", 1), (False, "meta", 1), (True, "meta", 1)]
)
def test_pieces_run_in_parallel_on_a_cpu_unless_they_add_to_the_same_elements(
    shared_sums: bool, device: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.zeros(48, 70, 1, 8, device=device)
    pieces, found = cut_into_pieces([span(48, 70, 70)], x, x, "none", (-1, -1), shared_sums=shared_sums)
    assert found == threads
    assert {piece.parts for piece in pieces} == {1}  # one block of queries cannot be divided


@pytest.mark.parametrize(("batches", "threads"), [(1, 1), (31, 1), (32, 2), (48, 3), (99, 3)])
def test_each_thread_has_at_least_the_scores_of_a_whole_tile(
    batches: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.zeros(batches, 64, 1, 8)
    _, found = cut_into_pieces([span(batches, 64, 64)], x, x, "none", (-1, -1))
    assert found == threads


@pytest.mark.parametrize(("blocks", "parts"), [(1, 1), (2, 2), (9, 3)])
def test_one_head_is_divided_into_as_many_parts_as_there_are_threads_and_blocks(
    blocks: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.zeros(1, 256 * blocks, 1, 8)
    pieces, _ = cut_into_pieces([span(1, 256 * blocks, 256 * blocks)], x, x, "none", (-1, -1))
    assert [(piece.part, piece.parts) for piece in pieces] == [(part, parts) for part in range(parts)]


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
