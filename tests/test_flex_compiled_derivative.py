"""Score modifications in compiled models whose derivative is not that of their operators stay PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit import compiled as kit
from kit.compiled import Compiled, counted
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from flashbwd.integrations.flex_derivative import has_the_derivative

WEIGHTS = torch.tensor([0.5, -0.7], dtype=torch.float64, requires_grad=True)
ANOTHER = "score_mod has another derivative than its operators (detach, no_grad, autograd.Function)"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with kit.on_the_cpu(monkeypatch):
        yield


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def without_gradients(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        gate = score.sigmoid()
    return score * WEIGHTS[h] + gate


OTHERS: dict[str, Any] = {
    "straight through": lambda s, b, h, q, k: s + (s.round() - s).detach(),
    "detached factor": lambda s, b, h, q, k: s * WEIGHTS.detach()[h] * WEIGHTS[h],
    "detached far away": lambda s, b, h, q, k: torch.where(q - k > 200, s.detach(), s) * WEIGHTS[h],
    "no_grad": without_gradients,
    "autograd.Function": lambda s, b, h, q, k: HalfGradient.apply(s) * WEIGHTS[h],
}
SAME: dict[str, Any] = {
    "detached number": lambda s, b, h, q, k: s * WEIGHTS[h] * torch.tensor(0.5, dtype=torch.float64).detach(),
    "rounded": lambda s, b, h, q, k: (s.round() + s).to(torch.bfloat16) - (WEIGHTS[h] * s).to(torch.bfloat16),
    "beyond its domain": lambda s, b, h, q, k: torch.where(s > 0, (s.abs() + 1).log(), s) * WEIGHTS[h],
}


def gradients(function: Any, mod: Any) -> tuple[Tensor, ...]:
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 2, 16, 4, dtype=torch.float64).unbind()]
    loss = function(lambda q, k, v: flex_attention(q, k, v, mod).sin().sum())(*inputs)
    return torch.autograd.grad(loss, [*inputs, WEIGHTS], allow_unused=True)


@pytest.mark.parametrize("name", OTHERS)
def test_a_function_with_another_derivative_stays_pytorchs(name: str) -> None:
    torch.manual_seed(0)
    found = gradients(Compiled, OTHERS[name])
    assert (counted().hits, counted().fallbacks) == (0, {ANOTHER: 1})
    torch.manual_seed(0)
    torch.testing.assert_close(found, gradients(lambda function: Compiled(function, lambda graph: None), OTHERS[name]))


@pytest.mark.parametrize("name", SAME)
def test_a_function_with_the_derivative_of_its_operators_is_replaced(name: str) -> None:
    gradients(Compiled, SAME[name])
    assert (counted().hits, counted().fallbacks) == (1, {})


def graph_of(function: Any, *tensors: Tensor) -> fx.GraphModule:
    indices = torch.zeros(4, dtype=torch.int32).unbind()
    numbers = torch.zeros(2, dtype=torch.float64).unbind()
    return make_fx(lambda *x: function(*x))(numbers[0], *indices, *tensors)


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1.2, False)])
def test_the_sum_of_a_captured_tensors_gradient_is_compared(factor: float, same: bool) -> None:
    table, index = torch.ones(3, 5, dtype=torch.float64), torch.ops.aten.index
    modification = graph_of(lambda s, b, h, q, k, t: s * index(t, [h, k]), table)

    def derivative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, t: Tensor) -> list[Any]:
        zeros = torch.zeros(3, 5, dtype=torch.float64)
        of_table = torch.ops.aten.index_put(zeros, [h, k], grad * s * factor, True)
        return [grad * index(t, [h, k]), None, None, None, None, of_table]

    joint = graph_of(derivative, torch.zeros((), dtype=torch.float64), table)
    assert has_the_derivative(modification, joint, [table]) == same


def test_the_graphs_of_a_gpu_are_evaluated_on_the_host() -> None:
    limit = lambda s, b, h, q, k: torch.where(q >= k, s, torch.full((), 2.0, dtype=s.dtype)) * 3  # noqa: E731
    derivative = lambda s, b, h, q, k, grad: [torch.where(q >= k, grad * 3, torch.scalar_tensor(0.0))] + [None] * 4  # noqa: E731
    graphs = [graph_of(limit), graph_of(derivative, torch.zeros((), dtype=torch.float64))]
    assert has_the_derivative(*graphs, [])
    for graph in graphs:
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | {"device": torch.device("cuda")}
    assert all("cuda" in str(graph.graph) for graph in graphs)
    assert has_the_derivative(*graphs, [])
