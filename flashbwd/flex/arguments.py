"""Checks of the arguments that flex_decoding and flex_attention have in common."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flashbwd import _arguments
from flashbwd.reference.modifications import accumulator

_ACTING: dict[str, type] = {"SPLIT_KV": int, "PRESCALE_QK": bool, "ROWS_GUARANTEED_SAFE": bool}
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
# PyTorch's tuning keys for its own kernels, also with the prefix fwd_ or bwd_. They are accepted and ignored.
_HINTS = frozenset(
    {
        *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
        *("BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA"),
        *("kpack", "matrix_instr_nonkdim", "waves_per_eu", "FLOAT32_PRECISION"),
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
) -> float | None:
    """Check the types of arguments and their layouts. Return the scale as a float."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _arguments.strided(name, tensor)
    _arguments.flag("enable_gqa", enable_gqa)
    _arguments.flag("return_lse", return_lse)
    for name, given, kind, expected in (
        ("block_mask", block_mask, BlockMask, "a BlockMask"),
        ("kernel_options", kernel_options, Mapping, "a mapping or None"),
        ("return_aux", return_aux, AuxRequest, "an AuxRequest or None"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ValueError(f"flashbwd: {name} is {_arguments.came(given)}, expected {expected}")
    if score_mod is not None and not callable(score_mod):
        raise ValueError(f"flashbwd: score_mod is {_arguments.came(score_mod)}, expected a function or None")
    if block_mask is not None and not callable(block_mask.mask_mod):
        raise ValueError(
            f"flashbwd: block_mask.mask_mod is {_arguments.came(block_mask.mask_mod)}, expected a function"
        )
    return None if scale is None else _arguments.finite("scale", scale)


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


def acting_options(given: Mapping[str, Any], query: Tensor) -> dict[str, Any]:
    """Return the options that have an effect here. A key that PyTorch does not know raises ``ValueError``."""
    options = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise ValueError(f"flashbwd: kernel_options has the key {_arguments.came(key)}, expected a string")
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
        elif name == "FLOAT32_PRECISION" and value is not None and query.dtype == torch.float32:
            raise ValueError(
                f"flashbwd: kernel_options[{key!r}] is {value!r}, expected None for float32 inputs: "
                "torch.backends.cuda.matmul.fp32_precision chooses the precision of the forward and the backward"
            )
        elif name not in _HINTS:
            known = ", ".join(sorted([*_ACTING, "BACKEND", *_HINTS]))
            raise ValueError(f"flashbwd: kernel_options has an unknown key {key!r}, expected one of {known}")
    return options


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_results(
    query: Tensor, value: Tensor, outputs: Mapping[str, Tensor | None], statistics: Mapping[str, Tensor | None]
) -> None:
    """Check ``out``, ``lse`` and their gradients against the operands."""
    of_outputs = (outputs, (*query.shape[:3], value.shape[3]), query.dtype)
    of_statistics = (statistics, tuple(query.shape[:3]), accumulator(query.dtype))
    for given, shape, dtype in (of_outputs, of_statistics):
        for name, tensor in given.items():
            if tensor is None and name.startswith("d"):
                continue
            _arguments.strided(name, tensor)
            assert tensor is not None
            if tensor.device != query.device:
                raise ValueError(f"flashbwd: {name} is on {tensor.device}, expected query's {query.device}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"flashbwd: {name} has shape {tuple(tensor.shape)}, expected {shape}")
            if tensor.dtype != dtype:
                of_query = f"for query in {_name_of(query.dtype)}"
                raise ValueError(f"flashbwd: {name} is {_name_of(tensor.dtype)}, expected {_name_of(dtype)} {of_query}")
