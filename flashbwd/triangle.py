"""Triangle attention: attention over rows of pairs, with a bias that all rows share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashbwd import _arguments
from flashbwd._attention_arguments import autocast_dtype
from flashbwd.attention import attention


def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Differentiable triangle attention, as in AlphaFold 2 and 3, with the shapes of cuEquivariance's function.

    For each batch b, row n and head h::

        out = softmax(scale * q @ k.T + bias[b, 0, h], where mask[b, n, 0, 0]) @ v

    This is :func:`attention` over a batch of B * N entries, with ``bias`` as ``attn_bias`` and ``mask`` as
    ``key_mask``. Gradients flow to q, k, v and bias. The gradient of the bias is summed over N in fp32, without a copy
    per row. Autocast and the other properties are those of :func:`attention`. Double backward raises ``RuntimeError``.

    Parameters
    ----------
    q : Tensor, (B, N, H, Q, D) or (N, H, Q, D)
        float16, bfloat16, float32 or float64; k and v must have the same dtype and number of dimensions. The last
        dimension must be contiguous; all other strides are free.
    k : Tensor, (B, N, H, K, D) or (N, H, K, D)
    v : Tensor, (B, N, H, K, Dv) or (N, H, K, Dv)
    bias : Tensor, (B, 1, H, Q, K) or (1, H, Q, K)
        Floating-point. It is cast to the dtype of the computation: q's dtype, or that of autocast.
    mask : Tensor, (B, N, 1, 1, K) or (N, 1, 1, K), bool, optional
        True where a key is visible to the queries of its row. If it hides all keys of a row, the outputs and gradients
        of that row are 0.
    scale : float, optional
        Default ``D ** -0.5``.

    Returns
    -------
    Tensor, (B, N, H, Q, Dv) or (N, H, Q, Dv)
        In the dtype of the computation. It is a transposed view of contiguous (B, N, Q, H, Dv) memory.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    given = {"q": q, "k": k, "v": v, "bias": bias} | ({} if mask is None else {"mask": mask})
    _check(given)
    if scale is not None and not math.isfinite(_arguments.number("scale", scale)):
        raise ValueError(f"flashbwd: scale is {scale}, expected a finite number")
    bias = bias.to(autocast_dtype(q))
    if q.dim() == 4:
        return _folded(q, k, v, bias, mask, scale).transpose(1, 2)
    batch, rows = q.shape[:2]
    if batch <= 1 or rows == 1:  # then each entry of the folded batch has a bias of its own, or all share one
        masks = None if mask is None else mask.flatten(0, 1)
        out = _folded(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bias.flatten(0, 1), masks, scale)
        out = out.unflatten(0, (batch, rows))
    else:
        mask_of_each = (None,) * batch if mask is None else mask.unbind()
        parts = zip(q.unbind(), k.unbind(), v.unbind(), bias.unbind(), mask_of_each, strict=True)
        out = torch.stack([_folded(*part, scale) for part in parts])
    return out.transpose(2, 3)


def _folded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention of q (N, H, Q, D), as (N, Q, H, Dv). The bias is (1, H, Q, K) or (N, H, Q, K)."""
    return attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=scale,
        attn_bias=bias,
        key_mask=None if mask is None else mask[:, 0, 0],
    )


def _check(given: dict[str, Tensor]) -> None:
    """Check shapes, and the dtypes that :func:`attention` does not check, with the names of this function."""
    for name, tensor in given.items():
        _arguments.tensor(name, tensor)
    q, k, v, bias, mask = (given.get(name) for name in ("q", "k", "v", "bias", "mask"))
    assert q is not None and k is not None and v is not None and bias is not None
    if q.dim() not in (4, 5):
        raise ValueError(f"flashbwd: q has shape {tuple(q.shape)}, expected (B, N, H, Q, D) or (N, H, Q, D)")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != q.dim():
            raise ValueError(f"flashbwd: {name} has shape {tuple(tensor.shape)}, expected {q.dim()} dimensions as q")
    *lead, rows, heads, queries, head_dim = q.shape
    keys = k.shape[-2]
    _check_shape("k", k, (*lead, rows, heads, keys, head_dim))
    _check_shape("v", v, (*lead, rows, heads, keys, v.shape[-1]))
    _check_shape("bias", bias, (*lead, 1, heads, queries, keys))
    if not bias.is_floating_point():
        raise ValueError(f"flashbwd: bias is {_name(bias.dtype)}, expected a floating-point dtype")
    if mask is not None:
        _check_shape("mask", mask, (*lead, rows, 1, 1, keys))
        if mask.dtype != torch.bool:
            raise ValueError(f"flashbwd: mask is {_name(mask.dtype)}, expected bool")
    _arguments.check_devices("q", given)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"flashbwd: {name} has shape {tuple(tensor.shape)}, expected {expected}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
