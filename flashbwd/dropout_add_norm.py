"""Fused dropout, residual add and LayerNorm or RMSNorm, with its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd import _arguments, _ops
from flashbwd.attention import RngState
from flashbwd.layer_norm import default_eps

__all__ = [
    "DropoutAddNormGrads",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_backward",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_backward",
]

_LAYOUT = "efficient64"


class DropoutAddNormGrads(NamedTuple):
    """Gradients of a norm of ``residual + dropout(x)``. A gradient that was not requested is ``None``.

    Attributes
    ----------
    dx, dresidual : Tensor, (..., N), optional
    dgamma : Tensor, (N,), optional
    dbeta : Tensor, (N,), optional
        Always ``None`` for RMSNorm.
    """

    dx: Tensor | None
    dresidual: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


def dropout_add_layer_norm_backward(
    dz: Tensor,
    h: Tensor,
    mu: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    *,
    dresidual: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: RngState | None = None,
    keep: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> DropoutAddNormGrads:
    """Compute the gradients of ``z = layer_norm(h)`` with ``h = residual + dropout(x)``.

    The function reads h and dz once. It uses the formulas of :func:`layer_norm_backward` for the norm::

        dh = (dx of layer_norm_backward at h) + dresidual       # returned as the gradient of the residual
        dx = keep * dh / (1 - dropout_p)

    Results are bitwise deterministic.

    Parameters
    ----------
    dz : Tensor, (..., N)
        Gradient of z, in x's dtype: float16, bfloat16, float32 or float64.
    h : Tensor, (..., N)
        Input of the norm, in dz's dtype or float32.
    mu, rs : Tensor, (rows,) or (..., 1)
        Mean and reciprocal standard deviation of each row of h, from the forward: float32 (float64 if h is float64),
        float16 or bfloat16.
    gamma : Tensor, (N,), optional
        dz's dtype or float32.
    dresidual : Tensor, (..., N), optional
        Gradient that reaches h through the residual connection, in h's dtype.
    dropout_p : float
        Dropout probability of the forward, in [0, 1). Above 0 it requires ``rng_state`` or ``keep``.
    rng_state : RngState, optional
        Philox state of the forward, with layout "efficient64". Element n of x in row-major order uses the random number
        that this layout assigns to element n of the first head's probabilities (docs/numerics.md).
    keep : Tensor of bool, (..., N), optional
        The dropout mask, True where x was kept.
    zero_centered_gamma : bool
        True if the forward multiplied by ``1 + gamma``.
    output_mask : (bool, bool, bool, bool)
        Which of dx, dresidual, dgamma, dbeta to compute.

    Returns
    -------
    DropoutAddNormGrads
        dx in dz's dtype, dresidual in h's dtype. dgamma and dbeta are (N,) in gamma's dtype, or in dz's dtype without
        gamma.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected. The function raises
        before it launches a kernel.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dresidual", "dgamma", "dbeta"))
    _arguments.tensor("mu", mu)
    rng = _rng_tensor(rng_state, h)
    return backward(dz, h, mu, rs, gamma, dresidual, keep, rng, dropout_p, zero_centered_gamma, output_mask)


def dropout_add_rms_norm_backward(
    dz: Tensor,
    h: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    *,
    dresidual: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: RngState | None = None,
    keep: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> DropoutAddNormGrads:
    """Compute the gradients of ``z = rms_norm(h)`` with ``h = residual + dropout(x)``.

    :func:`dropout_add_layer_norm_backward` documents the parameters, results and errors. RMSNorm has no mean and no
    beta: there is no ``mu``, ``dbeta`` is ``None``, and ``output_mask`` selects dx, dresidual and dgamma.
    """
    asked = _arguments.flags("output_mask", output_mask, ("dx", "dresidual", "dgamma"))
    rng, mask = _rng_tensor(rng_state, h), (asked[0], asked[1], asked[2], False)
    return backward(dz, h, None, rs, gamma, dresidual, keep, rng, dropout_p, zero_centered_gamma, mask)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute LayerNorm of ``h = residual + dropout(x)``, differentiable in x, residual, gamma and beta.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    residual : Tensor, (..., N)
        x's dtype, or float32 if x is 16-bit.
    gamma, beta : Tensor, (N,), optional
        x's dtype or float32. Both have the same dtype.
    dropout_p : float
        Probability of dropping an element of x, in [0, 1). Pass 0 outside training.
    keep : Tensor of bool, (..., N), optional
        Dropout mask, True for the elements of x to keep. By default the mask is drawn from PyTorch's generator of x's
        device; the backward regenerates it, so no mask is stored.
    eps : float
        Added to the variance.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma`` instead of gamma.

    Returns
    -------
    z : Tensor, (..., N)
        ``layer_norm(h)`` in x's dtype.
    h : Tensor, (..., N)
        ``residual + dropout(x)``, the new residual stream, in residual's dtype.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    return _forward(x, residual, gamma, beta, keep, 0, dropout_p, eps, zero_centered_gamma)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm of ``h = residual + dropout(x)``, differentiable in x, residual and gamma.

    :func:`dropout_add_layer_norm` documents the parameters, results and errors. There is no beta. ``eps`` is added to
    the mean square; its default is the default of :func:`flashbwd.rms_norm`.
    """
    eps = default_eps(_arguments.tensor("x", x).dtype) if eps is None else eps
    return _forward(x, residual, gamma, None, keep, 1, dropout_p, eps, zero_centered_gamma)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    _arguments.flag("zero_centered_gamma", inputs[-1])
    z, h, _, _, _ = _ops.call(torch.ops.flashbwd.dropout_add_norm, *inputs)
    return z, h


def backward(
    dz: Tensor,
    h: Tensor,
    mu: Tensor | None,
    rs: Tensor,
    gamma: Tensor | None,
    dresidual: Tensor | None,
    keep: Tensor | None,
    rng: Tensor | None,
    dropout_p: float,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, bool, bool, bool],
) -> DropoutAddNormGrads:
    _arguments.flag("zero_centered_gamma", zero_centered_gamma)
    grads = _ops.call(
        torch.ops.flashbwd.dropout_add_norm_backward,
        dz,
        h,
        mu,
        rs,
        gamma,
        dresidual,
        keep,
        rng,
        dropout_p=dropout_p,
        zero_centered_gamma=zero_centered_gamma,
        output_mask=_ops.output_mask_for(h, output_mask),
    )
    asked = requested(gamma, mu, output_mask)
    return DropoutAddNormGrads(*(grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)))


def requested(gamma: Tensor | None, mu: Tensor | None, mask: Any) -> tuple[bool, ...]:
    return mask[0], mask[1], mask[2] and gamma is not None, mask[3] and mu is not None


def _rng_tensor(state: RngState | None, h: Tensor) -> Tensor | None:
    """Return seed and offset as one int64 tensor of two elements on h's device."""
    if state is None:
        return None
    *given, layout = _arguments.rng_words(state)
    if layout != _LAYOUT:
        raise ValueError(f"flashbwd: rng_state.layout is {layout!r}, expected {_LAYOUT!r}")
    _arguments.tensor("h", h)
    words = []
    for word in given:
        word = (word.view(torch.int64) if word.dtype == torch.uint64 else word).reshape(())
        if word.is_cpu and not h.is_cpu:
            # An addition passes the value as a kernel argument. CUDA graph capture forbids copies from pageable memory.
            word = torch.zeros((), dtype=torch.int64, device=h.device) + word
        words.append(word.to(h.device))
    seed, offset = words
    side_by_side = offset.storage_offset() == seed.storage_offset() + 1
    if seed._base is not None and seed._base is offset._base and side_by_side:  # adjacent in one tensor: no copy
        return seed.as_strided((2,), (1,))
    return torch.stack(words)
