"""The attention cases of the benchmarks, and their bars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashbwd.bench.cases import (
    CPU_FLASH,
    CUDNN,
    DETERMINISTIC,
    EFFICIENT,
    FLASH,
    REFERENCE,
    SM80,
    SM90,
    AttentionCase,
    Bar,
    packed,
)

IN_ORDER = Bar(SM90 + DETERMINISTIC, SM90, 0.95)


def _hopper_bars(ratio: float) -> tuple[Bar, ...]:
    return (
        Bar(SM90, CUDNN, ratio),
        Bar(SM90, CUDNN, round(1.1 * ratio, 3), goal=True),
        Bar(SM80, FLASH, 1.0),
    )


# ---- the main table: B * S = 16384 tokens, H * D = 2048, heads equal, bf16 -----------------------

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)

# (head_dim, causal) -> required speed over cuDNN at each of SEQLENS
MAIN_BARS: dict[tuple[int, bool], tuple[float, ...]] = {
    (64, False): (1.23, 1.16, 1.15, 1.17, 1.17, 1.20),
    (64, True): (1.22, 1.26, 1.24, 1.26, 1.27, 1.24),
    (128, False): (1.05, 1.09, 1.07, 1.14, 1.11, 1.19),
    (128, True): (1.08, 1.11, 1.10, 1.14, 1.17, 1.19),
    (256, False): (1.20, 1.19, 1.18, 1.22, 1.29, 1.23),
    (256, True): (1.05, 1.07, 1.10, 1.21, 1.07, 1.21),
}


def _main_table() -> Iterator[AttentionCase]:
    for (head_dim, causal), ratios in MAIN_BARS.items():
        for seqlen, ratio in zip(SEQLENS, ratios, strict=True):
            bars = (*_hopper_bars(ratio), IN_ORDER)
            if (head_dim, causal, seqlen) == (128, False, 16384):
                bars += (Bar(SM90, "TFLOP/s", 700.0, goal=True),)
            heads = 2048 // head_dim
            yield AttentionCase(
                "main",
                batch=16384 // seqlen,
                seqlen=seqlen,
                heads=heads,
                heads_kv=heads,
                head_dim=head_dim,
                head_dim_v=head_dim,
                causal=causal,
                deterministic=True,
                compiled=seqlen == 4096,
                bars=bars,
            )


# ---- grouped heads -------------------------------------------------------------------------------
# GQA with 4 query heads per KV head: head dim; smallest and largest speed of the fastest public kernel over cuDNN

GROUPED_BARS = ((64, 1.06, 1.25), (128, 1.00, 1.15))


def _grouped_table() -> Iterator[AttentionCase]:
    for head_dim, least, most in GROUPED_BARS:
        heads = 2048 // head_dim
        for causal in (False, True):
            for seqlen in (1024, 8192):
                yield AttentionCase(
                    "grouped",
                    batch=16384 // seqlen,
                    seqlen=seqlen,
                    heads=heads,
                    heads_kv=heads // 4,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    causal=causal,
                    deterministic=True,
                    bars=(Bar(SM90, CUDNN, least), Bar(SM90, CUDNN, most, goal=True), Bar(SM80, FLASH, 1.0), IN_ORDER),
                )


# ---- other shapes: B, S, H, Hkv, D, Dv, mask, dtype, TFLOP/s of cuDNN (None: unsupported), TFLOP/s of the fastest
# public kernel

OTHER_SHAPES: tuple[tuple[int, int, int, int, int, int, str, str, int | None, int], ...] = (
    (4, 4096, 16, 16, 32, 32, "full", "bf16", 232, 370),
    (4, 4096, 16, 16, 32, 32, "causal", "bf16", 191, 317),
    (4, 4096, 16, 16, 80, 80, "full", "bf16", 364, 505),
    (4, 4096, 16, 16, 80, 80, "causal", "bf16", 313, 452),
    (4, 4096, 16, 16, 96, 96, "full", "bf16", 405, 523),
    (4, 4096, 16, 16, 96, 96, "causal", "bf16", 364, 492),
    (4, 4096, 16, 16, 112, 112, "full", "bf16", 466, 466),
    (4, 4096, 16, 16, 112, 112, "causal", "bf16", 419, 419),
    (4, 4096, 16, 16, 160, 160, "full", "bf16", 284, 284),
    (4, 4096, 16, 16, 160, 160, "causal", "bf16", 258, 258),
    (4, 4096, 16, 16, 192, 192, "full", "bf16", 335, 509),
    (4, 4096, 16, 16, 192, 192, "causal", "bf16", 299, 442),
    (4, 4096, 16, 16, 192, 128, "full", "bf16", 283, 478),
    (4, 4096, 16, 16, 192, 128, "causal", "bf16", 408, 456),
    (1, 16384, 16, 16, 128, 128, "window 256", "bf16", None, 176),
    (1, 16384, 16, 16, 128, 128, "window 1024", "bf16", None, 410),
    (16, 1024, 32, 4, 128, 128, "causal", "bf16", 278, 297),
    (2, 8192, 32, 4, 128, 128, "causal", "bf16", 518, 556),
    (16, 1024, 32, 2, 128, 128, "causal", "bf16", 279, 312),
    (2, 8192, 32, 2, 128, 128, "causal", "bf16", 475, 560),
    (16, 1024, 32, 1, 128, 128, "causal", "bf16", 281, 318),
    (2, 8192, 32, 1, 128, 128, "causal", "bf16", 479, 562),
    (2, 8192, 16, 16, 128, 128, "causal", "fp16", 493, 585),
    (2, 8192, 16, 16, 64, 64, "causal", "fp16", 382, 485),
)
WINDOW_BARS = {256: 250.0, 1024: 500.0}  # TFLOP/s
# GQA with windows: B, S, H, Hkv, D, window.
GROUPED_WINDOWS = ((1, 16384, 16, 4, 128, 1024), (2, 8192, 32, 8, 128, 4096))


def _other_table() -> Iterator[AttentionCase]:
    for batch, seqlen, heads, heads_kv, dim, dim_v, mask, dtype, cudnn, best in OTHER_SHAPES:
        window = int(mask.split()[1]) if mask.startswith("window") else None
        bars: tuple[Bar, ...] = (Bar(SM90, "TFLOP/s", WINDOW_BARS[window]),) if window else ()
        if cudnn is not None:
            bars += (Bar(SM90, CUDNN, round(best / cudnn, 3)),)
        # FlashAttention-2 requires equal head dims. For other shapes the bar refers to the memory-efficient kernel.
        bars += (Bar(SM80, FLASH, 1.0) if dim == dim_v else Bar(SM80, EFFICIENT, 2.2),)
        yield AttentionCase(
            "other",
            batch,
            seqlen,
            heads,
            heads_kv,
            dim,
            dim_v,
            causal=mask != "full",
            window=window,
            dtype=dtype,
            deterministic=True,
            compiled=window is not None,
            bars=(*bars, IN_ORDER),
        )


# ---- features that few kernels support: packed, bias with gradient, softcap, ALiBi, dropout, D 512, fp32 ----


def _feature_tables() -> Iterator[AttentionCase]:
    for batch, seqlen, heads, heads_kv, dim, window in GROUPED_WINDOWS:
        shape = AttentionCase("grouped_window", batch, seqlen, heads, heads_kv, dim, dim, causal=True, window=window)
        yield replace(shape, bars=(Bar(SM90, FLASH, 1.8),))
    bars = (Bar(SM80, FLASH, 1.0), Bar(SM90, CUDNN, 1.0, goal=True), IN_ORDER)
    for head_dim in (64, 128):
        for causal in (False, True):
            heads = 2048 // head_dim
            shape = AttentionCase("varlen", 1, 1, heads, heads, head_dim, head_dim, causal, bars=bars)
            yield packed(replace(shape, deterministic=True), 32768)
    shape = AttentionCase("bias", 4, 2048, 16, 16, 64, 64)
    for head_dim in (64, 128):
        for causal in (False, True):
            for bias_batch in (4, 1):
                yield replace(
                    shape,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    causal=causal,
                    bias_batch=bias_batch,
                    bars=(Bar(SM80, EFFICIENT, 2.0), Bar(SM90, EFFICIENT, 2.0, goal=True)),
                )
    shape = replace(shape, table="scores", seqlen=4096)
    for head_dim in (64, 128):
        for causal in (False, True):
            case = replace(shape, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
            yield replace(case, softcap=30.0, bars=(Bar(SM90, SM80, 1.5),))
            yield replace(case, alibi=True, bars=(Bar(SM90, EFFICIENT, 2.0), Bar(SM90, SM80, 1.5)))
    shape = replace(shape, table="dropout", dropout_p=0.1)
    for head_dim in (64, 128):
        for causal in (False, True):
            case = replace(shape, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
            yield replace(case, bars=(Bar(SM80, FLASH, 1.0), Bar(SM90, SM80, 1.5)))
            case = replace(case, dropout_layout="efficient")
            yield replace(case, bars=(Bar(SM80, EFFICIENT, 2.0), Bar(SM90, SM80, 1.5)))
            if not causal:
                yield replace(case, seqlen=2048, bias_batch=4, bars=(Bar(SM80, EFFICIENT, 2.0), Bar(SM90, SM80, 1.5)))
    for causal in (False, True):
        yield AttentionCase("wide", 2, 4096, 4, 4, 512, 512, causal=causal, bars=(Bar(SM80, EFFICIENT, 3.0),))
        yield AttentionCase(
            "fp32", 2, 4096, 16, 16, 64, 64, causal=causal, dtype="fp32", bars=(Bar(SM80, EFFICIENT, 2.2),)
        )


def _wide_table() -> Iterator[AttentionCase]:
    """Head dimensions above 256, as layers with global attention have them; 16384 tokens."""
    base = AttentionCase("wide", 2, 8192, 8, 8, 512, 512, causal=True, deterministic=True)
    long_bars = (Bar(SM90, "TFLOP/s", 300), Bar(SM90, "TFLOP/s", 380, goal=True), Bar(SM90, EFFICIENT, 3.0))
    yield replace(base, batch=8, seqlen=2048, bars=(Bar(SM90, "TFLOP/s", 220), Bar(SM90, EFFICIENT, 3.0)))
    yield replace(base, bars=long_bars)
    yield replace(base, causal=False, bars=long_bars)
    yield replace(base, heads=16, heads_kv=2, bars=long_bars)
    for head_dim in (288, 320):
        yield replace(base, head_dim=head_dim, head_dim_v=head_dim, bars=long_bars)


ATTENTION_CASES: tuple[AttentionCase, ...] = (
    *_main_table(),
    *_grouped_table(),
    *_other_table(),
    *_feature_tables(),
    *_wide_table(),
)

# ---- triangle attention: N rows share a bias; (N, heads, head dim) and the required TFLOP/s of sm90 ------------------

TRIANGLES = ((256, 4, 32, 95), (384, 4, 32, 130), (768, 4, 32, 180), (512, 8, 64, 270), (384, 16, 24, 95))

TRIANGLE_CASES: tuple[AttentionCase, ...] = tuple(
    AttentionCase(
        "triangle", n, n, heads, heads, dim, dim, bias_batch=1, deterministic=True, bars=(Bar(SM90, "TFLOP/s", bar),)
    )
    for n, heads, dim, bar in TRIANGLES
)

# ---- machines without a GPU ----------------------------------------------------------------------

_CPU = AttentionCase("cpu", 1, 4096, 8, 8, 64, 64, dtype="fp32")

CPU_ATTENTION_CASES: tuple[AttentionCase, ...] = (
    replace(_CPU, seqlen=512, causal=True),
    replace(_CPU, seqlen=1024, causal=True),
    replace(_CPU, seqlen=4096, causal=True, bars=(Bar(REFERENCE, CPU_FLASH, 0.667),)),
    replace(_CPU, seqlen=4096),
    replace(_CPU, seqlen=2048, causal=True, heads=16, heads_kv=4),
    replace(_CPU, seqlen=2048, causal=True, head_dim=128, head_dim_v=128),
    replace(_CPU, seqlen=2048, causal=True, dtype="bf16"),
    replace(_CPU, seqlen=2048, causal=True, window=256),
    replace(_CPU, seqlen=1024, bias_batch=1),
    packed(replace(_CPU, causal=True), 4096),
)
