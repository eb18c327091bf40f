"""torch.compile, torch.export and activation checkpointing of code that uses the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import cases, inputs
from support import arguments_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashbwd

ops = torch.ops.flashbwd


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """A self-attention block: projections, flashbwd.attention, output projection."""

    def __init__(self, width: int = 16, heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.heads = heads
        self.options = options
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return self.out(flashbwd.attention(q, k, v, **self.options).flatten(-2))


def block(**options: Any) -> Block:
    torch.manual_seed(0)
    return Block(**options)


def gradients(function: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    function(x).square().sum().backward()
    grads = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


OPTIONS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (4, 0)},
    "softcap": {"softcap": 5.0},
    "sink": {"sink": torch.tensor([0.5, -0.5])},
    "bias": {"attn_bias": torch.linspace(-1, 1, 24 * 24).view(1, 1, 24, 24)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_module_compiled_in_one_graph_gives_the_same_gradients(name: str) -> None:
    module = block(**OPTIONS[name])
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    for a, b in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(a, b)


def test_inductor_gives_the_same_gradients() -> None:
    module = block(causal=True)
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(module, fullgraph=True)
    for a, b in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(a, b)


def test_dynamic_shapes_compile_once() -> None:
    module = block(causal=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for batch, length in ((2, 24), (3, 24), (2, 7), (5, 130)):
        x = torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length))
        for a, b in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
            torch.testing.assert_close(a, b)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "heads_4to2",
        "bias_bh1k",
        "varlen_seqused",
        "dropout_flash_half_causal",
        "sink",
        "dlse_sink_causal",
        "key_mask_bias_shared",
    ],
)
def test_attention_backward_compiles_with_the_same_results(name: str) -> None:
    arguments = arguments_of(inputs.build(cases.BY_NAME[name], torch.float32))
    compiled = torch.compile(flashbwd.attention_backward, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(**arguments), flashbwd.attention_backward(**arguments), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, equal_nan=False)


def test_a_compiled_call_writes_to_a_given_output() -> None:
    x = inputs.build(cases.BY_NAME["heads_4to2"], torch.float32)
    arguments = arguments_of(x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def into(dq: Tensor) -> Tensor:
        flashbwd.attention_backward(**arguments, dq=dq)
        return dq * 2

    dq = torch.full_like(x.arguments["q"], torch.nan)
    doubled = into(dq)
    expected = flashbwd.attention_backward(**arguments).dq
    torch.testing.assert_close(dq, expected)
    torch.testing.assert_close(doubled, expected * 2)


def test_compiled_forward_and_backward_use_one_dropout_mask() -> None:
    q, k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    compiled = torch.compile(flashbwd.attention, fullgraph=True, backend="aot_eager_decomp_partition")
    out = compiled(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    torch.testing.assert_close((dv * v.detach()).sum(), out.detach().sum())


@pytest.mark.parametrize("name", ["causal", "sink", "softcap"])
def test_export_keeps_the_operator_and_dynamic_lengths(name: str) -> None:
    module = block(**OPTIONS[name]).eval()
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(module, (torch.randn(2, 24, 16),), dynamic_shapes={"x": {1: length}})
    targets = [node.target for node in program.graph.nodes]
    assert ops.attention.default in targets
    longer = torch.randn(2, 77, 16)
    torch.testing.assert_close(program.module()(longer), module(longer))


class CountForwards(TorchDispatchMode):
    """Counts runs of flashbwd::attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is ops.attention.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("saved", "forwards"), [(True, 1), (False, 2)])
def test_selective_checkpointing_saves_or_recomputes(saved: bool, forwards: int) -> None:
    module = block(causal=True)
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = saved and op is ops.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(
            module, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    with CountForwards() as counter:
        actual = gradients(checkpointed, module, x)
    assert counter.count == forwards
    for a, b in zip(actual, gradients(module, module, x), strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_recomputes_the_same_dropout() -> None:
    module = block(dropout_p=0.5)
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)
    plain = gradients(module, module, x)
    torch.manual_seed(7)
    recomputed = gradients(lambda x: checkpoint(module, x, use_reentrant=False), module, x)
    for a, b in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(a, b)
