"""PyTorch's LayerNorm and RMSNorm backwards, as calls of this library's.

Each function takes one aten operator's arguments and returns that operator's results, or in words why no kernel of
this library computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops
from flashbwd.attention import current_backend

_NO_GRADIENT = "the output has no gradient"

_refusals: dict[tuple[torch.dtype, torch.device, int], str] = {}


def _refusal(x: Tensor, columns: int) -> str:
    """Why no kernel takes rows like x's; empty where one does, or where the reference was asked for."""
    if current_backend() == "reference":
        return ""
    key = (x.dtype, x.device, columns)
    if (known := _refusals.get(key)) is None:
        known = _refusals[key] = torch.ops.flashbwd.norm_kernel_refusal(x.new_empty((0, columns)))
    return known


def _in_rows(x: Tensor, dims: int, columns: int) -> Tensor:
    """x with its last ``dims`` dimensions, which are normalised together, as one."""
    return x if dims == 1 else x.reshape(*x.shape[: x.dim() - dims], columns)


def _in_shape(grad: Tensor, wanted: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    if not wanted:
        return None
    return (grad if grad.dtype == dtype else grad.to(dtype)).view(shape)


def layer_norm_backward(
    grad_out: Tensor | None,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | str:
    """``aten::native_layer_norm_backward``: over any number of last dimensions; dx is contiguous."""
    if grad_out is None:
        return _NO_GRADIENT
    dims, columns = len(normalized_shape), math.prod(normalized_shape)
    if refusal := _refusal(x, columns):
        return refusal
    x = x.contiguous()
    try:
        dx, dgamma, dbeta = _ops.call(
            torch.ops.flashbwd.layer_norm_backward.default,
            _in_rows(grad_out, dims, columns),
            _in_rows(x, dims, columns),
            mean.reshape(-1),
            rstd.reshape(-1),
            None if weight is None else weight.reshape(-1),
            None,
            output_mask=output_mask,
        )
    except ValueError as error:
        return str(error)
    return (
        dx.view(x.shape) if output_mask[0] else None,
        None if weight is None else _in_shape(dgamma, output_mask[1], normalized_shape, weight.dtype),
        None if bias is None else _in_shape(dbeta, output_mask[2], normalized_shape, bias.dtype),
    )


def rms_norm_backward(
    grad_out: Tensor | None,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None] | str:
    """``aten::_fused_rms_norm_backward``, as :func:`layer_norm_backward`."""
    if grad_out is None:
        return _NO_GRADIENT
    dims, columns = len(normalized_shape), math.prod(normalized_shape)
    if refusal := _refusal(x, columns):
        return refusal
    x = x.contiguous()
    try:
        dx, dgamma = _ops.call(
            torch.ops.flashbwd.rms_norm_backward.default,
            _in_rows(grad_out, dims, columns),
            _in_rows(x, dims, columns),
            rstd.reshape(-1),
            None if weight is None else weight.reshape(-1),
            None,
            output_mask=output_mask,
        )
    except ValueError as error:
        return str(error)
    return (
        dx.view(x.shape) if output_mask[0] else None,
        None if weight is None else _in_shape(dgamma, output_mask[1], normalized_shape, weight.dtype),
    )


ATTEMPTS: dict[str, Callable[..., Any]] = {
    "native_layer_norm_backward": layer_norm_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
}
