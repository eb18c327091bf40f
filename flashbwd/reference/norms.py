"""Reference LayerNorm and RMSNorm operators: elementwise operators and reductions on chunks of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flashbwd.philox import as_word64, keep_elements
from flashbwd.reference.scores import accumulation_dtype, without_autocast
from flashbwd.reference.workers import run_all

T = TypeVar("T")

#: Minimum magnitude of the divisor with which xhat is computed from the output.
LEAST_GAMMA = 1e-5

# Elements per chunk: on a CPU the temporaries stay in cache, on a GPU a chunk is large enough to hide launch overhead.
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
    """Compute the gradients of ``z = (x - mu) * rs * gamma + beta`` with respect to x, gamma and beta.

    Parameters
    ----------
    dz, x, dresidual : Tensor, (..., N)
    mu, rs : Tensor, (rows,) or (..., 1)
        Mean and reciprocal standard deviation of each row, any floating dtype.
    gamma : Tensor, (N,), optional
        1 by default. With `zero_centered_gamma` the factor is ``1 + gamma``.
    dresidual : Tensor, optional
        Added to dx.
    output_mask : (bool, bool, bool)
        Which of dx, dgamma, dbeta to compute.

    Returns
    -------
    dx, dgamma, dbeta
        dx is like x. dgamma and dbeta are (N,) in gamma's dtype, or in x's dtype without gamma. A gradient that was not
        requested is None; without gamma, dgamma is None.
    """
    normalise = _from_input(x, mu, rs)
    return _norm_backward(dz, x, normalise, rs, gamma, dresidual, zero_centered_gamma, output_mask, True)


def rms_norm_backward(
    dz: Tensor,
    x: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of ``z = x * rs * gamma`` with respect to x and gamma; see :func:`layer_norm_backward`."""
    mask = (output_mask[0], output_mask[1], False)
    normalise = _from_input(x, None, rs)
    return _norm_backward(dz, x, normalise, rs, gamma, dresidual, zero_centered_gamma, mask, False)[:2]


def norm_backward_from_output(
    dz: Tensor,
    z: Tensor,
    rs: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    rms: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of LayerNorm, or of RMSNorm with `rms`, from the output z: ``xhat = (z - beta) / gamma``.

    A divisor whose magnitude is below `LEAST_GAMMA` is replaced by `LEAST_GAMMA` with the same sign.
    """
    dtype = accumulation_dtype(z.dtype)
    factor = _factor(gamma, zero_centered_gamma, dtype)
    divisor = None if factor is None else factor.abs().clamp_min(LEAST_GAMMA).copysign(factor + 0.0)
    shift = None if beta is None else beta.to(dtype)

    def normalise(rows: Tensor, index: slice, out: Tensor) -> None:
        torch.sub(rows, 0.0 if shift is None else shift, out=out)
        if divisor is not None:
            out.div_(divisor)

    return _norm_backward(dz, z, normalise, rs, gamma, dresidual, zero_centered_gamma, output_mask, not rms, beta)


def dropout_add_norm_backward(
    dz: Tensor,
    h: Tensor,
    mu: Tensor | None,
    rs: Tensor,
    gamma: Tensor | None = None,
    dresidual: Tensor | None = None,
    keep: Tensor | None = None,
    rng: Tensor | None = None,
    dropout_p: float = 0.0,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of a norm of ``h = residual + dropout(x)`` with respect to x, residual, gamma and beta.

    ``dresidual`` is the gradient that reaches h through the residual connection. Without ``mu`` the norm is RMSNorm.
    :func:`dropout_add_norm_forward` describes ``keep`` and ``rng``.
    """
    need_dx, need_dresidual, *parameters = output_mask
    mask = (need_dx or need_dresidual, parameters[0], parameters[1])
    normalise = _from_input(h, mu, rs)
    dh, dgamma, dbeta = _norm_backward(
        dz, h, normalise, rs, gamma, dresidual, zero_centered_gamma, mask, mu is not None, parameter_like=dz
    )
    dx = None
    if need_dx and dh is not None:
        with torch.no_grad():
            dx = _dropped(dh, keep, rng, dropout_p).to(dz.dtype)
    return dx, dh if need_dresidual else None, dgamma, dbeta


def _dropped(x: Tensor, keep: Tensor | None, rng: Tensor | None, dropout_p: float) -> Tensor:
    """Return x / (1 - p) for kept elements and 0 for dropped ones."""
    if keep is None and dropout_p > 0.0:
        assert rng is not None
        seed, offset = (as_word64(word, x.device) for word in rng)
        keep = keep_elements(seed, offset, dropout_p, 0, x.numel(), x.device).view(x.shape)
    return x if keep is None else torch.where(keep, x.to(accumulation_dtype(x.dtype)) * (1.0 / (1.0 - dropout_p)), 0.0)


def _from_input(x: Tensor, mu: Tensor | None, rs: Tensor) -> Callable[[Tensor, slice, Tensor], None]:
    """Return a function that normalises rows of x with the given statistics."""
    dtype = accumulation_dtype(x.dtype)

    def normalise(rows: Tensor, index: slice, out: Tensor) -> None:
        scale = rs.reshape(-1, 1)[index].to(dtype)
        if mu is None:
            torch.mul(rows, scale, out=out)
        else:
            torch.sub(rows, mu.reshape(-1, 1)[index].to(dtype), out=out).mul_(scale)

    return normalise


def _norm_backward(
    dz: Tensor,
    x: Tensor,
    normalise: Callable[[Tensor, slice, Tensor], None],
    rs: Tensor,
    gamma: Tensor | None,
    dresidual: Tensor | None,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, bool, bool],
    centred: bool,
    parameter_like: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dx, dgamma and dbeta. ``normalise(rows of x, their slice, out)`` writes the rows of xhat to ``out``.

    Without gamma, dbeta has the dtype of ``parameter_like``, or of x.
    """
    with torch.no_grad(), without_autocast(x.device):
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
                normalise(all_x[index], index, x_hat)
                torch.mul(dz_rows, x_hat, out=product)
                if output_mask[1]:
                    dgamma += product.sum(0)
                if output_mask[2]:
                    dbeta += dz_rows.sum(0, dtype=dtype)
                if all_dx is None:
                    continue
                torch.mul(dz_rows, rs_rows, out=rows_dx)  # becomes rs * dy, then the means are subtracted
                if factor is not None:
                    rows_dx.mul_(factor)
                    product.mul_(factor)
                if centred:
                    rows_dx.sub_(rows_dx.mean(-1, keepdim=True))
                rows_dx.addcmul_(x_hat, product.mean(-1, keepdim=True).mul_(rs_rows), value=-1.0)
                if all_dresidual is not None:
                    rows_dx.add_(all_dresidual[index])
                all_dx[index] = rows_dx
            return dgamma, dbeta

        sums = _run_on_chunks(x, rows_backward)
        if dx is not None and all_dx is not None:
            _finish(dx, all_dx)
        parameter_dtype = (x if parameter_like is None else parameter_like).dtype if gamma is None else gamma.dtype
        dgamma, dbeta = (torch.stack(parts).sum(0).to(parameter_dtype) for parts in zip(*sums, strict=True))
        return dx, dgamma if output_mask[1] and gamma is not None else None, dbeta if output_mask[2] else None


def layer_norm_forward(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LayerNorm over the last dimension. z is like x; mu, rs are (..., 1), float32 (float64 for float64 x)."""
    return _norm_forward(x, gamma, beta, eps, zero_centered_gamma, centred=True)


def rms_norm_forward(
    x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm over the last dimension. z is like x; rs is (..., 1), float32 (float64 for float64 x)."""
    z, _, rs = _norm_forward(x, gamma, None, eps, zero_centered_gamma, centred=False)
    return z, rs


def dropout_add_norm_forward(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    keep: Tensor | None = None,
    rng: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute LayerNorm (or RMSNorm) of ``h = residual + dropout(x)``.

    Returns z in x's dtype, h like residual, and mu and rs (..., 1); mu is empty for RMSNorm. ``keep``, if it is given,
    is the dropout mask. Otherwise ``rng`` is an int64 tensor of seed and offset, and element n of x, in row-major
    order, uses Philox number ``offset + n`` of the "efficient64" layout.
    """
    with torch.no_grad():
        h = torch.empty_like(residual)
        h.copy_(residual.to(accumulation_dtype(x.dtype)) + _dropped(x, keep, rng, dropout_p))
    z, mu, rs = _norm_forward(h, gamma, beta, eps, zero_centered_gamma, centred=not rms, like=x)
    return z, h, rs.new_empty(0) if rms else mu, rs


def _norm_forward(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    centred: bool,
    like: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z, mu and rs. z has the dtype and strides of ``like``, by default of x."""
    with torch.no_grad(), without_autocast(x.device):
        dtype = accumulation_dtype(x.dtype)
        z = torch.empty_like(x if like is None else like)
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
    """Call `work` once per CPU thread with consecutive chunks of rows, or once with [] if there are no rows."""
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    on_cpu = x.device.type == "cpu"
    step = max((_CPU_CHUNK if on_cpu else _CUDA_CHUNK) // max(columns, 1), 1)
    chunks = [slice(first, min(first + step, rows)) for first in range(0, rows, step)] if columns else []
    threads = torch.get_num_threads() if on_cpu else 1
    share = max(-(-len(chunks) // threads), 1)
    shares = [chunks[first : first + share] for first in range(0, len(chunks), share)] or [[]]
    return run_all([functools.partial(work, part) for part in shares], threads)


def _scratch(count: int, chunks: Sequence[slice], columns: int, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Allocate buffers that all chunks reuse. Page faults of new buffers would cost as much as the arithmetic."""
    rows = chunks[0].stop - chunks[0].start if chunks else 0
    return [x.new_empty(rows, columns, dtype=dtype) for _ in range(count)]


def _as_rows(tensor: Tensor) -> Tensor:
    """Reshape to (rows, N): a view if the strides allow it, else a copy."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _finish(tensor: Tensor, rows: Tensor) -> None:
    """Copy the rows back to the tensor if :func:`_as_rows` had to make a copy."""
    if rows.data_ptr() != tensor.data_ptr():
        tensor.copy_(rows.view_as(tensor))
