"""Gradients of flex decoding by the backward kernel: launching it, compiled first where no build has it."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashbwd.mods import nvrtc
from flashbwd.mods.captures import CannotEmitError, Captures, Slots, UnknownCaptureError
from flashbwd.mods.derivative import emit_gradient
from flashbwd.mods.emit import c_element
from flashbwd.mods.kernels import NoKernelError, known_modification, options_for
from flashbwd.mods.trace import trace
from flashbwd.reference.decoding import DecodingCall, Mod, block_states

_NAME = "flashbwd_decoding_backward"
_THREADS = 128


@dataclass(frozen=True)
class _Tile:
    head_dim: int
    dtype: torch.dtype
    aligned: bool
    device: int
    shared_bytes: int


@dataclass(eq=False)
class _Gradient:
    """Source of the modifications and their derivative; ``captured`` as in :class:`Slots`, ``places`` as in
    :func:`emit_gradient`."""

    source: str
    captured: list[int | Tensor]
    places: dict[int, int]
    kernels: dict[_Tile, int] = field(default_factory=dict)


_known: dict[Any, _Gradient] = {}
_lock = threading.Lock()


def run_backward(
    call: DecodingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    captured: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of query, key, value and the captured tensors of a call that the forward kernel takes.

    ``out`` is in float32, not rounded to query's dtype. Gradients of captured tensors are added up atomically, in
    float32 (float64 for float64).

    Raises
    ------
    NoKernelError
        When the modifications, or their derivative, have no CUDA; or when captured tensors need a gradient and
        ``torch.use_deterministic_algorithms`` is on.
    """
    if captured and torch.are_deterministic_algorithms_enabled():
        raise NoKernelError("gradients of captured tensors are added atomically, and deterministic ones were asked for")
    dout = query.new_zeros(out.shape) if dout is None else dout
    dout, query, key, value = (_rows_contiguous(tensor) for tensor in (dout, query, key, value))
    head_dim, aligned, shared_bytes = torch.ops.flashbwd.decoding_backward_tile(dout, query, key, value)
    tile = _Tile(head_dim, query.dtype, aligned, query.device.index, shared_bytes)
    mask = call.block_mask
    kernel = number = 0
    tensors: list[Tensor] = []
    gradients = {i: torch.zeros(t.shape, dtype=_sum_dtype(t), device=t.device) for i, t in enumerate(captured)}
    places: dict[int, int] = {}
    if call.score_mod is not None or mask is not None:
        mods = (call.score_mod, None if mask is None else mask.mask_mod)
        ordinary = None if captured else known_modification(*mods)  # the forward has traced them
        if ordinary is not None and ordinary[0].source is None:
            number, tensors = ordinary[0].number, ordinary[1]
        else:
            known, tensors = _gradient_of(*mods, captured)
            kernel = known.kernels.get(tile) or _compile(known, tile)
            places = known.places
    states = None if mask is None else block_states(mask, key.shape[2]).contiguous()
    q_block, kv_block = (1, 1) if mask is None else mask.BLOCK_SIZE
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
    torch.ops.flashbwd.decoding_backward(
        dout,
        query,
        key,
        value,
        out,
        lse,
        None if dlse is None else dlse.float().contiguous(),
        dq,
        dk,
        dv,
        states,
        tensors,
        [gradients[i] for i in places],
        list(places.values()),
        call.scale,
        q_block,
        kv_block,
        kernel,
        number,
    )
    return dq, dk, dv, list(gradients.values())


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _gradient_of(
    score_mod: Mod | None, mask_mod: Mod | None, differentiable: Sequence[Tensor]
) -> tuple[_Gradient, list[Tensor]]:
    """What was made of the modifications, and the tensors that they capture now."""
    try:
        captures = Captures(score_mod, mask_mod)
        key: Any = (captures.key, tuple(captures.position(tensor) for tensor in differentiable))
        known = _known.get(key)
    except (UnknownCaptureError, TypeError):  # TypeError: not hashable
        captures, key, known = Captures(), None, None
    if known is None:
        slots = Slots(captures)
        try:
            score = None if score_mod is None else trace("score_mod", score_mod, True)
            mask = None if mask_mod is None else trace("mask_mod", mask_mod, False)
            source, places = emit_gradient(score, mask, slots, list(differentiable))
        except CannotEmitError as error:
            raise NoKernelError(str(error)) from error
        known = _Gradient(source, slots.sources, places)
        if key is not None and None not in key[1]:
            _known[key] = known
    return known, [captures.tensors[c] if isinstance(c, int) else c for c in known.captured]


def backward_source(mod: str, head_dim: int, dtype: torch.dtype, aligned: bool) -> str:
    """All of the CUDA that is compiled, without a header."""
    source = torch.ops.flashbwd.decoding_backward_source() + mod
    source = re.sub(r"^#(include|pragma once).*$", "", source, flags=re.MULTILINE)
    arguments = f"{head_dim}, {c_element(dtype)}, {str(aligned).lower()}, flashbwd::Mod"
    return f"""{source}
extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
    {_NAME}(const __grid_constant__ flashbwd::DecodingBackwardParams p) {{
  extern __shared__ __align__(128) unsigned char shared[];
  flashbwd::Backward<{arguments}>(p, shared).run();
}}
"""


def _compile(known: _Gradient, tile: _Tile) -> int:
    capability = torch.cuda.get_device_capability(tile.device)
    source = backward_source(known.source, tile.head_dim, tile.dtype, tile.aligned)
    with _lock:
        try:
            cubin = nvrtc.cubin_of(source, options_for(capability))
            with torch.cuda.device(tile.device):
                known.kernels[tile] = nvrtc.load_kernel(cubin, _NAME, tile.shared_bytes)
        except nvrtc.CompilationError as error:
            raise NoKernelError(str(error)) from error
    return known.kernels[tile]
