"""A block mask as a part of the score_mod, for masks whose bits would take too much memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbwd.flex.lists import BlockStates
from flashbwd.reference.decoding import FULL, PARTIAL
from flashbwd.reference.modifications import Mod

__all__ = ["hidden_scores"]


def hidden_scores(score_mod: Mod | None, block_mask: Any, blocks: BlockStates) -> Mod:
    """Return a ``score_mod`` whose score is -inf where ``block_mask`` hides a pair.

    ``mask_mod`` is evaluated for pairs of partial blocks only. For others it could read beyond a captured tensor, which
    would be an illegal access in a kernel.

    Parameters
    ----------
    score_mod : callable, optional
        The score of a visible pair. Default: the score as it is.
    blocks : BlockStates
        Of ``block_mask``.
    """
    mask_mod = block_mask.mask_mod
    rows, columns = block_mask.BLOCK_SIZE
    states, partial_pair = blocks
    by_batch, by_head = states.shape[0] > 1, states.shape[1] > 1

    def hidden(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        state = states[b if by_batch else 0, h if by_head else 0, q_idx // rows, kv_idx // columns]
        visible = state == FULL
        if partial_pair is not None:
            partial = state == PARTIAL
            pair = [torch.where(partial, index, partial_pair[i]) for i, index in enumerate((b, h, q_idx, kv_idx))]
            visible = visible | (partial & mask_mod(*pair))
        modified = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(visible, modified, -float("inf"))

    return hidden
