"""References of the LayerNorm and RMSNorm operators, from elementwise operators and reductions, in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashbwd.reference.scores import accumulation_dtype

# Elements of a chunk: the handful of temporaries stay in a CPU's cache, or are worth a GPU's launch.
_CPU_CHUNK = 1 << 18
_CUDA_CHUNK = 1 << 24


def layer_norm_backward(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``z = (x - mu) * rs * gamma + beta`` with respect to x, gamma and beta.

    Parameters
    ----------
    dz, x, dresidual : Tensor, (..., N)
    mu, rs : Tensor, (rows,) or (..., 1)
        Mean and reciprocal standard deviation of each row, any floating dtype.
    gamma : Tensor, (N,), optional
        1 where absent. With `zero_centered_gamma` the factor is ``1 + gamma``.
    dresidual : Tensor, optional
        Added to dx.
    output_mask : (bool, bool, bool)
        Which of dx, dgamma, dbeta to compute.

    Returns
    -------
    dx, dgamma, dbeta
        dx like x; dgamma and dbeta (N,) in gamma's dtype (x's without gamma). None where not asked for, and dgamma
        where there is no gamma.
    """
    return _norm_backward(dz, x, mu, rs, gamma, dresidual, zero_centered_gamma, output_mask)


def rms_norm_backward(
    dz: Tensor,
    x: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``z = x * rs * gamma`` with respect to x and gamma; otherwise as :func:`layer_norm_backward`."""
    mask = (output_mask[0], output_mask[1], False)
    return _norm_backward(dz, x, None, rs, gamma, dresidual, zero_centered_gamma, mask)[:2]


def _norm_backward(
    dz: Tensor,
    x: Tensor,
    mu: Tensor | None,
    rs: Tensor,
    gamma: Tensor | None,
    dresidual: Tensor | None,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        dtype = accumulation_dtype(x.dtype)
        columns = x.shape[-1]
        dx = torch.empty_like(x) if output_mask[0] else None
        dgamma = x.new_zeros(columns, dtype=dtype) if output_mask[1] and gamma is not None else None
        dbeta = x.new_zeros(columns, dtype=dtype) if output_mask[2] else None
        factor = _factor(gamma, zero_centered_gamma, dtype)
        all_x, all_dz = _as_rows(x), _as_rows(dz)
        all_dx = None if dx is None else _as_rows(dx)
        all_dresidual = None if dresidual is None else _as_rows(dresidual)
        for index in _row_chunks(x):
            dz_rows, x_hat = all_dz[index].to(dtype), all_x[index].to(dtype)
            rs_rows = rs.reshape(-1, 1)[index].to(dtype)
            if mu is not None:
                x_hat = x_hat - mu.reshape(-1, 1)[index].to(dtype)
            x_hat = x_hat * rs_rows  # (rows, N)
            if dgamma is not None:
                dgamma += (dz_rows * x_hat).sum(0)
            if dbeta is not None:
                dbeta += dz_rows.sum(0)
            if all_dx is None:
                continue
            dy = dz_rows if factor is None else dz_rows * factor
            centred = dy - x_hat * (dy * x_hat).mean(-1, keepdim=True)
            if mu is not None:
                centred.sub_(dy.mean(-1, keepdim=True))
            centred.mul_(rs_rows)
            if all_dresidual is not None:
                centred.add_(all_dresidual[index])
            all_dx[index] = centred
        if dx is not None and all_dx is not None:
            _finish(dx, all_dx)
        parameter_dtype = x.dtype if gamma is None else gamma.dtype
        dgamma = None if dgamma is None else dgamma.to(parameter_dtype)
        dbeta = None if dbeta is None else dbeta.to(parameter_dtype)
        return dx, dgamma, dbeta


def layer_norm_forward(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension: z like x, and mu, rs of (rows,) in float32 (float64 for float64 x)."""
    return _norm_forward(x, gamma, beta, eps, zero_centered_gamma, centred=True)


def rms_norm_forward(
    x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension: z like x, and rs of (rows,) in float32 (float64 for float64 x)."""
    z, _, rs = _norm_forward(x, gamma, None, eps, zero_centered_gamma, centred=False)
    return z, rs


def _norm_forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        dtype = accumulation_dtype(x.dtype)
        rows = x.shape[:-1].numel()
        z = torch.empty_like(x)
        mu, rs = (x.new_zeros(rows, dtype=dtype) for _ in range(2))
        factor = _factor(gamma, zero_centered_gamma, dtype)
        all_x, all_z = _as_rows(x), _as_rows(z)
        for index in _row_chunks(x):
            values = all_x[index].to(dtype)
            if centred:
                variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
                values = values - mean
                mu[index] = mean.squeeze(-1)
            else:
                variance = values.square().mean(-1, keepdim=True)
            scale = torch.rsqrt(variance + eps)
            rs[index] = scale.squeeze(-1)
            values = values * scale
            if factor is not None:
                values.mul_(factor)
            if beta is not None:
                values.add_(beta)
            all_z[index] = values
        _finish(z, all_z)
        return z, mu, rs


def _factor(gamma: Tensor | None, zero_centered: bool, dtype: torch.dtype) -> Tensor | None:
    if gamma is None:
        return None
    return gamma.to(dtype) + 1.0 if zero_centered else gamma.to(dtype)


def _row_chunks(x: Tensor) -> Iterator[slice]:
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    if columns == 0:
        return
    step = max((_CPU_CHUNK if x.device.type == "cpu" else _CUDA_CHUNK) // columns, 1)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _as_rows(tensor: Tensor) -> Tensor:
    """(rows, N): a view where strides allow one, else a copy."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _finish(tensor: Tensor, rows: Tensor) -> None:
    """Copy back what :func:`_as_rows` could not view."""
    if rows.data_ptr() != tensor.data_ptr():
        tensor.copy_(rows.view_as(tensor))
