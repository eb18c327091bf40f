"""Block lists as the sm90 and sm80 kernels read them: one list per key block of a KV head, in the order of work tiles.

:func:`kernel_lists` turns :class:`~flashbwd.flex.lists.KeyBlockLists` into the three tensors of the operator
``flashbwd::block_mask_attention_backward``. ``csrc/attention/params.h`` declares their rows as structs.

lists    (batches, kv_heads, key_blocks, 4) int32    key block, index of its first entry, number of entries, 0
entries  (entries, 4) int32                          query block, query head within the KV head, bit tile or -1, turns
bits     (tiles, words) int32                        the mask of a tile in the order of the kernels' registers

- List i of a (batch, KV head) is its i-th work tile. The longest come first, so that short ones fill the last wave.
- ``turns`` is the number of entries with the same query block and head in the lists before this one, plus 2^16 times
  the number of those in the lists after it. In deterministic mode an add to dq waits for the adds of all lists that
  were handed out earlier; otherwise only the last add waits, if it writes dq. If sm90 hands out the lists of a head
  from the last one to the first (not in the last group of heads, and with GQA only if heads are outermost), the higher
  number counts the earlier ones.
- A list visits a query block for all query heads of the KV head and then the next block. If a key block sees few query
  blocks, it visits all blocks of a head and then the next head: neighbouring work tiles then share what L2 holds.
- Lists go from the last query block to the first. Work tiles of a causal mask then start at the same query block, and
  each comes to a dq tile after those that add to it before. sm90 visits lists that it hands out from the last one to
  the first the other way: then the longest list comes to a dq tile long after the others. Without counted adds, either
  order is as fast.
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flashbwd import _ops
from flashbwd.flex.listed_rows import ListedRows
from flashbwd.flex.lists import KeyBlockLists
from flashbwd.flex.tile import Tile

# Share of the query blocks that a key block sees, below which heads are outermost. As is_sparse in sm90/schedule.cpp.
_FEW = 0.45
_TILES_AT_ONCE = 4096  # bounds the memory in which bits are rearranged


class UnsupportedError(Exception):
    """No kernel computes the call. The message says why."""


class KernelLists(NamedTuple):
    """The tensors of a block mask for a kernel, in the layout that the module describes."""

    lists: Tensor
    entries: Tensor
    bits: Tensor
    covers: bool  # every query block of every head is in a list, so sm90 need not add dq into zeros
    tile: Tile
    # Not for the operator:
    hides_above_diagonal: bool = False  # no pair with kv_idx > q_idx + Sk - Sq is visible
    block_states: Tensor | None = None  # as in KeyBlockLists
    listed: ListedRows = ListedRows()

    def operands(self) -> tuple[Tensor, Tensor, Tensor, bool, list[int]]:
        """Return the arguments of the operator."""
        return self.lists, self.entries, self.bits, self.covers, [self.tile.queries, self.tile.keys]


REFUSALS = ("cannot run this", "no kernel takes this call")  # csrc/attention/plan.cpp


@functools.lru_cache(maxsize=256)
def kernel_tile(
    plan_operator: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    device: int,
    backend: str,
    softcap: bool = False,
    alibi: bool = False,
) -> Tile:
    """Return the tile of the kernel that computes such calls on a CUDA device.

    Parameters
    ----------
    plan_operator : str
        Name of the operator that plans the call, which has a block mask.
    backend : str
        The operator's option.

    Raises
    ------
    UnsupportedError
        If no kernel does.
    """
    vector = 16 // dtype.itemsize  # columns are padded to whole vectors
    with unset_fake_temporarily():
        q, v = (
            torch.empty(1, 1, 1, -(-columns // vector) * vector, dtype=dtype, device="meta")
            for columns in (head_dim, head_dim_v)
        )
        numbers = torch.empty(1, 1, 1, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="meta")
        lists = torch.empty(0, dtype=torch.int32, device="meta")
        options = {
            "softmax_scale": 1.0,
            "softcap": float(softcap),
            "alibi_slopes": numbers[0, 0].float() if alibi else None,
            "backend": backend,
            "plan_device": device,
        }
        operator = getattr(torch.ops.flashbwd, plan_operator)
        try:
            plan = _ops.call(operator, v, q, q, v, v, numbers, lists, lists, lists, False, [0, 0], **options)
        except ValueError as error:
            if not any(words in str(error) for words in REFUSALS):
                raise
            raise UnsupportedError(str(error).removeprefix("flashbwd: ")) from None
    return Tile(*json.loads(plan)["tile"])


def kernel_lists(lists: KeyBlockLists, heads: int, heads_kv: int) -> KernelLists:
    """Return the lists of a call with these numbers of heads. Reads a size back from the device.

    Raises
    ------
    UnsupportedError
        More than 2^16 key blocks see one query block.
    """
    group = heads // heads_kv
    lengths = lists.offsets.diff().long()
    owner = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    batch, head, key_block = _unravel(owner, (lists.batches, lists.heads, lists.key_blocks))
    query_block, tile = lists.entries.long() // 2, lists.bit_tiles.long()
    planes = 1 if lists.heads == 1 else heads_kv
    if lists.heads == 1:
        copies = torch.arange(group, device=owner.device)
        batch, key_block, query_block, tile = (
            x.repeat_interleave(group) for x in (batch, key_block, query_block, tile)
        )
        plane, member = torch.zeros_like(batch), copies.repeat(owner.numel())
    else:
        plane, member = head // group, head % group

    counts = lengths.view(lists.batches, planes, -1, lists.key_blocks).sum(2)
    counts = counts * group if lists.heads == 1 else counts
    order = counts.argsort(dim=-1, descending=True, stable=True)  # (batches, planes, position): key block
    position = order.argsort(dim=-1)
    plane = batch * planes + plane
    place = position.view(-1, lists.key_blocks)[plane, key_block]

    along = lists.query_blocks - 1 - query_block
    seen = owner.numel() / max(lengths.numel() * lists.query_blocks, 1)  # share of the query blocks, on average
    within = member * lists.query_blocks + along if seen < _FEW else along * group + member
    by_list = ((plane * lists.key_blocks + place) * lists.query_blocks * group + within).argsort()
    turns, dq_tiles = _turns(plane, member, query_block, place, lists, group)
    entries = torch.stack([query_block, member, tile, turns], 1)
    ordered = counts.gather(-1, order)
    ends = ordered.flatten().cumsum(0).view_as(ordered)
    rows = torch.stack([order, ends - ordered, ordered, torch.zeros_like(order)], -1)
    covers = dq_tiles == lists.batches * planes * group * lists.query_blocks
    bits = registers_of_bits(lists.bits)
    entries = entries[by_list].int().contiguous()
    return KernelLists(rows.int(), entries, bits, covers, lists.tile, block_states=lists.block_states)


def _unravel(index: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    parts = []
    for size in reversed(sizes):
        parts.append(index % size)
        index = index // size
    return parts[::-1]


def _turns(
    plane: Tensor, member: Tensor, query_block: Tensor, place: Tensor, lists: KeyBlockLists, group: int
) -> tuple[Tensor, int]:
    """Return, for each entry, how many entries of the same dq tile lie in earlier and in later lists (the high half).

    Also returns the number of dq tiles. Raises UnsupportedError if the numbers do not fit.
    """
    dq_tile = (plane * group + member) * lists.query_blocks + query_block
    by_tile = (dq_tile * lists.key_blocks + place).argsort()
    ordered = dq_tile[by_tile]
    number = torch.arange(ordered.numel(), device=ordered.device)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    if not ordered.numel():
        return number, 0
    first = number.masked_fill(~starts, 0).cummax(0).values
    last = number.masked_fill(~starts.roll(-1), number[-1]).flip(0).cummin(0).values.flip(0)
    if int((last - first).max()) >= 2**16:
        raise UnsupportedError(f"more than {2**16} key blocks of block_mask see one query block")
    turns = torch.empty_like(number)
    turns[by_tile] = (number - first) + (last - number << 16)
    return turns.where(turns < 2**31, turns - 2**32), int(starts.sum())


def registers_of_bits(bits: Tensor) -> Tensor:
    """Rearrange the bits of tiles in the order of the accumulators of matrix products.

    A lane of a warp with 16 keys holds the scores of two of these keys, eight apart, and of a pair of queries in each
    eight. Its bits are those of the first key, then those of the second one, each in the order of the queries. The
    bits of a tile are those of the lanes, for one group of 16 keys after the other.

    Parameters
    ----------
    bits : Tensor, (tiles, queries, keys / 32), int32
        Bit ``j % 32`` of word ``j // 32`` of a row says whether the query sees key j.

    Returns
    -------
    Tensor, (tiles, queries * keys / 32), int32
        ``queries / 2`` bits for each lane.
    """
    tiles, queries, words_per_row = bits.shape
    registers = bits.new_empty(tiles, queries * words_per_row)
    shifts = torch.arange(32, device=bits.device)
    for first in range(0, tiles, _TILES_AT_ONCE):
        visible = bits[first : first + _TILES_AT_ONCE].unsqueeze(-1) >> shifts & 1  # (tiles, queries, words, 32)
        # queries: eight, pair, odd; keys: sixteen, half, row of eight lanes
        visible = visible.view(-1, queries // 8, 4, 2, 2 * words_per_row, 2, 8)
        visible = visible.permute(0, 4, 6, 2, 5, 1, 3)  # sixteen, row, pair | half, eight, odd
        words = visible.reshape(-1, queries * words_per_row, 32).long()
        words = (words << shifts).sum(-1)
        registers[first : first + _TILES_AT_ONCE] = words.where(words < 2**31, words - 2**32).int()
    return registers
