"""The operators that a modification may call, as C++ expressions that use csrc/mods/functions.cuh."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashbwd.mods.captures import CannotEmitError

# 16-bit floats are computed in float and rounded after each operation, as in PyTorch.
C_TYPES = {
    torch.bool: "bool",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.float32: "float",
    torch.float64: "double",
}
ROUNDED = {torch.float16: "round_half", torch.bfloat16: "round_bfloat16"}


UNARY = {
    "neg": "negative({0})",
    "abs": "absolute({0})",
    "exp": "exp({0})",
    "exp2": "exp2({0})",
    "expm1": "expm1({0})",
    "log": "log({0})",
    "log2": "log2({0})",
    "log10": "log10({0})",
    "log1p": "log1p({0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "rsqrt({0})",
    "reciprocal": "(1 / {0})",
    "sin": "sine({0}, near)",
    "cos": "cosine({0}, near)",
    "tan": "tan({0})",
    "asin": "asin({0})",
    "acos": "acos({0})",
    "atan": "atan({0})",
    "sinh": "sinh({0})",
    "cosh": "cosh({0})",
    "tanh": "tanh_of({0})",
    "asinh": "asinh({0})",
    "acosh": "acosh({0})",
    "atanh": "atanh({0})",
    "erf": "erf({0})",
    "erfc": "erfc({0})",
    "mish": "({0} * tanh_of(log1p(exp({0}))))",
    "hardsigmoid": "hardsigmoid({0})",
    "hardswish": "hardswish({0})",
    "frac": "({0} - trunc({0}))",
    "sigmoid": "sigmoid({0})",
    "silu": "({0} * sigmoid({0}))",
    "relu": "relu({0})",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "trunc": "trunc({0})",
    "round": "rint({0})",
    "sign": "({0} > 0) - ({0} < 0)",
    "sgn": "({0} > 0) - ({0} < 0)",
}
ROUNDINGS = frozenset({"floor", "ceil", "trunc", "round"})  # an integer stays as it is
# The operands are converted to the dtype of the result.
BINARY = {
    "mul": "times({0}, {1})",
    "maximum": "maximum_of({0}, {1})",
    "minimum": "minimum_of({0}, {1})",
    "remainder": "remainder_of({0}, {1})",
    "fmod": "fmod_of({0}, {1})",
    "floor_divide": "floor_divide({0}, {1})",
    "atan2": "atan2({0}, {1})",
    "fmax": "fmax_of({0}, {1})",
    "fmin": "fmin_of({0}, {1})",
    "hypot": "hypot({0}, {1})",
    "copysign": "copysign({0}, {1})",
    "logaddexp": "logaddexp({0}, {1})",
    "xlogy": "xlogy({0}, {1})",
    "heaviside": "({0} == 0 ? {1} : static_cast<decltype({1})>({0} > 0))",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "__and__": "{0} & {1}",
    "__or__": "{0} | {1}",
    "__xor__": "{0} ^ {1}",
    "bitwise_left_shift": "shift_left({0}, {1})",
    "bitwise_right_shift": "shift_right({0}, {1})",
    "__lshift__": "shift_left({0}, {1})",
    "__rshift__": "shift_right({0}, {1})",
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LOGICAL = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
SAME = {"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "contiguous"}
# Operators with numeric options after the value, and the defaults of these options. All have the dtype of the result.
WITH_NUMBERS: dict[str, tuple[str, tuple[float, ...]]] = {
    "softplus": ("softplus({0}, {1}, {2})", (1.0, 20.0)),
    "elu": ("elu({0}, {1}, {2}, {3})", (1.0, 1.0, 1.0)),
    "hardtanh": ("minimum_of(maximum_of({0}, {1}), {2})", (-1.0, 1.0)),
    "leaky_relu": ("({0} > 0 ? {0} : {0} * {1})", (0.01,)),
    "threshold": ("({0} <= {1} ? {2} : {0})", ()),
}
POWERS = {2: "times({0}, {0})", 3: "times(times({0}, {0}), {0})", 0.5: "sqrt({0})", -1: "(1 / {0})", -0.5: "rsqrt({0})"}
ROW_BYTES = 16  # kModRowBytes of csrc/decoding/params.h
FILLS = {"new_ones": 1, "ones": 1, "ones_like": 1, "new_zeros": 0, "zeros": 0, "zeros_like": 0}


def c_type(dtype: torch.dtype) -> str:
    if dtype not in C_TYPES:
        raise CannotEmitError(f"{dtype} has no CUDA type here")
    return C_TYPES[dtype]


def c_element(dtype: torch.dtype) -> str:
    """Return the C++ type with which the kernels read query, key and value of this dtype."""
    return {torch.float16: "flashbwd::Half", torch.bfloat16: "flashbwd::BFloat16", torch.float32: "flashbwd::Float"}[
        dtype
    ]


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}ll" if abs(value) < 2**63 else f"{float(value)!r}"
    if isinstance(value, float):
        if math.isnan(value):
            return "__int_as_float(0x7fffffff)"
        if math.isinf(value):
            return "-FLASHBWD_INFINITY" if value < 0 else "FLASHBWD_INFINITY"
        return repr(value)
    raise CannotEmitError(f"a constant of type {type(value).__name__} has no CUDA implementation")
