"""The inputs of attention cases, and the dropout masks of forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.bench.cases import DTYPES, AttentionCase


@dataclass(frozen=True)
class AttentionInputs:
    """q, dout (B, S, H, D | Dv), k, v (B, S, Hkv, D | Dv), or packed (T, H, D); bias (B or 1, H, S, S), slopes (H,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens: Tensor | None = None  # (B + 1,) int32


def make_inputs(case: AttentionCase, device: torch.device, seed: int) -> AttentionInputs:
    """Return random normal inputs. Kernels run faster on zeros, so timings with zeros would mislead."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])

    rows = (sum(case.lengths),) if case.lengths else (case.batch, case.seqlen)
    cu_seqlens = None
    if case.lengths:
        cu_seqlens = torch.tensor((0, *case.lengths), device=device).cumsum(0).int()
    return AttentionInputs(
        q=normal(*rows, case.heads, case.head_dim),
        k=normal(*rows, case.heads_kv, case.head_dim),
        v=normal(*rows, case.heads_kv, case.head_dim_v),
        dout=normal(*rows, case.heads, case.head_dim_v),
        bias=normal(case.bias_batch, case.heads, case.seqlen, case.seqlen) if case.bias_batch else None,
        alibi_slopes=_slopes(case.heads, device) if case.alibi else None,
        cu_seqlens=cu_seqlens,
    )


def _slopes(heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slopes 2^(-8 h / H) of Press et al., "Train Short, Test Long", 2022."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=device))


def dropout_mask(case: AttentionCase, x: AttentionInputs, forward: Callable[[Tensor], Tensor], batch: int) -> Tensor:
    """Return the dropout mask of a forward, (S, H, S) bool.

    If v is the identity matrix, the forward's output shows the mask. Each call recovers the mask of Dv keys.
    """
    keep = torch.empty(case.seqlen, case.heads, case.seqlen, dtype=torch.bool, device=x.q.device)
    for first in range(0, case.seqlen, case.head_dim_v):
        width = min(case.head_dim_v, case.seqlen - first)
        v = torch.zeros_like(x.v)
        index = torch.arange(width, device=v.device)
        v[:, first + index, :, index] = 1
        keep[:, :, first : first + width] = forward(v)[batch, :, :, :width] > 0
    return keep
