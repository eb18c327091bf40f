"""Block lists on the GPU may contain numbers that are no block, or larger counts than columns. Decoding must then read
nothing outside its tensors, and treat such a number as a block without keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd

pytestmark = pytest.mark.gpu

BLOCK, KEYS, DIM = 128, 1000, 64  # 8 blocks, the last one of 104 keys


def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0


def decode(q: Tensor, k: Tensor, v: Tensor, counts: int, indices: list[int]) -> Tensor:
    lists = torch.arange(len(indices), dtype=torch.int32, device=q.device).view(1, 1, 1, -1)
    count = torch.full((1, 1, 1), len(indices), dtype=torch.int32, device=q.device)
    mask = BlockMask.from_kv_blocks(count, lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=everything, seq_lengths=(1, KEYS))
    # The lists are replaced after PyTorch created the mask, because PyTorch asserts on the device that they are valid.
    mask.kv_num_blocks = torch.full_like(count, counts)
    mask.kv_indices = torch.tensor(indices, dtype=torch.int32, device=q.device).view_as(lists)
    return flashbwd.flex_decoding(q, k, v, block_mask=mask)


def expected(q: Tensor, k: Tensor, v: Tensor, blocks: list[int]) -> Tensor:
    keys = [key for block in blocks for key in range(block * BLOCK, min(block * BLOCK + BLOCK, KEYS))]
    scores = q.double() @ k[:, :, keys].double().mT / math.sqrt(DIM)
    return torch.softmax(scores, -1) @ v[:, :, keys].double()


@pytest.mark.parametrize(
    ("counts", "indices", "blocks"),
    [
        (4, [0, 2, 5, 7], [0, 2, 5, 7]),
        (4, [0, 8, 5, 7], [0, 5, 7]),
        (4, [-1, 2, 2**31 - 1, -(2**31)], [2]),
        (10**6, [0, 2, 5, 7], [0, 2, 5, 7]),
        (2**31 - 1, [3, 10**8], [3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_no_block_count_as_blocks_without_keys(
    dtype: torch.dtype, counts: int, indices: list[int], blocks: list[int]
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, rows, DIM, device="cuda", dtype=dtype) for rows in (1, KEYS, KEYS))
    got = decode(q, k, v, counts, indices)
    torch.testing.assert_close(got.double(), expected(q, k, v, blocks), rtol=2e-2, atol=2e-2)
