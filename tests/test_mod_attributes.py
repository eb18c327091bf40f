"""Keys of modifications that read attributes of objects: they contain what is read, and no object that hides code."""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from flashbwd.mods.captures import Captures

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    seqlen: int = 16
    scale: float = 0.5


@dataclass
class Settings:
    sizes: Sizes = field(default_factory=Sizes)
    table: Any = field(default_factory=lambda: torch.zeros(3))
    of_class = 2.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: Any) -> None:
        self.gain = gain


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 0.5
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.zeros(4))
        self.inner = nn.Linear(2, 2)
        self.register_parameter("nothing", None)


settings = Settings()


def key_of(mod: Mod) -> Any:
    key = Captures(mod).key
    assert key is not None
    return key


# ---- objects with a key ----


def namespace(**values: Any) -> Callable[[], Any]:
    return lambda: types.SimpleNamespace(**values)


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda owner: object.__setattr__(owner, name, value)


def with_local(o: Any) -> Mod:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        gain = o.gain
        return s * gain

    return mod


# A function of an object, how the object is made, and a change.
READ: dict[str, tuple[Callable[[Any], Mod], Callable[[], Any], Callable[[Any], Any]]] = {
    "number": (lambda o: lambda s, b, h, q, k: s * o.gain, namespace(gain=1), setting("gain", 2)),
    "frozen": (lambda o: lambda s, b, h, q, k: s * o.seqlen, Sizes, setting("seqlen", 2)),
    "second": (lambda o: lambda s, b, h, q, k: s * o.seqlen + o.scale, Sizes, setting("scale", 2.0)),
    "first": (lambda o: lambda s, b, h, q, k: s * o.seqlen + o.scale, Sizes, setting("seqlen", 2)),
    "default": (lambda o: lambda s, b, h, q, k: s * o.of_class, Settings, setting("of_class", 3.0)),
    "slot": (lambda o: lambda s, b, h, q, k: s * o.gain, lambda: Slotted(1), setting("gain", 2)),
    "nested": (lambda o: lambda s, b, h, q, k: s * o.sizes.seqlen, Settings, lambda o: setting("seqlen", 2)(o.sizes)),
    "replaced": (lambda o: lambda s, b, h, q, k: s * o.sizes.scale, Settings, setting("sizes", Sizes(16, 2.0))),
    "tensor": (lambda o: lambda s, b, h, q, k: s + o.table[h], Settings, setting("table", torch.zeros(4))),
    "shape": (lambda o: lambda s, b, h, q, k: s + o.table.shape[0], Settings, setting("table", torch.zeros(4))),
    "parameter": (
        lambda o: lambda s, b, h, q, k: s + o.weight[h],
        Layer,
        lambda o: setattr(o, "weight", nn.Parameter(torch.zeros(4))),
    ),
    "buffer": (lambda o: lambda s, b, h, q, k: s + o.table[h], Layer, lambda o: o.double()),
    "submodule": (
        lambda o: lambda s, b, h, q, k: s + o.inner.weight[h, 0],
        Layer,
        lambda o: setattr(o, "inner", nn.Linear(3, 2)),
    ),
    "none": (
        lambda o: lambda s, b, h, q, k: s if o.nothing is None else -s,
        Layer,
        lambda o: o.register_parameter("nothing", o.weight),
    ),
    "function": (
        lambda o: lambda s, b, h, q, k: o.change(s),
        namespace(change=torch.sin),
        setting("change", torch.cos),
    ),
    "local": (with_local, namespace(gain=1), setting("gain", 2)),
}


@pytest.mark.parametrize("name", READ)
def test_a_key_contains_the_attributes_that_a_function_reads(name: str) -> None:
    function, make, change = READ[name]
    one, mod = make(), function
    before = key_of(mod(one))
    assert key_of(mod(make())) == key_of(mod(one)) == before
    change(one)
    assert key_of(mod(one)) != before


def test_a_key_does_not_contain_other_attributes() -> None:
    one = Settings()
    mod = lambda s, b, h, q, k: s * one.sizes.seqlen  # noqa: E731
    before = key_of(mod)
    one.table, one.other = [], object()  # type: ignore[attr-defined]
    assert key_of(mod) == before


def test_a_global_object_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = lambda s, b, h, q, k: s + settings.table[h]  # noqa: E731
    before = key_of(mod)
    assert Captures(mod).tensors == [settings.table]
    monkeypatch.setattr(settings, "table", torch.zeros(5))
    assert key_of(mod) != before
    monkeypatch.setitem(globals(), "settings", [settings])
    assert Captures(mod).key is None


def test_tensors_of_objects_are_captured_once() -> None:
    one, shared = Settings(), torch.zeros(3)
    one.table = shared
    mod = lambda s, b, h, q, k: s + one.table[h] + shared[q] + one.table[k]  # noqa: E731
    assert [id(tensor) for tensor in Captures(mod).tensors] == [id(shared)]
    one.table = torch.zeros(3)
    assert len(Captures(mod).tensors) == 2


def test_an_object_and_a_tensor_with_the_same_attribute_have_different_keys() -> None:
    def mods(table: Any) -> list[Mod]:
        one = types.SimpleNamespace(table=table)
        return [lambda s, b, h, q, k: s + table.shape[0], lambda s, b, h, q, k: s + one.table.shape[0]]

    tables = (torch.zeros(3), types.SimpleNamespace(shape=(3,)), types.SimpleNamespace(shape=torch.zeros(3)))
    keys = [key_of(mod) for table in tables for mod in mods(table)]
    assert len(set(keys)) == len(keys)


# ---- objects without a key ----


class WithProperty:
    @property
    def gain(self) -> float:
        return 1.0


class Computes:
    def __getattr__(self, name: str) -> float:
        return 1.0


class Intercepts:
    gain = 1.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Descriptor:
    def __get__(self, owner: Any, kind: Any = None) -> float:
        return 1.0


class DataDescriptor(Descriptor):
    def __set__(self, owner: Any, value: Any) -> None: ...


class WithDescriptors:
    gain = Descriptor()
    other = DataDescriptor()

    def method(self) -> float:
        return 1.0


class OtherDictionary:
    @property
    def __dict__(self) -> Any:
        return {"gain": 1.0}


class ComputingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


Pair = namedtuple("Pair", ["gain"])
intercepting, overriding = Intercepts(), WithDescriptors()
vars(overriding)["other"] = 2.0  # the class attribute precedes it
unset = Slotted.__new__(Slotted)
plain: Any = types.SimpleNamespace(gain=1.0, table=torch.zeros(3), parts=[1.0], inner=Settings())
count = types.SimpleNamespace(n=1)


def sets(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    count.n = 3
    return s * count.n


def adds(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    count.n += 1
    return s * count.n


def within(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (lambda: s * plain.gain)()


def aliased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    other = plain
    return s * other.gain


def rebound() -> Mod:
    owner = plain

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal owner
        result = s * owner.gain
        owner = settings
        return result

    return mod


def either(first: Any, second: Any) -> list[Mod]:
    """Functions that read an attribute of one of two values."""
    return [
        lambda s, b, h, q, k: (first if s.dim() else second).requires_grad,
        lambda s, b, h, q, k: (second if s.dim() else first).requires_grad,
        lambda s, b, h, q, k: second.requires_grad and first.requires_grad,
        lambda s, b, h, q, k: (first or second).requires_grad,
    ]


flagged = types.SimpleNamespace(requires_grad=True)

NOT_PROVABLE: dict[str, Mod] = {
    "property": lambda s, b, h, q, k: s * with_property.gain,
    "getattr": lambda s, b, h, q, k: s * computing.gain,
    "getattribute": lambda s, b, h, q, k: s * intercepting.gain,
    "descriptor": lambda s, b, h, q, k: s * overriding.gain,
    "data_descriptor": lambda s, b, h, q, k: s * overriding.other,
    "method": lambda s, b, h, q, k: s * overriding.method(),
    "dictionary": lambda s, b, h, q, k: s * other_dictionary.gain,
    "getattr_of_a_module": lambda s, b, h, q, k: s * computing_layer.gain,
    "field_of_a_named_tuple": lambda s, b, h, q, k: s * pair.gain,
    "missing": lambda s, b, h, q, k: s * plain.missing,
    "unset_slot": lambda s, b, h, q, k: s * unset.gain,
    "object": lambda s, b, h, q, k: s if plain.inner else -s,
    "attribute_of_a_tensor": lambda s, b, h, q, k: s if plain.table.requires_grad else -s,
    "whole": lambda s, b, h, q, k: s * plain.gain if plain else s,
    "compared": lambda s, b, h, q, k: s * plain.gain if plain == settings else s,
    "passed": lambda s, b, h, q, k: s * len(plain),
    "class": lambda s, b, h, q, k: s * Settings.of_class,
    "sets": sets,
    "adds": adds,
    "within": within,
    "whole_within": lambda s, b, h, q, k: s * plain.gain if (lambda: plain)() == 1 else s,
    "closure_within": (lambda o: lambda s, b, h, q, k: s * o.gain if (lambda: o)() == 1 else s)(plain),
    "of_an_argument": lambda s, b, h, q, k: s * flagged.requires_grad if s.requires_grad else s,
    "aliased": aliased,
    "rebound": rebound(),
    "builtin": lambda s, b, h, q, k: s * named.credits * credits.shape,
    **{f"either_{i}": mod for i, mod in enumerate(either(torch.zeros(3), flagged))},
    **{f"either_reversed_{i}": mod for i, mod in enumerate(either(flagged, torch.zeros(3)))},
}  # fmt: skip
with_property, computing, other_dictionary = WithProperty(), Computes(), OtherDictionary()
computing_layer, pair, named = ComputingLayer(), Pair(1.0), types.SimpleNamespace(credits=1.0)


@pytest.mark.parametrize("name", NOT_PROVABLE)
def test_a_function_that_could_run_code_or_read_more_has_no_key(name: str) -> None:
    assert Captures(NOT_PROVABLE[name]).key is None


def test_a_flag_of_a_tensor_is_not_taken_for_that_of_an_object() -> None:
    """A key does not contain whether a tensor requires a gradient."""
    both = lambda first, second: lambda s, b, h, q, k: first.requires_grad and second.requires_grad  # noqa: E731
    tensor = torch.zeros(3)
    assert key_of(both(flagged, flagged)) == key_of(both(flagged, flagged))
    assert [Captures(both(*pair)).key for pair in ((tensor, flagged), (flagged, tensor), (tensor, tensor))] == [
        None
    ] * 3
