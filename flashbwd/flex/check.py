"""Checks the arguments of FlexAttention, once per function and block mask where that is enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashbwd._autograd import hidden_from_modes
from flashbwd.flex import arguments, block_mask_checks
from flashbwd.flex.cache import kept, tensors_of
from flashbwd.flex.modifications import captured_of
from flashbwd.mods.reading import Reading
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.modifications import Mod, accumulator

__all__ = ["check_call"]


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
) -> tuple[DecodingCall, list[Tensor]]:
    """Check everything but types. Return the call, and the captured tensors that require a gradient."""
    if (score_mod is not None or block_mask is not None) and hasattr(query, "placements"):
        raise ValueError(
            "flashbwd: query is a DTensor, expected a Tensor beside score_mod or block_mask, whose indices are local: "
            "call this with query.to_local(), or flashbwd.integrations.distributed.context_parallel_flex_attention"
        )
    arguments.check_tensors(query, key, value, enable_gqa)
    options = arguments.acting_options(kernel_options, query) if kernel_options else {}
    of_mods = (query.device, accumulator(query.dtype), {"query": query, "key": key, "value": value})
    captured: list[Tensor] = []
    mask_reads = Reading(None, [])
    with hidden_from_modes():
        if score_mod is not None:
            captured = captured_of("score_mod", score_mod, *of_mods).tensors
        if block_mask is not None:
            _check_block_mask(block_mask, query, key)
            mask_reads = captured_of("mask_mod", block_mask.mask_mod, *of_mods)
    call = DecodingCall(
        score_mod=score_mod,
        block_mask=block_mask,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        prescale=options.get("PRESCALE_QK", False),
        rows_safe=options.get("ROWS_GUARANTEED_SAFE", False),
        mask_captured=tuple(mask_reads.tensors),
        mask_key=mask_reads.key,
        unrounded=query.is_cuda,  # there, PyTorch compiles the forward
    )
    return call, [tensor for tensor in captured if tensor.requires_grad]


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Check a block mask and its lists, once for each shape of the call."""
    block_mask_checks.check_sizes(block_mask)
    batch, heads, seqlen_q, _ = query.shape
    lengths = (seqlen_q, key.shape[2])
    capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()

    def check() -> None:
        block_mask_checks.check_block_mask(block_mask, query, key)
        if not capturing:  # a capture can't read the lists
            block_mask_checks.check_lists(block_mask, lengths)

    of_mask = (tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths))
    kept(
        block_mask,
        ("checked", capturing, batch, heads, *lengths, query.device, *of_mask),
        tensors_of(block_mask),
        check,
    )
