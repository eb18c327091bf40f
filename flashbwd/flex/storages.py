"""Remembers what was computed from tensors of a compiled graph, by their storages.

A graph passes the tensors of a BlockMask through autograd, which may hand on another Python object for the same memory.
So neither the BlockMask nor its tensors identify a mask there, but storages and versions do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flashbwd.flex.cache import version_of

__all__ = ["ByStorage"]

_Value = TypeVar("_Value")


class ByStorage(Generic[_Value]):
    """An LRU cache of values, each computed from the current contents of some tensors.

    An entry does not keep its tensors alive. It is dropped, at the latest when the next one is made, after one of them
    was freed. A write to a tensor makes a new entry. Writes by a replayed CUDA graph are not seen.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[Hashable, tuple[list[Any], _Value]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], _Value]) -> _Value:
        """Return ``make()``, or its earlier result for this key and the same contents of the same tensors."""
        # A weak reference keeps the address of a freed storage from being used again.
        full_key = (key, tuple(map(_key_of, tensors)))
        with self._lock:
            found = self._entries.get(full_key)
            if found is not None:
                self._entries.move_to_end(full_key)
                return found[1]
            self._drop_freed()
            value = make()
            self._entries[full_key] = ([StorageWeakRef(tensor.untyped_storage()) for tensor in tensors], value)
            while len(self._entries) > self.most:
                self._entries.popitem(last=False)
            return value

    def _drop_freed(self) -> None:
        freed = [key for key, (storages, _) in self._entries.items() if any(s.expired() for s in storages)]
        for key in freed:
            del self._entries[key]


def _key_of(tensor: Tensor) -> Hashable:
    shape, strides = tuple(tensor.shape), tensor.stride()
    return tensor.untyped_storage()._cdata, version_of(tensor), tensor.storage_offset(), shape, strides, tensor.dtype
