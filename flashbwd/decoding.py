"""Flex decoding: attention of few queries over many keys, with a Python score_mod and a block-sparse mask."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flashbwd._autograd import (
    differentiable_once,
    hidden_from_modes,
    is_last_backward,
    transforms_are_active,
)
from flashbwd.flex import arguments
from flashbwd.flex.block_mask_checks import check_block_mask, check_lists
from flashbwd.flex.cache import kept, tensors_of
from flashbwd.flex.modifications import captured_of
from flashbwd.flex.reads import Reads
from flashbwd.integrations.distributed import decode_shards
from flashbwd.mods.backward import run_backward
from flashbwd.mods.in_graph import attend_in_graph, compiler_traces_functions, implement, shaped_like_query
from flashbwd.mods.kernels import NoKernelError
from flashbwd.mods.run import kernel_refusal, run_at_once, run_kernel
from flashbwd.reference.decoding import DecodingCall, decoding_forward
from flashbwd.reference.decoding_backward import decoding_backward
from flashbwd.reference.modifications import Mod, accumulator

__all__ = ["flex_decoding"]

_NO_OPTIONS: dict[str, Any] = {}


def flex_decoding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Compute ``softmax(mask(score_mod(scale * q @ k.T))) @ v`` for a few queries over a long KV cache.

    The result equals the result of ``torch.nn.attention.flex_attention.flex_attention``, for any number of queries.
    Gradients flow to query, key, value and every tensor that ``score_mod`` captures, and also from the returned lse.
    Double backward is not supported.

    Parameters
    ----------
    query : Tensor, (B, H, Sq, D)
        float16, bfloat16, float32 or float64. Any strides.
    key, value : Tensor, (B or 1, Hkv, Sk, D) and (B or 1, Hkv, Sk, Dv)
        Same dtype as query; Dv may differ from D. A batch size of 1 is broadcast over the batch of query.
    score_mod : callable, optional
        ``(score, b, h, q_idx, kv_idx) -> score`` on 0-d tensors. ``score`` is the scaled score in float32 (float64 for
        float64 inputs), the indices are int32 (int64 on a CPU), and ``h`` is the query head. It may read and index
        captured tensors.
    block_mask : BlockMask, optional
        From PyTorch's ``create_block_mask`` for this Sq and Sk, or built by hand. Its block lists select the key
        blocks; its ``mask_mod`` is evaluated in partial blocks only. With GQA the lists may differ between the query
        heads of a KV head.
    scale : float, optional
        Default ``D ** -0.5``.
    enable_gqa : bool
        Allow H to be a multiple of Hkv. Query head h then reads KV head ``h // (H // Hkv)``.
    return_lse : bool
        Also return the natural log-sum-exp of each row, as ``(out, lse)``.
    kernel_options : mapping, optional
        Options of PyTorch's ``flex_attention``. These have an effect: ``SPLIT_KV`` (minimum number of KV splits),
        ``PRESCALE_QK`` (scale q instead of the scores) and ``ROWS_GUARANTEED_SAFE`` (no row is fully masked). Tuning
        options of PyTorch's kernels are accepted and ignored.
    return_aux : AuxRequest, optional
        Return ``(out, AuxOutput(lse, max_scores))``, with ``None`` for a field that was not requested. Not together
        with ``return_lse``. ``max_scores`` has no gradient.

    Returns
    -------
    out : Tensor, (B, H, Sq, Dv)
        It has query's dtype and order of strides. A row that sees no key is 0.
    lse, max_scores : Tensor, (B, H, Sq)
        float32 (float64 for float64 inputs). A row that sees no key has -inf. On a GPU they share one storage with
        ``out``.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected. On a GPU the host
        does not read block lists, and entries beyond the sequences are ignored.
    RuntimeError
        If ``score_mod`` or ``mask_mod`` raises; on a GPU also if it reads a value back, branches on one or calls an
        operator that has no CUDA implementation here. The message names the function and the operator.
    """
    if type(query) is not Tensor and hasattr(query, "placements"):
        rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse}
        rest |= {"kernel_options": kernel_options, "return_aux": return_aux}
        return decode_shards(functools.partial(flex_decoding, **rest), query, key, value, score_mod, block_mask)
    scale = arguments.check_types(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )
    need_lse, need_max_scores = return_lse, False
    if return_aux is not None:
        if return_lse:
            raise ValueError("flashbwd: return_lse and return_aux are both given, expected one of them")
        need_lse, need_max_scores = return_aux.lse, return_aux.max_scores
    options = arguments.acting_options(kernel_options, query) if kernel_options else _NO_OPTIONS
    if not is_dynamo_compiling() and not transforms_are_active():
        wanted = (enable_gqa, options.get("SPLIT_KV", 0), need_lse, need_max_scores, False)
        results = run_at_once(query, key, value, score_mod, block_mask, scale, wanted)
        if results:
            if return_aux is not None:
                lse = results[1] if need_lse else None
                return results[0], AuxOutput(lse=lse, max_scores=results[-1] if need_max_scores else None)
            return (results[0], results[1]) if return_lse else results[0]

    query, key, value = arguments.autocast(query, key, value)
    arguments.check_tensors(query, key, value, enable_gqa)
    if block_mask is not None:
        check_block_mask(block_mask, query, key, of_queries=False)
    call = DecodingCall(
        score_mod=score_mod,
        block_mask=block_mask,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        prescale=options.get("PRESCALE_QK", False),
        rows_safe=options.get("ROWS_GUARANTEED_SAFE", False),
        splits=options.get("SPLIT_KV"),
    )
    out, lse, largest = _attend(call, query, key, value)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if need_lse else None, max_scores=largest if need_max_scores else None)
    return (out, lse) if return_lse else out


# ---- the computation ----


def _attend(call: DecodingCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # The compiler derives the gradients of the traced graph, and transforms differentiate the reference.
    if torch.compiler.is_compiling() or transforms_are_active():
        return _forward(call, query, key, value)[:3]
    wants_gradients, on_reference = torch.is_grad_enabled(), bool(kernel_refusal(query, key, value))
    captured = []
    if query.numel() and key.numel() and (wants_gradients or on_reference):
        captured = _check_functions(call, query, key, on_reference)
    if not wants_gradients or not any(tensor.requires_grad for tensor in (query, key, value, *captured)):
        return _forward(call, query, key, value)[:3]
    return _FlexDecoding.apply(call, query, key, value, *captured)


def _forward(
    call: DecodingCall, query: Tensor, key: Tensor, value: Tensor, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, max_scores and a second out, which with ``exact`` is in the accumulation dtype."""
    shape = query.shape[:3]
    if query.numel() == 0 or key.numel() == 0:
        statistics = query.new_full(shape, -torch.inf, dtype=accumulator(query.dtype))
        out = query.new_zeros((*shape, value.shape[3]))
        return out, statistics, statistics.clone(), out
    if is_dynamo_compiling() and compiler_traces_functions():
        return attend_in_graph(call, query, key, value)
    with arguments.without_autocast(query.device):
        by_operators = torch.compiler.is_compiling() or transforms_are_active()
        if not by_operators and not kernel_refusal(query, key, value):
            try:
                wanted = (True, call.splits or 0, True, True, exact)
                with torch.no_grad():
                    results = run_at_once(query, key, value, call.score_mod, call.block_mask, call.scale, wanted)
                out, lse, largest, *rest = results or run_kernel(call, query, key, value, exact)
                return out, lse, largest, rest[0] if rest else out
            except NoKernelError as reason:
                _warn_once(f"flashbwd: flex_decoding falls back to its slow reference: {reason}")
                _check_functions(call, query, key, on_reference=True)
        out, lse, largest = decoding_forward(call, query, key, value)
    return shaped_like_query(query, value.shape[3]).copy_(out), lse, largest, out


def _check_functions(call: DecodingCall, query: Tensor, key: Tensor, on_reference: bool) -> list[Tensor]:
    """Check score_mod, and return the captured tensors that require a gradient.

    On the reference, check what it does not: the function of the mask, and lists that are not on a GPU.
    """
    of_call = (query.device, accumulator(query.dtype))
    captured: list[Tensor] = []
    mask = call.block_mask
    with hidden_from_modes():
        if call.score_mod is not None:
            captured = captured_of("score_mod", call.score_mod, *of_call).tensors
        if on_reference and mask is not None:
            captured_of("mask_mod", mask.mask_mod, *of_call)
            if query.device.type == "cpu":
                lengths = (query.shape[2], key.shape[2])
                check = functools.partial(check_lists, mask, lengths, of_queries=False)
                kept(mask, ("checked lists of keys", *lengths, tuple(mask.BLOCK_SIZE)), tensors_of(mask), check)
    return [tensor for tensor in captured if tensor.requires_grad]


def _backward(
    call: DecodingCall, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if not kernel_refusal(query, key, value):
        try:
            return run_backward(call, query, key, value, *rest)
        except NoKernelError as reason:
            _warn_once(f"flashbwd: the gradient of flex_decoding falls back to its slow reference: {reason}")
    with arguments.without_autocast(query.device):
        return decoding_backward(call, query, key, value, *rest)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


implement(_forward, _backward)


class _FlexDecoding(torch.autograd.Function):
    """Flex decoding with its backward. Captured tensors are inputs, because autograd tracks only inputs."""

    @staticmethod
    def forward(
        ctx: Any, call: DecodingCall, query: Tensor, key: Tensor, value: Tensor, *captured: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, largest, exact = _forward(call, query, key, value, exact=True)
        ctx.call = call
        ctx.reads = Reads(call.score_mod, call.block_mask, query)
        # The functions read these tensors themselves, not what a saved-tensor hook makes of them.
        ctx.captured = list(captured)
        ctx.save_for_backward(query, key, value, exact, lse, *captured, *ctx.reads.besides(captured))
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return out, lse, largest

    @staticmethod
    @differentiable_once("flex_decoding_backward")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = saved[:5]
        captured = ctx.reads.now(query, ctx.captured)
        inputs = (query, key, value, *captured)
        if query.numel() == 0 or key.numel() == 0 or (dout is None and dlse is None):
            return None, *(torch.zeros_like(tensor) for tensor in inputs)
        dq, dk, dv, dcaptured = _backward(ctx.call, query, key, value, out, lse, dout, dlse, captured)
        if is_last_backward():
            ctx.call = ctx.reads = ctx.captured = None  # they hold tensors
        grads = (dq, dk, dv, *dcaptured)
        return None, *(grad.to(tensor.dtype) for grad, tensor in zip(grads, inputs, strict=True))
