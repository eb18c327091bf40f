"""Modifications that every build has kernels for, recognised by what they compute.

A traced function is evaluated over a few kinds of values: sums of indices, conditions on the key index, functions of
the head, and the score itself. What stays within

    score = cap * tanh(score / cap)                    softcap
    score = score + slope(h) * (+-k + q * n + c)       ALiBi, relative position
    visible where +-k + q * n + c >= 0, and ...        causal, window, lengths, as mask or as -inf

with c of numbers and of captured integers (0-d, or one a batch or head) is passed to the kernel as arguments, however
it was written. The kernel's half is csrc/decoding/ordinary.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.trace import Trace

aten = torch.ops.aten

MAX_TERMS = 2  # captured integers of a sum
MAX_BOUNDS = 4
FAR = 2**29  # numbers up to here are added in 32 bits

_INTEGERS = (torch.int32, torch.int64)


class NotOrdinaryError(Exception):
    """The function is none of those above."""


@dataclass(frozen=True)
class Ordinary:
    """What two functions do: ``score`` to the score, and where the mask, if there is one, lets it be seen."""

    score: Score
    mask: Bounds | None


def recognise(score: Trace | None, mask: Trace | None, captures: Captures) -> Ordinary | None:
    """None for functions that are not ordinary. ``captures`` are theirs."""
    try:
        value = Score() if score is None else _evaluate(score, captures)
        visible = None if mask is None else _evaluate(mask, captures)
    except NotOrdinaryError:
        return None
    if not isinstance(value, Score) or value.stage or not isinstance(visible, (Bounds, type(None))):
        return None
    if visible is not None and value.bounds.sums:  # the mask does not count in full blocks, what the score is does
        return None
    sums = (*(visible or value.bounds).sums, *(() if value.bias is None else (value.bias.sum,)))
    return Ordinary(value, visible) if all(map(_fits, sums)) else None


def _fits(total: Sum) -> bool:
    return abs(total.constant) <= FAR and abs(total.q) <= 16 and all(abs(weight) == 1 for _, weight in total.terms)


def encode(ordinary: Ordinary, slots: Slots) -> tuple[list[int], list[float]]:
    """The integers and floats of ``OrdinaryMod`` (csrc/decoding/params.h), in the order of its members.

    Captured tensors get their places in ``slots``.

    Raises
    ------
    CannotEmitError
        For a tensor that kernels cannot be given.
    """

    def slot_of(captured: Captured) -> int:
        return slots.of(captured.tensor, "score_mod or mask_mod")

    def of_sum(total: Sum) -> list[int]:
        numbers = [total.q, total.constant]
        for i in range(MAX_TERMS):
            if i < len(total.terms):
                captured, weight = total.terms[i]
                numbers += [weight, slot_of(captured), "bh".find(captured.index) + 1 if captured.index else 0]
                numbers.append(captured.tensor.dtype == torch.int64)
            else:
                numbers += [0, 0, 0, 0]
        return numbers

    bias = ordinary.score.bias or Bias(OfHead(0.0), Sum(k=1))
    slope, sign = bias.slope, bias.sum.k
    bounds = (ordinary.mask or ordinary.score.bounds).sums
    kind = (0 if ordinary.score.untouched and ordinary.mask is not None else 1) + 2 * (ordinary.mask is not None)
    slot = -1 if slope.captured is None else slot_of(slope.captured)
    integers = [kind, slot, *of_sum(bias.sum * sign), len(bounds)]
    for i in range(MAX_BOUNDS):
        bound = bounds[i] if i < len(bounds) else Sum()
        integers += [bound.k, *of_sum(bound)]
    return [int(n) for n in integers], [ordinary.score.softcap, slope.factor * sign, slope.rate, slope.start]


# ---- values ----


@dataclass(frozen=True)
class Captured:
    """An element of a captured tensor: its only one, or that of the batch or head. ``index`` is "", "b" or "h"."""

    tensor: Tensor  # equal and hashed by identity
    index: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Captured) and self.tensor is other.tensor and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.index))


@dataclass(frozen=True)
class Sum:
    """Integer weights of the indices and of captured integers, and a constant."""

    b: int = 0
    h: int = 0
    q: int = 0
    k: int = 0
    constant: int = 0
    terms: tuple[tuple[Captured, int], ...] = ()

    def __add__(self, other: Sum) -> Sum:
        weights = dict(self.terms)
        for term, weight in other.terms:
            weights[term] = weights.get(term, 0) + weight
        terms = tuple((term, weight) for term, weight in weights.items() if weight)
        return Sum(
            self.b + other.b,
            self.h + other.h,
            self.q + other.q,
            self.k + other.k,
            self.constant + other.constant,
            terms,
        )

    def __mul__(self, by: int) -> Sum:
        terms = tuple((term, weight * by) for term, weight in self.terms if by)
        return Sum(self.b * by, self.h * by, self.q * by, self.k * by, self.constant * by, terms)

    @property
    def of_key(self) -> bool:
        return self.k in (1, -1) and not self.b and not self.h


@dataclass(frozen=True)
class Distance:
    """``abs`` of a sum."""

    sum: Sum


@dataclass(frozen=True)
class Bounds:
    """All of the sums are at least 0."""

    sums: tuple[Sum, ...] = ()


@dataclass(frozen=True)
class OfHead:
    """``factor * captured[h] * exp2(rate * h + start)``; without a captured tensor that is 1."""

    factor: float = 1.0
    captured: Captured | None = None
    rate: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class LinearInHead:
    """``rate * h + start``"""

    rate: float
    start: float


@dataclass(frozen=True)
class Bias:
    """``slope * sum``"""

    slope: OfHead
    sum: Sum


@dataclass(frozen=True)
class Score:
    """The score after ``softcap`` (0: none), ``bias`` and ``bounds``; ``stage`` tells what of a softcap is done."""

    softcap: float = 0.0
    stage: str = ""  # "divided" by softcap, then "tanh" of it, then ""
    bias: Bias | None = None
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def untouched(self) -> bool:
        return self == Score()


Value = Any  # of the above, a Python number, or None for a value of no kind


# ---- evaluation ----


def _evaluate(trace: Trace, captures: Captures) -> Value:
    """The value that a traced function returns."""
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
    raise NotOrdinaryError


def _tensor(tensor: Tensor, captures: Captures) -> Value:
    if tensor.dim() == 0 and tensor.device.type == "cpu" and captures.position(tensor) is None:
        return tensor.item()  # a constant that the function made
    if tensor.dim() == 0 and tensor.dtype in _INTEGERS:
        return Sum(terms=((Captured(tensor, ""), 1),))
    return tensor


def _operator(node: Any, values: dict[fx.Node, Value]) -> Value:
    name = str(node.target).removeprefix("aten.").split(".")[0]
    rule = _RULES.get(name)
    if rule is None or (node.kwargs and name not in _KEYWORDS_MEAN_NOTHING):
        raise NotOrdinaryError
    value = rule(*fx.node.map_aggregate(node.args, lambda a: values[a] if isinstance(a, fx.Node) else a))
    if value is None or (isinstance(value, Sum) and len(value.terms) > MAX_TERMS):
        raise NotOrdinaryError
    return value


def _index(source: Value, indices: list[Value]) -> Value:
    if not isinstance(source, Tensor) or source.dim() != 1 or len(indices) != 1:
        return None
    index = "b" if indices[0] == Sum(b=1) else "h" if indices[0] == Sum(h=1) else ""
    if index and source.dtype in _INTEGERS:
        return Sum(terms=((Captured(source, index), 1),))
    return OfHead(captured=Captured(source, index)) if index == "h" and source.dtype == torch.float32 else None


def _is_int(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_sum(value: Value) -> Sum | None:
    if _is_int(value):
        return Sum(constant=value)
    return value if isinstance(value, Sum) else None


def _same(value: Value, *_: Any) -> Value:
    return value


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
    if not isinstance(by, Bias) or score.stage or score.bias is not None or score.bounds.sums or not by.sum.of_key:
        return None
    return replace(score, bias=by)


def _linear(value: Value) -> LinearInHead | None:
    if isinstance(value, LinearInHead):
        return value
    if _is_number(value):
        return LinearInHead(0.0, float(value))
    if isinstance(value, Sum) and value == Sum(h=value.h, constant=value.constant):
        return LinearInHead(float(value.h), float(value.constant))
    return None


def _multiply(a: Value, b: Value) -> Value:
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return _times(a, b)
    if isinstance(a, Sum):
        a, b = b, a
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
    return Distance(value) if isinstance(value, Sum) else None


def _at_least(a: Value, b: Value, slack: int = 0) -> Value:
    """a >= b + slack"""
    if isinstance(b, Distance) and (left := _as_sum(a)) is not None:
        return _both(_at_least(left, b.sum, slack), _at_least(left, b.sum * -1, slack))
    left, right = _as_sum(a), _as_sum(b)
    if left is None or right is None:
        return None
    difference = left + right * -1 + Sum(constant=-slack)
    return Bounds((difference,)) if difference.of_key else None


def _more_than(a: Value, b: Value) -> Value:
    return _at_least(a, b, 1)


def _both(a: Value, b: Value) -> Value:
    if not isinstance(a, Bounds) or not isinstance(b, Bounds):
        return None
    bounds = Bounds(tuple(dict.fromkeys((*a.sums, *b.sums))))
    return bounds if len(bounds.sums) <= MAX_BOUNDS else None


def _where(condition: Value, score: Value, other: Value) -> Value:
    if not isinstance(condition, Bounds) or not isinstance(score, Score) or score.stage or other != -math.inf:
        return None
    bounds = _both(score.bounds, condition)
    return None if bounds is None else replace(score, bounds=bounds)


def _filled(_: Value, value: Value) -> Value:
    return Bounds() if value is True else value if _is_number(value) else None


def _ones(*_: Any) -> Value:
    return Bounds()


_RULES: dict[str, Callable[..., Value]] = {
    **dict.fromkeys(("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy"), _same),
    "index": _index,
    "add": _add,
    "sub": _subtract,
    "rsub": lambda a, b: _subtract(b, a),
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
    "full": _filled,
    "new_full": lambda _, size, value: _filled(size, value),
    "scalar_tensor": lambda value: _filled(None, value),
    "new_ones": _ones,
}
_KEYWORDS_MEAN_NOTHING = frozenset({"_to_copy", "clone", "full", "new_full", "scalar_tensor", "new_ones"})
