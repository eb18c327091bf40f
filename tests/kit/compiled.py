"""Compiles FlexAttention on a CPU, where PyTorch refuses its backward, with the pass of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as pytorchs
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table

import flashbwd
from flashbwd.integrations import flex_pass

NAME = "higher_order::flex_attention_backward"
OURS = torch.ops.flashbwd.flex_attention_backward_in_graph.default
PYTORCHS = torch.ops.higher_order.flex_attention_backward

Rewrite = Callable[[fx.Graph], None]


@contextmanager
def without_caches() -> Iterator[None]:
    """Compile every graph anew: the pass does not see a graph that comes from Inductor's cache."""
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let PyTorch trace the backward on a CPU, and the pass replace it there by the reference."""
    monkeypatch.setattr(pytorchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_pass, "_COMPUTED_BY_THE_REFERENCE", frozenset({"cpu"}))
    torch._dynamo.reset()
    flashbwd.stats(reset=True)
    with without_caches():
        yield
    torch._dynamo.reset()


def counted() -> flashbwd.OperatorStats:
    return flashbwd.stats()[NAME]


def _as_it_is(module: fx.GraphModule, inputs: list[Any]) -> Any:
    return make_boxed_func(module.forward)


class Compiled:
    """A compiled function whose backward graph, in Inductor's operators, is rewritten and then run node by node.

    Attributes
    ----------
    graphs : list of GraphModule
        The rewritten backward graphs.
    """

    def __init__(
        self, function: Callable[..., Any], rewrite: Rewrite | None = None, *, fullgraph: bool = True, **options: Any
    ) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.rewrite = flex_pass.replace_flex_backwards if rewrite is None else rewrite
        backend = aot_autograd(fw_compiler=_as_it_is, bw_compiler=self._backward, decompositions=select_decomp_table())
        self._call = torch.compile(function, backend=backend, fullgraph=fullgraph, **options)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def _backward(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        self.rewrite(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module)
        return make_boxed_func(module.forward)

    def count(self, target: Any) -> int:
        return sum(node.target is target for module in self.graphs for node in module.graph.nodes)


def inductors_backward(**options: Any) -> Callable[..., Any]:
    """A backend that compiles backwards with Inductor, which has no training forward of FlexAttention on a CPU."""

    def inner(module: fx.GraphModule, inputs: Any, **arguments: Any) -> Any:
        if arguments.get("is_backward"):
            return compile_fx_inner(module, inputs, **arguments)
        return make_boxed_func(module.forward)

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(module, inputs, inner_compile=inner, config_patches=options or None)

    return backend
