"""Random attention-backward calls.

A random generator draws a call from its number, so the number or the printed description reproduces the call.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKEND_DTYPES = {
    "short": ("bf16", "fp16"),
    "sm90": ("bf16", "fp16"),
    "sm80": ("bf16", "fp16", "fp32"),
    "reference": ("fp32", "bf16"),
}
MOST_SCORES = 6 << 20  # scores per call; the reference keeps a dozen float64 matrices of this size
MOST_DROPPED = 400_000  # scores per call with dropout, whose mask is drawn on the host
MOST_ELEMENTS = 8 << 20  # elements of queries and keys, summed over query heads
HEAD_DIMS = (1, 16, 32, 40, 48, 64, 64, 72, 80, 96, 104, 128, 128, 160, 192, 200, 256, 288, 320, 512)
HEAD_DIMS_OF_SHORT = (8, 16, 32, 32, 40, 48, 64, 64, 72, 80, 96)
CAUSAL: tuple[bool | str, ...] = (False, True, "top_left")
EDGES = (0, 1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 191, 200, 255, 257, 300)


@dataclass(frozen=True)
class Call:
    """Arguments of one call. Lengths are given per sequence; in a dense call they are all equal."""

    number: int
    dtype: str
    packed: bool
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    used_k: tuple[int, ...] | None
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool | str
    window: tuple[int, int]
    softcap: float
    bias: str | None  # the dimensions among b, h, q, k in which the bias does not broadcast
    bias_float32: bool
    hides_rows: bool
    alibi: bool
    sink: bool
    dlse: bool
    dropout: str | None
    deterministic: bool
    wide_dq: bool
    interleaved: bool  # q, k and v are views of one buffer if their shapes allow it
    key_mask: bool  # dense calls only; k and v of hidden keys are NaN
    beside: str  # concurrent work on a second stream: "nothing", "products" or "calls"

    @property
    def features(self) -> list[str]:
        names = ["packed", "softcap", "bias", "key_mask", "alibi", "sink", "dlse", "dropout", "deterministic"]
        names += ["wide_dq"]
        found = [name for name in names if getattr(self, name)]
        found += ["causal"] if self.causal else []
        found += ["window"] if self.window != (-1, -1) else []
        found += ["grouped heads"] if self.heads != self.heads_kv else []
        found += ["seqused_k"] if self.used_k else []
        found += [f"beside {self.beside}"] if self.beside != "nothing" else []
        return found or ["plain"]

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def draw(number: int, backend: str) -> Call:
    """Draw the call with this number for a backend."""
    rng = random.Random(f"{backend} {number}")

    def one_in(n: int) -> bool:
        return rng.randrange(n) == 0

    dropout = rng.choice(["flash", "efficient32", "efficient64"]) if one_in(12) else None
    kinds = ["small", "heads"] if backend == "short" else ["small", "small", "heads", "unseen", "unseen", "long"]
    kind = rng.choice(kinds)
    batch = rng.choice([1, 1, 2, 3])
    if kind == "small":
        heads, longest = rng.choice([1, 2, 3, 6, 8]), 300
    elif kind == "heads":
        heads, longest = rng.choice([33, 66, 132, 264]), 129
    elif kind == "unseen":
        heads, longest = rng.choice([8, 34, 66, 132, 180]), 200
    else:
        heads, longest = rng.choice([1, 2, 4]), 1500
    if backend == "short":
        longest = min(longest, 128)
    group = rng.choice([g for g in (1, 1, 1, 2, 4, 8) if heads % g == 0])
    packed = one_in(3)
    most = MOST_DROPPED if dropout else MOST_SCORES

    def length(limit: int) -> int:
        return rng.choice([n for n in EDGES if n <= limit]) if one_in(2) else rng.randint(1, limit)

    def lengths() -> tuple[list[int], list[int]]:
        if kind == "unseen":
            q = [rng.choice([1, 17, 64, 65, 128, 200]) for _ in range(batch)]
            k = [rng.choice([129, 256, 300, 520, 900]) for _ in range(batch)]
        else:
            q = [length(longest) for _ in range(batch)]
            k = list(q) if one_in(3) else [length(longest) for _ in range(batch)]
        return (q, k) if packed else (q[:1] * batch, k[:1] * batch)

    head_dims = HEAD_DIMS_OF_SHORT if backend == "short" else HEAD_DIMS
    head_dim = rng.choice(head_dims) if not one_in(6) else rng.randint(1, 256)
    head_dim_v = head_dim if not one_in(5) else rng.choice(head_dims)
    q, k = lengths()
    while (
        sum(a * b for a, b in zip(q, k, strict=True)) * heads > most
        or (sum(q) + sum(k)) * heads * max(head_dim, head_dim_v) > MOST_ELEMENTS
    ):
        q, k = [n // 2 for n in q], [n // 2 for n in k]
    causal = rng.choice(CAUSAL)
    window = (rng.choice([-1, 0, 3, 64, 100, 127]), rng.choice([-1, 0, 5, 20])) if one_in(2) else (-1, -1)
    if kind == "unseen":
        masks_of_few: list[tuple[bool | str, tuple[int, int]]] = [("top_left", (-1, -1)), (False, (3, 20))]
        causal, window = rng.choice([*masks_of_few, (True, (rng.choice([0, 64, 100]), -1))])
    softcap = rng.choice([1.0, 20.0]) if one_in(8) else 0.0
    bias = "".join(letter for letter in "bhqk" if not one_in(4)) if one_in(2) else None
    used = tuple(rng.randint(0, n) for n in k) if one_in(8) else None
    return Call(
        number, rng.choice(BACKEND_DTYPES[backend]), packed, tuple(q), tuple(k), used, heads, heads // group, head_dim,
        head_dim_v, causal, window, softcap, bias, one_in(5), one_in(6), one_in(8), one_in(6), one_in(4), dropout,
        one_in(3), one_in(6), one_in(4), not packed and one_in(4),
        rng.choice(["nothing", "nothing", "nothing", "products", "calls"]),
    )  # fmt: skip
