"""Kernels for a score_mod that no build contains: traced, written as CUDA, and compiled by NVRTC at the first call.

The kernels are those of block masks (``csrc/attention/sm90/score_mod/generated.cuh`` and
``csrc/attention/sm80/generated_scores.cuh``). A call without a block mask gets one that shows everything. A
``mask_mod`` whose bits would take too much memory becomes part of the ``score_mod``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.mods import nvrtc
from flashbwd.mods.derivative import Gradient, emit_score_gradient
from flashbwd.mods.gradients import GradientSources
from flashbwd.mods.kernels import NoKernelError
from flashbwd.reference.modifications import Mod, sum_dtype

__all__ = ["ARCHITECTURES", "GeneratedScoreMod", "generated"]

# By backend. The sm90 kernel needs instructions that only this architecture has; sm80 is compiled for the device.
ARCHITECTURES = {"sm90": "sm_90a", "sm80": None}
_NAME = "flashbwd_score_mod_backward"
_C_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
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

    def operands(self, query: Tensor, kernel: Kernel) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the arguments of the operator, and the gradients to which the kernel adds, which are zero.

        The kernel is compiled at its first call. Raises :class:`UnsupportedError` if that fails.

        Parameters
        ----------
        kernel : Kernel
            Of the call's plan.
        """
        gradients = [torch.zeros(t.shape, dtype=sum_dtype(t), device=t.device) for t in self.differentiable]
        slots = self.gradient.slots
        arguments = {
            "captured": self.captured,
            "gradients": [gradients[i] for i in slots],
            "gradient_slots": list(slots.values()),
            "numbers": self.gradient.numbers,
            "kernel": _kernel(self.gradient.source, kernel, query.dtype, query.device.index),
        }
        return arguments, gradients

    def cache(self, kernel: Kernel, dtype: torch.dtype, device: int) -> str | None:
        """Return where the kernel is: "memory", "disk", or None if it must be compiled.

        Raises :class:`UnsupportedError` if nothing can be compiled.
        """
        try:
            source = kernel_source(self.gradient.source, kernel, dtype)
            return nvrtc.cache_of(source, _NAME, device, ARCHITECTURES[kernel.backend])
        except nvrtc.CompilationError as error:
            raise UnsupportedError(str(error)) from error


def generated(score_mod: Mod, differentiable: Sequence[Tensor], deterministic: bool) -> GeneratedScoreMod:
    """Return ``score_mod`` as CUDA. Raises :class:`UnsupportedError` if that is not possible."""
    if differentiable and deterministic:
        raise UnsupportedError("gradients of captured tensors are added atomically, but determinism was requested")
    try:
        return GeneratedScoreMod(*_sources.of(score_mod, None, differentiable), differentiable)
    except NoKernelError as error:
        raise UnsupportedError(str(error)) from error


@dataclass(frozen=True)
class Kernel:
    """The kernel that a score_mod becomes part of.

    Attributes
    ----------
    backend : str
        "sm90" or "sm80".
    tile : int
        Number of the tile in the table of the backend, csrc/attention/sm90/config.h or csrc/attention/sm80/config.h.
    tf32 : bool
        sm80: float32 inputs are multiplied as TF32.
    """

    backend: str
    tile: int
    tf32: bool = False


def kernel_of_plan(plan: Mapping[str, Any], tf32: bool = False) -> Kernel:
    """Return the kernel of a plan."""
    return Kernel(plan["backend"], plan["config"], tf32 and plan["backend"] == "sm80")


def kernel_source(mod: str, kernel: Kernel, dtype: torch.dtype) -> str:
    """Return the complete CUDA source of a kernel. It includes files of :func:`~flashbwd.mods.nvrtc.header_folder`.

    Parameters
    ----------
    mod : str
        What ``emit_score_gradient`` returns.
    """
    arguments = f"{_C_TYPES[dtype]}, {kernel.tile}"
    threads = f"flashbwd::sm90::threads_of(flashbwd::sm90::kTiles[{kernel.tile}])"
    if kernel.backend == "sm80":
        arguments += f", {str(kernel.tf32).lower()}"
        threads = f"flashbwd::sm80::kTiles[{kernel.tile}].threads()"
    headers = ("mods/functions.cuh", "mods/gradient_sum.cuh", f"attention/{kernel.backend}/generated_kernel.cuh")
    return f"""{nvrtc.includes(*headers)}
namespace flashbwd {{
using {kernel.backend}::GeneratedParams;
}}
{mod}
extern "C" __global__ void __launch_bounds__({threads}, 1)
    {_NAME}(const __grid_constant__ flashbwd::GeneratedParams params) {{
  flashbwd::{kernel.backend}::generated_backward<{arguments}, flashbwd::Mod>(params);
}}
"""


@functools.lru_cache(maxsize=256)
def _kernel(mod: str, kernel: Kernel, dtype: torch.dtype, device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    try:
        source = kernel_source(mod, kernel, dtype)
        return nvrtc.kernel_of(source, _NAME, shared_bytes, device, ARCHITECTURES[kernel.backend])
    except nvrtc.CompilationError as error:
        raise UnsupportedError(str(error)) from error
