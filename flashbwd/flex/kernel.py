"""The backward of flex attention on the sm90 kernel: calls the operator that takes block lists."""

from __future__ import annotations

import torch
from torch import Tensor

from flashbwd import _ops
from flashbwd.flex.kernel_lists import KernelLists


def kernel_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: KernelLists,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, with the shapes and strides of the inputs.

    Parameters
    ----------
    dout, out : Tensor, (B, H, Sq, Dv)
    query : Tensor, (B, H, Sq, D)
    key, value : Tensor, (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv)
    lse, dlse : Tensor, (B, H, Sq), float32
        Natural logarithm. A row without a visible key may hold anything that is not finite.
    lists : KernelLists
        For these numbers of heads, in tiles of :func:`~flashbwd.flex.kernel_lists.kernel_tile`.
    softcap, alibi_slopes
        As in :func:`flashbwd.attention_backward`. Distances of ALiBi count from the diagonal that aligns the last query
        with the last key.

    Raises
    ------
    ValueError
        No kernel takes the call. The message gives the reason of each.
    """
    tensors = [x.transpose(1, 2) for x in (dout, query, key, value, out)]
    grads = _ops.call(
        torch.ops.flashbwd.block_mask_attention_backward,
        *tensors,
        lse,
        *lists,
        softmax_scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dlse=dlse,
        deterministic=deterministic,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv
