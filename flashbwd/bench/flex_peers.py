"""The peers of FlexAttention cases. Every peer makes its own BlockMask, so that its first call computes the lists."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashbwd
from flashbwd.bench import attention_peers
from flashbwd.bench.attention_inputs import AttentionInputs
from flashbwd.bench.cases import (
    DETERMINISTIC,
    FLEX,
    FLEX_TUNED,
    OURS_FLEX,
    PLAIN,
    RELATIVE_BIAS,
    SOFTCAP,
    TRAINED_BIAS,
    FlexCase,
)
from flashbwd.bench.flex_cases import mask_of, relative_bias
from flashbwd.bench.peers import Peer, Prepared, refuse


def _options(case: FlexCase, x: AttentionInputs, table: Tensor | None) -> dict[str, Any]:
    """Return the arguments score_mod and block_mask. ``table`` is that of a relative bias."""
    slopes = x.alibi_slopes

    def softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(s / SOFTCAP)

    def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        return s - slopes[h] * (i - j).abs()

    def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert table is not None
        return s + table[h, i - j + case.seqlen - 1]

    mask = mask_of(case, x.q.device)
    return {
        "score_mod": {"": None, "softcap": softcap, "ALiBi": alibi}.get(case.score, biased),
        "block_mask": create_block_mask(mask, None, None, case.seqlen, case.seqlen, device=str(x.q.device)),
        "enable_gqa": case.heads != case.heads_kv,
    }


def _now(x: AttentionInputs) -> float:
    if x.q.is_cuda:
        torch.cuda.synchronize(x.q.device)
    return time.perf_counter()


def _rows_first(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(grad.transpose(1, 2) for grad in grads)


@contextlib.contextmanager
def _where_pytorch_starts() -> Iterator[None]:
    """Refuse a case in which a kernel of PyTorch needs more shared memory than the GPU has."""
    try:
        yield
    except RuntimeError as error:
        refuse("No valid triton configs" in str(error), f"PyTorch's kernel does not start: {error}")
        raise


def pytorch(mode: str | None = None) -> Callable[[FlexCase, AttentionInputs], Prepared]:
    """Prepare the compiled backward of PyTorch's flex_attention, with a mode of torch.compile."""

    def prepare(case: FlexCase, x: AttentionInputs) -> Prepared:
        refuse(mode is not None and not case.tuned, "autotuned in a few cases only")
        import torch._functorch.config as functorch_config

        table = relative_bias(case, x.q.device)
        options = _options(case, x, table)
        inputs = tuple(t.transpose(1, 2).detach().requires_grad_() for t in (x.q, x.k, x.v))
        trained = () if table is None or not table.requires_grad else (table,)
        dout = x.dout.transpose(1, 2)
        start = _now(x)
        with functorch_config.patch(donated_buffer=False), _where_pytorch_starts():  # many backwards reuse the graph
            compiled: Callable[..., Any] = torch.compile(flex_attention, mode=mode)
            out = compiled(*inputs, **options)
            torch.autograd.grad(out, inputs + trained, dout, retain_graph=True)
        first_ms = 1e3 * (_now(x) - start)

        def backward() -> tuple[Tensor | None, ...]:
            return _rows_first(torch.autograd.grad(out, inputs + trained, dout, retain_graph=True)[:3])

        return Prepared(backward, first_ms=first_ms)

    return prepare


def ours(deterministic: bool = False, reference: bool = False) -> Callable[[FlexCase, AttentionInputs], Prepared]:
    """Prepare this library's backward. A case that only the reference computes is refused unless ``reference``."""

    def prepare(case: FlexCase, x: AttentionInputs) -> Prepared:
        q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))
        table = relative_bias(case, x.q.device)
        with torch.no_grad(), _where_pytorch_starts():
            results: Any = flashbwd.flex_attention(q, k, v, **_options(case, x, table), return_lse=True)
        out, lse = results
        # Another mask: the forward may have kept lists of its own.
        options = _options(case, x, table) | {"deterministic": deterministic}
        start = _now(x)
        plan = flashbwd.plan_flex_attention_backward(dout, q, k, v, out, lse, **options)
        reasons = "; ".join(dict.fromkeys(plan.reasons.values()))
        refuse(plan.backend == "reference" and not reference, f"no kernel computes the case: {reasons}")

        def backward() -> tuple[Tensor | None, ...]:
            grads = flashbwd.flex_attention_backward(dout, q, k, v, out, lse, **options)
            return _rows_first((grads.dq, grads.dk, grads.dv))

        backward()
        return Prepared(
            backward,
            first_ms=1e3 * (_now(x) - start),
            plan=plan.backend,
            refusals=dict(plan.reasons),
            workspace_bytes=plan.workspace_bytes,
        )

    return prepare


def plain(case: FlexCase, x: AttentionInputs) -> Prepared:
    """Prepare attention_backward, with the mask and the modification of the score as arguments."""
    refuse(case.mask not in ("causal", "window"), "attention_backward has no argument for this mask")
    refuse(case.score in (RELATIVE_BIAS, TRAINED_BIAS), "attention_backward has no argument for a relative bias")
    prepared = attention_peers.ours("sm90")(case.dense, x)
    start = _now(x)
    with prepared.scope():
        prepared.backward()
    return replace(prepared, work=case.work, first_ms=1e3 * (_now(x) - start))


FLEX_PEERS: tuple[Peer, ...] = (
    Peer(FLEX, pytorch(), compiled=True),
    Peer(FLEX_TUNED, pytorch("max-autotune-no-cudagraphs"), compiled=True),
    Peer(OURS_FLEX, ours(), compiled=True),
    Peer(OURS_FLEX + DETERMINISTIC, ours(deterministic=True), compiled=True),
    Peer(PLAIN, plain),
)
