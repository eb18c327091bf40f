"""Recognises built-in modifications, for which every build has kernels, by what they compute.

This module evaluates a traced function symbolically with a few kinds of values: sums of indices, conditions on the key
index, functions of the head, and the score itself. A function is built in, however it is written, if it computes

    score = cap * tanh(score / cap)                    softcap
    score = score + slope(h) * (+-k + q * n + c)       ALiBi, relative position
    score = score + slope(b, h) * abs(+-k + q * n + c) ALiBi in training, where the slope is any function
    score = score + captured[b, h, q, k]               bias of a pair in training; b, h or both may be missing
    visible where +-k + q * n + c >= 0, and ...        causal, window, lengths; as a mask or as a score of -inf

Here c is a sum of numbers and captured integers (0-d, or one per batch or head). csrc/decoding/built_in.cuh applies it.
The kernels of flex decoding take no absolute values, no bias of a pair, and a slope only as a number, captured[h] or
exp2 of a sum.

A function is recognised only if the kernel provably computes what PyTorch computes, for all values of the captured
tensors. PyTorch's integers wrap around. ``Bound`` therefore stores a sum that may wrap around separately from terms
that were moved across a comparison. Every value must have the dtype of its kind, so a function with a cast that may
change a value is not recognised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from flashbwd.mods.captures import CannotEmitError, Captures, Slots
from flashbwd.mods.numbers import number_of
from flashbwd.mods.rules import (
    BITS,
    FILLS,
    KEYWORDS_MEAN_NOTHING,
    MAX_BOUNDS,
    OF_SLOPES,
    RULES,
    both,
    cast,
    constant,
    is_of,
)
from flashbwd.mods.trace import Trace
from flashbwd.mods.values import (
    FAR,
    Bias,
    Bound,
    Bounds,
    Captured,
    Distance,
    OfBatchAndHead,
    OfHead,
    Score,
    Sum,
    Value,
    reads_batch,
)

MAX_TERMS = 2  # captured integers per sum


class NotBuiltInError(Exception):
    """The function is not a built-in modification."""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in modification: the change of the score, and the bounds of the visible keys if there is a mask."""

    score: Score
    mask: Bounds | None


def recognise(score: Trace | None, mask: Trace | None, captures: Captures) -> BuiltIn | None:
    """Return the built-in modification that two traces compute, or None if the kernels of flex decoding lack it.

    ``captures`` belongs to both functions.
    """
    value = Score() if score is None else recognise_score(score, captures)
    if value is None or value.element is not None:
        return None
    if value.bias and (value.bias.absolute or isinstance(value.bias.slope, OfBatchAndHead)):
        return None
    try:
        visible = None if mask is None else _evaluate(mask, captures)
    except NotBuiltInError:
        return None
    if not isinstance(visible, (Bounds, type(None))):
        return None
    if visible is not None and value.bounds.all:  # full blocks ignore the mask, but not a score of -inf
        return None
    bounds = (visible or value.bounds).all
    fit = all(_fits(bound.sum) and abs(bound.constant) <= FAR for bound in bounds)
    return BuiltIn(value, visible) if fit else None


def recognise_score(score: Trace, captures: Captures) -> Score | None:
    """Return the change of the score that a trace computes, or None.

    Unlike those of :func:`recognise`, it may add an element of a captured tensor, and its bias may have any slope and
    be absolute.
    """
    if score.changes_gradients:
        return None
    try:
        value = _evaluate(score, captures)
    except NotBuiltInError:
        return None
    if not isinstance(value, Score) or value.stage:
        return None
    return value if value.bias is None or _fits_bias(value.bias.sum) else None


def necessary_bounds(mask: Trace, captures: Captures) -> list[Bound]:
    """Return bounds that every visible pair of a mask meets: those that it combines with others by "and"."""
    values = _values(mask, captures, strict=False)
    (output,) = mask.graph.find_nodes(op="output")
    bounds: list[Bound] = []
    remaining = [output.args[0]]
    while remaining:
        node = remaining.pop()
        if isinstance(values[node], Bounds):
            bounds += values[node].all
        elif node.op == "call_function" and RULES.get(_name_of(node)) is both:
            remaining += node.all_input_nodes
    return bounds


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
    if not isinstance(slope, OfHead):  # recognise() refuses it
        raise CannotEmitError("score_mod has a slope that no kernel of flex decoding computes")
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
    (output,) = trace.graph.find_nodes(op="output")
    return _values(trace, captures, strict=True)[output.args[0]]


def _values(trace: Trace, captures: Captures, strict: bool) -> dict[fx.Node, Value]:
    """Return the symbolic values of all nodes. Unless ``strict``, the value of an unsupported node is None."""
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
            try:
                values[node] = _operator(node, values)
            except NotBuiltInError:
                if strict:
                    raise
                values[node] = None
    return values


def _tensor(tensor: Tensor, captures: Captures) -> Value:
    if tensor.dim() == 0 and tensor.device.type == "cpu" and captures.position(tensor) is None:
        return number_of(lambda: tensor)  # the function made this constant
    if tensor.dim() == 0 and tensor.dtype in BITS:
        return Sum(terms=((Captured(tensor, ""), 1),), bits=BITS[tensor.dtype])
    return tensor


def _name_of(node: Any) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _operator(node: Any, values: dict[fx.Node, Value]) -> Value:
    try:
        return _by_rule(node, values)
    except NotBuiltInError:
        reads = [reads_batch(values[source]) for source in node.all_input_nodes]
        if not reads or None in reads or _name_of(node) not in OF_SLOPES:
            raise
        return OfBatchAndHead(node.meta["val"].dtype, any(reads))


def _by_rule(node: Any, values: dict[fx.Node, Value]) -> Value:
    name = _name_of(node)
    dtype = node.meta["val"].dtype
    if name in FILLS:
        value = constant(number_of(lambda: torch.full((), FILLS[name](node), dtype=dtype)))
        if value is None:
            raise NotBuiltInError
        return value
    rule = RULES.get(name)
    if rule is None or (node.kwargs and name not in KEYWORDS_MEAN_NOTHING):
        raise NotBuiltInError
    sums = [values[n] for n in node.all_input_nodes if isinstance(values[n], Sum)]
    if not dtype.is_floating_point:
        bits = max((BITS.get(dtype, 0), *(total.bits for total in sums)), default=0)
        if any(total.bits < bits and not total.is_exact for total in sums):  # widened after a possible wrap-around
            raise NotBuiltInError
    value = rule(*fx.node.map_aggregate(node.args, lambda a: values[a] if isinstance(a, fx.Node) else a))
    if isinstance(value, (Sum, Distance)) and name == "_to_copy":
        value = cast(value, dtype)
    if not is_of(value, dtype) or (isinstance(value, Sum) and len(value.terms) > MAX_TERMS):
        raise NotBuiltInError
    return replace(value, bits=BITS[dtype]) if isinstance(value, Sum) else value
