"""``compile_mods``: a score_mod or mask_mod that may read any object and takes its tensors as named arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from flashbwd.mods.captures import FixedMod
from flashbwd.reference.modifications import Mod

_INDICES = {"score_mod": 5, "mask_mod": 4}


class Mods(NamedTuple):
    """Modifications that are bound to their tensors. A modification that was not given is ``None``."""

    score_mod: Mod | None
    mask_mod: Mod | None


class CompiledMods:
    """Handle returned by :func:`compile_mods`. Calling it with the tensors as keyword arguments returns :class:`Mods`.

    Attributes
    ----------
    tensor_names : tuple of str
        Names of the tensors that a call requires.
    """

    def __init__(self, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None) -> None:
        self._score_mod = None if score_mod is None else _Function("score_mod", score_mod)
        self._mask_mod = None if mask_mod is None else _Function("mask_mod", mask_mod)
        functions = [function for function in (self._score_mod, self._mask_mod) if function is not None]
        self.tensor_names = tuple(dict.fromkeys(name for function in functions for name in function.names))

    def __call__(self, **tensors: Tensor) -> Mods:
        for name in self.tensor_names:
            if name not in tensors:
                raise ValueError(f"flashbwd: {name} is missing, expected tensors {self._expected()}")
        for name, tensor in tensors.items():
            if name not in self.tensor_names:
                raise ValueError(f"flashbwd: {name} is not a tensor of these functions, expected {self._expected()}")
            if not isinstance(tensor, Tensor):
                raise ValueError(f"flashbwd: {name} is a {type(tensor).__name__}, expected a tensor")
        return Mods(
            None if self._score_mod is None else _score_mod(_fixed(self._score_mod, tensors)),
            None if self._mask_mod is None else _mask_mod(_fixed(self._mask_mod, tensors)),
        )

    def _expected(self) -> str:
        return ", ".join(self.tensor_names) or "none"


class _Function:
    """A user function of indices and tensors. Modifications bound to the same ``_Function`` share their kernels."""

    def __init__(self, owner: str, function: Callable[..., Tensor]) -> None:
        if not callable(function):
            raise ValueError(f"flashbwd: {owner} is a {type(function).__name__}, expected a function")
        self.function = function
        self.names = _tensor_names(owner, function)

    def __call__(self, arguments: tuple[Tensor, ...], tensors: Sequence[Tensor]) -> Tensor:
        return self.function(*arguments, **dict(zip(self.names, tensors, strict=True)))


def _fixed(function: _Function, tensors: Mapping[str, Tensor]) -> FixedMod:
    return FixedMod(function, function, [tensors[name] for name in function.names])


# PyTorch tells a score_mod from a mask_mod by the number of its parameters.


def _score_mod(fixed: FixedMod) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: fixed(score, b, h, q_idx, kv_idx)


def _mask_mod(fixed: FixedMod) -> Mod:
    return lambda b, h, q_idx, kv_idx: fixed(b, h, q_idx, kv_idx)


def _tensor_names(owner: str, function: Callable[..., Tensor]) -> tuple[str, ...]:
    """Return the names of the parameters after the score and the indices."""
    parameters = list(inspect.signature(function).parameters.values())
    indices, tensors = parameters[: _INDICES[owner]], parameters[_INDICES[owner] :]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(indices) < _INDICES[owner] or any(parameter.kind not in by_position for parameter in indices):
        expected = "score, b, h, q_idx, kv_idx" if owner == "score_mod" else "b, h, q_idx, kv_idx"
        raise ValueError(f"flashbwd: {owner} takes {inspect.signature(function)}, expected ({expected}, *, tensors)")
    for parameter in tensors:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ValueError(f"flashbwd: {owner} takes {parameter}, expected each tensor by its own name")
        if parameter.default is not inspect.Parameter.empty:
            raise ValueError(f"flashbwd: {owner} has a default for {parameter.name}, expected a tensor from each call")
    return tuple(parameter.name for parameter in tensors)


def compile_mods(
    score_mod: Callable[..., Tensor] | None = None, mask_mod: Callable[..., Tensor] | None = None
) -> CompiledMods:
    """Create a handle for modifications of ``flex_decoding``, which traces them only once, whatever they read.

    Without a handle, ``flex_decoding`` reuses the trace of a function that reads only numbers, tensors, plain functions
    and attributes of objects that hold these. It traces a function that reads anything else (a method, a property, a
    list) at every call, because the result may have changed. With a handle, the caller promises that only the named
    tensors change::

        def biased(score, b, h, q_idx, kv_idx, *, table):
            return score + gains[layer.index] * table[h, kv_idx]

        mods = flashbwd.compile_mods(biased)
        for table in tables:
            out = flashbwd.flex_decoding(q, k, v, mods(table=table).score_mod)

    Parameters
    ----------
    score_mod : callable, optional
        ``(score, b, h, q_idx, kv_idx, *, tensors) -> score`` on 0-d tensors, as for ``flex_decoding``. Every parameter
        after the indices is a tensor that is passed by name when the handle is called. It has at most five dimensions,
        any dtype except complex, and query's device. It may require a gradient.
    mask_mod : callable, optional
        ``(b, h, q_idx, kv_idx, *, tensors) -> bool``. Its tensors are passed in the same way. If both functions have a
        parameter of the same name, both get the same tensor.

    Returns
    -------
    CompiledMods
        Calling it with the tensors as keyword arguments returns a named tuple ``(score_mod, mask_mod)``. Pass
        ``score_mod`` to ``flex_decoding``. Pass ``mask_mod`` to ``create_block_mask``, or set it as the ``mask_mod`` of
        an existing ``BlockMask``. Both work on every backend, with gradients and inside ``torch.compile``.

    Raises
    ------
    ValueError
        If a function lacks the parameters for the indices, or has ``*args``, ``**kwargs`` or a default for a tensor.
        When the handle is called: if a name is missing or unknown, or a value is not a tensor.

    Notes
    -----
    On a GPU, numbers, attributes and results of Python code become constants of the compiled kernel. They are read at
    the first call with each combination of dtypes, shapes, strides and devices of the named tensors. If any of them
    changes, make a new handle. A function that reads a GPU tensor other than its named arguments raises
    ``RuntimeError`` in ``flex_decoding``.
    """
    return CompiledMods(score_mod, mask_mod)
