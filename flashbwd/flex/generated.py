"""Kernels for a score_mod that no build contains: traced, written as CUDA, and compiled by NVRTC at the first call.

The kernel is that of block masks (``csrc/attention/sm90/score_mod/generated.cuh``). A call without a block mask gets
one that shows everything.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.mods import nvrtc
from flashbwd.mods.derivative import emit_score_gradient
from flashbwd.mods.gradients import Gradient, GradientSources
from flashbwd.mods.kernels import NoKernelError
from flashbwd.reference.modifications import Mod, sum_dtype

__all__ = ["ARCHITECTURE", "GeneratedScoreMod", "generated"]

ARCHITECTURE = "sm_90a"  # the kernel needs instructions that only this one has
_NAME = "flashbwd_score_mod_backward"
_SHARED_BYTES = 227 * 1024  # kSharedMemoryBytes in csrc/attention/sm90/config.h
_C_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_sources = GradientSources(emit_score_gradient)


@dataclass(frozen=True, eq=False)
class GeneratedScoreMod:
    """A score_mod with its derivative as CUDA, and the tensors that it captures in a call.

    Attributes
    ----------
    captured : list of Tensor
        By slot.
    differentiable : sequence of Tensor
        Captured tensors that get a gradient.
    """

    gradient: Gradient
    captured: list[Tensor]
    differentiable: Sequence[Tensor]

    def operands(self, query: Tensor, tile: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the arguments of the operator, and the gradients to which the kernel adds, which are zero.

        The kernel is compiled at its first call. Raises :class:`UnsupportedError` if that fails.

        Parameters
        ----------
        tile : int
            Number of the tile of the plan, in csrc/attention/sm90/config.h.
        """
        gradients = [torch.zeros(t.shape, dtype=sum_dtype(t), device=t.device) for t in self.differentiable]
        slots = self.gradient.slots
        arguments = {
            "captured": self.captured,
            "gradients": [gradients[i] for i in slots],
            "gradient_slots": list(slots.values()),
            "kernel": _kernel(self.gradient.source, tile, query.dtype, query.device.index),
        }
        return arguments, gradients


def generated(score_mod: Mod, differentiable: Sequence[Tensor], deterministic: bool) -> GeneratedScoreMod:
    """Return ``score_mod`` as CUDA. Raises :class:`UnsupportedError` if that is not possible."""
    if differentiable and deterministic:
        raise UnsupportedError("gradients of captured tensors are added atomically, but determinism was requested")
    try:
        return GeneratedScoreMod(*_sources.of(score_mod, None, differentiable), differentiable)
    except NoKernelError as error:
        raise UnsupportedError(str(error)) from error


def kernel_source(mod: str, tile: int, dtype: torch.dtype) -> str:
    """Return the complete CUDA source of a kernel. It includes files of :func:`~flashbwd.mods.nvrtc.header_folder`.

    Parameters
    ----------
    mod : str
        What ``emit_score_gradient`` returns.
    tile : int
        Number of the tile, in csrc/attention/sm90/config.h.
    """
    threads = f"flashbwd::sm90::threads_of(flashbwd::sm90::kTiles[{tile}])"
    return f"""{nvrtc.includes("mods/functions.cuh", "mods/gradient_sum.cuh", "attention/sm90/generated_kernel.cuh")}
{mod}
extern "C" __global__ void __launch_bounds__({threads}, 1)
    {_NAME}(const __grid_constant__ flashbwd::sm90::GeneratedParams params) {{
  flashbwd::sm90::generated_backward<{_C_TYPES[dtype]}, {tile}, flashbwd::Mod>(params);
}}
"""


@functools.lru_cache(maxsize=256)
def _kernel(mod: str, tile: int, dtype: torch.dtype, device: int) -> int:
    try:
        source = kernel_source(mod, tile, dtype)
        return nvrtc.kernel_of(source, _NAME, _SHARED_BYTES, device, ARCHITECTURE)
    except nvrtc.CompilationError as error:
        raise UnsupportedError(str(error)) from error
