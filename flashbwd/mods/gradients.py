"""Traces modifications and writes them and their derivatives as CUDA, once per function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from flashbwd.mods.captures import CannotEmitError, Captures, Recent, Slots
from flashbwd.mods.derivative import Gradient
from flashbwd.mods.kernels import NoKernelError
from flashbwd.mods.trace import Trace, trace
from flashbwd.reference.modifications import Mod

__all__ = ["GradientSources"]

_Emit = Callable[[Trace | None, Trace | None, Slots, list[Tensor]], Gradient]


class GradientSources:
    """The sources that ``emit`` writes, by the key of the functions (:class:`~flashbwd.mods.captures.Captures`)."""

    def __init__(self, emit: _Emit) -> None:
        self._emit = emit
        # (Key of the functions, positions of the tensors that get a gradient) -> source, positions of captured tensors.
        self._known: Recent[tuple[Gradient, list[int]]] = Recent(256)

    def of(
        self, score_mod: Mod | None, mask_mod: Mod | None, differentiable: Sequence[Tensor]
    ) -> tuple[Gradient, list[Tensor]]:
        """Return the source, and the tensors that the functions capture in this call, one per slot.

        Parameters
        ----------
        differentiable : sequence of Tensor
            Captured tensors that get a gradient.

        Raises
        ------
        NoKernelError
            If a function or its derivative cannot be written as CUDA. The message names what prevents it.
        """
        captures = Captures(score_mod, mask_mod)
        chosen = tuple(captures.position(tensor) for tensor in differentiable)
        key = None if captures.key is None or None in chosen else (captures.key, chosen)
        found = None if key is None else self._known.get(key)
        if found is not None:
            return found[0], [captures.tensors[position] for position in found[1]]
        slots = Slots(captures)
        try:
            score = None if score_mod is None else trace("score_mod", score_mod, True)
            mask = None if mask_mod is None else trace("mask_mod", mask_mod, False)
            known = self._emit(score, mask, slots, list(differentiable))
        except CannotEmitError as error:
            raise NoKernelError(str(error)) from error
        positions = slots.positions()
        if key is not None and positions is not None:
            self._known.put(key, (known, positions))
        return known, slots.tensors()
