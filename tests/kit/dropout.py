"""The dropout masks of the forwards whose gradients flashbwd computes, element by element.

This module shares no code with flashbwd.

Every mask element depends only on (seed, offset, b, h, i, j). The functions here evaluate it on arrays of indices, in
NumPy's 64-bit integers, without tiling and without sharing random words between elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORD = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Sequence[np.ndarray], seed: int, rounds: int) -> list[np.ndarray]:
    """Philox4x32 of a counter of four arrays of 32-bit words (as uint64), with a 64-bit seed as key.

    Returns four arrays of 32-bit words (as uint64).
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) & _WORD for word in counter)
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(rounds):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(key[0]),
            second & _WORD,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(key[1]),
            first & _WORD,
        )
        key = [(key[0] + _WEYL[0]) & 0xFFFFFFFF, (key[1] + _WEYL[1]) & 0xFFFFFFFF]
    return [c0, c1, c2, c3]


def keep_efficient(
    seed: int,
    offset: int,
    dropout_p: float,
    *,
    b: int,
    h: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    wide: bool,
    first_row: int = 0,
    first_col: int = 0,
    row_stride: int | None = None,
) -> np.ndarray:
    """The mask of PyTorch's memory-efficient forward, (seqlen_q, seqlen_k) bool; ``wide`` means 64-bit numbering.

    With ``first_row``, ``first_col`` and ``row_stride`` (the Sk of the sequence), only a part of a huge mask is
    computed.
    """
    stride = seqlen_k if row_stride is None else row_stride
    i = np.arange(first_row, first_row + seqlen_q, dtype=np.uint64)[:, None]
    j = np.arange(first_col, first_col + seqlen_k, dtype=np.uint64)[None, :]
    head_part = (b * heads + h) * max_seqlen_q * max_seqlen_k
    element = i * np.uint64(stride) + j
    if not wide:
        head_part &= 0xFFFFFFFF
        element &= _WORD
    n = np.uint64((offset + head_part) & 0xFFFFFFFFFFFFFFFF) + element
    quad = n >> np.uint64(2)
    zero = np.zeros_like(quad)
    words = np.stack(philox4x32([quad & _WORD, quad >> np.uint64(32), zero, zero], seed, rounds=10))
    x = np.take_along_axis(words, (n & np.uint64(3)).astype(np.int64)[None], axis=0)[0]
    uniform = x.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return uniform > np.float32(dropout_p)


def keep_flash(
    seed: int, offset: int, dropout_p: float, *, b: int, h: int, heads: int, seqlen_q: int, seqlen_k: int
) -> np.ndarray:
    """The mask of FlashAttention-2's forward, (seqlen_q, seqlen_k) bool."""
    i, j = np.broadcast_arrays(
        np.arange(seqlen_q, dtype=np.uint64)[:, None], np.arange(seqlen_k, dtype=np.uint64)[None, :]
    )
    r, c = (i % np.uint64(16)).astype(np.int64), (j % np.uint64(32)).astype(np.int64)
    lane = (r % 8) * 4 + (c % 8) // 2
    low = np.uint64((offset + (b * heads + h) * 32) & 0xFFFFFFFFFFFFFFFF) + lane.astype(np.uint64)
    words = philox4x32([low & _WORD, low >> np.uint64(32), i // np.uint64(16), j // np.uint64(32)], seed, rounds=7)
    index = (c // 16) * 8 + ((c % 16) // 8) * 4 + (r // 8) * 2 + c % 2  # of 16 little-endian bytes
    word = np.take_along_axis(np.stack(words), (index // 4)[None], axis=0)[0]
    byte = (word >> (8 * (index % 4)).astype(np.uint64)) & np.uint64(0xFF)
    threshold = int(np.floor(float(np.float32(1.0) - np.float32(dropout_p)) * 255.0))
    return byte <= np.uint64(threshold)


def keep_masks(
    layout: str,
    seed: int,
    offset: int,
    dropout_p: float,
    *,
    heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> list[Tensor]:
    """One (H, seqlen_q, seqlen_k) bool tensor per sequence, for layout "flash", "efficient32" or "efficient64"."""

    def head(b: int, h: int) -> np.ndarray:
        shape = {"seqlen_q": seqlens_q[b], "seqlen_k": seqlens_k[b]}
        if layout == "flash":
            return keep_flash(seed, offset, dropout_p, b=b, h=h, heads=heads, **shape)
        return keep_efficient(
            seed,
            offset,
            dropout_p,
            b=b,
            h=h,
            heads=heads,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            wide=layout == "efficient64",
            **shape,
        )

    assert layout in ("flash", "efficient32", "efficient64"), layout
    return [torch.from_numpy(np.stack([head(b, h) for h in range(heads)])) for b in range(len(seqlens_q))]


def keep_scale(layout: str, dropout_p: float, dtype: torch.dtype) -> float:
    """The factor of kept weights: 1 / (1 - p), which the memory-efficient forward rounds to its dtype."""
    scale = 1 / (1 - dropout_p)
    return scale if layout == "flash" else float(torch.tensor(scale, dtype=torch.float64).to(dtype))
