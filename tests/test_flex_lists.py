"""Block lists and mask bits of FlexAttention agree with a loop over all pairs of the dense mask."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flashbwd.flex import mask_bits
from flashbwd.flex.cache import kernel_lists_of
from flashbwd.flex.lists import KeyBlockLists, key_block_lists, longest_first
from flashbwd.flex.tile import Tile
from flashbwd.reference.decoding import DecodingCall

Sizes = tuple[int, int, int, int]  # batch, query heads, queries, keys


def random_mask(sizes: Sizes, block: tuple[int, int], shared: tuple[bool, bool], seed: int) -> tuple[BlockMask, Tensor]:
    """A BlockMask with random lists, in which the mask_mod disagrees with the lists, and its dense mask."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = sizes
    rows, columns = (-(-n // size) for n, size in zip(sizes[2:], block, strict=True))
    lists = (1 if shared[0] else batch, 1 if shared[1] else heads)
    states = torch.randint(0, 3, (*lists, rows, columns), generator=generator)
    asked = torch.rand(batch, heads, seqlen_q, seqlen_k, generator=generator) < 0.5
    asked[:, :, : seqlen_q // 2] |= torch.rand((), generator=generator) < 0.5  # makes some tiles full
    asked[:, :, seqlen_q // 2 :] &= torch.rand((), generator=generator) < 0.5  # makes some tiles empty

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return asked[0 if shared[0] else b, 0 if shared[1] else h, q, k]

    def lists_of(state: int) -> tuple[Tensor, Tensor]:
        listed = states == state
        order = listed.int().argsort(dim=-1, descending=True, stable=True)
        return listed.sum(-1).int(), order.int()

    mask = BlockMask.from_kv_blocks(
        *lists_of(1), *lists_of(2), BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(seqlen_q, seqlen_k)
    )
    widths = [min(n, size) for n, size in zip(sizes[2:], block, strict=True)]
    wide = states.repeat_interleave(widths[0], 2).repeat_interleave(widths[1], 3)[:, :, :seqlen_q, :seqlen_k]
    asked = asked[: lists[0], : lists[1]]
    return mask, ((wide == 2) | ((wide == 1) & asked)).expand(*sizes)


def dense(lists: KeyBlockLists, sizes: Sizes, mask_mod: Any = None) -> Tensor:
    """The dense mask that the documented layout describes, read entry by entry."""
    batch, heads, seqlen_q, seqlen_k = sizes
    tile = lists.tile
    padded = torch.zeros(
        batch, heads, lists.query_blocks * tile.queries, lists.key_blocks * tile.keys, dtype=torch.bool
    )
    offsets, entries, tiles = (t.tolist() for t in (lists.offsets, lists.entries, lists.bit_tiles))
    for b in range(batch):
        for h in range(heads):
            for n in range(lists.key_blocks):
                at = ((b if lists.batches > 1 else 0) * lists.heads + (h if lists.heads > 1 else 0)) * lists.key_blocks
                for e in range(offsets[at + n], offsets[at + n + 1]):
                    m, full = divmod(entries[e], 2)
                    part = padded[b, h, m * tile.queries :, n * tile.keys :][: tile.queries, : tile.keys]
                    assert not part.any(), "a query block occurs twice"
                    assert (tiles[e] == -1) == (full == 1)
                    part[:] = True if full else bits_of(lists, tiles[e])
    assert not padded[:, :, seqlen_q:].any() and not padded[:, :, :, seqlen_k:].any()
    return padded[:, :, :seqlen_q, :seqlen_k]


def bits_of(lists: KeyBlockLists, index: int) -> Tensor:
    words = lists.bits[index].tolist()
    return torch.tensor([[(row[j // 32] >> (j % 32)) & 1 for j in range(lists.tile.keys)] for row in words]).bool()


@settings(max_examples=25)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 300), st.integers(1, 300)),
    block=st.sampled_from(
        [(64, 64), (128, 128), (64, 128), (192, 256), (16, 32), (20, 48), (96, 7), (1 << 30, 1 << 30)]
    ),
    shared=st.tuples(st.booleans(), st.booleans()),
    tile=st.sampled_from([Tile(), Tile(128, 128), Tile(64, 64)]),
    seed=st.integers(0, 2**31),
)
def test_the_lists_describe_the_dense_mask(
    sizes: Sizes, block: tuple[int, int], shared: tuple[bool, bool], tile: Tile, seed: int
) -> None:
    mask, expected = random_mask(sizes, block, shared, seed)
    lists = key_block_lists(mask, sizes, tile)
    assert torch.equal(dense(lists, sizes), expected)


def test_tiles_without_a_visible_pair_are_in_no_list_and_full_tiles_have_no_bits() -> None:
    sizes = (1, 1, 256, 256)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    lists = key_block_lists(mask, sizes)
    assert lists.offsets.tolist() == [0, 4, 6]
    assert [divmod(entry, 2) for entry in lists.entries.tolist()] == [(0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert lists.bit_tiles.tolist() == [0, 1, -1, -1, 2, 3]
    assert lists.bits.shape == (4, 64, 4) and lists.block_states is None


@pytest.mark.parametrize(
    ("mod", "batches", "heads"),
    [
        (lambda b, h, q, k: q >= k, 1, 1),
        (lambda b, h, q, k: q >= k + b, 3, 1),
        (lambda b, h, q, k: q >= k + h, 1, 4),
        (lambda b, h, q, k: q * b >= k + h, 3, 4),
    ],
    ids=["neither", "batch", "head", "both"],
)
def test_lists_are_shared_unless_the_mask_reads_the_batch_or_head(mod: Any, batches: int, heads: int) -> None:
    """The BlockMask itself has one batch and head, but PyTorch evaluates mask_mod with those of the call."""
    sizes = (3, 4, 100, 200)
    everything = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        everything, torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=256, mask_mod=mod, seq_lengths=sizes[2:]
    )
    lists = key_block_lists(mask, sizes)
    assert (lists.batches, lists.heads) == (batches, heads)
    index = [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes)]
    assert torch.equal(dense(lists, sizes), mod(*index).expand(sizes))


def test_a_mask_mod_is_not_evaluated_where_all_blocks_are_full() -> None:
    """It may read beyond a tensor there, also in a tile that reaches beyond the sequences."""
    none, one = torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
    table = torch.ones(3, dtype=torch.bool)
    mask = BlockMask.from_kv_blocks(
        none,
        none[..., None],
        one,
        none[..., None],
        BLOCK_SIZE=256,
        mask_mod=lambda b, h, q, k: table[q],
        seq_lengths=(100, 200),
    )
    assert bool(dense(key_block_lists(mask, (1, 1, 100, 200)), (1, 1, 100, 200)).all())


def test_lists_that_name_blocks_beyond_the_sequence_give_positions_in_range() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    for indices in (mask.q_indices, mask.full_q_indices):
        assert indices is not None
        indices[indices == 1] = 2**30
    lists = key_block_lists(mask, (1, 1, 256, 256))
    assert all(0 <= entry // 2 < 4 for entry in lists.entries.tolist())


def test_packing_is_reversible() -> None:
    visible = torch.rand(3, 64, 128) < 0.5
    bits = mask_bits.pack(visible)
    assert bits.dtype == torch.int32 and bits.shape == (3, 64, 4)
    assert torch.equal(mask_bits.unpack(bits), visible)


@pytest.mark.parametrize("section", [None, 1, 2])
def test_work_tiles_start_longest_first_within_a_section(section: int | None) -> None:
    sizes = (2, 4, 500, 700)
    mask, _ = random_mask(sizes, (64, 128), (False, False), 3)
    lists = key_block_lists(mask, sizes)
    order = longest_first(lists, 2, 4, 2, section).tolist()
    per_head = lists.lengths()
    lengths = [int(per_head[b, 2 * kv : 2 * kv + 2, n].sum()) for b in range(2) for kv in range(2) for n in range(6)]
    assert sorted(order) == list(range(24))
    size = 6 * (section or 4)
    for start in range(0, 24, size):
        part = order[start : start + size]
        assert sorted(part) == list(range(start, start + size))
        assert [lengths[i] for i in part] == sorted((lengths[i] for i in part), reverse=True)


@pytest.fixture
def not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_lists_are_computed_once_and_again_after_a_tensor_of_the_mask_changes(not_capturing: None) -> None:
    documents = torch.arange(300) // 100
    mask = create_block_mask(lambda b, h, q, k: documents[q] == documents[k], None, None, 300, 300, device="cpu")
    sizes = (1, 1, 300, 300)
    rows = torch.zeros(1, 1, 300, 64)
    call = DecodingCall(None, mask, 1.0, mask_captured=(documents,))
    first = kernel_lists_of(call, rows, rows, Tile())
    assert kernel_lists_of(call, rows, rows, Tile()) is first
    assert kernel_lists_of(call, rows, rows, Tile(128, 128)) is not first
    documents[50:] = 7
    again = kernel_lists_of(call, rows, rows, Tile())
    assert again is not first and not torch.equal(again.bits, first.bits)
    second = key_block_lists(mask, sizes)
    index = torch.arange(300)
    seen = documents[index[:, None]] == documents[index]
    listed = torch.zeros(300, 300, dtype=torch.bool)
    for m, n in (
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ):  # blocks that the unchanged lists of the BlockMask contain
        listed[128 * m : 128 * m + 128, 128 * n : 128 * n + 128] = True
    assert torch.equal(dense(second, sizes)[0, 0], seen & listed)


def test_the_lists_of_a_mask_are_freed_with_it(not_capturing: None) -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    rows = torch.zeros(1, 1, 300, 64)
    entries = weakref.ref(kernel_lists_of(DecodingCall(None, mask, 1.0), rows, rows, Tile()).entries)
    del mask
    gc.collect()
    assert entries() is None
