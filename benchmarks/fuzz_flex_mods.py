"""Random score_mods for the fuzzer: text, captured tensors, and the function that a call gets.

Generated expressions are smooth in the score, and their conditions depend on indices only. So a rounding of the score
never selects another branch. Scores, slopes and curvatures are bounded, as ``_is_tame`` checks.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_flex_calls import Call
from torch import Tensor

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64, "bool": torch.bool,
    "wide": torch.int64,
}  # fmt: skip
WIDE = 2**33 + 5  # of "wide": a 0-d integer that 32 bits do not hold
FLOATS = ("fp32", "fp32", "bf16", "fp16")
SHIFT = 2048  # more than any length: i - j + SHIFT is not negative, and the same expression serves all lengths
INFINITY = float("inf")

# Shape of a table and the index of an element. Letters are sizes of the call.
LOOKUPS: tuple[tuple[tuple[str | int, ...], str], ...] = (
    (("h",), "h"), (("b", "h"), "b, h"), (("h", 2 * SHIFT), f"h, i - j + {SHIFT}"), ((61,), "(i - j) % 61"),
    (("j",), "j"), (("i",), "i"), (("i", "j"), "i, j"), (("b", "h", "i", "j"), "b, h, i, j"), ((1,), "0"),
    ((61,), "-1 - j % 61"), (("h", 32), "h, {int}[(i - j) % 50]"), ((32, "h"), "{int}[j % 50], h"),
)  # fmt: skip
UNARY = (
    "torch.tanh({x})", "(2 * torch.sigmoid({x}))", "torch.sin({x})", "torch.cos({x})", "torch.atan({x})",
    "torch.asinh({x})", "torch.erf({x} * 0.5)", "torch.erfc({x} * 0.5)", "F.silu({x})", "F.gelu({x})", "(-{x})",
    "torch.log1p({x} * {x})", "torch.sqrt(1 + {x} * {x})", "torch.rsqrt(1 + {x} * {x})", "(0.5 * {x})",
    "torch.reciprocal(1 + {x} * {x})", "torch.exp(-{x} * {x})", "torch.exp2(torch.tanh({x}))", "(1.3 - {x})",
    "torch.expm1(torch.sin({x}))", "(torch.tanh({x}) ** 3)", "(torch.sin({x}) ** 2)", "torch.logaddexp({x}, -{x})",
    "torch.log(2 + torch.cos({x}))", "torch.sinh(torch.tanh({x}))", "torch.cosh(torch.sin({x}))",
    "({x} / (1 + {x}.abs()))", "torch.acos(torch.tanh({x}) * 0.7)", "torch.asin(torch.sin({x}) * 0.7)",
    "torch.atanh(torch.tanh({x}) * 0.5)", "torch.tan(0.5 * torch.tanh({x}))", "torch.acosh(1.5 + {x} * {x})",
    "{x}.clamp(-30, 30)", "torch.maximum({x}, {x} - 1)", "torch.minimum({x} + 2, {x})", "torch.relu({x} + 40)",
)  # fmt: skip
BINARY = (
    "({x} + {y})", "({x} + {y})", "({x} - {y})", "(0.3 * {x} * {y})", "({x} / (1.5 + {y} * {y}))",
    "torch.where({c}, {x}, {y})", "torch.where({c}, {x}, {y})", "torch.add({x}, {y}, alpha=0.3)",
    "torch.hypot({x}, 2 + torch.sin({y}))", "torch.logaddexp({x}, {y})", "torch.atan2({x}, 2 + torch.tanh({y}))",
    "{x}.masked_fill({c}, 0.25)",
)  # fmt: skip
WITH_TABLE = ("({x} + {t})", "({x} + {t})", "({x} * (1 + 0.3 * {t}.float()))", "torch.where({c}, {x}, {t})")
OF_INDICES = (
    "torch.sin(0.05 * (i - j))", "torch.tanh((i - j) / 100)", "(i % 7 - 3) * 0.1", "0.25 * b", "0.1 * (h % 5)",
    "torch.log1p((i - j).abs().float()) * 0.2", "torch.exp2(-(h % 8).float())", "(j // 64 - i // 64) * 0.05",
)  # fmt: skip
CONDITIONS = (
    "i > j", "(i >= j - 5)", "((i - j).abs() < 40)", "h % 2 == 0", "(i + 3 * j) % 5 < 2", "b == 0",
    "i // 64 != j // 32", "({int}[i % 50] == {int}[j % 50])", "{bool}[(i + j) % 50]", "((i % 2 == 0) | (j > 10))",
    "torch.logical_and(i > 3, j % 3 > 0)", "(i * {wide} + j) % 7 < 3", "i - j < {wide} - 8589934592", "j < {wide}",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A captured tensor. Letters in its shape are sizes of the call; integers are 0 to 31, or ``WIDE``."""

    name: str
    shape: tuple[str | int, ...]
    dtype: str
    trained: bool = False

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def values(self, sizes: dict[str, int], generator: torch.Generator, device: torch.device) -> Tensor:
        shape = [sizes[n] if isinstance(n, str) else n for n in self.shape]
        if self.dtype == "wide":
            return torch.full(shape, WIDE, device=device)
        if self.dtype == "int64":
            return torch.randint(0, 32, shape, device=device, generator=generator)
        values = torch.randn(shape, device=device, generator=generator) * 0.5
        return values > 0 if self.dtype == "bool" else values.to(DTYPES[self.dtype])


@dataclass(frozen=True)
class ScoreMod:
    """The text of a score_mod in s, b, h, i and j, and the tensors that it captures."""

    text: str
    tables: tuple[Table, ...]

    def function(self, tensors: dict[str, Any]) -> Callable[..., Tensor]:
        """Return the function that captures these tensors as global variables of the same names."""
        return eval(_code(self.text), {"torch": torch, "F": torch.nn.functional, "inf": INFINITY, **tensors})


@functools.lru_cache(maxsize=512)
def _code(text: str) -> Any:
    return compile(f"lambda s, b, h, i, j: {text}", "<score_mod>", "eval")


class _Writer:
    """Writes one random expression."""

    def __init__(self, rng: random.Random, trains: bool) -> None:
        self.rng, self.trains = rng, trains
        self.tables: dict[str, Table] = {}

    def _table(self, shape: tuple[str | int, ...], dtype: str) -> str:
        trained = self.trains and dtype in FLOATS and not (self._trained() and self.rng.randrange(2))
        table = Table(f"t{len(self.tables)}", shape, dtype, trained)
        self.tables[table.name] = table
        return table.name

    def _trained(self) -> bool:
        return any(table.trained for table in self.tables.values())

    def _with_whole_numbers(self, text: str) -> str:
        for dtype, shape in (("int64", (50,)), ("bool", (50,)), ("wide", ())):
            word = "{" + dtype.removesuffix("64") + "}"
            if word in text:
                known = [t.name for t in self.tables.values() if t.dtype == dtype]
                text = text.replace(word, known[0] if known else self._table(shape, dtype))
        return text

    def _lookup(self) -> str:
        shape, index = self.rng.choice(LOOKUPS)
        index = self._with_whole_numbers(index)
        return f"{self._table(shape, self.rng.choice(FLOATS))}[{index}]"

    def _condition(self) -> str:
        return self._with_whole_numbers(self.rng.choice(CONDITIONS))

    def write(self) -> str:
        """Apply two to five operators to the score, one after the other."""
        pool = ["s", "s", f"({self.rng.choice(OF_INDICES)})"]
        for step in range(self.rng.randint(2, 5)):
            templates = WITH_TABLE if step == 0 and self.trains else self.rng.choice([UNARY, BINARY, WITH_TABLE])
            template = self.rng.choice(templates)
            x, y = pool[-1] if step else "s", self.rng.choice(pool)
            lookup = self._lookup() if "{t}" in template else ""
            condition = self._condition() if "{c}" in template else ""
            pool.append(template.format(x=x, y=y, t=lookup, c=condition))
        if self.rng.randrange(12) == 0:
            return f"torch.where({self._condition()}, {pool[-1]}, -inf)"
        return pool[-1]


def _is_tame(mod: ScoreMod) -> bool:
    """Whether score, slope and curvature are moderate, and the gradient of each trained tensor is not zero."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"b": 3, "h": 8, "i": 100, "j": 100}
    tensors = {t.name: t.values(sizes, generator, torch.device("cpu")) for t in mod.tables}
    trained = [tensors[t.name].requires_grad_() for t in mod.tables if t.trained]
    s = torch.linspace(-6, 6, 241, dtype=torch.float64).repeat(16).requires_grad_()
    index = [torch.randint(0, n, s.shape, generator=generator) for n in sizes.values()]
    t = mod.function(tensors)(s, *index)
    slope, *of_trained = torch.autograd.grad(t.sum(), [s, *trained], create_graph=True, allow_unused=True)
    if any(found is None or not found.any() for found in of_trained) or not slope.requires_grad:
        return False
    (curvature,) = torch.autograd.grad(slope.sum(), s, allow_unused=True)
    size = t.masked_fill(t == -INFINITY, 0.0).abs().max()
    bent = 0.0 if curvature is None else float(curvature.abs().max())
    # Most pairs have a slope, so that dq and dk are not zero.
    return bool(size < 12 and slope.abs().mean() > 0.1 and slope.abs().max() < 4 and bent < 8)


@functools.lru_cache(maxsize=256)
def generated(number: int) -> ScoreMod:
    """Return the generated score_mod with this number. Those with even numbers have trained tensors."""
    rng = random.Random(f"score_mod {number}")
    while True:
        writer = _Writer(rng, number % 2 == 0)
        text = writer.write()
        mod = ScoreMod(text, tuple(writer.tables.values()))
        if len(text) < 800 and "s" in text and len(mod.tables) <= 8 and _is_tame(mod):
            return mod


# Shape and index of a bias that has an element for each pair, which the kernels of every build add without a mask.
BIASES: tuple[tuple[tuple[str | int, ...], str], ...] = (
    (("i", "j"), "i, j"), (("h", "i", "j"), "h, i, j"), (("b", "i", "j"), "b, i, j"), ((1, "i", "j"), "0, i, j"),
    (("b", "h", "i", "j"), "b, h, i, j"), (("j", "h", "i"), "j, h, i"), ((3, "h", "i", "j"), "1, h, i, j"),
)  # fmt: skip


def _with_bias_of_a_pair(call: Call, rng: random.Random) -> ScoreMod:
    shape, index = rng.choice(BIASES)
    bias = Table("t0", shape, rng.choice([call.dtype, "fp32"]), call.trains)
    score = rng.choice(["s", "s", "5.0 * torch.tanh(s / 5.0)"])
    if rng.randrange(3):
        return ScoreMod(f"{score} + t0[{index}]", (bias,))
    distance = f"(i + {call.length_k - call.length_q} - j).abs()"
    return ScoreMod(f"{score} - t1[h] * {distance} + t0[{index}]", (bias, Table("t1", ("h",), "fp32")))


def score_mod_of(call: Call) -> ScoreMod | None:
    """Return the score_mod of a call."""
    rng = random.Random(call.number)
    if call.score == "none":
        return None
    if call.score == "generated":
        return generated(call.mod)
    if call.score == "softcap":
        cap = rng.choice([1.0, 8.0, 20.0])
        return ScoreMod(f"{cap} * torch.tanh(s / {cap})", ())
    if call.score == "pair":
        return _with_bias_of_a_pair(call, rng)
    # The kernels of every build take the second offset. Generated ones take any, but an offset is part of their source.
    offset = 0 if call.trains or rng.randrange(6) == 0 else call.length_k - call.length_q
    shape, index = rng.choice([(("h",), "h"), (("b", "h"), "b, h")])
    score = rng.choice(["s", "s", "5.0 * torch.tanh(s / 5.0)"])
    changes = [f"- t0[{index}].abs() * (i + {offset} - j).abs()", f"- t0[{index}] * (i + {offset} - j).abs()"]
    if call.mask == "causal":  # hides later keys
        changes.append(f"+ t0[{index}] * (j - i - {offset})")
    return ScoreMod(f"{score} {rng.choice(changes)}", (Table("t0", shape, "fp32", call.trains),))
