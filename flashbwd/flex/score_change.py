"""Recognises a score_mod that the kernels of every build compute: a softcap, and then ALiBi and a captured bias.

After the softcap, the kernels subtract ``slope * abs(q_idx + offset - kv_idx)`` with ``offset = Sk - Sq``. Without an
absolute value, ALiBi adds ``slope * (kv_idx - q_idx - offset)``. That is the same where ``kv_idx <= q_idx + offset``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.flex.captured_bias import CapturedBias
from flashbwd.flex.storages import ByStorage
from flashbwd.mods.built_in import necessary_bounds, recognise_score
from flashbwd.mods.captures import CannotEmitError, Captures
from flashbwd.mods.trace import trace
from flashbwd.mods.values import Bias, OfBatchAndHead, Part, Sum
from flashbwd.reference.decoding import Mod
from flashbwd.reference.modes import AsInKernels
from flashbwd.reference.modifications import run_mod, unrounded

__all__ = ["Addend", "Alibi", "ScoreChange", "Slopes", "hides_above_diagonal", "score_change_of"]


@dataclass(frozen=True)
class Alibi:
    """``-slope * distance``, where the distance is ``q_idx + offset - kv_idx`` or its absolute value.

    Attributes
    ----------
    by_batch : bool
        Whether the slopes depend on the batch index. They always may depend on the head index.
    captured : int, optional
        Position of the captured tensor whose element ``h``, times ``factor``, is the slope of head h. None if only the
        function itself gives the slopes.
    """

    offset: int
    absolute: bool
    by_batch: bool
    captured: int | None
    factor: float


@dataclass(frozen=True)
class Addend:
    """``captured[indices]``, as :class:`~flashbwd.flex.captured_bias.CapturedBias` describes it.

    Attributes
    ----------
    source : int or Tensor
        Position of the captured tensor, or the tensor itself if the function has no key.
    """

    source: int | Tensor
    indices: tuple[str | int, ...]

    def bias(self, score_mod: Mod, sizes: tuple[int, int, int, int], has_gradient: bool) -> CapturedBias:
        """Return the bias that ``score_mod``, which computes this, has now, in a call with sizes (B, H, Sq, Sk)."""
        source = self.source
        tensor = source if isinstance(source, Tensor) else Captures(score_mod).tensors[source]
        return CapturedBias(tensor, self.indices, sizes, has_gradient)


@dataclass(frozen=True)
class ScoreChange:
    """A softcap (0: none), and then ALiBi and an element of a captured tensor."""

    softcap: float = 0.0
    alibi: Alibi | None = None
    addend: Addend | None = None


_known: dict[Hashable, ScoreChange | None] = {}
_MOST = 1024  # functions that are remembered
_constant_slopes: ByStorage[Tensor] = ByStorage(256)


def score_change_of(score_mod: Mod) -> ScoreChange | None:
    """Return what ``score_mod`` computes, or None if it is something else."""
    captures = Captures(score_mod)
    if captures.key is None:
        return _recognised(score_mod, captures)
    if captures.key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[captures.key] = _recognised(score_mod, captures)
    return _known[captures.key]


def _recognised(score_mod: Mod, captures: Captures) -> ScoreChange | None:
    try:
        score = recognise_score(trace("score_mod", unrounded(score_mod), True), captures)
    except CannotEmitError:
        return None
    if score is None or score.bounds.all or not math.isfinite(score.softcap):
        return None
    alibi = None if score.bias is None else _alibi_of(score.bias, captures)
    addend = None if score.element is None else _addend_of(score.element, captures)
    if (alibi is None) != (score.bias is None) or (addend is None) != (score.element is None):
        return None
    if addend is not None and alibi is not None and alibi.captured is None:
        return None  # other slopes are found by evaluating the function, which adds the element too
    return ScoreChange(score.softcap, alibi, addend)


def _addend_of(element: Part, captures: Captures) -> Addend | None:
    indices = tuple(index for index in element.indices if index is not None)
    if captures.key is None:
        return Addend(element.tensor, indices)
    position = captures.position(element.tensor)
    return None if position is None else Addend(position, indices)  # None: the function made the tensor


def _alibi_of(bias: Bias, captures: Captures) -> Alibi | None:
    total, slope = bias.sum, bias.slope
    if total != Sum(q=-total.k, k=total.k, constant=total.constant, bits=total.bits) or abs(total.k) != 1:
        return None
    offset = -total.k * total.constant  # the sum is -k * (q_idx + offset - kv_idx)
    if isinstance(slope, OfBatchAndHead):
        return Alibi(offset, bias.absolute, slope.batch, None, 1.0)
    position = None
    if slope.captured is not None and slope.rate == slope.start == 0.0:
        position = captures.position(slope.captured.tensor)
    factor = slope.factor * (-1 if bias.absolute else total.k)
    return Alibi(offset, bias.absolute, False, position, factor)


@dataclass(frozen=True)
class Slopes:
    """The slopes of a call with this ALiBi, which are read when the kernel runs."""

    alibi: Alibi
    score_mod: Mod
    batch: int
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.heads) if self.alibi.by_batch else (self.heads,)

    def tensor(self, device: torch.device) -> Tensor:
        """Return the slopes in float32. They are evaluated once if the function captures no tensor."""
        captures = Captures(self.score_mod)
        if self.alibi.captured is not None:  # no evaluation, which would cost several small kernels
            slopes = captures.tensors[self.alibi.captured].detach()
            slopes = slopes if slopes.shape[0] == self.heads else slopes[: self.heads]
            return slopes.contiguous() if self.alibi.factor == 1 else slopes * self.alibi.factor
        with torch.no_grad():
            if captures.key is None or captures.tensors or _is_capturing(device):
                return self._evaluated(device)
            key = (captures.key, self.shape, device)
            return _constant_slopes.get(key, (), lambda: self._evaluated(device))

    def _evaluated(self, device: torch.device) -> Tensor:
        """Return minus the score of a pair with distance 1 whose products are 0."""
        score = torch.zeros((), device=device, dtype=torch.float32)
        q = torch.zeros((), device=device, dtype=torch.int32)
        k = q + (self.alibi.offset - 1)
        batch, head = (torch.arange(n, device=device, dtype=torch.int32) for n in (self.batch, self.heads))
        mod = torch.vmap(unrounded(self.score_mod), in_dims=(None, None, 0, None, None))
        if self.alibi.by_batch:
            mod = torch.vmap(mod, in_dims=(None, 0, None, None, None))
        else:
            batch = batch.new_zeros(())
        with AsInKernels():
            return -run_mod("score_mod", mod, score, batch, head, q, k).float().contiguous()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def hides_above_diagonal(mask_mod: Mod, offset: int) -> bool:
    """Return whether ``mask_mod`` provably hides all pairs with ``kv_idx > q_idx + offset``."""
    captures = Captures(mask_mod)
    try:
        bounds = necessary_bounds(trace("mask_mod", mask_mod, False), captures)
    except (CannotEmitError, RuntimeError):
        return False
    return any((b.k, b.q, b.sum) == (-1, 1, Sum()) and b.constant <= offset for b in bounds)
