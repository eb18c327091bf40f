"""Registers reference implementations, fake kernels and autograd rules of LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops, reference
from flashbwd.norm_backward import (
    layer_norm_backward,
    layer_norm_backward_from_output,
    rms_norm_backward,
    rms_norm_backward_from_output,
)


def _layer_norm_backward_reference(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rs: Tensor,
    gamma: Tensor | None,
    dresidual: Tensor | None,
    zero_centered_gamma: bool,
    *mask: bool,
) -> tuple[Tensor, ...]:
    grads = reference.layer_norm_backward(
        dz, x, mu, rs, gamma, dresidual, zero_centered_gamma, (mask[0], mask[1], mask[2])
    )
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _rms_norm_backward_reference(
    dz: Tensor,
    x: Tensor,
    rs: Tensor,
    gamma: Tensor | None,
    dresidual: Tensor | None,
    zero_centered_gamma: bool,
    *mask: bool,
) -> tuple[Tensor, ...]:
    grads = reference.rms_norm_backward(dz, x, rs, gamma, dresidual, zero_centered_gamma, (mask[0], mask[1]))
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _norm_backward_from_output_reference(
    dz: Tensor,
    z: Tensor,
    rs: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    dresidual: Tensor | None,
    zero_centered_gamma: bool,
    rms: bool,
    *mask: bool,
) -> tuple[Tensor, ...]:
    grads = reference.norm_backward_from_output(
        dz, z, rs, gamma, beta, dresidual, zero_centered_gamma, rms, (mask[0], mask[1], mask[2])
    )
    return tuple(z.new_empty(0) if grad is None else grad for grad in grads)


_ops.implement_reference("norm_backward_from_output_reference", _norm_backward_from_output_reference)
_ops.implement_reference("layer_norm_backward_reference", _layer_norm_backward_reference)
_ops.implement_reference("rms_norm_backward_reference", _rms_norm_backward_reference)


@torch.library.register_fake("flashbwd::layer_norm_backward_reference")
def _layer_norm_backward_reference_fake(
    dz: Tensor, x: Tensor, mu: Tensor, rs: Tensor, gamma: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return _fake_grads(x, gamma, list(rest[-3:]))


@torch.library.register_fake("flashbwd::rms_norm_backward_reference")
def _rms_norm_backward_reference_fake(
    dz: Tensor, x: Tensor, rs: Tensor, gamma: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return _fake_grads(x, gamma, list(rest[-2:]))


def _fake_grads(x: Tensor, gamma: Tensor | None, mask: list[bool], beta: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return fake dx, dgamma and, if the mask has three entries, dbeta. A gradient that was not requested is empty."""
    parameter = next(t for t in (gamma, beta, x) if t is not None)
    present = (mask[0], mask[1] and gamma is not None, *mask[2:])
    shapes = [torch.empty_like(x)] + [parameter.new_empty(x.shape[-1]) for _ in present[1:]]
    return tuple(grad if wanted else x.new_empty(0) for grad, wanted in zip(shapes, present, strict=True))


@torch.library.register_fake("flashbwd::norm_backward_from_output_reference")
def _norm_backward_from_output_reference_fake(
    dz: Tensor, z: Tensor, rs: Tensor, gamma: Tensor | None, beta: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return _fake_grads(z, gamma, list(rest[-3:]), beta)


@_ops.register_fake("norm_backward_from_output", "z")
def _norm_backward_from_output_fake(
    dz: Tensor,
    z: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    dresidual: Tensor | None = None,
    *,
    zero_centered_gamma: bool = False,
    rms: bool = False,
    output_mask: list[bool] = [True, True, True],  # noqa: B006
) -> tuple[Tensor, ...]:
    return _fake_grads(z, gamma, [*output_mask[:2], output_mask[2] and not rms], beta)


@_ops.register_fake("layer_norm_backward", "x")
def _layer_norm_backward_fake(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    dresidual: Tensor | None = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: list[bool] = [True, True, True],  # noqa: B006 (a schema's default)
) -> tuple[Tensor, ...]:
    return _fake_grads(x, gamma, output_mask)


@_ops.register_fake("rms_norm_backward", "x")
def _rms_norm_backward_fake(
    dz: Tensor,
    x: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    dresidual: Tensor | None = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: list[bool] = [True, True],  # noqa: B006
) -> tuple[Tensor, ...]:
    return _fake_grads(x, gamma, output_mask)


def _norm_forward_reference(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if rms:
        z, rs = reference.rms_norm_forward(x, gamma, eps=eps, zero_centered_gamma=zero_centered_gamma)
        return z, rs.new_empty(0), rs
    return reference.layer_norm_forward(x, gamma, beta, eps=eps, zero_centered_gamma=zero_centered_gamma)


_ops.implement_reference("norm_forward_reference", _norm_forward_reference)


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@_ops.register_fake("layer_norm", "x")
def _layer_norm_fake(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool, _: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _statistics(x), _statistics(x)


@_ops.register_fake("rms_norm", "x")
def _rms_norm_fake(
    x: Tensor, gamma: Tensor | None, eps: float, zero_centered_gamma: bool, _: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _statistics(x)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, beta, _, zero_centered_gamma, memory_efficient = inputs
    z, mu, rs = output
    ctx.save_for_backward(z if memory_efficient else x, gamma, beta if memory_efficient else None, mu, rs)
    ctx.zero_centered_gamma, ctx.memory_efficient = zero_centered_gamma, memory_efficient
    ctx.beta_dtype = None if beta is None else beta.dtype
    ctx.mark_non_differentiable(mu, rs)
    ctx.set_materialize_grads(False)


def _layer_norm_grads(ctx: Any, dz: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dz is None:
        return (None,) * 6
    x_or_z, gamma, beta, mu, rs = ctx.saved_tensors
    options: dict[str, Any] = {
        "zero_centered_gamma": ctx.zero_centered_gamma,
        "output_mask": tuple(ctx.needs_input_grad[:3]),
    }
    if ctx.memory_efficient:
        grads = layer_norm_backward_from_output(dz, x_or_z, rs, gamma, beta, **options)
    else:
        grads = layer_norm_backward(dz, x_or_z, mu, rs, gamma, **options)
    dbeta = None if grads.dbeta is None else grads.dbeta.to(ctx.beta_dtype)
    return grads.dx, grads.dgamma, dbeta, None, None, None


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, _, zero_centered_gamma, memory_efficient = inputs
    z, rs = output
    ctx.save_for_backward(z if memory_efficient else x, gamma, rs)
    ctx.zero_centered_gamma, ctx.memory_efficient = zero_centered_gamma, memory_efficient
    ctx.mark_non_differentiable(rs)
    ctx.set_materialize_grads(False)


def _rms_norm_grads(ctx: Any, dz: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dz is None:
        return (None,) * 5
    x_or_z, gamma, rs = ctx.saved_tensors
    backward = rms_norm_backward_from_output if ctx.memory_efficient else rms_norm_backward
    grads = backward(
        dz,
        x_or_z,
        rs,
        gamma,
        zero_centered_gamma=ctx.zero_centered_gamma,
        output_mask=(ctx.needs_input_grad[0], ctx.needs_input_grad[1]),
    )
    return grads.dx, grads.dgamma, None, None, None


_ops.library.register_autograd("layer_norm", _layer_norm_grads, _save_layer_norm)
_ops.library.register_autograd("rms_norm", _rms_norm_grads, _save_rms_norm)

_HALF = (torch.float16, torch.bfloat16)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _autocast_layer_norm(x: Tensor, gamma: Tensor | None, beta: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    """Cast 16-bit inputs to float32. A kernel of ``torch.library.register_autocast`` takes three times as long."""
    inputs = (t.float() if t is not None and t.dtype in _HALF else t for t in (x, gamma, beta))
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        results: tuple[Tensor, ...] = torch.ops.flashbwd.layer_norm.default(*inputs, *options)
    return results


# PyTorch's CUDA autocast also casts layer_norm to float32 but not rms_norm. Its CPU autocast casts neither.
_ops.library.impl("layer_norm", _autocast_layer_norm, "AutocastCUDA")
