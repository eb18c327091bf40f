"""Keys for Python functions. Two functions with equal keys compute the same from the tensors that they capture.

A function has a key only if it reads nothing but its code, immutable constants, tensors (the key holds their dtype,
shape, strides and device), plain functions that have a key, tuples of these, and attributes of objects that are such
values (``layer.config.window``). A function that can reach anything else (an object as a whole, a class, a method, a
property, a list, a module other than torch and math) has no key. It is traced at every call.
"""

from __future__ import annotations

import math
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from flashbwd.mods.attributes import HasCodeError, attribute
from flashbwd.mods.code import Code, Path, read_code

_CONSTANTS = frozenset({type(None), bool, int, str, bytes, torch.dtype, torch.device})
_MODULES = (torch, nn.functional, math)
_TENSORS = (Tensor, nn.Parameter)
# The types of values that _value describes. All others are objects, of which only attributes can be described.
_DESCRIBED = _CONSTANTS | {float, tuple, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, *_TENSORS}
_DEEPEST = 8  # nesting depth of functions and tuples

# Functions of these modules and attributes of tensors whose results depend only on the arguments.
_ATTRIBUTES = frozenset(
    """
    abs absolute acos acosh add arange asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip clone contiguous copysign
    cos cosh detach div divide eq erf erfc exp exp2 expand expm1 fill floor floor_divide fmax fmin fmod frac full
    full_like gather ge greater greater_equal gt heaviside hypot index_select le less less_equal log log10 log1p log2
    logaddexp logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mul multiply ne neg
    negative new_full new_ones new_tensor new_zeros not_equal ones ones_like pow reciprocal relu remainder reshape
    round rsqrt rsub select sgn sigmoid sign sin sinh sqrt square squeeze sub subtract tan tanh tensor true_divide
    trunc unsqueeze view where xlogy zeros zeros_like
    bool bfloat16 double dtype float float16 float32 float64 half int int16 int32 int64 int8 long short to type_as uint8
    device dim is_cuda is_floating_point ndim numel shape size stride
    e fabs inf isfinite isinf isnan nan pi tau
    elu functional gelu hardsigmoid hardswish hardtanh leaky_relu lerp mish nan_to_num nn positive relu6 selu silu
    softplus softsign tanhshrink threshold
    """.split()  # noqa: SIM905
)
_BUILTINS = frozenset({"abs", "bool", "divmod", "enumerate", "float", "int", "len", "max", "min", "pow", "range"})
_BUILTINS |= {"reversed", "round", "sum", "tuple", "zip", "True", "False", "None"}
_KNOWN_NAMES = _ATTRIBUTES | _BUILTINS

_MOST_ITEMS = 64  # of a list or a dict, which are described at every call
MAX_CAPTURED = 16
MAX_DIMS = 5

_Value = TypeVar("_Value")


class CannotEmitError(Exception):
    """This modification cannot be compiled to CUDA. The message names the operator or capture that prevents it."""


class _NotProvableError(Exception):
    """A function can read something whose change would not change the key."""


class Recent(Generic[_Value]):
    """A thread-safe LRU cache of at most ``most`` entries."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[Any, _Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any) -> _Value | None:
        try:
            self._entries.move_to_end(key)
            return self._entries[key]
        except KeyError:
            return None

    def put(self, key: Any, value: _Value) -> None:
        self._entries[key] = value
        while len(self._entries) > self.most:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()


class FixedMod:
    """A modification with explicit tensors. The caller guarantees that everything else that it reads stays the same.

    Attributes
    ----------
    identity : object
        Hashable. Two modifications with equal identities compute the same from their tensors.
    function : callable
        ``function(arguments, tensors)``. ``arguments`` is the tuple of the modification's arguments.
    tensors : sequence of Tensor
        Passed to ``function``.
    """

    __slots__ = ("function", "identity", "tensors")

    def __init__(self, identity: Any, function: Any, tensors: Sequence[Tensor]) -> None:
        self.identity = identity
        self.function = function
        self.tensors = tensors

    def __call__(self, *arguments: Tensor) -> Tensor:
        result: Tensor = self.function(arguments, self.tensors)
        return result


class Captures:
    """The key and the captured tensors of one or several functions.

    Functions with equal keys compute the same from the same list of tensors. For each tensor, the key holds its dtype,
    shape, strides and device, or the earlier position of the same tensor object. It never holds values.

    Attributes
    ----------
    key : tuple, optional
        None if the functions must be traced at each call.
    tensors : list of Tensor
        Empty if there is no key.
    """

    __slots__ = ("key", "tensors")

    def __init__(self, *functions: Any) -> None:
        # The default dtype is part of the key: it is the dtype of a Python float times an integer tensor.
        key: list[Any] = [torch.get_default_dtype()]
        self.tensors: list[Tensor] = []
        self.key: tuple[Any, ...] | None = None
        try:
            for function in functions:
                _value(function, key, self.tensors, 0)
        except _NotProvableError:
            self.tensors = []
        else:
            self.key = tuple(key)

    def position(self, tensor: Tensor) -> int | None:
        return _position(tensor, self.tensors)


class Slots:
    """The captured tensors that are passed to a kernel, one per slot.

    Attributes
    ----------
    sources : list
        For each slot, the position of its tensor in ``captures.tensors``, or the tensor itself if that list lacks it.
    """

    def __init__(self, captures: Captures, device: str = "cuda") -> None:
        self.captures = captures
        self.device = device
        self.sources: list[int | Tensor] = []

    def of(self, tensor: Tensor, owner: str) -> int:
        """Return the slot of ``tensor``; add it if it has none. ``owner`` names the function in error messages.

        Raises
        ------
        CannotEmitError
            If the tensor cannot be passed to a kernel.
        """
        if tensor.device.type != self.device:
            raise CannotEmitError(f"{owner} captures a tensor on {tensor.device}")
        if tensor.dim() > MAX_DIMS:
            raise CannotEmitError(f"{owner} captures a tensor of {tensor.dim()} dimensions, more than {MAX_DIMS}")
        if tensor.numel() == 0:  # a kernel has no element to read for an index out of range
            raise CannotEmitError(f"{owner} captures a tensor without elements, of shape {tuple(tensor.shape)}")
        position = self.captures.position(tensor)
        source = tensor if position is None else position
        for slot, known in enumerate(self.sources):
            if known is source or (type(known) is int and known == source):
                return slot
        if len(self.sources) == MAX_CAPTURED:
            raise CannotEmitError(f"{owner} captures more than {MAX_CAPTURED} tensors")
        self.sources.append(source)
        return len(self.sources) - 1

    def positions(self) -> list[int] | None:
        """Return ``sources`` if all of them are positions, else None."""
        positions = [source for source in self.sources if isinstance(source, int)]
        return positions if len(positions) == len(self.sources) else None

    def tensors(self) -> list[Tensor]:
        return [self.captures.tensors[s] if isinstance(s, int) else s for s in self.sources]


def _position(tensor: Tensor, tensors: list[Tensor]) -> int | None:
    for i, known in enumerate(tensors):
        if known is tensor:
            return i
    return None


def _value(value: Any, key: list[Any], tensors: list[Tensor], depth: int) -> None:
    """Append to ``key`` a description that only values equal to ``value`` have."""
    kind = type(value)
    if kind in _TENSORS:
        _tensor(value, key, tensors)
    elif kind in _CONSTANTS:
        key += (kind, value)
    elif kind is float:
        key += (float, value, math.copysign(1.0, value))  # tells -0.0 from 0.0
    elif (kind is types.ModuleType and value in _MODULES) or (
        kind is types.BuiltinFunctionType and value.__name__ in _ATTRIBUTES and _is_of_a_module(value)
    ):
        key.append(value)
    elif depth == _DEEPEST:
        raise _NotProvableError
    elif kind is types.FunctionType:
        _function(value, key, tensors, depth + 1)
    elif kind is tuple or (kind is list and len(value) <= _MOST_ITEMS):
        key += (kind, len(value))
        for item in value:
            _value(item, key, tensors, depth + 1)
    elif kind is dict and len(value) <= _MOST_ITEMS:
        key += (dict, len(value))
        for item in value.items():
            _value(item, key, tensors, depth + 1)
    elif kind is FixedMod:
        key += (FixedMod, value.identity, len(value.tensors))
        for tensor in value.tensors:
            _value(tensor, key, tensors, depth + 1)
    else:
        raise _NotProvableError


def _is_of_a_module(function: types.BuiltinFunctionType) -> bool:
    return any(getattr(module, function.__name__, None) is function for module in _MODULES)


def _tensor(value: Tensor, key: list[Any], tensors: list[Tensor]) -> None:
    hides_a_known_name = value.__dict__ and not _KNOWN_NAMES.isdisjoint(value.__dict__)
    if hides_a_known_name or value.layout is not torch.strided:
        raise _NotProvableError
    position = _position(value, tensors) if tensors else None
    if position is None:
        tensors.append(value)
        key += (type(value), value.dtype, value.shape, value.stride(), value.device)
    else:
        key += (Tensor, position)


_known_codes: Recent[Code] = Recent(4096)


def _code_of(function: types.FunctionType) -> Code:
    known = _known_codes.get(id(function.__code__))
    if known is None:
        known = read_code(function.__code__)
        _known_codes.put(id(function.__code__), known)
    return known


def _function(function: types.FunctionType, key: list[Any], tensors: list[Tensor], depth: int) -> None:
    code = _code_of(function)
    if function.__dict__:
        raise _NotProvableError
    key += (types.FunctionType, code)
    if function.__defaults__:
        key.append("defaults")
        _value(function.__defaults__, key, tensors, depth)
    if function.__kwdefaults__:
        key.append(tuple(function.__kwdefaults__))
        _value(tuple(function.__kwdefaults__.values()), key, tensors, depth)
    objects: set[str] = set()  # variables
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError as error:  # an empty cell
            raise _NotProvableError from error
        _variable(name, value, code, objects, key, tensors, depth)
    surroundings = function.__globals__
    attributes: list[str] = []
    for name in code.names:
        if name in surroundings:
            key.append(name)
            _variable(name, surroundings[name], code, objects, key, tensors, depth)
        elif name not in _KNOWN_NAMES:
            attributes.append(name)
    for name in attributes:
        if name not in code.readers or not code.readers[name] <= objects:
            raise _NotProvableError


def _variable(
    name: str, value: Any, code: Code, objects: set[str], key: list[Any], tensors: list[Tensor], depth: int
) -> None:
    """As :func:`_value`. An object is added to ``objects``, and described by the attributes that the code reads."""
    if type(value) in _DESCRIBED or name not in code.paths:
        _value(value, key, tensors, depth)
        return
    objects.add(name)
    for path in code.paths[name]:
        _attribute(value, path, key, tensors, depth)


def _attribute(value: Any, path: Path, key: list[Any], tensors: list[Tensor], depth: int) -> None:
    """Describe the first value on a path of attributes that is not an object. The rest must be known attributes."""
    rest = len(path)
    while rest and (rest == len(path) or type(value) not in _DESCRIBED):
        try:
            value = attribute(value, path[-rest])
        except HasCodeError as error:
            raise _NotProvableError from error
        rest -= 1
    if rest and not _KNOWN_NAMES.issuperset(path[-rest:]):
        raise _NotProvableError
    key += (object, rest)
    _value(value, key, tensors, depth + 1)
