"""Functions that torch.compile does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

__all__ = ["untraced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Return a function that breaks a compiled graph and runs as it is, with all functions that it calls.

    It does what :func:`torch.compiler.disable` does, which imports the compiler, only when the compiler meets it.
    """
    disabled: list[Any] = []

    def prepare() -> bool:
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return True

    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it instead of tracing it

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo skips a frame, but not those that it calls, where it can't compile it.
        if is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
            prepare()
            return disabled[0](*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
