"""A traced modification as a CUDA C++ function of scalars."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from flashbwd.mods.captures import CannotEmitError, Slots
from flashbwd.mods.trace import Trace

aten = torch.ops.aten

# 16-bit floats are computed with as floats and rounded after each operation, as PyTorch does.
_C_TYPES = {
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
_ROUNDED = {torch.float16: "round_half", torch.bfloat16: "round_bfloat16"}


PRELUDE = r"""
namespace flashbwd {
template <typename T> __device__ __forceinline__ T load_captured(const void* data, long long at) {
  return static_cast<const T*>(data)[at];
}
__device__ __forceinline__ float load_half(const void* data, long long at) {
  return float_of_half(static_cast<const unsigned short*>(data)[at]);
}
__device__ __forceinline__ float load_bfloat16(const void* data, long long at) {
  return float_of_bfloat16(static_cast<const unsigned short*>(data)[at]);
}
__device__ __forceinline__ float round_half(float x) {
  return float_of_half(static_cast<unsigned short>(pack_16bit<false>(x, 0.f)));
}
__device__ __forceinline__ float round_bfloat16(float x) {
  return float_of_bfloat16(static_cast<unsigned short>(pack_16bit<true>(x, 0.f)));
}
__device__ __forceinline__ long long wrap(long long i, int size) { return i < 0 ? i + size : i; }
template <typename T> __device__ __forceinline__ T floor_divide(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return floor(a / b);
  } else {
    const T q = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
  }
}
template <typename T> __device__ __forceinline__ T trunc_divide(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return trunc(a / b);
  } else {
    return a / b;
  }
}
template <typename T> __device__ __forceinline__ T remainder_of(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    const T r = fmod(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
  } else {
    const T r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
  }
}
template <typename T> __device__ __forceinline__ T fmod_of(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return fmod(a, b);
  } else {
    return a % b;
  }
}
template <typename T> __device__ __forceinline__ T power(T a, T b) {
  if constexpr (static_cast<T>(0.5) != static_cast<T>(0)) {
    return pow(a, b);
  } else {
    T r = 1;
    for (; b > 0; --b) r *= a;
    return r;
  }
}
template <typename T> __device__ __forceinline__ T maximum_of(T a, T b) { return a != a || a > b ? a : b; }
template <typename T> __device__ __forceinline__ T minimum_of(T a, T b) { return a != a || a < b ? a : b; }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
template <typename T> __device__ __forceinline__ T sigmoid(T x) { return T(1) / (T(1) + exp(-x)); }
}  // namespace flashbwd
"""

_UNARY = {
    "neg": "-{0}",
    "abs": "({0} < 0 ? -{0} : {0})",
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
    "square": "({0} * {0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "tan": "tan({0})",
    "asin": "asin({0})",
    "acos": "acos({0})",
    "atan": "atan({0})",
    "sinh": "sinh({0})",
    "cosh": "cosh({0})",
    "tanh": "tanh_of({0})",
    "erf": "erf({0})",
    "sigmoid": "sigmoid({0})",
    "silu": "({0} * sigmoid({0}))",
    "relu": "({0} > 0 ? {0} : {0} * 0)",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "trunc": "trunc({0})",
    "round": "rint({0})",
    "sign": "({0} > 0) - ({0} < 0)",
    "sgn": "({0} > 0) - ({0} < 0)",
}
# Computed in the type of the result.
_BINARY = {
    "mul": "{0} * {1}",
    "maximum": "maximum_of({0}, {1})",
    "minimum": "minimum_of({0}, {1})",
    "remainder": "remainder_of({0}, {1})",
    "fmod": "fmod_of({0}, {1})",
    "floor_divide": "floor_divide({0}, {1})",
    "pow": "power({0}, {1})",
    "atan2": "atan2({0}, {1})",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "__and__": "{0} & {1}",
    "__or__": "{0} | {1}",
    "__xor__": "{0} ^ {1}",
    "bitwise_left_shift": "{0} << {1}",
    "bitwise_right_shift": "{0} >> {1}",
    "__lshift__": "{0} << {1}",
    "__rshift__": "{0} >> {1}",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
_SAME = {"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "contiguous"}
_FILLS = {"new_ones": 1, "ones": 1, "ones_like": 1, "new_zeros": 0, "zeros": 0, "zeros_like": 0}


class _Emitter:
    """Writes one function; ``slots`` takes the captured tensors of all functions of a kernel."""

    def __init__(self, name: str, trace: Trace, slots: Slots) -> None:
        self.name = name
        self.trace = trace
        self.slots = slots
        self.lines: list[str] = []
        self.names: dict[fx.Node, str] = {}
        self.captured: dict[fx.Node, int] = {}

    def run(self, parameters: list[str], result: torch.dtype) -> str:
        inputs = iter(parameters)
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = next(inputs)
            elif node.op == "get_attr":
                self._capture(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                value = self._cast(node.args[0], result)
                self.lines.append(f"return {value};")
            else:
                raise CannotEmitError(f"{self.name} has a {node.op} of {node.target}")
        return "\n    ".join(self.lines)

    # ---- values ----

    def _dtype(self, value: Any) -> torch.dtype:
        if isinstance(value, fx.Node):
            return value.meta["val"].dtype
        return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value in self.captured and value not in self.names:
                self._load(value, [])
            return self.names[value]
        return _literal(value)

    def _cast(self, value: Any, dtype: torch.dtype) -> str:
        if not isinstance(value, fx.Node) and dtype.is_floating_point:
            value = float(value)
        return f"static_cast<{_c_type(dtype)}>({self._value(value)})"

    def _common(self, *values: Any) -> torch.dtype:
        """The type in which PyTorch compares: numbers count only by their category."""
        nodes = [self._dtype(value) for value in values if isinstance(value, fx.Node)]
        dtype = nodes[0]
        for other in nodes[1:]:
            dtype = torch.promote_types(dtype, other)
        for value in values:
            if isinstance(value, float) and not dtype.is_floating_point:
                return torch.float32
            if isinstance(value, int) and not isinstance(value, bool) and dtype == torch.bool:
                dtype = torch.int64
        return dtype

    def _define(self, node: Any, expression: str, round_result: bool = True) -> None:
        dtype = self._dtype(node)
        if round_result and dtype in _ROUNDED:
            expression = f"{_ROUNDED[dtype]}({expression})"
        self.names[node] = f"t{len(self.names)}"
        c_type = _c_type(dtype)
        self.lines.append(f"const {c_type} {self.names[node]} = static_cast<{c_type}>({expression});")

    # ---- captured tensors ----

    def _capture(self, node: Any) -> None:
        tensor = self.trace.tensors[str(node.target)]
        made = self.slots.captures.position(tensor) is None
        if made and tensor.dim() == 0 and tensor.device.type == "cpu":  # a constant that the function made
            self.names[node] = _literal(tensor.item())
            return
        self.captured[node] = self.slots.of(tensor, self.name)

    def _load(self, node: Any, indices: list[str], into: Any = None) -> None:
        """An element of a captured tensor as the value of ``into``."""
        tensor = node.meta["val"]
        if tensor.dim() != len(indices):
            raise CannotEmitError(f"{self.name} uses a captured tensor of shape {tuple(tensor.shape)} as a whole")
        slot = self.captured[node]
        terms = [
            f"wrap({index}, p.captured[{slot}].sizes[{d}]) * p.captured[{slot}].strides[{d}]"
            for d, index in enumerate(indices)
        ]
        functions = {torch.float16: "load_half", torch.bfloat16: "load_bfloat16"}
        function = functions.get(tensor.dtype, f"load_captured<{_c_type(tensor.dtype)}>")
        self._define(into or node, f"{function}(p.captured[{slot}].data, {' + '.join(terms) or '0'})", False)

    # ---- operators ----

    def _call(self, node: Any) -> None:
        result = node.meta.get("val")
        if not isinstance(result, Tensor):
            raise CannotEmitError(f"{self.name} calls {node.target}, which there is no CUDA for")
        if result.dim() != 0:
            raise CannotEmitError(f"{self.name} calls {node.target} with a result of shape {tuple(result.shape)}")
        name = str(node.target).removeprefix("aten.").split(".")[0]
        handler: Callable[[fx.Node], None] | None = getattr(self, f"_op_{name}", None)
        if handler is not None:
            handler(node)
        elif name in _SAME or name in ("view", "expand", "squeeze", "reshape"):
            self._define(node, self._value(node.args[0]))
        elif name in _FILLS:
            self._define(node, str(_FILLS[name]))
        elif name in _COMPARISONS:
            self._comparison(node, _COMPARISONS[name])
        elif name in _LOGICAL:
            a, b = (self._cast(value, torch.bool) for value in node.args)
            self._define(node, f"{a} {_LOGICAL[name]} {b}")
        elif name in _UNARY and len(node.args) == 1:
            self._define(node, _UNARY[name].format(self._cast(node.args[0], self._dtype(node))))
        elif name in _BINARY and len(node.args) == 2:
            operands = [self._cast(value, self._dtype(node)) for value in node.args]
            self._define(node, _BINARY[name].format(*operands))
        else:
            raise CannotEmitError(f"{self.name} calls {node.target}, which there is no CUDA for")

    def _comparison(self, node: Any, sign: str) -> None:
        common = self._common(*node.args)
        a, b = (self._cast(value, common) for value in node.args)
        self._define(node, f"{a} {sign} {b}")

    def _sum(self, node: Any, sign: str) -> None:
        a, b = (self._cast(value, self._dtype(node)) for value in node.args)
        alpha = node.kwargs.get("alpha", 1)
        self._define(
            node, f"{a} {sign} {b}" if alpha == 1 else f"{a} {sign} {self._cast(alpha, self._dtype(node))} * {b}"
        )

    def _op_add(self, node: Any) -> None:
        self._sum(node, "+")

    def _op_sub(self, node: Any) -> None:
        self._sum(node, "-")

    def _op_rsub(self, node: Any) -> None:
        a, b = (self._cast(value, self._dtype(node)) for value in node.args[:2])
        if len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1:
            raise CannotEmitError(f"{self.name} calls {node.target} with alpha, which there is no CUDA for")
        self._define(node, f"{b} - {a}")

    def _op_div(self, node: Any) -> None:
        a, b = (self._cast(value, self._dtype(node)) for value in node.args[:2])
        mode = node.kwargs.get("rounding_mode")
        self._define(node, f"{a} / {b}" if mode is None else f"{mode}_divide({a}, {b})")

    def _op_where(self, node: Any) -> None:
        condition = self._cast(node.args[0], torch.bool)
        a, b = (self._cast(value, self._dtype(node)) for value in node.args[1:3])
        self._define(node, f"{condition} ? {a} : {b}", False)

    def _op_clamp(self, node: Any) -> None:
        dtype = self._dtype(node)
        value = self._cast(node.args[0], dtype)
        bounds = [*node.args[1:], None, None][:2]
        least = node.kwargs.get("min", bounds[0])
        most = node.kwargs.get("max", bounds[1])
        if least is not None:
            value = f"maximum_of({value}, {self._cast(least, dtype)})"
        if most is not None:
            value = f"minimum_of({value}, {self._cast(most, dtype)})"
        self._define(node, value)

    def _op_clamp_min(self, node: Any) -> None:
        self._op_clamp(node)

    def _op_clamp_max(self, node: Any) -> None:
        dtype = self._dtype(node)
        self._define(node, f"minimum_of({self._cast(node.args[0], dtype)}, {self._cast(node.args[1], dtype)})")

    def _op_logical_not(self, node: Any) -> None:
        self._define(node, f"!{self._cast(node.args[0], torch.bool)}")

    def _op_bitwise_not(self, node: Any) -> None:
        dtype = self._dtype(node)
        self._define(node, f"{'!' if dtype == torch.bool else '~'}{self._cast(node.args[0], dtype)}")

    def _op_isnan(self, node: Any) -> None:
        value = self._value(node.args[0])
        self._define(node, f"{value} != {value}")

    def _op_isinf(self, node: Any) -> None:
        self._define(node, f"fabs(static_cast<float>({self._value(node.args[0])})) == FLASHBWD_INFINITY")

    def _op__to_copy(self, node: Any) -> None:
        self._define(node, self._value(node.args[0]))

    def _op_scalar_tensor(self, node: Any) -> None:
        self._define(node, self._cast(node.args[0], self._dtype(node)))

    def _op_full(self, node: Any) -> None:
        self._define(node, self._cast(node.args[1], self._dtype(node)))

    _op_new_full = _op_full_like = _op_full

    def _op_index(self, node: Any) -> None:
        source, indices = node.args
        if source not in self.captured:
            raise CannotEmitError(f"{self.name} indexes a tensor that it made itself")
        if any(index is None for index in indices):
            raise CannotEmitError(f"{self.name} takes a slice of a captured tensor")
        self._load(source, [self._value(index) for index in indices], node)


def _c_type(dtype: torch.dtype) -> str:
    if dtype not in _C_TYPES:
        raise CannotEmitError(f"{dtype} has no CUDA type here")
    return _C_TYPES[dtype]


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}ll" if abs(value) < 2**63 else f"{float(value)!r}"
    if isinstance(value, float):
        if math.isnan(value):
            return "__int_as_float(0x7fffffff)"
        if math.isinf(value):
            return "-FLASHBWD_INFINITY" if value < 0 else "FLASHBWD_INFINITY"
        return repr(value) if operator.ne(value, float(int(value))) or abs(value) > 1e15 else f"{int(value)}.0"
    raise CannotEmitError(f"a constant of type {type(value).__name__} has no CUDA")


def emit(score: Trace | None, mask: Trace | None, slots: Slots) -> str:
    """``struct Mod`` for the kernel. Its captured tensors get their places in ``slots``.

    Raises
    ------
    CannotEmitError
        Names the operator or capture that has no CUDA.
    """
    score_body, mask_body = "return score;", "return true;"
    if score is not None:
        score_body = _Emitter("score_mod", score, slots).run(["score", "b", "h", "q", "k"], torch.float32)
    if mask is not None:
        mask_body = _Emitter("mask_mod", mask, slots).run(["b", "h", "q", "k"], torch.bool)
    return f"""{PRELUDE}
namespace flashbwd {{
struct Mod {{
  static constexpr bool kHasScoreMod = {str(score is not None).lower()};
  static constexpr bool kHasMask = {str(mask is not None).lower()};
  struct Row {{
    __device__ Row(const DecodingParams&, int, int, int) {{}}
  }};
  __device__ static float score_mod(const DecodingParams& p, const Row&, float score, int b, int h, int q, int k) {{
    {score_body}
  }}
  __device__ static bool mask_mod(const DecodingParams& p, const Row&, int b, int h, int q, int k) {{
    {mask_body}
  }}
}};
}}  // namespace flashbwd
"""
