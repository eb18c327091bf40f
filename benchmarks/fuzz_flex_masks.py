"""Random BlockMasks for the fuzzer, and the pairs that they show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fuzz_flex_calls import FROM_PAIRS, Call
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

ABSENT, PARTIAL, FULL = 0, 1, 2  # states of a block


@dataclass(frozen=True)
class Mask:
    """The mask of a call.

    Attributes
    ----------
    visible : Tensor, (B, H, Sq, Sk) bool
    hidden_queries, hidden_keys : Tensor, (B, H, Sq) and (B, Hkv, Sk) bool
        In no listed block. Nothing of them may be read.
    """

    block_mask: BlockMask | None
    visible: Tensor
    hidden_queries: Tensor
    hidden_keys: Tensor


def mask_of(call: Call, device: torch.device) -> Mask:
    """Return the mask of a call. It uses no function of the library, and none that makes a BlockMask of a mask_mod."""
    sizes = (call.batch, call.heads, call.length_q, call.length_k)
    if call.mask == "none":
        visible = torch.ones(sizes, dtype=torch.bool, device=device)
        return Mask(None, visible, ~visible.any(-1), ~visible[:, : call.heads_kv].any(2))
    generator = torch.Generator(device).manual_seed(call.number + 1)
    mask_mod = _mask_mod(call, generator, device)
    index = [
        torch.arange(n, device=device).view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate(sizes)
    ]
    shown = mask_mod(*index).expand(sizes)
    states = _states(call, shown, generator)
    of_pairs = states.repeat_interleave(call.block_q, 2).repeat_interleave(call.block_k, 3)
    of_pairs = of_pairs[:, :, : call.length_q, : call.length_k].expand(sizes)
    visible = (of_pairs == FULL) | ((of_pairs == PARTIAL) & shown)
    listed = of_pairs != ABSENT
    keys = listed.any(2).unflatten(1, (call.heads_kv, -1)).any(2)
    return Mask(_block_mask(call, states, mask_mod), visible, ~listed.any(-1), ~keys)


def _mask_mod(call: Call, generator: torch.Generator, device: torch.device) -> Callable[..., Tensor]:
    if call.pairs == "table":
        table = torch.rand(call.length_q, call.length_k, device=device, generator=generator) < 0.4
        return lambda b, h, i, j: table[i, j]
    if call.pairs == "documents":
        longest = max(call.length_q, call.length_k)
        document = torch.randint(0, 4, (longest,), device=device, generator=generator).sort().values
        return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    offset, width = call.length_k - call.length_q, random.Random(call.number).choice([1, 40, 150])
    if call.pairs == "causal":
        return lambda b, h, i, j: i + offset >= j
    if call.pairs == "window":
        return lambda b, h, i, j: (i >= j) & (i - j < width)
    if call.pairs == "hash":
        return lambda b, h, i, j: (i * 31 + j * 17 + (i * j) % 13) % 7 < 3
    if call.pairs == "by head":
        return lambda b, h, i, j: (i + j * 3 + h * 5 + b) % 7 < 4
    return lambda b, h, i, j: i < 0


def _states(call: Call, shown: Tensor, generator: torch.Generator) -> Tensor:
    """Return the state of each block, (B or 1, H or 1, query blocks, key blocks)."""
    if call.mask in FROM_PAIRS:  # these do not depend on batch or head
        return _states_of_pairs(call, shown[:1, :1])
    batch, heads = call.batch if call.lists_by_batch else 1, call.heads if call.lists_by_head else 1
    rows, columns = -(-call.length_q // call.block_q), -(-call.length_k // call.block_k)
    shape, device, rng = (batch, heads, rows, columns), shown.device, random.Random(call.number)

    def chance(*sizes: int) -> Tensor:
        return torch.rand(sizes, device=device, generator=generator)

    whole = {"nothing": ABSENT, "all blocks": FULL, "all partial": PARTIAL}
    if call.mask in whole:
        return torch.full(shape, whole[call.mask], device=device)
    states = torch.where(chance(*shape) < rng.choice([0.3, 0.5, 0.9]), PARTIAL, FULL)
    if call.mask == "full blocks":
        states = torch.full_like(states, FULL)
    if call.mask == "one block":
        at = (chance(batch, heads, 1, 1) * rows * columns).long()
        number = torch.arange(rows * columns, device=device).view(rows, columns)
        return states.where(number == at, ABSENT)
    states = states.where(chance(*shape) < rng.choice([0.2, 0.5, 0.8]), ABSENT)
    if call.mask == "empty rows":
        states = states.masked_fill(chance(batch, heads, rows, 1) < 0.5, ABSENT)
    if call.mask == "empty columns":
        states = states.masked_fill(chance(batch, 1, 1, columns) < 0.5, ABSENT)
    return states


def _states_of_pairs(call: Call, shown: Tensor) -> Tensor:
    """Return the states that show the same pairs as mask_mod. A block beyond the sequences may be full."""

    def by_block(pairs: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(pairs, (0, -call.length_k % call.block_k, 0, -call.length_q % call.block_q))
        return padded.unflatten(3, (-1, call.block_k)).unflatten(2, (-1, call.block_q)).any(5).any(3)

    states = torch.where(by_block(shown), PARTIAL, ABSENT)
    return states.masked_fill(by_block(shown) & ~by_block(~shown), FULL)


def _block_mask(call: Call, states: Tensor, mask_mod: Callable[..., Tensor]) -> BlockMask:
    def lists(listed: Tensor) -> tuple[Tensor, Tensor]:
        order = listed.int().argsort(dim=-1, descending=True, stable=True)
        return listed.sum(-1).int(), order.int()

    full = lists(states == FULL) if bool((states == FULL).any()) else (None, None)
    return BlockMask.from_kv_blocks(
        *lists(states == PARTIAL),
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        BLOCK_SIZE=(call.block_q, call.block_k),
        mask_mod=mask_mod,
        seq_lengths=(call.length_q, call.length_k),
    )
