"""PyTorch's forward kernel gets block lists in the one layout that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd
from flashbwd.flex.uniform_lists import with_uniform_lists
from flashbwd.reference.decoding import block_states

SHAPE = Shape(batch=2, heads=2, heads_kv=2, seqlen_q=512, seqlen_k=512, head_dim=64)


def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A causal mask, and a document of the first 400 tokens: more full blocks than partial ones in a row."""
    return (q >= k) | ((q < 400) & (k < 400) & (b >= 0) & (h >= 0))


def changed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], device: str, sides: str = "kv q") -> BlockMask:
    """A BlockMask with changed counts and indices."""
    mask = kit.block_mask(mask_mod, SHAPE, block=128, device=device)
    for side in sides.split():
        for kind in ("", "full_"):
            names = [f"{kind}{side}_{part}" for part in ("num_blocks", "indices")]
            for name, tensor in zip(names, change(*(getattr(mask, name) for name in names)), strict=True):
                setattr(mask, name, tensor)
    return mask


def compact(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return counts, indices[..., : int(counts.max())].contiguous()


def narrow_views(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return counts, indices[..., : int(counts.max())]


def of_one_batch(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return counts[:1].expand(2, -1, -1), indices[:1].expand(2, -1, -1, -1)


def transposed_in_memory(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return counts.mT.contiguous().mT, indices.mT.contiguous().mT


CHANGES = {f.__name__: f for f in (compact, narrow_views, of_one_batch, transposed_in_memory)}


@pytest.mark.parametrize("name", CHANGES)
def test_lists_of_other_shapes_and_strides_become_uniform(name: str) -> None:
    mask = changed(CHANGES[name], "cpu")
    uniform = with_uniform_lists(mask)
    assert uniform.full_kv_num_blocks is not None and uniform.full_kv_indices is not None
    assert uniform.kv_num_blocks.shape == uniform.full_kv_num_blocks.shape
    assert uniform.kv_indices.shape == uniform.full_kv_indices.shape
    for tensor in (uniform.kv_num_blocks, uniform.kv_indices, uniform.full_kv_num_blocks, uniform.full_kv_indices):
        assert tensor.is_contiguous()
    expected = kit.block_mask(mask_mod, SHAPE, block=128, device="cpu")
    assert torch.equal(block_states(uniform, 512), block_states(expected, 512))


def test_full_blocks_of_fewer_heads_become_uniform() -> None:
    mask = kit.block_mask(mask_mod, SHAPE, block=128, device="cpu")
    states = block_states(mask, 512)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    mask.full_kv_num_blocks, mask.full_kv_indices = mask.full_kv_num_blocks[:, :1], mask.full_kv_indices[:, :1]
    uniform = with_uniform_lists(mask)
    assert uniform.full_kv_num_blocks is not None
    assert uniform.full_kv_num_blocks.shape == uniform.kv_num_blocks.shape
    assert torch.equal(block_states(uniform, 512), states)


def test_uniform_lists_are_not_copied() -> None:
    mask = kit.block_mask(mask_mod, SHAPE, block=128, device="cpu")
    assert with_uniform_lists(mask) is mask
    mask.full_kv_num_blocks = mask.full_kv_indices = None
    assert with_uniform_lists(mask) is mask


def test_a_copy_is_made_once_until_a_list_is_written() -> None:
    mask = changed(compact, "cpu")
    uniform = with_uniform_lists(mask)
    assert with_uniform_lists(mask) is uniform
    mask.kv_num_blocks[..., 0] = 0
    assert int(with_uniform_lists(mask).kv_num_blocks[0, 0, 0]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHANGES)
def test_the_forward_on_a_gpu_reads_lists_of_other_shapes_and_strides(name: str) -> None:
    q, k, v = SHAPE.tensors(torch.bfloat16, device="cuda")
    attend: Any = flashbwd.flex_attention
    got, lse = attend(q, k, v, block_mask=changed(CHANGES[name], "cuda"), return_lse=True)
    uniform = kit.block_mask(mask_mod, SHAPE, block=128, device="cuda")
    want, expected = attend(q, k, v, block_mask=uniform, return_lse=True)
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(got, want)
