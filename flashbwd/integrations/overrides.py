"""Replaces the CUDA kernels of PyTorch's backward operators with this library's, and restores them.

An override is implemented in C++ and first tries a kernel of this library. If none supports the call, the kernel that
was registered before runs with the same arguments, and the override counts the reason. C++ calls PyTorch's own kernels;
this module calls previous kernels that another library registered.

The backward of FlexAttention is no operator with kernels: PyTorch's compiler generates it. A pass over the compiler's
graphs replaces it instead.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch

from flashbwd import _arguments, _ops
from flashbwd.flex import counts

__all__ = ["OperatorStats", "Overrides", "disable", "enable", "stats"]


class OperatorStats(NamedTuple):
    """Counts of the calls of one overridden operator.

    Attributes
    ----------
    hits : int
        Calls that a kernel of this library ran.
    fallbacks : dict of str to int
        Calls that PyTorch's own kernel ran, by reason. For FlexAttention in compiled models: calls that a graph keeps,
        counted once, when the graph is compiled.
    """

    hits: int
    fallbacks: dict[str, int]


class _Stats(dict[str, OperatorStats]):
    """The counts of each operator. Printed, they take one line per operator and one per reason.

    If there are none because there is no GPU, the printed form says so.
    """

    def __str__(self) -> str:
        lines: list[str] = []
        for name, (hits, fallbacks) in self.items():
            lines.append(f"{name}: {hits} by flashbwd, {sum(fallbacks.values())} by PyTorch")
            lines += [f"    {count}: {reason}" for reason, count in fallbacks.items()]
        counts = "\n".join(lines)
        if torch.cuda.is_available() or any(stats != (0, {}) for stats in self.values()):
            return counts
        no_gpu = "PyTorch finds no CUDA device" if torch.version.cuda else "this PyTorch was built without CUDA"
        return (
            f"Nothing was taken over: {no_gpu}, and flashbwd.enable() replaces only CUDA kernels. "
            f"On the CPU, PyTorch's own backwards run, and they are not counted.\n{counts}"
        )


@functools.cache
def _use_up_the_warning() -> None:
    """Trigger and suppress PyTorch's warning about the first kernel that a process replaces.

    PyTorch warns only once. If C++ replaces the kernel, Python's warning filters do not apply.
    """
    library = torch.library.Library("flashbwd", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for _ in range(2):
            library.impl("force_backend", lambda name: None, allow_override=True)
    library._destroy()


def _is_pytorchs(operator: str, key: str) -> bool:
    """Return whether PyTorch's generated code registered the operator's current kernel for a dispatch key."""
    kernels = torch._C._dispatch_dump(operator).splitlines()
    return any(re.match(rf"{key}: registered at \S*/Register{key}_\d+\.cpp:", line) for line in kernels)


class _Override:
    """The override of one operator: registration, the fallback to the previous kernel, and the counts.

    Its kernel is C++ code in ``csrc/api``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.qualified_name = f"aten::{name}"
        self._key: str | None = None
        self._original: Any = None
        schema = str(getattr(torch.ops.aten, name).default._schema)
        fallback = f"fall_back_{name.removeprefix('_')}"
        _ops.library.define(fallback + schema[schema.index("(") :])
        _ops.library.impl(fallback, self._fall_back, "CompositeExplicitAutograd")
        _ops.library.refuse_derivatives(fallback)

    def stats(self, *, reset: bool = False) -> OperatorStats:
        hits, *reasons = torch.ops.flashbwd.override_stats(self.name, reset).split("\n")
        calls = (line.partition(" ") for line in reasons)
        return OperatorStats(int(hits), {reason: int(count) for count, _, reason in calls})

    def _fall_back(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel that was registered before; C++ calls this if it cannot call that kernel itself."""
        return self._original.call_boxed(self._keyset, *args, **kwargs)

    def register(self, key: str = "CUDA") -> None:
        operator = self.qualified_name
        if self._key is not None or not torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
            return  # a PyTorch without CUDA has nothing to replace
        self._key = key
        self._keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        self._original = torch.library.get_kernel(operator, key)
        _use_up_the_warning()
        torch.ops.flashbwd.register_override(self.name, key, _is_pytorchs(operator, key))

    def unregister(self) -> None:
        if self._key is not None:
            torch.ops.flashbwd.unregister_override(self.name)
        self._key = None  # _original stays valid, because another thread may be about to call it


class _CompiledFlexAttention:
    """The pass that replaces PyTorch's backward of FlexAttention in the graphs of Inductor."""

    qualified_name = "higher_order::flex_attention_backward"

    def __init__(self) -> None:
        self._installed: Any = None

    def stats(self, *, reset: bool = False) -> OperatorStats:
        return OperatorStats(*counts.compiled.read(reset=reset))

    def register(self) -> None:
        if self._installed is None:
            from flashbwd.integrations import flex_override  # imports PyTorch's compiler

            self._installed = flex_override.install()

    def unregister(self) -> None:
        if self._installed is not None:
            from flashbwd.integrations import flex_override

            flex_override.remove(self._installed)
        self._installed = None


_ATTENTION = {
    name: _Override(name)
    for name in (
        "_scaled_dot_product_cudnn_attention_backward",
        "_flash_attention_backward",
        "_efficient_attention_backward",
    )
}
_NORMS = {name: _Override(name) for name in ("native_layer_norm_backward", "_fused_rms_norm_backward")}
_ALL = _ATTENTION | _NORMS
_REPLACED: dict[str, _Override | _CompiledFlexAttention] = {
    **_ALL,
    "flex_attention_backward": _CompiledFlexAttention(),
}

_lock = threading.RLock()
_held: set[Overrides] = set()


class Overrides:
    """Keeps overrides active until :meth:`remove`, the end of the ``with`` block, or :func:`disable`.

    :func:`enable` creates it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def remove(self) -> None:
        """Release the overrides. An operator gets PyTorch's kernel back when no other ``Overrides`` object holds it."""
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
    for name, override in _REPLACED.items():
        if name in names:
            override.register()
        else:
            override.unregister()


def enable(*, attention: bool = True, norms: bool = True) -> Overrides:
    """Make PyTorch's backward operators use the kernels of this library for every call that they support.

    After this call, this library computes the CUDA gradients of ``scaled_dot_product_attention`` (after PyTorch's
    cuDNN, flash and memory-efficient forwards), ``layer_norm`` and ``rms_norm`` in the whole process, also in compiled
    graphs, and those of ``flex_attention`` in models that are compiled from now on. If no kernel supports a call,
    PyTorch's own kernel runs; :func:`stats` counts these calls by reason.
    Enabling an override that is already enabled has no effect. The function may be called on a machine without a GPU,
    where none of these operators runs.

    Parameters
    ----------
    attention : bool
        Override the backwards of attention.
    norms : bool
        Override the backwards of LayerNorm and RMSNorm. These overrides have no effect in models that Inductor
        compiles, because it generates its own norm kernels.

    Returns
    -------
    Overrides
        A context manager. The overrides end with its ``with`` block::

            with flashbwd.enable():
                loss.backward()
    """
    _arguments.flag("attention", attention)
    _arguments.flag("norms", norms)
    overrides = Overrides(name for name in _REPLACED if (norms if name in _NORMS else attention))
    with _lock:
        _held.add(overrides)
        _register_what_is_held()
    return overrides


def disable() -> None:
    """Restore all of PyTorch's kernels, also if other code enabled the overrides."""
    with _lock:
        _held.clear()
        _register_what_is_held()


def stats(*, reset: bool = False) -> dict[str, OperatorStats]:
    """Count the calls of each overridden operator since the process began, or since the last ``reset``.

    Parameters
    ----------
    reset : bool
        Start again from zero after reading.

    Returns
    -------
    dict of str to OperatorStats
        By the operator's name: ``"aten::..."`` or ``"higher_order::flex_attention_backward"``. A call in a CUDA graph
        is counted once, at capture. On a machine without a GPU, ``print`` also shows why nothing was counted.
    """
    _arguments.flag("reset", reset)
    return _Stats((override.qualified_name, override.stats(reset=reset)) for override in _REPLACED.values())


def _offer_to_torch() -> None:
    """Register FLASHBWD in PyTorch's list of attention implementations, without activating it."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:  # before torch 2.11
        return
    register_flash_attention_impl("FLASHBWD", register_fn=lambda: enable(norms=False))


_offer_to_torch()
