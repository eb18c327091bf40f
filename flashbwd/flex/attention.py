"""FlexAttention for training: PyTorch's forward, and gradients for query, key, value and captured tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from torch.nn.attention.flex_attention import flex_attention as _pytorch_flex_attention

from flashbwd import _arguments
from flashbwd._autograd import differentiable_once, is_last_backward, transforms_are_active
from flashbwd._eager import untraced
from flashbwd.flex import arguments, backends
from flashbwd.flex.block_mask_checks import check_query_lists
from flashbwd.flex.check import check_call
from flashbwd.flex.forward import forward
from flashbwd.flex.gradients import gradients
from flashbwd.flex.graph_operator import DETERMINISTIC
from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.flex.modifications import name_of
from flashbwd.flex.reads import Reads
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.modifications import Mod

# PyTorch annotates kernel_options and the results more narrowly than it accepts and returns them.
pytorch_flex_attention: Any = _pytorch_flex_attention

__all__ = [
    "FlexAttentionGrads",
    "FlexPlan",
    "flex_attention",
    "flex_attention_backward",
    "plan_flex_attention_backward",
]


class FlexAttentionGrads(NamedTuple):
    """Gradients of FlexAttention.

    Attributes
    ----------
    dq, dk, dv : Tensor
        Of query's, key's and value's shape, dtype and strides.
    captured : dict
        The gradient of each tensor that ``score_mod`` captures and that requires one: by the name of the variable, or
        by its position among them, in the order of first use, if it has no name.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: dict[str | int, Tensor]


@dataclass(frozen=True)
class FlexPlan:
    """How :func:`flex_attention_backward` computes a call.

    Attributes
    ----------
    backend : str
        "sm90", "sm80", "short" or "reference".
    reasons : dict of str to str
        Why each of the other backends does not compute the call.
    workspace_bytes : int
        Bytes of scratch memory on the device, except the temporary tensors of the reference.
    compiled : bool
        Whether a kernel is compiled at run time, with ``score_mod`` or a large ``mask_mod`` in it.
    cache : str, optional
        Where that compiled kernel is: "memory" or "disk". None: the next call compiles it, or nothing is compiled.
    deterministic : bool
        Whether repeated calls give equal bits.
    """

    backend: str
    reasons: dict[str, str] = field(default_factory=dict)
    workspace_bytes: int = 0
    compiled: bool = False
    cache: str | None = None
    deterministic: bool = True


def flex_attention(
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
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Compute ``softmax(mask(score_mod(scale * q @ k.T))) @ v``, differentiable in everything that it reads.

    The arguments and results are those of ``torch.nn.attention.flex_attention.flex_attention``. The forward is
    PyTorch's compiled kernel on a GPU with Triton, and this library's reference elsewhere. Both obey the block lists.
    Double backward is not supported.

    Parameters
    ----------
    query : Tensor, (B, H, Sq, D)
        float16, bfloat16, float32 or float64. Any strides.
    key, value : Tensor, (B or 1, Hkv, Sk, D) and (B or 1, Hkv, Sk, Dv)
        Same dtype as query; Dv may differ from D. A batch size of 1 is broadcast over the batch of query.
    score_mod : callable, optional
        ``(score, b, h, q_idx, kv_idx) -> score`` on 0-d tensors. ``score`` is the scaled score in float32 (float64 for
        float64 inputs), and the indices are int32 on a GPU and int64 on a CPU. It may read captured tensors, which get
        gradients if they require them. It writes to nothing.
    block_mask : BlockMask, optional
        Its block lists select the blocks; its ``mask_mod`` decides in partial blocks only. ``q_indices`` and
        ``full_q_indices`` list the same blocks as those of keys. A query or key whose blocks are in neither list may
        hold anything, NaN too.
    scale : float, optional
        Default ``D ** -0.5``.
    enable_gqa : bool
        Allow H to be a multiple of Hkv.
    return_lse : bool
        Also return the natural log-sum-exp of each row, which has a gradient too. Inductor refuses it if it compiles
        for a CPU.
    kernel_options : mapping, optional
        Options of PyTorch's ``flex_attention``. ``PRESCALE_QK`` (scale query instead of the scores) and
        ``ROWS_GUARANTEED_SAFE`` (no row is fully masked) apply everywhere, those that tune a kernel only to
        PyTorch's forward on a GPU.
    return_aux : AuxRequest, optional
        Return ``(out, AuxOutput(lse, max_scores))``, with ``None`` for a field that was not requested. Not together
        with ``return_lse``. ``max_scores`` has no gradient.
    deterministic : bool
        Require gradients with equal bits in every run. ``torch.use_deterministic_algorithms(True)`` implies it. In a
        compiled model it applies to backwards that this library computes (:func:`flashbwd.enable`).

    Returns
    -------
    out : Tensor, (B, H, Sq, Dv)
        query's dtype and order of strides. 0 in a row that sees no key.
    lse, max_scores : Tensor, (B, H, Sq)
        float32 (float64 for float64 inputs). -inf in a row that sees no key.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected. Inside
        ``torch.compile``, PyTorch checks the arguments instead.
    RuntimeError
        If ``score_mod`` or ``mask_mod`` raises.
    """
    _arguments.flag("deterministic", deterministic)
    if return_lse and return_aux is not None:
        raise ValueError("flashbwd: return_lse and return_aux are both given, expected one of them")
    if is_dynamo_compiling() or is_exporting():
        if deterministic:
            kernel_options = {**(kernel_options or {}), DETERMINISTIC: True}
        options = {"kernel_options": kernel_options, "return_aux": AuxRequest(lse=True) if return_lse else return_aux}
        results = pytorch_flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)
        return (results[0], results[1].lse) if return_lse else results
    scale = arguments.check_types(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )
    need_max_scores = return_aux is not None and return_aux.max_scores
    out, lse, max_scores = _attend(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, need_max_scores, deterministic
    )
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
    return (out, lse) if return_lse else out


@untraced
def flex_attention_backward(
    dout: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dlse: Tensor | None = None,
    deterministic: bool = False,
) -> FlexAttentionGrads:
    """Compute the gradients of :func:`flex_attention`.

    ::

        s  = scale * q @ k.T;  t = score_mod(s);  p = exp(t - lse) where visible, else 0
        ds = dt/ds * p * (dout @ v.T - delta);    delta = rowsum(dout * out) - dlse
        dv = p.T @ dout;  dq = scale * ds @ k;    dk = scale * ds.T @ q
        dc = sum of dt/dc * p * (dout @ v.T - delta) over the visible pairs, for each captured tensor c

    Parameters
    ----------
    dout : Tensor, (B, H, Sq, Dv), optional
        Gradient of ``out``. None if only the lse was used.
    out : Tensor, (B, H, Sq, Dv)
    lse : Tensor, (B, H, Sq)
        Natural log-sum-exp, float32 (float64 for float64 inputs).
    dlse : Tensor, (B, H, Sq), optional
        Gradient of ``lse``.
    query, key, value, score_mod, block_mask, scale, enable_gqa, deterministic
        As in :func:`flex_attention`. ``block_mask`` needs its ``q_indices``.

    Returns
    -------
    FlexAttentionGrads
        ``(dq, dk, dv, captured)``. 0 in rows without a visible key and in keys that no query sees.

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    RuntimeError
        If ``score_mod`` or ``mask_mod`` raises.
    """
    scale = arguments.check_types(query, key, value, score_mod, block_mask, scale, enable_gqa, False, None, None)
    _arguments.flag("deterministic", deterministic)
    call, captured = check_call(query, key, value, score_mod, block_mask, scale, enable_gqa, None)
    if block_mask is not None:
        check_query_lists(block_mask)
    arguments.check_results(query, value, {"dout": dout, "out": out}, {"lse": lse, "dlse": dlse})
    order = _requires_order(deterministic)
    dq, dk, dv, found = gradients(call, query, key, value, out, lse, dout, dlse, captured, order)
    names = [name_of(score_mod, tensor) or i for i, tensor in enumerate(captured)]
    return FlexAttentionGrads(dq, dk, dv, dict(zip(names, found, strict=True)))


@untraced
def plan_flex_attention_backward(
    dout: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dlse: Tensor | None = None,
    deterministic: bool = False,
) -> FlexPlan:
    """Return how :func:`flex_attention_backward` would compute a call with these arguments, without computing it.

    Raises
    ------
    ValueError
        As :func:`flex_attention_backward`.
    """
    scale = arguments.check_types(query, key, value, score_mod, block_mask, scale, enable_gqa, False, None, None)
    _arguments.flag("deterministic", deterministic)
    call, captured = check_call(query, key, value, score_mod, block_mask, scale, enable_gqa, None)
    if block_mask is not None:
        check_query_lists(block_mask)
    arguments.check_results(query, value, {"dout": dout, "out": out}, {"lse": lse, "dlse": dlse})
    order = _requires_order(deterministic)
    try:
        kernel_call = backends.choose(call, query, key, value, captured, order)
        plan = kernel_call.plan(out if dout is None else dout, query, key, value, out, lse, dlse)
        cache = kernel_call.cache(plan, query)
    except UnsupportedError as reason:
        return FlexPlan("reference", dict.fromkeys(("sm90", "sm80", "short"), str(reason)))
    return FlexPlan(
        plan["backend"],
        plan["refusals"],
        plan["workspace_bytes"],
        compiled=kernel_call.score_mod is not None,
        cache=cache,
        deterministic=plan["deterministic"],
    )


# ---- the computation ----


@untraced
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
    need_max_scores: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, lse and, if needed, max_scores. The types of the arguments have been checked."""
    query, key, value = arguments.autocast(query, key, value)
    call, captured = check_call(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options)
    wants_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *captured))
    if wants_gradients and block_mask is not None:
        check_query_lists(block_mask)
    if not wants_gradients or transforms_are_active():
        return forward(call, kernel_options, need_max_scores, query, key, value)
    options = (kernel_options, need_max_scores, _requires_order(deterministic))
    results: tuple[Tensor, Tensor, Tensor | None] = _FlexAttention.apply(call, *options, query, key, value, *captured)
    return results


def _requires_order(deterministic: bool) -> bool:
    return deterministic or torch.are_deterministic_algorithms_enabled()


class _FlexAttention(torch.autograd.Function):
    """FlexAttention with its backward. Captured tensors are inputs, so that autograd tracks them."""

    @staticmethod
    def forward(
        ctx: Any,
        call: DecodingCall,
        kernel_options: Mapping[str, Any] | None,
        need_max_scores: bool,
        deterministic: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, max_scores = forward(call, kernel_options, need_max_scores, query, key, value)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        ctx.call, ctx.deterministic = call, deterministic
        ctx.reads = Reads(call.score_mod, call.block_mask, query)
        # score_mod reads these tensors themselves, not what a saved-tensor hook makes of them.
        ctx.captured = list(captured)
        ctx.save_for_backward(query, key, value, out, lse, *captured, *ctx.reads.besides(captured))
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    @differentiable_once("flex_attention_backward")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None, _: None = None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = saved[:5]
        captured = ctx.reads.now(query, ctx.captured)
        dq, dk, dv, found = gradients(ctx.call, query, key, value, out, lse, dout, dlse, captured, ctx.deterministic)
        if is_last_backward():
            ctx.call = ctx.reads = ctx.captured = None  # they hold tensors
        return None, None, None, None, dq, dk, dv, *found
