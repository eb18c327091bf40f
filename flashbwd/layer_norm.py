"""LayerNorm and RMSNorm as differentiable functions and as drop-in modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashbwd import _arguments, _ops

__all__ = ["LayerNorm", "RMSNorm", "default_eps", "layer_norm", "rms_norm"]


def layer_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute LayerNorm over the last dimension, differentiable in x, gamma and beta.

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

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
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
    """Compute RMSNorm over the last dimension, differentiable in x and gamma.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    gamma : Tensor, (N,), optional
        x's dtype or float32.
    eps : float, optional
        Added to the mean square. The default is PyTorch's: ``torch.finfo(torch.float32).eps``, or
        ``torch.finfo(torch.float64).eps`` for float64 inputs.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma`` instead of gamma.
    memory_efficient : bool
        Save the output instead of x for the backward, which then uses :func:`rms_norm_backward_from_output`.

    Returns
    -------
    Tensor, (..., N)
        ``gamma * x / sqrt(mean(x**2) + eps)`` in x's dtype, computed in float32 (float64 for float64 inputs).

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
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
