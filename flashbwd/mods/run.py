"""Launches the forward kernel of flex decoding, after compiling it if necessary."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flashbwd._autograd import hidden_from_modes
from flashbwd._ops import library
from flashbwd.mods.kernels import Tile, compiled_modification, known_modification
from flashbwd.reference.decoding import Blocks, DecodingCall, block_states
from flashbwd.reference.modifications import Mod

_KEYS_PER_ITERATION = 16  # of one warp; block sizes of a list must be a multiple of it
_decoding_forward = torch.ops.flashbwd.decoding_forward.default._op  # the C++ callable without a Python wrapper

# enable_gqa, splits (0: chosen by the plan), need_lse, need_max_scores, need_exact_out
Wanted = tuple[bool, int, bool, bool, bool]
_NO_MASK = (1, 1, 0, 0)


def run_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | Blocks | None,
    scale: float | None,
    wanted: Wanted,
) -> list[Tensor]:
    """Launch a call that needs no preparation, and return out and the requested statistics. Return [] otherwise.

    This is the fast path of a decoding loop. The operator returns [] unless all tensors are plain CUDA tensors that
    pass the checks and the kernel already exists. The slow path then raises the errors.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or not query.is_cuda:
        return []
    number = 0
    captured: list[Tensor] = []
    lists: list[Tensor] = []
    shape: tuple[int, ...] = _NO_MASK
    if score_mod is not None or block_mask is not None:
        if block_mask is None:
            known = known_modification(score_mod, None)
        elif type(block_mask) is BlockMask or type(block_mask) is Blocks:
            known = known_modification(score_mod, block_mask.mask_mod)
        else:
            return []
        if known is None:
            return []
        modification, captured = known  # keeps the C++ record alive until the operator returns
        number = modification.number
        if block_mask is not None:
            lists = _mask_lists(block_mask)
            shape = (*block_mask.BLOCK_SIZE, *block_mask.seq_lengths)
    if torch.is_grad_enabled():
        if query.requires_grad or key.requires_grad or value.requires_grad:
            return []
        if any(tensor.requires_grad for tensor in captured):
            return []
    results: list[Tensor] = _decoding_forward(query, key, value, lists, shape, captured, number, scale, *wanted)
    return results


def _mask_lists(mask: Any) -> list[Tensor]:
    """Return counts and indices of the partial blocks and, if the mask has them, of the full blocks."""
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        lists += [mask.full_kv_num_blocks, mask.full_kv_indices]
    return lists


# Under autocast the fast path returns [], because the arguments must be cast first. A dispatcher rule costs nothing in
# calls without autocast.
library.impl("decoding_forward", lambda *_: [], "AutocastCUDA")


@functools.cache
def _device_refusal(device: int) -> str:
    return torch.ops.flashbwd.decoding_refusal(device)


def kernel_refusal(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return the reason why no kernel supports these tensors; empty if a kernel does."""
    if not query.is_cuda:
        return "query is not on a CUDA device"
    if type(query) not in (Tensor, nn.Parameter):
        return f"query is a {type(query).__name__}"
    if query.dtype == torch.float64:
        return "query is float64"
    for name, size in (("head dimension of query", query.shape[3]), ("head dimension of value", value.shape[3])):
        if size > 256:
            return f"the {name} is {size}, more than 256"
    return _device_refusal(query.device.index)


def run_kernel(call: DecodingCall, query: Tensor, key: Tensor, value: Tensor, exact: bool) -> list[Tensor]:
    """Launch a call that has passed all checks and :func:`kernel_refusal`; compile its kernel first if necessary.

    Returns out, lse and max_scores. With ``exact`` it also returns out before rounding to 16 bits.

    Raises
    ------
    NoKernelError
        If no kernel can be made for the modifications.
    """
    block_mask = call.block_mask
    group = query.shape[1] // key.shape[1]
    query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
    number = 0
    captured: list[Tensor] = []
    mask: list[Tensor] = []
    shape: tuple[int, ...] = _NO_MASK
    if call.score_mod is not None or block_mask is not None:
        head_dim, rows, warps, aligned = torch.ops.flashbwd.decoding_tile(query, key, value)
        tile = Tile(head_dim, rows, warps, query.dtype, aligned, query.device.index)
        mask_mod = None if block_mask is None else block_mask.mask_mod
        with hidden_from_modes():
            modification, captured = compiled_modification(call.score_mod, mask_mod, tile)
        number = modification.number
    if block_mask is not None:
        mask = _lists(block_mask, group, key.shape[2]) or [block_states(block_mask, key.shape[2]).contiguous()]
        shape = (*block_mask.BLOCK_SIZE, query.shape[2], key.shape[2])
    wanted = (True, call.splits or 0, True, True, exact)
    results: list[Tensor] = _decoding_forward(query, key, value, mask, shape, captured, number, call.scale, *wanted)
    if not results:
        raise RuntimeError("flashbwd: the decoding kernel refused a call that was prepared for it")
    return results


def _lists(mask: BlockMask, group: int, seqlen_k: int) -> list[Tensor]:
    """Return the mask's block lists if the kernel can read them directly, else [].

    It can if all rows of a KV head share one list, and key blocks are a multiple of ``_KEYS_PER_ITERATION`` keys.
    """
    lists = _mask_lists(mask)
    shared = all((t.shape[1] == 1 or group == 1) and t.shape[2] == 1 and t.dtype == torch.int32 for t in lists)
    kv_block: int = mask.BLOCK_SIZE[1]
    if not shared or (kv_block % _KEYS_PER_ITERATION != 0 and kv_block < seqlen_k):
        return []
    return [t if t.dim() == 3 else _rows_contiguous(t) for t in lists]


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()
