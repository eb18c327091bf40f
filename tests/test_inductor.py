"""Passes over Inductor's graphs replace the nodes that they should, no others, and do not change gradients."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import tolerance
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import layer_norm, rms_norm
from torch.profiler import ProfilerActivity, profile

import flashbwd
from flashbwd.bench import block_peers
from flashbwd.bench.cases import BlockCase
from flashbwd.integrations import inductor


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pass replace norms of CPU tensors too, which the reference computes."""
    monkeypatch.setattr(inductor, "_runs_on", lambda device: True)


def block_inputs(shape: str, dtype: str = "fp32", device: str = "cpu", seqlen: int = 24) -> block_peers.BlockInputs:
    width, hidden = (32, 48) if device == "cpu" else (256, 512)
    case = BlockCase("test", shape, 2, seqlen, width, 4, 4 if shape == "gpt" else 2, hidden, dtype)
    return block_peers.make_inputs(case, torch.device(device), 0)


def gradients(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(call(leaf), [leaf, *module.parameters()], dout)


# ---- norms ----


def taken(function: Callable[..., Any], *tensors: Tensor) -> int:
    """The number of norms of a function that the pass replaces. Asserts that results and gradients do not change."""
    found: list[int] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        inductor.NormsOfBranches()(module.graph)
        module.graph.lint()
        module.recompile()
        replaced = set(inductor._NORMS.values())
        found.append(sum(node.target in replaced for node in module.graph.nodes))
        return lookup_backend("aot_eager")(module, inputs)

    def run(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        out = call(*leaves)
        with_gradient = [leaf for leaf in leaves if leaf.requires_grad]
        return (out, *torch.autograd.grad(out.square().sum(), with_gradient, materialize_grads=True))

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    if any(t.requires_grad for t in tensors):
        for got, want in zip(run(compiled), run(function), strict=True):
            torch.testing.assert_close(got, want)
    else:
        torch.testing.assert_close(compiled(*tensors), function(*tensors))
    return sum(found)


def rows(*shape: int, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("shape", "norms"), [("gpt", 2), ("llama", 1)])
def test_norms_with_one_user_in_a_block_are_replaced(shape: str, norms: int) -> None:
    x = block_inputs(shape)
    assert taken(x.block, x.x) == norms


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, g, b: x + rms_norm(x, (16,), g, 1e-3) * 2,
        lambda x, g, b: rms_norm(x, (16,)).sin() + x * 3,
        lambda x, g, b: layer_norm(x, (16,), g, b).cos() + x,
        lambda x, g, b: layer_norm(x, (16,), g, bias=b, eps=1e-2).cos() + x,
        lambda x, g, b: layer_norm(x, (16,), g).cos() + x,
    ],
)
def test_norms_are_replaced_for_all_forms_of_their_arguments(function: Callable[..., Tensor]) -> None:
    assert taken(function, rows(3, 5, 16), rows(16), rows(16)) == 1


@pytest.mark.usefixtures("on_the_cpu")
def test_two_norms_of_the_same_rows_are_both_replaced() -> None:
    def two(x: Tensor, g: Tensor) -> Tensor:
        return rms_norm(x, (16,), g).sin() + layer_norm(x, (16,), g).cos() + x

    assert taken(two, rows(3, 16), rows(16)) == 2


@pytest.mark.usefixtures("on_the_cpu")
def test_norms_outside_of_the_pattern_are_not_replaced() -> None:
    def no_sum(x: Tensor, g: Tensor) -> Tensor:
        return rms_norm(x, (16,), g).sin()

    def read_before(x: Tensor, g: Tensor) -> Tensor:
        y = x.cos()
        return rms_norm(x, (16,), g).sin() + y

    def two_readers(x: Tensor, g: Tensor) -> Tensor:
        z = rms_norm(x, (16,), g)
        return x + z.sin() * z.cos()

    def branch(x: Tensor, g: Tensor) -> Tensor:
        return x + rms_norm(x, (16,), g).sin()

    def two_dimensions(x: Tensor, g: Tensor) -> Tensor:
        return x + rms_norm(x, (5, 16), g).sin()

    for function in (no_sum, read_before, two_readers):
        assert taken(function, rows(5, 16), rows(16)) == 0
    assert taken(branch, rows(5, 16, grad=False), rows(16, grad=False)) == 0
    assert taken(two_dimensions, rows(3, 5, 16), rows(5, 16)) == 0
    assert taken(branch, rows(5, 16).detach().bfloat16().requires_grad_(), rows(16)) == 0


def test_norms_on_the_cpu_are_not_replaced() -> None:
    x = block_inputs("gpt")
    assert taken(x.block, x.x) == 0


@pytest.mark.usefixtures("on_the_cpu")
def test_inductor_accepts_the_options() -> None:
    x = block_inputs("llama")
    compiled = torch.compile(x.block, fullgraph=True, options=inductor.options())
    for got, want in zip(
        gradients(compiled, x.block, x.x, x.dout), gradients(x.block, x.block, x.x, x.dout), strict=True
    ):
        torch.testing.assert_close(got, want)


# ---- attention ----

AFTER_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
IN_ONE = torch.ops.flashbwd.attention_backward_in_one.default


def graph_that_joins(
    order: tuple[int, ...] = (0, 1, 2),
    dim: int = 2,
    dropout_p: float = 0.0,
    biased: bool = False,
    read_again: bool = False,
    by_heads: bool = False,
) -> fx.Graph:
    """A graph that concatenates the gradients of a backward with batch 2, 4 query heads, 2 KV heads and dimension 8."""
    graph = fx.Graph()

    def node(value: Tensor | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta["val"] = value
        return made

    def heads(count: int) -> Tensor:
        return torch.empty(2, 5, count, 8, device="meta").transpose(1, 2)

    inputs = [graph.placeholder(name) for name in ("dout", "q", "k", "v", "out", "lse", "seed", "offset", "bias")]
    bias = inputs.pop()
    args = (*inputs, bias if biased else None, None, None, 5, 5, dropout_p, True)
    backward = node(None, AFTER_CUDNN, *args, scale=0.25)
    parts, elements = [], []
    for i in order:
        value = heads(4 if i == 0 else 2)
        elements.append(node(value, operator.getitem, backward, i))
        part = node(value.transpose(1, 2), torch.ops.aten.permute.default, elements[-1], [0, 2, 1, 3])
        if by_heads:
            part = elements[-1]
        flat = torch.empty(2, 5, value.shape[1] * 8, device="meta")
        parts.append(node(flat, torch.ops.aten.view.default, part, list(flat.shape)))
    joined = node(torch.empty(2, 5, 64, device="meta"), torch.ops.aten.cat.default, parts, dim)
    graph.output((joined, elements[0]) if read_again else joined)
    return graph


def test_gradients_that_a_graph_concatenates_are_written_to_one_tensor() -> None:
    graph = graph_that_joins()
    inductor.GradientsInOne()(graph)
    graph.lint()
    (call,) = (node for node in graph.nodes if node.op == "call_function")
    assert call.target is IN_ONE and call.meta["val"].shape == (2, 5, 64)
    assert [str(arg) for arg in call.args] == ["dout", "q", "k", "v", "out", "lse", "0.25", "True"]


@pytest.mark.parametrize(
    "other",
    [
        {"order": (1, 0, 2)},
        {"dim": 1},
        {"dropout_p": 0.1},
        {"biased": True},
        {"read_again": True},
        {"by_heads": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_graphs_do_not_change(other: dict[str, Any]) -> None:
    graph = graph_that_joins(**other)
    before = str(graph)
    inductor.GradientsInOne()(graph)
    assert str(graph) == before


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_operator_gives_the_three_gradients_side_by_side(causal: bool, scale: float | None) -> None:
    q, k, v, dout = (rows(2, 5, heads, 8, grad=False) for heads in (4, 2, 2, 4))
    out, lse = flashbwd.attention(q, k, v, causal=causal, softmax_scale=scale, return_lse=True)
    grads = flashbwd.attention_backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
    first = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
    joined = IN_ONE(*first, lse, scale, causal)
    torch.testing.assert_close(joined, torch.cat([grad.flatten(2) for grad in grads[:3]], dim=2))
    torch.library.opcheck(IN_ONE, (*first, lse, scale, causal), test_utils=("test_schema", "test_faketensor"))


def test_passes_have_stable_keys_for_the_cache_of_inductor() -> None:
    keys, again = ([chosen.uuid() for chosen in inductor.options().values()] for _ in range(2))
    assert keys == again and None not in keys


# ---- both, on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_a_compiled_block_runs_kernels_of_this_library(shape: str) -> None:
    x = block_inputs(shape, "bf16", "cuda", 256)
    compiled = torch.compile(x.block, fullgraph=True, options=inductor.options())
    gradients(compiled, x.block, x.x, x.dout)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        actual = gradients(compiled, x.block, x.x, x.dout)
        torch.cuda.synchronize()
    kernels = " ".join(event.name for event in profiler.events())
    attention = re.search("flashbwd::(sm90|sm80|short_sequences)::backward_kernel", kernels)
    assert "flashbwd::layer_norm::backward_kernel" in kernels
    if torch.cuda.get_device_capability()[0] >= 9:  # PyTorch's first choice there is cuDNN
        assert attention and "cat" not in kernels
    naive = gradients(x.block, x.block, x.x, x.dout)
    wide = copy.deepcopy(x.block).double()
    expected = gradients(wide, wide, x.x.double(), x.dout.double())
    for i, (got, want, plain) in enumerate(zip(actual, expected, naive, strict=True)):
        tolerance.assert_close(got, want, [plain.double()], f"gradient {i}")
