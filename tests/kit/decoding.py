"""Flex decoding cases and a float64 oracle with dense scores, dense masks and mods on broadcast index tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; ``batch_kv`` is 1 or ``batch``."""

    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    seqlen_q: int = 3
    seqlen_k: int = 203
    head_dim: int = 16
    head_dim_v: int = 16
    batch_kv: int | None = None

    def __str__(self) -> str:
        kv = "" if self.batch_kv is None else f"({self.batch_kv})"
        return (
            f"b{self.batch}{kv}-h{self.heads}:{self.heads_kv}-q{self.seqlen_q}-k{self.seqlen_k}"
            f"-d{self.head_dim}:{self.head_dim_v}"
        )

    def tensors(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batch_kv = self.batch if self.batch_kv is None else self.batch_kv
        sizes = (
            (self.batch, self.heads, self.seqlen_q, self.head_dim),
            (batch_kv, self.heads_kv, self.seqlen_k, self.head_dim),
            (batch_kv, self.heads_kv, self.seqlen_k, self.head_dim_v),
        )
        q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes)
        return q, k, v


def score_mods(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Mod]:
    """Modifications by name. They work on 0-d tensors and on tensors that broadcast."""
    generator = torch.Generator().manual_seed(7)

    def captured(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    B, H, Sq, Sk = shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k
    bias2, bias3, bias4 = captured(Sq, Sk), captured(H, Sq, Sk), captured(B, H, Sq, Sk)
    offsets = captured(H)
    slopes = 2.0 ** -torch.arange(1, H + 1, device=device, dtype=dtype)
    documents = torch.arange(Sk, device=device) * 5 // Sk
    inf = float("inf")
    return {
        "identity": lambda s, b, h, q, k: s,
        "squared": lambda s, b, h, q, k: s * s,
        "causal": lambda s, b, h, q, k: torch.where(q + Sk - Sq >= k, s, -inf),
        "inverse_causal": lambda s, b, h, q, k: torch.where(q <= k, s, -inf),
        "relative_bias": lambda s, b, h, q, k: s + (q - k),
        "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q - (Sk - Sq)),
        "windowed": lambda s, b, h, q, k: torch.where((q + Sk - Sq - k).abs() <= 20, s, -inf),
        "head_offset": lambda s, b, h, q, k: s + offsets[h],
        "head_offset_times": lambda s, b, h, q, k: s * h + offsets[h] * b,
        "softcap": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
        "trig": lambda s, b, h, q, k: torch.sin(s) + torch.cos(s * 0.5),
        "silu": lambda s, b, h, q, k: s * torch.sigmoid(s),
        "integers": lambda s, b, h, q, k: torch.where((k // 3 + q) % 5 == (b ^ 1), s * 0.5, s + (k & 7)),
        "document": lambda s, b, h, q, k: torch.where(documents[k] == documents[q + Sk - Sq], s, -inf),
        "bias_rank2": lambda s, b, h, q, k: s + bias2[q, k],
        "bias_rank3": lambda s, b, h, q, k: s + bias3[h, q, k],
        "bias_rank4": lambda s, b, h, q, k: s + bias4[b, h, q, k],
    }


def mask_mods(shape: Shape, device: str = "cpu") -> dict[str, Mod]:
    """Masks by name; "per_head" and "per_batch" differ between heads and between batches."""
    Sk, shift = shape.seqlen_k, shape.seqlen_k - shape.seqlen_q
    documents = torch.arange(Sk, device=device) * 5 // Sk
    return {
        "causal": lambda b, h, q, k: q + shift >= k,
        "window": lambda b, h, q, k: (q + shift - k).abs() <= 40,
        "document": lambda b, h, q, k: documents[k] == documents[q + shift],
        "per_head": lambda b, h, q, k: (k // 16) % (h + 2) == 0,
        "per_batch": lambda b, h, q, k: k >= 100 * b,
        "some_rows_empty": lambda b, h, q, k: (q % 2 == 1) & (k < 70),
        "all_rows_empty": lambda b, h, q, k: k < 0 * q,
    }


def block_mask(mod: Mod, shape: Shape, device: str = "cpu", block: int | tuple[int, int] = 64) -> BlockMask:
    return create_block_mask(
        mod, shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k, device=device, BLOCK_SIZE=block
    )


def mask_of_lengths(lengths: Tensor, seqlen_k: int) -> BlockMask:
    """A mask for one query per sequence, which sees the first ``lengths[b]`` keys.

    ``lengths`` (batch,) may change later, so the mask lists every block.
    """
    batch, blocks = lengths.numel(), -(-seqlen_k // 128)
    indices = torch.arange(blocks, dtype=torch.int32, device=lengths.device)
    return BlockMask.from_kv_blocks(
        torch.full((batch, 1, 1), blocks, dtype=torch.int32, device=lengths.device),
        indices.expand(batch, 1, 1, blocks).contiguous(),
        mask_mod=lambda b, h, q, k: k < lengths[b],
        seq_lengths=(1, seqlen_k),
    )


def grids(shape: Shape, device: Any) -> list[Tensor]:
    """b, h, q_idx, kv_idx that broadcast to (B, H, Sq, Sk)."""
    sizes = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k)
    return [
        torch.arange(n, device=device).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes)
    ]


def dense_mask(mod: Mod, shape: Shape, device: Any) -> Tensor:
    return mod(*grids(shape, device)).expand(shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k)


def oracle(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, from the whole score matrix in ``dtype``; 0 and -inf in rows that see no key."""
    group = shape.heads // shape.heads_kv
    keys, values = (t.to(dtype).repeat_interleave(group, 1).expand(shape.batch, -1, -1, -1) for t in (k, v))
    scores = q.to(dtype) @ keys.mT * (shape.head_dim**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *grids(shape, q.device)).to(dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1).masked_fill(empty.squeeze(-1), -torch.inf)
    return weights @ values, lse
