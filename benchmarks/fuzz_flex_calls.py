"""Random FlexAttention-backward calls.

A random generator draws a call from its number, so the number or the printed description reproduces the call.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

MODS = 400  # different generated score_mods; every other one trains the tensors that it captures
SAME_KERNEL = 16  # consecutive calls that a worker computes with the same generated kernel, which takes seconds to make
MOST_SCORES = {
    "flex": 2 << 20,
    "flex_sm80": 2 << 20,
    "flex_reference": 1 << 18,
}  # scores per call; the oracle keeps dozens of such matrices
MOST_ELEMENTS = 4 << 20  # elements of queries and keys, summed over query heads
EDGES = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 300)
DTYPES = {"flex_sm80": ["bf16", "fp16", "fp32"]}  # others: bf16 and fp16
HEAD_DIMS = {
    64: (8, 16, 32, 40, 48, 64, 64, 64),
    128: (72, 80, 96, 104, 120, 128, 128, 128),
    192: (136, 144, 160, 176, 192, 192),
    256: (200, 208, 224, 240, 256, 256),
}
BLOCKS = (64, 128, 128, 256)
RARE_BLOCKS = (32, 96, 192)
LAYOUTS = ("heads first", "rows first", "rows first", "padded")  # order of the dimensions in memory
SCORES = ("none", "softcap", "alibi", "pair", "generated", "generated", "generated")
TRAINED = {"alibi": 4, "pair": 2}  # one in so many has a captured tensor that gets a gradient
# The first five masks have random block lists. The blocks of the next three follow from mask_mod.
LISTS = ("full blocks", "blocks", "empty rows", "empty columns", "one block")
FROM_PAIRS = ("causal", "window", "documents")
MASKS = ("none", *LISTS, *FROM_PAIRS, "all blocks", "all partial", "nothing")
PAIRS = ("table", "hash", "by head", "causal", "window", "documents", "nothing")  # what mask_mod computes


@dataclass(frozen=True)
class Call:
    """Arguments of one call."""

    number: int
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    length_q: int
    length_k: int
    head_dim: int
    head_dim_v: int
    scale: float | None
    score: str
    mod: int  # number of the generated score_mod
    trains: bool  # captured tensors of score_mod get gradients
    mask: str
    pairs: str
    block_q: int
    block_k: int
    lists_by_batch: bool
    lists_by_head: bool
    poisoned: bool  # keys and queries that no block shows are NaN
    layouts: tuple[str, ...]  # of q, k, v, dout and out
    dout: bool
    dlse: bool
    deterministic: bool
    broadcast: bool  # keys and values have a batch of one
    beside: str  # concurrent work on a second stream: "nothing", "products" or "calls"
    without_bits: bool  # the kernel evaluates mask_mod, as if its bits needed too much memory

    @property
    def features(self) -> list[str]:
        found = [f"mask {self.mask}", f"score {self.score}"]
        found += ["captured gradients"] if self.trains else []
        found += ["grouped heads"] if self.heads != self.heads_kv else []
        found += ["lists by batch or head"] if self.lists_by_batch or self.lists_by_head else []
        found += ["unequal blocks"] if self.block_q != self.block_k else []
        found += ["poisoned"] if self.poisoned else []
        found += ["broadcast"] if self.broadcast else []
        found += ["dlse"] if self.dlse else []
        found += [] if self.dout else ["only dlse"]
        found += ["deterministic"] if self.deterministic else []
        found += [f"beside {self.beside}"] if self.beside != "nothing" else []
        found += ["without bits"] if self.without_bits else []
        return found

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def draw(number: int, backend: str) -> Call:
    """Draw the call with this number. ``backend`` is "flex", "flex_sm80" or "flex_reference"."""
    rng = random.Random(f"{backend} {number}")
    kernel = random.Random(f"{backend} kernel {number // SAME_KERNEL}")
    dtype = kernel.choice(DTYPES.get(backend, ["bf16", "fp16"]))
    tile, mod = kernel.choice([64, 64, 128, 128, 192, 256]), kernel.randrange(MODS)

    def one_in(n: int) -> bool:
        return rng.randrange(n) == 0

    batch, heads, group, length_q, length_k = _sizes(rng)
    head_dim, head_dim_v = _head_dims(rng, tile)
    while (
        batch * heads * length_q * length_k > MOST_SCORES[backend]
        or batch * heads * (length_q + length_k) * max(head_dim, head_dim_v) > MOST_ELEMENTS
    ):
        length_q, length_k = max(length_q * 2 // 3, 1), max(length_k * 2 // 3, 1)
    score = rng.choice(SCORES)
    trains = mod % 2 == 0 if score == "generated" else score in TRAINED and one_in(TRAINED[score])
    mask = "none" if score == "pair" and one_in(2) else rng.choice(MASKS)
    block_q = rng.choice(BLOCKS) if not one_in(8) else rng.choice(RARE_BLOCKS)
    block_k = block_q if not one_in(5) else rng.choice(BLOCKS)
    layouts = tuple(rng.choice(LAYOUTS) for _ in range(5))
    dout = not one_in(30)
    poisoned = mask in (*LISTS, "nothing") and one_in(2)
    return Call(
        number, dtype, batch, heads, heads // group, length_q, length_k, head_dim, head_dim_v,
        rng.choice([None, None, 0.05, 0.2]), score, mod, trains, mask,
        mask if mask in FROM_PAIRS else rng.choice(PAIRS), block_q, block_k, one_in(3), one_in(3),
        poisoned, layouts, dout, not dout or one_in(4),
        one_in(3) and (not trains or (score == "pair" and mask == "none")), batch > 1 and not poisoned and one_in(4),
        rng.choice(["nothing", "nothing", "nothing", "products", "calls"]), mask != "none" and one_in(24),
    )  # fmt: skip


def _sizes(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Draw the batch size, the query heads, the query heads per KV head and both lengths."""
    kind = rng.choice(["small", "small", "heads", "long", "long"])
    heads, longest = rng.choice([1, 2, 3, 4, 6, 8]), 400
    if kind == "heads":
        heads, longest = rng.choice([33, 48, 66, 132]), 200
    elif kind == "long":
        heads, longest = rng.choice([1, 2, 4]), 1500

    def length() -> int:
        return rng.choice([n for n in EDGES if n <= longest]) if rng.randrange(3) == 0 else rng.randint(1, longest)

    group = rng.choice([g for g in (1, 1, 2, 3, 4, 8) if heads % g == 0])
    length_q = length()
    return rng.choice([1, 1, 2, 3]), heads, group, length_q, length_q if rng.randrange(2) else length()


def _head_dims(rng: random.Random, tile: int) -> tuple[int, int]:
    """Draw head dimensions for one of the kernel's tiles. TMA needs multiples of 8, so others are rare."""
    least = 1 if tile == 64 else 65 if tile == 128 else tile - 63
    large = rng.choice(HEAD_DIMS[tile]) if rng.randrange(12) else rng.randint(least, tile)
    if rng.randrange(4):
        return large, large
    other = rng.choice([n for dims in HEAD_DIMS.values() for n in dims if n <= tile])
    return (large, other) if rng.randrange(2) else (other, large)
