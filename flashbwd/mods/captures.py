"""What a Python function is made of: a key of its code and constants, and the tensors that it captures."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_FIXED = ("torch", "math", "builtins", "operator", "functools")  # packages whose contents stay as they are
_OPAQUE = (types.ModuleType, types.BuiltinFunctionType, type)


class UnknownCaptureError(Exception):
    """The function captures something whose state cannot be compared."""


class Captures:
    """Key and tensors of one or several functions.

    Two functions with equal keys do the same with their tensors, taken in order. Of a tensor the key has dtype, number
    of dimensions, device, and which earlier one it is the same object as.

    Attributes
    ----------
    tensors : list of Tensor
    """

    def __init__(self, *functions: Any) -> None:
        self.tensors: list[Tensor] = []
        self._key: list[Any] = []
        self._places: dict[int, int] = {}  # of tensors, by identity
        self._open: set[int] = set()  # objects that are being walked
        for function in functions:
            self._walk(function)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self._key)

    def position(self, tensor: Tensor) -> int | None:
        return self._places.get(id(tensor))

    def _walk(self, value: Any) -> None:
        add = self._key.append
        if isinstance(value, Tensor):
            if id(value) in self._places:
                add(self._places[id(value)])
                return
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self._key += (value.dtype, value.dim(), value.device.type)
        elif isinstance(value, _CONSTANTS):
            self._key += (type(value), value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _OPAQUE):
            add(value)  # not its id: the key keeps it alive
        else:
            self._object(value)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._key.append(code)
        if id(function) in self._open:
            return
        self._open.add(id(function))
        names = _names(code)
        surroundings: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            try:
                surroundings.append(cell.cell_contents)
            except ValueError:  # an empty cell
                self._key.append(None)
        surroundings += [function.__globals__[name] for name in names if name in function.__globals__]
        for value in surroundings:
            self._walk(value)
            if isinstance(value, (types.ModuleType, type)):
                self._attributes(value, names)
        self._open.discard(id(function))

    def _attributes(self, owner: Any, names: tuple[str, ...]) -> None:
        """What a function may read off a module or class: settings, say. PyTorch's own do not change."""
        module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
        if module.partition(".")[0] in _FIXED:
            return
        for name in names:
            if name in vars(owner):
                self._walk(vars(owner)[name])

    def _object(self, value: Any) -> None:
        if id(value) in self._open:
            return
        self._open.add(id(value))
        self._key.append(type(value))
        if isinstance(value, (tuple, list)):
            self._key.append(len(value))
            for item in value:
                self._walk(item)
        elif isinstance(value, Mapping):
            self._key.append(len(value))
            for name, item in value.items():
                self._walk(name)
                self._walk(item)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(part)
        elif isinstance(value, types.MethodType):
            self._walk(value.__func__)
            self._walk(value.__self__)
        elif type(value).__module__.startswith("torch.") and not isinstance(value, torch.nn.Module):
            self._torch_object(value)
        elif hasattr(value, "__dict__"):
            self._walk(type(value).__call__ if callable(value) else None)
            self._walk(vars(value))
        else:
            raise UnknownCaptureError(f"a {type(value).__name__} is captured, whose state cannot be read")
        self._open.discard(id(value))

    def _torch_object(self, value: Any) -> None:
        inner = getattr(value, "fn", None)  # PyTorch's wrapper of a mask_mod
        if inner is None:
            self._key.append(value)
        else:
            self._walk(inner)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or code inside it, looks up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *(name for names in inner for name in names))
