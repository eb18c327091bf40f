"""What a Python function is made of: a key of its code and constants, and the tensors that it captures.

Every call of flex_decoding asks this, so that a function that is made anew each step, or one whose closure has changed,
is known for what it is. It is written to take about a microsecond for an ordinary pair of functions.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_CONSTANTS = frozenset({type(None), bool, int, str, bytes, torch.dtype, torch.device})
_FLOATS = frozenset({float, complex})
_FIXED = ("torch", "math", "builtins", "operator", "functools")  # packages whose contents stay as they are


MAX_CAPTURED = 16
MAX_DIMS = 5


class CannotEmitError(Exception):
    """There is no CUDA for this modification; the message names what is in the way."""


class UnknownCaptureError(Exception):
    """The function captures something whose state cannot be compared."""


@dataclass(frozen=True, eq=False, slots=True)
class _Code:
    """A code object (kept alive, so that its id names it) with the global variables and the other names it looks up,
    and the attributes that it reads of each variable of its surroundings of which it does nothing else."""

    code: types.CodeType
    global_names: tuple[str, ...]
    names: tuple[str, ...]
    attributes: dict[str, tuple[str, ...]]


class Captures:
    """Key and tensors of one or several functions.

    Two functions with equal keys do the same with their tensors, taken in order. Of a tensor the key has dtype, number
    of dimensions, and which earlier one it is the same object as.

    Attributes
    ----------
    key : tuple
    tensors : list of Tensor
    """

    __slots__ = ("key", "tensors")

    def __init__(self, *functions: Any) -> None:
        key: list[Any] = []
        self.tensors: list[Tensor] = []
        for function in functions:
            if function is None:
                key.append(None)
            elif type(function) is types.FunctionType:  # as _walk() would find, sooner
                _function(function, key, self.tensors, ())
            else:
                _walk(function, key, self.tensors, ())
        self.key = tuple(key)

    def position(self, tensor: Tensor) -> int | None:
        return _position(tensor, self.tensors)


class Slots:
    """Captured tensors of a kernel, in the order in which it is given them.

    Attributes
    ----------
    sources : list
        Of each: its position in ``captures.tensors``, or the tensor itself where the functions do not hold it in a
        place that ``captures`` reads.
    """

    def __init__(self, captures: Captures, device: str = "cuda") -> None:
        self.captures = captures
        self.device = device
        self.sources: list[int | Tensor] = []

    def of(self, tensor: Tensor, owner: str) -> int:
        """The slot of ``tensor``, a new one when it has none. ``owner`` is the function, for errors.

        Raises
        ------
        CannotEmitError
            For what kernels cannot be given.
        """
        if tensor.device.type != self.device:
            raise CannotEmitError(f"{owner} captures a tensor on {tensor.device}")
        if tensor.dim() > MAX_DIMS:
            raise CannotEmitError(f"{owner} captures a tensor of {tensor.dim()} dimensions, more than {MAX_DIMS}")
        position = self.captures.position(tensor)
        source = tensor if position is None else position
        for slot, known in enumerate(self.sources):
            if known is source or (type(known) is int and known == source):
                return slot
        if len(self.sources) == MAX_CAPTURED:
            raise CannotEmitError(f"{owner} captures more than {MAX_CAPTURED} tensors")
        self.sources.append(source)
        return len(self.sources) - 1

    @property
    def in_order(self) -> bool:
        """Whether the tensors are those of ``captures``, in their order."""
        return [s for s in self.sources if isinstance(s, int)] == list(range(len(self.captures.tensors))) and all(
            isinstance(s, int) for s in self.sources
        )

    def tensors(self) -> list[Tensor]:
        return [self.captures.tensors[s] if isinstance(s, int) else s for s in self.sources]


def _position(tensor: Tensor, tensors: list[Tensor]) -> int | None:
    for i, known in enumerate(tensors):
        if known is tensor:
            return i
    return None


def _walk(value: Any, key: list[Any], tensors: list[Tensor], above: tuple[int, ...]) -> None:
    """Appends what ``value`` is to ``key``. ``above`` has the ids of the objects that are being walked."""
    kind = type(value)
    if kind is types.FunctionType:
        _function(value, key, tensors, above)
    elif kind in _CONSTANTS:
        key += (kind, value)
    elif kind is Tensor or isinstance(value, Tensor):
        _tensor(value, key, tensors)
    elif kind in _FLOATS:
        key += (kind, repr(value))  # tells -0.0 from 0.0, and finds NaN again
    elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
        key.append(value)  # not its id: the key keeps it alive
    else:
        _object(value, key, tensors, above)


def _tensor(value: Tensor, key: list[Any], tensors: list[Tensor]) -> None:
    position = _position(value, tensors) if tensors else None
    if position is None:
        tensors.append(value)
        key.append(value.dtype)
        key.append(value.ndim)
    else:
        key.append(position)


def _function(function: types.FunctionType, key: list[Any], tensors: list[Tensor], above: tuple[int, ...]) -> None:
    code = code_of(function)
    key.append(code)
    if above and id(function) in above:
        return
    above = (*above, id(function)) if above else (id(function),)
    if function.__defaults__ is not None:
        for value in function.__defaults__:
            _surrounding(value, code, key, tensors, above)
    if function.__kwdefaults__ is not None:
        for value in function.__kwdefaults__.values():
            _surrounding(value, code, key, tensors, above)
    if function.__closure__ is not None:
        for i, cell in enumerate(function.__closure__):
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                key.append(None)
                continue
            if type(value) is Tensor:  # as _surrounding() would find, sooner
                _tensor(value, key, tensors)
            else:
                _surrounding(value, code, key, tensors, above, code.code.co_freevars[i])
    if code.global_names:
        surroundings = function.__globals__
        for name in code.global_names:
            if name in surroundings:
                value = surroundings[name]
                if value is torch:  # both as _surrounding() would find, sooner
                    key.append(torch)
                elif type(value) is Tensor:
                    _tensor(value, key, tensors)
                else:
                    _surrounding(value, code, key, tensors, above, name)


def _surrounding(
    value: Any, code: _Code, key: list[Any], tensors: list[Tensor], above: tuple[int, ...], variable: str = ""
) -> None:
    """A value that a function reaches by name, and what it may read off it: settings of a module or class, say."""
    kind = type(value)
    if kind in _CONSTANTS:
        key += (kind, value)
    elif isinstance(value, (types.ModuleType, type)):
        key.append(value)
        if not _is_fixed(value) and id(value) not in above:
            attributes = vars(value)
            for name in code.names:
                if name in attributes:
                    _surrounding(attributes[name], code, key, tensors, (*above, id(value)))
    elif variable in code.attributes and (read := plain_attributes(value, code.attributes[variable])) is not None:
        key.append(kind)
        for attribute in read.values():
            _walk(attribute, key, tensors, above)
    else:
        _walk(value, key, tensors, above)


def _object(value: Any, key: list[Any], tensors: list[Tensor], above: tuple[int, ...]) -> None:
    if id(value) in above:
        return
    above = (*above, id(value))
    key.append(type(value))
    if isinstance(value, (tuple, list)):
        key.append(len(value))
        for item in value:
            _walk(item, key, tensors, above)
    elif isinstance(value, Mapping):
        key.append(len(value))
        for name, item in value.items():
            _walk(name, key, tensors, above)
            _walk(item, key, tensors, above)
    elif isinstance(value, functools.partial):
        for part in (value.func, value.args, value.keywords):
            _walk(part, key, tensors, above)
    elif isinstance(value, types.MethodType):
        _walk(value.__func__, key, tensors, above)
        _walk(value.__self__, key, tensors, above)
    elif type(value).__module__.startswith("torch.") and not isinstance(value, nn.Module):
        inner = getattr(value, "fn", None)  # PyTorch's wrapper of a mask_mod
        if inner is None:
            key.append(value)
        else:
            _walk(inner, key, tensors, above)
    elif hasattr(value, "__dict__"):
        _walk(type(value).__call__ if callable(value) else None, key, tensors, above)
        _walk(vars(value), key, tensors, above)
    else:
        raise UnknownCaptureError(f"a {type(value).__name__} is captured, whose state cannot be read")


# ---- code ----

_known_codes: dict[int, _Code] = {}


def code_of(function: types.FunctionType) -> _Code:
    return _known_codes.get(id(function.__code__)) or _read_code(function.__code__)


def plain_attributes(value: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Attributes of an object by name, all of which the object itself holds; None where its class has a say."""
    kind = type(value)
    if kind.__getattribute__ is not object.__getattribute__ or type(getattr(value, "__dict__", None)) is not dict:
        return None
    held = vars(value)
    if any(name not in held or hasattr(kind, name) for name in names):
        return None
    return {name: held[name] for name in names}


def _read_code(code: types.CodeType) -> _Code:
    globals_read: dict[str, None] = {}
    names: dict[str, None] = {}
    _collect(code, globals_read, names)
    return _known_codes.setdefault(id(code), _Code(code, tuple(globals_read), tuple(names), _attributes_alone(code)))


def _collect(code: types.CodeType, globals_read: dict[str, None], names: dict[str, None]) -> None:
    """Names that the code, or code inside it, looks up."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_read[instruction.argval] = None
    names.update(dict.fromkeys(code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _collect(constant, globals_read, names)


def _attributes_alone(code: types.CodeType) -> dict[str, tuple[str, ...]]:
    """For each variable of the surroundings that is named for an attribute of it and nothing else: the attributes."""
    found: dict[str, dict[str, None]] = {}
    for_more: set[str] = set()  # passed on whole, assigned, or met in code inside
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inside: dict[str, None] = {}
            _collect(constant, inside, {})
            for_more.update(constant.co_freevars, inside)
    loaded = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            continue
        if loaded is not None:
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found.setdefault(loaded, {})[instruction.argval] = None
            else:
                for_more.add(loaded)
        loaded = None
        if instruction.opname in ("LOAD_DEREF", "LOAD_GLOBAL"):
            loaded = instruction.argval
        elif isinstance(instruction.argval, str) and instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            for_more.add(instruction.argval)
    return {name: tuple(attributes) for name, attributes in found.items() if name not in for_more}


def is_constant(value: Any) -> bool:
    """Whether a value is never other than it is."""
    if type(value) in _CONSTANTS or type(value) in _FLOATS:
        return True
    if isinstance(value, (types.ModuleType, type)):
        return _is_fixed(value)
    return isinstance(value, types.BuiltinFunctionType)


@functools.cache
def _is_fixed(owner: Any) -> bool:
    module: str = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return module.partition(".")[0] in _FIXED
