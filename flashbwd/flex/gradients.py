"""Computes the gradients of a checked call, on a kernel or on the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from flashbwd._attention_arguments import backend as backend_option
from flashbwd.flex import arguments, backends
from flashbwd.flex.cache import kernel_lists_of
from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.decoding_backward import decoding_backward

__all__ = ["gradients"]


def _warn_on_a_gpu(query: Tensor, reason: UnsupportedError) -> None:
    if query.is_cuda and backend_option() != "reference":
        warnings.warn(f"flashbwd: the slow reference computes the gradients of flex_attention: {reason}", stacklevel=3)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def gradients(
    call: DecodingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    captured: list[Tensor],
    deterministic: bool,
    lists_of: backends.ListsOf = kernel_lists_of,
    on_refusal: Callable[[UnsupportedError], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return dq, dk, dv and the gradients of the captured tensors.

    Parameters
    ----------
    lists_of : callable, optional
        Returns the lists of the block mask, as :func:`~flashbwd.flex.cache.kernel_lists_of`.
    on_refusal : callable, optional
        Called with the reason before the reference computes the call because no kernel does. The default warns if the
        call is on a GPU.
    """
    inputs = (query, key, value)
    if query.numel() == 0 or key.numel() == 0 or (dout is None and dlse is None):
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in inputs)
        return dq, dk, dv, [torch.zeros_like(tensor) for tensor in captured]
    q, k, v, out, lse = (_detached(tensor) for tensor in (query, key, value, out, lse))
    try:
        kernel = backends.choose(call, q, k, v, captured, deterministic, lists_of)
        given = torch.zeros_like(out) if dout is None else _detached(dout)
        *grads, found = kernel.gradients(given, q, k, v, out, lse, dlse)
        return (
            grads[0],
            grads[1],
            grads[2],
            [grad.to(tensor.dtype) for tensor, grad in zip(captured, found, strict=True)],
        )
    except UnsupportedError as reason:
        if on_refusal is None:
            _warn_on_a_gpu(query, reason)
        else:
            on_refusal(reason)
    with arguments.without_autocast(query.device):
        *grads, found = decoding_backward(call, q, k, v, out, lse, dout, dlse, captured)
    dq, dk, dv = (torch.empty_like(tensor).copy_(grad) for tensor, grad in zip(inputs, grads, strict=True))
    return dq, dk, dv, [grad.to(tensor.dtype) for tensor, grad in zip(captured, found, strict=True)]
