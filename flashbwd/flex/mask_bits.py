"""Evaluates a ``mask_mod`` once for tiles that are not full, and packs the result to one bit per pair.

Values in 16 bits are not rounded, because PyTorch's compiled forward, which hid the same pairs, does not round them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbwd.flex.tile import Tile
from flashbwd.mods.captures import CannotEmitError
from flashbwd.mods.trace import trace
from flashbwd.reference.decoding import FULL, PARTIAL
from flashbwd.reference.modes import OnScalars
from flashbwd.reference.modifications import Mod, run_mod, unrounded

_PAIRS = 2**21  # pairs that are evaluated together


def tiles_at_once(tile: Tile) -> int:
    """Return how many tiles may be unpacked together. The limit bounds the memory of their pairs."""
    return max(_PAIRS // (tile.queries * tile.keys), 1)


def depends_on_batch_and_head(mask_mod: Mod) -> tuple[bool, bool]:
    """Return whether a ``mask_mod`` reads the batch index and the head index. True if that cannot be found out."""
    try:
        graph = trace("mask_mod", mask_mod, False).graph
    except (CannotEmitError, RuntimeError):
        return True, True
    batch, head, *_ = (bool(node.users) for node in graph.nodes if node.op == "placeholder")
    return batch, head


def evaluate(
    block_mask: Any, states: Tensor, tiles: Tensor, sizes: tuple[int, int, int, int], tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate which pairs of some tiles are visible.

    Parameters
    ----------
    states : Tensor, (B or 1, H or 1, query blocks, key blocks)
        State of each block of the BlockMask.
    tiles : Tensor, (n, 4), int64
        Batch, head, query block and key block of each tile.
    sizes : tuple of int
        Batch size, query heads, queries and keys of the call.

    Returns
    -------
    bits : Tensor, (n, tile.queries, tile.keys // 32), int32
    any_visible, all_visible : Tensor, (n,), bool
    """
    parts = []
    for some in tiles.split(tiles_at_once(tile)):
        visible = _visible(block_mask, states, some, sizes, tile)
        parts.append((pack(visible), visible.flatten(1).any(1), visible.flatten(1).all(1)))
    bits, any_visible, all_visible = (torch.cat(part) for part in zip(*parts, strict=True))
    return bits, any_visible, all_visible


def _visible(block_mask: Any, states: Tensor, tiles: Tensor, sizes: tuple[int, int, int, int], tile: Tile) -> Tensor:
    """Return the visible pairs, (n, tile.queries, tile.keys) bool."""
    b, h, m, n = tiles.int().unbind(1)
    q = m.unsqueeze(1) * tile.queries + torch.arange(tile.queries, device=m.device, dtype=torch.int32)
    k = n.unsqueeze(1) * tile.keys + torch.arange(tile.keys, device=m.device, dtype=torch.int32)
    exists = (q < sizes[2]).unsqueeze(2) & (k < sizes[3]).unsqueeze(1)
    rows, columns = (
        index.clamp(max=length - 1) // size
        for index, length, size in zip((q, k), sizes[2:], block_mask.BLOCK_SIZE, strict=True)
    )
    lists_b, lists_h = (i * (size > 1) for i, size in zip((b, h), states.shape, strict=False))
    state = states[lists_b[:, None, None], lists_h[:, None, None], rows.unsqueeze(2), columns.unsqueeze(1)]
    visible = exists & (state == FULL)
    partial = exists & (state == PARTIAL)  # for other pairs, mask_mod may read beyond a tensor
    t, i, j = partial.nonzero().unbind(1)
    if len(t):
        visible[partial] = _asked(block_mask.mask_mod, b[t], h[t], q[t, i], k[t, j])
    return visible


def _asked(mask_mod: Mod, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return what ``mask_mod`` says about n pairs, (n,) bool."""
    with torch.no_grad(), OnScalars():
        asked = run_mod("mask_mod", torch.vmap(unrounded(mask_mod)), b, h, q, k)
    if asked.dtype != torch.bool:
        raise ValueError(f"flashbwd: mask_mod returned {str(asked.dtype).removeprefix('torch.')}, expected bool")
    return asked


def pack(visible: Tensor) -> Tensor:
    """Pack (..., 32 * words) bool to (..., words) int32. Element j is bit ``j % 32`` of word ``j // 32``."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=visible.device)
    octets = (visible.contiguous().view(torch.uint8).unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32)  # the first byte of a word is its lowest, on every machine that PyTorch supports


def unpack(bits: Tensor) -> Tensor:
    """Unpack (..., words) int32 to (..., 32 * words) bool. The inverse of :func:`pack`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts & 1).bool().flatten(-2)
