"""The FlexAttention cases of the benchmarks: masks given as a BlockMask, with their visible pairs and their bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashbwd.bench.cases import FLEX, MASKS, OURS_FLEX, PLAIN, RELATIVE_BIAS, TRAINED_BIAS, Bar, FlexCase

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_of(case: FlexCase, device: torch.device) -> Mask:
    """Return the mask_mod of a case."""
    lengths = torch.tensor(case.lengths, device=device)
    document = torch.arange(case.documents, device=device).repeat_interleave(lengths)
    prefix, window = case.seqlen // 4, case.window

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (j <= i)

    def prefix_lm(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) | ((i < prefix) & (j < prefix))

    def sliding(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    return {"causal": causal, "documents": documents, "prefix": prefix_lm, "window": sliding}[case.mask]


def visible_pairs(case: FlexCase, device: torch.device) -> Tensor:
    """Return the dense mask, (S, S) bool."""
    i = torch.arange(case.seqlen, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return mask_of(case, device)(zero, zero, i[:, None], i[None, :])


def relative_bias(case: FlexCase, device: torch.device) -> Tensor | None:
    """Return the table of a relative bias, (H, 2 S - 1) float32. Query i and key j get column i - j + S - 1.

    It requires a gradient if the case trains it.
    """
    if case.score not in (RELATIVE_BIAS, TRAINED_BIAS):
        return None
    generator = torch.Generator().manual_seed(case.seqlen)
    table = torch.randn(case.heads, 2 * case.seqlen - 1, generator=generator).to(device)
    return table.requires_grad_(case.score == TRAINED_BIAS)


# ---- the cases: heads, KV heads, D, S, masks, whether with score modifications -------------------

_ROWS: tuple[tuple[int, int, int, int, tuple[str, ...], bool], ...] = (
    (16, 16, 128, 2048, MASKS, False),
    (16, 16, 128, 4096, ("causal", "documents"), False),
    (16, 16, 128, 8192, MASKS, True),
    (32, 32, 64, 2048, MASKS, False),
    (32, 32, 64, 4096, ("causal", "documents"), False),
    (32, 32, 64, 8192, MASKS, True),
    (32, 8, 128, 2048, ("causal", "documents"), False),
    (32, 8, 128, 8192, ("causal", "documents"), False),
)
DOCUMENTS = {2048: 4, 4096: 6, 8192: 8}


def _bars(mask: str, head_dim: int, score: str) -> tuple[Bar, ...]:
    if score == RELATIVE_BIAS:
        return (Bar(OURS_FLEX, FLEX, 1.5),)
    if score == TRAINED_BIAS:
        return ()
    if mask in ("causal", "window"):
        return (Bar(OURS_FLEX, PLAIN, 0.95),)
    return (Bar(OURS_FLEX, FLEX, 1.5 if mask == "prefix" and head_dim == 128 else 2.0),)


def _flex_cases() -> Iterator[FlexCase]:
    for heads, heads_kv, head_dim, seqlen, masks, with_scores in _ROWS:
        rows = [(mask, "") for mask in masks]
        if with_scores:
            rows += [("causal", "softcap"), ("causal", "ALiBi"), ("causal", RELATIVE_BIAS), ("causal", TRAINED_BIAS)]
        for mask, score in rows:
            yield FlexCase(
                "flex",
                16384 // seqlen,
                seqlen,
                heads,
                heads_kv,
                head_dim,
                mask,
                score,
                documents=DOCUMENTS[seqlen] if mask == "documents" else 1,
                tuned=heads == heads_kv and seqlen == 8192 and not score and mask in ("causal", "documents"),
                bars=_bars(mask, head_dim, score),
            )


FLEX_CASES: tuple[FlexCase, ...] = tuple(_flex_cases())
