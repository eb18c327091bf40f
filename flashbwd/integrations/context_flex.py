"""FlexAttention over rows that are split over devices.

Each device keeps its queries and receives the keys and values of the blocks that they see, in one all-to-all. It then
computes :func:`flashbwd.flex_attention` with its part of the block mask. The gradients of received rows go back to the
device that holds the rows, which adds them in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from flashbwd import _arguments
from flashbwd._autograd import differentiable_once
from flashbwd.flex import arguments
from flashbwd.flex.attention import flex_attention
from flashbwd.flex.block_mask_checks import check_lists
from flashbwd.flex.cache import kept
from flashbwd.flex.check import check_call
from flashbwd.integrations.context_parallel import (
    Exchange,
    accumulator_dtype,
    add_returned,
    departures,
    rows_of,
    send_back,
)
from flashbwd.integrations.context_plan import Plan, Range, balanced, exchange_of, joined
from flashbwd.integrations.context_split import RowSplit, check_mesh, check_rows
from flashbwd.reference.decoding import FULL, PARTIAL, block_states
from flashbwd.reference.modifications import Mod


@dataclass(frozen=True, eq=False)
class BlockMaskSplit(RowSplit):
    """The rows that each device holds, and this device's part of a block mask; made by :func:`split_block_mask`.

    Attributes
    ----------
    block_mask : BlockMask
        Of this device's rows and the keys that it receives.
    key_rows : Tensor, (keys,), int64
        The index in the whole sequence of each key that this device receives.
    """

    block_mask: BlockMask
    key_rows: Tensor
    _query_rows: Tensor
    _exchange: Plan

    def score_mod(self, score_mod: Mod | None) -> Mod | None:
        """Return ``score_mod``, which has indices of the whole sequence, for the indices of this device's tensors."""
        if score_mod is None:
            return None
        rows, keys = self._query_rows, self.key_rows
        key = ("for local indices", score_mod)
        return kept(self.block_mask, key, [], lambda: lambda s, b, h, q, k: score_mod(s, b, h, rows[q], keys[k]))


def split_block_mask(mesh: DeviceMesh, block_mask: BlockMask) -> BlockMaskSplit:
    """Split the rows of a sequence with a block mask over the devices of a mesh dimension.

    Every device must pass the same mask. Devices get whole blocks of queries with almost equally many visible blocks.
    The numbers of rows are equal if the blocks divide evenly, and otherwise differ by at most 16 blocks. Make one split
    per mask and use it for all layers. The host reads the lists.

    Parameters
    ----------
    mesh : DeviceMesh
        One-dimensional, for example ``mesh["context"]`` of a larger mesh.
    block_mask : BlockMask
        Of the whole sequence, for self-attention: as many queries as keys. Its ``mask_mod`` gets indices of the whole
        sequence.

    Returns
    -------
    BlockMaskSplit
        With ``take``, ``gather`` and ``rows`` as :class:`ContextSplit` has them.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    check_mesh(mesh)
    if not isinstance(block_mask, BlockMask):
        raise ValueError(f"flashbwd: block_mask is {_arguments.came(block_mask)}, expected a BlockMask")
    lengths = (block_mask.seq_lengths[0], block_mask.seq_lengths[1])
    if lengths[0] != lengths[1]:
        raise ValueError(f"flashbwd: block_mask was made for lengths {lengths}, expected as many queries as keys")
    check_lists(block_mask, lengths)
    total, (queries, keys) = lengths[0], block_mask.BLOCK_SIZE
    states = block_states(block_mask, total)
    listed = (states > 0).flatten(0, 1).cpu()
    if listed.shape[1] < mesh.size():
        raise ValueError(
            f"flashbwd: block_mask has {listed.shape[1]} blocks of {queries} queries, expected at least one for each "
            f"of the {mesh.size()} devices"
        )
    owned = balanced(listed.sum((0, 2)), mesh.size())
    chunks = tuple(_in_rows(blocks, queries, total) for blocks in owned)
    read = [_key_blocks(listed, blocks) for blocks in owned]
    needed = tuple(_in_rows(blocks, keys, total) for blocks in read)
    rank = mesh.get_local_rank()
    device = states.device
    query_rows, key_rows = (_items(rows[rank], device) for rows in (chunks, needed))
    part = states[:, :, _items(owned[rank], device)][..., _items(read[rank], device)]
    mask = _block_mask(block_mask, part, query_rows, key_rows)
    return BlockMaskSplit(mesh, chunks, mask, key_rows, query_rows, exchange_of(needed, chunks, rank))


def _items(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


def _in_rows(blocks: tuple[Range, ...], size: int, total: int) -> tuple[Range, ...]:
    """Convert ranges of blocks to ranges of rows."""
    return tuple((start * size, min(stop * size, total)) for start, stop in blocks)


def _key_blocks(listed: Tensor, blocks: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return the ranges of key blocks that some batch and head of these query blocks sees; at least one block."""
    seen = torch.stack([listed[:, start:stop].flatten(0, 1).any(0) for start, stop in blocks]).any(0)
    return joined((i, i + 1) for i in seen.nonzero().flatten().tolist()) or ((0, 1),)


def _block_mask(whole: BlockMask, states: Tensor, query_rows: Tensor, key_rows: Tensor) -> BlockMask:
    """Return the block mask of some rows and keys, of which ``states`` holds the blocks."""
    mask_mod = whole.mask_mod

    def local(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, query_rows[q_idx], key_rows[kv_idx])

    counts, indices = _lists(states == PARTIAL)
    full_counts, full_indices = _lists(states == FULL)
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=whole.BLOCK_SIZE,
        mask_mod=local,
        seq_lengths=(len(query_rows), len(key_rows)),
    )


def _lists(listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts and the indices of a BlockMask whose lists contain these blocks."""
    indices = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return listed.sum(-1, dtype=torch.int32), indices.to(torch.int32)


@torch.compiler.disable
def context_parallel_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    split: BlockMaskSplit,
    score_mod: Mod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute differentiable FlexAttention of rows that are split over devices.

    :func:`flashbwd.flex_attention` on the whole sequence, with the block mask of ``split``, gives the same output and
    gradients; each device gets its own rows of them. The gradient of a tensor that ``score_mod`` captures is this
    device's part; add it over the devices of the mesh. ``torch.compile`` calls this function without compiling it.

    Forward and backward exchange rows. Every device must therefore call this function, with equal shapes except for the
    rows, the same dtype and options, in the same order, and run the backward, even if its own loss is 0. Otherwise the
    others wait for it.

    Parameters
    ----------
    query : Tensor, (B, H, rows, D)
        This device's rows, in the order of ``split.take``.
    key, value : Tensor, (B or 1, Hkv, rows, D) and (B or 1, Hkv, rows, Dv)
    split : BlockMaskSplit
        From :func:`split_block_mask`.
    score_mod : callable, optional
        ``(score, b, h, q_idx, kv_idx) -> score`` with indices of the whole sequence. Captured tensors that it indexes
        with them must hold the whole sequence on every device.
    scale, enable_gqa, return_lse, kernel_options, deterministic
        As for :func:`flashbwd.flex_attention`.

    Returns
    -------
    out : Tensor, (B, H, rows, Dv)
    lse : Tensor, (B, H, rows)
        Only with ``return_lse``.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected. The function raises
        before it sends anything.
    RuntimeError
        If ``score_mod`` or ``mask_mod`` raises.

    Notes
    -----
    The received keys and values stay in memory for the backward. Each device rounds its part of the gradients of keys
    and values to their dtype before the parts are added.
    """
    if not isinstance(split, BlockMaskSplit):
        raise ValueError(
            f"flashbwd: split is {_arguments.came(split)}, expected a BlockMaskSplit from split_block_mask"
        )
    mask = split.block_mask
    scale = arguments.check_types(
        query, key, value, score_mod, mask, scale, enable_gqa, return_lse, kernel_options, None
    )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"flashbwd: {name} has {tensor.dim()} dimensions, expected 4: (batch, heads, rows, dim)")
        check_rows(name, tensor, 2, split.length())
    if split.key_rows.device != query.device:
        raise ValueError(
            f"flashbwd: split.block_mask is on {split.key_rows.device}, expected query's device {query.device}"
        )
    query, key, value = arguments.autocast(query, key, value)
    local_mod = split.score_mod(score_mod)
    # Check all arguments before sending anything: after a later error the other devices would wait forever.
    keys, values = (_stand_in(x, len(split.key_rows)) for x in (key, value))
    check_call(query, keys, values, local_mod, mask, scale, enable_gqa, kernel_options)
    _arguments.flag("deterministic", deterministic)
    key, value = _KeysOfOthers.apply(key, value, split)
    options: dict[str, Any] = {"kernel_options": kernel_options, "deterministic": deterministic}
    results: Any = flex_attention(query, key, value, local_mod, mask, scale, enable_gqa, return_lse, **options)
    return results


def _stand_in(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor like ``tensor`` with ``rows`` rows, all of them in the memory of one."""
    return tensor.detach().new_empty(*tensor.shape[:2], 1, tensor.shape[3]).expand(-1, -1, rows, -1)


class _KeysOfOthers(torch.autograd.Function):
    """The keys and values that this device's queries see, (B, Hkv, keys, D) and (B, Hkv, keys, Dv)."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, split: BlockMaskSplit) -> tuple[Tensor, Tensor]:
        ctx.split, ctx.rows = split, key.shape[2]
        work = split._exchange
        rows_first = torch.cat([key, value], dim=-1).permute(2, 0, 1, 3)
        sent = rows_of(rows_first, [rows for theirs in work.sent for rows in theirs])
        arriving = Exchange.start(sent, work.counts, departures(work), split).wait()
        received = rows_of(arriving, work.received).permute(1, 2, 0, 3)
        ctx.dims = key.shape[3], value.shape[3]
        keys, values = received.split(ctx.dims, dim=-1)
        return keys, values

    @staticmethod
    @differentiable_once("context_parallel_flex_attention_backward")
    def backward(ctx: Any, _: tuple[Tensor, ...], dkey: Tensor, dvalue: Tensor) -> tuple[Tensor | None, ...]:
        work = ctx.split._exchange
        grads = torch.cat([dkey, dvalue], dim=-1).transpose(1, 2)  # (B, keys, Hkv, D + Dv)
        of_rows = (grads.shape[0], ctx.rows, *grads.shape[2:])
        added = torch.zeros(of_rows, dtype=accumulator_dtype(grads), device=grads.device)
        add_returned(added, send_back(grads, ctx.split, work).wait(), work)
        dk, dv = added.to(grads.dtype).transpose(1, 2).split(ctx.dims, dim=-1)
        return dk, dv, None
