"""The peers of attention cases. To add a peer, write its ``prepare`` and add a row to ``ATTENTION_PEERS``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashbwd
from flashbwd.bench.attention_inputs import AttentionInputs
from flashbwd.bench.cases import (
    COPY,
    CPU_FLASH,
    CUDNN,
    CUDNN_HEADS_FIRST,
    DETERMINISTIC,
    EFFICIENT,
    FLASH,
    FLEX,
    REFERENCE,
    SHORT,
    SM80,
    SM90,
    AttentionCase,
)
from flashbwd.bench.peers import Peer, Prepared, UnsupportedCaseError, refuse

aten = torch.ops.aten
MASK_SEED = 1234


def _alibi_as_bias(case: AttentionCase, x: AttentionInputs, slopes: Tensor) -> Tensor:
    """Return the ALiBi terms as a bias, (1, H, S, S)."""
    positions = torch.arange(case.seqlen, device=slopes.device)
    return (-slopes[:, None, None] * (positions[:, None] - positions).abs())[None].to(x.q.dtype)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _fold_groups(grad: Tensor, heads_kv: int) -> Tensor:
    """Sum over the query heads of each KV head: (..., H, D) -> (..., Hkv, D)."""
    if grad.shape[-2] == heads_kv:
        return grad
    return grad.unflatten(-2, (heads_kv, -1)).sum(-2)


def _expand_groups(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Enable PyTorch's deterministic mode without filling uninitialized memory, which the timing would include."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


# ---- PyTorch's kernels on CUDA, as bare backward operators ---------------------------------------


def _flash_forward(case: AttentionCase, x: AttentionInputs, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return FlashAttention-2's out, lse and rng_state, and the operator's unused tensor."""
    refuse(x.bias is not None, "does not support a bias")
    refuse(case.softcap > 0 or case.alibi, "PyTorch passes it neither softcap nor ALiBi")
    refuse(case.dtype not in ("bf16", "fp16"), "supports only 16-bit dtypes")
    refuse(case.head_dim > 256, "supports head dims up to 256")
    refuse(case.head_dim != case.head_dim_v, "requires equal head dims")
    torch.manual_seed(MASK_SEED)
    left, right = (case.window - 1, 0) if case.window else (None, None)
    out, lse, rng_state, unused, _ = aten._flash_attention_forward(
        x.q, x.k, v, x.cu_seqlens, x.cu_seqlens, case.seqlen, case.seqlen, case.dropout_p, case.causal, False,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse, rng_state, unused


def torch_flash(case: AttentionCase, x: AttentionInputs) -> Prepared:
    out, lse, rng_state, unused = _flash_forward(case, x, x.v)
    left, right = (case.window - 1, 0) if case.window else (None, None)

    def backward() -> tuple[Tensor | None, ...]:
        return aten._flash_attention_backward(
            x.dout, x.q, x.k, x.v, out, lse, x.cu_seqlens, x.cu_seqlens, case.seqlen, case.seqlen, case.dropout_p,
            case.causal, rng_state, unused, window_size_left=left, window_size_right=right,
        )  # fmt: skip

    return Prepared(backward, forward=lambda v: _flash_forward(case, x, v)[0])


def torch_flash_deterministic(case: AttentionCase, x: AttentionInputs) -> Prepared:
    return replace(torch_flash(case, x), scope=deterministic_algorithms)


def _efficient_forward(case: AttentionCase, x: AttentionInputs, v: Tensor) -> tuple[Any, ...]:
    """Return q, k, v and bias with expanded heads for the memory-efficient kernel, then out, lse, seed and offset."""
    refuse(case.softcap > 0, "does not support softcap")
    torch.manual_seed(MASK_SEED)
    q, k, v = x.q, _expand_groups(x.k, case.heads), _expand_groups(v, case.heads)
    if x.cu_seqlens is not None:
        q, k, v = q[None], k[None], v[None]
    bias = x.bias if x.alibi_slopes is None else _alibi_as_bias(case, x, x.alibi_slopes)
    if bias is not None:
        bias = bias.expand(case.batch, case.heads, case.seqlen, case.seqlen)
    lengths = (case.seqlen, case.seqlen) if x.cu_seqlens is not None else (None, None)
    out, lse, seed, offset, _, _ = aten._efficient_attention_forward(
        q, k, v, bias, x.cu_seqlens, x.cu_seqlens, *lengths, case.dropout_p, int(case.causal), True,
        window_size=case.window,
    )  # fmt: skip
    return q, k, v, bias, out, lse, seed, offset


def torch_efficient(case: AttentionCase, x: AttentionInputs) -> Prepared:
    q, k, v, bias, out, lse, seed, offset = _efficient_forward(case, x, x.v)
    dout = x.dout if x.cu_seqlens is None else x.dout[None]
    shared_bias = x.bias is not None and x.bias.shape[0] < case.batch

    def backward() -> tuple[Tensor | None, ...]:
        dq, dk, dv, dbias = aten._efficient_attention_backward(
            dout, q, k, v, bias, out, x.cu_seqlens, x.cu_seqlens, case.seqlen, case.seqlen, lse, case.dropout_p, seed,
            offset, int(case.causal), x.bias is not None, window_size=case.window,
        )  # fmt: skip
        if x.cu_seqlens is not None:
            dq, dk, dv = dq[0], dk[0], dv[0]
        if shared_bias:
            dbias = dbias.sum(0, keepdim=True)
        grads = dq, _fold_groups(dk, case.heads_kv), _fold_groups(dv, case.heads_kv)
        return grads if x.bias is None else (*grads, dbias)

    def forward(other_v: Tensor) -> Tensor:
        out = _efficient_forward(case, x, other_v)[4]
        return out if x.cu_seqlens is None else out[0]

    # During a capture the operator expects seed and offset in GPU memory, but an eager forward returns them on the CPU.
    return Prepared(backward, forward=forward, capturable=case.dropout_p == 0)


def torch_cudnn(case: AttentionCase, x: AttentionInputs) -> Prepared:
    refuse(x.bias is not None, "computes no gradient of the bias")
    refuse(case.softcap > 0 or case.alibi, "PyTorch passes it neither softcap nor ALiBi")
    refuse(case.window is not None, "PyTorch passes it no window")
    refuse(case.dtype not in ("bf16", "fp16"), "supports only 16-bit dtypes")
    if x.cu_seqlens is not None:
        return _torch_cudnn_varlen(case, x, x.cu_seqlens)
    q, k, dout = _heads_first(x.q), _heads_first(x.k), _heads_first(x.dout)

    def run_forward(v: Tensor) -> tuple[Any, ...]:
        torch.manual_seed(MASK_SEED)
        return aten._scaled_dot_product_cudnn_attention(
            q, k, _heads_first(v), None, True, case.dropout_p, case.causal, False
        )

    v = _heads_first(x.v)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = run_forward(x.v)

    def backward() -> tuple[Tensor | None, ...]:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, case.dropout_p, case.causal
        )
        return tuple(_heads_first(grad) for grad in grads)

    return Prepared(
        backward, forward=lambda v: _heads_first(run_forward(v)[0]), capturable=case.dropout_p == 0
    )  # fmt: skip


def torch_cudnn_heads_first(case: AttentionCase, x: AttentionInputs) -> Prepared:
    """Prepare the cuDNN kernel with inputs stored as (B, H, S, D), which is faster for some shapes."""
    refuse(x.cu_seqlens is not None, "packed sequences are always stored with rows first")
    moved = {name: _heads_first(getattr(x, name)).contiguous().transpose(1, 2) for name in ("q", "k", "v", "dout")}
    return torch_cudnn(case, replace(x, **moved))


def _torch_cudnn_varlen(case: AttentionCase, x: AttentionInputs, cu_seqlens: Tensor) -> Prepared:
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = aten._cudnn_attention_forward(
        x.q, x.k, x.v, None, cu_seqlens, cu_seqlens, case.seqlen, case.seqlen, True, 0.0, case.causal, False
    )

    def backward() -> tuple[Tensor | None, ...]:
        return aten._cudnn_attention_backward(
            x.dout, x.q, x.k, x.v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, case.causal
        )

    return Prepared(backward)


def flex(case: AttentionCase, x: AttentionInputs) -> Prepared:
    """Prepare the compiled backward of flex_attention, called through autograd."""
    refuse(x.bias is not None or case.dropout_p > 0 or x.cu_seqlens is not None, "measured only with masks")
    import torch._functorch.config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if case.causal:
        window = case.window or case.seqlen

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (j > i - window)

        block_mask = create_block_mask(visible, None, None, case.seqlen, case.seqlen, device=str(x.q.device))
    slopes = x.alibi_slopes

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        return s if slopes is None else s - slopes[h] * (i - j).abs()

    score_mod = score if case.softcap or case.alibi else None
    q, k, v = inputs = tuple(_heads_first(t).detach().requires_grad_() for t in (x.q, x.k, x.v))
    dout = _heads_first(x.dout)
    with functorch_config.patch(donated_buffer=False):  # many backwards reuse the graph
        compiled: Callable[..., Any] = torch.compile(flex_attention)
        out = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=case.heads != case.heads_kv)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def backward() -> tuple[Tensor | None, ...]:
        grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        return tuple(_heads_first(grad) for grad in grads)

    return Prepared(backward)


def device_copy(case: AttentionCase, x: AttentionInputs) -> Prepared:
    """Prepare a copy that moves as many bytes as the backward must. It is the bound of short sequences."""
    refuse(all(bar.over != COPY for bar in case.bars), "measured only for short sequences")
    source = torch.empty(case.moved_bytes // 2, dtype=torch.uint8, device=x.q.device).random_()
    target = torch.empty_like(source)

    def copy() -> tuple[Tensor | None, ...]:
        target.copy_(source)
        return ()

    return Prepared(copy, checked=False)


# ---- PyTorch on the CPU --------------------------------------------------------------------------


def torch_cpu_flash(case: AttentionCase, x: AttentionInputs) -> Prepared:
    refuse(x.bias is not None, "computes no gradient of the bias")
    refuse(case.softcap > 0 or case.alibi, "supports neither softcap nor ALiBi")
    refuse(case.window is not None or x.cu_seqlens is not None, "supports neither a window nor packed sequences")
    refuse(case.head_dim != case.head_dim_v or case.dropout_p > 0, "requires equal head dims and no dropout")
    k, v = (_heads_first(_expand_groups(t, case.heads)) for t in (x.k, x.v))
    q, dout = _heads_first(x.q), _heads_first(x.dout)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal)

    def backward() -> tuple[Tensor | None, ...]:
        dq, dk, dv = (
            _heads_first(grad)
            for grad in aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, case.causal
            )
        )
        return dq, _fold_groups(dk, case.heads_kv), _fold_groups(dv, case.heads_kv)

    return Prepared(backward)


def torch_math(case: AttentionCase, x: AttentionInputs) -> Prepared:
    """Prepare autograd of the plain formula, with S^2 memory.

    On the CPU, PyTorch has no better backward for a window or for a bias with gradient.
    """
    refuse(x.bias is None and case.window is None, "measured only if PyTorch has no better backward")
    refuse(case.softcap > 0 or case.alibi, "measured only with masks and a bias")
    refuse(x.cu_seqlens is not None or case.dropout_p > 0, "not measured with dropout or packed sequences")
    k, v = (_heads_first(_expand_groups(t, case.heads)).detach().requires_grad_() for t in (x.k, x.v))
    q, dout = _heads_first(x.q).detach().requires_grad_(), _heads_first(x.dout)
    bias = None if x.bias is None else x.bias.detach().requires_grad_()
    scores = case.head_dim**-0.5 * q @ k.mT
    if bias is not None:
        scores = scores + bias
    if case.causal:
        visible = torch.ones(case.seqlen, case.seqlen, dtype=torch.bool, device=q.device).tril()
        if case.window:
            visible = visible.triu(1 - case.window)
        scores = scores.masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ v
    wanted = (q, k, v) if bias is None else (q, k, v, bias)

    def backward() -> tuple[Tensor | None, ...]:
        dq, dk, dv, *dbias = torch.autograd.grad(out, wanted, dout, retain_graph=True)
        grads = (_heads_first(dq), *(_fold_groups(_heads_first(d), case.heads_kv) for d in (dk, dv)))
        return (*grads, *dbias)

    return Prepared(backward)


# ---- this library --------------------------------------------------------------------------------


def ours(backend: str, deterministic: bool = False) -> Callable[[AttentionCase, AttentionInputs], Prepared]:
    """Prepare this library with a forced backend, or with "auto". ``flashbwd.attention`` chooses the forward."""

    def prepare(case: AttentionCase, x: AttentionInputs) -> Prepared:
        options: dict[str, Any] = {"causal": case.causal}
        forward = None
        if case.window:
            options["window_size"] = (case.window - 1, 0)
        if x.bias is not None:
            options["attn_bias"] = x.bias
        if case.softcap:
            options["softcap"] = case.softcap
        if x.alibi_slopes is not None:
            options["alibi_slopes"] = x.alibi_slopes
        if x.cu_seqlens is not None:
            options.update(
                cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, max_seqlen_q=case.seqlen, max_seqlen_k=case.seqlen
            )
        if case.dropout_p > 0:
            refuse(not x.q.is_cuda, "dropout is measured only with masks of GPU forwards")
            out, lse, options["rng_state"] = _forward_with_dropout(case, x, x.v)
            options["dropout_p"] = case.dropout_p

            def forward(v: Tensor) -> Tensor:
                return _forward_with_dropout(case, x, v)[0]
        else:
            with torch.no_grad():
                out, lse = flashbwd.attention(x.q, x.k, x.v, **options, return_lse=True)
        options["deterministic"] = deterministic
        arguments = (x.dout, x.q, x.k, x.v, out, lse)
        if backend == "reference" and x.q.is_cuda:
            chosen = flashbwd.plan_attention_backward(*arguments, **options).backend
            refuse(chosen != "reference", f"not needed: {chosen} supports the case")
        try:
            with flashbwd.use_backend(backend):
                plan = flashbwd.plan_attention_backward(*arguments, **options)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedCaseError(str(error).splitlines()[0]) from error

        def backward() -> tuple[Tensor | None, ...]:
            grads = flashbwd.attention_backward(*arguments, **options)
            return tuple(grads[:3]) if x.bias is None else tuple(grads[:4])

        return Prepared(
            backward,
            forward=forward,
            scope=lambda: flashbwd.use_backend(backend),
            plan=_in_words(plan),
            refusals=dict(plan.reasons),
            workspace_bytes=plan.workspace_bytes,
        )

    return prepare


def _forward_with_dropout(
    case: AttentionCase, x: AttentionInputs, v: Tensor
) -> tuple[Tensor, Tensor, flashbwd.RngState]:
    """Return out, lse and rng_state of the forward that the case names in ``dropout_layout``."""
    if case.dropout_layout == "flash":
        out, lse, rng_state, _ = _flash_forward(case, x, v)
        return out, lse, flashbwd.RngState(rng_state[0], rng_state[1], "flash")
    *_, out, lse, seed, offset = _efficient_forward(case, x, v)
    # "efficient32" and "efficient64" are the same for masks with fewer than 2**32 elements.
    return out, lse, flashbwd.RngState(seed, offset, "efficient64")


def _in_words(plan: flashbwd.Plan) -> str:
    tile = f", tile {plan.tile[0]}x{plan.tile[1]}" if plan.tile else ""
    return f"{plan.backend}: {plan.schedule}{tile}"


ATTENTION_PEERS: tuple[Peer, ...] = (
    Peer(EFFICIENT, torch_efficient),
    Peer(FLASH, torch_flash),
    Peer(FLASH + DETERMINISTIC, torch_flash_deterministic),
    Peer(CUDNN, torch_cudnn),
    Peer(CUDNN_HEADS_FIRST, torch_cudnn_heads_first),
    Peer(FLEX, flex, compiled=True, ahead=True),
    Peer(CPU_FLASH, torch_cpu_flash, devices=("cpu",)),
    Peer("torch math", torch_math, devices=("cpu",)),
    Peer(SM90, ours("sm90")),
    Peer(SM90 + DETERMINISTIC, ours("sm90", deterministic=True)),
    Peer(SM80, ours("sm80")),
    Peer(SM80 + DETERMINISTIC, ours("sm80", deterministic=True)),
    Peer(SHORT, ours("short")),
    Peer(COPY, device_copy),
    Peer(REFERENCE, ours("reference"), devices=("cuda", "cpu")),
)
