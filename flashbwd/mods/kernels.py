"""From the modifications of a call to a kernel that is ready to launch."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd.mods import nvrtc
from flashbwd.mods.captures import Captures, UnknownCaptureError
from flashbwd.mods.emit import CannotEmitError, emit
from flashbwd.reference.decoding import Mod

_NAME = "flashbwd_decoding"


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for."""

    head_dim: int
    rows: int
    bfloat16: bool
    device: int


@dataclass(frozen=True)
class _Emitted:
    source: str
    sources: list[int | Tensor]
    refusal: str = ""


class NoKernelError(Exception):
    """There is no kernel for these modifications; the message says why."""


_emitted: dict[Any, _Emitted] = {}
_kernels: dict[Any, int] = {}
_lock = threading.Lock()


def kernel_for(
    score_mod: Mod | None, mask_mod: Mod | None, tile: Tile, device: torch.device
) -> tuple[int, list[Tensor]]:
    """The kernel's handle and the captured tensors to pass to it.

    Traces only when the functions' code, constants, or the kind of their tensors are new; compiles only when, besides,
    the source is in no cache.
    """
    try:
        captures = Captures(score_mod, mask_mod)
        key = captures.key
        known = _emitted.get(key)
    except (UnknownCaptureError, TypeError):  # TypeError: not hashable
        captures, key, known = Captures(), None, None
    if known is None:
        known = _emit(score_mod, mask_mod, captures, device)
        if key is not None:
            _emitted[key] = known
    if known.refusal:
        raise NoKernelError(known.refusal)
    handle = _kernels.get((known.source, tile))
    if handle is None:
        with _lock:
            handle = _kernels.get((known.source, tile)) or _build(known.source, tile)
            _kernels[known.source, tile] = handle
    return handle, [captures.tensors[s] if isinstance(s, int) else s for s in known.sources]


def _emit(score_mod: Mod | None, mask_mod: Mod | None, captures: Captures, device: torch.device) -> _Emitted:
    try:
        return _Emitted(*emit(score_mod, mask_mod, captures, device))
    except CannotEmitError as error:
        return _Emitted("", [], str(error))


def kernel_source(mod: str, tile: Tile) -> str:
    """All of the CUDA that is compiled, without a header."""
    library = re.sub(r"^#(include|pragma once).*$", "", torch.ops.flashbwd.decoding_source(), flags=re.MULTILINE)
    arguments = f"{tile.head_dim}, {tile.rows}, {str(tile.bfloat16).lower()}, flashbwd::Mod"
    return f"""{library}{mod}
extern "C" __global__ void __launch_bounds__(flashbwd::kWarps * 32)
    {_NAME}(const __grid_constant__ flashbwd::DecodingParams p) {{
  extern __shared__ __align__(128) unsigned char shared[];
  flashbwd::split_kv<{arguments}>(p, shared);
}}
"""


def options_for(capability: tuple[int, int]) -> list[str]:
    major, minor = capability
    return [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17", "-default-device", "--fmad=true"]


def shared_bytes(tile: Tile) -> int:
    """As csrc/decoding/split_kv.cuh has it."""
    return torch.ops.flashbwd.decoding_shared_bytes(tile.head_dim, tile.rows)


def _build(mod: str, tile: Tile) -> int:
    capability = torch.cuda.get_device_capability(tile.device)
    try:
        cubin = nvrtc.cubin_of(kernel_source(mod, tile), options_for(capability))
        with torch.cuda.device(tile.device):
            return nvrtc.load_kernel(cubin, _NAME, shared_bytes(tile))
    except nvrtc.CompilationError as error:
        raise NoKernelError(str(error)) from error
