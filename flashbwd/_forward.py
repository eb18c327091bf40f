"""The operator that :func:`flashbwd.attention` calls: its forward, and its gradient by ``attention_backward``.

The forward is PyTorch's own if PyTorch supports the case, and otherwise the reference. Only this module, the fallbacks
of overrides and the peers of benchmarks may call attention kernels of other libraries.
"""

from __future__ import annotations

import functools
import operator
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flashbwd import _ops, reference
from flashbwd.options import AttentionOptions

_aten = torch.ops.aten


def choose(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """Choose the forward: "torch_cpu", "torch_cudnn", "torch_flash", "torch_efficient" or "reference".

    With dropout the choice depends on metadata alone, so that the backward can repeat it to find the mask's layout.
    """
    causal, bias = options.causal, options.attn_bias
    if options.softcap > 0.0 or options.alibi_slopes is not None or q.numel() == 0 or k.numel() == 0:
        return "reference"
    varlen = options.cu_seqlens_q is not None
    same_length = not varlen and q.shape[1] == k.shape[1]
    windowed = options.window != (-1, -1)
    plain = bias is None and options.key_mask is None and q.shape[-1] == v.shape[-1]
    if q.device.type == "cpu":
        full_rows = not windowed and (causal != "bottom_right" or same_length)
        if plain and full_rows and not varlen and options.dropout_p == 0.0:
            return "torch_cpu"
        return "reference"
    if not q.is_cuda:
        return "reference"
    half = q.dtype in (torch.float16, torch.bfloat16)
    dense = not varlen and not windowed and options.dropout_p == 0.0
    if plain and half and dense and _fits_cudnn(q, k, v, options, same_length):
        return "torch_cudnn"
    bottom_right = causal != "top_left" or same_length
    fits_flash = half and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and bottom_right
    if plain and fits_flash and torch.backends.cuda.is_flash_attention_available():
        return "torch_flash"
    if dense and _fits_efficient(q, k, v, options):
        return "torch_efficient"
    return "reference"


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, same_length: bool) -> bool:
    """Return whether cuDNN supports the call and is PyTorch's first choice. Not used for deterministic calls."""
    return (
        q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and q.shape[1] > 1
        and k.shape[1] > 1
        and (options.causal != "bottom_right" or same_length)
        and not options.deterministic
        and _has_cudnn(q.get_device())
        and _has_cudnn_plan(q, k, v, options)
    )


@functools.cache
def _has_cudnn(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9 and (torch.backends.cudnn.version() or 0) >= 90000


_cudnn_plans: set[tuple[Any, ...]] = set()


def _has_cudnn_plan(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Return whether cuDNN already has a plan for such a call, or may create one now.

    The first call creates a handle and a plan, which CUDA graph capture forbids. PyTorch caches handles per thread and
    plans per thread and shape, so this set grows no faster than PyTorch's own cache.
    """
    layout = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    key = (threading.get_ident(), q.device, q.dtype, options.causal, options.softmax_scale, layout)
    if key not in _cudnn_plans:
        if torch.cuda.is_current_stream_capturing():
            return False
        _cudnn_plans.add(key)
    return True


def _fits_efficient(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Return whether PyTorch's memory-efficient forward supports the call.

    That forward does not support GQA, and it writes an LSE of 0 for bottom-right causal rows that see no key.
    """
    bias = options.attn_bias
    return (
        q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.shape[2] == k.shape[2]
        and q.shape[-1] % 8 == 0
        and v.shape[-1] % 8 == 0
        and (options.causal != "bottom_right" or k.shape[1] >= q.shape[1])
        and (bias is None or (bias.dtype == q.dtype and bias.shape[-1] == k.shape[1]))
        # Its float32 products split numbers into two parts, which turns the -inf of _hide_keys into NaN.
        and not (options.key_mask is not None and q.dtype == torch.float32 and _shared_by_batches(q, bias))
    )


def _shared_by_batches(q: Tensor, bias: Tensor | None) -> bool:
    return bias is not None and q.shape[0] > 1 and (bias.shape[0] == 1 or bias.stride(0) == 0)


def dropout_layout(forward: str) -> str:
    """Return the :class:`~flashbwd.RngState` layout of the dropout mask that a forward draws."""
    return "flash" if forward == "torch_flash" else "efficient64"


def run(forward: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Run the chosen forward. Returns out, softmax_lse and rng = (seed, offset); rng is empty without dropout."""
    no_rng = q.new_empty(0, dtype=torch.int64)
    if forward == "reference":
        rng = no_rng
        if options.dropout_p > 0.0:
            rng = torch.randint(2**62, (2,), device=q.device)
            rng[1:].zero_()
            options = options._replace(rng_seed=rng[0], rng_offset=rng[1], rng_layout="efficient64")
        return *reference.attention_forward(q, k, v, options), rng
    causal, dropout_p, sink = options.causal, options.dropout_p, options.sink
    assert options.softmax_scale is not None
    rng = no_rng
    q, softmax_scale = _with_positive_scale(q, options.softmax_scale)
    if forward == "torch_cpu":
        k, v = (_repeated(x, q.shape[2] // x.shape[2]) for x in (k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal != "none", scale=softmax_scale
        )
        out, lse = out.transpose(1, 2), lse.to(_statistics_dtype(q))
    elif forward == "torch_cudnn":
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, causal != "none", scale=softmax_scale
        )
        out, lse = out.transpose(1, 2), lse.view(lse.shape[:3])  # older PyTorch: (B, H, Sq, 1)
    elif forward == "torch_efficient":
        out, lse = _efficient(q, k, v, options, softmax_scale)
    else:
        out, lse, rng, _, _ = _aten._flash_attention_forward(
            q,
            k,
            v,
            options.cu_seqlens_q,
            options.cu_seqlens_k,
            q.shape[1] if options.max_seqlen_q is None else options.max_seqlen_q,
            k.shape[1] if options.max_seqlen_k is None else options.max_seqlen_k,
            dropout_p,
            causal != "none",
            False,
            scale=softmax_scale,
            window_size_left=None if options.window_left < 0 else options.window_left,
            window_size_right=None if options.window_right < 0 else options.window_right,
        )
        rng = rng.view(torch.int64) if dropout_p > 0.0 else no_rng
    if sink is not None:
        out, lse = _add_sink(out, lse, sink)
    return out.contiguous(), lse.contiguous(), rng


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's memory-efficient forward."""
    mask = ("none", "top_left", "bottom_right").index(options.causal)
    rows, bias, dead = q.shape[1], options.attn_bias, None
    if options.key_mask is not None:
        dead = _rows_without_keys(options.key_mask, rows, options.causal)
        q, k, v, bias = _hide_keys(q, k, v, bias, options.key_mask)
    bias = None if bias is None else _aligned(bias).expand(q.shape[0], q.shape[2], rows, -1)
    out, lse, *_ = _aten._efficient_attention_forward(
        q, k, v, bias, None, None, None, None, 0.0, mask, True, scale=softmax_scale
    )
    lse = lse[..., :rows]  # (B, H, roundup(Sq, 32))
    if dead is not None:
        out = out.masked_fill(dead[:, :, None, None], 0.0)
        lse = lse.masked_fill(dead[:, None], -torch.inf)
    return out, lse


def _hide_keys(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return operands whose scores of hidden keys are -inf. Hidden keys, values and biases may hold NaN.

    If batches share the bias, a copy per batch would take too much memory. Then q and k get 8 more columns, whose
    product is 0 or -inf.
    """
    hidden = key_mask.logical_not()
    k, v = (x.masked_fill(hidden[:, :, None, None], 0.0) for x in (k, v))
    if not _shared_by_batches(q, bias):
        bias = q.new_zeros(1, 1, 1, 1) if bias is None else bias
        return q, k, v, bias.masked_fill(hidden[:, None, None], -torch.inf)
    assert bias is not None
    bias = bias[:1].masked_fill(hidden.all(0), -torch.inf)
    column = torch.zeros_like(hidden, dtype=k.dtype).masked_fill_(hidden, -torch.inf)
    q, k = with_columns(q, k, column[:, :, None, None].expand(*k.shape[:-1], 1))
    return q, k, v, bias


def with_columns(q: Tensor, k: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with 8 more columns, whose product is the sum of up to 8 ``columns`` of k.

    Kernels load rows in vectors of 8 elements, so a head dimension should be a multiple of 8.
    """
    count = columns.shape[-1]
    ones = q.new_ones(*q.shape[:-1], count)
    return (
        torch.cat([q, ones, q.new_zeros(*q.shape[:-1], 8 - count)], -1),
        torch.cat([k, columns, k.new_zeros(*k.shape[:-1], 8 - count)], -1),
    )


def _rows_without_keys(key_mask: Tensor, rows: int, causal: str) -> Tensor:
    """Return the rows that see no key because of a key mask and a causal mask, (B, Sq or 1) bool."""
    keys = key_mask.shape[1]
    first = key_mask.to(torch.uint8).argmax(1, keepdim=True).masked_fill(~key_mask.any(1, keepdim=True), keys)
    if causal == "none":
        return first == keys
    offset = keys - rows if causal == "bottom_right" else 0
    return first > torch.arange(rows, device=key_mask.device) + offset


def _repeated(x: Tensor, group: int) -> Tensor:
    """Repeat the KV heads of (B, Sk, Hkv, D) for each query head, because PyTorch's CPU forward may not support GQA."""
    return x if group == 1 else x.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3)


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries and a scale that give the same scores, such that the scale is a positive float32 number.

    PyTorch's forwards mask scores with -inf before they scale them, so a negative scale would turn the mask into +inf
    and a zero scale into NaN. They also take the row maximum of unscaled scores, which is wrong for a negative scale.
    """
    if scale < 0.0:
        q, scale = q.neg(), -scale
    if scale < torch.finfo(torch.float32).tiny:
        q, scale = q * scale, 1.0
    return q, scale


def _aligned(bias: Tensor) -> Tensor:
    """Pad the rows of a bias to multiples of 16 elements, which the memory-efficient forward requires."""
    columns = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -columns % 16))[..., :columns]


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add one logit per head to the softmax: ``lse' = logaddexp(lse, sink)``, ``out' = out * exp(lse - lse')``.

    FlashAttention-2 writes an LSE of +inf for a row that sees no key. The output of such a row stays 0.
    """
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    with_sink = torch.logaddexp(lse, sink[:, None])  # (B, H, Sq) or (H, total_q)
    share = torch.exp(lse - with_sink).nan_to_num(0.0)
    return (out * share.transpose(-1, -2).unsqueeze(-1)).to(out.dtype), with_sink


_CHECKED = torch.ops.flashbwd.check_attention_inputs.default._schema
_RESULTS = "(Tensor out, Tensor softmax_lse, Tensor rng)"
_SCHEMA = str(_CHECKED).removeprefix(_CHECKED.name).replace("-> ()", f"-> {_RESULTS}")
#: The operator's arguments: q, k, v and the options of a forward. The tensors among these options are saved as tensors.
INPUTS = [argument.name for argument in _CHECKED.arguments]
OPTIONS = INPUTS[3:]
_TENSORS = [argument.name for argument in _CHECKED.arguments[3:] if "Tensor" in str(argument.type)]


# The position of each option in the operator's inputs, or in the defaults that follow them. An itemgetter is three
# times as fast as keyword arguments.
_DEFAULTS = tuple(AttentionOptions())
_in_order = operator.itemgetter(
    *(INPUTS.index(name) if name in INPUTS else len(INPUTS) + i for i, name in enumerate(AttentionOptions._fields))
)


def _options(inputs: tuple[Any, ...]) -> AttentionOptions:
    return AttentionOptions._make(_in_order(inputs + _DEFAULTS))


def _attention(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _ops.call(torch.ops.flashbwd.check_attention_inputs, *inputs)
    call = (*inputs[:3], _options(inputs))
    return run(choose(*call), *call)


# The tag keeps compilers from recomputing the forward in the backward, where the generator would draw another mask.
torch.library.define("flashbwd::attention", _SCHEMA, lib=_ops.library, tags=(torch.Tag.nondeterministic_seeded,))
torch.library.impl("flashbwd::attention", "CompositeExplicitAutograd", lib=_ops.library)(_attention)


@_ops.register_fake("attention", "q")
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    with_dropout = options[OPTIONS.index("dropout_p")] > 0.0
    return out, lse, q.new_empty(2 if with_dropout else 0, dtype=torch.int64)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, options = *inputs[:3], _options(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *(getattr(options, name) for name in _TENSORS))
    layout = dropout_layout(choose(q, k, v, options)) if options.dropout_p > 0.0 else ""
    without_tensors: dict[str, Any] = dict.fromkeys(_TENSORS)
    ctx.options = options._replace(rng_layout=layout, **without_tensors)
    ctx.mark_non_differentiable(output[2])


def _attention_grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, softmax_lse, rng, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * len(INPUTS)
    given = dict(zip(_TENSORS, tensors, strict=True))
    need_dbias = given["attn_bias"] is not None and ctx.needs_input_grad[INPUTS.index("attn_bias")]
    with_dropout = ctx.options.dropout_p > 0.0
    options = ctx.options._replace(
        **given,
        dlse=dlse,
        rng_seed=rng[0] if with_dropout else None,
        rng_offset=rng[1] if with_dropout else None,
        need_dbias=need_dbias,
        allow_tf32=_ops.allow_tf32(q),
    )
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsink = _ops.call_below_autograd(
        torch.ops.flashbwd.attention_backward, dout, q, k, v, out, softmax_lse, *options
    )
    grads = dict.fromkeys(INPUTS) | {"q": dq, "k": dk, "v": dv}
    if need_dbias:
        grads["attn_bias"] = dbias
    if options.sink is not None:
        grads["sink"] = dsink
    return tuple(grads.values())


_ops.library.register_autograd("attention", _attention_grads, _save_for_backward)


@register_flop_formula(torch.ops.flashbwd.attention)
def _attention_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the floating-point operations of two products over the visible pairs: ``pairs * (2 D + 2 Dv)``."""
    bound = dict(zip(INPUTS, shapes, strict=True))
    return _ops.pairs_of_call(bound) * 2 * (bound["q"][-1] + bound["v"][-1])
