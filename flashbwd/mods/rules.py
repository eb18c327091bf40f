"""The rules by which :mod:`~flashbwd.mods.built_in` evaluates operators on symbolic values. None: unsupported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashbwd.mods.values import (
    FAR,
    Bias,
    Bound,
    Bounds,
    Captured,
    Distance,
    LinearInHead,
    OfBatchAndHead,
    OfHead,
    Part,
    Score,
    Sum,
    Value,
    reads_batch,
)

MAX_BOUNDS = 4
BITS = {torch.int32: 32, torch.int64: 64}


def is_of(value: Value, dtype: torch.dtype) -> bool:
    """Return whether values of this kind have dtype ``dtype``. Any other dtype would have changed the value."""
    if isinstance(value, (Sum, Distance)) or _is_int(value):
        return dtype in BITS and not (_is_int(value) and abs(value) > FAR)
    if isinstance(value, (Bounds, bool)):
        return dtype == torch.bool
    if isinstance(value, float):
        return dtype == torch.float32 and (math.isinf(value) or value == 0 or 2**-60 <= abs(value) <= 2**60)
    if isinstance(value, (Tensor, OfBatchAndHead)):
        return dtype == value.dtype
    if isinstance(value, Part):
        own = value.tensor.dtype
        return own.is_floating_point and (dtype == own or (dtype == torch.float32 and own.itemsize == 2))
    return value is not None and dtype == torch.float32


def cast(total: Sum | Distance, dtype: torch.dtype) -> Value:
    if dtype == torch.float32:
        return _as_bias(total)
    if isinstance(total, Distance):
        return total
    # Narrowing is exact: the lower 32 bits of a sum do not depend on whether it wraps around at 64 bits.
    bits = BITS.get(dtype)
    return None if bits is None else replace(total, bits=bits)


def constant(value: Any) -> Value:
    """Return the value of a tensor that is filled with one number. A mask of True is a condition without bounds."""
    if isinstance(value, bool):
        return Bounds() if value else None
    return value if is_of(value, torch.int32 if isinstance(value, int) else torch.float32) else None


def _index_of(value: Value) -> str | int | None:
    if _is_int(value):
        return int(value)
    return next((name for name in "bhqk" if isinstance(value, Sum) and value.is_index(name)), None)


def _index(source: Value, indices: list[Value]) -> Value:
    names = [_index_of(index) for index in indices]
    if not isinstance(source, Tensor) or source.dim() != 1:
        return _part(source, names)
    index = names[0]
    if index in ("b", "h") and source.dtype in BITS:
        return Sum(terms=((Captured(source, index), 1),), bits=BITS[source.dtype])
    return OfHead(captured=Captured(source, index)) if index == "h" and source.dtype == torch.float32 else None


def _select(source: Value, dim: Value, index: Value) -> Value:
    return _part(source, [index]) if dim == 0 and _is_int(index) else None


def _part(source: Value, indices: Sequence[str | int | None]) -> Value:
    """Return an element of a pair, or a part of a captured tensor of which some dimensions have no index."""
    part = Part(source, (None,) * source.dim()) if isinstance(source, Tensor) else source
    if not isinstance(part, Part) or None in indices or len(indices) > part.indices.count(None):
        return None
    part = part.select(indices)
    return part if None in part.indices or part.is_of_a_pair else None


def _is_int(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_sum(value: Value) -> Sum | None:
    if _is_int(value):
        return Sum(constant=value)
    return value if isinstance(value, Sum) else None


def _negative(value: Value) -> Value:
    return _multiply(value, -1)


def _add(a: Value, b: Value) -> Value:
    if _is_number(a) and _is_number(b):
        return a + b
    if isinstance(b, Score):
        a, b = b, a
    if isinstance(a, Score):
        return _biased(a, b)
    left, right = _as_sum(a), _as_sum(b)
    if left is not None and right is not None:
        return left + right
    rates, more = _linear(a), _linear(b)
    if rates is not None and more is not None:
        return LinearInHead(rates.rate + more.rate, rates.start + more.start)
    return None


def _subtract(a: Value, b: Value) -> Value:
    return None if isinstance(b, Score) else _add(a, _multiply(b, -1))


def _as_bias(value: Value) -> Value:
    """Return a sum or its absolute value, cast to floating point. Other values stay as they are."""
    if isinstance(value, Distance):
        return Bias(OfHead(float(value.sign)), value.sum, absolute=True)
    return Bias(OfHead(), value) if isinstance(value, Sum) else value


def _biased(score: Score, by: Value) -> Value:
    if score.stage or score.bounds.all:
        return None
    if isinstance(by, Part):
        return replace(score, element=by) if by.is_of_a_pair and score.element is None else None
    by = _as_bias(by)
    return replace(score, bias=by) if isinstance(by, Bias) and score.bias is None and _is_key(by.sum) else None


def _linear(value: Value) -> LinearInHead | None:
    if isinstance(value, LinearInHead):
        return value
    if _is_number(value):
        return LinearInHead(0.0, float(value))
    if isinstance(value, Sum) and value == Sum(h=value.h, constant=value.constant, bits=value.bits):
        return LinearInHead(float(value.h), float(value.constant))
    if isinstance(value, Bias) and value.factor is not None and not value.absolute:  # a sum cast to floating point
        linear = _linear(value.sum)
        return None if linear is None else _times(linear, value.factor)
    return None


def _multiply(a: Value, b: Value) -> Value:
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return _times(a, b)
    return _sloped(a, b) or _sloped(b, a)


def _sloped(slope: Value, by: Value) -> Bias | None:
    """Return the product of a function of the head and a sum of indices, if it is one."""
    bias = _as_bias(by)
    if not isinstance(bias, Bias) or bias.factor is None:
        return None
    if isinstance(slope, OfHead):
        return replace(bias, slope=replace(slope, factor=slope.factor * bias.factor))
    batch = reads_batch(slope)
    is_float = isinstance(slope, (LinearInHead, Bias)) or getattr(slope, "dtype", None) == torch.float32
    if batch is None or not is_float or reads_batch(by) is not None:
        return None
    return replace(bias, slope=OfBatchAndHead(torch.float32, batch))


def _times(value: Value, number: float) -> Value:
    if _is_number(value):
        return value * number
    if isinstance(value, Sum) and _is_int(number):
        return value * int(number)
    if isinstance(value, OfHead):
        return replace(value, factor=value.factor * number)
    if isinstance(value, Distance) and _is_int(number):
        return replace(value, sign=value.sign * int(number)) if abs(number) == 1 else None
    if isinstance(value, Bias):
        return value.times(number)
    if isinstance(value, Score) and number > 0:
        if value.stage == "tanh" and math.isclose(value.softcap, number, rel_tol=1e-6):
            return Score(softcap=value.softcap)
        return Score(softcap=1 / number, stage="divided") if value.untouched else None
    linear = _linear(value)
    if linear is not None:
        return LinearInHead(linear.rate * number, linear.start * number)
    return _as_bias(value).times(number) if isinstance(value, (Sum, Distance)) else None


def _divide(value: Value, number: Value, *_: Any) -> Value:
    if not _is_number(number) or number == 0:
        return None
    if isinstance(value, Score):
        return Score(softcap=float(number), stage="divided") if value.untouched and number > 0 else None
    return _times(value, 1 / number)


def _tanh(value: Value) -> Value:
    return replace(value, stage="tanh") if isinstance(value, Score) and value.stage == "divided" else None


def _exp2(value: Value) -> Value:
    return OfHead(rate=value.rate, start=value.start) if (value := _linear(value)) is not None else None


def _power(base: Value, exponent: Value) -> Value:
    return _exp2(exponent) if base == 2 else None


def _absolute(value: Value) -> Value:
    if isinstance(value, Bias) and value.factor is not None and isinstance(_absolute(value.sum), Distance):
        return Bias(OfHead(abs(value.factor)), value.sum, absolute=True)
    return Distance(value) if isinstance(value, Sum) and not value.terms and value.is_exact else None


def _at_least(a: Value, b: Value, slack: int = 0) -> Value:
    """Return the condition a >= b + slack, or None if it is not a supported bound."""
    if isinstance(b, Distance) and b.sign == 1 and (left := _as_sum(a)) is not None:
        return both(_at_least(left, b.sum, slack), _at_least(left, b.sum * -1, slack))
    left, right = _as_sum(a), _as_sum(b)
    if left is None or right is None:
        return None
    bound = Bound(constant=-slack)
    for total, sign in ((left, 1), (right, -1)):
        if total.b or total.h:
            return None
        if total.is_exact and not total.terms:
            constant = bound.constant + sign * total.constant
            bound = replace(bound, k=bound.k + sign * total.k, q=bound.q + sign * total.q, constant=constant)
        elif bound.sum == Sum() and total.k == 0:
            bound = replace(bound, sign=sign, sum=total)
        else:
            return None
    return Bounds((bound,)) if bound.k in (1, -1) else None


def _is_key(total: Sum) -> bool:
    return total.k in (1, -1) and not total.b and not total.h


def _more_than(a: Value, b: Value) -> Value:
    return _at_least(a, b, 1)


def both(a: Value, b: Value) -> Value:
    if not isinstance(a, Bounds) or not isinstance(b, Bounds):
        return None
    bounds = Bounds(tuple(dict.fromkeys((*a.all, *b.all))))
    return bounds if len(bounds.all) <= MAX_BOUNDS else None


def _where(condition: Value, score: Value, other: Value) -> Value:
    if not isinstance(condition, Bounds) or not isinstance(score, Score) or score.stage or other != -math.inf:
        return None
    bounds = both(score.bounds, condition)
    return None if bounds is None else replace(score, bounds=bounds)


def _detach(value: Value) -> Value:
    """Return None for what a kernel would give a gradient: the score, and a tensor that may be a bias."""
    has_gradient = isinstance(value, (Score, Part)) or (isinstance(value, Tensor) and value.dim() > 1)
    return None if has_gradient else value


RULES: dict[str, Callable[..., Value]] = {
    **dict.fromkeys(("alias", "clone", "lift_fresh", "lift_fresh_copy", "_to_copy"), lambda value: value),
    "detach": _detach,
    "index": _index,
    "select": _select,
    "add": _add,
    "sub": _subtract,
    "rsub": lambda a, b, alpha=1: _subtract(b, a) if alpha == 1 else None,
    "neg": _negative,
    "mul": _multiply,
    "div": _divide,
    "tanh": _tanh,
    "exp2": _exp2,
    "pow": _power,
    "abs": _absolute,
    "ge": _at_least,
    "gt": _more_than,
    "le": lambda a, b: _at_least(b, a),
    "lt": lambda a, b: _more_than(b, a),
    "bitwise_and": both,
    "__and__": both,
    "logical_and": both,
    "where": _where,
}
FILLS: dict[str, Callable[[Any], Any]] = {
    "full": lambda node: node.args[1],
    "new_full": lambda node: node.args[2],
    "scalar_tensor": lambda node: node.args[0],
    "new_ones": lambda node: 1,
}
KEYWORDS_MEAN_NOTHING = frozenset({"_to_copy", "clone"})  # except the dtype, which the result also has
# Functions of their operands alone. Of batch and head indices, PyTorch can evaluate them before a kernel runs.
OF_SLOPES = frozenset(
    """
    _to_copy abs add alias bitwise_and bitwise_or ceil clamp clamp_max clamp_min clone detach div eq exp exp2 expm1
    floor floor_divide ge gt index le log log1p log2 logical_and logical_not logical_or lt maximum minimum mul ne neg
    pow reciprocal remainder rsqrt rsub select sigmoid softplus sqrt square sub tanh where
    """.split()  # noqa: SIM905
)
