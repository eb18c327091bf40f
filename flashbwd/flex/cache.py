"""What is computed once per BlockMask: kept as long as the BlockMask lives and its tensors do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashbwd.flex.lists import DEFAULT_LIMIT, KeyBlockLists, Tile, key_block_lists
from flashbwd.reference.decoding import mask_captures

__all__ = ["kept", "lists_of"]

_Value = TypeVar("_Value")

_known: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Hashable, Any]]] = weakref.WeakKeyDictionary()


def kept(block_mask: Any, key: Hashable, tensors: Iterable[Tensor], make: Callable[[], _Value]) -> _Value:
    """Return the value of ``make()`` for this BlockMask and key. It is made again after a tensor was written to.

    Writes by a replayed CUDA graph are not seen, nor are writes to inference tensors, which do not count them.
    """
    state = tuple((id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
    entries = _known.setdefault(block_mask, {})
    found = entries.get(key)
    if found is not None and found[0] == state:
        return found[1]  # type: ignore[no-any-return]
    value = make()
    entries[key] = (state, value)
    return value


def tensors_of(block_mask: BlockMask) -> list[Tensor]:
    """Return the list tensors of a BlockMask."""
    names = [f"{prefix}_{kind}" for prefix in ("kv", "full_kv", "q", "full_q") for kind in ("num_blocks", "indices")]
    return [tensor for name in names if (tensor := getattr(block_mask, name)) is not None]


def lists_of(
    block_mask: BlockMask,
    sizes: tuple[int, int, int, int],
    tile: Tile | None = None,
    limit: int = DEFAULT_LIMIT,
) -> KeyBlockLists:
    """As :func:`~flashbwd.flex.lists.key_block_lists`, but computed once per BlockMask.

    Python objects that ``mask_mod`` reads are assumed to stay as they were when the BlockMask was made.
    """
    device = block_mask.kv_num_blocks.device
    read = [*tensors_of(block_mask), *mask_captures(block_mask.mask_mod, device)]
    key = ("lists", sizes, tile or Tile(), limit, block_mask.mask_mod)
    return kept(block_mask, key, read, lambda: key_block_lists(block_mask, sizes, tile, limit))
