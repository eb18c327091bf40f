"""Finds or makes the forward kernel for the modifications of a call."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashbwd.mods import nvrtc
from flashbwd.mods.built_in import encode, recognise
from flashbwd.mods.captures import CannotEmitError, Captures, FixedMod, Recent, Slots
from flashbwd.mods.emit import emit
from flashbwd.mods.operators import c_element
from flashbwd.mods.trace import trace
from flashbwd.reference.modifications import Mod

_NAME = "flashbwd_decoding"


@dataclass(frozen=True)
class Tile:
    """Tile sizes, dtype, alignment and device for which a kernel is compiled."""

    head_dim: int
    rows: int
    warps: int
    dtype: torch.dtype
    aligned: bool
    device: int


@dataclass(eq=False)
class Modification:
    """A score_mod and a mask_mod, identified by what they compute.

    Attributes
    ----------
    number : int
        Identifies the C++ record that holds the compiled kernels. The record is deleted together with this object.
    source : str, optional
        CUDA source; None for a built-in modification, whose kernels every build contains.
    tiles : set of Tile
        Tiles for which a kernel has been compiled.
    """

    number: int
    source: str | None
    tiles: set[Tile] = field(default_factory=set)


class NoKernelError(Exception):
    """No kernel can be made for a call on this machine. The message gives the reason."""


_MOST = 1024
# Key of the functions -> their modification, and the positions of the captured tensors that the kernel reads.
_known: Recent[tuple[Modification, list[int]]] = Recent(_MOST)
# Source, or parameters of a built-in modification -> modification.
_modifications: Recent[Modification] = Recent(_MOST)
_lock = threading.Lock()


def known_modification(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]] | None:
    """Return the modification and the tensors that its kernel reads; None if the functions must be traced first."""
    captures = Captures(score_mod, mask_mod)
    known = None if captures.key is None else _known.get(captures.key)
    if known is None:
        return None
    modification, positions = known
    return modification, [captures.tensors[position] for position in positions]


def modification_of(score_mod: Mod | None, mask_mod: Mod | None) -> tuple[Modification, list[Tensor]]:
    """Return what :func:`known_modification` returns, but trace functions that are not known yet.

    Raises
    ------
    RuntimeError
        If a function cannot be compiled to CUDA. The message names the operator or capture that prevents it.
    """
    return known_modification(score_mod, mask_mod) or _trace(score_mod, mask_mod)


def compiled_modification(score_mod: Mod | None, mask_mod: Mod | None, tile: Tile) -> tuple[Modification, list[Tensor]]:
    """Return what :func:`modification_of` returns, and make sure that a kernel for ``tile`` is compiled and loaded.

    Raises
    ------
    NoKernelError
        If NVRTC is missing or fails.
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
    """Return the modification with this source or these parameters; create it if it does not exist."""
    key = source, tuple(integers), tuple(map(repr, floats))  # repr: -0.0 differs from 0.0, NaN equals NaN
    with _lock:
        known = _modifications.get(key)
        if known is None:
            known = Modification(torch.ops.flashbwd.decoding_modification(integers, floats), source)
            forget = torch.ops.flashbwd.decoding_forget_modification
            weakref.finalize(known, forget, known.number).atexit = False
            _modifications.put(key, known)
    return known


def kernel_source(mod: str, tile: Tile) -> str:
    """Return the complete CUDA source of a kernel. It includes files of :func:`~flashbwd.mods.nvrtc.header_folder`."""
    sizes = f"{tile.head_dim}, {tile.rows}, {tile.warps}"
    arguments = f"{sizes}, {c_element(tile.dtype)}, {str(tile.aligned).lower()}, flashbwd::Mod"
    return f"""{nvrtc.includes("decoding/split_kv.cuh", "mods/functions.cuh")}
{mod}
extern "C" __global__ void __launch_bounds__({tile.warps * 32}, 1)
    {_NAME}(const __grid_constant__ flashbwd::DecodingParams p) {{
  extern __shared__ __align__(128) unsigned char shared[];
  flashbwd::split_kv<{arguments}>(p, shared);
}}
"""


def shared_bytes(tile: Tile) -> int:
    """Return the dynamic shared memory of a kernel in bytes; csrc/decoding/params.h computes it."""
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
