"""Modes in which modifications are evaluated, on scalars or under torch.vmap."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["INDEX_OPERATORS", "AsInKernels", "GatherByIndex", "OnScalars", "evaluating_on", "index_dtype"]

INDEX_OPERATORS = (torch.ops.aten.index, torch.ops.aten.index.Tensor)


class GatherByIndex(TorchFunctionMode):
    """Turns ``tensor[i, j]`` with 0-d index tensors into a gather. PyTorch would read the indices to make a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            entries = index if isinstance(index, tuple) else (index,)
            if any(isinstance(entry, Tensor) for entry in entries) and all(map(_is_gather_index, entries)):
                return torch.ops.aten.index(tensor, [_as_index(entry, tensor) for entry in entries])
        return func(*args, **(kwargs or {}))


# Functions in which torch.vmap casts a scalar to the dtype of another one, as it would beside a tensor with dimensions.
_CUT_BY_VMAP = frozenset(
    """
    lt le gt ge eq ne less less_equal greater greater_equal not_equal isclose isin where clamp clip clamp_min clamp_max
    addcmul addcdiv logical_and logical_or logical_xor
    """.split()  # noqa: SIM905
)
_QUOTIENTS = frozenset({"truediv", "div", "divide", "true_divide"})


class OnScalars(GatherByIndex):
    """Makes a vectorised function compute what it computes on scalars.

    ``torch.vmap`` cuts an int64 number to int32 if an int32 index is compared with it, and a Python number if an
    integer is divided by it, or it by an integer. Here, scalars of one category are cast to their common dtype first.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(getattr(func, "__name__", "")).split(".")[0]
        name = name if name.endswith("_") and not name.endswith("__") else name.strip("_")  # not what works in place
        if name in _CUT_BY_VMAP:
            args, kwargs = _promoted((args, kwargs or {}))
        elif name in _QUOTIENTS and not kwargs and any(isinstance(value, (int, float)) for value in args):
            args = tuple(value.to(torch.get_default_dtype()) if _is_integer(value) else value for value in args)
        return super().__torch_function__(func, types, args, kwargs)


class AsInKernels(OnScalars):
    """Also makes an index in brackets that is beyond a tensor the last one, as this library's kernels do.

    A function is also called for hidden pairs, for which its tensors may have no element. On a GPU, PyTorch would end
    the process.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            args = (args[0], _bounded_entries(*args))
        elif func in INDEX_OPERATORS:
            args, kwargs = _bounded_operands(*args, **(kwargs or {})), None
        return super().__torch_function__(func, types, args, kwargs)


def _promoted(arguments: Any) -> Any:
    """Cast scalars of the same category (integers, or floating-point numbers) to their common dtype."""
    kinds: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for leaf in tree_leaves(arguments):
        if _is_scalar(leaf):
            kinds[leaf.is_floating_point()].add(leaf.dtype)
    if all(len(dtypes) < 2 for dtypes in kinds.values()):
        return arguments
    common = {kind: functools.reduce(torch.promote_types, dtypes) for kind, dtypes in kinds.items() if dtypes}
    return tree_map_only(Tensor, lambda x: x.to(common[x.is_floating_point()]) if _is_scalar(x) else x, arguments)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a 0-d tensor of a number."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype != torch.bool


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _bounded_entries(tensor: Tensor, index: Any) -> tuple[Any, ...]:
    """Return the entries of ``tensor[index]`` with index tensors in range."""
    entries = index if isinstance(index, tuple) else (index,)
    dims = [_dims_of(entry) for entry in entries]
    bounded, dim = [], 0
    for entry, count in zip(entries, dims, strict=True):
        bounded.append(_bounded(entry, tensor.shape[dim]) if _is_integer(entry) else entry)
        dim += tensor.dim() - sum(dims) if entry is Ellipsis else count
    return tuple(bounded)


def _dims_of(entry: Any) -> int:
    """Return how many dimensions an entry of an index selects from. 0 for an Ellipsis, which takes what is left."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def _bounded_operands(tensor: Tensor, indices: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tensor, [
        _bounded(index, size) if _is_integer(index) else index
        for index, size in zip(indices, tensor.shape, strict=False)
    ]


def _bounded(index: Any, size: int) -> Tensor:
    """As ``wrap`` in csrc/mods/functions.cuh."""
    index = index.long()
    index = torch.where(index < 0, index + size, index)
    return torch.where((index < 0) | (index >= size), size - 1, index)


def evaluating_on(device: torch.device) -> OnScalars:
    """Return the mode in which a vectorised function is evaluated: on a GPU as by this library's kernels."""
    return AsInKernels() if device.type == "cuda" else OnScalars()


def index_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of indices: int32 in PyTorch's CUDA kernels, int64 in its CPU kernels and its eager mode."""
    return torch.int32 if device.type == "cuda" else torch.int64


def _is_gather_index(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dtype != torch.bool
    return isinstance(entry, int) or entry == slice(None)


def _as_index(entry: Any, like: Tensor) -> Tensor | None:
    if isinstance(entry, int):
        return torch.full((), entry, dtype=torch.int64, device=like.device)
    return entry if isinstance(entry, Tensor) else None
