"""Fused dropout, residual add and LayerNorm or RMSNorm, with its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbwd import _arguments, _ops, reference
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

    ``dbeta`` is always ``None`` for RMSNorm.
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

    In one pass over h and dz, with the formulas of :func:`layer_norm_backward` for the norm::

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
        If an argument is invalid. The message names the argument, its value and what was expected. No kernel has been
        launched then.
    """
    _arguments.flags("output_mask", output_mask, ("dx", "dresidual", "dgamma", "dbeta"))
    _arguments.tensor("mu", mu)
    rng = _rng_tensor(rng_state, h)
    return _backward(dz, h, mu, rs, gamma, dresidual, keep, rng, dropout_p, zero_centered_gamma, output_mask)


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
    """Compute the gradients of ``rms_norm(residual + dropout(x))``, as :func:`dropout_add_layer_norm_backward` does.

    RMSNorm has no mean and no beta, so there is no ``mu``, and ``dbeta`` is ``None``.
    """
    asked = _arguments.flags("output_mask", output_mask, ("dx", "dresidual", "dgamma"))
    rng, mask = _rng_tensor(rng_state, h), (asked[0], asked[1], asked[2], False)
    return _backward(dz, h, None, rs, gamma, dresidual, keep, rng, dropout_p, zero_centered_gamma, mask)


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
    """Compute RMSNorm of ``h = residual + dropout(x)``, as :func:`dropout_add_layer_norm` does for LayerNorm.

    The default ``eps`` is that of :func:`flashbwd.rms_norm`.
    """
    eps = default_eps(_arguments.tensor("x", x).dtype) if eps is None else eps
    return _forward(x, residual, gamma, None, keep, 1, dropout_p, eps, zero_centered_gamma)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    _arguments.flag("zero_centered_gamma", inputs[-1])
    z, h, _, _, _ = _ops.call(torch.ops.flashbwd.dropout_add_norm, *inputs)
    return z, h


def _backward(
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
    asked = _asked(gamma, mu, output_mask)
    return DropoutAddNormGrads(*(grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)))


def _asked(gamma: Tensor | None, mu: Tensor | None, mask: Any) -> tuple[bool, ...]:
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
            # Adding passes the value as a kernel argument. A CUDA graph capture allows no copy from pageable memory.
            word = torch.zeros((), dtype=torch.int64, device=h.device) + word
        words.append(word.to(h.device))
    seed, offset = words
    side_by_side = offset.storage_offset() == seed.storage_offset() + 1
    if seed._base is not None and seed._base is offset._base and side_by_side:  # adjacent in one tensor: no copy
        return seed.as_strided((2,), (1,))
    return torch.stack(words)


# ---- the operators ----


def _dropout_add_norm_forward_reference(*inputs: Any) -> tuple[Tensor, ...]:
    return reference.dropout_add_norm_forward(*inputs)


def _dropout_add_norm_backward_reference(
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
    *mask: bool,
) -> tuple[Tensor, ...]:
    asked = (mask[0], mask[1], mask[2], mask[3])
    grads = reference.dropout_add_norm_backward(
        dz, h, mu, rs, gamma, dresidual, keep, rng, dropout_p, zero_centered_gamma, asked
    )
    return tuple(h.new_empty(0) if grad is None else grad for grad in grads)


_ops.implement_reference("dropout_add_norm_forward_reference", _dropout_add_norm_forward_reference)
_ops.implement_reference("dropout_add_norm_backward_reference", _dropout_add_norm_backward_reference)


def _fake_grads(dz: Tensor, h: Tensor, gamma: Tensor | None, asked: tuple[bool, ...]) -> tuple[Tensor, ...]:
    parameter = (dz if gamma is None else gamma).new_empty(h.shape[-1])
    shapes = (torch.empty_like(dz), torch.empty_like(h), parameter, torch.empty_like(parameter))
    return tuple(grad if wanted else h.new_empty(0) for grad, wanted in zip(shapes, asked, strict=True))


@torch.library.register_fake("flashbwd::dropout_add_norm_backward_reference")
def _dropout_add_norm_backward_reference_fake(
    dz: Tensor, h: Tensor, mu: Tensor | None, rs: Tensor, gamma: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return _fake_grads(dz, h, gamma, _asked(gamma, mu, rest[-4:]))


@_ops.register_fake("dropout_add_norm_backward", "h")
def _dropout_add_norm_backward_fake(
    dz: Tensor,
    h: Tensor,
    mu: Tensor | None,
    rs: Tensor,
    gamma: Tensor | None = None,
    *rest: Tensor | None,
    dropout_p: float = 0.0,
    zero_centered_gamma: bool = False,
    output_mask: list[bool] = [True, True, True, True],  # noqa: B006 (a schema's default)
) -> tuple[Tensor, ...]:
    return _fake_grads(dz, h, gamma, _asked(gamma, mu, output_mask))


def _dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    keep: Tensor | None,
    rms: int,
    dropout_p: float,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, ...]:
    rng = None
    if _draws(keep, dropout_p):  # offset % 4 == 0 aligns Philox blocks of four with vectors
        rng = torch.randint(2**62, (2,), device=x.device).bitwise_and_(-4)
    results = _ops.call(
        torch.ops.flashbwd.dropout_add_norm_forward,
        x,
        residual,
        gamma,
        beta,
        keep,
        rng,
        dropout_p,
        eps,
        zero_centered_gamma,
        bool(rms),
    )
    return *results, x.new_empty(0, dtype=torch.int64) if rng is None else rng


def _draws(keep: Tensor | None, dropout_p: float) -> bool:
    return keep is None and 0.0 < dropout_p < 1.0


# The tag keeps compilers from recomputing the forward in the backward, where the generator would draw another mask.
# rms is an int and the first option: DTensor's cache key has the tensors and all arguments from the first int on.
torch.library.define(
    "flashbwd::dropout_add_norm",
    "(Tensor x, Tensor residual, Tensor? gamma, Tensor? beta, Tensor? keep, int rms, float dropout_p, float eps, "
    "bool zero_centered_gamma) -> (Tensor z, Tensor h, Tensor mu, Tensor rs, Tensor rng)",
    lib=_ops.library,
    tags=(torch.Tag.nondeterministic_seeded,),
)
torch.library.impl("flashbwd::dropout_add_norm", "CompositeExplicitAutograd", lib=_ops.library)(_dropout_add_norm)


@_ops.register_fake("dropout_add_norm", "x")
def _dropout_add_norm_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    keep: Tensor | None,
    rms: int,
    dropout_p: float,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, ...]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rs = x.new_empty((*x.shape[:-1], 1), dtype=dtype)
    mu = rs.new_empty(0) if rms else torch.empty_like(rs)
    rng = x.new_empty(2 if _draws(keep, dropout_p) else 0, dtype=torch.int64)
    return torch.empty_like(x), torch.empty_like(residual), mu, rs, rng


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _residual, gamma, beta, keep, rms, dropout_p, _eps, zero_centered_gamma = inputs
    _z, h, mu, rs, rng = output
    ctx.save_for_backward(h, gamma, keep, mu, rs, rng)
    ctx.x_dtype = x.dtype
    ctx.dropout_p, ctx.zero_centered_gamma, ctx.rms = dropout_p, zero_centered_gamma, rms
    ctx.beta_dtype = None if beta is None else beta.dtype
    ctx.mark_non_differentiable(mu, rs, rng)
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, dz: Tensor | None, dh: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dz is None and dh is None:
        return (None,) * 9
    h, gamma, keep, mu, rs, rng = ctx.saved_tensors
    dz = torch.zeros_like(h, dtype=ctx.x_dtype) if dz is None else dz
    need_dx, need_dresidual, need_dgamma, need_dbeta = ctx.needs_input_grad[:4]
    # Without dropout, x and the residual have the same gradient.
    shared = need_dx and keep is None and ctx.dropout_p == 0.0 and h.dtype == ctx.x_dtype
    dx, dresidual, dgamma, dbeta = _backward(
        dz,
        h,
        None if ctx.rms else mu,
        rs,
        gamma,
        dh,
        keep,
        rng if rng.numel() > 0 else None,
        ctx.dropout_p,
        ctx.zero_centered_gamma,
        (need_dx and not shared, need_dresidual or shared, need_dgamma, need_dbeta),
    )
    if shared:
        dx, dresidual = dresidual, dresidual if need_dresidual else None
    dbeta = None if dbeta is None else dbeta.to(ctx.beta_dtype)
    return dx, dresidual, dgamma, dbeta, None, None, None, None, None


_ops.library.register_autograd("dropout_add_norm", _grads, _save)
