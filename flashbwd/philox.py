"""Regenerates the dropout masks of PyTorch's and FlashAttention's forwards with integer tensor operators.

Philox4x32 is a counter-based generator: a block of four 32-bit words is a pure function of a 128-bit counter and a
64-bit key, so any tile of a mask can be computed independently. Words are stored in int64 tensors, because PyTorch's
unsigned dtypes lack many operators; int64 products wrap modulo 2**64, as unsigned products do.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("flash", "efficient32", "efficient64")

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Word = Any  # an int or an int64 tensor


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], rounds: int) -> list[Word]:
    """Compute four 32-bit random words for each counter.

    Parameters
    ----------
    counter : four ints or int64 tensors of one shape, each in [0, 2**32)
    key : two ints or 0-d int64 tensors, each in [0, 2**32)
    rounds : 10 in cuRAND's generator (PyTorch), 7 in FlashAttention-2

    Returns
    -------
    Four ints or int64 tensors, each in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        high0, high1 = product0 >> 32, product1 >> 32
        high0 &= _MASK32  # in place: allocating new tensors would cost more than the arithmetic
        high0 ^= c3
        high0 ^= k1
        high1 &= _MASK32
        high1 ^= c1
        high1 ^= k0
        product0 &= _MASK32
        product1 &= _MASK32
        c0, c1, c2, c3 = high1, product1, high0, product0
        k0 = (k0 + _KEY_STEPS[0]) & _MASK32
        k1 = (k1 + _KEY_STEPS[1]) & _MASK32
    return [c0, c1, c2, c3]


def as_word64(value: Word, device: torch.device) -> Word:
    """Convert a 64-bit seed or offset to an int in [-2**63, 2**63), or to a 0-d int64 tensor if it is on `device`.

    A tensor on the GPU is not read: that would synchronise, and a captured CUDA graph must use the values that the
    tensor has at replay.
    """
    if isinstance(value, Tensor):
        value = value.detach().reshape(())
        if value.dtype == torch.uint64:
            value = value.view(torch.int64)
        if value.device.type != "cpu" and value.device == device:
            return value.to(torch.int64)
        value = int(value.item())
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def keep_scale(layout: str, dropout_p: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - p), by which kept probabilities are multiplied.

    PyTorch's memory-efficient forward rounds this factor to `dtype`.
    """
    scale = 1.0 / (1.0 - dropout_p)
    return scale if layout == "flash" else float(torch.tensor(scale, dtype=dtype).item())


def keep_mask(
    layout: str,
    seed: Word,
    offset: Word,
    dropout_p: float,
    batch_heads: Tensor,
    rows: tuple[int, int],
    cols: tuple[int, int],
    *,
    seqlen_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Compute one tile of a forward's dropout mask.

    Parameters
    ----------
    layout : which forward drew the mask: ``"flash"`` (FlashAttention-2), ``"efficient32"`` or ``"efficient64"``
        (PyTorch's memory-efficient forward with 32-bit or 64-bit element numbers)
    seed, offset : ints, or 0-d int64 tensors on the device of `batch_heads` (see `as_word64`)
    dropout_p : probability of dropping, in [0, 1)
    batch_heads : (n,) int64, ``b * H + h`` with H the number of query heads
    rows, cols : half-open ranges of queries and keys, counted within the sequence
    seqlen_k : keys of this sequence
    max_seqlen_q, max_seqlen_k : lengths of the longest sequences of the call (for dense inputs, Sq and Sk)

    Returns
    -------
    (n, rows, cols) bool, True where the probability is kept.
    """
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    if layout == "flash":
        return _flash_tile(key, offset, dropout_p, batch_heads, rows, cols)
    if layout not in LAYOUTS:
        raise ValueError(f"flashbwd: rng_state.layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    wraps = layout == "efficient32"
    plane = batch_heads * (max_seqlen_q * max_seqlen_k)  # (n,)
    if wraps:
        plane = plane & _MASK32
    first = torch.arange(rows[0], rows[1], device=batch_heads.device)[:, None] * seqlen_k  # (rows, 1)
    crosses = wraps and (rows[0] * seqlen_k) >> 32 != (rows[1] * seqlen_k) >> 32
    if crosses:  # numbers wrap around within this tile, so each element computes its own block
        within = (first + torch.arange(cols[0], cols[1], device=batch_heads.device)) & _MASK32  # (rows, cols)
        number = offset + plane[:, None, None] + within  # (n, rows, cols)
        kept = _efficient_blocks(key, number >> 2, dropout_p)  # (n, rows, cols, 4)
        return kept.gather(-1, (number & 3).unsqueeze(-1)).squeeze(-1)
    within = first + cols[0]
    if wraps:
        within = within & _MASK32
    number = offset + plane[:, None, None] + within  # (n, rows, 1), of the first column
    width = cols[1] - cols[0]
    blocks = (number >> 2) + torch.arange((width + 6) // 4, device=batch_heads.device)  # (n, rows, blocks)
    kept = _efficient_blocks(key, blocks, dropout_p).flatten(-2)  # (n, rows, 4 * blocks)
    return kept.gather(-1, (number & 3) + torch.arange(width, device=batch_heads.device))


def keep_elements(seed: Word, offset: Word, dropout_p: float, first: int, count: int, device: torch.device) -> Tensor:
    """Compute elements `first` to `first + count` of a one-dimensional mask with the "efficient64" layout.

    Parameters
    ----------
    seed, offset : ints, or 0-d int64 tensors on `device` (see `as_word64`)
    dropout_p : probability of dropping, in [0, 1)
    first, count : range of elements; element 0 of the mask uses random number `offset`

    Returns
    -------
    (count,) bool, True where the element is kept.
    """
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    number = offset + first
    blocks = (number >> 2) + torch.arange((count + 6) // 4, device=device)
    kept = _efficient_blocks(key, blocks, dropout_p).flatten()  # (4 * blocks,)
    return kept[(number & 3) + torch.arange(count, device=device)]


def _efficient_blocks(key: tuple[Word, Word], block: Tensor, dropout_p: float) -> Tensor:
    """Return which elements are kept, (..., 4), for blocks that a 62-bit Philox counter in subsequence 0 numbers."""
    words = philox4x32((block & _MASK32, (block >> 32) & 0x3FFFFFFF, 0, 0), key, 10)
    threshold = _float32(dropout_p)
    return torch.stack([word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33) > threshold for word in words], -1)


def _flash_tile(
    key: tuple[Word, Word],
    offset: Word,
    dropout_p: float,
    batch_heads: Tensor,
    rows: tuple[int, int],
    cols: tuple[int, int],
) -> Tensor:
    """Compute a tile of FlashAttention-2's mask: one Philox call per lane of a 16 x 32 block, one byte per element."""
    device = batch_heads.device
    row0, col0 = rows[0] // 16, cols[0] // 32
    block_rows = torch.arange(row0, (rows[1] + 15) // 16, device=device)[:, None, None]  # (R, 1, 1)
    block_cols = torch.arange(col0, (cols[1] + 31) // 32, device=device)[:, None]  # (C, 1)
    lanes = torch.arange(32, device=device)
    low = offset + batch_heads[:, None, None, None] * 32 + lanes  # (n, 1, 1, 32)
    counter = torch.broadcast_tensors(low & _MASK32, (low >> 32) & _MASK32, block_rows, block_cols)
    word = torch.stack(philox4x32(counter, key, 7), -1)  # (n, R, C, 32, 4)
    shifts = torch.arange(0, 32, 8, device=device)
    kept = ((word.unsqueeze(-1) >> shifts) & 0xFF) <= math.floor(_float32(1.0 - _float32(dropout_p)) * 255.0)
    # lane = (row % 8) * 4 + (col % 8) / 2; byte = (col / 16) * 8 + (col % 16 / 8) * 4 + (row / 8) * 2 + col % 2
    n, num_rows, num_cols = kept.shape[:3]
    kept = kept.view(n, num_rows, num_cols, 8, 4, 2, 2, 2, 2)  # n R C row%8 col%8/2 | col/16 col%16/8 row/8 col%2
    kept = kept.permute(0, 1, 7, 3, 2, 5, 6, 4, 8).reshape(n, num_rows * 16, num_cols * 32)
    return kept[:, rows[0] - row0 * 16 : rows[1] - row0 * 16, cols[0] - col0 * 32 : cols[1] - col0 * 32]
