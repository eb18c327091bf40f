"""Compares the derivative of a score modification in PyTorch's graph with the one that this library computes.

PyTorch differentiates the function of the user, and the result is a second graph. This library differentiates the first
graph, in which ``detach()`` is an alias, and ``torch.no_grad()`` and a ``torch.autograd.Function`` leave no trace. So
both derivatives are evaluated at random points.

There, every tensor is a scalar on the host. A captured tensor has equal elements, so what selects some of them does
nothing. The gradient of a captured tensor is the sum of its elements.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = ["has_the_derivative"]

aten = torch.ops.aten

_POINTS = 12
_TOLERANCE = 0.02  # relative: a modification may compute in 16 bits
_SELECTS = frozenset(
    {
        *(aten.index.Tensor, aten.select.int, aten.slice.Tensor, aten.index_select.default, aten.gather.default),
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
        *(aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.clone.default, aten.as_strided.default),
        *(aten.embedding.default, aten.embedding_dense_backward.default, aten.constant_pad_nd.default),
        *(aten.select_backward.default, aten.slice_backward.default, torch.ops.prims.device_put.default),
    }
)
# Operators that add to a gradient, and the place of what they add among their arguments.
_ADDS = {
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten.index_add.default: 3,
    aten.scatter_add.default: 3,
    aten.select_scatter.default: 1,
    aten.slice_scatter.default: 1,
}
_FILLS = (aten.zeros.default, aten.ones.default, aten.full.default)  # (sizes, ...)
_FILLS_LIKE = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)  # (like, sizes, ...)


class _OnScalars(fx.Interpreter):
    """Evaluates a modification or its derivative with scalars in place of all tensors."""

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().get_attr(target, args, kwargs).cpu()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _SELECTS:
            return args[0]
        if target in _ADDS:
            return args[0] + args[_ADDS[target]]
        if getattr(target, "_opname", "") == "zeros_and_scatter":  # (sizes, indices, values)
            return args[2]
        if target in _FILLS:
            args = ([], *args[1:])
        elif target in _FILLS_LIKE:
            args = (args[0], [], *args[2:])
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


def has_the_derivative(fw_graph: fx.GraphModule, joint_graph: fx.GraphModule, captured: Sequence[Any]) -> bool:
    """Return whether ``joint_graph`` is the derivative of ``fw_graph``, as far as random points can tell.

    Parameters
    ----------
    fw_graph, joint_graph : GraphModule
        Of PyTorch's operator: ``(score, b, h, q_idx, kv_idx, *captured)`` and the same with the gradient of the result
        after ``kv_idx``.
    captured : sequence of Tensor or int
        Fake tensors, and examples of symbolic numbers.

    Raises
    ------
    Exception
        If one of the graphs cannot be evaluated on scalars.
    """
    numbers = random.Random(0)
    pairs: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)  # by gradient: this library's and PyTorch's
    with unset_fake_temporarily(), torch.inference_mode(False), torch.enable_grad():
        for _ in range(_POINTS):
            score = torch.tensor(numbers.uniform(-3, 3), dtype=torch.float64, requires_grad=True)
            most = numbers.choice((4, 64, 4096))
            indices = [torch.tensor(numbers.randrange(most), dtype=torch.int32) for _ in range(4)]
            values = [_example(value, numbers) for value in captured]
            given = torch.tensor(numbers.uniform(0.5, 2), dtype=torch.float64)
            result = _OnScalars(fw_graph).run(score, *indices, *values)
            of_score, _, _, _, _, *of_values = _OnScalars(joint_graph).run(score, *indices, given, *values)
            theirs = dict(enumerate([of_score, *of_values]))
            theirs = {i: float(gradient.detach()) for i, gradient in theirs.items() if gradient is not None}
            ours = _gradients(result, [[score, *values][i] for i in theirs], given)
            for (i, gradient), own in zip(theirs.items(), ours, strict=True):
                if not math.isnan(own + gradient):  # else the point is beyond the domain of the function
                    pairs[i].append((own, gradient))
    return all(map(_agree, pairs.values())) and bool(pairs)


def _agree(pairs: list[tuple[float, float]]) -> bool:
    typical = statistics.median(abs(own) + abs(other) for own, other in pairs)
    return all(
        own == other or abs(own - other) <= _TOLERANCE * (abs(own) + abs(other) + typical) for own, other in pairs
    )


def _example(value: Any, numbers: random.Random) -> Any:
    """Return a scalar in place of a captured value. Numbers have the value with which they were traced."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.tensor(numbers.uniform(0.1, 2), dtype=torch.float64, requires_grad=True)
    example = numbers.random() < 0.5 if value.dtype == torch.bool else numbers.randrange(1, 4)
    return torch.tensor(example, dtype=value.dtype)


def _gradients(result: Tensor, inputs: Sequence[Tensor], given: Tensor) -> list[float]:
    if not result.requires_grad:
        return [0.0] * len(inputs)
    found = torch.autograd.grad(result, inputs, given.to(result.dtype), allow_unused=True)
    return [0.0 if gradient is None else float(gradient) for gradient in found]
