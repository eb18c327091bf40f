"""Modifications that read objects, classes, helper functions or shapes that may change between two calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

table = torch.zeros(3)


class Config:
    window = 128


class Layer:
    slope = 0.5
    __slots__ = ("own",)

    def __init__(self, own: Any = 1.0) -> None:
        self.own = own

    @property
    def gain(self) -> float:
        return float(GAIN["now"])

    def of_class(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.slope * torch.sin(k)

    def read(self) -> Any:
        return self.own


GAIN = {"now": 1.0}
layer = Layer()
settings = SimpleNamespace(gain=1.0)


def helper() -> Any:
    return Config.window


def sliding(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < Config.window + q


def by_helper(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < helper() + q


def ring(t: Tensor) -> Any:
    return lambda s, b, h, q, k: s + t[k % t.shape[0]]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[pytest.MonkeyPatch], None], Callable[[], Any]]] = {
    # The modifications, a change, and modifications with literals that give what the first must give after the change.
    "class": (
        lambda: (None, sliding),
        lambda patch: patch.setattr(Config, "window", 32),
        lambda: (None, lambda b, h, q, k: k < 32 + q),
    ),
    "helper": (
        lambda: (None, by_helper),
        lambda patch: patch.setattr(Config, "window", 32),
        lambda: (None, lambda b, h, q, k: k < 32 + q),
    ),
    "method": (
        lambda: (layer.of_class,),
        lambda patch: patch.setattr(Layer, "slope", -2.0),
        lambda: (lambda s, b, h, q, k: s + -2.0 * torch.sin(k),),
    ),
    "property": (
        lambda: (lambda s, b, h, q, k: s + layer.gain * torch.cos(k),),
        lambda patch: patch.setitem(GAIN, "now", 3.0),
        lambda: (lambda s, b, h, q, k: s + 3.0 * torch.cos(k),),
    ),
    "slots": (
        lambda: (lambda s, b, h, q, k: s + layer.own * torch.cos(k),),
        lambda patch: patch.setattr(layer, "own", 3.0),
        lambda: (lambda s, b, h, q, k: s + 3.0 * torch.cos(k),),
    ),
    "attribute": (
        lambda: (lambda s, b, h, q, k: s + settings.gain * torch.cos(k),),
        lambda patch: patch.setattr(settings, "gain", 3.0),
        lambda: (lambda s, b, h, q, k: s + 3.0 * torch.cos(k),),
    ),
    "shape": (
        lambda: (ring(table),),
        lambda patch: patch.setitem(globals(), "table", torch.zeros(16)),
        lambda: (lambda s, b, h, q, k: s + table[k % 16],),
    ),
}
