"""The cases of the suite ``short``: many sequences of at most 128 rows, as in window attention of vision models.

The backward of such a call moves few bytes and computes little, so its bars are ratios over cuDNN's backward and over a
device copy that moves as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashbwd.bench.cases import COPY, CUDNN, SHORT, AttentionCase, Bar

# B, S, H, D
SHAPES = (
    (512, 49, 16, 32),
    (512, 64, 16, 32),
    (256, 100, 16, 32),
    (256, 128, 16, 32),
    (512, 49, 12, 64),
    (512, 64, 16, 64),
    (256, 100, 12, 64),
    (256, 128, 12, 64),
    (256, 64, 16, 80),
    (128, 128, 16, 80),
)
_OVER_CUDNN = Bar(SHORT, CUDNN, 1.2)
_OVER_COPY = Bar(SHORT, COPY, 0.4)


def _cases() -> Iterator[AttentionCase]:
    for batch, seqlen, heads, head_dim in SHAPES:
        bars = (_OVER_CUDNN, _OVER_COPY) if head_dim <= 64 else (_OVER_CUDNN,)
        case = AttentionCase("short", batch, seqlen, heads, heads, head_dim, head_dim, bars=bars)
        yield case
        if seqlen in (64, 128):
            yield replace(case, causal=True)
        if seqlen in (49, 64):  # cuDNN computes no gradient of a bias
            yield replace(case, bias_batch=1, bars=tuple(bar for bar in bars if bar.over != CUDNN))
    yield AttentionCase("short", 512, 64, 16, 16, 32, 32, dtype="fp16", bars=(_OVER_CUDNN, _OVER_COPY))


SHORT_CASES: tuple[AttentionCase, ...] = tuple(_cases())
