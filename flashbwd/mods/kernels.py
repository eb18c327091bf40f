"""From the modifications of a call to kernels that are ready to launch."""

from __future__ import annotations

import re
import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashbwd.mods import nvrtc
from flashbwd.mods.captures import CannotEmitError, Captures, FixedMod, Recent, Slots
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
    """What two functions compute.

    Attributes
    ----------
    number : int
        Of the operator's own record, which has the compiled kernels. The record is dropped with this object.
    source : str, optional
        None for a built-in one, whose kernels every build holds.
    tiles : set of Tile
        That kernels were compiled for.
    """

    number: int
    source: str | None
    tiles: set[Tile] = field(default_factory=set)


class NoKernelError(Exception):
    """No kernel can be compiled on this machine; the message says why."""


_MOST = 1024
# By the key of the functions: what they compute, and which of their tensors the kernel takes.
_known: Recent[tuple[Modification, list[int]]] = Recent(_MOST)
# By what is computed: the source, or the numbers of a built-in modification.
_modifications: Recent[Modification] = Recent(_MOST)
_lock = threading.Lock()


def known_modification(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]] | None:
    """What these functions are known to compute, and the tensors that the kernel takes; None if they must be traced."""
    captures = Captures(score_mod, mask_mod)
    known = None if captures.key is None else _known.get(captures.key)
    if known is None:
        return None
    modification, positions = known
    return modification, [captures.tensors[position] for position in positions]


def modification_of(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]]:
    """As :func:`known_modification`; traces functions that are not known.

    Raises
    ------
    RuntimeError
        For functions that the kernel has no code for; the message names what it is.
    """
    return known_modification(score_mod, mask_mod) or _trace(score_mod, mask_mod)


def compiled_modification(score_mod: Mod | None, mask_mod: Mod | None, tile: Tile) -> tuple[Modification, list[Tensor]]:
    """As :func:`modification_of`, with a kernel for ``tile``: compiled only when its source is in no cache.

    Raises
    ------
    NoKernelError
        Without a working NVRTC.
    """
    found = modification_of(score_mod, mask_mod)
    modification = found[0]
    if modification.source is not None and tile not in modification.tiles:
        with _lock:
            if tile not in modification.tiles:
                _build(modification, modification.source, tile)
    return found


def _trace(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]]:
    captures = Captures(score_mod, mask_mod)
    slots = Slots(captures)
    source = None
    numbers: tuple[list[int], list[float]] = ([], [])
    try:
        score = None if score_mod is None else trace("score_mod", score_mod, True)
        mask = None if mask_mod is None else trace("mask_mod", mask_mod, False)
        built_in = recognise(score, mask, captures)
        if built_in is None:
            source = emit(score, mask, slots)
        else:
            numbers = encode(built_in, slots)
    except CannotEmitError as error:
        raise RuntimeError(f"flashbwd: {error}") from error
    modification = _same_modification(source, *numbers)
    positions = slots.positions()
    if captures.key is not None and positions is not None:
        _known.put(captures.key, (modification, positions))
    elif captures.key is not None and FixedMod in captures.key:
        raise RuntimeError("flashbwd: a function of compile_mods reads a tensor that is not one of its named arguments")
    return modification, slots.tensors()


def _same_modification(source: str | None, integers: list[int], floats: list[float]) -> Modification:
    """The record of what is computed, a new one where there is none."""
    key = source, tuple(integers), tuple(map(repr, floats))  # repr tells -0.0 from 0.0, and finds NaN again
    with _lock:
        known = _modifications.get(key)
        if known is None:
            known = Modification(torch.ops.flashbwd.decoding_modification(integers, floats), source)
            forget = torch.ops.flashbwd.decoding_forget_modification
            weakref.finalize(known, forget, known.number).atexit = False
            _modifications.put(key, known)
    return known


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


def shared_bytes(tile: Tile) -> int:
    """As csrc/decoding/params.h has it."""
    return torch.ops.flashbwd.decoding_shared_bytes(tile.head_dim, tile.rows, tile.warps, tile.dtype.itemsize)


def _build(modification: Modification, source: str, tile: Tile) -> None:
    try:
        kernel = nvrtc.kernel_of(kernel_source(source, tile), _NAME, shared_bytes(tile), tile.device)
    except nvrtc.CompilationError as error:
        raise NoKernelError(str(error)) from error
    torch.ops.flashbwd.decoding_add_kernel(
        modification.number, tile.head_dim, tile.rows, tile.warps, tile.dtype, tile.aligned, tile.device, kernel
    )
    modification.tiles.add(tile)
