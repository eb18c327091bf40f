"""What a peer is: something that turns a case and its inputs into one callable, the backward alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashbwd.bench.cases import DETERMINISTIC


class UnsupportedCaseError(Exception):
    """The peer does not do this case; the message says why."""


def refuse(condition: bool, reason: str) -> None:
    if condition:
        raise UnsupportedCaseError(reason)


@dataclass(frozen=True)
class Prepared:
    """A peer ready to be timed; its forward has run.

    Attributes
    ----------
    backward
        Returns the gradients in the layout of the inputs: (dq, dk, dv[, dbias]), or (dx, dgamma, dbeta).
    forward
        Repeats the forward with another v and the same dropout mask, so that the mask can be read off it.
    scope
        Entered around every use of ``backward``.
    capturable
        Whether a CUDA graph of ``backward`` does the same as ``backward``.
    work
        What one call does, where that is not the case's own work.
    plan
        How it runs, in words.
    refusals
        For each backend that was not chosen, why.
    checked
        Whether ``backward`` computes what the case's reference does; else it is only timed.
    workspace_bytes
        The scratch it says it needs.
    """

    backward: Callable[[], tuple[Tensor | None, ...]]
    forward: Callable[[Tensor], Tensor] | None = None
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    capturable: bool = True
    work: float | None = None
    plan: str = ""
    refusals: Mapping[str, str] = field(default_factory=dict)
    workspace_bytes: int | None = None
    checked: bool = True


@dataclass(frozen=True)
class Peer:
    """A row of a table of peers. ``prepare(case, inputs)`` raises ``UnsupportedCaseError`` with the reason."""

    name: str
    prepare: Callable[[Any, Any], Prepared]
    devices: tuple[str, ...] = ("cuda",)
    compiled: bool = False  # takes seconds to compile for each shape
    ahead: bool = False  # so many that processes of their own do it for all cases before the first is measured

    @property
    def ours(self) -> bool:
        return self.name.startswith("flashbwd")

    @property
    def deterministic(self) -> bool:
        return self.name.endswith(DETERMINISTIC)
