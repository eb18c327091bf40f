"""Reference implementation of flex decoding, blockwise over the keys.

``torch.vmap`` vectorises the modifications. As in the kernels, the block lists of a BlockMask determine which keys are
visible: all keys of a full block, the keys of a partial block for which ``mask_mod`` is True, and no key of a block
that is in neither list.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd.reference.modes import evaluating_on, index_dtype
from flashbwd.reference.modifications import (
    Mod,
    accumulator,
    result_of,
    run_mod,
    unrounded,
    vectorised,
)

ABSENT, PARTIAL, FULL = 0, 1, 2  # states of a block of the mask

_QUERIES = 512  # query rows per tile
_SCORES = 2**20  # maximum elements per tile of scores, unless _FEWEST_KEYS keys are already more
_FEWEST_KEYS = 128


@dataclass(frozen=True)
class DecodingCall:
    """The arguments of a call, except query, key and value.

    Attributes
    ----------
    score_mod : callable, optional
        ``(score, b, h, q_idx, kv_idx) -> score`` on scalars.
    block_mask : BlockMask, optional
    scale : float
    prescale : bool
        Scale q before the matrix product instead of the scores.
    rows_safe : bool
        The caller guarantees that every row sees a key.
    splits : int, optional
        Minimum number of KV splits that are reduced separately.
    mask_captured : tuple of Tensor
        The tensors that ``mask_mod`` captures, if the caller has found them.
    mask_key : object
        Differs if ``mask_mod`` computes something else from them. None if the caller does not know.
    unrounded : bool
        The modifications do not round values in 16 bits, as if Inductor had compiled them.
    """

    score_mod: Mod | None
    block_mask: Any
    scale: float
    prescale: bool = False
    rows_safe: bool = False
    splits: int | None = None
    mask_captured: tuple[Tensor, ...] = ()
    mask_key: Any = None
    unrounded: bool = False


@dataclass(frozen=True, slots=True)
class Blocks:
    """The fields of a BlockMask that this module reads. The operator of a compiled graph creates it."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    mask_mod: Mod


# ---- which keys ----


def block_states(block_mask: Any, seqlen_k: int) -> Tensor:
    """Return ABSENT, PARTIAL or FULL for each block: (B or 1, H or 1, query blocks, key blocks)."""
    blocks = -(-seqlen_k // block_mask.BLOCK_SIZE[1])
    states = listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, blocks) * PARTIAL
    if block_mask.full_kv_num_blocks is None:
        return states
    return states.maximum(listed_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks) * FULL)


def listed_blocks(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Return 1 for each block among the first ``counts`` entries of its (..., columns) index list, else 0."""
    column = torch.arange(indices.shape[-1], device=indices.device)
    index = torch.where(column < counts.unsqueeze(-1), indices, blocks).clamp(0, blocks).long()
    listed = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.uint8, device=indices.device)
    return listed.scatter(-1, index, torch.ones_like(index, dtype=torch.uint8))[..., :blocks]


@dataclass(frozen=True)
class Tile:
    """Queries [q0, q1) and keys [k0, k1). ``masked`` is True if some of the pairs may be hidden."""

    q0: int
    q1: int
    k0: int
    k1: int
    masked: bool


def _tiles(call: DecodingCall, states: Tensor | None, q: Tensor, seqlen_k: int) -> Iterator[tuple[int, list[Tile]]]:
    """Yield the number of queries of each range of queries, and its tiles.

    If the host can read the states, all blocks of a tile have the same state for each batch and head, and no tile
    consists of absent blocks. So a NaN in one block reaches only the rows and keys of that block.
    """
    B, H, Sq, _ = q.shape
    known = None if states is None or not _readable(states) else states.flatten(0, 1).cpu()
    size = (Sq, seqlen_k) if known is None else call.block_mask.BLOCK_SIZE
    for q0, q1 in _equal_ranges(None if known is None else known.transpose(1, 2), size[0], Sq, _QUERIES):
        most = max(_FEWEST_KEYS, _SCORES // (B * H * (q1 - q0)))
        if call.splits is not None:
            most = min(most, max(seqlen_k // call.splits, 1))  # rounded down: at least as many splits as requested
        row = None if known is None else known[:, q0 // size[0]]
        tiles = []
        for k0, k1 in _equal_ranges(row, size[1], seqlen_k, most):
            present, full = (True, states is None) if row is None else _extremes(row[:, k0 // size[1]])
            if present:
                tiles.append(Tile(q0, q1, k0, k1, masked=not full))
        yield q1 - q0, tiles


def _readable(states: Tensor) -> bool:
    """Return whether the host can read the states: they have values, and no CUDA graph is being captured."""
    if type(states) is not Tensor or torch.compiler.is_compiling() or states.device.type not in ("cpu", "cuda"):
        return False
    return not (states.is_cuda and torch.cuda.is_current_stream_capturing())


def _extremes(states: Tensor) -> tuple[bool, bool]:
    """Return whether any block is present, and whether all blocks are full."""
    least, largest = states.aminmax()
    return int(largest) != ABSENT, int(least) == FULL


def _equal_ranges(blocks: Tensor | None, size: int, length: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most ``most`` positions that cover ``length``.

    Within a range, all entries of the last dimension of ``blocks`` are equal.
    """
    bounds = []
    if blocks is not None:
        changes = (blocks[..., 1:] != blocks[..., :-1]).flatten(0, -2).any(0)
        bounds = [(i + 1) * size for i, change in enumerate(changes.tolist()) if change]
    for start, end in itertools.pairwise([0, *bounds, length]):
        for first in range(start, end, most):
            yield first, min(first + most, end)


# ---- one tile ----


class Operands:
    """Provides q, k, v, scores and masks of a call, one tile at a time."""

    def __init__(self, call: DecodingCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.call = call
        self.q, self.k, self.v = q, k, v
        self.dtype = accumulator(q.dtype)
        self.group = q.shape[1] // k.shape[1]
        self.states = None if call.block_mask is None else block_states(call.block_mask, k.shape[2])
        self.index = [torch.arange(n, device=q.device, dtype=index_dtype(q.device)) for n in (*q.shape[:3], k.shape[2])]
        self.score_mod = None if call.score_mod is None else vectorised(self._rounded(call.score_mod), True)
        self.mask_mod = None if call.block_mask is None else vectorised(self._rounded(call.block_mask.mask_mod), False)

    def _rounded(self, mod: Mod) -> Mod:
        return unrounded(mod) if self.call.unrounded else mod

    def tiles(self) -> Iterator[tuple[int, list[Tile]]]:
        return _tiles(self.call, self.states, self.q, self.k.shape[2])

    def rows(self, source: Tensor, tile: Tile, visible: Tensor | None) -> Tensor:
        """Return (B, Hkv, group * rows, D) of q or dout. Rows that see no key of the tile are zeroed, as in keys()."""
        rows = source[:, :, tile.q0 : tile.q1].to(self.dtype)
        if visible is not None:
            rows = torch.where(visible.any(-1, keepdim=True), rows, 0.0)
        return self.fold(rows)

    def fold(self, rows: Tensor) -> Tensor:
        """Reshape (B, H, rows, D) to (B, Hkv, group * rows, D)."""
        return rows.unflatten(1, (-1, self.group)).flatten(2, 3)

    def unfold(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.group, -1)).flatten(1, 2)

    def keys(self, source: Tensor, tile: Tile, visible: Tensor | None) -> Tensor:
        """Return (B or 1, Hkv, n, D) of k or v. Keys that no row of the tile sees become 0: they may hold NaN."""
        keys = source[:, :, tile.k0 : tile.k1].to(self.dtype)
        if visible is None:
            return keys
        seen = visible.unflatten(1, (-1, self.group)).any(3).any(2)  # (B, Hkv, n)
        if keys.shape[0] == 1:
            seen = seen.any(0, keepdim=True)
        return torch.where(seen.unsqueeze(-1), keys, 0.0)

    def visible(self, tile: Tile) -> Tensor | None:
        """Return the visible pairs of a tile, (B, H, rows, n); None if all are visible."""
        if self.states is None or self.mask_mod is None or not tile.masked:
            return None
        b, h, q, k = self.index
        q, k = q[tile.q0 : tile.q1], k[tile.k0 : tile.k1]
        size = self.call.block_mask.BLOCK_SIZE
        states = self.states.index_select(2, q // size[0]).index_select(3, k // size[1])
        with torch.no_grad(), evaluating_on(q.device):
            asked = run_mod("mask_mod", self.mask_mod, b, h, q, k)
        if asked.dtype != torch.bool:
            raise ValueError(f"flashbwd: mask_mod returned {_name_of(asked.dtype)}, expected bool")
        return (states == FULL) | ((states == PARTIAL) & asked)

    def raw_scores(self, tile: Tile, visible: Tensor | None) -> Tensor:
        """Return scale * q @ k.T, (B, H, rows, n)."""
        q, k = self.rows(self.q, tile, visible), self.keys(self.k, tile, visible)
        scale = self.call.scale
        scores = (q * scale) @ k.mT if self.call.prescale else (q @ k.mT) * scale
        return self.unfold(scores)

    def modified(self, scores: Tensor, tile: Tile) -> Tensor:
        if self.score_mod is None:
            return scores
        b, h, q, k = self.index
        with evaluating_on(scores.device):
            result = run_mod("score_mod", self.score_mod, scores, b, h, q[tile.q0 : tile.q1], k[tile.k0 : tile.k1])
        return self._checked(result)

    def modified_pairs(self, scores: Tensor, tile: Tile, visible: Tensor) -> Tensor:
        """Return the modified scores of the visible pairs only, (n,), in the order of ``visible.nonzero()``."""
        assert self.call.score_mod is not None
        if not visible.any():  # torch.vmap takes no empty dimension
            return scores.new_empty(0)
        score_mod = torch.vmap(functools.partial(result_of, self._rounded(self.call.score_mod)))
        starts = (0, 0, tile.q0, tile.k0)
        pairs = (i + start for i, start in zip(visible.nonzero().unbind(1), starts, strict=True))
        with evaluating_on(scores.device):
            result = run_mod("score_mod", score_mod, scores[visible], *(i.to(index_dtype(i.device)) for i in pairs))
        return self._checked(result)

    def _checked(self, result: Tensor) -> Tensor:
        if not result.is_floating_point():
            raise ValueError(f"flashbwd: score_mod returned {_name_of(result.dtype)}, expected a floating-point score")
        return result.to(self.dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- forward and backward ----


def decoding_forward(call: DecodingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute out, (B, H, Sq, Dv), and the natural log-sum-exp and maximum score of each row, (B, H, Sq).

    Parameters
    ----------
    q : Tensor, (B, H, Sq, D)
    k, v : Tensor, (B or 1, Hkv, Sk, D or Dv)
        None of the sizes is 0.

    Returns
    -------
    out, lse, max_scores : Tensor
        In the accumulation dtype: float32, or float64 for float64 inputs. A row that sees no key has out 0, and lse
        and max_scores -inf.
    """
    x = Operands(call, q, k, v)
    parts = [_attend(x, rows, tiles) for rows, tiles in x.tiles()]
    out, lse, largest = (torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    return out, lse, largest


def _attend(x: Operands, rows: int, tiles: list[Tile]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one query block with an online softmax over its key tiles."""
    B, H = x.q.shape[:2]
    largest = x.q.new_full((B, H, rows, 1), -torch.inf, dtype=x.dtype)
    total = torch.zeros_like(largest)
    out = x.q.new_zeros((B, H, rows, x.v.shape[3]), dtype=x.dtype)
    for tile in tiles:
        visible = x.visible(tile)
        scores = x.modified(x.raw_scores(tile, visible), tile)
        if visible is not None:
            scores = torch.where(visible, scores, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        # For a row without a visible key so far, exp(-inf - 0) = 0, but exp(-inf - -inf) would be NaN.
        base = largest.masked_fill(largest == -torch.inf, 0.0)
        p = torch.exp(scores - base)
        shrink = torch.exp(before - base)
        total = total * shrink + p.sum(-1, keepdim=True)
        out = out * shrink + x.unfold(x.fold(p) @ x.keys(x.v, tile, visible))
    out = out / (total if x.call.rows_safe else torch.where(total == 0, 1.0, total))
    return out, (largest + total.log()).squeeze(-1), largest.squeeze(-1)
