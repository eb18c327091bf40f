"""Computes float64 gradients of the naive formulas by autograd, for slices of a problem.

This module shares no code with the library or with any peer. A slice is one sequence and one KV head with all its query
heads. Queries are processed in blocks of rows, which is exact because the loss is a sum over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**23  # float64 scores held at once: 64 MB
CHECKED_ROWS = 128  # queries or keys per block: the error of a gradient is the largest error of these blocks


def attention_slice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    visible: Tensor | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    relative: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients for one KV head of one sequence.

    Parameters
    ----------
    q, dout : (Sq, G, D), (Sq, G, Dv)
    k, v : (Sk, D), (Sk, Dv)
    causal
        Key j is visible to query i iff j <= i + Sk - Sq.
    window
        Only the last ``window`` of these keys are visible.
    visible : (Sq, Sk) bool, optional
        The keys that each query sees, if neither argument describes the mask.
    softcap
        0 means no softcap.
    slopes : (G,), optional
        ALiBi slopes: slope * |i + Sk - Sq - j| is subtracted from the scores.
    relative : (G, Sq + Sk - 1), optional
        Column i - j + Sk - 1 is added to the scores.
    bias : (G, Sq, Sk), optional
    keep : (G, Sq, Sk) bool, optional
        The dropout mask. Kept elements are scaled by 1 / (1 - dropout_p), the others are zeroed.

    Returns
    -------
    dq, dk, dv, dbias
        float64, with the shapes of q, k, v and bias.
    """
    k64 = k.double().requires_grad_()
    v64 = v.double().requires_grad_()
    (sq, groups), sk = q.shape[:2], k.shape[0]
    scale = q.shape[-1] ** -0.5
    dq = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    dk, dv = torch.zeros_like(k64), torch.zeros_like(v64)
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float64, device=q.device)
    step = max(1, _BLOCK_ELEMENTS // max(sk, 1))
    columns = torch.arange(sk, device=q.device)
    for g in range(groups):
        for start in range(0, sq, step):
            rows = slice(start, min(start + step, sq))
            q64 = q[rows, g].double().requires_grad_()
            wanted = [q64, k64, v64]
            scores = scale * q64 @ k64.T  # (rows, Sk)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if bias is not None:
                bias64 = bias[g, rows].double().requires_grad_()
                wanted.append(bias64)
                scores = scores + bias64
            last = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (sk - sq)
            if slopes is not None:
                scores = scores - slopes[g].double() * (last - columns).abs()
            if relative is not None:
                scores = scores + relative[g].double()[last + (sq - 1) - columns]
            seen = None if visible is None else visible[rows]
            if visible is None and causal:
                seen = columns <= last
                if window is not None:
                    seen &= columns > last - window
            if seen is not None:
                scores = scores.masked_fill(~seen, -torch.inf)
            p = scores.softmax(-1)
            if keep is not None:
                p = p * keep[g, rows] / (1 - dropout_p)
            grads = torch.autograd.grad(p @ v64, wanted, dout[rows, g].double())
            dq[rows, g] = grads[0]
            dk += grads[1]
            dv += grads[2]
            if dbias is not None:
                dbias[g, rows] = grads[3]
    return dq, dk.detach(), dv.detach(), dbias


def norm_gradients(
    dz: Tensor, x: Tensor, gamma: Tensor, *, eps: float, rms: bool, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return float64 dx of LayerNorm (or RMSNorm) at the given ``rows``, and dgamma and dbeta over all rows.

    x and dz are (R, N), gamma is (N,). dgamma and dbeta are summed over blocks of rows, so that memory stays bounded.
    """
    gamma64 = gamma.double().requires_grad_()
    beta64 = torch.zeros_like(gamma64).requires_grad_()

    def normalized(block: Tensor) -> Tensor:
        if rms:
            return block * (block.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma64
        centred = block - block.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma64 + beta64

    picked = x[rows].double().requires_grad_()
    (dx,) = torch.autograd.grad(normalized(picked), picked, dz[rows].double())
    parameters = [gamma64] if rms else [gamma64, beta64]
    sums = [torch.zeros_like(p) for p in parameters]
    step = max(1, _BLOCK_ELEMENTS // x.shape[1])
    for start in range(0, x.shape[0], step):
        block = x[start : start + step].double()
        for total, part in zip(
            sums, torch.autograd.grad(normalized(block), parameters, dz[start : start + step].double()), strict=True
        ):
            total += part
    return dx, sums[0].detach(), None if rms else sums[1].detach()


def relative_error(value: Tensor, reference: Tensor, rows: int | None = None) -> float:
    """Return ``||value - reference|| / ||reference||`` in float64; NaN if any element is not finite.

    With ``rows``, the function returns the largest error of the blocks of ``rows`` rows, because under a causal mask
    the last keys contribute almost nothing to the norm of the whole tensor. The norm of a block counts as at least 1e-6
    of the largest block norm.
    """
    reference = reference.double()
    difference = value.double() - reference
    parts = [(difference, reference)]
    if rows is not None:
        parts = list(zip(difference.split(rows), reference.split(rows), strict=True))
    norms = torch.stack([part.norm() for _, part in parts])
    off = torch.stack([part.norm() for part, _ in parts])
    floor = norms.max() * 1e-6
    return float((off / norms.clamp(min=floor)).max() if floor > 0 else off.max())
