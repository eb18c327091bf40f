"""Chooses how a FlexAttention backward is computed, and calls the kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops
from flashbwd._attention_arguments import backend as backend_option
from flashbwd.flex.cache import kernel_lists_of
from flashbwd.flex.captured_bias import CapturedBias
from flashbwd.flex.generated import GeneratedScoreMod, Kernel, generated, kernel_of_plan
from flashbwd.flex.hidden_scores import hidden_scores
from flashbwd.flex.kernel_lists import REFUSALS, KernelLists, UnsupportedError, kernel_tile
from flashbwd.flex.score_change import ScoreChange, Slopes, score_change_of
from flashbwd.flex.tile import Tile
from flashbwd.mods.captures import Recent
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.modifications import accumulator

__all__ = ["KernelCall", "ListsOf", "choose"]

# (call, query, key, tile) -> lists of its block mask. Without a block mask, they show every pair.
ListsOf = Callable[[DecodingCall, Tensor, Tensor, Tile], KernelLists]


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
    bias : CapturedBias, optional
        That ``score_mod`` adds. Only without lists.
    score_mod : GeneratedScoreMod, optional
        That is compiled at run time.
    """

    operator: Any
    plan_operator: Any
    options: dict[str, Any]
    lists: KernelLists | None
    slopes: Slopes | None = None
    score_mod: GeneratedScoreMod | None = None
    bias: CapturedBias | None = None

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
        operands, options = self._arguments(dout, query, key, value, out, lse, dlse)
        if self.slopes is not None:  # a plan reads only the shape
            options["alibi_slopes"] = torch.empty(self.slopes.shape, dtype=torch.float32, device=query.device)
        return self._plan(operands, options, query.device.index if device is None else device)

    def cache(self, plan: dict[str, Any], query: Tensor) -> str | None:
        """Return where the compiled kernel of a plan is: "memory", "disk", or None if the next call compiles it.

        None if nothing is compiled. Raises :class:`UnsupportedError` if nothing can be compiled.
        """
        if self.score_mod is None:
            return None
        kernel = kernel_of_plan(plan, self.options.get("allow_tf32", False))
        return self.score_mod.cache(kernel, query.dtype, query.device.index)

    def gradients(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return dq, dk and dv, with the shapes of the inputs, and the gradients of captured tensors.

        The gradient of ``bias`` has its dtype; those of a compiled kernel are float32, or float64 for float64 tensors.
        The arguments are those of :func:`flashbwd.flex_attention_backward`, and have been checked. Raises
        :class:`UnsupportedError` if no kernel takes them, for example because of their alignment.
        """
        operands, options = self._arguments(dout, query, key, value, out, lse, dlse)
        of_captured: list[Tensor] = []
        if self.slopes is not None:
            options["alibi_slopes"] = self.slopes.tensor(query.device)
        if self.score_mod is not None:
            kernel = self._kernel(operands, options, query.device.index)  # refuses before anything is compiled
            compiled, of_captured = self.score_mod.operands(query, kernel)
            options |= compiled
        grads = _run(self.operator, operands, options)
        if self.bias is not None and self.bias.has_gradient:
            of_captured = [self.bias.gradient(grads[3])]
        dq, dk, dv = (_like_input(grad, x) for grad, x in zip(grads[:3], (query, key, value), strict=True))
        return dq, dk, dv, of_captured

    def _arguments(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional arguments and the options of both operators, except those of ``score_mod``."""
        batch, dtype, pads = query.shape[0], query.dtype, self.lists is not None
        operands: list[Any] = [_for_kernel(x, dtype, batch, pads) for x in (dout, query, key, value, out)]
        statistics = accumulator(dtype)
        operands.append(lse if lse.dtype == statistics else lse.to(statistics))
        if self.lists is not None:
            listed = self.lists.listed
            dout, query, key, value, out, lse = operands
            operands = [*map(listed.of_queries, (dout, query)), *map(listed.of_keys, (key, value))]
            operands += [listed.of_queries(out), listed.of_statistics(lse), *self.lists.operands()]
            dlse = None if dlse is None else listed.of_statistics(dlse)
        options = dict(self.options)
        if self.bias is not None:
            options |= {"attn_bias": self.bias.view(query.device), "need_dbias": self.bias.has_gradient}
        if dlse is not None:
            options["dlse"] = dlse.to(statistics)
        return operands, options

    def _plan(self, operands: list[Any], options: dict[str, Any], device: int) -> dict[str, Any]:
        plan = json.loads(_run(self.plan_operator, operands, options | {"plan_device": device}))
        if plan["backend"] == "reference":
            raise UnsupportedError("; ".join(f"{name}: {reason}" for name, reason in plan["refusals"].items()))
        return dict(plan)

    def _kernel(self, operands: list[Any], options: dict[str, Any], device: int) -> Kernel:
        """Return the kernel that the operator will launch, from the plan of an earlier call if everything is equal.

        A plan depends on no pointer, because :func:`_for_kernel` aligns all of them.
        """
        assert self.lists is not None
        layouts = [(x.shape, x.stride(), x.dtype) for x in operands if isinstance(x, Tensor)]
        others = (self.lists.covers, self.lists.tile, "dlse" in options, *self.options.items())
        key = (self.plan_operator, device, *layouts, *others)
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = kernel_of_plan(self._plan(operands, options, device), options.get("allow_tf32", False))
            _kernels.put(key, kernel)
        return kernel


_kernels: Recent[Kernel] = Recent(1024)


def _run(operator: Any, operands: list[Any], options: dict[str, Any]) -> Any:
    """Run an operator. Only a refusal of all kernels is an UnsupportedError: other errors are not hidden."""
    try:
        return _ops.call_below_autograd(operator, *operands, **options)
    except ValueError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        raise UnsupportedError(str(error).removeprefix("flashbwd: ")) from None


_VECTOR_BYTES = 16  # TMA loads only rows whose pointers and strides are multiples of it; sm80 loads these faster


def _for_kernel(tensor: Tensor, dtype: torch.dtype, batch: int, pads: bool) -> Tensor:
    """View (B or 1, H, S, D) as (B, S, H, D). Copies what a kernel cannot load, such as the expanded gradient of a sum.

    With ``pads``, rows are whole vectors. The columns are padded with zeros, which change neither the products nor the
    gradients of the other columns.
    """
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    broadcast = tensor.shape[0] < batch
    rows = (tensor.expand(batch, -1, -1, -1) if broadcast else tensor).transpose(1, 2)
    columns, vector = rows.shape[3], _VECTOR_BYTES // dtype.itemsize
    if pads and columns % vector:
        return torch.nn.functional.pad(rows, (0, -columns % vector))
    b, s, h, d = rows.stride()
    aligned = d == 1 or columns == 1
    if pads and aligned:
        aligned = not (b % vector or s % vector or h % vector)
        aligned = aligned and (rows.is_meta or rows.data_ptr() % _VECTOR_BYTES == 0)
    return rows.clone(memory_format=torch.contiguous_format) if broadcast or not aligned else rows


def _like_input(grad: Tensor, like: Tensor) -> Tensor:
    """View a gradient (B, S, H, D), maybe with padded columns, as that of an input. Sum it over a broadcast batch."""
    grad = grad.transpose(1, 2)
    if grad.shape[3] != like.shape[3]:
        grad = grad[..., : like.shape[3]]
    return grad if grad.shape[0] == like.shape[0] else grad.sum(0, keepdim=True, dtype=torch.float32).to(grad.dtype)


def choose(
    call: DecodingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    deterministic: bool,
    lists_of: ListsOf = kernel_lists_of,
    recognise: bool = True,
) -> KernelCall:
    """Return the kernel call that computes a backward. Raises :class:`UnsupportedError` if there is none.

    By default, the lists of a block mask are computed once per BlockMask.

    Parameters
    ----------
    recognise : bool
        Use the kernels of the build for a softcap, ALiBi and a bias. Otherwise every score_mod is compiled at run time.
    """
    if not query.is_cuda:
        place = "the CPU" if query.device.type == "cpu" else str(query.device)
        raise UnsupportedError(f"query is on {place}")
    if backend_option() == "reference":
        raise UnsupportedError('use_backend("reference") is in effect')
    if call.prescale:
        raise UnsupportedError("PRESCALE_QK rounds the query before the products")
    # PyTorch takes up to 1 us to read an option, so those with their default values are left out.
    options: dict[str, Any] = {"softmax_scale": float(call.scale)}
    if deterministic:
        options["deterministic"] = True
    if _ops.allow_tf32(query):
        options["allow_tf32"] = True
    if (backend := backend_option()) != "auto":
        options["backend"] = backend
    of_build = _kernel_of_build(call, query, key, value, captured, options, lists_of) if recognise else None
    if of_build is not None and (of_build.bias is None or not of_build.bias.is_faster_compiled(query.dtype)):
        return of_build
    try:
        return _compiled_kernel(call, query, key, value, captured, options, lists_of)
    except UnsupportedError:
        if of_build is None:
            raise
        return of_build


def _compiled_kernel(
    call: DecodingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    options: dict[str, Any],
    lists_of: ListsOf,
) -> KernelCall:
    """Return a call of a kernel that is compiled at run time. Raises :class:`UnsupportedError` if there is none."""
    name, deterministic = "score_mod_attention_backward", options.get("deterministic", False)
    lists = lists_of(call, query, key, _tile(name, query, value))
    if lists.block_states is None:
        score_mod = generated(call.score_mod or _unchanged, captured, deterministic)
    else:
        try:
            hidden = hidden_scores(call.score_mod, call.block_mask, lists.block_states)
            score_mod = generated(hidden, captured, deterministic)
        except (RuntimeError, UnsupportedError) as error:  # RuntimeError: mask_mod does not run on scalars of a CPU
            reason = "the bits of block_mask exceed the limit on memory, and no kernel evaluates its mask_mod"
            raise UnsupportedError(f"{reason}: {error}") from error
    return KernelCall(*_operators(name), options, lists, score_mod=score_mod)


def _unchanged(score: Tensor, *_: Tensor) -> Tensor:
    return score


def _kernel_of_build(
    call: DecodingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    options: dict[str, Any],
    lists_of: ListsOf,
) -> KernelCall | None:
    """Return a call of the kernels that are in every build, or None if they lack ``score_mod`` or a gradient."""
    change = ScoreChange() if call.score_mod is None else score_change_of(call.score_mod)
    if change is None:
        return None
    bias = slopes = None
    if call.score_mod is not None and change.addend is not None:
        bias = change.addend.bias(call.score_mod, (*query.shape[:3], key.shape[2]), bool(captured))
        if call.block_mask is not None or not bias.fits(query.dtype):
            return None
    if any(bias is None or tensor is not bias.tensor for tensor in captured):
        return None
    if call.score_mod is not None and change.alibi is not None:
        if change.alibi.offset != key.shape[2] - query.shape[2]:  # they align the last query with the last key
            return None
        slopes = Slopes(change.alibi, call.score_mod, query.shape[0], query.shape[1])
    if change.softcap:
        options = options | {"softcap": change.softcap}
    signed = slopes is not None and not slopes.alibi.absolute  # they take the absolute value of the distance
    if call.block_mask is None:
        return None if signed else KernelCall(*_operators("attention_backward"), options, None, slopes, bias=bias)
    name = "block_mask_attention_backward"
    tile = _tile(name, query, value, change.softcap > 0, slopes is not None)
    lists = lists_of(call, query, key, tile)
    if lists.block_states is not None or (signed and not lists.hides_above_diagonal):
        return None
    return KernelCall(*_operators(name), options, lists, slopes)


def _operators(name: str) -> tuple[Any, Any]:
    """Return an operator and the one that plans its calls."""
    ops = torch.ops.flashbwd
    return getattr(ops, name), getattr(ops, f"plan_{name}")


def _tile(name: str, query: Tensor, value: Tensor, softcap: bool = False, alibi: bool = False) -> Tile:
    """Return the tile of the kernel that computes a call with a block mask by this operator."""
    dims = query.shape[3], value.shape[3]
    device = query.device.index or 0
    return kernel_tile(f"plan_{name}", query.dtype, *dims, device, backend_option(), softcap, alibi)
