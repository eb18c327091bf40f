"""Recognises a score_mod that is a softcap, which the kernels of every build compute."""

from __future__ import annotations

from collections.abc import Hashable

from flashbwd.mods.built_in import recognise
from flashbwd.mods.captures import CannotEmitError, Captures
from flashbwd.mods.trace import trace
from flashbwd.reference.decoding import Mod

__all__ = ["softcap_of"]

_known: dict[Hashable, float | None] = {}
_MOST = 1024  # functions that are remembered


def softcap_of(score_mod: Mod) -> float | None:
    """Return the cap if ``score_mod`` computes ``cap * tanh(score / cap)``, 0 if it returns the score, else None."""
    captures = Captures(score_mod)
    if captures.key is None or captures.tensors:
        return None
    if captures.key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[captures.key] = _recognised(score_mod, captures)
    return _known[captures.key]


def _recognised(score_mod: Mod, captures: Captures) -> float | None:
    try:
        built_in = recognise(trace("score_mod", score_mod, True), None, captures)
    except CannotEmitError:
        return None
    if built_in is None or built_in.score.bias is not None or built_in.score.bounds.all:
        return None
    return built_in.score.softcap
