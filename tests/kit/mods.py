"""Modifications that exercise the operators that can be emitted: functions of scores in (-4, 4) and indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Mod = Callable[..., Tensor]
INF, NAN = float("inf"), float("nan")

SHAPE = (2, 4, 5, 40)  # number of values of the indices b, h, q, k

_F = nn.functional
_UNARY = {
    **{n: getattr(torch, n) for n in ("neg", "abs", "exp", "exp2", "expm1", "sin", "cos", "tan", "atan", "sinh")},
    **{n: getattr(torch, n) for n in ("cosh", "tanh", "asinh", "erf", "erfc", "sigmoid", "relu", "square", "sign")},
    **{n: getattr(torch, n) for n in ("floor", "ceil", "trunc", "round", "frac", "sgn", "reciprocal", "positive")},
    **{n: getattr(_F, n) for n in ("silu", "gelu", "mish", "hardsigmoid", "hardswish", "hardtanh", "relu6")},
    **{n: getattr(_F, n) for n in ("elu", "selu", "leaky_relu", "softplus", "softsign", "tanhshrink")},
}
_OF_POSITIVE = {n: getattr(torch, n) for n in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")}
_OF_SMALL = {n: getattr(torch, n) for n in ("asin", "acos", "atanh")}


def unary() -> dict[str, Mod]:
    return {
        **{name: (lambda s, b, h, q, k, f=f: f(s)) for name, f in _UNARY.items()},
        **{name: (lambda s, b, h, q, k, f=f: f(s.abs() + 0.1)) for name, f in _OF_POSITIVE.items()},
        **{name: (lambda s, b, h, q, k, f=f: f(s / 4.1)) for name, f in _OF_SMALL.items()},
        "acosh": lambda s, b, h, q, k: torch.acosh(s.abs() + 1.1),
        "gelu_tanh": lambda s, b, h, q, k: _F.gelu(s, approximate="tanh"),
        "softplus_sharp": lambda s, b, h, q, k: _F.softplus(s, beta=7, threshold=5),
        "elu_slow": lambda s, b, h, q, k: _F.elu(s, alpha=0.3),
        "threshold": lambda s, b, h, q, k: _F.threshold(s, 0.5, -7.0),
        "rounded_integers": lambda s, b, h, q, k: s + (k - 20).floor() + k.round() + k.trunc() + k.ceil(),
    }


def arithmetic() -> dict[str, Mod]:
    return {
        "quotient": lambda s, b, h, q, k: (2 - s) * 3 / (s * s + 1) + (k - 20) / 7,
        "alpha": lambda s, b, h, q, k: torch.add(s, k, alpha=3) - torch.sub(s, q, alpha=2),
        "clamp": lambda s, b, h, q, k: s.clamp(-1, 2) + s.clamp(min=0) + s.clamp(max=k) + s.clamp_min(0.5),
        "powers": lambda s, b, h, q, k: s**2 + s**3 + s.abs() ** 0.5 + (s + 9) ** -1 + (s + 9) ** -0.5,
        "first_power": lambda s, b, h, q, k: s**1,
        "numbers_left_out": lambda s, b, h, q, k: torch.ops.aten.hardtanh(s) + torch.ops.aten.elu(s),
        "other_powers": lambda s, b, h, q, k: s.abs() ** 1.7 + torch.pow(s.abs(), k % 3),
        "powers_of_two": lambda s, b, h, q, k: 2**s + 2.0**-h,
        "powers_of_integers": lambda s, b, h, q, k: s + k**2 + (q - 3) ** 3 + 2**q,
        "floor_division": lambda s, b, h, q, k: s + (k - 20) // 3 + (k - 20) // -3 + (20 - k) // (q + 1),
        "floor_division_of_floats": lambda s, b, h, q, k: (s * 4) // 1.5 + k // 0.7,
        "remainder": lambda s, b, h, q, k: s + (k - 20) % 3 + (k - 20) % -3 + 100 % (q + 1),
        "remainder_of_floats": lambda s, b, h, q, k: (s * 4) % 1.5 + (s * 4) % -1.5,
        "fmod": lambda s, b, h, q, k: torch.fmod(k - 20, 3) + torch.fmod(s * 4, 1.5) + torch.fmod(s, -1.5),
        "truncated_division": lambda s, b, h, q, k: s + torch.div(k - 20, 3, rounding_mode="trunc"),
        "divisions_of_floats": lambda s, b, h, q, k: (
            torch.div(s, 0.7, rounding_mode="floor") + torch.div(s, 0.7, rounding_mode="trunc")
        ),
        "bits": lambda s, b, h, q, k: s + (k & 5) + (k | 8) + (k ^ q) + (~k) + (k << 2) + ((k - 20) >> 1),
        "shifts": lambda s, b, h, q, k: s + torch.bitwise_left_shift(k, q) + torch.bitwise_right_shift(k, b),
        "extrema": lambda s, b, h, q, k: torch.maximum(s, k * 0.1) + torch.minimum(s, s * 0 + h),
        "extrema_beside_nan": lambda s, b, h, q, k: (
            torch.fmax(torch.where(s > 0, s, NAN), k * 1.0) + torch.fmin(torch.where(s > 0, NAN, s), s + 1)
        ),
        "extrema_of_nan": lambda s, b, h, q, k: torch.maximum(torch.where(s > 0, s, NAN), k * 1.0),
        "signs": lambda s, b, h, q, k: torch.copysign(s + 1, k - 20.0) + torch.signbit(s) + torch.sign(k - 20),
        "heaviside": lambda s, b, h, q, k: torch.heaviside(s, s + 3) + torch.heaviside(s * 0, s),
        "two_values": lambda s, b, h, q, k: torch.atan2(s, k + 1.0) + torch.hypot(s, q * 1.0),
        "logarithms": lambda s, b, h, q, k: torch.logaddexp(s, k * 0.1) + torch.xlogy(s, k + 1),
        "three_values": lambda s, b, h, q, k: torch.addcmul(s, s, k * 0.1, value=2) + torch.addcdiv(s, s, k + 1.0),
        "lerp": lambda s, b, h, q, k: torch.lerp(s, k * 1.0, 0.25) + torch.lerp(s, q * 1.0, s),
        "shared_values": lambda s, b, h, q, k: (lambda t: t + t * t)(torch.tanh(s)),
        "no_score": lambda s, b, h, q, k: (k - q) * 0.25,
    }


def conditions() -> dict[str, Mod]:
    return {
        "compare": lambda s, b, h, q, k: (s > 0) * 1.0 + (s <= k - 20) * 2 + (q == b) * 4 + (k != 7) * 8,
        "compare_with_numbers": lambda s, b, h, q, k: s + (q < 2) + (k >= 5.5) + (k > -0.5),
        "logic": lambda s, b, h, q, k: torch.where(((k > 3) & (q < 4)) | ~(h == 1) ^ (b == 0), s, -s),
        "logical": lambda s, b, h, q, k: torch.where(torch.logical_or(k > 30, torch.logical_not(s > 0)), s, 2.0),
        "logical_of_values": lambda s, b, h, q, k: torch.logical_and(s, k) + torch.logical_xor(k > 3, s > 0) * 2.0,
        "masked_fill": lambda s, b, h, q, k: s.masked_fill(k > 20, -3.0),
        "where_of_numbers": lambda s, b, h, q, k: s + torch.where(k > q, 1.5, -2) + torch.where(k > 3, k, q),
        "nan_and_inf": lambda s, b, h, q, k: (
            torch.isnan(torch.where(s > 1, NAN, s)) * 1.0 + torch.isinf(torch.where(s < 0, INF, s))
        ),
        "isfinite": lambda s, b, h, q, k: torch.isfinite(s / 0) + torch.isfinite(s) * 2.0,
        "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num(
            torch.where(s > 1, NAN, torch.where(s < -1, -INF, s)), 3.0, neginf=-5.0
        ),
        "casts": lambda s, b, h, q, k: s.int() + k.float() / 3 + (s > 0).to(torch.int8) + k.to(torch.uint8),
        "wide_casts": lambda s, b, h, q, k: (s.double() / 7 + s.long() + s.bool()).float(),
        "halves": lambda s, b, h, q, k: (s.half() * 1.1 + k.half() / 3).float() + s.bfloat16() * 1.7,
        "constants": lambda s, b, h, q, k: s + torch.tensor(2.5) + torch.full((), 3.0) + torch.ones(()),
        "constants_new": lambda s, b, h, q, k: s.new_ones(()) + s * s.new_zeros(()) + torch.ones_like(s) * 2,
        "nan_to_num_of_integers": lambda s, b, h, q, k: s + torch.nan_to_num(k - 20, 3.0, 4.0, 5.0),
        "constants_like": lambda s, b, h, q, k: torch.zeros_like(s) + s.new_tensor(0.5) + s.new_full((), 2),
    }


def captures(device: str) -> dict[str, Mod]:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(6, generator=generator).to(device)
    bias = torch.randn(SHAPE, generator=generator).to(device)
    half = bias.half()
    integers = torch.randint(-9, 9, (40,), generator=generator, dtype=torch.int16).to(device)
    flags = (torch.rand(40, generator=generator) < 0.5).to(device)
    scalar = torch.tensor(1.25, device=device)
    strided = bias.permute(3, 1, 0, 2)
    wide = torch.randint(-9, 9, (6,), generator=generator).to(device)
    return {
        "scalar": lambda s, b, h, q, k: s * scalar + scalar,
        "rank_1": lambda s, b, h, q, k: s + table[h] + table[-1 - q] + table[k % 6] + table[5],
        "rank_4": lambda s, b, h, q, k: s + bias[b, h, q, k] + half[b, h, q, k] + bias[b, h, 4, k],
        "strided": lambda s, b, h, q, k: s + strided[k, h, b, q],
        "integers": lambda s, b, h, q, k: s + integers[k] * 2 + table[integers[k].long() % 6],
        "flags": lambda s, b, h, q, k: s + torch.where(flags[k], 1.0, integers[39 - k]),
        "of_rows": lambda s, b, h, q, k: torch.where(flags[q], s * table[h], s + wide[b]) * table[wide[h] % 6] + k,
        "of_rows_too_many": lambda s, b, h, q, k: (
            s * wide[h] + (k + wide[b]) * (k + wide[q]) + k * half[b, h, q, 2] + torch.where(flags[h], s, k * table[q])
        ),
    }


def captures_in_steps(device: str) -> dict[str, Mod]:
    """Captured tensors indexed one dimension at a time; on broadcast index tensors these mean something else."""
    bias = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4)).to(device)
    return {
        "in_steps": lambda s, b, h, q, k: s + bias[b][h][q][k] + bias[1, 2][q, k] + bias[1][h, q, -k],
        "middle_dimensions": lambda s, b, h, q, k: s + bias[:, h, q][b, k] + bias[:, :, 2, :][b, h, k],
    }


def all_mods(device: str) -> dict[str, Mod]:
    return {**unary(), **arithmetic(), **conditions(), **captures(device)}
