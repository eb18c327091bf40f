"""The block of transformers that drop out, add to the residual stream and normalise, and its gradient."""

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
    """Gradients of a norm of ``residual + dropout(x)``; ``None`` where not asked for. ``dbeta`` is LayerNorm's."""

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
    """Gradients of ``z = gamma * xhat + beta``, xhat the normalised rows of ``h = residual + dropout(x)``.

    ::

        dh        = layer_norm_backward(dz, h, ...) + dresidual        # the gradient of the residual
        dx        = keep * dh / (1 - dropout_p)
        dgamma, dbeta as in layer_norm_backward

    One pass over h and dz. Bitwise deterministic.

    Parameters
    ----------
    dz : Tensor, (..., N)
        Gradient of z, in x's dtype.
    h : Tensor, (..., N)
        What was normalised: dz's dtype or float32.
    mu, rs : Tensor, (rows,) or (..., 1)
        Mean and reciprocal standard deviation of each row of h.
    gamma : Tensor, (N,), optional
        dz's dtype or float32.
    dresidual : Tensor, (..., N), optional
        h's dtype: the gradient that reaches h past the norm.
    dropout_p : float
        In [0, 1). Above 0 it needs ``rng_state`` or ``keep``.
    rng_state : RngState, optional
        What the forward drew its mask from, with layout "efficient64": element n of x, counted row by row, is kept as
        element n of one head's probabilities would be (docs/numerics.md).
    keep : Tensor of bool, (..., N), optional
        The mask itself, True where x was kept.
    zero_centered_gamma : bool
        The forward multiplied by ``1 + gamma``.
    output_mask : (bool, bool, bool, bool)
        Which of dx, dresidual, dgamma, dbeta to compute.

    Returns
    -------
    DropoutAddNormGrads
        dx with dz's dtype, dresidual with h's; dgamma and dbeta (N,) in gamma's dtype, dz's without gamma.

    Raises
    ------
    ValueError
        For bad arguments, before anything runs; the message names the argument, what was expected and what came.
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
    """As :func:`dropout_add_layer_norm_backward` with RMSNorm, which has neither mean nor beta."""
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
    """LayerNorm of ``h = residual + dropout(x)``, differentiable in x, residual, gamma and beta.

    Parameters
    ----------
    x : Tensor, (..., N)
        float16, bfloat16, float32 or float64.
    residual : Tensor, (..., N)
        x's dtype, or float32 beside a 16-bit x.
    gamma, beta : Tensor, (N,), optional
        x's dtype or float32, both the same.
    dropout_p : float
        Probability of dropping, in [0, 1); 0 when not training.
    keep : Tensor of bool, (..., N), optional
        Which elements of x to keep. By default they are drawn from PyTorch's generator of x's device, and drawn again
        in the backward: no mask is stored.
    eps : float
        Added to the variance.
    zero_centered_gamma : bool
        Multiply by ``1 + gamma``.

    Returns
    -------
    (z, h)
        z, the norm, in x's dtype; h, the residual stream, in residual's.
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
    """As :func:`dropout_add_layer_norm` with RMSNorm; ``eps`` is by default that of :func:`rms_norm`."""
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
    """Seed and offset as one int64 tensor beside h."""
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
            # The value travels as a kernel argument: a CUDA graph capture allows no copy from pageable memory.
            word = torch.zeros((), dtype=torch.int64, device=h.device) + word
        words.append(word.to(h.device))
    seed, offset = words
    side_by_side = offset.storage_offset() == seed.storage_offset() + 1
    if seed._base is not None and seed._base is offset._base and side_by_side:  # parts of one tensor: no copy
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
    if _draws(keep, dropout_p):  # an offset that four divides: blocks of the generator begin where vectors do
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


# Dropout draws from the generator: no compiler may run the forward again for the backward. DTensor knows a call by its
# tensors and by the arguments from the first integer on: rms comes before all that decides what the results are.
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
    # Where nothing was dropped, x and the residual have one gradient.
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
