"""A block mask as a part of the score_mod, for masks whose bits would take too much memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbwd.reference.decoding import FULL, PARTIAL
from flashbwd.reference.modifications import Mod

__all__ = ["hidden_scores"]


def hidden_scores(score_mod: Mod | None, block_mask: Any, states: Tensor) -> Mod:
    """Return a ``score_mod`` whose score is -inf where ``block_mask`` hides a pair.

    A kernel evaluates ``mask_mod`` for all pairs. For those outside of partial blocks it may index beyond a captured
    tensor; kernels bound such an index, and the result is not used.

    Parameters
    ----------
    score_mod : callable, optional
        The score of a visible pair. Default: the score as it is.
    states : Tensor, (B or 1, H or 1, query blocks, key blocks), uint8
        ABSENT, PARTIAL or FULL for each block of ``block_mask``.
    """
    mask_mod = block_mask.mask_mod
    rows, columns = block_mask.BLOCK_SIZE
    by_batch, by_head = states.shape[0] > 1, states.shape[1] > 1

    def hidden(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        state = states[b if by_batch else 0, h if by_head else 0, q_idx // rows, kv_idx // columns]
        visible = (state == FULL) | ((state == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))
        modified = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(visible, modified, -float("inf"))

    return hidden
