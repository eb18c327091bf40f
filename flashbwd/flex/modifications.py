"""Checks of score_mod and mask_mod, and the tensors that they capture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashbwd import _arguments
from flashbwd._eager import untraced
from flashbwd.mods.captures import Captures, Recent
from flashbwd.mods.reading import Operations, Reading
from flashbwd.mods.trace import READS
from flashbwd.reference.modes import index_dtype
from flashbwd.reference.modifications import Mod, result_of, without_hooks

__all__ = ["captured_of", "name_of"]


_INDICES = ("b", "h", "q_idx", "kv_idx")

# For functions that have been checked: the positions of the tensors that they read among those of ``Captures``.
_known: Recent[list[int]] = Recent(1024)


class _Watch(TorchDispatchMode):
    """Raises before an operator writes to an argument, a captured tensor or a view of one.

    Notes whether the host reads a value.
    """

    def __init__(self, name: str, arguments: Mapping[str, Tensor], found: Operations) -> None:
        super().__init__()
        self.name = name
        self.arguments = arguments
        self.found = found
        self.reads_values = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import PyTorch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reads_values |= func.overloadpacket in READS
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.is_write:
                    for leaf in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                        self._check_write(func, leaf)
        return func(*args, **kwargs)

    def _check_write(self, func: Any, written: Any) -> None:
        storage = _storage(written)
        named = [(name, [argument]) for name, argument in self.arguments.items()]
        for name, tensors in (*named, ("a captured tensor", list(self.found.captured.values()))):
            if storage is not None and storage in map(_storage, tensors):
                raise ValueError(f"flashbwd: {self.name} writes to {name} with {func}, expected only reads")


def _storage(value: Any) -> int | None:
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # a wrapper of torch.func
        return None


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset()) * tensor.element_size()
    elements = 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + elements * tensor.element_size()


@untraced
def captured_of(
    name: str,
    mod: Mod,
    device: torch.device,
    dtype: torch.dtype,
    operands: Mapping[str, Tensor] = MappingProxyType({}),
) -> Reading:
    """Check a modification, and return what it reads, with the tensors that it captures.

    It is called on scalars, unless a function with the same key has been checked before.

    Parameters
    ----------
    name : str
        "score_mod" or "mask_mod".
    device : torch.device
        Of the call.
    dtype : torch.dtype
        Of the score.
    operands : mapping of str to Tensor, optional
        Operands of the call that the function must not read, by name.

    Raises
    ------
    ValueError
        If the function returns another shape, dtype or device, writes to an argument or a captured tensor, or captures
        an operand or a tensor on another device.
    RuntimeError
        If the function raises.
    """
    captures = Captures(mod)
    key = None if captures.key is None else (captures.key, name, dtype, device)
    positions = None if key is None else _known.get(key)
    if positions is not None:
        reading = Reading(captures.key, [captures.tensors[position] for position in positions])
    else:
        reading, reads_values = _call_on_scalars(name, mod, device, dtype)
        if any(tensor.requires_grad for tensor in reading.tensors):
            # The first call may compute a table and keep it. The next ones, which count, then read the table.
            reading, reads_values = _call_on_scalars(name, mod, device, dtype)
        found = [captures.position(tensor) for tensor in reading.tensors]
        if key is not None and None not in found and not reads_values:  # a value may decide what is read
            _known.put(key, cast(list[int], found))
            reading = Reading(captures.key, reading.tensors)
    if reading.tensors:
        _check_operands(name, reading.tensors, operands)
    return reading


def _call_on_scalars(name: str, mod: Mod, device: torch.device, dtype: torch.dtype) -> tuple[Reading, bool]:
    """Return what a modification reads, and whether the host reads a value. Check the result."""
    arguments = {name: torch.zeros((), device=device, dtype=index_dtype(device)) for name in _INDICES}
    if name == "score_mod":
        arguments = {"score": torch.zeros((), device=device, dtype=dtype)} | arguments
    found = Operations(list(arguments.values()))
    watch = _Watch(name, arguments, found)
    try:
        with torch.enable_grad(), without_hooks(), found, watch:
            result = result_of(mod, *arguments.values())
    except ValueError as error:
        if str(error).startswith("flashbwd: "):
            raise
        raise RuntimeError(f"flashbwd: {name} failed: {error}") from error
    except Exception as error:
        raise RuntimeError(f"flashbwd: {name} failed: {error}") from error
    reading = found.reading()
    _check_devices(name, reading.tensors, device)
    _check_result(name, result, device)
    return reading, watch.reads_values


def _check_result(name: str, result: Any, device: torch.device) -> None:
    with_score = name == "score_mod"
    expected = "a floating-point score" if with_score else "a bool"
    if not isinstance(result, Tensor):
        raise ValueError(f"flashbwd: {name} returned {_arguments.came(result)}, expected {expected} of shape ()")
    if result.dim() != 0:
        raise ValueError(f"flashbwd: {name} returned shape {tuple(result.shape)} for scalars, expected shape ()")
    if not (result.is_floating_point() if with_score else result.dtype == torch.bool):
        dtype = str(result.dtype).removeprefix("torch.")
        raise ValueError(f"flashbwd: {name} returned {dtype}, expected {expected}")
    if result.device != device:
        raise ValueError(f"flashbwd: {name} returned a tensor on {result.device}, expected query's {device}")


def _check_devices(name: str, captured: list[Tensor], device: torch.device) -> None:
    for tensor in captured:
        if tensor.device != device:
            raise ValueError(f"flashbwd: {name} captures a tensor on {tensor.device}, expected query's {device}")


def _check_operands(name: str, captured: list[Tensor], operands: Mapping[str, Tensor]) -> None:
    by_storage = {operand: _storage(value) for operand, value in operands.items()}
    for tensor in captured:
        storage = _storage(tensor)
        for operand, value in operands.items():
            if tensor is value or (storage is not None and storage == by_storage[operand] and _overlap(tensor, value)):
                raise ValueError(
                    f"flashbwd: {name} reads {operand}, expected a function of the score, the indices and other tensors"
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same storage may share an element. Parts of the columns of a matrix do not."""
    if not a.numel() or not b.numel():
        return False
    (first_a, last_a), (first_b, last_b) = _byte_range(a), _byte_range(b)
    if last_a <= first_b or last_b <= first_a:
        return False
    rows = {
        stride * t.element_size() for t in (a, b) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1
    }
    return not any(row and _in_other_columns(a, b, row) for row in rows)


def _in_other_columns(a: Tensor, b: Tensor, row: int) -> bool:
    """Return whether both lie in columns of a matrix with rows of ``row`` bytes, and in none together."""
    columns = [_columns(tensor, row) for tensor in (a, b)]
    if columns[0] is None or columns[1] is None:
        return False
    (first_a, last_a), (first_b, last_b) = columns[0], columns[1]
    return last_a <= first_b or last_b <= first_a


def _columns(tensor: Tensor, row: int) -> tuple[int, int] | None:
    """Return the first and the last (exclusive) byte within a row, or None if the tensor does not lie in columns."""
    size = tensor.element_size()
    inner = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride * size % row]
    first = int(tensor.storage_offset()) * size % row
    last = first + sum((n - 1) * stride for n, stride in inner) + size
    return (first, last) if last <= row else None


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
