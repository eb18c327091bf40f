"""Checks the Python types of arguments, with messages that use the public argument names.

C++ code (``csrc``) checks shapes, dtypes, devices and ranges. Before that code runs, PyTorch compares the arguments
with the operator's schema, and its message is about the operator. After such a failure :func:`misfit` writes a message
about the argument. Python itself checks only the arguments that it reads, and arguments that PyTorch would convert
silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

# Operator arguments whose name differs in the public functions.
_PUBLIC = {
    "window_left": "window_size[0]",
    "window_right": "window_size[1]",
    "rng_seed": "rng_state.seed",
    "rng_offset": "rng_state.offset",
    "rng_layout": "rng_state.layout",
}
_MOST_FLOAT = 2**1023
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_MOST_DIMS = 8  # TensorDesc::kMaxDims in csrc/common/types.h
# Schema type -> accepted Python types, and their description in messages.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "float": (_NUMBERS, "a number in the range of float64"),
    "int": ((int, torch.SymInt), "a 64-bit integer"),
    "SymInt": ((int, torch.SymInt), "a 64-bit integer"),
    "bool": ((bool,), "a bool"),
    "str": ((str,), "a string"),
}


def came(value: Any) -> str:
    """Format a value for an error message: the value itself if it is short, else its type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a {value.bit_length()}-bit integer"
    if isinstance(value, (type(None), int, float, str)):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    prefix = "" if library in ("builtins", "torch", "flashbwd", "__main__") else f"{library}."
    return f"a {prefix}{kind.__name__}"


def tensor(name: str, value: Any) -> Tensor:
    """Return the argument, or raise if it is not a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"flashbwd: {name} is {came(value)}, expected a tensor")
    return value


def strided(name: str, value: Any) -> Tensor:
    """Return the argument, or raise if it is not a tensor with strides."""
    given = tensor(name, value)
    if wrong := _layout_fault(given):
        raise ValueError(f"flashbwd: {name} {wrong}")
    return given


def _layout_fault(value: Tensor) -> str:
    if value.layout is not torch.strided:
        return f"has layout {value.layout}, expected torch.strided"
    return "is a nested tensor, expected one with strides" if value.is_nested else ""


def number(name: str, value: Any) -> float:
    """Return the argument, or raise if it is not a number. PyTorch would also accept a tensor, and read it back."""
    if not isinstance(value, float) and not _is_number(value):
        raise ValueError(f"flashbwd: {name} is {came(value)}, expected {_TYPES['float'][1]}")
    number: float = value
    return number


def finite(name: str, value: Any) -> float:
    """Return the argument as a float (a symbol as it is), or raise if it is not a finite number."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return cast(float, value)
    scalar = float(value) if isinstance(value, Real) and not isinstance(value, int) else number(name, value)
    if not math.isfinite(scalar):
        raise ValueError(f"flashbwd: {name} is {came(scalar)}, expected a finite number")
    return float(scalar)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return False
    return not isinstance(value, int) or -_MOST_FLOAT < value < _MOST_FLOAT


def flag(name: str, value: Any) -> bool:
    """Return the argument, or raise if it is not a bool. PyTorch would also accept numbers and None."""
    if value is True or value is False:
        return value
    raise ValueError(f"flashbwd: {name} is {came(value)}, expected a bool")


def flags(name: str, value: Any, meaning: Sequence[str]) -> Sequence[bool]:
    """Return the argument, or raise if it is not a tuple with one bool for each entry of ``meaning``."""
    if isinstance(value, (tuple, list)) and len(value) == len(meaning):
        for i, item in enumerate(value):
            if item is not True and item is not False:
                flag(f"{name}[{i}]", item)
        return value
    found = f"has {len(value)} elements" if isinstance(value, (tuple, list)) else f"is {came(value)}"
    raise ValueError(f"flashbwd: {name} {found}, expected {len(meaning)} bools ({', '.join(meaning)})")


def rng_words(state: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the seed and the offset of an RngState as 64-bit tensors with one element, and its layout unchecked."""
    if not isinstance(state, (tuple, list)) or len(state) != 3:
        found = f"has {len(state)} elements" if isinstance(state, (tuple, list)) else f"is {came(state)}"
        raise ValueError(f"flashbwd: rng_state {found}, expected RngState(seed, offset, layout)")
    return _word("rng_state.seed", state[0]), _word("rng_state.offset", state[1]), state[2]


def _word(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"flashbwd: {name} has shape {tuple(value.shape)}, expected one element")
        if value.dtype not in (torch.int64, torch.uint64):
            dtype = str(value.dtype).removeprefix("torch.")
            raise ValueError(f"flashbwd: {name} is {dtype}, expected int64 or uint64")
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"flashbwd: {name} is {came(value)}, expected an integer or a tensor with one element")
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"flashbwd: {name} is {came(value)}, expected a 64-bit integer")
    return torch.tensor(value - 2**64 if value >= 2**63 else value, dtype=torch.int64)


# The first words of PyTorch's error for an argument that does not fit the schema, and of the C++ error for an undefined
# tensor or one with too many dimensions.
_ABOUT_TYPES = ("Expected a value of type", "flashbwd: a tensor ")


def is_about_types(error: Exception) -> bool:
    """Return whether a call failed because of argument types, before the operator checked the values."""
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _ABOUT_TYPES)


def by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments of an operator by name."""
    return dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)


def misfit(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return a message about the first argument that does not fit the operator's schema; None if all of them fit."""
    given = by_name(schema, args, kwargs)
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.name not in given:
            continue
        value, name = given[argument.name], _PUBLIC.get(argument.name, argument.name)
        if not _fits(kind, value):
            return f"flashbwd: {name} is {came(value)}, expected {_words(kind)}"
        if isinstance(value, Tensor) and (wrong := _layout_fault(value)):
            return f"flashbwd: {name} {wrong}"
        if isinstance(value, Tensor) and value.dim() > _MOST_DIMS:
            return f"flashbwd: {name} has {value.dim()} dimensions, expected at most {_MOST_DIMS}"
    return None


def check_devices(main: str, given: Mapping[str, Any]) -> None:
    """Raise if a tensor is not on the main tensor's device. The C++ checks do not run on fake tensors."""
    device = given[main].device
    for name, value in given.items():
        if isinstance(value, Tensor) and value.device != device and name not in ("rng_seed", "rng_offset"):
            raise ValueError(f"flashbwd: {_PUBLIC.get(name, name)} is on {value.device}, expected {main}'s {device}")


def _inner(kind: str) -> tuple[str, str]:
    """Split a schema type into "Optional" or "List" and its inner type. Return "" and the type for other types."""
    wrapped = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    return (wrapped[1], wrapped[2]) if wrapped else ("", kind)


def _fits(kind: str, value: Any) -> bool:
    wrapper, inner = _inner(kind)
    if wrapper == "Optional":
        return value is None or _fits(inner, value)
    if wrapper == "List":
        return isinstance(value, (list, tuple)) and all(_fits(inner, item) for item in value)
    if kind not in _TYPES:
        return True
    if kind != "bool" and isinstance(value, bool):
        return False
    if kind == "float":
        return _is_number(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return False
    return isinstance(value, _TYPES[kind][0])


def _words(kind: str) -> str:
    wrapper, inner = _inner(kind)
    if wrapper == "Optional":
        return f"{_words(inner)} or None"
    if wrapper == "List":
        return f"a list in which each item is {_words(inner)}"
    return _TYPES[kind][1]
