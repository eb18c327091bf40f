"""flashbwd.compile_mods: modifications whose tensors are named arguments."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flashbwd
from flashbwd.mods import kernels
from flashbwd.mods.captures import Recent, Slots

SHAPE = Shape(batch=2, heads=4, heads_kv=4, seqlen_q=3, seqlen_k=200, head_dim=16, head_dim_v=16)


class Layer:
    def __init__(self, gain: float) -> None:
        self.gain = gain
        self.hidden = torch.zeros(4)

    def biased(self, s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Tensor) -> Any:
        return s + self.gain * table[h, k]

    def reads_hidden(self, s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Tensor) -> Any:
        return s + self.hidden[h] + table[h, k]

    def before(self, b: Any, h: Any, q: Any, k: Any, length: Tensor) -> Any:
        return k < length[b] + 0 * int(self.gain)


def handle() -> Any:
    layer = Layer(2.0)
    return flashbwd.compile_mods(layer.biased, layer.before)


def tensors_of(device: str) -> tuple[Tensor, Tensor]:
    """A table and lengths."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(4, SHAPE.seqlen_k, generator=generator)
    return table.to(device), torch.tensor([150, 33], dtype=torch.int32, device=device)


def plain(table: Tensor) -> Any:
    return lambda s, b, h, q, k: s + 2.0 * table[h, k]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that are traced from now on. Kernels accept tensors on the host."""
    names: list[str] = []
    real = kernels.trace
    monkeypatch.setattr(kernels, "trace", lambda *args: names.append(args[0]) or real(*args))
    monkeypatch.setattr(kernels, "_known", Recent(16))
    monkeypatch.setattr(kernels, "Slots", functools.partial(Slots, device="cpu"))
    return names


# ---- what a handle computes ----


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_output_and_gradients_are_those_of_plain_functions(device: str) -> None:
    mods = handle()
    length = tensors_of(device)[1]
    for seed in range(2):
        q, k, v = (t.requires_grad_() for t in SHAPE.tensors(torch.float32, device, seed))
        table = (tensors_of(device)[0] + seed).requires_grad_()
        score_mod, mask_mod = mods(table=table, length=length)
        mask = create_block_mask(mask_mod, SHAPE.batch, None, SHAPE.seqlen_q, SHAPE.seqlen_k, device=device)
        out = flashbwd.flex_decoding(q, k, v, score_mod, mask)
        found = torch.autograd.grad(out.square().sum(), (q, k, v, table))
        exact = [t.detach().double().requires_grad_() for t in (q, k, v, table)]
        dense = kit.dense_mask(lambda b, h, q, k: k < length[b], SHAPE, device)
        expected, _ = kit.oracle(SHAPE, *exact[:3], plain(exact[3]), dense)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        for got, want in zip(found, torch.autograd.grad(expected.square().sum(), exact), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_a_handle_works_inside_a_compiled_graph() -> None:
    mods = handle()
    q, k, v = SHAPE.tensors(torch.float32, "cpu")
    table = tensors_of("cpu")[0].requires_grad_()

    def attend(table: Tensor) -> Any:
        return flashbwd.flex_decoding(q, k, v, mods(table=table, length=torch.tensor([1, 1])).score_mod)

    expected = attend(table)
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(table)
    torch.testing.assert_close(found, expected)
    (want,) = torch.autograd.grad(expected.sum(), table)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), table)[0], want)


def test_the_functions_have_the_number_of_parameters_that_pytorch_expects() -> None:
    table, length = tensors_of("cpu")
    score_mod, mask_mod = handle()(table=table, length=length)
    assert [len(inspect.signature(mod).parameters) for mod in (score_mod, mask_mod)] == [5, 4]


def test_a_name_that_both_functions_have_is_one_tensor() -> None:
    mods = flashbwd.compile_mods(lambda s, b, h, q, k, x, y: s * x[h] + y[h], lambda b, h, q, k, *, y: k < y[h])
    assert mods.tensor_names == ("x", "y")
    assert flashbwd.compile_mods()() == (None, None)


# ---- when a handle is traced ----


def test_tensors_of_equal_shape_and_dtype_are_traced_once(traced: list[str]) -> None:
    mods = handle()
    table, length = tensors_of("cpu")
    found, taken = kernels.modification_of(*mods(table=table, length=length))
    assert traced == ["score_mod", "mask_mod"]
    others = table + 1, length + 1
    again, taken = kernels.modification_of(*mods(table=others[0], length=others[1]))
    assert traced == ["score_mod", "mask_mod"]
    assert again is found
    assert {id(tensor) for tensor in taken} == {id(tensor) for tensor in others}
    kernels.modification_of(*mods(table=table[:, :64], length=length))
    assert traced == ["score_mod", "mask_mod"] * 2


def test_another_handle_of_the_same_functions_is_traced_again(traced: list[str]) -> None:
    table = tensors_of("cpu")[0]
    layer = Layer(2.0)
    first, _ = kernels.modification_of(flashbwd.compile_mods(layer.biased)(table=table).score_mod, None)
    layer.gain = 3.0
    second, _ = kernels.modification_of(flashbwd.compile_mods(layer.biased)(table=table).score_mod, None)
    literal, _ = kernels.modification_of(lambda s, b, h, q, k: s + 3.0 * table[h, k], None)
    assert second is literal is not first


@pytest.mark.usefixtures("traced")
def test_a_tensor_that_is_not_named_raises() -> None:
    mods = flashbwd.compile_mods(Layer(1.0).reads_hidden)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="compile_mods reads a tensor that is not one of its named arguments"):
            kernels.modification_of(mods(table=tensors_of("cpu")[0]).score_mod, None)


@pytest.mark.gpu
def test_warm_calls_with_objects_trace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mods = handle()
    tensors = SHAPE.tensors(torch.bfloat16, "cuda")
    table, length = tensors_of("cuda")
    for step in range(3):
        if step == 1:
            monkeypatch.setattr(kernels, "trace", lambda *_: pytest.fail("traced"))
        table = table + 1
        with torch.no_grad():
            out = flashbwd.flex_decoding(*tensors, mods(table=table, length=length).score_mod)
        expected, _ = kit.oracle(SHAPE, *tensors, plain(table))
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


# ---- errors ----


def few(s: Any, b: Any, h: Any, q: Any) -> Any:
    return s


def by_keyword(s: Any, b: Any, h: Any, q: Any, *, k: Any) -> Any:
    return s


@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "message"),
    [
        (3.0, None, "score_mod is a float, expected a function"),
        (few, None, r"score_mod takes .*expected \(score, b, h, q_idx, kv_idx, \*, tensors\)"),
        (by_keyword, None, r"score_mod takes .*expected \(score, b, h, q_idx, kv_idx, \*, tensors\)"),
        (None, lambda b, h, q: q > b, r"mask_mod takes .*expected \(b, h, q_idx, kv_idx, \*, tensors\)"),
        (lambda s, b, h, q, k, *more: s, None, r"score_mod takes \*more, expected each tensor by its own name"),
        (lambda s, b, h, q, k, **more: s, None, r"score_mod takes \*\*more, expected each tensor by its own name"),
        (lambda s, b, h, q, k, x=1: s, None, "score_mod has a default for x, expected a tensor from each call"),
    ],
)
def test_a_function_with_other_parameters_is_refused(score_mod: Any, mask_mod: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"flashbwd: {message}"):
        flashbwd.compile_mods(score_mod, mask_mod)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": None}, "table is a NoneType, expected a tensor"),
        ({"bias": torch.zeros(1)}, "bias is not a tensor of these functions, expected table, length"),
        ({"length": ...}, "length is missing, expected tensors table, length"),
    ],
)
def test_the_error_names_a_wrong_tensor(change: dict[str, Any], message: str) -> None:
    table, length = tensors_of("cpu")
    given = {name: value for name, value in ({"table": table, "length": length} | change).items() if value is not ...}
    with pytest.raises(ValueError, match=f"flashbwd: {message}"):
        handle()(**given)
