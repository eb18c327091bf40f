"""LayerNorm and RMSNorm: backward functions, differentiable functions, and drop-in modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashbwd import _arguments, _ops, reference

__all__ = [
    "LayerNorm",
    "LayerNormGrads",
    "RMSNorm",
    "RMSNormGrads",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_backward_from_output",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_from_output",
]


class LayerNormGrads(NamedTuple):
    """Gradients of a LayerNorm. A gradient that was not requested is ``None``."""

    dx: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


class RMSNormGrads(NamedTuple):
    """Gradients of an RMSNorm. A gradient that was not requested is ``None``."""

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
    """Compute the gradients of LayerNorm, ``z = gamma * xhat + beta`` with ``xhat = (x - mu) * rs``.

    Means are over a row::

        dy     = gamma * dz
        dx     = rs * (dy - mean(dy) - xhat * mean(dy * xhat)) + dresidual
        dgamma = sum over rows of dz * xhat
        dbeta  = sum over rows of dz

    (Derivative of the definition in Ba et al., "Layer Normalization", 2016.) Sums are accumulated in float32, or in
    float64 for float64 inputs. Results are bitwise deterministic.

    Parameters
    ----------
    dz : Tensor, (..., N)
        Gradient of z: float16, bfloat16 or float32, which may differ from x's dtype; float64 if x is float64.
    x : Tensor, (..., N)
        Input of the forward: float16, bfloat16, float32 or float64. Any number of rows, including zero, with any row
        stride.
    mu, rs : Tensor, (rows,) or (..., 1)
        Mean and reciprocal standard deviation of each row, from the forward: float32 (float64 if x is float64), float16
        or bfloat16.
    gamma : Tensor, (N,), optional
        x's dtype or float32. Without it, gamma is 1 and dgamma is ``None``.
    dresidual : Tensor, (..., N), optional
        Gradient that reaches x through the residual connection, in x's dtype. It is added to dx.
    zero_centered_gamma : bool
        True if the forward multiplied by ``1 + gamma``. Requires ``gamma``.
    output_mask : (bool, bool, bool)
        Which of dx, dgamma, dbeta to compute.

    Returns
    -------
    LayerNormGrads
        dx has x's dtype and the strides of ``torch.empty_like(x)``. dgamma and dbeta are (N,) in gamma's dtype, or in
        x's dtype without gamma.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected. No kernel has been
        launched then.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dgamma", "dbeta"))
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    grads = _ops.call(
        torch.ops.flashbwd.layer_norm_backward,
        dz,
        x,
        mu,
        rs,
        gamma,
        dresidual=dresidual,
        zero_centered_gamma=zero_centered_gamma,
        output_mask=_ops.output_mask_for(x, output_mask),
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
    """Compute the gradients of RMSNorm, ``z = gamma * xhat`` with ``xhat = x * rs``.

    ::

        dy     = gamma * dz
        dx     = rs * (dy - xhat * mean(dy * xhat)) + dresidual
        dgamma = sum over rows of dz * xhat

    (Derivative of the definition in Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) ``rs`` is
    ``1 / sqrt(mean(x**2) + eps)`` of each row. There is no mean and no beta; all else is as in
    :func:`layer_norm_backward`.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dgamma"))
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    grads = _ops.call(
        torch.ops.flashbwd.rms_norm_backward,
        dz,
        x,
        rs,
        gamma,
        dresidual=dresidual,
        zero_centered_gamma=zero_centered_gamma,
        output_mask=_ops.output_mask_for(x, output_mask),
    )
    asked = (output_mask[0], output_mask[1] and gamma is not None)
    return RMSNormGrads(*(grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)))


def layer_norm_backward_from_output(
    dz: Tensor,
    z: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> LayerNormGrads:
    """Compute the gradients of LayerNorm from its output z, so that the input x need not be kept.

    The formulas are those of :func:`layer_norm_backward` with ``xhat = (z - beta) / gamma``. A divisor (gamma, or
    ``1 + gamma`` with ``zero_centered_gamma``) with a magnitude below 1e-5 is replaced by 1e-5 with the same sign. xhat
    inherits the rounding error of z. Gradients from a 16-bit z are therefore less accurate than those from x for
    columns in which gamma is small compared with beta.

    Parameters
    ----------
    dz, z : Tensor, (..., N)
        Gradient of the norm's output, and the output itself, with the same dtype.
    rs : Tensor, (rows,) or (..., 1)
        Reciprocal standard deviation of each row of x.
    gamma, beta : Tensor, (N,), optional
        z's dtype or float32. Both have the same dtype.
    dresidual, zero_centered_gamma, output_mask
        As in :func:`layer_norm_backward`.

    Returns
    -------
    LayerNormGrads
        As from :func:`layer_norm_backward`, with z in place of x.

    Raises
    ------
    ValueError
        If an argument is invalid.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dgamma", "dbeta"))
    return LayerNormGrads(
        *_backward_from_output(dz, z, rs, gamma, beta, dresidual, zero_centered_gamma, False, output_mask)
    )


def rms_norm_backward_from_output(
    dz: Tensor,
    z: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    *,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool] = (True, True),
) -> RMSNormGrads:
    """Compute the gradients of RMSNorm from its output z; see :func:`layer_norm_backward_from_output`."""
    dx_and_dgamma = _arguments.flags("output_mask", output_mask, ("dx", "dgamma"))
    mask = (dx_and_dgamma[0], dx_and_dgamma[1], False)
    dx, dgamma, _ = _backward_from_output(dz, z, rs, gamma, None, dresidual, zero_centered_gamma, True, mask)
    return RMSNormGrads(dx, dgamma)


def _backward_from_output(
    dz: Tensor,
    z: Tensor,
    rs: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    dresidual: Tensor | None,
    zero_centered_gamma: bool,
    rms: bool,
    output_mask: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    grads = _ops.call(
        torch.ops.flashbwd.norm_backward_from_output,
        dz,
        z,
        rs,
        gamma,
        beta,
        dresidual,
        zero_centered_gamma=zero_centered_gamma,
        rms=rms,
        output_mask=_ops.output_mask_for(z, output_mask),
    )
    asked = (output_mask[0], output_mask[1] and gamma is not None, output_mask[2])
    return [grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)]


def layer_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """LayerNorm over the last dimension, differentiable in x, gamma and beta.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    gamma, beta : Tensor, (N,), optional
        x's dtype or float32. Both have the same dtype.
    eps : float
        Added to the variance.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma`` instead of gamma.
    memory_efficient : bool
        Save the output instead of x for the backward, which then uses :func:`layer_norm_backward_from_output`.

    Returns
    -------
    Tensor, (..., N)
        ``gamma * (x - mean) / sqrt(var + eps) + beta`` in x's dtype, computed in float32 (float64 for float64 inputs).
        CUDA autocast casts the inputs to float32, as it does for PyTorch's ``layer_norm``.
    """
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    _arguments.flag("memory_efficient", memory_efficient)
    z, _, _ = _ops.call(torch.ops.flashbwd.layer_norm, x, gamma, beta, eps, zero_centered_gamma, memory_efficient)
    return z


def default_eps(dtype: torch.dtype) -> float:
    """Return PyTorch's default eps of RMSNorm: the machine epsilon of the dtype in which it computes."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def rms_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """RMSNorm over the last dimension, differentiable in x and gamma.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    gamma : Tensor, (N,), optional
        x's dtype or float32.
    eps : float, optional
        Added to the mean square. Default as in PyTorch: ``torch.finfo(torch.float32).eps``, or that of float64 for
        float64 inputs.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma`` instead of gamma.
    memory_efficient : bool
        Save the output instead of x for the backward, which then uses :func:`rms_norm_backward_from_output`.

    Returns
    -------
    Tensor, (..., N)
        ``gamma * x / sqrt(mean(x**2) + eps)`` in x's dtype, computed in float32 (float64 for float64 inputs).
    """
    eps = default_eps(_arguments.tensor("x", x).dtype) if eps is None else eps
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    _arguments.flag("memory_efficient", memory_efficient)
    z, _ = _ops.call(torch.ops.flashbwd.rms_norm, x, gamma, eps, zero_centered_gamma, memory_efficient)
    return z


def _flat_normalised(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """Merge the normalised dimensions of x into one."""
    dims = len(normalized_shape)
    if tuple(_arguments.tensor("x", x).shape[x.dim() - dims :]) != tuple(normalized_shape):
        raise ValueError(
            f"flashbwd: x has shape {tuple(x.shape)}, expected its last dimensions to be {normalized_shape}"
        )
    return x if dims == 1 else x.reshape(*x.shape[: x.dim() - dims], math.prod(normalized_shape))


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` computed by this library, with the same arguments and the same state dict."""

    def forward(self, x: Tensor) -> Tensor:
        gamma = None if self.weight is None else self.weight.flatten()
        beta = None if self.bias is None else self.bias.flatten()
        return layer_norm(_flat_normalised(x, self.normalized_shape), gamma, beta, eps=self.eps).view_as(x)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` computed by this library, with the same arguments and the same state dict."""

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
    """Return fake dx, dgamma and, if the mask has three entries, dbeta. Gradients not requested are empty."""
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


def _define(name: str, schema: str, forward: Callable[..., Any]) -> None:
    torch.library.define(f"flashbwd::{name}", schema, lib=_ops.library)
    torch.library.impl(f"flashbwd::{name}", "CompositeExplicitAutograd", lib=_ops.library)(forward)


def _layer_norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool, _: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.call(torch.ops.flashbwd.norm_forward, x, gamma, beta, eps, zero_centered_gamma, False)


def _rms_norm(
    x: Tensor, gamma: Tensor | None, eps: float, zero_centered_gamma: bool, _: bool = False
) -> tuple[Tensor, Tensor]:
    z, _mu, rs = _ops.call(torch.ops.flashbwd.norm_forward, x, gamma, None, eps, zero_centered_gamma, True)
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
    "(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool zero_centered_gamma, bool memory_efficient=False) "
    "-> (Tensor z, Tensor mu, Tensor rs)",
    _layer_norm,
)
_define(
    "rms_norm",
    "(Tensor x, Tensor? gamma, float eps, bool zero_centered_gamma, bool memory_efficient=False) "
    "-> (Tensor z, Tensor rs)",
    _rms_norm,
)


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

# As in PyTorch: its CUDA autocast casts layer_norm to float32 but not rms_norm; its CPU autocast casts neither.
torch.library.register_autocast("flashbwd::layer_norm", "cuda", torch.float32, lib=_ops.library)
