"""Who is measured on short-query decoding. To add a peer, write its ``prepare`` and a row of ``DECODING_PEERS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashbwd
from flashbwd.bench.cases import DECODING, DTYPES, SDPA, DecodingCase
from flashbwd.bench.peers import Peer, Prepared


@dataclass(frozen=True)
class DecodingInputs:
    """q (B, H, Sq, D), k and v (B, Hkv, Sk, D); slopes (H,) of ALiBi."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor


def make_inputs(case: DecodingCase, device: torch.device, seed: int) -> DecodingInputs:
    """Random normal inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])

    q = normal(case.heads, case.seqlen_q)
    k, v = normal(case.heads_kv, case.seqlen_k), normal(case.heads_kv, case.seqlen_k)
    return DecodingInputs(q, k, v, 2.0 ** -torch.arange(1, case.heads + 1, device=device).clamp(max=16))


def outputs(case: DecodingCase, x: DecodingInputs) -> Tensor:
    """The last batch's output in float64, for all of its heads."""
    group = case.heads // case.heads_kv
    q, k, v = (t[-1].double() for t in (x.q, x.k, x.v))
    parts = [(q[h] @ k[h // group].T * case.head_dim**-0.5).softmax(-1) @ v[h // group] for h in range(case.heads)]
    return torch.stack(parts)


def sdpa(case: DecodingCase, x: DecodingInputs) -> Prepared:
    grouped = case.heads != case.heads_kv
    return _without_gradients(
        lambda: torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=grouped)
    )


def _flex(mode: str | None) -> Callable[[DecodingCase, DecodingInputs], Prepared]:
    def prepare(case: DecodingCase, x: DecodingInputs) -> Prepared:
        from torch.nn.attention.flex_attention import flex_attention

        compiled: Any = torch.compile(flex_attention, dynamic=False, mode=mode)
        return _without_gradients(lambda: compiled(x.q, x.k, x.v, enable_gqa=case.heads != case.heads_kv))

    return prepare


def _ours(name: str) -> Callable[[DecodingCase, DecodingInputs], Prepared]:
    def prepare(case: DecodingCase, x: DecodingInputs) -> Prepared:
        slopes = x.slopes

        def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slopes[h] * (k - q)

        def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return 30 * torch.tanh(score / 30)

        mod = {"": None, "alibi": alibi, "softcap": softcap}[name]
        grouped = case.heads != case.heads_kv
        call = _without_gradients(lambda: flashbwd.flex_decoding(x.q, x.k, x.v, mod, enable_gqa=grouped))
        if mod is None:
            return call
        return Prepared(call.backward, checked=False)

    return prepare


def _without_gradients(attend: Callable[[], Any]) -> Prepared:
    def call() -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            return (attend(),)

    return Prepared(call)


DECODING_PEERS: tuple[Peer, ...] = (
    Peer(SDPA, sdpa, devices=("cuda", "cpu")),
    Peer("flex", _flex(None), compiled=True),
    Peer("flex max-autotune", _flex("max-autotune-no-cudagraphs"), compiled=True),
    Peer(DECODING, _ours(""), devices=("cuda", "cpu")),
    Peer(f"{DECODING} with ALiBi", _ours("alibi"), devices=("cuda", "cpu")),
    Peer(f"{DECODING} with softcap", _ours("softcap"), devices=("cuda", "cpu")),
)
