"""The backward functions of LayerNorm and RMSNorm, from the input or from the output of the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd import _arguments, _ops

__all__ = [
    "LayerNormGrads",
    "RMSNormGrads",
    "layer_norm_backward",
    "layer_norm_backward_from_output",
    "rms_norm_backward",
    "rms_norm_backward_from_output",
]


class LayerNormGrads(NamedTuple):
    """Gradients of a LayerNorm. A gradient that was not requested is ``None``.

    Attributes
    ----------
    dx : Tensor, (..., N), optional
    dgamma, dbeta : Tensor, (N,), optional
    """

    dx: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


class RMSNormGrads(NamedTuple):
    """Gradients of an RMSNorm. A gradient that was not requested is ``None``.

    Attributes
    ----------
    dx : Tensor, (..., N), optional
    dgamma : Tensor, (N,), optional
    """

    dx: Tensor | None
    dgamma: Tensor | None


def _options(x: Tensor, zero_centered_gamma: bool, output_mask: Sequence[bool]) -> dict[str, Any]:
    """Return the operator's options that differ from its defaults. PyTorch takes a microsecond to read one."""
    options: dict[str, Any] = {}
    if zero_centered_gamma:
        options["zero_centered_gamma"] = True
    if not all(output_mask):
        options["output_mask"] = _ops.output_mask_for(x, output_mask)
    return options


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

    Each mean is over one row::

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
        If an argument is invalid. The message names the argument, its value and what was expected. The function raises
        before it launches a kernel.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dgamma", "dbeta"))
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    dx, dgamma, dbeta = _ops.call_below_autograd(
        torch.ops.flashbwd.layer_norm_backward,
        dz,
        x,
        mu,
        rs,
        gamma,
        dresidual,
        **_options(x, zero_centered_gamma, output_mask),
    )
    return LayerNormGrads(
        dx if output_mask[0] else None,
        dgamma if output_mask[1] and gamma is not None else None,
        dbeta if output_mask[2] else None,
    )


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
    ``1 / sqrt(mean(x**2) + eps)`` of each row. RMSNorm has no mean and no beta, so ``output_mask`` selects dx and
    dgamma. :func:`layer_norm_backward` documents the other parameters, the results and the errors.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dgamma"))
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    dx, dgamma = _ops.call_below_autograd(
        torch.ops.flashbwd.rms_norm_backward,
        dz,
        x,
        rs,
        gamma,
        dresidual,
        **_options(x, zero_centered_gamma, output_mask),
    )
    return RMSNormGrads(dx if output_mask[0] else None, dgamma if output_mask[1] and gamma is not None else None)


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

    The function uses the formulas of :func:`layer_norm_backward` with ``xhat = (z - beta) / gamma``. It replaces a
    divisor (gamma, or ``1 + gamma`` with ``zero_centered_gamma``) whose magnitude is below 1e-5 by 1e-5 with the same
    sign. xhat inherits the rounding error of z: in columns in which gamma is small compared with beta, gradients from a
    16-bit z are less accurate than gradients from x.

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
        If an argument is invalid. The message names the argument, its value and what was expected.
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
    """Compute the gradients of RMSNorm from its output z, so that the input x need not be kept.

    The function uses the formulas of :func:`rms_norm_backward` with ``xhat = z / gamma``. There is no beta.
    :func:`layer_norm_backward_from_output` documents the parameters, results and errors.
    """
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
    grads = _ops.call_below_autograd(
        torch.ops.flashbwd.norm_backward_from_output,
        dz,
        z,
        rs,
        gamma,
        beta,
        dresidual,
        rms=rms,
        **_options(z, zero_centered_gamma, output_mask),
    )
    asked = (output_mask[0], output_mask[1] and gamma is not None, output_mask[2])
    return [grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)]
