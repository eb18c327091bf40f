"""Launching the decoding kernel: whether it takes a call's tensors, and as what it takes the mask."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flashbwd.mods.kernels import Tile, kernel_for
from flashbwd.reference.decoding import DecodingCall, block_states

_CHUNK = 16  # keys that a warp takes at a time


@functools.cache
def _device_refusal(device: int) -> str:
    return torch.ops.flashbwd.decoding_refusal(device)


@functools.lru_cache(maxsize=256)
def _tile(head_dim: int, head_dim_v: int, rows: int) -> tuple[int, int]:
    return torch.ops.flashbwd.decoding_tile(head_dim, head_dim_v, rows)


def kernel_refusal(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why the kernel does not take these tensors; empty when it does."""
    if not query.is_cuda:
        return "query is not on a CUDA device"
    if type(query) not in (Tensor, nn.Parameter):
        return f"query is a {type(query).__name__}"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"query is {query.dtype}, not bfloat16 or float16"
    for name, size in (("head dimension of query", query.shape[3]), ("head dimension of value", value.shape[3])):
        if size % 8 != 0 or size > 256:
            return f"the {name} is {size}, which is no multiple of 8 up to 256"
    return _device_refusal(query.device.index)


def run_kernel(call: DecodingCall, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Fills ``out``; returns lse and largest score. Raises NoKernelError when the modifications have no kernel."""
    group = query.shape[1] // key.shape[1]
    mask = call.block_mask
    handle = 0
    captured: list[Tensor] = []
    if call.score_mod is not None or mask is not None:
        head_dim, rows = _tile(query.shape[3], value.shape[3], group * query.shape[2])
        tile = Tile(head_dim, rows, query.dtype == torch.bfloat16, query.device.index)
        handle, captured = kernel_for(call.score_mod, None if mask is None else mask.mask_mod, tile, query.device)
    lists: tuple[Tensor | None, ...] = (None, None, None, None)
    states, q_block, kv_block = None, 1, 1
    if mask is not None:
        q_block, kv_block = mask.BLOCK_SIZE
        if _rows_share_lists(mask, group, key.shape[2]):
            lists = (mask.kv_num_blocks, _rows_contiguous(mask.kv_indices))
            lists += (mask.full_kv_num_blocks, _rows_contiguous(mask.full_kv_indices))
        else:
            states = block_states(mask, key.shape[2]).contiguous()
    statistics = query.new_empty((2, *query.shape[:3]), dtype=torch.float32)
    lse, largest = statistics.unbind()
    torch.ops.flashbwd.decoding_forward(
        _aligned(query),
        _aligned(key),
        _aligned(value),
        out,
        lse,
        largest,
        *lists,
        states,
        captured,
        call.scale,
        call.splits or 0,
        q_block,
        kv_block,
        handle,
    )
    return lse, largest


def _rows_share_lists(mask: BlockMask, group: int, seqlen_k: int) -> bool:
    """Whether all rows of a key head have the same lists, in blocks that the kernel's chunks divide."""
    counts: Tensor = mask.kv_num_blocks
    full: Tensor | None = mask.full_kv_num_blocks
    kv_block: int = mask.BLOCK_SIZE[1]
    if any(t is not None and t.dtype != torch.int32 for t in (counts, full)):
        return False
    heads = max(t.shape[1] for t in (counts, full) if t is not None)
    return (heads == 1 or group == 1) and counts.shape[2] == 1 and (kv_block % _CHUNK == 0 or kv_block >= seqlen_k)


def _rows_contiguous(indices: Tensor | None) -> Tensor | None:
    if indices is None or indices.shape[-1] <= 1 or indices.stride(-1) == 1:
        return indices
    return indices.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy whose rows begin at multiples of 16 bytes."""
    strides = tensor.stride()
    if strides[3] == 1 and not any(s % 8 for s in strides[:3]) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
