"""Replacing the CUDA kernels of PyTorch's backward operators by this library's, and putting them back.

An override tries a kernel of this library. Where there is none for the call, it runs what the dispatcher held before,
with the arguments as they came, and counts why.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch

from flashbwd.integrations import norms, sdpa

__all__ = ["OperatorStats", "Overrides", "disable", "enable", "stats"]


class OperatorStats(NamedTuple):
    """What became of the calls of one overridden operator.

    Attributes
    ----------
    hits : int
        Calls that a kernel of this library ran.
    fallbacks : dict of str to int
        Calls that PyTorch's own kernel ran, by the reason.
    """

    hits: int
    fallbacks: dict[str, int]


class _Override:
    """One operator's replacement. ``attempt`` takes the operator's arguments; it returns its results, or a reason."""

    def __init__(self, name: str, attempt: Callable[..., Any], dispatch_key: str = "CUDA") -> None:
        self.name = name
        self.attempt = attempt
        self.dispatch_key = dispatch_key
        self._lock = threading.Lock()  # backwards run in autograd's threads
        self._original: Any = None
        self._library: torch.library.Library | None = None
        self.reset()

    def reset(self) -> None:
        self._hits = 0
        self._fallbacks: Counter[str] = Counter()

    def stats(self) -> OperatorStats:
        with self._lock:
            return OperatorStats(self._hits, dict(self._fallbacks))

    def run(self, keyset: torch.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        result = self.attempt(*args, **kwargs)
        if type(result) is not str:
            with self._lock:
                self._hits += 1
            return result
        with self._lock:
            self._fallbacks[result] += 1
        return self._original.call_boxed(keyset, *args, **kwargs)

    def register(self) -> None:
        operator, key = f"aten::{self.name}", self.dispatch_key
        if self._library is not None or not torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
            return  # a PyTorch without CUDA has nothing to replace
        self._original = torch.library.get_kernel(operator, key)
        self._library = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():  # PyTorch warns of the first kernel that is replaced
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            self._library.impl(self.name, self.run, with_keyset=True, allow_override=True)

    def unregister(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = self._original = None


_ATTENTION = {name: _Override(name, attempt) for name, attempt in sdpa.ATTEMPTS.items()}
_NORMS = {name: _Override(name, attempt) for name, attempt in norms.ATTEMPTS.items()}
_ALL = _ATTENTION | _NORMS

_lock = threading.RLock()
_held: set[Overrides] = set()


class Overrides:
    """Holds overrides in place: from :func:`enable` until :meth:`remove`, the end of a ``with`` block, or
    :func:`disable`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def remove(self) -> None:
        """Let go; an operator gets PyTorch's kernel back when nothing else holds its override."""
        with _lock:
            _held.discard(self)
            _register_what_is_held()

    def __enter__(self) -> Overrides:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _register_what_is_held() -> None:
    names = frozenset().union(*(overrides.names for overrides in _held))
    for name, override in _ALL.items():
        if name in names:
            override.register()
        else:
            override.unregister()


def enable(*, attention: bool = True, norms: bool = True) -> Overrides:
    """Let PyTorch compute its backwards with the kernels of this library, wherever they can.

    From here on the gradients of ``scaled_dot_product_attention`` (after PyTorch's cuDNN, flash and memory-efficient
    forwards), of ``layer_norm`` and of ``rms_norm`` on CUDA come from this library, compiled graphs included, for the
    whole process. Calls that no kernel takes run PyTorch's own; :func:`stats` tells how many, and why. Enabling what is
    enabled changes nothing. Works on machines without a GPU, where none of these operators is called.

    Parameters
    ----------
    attention : bool
        Override the backwards of attention.
    norms : bool
        Override the backwards of LayerNorm and RMSNorm. ``torch.compile`` with Inductor compiles its own.

    Returns
    -------
    Overrides
        A context manager whose end takes them back::

            with flashbwd.enable():
                loss.backward()
    """
    overrides = Overrides([*(_ATTENTION if attention else ()), *(_NORMS if norms else ())])
    with _lock:
        _held.add(overrides)
        _register_what_is_held()
    return overrides


def disable() -> None:
    """Give PyTorch all its kernels back, whoever asked for the overrides."""
    with _lock:
        _held.clear()
        _register_what_is_held()


def stats(*, reset: bool = False) -> dict[str, OperatorStats]:
    """Calls of each overridden operator since the process began, or since the last ``reset``.

    Parameters
    ----------
    reset : bool
        Start again from zero after reading.

    Returns
    -------
    dict of str to OperatorStats
        By the operator's name, ``"aten::..."``. What a CUDA graph replays was counted once, at its capture.
    """
    counted = {f"aten::{name}": override.stats() for name, override in _ALL.items()}
    if reset:
        for override in _ALL.values():
            override.reset()
    return counted


def _offer_to_torch() -> None:
    """Register, not activate, under the name FLASHBWD where PyTorch keeps a list of such implementations."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:  # before torch 2.11
        return
    register_flash_attention_impl("FLASHBWD", register_fn=lambda: enable(norms=False))


_offer_to_torch()
