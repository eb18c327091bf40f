"""The forward of FlexAttention: PyTorch's compiled kernel, or the reference, both of which obey the block lists."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import flex_attention as pytorch_flex_attention

from flashbwd._autograd import hidden_from_modes, transforms_are_active
from flashbwd.flex import arguments
from flashbwd.flex.uniform_lists import with_uniform_lists
from flashbwd.mods.captures import Captures
from flashbwd.mods.in_graph import shaped_like_query
from flashbwd.reference.decoding import DecodingCall, accumulator, decoding_forward

__all__ = ["forward"]


def forward(
    call: DecodingCall,
    kernel_options: Mapping[str, Any] | None,
    need_max_scores: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the output, the LSE and, if needed, the largest score of each row of a checked call."""
    if query.numel() == 0 or key.numel() == 0:
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=accumulator(query.dtype))
        return query.new_zeros((*query.shape[:3], value.shape[3])), lse, lse.clone() if need_max_scores else None
    if pytorch_has_a_kernel(query):
        return _compiled_forward(call, dict(kernel_options or {}), need_max_scores, query, key, value)
    with arguments.without_autocast(query.device):
        out, lse, largest = decoding_forward(call, query, key, value)
    max_scores = largest if need_max_scores else None
    if transforms_are_active():  # vmap may batch out but not query, and a batched tensor can't be copied into query's
        return out.to(query.dtype), lse, max_scores
    return shaped_like_query(query, value.shape[3]).copy_(out), lse, max_scores


_STAGES = (None, 2, 1)  # of the pipeline of PyTorch's kernel; None: PyTorch's own choice
_TOO_LARGE = ("No valid triton configs", "out of resource")  # the words of PyTorch's error
_attempts: dict[Hashable, int] = {}  # which of _STAGES to try first


def _compiled_forward(
    call: DecodingCall, options: dict[str, Any], need_max_scores: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run PyTorch's kernel, with fewer stages of its pipeline if it needs more shared memory than the GPU has."""
    from torch._dynamo import config

    compiled: Any = torch.compile(_pytorchs_forward, dynamic=None)
    with hidden_from_modes():
        block_mask = None if call.block_mask is None else with_uniform_lists(call.block_mask)
    attempt = _attempts.get(_kind(call, query, value), 0) if _attempts else 0  # the key takes time
    while True:
        stages = _STAGES[attempt]
        given = options if stages is None else options | {"num_stages": stages}
        rest = (call.score_mod, block_mask, call.scale, given, need_max_scores)
        try:
            # PyTorch's limit of 8 versions of a function would run the ninth score_mod unfused, which ignores lists.
            with config.patch(recompile_limit=2**31 - 1, accumulated_recompile_limit=2**31 - 1):
                out, lse, max_scores = compiled(query, key, value, *rest)
            return out, lse, max_scores
        except RuntimeError as error:
            chosen = "num_stages" in options or "fwd_num_stages" in options
            if chosen or stages == _STAGES[-1] or not all(words in str(error) for words in _TOO_LARGE):
                raise
        attempt += 1
        _attempts[_kind(call, query, value)] = attempt


def _kind(call: DecodingCall, query: Tensor, value: Tensor) -> Hashable:
    """Return what the shared memory of PyTorch's kernel depends on, except the options, as far as it is known."""
    mod = call.score_mod
    dtypes = () if mod is None else tuple(tensor.dtype for tensor in Captures(mod).tensors)
    function = getattr(mod, "func", mod)  # of functools.partial
    code = getattr(function, "__code__", type(function))
    return query.device, query.dtype, query.shape[3], value.shape[3], code, dtypes, call.block_mask is None


def _pytorchs_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    options: Any,
    need_max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    results: Any = pytorch_flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa=True,
        kernel_options=options,
        return_aux=AuxRequest(lse=True, max_scores=need_max_scores),
    )
    return results[0], results[1].lse, results[1].max_scores


def pytorch_has_a_kernel(query: Tensor) -> bool:
    """Return whether PyTorch compiles its forward for this call, so that it obeys the block lists."""
    from torch.utils._triton import has_triton

    return query.is_cuda and query.dtype != torch.float64 and has_triton() and not transforms_are_active()
