"""The kinds of benchmark cases: every case is data, with its amount of work and the bars that it must reach.

``attention_cases`` and ``suites`` list the cases.

A *bar* is the speed that one of this library's backends must reach on a case, as a ratio over a peer in the same run or
as an absolute rate. A bar over cuDNN is the speed of the fastest public kernel over PyTorch's cuDNN backward, measured
on one H100 80GB HBM3 with torch 2.11 and cuDNN 9.19. A *goal* is a bar that may be missed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

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
SHORT = "flashbwd short"
REFERENCE = "flashbwd reference"
NORM = "flashbwd"
FLASH = "torch flash"
EFFICIENT = "torch efficient"
CUDNN = "torch cuDNN"
CUDNN_HEADS_FIRST = "torch cuDNN, heads first"  # inputs stored as (B, H, S, D) instead of (B, S, H, D)
FLEX = "flex"
FLEX_TUNED = "flex autotuned"
OURS_FLEX = "flashbwd flex"
PLAIN = "flashbwd plain"  # attention_backward with the same mask given as arguments
MASKS = ("causal", "documents", "prefix", "window")  # of FlexAttention
RELATIVE_BIAS = "relative bias"  # a captured table, by query head and distance
TRAINED_BIAS = "trained relative bias"  # the same, with a gradient
SOFTCAP = 30.0
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
HOST_BAR = 1.2  # largest host time of a backward over that of PyTorch's for the same work
DETERMINISTIC = " deterministic"  # suffix of a peer's name


@dataclass(frozen=True)
class Bar:
    """``ours`` must run at ``at_least`` times the speed of ``over``.

    ``over`` is the name of a peer, ``ANY_PEER`` (the fastest peer that does not belong to this library), or the unit of
    an absolute rate, "TFLOP/s" or "GB/s".
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
        """Number of visible (query, key) pairs per head. By convention, a causal mask counts as half of the square."""
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
    def moved_bytes(self) -> int:
        """Bytes that every implementation must move, except the LSE: inputs and gradients, each once."""
        size = DTYPES[self.dtype].itemsize
        tokens = sum(self.lengths) if self.lengths else self.batch * self.seqlen
        gradients = tokens * (self.heads * self.head_dim + self.heads_kv * (self.head_dim + self.head_dim_v))
        return self.input_bytes + (gradients + self.bias_elements) * size

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
        """Bytes that every implementation must move: it reads x and dz and writes dx.

        With dropout, it reads h, dz and the gradient of h from the residual connection, and writes dx and the gradient
        of the residual.
        """
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
        """Bytes of the keys and values, which are read, and for a backward of their gradients, which are written."""
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


# Minimum slot length of block cases: the clock of a card at its power limit takes a few tenths of a second to settle.
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
        """Floating-point operations of all matrix products.

        Each weight matrix has three products: the forward, the gradient of the input and the gradient of the weight.
        Attention has seven products over half of the pairs.
        """
        tokens = self.batch * self.seqlen
        width_kv = self.width // self.heads * self.heads_kv
        products = {"gpt": 2, "llama": 3}[self.shape]
        weights = self.width * (2 * self.width + 2 * width_kv + products * self.hidden)
        return 6.0 * tokens * weights + 7.0 * tokens * self.seqlen * self.width

    @property
    def input_bytes(self) -> int:
        return 2 * self.batch * self.seqlen * self.width * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FlexCase:
    """The backward of one FlexAttention. ``mask`` is one of ``MASKS``; "documents" is causal within each document."""

    table: str
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    mask: str
    score: str = ""  # "", "softcap", "ALiBi", RELATIVE_BIAS or TRAINED_BIAS
    documents: int = 1
    window: int = 1024
    dtype: str = "bf16"
    deterministic: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    tuned: bool = False  # also measure PyTorch's autotuned kernels, which takes long
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads}:{self.heads_kv}"
        mask = {
            "causal": "causal",
            "documents": f"{self.documents} documents",
            "prefix": f"prefix {self.seqlen // 4}",
            "window": f"window {self.window}",
        }[self.mask]
        score = f" {self.score}" if self.score else ""
        return f"flex {self.dtype} B{self.batch} S{self.seqlen} {heads} D{self.head_dim} {mask}{score}"

    @property
    def unit(self) -> str:
        return "TFLOP/s"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the documents of every sequence: random, but the same in every run."""
        cuts = sorted(random.Random(self.seqlen).sample(range(1, self.seqlen), self.documents - 1))
        return tuple(b - a for a, b in zip((0, *cuts), (*cuts, self.seqlen), strict=True))

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs per head, over all sequences."""
        s = self.seqlen
        visible = s * (s + 1) // 2
        if self.mask == "documents":
            visible = sum(n * (n + 1) // 2 for n in self.lengths)
        elif self.mask == "prefix":  # the queries of the prefix also see the later keys of the prefix
            prefix = s // 4
            visible += prefix * (prefix - 1) // 2
        elif self.mask == "window":
            w = min(self.window, s)
            visible = w * (w + 1) // 2 + (s - w) * w
        return self.batch * visible

    @property
    def work(self) -> float:
        return 10.0 * self.heads * self.pairs * self.head_dim

    @property
    def input_bytes(self) -> int:
        return self.dense.input_bytes

    @property
    def dense(self) -> AttentionCase:
        """The attention case with the same inputs, and with the same mask if it is causal or a window."""
        return AttentionCase(
            self.table,
            self.batch,
            self.seqlen,
            self.heads,
            self.heads_kv,
            self.head_dim,
            self.head_dim,
            causal=self.mask in ("causal", "window"),
            window=self.window if self.mask == "window" else None,
            dtype=self.dtype,
            softcap=SOFTCAP if self.score == "softcap" else 0.0,
            alibi=self.score == "ALiBi",
        )


Case = AttentionCase | NormCase | DecodingCase | BlockCase | FlexCase


def long_tailed_lengths(total: int, seed: int = 0, typical: int = 512, longest: int = 8192) -> tuple[int, ...]:
    """Return lengths that sum to ``total``, log-normal around ``typical``: many short and a few very long ones."""
    law = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = round(typical * math.exp(law.gauss(0.0, 1.2)))
        lengths.append(min(max(drawn, 16), longest, left))
    return tuple(lengths)


def packed(case: AttentionCase, total: int) -> AttentionCase:
    """Return ``case`` with packed sequences of long-tailed lengths, ``total`` tokens in all."""
    lengths = long_tailed_lengths(total)
    return replace(case, batch=len(lengths), seqlen=max(lengths), lengths=lengths)
