"""The arguments of attention: which backend runs a call, and the public options in the form of the operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd import _arguments


class RngState(NamedTuple):
    """Random number generator state from which a forward drew its dropout mask.

    Attributes
    ----------
    seed, offset : int or Tensor
        Philox seed and offset. A tensor has one element, int64 or uint64, on the CPU or on q's device.
    layout : {"flash", "efficient32", "efficient64"}
        How the forward assigned random numbers to elements: ``"flash"`` for FlashAttention-2 and PyTorch's flash
        attention; ``"efficient32"`` (torch <= 2.11) or ``"efficient64"`` for PyTorch's memory-efficient attention,
        which numbers elements in 32 or 64 bits. docs/numerics.md defines all three.
    """

    seed: int | Tensor
    offset: int | Tensor
    layout: str


_backend = "auto"


_BACKENDS = ("auto", "sm90", "sm80", "short", "reference")


def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
    """Force a backend inside a ``with`` block.

    A call of attention that it does not support raises ``ValueError`` with the reason.

    Parameters
    ----------
    name : {"auto", "sm90", "sm80", "short", "reference"}
        Applies to the whole process, not only to the current thread. The backward of :func:`attention` uses the
        backend that was set when its forward ran. For :func:`flex_attention`, the backend counts that is set when its
        backward runs, and the reference computes what that backend refuses.

    Raises
    ------
    ValueError
        If there is no backend ``name``.
    """
    if not isinstance(name, str):
        raise ValueError(f"flashbwd: backend is {_arguments.came(name)}, expected a string")
    if name not in _BACKENDS:
        raise ValueError(f'flashbwd: backend is "{name}", expected "auto", "sm90", "sm80", "short" or "reference"')
    return _forced(name)


def backend() -> str:
    """Return the backend that :func:`use_backend` chose, by default "auto"."""
    return _backend


@contextlib.contextmanager
def _forced(name: str) -> Iterator[None]:
    before = _backend
    _set_backend(name)
    try:
        yield
    finally:
        _set_backend(before)


def _set_backend(name: str) -> None:
    global _backend
    _backend = name
    torch.ops.flashbwd.force_backend(name)  # the operator overrides in C++ read it


def _causal_name(causal: bool | str) -> str:
    if isinstance(causal, str):
        return causal
    if causal is True or causal is False:
        return "bottom_right" if causal else "none"
    raise ValueError(f'flashbwd: causal is {_arguments.came(causal)}, expected False, True or "top_left"')


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)):
        raise ValueError(f"flashbwd: window_size is {_arguments.came(window_size)}, expected a pair (left, right)")
    if len(window_size) != 2:
        raise ValueError(f"flashbwd: window_size is {window_size!r}, expected a pair (left, right)")
    return window_size[0], window_size[1]


def _sink_logits(q: Tensor, sink: Tensor | None) -> Tensor | None:
    """Convert sink logits to the dtype that the operators expect: float64 for float64 inputs, else float32."""
    if sink is None:
        return None
    if not _arguments.tensor("sink", sink).is_floating_point():
        dtype = str(sink.dtype).removeprefix("torch.")
        raise ValueError(f"flashbwd: sink is {dtype}, expected a floating-point dtype")
    return sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def default_scale(q: Tensor) -> float:
    """Return ``D ** -0.5``, or 1 if q has no head dimension, an error that the operator reports."""
    if q.is_nested:
        return 1.0
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def autocast_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes: autocast's if it is enabled and q is not float64, else q's."""
    kind = q.device.type
    if kind == "meta" or q.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return q.dtype
    return torch.get_autocast_dtype(kind)


def _deterministic(asked: bool) -> bool:
    return _arguments.flag("deterministic", asked) or torch.are_deterministic_algorithms_enabled()


def operator_options(q: Tensor, *, rng_state: RngState | None = None, **given: Any) -> dict[str, Any]:
    """Translate the public options to the operators' options (:class:`flashbwd.options.AttentionOptions`).

    ``given`` and the result may lack options that have their default values.
    """
    _arguments.tensor("q", q)
    if rng_state is not None and _arguments.number("dropout_p", given.get("dropout_p", 0.0)) != 0.0:
        given["rng_seed"], given["rng_offset"], given["rng_layout"] = _arguments.rng_words(rng_state)
    if "window_size" in given:
        given["window_left"], given["window_right"] = _window(given.pop("window_size"))
    if "sink" in given:
        given["sink"] = _sink_logits(q, given["sink"])
    if "causal" in given:
        given["causal"] = _causal_name(given["causal"])
    if _deterministic(given.get("deterministic", False)):
        given["deterministic"] = True
    if _backend != "auto":
        given["backend"] = _backend
    return given
