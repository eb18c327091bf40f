"""The kinds of symbolic values with which :mod:`~flashbwd.mods.built_in` evaluates a traced function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

FAR = 2**29  # upper limit for the magnitude of indices and of constants in a sum


@dataclass(frozen=True)
class Captured:
    """The element of a 0-d tensor (``index`` ""), or the element that the batch ("b") or head ("h") index selects."""

    tensor: Tensor  # compared and hashed by identity
    index: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Captured) and self.tensor is other.tensor and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.index))


@dataclass(frozen=True)
class Sum:
    """A weighted sum of indices, captured integers and a constant, which PyTorch computes in ``bits`` bits."""

    b: int = 0
    h: int = 0
    q: int = 0
    k: int = 0
    constant: int = 0
    terms: tuple[tuple[Captured, int], ...] = ()
    bits: int = 32

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
            max(self.bits, other.bits),
        )

    def __mul__(self, by: int) -> Sum:
        terms = tuple((term, weight * by) for term, weight in self.terms if by)
        return Sum(self.b * by, self.h * by, self.q * by, self.k * by, self.constant * by, terms, self.bits)

    @property
    def is_exact(self) -> bool:
        """Whether the sum cannot wrap around.

        True for one captured integer with weight 1, and for indices with a constant whose sum stays below the limit.
        """
        if self.terms:
            term = self.terms[0][0]
            alone = len(self.terms) == 1 and self == Sum(terms=((term, 1),), bits=self.bits)
            return alone and torch.iinfo(term.tensor.dtype).bits <= self.bits
        largest = (abs(self.b) + abs(self.h) + abs(self.q) + abs(self.k)) * FAR + abs(self.constant)
        return largest < 2 ** (self.bits - 1)

    def is_index(self, name: str) -> bool:
        """Return whether the sum is just the index of the batch ("b"), head ("h"), query ("q") or key ("k")."""
        weights: dict[str, Any] = {name: 1}
        return self == Sum(**weights, bits=self.bits)


@dataclass(frozen=True)
class Bound:
    """The condition ``k * kv_idx + sign * sum + q * q_idx + constant >= 0``, in which only ``sum`` may wrap around."""

    k: int = 0
    sign: int = 1
    sum: Sum = Sum()
    q: int = 0
    constant: int = 0


@dataclass(frozen=True)
class Distance:
    """``sign`` times the absolute value of a sum."""

    sum: Sum
    sign: int = 1


@dataclass(frozen=True)
class Bounds:
    """The condition that all of the bounds hold."""

    all: tuple[Bound, ...] = ()


@dataclass(frozen=True)
class OfHead:
    """``factor * captured[h] * exp2(rate * h + start)``. Without a captured tensor, ``captured[h]`` is 1."""

    factor: float = 1.0
    captured: Captured | None = None
    rate: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class OfBatchAndHead:
    """Any other function of the batch index and the head index. Only PyTorch can evaluate it."""

    dtype: torch.dtype
    batch: bool  # whether it reads the batch index


@dataclass(frozen=True)
class LinearInHead:
    """``rate * h + start``"""

    rate: float
    start: float


@dataclass(frozen=True)
class Bias:
    """``slope * sum``, or ``slope * abs(sum)``"""

    slope: OfHead | OfBatchAndHead
    sum: Sum
    absolute: bool = False

    @property
    def factor(self) -> float | None:
        """The slope if it is a number, else None."""
        return self.slope.factor if isinstance(self.slope, OfHead) and self.slope == OfHead(self.slope.factor) else None

    def times(self, number: float) -> Bias:
        """Return the product with a number. The value of a slope that only PyTorch evaluates is not tracked."""
        if isinstance(self.slope, OfBatchAndHead):
            return self
        return replace(self, slope=replace(self.slope, factor=self.slope.factor * number))


@dataclass(frozen=True, eq=False)
class Part:
    """An element of a captured tensor, or a part of the tensor that is indexed further.

    Attributes
    ----------
    indices : tuple
        For each dimension: the index that selects from it ("b", "h", "q" or "k"), a number, or None if there is no
        index yet.
    """

    tensor: Tensor
    indices: tuple[str | int | None, ...]

    def select(self, chosen: Sequence[str | int | None]) -> Part:
        """Return the part with indices for the first dimensions without one."""
        remaining = iter(chosen)
        indices = (next(remaining, None) if index is None else index for index in self.indices)
        return Part(self.tensor, tuple(indices))

    @property
    def is_of_a_pair(self) -> bool:
        """Whether all dimensions have an index, with "q" and "k" once and "b" and "h" at most once."""
        once = all(self.indices.count(name) <= 1 for name in "bh")
        return once and None not in self.indices and all(self.indices.count(name) == 1 for name in "qk")


@dataclass(frozen=True)
class Score:
    """The score after ``softcap`` (0: none), ``bias``, ``element`` and ``bounds``.

    ``stage`` is the progress of a softcap. ``element`` is added to the score.
    """

    softcap: float = 0.0
    stage: str = ""  # "divided" by softcap, then "tanh", then "" (complete)
    bias: Bias | None = None
    element: Part | None = None
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def untouched(self) -> bool:
        return self == Score()


Value = Any  # one of the classes above, a Python number, or None if unsupported


def reads_batch(value: Value) -> bool | None:
    """Return whether a function of the batch and head index reads the batch index. None: it reads another argument."""
    if isinstance(value, Sum):
        return None if value.q or value.k else bool(value.b) or any(term.index == "b" for term, _ in value.terms)
    if isinstance(value, Distance):
        return reads_batch(value.sum)
    if isinstance(value, OfBatchAndHead):
        return value.batch
    if isinstance(value, Part):
        return None if "q" in value.indices or "k" in value.indices else "b" in value.indices
    if isinstance(value, Bias):
        slope, total = reads_batch(value.slope), reads_batch(value.sum)
        return None if slope is None or total is None else slope or total
    return False if isinstance(value, (OfHead, LinearInHead, Tensor, bool, int, float)) else None
