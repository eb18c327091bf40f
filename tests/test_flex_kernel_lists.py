"""The block lists that the sm90 and sm80 kernels read describe the mask. These tests need no GPU."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from kit.host import device_info, load_host, on_gpu
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashbwd._ops import call
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError, _turns, kernel_lists
from flashbwd.flex.lists import KeyBlockLists, key_block_lists
from flashbwd.flex.tile import Tile


@cache
def bits_of_pairs(queries: int, keys: int) -> torch.Tensor:
    """The bit of each pair (queries, keys) in a tile of bits, by the layout of the accumulators of mma and wgmma."""
    bits = torch.full((queries, keys), -1)
    for lane in range(2 * keys):  # 32 for each 16 keys
        key = lane // 32 * 16 + lane % 32 // 4
        query = lane % 4 * 2
        for value in range(queries // 2):  # value i of a lane in the accumulator of 16 keys and all queries
            i = value % 4 // 2 * (queries // 4) + value // 4 * 2 + value % 2
            bits[value // 4 * 8 + query + value % 2, key + value % 4 // 2 * 8] = lane * (queries // 2) + i
    return bits


def mask_of_tile(row: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The mask (queries, keys) in the words of a tile."""
    bits = bits_of_pairs(tile.queries, tile.keys)
    return (row.long()[bits // 32] >> bits % 32 & 1).bool()


def mask_of(lists: KernelLists, sizes: tuple[int, int, int, int], heads_kv: int) -> torch.Tensor:
    batch, heads, seqlen_q, seqlen_k = sizes
    queries, keys = lists.tile.queries, lists.tile.keys
    group = heads // heads_kv
    mask = torch.zeros(batch, heads, -(-seqlen_q // queries) * queries, -(-seqlen_k // keys) * keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads_kv):
            plane = lists.lists[b % lists.lists.shape[0], h % lists.lists.shape[1]]
            for key_block, first, count, _ in plane.tolist():
                for m, member, tile, _ in lists.entries[first : first + count].tolist():
                    part = torch.ones(queries, keys) if tile < 0 else mask_of_tile(lists.bits[tile], lists.tile)
                    rows, columns = (
                        slice(m * queries, (m + 1) * queries),
                        slice(key_block * keys, (key_block + 1) * keys),
                    )
                    assert not mask[b, h * group + member, rows, columns].any(), "a tile occurs twice"
                    mask[b, h * group + member, rows, columns] = part.bool()
    return mask


MODS = {
    "causal": lambda b, h, i, j: i >= j,
    "by_head": lambda b, h, i, j: i >= j + 70 * h,
    "by_batch": lambda b, h, i, j: (i // 90 == j // 90) & (j >= 40 * b),
    "nothing": lambda b, h, i, j: i < 0,
    "skips_queries": lambda b, h, i, j: (i >= j) & (i >= 64),
}
CASES = [
    ("causal", (1, 1, 256, 256), 1, (64, 128)),
    ("causal", (2, 4, 300, 260), 2, (64, 128)),
    ("causal", (1, 2, 300, 520), 2, (128, 128)),
    ("by_head", (1, 4, 257, 385), 2, (64, 128)),
    ("by_batch", (2, 2, 400, 400), 1, (128, 128)),
    ("nothing", (1, 2, 130, 130), 2, (64, 128)),
    # tiles of sm80 alone
    ("causal", (1, 2, 131, 257), 1, (128, 64)),
    ("by_batch", (2, 2, 200, 200), 1, (64, 64)),
    ("by_head", (1, 4, 100, 131), 2, (32, 32)),
    ("causal", (1, 1, 97, 129), 1, (32, 64)),
]


def lists_of(name: str, sizes: tuple[int, int, int, int], heads_kv: int, tile: tuple[int, int]) -> KernelLists:
    batch, heads, seqlen_q, seqlen_k = sizes
    by_batch, by_head = name == "by_batch", name == "by_head"
    block_mask = create_block_mask(
        MODS[name], batch if by_batch else None, heads if by_head else None, seqlen_q, seqlen_k, device="cpu"
    )
    return kernel_lists(key_block_lists(block_mask, sizes, Tile(*tile)), heads, heads_kv)


@pytest.mark.parametrize(("name", "sizes", "heads_kv", "tile"), CASES)
def test_kernel_lists_describe_the_mask(
    name: str, sizes: tuple[int, int, int, int], heads_kv: int, tile: tuple[int, int]
) -> None:
    seqlen_q, seqlen_k = sizes[2:]
    b, h, i, j = (torch.arange(size).view([-1 if d == at else 1 for d in range(4)]) for at, size in enumerate(sizes))
    expected = MODS[name](b, h, i, j).expand(sizes)
    lists = lists_of(name, sizes, heads_kv, tile)
    found = mask_of(lists, sizes, heads_kv)
    blocks = found.unflatten(2, (-1, tile[0])).flatten(3).any(-1)
    assert lists.covers == bool(blocks.all())
    assert torch.equal(found[..., :seqlen_q, :seqlen_k], expected)
    assert not found[..., seqlen_q:, :].any()
    assert not found[..., seqlen_k:].any()


@pytest.mark.parametrize(("name", "sizes", "heads_kv", "tile"), CASES)
def test_the_turns_of_an_add_count_the_adds_of_earlier_and_of_later_work_tiles(
    name: str, sizes: tuple[int, int, int, int], heads_kv: int, tile: tuple[int, int]
) -> None:
    lists = lists_of(name, sizes, heads_kv, tile)
    for plane in lists.lists.flatten(0, 1).tolist():
        before: dict[tuple[int, int], int] = defaultdict(int)
        after: dict[tuple[int, int], list[int]] = defaultdict(list)
        lengths = [count for _, _, count, _ in plane]
        assert lengths == sorted(lengths, reverse=True)
        assert sorted(key_block for key_block, *_ in plane) == list(range(len(plane)))
        for _, first, count, _ in plane:
            for m, member, _, turns in lists.entries[first : first + count].tolist():
                assert turns % 2**16 == before[m, member]
                before[m, member] += 1
                after[m, member].append(turns % 2**32 // 2**16)
        assert all(numbers == list(range(before[tile]))[::-1] for tile, numbers in after.items())


def test_more_key_blocks_of_a_query_block_than_turns_can_count_are_refused() -> None:
    def turns_of(key_blocks: int) -> Tensor:
        place, zeros = torch.arange(key_blocks), torch.zeros(key_blocks, dtype=torch.int64)
        lists = cast(KeyBlockLists, SimpleNamespace(query_blocks=1, key_blocks=key_blocks))
        return _turns(zeros, zeros, zeros, place, lists, 1)[0]

    place = torch.arange(2**16)
    assert torch.equal(turns_of(2**16) % 2**32, place + ((2**16 - 1 - place) << 16))
    with pytest.raises(UnsupportedError, match="more than 65536 key blocks"):
        turns_of(2**16 + 1)


def test_a_call_without_heads_is_refused() -> None:
    numbers, lse = torch.empty(0, 4, dtype=torch.int32, device="meta"), torch.empty(1, 0, 64, device="meta")
    x = torch.empty(1, 64, 0, 64, dtype=torch.bfloat16, device="meta")
    lists, bits = torch.empty(1, 1, 1, 4, dtype=torch.int32, device="meta"), numbers.new_empty(0, 256)
    plan = torch.ops.flashbwd.plan_block_mask_attention_backward
    with pytest.raises(ValueError, match="no kernel takes this call"):
        call(plan, x, x, x, x, x, lse, lists, numbers, bits, True, [64, 128], softmax_scale=1.0, plan_device=-1)


@pytest.mark.parametrize(
    ("name", "batch", "seqlen", "heads_kv", "deterministic", "writes"),
    [
        ("causal", 17, 2048, 4, False, True),
        ("causal", 17, 2560, 4, False, False),
        ("causal", 1, 2048, 4, False, False),  # too few lists
        ("causal", 1, 4096, 4, True, True),
        ("causal", 1, 4608, 4, True, False),
        ("causal", 1, 2048, 1, True, True),
        ("causal", 1, 4096, 1, True, False),
        ("skips_queries", 1, 512, 4, True, False),  # no list has the first query blocks
    ],
)
def test_the_plan_of_a_call_knows_how_many_queries_a_key_block_sees(
    name: str, batch: int, seqlen: int, heads_kv: int, deterministic: bool, writes: bool
) -> None:
    lists = lists_of(name, (1, 4, seqlen, seqlen), heads_kv, (64, 128))
    assert ("the last add writes dq" in schedule_of(lists, batch, seqlen, heads_kv, deterministic)) is writes


@pytest.mark.parametrize("seqlen", [1000, 2048])  # with and without a last query block that is cut off
@pytest.mark.parametrize("more", [-9, -2, -1, 0, 1, 9])
def test_lists_of_grouped_heads_are_reversed_only_if_they_visit_one_head_after_another(more: int, seqlen: int) -> None:
    mask = torch.zeros(-(-seqlen // 64), -(-seqlen // 128), dtype=torch.bool)
    number = math.ceil(0.45 * mask.numel()) + more
    mask.view(-1)[torch.arange(number) * 7 % mask.numel()] = True
    assert mask.sum() == number and mask.any(0).all()
    block_mask = create_block_mask(lambda b, h, i, j: mask[i // 64, j // 128], None, None, seqlen, seqlen, device="cpu")
    lists = kernel_lists(key_block_lists(block_mask, (1, 4, seqlen, seqlen), Tile(64, 128)), 4, 2)
    first, count = lists.lists[0, 0, 0, 1:3].tolist()
    members = lists.entries[first : first + count, 1]
    one_after_another = bool((members.diff() != 0).sum() == 1)
    schedule = schedule_of(lists, 1, seqlen, 2, deterministic=True)
    assert ("the shortest lists first" in schedule) is one_after_another
    assert one_after_another is (more < 0)


def schedule_of(lists: KernelLists, batch: int, seqlen: int, heads_kv: int, deterministic: bool) -> str:
    """The schedule of a call with 4 heads, in words."""
    host = load_host()
    q = torch.empty(batch, seqlen, 4, 128, dtype=torch.bfloat16)
    k = torch.empty(batch, seqlen, heads_kv, 128, dtype=torch.bfloat16)
    tensors = {"dout": q, "q": q, "k": k, "v": k, "out": q, "softmax_lse": torch.empty(batch, 4, seqlen)}
    tensors |= {"block_lists": lists.lists, "block_entries": lists.entries, "block_bits": lists.bits}
    arguments = host.AttentionArguments()
    for argument, tensor in tensors.items():
        setattr(arguments, argument, on_gpu(host, tensor))
    arguments.block_mask_covers, arguments.deterministic = lists.covers, deterministic
    arguments.block_m, arguments.block_n = lists.tile.queries, lists.tile.keys
    gpu = {"usable": True, "cc_major": 9, "cc_minor": 0, "sm_count": 132, "smem_per_block": 227 * 1024}
    plan = json.loads(host.plan_of_arguments(arguments, device_info(host, **gpu, has_attention_sm90=True)))
    assert plan["backend"] == "sm90"
    return str(plan["schedule"])
