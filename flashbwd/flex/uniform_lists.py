"""Block lists in the one layout that PyTorch's forward kernel reads."""

from __future__ import annotations

import copy

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from flashbwd.flex.cache import kept

__all__ = ["with_uniform_lists"]


def with_uniform_lists(block_mask: BlockMask) -> BlockMask:
    """Return the BlockMask, or an equal one whose lists of partial and of full blocks have equal shapes and strides.

    Up to version 2.11, PyTorch's kernel reads the lists of full blocks with the sizes and strides of those of partial
    blocks. In all versions it takes the lists for contiguous. Without an error, it would attend to other keys.
    """
    names = [("kv_num_blocks", "kv_indices")]
    if block_mask.full_kv_num_blocks is not None:
        names.append(("full_kv_num_blocks", "full_kv_indices"))
    lists = [getattr(block_mask, name) for pair in names for name in pair]
    if lists[1].shape == lists[-1].shape and all(tensor.is_contiguous() for tensor in lists):
        return block_mask

    def make() -> BlockMask:
        uniform = copy.copy(block_mask)
        batches, heads, rows, _ = torch.broadcast_shapes(*(counts.unsqueeze(-1).shape for counts in lists[::2]))
        columns = max(indices.shape[3] for indices in lists[1::2])
        for pair in names:
            counts, indices = (getattr(block_mask, name) for name in pair)
            indices = pad(indices, (0, columns - indices.shape[3]))
            setattr(uniform, pair[0], counts.expand(batches, heads, rows).contiguous())
            setattr(uniform, pair[1], indices.expand(batches, heads, rows, columns).contiguous())
        return uniform

    if lists[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return make()  # each replay copies the lists again
    others = (block_mask.mask_mod, block_mask.BLOCK_SIZE, block_mask.seq_lengths)
    return kept(block_mask, "uniform lists", lists, make, others)
