"""The benchmark cases: every case is data, with its amount of work and the bars that it must reach.

A *bar* is the speed that one of this library's backends must reach on a case, as a ratio over a peer in the same run or
as an absolute rate. The bars over cuDNN are the ratios of the fastest public kernel to PyTorch's cuDNN backward,
measured on one H100 80GB HBM3 with torch 2.11 and cuDNN 9.19. A *goal* is a bar that may be missed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Largest relative error ||g - ref|| / ||ref|| of a correct gradient. The value for fp32 allows TF32 products.
TOLERANCES: dict[str, float] = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-3, "fp64": 1e-9}

SM90 = "flashbwd sm90"
SM80 = "flashbwd sm80"
REFERENCE = "flashbwd reference"
NORM = "flashbwd"
FLASH = "torch flash"
EFFICIENT = "torch efficient"
CUDNN = "torch cuDNN"
CUDNN_HEADS_FIRST = "torch cuDNN, heads first"  # inputs stored as (B, H, S, D) instead of (B, S, H, D)
FLEX = "flex"
CPU_FLASH = "torch CPU flash"
COPY = "device copy"
DECODING = "flashbwd decoding"
DECODING_FORMS = tuple(f"{DECODING} with {what}" for what in ("ALiBi", "softcap", "a compiled mod", "causal mask"))
SDPA = "torch SDPA"
TORCH_BLOCK = "torch eager"
TORCH_BLOCK_COMPILED = "torch compiled"
BLOCK = "flashbwd eager"
BLOCK_COMPILED = "flashbwd compiled"
ANY_PEER = "fastest peer"
VARIANTS = {CUDNN: (CUDNN, CUDNN_HEADS_FIRST)}  # variants of a peer; the fastest one counts
DETERMINISTIC = " deterministic"  # suffix of a peer's name


@dataclass(frozen=True)
class Bar:
    """``ours`` must run at ``at_least`` times the speed of ``over``.

    ``over`` is the name of a peer, ``ANY_PEER`` (the fastest peer that is not of this library), or the unit of an
    absolute rate, "TFLOP/s" or "GB/s".
    """

    ours: str
    over: str
    at_least: float
    goal: bool = False


@dataclass(frozen=True)
class AttentionCase:
    """One attention backward. With ``window`` w, a query sees its own key and the w - 1 keys before it."""

    table: str
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: int | None = None
    dtype: str = "bf16"
    dropout_p: float = 0.0
    dropout_layout: str = "flash"  # "flash" or "efficient": the forward whose mask this library regenerates
    softcap: float = 0.0
    alibi: bool = False
    bias_batch: int | None = None  # attn_bias is (bias_batch, H, S, S), with the batch or 1; its gradient is computed
    lengths: tuple[int, ...] | None = None  # packed sequences; batch and seqlen are their number and maximum
    deterministic: bool = False  # also measure the deterministic variants of the peers
    compiled: bool = False  # also measure peers that compile for the shape (seconds each)
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.dtype, f"B{self.batch}"]
        parts.append(f"T{sum(self.lengths)} varlen" if self.lengths else f"S{self.seqlen}")
        parts.append(f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads}:{self.heads_kv}")
        parts.append(f"D{self.head_dim}" if self.head_dim == self.head_dim_v else f"D{self.head_dim}/{self.head_dim_v}")
        parts.append(f"window {self.window}" if self.window else "causal" if self.causal else "full")
        if self.bias_batch:
            parts.append("bias" if self.bias_batch == self.batch else "shared bias")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.alibi:
            parts.append("ALiBi")
        if self.dropout_p:
            parts.append(f"{'efficient ' if self.dropout_layout == 'efficient' else ''}dropout {self.dropout_p:g}")
        return " ".join(parts)

    @property
    def unit(self) -> str:
        return "TFLOP/s"

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head. By convention, a causal mask counts as half of the square."""
        total = 0.0
        for s in self.lengths or (self.seqlen,) * self.batch:
            if self.window is not None:
                w = min(self.window, s)
                total += w * (w + 1) / 2 + (s - w) * w
            else:
                total += s * s / 2 if self.causal else s * s
        return total

    @property
    def work(self) -> float:
        """Floating-point operations: three products over D and two over Dv, with 2 operations per multiply-add."""
        return self.heads * self.pairs * (6 * self.head_dim + 4 * self.head_dim_v)

    @property
    def input_bytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        tokens = sum(self.lengths) if self.lengths else self.batch * self.seqlen
        of_q = self.heads * (self.head_dim + 2 * self.head_dim_v)  # q, out, dout
        of_k = self.heads_kv * (self.head_dim + self.head_dim_v)
        return (tokens * (of_q + of_k) + self.bias_elements) * size

    @property
    def bias_elements(self) -> int:
        return (self.bias_batch or 0) * self.heads * self.seqlen * self.seqlen


@dataclass(frozen=True)
class NormCase:
    """One LayerNorm (or RMSNorm) backward over ``rows`` rows of ``columns``.

    ``form`` "dropout" is the backward of dropout, residual addition and norm. "output" is the backward from the output
    of the norm.
    """

    table: str
    columns: int
    rows: int
    dtype: str = "bf16"
    rms: bool = False
    form: str = ""
    compiled: bool = True
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        kind = f"{'rms' if self.rms else 'layer'} norm{f' {self.form}' if self.form else ''}"
        return f"{kind} {self.dtype} N{self.columns} rows {self.rows}"

    @property
    def unit(self) -> str:
        return "GB/s"

    @property
    def work(self) -> float:
        """Bytes that every implementation has to move: read x and dz, write dx. With dropout: read h, dz and the
        gradient of h from the residual connection, write dx and the gradient of the residual."""
        return (5.0 if self.form == "dropout" else 3.0) * self.rows * self.columns * DTYPES[self.dtype].itemsize

    @property
    def input_bytes(self) -> int:
        return 2 * self.rows * self.columns * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class DecodingCase:
    """One short-query attention over a key-value cache: the forward or the backward."""

    table: str
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "bf16"
    backward: bool = False
    compiled: bool = True
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        direction = " backward" if self.backward else ""
        return (
            f"decoding{direction} {self.dtype} B{self.batch} H{self.heads}:{self.heads_kv} Sq{self.seqlen_q} "
            f"Sk{self.seqlen_k} D{self.head_dim}"
        )

    @property
    def unit(self) -> str:
        return "GB/s"

    @property
    def work(self) -> float:
        """Bytes of the keys and values that are read; in the backward also of their gradients, which are written."""
        return (
            (4.0 if self.backward else 2.0)
            * self.batch
            * self.heads_kv
            * self.seqlen_k
            * self.head_dim
            * DTYPES[self.dtype].itemsize
        )

    @property
    def input_bytes(self) -> int:
        return int(self.work) + self.batch * self.heads * self.seqlen_q * self.head_dim * DTYPES[self.dtype].itemsize


# Minimum slot length of blocks. The clock of a card at its power limit needs some tenths of a second to settle.
BLOCK_SLOT_MS = 1000.0


@dataclass(frozen=True)
class BlockCase:
    """One training step of a transformer block: forward, backward and optimizer, causal."""

    table: str
    shape: str  # "gpt": LayerNorm, GELU, biases; "llama": RMSNorm, gated MLP
    batch: int
    seqlen: int
    width: int
    heads: int
    heads_kv: int
    hidden: int  # columns of the MLP
    dtype: str = "bf16"
    compiled: bool = True
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads}:{self.heads_kv}"
        return f"{self.shape} block {self.dtype} B{self.batch} S{self.seqlen} width {self.width} {heads}"

    @property
    def unit(self) -> str:
        return "TFLOP/s"

    @property
    def work(self) -> float:
        """Operations of all matrix products: three products per weight matrix (forward, gradient of the input, gradient
        of the weight), and seven attention products over half of the pairs."""
        tokens = self.batch * self.seqlen
        width_kv = self.width // self.heads * self.heads_kv
        products = {"gpt": 2, "llama": 3}[self.shape]
        weights = self.width * (2 * self.width + 2 * width_kv + products * self.hidden)
        return 6.0 * tokens * weights + 7.0 * tokens * self.seqlen * self.width

    @property
    def input_bytes(self) -> int:
        return 2 * self.batch * self.seqlen * self.width * DTYPES[self.dtype].itemsize


Case = AttentionCase | NormCase | DecodingCase | BlockCase


def long_tailed_lengths(total: int, seed: int = 0, typical: int = 512, longest: int = 8192) -> tuple[int, ...]:
    """Sequence lengths that sum to ``total``, log-normal around ``typical``: many short and a few very long ones."""
    law = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = round(typical * math.exp(law.gauss(0.0, 1.2)))
        lengths.append(min(max(drawn, 16), longest, left))
    return tuple(lengths)


def packed(case: AttentionCase, total: int) -> AttentionCase:
    """``case`` with packed sequences of long-tailed lengths, ``total`` tokens in all."""
    lengths = long_tailed_lengths(total)
    return replace(case, batch=len(lengths), seqlen=max(lengths), lengths=lengths)


IN_ORDER = Bar(SM90 + DETERMINISTIC, SM90, 0.95)


def _hopper_bars(ratio: float) -> tuple[Bar, ...]:
    return (
        Bar(SM90, CUDNN, ratio),
        Bar(SM90, CUDNN, round(1.1 * ratio, 3), goal=True),
        Bar(SM80, FLASH, 1.0),
    )


# ---- the main table: B * S = 16384 tokens, H * D = 2048, heads equal, bf16 -----------------------

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)

# (head_dim, causal) -> the bar over cuDNN at each of SEQLENS
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
# GQA with 4 query heads per KV head: head dim, smallest and largest ratio of the fastest public kernel over cuDNN

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


# ---- other shapes: B, S, H, Hkv, D, Dv, mask, dtype, TFLOP/s of cuDNN (None: unsupported), of the fastest public
# kernel

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
        # FlashAttention-2 requires equal head dims; for other shapes the bar is over the memory-efficient kernel.
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


ATTENTION_CASES: tuple[AttentionCase, ...] = (*_main_table(), *_grouped_table(), *_other_table(), *_feature_tables())

# ---- LayerNorm: (N, rows of bf16, rows of fp32) --------------------------------------------------

NORM_ROWS = (
    (768, 349525, 174762),
    (1024, 262144, 131072),
    (2048, 131072, 65536),
    (4096, 65536, 32768),
    (5120, 52428, 26214),
    (8192, 32768, 16384),
    (12288, 21845, 10922),
    (16384, 16384, 8192),
    (65536, 4096, 2048),
)
UNTUNED_COLUMNS = (1000, 5000, 7919)
FEW_ROWS = ((8192, (1024, 4096, 8192)), (1024, (768, 1024, 2048, 3072, 4096, 5120, 8192)))
DROPOUT_COLUMNS = (768, 1024, 4096, 5000, 7919, 8192, 12288, 16384, 65536)
_COPY_BARS = (Bar(NORM, COPY, 0.92), Bar(NORM, COPY, 0.97, goal=True))
_FORM_BARS = (Bar(NORM, COPY, 0.9),)
_AHEAD = (Bar(NORM, ANY_PEER, 1.0),)


def _norm_cases() -> Iterator[NormCase]:
    for dtype, column in (("bf16", 1), ("fp32", 2)):
        for row in NORM_ROWS:
            yield NormCase("layer_norm", row[0], row[column], dtype, bars=_COPY_BARS)
    for dtype, elements in (("bf16", 2**28), ("fp32", 2**27)):
        for columns in UNTUNED_COLUMNS:
            yield NormCase("layer_norm_untuned", columns, elements // columns, dtype, bars=_COPY_BARS)
    for rows, widths in FEW_ROWS:
        for dtype in ("bf16", "fp32"):
            for columns in widths:
                yield NormCase("layer_norm_few_rows", columns, rows, dtype, bars=_AHEAD)
    for dtype, rows in (("bf16", 65536), ("fp32", 32768)):
        yield NormCase("rms_norm", 4096, rows, dtype, rms=True, bars=_COPY_BARS)
    for dtype, elements in (("bf16", 2**28), ("fp32", 2**27)):
        for columns in DROPOUT_COLUMNS:
            yield NormCase(
                "layer_norm_dropout", columns, elements // 2 // columns, dtype, form="dropout", bars=_FORM_BARS
            )
        for columns in (1024, 4096, 8192):
            yield NormCase("layer_norm_output", columns, elements // columns, dtype, form="output", bars=_FORM_BARS)


NORM_CASES: tuple[NormCase, ...] = tuple(_norm_cases())

# ---- decoding ------------------------------------------------------------------------------------

DECODING_SHAPES = (
    (1, 32, 8, 1, 8192, 128),
    (1, 32, 8, 1, 131072, 128),
    (8, 32, 8, 1, 8192, 128),
    (64, 32, 8, 1, 8192, 128),
    (8, 32, 32, 1, 8192, 128),
    (8, 64, 8, 4, 16384, 128),
    (16, 32, 8, 1, 16384, 64),
    (8, 24, 8, 1, 8192, 128),
    (8, 32, 8, 1, 8191, 128),
)


def _decoding_cases() -> Iterator[DecodingCase]:
    for index, shape in enumerate(DECODING_SHAPES):
        case = DecodingCase("decoding", *shape)
        bars: tuple[Bar, ...] = (Bar(DECODING, SDPA, 0.98),)
        if case.work > 128e6:
            bars += tuple(Bar(ours, "GB/s", 2800.0) for ours in (DECODING, *DECODING_FORMS))
        if index == 0:
            # The requirement is 1500 GB/s, and less than 22 us from a CUDA graph. The latter is stricter.
            bars += (Bar(DECODING, "GB/s", round(case.work / 22e-6 / 1e9)),)
        yield replace(case, bars=bars)


DECODING_CASES: tuple[DecodingCase, ...] = tuple(_decoding_cases())

_DECODING_BACKWARD = (
    ((8, 32, 8, 1, 8192, 128), "bf16"),
    ((8, 64, 8, 4, 16384, 128), "bf16"),
    ((16, 32, 8, 1, 16384, 64), "bf16"),
    ((8, 32, 8, 1, 8192, 128), "fp32"),
)
DECODING_BACKWARD_CASES: tuple[DecodingCase, ...] = tuple(
    DecodingCase("decoding_backward", *shape, dtype=dtype, backward=True, bars=(Bar(DECODING, ANY_PEER, 1.0),))
    for shape, dtype in _DECODING_BACKWARD
)

# ---- a whole block in training -------------------------------------------------------------------
# GPT-2 medium; Llama 3.2 1B; Llama 3 8B: shape, width, heads, KV heads, hidden columns

BLOCK_SHAPES = (("gpt", 1024, 16, 16, 4096), ("llama", 2048, 32, 8, 8192), ("llama", 4096, 32, 8, 14336))


def _block_cases() -> Iterator[BlockCase]:
    for shape, width, heads, heads_kv, hidden in BLOCK_SHAPES:
        for seqlen in (4096, 8192):
            bars = (Bar(BLOCK, TORCH_BLOCK, 1.05), Bar(BLOCK_COMPILED, TORCH_BLOCK_COMPILED, 1.05))
            yield BlockCase(
                "block",
                shape,
                batch=16384 // seqlen,
                seqlen=seqlen,
                width=width,
                heads=heads,
                heads_kv=heads_kv,
                hidden=hidden,
                bars=bars if seqlen == 8192 else (),
            )


BLOCK_CASES: tuple[BlockCase, ...] = tuple(_block_cases())

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
CPU_DECODING_CASES: tuple[DecodingCase, ...] = (
    DecodingCase("cpu_decoding", 1, 32, 8, 1, 8192, 128, dtype="fp32", compiled=False),
    DecodingCase("cpu_decoding", 4, 32, 8, 1, 2048, 64, dtype="fp32", compiled=False),
)
CPU_NORM_CASES: tuple[NormCase, ...] = (
    NormCase("cpu_norm", 768, 8192, "fp32", compiled=False),
    NormCase("cpu_norm", 4096, 4096, "fp32", compiled=False),
    NormCase("cpu_norm", 4096, 4096, "bf16", compiled=False),
    NormCase("cpu_norm", 1000, 8192, "fp32", compiled=False),
    NormCase("cpu_norm", 4096, 4096, "fp32", rms=True, compiled=False),
)

# ---- a few typical shapes, for `python -m flashbwd` ----------------------------------------------

SMOKE_CASES: dict[str, tuple[Case, ...]] = {
    "cuda": (
        AttentionCase("smoke", 4, 4096, 16, 16, 128, 128, causal=True),
        AttentionCase("smoke", 4, 4096, 32, 8, 128, 128, causal=True),
        AttentionCase("smoke", 8, 2048, 32, 32, 64, 64),
        AttentionCase("smoke", 2, 4096, 8, 8, 256, 256, causal=True),
        AttentionCase("smoke", 1, 8192, 16, 16, 128, 128, causal=True, window=1024),
        AttentionCase("smoke", 4, 1024, 16, 16, 64, 64, bias_batch=1),
        AttentionCase("smoke", 4, 2048, 16, 16, 128, 128, causal=True, dropout_p=0.1),
        packed(AttentionCase("smoke", 1, 1, 16, 16, 128, 128, causal=True), 16384),
        NormCase("smoke", 4096, 16384, "bf16", compiled=False),
        NormCase("smoke", 4096, 16384, "bf16", rms=True, compiled=False),
    ),
    "cpu": (
        AttentionCase("smoke", 1, 512, 8, 8, 64, 64, causal=True, dtype="fp32"),
        AttentionCase("smoke", 1, 1024, 8, 8, 64, 64, causal=True, dtype="fp32"),
        AttentionCase("smoke", 1, 512, 16, 4, 64, 64, causal=True, dtype="fp32"),
        AttentionCase("smoke", 1, 512, 8, 8, 128, 128, dtype="bf16"),
        AttentionCase("smoke", 1, 512, 4, 4, 256, 256, causal=True, dtype="fp32"),
        AttentionCase("smoke", 1, 1024, 4, 4, 64, 64, causal=True, window=256, dtype="fp32"),
        AttentionCase("smoke", 1, 512, 8, 8, 64, 64, bias_batch=1, dtype="fp32"),
        packed(AttentionCase("smoke", 1, 1, 4, 4, 64, 64, causal=True, dtype="fp32"), 1024),
        NormCase("smoke", 4096, 1024, "fp32", compiled=False),
        NormCase("smoke", 4096, 1024, "fp32", rms=True, compiled=False),
    ),
}


def suite(name: str, device: str, quick: bool = False) -> tuple[Case, ...]:
    """The cases of suite ``name`` on ``device`` ("cuda" or "cpu")."""
    attention: tuple[Case, ...] = ATTENTION_CASES if device == "cuda" else CPU_ATTENTION_CASES
    norms: tuple[Case, ...] = NORM_CASES if device == "cuda" else CPU_NORM_CASES
    decoding: tuple[Case, ...] = CPU_DECODING_CASES
    if device == "cuda":
        decoding = (*DECODING_CASES, *DECODING_BACKWARD_CASES)
    blocks: tuple[Case, ...] = BLOCK_CASES if device == "cuda" else ()
    if quick:
        decoding = (*decoding[:3], *decoding[len(DECODING_CASES) :][:1])
        blocks = tuple(case for case in blocks if isinstance(case, BlockCase) and case.width < 4096)
        attention = tuple(case for case in attention if isinstance(case, AttentionCase) and _is_quick(case))
        norms = tuple(case for case in norms if isinstance(case, NormCase) and case.columns in (1024, 4096, 16384))
    chosen = {"attention": attention, "layer_norm": norms, "decoding": decoding, "block": blocks}
    return sum(chosen.values(), ()) if name == "all" else chosen[name]


def _is_quick(case: AttentionCase) -> bool:
    if case.table == "main":
        return case.seqlen in (1024, 8192)
    if case.table == "cpu":
        return case.seqlen <= 1024
    return case.table not in ("grouped", "fp32") and case.causal and case.dtype == "bf16"
