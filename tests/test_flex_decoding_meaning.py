"""Emitted code and recognised modifications give the results of PyTorch's eager operators, also at extreme values.

The host compiler builds the code that the library emits, and the part of the built-in kernels that interprets the
result of the recogniser.
"""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from kit.decoding import Shape
from kit.emission import HostMods, compiler
from kit.expressions import AsOnCuda, Expression, expressions
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd
from flashbwd.mods.built_in import BuiltIn, recognise
from flashbwd.mods.captures import CannotEmitError, Captures, Slots
from flashbwd.mods.trace import trace

INF = math.inf
host_only = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


def seed_of_run() -> int:
    """0 in CI, and a new seed in each thorough run."""
    return 0 if settings().derandomize else random.SystemRandom().randrange(2**32)


# ---- the emitter ----


def differing(got: Tensor, expression: Expression) -> Tensor:
    want = expression.value
    if expression.exact:
        same = (got == want) & (got.signbit() == want.signbit())
        return ~(same | (got.isnan() & want.isnan()))
    eps = torch.finfo(expression.dtype).eps if expression.dtype.is_floating_point else 0.0
    rtol, atol = (2 * eps, eps / 2) if eps > 1e-5 else (2e-6, 1e-6)
    return ~torch.isclose(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


@host_only
@pytest.mark.timeout(1200)
def test_generated_expressions_equal_those_of_pytorch_bit_for_bit(tmp_path: Path) -> None:
    """Functions that libraries round differently, such as ``exp``, come last and have a tolerance."""
    thorough = not settings().derandomize
    seed = seed_of_run()
    wrong = []
    for part in range(5 if thorough else 1):
        host = HostMods(tmp_path)
        cases = []
        for i, (maker, made) in enumerate(expressions(seed + part, 2000 if thorough else 600)):
            for j, expression in enumerate(made):
                host.add(f"case_{i}_{j}", expression.function)
                cases.append((f"case_{i}_{j}", maker, expression))
        host.compile()
        for name, maker, expression in cases:
            bad = differing(host.run(name, maker.scores(), maker.indices()), expression)
            if bad.any():
                at = int(bad.nonzero()[0])
                wrong.append((expression.text, float(maker.scores()[at]), maker.indices()[:, at].tolist()))
    assert not wrong, (
        f"seed {seed}: {len(wrong)} wrong, the shortest {sorted(wrong, key=lambda case: len(case[0]))[:5]}"
    )


@pytest.mark.parametrize("name", ["rsub_alpha", "bessel", "lgamma"])
def test_an_operator_without_code_is_refused_by_name(name: str) -> None:
    mods = {
        "rsub_alpha": lambda s, b, h, q, k: torch.rsub(s, k, alpha=2),
        "bessel": lambda s, b, h, q, k: torch.special.i0(s),
        "lgamma": lambda s, b, h, q, k: torch.lgamma(s),
    }
    with pytest.raises(CannotEmitError, match="score_mod calls aten"):
        HostMods(Path()).add("refused", mods[name])


# ---- modifications that an earlier version computed wrongly ----

WIDE32 = torch.tensor(2**31 - 1, dtype=torch.int32)
WIDE64 = torch.tensor(2**62, dtype=torch.int64)


def score_cases(device: str = "cpu") -> dict[str, Any]:
    wide = WIDE32.to(device)
    return {
        "float bias": lambda s, b, h, q, k: s - 0.1 * (k / 64),
        "quotient cast to int": lambda s, b, h, q, k: s + 0.5 * ((k - q) / 64).int(),
        "product cast to int32": lambda s, b, h, q, k: s + 0.05 * (k * 0.125).to(torch.int32),
        "head cast to int": lambda s, b, h, q, k: s - torch.exp2(-((h + 1) / 2).int()) * (k / 8),
        "score cast to int": lambda s, b, h, q, k: s.int().float(),
        "distance cast to uint8": lambda s, b, h, q, k: s + 0.01 * (k - q).to(torch.uint8),
        "distance cast to int8": lambda s, b, h, q, k: s + 0.01 * (k - q).to(torch.int8),
        "distance cast to half": lambda s, b, h, q, k: s + (k * 9 - q).half() * 0.5,
        "score cast to bfloat16": lambda s, b, h, q, k: s.bfloat16().float(),
        "integer power of a distance": lambda s, b, h, q, k: s + 3.0 * (2 ** (q - k)),
        "integer power of the head": lambda s, b, h, q, k: s + (2 ** (-(h + 1))) * (k - q) * 0.05,
        "integer power of -1": lambda s, b, h, q, k: s + (-1) ** (q - k),
        "floor division of floats": lambda s, b, h, q, k: s + 0.01 * ((k / 10) // 0.1),
        "copysign of -0.0": lambda s, b, h, q, k: torch.copysign(s, -0.0),
        "filled integer": lambda s, b, h, q, k: s + (k - q) * torch.full((), 1.7, dtype=torch.int32),
        "no window, int32": lambda s, b, h, q, k: torch.where(k - q <= wide, s, -INF),
    }


def mask_cases(device: str = "cpu") -> dict[str, Any]:
    wide32, wide64 = WIDE32.to(device), WIDE64.to(device)
    seed = torch.tensor(2654435761, device=device)
    return {
        "no window, int32": lambda b, h, q, k: k - q <= wide32,
        "no window, int64": lambda b, h, q, k: k - q <= wide64,
        "no window, two-sided": lambda b, h, q, k: (q - k <= wide64) & (k - q < wide32),
        "hash with a seed of 64 bits": lambda b, h, q, k: ((q * seed + k * 40503) % 7 < 3) | (q == k),
        "sum of 64 bits": lambda b, h, q, k: (q + wide64) - (k + wide64) > -200,
        "length that wraps around": lambda b, h, q, k: k < wide32 + 1 + q,
        "start that wraps around": lambda b, h, q, k: k >= -2 - wide32 + q,
        "ones of integers": lambda b, h, q, k: (k >= b.new_ones(())) & (q < 7),
    }


NOT_BUILT_IN = {
    "head cast to int",
    "quotient cast to int",
    "product cast to int32",
    "score cast to int",
    "distance cast to uint8",
    "distance cast to int8",
    "distance cast to half",
    "score cast to bfloat16",
    "integer power of the head",
    "integer power of a distance",
    "integer power of -1",
    "floor division of floats",
    "copysign of -0.0",
    "ones of integers",
    "hash with a seed of 64 bits",
}
POINTS = torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(4), torch.arange(0, 512, 23)).int()
SCORES = torch.randn(len(POINTS), generator=torch.Generator().manual_seed(1)) * 3


def at_all_points(score_mod: Any, mask_mod: Any, scores: Tensor, points: Tensor) -> Tensor:
    """The scores after both functions, which PyTorch evaluates on int32 scalars, as its compiler traces them."""
    results = []
    with AsOnCuda():
        for score, point in zip(scores.unbind(), points, strict=True):
            index = point.unbind()
            value = score if score_mod is None else score_mod(score, *index).float()
            results.append(value if mask_mod is None else torch.where(mask_mod(*index), value, -INF))
    return torch.stack(results)


def recognised(score_mod: Any, mask_mod: Any) -> tuple[BuiltIn | None, Captures]:
    captures = Captures(score_mod, mask_mod)
    score = None if score_mod is None else trace("score_mod", score_mod, True)
    mask = None if mask_mod is None else trace("mask_mod", mask_mod, False)
    return recognise(score, mask, captures), captures


CASES = [(name, mod, None) for name, mod in score_cases().items()]
CASES += [(name, None, mod) for name, mod in mask_cases().items()]


@host_only
@pytest.mark.parametrize(("name", "score_mod", "mask_mod"), CASES, ids=[c[0] for c in CASES])
def test_cases_that_were_once_wrong_agree_with_pytorch(
    name: str, score_mod: Any, mask_mod: Any, tmp_path: Path
) -> None:
    host = HostMods(tmp_path)
    host.add("emitted", score_mod, mask_mod)
    found, captures = recognised(score_mod, mask_mod)
    assert (found is None) == (name in NOT_BUILT_IN)
    if found is not None:
        host.add_built_in("built_in", found, Slots(captures, "cpu"))
    host.compile()
    want = at_all_points(score_mod, mask_mod, SCORES, POINTS)
    for form in ["emitted"] if found is None else ["emitted", "built_in"]:
        torch.testing.assert_close(host.run(form, SCORES, POINTS.T), want, rtol=1e-6, atol=1e-6)


def all_blocks(mask_mod: Any) -> BlockMask:
    """List all 4 blocks of 128 keys as partial. create_block_mask would evaluate the mask on int64 indices."""
    count, blocks = torch.full((1, 1, 1), 4), torch.arange(4).view(1, 1, 1, 4)
    lists = (x.to("cuda", torch.int32) for x in (count, blocks))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(128, 128), mask_mod=mask_mod, seq_lengths=(3, 512))


GPU_CASES = [("score", name) for name in score_cases()] + [("mask", name) for name in mask_cases()]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), GPU_CASES)
def test_cases_that_were_once_wrong_agree_with_pytorch_on_a_gpu(kind: str, name: str) -> None:
    shape = Shape(batch=1, heads=4, heads_kv=4, seqlen_q=3, seqlen_k=512, head_dim=64, head_dim_v=64)
    tensors = shape.tensors(torch.float32, "cuda")
    score_mod = score_cases("cuda")[name] if kind == "score" else None
    mask_mod = mask_cases("cuda")[name] if kind == "mask" else None
    block_mask = None if mask_mod is None else all_blocks(mask_mod)
    out = flashbwd.flex_decoding(*tensors, score_mod, block_mask)
    size = (1, 4, 3, 512)
    points = torch.cartesian_prod(*(torch.arange(n) for n in size)).int()
    q, k, v = (t.cpu() for t in tensors)
    scores = ((q @ k.mT) * shape.head_dim**-0.5).flatten()
    host_score = score_cases()[name] if kind == "score" else None
    host_mask = mask_cases()[name] if kind == "mask" else None
    weights = at_all_points(host_score, host_mask, scores, points).view(size).double().softmax(-1).nan_to_num()
    torch.testing.assert_close(out.cpu().double(), weights @ v.double(), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


# ---- the recogniser ----

EXTREMES = (0, 1, -1, 5, 300, 2**29, -(2**29), 2**30 + 7, 2**31 - 1, -(2**31), -(2**31) + 1)
EXTREMES64 = (*EXTREMES, 2**31, 2**32 + 3, 2**40, -(2**40), 2**62, 2**63 - 1, -(2**63))


class Linear:
    """Random functions that resemble the recognised ones: sums, casts, comparisons, slopes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.names: dict[str, Any] = {
            "torch": torch,
            "inf": INF,
            "c32": torch.tensor(pick(EXTREMES), dtype=torch.int32),
            "c64": torch.tensor(pick(EXTREMES64)),
            "t32": torch.tensor([pick(EXTREMES) for _ in range(4)], dtype=torch.int32),
            "t64": torch.tensor([pick(EXTREMES64) for _ in range(4)]),
            "slopes": torch.tensor([0.5, -0.25, 2.0, 0.0]),
        }

    def sum(self) -> str:
        pick = self.random.choice
        text = pick(["q", "k", "k", "k", "c32", "c64", "t32[b]", "t64[h]", "t32[h]", "7", "(q + 3)"])
        for _ in range(self.random.randint(0, 3)):
            other = pick(["q", "k", "1", "5", "c32", "c64", "t32[b]", "t64[b]", "h", "2**30", "torch.tensor(4)"])
            text = pick(
                [
                    f"({text} + {other})",
                    f"({text} - {other})",
                    f"({other} - {text})",
                    f"(-({text} + b * 0))",
                    f"({text} + q * 2)",
                    f"({text} + b * 0).to(torch.{pick(['int32', 'int64', 'int16', 'float32', 'uint8', 'bool'])})",
                    f"(({text} + b * 0).abs())",
                ]
            )
        return f"({text} + b * 0)"

    def bound(self) -> str:
        return f"({self.sum()} {self.random.choice(['<', '<=', '>', '>='])} {self.sum()})"

    def mask(self) -> str:
        return " & ".join(self.bound() for _ in range(self.random.randint(1, 2)))

    def score(self) -> str:
        slope = self.random.choice(["slopes[h]", "0.5", "2", "torch.exp2(-(h + 1.0))", "2 ** (-h)", "2.0 ** -h", "h"])
        text = self.random.choice(
            [
                f"s + {slope} * {self.sum()}",
                f"s - {self.sum()} * {slope}",
                f"3 * torch.tanh(s / 3) + {self.sum()} / 8",
                f"s + {self.sum()}",
                f"s.to(torch.{self.random.choice(['float64', 'int32', 'float16'])}).float() + {self.sum()}",
            ]
        )
        return f"torch.where({self.mask()}, {text}, -inf)" if self.random.random() < 0.3 else text

    def function(self) -> tuple[str, Any, Any]:
        if self.random.random() < 0.5:
            text = self.score()
            return text, eval(f"lambda s, b, h, q, k: {text}", self.names), None
        text = self.mask()
        return text, None, eval(f"lambda b, h, q, k: {text}", self.names)


FEW = torch.tensor([[0, 0, 0, 0], [1, 3, 5, 9], [0, 1, 300, 2], [3, 2, 7, 300], [1, 0, 4, 511], [2, 2, 2, 2]]).int()
FEW_SCORES = torch.tensor([0.5, -2.0, 3.0, 100.0, 0.0, -0.25])


@host_only
def test_recognised_functions_agree_with_pytorch_for_any_captured_integer(tmp_path: Path) -> None:
    seed = seed_of_run()
    host = HostMods(tmp_path)
    found = {}
    for i in range(1200 if settings().derandomize else 6000):
        linear = Linear(seed + i)
        text, score_mod, mask_mod = linear.function()
        try:
            want = at_all_points(score_mod, mask_mod, FEW_SCORES, FEW)
            modification, captures = recognised(score_mod, mask_mod)
        except (RuntimeError, ValueError, OverflowError):  # PyTorch refuses the function
            continue
        if modification is not None:
            host.add_built_in(f"case_{i}", modification, Slots(captures, "cpu"))
            found[f"case_{i}"] = (text, linear.names, want)
    host.compile()
    assert len(found) > 50
    for name, (text, names, want) in found.items():
        got = host.run(name, FEW_SCORES, FEW.T)
        described = {n: v.tolist() for n, v in names.items() if isinstance(v, Tensor) and n in text}
        torch.testing.assert_close(
            got,
            want,
            rtol=2e-6,
            atol=2e-6,
            equal_nan=True,
            msg=partial("{0}: {1}".format, f"seed {seed}, {text}, {described}"),
        )
