"""What may and may not happen between the forward and the backward of FlexAttention and flex decoding."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

import flashbwd

SHAPE = Shape(seqlen_q=24, seqlen_k=24)
Attention = Callable[..., Any]
FUNCTIONS = pytest.mark.parametrize("attention", [flashbwd.flex_attention, flashbwd.flex_decoding])
ASSIGNED = "reads a variable or an attribute that was assigned between the forward and the backward"


def inputs() -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in SHAPE.tensors(torch.float64)]


def causal(limit: Callable[[], int]) -> BlockMask:
    return kit.block_mask(lambda b, h, q, k: q + limit() >= k, SHAPE, block=8)


@FUNCTIONS
def test_a_variable_of_a_loop_may_not_change_before_the_backward(attention: Attention) -> None:
    scales, total = torch.tensor([1.0, 2.0]), torch.zeros(())
    for i in range(2):
        total = total + attention(*inputs(), lambda s, b, h, q, k: s * scales[i], enable_gqa=True).sum()  # noqa: B023
    with pytest.raises(RuntimeError, match=f"score_mod {ASSIGNED}"):
        total.backward()


@FUNCTIONS
def test_a_default_argument_keeps_the_value_of_a_loop(attention: Attention) -> None:
    scales, (q, k, v) = torch.tensor([1.0, 2.0]), inputs()
    together, apart = torch.zeros((), dtype=q.dtype), torch.zeros_like(q)
    for i in range(2):
        together = together + attention(q, k, v, lambda s, b, h, q, k, i=i: s * scales[i], enable_gqa=True).sum()
        scaled = attention(q, k, v, scale=(1 + i) * q.shape[3] ** -0.5, enable_gqa=True)
        apart += torch.autograd.grad(scaled.sum(), q)[0]
    torch.testing.assert_close(torch.autograd.grad(together, q)[0], apart)


def without_key(mod: Any) -> Any:
    return functools.partial(mod)


@FUNCTIONS
@pytest.mark.parametrize("form", [lambda mod: mod, without_key])
def test_a_parameter_may_not_be_replaced_before_the_backward(attention: Attention, form: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(24))

        def forward(self) -> Any:
            return attention(*inputs(), form(lambda s, b, h, q, k: s + self.bias[k]), enable_gqa=True)

    layer = Layer()
    out = torch.func.functional_call(layer, {"bias": torch.ones(24)}, ())
    with pytest.raises(RuntimeError, match=f"score_mod {ASSIGNED}"):
        out.sum().backward()


@FUNCTIONS
def test_a_value_of_a_dict_may_not_change_before_the_backward(attention: Attention) -> None:
    window = {"n": 0}
    out = attention(*inputs(), block_mask=causal(lambda: window["n"]), enable_gqa=True)
    window["n"] = 3
    with pytest.raises(RuntimeError, match=f"mask_mod {ASSIGNED}"):
        out.sum().backward()


class Scale:
    """A modification whose code reads attributes, in the forms that have no key."""

    def __init__(self) -> None:
        self.number: Any = 1.0
        self.tensor = torch.ones(())

    def __call__(self, score: Tensor, *_: Tensor) -> Tensor:
        return score * self.number * self.tensor

    def method(self, score: Tensor, *_: Tensor) -> Tensor:
        return self(score)


def change_number(scale: Scale) -> None:
    scale.number = 2.0


def change_to_numpy(scale: Scale) -> None:
    scale.number = np.float32(2.0)


def change_tensor(scale: Scale) -> None:
    scale.tensor = scale.tensor * 2


@FUNCTIONS
@pytest.mark.parametrize("change", [change_number, change_to_numpy, change_tensor])
@pytest.mark.parametrize(
    "form",
    [lambda x: x, lambda x: x.method, lambda x: functools.partial(x), lambda x: lambda s, b, h, q, k: x.method(s)],
    ids=["object", "method", "partial", "closure"],
)
def test_an_object_may_not_change_before_the_backward(
    attention: Attention, form: Callable[[Scale], Any], change: Callable[[Scale], None]
) -> None:
    scale, given = Scale(), inputs()
    torch.autograd.grad(attention(*given, form(scale), enable_gqa=True).sum(), given)
    out = attention(*given, form(scale), enable_gqa=True)
    change(scale)
    with pytest.raises(RuntimeError, match=f"score_mod {ASSIGNED}"):
        out.sum().backward()


@FUNCTIONS
def test_a_mask_that_is_an_object_may_not_change_before_the_backward(attention: Attention) -> None:
    class Window:
        size = 3

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q - k < self.size

    window = Window()
    out = attention(*inputs(), block_mask=kit.block_mask(window, SHAPE, block=8), enable_gqa=True)
    window.size = 5
    with pytest.raises(RuntimeError, match=f"mask_mod {ASSIGNED}"):
        out.sum().backward()


@FUNCTIONS
def test_an_object_may_make_its_tensors_in_each_call(attention: Attention) -> None:
    class Table:
        def __init__(self) -> None:
            self.values = np.linspace(0.0, 1.0, 24)

        def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + torch.from_numpy(self.values)[k] + torch.tensor(self.values[3])

    given = inputs()
    grads = torch.autograd.grad(attention(*given, Table(), enable_gqa=True).sin().sum(), given)
    values = torch.linspace(0.0, 1.0, 24, dtype=torch.float64)
    plain = attention(*given, lambda s, b, h, q, k: s + values[k] + values[3], enable_gqa=True)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.sin().sum(), given))


@FUNCTIONS
def test_a_trained_tensor_may_not_become_one_without_a_gradient(attention: Attention) -> None:
    rates, scale = torch.ones(4, requires_grad=True), Scale()
    scale.tensor = rates.view(4)
    out = attention(*inputs(), lambda s, b, h, q, k: s * scale.tensor[h], enable_gqa=True)
    scale.tensor = rates.detach()
    with pytest.raises(RuntimeError, match=f"score_mod {ASSIGNED}"):
        out.sum().backward()


@FUNCTIONS
def test_each_forward_may_make_a_view_of_a_parameter(attention: Attention) -> None:
    """Sharded training assigns them to the attributes of a module."""
    rates, scale, given = torch.ones(4, requires_grad=True), Scale(), inputs()
    twice = torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        scale.tensor = rates.view(4)
        twice = twice + attention(*given, lambda s, b, h, q, k: s * scale.tensor[h], enable_gqa=True).sin().sum()
    once = attention(*given, lambda s, b, h, q, k: s * rates[h], enable_gqa=True).sin().sum()
    torch.testing.assert_close(torch.autograd.grad(twice, rates), torch.autograd.grad(2 * once, rates))


@FUNCTIONS
def test_a_mask_may_keep_another_view_of_a_parameter_than_score_mod(attention: Attention) -> None:
    rates, scale, given = torch.linspace(1, 2, 24, requires_grad=True), Scale(), inputs()
    kept = scale.tensor = rates.view(24)
    mask = kit.block_mask(lambda b, h, q, k: q - k <= kept[q] * 3, SHAPE, block=8)
    mod = lambda s, b, h, q, k: s * scale.tensor[q]  # noqa: E731
    (want,) = torch.autograd.grad(attention(*given, mod, mask, enable_gqa=True).sin().sum(), rates)
    out = attention(*given, mod, mask, enable_gqa=True)
    scale.tensor = rates.view(24)
    assert want.any()
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), rates)[0], want)


@FUNCTIONS
@pytest.mark.parametrize("makes", ["in the first call", "cached by a parametrization"])
def test_a_table_that_score_mod_makes_and_keeps_gets_its_gradient(attention: Attention, makes: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(0, 1, 4))
            self.kept: Tensor | None = None

        def table(self) -> Tensor:
            if self.kept is None:
                self.kept = self.weight.exp()
            return self.kept

    class Exponential(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    layer, given = Layer(), inputs()
    want = attention(*given, lambda s, b, h, q, k: s * layer.weight[h].exp(), enable_gqa=True).sin().sum()
    (expected,) = torch.autograd.grad(want, layer.weight)
    if makes == "in the first call":
        attention(*given, lambda s, b, h, q, k: s * layer.table()[h], enable_gqa=True).sin().sum().backward()
        got = layer.weight.grad
    else:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Exponential(), unsafe=True)
        with torch.nn.utils.parametrize.cached():
            attention(*given, lambda s, b, h, q, k: s * layer.weight[h], enable_gqa=True).sin().sum().backward()
        got = layer.parametrizations.weight.original.grad  # type: ignore[union-attr]
    torch.testing.assert_close(got, expected)


@FUNCTIONS
def test_a_trained_tensor_of_a_mask_may_not_be_written_before_the_backward(attention: Attention) -> None:
    limits = torch.nn.Parameter(torch.full((24,), 3.0))
    mask = kit.block_mask(lambda b, h, q, k: q - k <= limits[q], SHAPE, block=8)
    out = attention(*inputs(), block_mask=mask, enable_gqa=True)
    with torch.no_grad():
        limits.sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@FUNCTIONS
def test_a_backward_frees_the_tensors_that_score_mod_captures(attention: Attention) -> None:
    weight, given = torch.zeros(4, requires_grad=True), inputs()

    def attend() -> tuple[Tensor, weakref.ref[Tensor]]:
        scales = weight.exp()
        return attention(*given, lambda s, b, h, q, k: s * scales[h], enable_gqa=True), weakref.ref(scales)

    out, scales = attend()
    out.sin().sum().backward(retain_graph=True)
    assert scales() is not None
    out.cos().sum().backward()
    assert scales() is None


@FUNCTIONS
def test_a_list_and_a_dict_may_grow_before_the_backward(attention: Attention) -> None:
    biases: list[Tensor] = []
    by_length: dict[int, Tensor] = {}
    total, given = torch.zeros(()), inputs()
    for n in range(2):
        biases.append(torch.zeros(24, requires_grad=True))
        by_length[n] = torch.ones(24)
        mod = lambda s, b, h, q, k, n=n: s * by_length[n][q] + biases[n][k]  # noqa: E731
        total = total + attention(*given, mod, enable_gqa=True).sin().sum()
    first, second = torch.autograd.grad(total, biases)
    assert first.any()
    torch.testing.assert_close(first, second)


@FUNCTIONS
def test_a_long_array_may_not_change_before_the_backward(attention: Attention) -> None:
    values = np.zeros(3000)
    out = attention(*inputs(), lambda s, b, h, q, k: s + torch.tensor(values)[k + 1500], enable_gqa=True)
    values[1500] = 1
    with pytest.raises(RuntimeError, match=f"score_mod {ASSIGNED}"):
        out.sum().backward()


@FUNCTIONS
def test_others_may_set_attributes_of_a_trained_tensor(attention: Attention) -> None:
    bias = torch.nn.Parameter(torch.zeros(24))
    out = attention(*inputs(), lambda s, b, h, q, k: s + bias[k], enable_gqa=True)
    bias.main_grad = torch.zeros(24)  # type: ignore[attr-defined]
    assert torch.autograd.grad(out.sin().sum(), bias)[0].any()


@FUNCTIONS
@pytest.mark.parametrize("name", ["mask_mod", "kv_num_blocks"])
def test_the_parts_of_a_block_mask_may_not_be_replaced_before_the_backward(attention: Attention, name: str) -> None:
    mask, other = causal(lambda: 0), causal(lambda: 3)
    out = attention(*inputs(), block_mask=mask, enable_gqa=True)
    setattr(mask, name, getattr(other, name))
    with pytest.raises(RuntimeError, match="an attribute of block_mask was assigned between"):
        out.sum().backward()


def test_a_write_to_the_result_is_an_error_in_the_backward() -> None:
    out: Any = flashbwd.flex_attention(*inputs(), enable_gqa=True)
    out *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_flex_decoding_refuses_tensors_that_changed_after_the_forward() -> None:
    bias = torch.zeros(24)
    out = flashbwd.flex_decoding(*inputs(), lambda s, b, h, q, k: s + bias[k], enable_gqa=True)
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@FUNCTIONS
def test_a_checkpoint_changes_no_gradient(attention: Attention) -> None:
    """The first call of a function checks it on scalars, which autograd records."""
    rates = torch.tensor([0.5, -0.5, 1.0, 0.0], requires_grad=True)
    given = inputs()

    def run(*x: Tensor) -> Any:
        scales = rates.exp()
        return attention(*x, lambda s, b, h, q, k: s * scales[h], enable_gqa=True)

    recomputed: Any = checkpoint(run, *given, use_reentrant=False)
    found = torch.autograd.grad(recomputed.sin().sum(), [*given, rates])
    torch.testing.assert_close(found, torch.autograd.grad(run(*given).sin().sum(), [*given, rates]))


@FUNCTIONS
def test_hooks_on_saved_tensors_change_no_gradient(attention: Attention) -> None:
    rates, given = torch.tensor([0.5, -0.5, 1.0, 0.0], requires_grad=True), inputs()

    def run() -> Any:
        return attention(*given, lambda s, b, h, q, k: s * rates[h], enable_gqa=True).sin().sum()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = run()
    torch.testing.assert_close(torch.autograd.grad(out, [*given, rates]), torch.autograd.grad(run(), [*given, rates]))
