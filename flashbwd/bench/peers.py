"""The interface of a peer. A peer turns a case and its inputs into a callable that runs only the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashbwd.bench.cases import DETERMINISTIC


class UnsupportedCaseError(Exception):
    """The peer does not support this case; the message gives the reason."""


def refuse(condition: bool, reason: str) -> None:
    if condition:
        raise UnsupportedCaseError(reason)


@dataclass(frozen=True)
class Prepared:
    """A peer that is ready to be timed; its forward has already run.

    Attributes
    ----------
    backward
        Returns the gradients in the layout of the inputs: (dq, dk, dv[, dbias]), or (dx, dgamma, dbeta).
    forward
        Repeats the forward with another v and the same dropout mask, so that the mask can be recovered.
    scope
        Entered around every use of ``backward``.
    capturable
        Whether a CUDA graph of ``backward`` computes the same as ``backward``.
    work
        Work of one call (FLOPs or bytes), if it differs from the work of the case.
    plan
        A description of the backend and its schedule.
    refusals
        Name of each backend that was not chosen, and the reason.
    checked
        Whether to compare the gradients with the reference of the case. If false, the peer is only timed.
    workspace_bytes
        Size of the scratch memory according to the plan.
    first_ms
        Time of the first call, including compilation and what is computed once per mask; None if it was not measured.
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
    first_ms: float | None = None


@dataclass(frozen=True)
class Peer:
    """A row of a table of peers. ``prepare(case, inputs)`` raises ``UnsupportedCaseError`` with the reason."""

    name: str
    prepare: Callable[[Any, Any], Prepared]
    devices: tuple[str, ...] = ("cuda",)
    compiled: bool = False  # compiles each shape, which takes seconds
    ahead: bool = False  # separate processes compile it for all cases before the first measurement

    @property
    def ours(self) -> bool:
        return self.name.startswith("flashbwd")

    @property
    def deterministic(self) -> bool:
        return self.name.endswith(DETERMINISTIC)
