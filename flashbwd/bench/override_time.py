"""Measures the host time that the overrides of PyTorch's backwards add to a call.

Run ``python -m flashbwd.bench.override_time`` on a machine with a GPU. It times PyTorch's operators alternately with
and without overrides, and this library's operators on the same tensors. The tensors are small and each burst of calls
starts with an idle GPU, so the host never waits for it. The times depend on the machine and its load. For comparison,
the script also times PyTorch's LayerNorm backward of a few rows on the CPU.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashbwd
from flashbwd.bench.measure import host_bursts

CALLS, BURSTS, ROUNDS = 40, 5, 15  # calls per burst, bursts per round, rounds


class Call(NamedTuple):
    """A call of a PyTorch operator, with or without an override."""

    name: str
    pytorchs: Callable[[], Any]
    ours: Callable[[], Any] | None = None  # this library's operator, if one of its kernels supports the call
    backend: str = "auto"


def attention_calls() -> Iterator[Call]:
    aten, ours = torch.ops.aten, torch.ops.flashbwd.attention_backward.default
    dout, q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    rows = [t.transpose(1, 2) for t in (dout, q, k, v)]

    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    ours_after_cudnn = [*rows, out.transpose(1, 2), lse]
    cudnn = aten._scaled_dot_product_cudnn_attention_backward.default
    tensors = [dout, q, k, v, out, lse, seed, offset, None, None, None, 64, 64]
    yield Call("attention after cuDNN", lambda: cudnn(*tensors, 0.0, False), lambda: ours(*ours_after_cudnn))
    yield Call("the same, dropout", lambda: cudnn(*tensors, 0.1, False))

    out, lse, rng, unused, _ = aten._flash_attention_forward(*rows[1:], None, None, 64, 64, 0.0, False, False)
    flash = [*rows, out, lse, None, None, 64, 64, 0.0, False, rng, unused]
    ours_after_flash = [*rows, out, lse]
    yield Call(
        "attention after flash",
        lambda: aten._flash_attention_backward.default(*flash),
        lambda: ours(*ours_after_flash),
    )

    wide = [t.float().contiguous() for t in rows]
    out, lse, seed, offset, *_ = aten._efficient_attention_forward(*wide[1:], *(None,) * 5, 0.0, 0, True)
    efficient = [*wide, None, out, None, None, 64, 64, lse, 0.0, seed, offset, 0, False]
    ours_after_efficient = [*wide, out, lse]
    backward = aten._efficient_attention_backward.default
    yield Call(
        "attention after memory-efficient, fp32", lambda: backward(*efficient), lambda: ours(*ours_after_efficient)
    )
    yield Call("the same, with a forced backend that refuses it", lambda: backward(*efficient), backend="sm90")


def layer_norm_arguments(dtype: torch.dtype, device: str) -> list[Any]:
    x, gamma = torch.randn(4, 256, device=device, dtype=dtype), torch.randn(256, device=device, dtype=dtype)
    _, mu, rs = torch.ops.aten.native_layer_norm(x, [256], gamma, gamma, 1e-5)
    return [x, x, [256], mu, rs, gamma, gamma, [True, True, True]]


def rms_norm_arguments(dtype: torch.dtype) -> list[Any]:
    x, gamma = torch.randn(4, 256, device="cuda", dtype=dtype), torch.randn(256, device="cuda", dtype=dtype)
    _, rs = torch.ops.aten._fused_rms_norm(x, [256], gamma, 1e-5)
    return [x, x, [256], rs, gamma, [True, True]]


def norm_calls() -> Iterator[Call]:
    layer_norm = torch.ops.aten.native_layer_norm_backward.default
    rms_norm = torch.ops.aten._fused_rms_norm_backward.default
    ours = torch.ops.flashbwd
    narrow, wide = (layer_norm_arguments(dtype, "cuda") for dtype in (torch.float32, torch.float64))
    dz, x, _, mu, rs, gamma, *_ = narrow
    yield Call("LayerNorm", lambda: layer_norm(*narrow), lambda: ours.layer_norm_backward.default(dz, x, mu, rs, gamma))
    yield Call("LayerNorm, fp64", lambda: layer_norm(*wide))
    rms_narrow, rms_wide = (rms_norm_arguments(dtype) for dtype in (torch.float32, torch.float64))
    rs_of_rms: Tensor = rms_narrow[3]
    yield Call(
        "RMSNorm", lambda: rms_norm(*rms_narrow), lambda: ours.rms_norm_backward.default(dz, x, rs_of_rms, gamma)
    )
    yield Call("RMSNorm, fp64", lambda: rms_norm(*rms_wide))


def microseconds(call: Callable[[], Any]) -> float:
    """Return microseconds per call in the fastest burst."""
    return min(host_bursts(call, BURSTS, CALLS))


def one_round(calls: list[Call], times: dict[tuple[str, str], list[float]]) -> set[str]:
    """Time every call. Return the names of the calls that fell back to PyTorch's kernel."""
    handed_on = set()
    for call in calls:
        times[call.name, "PyTorch's"].append(microseconds(call.pytorchs))
    with flashbwd.enable():
        for call in calls:
            flashbwd.stats(reset=True)
            with flashbwd.use_backend(call.backend):
                times[call.name, "overridden"].append(microseconds(call.pytorchs))
            if any(counts.fallbacks for counts in flashbwd.stats().values()):
                handed_on.add(call.name)
            if call.ours is not None:
                times[call.name, "ours"].append(microseconds(call.ours))
    return handed_on


def row_of(call: Call, times: dict[tuple[str, str], list[float]], handed_on: bool) -> str:
    pytorchs, ours, overridden = (times[call.name, kind] for kind in ("PyTorch's", "ours", "overridden"))
    cells = [f"{statistics.median(of):.1f}" if of else "-" for of in (pytorchs, ours, overridden)]
    without, runs = (pytorchs, "PyTorch's kernel") if handed_on or not ours else (ours, "this library's")
    adds = statistics.median(a - b for a, b in zip(overridden, without, strict=True))
    return f"| {call.name} | {' | '.join(cells)} | {runs} | {adds:+.1f} |"


@torch.no_grad()
def main(rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)
    calls = [*attention_calls(), *norm_calls()]
    on_cpu = layer_norm_arguments(torch.float32, "cpu")
    layer_norm = torch.ops.aten.native_layer_norm_backward.default
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    handed_on = one_round(calls, defaultdict(list))  # warm-up
    host = []
    for _ in range(rounds):
        one_round(calls, times)
        host.append(microseconds(lambda: layer_norm(*on_cpu)))
    print("| host time in us | PyTorch's | this library's operator | overridden | kernel that runs | override adds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for call in calls:
        print(row_of(call, times, call.name in handed_on))
    print(f"\nPyTorch's LayerNorm backward of 4 rows on the CPU: {statistics.median(host):.1f} us.")


if __name__ == "__main__":
    main()
