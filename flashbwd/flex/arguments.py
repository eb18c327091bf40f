"""Checks of the arguments that flex_decoding and flex_attention have in common."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flashbwd import _arguments

_ACTING: dict[str, type] = {"SPLIT_KV": int, "PRESCALE_QK": bool, "ROWS_GUARANTEED_SAFE": bool}
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
# PyTorch's tuning keys for its own kernels, also with the prefix fwd_ or bwd_. They are accepted and ignored.
_HINTS = frozenset(
    {
        *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
        *("BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA"),
        *("kpack", "matrix_instr_nonkdim", "waves_per_eu"),
    }
)
_AUTOCAST = ("cpu", "cuda")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast, which has cast the arguments already, so that products keep the accumulation dtype."""
    if device.type not in _AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def check_types(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    kernel_options: Any,
    return_aux: Any,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _arguments.tensor(name, tensor)
    _arguments.flag("enable_gqa", enable_gqa)
    _arguments.flag("return_lse", return_lse)
    for name, given, kind, expected in (
        ("block_mask", block_mask, BlockMask, "a BlockMask"),
        ("kernel_options", kernel_options, Mapping, "a mapping or None"),
        ("return_aux", return_aux, AuxRequest, "an AuxRequest or None"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ValueError(f"flashbwd: {name} is {_arguments.came(given)}, expected {expected}")
    if scale is not None:
        _arguments.number("scale", scale)
    if score_mod is not None and not callable(score_mod):
        raise ValueError(f"flashbwd: score_mod is {_arguments.came(score_mod)}, expected a function or None")


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"flashbwd: {name} has {tensor.dim()} dimensions, expected 4: (batch, heads, length, dim)")
        if tensor.device != query.device:
            raise ValueError(f"flashbwd: {name} is on {tensor.device}, expected query's {query.device}")
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"flashbwd: {name} is {_name_of(tensor.dtype)}, expected float16, bfloat16, float32 or float64"
            )
        if tensor.dtype != query.dtype:
            raise ValueError(f"flashbwd: {name} is {_name_of(tensor.dtype)}, expected query's {_name_of(query.dtype)}")
    B, H, _, D = query.shape
    if D == 0:
        raise ValueError(f"flashbwd: query has shape {tuple(query.shape)}, expected a last dimension of at least 1")
    if key.shape[3] != D:
        raise ValueError(f"flashbwd: key has head dimension {key.shape[3]}, expected query's {D}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"flashbwd: value has shape {tuple(value.shape)}, expected key's batch, heads and length "
            f"{tuple(key.shape[:3])}"
        )
    if key.shape[0] not in (1, B):
        raise ValueError(f"flashbwd: key has batch {key.shape[0]}, expected 1 or query's {B}")
    heads = key.shape[1]
    if heads != H and not enable_gqa:
        raise ValueError(f"flashbwd: key has {heads} heads, expected query's {H} (enable_gqa=True allows a divisor)")
    if heads != H and (heads == 0 or H % heads != 0):
        raise ValueError(f"flashbwd: key has {heads} heads, which does not divide query's {H}")


def check_block_mask(mask: BlockMask, query: Tensor, key: Tensor, of_queries: bool = True) -> None:
    """Raise ``ValueError`` unless the lists fit query and key. ``of_queries``: also the lists that a backward reads."""
    _check_fields(mask, of_queries)
    rows = [-(-length // size) for length, size in zip((query.shape[2], key.shape[2]), mask.BLOCK_SIZE, strict=True)]
    lists = {
        f"{prefix}_{suffix}": (dims, rows[0] if prefix.endswith("kv") else rows[1])
        for prefix in ("kv", "full_kv") + (("q", "full_q") if of_queries else ())
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
    if tuple(mask.shape[-2:]) != lengths:
        raise ValueError(
            f"flashbwd: block_mask was made for lengths {tuple(mask.shape[-2:])}, expected query's and key's {lengths}"
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
    size = mask.BLOCK_SIZE
    if len(size) != 2 or any(not isinstance(n, (int, torch.SymInt)) or n < 1 for n in size):
        raise ValueError(f"flashbwd: block_mask.BLOCK_SIZE is {size}, expected two positive ints")
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
            if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"flashbwd: block_mask.{name} is {_name_of(tensor.dtype)}, expected int32")


def acting_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have an effect here. A key that PyTorch does not know raises ``ValueError``."""
    options = {}
    for key, value in given.items():
        name = key if key in _ACTING else key.removeprefix("fwd_").removeprefix("bwd_")
        if name in _ACTING:
            positive = type(value) is int and value > 0
            if not (positive if _ACTING[name] is int else isinstance(value, bool)):
                expected = "a positive int" if _ACTING[name] is int else "a bool"
                raise ValueError(f"flashbwd: kernel_options[{key!r}] is {value!r}, expected {expected}")
            if not key.startswith("bwd_"):
                options[name] = value
        elif name == "BACKEND":
            if value not in _BACKENDS:
                raise ValueError(f"flashbwd: kernel_options['BACKEND'] is {value!r}, expected one of {_BACKENDS}")
        elif name not in _HINTS:
            known = ", ".join(sorted([*_ACTING, "BACKEND", *_HINTS]))
            raise ValueError(f"flashbwd: kernel_options has an unknown key {key!r}, expected one of {known}")
    return options


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_query_lists(mask: BlockMask) -> None:
    """Check that a BlockMask has the lists that a backward needs."""
    if mask.q_indices is None or mask.q_num_blocks is None:
        raise ValueError(
            "flashbwd: block_mask.q_indices is None, expected a tensor: make the BlockMask with compute_q_blocks=True"
        )


def check_lists(mask: BlockMask, lengths: tuple[int, int]) -> None:
    """Check that no list names a block beyond the sequences. Reads the lists back, except in a CUDA graph."""
    blocks = [-(-length // size) for length, size in zip(lengths, mask.BLOCK_SIZE, strict=True)]
    for prefix, most in (("kv", blocks[1]), ("full_kv", blocks[1]), ("q", blocks[0]), ("full_q", blocks[0])):
        counts, indices = getattr(mask, f"{prefix}_num_blocks"), getattr(mask, f"{prefix}_indices")
        if counts is None or indices is None or not _can_be_read(counts):
            continue
        if counts.shape != indices.shape[:3]:
            raise ValueError(
                f"flashbwd: block_mask.{prefix}_indices has shape {tuple(indices.shape)}, expected one row for each "
                f"element of block_mask.{prefix}_num_blocks, which has shape {tuple(counts.shape)}"
            )
        column = torch.arange(indices.shape[-1], device=indices.device)
        listed = indices[column < counts.unsqueeze(-1)]
        _check_range(f"block_mask.{prefix}_num_blocks holds the count", counts, indices.shape[-1])
        _check_range(f"block_mask.{prefix}_indices names block", listed, most - 1)
    for kind in ("", "full_"):
        of_keys, of_queries = (getattr(mask, f"{kind}{side}_num_blocks") for side in ("kv", "q"))
        if of_keys is None or of_queries is None or not _can_be_read(of_keys):
            continue
        if of_keys.shape[:2] != of_queries.shape[:2]:
            continue
        given, expected = int(of_queries.sum()), int(of_keys.sum())
        if given != expected:
            raise ValueError(
                f"flashbwd: block_mask.{kind}q_num_blocks lists {given} blocks, expected {expected}, as many "
                f"as block_mask.{kind}kv_num_blocks"
            )


def _check_range(text: str, values: Tensor, most: int) -> None:
    if values.numel() == 0:
        return
    least, largest = map(int, values.aminmax())
    if least < 0 or largest > most:
        raise ValueError(f"flashbwd: {text} {largest if largest > most else least}, expected 0 to {most}")


def _can_be_read(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.device.type not in _AUTOCAST or torch.compiler.is_exporting():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_results(
    query: Tensor, value: Tensor, outputs: Mapping[str, Tensor | None], statistics: Mapping[str, Tensor | None]
) -> None:
    """Check ``out``, ``lse`` and their gradients against the operands."""
    for given, shape in ((outputs, (*query.shape[:3], value.shape[3])), (statistics, tuple(query.shape[:3]))):
        for name, tensor in given.items():
            if tensor is None and name.startswith("d"):
                continue
            _arguments.tensor(name, tensor)
            assert tensor is not None
            if tensor.device != query.device:
                raise ValueError(f"flashbwd: {name} is on {tensor.device}, expected query's {query.device}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"flashbwd: {name} has shape {tuple(tensor.shape)}, expected {shape}")
            if not tensor.is_floating_point():
                raise ValueError(f"flashbwd: {name} is {_name_of(tensor.dtype)}, expected a floating-point dtype")
