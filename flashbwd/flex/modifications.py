"""Checks of score_mod and mask_mod, and the tensors that they capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashbwd import _arguments
from flashbwd.reference.modifications import CapturedTensors, Mod

__all__ = ["captured_of", "name_of"]


class _RefuseWrites(TorchDispatchMode):
    """Raises before an operator writes to a captured tensor or a view of one."""

    def __init__(self, name: str, found: CapturedTensors) -> None:
        super().__init__()
        self.name = name
        self.found = found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import PyTorch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            storages = {_storage(tensor) for tensor in self.found.captured.values()}
            for i, argument in enumerate(func._schema.arguments):
                written = args[i] if i < len(args) else kwargs.get(argument.name)
                if argument.is_write and any(_storage(leaf) in storages for leaf in tree_leaves(written)):
                    raise ValueError(
                        f"flashbwd: {self.name} writes to a captured tensor with {func}, expected only reads"
                    )
        return func(*args, **kwargs)


def _storage(value: Any) -> int | None:
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # a wrapper of torch.func
        return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the ranges of memory between the first and the last element of two tensors overlap."""
    storage = _storage(a)
    if storage is None or storage != _storage(b) or not a.numel() or not b.numel():
        return False
    (first_a, last_a), (first_b, last_b) = _byte_range(a), _byte_range(b)
    return first_a < last_b and first_b < last_a


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset()) * tensor.element_size()
    elements = 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + elements * tensor.element_size()


def captured_of(
    name: str, mod: Mod, with_score: bool, operands: Mapping[str, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Call a modification once on scalars, check what it does, and return the tensors that it captures.

    Parameters
    ----------
    name : str
        "score_mod" or "mask_mod", for error messages.
    operands : mapping of str to Tensor
        The operands of the call, by name.
    dtype : torch.dtype
        Of the score.

    Raises
    ------
    ValueError
        If the function returns another shape or dtype, writes to a captured tensor, or captures an operand or a tensor
        on another device.
    RuntimeError
        If the function raises.
    """
    device = operands["query"].device
    indices = torch.zeros(4, device=device, dtype=torch.int32).unbind()
    arguments = (torch.zeros((), device=device, dtype=dtype), *indices) if with_score else indices
    found = CapturedTensors(arguments)
    try:
        with torch.enable_grad(), found, _RefuseWrites(name, found):
            result = mod(*arguments)
    except ValueError as error:
        if str(error).startswith("flashbwd: "):
            raise
        raise RuntimeError(f"flashbwd: {name} failed: {error}") from error
    except Exception as error:
        raise RuntimeError(f"flashbwd: {name} failed: {error}") from error
    _check_result(name, result, with_score)
    captured = list(found.captured.values())
    for tensor in captured:
        _check_captured(name, tensor, operands, device)
    return captured


def _check_result(name: str, result: Any, with_score: bool) -> None:
    expected = "a floating-point score" if with_score else "a bool"
    if not isinstance(result, Tensor):
        raise ValueError(f"flashbwd: {name} returned {_arguments.came(result)}, expected {expected} of shape ()")
    if result.dim() != 0:
        raise ValueError(f"flashbwd: {name} returned shape {tuple(result.shape)} for scalars, expected shape ()")
    if not (result.is_floating_point() if with_score else result.dtype == torch.bool):
        dtype = str(result.dtype).removeprefix("torch.")
        raise ValueError(f"flashbwd: {name} returned {dtype}, expected {expected}")


def _check_captured(name: str, tensor: Tensor, operands: Mapping[str, Tensor], device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"flashbwd: {name} captures a tensor on {tensor.device}, expected query's {device}")
    for operand, value in operands.items():
        if tensor is value or _overlap(tensor, value):
            raise ValueError(
                f"flashbwd: {name} reads {operand}, expected a function of the score, the indices and other tensors"
            )


def name_of(mod: Mod | None, tensor: Tensor) -> str | None:
    """Return the name of the closure variable or global variable through which a function captures a tensor."""
    code, cells = getattr(mod, "__code__", None), getattr(mod, "__closure__", None) or ()
    if code is None:
        return None
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            if cell.cell_contents is tensor:
                return str(name)
        except ValueError:  # an empty cell
            continue
    surroundings = getattr(mod, "__globals__", {})
    return next((str(name) for name in code.co_names if surroundings.get(name) is tensor), None)
