"""Each captured tensor gets a slot, in the order of first use, up to the limits of a kernel."""

from __future__ import annotations

import math
import operator as python_operators
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbwd.mods import captures, kernels, nvrtc, operators
from flashbwd.mods.captures import CannotEmitError, Captures, FixedMod, Recent, Slots
from flashbwd.mods.row import Row

CSRC = Path(__file__).resolve().parents[1] / "csrc"


def slots_of(*tensors: Tensor) -> Slots:
    """The slots of a function that captures these tensors."""
    return Slots(Captures(FixedMod("mod", lambda arguments, given: given[0], tensors)), "cpu")


def test_a_tensor_has_the_slot_of_its_first_use() -> None:
    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    slots = slots_of(a, b, c)
    assert [slots.of(x, "mod") for x in (b, a, b, c, a)] == [0, 1, 0, 2, 1]
    assert slots.sources == slots.positions() == [1, 0, 2]
    assert all(got is want for got, want in zip(slots.tensors(), (b, a, c), strict=True))


def test_a_tensor_that_was_not_captured_is_its_own_source() -> None:
    a, other = torch.zeros(1), torch.zeros(2)
    slots = slots_of(a)
    assert [slots.of(x, "mod") for x in (other, a, other)] == [0, 1, 0]
    assert slots.tensors()[0] is other
    assert slots.positions() is None


def test_equal_tensors_have_separate_slots() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    slots = slots_of(a, b)
    assert [slots.of(x, "mod") for x in (a, b)] == [0, 1]


def test_a_modification_may_capture_as_many_tensors_as_a_kernel_takes() -> None:
    tensors = [torch.zeros(1) for _ in range(17)]
    slots = slots_of(*tensors)
    assert [slots.of(x, "mod") for x in tensors[:16]] == list(range(16))
    with pytest.raises(CannotEmitError, match="score_mod captures more than 16 tensors"):
        slots.of(tensors[16], "score_mod")
    assert slots.of(tensors[15], "mod") == 15  # tensors with a slot are still found


def test_tensors_have_at_most_five_dimensions() -> None:
    five, six = torch.zeros(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 1, 1)
    slots = slots_of(five, six)
    assert slots.of(five, "mod") == 0
    with pytest.raises(CannotEmitError, match="mask_mod captures a tensor of 6 dimensions, more than 5"):
        slots.of(six, "mask_mod")


def test_tensors_of_another_device_are_refused() -> None:
    with pytest.raises(CannotEmitError, match="score_mod captures a tensor on meta"):
        slots_of().of(torch.zeros(1, device="meta"), "score_mod")


@pytest.mark.parametrize(
    ("header", "name", "limit"),
    [
        ("mods/captured_tensor.h", "kMaxDims", captures.MAX_DIMS),
        ("mods/captured_tensor.h", "kMaxCaptured", captures.MAX_CAPTURED),
        ("decoding/params.h", "kModRowBytes", operators.ROW_BYTES),
    ],
)
def test_limits_in_python_equal_those_of_the_kernels(header: str, name: str, limit: int) -> None:
    found = re.search(rf"constexpr int {name} = (\d+);", (CSRC / header).read_text())
    assert found is not None
    assert int(found[1]) == limit


def nested(depth: int) -> Any:
    """A modification in which ``depth`` functions call one another."""

    def innermost(score: Tensor, *index: Tensor) -> Tensor:
        return score

    function = innermost
    for _ in range(depth - 1):

        def outer(score: Tensor, *index: Tensor, inner: Any = function) -> Tensor:
            return inner(score, *index)  # type: ignore[no-any-return]

        function = outer
    return function


def test_functions_have_a_key_to_a_bounded_depth() -> None:
    has_key = [Captures(nested(depth)).key is not None for depth in range(1, 9)]
    assert has_key[0] and not has_key[-1]
    assert has_key == sorted(has_key, reverse=True)


def chain(depth: int) -> Any:
    """Tuples inside each other."""
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(("depth", "known"), [(7, True), (8, True), (9, False)])
def test_tuples_have_a_key_to_a_depth_of_eight(depth: int, known: bool) -> None:
    assert (Captures(chain(depth)).key is not None) is known


def test_a_tuple_and_its_items_have_different_keys() -> None:
    assert Captures((1, 2)).key != Captures(1, 2).key
    assert Captures(((1,), 2)).key != Captures((1, (2,))).key


def test_functions_without_a_key_hold_no_tensors() -> None:
    captured = Captures(torch.zeros(1), object())
    assert captured.key is None
    assert captured.tensors == []


def test_a_tensor_with_an_attribute_of_a_known_name_or_another_layout_has_no_key() -> None:
    marked = torch.zeros(1)
    marked.pi = 1  # type: ignore[attr-defined]
    assert Captures(torch.zeros(1)).key is not None
    assert Captures(marked).key is None
    assert Captures(torch.zeros(2, 2).to_sparse()).key is None


@pytest.mark.parametrize("function", [torch.exp, torch.nn.functional.gelu, math.exp])
def test_functions_of_pytorch_and_math_have_a_key(function: Any) -> None:
    assert Captures(function).key is not None


def test_a_function_of_another_module_has_no_key_whatever_its_name() -> None:
    assert python_operators.neg.__name__ == torch.neg.__name__
    assert Captures(python_operators.neg).key is None


def test_zero_and_minus_zero_are_different_constants() -> None:
    assert Captures(0.0).key != Captures(-0.0).key


def test_the_number_of_recent_entries_is_bounded_and_reading_renews_an_entry() -> None:
    recent: Recent[str] = Recent(2)
    recent.put("a", "A")
    recent.put("b", "B")
    assert len(recent) == 2
    assert recent.get("a") == "A"
    recent.put("c", "C")
    assert [recent.get(key) for key in "abc"] == ["A", None, "C"]


@pytest.mark.parametrize("warps", [4, 8])
def test_a_kernel_is_compiled_for_the_threads_of_its_warps(warps: int) -> None:
    source = kernels.kernel_source("", kernels.Tile(64, 16, warps, torch.bfloat16, True, 0))
    assert f"__launch_bounds__({32 * warps}, 1)" in source
    assert f"split_kv<64, 16, {warps}," in source


def test_a_source_that_does_not_compile_leaves_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise nvrtc.CompilationError("no NVRTC here")

    monkeypatch.setattr(nvrtc, "kernel_of", fails)
    modification = kernels.Modification(torch.ops.flashbwd.decoding_modification([], []), "source")
    with pytest.raises(kernels.NoKernelError, match="no NVRTC here"):
        kernels._build(modification, "source", kernels.Tile(64, 16, 4, torch.bfloat16, True, 0))
    assert modification.tiles == set()


@pytest.mark.parametrize(
    ("dtypes", "taken"),
    [
        ([torch.float32] * 5, "0123"),
        ([torch.float64, torch.float64, torch.float32], "01"),
        ([torch.float64, torch.int32, torch.float64, torch.int32], "013"),
        ([torch.bfloat16] * 5, "0123"),  # stored as float
        ([torch.bool] * 17, "0123456789101112131415"),
    ],
)
def test_values_are_stored_per_row_while_they_fit_into_its_bytes(dtypes: list[torch.dtype], taken: str) -> None:
    row = Row()
    fields = row.take("score", ["work"], {str(i): dtype for i, dtype in enumerate(dtypes)})
    assert "".join(fields) == taken
    assert all(f"score_{i};" in row.text() for i in fields)


def test_two_functions_share_the_bytes_of_a_row() -> None:
    row = Row()
    assert row.text() == ""
    assert list(row.take("score", [], {"a": torch.float64})) == ["a"]
    assert list(row.take("mask", [], {"b": torch.float32, "c": torch.float64, "d": torch.float32})) == ["b", "d"]
