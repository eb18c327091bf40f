"""What is computed once per BlockMask: kept as long as the BlockMask lives and its tensors do not change."""

from __future__ import annotations

import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flashbwd.flex import diagonal
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError, kernel_lists
from flashbwd.flex.listed_rows import listed_rows
from flashbwd.flex.lists import key_block_lists
from flashbwd.flex.tile import Tile
from flashbwd.reference.decoding import DecodingCall

__all__ = ["address_of", "keep_for_graph", "kept", "kernel_lists_maker", "kernel_lists_of", "version_of"]

_Value = TypeVar("_Value")
_State = tuple["weakref.ref[Tensor]", int, int, torch.Size]  # a tensor, its version, its address and its shape

_known: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[list[_State], Any, Any]]] = weakref.WeakKeyDictionary()
# A replayed graph reads its lists by address, and nothing says when a graph is destroyed: they are never freed.
_of_graphs: dict[int, KernelLists] = {}


def kept(
    block_mask: Any, key: Hashable, tensors: Iterable[Tensor], make: Callable[[], _Value], others: Any = None
) -> _Value:
    """Return the value of ``make()`` for this BlockMask and key.

    It is made again if a tensor was written to, or if ``others`` differs: what it also depends on, if only the last
    value is worth keeping. Writes by a replayed CUDA graph are not seen, nor are writes to inference tensors, which do
    not count them.
    """
    read = list(tensors)
    entries = _known.setdefault(block_mask, {})
    found = entries.get(key)
    if found is not None and found[1] == others and _is_state_of(found[0], read):
        return cast(_Value, found[2])
    # Not id(tensor): another tensor may get the id of one that was freed.
    state = [(weakref.ref(tensor), version_of(tensor), address_of(tensor), tensor.shape) for tensor in read]
    value = make()
    entries[key] = (state, others, value)
    return value


def version_of(tensor: Tensor) -> int:
    """Return a number that every write to the tensor increases, except in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _is_state_of(state: list[_State], tensors: list[Tensor]) -> bool:
    if len(state) != len(tensors):
        return False
    for (known, version, address, shape), tensor in zip(state, tensors, strict=True):
        if known() is not tensor or version != version_of(tensor) or shape != tensor.shape:
            return False
        if address != address_of(tensor):
            return False
    return True


def address_of(tensor: Tensor) -> int:
    """Return where the elements of a tensor are, which an assignment to ``tensor.data`` changes without a write."""
    if type(tensor) not in (Tensor, Parameter):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper of torch.func
        return 0


_lists_of_mask = operator.attrgetter(
    *(f"{prefix}_{kind}" for prefix in ("kv", "full_kv", "q", "full_q") for kind in ("num_blocks", "indices"))
)


def tensors_of(block_mask: BlockMask) -> list[Tensor]:
    """Return the list tensors of a BlockMask."""
    found = [tensor for tensor in _lists_of_mask(block_mask) if tensor is not None]
    for tensor in found:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"flashbwd: block_mask has lists of type {type(tensor).__name__}, expected tensors")
    return found


@functools.lru_cache(maxsize=32)
def visible_everywhere(seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockMask:
    """Return a block mask that hides nothing: one full block."""
    none, one = (torch.full((1, 1, 1), count, dtype=torch.int32, device=device) for count in (0, 1))
    index = none.unsqueeze(-1)
    size = (-(-seqlen_q // 128) * 128, -(-seqlen_k // 128) * 128)
    return BlockMask.from_kv_blocks(
        none, index, one, index, BLOCK_SIZE=size, mask_mod=noop_mask, seq_lengths=(seqlen_q, seqlen_k)
    )


def kernel_lists_of(call: DecodingCall, query: Tensor, key: Tensor, tile: Tile) -> KernelLists:
    """As :func:`~flashbwd.flex.kernel_lists.kernel_lists`, but computed once per BlockMask.

    Raises UnsupportedError during a graph capture, which cannot compute them. Without a BlockMask, every pair is
    visible. Lists are computed again if ``mask_mod`` reads something else.
    """
    block_mask = call.block_mask
    if block_mask is None:
        block_mask = visible_everywhere(query.shape[2], key.shape[2], query.device)
    key_of_call, make = kernel_lists_maker(block_mask, query, key, tile)
    mask_key = block_mask.mask_mod if call.mask_key is None else call.mask_key
    tensors = [*tensors_of(block_mask), *call.mask_captured]
    return keep_for_graph(kept(block_mask, ("kernel lists", *key_of_call), tensors, make, mask_key))


def kernel_lists_maker(
    block_mask: Any, query: Tensor, key: Tensor, tile: Tile
) -> tuple[tuple[Hashable, ...], Callable[[], KernelLists]]:
    """Return what the lists depend on besides the block mask, and the function that computes them."""
    batch, heads, seqlen_q, _ = query.shape
    sizes, heads_kv = (batch, heads, seqlen_q, key.shape[2]), key.shape[1]

    def make() -> KernelLists:
        if torch.cuda.is_current_stream_capturing():
            reason = "a graph is being captured, and block_mask was in no call before"
            warnings.warn(f"flashbwd: the graph gets the slow reference backward: {reason}", stacklevel=2)
            raise UnsupportedError(reason)
        lists = key_block_lists(block_mask, sizes, tile)
        hides_above = diagonal.hides_above(lists, key.shape[2] - seqlen_q)
        of_kernel = kernel_lists(lists, heads, heads_kv)
        listed = listed_rows(block_mask, (seqlen_q, key.shape[2]), heads_kv, tile)
        return of_kernel._replace(hides_above_diagonal=hides_above, listed=listed)

    return (sizes, heads_kv, tile), make


def keep_for_graph(lists: KernelLists) -> KernelLists:
    """Return the lists. If a CUDA graph is being captured, they are never freed."""
    if torch.cuda.is_current_stream_capturing():
        _of_graphs[id(lists)] = lists
    return lists
