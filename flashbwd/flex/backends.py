"""Chooses how a FlexAttention backward is computed, and calls the kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops
from flashbwd.flex.cache import kernel_lists_of
from flashbwd.flex.generated import GeneratedScoreMod, generated
from flashbwd.flex.kernel_lists import MAX_HEAD_DIM, KernelLists, UnsupportedError
from flashbwd.flex.score_change import Alibi, ScoreChange, Slopes, score_change_of
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.modifications import accumulator

__all__ = ["KernelCall", "ListsOf", "choose"]

# (block_mask, tensors that mask_mod captures, query, key, value, deterministic) -> lists, or None if too large. Without
# a block_mask, the lists show every pair.
ListsOf = Callable[[Any, Sequence[Tensor], Tensor, Tensor, Tensor, bool], KernelLists | None]

_REFUSALS = ("cannot run this", "no kernel takes this call")  # csrc/attention/plan.cpp


@dataclass(frozen=True)
class KernelCall:
    """A call that a kernel computes.

    Attributes
    ----------
    operator, plan_operator : callable
        The operator, and the one that returns its plan, without the tensors of the call.
    lists : KernelLists, optional
        Of the block mask, if there is one.
    slopes : Slopes, optional
        Of ALiBi.
    score_mod : GeneratedScoreMod, optional
        That is compiled at run time.
    """

    operator: Any
    plan_operator: Any
    options: dict[str, Any]
    lists: KernelLists | None
    slopes: Slopes | None = None
    score_mod: GeneratedScoreMod | None = None

    def plan(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        device: int | None = None,
    ) -> dict[str, Any]:
        """Return the plan, for meta tensors that of a CUDA device.

        Raises :class:`UnsupportedError` if no kernel computes the call.
        """
        device = query.device.index if device is None else device
        plan = json.loads(self._run(self.plan_operator, dout, query, key, value, out, lse, dlse, device))
        if plan["backend"] == "reference":
            raise UnsupportedError("; ".join(f"{name}: {reason}" for name, reason in plan["refusals"].items()))
        return dict(plan)

    def gradients(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return dq, dk and dv, with the shapes and strides of the inputs, and the gradients of captured tensors.

        The latter are float32, or float64 for float64 tensors. The arguments are those of
        :func:`flashbwd.flex_attention_backward`, and have been checked. Raises :class:`UnsupportedError` if no kernel
        takes them, for example because of their alignment.
        """
        compiled: dict[str, Any] = {}
        of_captured: list[Tensor] = []
        if self.score_mod is not None:
            plan = self.plan(dout, query, key, value, out, lse, dlse)  # refuses before anything is compiled
            compiled, of_captured = self.score_mod.operands(query, plan["tile"][0])
        grads = self._run(self.operator, dout, query, key, value, out, lse, dlse, **compiled)
        dq, dk, dv = (_rows_first(x) for x in grads[:3])
        return dq, dk, dv, of_captured

    def _run(
        self,
        operator: Any,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        plan_device: int | None = None,
        **compiled: Any,
    ) -> Any:
        """Run an operator. Only a refusal of all kernels is an UnsupportedError: other errors are not hidden."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.shape[3] > 1 and tensor.stride(3) != 1:
                raise UnsupportedError(f"the last dimension of {name} has stride {tensor.stride(3)}, expected 1")
        statistics = accumulator(query.dtype)
        dout, out = (_with_unit_stride(x.to(query.dtype)) for x in (dout, out))
        tensors = [_rows_first(x) for x in (dout, query, key, value, out)]
        options = self.options | compiled | {"dlse": None if dlse is None else dlse.to(statistics)}
        if plan_device is not None:
            options["plan_device"] = plan_device
        if self.slopes is not None and plan_device is not None:  # a plan reads only the shape
            options["alibi_slopes"] = torch.empty(self.slopes.shape, dtype=torch.float32, device=query.device)
        elif self.slopes is not None:
            options["alibi_slopes"] = self.slopes.tensor(query.device)
        operands = () if self.lists is None else self.lists.operands()
        try:
            return _ops.call(operator, *tensors, lse.to(statistics), *operands, **options)
        except ValueError as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            raise UnsupportedError(str(error).removeprefix("flashbwd: ")) from None


def _with_unit_stride(tensor: Tensor) -> Tensor:
    """Copy a tensor whose last dimension is not contiguous, such as the expanded gradient of a sum."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _rows_first(tensor: Tensor) -> Tensor:
    """View (B, H, S, D) as (B, S, H, D), or the reverse."""
    return tensor.transpose(1, 2)


def choose(
    call: DecodingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    deterministic: bool,
    lists_of: ListsOf = kernel_lists_of,
) -> KernelCall:
    """Return the kernel call that computes a backward. Raises :class:`UnsupportedError` if there is none.

    By default, the lists of a block mask are computed once per BlockMask.
    """
    if not query.is_cuda:
        raise UnsupportedError("query is on the CPU")
    if call.prescale:
        raise UnsupportedError("PRESCALE_QK rounds the query before the products")
    if key.shape[0] != query.shape[0]:
        raise UnsupportedError("key and value are broadcast over the batch")
    ops = torch.ops.flashbwd
    change = ScoreChange() if call.score_mod is None else None if captured else score_change_of(call.score_mod)
    if change is None:
        assert call.score_mod is not None
        score_mod = generated(call.score_mod, captured, deterministic)
        lists = _lists(lists_of, call, query, key, value, deterministic)
        options = {"softmax_scale": float(call.scale), "deterministic": deterministic}
        plan = ops.plan_score_mod_attention_backward
        return KernelCall(ops.score_mod_attention_backward, plan, options, lists, score_mod=score_mod)
    slopes = None
    if call.score_mod is not None and change.alibi is not None:
        _check_distance(change.alibi, query.shape[2], key.shape[2], call.block_mask is not None)
        slopes = Slopes(change.alibi, call.score_mod, query.shape[0], query.shape[1])
    options = {"softmax_scale": float(call.scale), "softcap": change.softcap, "deterministic": deterministic}
    if call.block_mask is None:
        return KernelCall(ops.attention_backward, ops.plan_attention_backward, options, None, slopes)
    lists = _lists(lists_of, call, query, key, value, deterministic)
    if change.alibi is not None and not change.alibi.absolute and not lists.hides_above_diagonal:
        raise UnsupportedError("score_mod is ALiBi without an absolute value, and block_mask shows later keys")
    return KernelCall(ops.block_mask_attention_backward, ops.plan_block_mask_attention_backward, options, lists, slopes)


def _lists(
    lists_of: ListsOf, call: DecodingCall, query: Tensor, key: Tensor, value: Tensor, deterministic: bool
) -> KernelLists:
    if max(query.shape[3], value.shape[3]) > MAX_HEAD_DIM:
        raise UnsupportedError(f"a block mask needs head dimensions of at most {MAX_HEAD_DIM}")
    lists = lists_of(call.block_mask, call.mask_captured, query, key, value, deterministic)
    if lists is None:
        raise UnsupportedError("the bits of block_mask would exceed the limit on memory")
    return lists


def _check_distance(alibi: Alibi, seqlen_q: int, seqlen_k: int, is_masked: bool) -> None:
    """Refuse distances that the kernels do not compute. They align the last query with the last key."""
    if alibi.offset != seqlen_k - seqlen_q:
        raise UnsupportedError(
            f"score_mod is ALiBi with the distance q_idx + {alibi.offset} - kv_idx, "
            f"expected q_idx + {seqlen_k - seqlen_q} - kv_idx (Sk - Sq)"
        )
    if not alibi.absolute and not is_masked:
        raise UnsupportedError("score_mod is ALiBi without an absolute value, and no block_mask hides later keys")
