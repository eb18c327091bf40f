"""Registers reference implementations, fake kernels and the autograd rule of dropout, residual add and norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops, reference
from flashbwd.dropout_add_norm import backward, requested


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
    return _fake_grads(dz, h, gamma, requested(gamma, mu, rest[-4:]))


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
    return _fake_grads(dz, h, gamma, requested(gamma, mu, output_mask))


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
# rms is an int and comes before all other options, because DTensor's cache key holds only the tensors and the arguments
# from the first int on.
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
    dx, dresidual, dgamma, dbeta = backward(
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
