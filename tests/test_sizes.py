"""Sizes that do not fit in 16 or 32 bits."""

from __future__ import annotations

import pytest
import torch
from kit import cases, inputs
from support import (
    CPU_TARGETS,
    GPU_TARGETS,
    Target,
    backward,
    repeated,
    run_copies,
    skip_where_refused,
    with_nan_outputs,
)

import flashbwd

SIXTEEN_BIT = [target for target in GPU_TARGETS if "float16" in str(target.id) or "bfloat16" in str(target.id)]
BEYOND = 2**31


def need_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory")


@pytest.mark.parametrize("target", SIXTEEN_BIT)
def test_gradients_of_more_than_65535_batches_times_heads_are_right(target: Target) -> None:
    case = cases.Case("many", batch=1, heads=3, heads_kv=1, seqlen_q=9, seqlen_k=17, head_dim=64, head_dim_v=64)
    run_copies(case, target, 25_000)


@pytest.mark.parametrize("target", SIXTEEN_BIT)
def test_gradients_of_more_than_65535_batches_are_right(target: Target) -> None:
    case = cases.Case("many", batch=1, heads=1, heads_kv=1, seqlen_q=5, seqlen_k=5, head_dim=64, head_dim_v=64)
    run_copies(case, target, 66_000)


@pytest.mark.alone
@pytest.mark.parametrize("target", SIXTEEN_BIT)
def test_gradients_of_tensors_with_more_than_2_to_31_elements_are_right(target: Target) -> None:
    need_memory(70)
    case = cases.Case(
        "huge", batch=1, heads=16, heads_kv=16, seqlen_q=256, seqlen_k=256, head_dim=128, head_dim_v=128, causal=True
    )
    copies = BEYOND // (16 * 256 * 128) + 1
    run_copies(case, target, copies)


@pytest.mark.alone
@pytest.mark.parametrize("target", SIXTEEN_BIT)
def test_gradients_of_packed_rows_beyond_2_to_31_elements_are_right(target: Target) -> None:
    """There are so many packed sequences that the last one begins after 2^31 elements."""
    need_memory(70)
    device, backend, dtype = target
    length, heads, dim = 256, 16, 128
    copies = BEYOND // (length * heads * dim) + 1
    case = cases.Case(
        "packed",
        heads=heads,
        heads_kv=heads,
        seqlens_q=(length,),
        seqlens_k=(length,),
        head_dim=dim,
        head_dim_v=dim,
        causal=True,
        window_size=(127, 0),
    )
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    names = ("dout", "q", "k", "v", "out")
    starts = torch.arange(copies + 1, dtype=torch.int32, device=device) * length
    with flashbwd.use_backend(backend):
        grads = backward(
            *(repeated(x.arguments[name], copies) for name in names),
            x.arguments["softmax_lse"].repeat(1, copies),
            causal=True,
            window_size=(127, 0),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=length,
            max_seqlen_k=length,
        )
    for at in (0, copies - 1):
        here = slice(at * length, (at + 1) * length)
        x.check(grads.dq[here], grads.dk[here], grads.dv[here], None, None)


@pytest.mark.alone
@pytest.mark.parametrize("target", [t for t in CPU_TARGETS if "bfloat16" in str(t.id)] + GPU_TARGETS)
@pytest.mark.parametrize("which", ["batch", "row", "head"])
def test_gradients_with_strides_beyond_32_bits_are_right(which: str, target: Target) -> None:
    """A small problem whose elements lie more than 2^31 elements apart; one buffer serves all inputs.

    On a CPU the buffer is only address space. Pages that are not touched take no memory.
    """
    device, backend, dtype = target
    if device == "cuda":
        need_memory(BEYOND * dtype.itemsize / 2**30 + 6)
    case = cases.Case("far", batch=2, seqlen_q=3, seqlen_k=3, head_dim=64, head_dim_v=64, causal=True)
    x = inputs.build(case, dtype, device)
    strides = {
        "batch": (BEYOND, 128, 64, 1),
        "row": (64, BEYOND // 2, 128, 1),
        "head": (192, 64, BEYOND, 1),
    }[which]
    buffer = torch.empty(BEYOND + (1 << 20), dtype=dtype, device=device)
    moved = {
        name: buffer.as_strided((2, 3, 2, 64), strides, n * 4096).copy_(x.arguments[name])
        for n, name in enumerate(("q", "k", "v", "out", "dout"))
    }
    skip_where_refused(x, backend, **moved)
    with flashbwd.use_backend(backend):
        arguments = moved | {"softmax_lse": x.arguments["softmax_lse"], "causal": True}
        grads = flashbwd.attention_backward(**with_nan_outputs(arguments))
    x.check(*grads)
