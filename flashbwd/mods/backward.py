"""Launches the backward kernel of flex decoding, after compiling it if it is not built in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbwd.mods import nvrtc
from flashbwd.mods.derivative import emit_gradient
from flashbwd.mods.gradients import GradientSources
from flashbwd.mods.kernels import NoKernelError, modification_of
from flashbwd.mods.operators import c_element
from flashbwd.reference.decoding import DecodingCall, block_states

_NAME = "flashbwd_decoding_backward"
_THREADS = 128


@dataclass(frozen=True)
class _Tile:
    head_dim: int
    dtype: torch.dtype
    aligned: bool
    device: int
    shared_bytes: int


_sources = GradientSources(emit_gradient)


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
    """Compute the gradients of query, key, value and the captured tensors of a call that the forward kernel supports.

    ``out`` is the float32 output before it is rounded to query's dtype. The kernel accumulates gradients of captured
    tensors with atomics, in float32 (float64 for float64 tensors).

    Raises
    ------
    NoKernelError
        If the modifications or their derivative cannot be compiled, or if captured tensors need a gradient while
        ``torch.use_deterministic_algorithms`` is on.
    """
    if captured and torch.are_deterministic_algorithms_enabled():
        raise NoKernelError("gradients of captured tensors are added atomically, but determinism was requested")
    dout = query.new_zeros(out.shape) if dout is None else dout
    dout, query, key, value = (_rows_contiguous(tensor) for tensor in (dout, query, key, value))
    head_dim, aligned, shared_bytes = torch.ops.flashbwd.decoding_backward_tile(dout, query, key, value)
    tile = _Tile(head_dim, query.dtype, aligned, query.device.index, shared_bytes)
    mask = call.block_mask
    kernel = number = 0
    tensors: list[Tensor] = []
    gradients = {i: torch.zeros(t.shape, dtype=_sum_dtype(t), device=t.device) for i, t in enumerate(captured)}
    slots: dict[int, int] = {}
    if call.score_mod is not None or mask is not None:
        mods = (call.score_mod, None if mask is None else mask.mask_mod)
        built_in = None if captured else modification_of(*mods)
        if built_in is not None and built_in[0].source is None:
            number, tensors = built_in[0].number, built_in[1]
        else:
            known, tensors = _sources.of(*mods, captured)
            kernel = _kernel(known.source, tile)
            slots = known.slots
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
        [gradients[i] for i in slots],
        list(slots.values()),
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


def backward_source(mod: str, head_dim: int, dtype: torch.dtype, aligned: bool) -> str:
    """As :func:`~flashbwd.mods.kernels.kernel_source`, for the backward."""
    arguments = f"{head_dim}, {c_element(dtype)}, {str(aligned).lower()}, flashbwd::Mod"
    return f"""{nvrtc.includes("decoding/backward.cuh", "decoding/mod.cuh", "mods/functions.cuh")}
{mod}
extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
    {_NAME}(const __grid_constant__ flashbwd::DecodingBackwardParams p) {{
  extern __shared__ __align__(128) unsigned char shared[];
  flashbwd::Backward<{arguments}>(p, shared).run();
}}
"""


@functools.lru_cache(maxsize=256)
def _kernel(source: str, tile: _Tile) -> int:
    try:
        text = backward_source(source, tile.head_dim, tile.dtype, tile.aligned)
        return nvrtc.kernel_of(text, _NAME, tile.shared_bytes, tile.device)
    except nvrtc.CompilationError as error:
        raise NoKernelError(str(error)) from error
