"""References of the LayerNorm and RMSNorm operators, from elementwise operators and reductions, in chunks of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flashbwd.reference.scores import accumulation_dtype
from flashbwd.reference.workers import run_all

T = TypeVar("T")

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
        factor = _factor(gamma, zero_centered_gamma, dtype)
        all_x, all_dz = _as_rows(x), _as_rows(dz)
        all_dx = None if dx is None else _as_rows(dx)
        all_dresidual = None if dresidual is None else _as_rows(dresidual)

        def rows_backward(chunks: Sequence[slice]) -> tuple[Tensor, Tensor]:
            dgamma, dbeta = (x.new_zeros(columns, dtype=dtype) for _ in range(2))
            scratch = _scratch(3, chunks, columns, x, dtype)
            for index in chunks:
                x_hat, product, rows_dx = (buffer[: index.stop - index.start] for buffer in scratch)  # (rows, N)
                dz_rows, rs_rows = all_dz[index], rs.reshape(-1, 1)[index].to(dtype)
                if mu is None:
                    torch.mul(all_x[index], rs_rows, out=x_hat)
                else:
                    torch.sub(all_x[index], mu.reshape(-1, 1)[index].to(dtype), out=x_hat).mul_(rs_rows)
                torch.mul(dz_rows, x_hat, out=product)
                if output_mask[1]:
                    dgamma += product.sum(0)
                if output_mask[2]:
                    dbeta += dz_rows.sum(0, dtype=dtype)
                if all_dx is None:
                    continue
                torch.mul(dz_rows, rs_rows, out=rows_dx)  # rs * dz, then rs * dy, then less the means
                if factor is not None:
                    rows_dx.mul_(factor)
                    product.mul_(factor)
                if mu is not None:
                    rows_dx.sub_(rows_dx.mean(-1, keepdim=True))
                rows_dx.addcmul_(x_hat, product.mean(-1, keepdim=True).mul_(rs_rows), value=-1.0)
                if all_dresidual is not None:
                    rows_dx.add_(all_dresidual[index])
                all_dx[index] = rows_dx
            return dgamma, dbeta

        sums = _run_on_chunks(x, rows_backward)
        if dx is not None and all_dx is not None:
            _finish(dx, all_dx)
        parameter_dtype = x.dtype if gamma is None else gamma.dtype
        dgamma, dbeta = (torch.stack(parts).sum(0).to(parameter_dtype) for parts in zip(*sums, strict=True))
        return dx, dgamma if output_mask[1] and gamma is not None else None, dbeta if output_mask[2] else None


def layer_norm_forward(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension: z like x, and mu, rs (..., 1) in float32 (float64 for float64 x)."""
    return _norm_forward(x, gamma, beta, eps, zero_centered_gamma, centred=True)


def rms_norm_forward(
    x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension: z like x, and rs (..., 1) in float32 (float64 for float64 x)."""
    z, _, rs = _norm_forward(x, gamma, None, eps, zero_centered_gamma, centred=False)
    return z, rs


def _norm_forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, zero_centered_gamma: bool, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        dtype = accumulation_dtype(x.dtype)
        z = torch.empty_like(x)
        mu, rs = (x.new_zeros(x.shape[:-1].numel(), 1, dtype=dtype) for _ in range(2))
        factor = _factor(gamma, zero_centered_gamma, dtype)
        all_x, all_z = _as_rows(x), _as_rows(z)

        def rows_forward(chunks: Sequence[slice]) -> None:
            for index in chunks:
                values = all_x[index].to(dtype)
                if centred:
                    variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
                    values = values - mean
                    mu[index] = mean
                else:
                    variance = values.square().mean(-1, keepdim=True)
                scale = torch.rsqrt(variance + eps)
                rs[index] = scale
                values = values * scale
                if factor is not None:
                    values.mul_(factor)
                if beta is not None:
                    values.add_(beta)
                all_z[index] = values

        _run_on_chunks(x, rows_forward)
        _finish(z, all_z)
        statistics = (*x.shape[:-1], 1)
        return z, mu.view(statistics), rs.view(statistics)


def _factor(gamma: Tensor | None, zero_centered: bool, dtype: torch.dtype) -> Tensor | None:
    if gamma is None:
        return None
    return gamma.to(dtype) + 1.0 if zero_centered else gamma.to(dtype)


def _run_on_chunks(x: Tensor, work: Callable[[Sequence[slice]], T]) -> list[T]:
    """Call `work` with chunks of rows, consecutive ones on each CPU thread; at least once, if with none."""
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    on_cpu = x.device.type == "cpu"
    step = max((_CPU_CHUNK if on_cpu else _CUDA_CHUNK) // max(columns, 1), 1)
    chunks = [slice(first, min(first + step, rows)) for first in range(0, rows, step)] if columns else []
    threads = torch.get_num_threads() if on_cpu else 1
    share = max(-(-len(chunks) // threads), 1)
    shares = [chunks[first : first + share] for first in range(0, len(chunks), share)] or [[]]
    return run_all([functools.partial(work, part) for part in shares], threads)


def _scratch(count: int, chunks: Sequence[slice], columns: int, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Memory that every chunk uses again: fresh pages would cost as much as the arithmetic."""
    rows = chunks[0].stop - chunks[0].start if chunks else 0
    return [x.new_empty(rows, columns, dtype=dtype) for _ in range(count)]


def _as_rows(tensor: Tensor) -> Tensor:
    """(rows, N): a view where strides allow one, else a copy."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _finish(tensor: Tensor, rows: Tensor) -> None:
    """Copy back what :func:`_as_rows` could not view."""
    if rows.data_ptr() != tensor.data_ptr():
        tensor.copy_(rows.view_as(tensor))
