"""Large calls on Hopper overlap the preprocess and the dq postprocess with the kernel. Their gradients agree, head by
head, with those of small calls, which do not."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support import MAIN
from torch import Tensor

import flashbwd

pytestmark = pytest.mark.gpu


class Shape(NamedTuple):
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    mask: dict[str, Any]
    group: int = 1  # query heads per KV head


# Largest relative difference of two roundings of nearly the same sums.
RELATIVE_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}

SHAPES = {
    "window": Shape(1, 8192, 16, 128, {"window_size": (255, 0)}),
    "window_of_both_sides": Shape(4, 3000, 8, 128, {"window_size": (100, 30)}),
    "causal": Shape(6, 1000, 16, 128, {"causal": True}),
    "long_causal": Shape(1, 4200, 16, 128, {"causal": True}),
    "long_full": Shape(1, 4200, 16, 128, {}),
    "full": Shape(12, 512, 16, 96, {}),
    "full_clusters": Shape(5, 1000, 16, 256, {}),
    "clusters": Shape(4, 1024, 8, 256, {"causal": True}),
    "clusters_that_convert": Shape(6, 1000, 16, 192, {"causal": True}),
    "converted_between_work_tiles": Shape(6, 1100, 24, 64, {"causal": True}),
    "groups": Shape(2, 4200, 16, 128, {"causal": True}, group=4),
    "groups_full": Shape(4, 2100, 16, 64, {}, group=2),
}


def inputs_of(shape: Shape, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    heads, heads_kv = shape.heads, shape.heads // shape.group
    dout, q, k, v, out = (
        torch.randn(shape.batch, shape.seqlen, h, shape.head_dim, generator=generator, device="cuda", dtype=dtype)
        for h in (heads, heads, heads_kv, heads_kv, heads)
    )
    lse = torch.rand(shape.batch, shape.heads, shape.seqlen, generator=generator, device="cuda") + 6
    return dout, q, k, v, out, lse


def arguments_of(tensors: tuple[Tensor, ...], shape: Shape) -> dict[str, Any]:
    return dict(zip(MAIN, tensors, strict=True)) | shape.mask


def gradients(tensors: tuple[Tensor, ...], shape: Shape, **changes: Any) -> tuple[Tensor, ...]:
    with flashbwd.use_backend("sm90"):
        return flashbwd.attention_backward(**arguments_of(tensors, shape), **changes)[:3]


def by_head(tensors: tuple[Tensor, ...], shape: Shape) -> list[Tensor]:
    """The same gradients from one call per query head of the batch, with dk and dv summed over groups."""
    *wide, lse = tensors
    parts = []
    for b in range(shape.batch):
        for h in range(shape.heads):
            heads = [h * x.shape[2] // shape.heads for x in wide]
            one = (*(x[b : b + 1, :, n : n + 1] for x, n in zip(wide, heads, strict=True)), lse[b : b + 1, h : h + 1])
            parts.append(gradients(one, shape))
    dq, dk, dv = (
        torch.stack([part[i][0, :, 0] for part in parts]).view(shape.batch, -1, n, shape.seqlen, shape.head_dim)
        for i, n in enumerate((1, shape.group, shape.group))
    )
    return [x.float().sum(2).transpose(1, 2) for x in (dq, dk, dv)]


def assert_agree(grads: tuple[Tensor, ...], expected: list[Tensor], dtype: torch.dtype) -> None:
    for grad, other in zip(grads, expected, strict=True):
        error = (grad.float() - other.float()).norm() / other.float().norm()
        assert error < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_heads_in_one_call_agree_with_calls_of_one_head(name: str, deterministic: bool, dtype: torch.dtype) -> None:
    """The result must not depend on the bytes that the workspace contains before the call: they may look like a flag
    that the kernel waits for."""
    shape = SHAPES[name]
    tensors = inputs_of(shape, dtype)
    expected = by_head(tensors, shape)
    with flashbwd.use_backend("sm90"):
        plan = flashbwd.plan_attention_backward(**arguments_of(tensors, shape), deterministic=deterministic)
    for byte in (255, 0, 1):
        workspace = torch.full((plan.workspace_bytes,), byte, dtype=torch.uint8, device="cuda")
        grads = gradients(tensors, shape, deterministic=deterministic, workspace=workspace)
        assert_agree(grads, expected, dtype)


def test_a_replayed_graph_uses_the_new_values_of_its_inputs() -> None:
    shape, dtype = SHAPES["window"], torch.bfloat16
    tensors = inputs_of(shape, dtype)
    gradients(tensors, shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = gradients(tensors, shape)
    for seed in range(1, 4):
        for tensor, other in zip(tensors, inputs_of(shape, dtype, seed), strict=True):
            tensor.copy_(other)
        for _ in range(10):
            graph.replay()
        assert_agree(grads, by_head(tensors, shape), dtype)


def test_calls_on_two_streams_do_not_disturb_each_other() -> None:
    dtype = torch.bfloat16
    calls = [(SHAPES[name], inputs_of(SHAPES[name], dtype)) for name in ("window", "causal")]
    expected = [by_head(tensors, shape) for shape, tensors in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[tuple[Tensor, ...]] = [(), ()]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i] = gradients(calls[i][1], calls[i][0])
    torch.cuda.synchronize()
    for result, reference in zip(results, expected, strict=True):
        assert_agree(result, reference, dtype)
