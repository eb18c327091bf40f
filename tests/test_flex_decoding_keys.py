"""Modifications with a key are recognised without a trace; all others are traced at every call."""

from __future__ import annotations

import functools
import gc
import math
from typing import Any

import pytest
import torch
from kit.changing import CHANGES, Config, helper, layer
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks

from flashbwd.mods import kernels
from flashbwd.mods.captures import Captures, Recent, Slots

table = torch.zeros(3)
WINDOW = 128


def plus(*values: Any) -> Any:
    a, b = (*values, 0.0)[:2]
    return lambda s, b_, h, q, k: s + a + b


def keys_before(bound: Any) -> Any:
    return lambda b, h, q, k: k < bound + q


def key_of(*mods: Any) -> tuple[Any, ...]:
    key = Captures(*mods).key
    assert key is not None
    return key


@pytest.fixture
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without records, and let kernels accept tensors on the host."""
    monkeypatch.setattr(kernels, "_known", Recent(16))
    monkeypatch.setattr(kernels, "_modifications", Recent(16))
    monkeypatch.setattr(kernels, "Slots", functools.partial(Slots, device="cpu"))


def computes(score_mod: Any, mask_mod: Any = None) -> kernels.Modification:
    return kernels.modification_of(score_mod, mask_mod)[0]


def never(*_: Any) -> Any:
    pytest.fail("traced")


# ---- functions that have a key ----


def test_the_key_contains_the_metadata_of_a_tensor_but_not_its_values() -> None:
    one = torch.zeros(3, 4)
    assert key_of(plus(one)) == key_of(plus(torch.ones(3, 4)))
    others = [
        torch.zeros(3, 5),
        torch.zeros(3, 4, 1),
        torch.zeros(4, 3).T,
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 4, device="meta"),
        nn.Parameter(one),
    ]
    for other in others:
        assert key_of(plus(other)) != key_of(plus(one))


def test_the_key_tells_whether_two_tensors_are_the_same_one() -> None:
    one, two = torch.zeros(3), torch.zeros(3)
    assert key_of(plus(one, one)) == key_of(plus(two, two)) != key_of(plus(one, two))
    assert Captures(plus(one, one)).tensors == [one]
    captures = Captures(plus(plus(one), two), plus(one))
    assert [captures.position(tensor) for tensor in (one, two, table)] == [0, 1, None]


def test_the_key_contains_the_values_of_constants() -> None:
    values = [
        2.0,
        3.0,
        2,
        True,
        1,
        0.0,
        -0.0,
        None,
        "2",
        (2.0,),
        (2.0, 2.0),
        ((2.0,), 2.0),
        torch.float32,
        torch,
        torch.sin,
        math.sin,
    ]
    keys = [key_of(plus(value)) for value in values]
    assert len(set(keys)) == len(keys)
    assert keys == [key_of(plus(value)) for value in values]
    assert key_of(plus(2.0), None) != key_of(None, plus(2.0))


def test_the_key_contains_the_functions_that_a_function_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(plus(plus(table, (1, plus(2.0)))))
    assert key_of(plus(plus(table, (1, plus(2.0))))) == before
    assert key_of(plus(plus(table, (1, plus(3.0))))) != before
    assert key_of(plus(plus(torch.zeros(4), (1, plus(2.0))))) != before
    assert key_of(plus(lambda s, b, h, q, k: s)) != key_of(plus(lambda s, b, h, q, k: -s))


def test_the_key_contains_global_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        inner = lambda: torch.where(q - k < WINDOW, s, table[h])  # noqa: E731
        return inner()

    before = key_of(mod)
    monkeypatch.setitem(globals(), "WINDOW", 127)
    assert key_of(mod) != before
    monkeypatch.undo()
    assert key_of(mod) == before
    monkeypatch.setitem(globals(), "table", torch.zeros(4))
    assert key_of(mod) != before
    monkeypatch.setitem(globals(), "torch", math)
    assert key_of(mod) != before
    monkeypatch.setitem(globals(), "torch", object())
    assert Captures(mod).key is None


def test_the_key_contains_default_arguments() -> None:
    def mod(first: Any, second: Any) -> Any:
        return lambda s, b, h, q, k, f=first, *, g=second: s * f + g

    keys = [key_of(mod(*values)) for values in ((1, 2), (1, 3), (2, 2), (table, 2), (1, table))]
    assert len(set(keys)) == len(keys)
    without = mod(1, 2)
    without.__defaults__ = None
    assert key_of(without) not in keys


def test_the_key_contains_the_names_of_keyword_defaults() -> None:
    def mod(**defaults: Any) -> Any:
        def of(s: Any, b: Any, h: Any, q: Any, k: Any, *, scale: float = 1.0, shift: float = 0.0) -> Any:
            return s * scale + shift

        of.__kwdefaults__ = defaults
        return of

    assert key_of(mod(scale=2.0, shift=3.0)) == key_of(mod(scale=2.0, shift=3.0))
    assert key_of(mod(scale=2.0, shift=3.0)) != key_of(mod(shift=2.0, scale=3.0))


def test_the_key_contains_the_default_dtype() -> None:
    mod = lambda s, b, h, q, k: s + k * 1.0  # noqa: E731
    before = key_of(mod)
    torch.set_default_dtype(torch.float64)
    try:
        assert key_of(mod) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_masks_that_pytorch_combines_have_a_key() -> None:
    def both(start: Any, end: Any) -> Any:
        return and_masks(lambda b, h, q, k: k < end[b], lambda b, h, q, k: k >= start)

    assert key_of(both(3, table)) == key_of(both(3, torch.ones(3)))
    assert key_of(both(3, table)) != key_of(both(4, table))


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: {"a": x}, lambda x: (1, [x]), lambda x: {x: 1}])
def test_the_key_contains_the_items_of_lists_and_dicts(make: Any) -> None:
    assert key_of(plus(make(2))) == key_of(plus(make(2)))
    assert key_of(plus(make(2))) != key_of(plus(make(3)))


def test_a_key_ignores_attributes_that_others_gave_a_tensor() -> None:
    """Such as those of a library for distributed training."""
    parameter = nn.Parameter(torch.zeros(3))
    before = key_of(plus(parameter))
    parameter.main_grad = torch.zeros(3)  # type: ignore[attr-defined]
    assert key_of(plus(parameter)) == before
    assert Captures(lambda s, b, h, q, k: s + parameter.main_grad[h]).key is None  # type: ignore[attr-defined]


# ---- functions without a key ----


def with_attribute() -> None: ...


with_attribute.shape = 2.0  # type: ignore[attr-defined]


def imports(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    import string

    return s * len(string.ascii_letters)


def named_tensor() -> Tensor:
    tensor = torch.zeros(3)
    tensor.pi = 3  # type: ignore[attr-defined]
    return tensor


def itself(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return itself(s, b, h, q, k)


NOT_PROVABLE: dict[str, Any] = {
    "class": lambda s, b, h, q, k: s * Config.window,
    "instance": lambda s, b, h, q, k: s * layer.own if layer else s,
    "property": lambda s, b, h, q, k: s * layer.gain,
    "method": layer.of_class,
    "method_called": lambda s, b, h, q, k: s * layer.read(),
    "helper": lambda s, b, h, q, k: s * helper(),
    "long_list": plus([table] * 65),
    "long_dict": plus(dict.fromkeys(range(65), table)),
    "set": plus({1, 2}),
    "partial": functools.partial(lambda f, s, b, h, q, k: s * f, 2.0),
    "callable": nn.Identity(),
    "getattr": lambda s, b, h, q, k: s * getattr(table, "shape")[0],  # noqa: B009
    "other_module": lambda s, b, h, q, k: s * gc.get_count()[0],
    "state_of_torch": lambda s, b, h, q, k: s * torch.get_num_threads(),
    "attribute_of_a_function": lambda s, b, h, q, k: s * with_attribute.shape,  # type: ignore[attr-defined]
    "builtin": plus(torch.get_num_threads),
    "attribute_of_a_tensor": plus(named_tensor()),
    "subclass": plus(type("Sub", (Tensor,), {})(3)),
    "sparse": plus(torch.zeros(3).to_sparse()),
    "import": imports,
    "endless": itself,
}


@pytest.mark.parametrize("name", NOT_PROVABLE)
def test_a_function_that_reads_changeable_state_has_no_key(name: str) -> None:
    assert Captures(NOT_PROVABLE[name]).key is None
    assert Captures(None, NOT_PROVABLE[name]).tensors == []


def test_a_function_with_an_unbound_variable_has_no_key() -> None:
    if gc is None:
        unbound = 1
    assert Captures(lambda s, b, h, q, k: s + unbound).key is None


# ---- lookup ----


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("no_records")
def test_a_lookup_sees_changes_of_values_that_a_function_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mods, change, same = CHANGES[name]
    before = computes(*mods())
    assert computes(*mods()) is before
    change(monkeypatch)
    assert computes(*mods()) is computes(*same()) is not before
    monkeypatch.undo()


@pytest.mark.usefixtures("no_records")
def test_a_function_that_is_traced_again_gets_the_same_record() -> None:
    first = computes(layer.of_class)
    records = torch.ops.flashbwd.decoding_modifications()
    assert first.source is not None
    assert computes(layer.of_class) is first
    assert computes(lambda s, b, h, q, k: s + 0.5 * torch.sin(k)) is first
    assert torch.ops.flashbwd.decoding_modifications() == records


@pytest.mark.usefixtures("no_records")
def test_a_known_function_is_not_traced_and_uses_the_tensors_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (torch.zeros(4, dtype=torch.int32) for _ in range(3))

    def mod(x: Tensor, y: Tensor) -> Any:
        return lambda s, b, h, q, k: s + y[k] + x[h] * 2

    found, tensors = kernels.modification_of(mod(one, two), None)
    assert [id(tensor) for tensor in tensors] == [id(two), id(one)]  # in the order of the kernel's slots
    monkeypatch.setattr(kernels, "trace", never)
    again, tensors = kernels.modification_of(mod(three, one), None)
    assert again is found
    assert [id(tensor) for tensor in tensors] == [id(one), id(three)]


# ---- records have a bound ----


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize("built_in", [True, False], ids=["built_in", "compiled"])
def test_the_number_of_records_is_bounded_if_a_constant_changes_at_each_call(built_in: bool) -> None:
    gc.collect()
    before = torch.ops.flashbwd.decoding_modifications()
    for step in range(100):
        if built_in:
            computes(None, keys_before(step))
        else:
            computes(lambda s, b, h, q, k, step=step: torch.sin(s) + step)
    gc.collect()
    assert len(kernels._known) <= 16 and len(kernels._modifications) <= 16
    assert torch.ops.flashbwd.decoding_modifications() - before <= 16


@pytest.mark.usefixtures("no_records")
def test_a_record_in_use_survives_its_eviction() -> None:
    held = computes(None, keys_before(1000))
    for step in range(100):
        computes(None, keys_before(step))
    gc.collect()
    before = torch.ops.flashbwd.decoding_modifications()
    del held
    gc.collect()
    assert torch.ops.flashbwd.decoding_modifications() == before - 1


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    recent: Recent[int] = Recent(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)
