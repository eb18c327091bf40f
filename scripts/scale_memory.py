"""Prints the table of docs/scale.md: the planned memory of attention over 1M tokens that are split over devices.

The script needs no GPU. It needs the test modules (``python setup.py build_test_modules``), which can plan for a GPU
that the machine does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # last, so that an installed package comes before the source tree

import flashbwd  # noqa: E402
from flashbwd.integrations import context_parallel, context_plan  # noqa: E402

SEQLEN = 2**20
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
H100 = {
    "usable": True,
    "cc_major": 9,
    "cc_minor": 0,
    "sm_count": 132,
    "smem_per_block": 227 * 1024,
    "has_attention_sm90": True,
}


def workspace_bytes(rows: int, keys: int, groups: int, deterministic: bool) -> int:
    """Return the workspace of one causal bf16 backward on an H100 with 1 / ``groups`` of the heads."""
    from kit.host import device_info, load_host, planned_for

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q = meta(1, rows, HEADS // groups, HEAD_DIM)
    k = meta(1, keys, HEADS_KV // groups, HEAD_DIM)
    lse = meta(1, HEADS // groups, rows, dtype=torch.float32)
    with planned_for(device_info(load_host(), **H100)):
        plan = flashbwd.plan_attention_backward(q, q, k, k, q, lse, causal=True, deterministic=deterministic)
    if plan.backend != "sm90":
        raise RuntimeError(f"flashbwd: planned for {plan.backend}, expected sm90: {plan.reasons}")
    return plan.workspace_bytes


def rows_of_table() -> Iterator[list[str]]:
    """Yield the rows of the table; HEADER names the columns."""
    bounds, window = (0, SEQLEN), (-1, 0)
    element, exact = 2, 4  # bytes in bf16 and fp32
    for devices in (1, 2, 4, 8, 16, 32):
        rows = SEQLEN // devices
        tensors = rows * HEAD_DIM * element * (4 * HEADS + 4 * HEADS_KV)  # q, out, dout, dq; k, v, dk, dv
        groups = context_parallel.KV_HEAD_GROUPS if devices > 1 else 1
        chunks = context_plan.balanced_chunks(bounds, window, devices)
        plans = [context_plan.plan(bounds, window, chunks, rank) for rank in range(devices)]
        calls = {(sum(call.queries), sum(call.keys)) for plan in plans for call in plan.calls}
        workspaces = [
            max(workspace_bytes(*call, groups, deterministic) for call in calls) for deterministic in (False, True)
        ]
        received = max(sum(plan.counts) for plan in plans) if devices > 1 else 0
        # Two groups of keys and values in bf16, and their gradients in fp32.
        keys = received * 2 * HEAD_DIM * HEADS_KV // groups * (2 * element + exact)
        yield [
            str(devices),
            f"{rows:,}",
            gib(tensors),
            gib(workspaces[0]),
            gib(workspaces[1]),
            f"{workspaces[0] / rows:,.0f}",
            gib(keys) if devices > 1 else "-",
        ]


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


HEADER = [
    "devices",
    "tokens per device",
    "q, k, v, out and gradients, GiB",
    "workspace, GiB",
    "workspace, deterministic, GiB",
    "workspace, bytes per token",
    "keys of other devices, GiB",
]

if __name__ == "__main__":
    from flashbwd.bench.report import table

    print(table(HEADER, rows_of_table()))
