"""What a Python function reads besides its arguments, so that a later call can be compared with an earlier one."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flashbwd._eager import untraced
from flashbwd.mods.captures import Captures
from flashbwd.reference.modes import GatherByIndex
from flashbwd.reference.modifications import Mod, accumulator, result_of, run_mod, scalars, without_hooks

__all__ = ["Operations", "Reading", "reading_of"]


@dataclass(frozen=True, eq=False)
class Reading:
    """What a function reads. If it reads the same twice, both calls compute the same from equal arguments.

    Attributes
    ----------
    key : object
        The key of its :class:`~flashbwd.mods.captures.Captures`. A function without a key has its operations on
        scalars: any object that it reads shows in them.
    tensors : list of Tensor
        That it reads, in a fixed order.
    """

    key: Any
    tensors: list[Tensor]

    def is_same_as(self, other: Reading) -> bool:
        if self.key != other.key or len(self.tensors) != len(other.tensors):
            return False
        return all(map(_is_same, self.tensors, other.tensors))


_form_of = operator.attrgetter("dtype", "shape", "device", "requires_grad")


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same, or equal views of the same memory."""
    if one is other:
        return True
    if _form_of(one) != _form_of(other):
        return False
    try:
        return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    except RuntimeError:  # a tensor without memory
        return False


class Operations(GatherByIndex):
    """Records the operators that a function calls, with their arguments, and the tensors that it captures.

    It captures what it reads, except its arguments and the results of its operators.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.captured: dict[int, Tensor] = {}
        self._made = {id(tensor): tensor for tensor in arguments}  # keeps results alive, so that ids stay unique
        self._numbers = {id(tensor): number for number, tensor in enumerate(arguments)}
        self._record: list[Hashable] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._made:
                self.captured[id(leaf)] = leaf
        result = super().__torch_function__(func, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.captured:
                self._made[id(leaf)] = leaf
        self._record.append(func)
        self._record += map(self._described, tree_leaves((args, kwargs, result)))
        return result

    def _described(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):  # all of them are kept, so an id stays unique
            return Tensor, self._numbers.setdefault(id(value), len(self._numbers))
        if isinstance(value, slice):
            return slice, *map(self._described, (value.start, value.stop, value.step))
        if hasattr(value, "tobytes"):  # an array
            return type(value), str(getattr(value, "dtype", "")), getattr(value, "shape", None), value.tobytes()
        # The text of a number tells -0.0 from 0.0, and NaN equals itself. Other objects may be new in each call.
        return type(value), repr(value) if isinstance(value, _PLAIN) or hasattr(value, "__float__") else None

    def reading(self) -> Reading:
        return Reading((torch.get_default_dtype(), *self._record), list(self.captured.values()))


_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@untraced
def reading_of(name: str, mod: Mod, query: Tensor) -> Reading:
    """Return what a ``score_mod`` or a ``mask_mod`` reads now.

    A function without a key is called on scalars, and so is one that has a list or a dict: these may grow, and the key
    holds all that they contain.

    Parameters
    ----------
    name : str
        "score_mod" or "mask_mod".
    """
    captures = Captures(mod)
    if captures.key is not None and not any(kind in captures.key for kind in (list, dict)):
        return Reading(captures.key, captures.tensors)
    arguments = scalars(query.device, accumulator(query.dtype) if name == "score_mod" else None)
    with torch.enable_grad(), without_hooks(), Operations(arguments) as operations:
        run_mod(name, lambda *x: result_of(mod, *x), *arguments)
    return operations.reading()
