"""Streams, graphs, devices, repeats and memory on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kit import cases, inputs
from kit.repeats import differing_elements
from support import GPU_TARGETS, MAIN, Target, arguments_of, repeated, run, run_copies, skip_where_refused
from torch import Tensor

import flashbwd

pytestmark = pytest.mark.gpu

KERNELS = [target for target in GPU_TARGETS if "reference" not in str(target.id)]
MEDIUM = cases.Case("medium", batch=2, heads=4, heads_kv=2, seqlen_q=257, seqlen_k=300, head_dim=64, head_dim_v=64)
PACKED = cases.Case(
    "packed", heads=4, heads_kv=2, seqlens_q=(100, 57, 0, 43), seqlens_k=(80, 90, 10, 20), head_dim=64, head_dim_v=64
)
VARIANTS = {
    "dense_causal": dataclasses.replace(MEDIUM, causal=True),
    "dense_causal_128": dataclasses.replace(MEDIUM, causal=True, heads_kv=4, head_dim=128, head_dim_v=128),
    "dense_window_128": dataclasses.replace(MEDIUM, seqlen_q=450, window_size=(80, 9), head_dim=128, head_dim_v=128),
    "dense_many_heads": cases.BY_NAME["many_heads_deterministic"],
    "dense_bias": dataclasses.replace(MEDIUM, bias="1hqk"),
    "dense_bias_tiles": dataclasses.replace(MEDIUM, seqlen_k=304, bias="b1qk"),  # rows that TMA can load
    "dense_bias_pairs": dataclasses.replace(
        MEDIUM, batch=3, heads_kv=4, seqlen_k=304, head_dim=32, head_dim_v=32, bias="1hqk"
    ),
    "dense_softcap_256": dataclasses.replace(
        MEDIUM, seqlen_q=1500, seqlen_k=700, head_dim=256, head_dim_v=256, softcap=20.0
    ),
    "dense_512": dataclasses.replace(MEDIUM, causal=True, head_dim=512, head_dim_v=512),
    "dense_wide": dataclasses.replace(MEDIUM, head_dim=320, head_dim_v=512, causal=True, bias="bh1k", dropout_p=0.1),
    "dense_dropout": dataclasses.replace(MEDIUM, dropout_p=0.2),
    "varlen_causal": dataclasses.replace(PACKED, causal=True),
    "varlen_sink": dataclasses.replace(PACKED, sink="finite", dlse=True),
}
ORDERS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "groups": {"causal": True, "heads": 4},
    "window": {"window_size": (255, 0)},
}
OTHER_LENGTHS = [((43, 57, 0, 100), (10, 90, 20, 80)), ((0, 0, 0, 0), (0, 0, 0, 0)), ((1, 1, 1, 1), (50, 50, 50, 50))]


def built(name: str, target: Target, **changes: Any) -> inputs.Inputs:
    device, backend, dtype = target
    x = inputs.build(dataclasses.replace(VARIANTS[name], **changes), dtype, device)
    skip_where_refused(x, backend)
    return x


def other_work() -> Callable[[], object]:
    """Alternately a matrix product and deterministic gradients. They delay CTAs that wait for semaphores, at varying
    times."""
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    x = inputs.build(dataclasses.replace(MEDIUM, batch=1, causal=True, deterministic=True), torch.bfloat16, "cuda")
    tensors = {name: repeated(x.arguments[name], 30) for name in MAIN}
    calls = itertools.cycle([lambda: a @ a, lambda: run(x, **tensors)])
    return lambda: next(calls)()


def present(grads: flashbwd.AttentionGrads) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_work_on_a_side_stream_keeps_its_order(name: str, target: Target) -> None:
    """200 times, a side stream writes an input late, computes gradients, and reads them at once."""
    x = built(name, target, deterministic=True)
    expected = present(run(x, target[1]))
    q = x.arguments["q"]
    stream = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(200 if target[1] != "reference" else 20):
            late = torch.full_like(q, torch.nan)
            torch.cuda._sleep(200_000)
            late.copy_(q)
            for actual, reference in zip(present(run(x, target[1], q=late)), expected, strict=True):
                wrong += (actual != reference).sum()
    stream.synchronize()
    assert int(wrong) == 0


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_captured_graph_replays_with_other_inputs(name: str, target: Target) -> None:
    x = built(name, target, deterministic=True)
    # The graph needs memory of its own, because the values of x are copied into it again below.
    arguments = arguments_of(x, **{argument: tensor.clone() for argument, tensor in x.tensors().items()})
    state = x.rng_state()
    if state is not None:
        words = [torch.tensor(word, device="cuda") for word in state[:2]]
        arguments["rng_state"] = flashbwd.RngState(*words, state[2])
    run(x, target[1])  # initialises everything that the first call initialises
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), flashbwd.use_backend(target[1]):
        captured = flashbwd.attention_backward(**arguments)
    other = inputs.build(dataclasses.replace(x.case, rng_seed=99, rng_offset=12), x.dtype, "cuda", seed=1)
    for source in (other, x, other):
        for argument, tensor in source.tensors().items():
            arguments[argument].copy_(tensor)
        for static, word in zip(arguments.get("rng_state", ())[:2], source.rng_state() or (), strict=False):
            static.fill_(word)
        for grad in present(captured):
            grad.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        source.check(*captured)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 512])
def test_a_replayed_graph_reads_the_current_lengths(head_dim: int, target: Target) -> None:
    """The lengths are on the device, and each replay reads their current values."""
    first = built("varlen_causal", target, deterministic=True, slack=60, head_dim=head_dim, head_dim_v=head_dim)
    arguments = arguments_of(first)
    run(first, target[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), flashbwd.use_backend(target[1]):
        captured = flashbwd.attention_backward(**arguments)
    longest = max(*first.case.physical_q, *first.case.physical_k) + 60
    for seqlens_q, seqlens_k in OTHER_LENGTHS:
        slack = longest - max(*seqlens_q, *seqlens_k)
        other = inputs.build(
            dataclasses.replace(first.case, seqlens_q=seqlens_q, seqlens_k=seqlens_k, slack=slack), first.dtype, "cuda"
        )
        for argument, tensor in other.tensors().items():
            static = arguments[argument]
            static.fill_(torch.nan if static.is_floating_point() else 0)
            static[tuple(slice(n) for n in tensor.shape)].copy_(tensor)  # rows outside the sequences stay NaN
        graph.replay()
        torch.cuda.synchronize()
        end_q, end_k = sum(seqlens_q), sum(seqlens_k)
        other.check(captured.dq[:end_q], captured.dk[:end_k], captured.dv[:end_k], None, None)
        assert not captured.dq[end_q:].any()
        assert not captured.dk[end_k:].any()
        assert not captured.dv[end_k:].any()


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_does_not_wait_for_the_gpu(name: str, target: Target) -> None:
    x = built(name, target)
    run(x, target[1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = run(x, target[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x.check(*grads)


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_thousand_deterministic_runs_agree_bitwise(name: str, target: Target) -> None:
    backend = target[1]
    x = built(name, target, deterministic=True)
    times = 1000 if backend != "reference" else 50
    assert differing_elements(lambda: present(run(x, backend)), times, other_work()) == 0


@pytest.mark.parametrize("target", [target for target in KERNELS if "bfloat16" in str(target.id)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "head_dims",
    [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)],
    ids=str,
)
def test_a_thousand_deterministic_runs_of_many_key_blocks_agree_bitwise(
    head_dims: tuple[int, int], order: str, target: Target
) -> None:
    """8 heads, or 4 groups of 4 heads, with 17 key blocks each."""
    device, backend, dtype = target
    head_dim, head_dim_v = head_dims
    case = dataclasses.replace(MEDIUM, batch=1, heads=1, heads_kv=1, seqlen_q=2100, seqlen_k=2100, deterministic=True)
    case = dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim_v, **ORDERS[order])
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    tensors = {name: repeated(x.arguments[name], 4 if order == "groups" else 8, heads=True) for name in MAIN}
    assert differing_elements(lambda: present(run(x, backend, **tensors)), beside=other_work()) == 0


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_uses_at_most_the_memory_of_its_plan(name: str, deterministic: bool, target: Target) -> None:
    x = built(name, target, deterministic=deterministic)
    with flashbwd.use_backend(target[1]):
        plan = flashbwd.plan_attention_backward(**arguments_of(x))
    outputs = sum(grad.numel() * grad.element_size() for grad in present(run(x, target[1], poison=False)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    grads = run(x, target[1], poison=False)
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - outputs
    del grads
    assert extra <= plan.workspace_bytes


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(2, 1024), (6, 400)])
def test_gradients_are_right_with_a_few_more_work_tiles_than_sms(
    heads: int, seqlen_q: int, deterministic: bool, target: Target
) -> None:
    """12 KV heads have 12 key blocks each. On the 132 SMs of an H100, CTAs share the last ones."""
    case = dataclasses.replace(
        MEDIUM, batch=1, heads=heads, heads_kv=2, seqlen_q=seqlen_q, seqlen_k=1500, deterministic=deterministic
    )
    run_copies(case, target, 6, heads=True)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128])
def test_gradients_are_right_with_many_more_work_tiles_than_sms(
    head_dim: int, deterministic: bool, target: Target
) -> None:
    """40 heads have 6 key blocks each. Many SMs compute two, and some heads finish while others begin."""
    case = dataclasses.replace(MEDIUM, batch=1, heads=2, heads_kv=2, seqlen_q=700, seqlen_k=700, causal=True)
    case = dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, deterministic=deterministic)
    run_copies(case, target, 20, heads=True)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("length", [450, 1450])
def test_gradients_of_mirrored_tile_pairs_are_right(length: int, heads: int, target: Target) -> None:
    """30 KV heads have 2 or 6 mirrored tile pairs. With 6 there are more work tiles than SMs."""
    case = dataclasses.replace(MEDIUM, batch=1, heads=heads, heads_kv=1, seqlen_q=length, seqlen_k=length, causal=True)
    case = dataclasses.replace(case, head_dim=128, head_dim_v=128, deterministic=True)
    run_copies(case, target, 30, heads=True)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("seqlen_q", [2200, 900, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_work_tiles_of_equal_length_are_right(
    deterministic: bool, head_dim: int, seqlen_q: int, target: Target
) -> None:
    """20 heads have 12 key blocks each, which make several waves. There are more or fewer query blocks than that."""
    case = dataclasses.replace(MEDIUM, batch=1, heads=1, heads_kv=1, seqlen_q=seqlen_q, seqlen_k=1450)
    case = dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, deterministic=deterministic)
    run_copies(case, target, 20, heads=True)


@pytest.mark.parametrize("target", KERNELS)
def test_the_first_call_of_a_thread_gives_equal_bits(target: Target) -> None:
    """A new thread, such as a thread of autograd, has no CUDA context before its first launch."""
    x = built("dense_causal", target, deterministic=True)
    expected = present(run(x, target[1]))
    present(run(x, target[1]))  # freed at once, so the thread's call reuses this memory, not that of `expected`
    with ThreadPoolExecutor(max_workers=1) as thread:
        grads = present(thread.submit(run, x, target[1]).result())
    for actual, reference in zip(grads, expected, strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_a_call_runs_on_the_device_of_its_inputs(target: Target) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    _, backend, dtype = target
    x = inputs.build(VARIANTS["dense_causal"], dtype, "cuda:1")
    skip_where_refused(x, backend)
    assert torch.cuda.current_device() == 0
    grads = run(x, backend)
    assert grads.dq.device.index == 1
    assert torch.cuda.current_device() == 0
    x.check(*grads)


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_the_plan_names_the_backend_that_runs(target: Target) -> None:
    x = built("dense_causal", target)
    with flashbwd.use_backend(target[1]):
        plan = flashbwd.plan_attention_backward(**arguments_of(x))
    assert plan.backend == target[1]
    assert plan.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    assert (plan.tile is None) == (target[1] == "reference")


@pytest.mark.parametrize("target", KERNELS)
def test_compiled_calls_with_cuda_graphs_have_right_gradients(target: Target) -> None:
    backend = target[1]
    x = built("dense_causal", target)
    leaves = [x.arguments[name].detach().requires_grad_() for name in ("q", "k", "v")]
    with flashbwd.use_backend(backend):
        compiled = torch.compile(flashbwd.attention, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*leaves, causal=True)
            grads = [grad.clone() for grad in torch.autograd.grad(out, leaves, x.arguments["dout"])]
    x.check(*grads, None, None)
