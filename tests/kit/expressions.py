"""Random expressions of the operators that can be emitted, with their values from PyTorch's eager operators.

An expression is text, so a failure can be repeated. The generator applies operators one after the other to earlier
results. PyTorch evaluates each application immediately, on vectors of extreme values; an application that PyTorch
refuses is discarded. The vectors are too short for PyTorch's SIMD functions, which differ from the GPU's functions. All
constants are Python numbers, so that vectors have the same type promotion as scalars.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kit.mods import Mod

INF, NAN = float("inf"), float("nan")
NAMES: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "inf": INF, "nan": NAN}
DTYPES = (
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)

INTEGERS = [0, 1, -1, 2, 3, -7, 31, 32, 64, 127, 128, -128, 255, 256, 32767, -32768, 65536, 2**24 + 1, 10**9]
INTEGERS += [2**31 - 1, -(2**31), -(2**31) + 1, 2**30]
FLOATS = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, -0.3, 3.7, 1e-40, -1e-45, 1e-8, 1e-30]
FLOATS += [65504.0, 65520.0, -7e4, 16777217.0, 2147483648.0, -9.3e18, 1e30, -3.4028235e38, 0.99999994]
INTEGER_CONSTANTS = (0, 1, 2, 3, -1, -2, -5, 7, 100, 255, 300, 2**31 - 1, -(2**31), 2**62, -(2**62))
FLOAT_CONSTANTS = (0.0, -0.0, 0.5, 1.0, -1.0, 0.1, 2.5, -3.3, INF, -INF, NAN, 1e-45, 1e-10, 6.5e4, 1e20, 1e39)

# PyTorch's 16-bit arithmetic rounds a Python number to 16 bits only on one of CPU and GPU, so such arithmetic gets
# constants that are exact in 16 bits. Comparisons and fills always round the number.
EXACT_INTEGERS, EXACT_FLOATS = (0, 1, 2, -1, 3, 100), (0.0, -0.0, 0.5, 1.0, -2.5, INF, -INF, NAN)
_ROUND_NUMBERS = (" < ", " <= ", " > ", " >= ", " == ", " != ", "fill", "full", "clamp")

# The sign of the maximum of 0.0 and -0.0 differs between processors, so the templates add 0 to extrema.
# Placeholders: {x}, {y} for values, {i} and {f} for integer and floating-point constants, {c} for either,
# {n} for a constant that is not NaN, {d} for a dtype.
_UNARY = """
-{x};torch.abs({x});torch.floor({x});torch.ceil({x});torch.trunc({x});torch.round({x});torch.frac({x});torch.sign({x})
torch.sgn({x});torch.square({x});torch.relu({x}) + 0;torch.reciprocal({x});torch.isnan({x});torch.isinf({x})
torch.isfinite({x});torch.signbit({x});torch.logical_not({x});~{x};{x}.clone();torch.nan_to_num({x});{x}.detach()
torch.nan_to_num({x}, {f}, {f}, {f});{x}.clamp({n}, {n}) + 0;{x}.clamp(min={n}) + 0;{x}.clamp(max={n}) + 0
torch.clamp_min({x}, {n}) + 0;torch.clamp_max({x}, {n}) + 0;{x} ** 2;{x} ** 3;{x} ** 0;{x} ** 1;{x} ** -1
torch.zeros_like({x});torch.ones_like({x});torch.full_like({x}, {c});{x}.new_full((), {c}) + {x};F.relu6({x}) + 0
F.hardtanh({x}, -2, 3) + 0;F.leaky_relu({x});F.leaky_relu({x}, 0.3);F.threshold({x}, {c}, {c});torch.positive({x})
{x}.new_ones(()) * {x};{x}.new_zeros((), dtype={d}) + {x};torch.heaviside({x}, {x})
"""
_WITH_NUMBER = """
{x} + {c};{c} - {x};{x} - {c};{x} * {c};{x} / {c};{c} / {x};{x} // {c};{c} // {x};{x} % {c};{c} % {x};{x} == {c}
{x} != {c};{x} < {c};{x} <= {c};{x} > {c};{x} >= {c};torch.fmod({x}, {c});torch.copysign({x}, {c});{x} & {i};{x} | {i}
{x} ^ {i};{x} << {i};{x} >> {i};torch.bitwise_left_shift({x}, {i});torch.bitwise_right_shift({x}, {i})
torch.where({x} > {c}, {x}, {c});torch.where({x} > {c}, {c}, {x});torch.where({x} > {c}, {c}, {c})
{x}.masked_fill({x} > 0, {c});torch.div({x}, {c}, rounding_mode='floor');torch.div({x}, {c}, rounding_mode='trunc')
torch.rsub({x}, {c})
"""
_BINARY = """
{x} + {y};{x} - {y};{x} * {y};{x} / {y};torch.maximum({x}, {y}) + 0;torch.minimum({x}, {y}) + 0
torch.fmax({x}, {y}) + 0;torch.fmin({x}, {y}) + 0;torch.copysign({x}, {y});{x} & {y};{x} | {y};{x} ^ {y};{x} << {y}
{x} >> {y};{x} == {y};{x} != {y};{x} < {y};{x} <= {y};{x} > {y};{x} >= {y};torch.logical_and({x}, {y})
torch.logical_or({x}, {y});torch.logical_xor({x}, {y});torch.where({x} > 0, {x}, {y})
torch.where({x} == {y}, {c}, {y});{x}.masked_fill({y} > 0, {c});{x}.clamp({y}, {x}) + 0;{x}.clamp({x}, {y}) + 0
{x}.clamp(min={y}) + 0;torch.clamp_max({x}, {y}) + 0;{x} // {y};{x} % {y};torch.fmod({x}, {y})
torch.div({x}, {y}, rounding_mode='trunc');torch.heaviside({x}, {y});torch.div({x}, {y}, rounding_mode='floor')
torch.bitwise_right_shift({x}, {y});torch.logical_not({x}) + {y};torch.add({x}, {y}, alpha={i})
torch.sub({x}, {y}, alpha={i})
"""
_INTEGER_POWERS = "{x} ** {y};{i} ** {y};{x} ** {i}"
# Functions that libraries round differently; they are applied last, so that no later operator magnifies the difference.
_LAST = """
torch.exp({x});torch.exp2({x});torch.expm1({x});torch.log({x});torch.log2({x});torch.log10({x});torch.log1p({x})
torch.sqrt({x});torch.rsqrt({x});{x}.nan_to_num() ** 0.5;torch.sin({x});torch.cos({x});torch.tan({x});torch.asin({x})
torch.acos({x});torch.atan({x});torch.sinh({x});torch.cosh({x});torch.tanh({x});torch.asinh({x});torch.acosh({x})
torch.atanh({x});torch.erf({x});torch.erfc({x});torch.sigmoid({x});F.silu({x});F.mish({x});F.hardsigmoid({x})
F.hardswish({x});F.gelu({x}.clamp(-50, 50));F.gelu({x}, approximate='tanh');F.softplus({x});F.softplus({x}, 7, 5)
F.elu({x});F.elu({x}, 0.3);F.selu({x});torch.atan2({x}, {y});torch.hypot({x}, {y});torch.logaddexp({x}, {y})
torch.xlogy({x}, {y});{x} ** {y};{x} ** {f};{x}.nan_to_num().abs() ** -0.5;{f} ** {x};torch.add({x}, {y}, alpha=0.7)
torch.sub({x}, {y}, alpha=-0.3);torch.addcmul({x}, {x}, {y});torch.addcmul({x}, {y}, {x}, value=0.5)
torch.addcdiv({x}, {x}, {y});torch.lerp({x}.clamp(-99, 99), {y}.clamp(-99, 99), 0.25);F.softsign({x})
torch.lerp({x}.clamp(-99, 99), {y}.clamp(-99, 99), {x}.clamp(-99, 99));F.tanhshrink({x})
"""


def _templates(text: str) -> list[str]:
    return [template for line in text.strip().splitlines() for template in line.split(";")]


UNARY, WITH_NUMBER, BINARY, LAST = (_templates(t) for t in (_UNARY, _WITH_NUMBER, _BINARY, _LAST))
INTEGER_POWERS = _templates(_INTEGER_POWERS)


class AsOnCuda(TorchFunctionMode):
    """Divides by a Python number as PyTorch's CUDA kernels do, which multiply by the reciprocal in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        quotient = getattr(func, "__name__", "") in ("__truediv__", "div", "divide", "true_divide")
        if quotient and not kwargs and isinstance(args[1], (int, float)) and args[1] != 0:
            x = func(args[0], 1)  # converts to the dtype of the quotient
            if x.dtype != torch.float64:
                reciprocal = torch.ones(()) / torch.tensor(float(args[1]), dtype=torch.float32)
                return (x.float() * reciprocal).to(x.dtype)
        return func(*args, **(kwargs or {}))


@dataclass
class Expression:
    """The ``text`` of a function of (s, b, h, q, k), its value for the inputs, and whether every bit must match."""

    text: str
    value: Tensor
    exact: bool
    dtype: torch.dtype  # dtype of the result of the last operator

    @property
    def function(self) -> Mod:
        return eval(f"lambda s, b, h, q, k: {self.text}", dict(NAMES))


class Expressions:
    """Expressions drawn from a seed; ``vectors`` are the inputs on which they are evaluated, 7 values at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.vectors = [self._inputs() for _ in range(8)]

    def _inputs(self) -> dict[str, Tensor]:
        inputs = {"s": torch.tensor(self.random.sample(FLOATS, 7))}
        for name in "bhqk":
            values = self.random.sample(INTEGERS if name in "bk" else range(-9, 70), 7)
            inputs[name] = torch.tensor(values, dtype=torch.int32)
        return inputs

    def scores(self) -> Tensor:
        return torch.cat([inputs["s"] for inputs in self.vectors])

    def indices(self) -> Tensor:
        return torch.stack([torch.cat([inputs[name] for inputs in self.vectors]) for name in "bhqk"])

    def make(self) -> Expression:
        """An expression of one to five operators."""
        while True:
            pool = [(name, self._value(name)) for name in "bhqks"]
            for _ in range(self.random.randint(1, 5)):
                made = self._cast(pool) if self.random.random() < 0.3 else self._apply(self._exact(), pool)
                if made is not None:
                    pool.append(made)
            text, value = pool[-1]
            exact = self.random.random() < 0.7
            if not exact:
                last = self._apply(self.random.choice(LAST), [pool[4], *pool[-3:]])
                if last is None:
                    continue
                text, value = last
            elif len(pool) == 5:
                continue
            dtype = value.dtype
            if not value.is_floating_point():
                text, value = f"({text}).to(torch.float32)", value.float()
            return Expression(text, value.float(), exact, dtype)

    def _exact(self) -> str:
        kind = self.random.random()
        return self.random.choice(
            UNARY if kind < 0.3 else WITH_NUMBER if kind < 0.55 else BINARY if kind < 0.97 else INTEGER_POWERS
        )

    def _cast(self, pool: list[tuple[str, Tensor]]) -> tuple[str, Tensor]:
        text, value = self.random.choice(pool)
        dtype = self.random.choice(DTYPES)
        if value.is_floating_point() and not dtype.is_floating_point and dtype != torch.bool:
            # Casting a value that does not fit into the type gives different results on different processors.
            text = f"torch.nan_to_num({text}, 0.0, 99.0, -99.0).clamp(-100, 100)"
        text = f"({text}).to({dtype})"
        return text, self._value(text)

    def _apply(self, template: str, pool: list[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
        recent = pool[-3:] if self.random.random() < 0.7 else pool
        x, y = self.random.choice(recent), self.random.choice(recent)
        has_16_bits = any(value.dtype in (torch.float16, torch.bfloat16) for _, value in (x, y))
        if has_16_bits and "alpha=" in template:
            return None  # a CPU rounds twice, a GPU once
        if template in INTEGER_POWERS and any(value.is_floating_point() for _, value in (x, y)):
            return None
        parts = self._with_numbers(template, has_16_bits)
        if _takes_sign_of_nan(template, x[1], y[1]) or _divides_by_minus_one(template, x[1], y[1], parts):
            return None
        text = f"({parts})".replace("{x}", x[0]).replace("{y}", y[0])
        try:
            value = self._value(text)
        except (RuntimeError, TypeError, ZeroDivisionError, OverflowError):
            return None
        ok = value.dtype in DTYPES and value.shape == x[1].shape and len(text) < 600
        return (text, value) if ok else None

    def _with_numbers(self, template: str, has_16_bits: bool) -> str:
        kinds = {"i": INTEGER_CONSTANTS, "f": FLOAT_CONSTANTS}
        if has_16_bits and not any(sign in template for sign in _ROUND_NUMBERS):
            kinds = {"i": EXACT_INTEGERS, "f": EXACT_FLOATS}
        kinds["c"] = kinds[self.random.choice("if")]
        kinds["n"] = tuple(number for number in kinds["c"] if number == number)
        for kind, constants in kinds.items():
            while f"{{{kind}}}" in template:
                template = template.replace(f"{{{kind}}}", f"({self.random.choice(constants)!r})", 1)
        return template.replace("{d}", str(self.random.choice(DTYPES)))

    def _value(self, text: str) -> Tensor:
        with AsOnCuda():
            return torch.cat([eval(text, dict(NAMES), inputs) for inputs in self.vectors])


def _takes_sign_of_nan(template: str, x: Tensor, y: Tensor) -> bool:
    """Whether the result depends on the sign of a NaN, which differs between processors."""
    if "signbit" in template:
        return bool(x.isnan().any())
    return "copysign({x}, {y})" in template and bool(y.isnan().any())


def _divides_by_minus_one(template: str, x: Tensor, y: Tensor, parts: str) -> bool:
    """Whether the template divides integers by -1 with truncation.

    PyTorch's truncated division of the lowest integer by -1 kills the process.
    """
    if "trunc'" not in parts or x.is_floating_point() or y.is_floating_point():
        return False
    numbers = [torch.tensor(int(number)).to(x.dtype) for number in re.findall(r"\((-?\d+)\)", parts)]
    return any(int(number) == -1 for number in numbers) or bool((y == -1).any())


def expressions(seed: int, count: int) -> Iterator[tuple[Expressions, list[Expression]]]:
    """Batches of expressions that share inputs, ``count`` expressions in all."""
    batch = 10
    for i in range(0, count, batch):
        maker = Expressions(seed * 1000 + i // batch)
        yield maker, [maker.make() for _ in range(min(batch, count - i))]
