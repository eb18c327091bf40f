"""Recognises built-in modifications, for which every build has kernels, by what they compute.

This module evaluates a traced function symbolically with a few kinds of values: sums of indices, conditions on the key
index, functions of the head, and the score itself. A function is built in, however it is written, if it computes

    score = cap * tanh(score / cap)                    softcap
    score = score + slope(h) * (+-k + q * n + c)       ALiBi, relative position
    visible where +-k + q * n + c >= 0, and ...        causal, window, lengths; as a mask or as a score of -inf

Here c is a sum of numbers and captured integers (0-d, or one per batch or head). csrc/decoding/built_in.cuh applies it.

A function is recognised only if the kernel provably computes what PyTorch computes, for all values of the captured
tensors. PyTorch's integers wrap around. ``Bound`` therefore stores a sum that may wrap around separately from terms
that were moved across a comparison. Every value must have the dtype of its kind, so a function with a cast that may
change a value is not recognised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.trace import Trace
from flashbwd.mods.values import (
    FAR,
    Bias,
    Bound,
    Bounds,
    Captured,
    Distance,
    LinearInHead,
    OfHead,
    Score,
    Sum,
    Value,
)

MAX_TERMS = 2  # captured integers per sum
MAX_BOUNDS = 4

_BITS = {torch.int32: 32, torch.int64: 64}


class NotBuiltInError(Exception):
    """The function is not a built-in modification."""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in modification: the change of the score, and the bounds of the visible keys if there is a mask."""

    score: Score
    mask: Bounds | None


def recognise(score: Trace | None, mask: Trace | None, captures: Captures) -> BuiltIn | None:
    """Return the built-in modification that two traces compute, or None. ``captures`` belongs to both functions."""
    try:
        value = Score() if score is None else _evaluate(score, captures)
        visible = None if mask is None else _evaluate(mask, captures)
    except NotBuiltInError:
        return None
    if not isinstance(value, Score) or value.stage or not isinstance(visible, (Bounds, type(None))):
        return None
    if visible is not None and value.bounds.all:  # full blocks ignore the mask, but not a score of -inf
        return None
    if value.bias is not None and not _fits_bias(value.bias.sum):
        return None
    return BuiltIn(value, visible) if all(_fits(bound.sum) for bound in (visible or value.bounds).all) else None


def _fits(total: Sum) -> bool:
    return abs(total.constant) <= FAR and abs(total.q) <= 16 and all(abs(weight) == 1 for _, weight in total.terms)


def _fits_bias(total: Sum) -> bool:
    """Return whether 32 bits hold every value of the sum. The kernel adds up a bias in 32 bits."""
    return _fits(total) and (total.bits == 32 or (not total.terms and replace(total, bits=32).is_exact))


def encode(built_in: BuiltIn, slots: Slots) -> tuple[list[int], list[float]]:
    """Return the integers and floats of ``BuiltInMod`` (csrc/decoding/params.h) in the order of its members.

    Adds the captured tensors to ``slots``.

    Raises
    ------
    CannotEmitError
        If a captured tensor cannot be passed to a kernel.
    """

    def slot_of(captured: Captured) -> int:
        return slots.of(captured.tensor, "score_mod or mask_mod")

    def of_sum(total: Sum) -> list[int]:
        numbers = [total.bits == 64, total.q, total.constant]
        for i in range(MAX_TERMS):
            if i < len(total.terms):
                captured, weight = total.terms[i]
                numbers += [weight, slot_of(captured), "bh".find(captured.index) + 1 if captured.index else 0]
                numbers.append(captured.tensor.dtype == torch.int64)
            else:
                numbers += [0, 0, 0, 0]
        return numbers

    bias = built_in.score.bias or Bias(OfHead(0.0), Sum(k=1))
    slope = bias.slope
    bounds = (built_in.mask or built_in.score.bounds).all
    kind = (0 if built_in.score.untouched and built_in.mask is not None else 1) + 2 * (built_in.mask is not None)
    slot = -1 if slope.captured is None else slot_of(slope.captured)
    integers = [kind, slot, bias.sum.k, *of_sum(bias.sum), len(bounds)]
    for i in range(MAX_BOUNDS):
        bound = bounds[i] if i < len(bounds) else Bound()
        integers += [bound.k, bound.sign, bound.q, bound.constant, *of_sum(bound.sum)]
    return [int(n) for n in integers], [built_in.score.softcap, slope.factor, slope.rate, slope.start]


# ---- evaluation ----


def _evaluate(trace: Trace, captures: Captures) -> Value:
    """Return the symbolic value of a traced function."""
    values: dict[fx.Node, Value] = {}
    arguments: list[Value] = [Sum(b=1), Sum(h=1), Sum(q=1), Sum(k=1)]
    placeholders = [node for node in trace.graph.nodes if node.op == "placeholder"]
    if len(placeholders) == 5:
        arguments.insert(0, Score())
    for node, value in zip(placeholders, arguments, strict=True):
        values[node] = value
    for node in trace.graph.nodes:
        if node.op == "get_attr":
            values[node] = _tensor(trace.tensors[str(node.target)], captures)
        elif node.op == "call_function":
            values[node] = _operator(node, values)
        elif node.op == "output":
            return values[node.args[0]]
    raise NotBuiltInError


def _tensor(tensor: Tensor, captures: Captures) -> Value:
    if tensor.dim() == 0 and tensor.device.type == "cpu" and captures.position(tensor) is None:
        return tensor.item()  # the function made this constant
    if tensor.dim() == 0 and tensor.dtype in _BITS:
        return Sum(terms=((Captured(tensor, ""), 1),), bits=_BITS[tensor.dtype])
    return tensor


def _operator(node: Any, values: dict[fx.Node, Value]) -> Value:
    name = str(node.target).removeprefix("aten.").split(".")[0]
    dtype = node.meta["val"].dtype
    if name in _FILLS:
        value = _constant(torch.full((), _FILLS[name](node), dtype=dtype).item())
        if value is None:
            raise NotBuiltInError
        return value
    rule = _RULES.get(name)
    if rule is None or (node.kwargs and name not in _KEYWORDS_MEAN_NOTHING):
        raise NotBuiltInError
    sums = [values[n] for n in node.all_input_nodes if isinstance(values[n], Sum)]
    if not dtype.is_floating_point:
        bits = max((_BITS.get(dtype, 0), *(total.bits for total in sums)), default=0)
        if any(total.bits < bits and not total.is_exact for total in sums):  # widened after a possible wrap-around
            raise NotBuiltInError
    value = rule(*fx.node.map_aggregate(node.args, lambda a: values[a] if isinstance(a, fx.Node) else a))
    if isinstance(value, Sum) and name == "_to_copy":
        value = _cast_sum(value, dtype)
    if not _is_of(value, dtype) or (isinstance(value, Sum) and len(value.terms) > MAX_TERMS):
        raise NotBuiltInError
    return replace(value, bits=_BITS[dtype]) if isinstance(value, Sum) else value


def _is_of(value: Value, dtype: torch.dtype) -> bool:
    """Return whether values of this kind have dtype ``dtype``. Any other dtype would have changed the value."""
    if isinstance(value, (Sum, Distance)) or _is_int(value):
        return dtype in _BITS and not (_is_int(value) and abs(value) > FAR)
    if isinstance(value, (Bounds, bool)):
        return dtype == torch.bool
    if isinstance(value, float):
        return dtype == torch.float32 and (math.isinf(value) or value == 0 or 2**-60 <= abs(value) <= 2**60)
    if isinstance(value, Tensor):
        return dtype == value.dtype
    return value is not None and dtype == torch.float32


def _cast_sum(total: Sum, dtype: torch.dtype) -> Value:
    if dtype == torch.float32:
        return Bias(OfHead(), total)
    # Narrowing is exact: the lower 32 bits of a sum do not depend on whether it wraps around at 64 bits.
    bits = _BITS.get(dtype)
    return None if bits is None else replace(total, bits=bits)


def _constant(value: Any) -> Value:
    """Return the value of a tensor that is filled with one number. A mask of True is a condition without bounds."""
    if isinstance(value, bool):
        return Bounds() if value else None
    return value if _is_of(value, torch.int32 if isinstance(value, int) else torch.float32) else None


def _index(source: Value, indices: list[Value]) -> Value:
    if not isinstance(source, Tensor) or source.dim() != 1 or len(indices) != 1:
        return None
    index = next((name for name in "bh" if isinstance(indices[0], Sum) and indices[0].is_index(name)), "")
    if index and source.dtype in _BITS:
        return Sum(terms=((Captured(source, index), 1),), bits=_BITS[source.dtype])
    return OfHead(captured=Captured(source, index)) if index == "h" and source.dtype == torch.float32 else None


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


def _biased(score: Score, by: Value) -> Value:
    if isinstance(by, Sum):
        by = Bias(OfHead(), by)
    if not isinstance(by, Bias) or score.stage or score.bias is not None or score.bounds.all or not _is_key(by.sum):
        return None
    return replace(score, bias=by)


def _linear(value: Value) -> LinearInHead | None:
    if isinstance(value, LinearInHead):
        return value
    if _is_number(value):
        return LinearInHead(0.0, float(value))
    if isinstance(value, Sum) and value == Sum(h=value.h, constant=value.constant, bits=value.bits):
        return LinearInHead(float(value.h), float(value.constant))
    if isinstance(value, Bias) and value.slope == OfHead(value.slope.factor):  # a sum cast to floating point
        linear = _linear(value.sum)
        return None if linear is None else _times(linear, value.slope.factor)
    return None


def _multiply(a: Value, b: Value) -> Value:
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return _times(a, b)
    if isinstance(a, (Sum, Bias)):
        a, b = b, a
    if isinstance(a, OfHead) and isinstance(b, Bias) and b.slope == OfHead(b.slope.factor):
        return Bias(replace(a, factor=a.factor * b.slope.factor), b.sum)
    return Bias(a, b) if isinstance(a, OfHead) and isinstance(b, Sum) else None


def _times(value: Value, number: float) -> Value:
    if _is_number(value):
        return value * number
    if isinstance(value, Sum) and _is_int(number):
        return value * int(number)
    if isinstance(value, OfHead):
        return replace(value, factor=value.factor * number)
    if isinstance(value, Bias):
        return replace(value, slope=replace(value.slope, factor=value.slope.factor * number))
    if isinstance(value, Score) and number > 0:
        if value.stage == "tanh" and math.isclose(value.softcap, number, rel_tol=1e-6):
            return Score(softcap=value.softcap)
        return Score(softcap=1 / number, stage="divided") if value.untouched else None
    linear = _linear(value)
    if linear is not None:
        return LinearInHead(linear.rate * number, linear.start * number)
    return Bias(OfHead(number), value) if isinstance(value, Sum) else None


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
    return Distance(value) if isinstance(value, Sum) and not value.terms and value.is_exact else None


def _at_least(a: Value, b: Value, slack: int = 0) -> Value:
    """Return the condition a >= b + slack, or None if it is not a supported bound."""
    if isinstance(b, Distance) and (left := _as_sum(a)) is not None:
        return _both(_at_least(left, b.sum, slack), _at_least(left, b.sum * -1, slack))
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


def _both(a: Value, b: Value) -> Value:
    if not isinstance(a, Bounds) or not isinstance(b, Bounds):
        return None
    bounds = Bounds(tuple(dict.fromkeys((*a.all, *b.all))))
    return bounds if len(bounds.all) <= MAX_BOUNDS else None


def _where(condition: Value, score: Value, other: Value) -> Value:
    if not isinstance(condition, Bounds) or not isinstance(score, Score) or score.stage or other != -math.inf:
        return None
    bounds = _both(score.bounds, condition)
    return None if bounds is None else replace(score, bounds=bounds)


_RULES: dict[str, Callable[..., Value]] = {
    **dict.fromkeys(("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy"), lambda value: value),
    "index": _index,
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
    "bitwise_and": _both,
    "__and__": _both,
    "logical_and": _both,
    "where": _where,
}
_FILLS: dict[str, Callable[[Any], Any]] = {
    "full": lambda node: node.args[1],
    "new_full": lambda node: node.args[2],
    "scalar_tensor": lambda node: node.args[0],
    "new_ones": lambda node: 1,
}
_KEYWORDS_MEAN_NOTHING = frozenset({"_to_copy", "clone"})  # except the dtype, which the result also has
