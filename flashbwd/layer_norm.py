"""LayerNorm and RMSNorm: their backward, differentiable forms, and drop-in modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashbwd import _ops, reference

__all__ = [
    "LayerNorm",
    "LayerNormGrads",
    "RMSNorm",
    "RMSNormGrads",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]


class LayerNormGrads(NamedTuple):
    """Gradients of a LayerNorm; ``None`` where not asked for."""

    dx: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


class RMSNormGrads(NamedTuple):
    """Gradients of an RMSNorm; ``None`` where not asked for."""

    dx: Tensor | None
    dgamma: Tensor | None


def layer_norm_backward(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    *,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> LayerNormGrads:
    """Gradients of ``z = gamma * xhat + beta`` with ``xhat = (x - mu) * rs``, the rows of x normalised.

    ::

        dy     = gamma * dz
        dx     = rs * (dy - mean(dy) - xhat * mean(dy * xhat)) + dresidual
        dgamma = sum over rows of dz * xhat
        dbeta  = sum over rows of dz

    (Ba et al., "Layer Normalization", 2016, differentiated; means over a row.) Sums are float32, float64 for float64
    inputs. Bitwise deterministic.

    Parameters
    ----------
    dz : Tensor, (..., N)
        Gradient of z: float16, bfloat16 or float32, not necessarily x's; float64 with a float64 x.
    x : Tensor, (..., N)
        Any number of rows, zero too, at any distance from each other.
    mu, rs : Tensor, (rows,) or (..., 1)
        Mean and reciprocal standard deviation of each row as the forward gave them: float32 (float64 for a float64 x),
        or 16-bit.
    gamma : Tensor, (N,), optional
        x's dtype or float32. Without it ``gamma = 1``, and dgamma is ``None``.
    dresidual : Tensor, (..., N), optional
        x's dtype; added to dx: the gradient that reaches x past the normalisation.
    zero_centered_gamma : bool
        The forward multiplied by ``1 + gamma``.
    output_mask : (bool, bool, bool)
        Which of dx, dgamma, dbeta to compute.

    Returns
    -------
    LayerNormGrads
        dx with x's dtype and the strides of ``empty_like(x)``; dgamma and dbeta (N,) with gamma's dtype, x's without
        gamma.

    Raises
    ------
    ValueError
        For bad arguments, before anything runs; the message names the argument, what was expected and what came.
    """
    grads = _ops.call(
        torch.ops.flashbwd.layer_norm_backward,
        dz,
        x,
        mu,
        rs,
        gamma,
        dresidual=dresidual,
        zero_centered_gamma=zero_centered_gamma,
        output_mask=list(output_mask),
    )
    asked = (output_mask[0], output_mask[1] and gamma is not None, output_mask[2])
    return LayerNormGrads(*(grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)))


def rms_norm_backward(
    dz: Tensor,
    x: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    *,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool] = (True, True),
) -> RMSNormGrads:
    """Gradients of ``z = gamma * xhat`` with ``xhat = x * rs``.

    As :func:`layer_norm_backward`, with neither mean nor beta::

        dx = rs * (dy - xhat * mean(dy * xhat)) + dresidual

    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, differentiated.) ``rs`` is the reciprocal root
    of ``mean(x**2) + eps``.
    """
    grads = _ops.call(
        torch.ops.flashbwd.rms_norm_backward,
        dz,
        x,
        rs,
        gamma,
        dresidual=dresidual,
        zero_centered_gamma=zero_centered_gamma,
        output_mask=list(output_mask),
    )
    asked = (output_mask[0], output_mask[1] and gamma is not None)
    return RMSNormGrads(*(grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)))


def layer_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """LayerNorm over the last dimension, differentiable in x, gamma and beta.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    gamma, beta : Tensor, (N,), optional
        x's dtype or float32, both the same.
    eps : float
        Added to the variance.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma``.

    Returns
    -------
    Tensor, (..., N)
        ``gamma * (x - mean) / sqrt(var + eps) + beta`` in x's dtype, computed in float32 (float64 for float64). CUDA
        autocast runs it in float32, as PyTorch's.
    """
    z, _, _ = torch.ops.flashbwd.layer_norm(x, gamma, beta, eps, zero_centered_gamma)
    return z


def rms_norm(
    x: Tensor, gamma: Tensor | None = None, *, eps: float | None = None, zero_centered_gamma: bool = False
) -> Tensor:
    """RMSNorm over the last dimension, differentiable in x and gamma.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    gamma : Tensor, (N,), optional
        x's dtype or float32.
    eps : float, optional
        Added to the mean square; by default ``torch.finfo(x.dtype).eps``, as in PyTorch.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma``.

    Returns
    -------
    Tensor, (..., N)
        ``gamma * x / sqrt(mean(x**2) + eps)`` in x's dtype, computed in float32 (float64 for float64).
    """
    z, _ = torch.ops.flashbwd.rms_norm(x, gamma, torch.finfo(x.dtype).eps if eps is None else eps, zero_centered_gamma)
    return z


def _flat_normalised(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """x with the dimensions that are normalised together as one."""
    dims = len(normalized_shape)
    if tuple(x.shape[x.dim() - dims :]) != tuple(normalized_shape):
        raise ValueError(
            f"flashbwd: x has shape {tuple(x.shape)}, expected its last dimensions to be {normalized_shape}"
        )
    return x if dims == 1 else x.reshape(*x.shape[: x.dim() - dims], math.prod(normalized_shape))


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` with the gradients of this library; same arguments, same state."""

    def forward(self, x: Tensor) -> Tensor:
        gamma = None if self.weight is None else self.weight.flatten()
        beta = None if self.bias is None else self.bias.flatten()
        return layer_norm(_flat_normalised(x, self.normalized_shape), gamma, beta, eps=self.eps).view_as(x)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with the gradients of this library; same arguments, same state."""

    def forward(self, x: Tensor) -> Tensor:
        gamma = None if self.weight is None else self.weight.flatten()
        return rms_norm(_flat_normalised(x, self.normalized_shape), gamma, eps=self.eps).view_as(x)


# ---- the operators ----


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


def _fake_grads(x: Tensor, gamma: Tensor | None, mask: list[bool]) -> tuple[Tensor, ...]:
    """Fakes of dx, dgamma and, for a mask of three, dbeta; empty where not asked for."""
    parameter = x if gamma is None else gamma
    present = (mask[0], mask[1] and gamma is not None, *mask[2:])
    shapes = [torch.empty_like(x)] + [parameter.new_empty(x.shape[-1]) for _ in present[1:]]
    return tuple(grad if wanted else x.new_empty(0) for grad, wanted in zip(shapes, present, strict=True))


@torch.library.register_fake("flashbwd::layer_norm_backward")
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


@torch.library.register_fake("flashbwd::rms_norm_backward")
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


for _name in ("layer_norm_backward", "rms_norm_backward"):
    torch.library.register_autograd(f"flashbwd::{_name}", _ops.refuse_double_backward(_name), lib=_ops.library)


def _define(name: str, schema: str, forward: Callable[..., Any]) -> None:
    torch.library.define(f"flashbwd::{name}", schema, lib=_ops.library)
    torch.library.impl(f"flashbwd::{name}", "CompositeExplicitAutograd", lib=_ops.library)(forward)


def _layer_norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.call(torch.ops.flashbwd.norm_forward, x, gamma, beta, eps, zero_centered_gamma, False)


def _rms_norm(x: Tensor, gamma: Tensor | None, eps: float, zero_centered_gamma: bool) -> tuple[Tensor, Tensor]:
    z, _, rs = _ops.call(torch.ops.flashbwd.norm_forward, x, gamma, None, eps, zero_centered_gamma, True)
    return z, rs


def _norm_forward_reference(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if rms:
        z, rs = reference.rms_norm_forward(x, gamma, eps=eps, zero_centered_gamma=zero_centered_gamma)
        return z, rs.new_empty(0), rs
    return reference.layer_norm_forward(x, gamma, beta, eps=eps, zero_centered_gamma=zero_centered_gamma)


_ops.implement_reference("norm_forward_reference", _norm_forward_reference)
_define(
    "layer_norm",
    "(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool zero_centered_gamma) -> (Tensor z, Tensor mu, Tensor rs)",
    _layer_norm,
)
_define(
    "rms_norm", "(Tensor x, Tensor? gamma, float eps, bool zero_centered_gamma) -> (Tensor z, Tensor rs)", _rms_norm
)


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@torch.library.register_fake("flashbwd::layer_norm")
def _layer_norm_fake(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _statistics(x), _statistics(x)


@torch.library.register_fake("flashbwd::rms_norm")
def _rms_norm_fake(x: Tensor, gamma: Tensor | None, eps: float, zero_centered_gamma: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _statistics(x)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, beta, _, zero_centered_gamma = inputs
    _, mu, rs = output
    ctx.save_for_backward(x, gamma, mu, rs)
    ctx.zero_centered_gamma = zero_centered_gamma
    ctx.beta_dtype = None if beta is None else beta.dtype
    ctx.mark_non_differentiable(mu, rs)
    ctx.set_materialize_grads(False)


def _layer_norm_grads(ctx: Any, dz: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dz is None:
        return None, None, None, None, None
    x, gamma, mu, rs = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    dx, dgamma, dbeta = layer_norm_backward(
        dz, x, mu, rs, gamma, zero_centered_gamma=ctx.zero_centered_gamma, output_mask=tuple(wanted)
    )
    return dx, dgamma, None if dbeta is None else dbeta.to(ctx.beta_dtype), None, None


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, _, zero_centered_gamma = inputs
    ctx.save_for_backward(x, gamma, output[1])
    ctx.zero_centered_gamma = zero_centered_gamma
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rms_norm_grads(ctx: Any, dz: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dz is None:
        return None, None, None, None
    x, gamma, rs = ctx.saved_tensors
    dx, dgamma = rms_norm_backward(
        dz,
        x,
        rs,
        gamma,
        zero_centered_gamma=ctx.zero_centered_gamma,
        output_mask=(ctx.needs_input_grad[0], ctx.needs_input_grad[1]),
    )
    return dx, dgamma, None, None


torch.library.register_autograd(
    "flashbwd::layer_norm", _layer_norm_grads, setup_context=_save_layer_norm, lib=_ops.library
)
torch.library.register_autograd("flashbwd::rms_norm", _rms_norm_grads, setup_context=_save_rms_norm, lib=_ops.library)

# PyTorch's list for CUDA autocast has layer_norm, not rms_norm; that for the CPU has neither.
torch.library.register_autocast("flashbwd::layer_norm", "cuda", torch.float32, lib=_ops.library)
