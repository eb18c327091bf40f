"""Host time of small backwards beside PyTorch's: ``python -m flashbwd.bench.host_time --backward``.

Each row compares two calls that compute the same gradients of the same tensors. The direct rows compare a public
function with PyTorch's backward operator. The other rows compare ``loss.backward()`` of a graph that PyTorch's forward
recorded, with and without ``flashbwd.enable()``. On a GPU, both times are from bursts of calls that start with an idle
GPU and fit into its launch queue, so the host never waits for the GPU. Each round measures all of PyTorch's calls and
all of this library's, in alternating order. A ratio is the median over rounds of the ratio within a round.

A CPU runs the same calls with smaller tensors, in which the time of a call includes its arithmetic, and the overrides
replace no kernel. Ratios are judged only on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import flashbwd
from flashbwd.bench.cases import HOST_BAR
from flashbwd.bench.measure import host_bursts

aten = torch.ops.aten
EPS = 1e-5
DIRECT, OVERRIDDEN = "called directly", "loss.backward() through the overrides"


@dataclass(frozen=True)
class Sizes:
    """The tensors of the rows, and how long to measure."""

    seqlen: int
    heads: int
    head_dims: Sequence[int]
    rows: int
    columns: Sequence[int]
    dtype: torch.dtype
    rounds: int
    calls: int  # per burst


SIZES = {
    "cuda": Sizes(512, 8, (64, 128), 1024, (1024, 4096), torch.bfloat16, rounds=40, calls=30),
    "cpu": Sizes(16, 2, (16,), 8, (32, 64), torch.float32, rounds=2, calls=2),
}


@dataclass(frozen=True)
class Row:
    """A backward of this library, and PyTorch's for the same work. Both return or store the same gradients."""

    name: str
    how: str  # DIRECT or OVERRIDDEN
    pytorchs: Callable[[], Any]
    ours: Callable[[], Any]


@dataclass(frozen=True)
class HostTime:
    """Microseconds per call of PyTorch and of this library, one value per round.

    ``fallbacks`` is the number of overridden operators in a call of ``row.ours`` that PyTorch's kernels compute.
    """

    row: Row
    fallbacks: int
    pytorchs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(ours / other for ours, other in zip(self.ours, self.pytorchs, strict=True))

    @property
    def verdict(self) -> str:
        if self.fallbacks:
            return "PyTorch's kernel ran"
        return "reached" if self.ratio <= HOST_BAR else "MISSED"


# ---- the rows ------------------------------------------------------------------------------------


def rows_of(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    torch.manual_seed(0)
    for head_dim in sizes.head_dims:
        yield from _attention_rows(device, sizes, head_dim)
    for columns in sizes.columns:
        yield from _norm_rows(device, sizes, columns)


def _attention_rows(device: torch.device, sizes: Sizes, head_dim: int) -> Iterator[Row]:
    shape = (1, sizes.seqlen, sizes.heads, head_dim)
    dout, q, k, v = (torch.randn(shape, device=device, dtype=sizes.dtype) for _ in range(4))
    heads_first = [t.transpose(1, 2) for t in (dout, q, k, v)]
    name = f"attention D {head_dim}, S {sizes.seqlen}"
    if device.type == "cuda":
        yield _after_flash(f"{name}, after flash", dout, q, k, v)
        yield _after_cudnn(f"{name}, after cuDNN", *heads_first)
    else:
        yield _after_cpu_flash(f"{name}, after flash", *heads_first)
    inputs = q, k, v = tuple(t.detach().requires_grad_() for t in heads_first[1:])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    yield _through_autograd(
        f"F.scaled_dot_product_attention D {head_dim}, S {sizes.seqlen}", out, inputs, heads_first[0]
    )


def _after_flash(name: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Row:
    length = q.shape[1]
    out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, None, None, length, length, 0.0, True, False)
    pytorchs = aten._flash_attention_backward.default
    arguments = (dout, q, k, v, out, lse, None, None, length, length, 0.0, True, rng, unused)
    return Row(
        name,
        DIRECT,
        lambda: pytorchs(*arguments),
        lambda: flashbwd.attention_backward(dout, q, k, v, out, lse, causal=True),
    )


def _after_cudnn(name: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Row:
    length = q.shape[2]
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    pytorchs = aten._scaled_dot_product_cudnn_attention_backward.default
    arguments = (dout, q, k, v, out, lse, seed, offset, None, None, None, length, length, 0.0, True)
    ours = (*(t.transpose(1, 2) for t in (dout, q, k, v, out)), lse)
    return Row(
        name,
        DIRECT,
        lambda: pytorchs(*arguments),
        lambda: flashbwd.attention_backward(*ours, causal=True),
    )


def _after_cpu_flash(name: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Row:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    pytorchs = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ours = (*(t.transpose(1, 2) for t in (dout, q, k, v, out)), lse)
    return Row(
        name,
        DIRECT,
        lambda: pytorchs(dout, q, k, v, out, lse, 0.0, True),
        lambda: flashbwd.attention_backward(*ours, causal=True),
    )


def _norm_rows(device: torch.device, sizes: Sizes, columns: int) -> Iterator[Row]:
    shape, size = [columns], f"{sizes.rows} rows, N {columns}"
    x, dz = (torch.randn(sizes.rows, columns, device=device, dtype=sizes.dtype) for _ in range(2))
    gamma, beta = (torch.randn(columns, device=device, dtype=sizes.dtype) for _ in range(2))
    _, mu, rs = aten.native_layer_norm(x, shape, gamma, beta, EPS)
    layer_norm = aten.native_layer_norm_backward.default
    yield Row(
        f"layer_norm {size}",
        DIRECT,
        lambda: layer_norm(dz, x, shape, mu, rs, gamma, beta, [True, True, True]),
        lambda: flashbwd.layer_norm_backward(dz, x, mu, rs, gamma),
    )
    if device.type == "cuda":  # the CPU has no fused operator of RMSNorm
        _, rs_of_rms = aten._fused_rms_norm(x, shape, gamma, EPS)
        rms_norm = aten._fused_rms_norm_backward.default
        yield Row(
            f"rms_norm {size}",
            DIRECT,
            lambda: rms_norm(dz, x, shape, rs_of_rms, gamma, [True, True]),
            lambda: flashbwd.rms_norm_backward(dz, x, rs_of_rms, gamma),
        )
    inputs = tuple(t.detach().requires_grad_() for t in (x, gamma, beta))
    z = F.layer_norm(inputs[0], shape, inputs[1], inputs[2], EPS)
    yield _through_autograd(f"F.layer_norm {size}", z, inputs, dz)
    inputs = tuple(t.detach().requires_grad_() for t in (x, gamma))
    yield _through_autograd(f"F.rms_norm {size}", F.rms_norm(inputs[0], shape, inputs[1], EPS), inputs, dz)


def _through_autograd(name: str, out: Tensor, inputs: Sequence[Tensor], dout: Tensor) -> Row:
    """Return the row of a recorded graph. The graph calls operators, which the overrides replace while enabled."""

    def backward() -> None:
        for tensor in inputs:
            tensor.grad = None
        out.backward(dout, retain_graph=True)

    return Row(name, OVERRIDDEN, backward, backward)


# ---- measuring -----------------------------------------------------------------------------------


def burst(device: torch.device, call: Callable[[], Any], calls: int) -> float:
    """Return microseconds per call over one burst of calls, after one call that is not counted."""
    call()
    if device.type == "cuda":
        return host_bursts(call, 1, calls)[0]
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def measure_rows(
    rows: Sequence[Row], device: torch.device, sizes: Sizes, tick: Callable[[], None] = lambda: None
) -> list[HostTime]:
    """Time all rows in interleaved rounds. The first round is a warm-up, and ``tick`` is called after each round."""
    with flashbwd.enable():
        found = [HostTime(row, _fallbacks(row)) for row in rows]
    for turn in range(sizes.rounds + 1):
        for ours in (False, True) if turn % 2 else (True, False):
            with flashbwd.enable() if ours else contextlib.nullcontext():
                for of in found:
                    microseconds = burst(device, of.row.ours if ours else of.row.pytorchs, sizes.calls)
                    if turn > 0:
                        (of.ours if ours else of.pytorchs).append(microseconds)
        tick()
    return found


def _fallbacks(row: Row) -> int:
    flashbwd.stats(reset=True)
    row.ours()
    return sum(sum(counts.fallbacks.values()) for counts in flashbwd.stats().values())


def table(found: Sequence[HostTime], judged: bool = True) -> str:
    """Return the Markdown table of all rows."""
    lines = [
        f"| backward | how | PyTorch, us | flashbwd, us | ratio | at most {HOST_BAR:g} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for of in found:
        medians = (statistics.median(times) for times in (of.pytorchs, of.ours))
        cells = [of.row.name, of.row.how, *(f"{median:.1f}" for median in medians), f"{of.ratio:.2f}"]
        lines.append(f"| {' | '.join([*cells, of.verdict if judged else '-'])} |")
    return "\n".join(lines)


def main(device: torch.device) -> None:
    """Measure all rows on a device with the sizes of SIZES, and print the table."""
    sizes = SIZES[device.type]
    rounds = itertools.count()

    def tick() -> None:
        if (done := next(rounds)) % 10 == 0:
            print(f"round {done} of {sizes.rounds}", file=sys.stderr, flush=True)

    if device.type == "cpu":
        note = "Without a GPU this is only a smoke test: the overrides replace nothing, and the ratios mean nothing."
        print(note, file=sys.stderr)
    found = measure_rows(list(rows_of(device, sizes)), device, sizes, tick)
    print(table(found, judged=device.type == "cuda"))
