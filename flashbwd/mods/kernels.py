"""From the modifications of a call to kernels that are ready to launch."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashbwd.mods import nvrtc
from flashbwd.mods.captures import CannotEmitError, Captures, Slots, UnknownCaptureError
from flashbwd.mods.emit import c_element, emit
from flashbwd.mods.ordinary import encode, recognise
from flashbwd.mods.trace import trace
from flashbwd.reference.decoding import Mod

_NAME = "flashbwd_decoding"


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for."""

    head_dim: int
    rows: int
    warps: int
    dtype: torch.dtype
    aligned: bool
    device: int


@dataclass(eq=False)
class Modification:
    """What two functions become.

    Attributes
    ----------
    number : int
        Of the operator's own record, which has the compiled kernels.
    source : str, optional
        None for an ordinary one, whose kernels every build holds.
    captured : list
        For each captured tensor of the kernel: its position among the functions' own, or the tensor itself where the
        functions do not hold it in a place that :class:`Captures` reads.
    in_order : bool
        The captured tensors are the functions' own, in their order.
    tiles : set of Tile
        That kernels were compiled for.
    """

    number: int
    source: str | None
    captured: list[int | Tensor]
    in_order: bool
    tiles: set[Tile] = field(default_factory=set)


class NoKernelError(Exception):
    """No kernel can be compiled on this machine; the message says why."""


_MOST_ORDINARY = 10000  # functions that a changing Python number makes anew at each step are not kept for good
_known: dict[Any, Modification] = {}
_lock = threading.Lock()


def known_modification(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]] | None:
    """What was made of these functions before, and the tensors that they capture now."""
    try:
        captures = Captures(score_mod, mask_mod)
        known = _known.get(captures.key)
    except (UnknownCaptureError, TypeError):  # TypeError: not hashable
        return None
    if known is None:
        return None
    tensors = captures.tensors
    return known, tensors if known.in_order else [tensors[c] if isinstance(c, int) else c for c in known.captured]


def compiled_modification(score_mod: Mod | None, mask_mod: Mod | None, tile: Tile) -> tuple[Modification, list[Tensor]]:
    """As :func:`known_modification`, with a kernel for ``tile``.

    Traces only when the functions' code, constants, or the kind of their tensors are new; compiles only when, besides,
    the source is in no cache.

    Raises
    ------
    NoKernelError
        Without a working NVRTC.
    RuntimeError
        For functions that the kernel has no code for; the message names what it is.
    """
    found = known_modification(score_mod, mask_mod) or _trace(score_mod, mask_mod)
    modification = found[0]
    if modification.source is not None and tile not in modification.tiles:
        with _lock:
            if tile not in modification.tiles:
                _build(modification, modification.source, tile)
    return found


def _trace(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]]:
    try:
        captures = Captures(score_mod, mask_mod)
        hash(captures.key)
        has_key = True
    except (UnknownCaptureError, TypeError):
        captures, has_key = Captures(), False
    slots = Slots(captures)
    source = None
    numbers: tuple[list[int], list[float]] = ([], [])
    try:
        score = None if score_mod is None else trace("score_mod", score_mod, True)
        mask = None if mask_mod is None else trace("mask_mod", mask_mod, False)
        ordinary = recognise(score, mask, captures)
        if ordinary is None:
            source = emit(score, mask, slots)
        else:
            numbers = encode(ordinary, slots)
    except CannotEmitError as error:
        raise RuntimeError(f"flashbwd: {error}") from error
    number = torch.ops.flashbwd.decoding_modification(*numbers)
    modification = Modification(number, source, slots.sources, slots.in_order)
    if has_key:
        if len(_known) >= _MOST_ORDINARY:
            for key in [key for key, known in list(_known.items()) if known.source is None]:
                _known.pop(key, None)
        _known[captures.key] = modification
    return modification, slots.tensors()


def kernel_source(mod: str, tile: Tile) -> str:
    """All of the CUDA that is compiled, without a header."""
    source = torch.ops.flashbwd.decoding_source() + mod
    source = re.sub(r"^#(include|pragma once).*$", "", source, flags=re.MULTILINE)
    sizes = f"{tile.head_dim}, {tile.rows}, {tile.warps}"
    arguments = f"{sizes}, {c_element(tile.dtype)}, {str(tile.aligned).lower()}, flashbwd::Mod"
    return f"""{source}
extern "C" __global__ void __launch_bounds__({tile.warps * 32}, 1)
    {_NAME}(const __grid_constant__ flashbwd::DecodingParams p) {{
  extern __shared__ __align__(128) unsigned char shared[];
  flashbwd::split_kv<{arguments}>(p, shared);
}}
"""


def options_for(capability: tuple[int, int]) -> list[str]:
    major, minor = capability
    return [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17", "-default-device", "--fmad=true"]


def shared_bytes(tile: Tile) -> int:
    """As csrc/decoding/params.h has it."""
    return torch.ops.flashbwd.decoding_shared_bytes(tile.head_dim, tile.rows, tile.warps, tile.dtype.itemsize)


def _build(modification: Modification, source: str, tile: Tile) -> None:
    capability = torch.cuda.get_device_capability(tile.device)
    try:
        cubin = nvrtc.cubin_of(kernel_source(source, tile), options_for(capability))
        with torch.cuda.device(tile.device):
            kernel = nvrtc.load_kernel(cubin, _NAME, shared_bytes(tile))
    except nvrtc.CompilationError as error:
        raise NoKernelError(str(error)) from error
    torch.ops.flashbwd.decoding_add_kernel(
        modification.number, tile.head_dim, tile.rows, tile.warps, tile.dtype, tile.aligned, tile.device, kernel
    )
    modification.tiles.add(tile)
