"""Attention over rows of pairs or of an alignment, with a bias that all rows share: AlphaFold and its relatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashbwd import _arguments
from flashbwd._attention_arguments import autocast_dtype
from flashbwd._forward import with_columns
from flashbwd.attention import attention


def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Differentiable triangle attention, as in AlphaFold 2 and 3, with the shapes of cuEquivariance's function.

    For each batch b, row n and head h::

        out = softmax(scale * q @ k.T + bias[b, 0, h], where mask[b, n, 0, 0]) @ v

    This is :func:`attention` over a batch of N entries for each b, with ``bias`` as ``attn_bias`` and ``mask`` as
    ``key_mask``. Gradients flow to q, k, v and bias. The gradient of the bias is summed over N in fp32, by default
    without a copy per row. Autocast and the other properties are those of :func:`attention`. Double backward raises
    ``RuntimeError``.

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
    _check_triangle(given)
    scale = None if scale is None else _arguments.finite("scale", scale)
    bias = bias.to(autocast_dtype(q))
    if q.dim() == 4:
        q, k, v, bias = (x.unsqueeze(0) for x in (q, k, v, bias))
        mask = None if mask is None else mask.unsqueeze(0)
        return _attend(q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3), bias, mask, scale)[0].transpose(1, 2)
    return _attend(q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3), bias, mask, scale).transpose(2, 3)


def evoformer_attention(q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor | None] = ()) -> Tensor:
    """Differentiable attention of an Evoformer, with the shapes of DeepSpeed's ``DS4Sci_EvoformerAttention``.

    For each batch b, row n and head h::

        out = softmax(D ** -0.5 * q @ k.T + biases[0][b, n, 0, 0] + biases[1][b, 0, h]) @ v

    Gradients flow to q, k, v and both biases, and are those of :func:`attention`. With both biases, the first one is
    added by 8 more columns of q and k, so that no sum of the two is stored: its gradient is a column of dk, in the
    dtype of the computation. If it only hides keys, :func:`triangle_attention` with a mask is faster. Double backward
    raises ``RuntimeError``.

    Parameters
    ----------
    q, k, v : Tensor, (B, N, L, H, D)
        float16, bfloat16, float32 or float64. N counts the rows (sequences of an alignment), L the residues of a row.
        v may have another D. The last dimension must be contiguous; all other strides are free.
    biases : sequence of up to two Tensor or None
        The bias of the keys of a row, (B, N, 1, 1, L), and the bias of the pairs of residues, (B, 1, H, L, L).
        Floating-point. The latter is cast to the dtype of the computation: q's dtype, or that of autocast. A key of
        which the former is very low, such as -10^9, is hidden. If all keys of a row are hidden so, its output is the
        average of its values, and its gradients are 0 in bfloat16, float32 and float64.

    Returns
    -------
    Tensor, (B, N, L, H, Dv)
        In the dtype of the computation.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    of_keys, of_pairs = _pair_of_biases(biases)
    _check_evoformer(q, k, v, of_keys, of_pairs)
    dtype, scale = autocast_dtype(q), q.shape[-1] ** -0.5
    of_pairs = None if of_pairs is None else of_pairs.to(dtype)
    if of_keys is None:
        return _attend(q, k, v, of_pairs, None, scale)
    if of_pairs is None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = attention(q, k, v, softmax_scale=scale, attn_bias=of_keys.to(dtype).flatten(0, 1))
        return out.unflatten(0, of_keys.shape[:2])
    q, k = _with_bias_of_keys(q.to(dtype), k.to(dtype), of_keys, scale)
    return _attend(q, k, v, of_pairs, None, scale)


def _with_bias_of_keys(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with more columns, whose product is ``bias / scale``."""
    precise = torch.promote_types(k.dtype, torch.float32)
    quotient = (bias.to(precise) / scale).clamp(min=torch.finfo(k.dtype).min)
    high = quotient.to(k.dtype)
    low = (quotient - high).to(k.dtype)  # what a 16-bit number does not hold
    columns = torch.stack([high, low], -1)[:, :, 0, 0, :, None].expand(*k.shape[:-1], 2)
    return with_columns(q, k, columns)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention of q (B, N, Q, H, D), as contiguous (B, N, Q, H, Dv).

    The bias is (B, 1, H, Q, K), and the mask (B, N, 1, 1, K).
    """
    batch, rows = q.shape[:2]
    if bias is None or batch <= 1 or rows == 1:  # entries of the folded batch have biases of their own, or share one
        biases, masks = (None if x is None else x.flatten(0, 1) for x in (bias, mask))
        out = _folded(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), biases, masks, scale)
        return out.unflatten(0, (batch, rows))
    mask_of_each = (None,) * batch if mask is None else mask.unbind()
    parts = zip(q.unbind(), k.unbind(), v.unbind(), bias.unbind(), mask_of_each, strict=True)
    return torch.stack([_folded(*part, scale) for part in parts])


def _folded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention of q (N, Q, H, D), as (N, Q, H, Dv). The bias is (1, H, Q, K) or (N, H, Q, K)."""
    key_mask = None if mask is None else mask[:, 0, 0]
    return attention(q, k, v, softmax_scale=scale, attn_bias=bias, key_mask=key_mask)


def _check_triangle(given: dict[str, Tensor]) -> None:
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


def _pair_of_biases(biases: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(biases, (list, tuple)):
        raise ValueError(f"flashbwd: biases is {_arguments.came(biases)}, expected a list or tuple of tensors")
    if len(biases) > 2:
        raise ValueError(f"flashbwd: biases has {len(biases)} entries, expected at most 2")
    of_keys, of_pairs = [*biases, None, None][:2]
    return of_keys, of_pairs


def _check_evoformer(q: Tensor, k: Tensor, v: Tensor, of_keys: Tensor | None, of_pairs: Tensor | None) -> None:
    biases = {name: x for name, x in (("biases[0]", of_keys), ("biases[1]", of_pairs)) if x is not None}
    for name, tensor in {"q": q, "k": k, "v": v, **biases}.items():
        _arguments.tensor(name, tensor)
    if q.dim() != 5:
        raise ValueError(f"flashbwd: q has shape {tuple(q.shape)}, expected (B, N, L, H, D)")
    if autocast_dtype(k) != autocast_dtype(q):
        raise ValueError(f"flashbwd: k is {_name(k.dtype)}, expected {_name(q.dtype)} as q")
    batch, rows, length, heads, _ = q.shape
    _check_shape("k", k, tuple(q.shape))
    _check_shape("v", v, (batch, rows, length, heads, v.shape[-1] if v.dim() > 0 else 0))
    shapes = {"biases[0]": (batch, rows, 1, 1, length), "biases[1]": (batch, 1, heads, length, length)}
    for name, bias in biases.items():
        _check_shape(name, bias, shapes[name])
        if not bias.is_floating_point():
            raise ValueError(f"flashbwd: {name} is {_name(bias.dtype)}, expected a floating-point dtype")
    _arguments.check_devices("q", {"q": q, "k": k, "v": v, **biases})


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"flashbwd: {name} has shape {tuple(tensor.shape)}, expected {expected}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
