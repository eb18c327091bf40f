"""PyTorch's ring attention: this library computes each step of the backward, and the sums are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit import ranks, tolerance
from kit.summary import NO_CASE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashbwd
from flashbwd.integrations import overrides

if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)


def inputs(heads_kv: int, device: str, dtype: torch.dtype, seqlen: int, head_dim: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the output, (B, H, S, D)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, seqlen, head_dim) for heads in (4, heads_kv, heads_kv, 4)]
    *tensors, dout = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return tensors, dout


def gradients_of_part(tensors: list[Tensor], dout: Tensor, device: str) -> list[Tensor]:
    """Gradients of causal attention over a ring, gathered from every process."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    parts = [t.clone() for t in (*tensors, dout)]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * len(parts)):
        *leaves, dout_part = (t.detach() for t in parts)
        for leaf in leaves:
            leaf.requires_grad_()
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        out.backward(dout_part)
    gathered = []
    for leaf in leaves:
        pieces = [torch.empty_like(leaf) for _ in range(mesh.size())]
        torch.distributed.all_gather(pieces, leaf.grad.contiguous())
        # Process r holds chunks r and 2n - 1 - r of the sequence, which balances the work of a causal mask.
        chunks = [piece.chunk(2, dim=2) for piece in pieces]
        gathered.append(torch.cat([first for first, _ in chunks] + [last for _, last in reversed(chunks)], dim=2))
    return gathered


def check(actual: list[Tensor], tensors: list[Tensor], dout: Tensor) -> None:
    """Apply the tolerance rule: compare with unfused attention in one process, in float64 and rounded."""

    def plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    for i, (got, want, rounded) in enumerate(zip(actual, plain(torch.float64), plain(tensors[0].dtype), strict=True)):
        tolerance.assert_close(got, want, [rounded.double()], f"gradient {i}")


# ---- on the CPU, where plain operators replace the forward, which PyTorch has only for CUDA ----


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> Any:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    rng_state = torch.zeros(2, dtype=torch.uint64)
    nothing = q.new_empty(0)
    lengths = (q.shape[2], k.shape[2])
    return (
        scores.softmax(-1) @ v,
        scores.logsumexp(-1),
        None,
        None,
        *lengths,
        rng_state,
        rng_state.new_empty(()),
        nothing,
    )


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, **options: Any) -> Any:
    """Do what PyTorch's CUDA kernel of this name does: put rows first, and call the operator that is overridden."""
    rows_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = torch.ops.aten._flash_attention_backward(*rows_first, *rest, **options)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _ring_on_the_cpu() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    attention.__name__ = "scaled_dot_product_attention"
    torch.nn.functional.scaled_dot_product_attention = attention
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", _flash_forward)
    library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward)
    library.impl("_flash_attention_backward", lambda *args, **kwargs: pytest.fail("PyTorch's own backward ran"))
    override = overrides._ALL["_flash_attention_backward"]
    override.register("CPU")
    try:
        tensors, dout = inputs(4, "cpu", torch.float32, 64, 16)
        with flashbwd.use_backend("reference"):
            actual = gradients_of_part(tensors, dout, "cpu")
        assert override.stats() == flashbwd.OperatorStats(torch.distributed.get_world_size(), {})
        check(actual, tensors, dout)
    finally:
        override.unregister()
        library._destroy()
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def test_every_step_of_a_ring_calls_the_override(tmp_path: Any) -> None:
    with ranks.Ranks(2, tmp_path) as two:
        two.run(_ring_on_the_cpu)


# ---- on GPUs, one per process ----


@pytest.fixture(scope="module", params=[2, 4])
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks.Ranks]:
    yield from ranks.gpu_ranks(request, tmp_path_factory)


OPERATORS = {
    "CUDNN_ATTENTION": "aten::_scaled_dot_product_cudnn_attention_backward",
    "FLASH_ATTENTION": "aten::_flash_attention_backward",
    "EFFICIENT_ATTENTION": "aten::_efficient_attention_backward",
}


def _ring_on_gpus(forward: str, heads_kv: int) -> None:
    tensors, dout = inputs(heads_kv, "cuda", torch.bfloat16, 512, 64)
    flashbwd.stats(reset=True)
    with flashbwd.enable(), sdpa_kernel(getattr(SDPBackend, forward)):
        actual = gradients_of_part(tensors, dout, "cuda")
    called = {name: stats for name, stats in flashbwd.stats().items() if stats != (0, {})}
    assert called == {OPERATORS[forward]: (torch.distributed.get_world_size(), {})}
    check(actual, tensors, dout)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("forward", OPERATORS)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_a_kernel_of_this_library_runs_every_step_of_a_ring_of_gpus(
    gpus: ranks.Ranks, forward: str, heads_kv: int
) -> None:
    if heads_kv != 4 and forward == "EFFICIENT_ATTENTION":
        pytest.skip(NO_CASE + "PyTorch's memory-efficient attention takes no grouped heads")
    gpus.run(_ring_on_gpus, forward, heads_kv)
