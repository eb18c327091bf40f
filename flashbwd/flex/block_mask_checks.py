"""Checks of block masks: their fields, their shapes, and what their lists hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashbwd import _arguments
from flashbwd.reference.decoding import listed_blocks

__all__ = ["check_block_mask", "check_lists", "check_query_lists", "check_sizes"]

_OF_KEYS = ("kv", "full_kv")
_OF_QUERIES = ("q", "full_q")


def check_sizes(mask: BlockMask) -> None:
    """Check ``BLOCK_SIZE`` and ``seq_lengths``."""
    kinds = (tuple, list)  # what PyTorch accepts
    for name, sizes, kind, least in (
        ("BLOCK_SIZE", mask.BLOCK_SIZE, kinds, 1),
        ("seq_lengths", mask.seq_lengths, tuple, 0),
    ):
        if not isinstance(sizes, kind) or len(sizes) != 2 or not all(_is_integer(n) and n >= least for n in sizes):
            expected = "two positive ints" if least else "two ints of at least 0"
            raise ValueError(f"flashbwd: block_mask.{name} is {sizes!r}, expected a tuple of {expected}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def check_block_mask(mask: BlockMask, query: Tensor, key: Tensor, of_queries: bool = True) -> None:
    """Raise ``ValueError`` unless the lists fit query and key. ``of_queries``: also the lists that a backward reads."""
    check_sizes(mask)
    _check_fields(mask, of_queries)
    rows = [-(-length // size) for length, size in zip((query.shape[2], key.shape[2]), mask.BLOCK_SIZE, strict=True)]
    lists = {
        f"{prefix}_{suffix}": (dims, rows[0] if prefix in _OF_KEYS else rows[1])
        for prefix in _OF_KEYS + (_OF_QUERIES if of_queries else ())
        for suffix, dims in (("num_blocks", 3), ("indices", 4))
    }
    for name, (dims, _) in lists.items():
        tensor = getattr(mask, name)
        if tensor is None:
            continue
        if tensor.device != query.device:
            raise ValueError(f"flashbwd: block_mask.{name} is on {tensor.device}, expected query's {query.device}")
        if tensor.dim() != dims or any(n not in (1, m) for n, m in zip(tensor.shape[:2], query.shape[:2], strict=True)):
            raise ValueError(
                f"flashbwd: block_mask.{name} has shape {tuple(tensor.shape)}, expected {dims} dimensions that begin "
                f"with (1 or {query.shape[0]}, 1 or {query.shape[1]})"
            )
    lengths = (query.shape[2], key.shape[2])
    if min(mask.BLOCK_SIZE) >= 1 << 30:  # PyTorch's mask that hides nothing; it fits every length
        return
    if tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"flashbwd: block_mask was made for lengths {mask.seq_lengths}, expected query's and key's {lengths}"
        )
    for name, (_, expected) in lists.items():
        tensor = getattr(mask, name)
        if tensor is not None and tensor.shape[2] != expected:
            raise ValueError(
                f"flashbwd: block_mask.{name} has shape {tuple(tensor.shape)}, expected {expected} blocks in the third "
                f"dimension for lengths {lengths} and BLOCK_SIZE {tuple(mask.BLOCK_SIZE)}"
            )


def _check_fields(mask: BlockMask, of_queries: bool) -> None:
    """Check the types of the lists, and that those of full blocks exist for queries and keys, or for neither."""
    groups: list[tuple[str, ...]] = [("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")]
    if of_queries and mask.q_indices is not None and mask.q_num_blocks is not None:
        groups[1] += ("full_q_num_blocks", "full_q_indices")
    for names, optional in zip(groups, (False, True), strict=True):
        missing = [name for name in names if getattr(mask, name) is None]
        if missing and not (optional and len(missing) == len(names)):
            others = f", or None for all of {', '.join(names)}" if optional else ""
            raise ValueError(f"flashbwd: block_mask.{missing[0]} is None, expected a tensor{others}")
        for name in names:
            tensor = getattr(mask, name)
            if tensor is None:
                continue
            if _arguments.strided(f"block_mask.{name}", tensor).dtype not in (torch.int32, torch.int64):
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(f"flashbwd: block_mask.{name} is {dtype}, expected int32")


def check_query_lists(mask: BlockMask) -> None:
    """Check that a BlockMask has the lists that a backward needs."""
    for name in ("q_num_blocks", "q_indices"):
        if getattr(mask, name) is None:
            raise ValueError(
                f"flashbwd: block_mask.{name} is None, expected a tensor: make the BlockMask with compute_q_blocks=True"
            )


def check_lists(mask: BlockMask, lengths: tuple[int, int], of_queries: bool = True) -> None:
    """Check that the lists name blocks of the sequences, each once, and that those of keys and queries agree.

    Waits for the device once. Does nothing in a CUDA graph and for lists without values.
    """
    blocks = [-(-length // size) for length, size in zip(lengths, mask.BLOCK_SIZE, strict=True)]
    faults: list[tuple[Tensor, Callable[[], str]]] = []
    listed: dict[str, Tensor] = {}
    for prefix in _OF_KEYS + (_OF_QUERIES if of_queries else ()):
        counts, indices = getattr(mask, f"{prefix}_num_blocks"), getattr(mask, f"{prefix}_indices")
        if counts is None or indices is None or not _can_be_read(counts):
            continue
        if counts.shape != indices.shape[:3]:
            raise ValueError(
                f"flashbwd: block_mask.{prefix}_indices has shape {tuple(indices.shape)}, expected one row for each "
                f"element of block_mask.{prefix}_num_blocks, which has shape {tuple(counts.shape)}"
            )
        most = blocks[1] if prefix in _OF_KEYS else blocks[0]
        listed[prefix] = listed_blocks(counts, indices, most)
        faults += _faults_of_list(f"block_mask.{prefix}", counts, indices, most, listed[prefix])
    faults += _disagreements(listed)
    if faults:
        # The first message holds for lists for which later checks make no sense.
        found = torch.stack([fault for fault, _ in faults]).tolist()
        for is_fault, (_, message) in zip(found, faults, strict=True):
            if is_fault:
                raise ValueError(f"flashbwd: {message()}")


def _faults_of_list(
    name: str, counts: Tensor, indices: Tensor, most: int, listed: Tensor
) -> list[tuple[Tensor, Callable[[], str]]]:
    """Return whether a list has a fault, on the device, and the message about it; for each kind of fault."""
    columns = indices.shape[-1]
    used = torch.arange(columns, device=indices.device) < counts.unsqueeze(-1)
    wrong_counts = (counts < 0) | (counts > columns)
    wrong_blocks = used & ((indices < 0) | (indices >= most))
    repeated = listed.sum(-1, dtype=torch.int64) != counts

    def of_counts() -> str:
        return f"{name}_num_blocks holds the count {int(counts[wrong_counts][0])}, expected 0 to {columns}"

    def of_blocks() -> str:
        return f"{name}_indices names block {int(indices[wrong_blocks][0])}, expected 0 to {most - 1}"

    def of_repeated() -> str:
        row = repeated.nonzero()[0]
        where = ", ".join(map(str, row.tolist()))
        return f"{name}_indices names a block twice in its row ({where}), expected each block at most once"

    return [(wrong_counts.any(), of_counts), (wrong_blocks.any(), of_blocks), (repeated.any(), of_repeated)]


def _disagreements(listed: dict[str, Tensor]) -> list[tuple[Tensor, Callable[[], str]]]:
    """Return whether lists contradict each other, on the device, and the messages about it."""
    found: list[tuple[Tensor, Callable[[], str]]] = []
    for side in ("kv", "q"):
        partial, full = listed.get(side), listed.get(f"full_{side}")
        if partial is not None and full is not None:
            message = (
                f"block_mask.full_{side}_indices and block_mask.{side}_indices name the same block, "
                "expected each block in one of them"
            )
            found.append(((partial & full).any(), functools.partial(str, message)))
    for kind in ("", "full_"):
        of_keys, of_queries = listed.get(f"{kind}kv"), listed.get(f"{kind}q")
        if of_keys is not None and of_queries is not None:
            message = (
                f"block_mask.{kind}q_indices and block_mask.{kind}kv_indices list different blocks, expected in the "
                "lists of queries what the lists of keys hold, transposed"
            )
            found.append(((of_keys != of_queries.mT).any(), functools.partial(str, message)))
    return found


def _can_be_read(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda") or torch.compiler.is_exporting():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
