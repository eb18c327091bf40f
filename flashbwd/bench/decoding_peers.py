"""The peers of short-query decoding cases. To add a peer, write its ``prepare`` and a row of ``DECODING_PEERS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd
from flashbwd.bench.cases import DECODING, DECODING_FORMS, DTYPES, SDPA, DecodingCase
from flashbwd.bench.peers import Peer, Prepared, refuse


@dataclass(frozen=True)
class DecodingInputs:
    """q and dout (B, H, Sq, D), k and v (B, Hkv, Sk, D), ALiBi slopes (H,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    slopes: Tensor


def make_inputs(case: DecodingCase, device: torch.device, seed: int) -> DecodingInputs:
    """Return random normal inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])

    q = normal(case.heads, case.seqlen_q)
    k, v = normal(case.heads_kv, case.seqlen_k), normal(case.heads_kv, case.seqlen_k)
    for tensor in (q, k, v):
        tensor.requires_grad_(case.backward)
    dout = normal(case.heads, case.seqlen_q)
    return DecodingInputs(q, k, v, dout, 2.0 ** -torch.arange(1, case.heads + 1, device=device).clamp(max=16))


def expected(case: DecodingCase, x: DecodingInputs) -> list[Tensor]:
    """Return the float64 output of the last batch element for all heads; for a backward case, its dq, dk and dv."""
    group = case.heads // case.heads_kv
    q, k, v = (t[-1].detach().double().requires_grad_(case.backward) for t in (x.q, x.k, x.v))
    parts = [(q[h] @ k[h // group].T * case.head_dim**-0.5).softmax(-1) @ v[h // group] for h in range(case.heads)]
    out = torch.stack(parts)
    return list(torch.autograd.grad(out, (q, k, v), x.dout[-1].double())) if case.backward else [out]


def sdpa(case: DecodingCase, x: DecodingInputs) -> Prepared:
    grouped = case.heads != case.heads_kv
    return _prepared(
        case, x, lambda: torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=grouped)
    )


def _flex(mode: str | None) -> Callable[[DecodingCase, DecodingInputs], Prepared]:
    """Prepare PyTorch's compiled flex_attention with a mask that lists all keys.

    Without a mask, torch 2.11 splits one block of 2**30 keys, so the first split gets all existing keys.
    """

    def prepare(case: DecodingCase, x: DecodingInputs) -> Prepared:
        refuse(case.backward and mode is not None, "the backward is measured without autotuning, which takes minutes")
        from torch.nn.attention.flex_attention import flex_attention

        compiled: Any = torch.compile(flex_attention, dynamic=False, mode=mode)
        mask = _all_keys(case, x.q.device)
        grouped = case.heads != case.heads_kv
        return _prepared(case, x, lambda: compiled(x.q, x.k, x.v, block_mask=mask, enable_gqa=grouped))

    return prepare


def _all_keys(case: DecodingCase, device: torch.device, block: int = 128) -> BlockMask:
    indices = torch.arange(-(-case.seqlen_k // block), dtype=torch.int32, device=device)[None, None, None]
    count = torch.full((1, 1, 1), indices.numel(), dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        count, indices, BLOCK_SIZE=(block, block), seq_lengths=(case.seqlen_q, case.seqlen_k)
    )


def _ours(name: str) -> Callable[[DecodingCase, DecodingInputs], Prepared]:
    def prepare(case: DecodingCase, x: DecodingInputs) -> Prepared:
        slopes = x.slopes

        def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slopes[h] * (k - q)

        def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return 30 * torch.tanh(score / 30)

        def compiled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score * slopes[h] + torch.sin(score)

        mod = {"": None, "alibi": alibi, "softcap": softcap, "compiled": compiled}[name]
        grouped = case.heads != case.heads_kv
        prepared = _prepared(case, x, lambda: flashbwd.flex_decoding(x.q, x.k, x.v, mod, enable_gqa=grouped))
        return replace(prepared, checked=mod is None)

    return prepare


def _causal(case: DecodingCase, x: DecodingInputs) -> Prepared:
    """Prepare this library with a causal mask that hides about the last 8 keys: full blocks and one partial block."""
    length, block = case.seqlen_k - 8, 128

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + length >= k

    def tensor(*values: int) -> Tensor:
        return torch.tensor([[values]], dtype=torch.int32, device=x.q.device)

    last = (case.seqlen_k - 1) // block
    mask = BlockMask.from_kv_blocks(
        tensor(1),
        tensor(last, *range(last))[:, :, None],
        tensor(last),
        tensor(*range(last + 1))[:, :, None],
        BLOCK_SIZE=(block, block),
        mask_mod=causal,
        seq_lengths=(case.seqlen_q, case.seqlen_k),
    )
    grouped = case.heads != case.heads_kv
    call = _prepared(case, x, lambda: flashbwd.flex_decoding(x.q, x.k, x.v, block_mask=mask, enable_gqa=grouped))
    return replace(call, checked=False)


def _prepared(case: DecodingCase, x: DecodingInputs, attend: Callable[[], Any]) -> Prepared:
    """Return a peer that runs the forward without autograd or, for a backward case, the backward of a past forward."""
    if case.backward:
        out = attend()
        # Autograd runs the backward on the stream of the forward, not on the captured stream.
        return Prepared(lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.dout, retain_graph=True), capturable=False)

    def call() -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            return (attend(),)

    return Prepared(call)


DECODING_PEERS: tuple[Peer, ...] = (
    Peer(SDPA, sdpa, devices=("cuda", "cpu")),
    Peer("flex", _flex(None), compiled=True, ahead=True),
    Peer("flex max-autotune", _flex("max-autotune-no-cudagraphs"), compiled=True, ahead=True),
    Peer(DECODING, _ours(""), devices=("cuda", "cpu")),
    *(
        Peer(name, prepare, devices=("cuda", "cpu"))
        for name, prepare in zip(
            DECODING_FORMS, (_ours("alibi"), _ours("softcap"), _ours("compiled"), _causal), strict=True
        )
    ),
)
