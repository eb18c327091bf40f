"""The emitted derivative of a score_mod, compiled for the host, against PyTorch's autograd in float64."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from kit.emission import HostMods, compiler
from kit.expressions import NAMES
from torch import Tensor

from flashbwd.mods import derivative
from flashbwd.mods.captures import CannotEmitError, Captures, Slots
from flashbwd.mods.trace import trace

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

# Expressions of {x} and {y} for each operator with a rule. Both get a gradient. The inputs contain values at ties and
# bounds.
OPERATORS: dict[str, list[str]] = {
    **{n: [f"torch.{n}({{x}})"] for n in ("neg", "abs", "exp", "exp2", "expm1", "sin", "cos", "tan", "atan")},
    **{n: [f"torch.{n}({{x}})"] for n in ("sinh", "cosh", "tanh", "asinh", "erf", "erfc", "sigmoid", "relu", "floor")},
    **{n: [f"torch.{n}({{x}})"] for n in ("ceil", "trunc", "round", "sign", "sgn", "clone", "detach")},
    **{n: [f"torch.{n}({{x}}.abs() + 0.1)"] for n in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")},
    **{n: [f"torch.{n}({{x}} / 4)"] for n in ("asin", "acos", "atanh")},
    "acosh": ["torch.acosh({x}.abs() + 1.1)"],
    "hypot": ["torch.hypot({x}, {y} + 4)"],
    "logaddexp": ["torch.logaddexp({x}, {y})"],
    "silu": ["F.silu({x})"],
    "gelu": ["F.gelu({x})"],
    "add": ["({x} + {y})", "torch.add({x}, {y}, alpha=0.3)"],
    "sub": ["({x} - {y})", "torch.sub({x}, {y}, alpha=3)"],
    "rsub": ["torch.rsub({x}, 2)", "(1.5 - {x})", "torch.rsub({x}, {y} * {y})"],
    "mul": ["({x} * {y})", "({x} * 0.3)"],
    "div": ["({x} / ({y}.abs() + 1))", "(2 / ({x} + 4))", "torch.div({x}, 0.3, rounding_mode='floor')"],
    "maximum": ["torch.maximum({x}, {y})", "torch.maximum({x}, {x} * 1)"],
    "minimum": ["torch.minimum({x}, {y})", "torch.minimum({x} * 1, {x})"],
    "remainder": ["({x} % 0.7)"],
    "fmod": ["torch.fmod({x}, 0.7)"],
    "pow": ["({x} ** 2)", "({x} ** 3)", "(({x}.abs() + 0.1) ** {y})", "(0.4 ** {x})", "(({x}.abs() + 1) ** -0.5)"],
    "atan2": ["torch.atan2({x}, {y} + 0.01)", "torch.atan2({x} * 0, {y} * 0)"],
    "where": ["torch.where({x} > {y}, {x} * 2, {y})", "torch.where({x} > 0, 1.5, {x})"],
    "masked_fill": ["({x} * 2).masked_fill({y} > 0.5, 0.25)"],
    "clamp": [
        "{x}.clamp(-0.5, 1)",
        "{x}.clamp(min=0.5)",
        "{x}.clamp(max=-0.5)",
        "{x}.clamp(b.double() / 8, q.double() / 2)",
        "{x}.clamp(k.double() / 4, k.double() / 4)",
    ],
    "clamp_min": ["torch.clamp_min({x}, 0.5)", "torch.clamp_min({x}, k.double() / 4)"],
    "clamp_max": ["torch.clamp_max({x}, 0.5)", "torch.clamp_max({x}, k.double() / 4)"],
    "_to_copy": ["{x}.to(torch.float64)", "({x} + ({x} * 3).to(torch.int32) * 0.5)"],
}
WITHOUT_AN_OPERATOR = {"alias", "contiguous", "view", "expand", "squeeze", "reshape", "lift_fresh"}
ALL = [text for texts in OPERATORS.values() for text in texts]

SCORES = torch.cat([torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 0.7]), torch.linspace(-2.9, 3.1, 26)])
INDICES = torch.stack([(torch.arange(len(SCORES)) * step) % 9 for step in (1, 2, 4, 5)]).int()


def function_of(text: str) -> Any:
    return eval(f"lambda s, b, h, q, k: {text}", dict(NAMES))


def in_double(text: str) -> Any:
    mod = function_of(text)
    return lambda s, b, h, q, k: mod(s.double(), b, h, q, k)


def expected(mod: Any) -> Tensor:
    """Gradients by autograd in float64, for scores that are exact in float32."""
    scores = SCORES.double().requires_grad_()
    result = mod(scores, *INDICES)
    return torch.autograd.grad(result.sum(), scores)[0] if result.requires_grad else torch.zeros_like(scores)


def compiled(folder: Path, mods: dict[str, Any]) -> HostMods:
    host = HostMods(folder)
    for name, mod in mods.items():
        host.add_gradient(name, mod)
    host.compile()
    return host


def expressions_of(operator: str) -> list[str]:
    return [text.format(x="s", y="(s * 0.5 + 0.5)") for text in OPERATORS[operator]]


def test_every_operator_with_a_rule_is_tested() -> None:
    handled = {name.removeprefix("_op_") for name in vars(derivative.Derivative) if name.startswith("_op_")}
    named = handled | set(derivative._RULES) | derivative._FLAT | derivative._PASSES
    assert named - WITHOUT_AN_OPERATOR == set(OPERATORS)
    for operator in OPERATORS:
        called = set()
        for text in expressions_of(operator):
            graph = trace("score_mod", function_of(text), True).graph
            called |= {str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function"}
        assert operator in called, operator


@pytest.fixture(scope="module")
def by_operator(tmp_path_factory: pytest.TempPathFactory) -> HostMods:
    mods = {}
    for operator in OPERATORS:
        for i, text in enumerate(expressions_of(operator)):
            mods[f"{operator}_{i}"] = function_of(text)
            mods[f"{operator}_{i}_double"] = in_double(text)
    return compiled(tmp_path_factory.mktemp("derivatives"), mods)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_derivative_of_an_operator_agrees_with_autograd(operator: str, by_operator: HostMods) -> None:
    for i, text in enumerate(expressions_of(operator)):
        want = expected(function_of(text))
        for suffix, limit in (("_double", 2e-7), ("", 2e-5)):
            got = by_operator.run(f"{operator}_{i}{suffix}", SCORES, INDICES).double()
            torch.testing.assert_close(got, want, rtol=limit, atol=limit, msg=partial("{0}: {1}".format, text))


def generated(generator: random.Random) -> tuple[str, Tensor]:
    """An expression of up to six operators whose gradients are neither huge nor lost to cancellation."""
    while True:
        pool = ["s", "s", "(k.double() / 7 - 0.5)", "(q.double() / 3)"]
        for _ in range(generator.randint(2, 6)):
            x, y = generator.choice(pool[-3:]), generator.choice(pool)
            pool.append(generator.choice(ALL).format(x=x, y=y))
        text = pool[-1]
        if len(text) > 2000 or "detach" in text:
            continue
        want = expected(function_of(text))
        if want.isfinite().all() and want.any() and want.abs().max() < 1e4:
            return text, want


def test_derivatives_of_generated_expressions_agree_with_autograd(tmp_path: Path) -> None:
    profile = settings()
    seed = 0 if profile.derandomize else random.SystemRandom().randrange(2**32)
    generator = random.Random(seed)
    cases = [generated(generator) for _ in range(profile.max_examples * 2)]
    mods = {}
    for i, (text, _) in enumerate(cases):
        mods[f"case_{i}"] = in_double(text)
    host = compiled(tmp_path, mods)
    for i, (text, want) in enumerate(cases):
        got = host.run(f"case_{i}", SCORES, INDICES).double()
        torch.testing.assert_close(
            got, want, rtol=1e-6, atol=1e-6, equal_nan=True, msg=partial("{0}: {1}".format, f"seed {seed}, {text}")
        )


def test_gradients_of_captured_tensors_agree_with_autograd(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(9, 9, generator=generator)
    factor = torch.randn((), generator=generator)
    slopes = torch.randn(9, generator=generator)

    def mod_of(table: Tensor, factor: Tensor, slopes: Tensor) -> Any:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            hidden = (s * 2).masked_fill(q > k, factor * 3)
            return torch.tanh(s * factor) * slopes[h] + table[q][-1 - k] + slopes[h] * (k - q) * 0.01 + hidden

        return mod

    captured = (table, factor, slopes)
    host = HostMods(tmp_path)
    host.add_gradient("captured", mod_of(*captured), captured)
    host.compile()
    score_gradients = host.run("captured", SCORES, INDICES)
    wide = [tensor.double().requires_grad_() for tensor in captured]
    mod, scores = mod_of(*wide), SCORES.double().requires_grad_()
    sum(mod(s, *index) for s, index in zip(scores, INDICES.T, strict=True)).backward()
    assert scores.grad is not None
    torch.testing.assert_close(score_gradients, scores.grad.float(), rtol=1e-5, atol=1e-5)
    for tensor, double in zip(captured, wide, strict=True):
        torch.testing.assert_close(tensor.grad, double.grad.float(), rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


def test_gradients_are_multiplied_by_the_gradient_of_the_result(tmp_path: Path) -> None:
    slopes = torch.linspace(1, 2, 9)
    host = HostMods(tmp_path)
    host.add_gradient("scaled", lambda s, b, h, q, k: torch.exp(s * slopes[h]) + torch.sin(s), (slopes,))
    host.compile()
    found = []
    for ds in (1.0, -2.0):
        found.append((host.run("scaled", SCORES, INDICES, ds=ds), slopes.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, -2 * one)  # type: ignore[operator]


def test_gradients_of_captured_tensors_are_added_only_if_the_caller_asks(tmp_path: Path) -> None:
    """Several warps compute the gradient of one score. Only one of them may add it to the gradient of a tensor."""
    slopes = torch.ones(9)
    host = HostMods(tmp_path)
    host.add_gradient("captured", lambda s, b, h, q, k: s * slopes[h], (slopes,))
    host.compile()
    assert host.run("captured", SCORES, INDICES, first=False).tolist() == [1.0] * len(SCORES)
    assert slopes.grad is not None and not slopes.grad.any()


def test_the_derivative_of_a_double_is_a_double(tmp_path: Path) -> None:
    """The gradient of the first product is 1e60, which is beyond the range of float32."""
    host = HostMods(tmp_path)
    host.add_gradient("far", lambda s, b, h, q, k: s.double() * 1e-60 * 1e60)
    host.compile()
    torch.testing.assert_close(host.run("far", SCORES, INDICES), torch.ones_like(SCORES))


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("F.gelu(s, approximate='tanh')", "gelu with approximate='tanh'"),
        ("s.clamp(min=s * 2)", "aten.clamp.Tensor"),
        ("torch.clamp_max(s, s * 2)", "aten.clamp_max.Tensor"),
        ("torch.fmod(s, s * 2)", "aten.fmod.Tensor"),
        ("torch.copysign(s, k)", "aten.copysign.Tensor"),
    ],
)
def test_a_derivative_without_a_rule_is_refused_by_the_name_of_its_operator(text: str, operator: str) -> None:
    score = trace("score_mod", function_of(text), True)
    message = f"score_mod calls {operator}, whose derivative has no CUDA implementation"
    with pytest.raises(CannotEmitError, match=re.escape(message)):
        derivative.emit_gradient(score, None, Slots(Captures()), [])
