"""Who is measured on short-query decoding. To add a peer, write its ``prepare`` and a row of ``DECODING_PEERS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashbwd
from flashbwd.bench.cases import DECODING, DTYPES, FLEX, SDPA, DecodingCase
from flashbwd.bench.peers import Peer, Prepared

RELATIVE_POSITIONS = 256  # of the table of biases; further keys have the last one's


@dataclass(frozen=True)
class DecodingInputs:
    """q (B, H, Sq, D), k and v (B, Hkv, Sk, D); what the case's modification is made of."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: Callable[..., Tensor] | None = None
    block_mask: BlockMask | None = None


def make_inputs(case: DecodingCase, device: torch.device, seed: int) -> DecodingInputs:
    """Random normal inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])

    q = normal(case.heads, case.seqlen_q)
    k, v = normal(case.heads_kv, case.seqlen_k), normal(case.heads_kv, case.seqlen_k)
    return DecodingInputs(q, k, v, *_modification(case, device, generator))


def _modification(
    case: DecodingCase, device: torch.device, generator: torch.Generator
) -> tuple[Callable[..., Tensor] | None, BlockMask | None]:
    offset = case.seqlen_k - case.seqlen_q  # queries are the last positions
    slopes = 2.0 ** -torch.arange(1, case.heads + 1, device=device).clamp(max=16)
    table = torch.randn(case.heads, RELATIVE_POSITIONS, generator=generator, device=device)

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + offset >= k

    if case.mod == "causal":
        lengths = (case.seqlen_q, case.seqlen_k)
        return None, create_block_mask(causal, None, None, *lengths, device=device)
    mods: dict[str, Callable[..., Tensor]] = {
        "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q - offset),
        "softcap": lambda score, b, h, q, k: 30 * torch.tanh(score / 30),
        "relative": lambda score, b, h, q, k: score + table[h, (q + offset - k).clamp(0, RELATIVE_POSITIONS - 1)],
    }
    return mods.get(case.mod), None


def outputs(case: DecodingCase, x: DecodingInputs) -> Tensor:
    """The last batch's output in float64, for all of its heads."""
    group = case.heads // case.heads_kv
    q, k, v = (t[-1].double() for t in (x.q, x.k, x.v))
    rows, keys = (torch.arange(n, device=q.device) for n in (case.seqlen_q, case.seqlen_k))
    parts = []
    for h in range(case.heads):
        scores = q[h] @ k[h // group].T * case.head_dim**-0.5
        index = (torch.tensor(case.batch - 1), torch.tensor(h), rows[:, None], keys)
        if x.score_mod is not None:
            scores = x.score_mod(scores, *index)
        if x.block_mask is not None:
            scores = scores.masked_fill(~x.block_mask.mask_mod(*index), -torch.inf)
        parts.append(scores.softmax(-1) @ v[h // group])
    return torch.stack(parts)


def sdpa(case: DecodingCase, x: DecodingInputs) -> Prepared:
    """Where the case has a modification: what the attention alone would take."""
    grouped = case.heads != case.heads_kv
    call = _without_gradients(
        lambda: torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=grouped)
    )
    return Prepared(call.backward, checked=not case.mod)


def _flex(mode: str | None) -> Callable[[DecodingCase, DecodingInputs], Prepared]:
    def prepare(case: DecodingCase, x: DecodingInputs) -> Prepared:
        from torch.nn.attention.flex_attention import flex_attention

        compiled: Any = torch.compile(flex_attention, dynamic=False, mode=mode)
        return _attending(compiled, case, x)

    return prepare


def ours(case: DecodingCase, x: DecodingInputs) -> Prepared:
    return _attending(flashbwd.flex_decoding, case, x)


def _attending(attend: Callable[..., Any], case: DecodingCase, x: DecodingInputs) -> Prepared:
    grouped = case.heads != case.heads_kv
    return _without_gradients(lambda: attend(x.q, x.k, x.v, x.score_mod, x.block_mask, enable_gqa=grouped))


def _without_gradients(attend: Callable[[], Any]) -> Prepared:
    def call() -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            return (attend(),)

    return Prepared(call)


DECODING_PEERS: tuple[Peer, ...] = (
    Peer(SDPA, sdpa, devices=("cuda", "cpu")),
    Peer(FLEX, _flex(None), compiled=True),
    Peer("flex max-autotune", _flex("max-autotune-no-cudagraphs"), compiled=True),
    Peer(DECODING, ours, devices=("cuda", "cpu")),
)
