"""Writes a traced modification as the body of a CUDA C++ function of scalars."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from flashbwd.mods.captures import CannotEmitError, Slots
from flashbwd.mods.element import Element
from flashbwd.mods.number_slots import NumberSlots
from flashbwd.mods.numbers import number_of
from flashbwd.mods.operators import (
    BINARY,
    COMPARISONS,
    FILLS,
    LOGICAL,
    POWERS,
    ROUNDED,
    ROUNDINGS,
    SAME,
    UNARY,
    WITH_NUMBERS,
    c_type,
    literal,
)
from flashbwd.mods.row import Row
from flashbwd.mods.trace import Trace

SCORE_PARAMETERS = ["score", "b", "h", "q", "k"]
MASK_PARAMETERS = SCORE_PARAMETERS[1:]
# Operators that take as long with a number that the compiler does not know.
_WITH_SLOTS = frozenset({"add", "sub", "rsub", "mul", "div", *COMPARISONS})


class Emitter:
    """Writes the body of one C++ function. All functions of a kernel share ``slots``.

    Without ``rounds``, values in 16 bits are computed in float32 and not rounded, as in Inductor's kernels. Otherwise
    every operator rounds its result, as in PyTorch without a compiler. With ``numbers``, operands that are numbers
    become arguments of the kernel where this costs nothing.
    """

    def __init__(
        self, name: str, trace: Trace, slots: Slots, rounds: bool = True, numbers: NumberSlots | None = None
    ) -> None:
        self.rounds = rounds
        self.numbers = numbers
        self._takes_slots = False  # whether numbers of the current operator get a slot
        self.name = name
        self.trace = trace
        self.slots = slots
        self.lines: list[str] = []
        self.defined: list[fx.Node] = []  # for each line, the node that it computes
        self.names: dict[fx.Node, str] = {}
        self.captured: dict[fx.Node, Element] = {}  # nodes that are captured tensors or select from them

    def run(self, parameters: list[str], result: torch.dtype, row: Row | None = None) -> str:
        value = self.cast(self.forward(parameters), result)
        if row is not None:
            self.move_to_row(row)
        return "\n    ".join([*self.lines, f"return {value};"])

    def forward(self, parameters: list[str]) -> Any:
        """Write all lines except the return statement. Return the node whose value the function returns."""
        inputs = iter(parameters)
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = next(inputs)
            elif node.op == "get_attr":
                self._capture(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                return node.args[0]
            else:
                break
        raise CannotEmitError(f"{self.name} has a {node.op} of {node.target}")

    def move_to_row(self, row: Row) -> None:
        """Move values that depend on captured tensors, but not on the score or the key, to ``row``.

        The kernel then computes them once per query row instead of once per score.
        """
        per_key: set[fx.Node] = set()
        of_captured = set(self.captured)
        wanted: dict[str, fx.Node] = {}
        for node in self.trace.graph.nodes:
            inputs = node.all_input_nodes
            if self.names.get(node) in ("score", "k") or not per_key.isdisjoint(inputs):
                per_key.add(node)
            if not of_captured.isdisjoint(inputs):
                of_captured.add(node)
            if node in per_key or node.op == "output":
                wanted |= {self.names[i]: i for i in inputs if i in self.names and i in of_captured - per_key}
        lines = [line for line, node in zip(self.lines, self.defined, strict=True) if node not in per_key]
        fields = row.take(self.name, lines, {name: self.dtype(node) for name, node in wanted.items()})
        for i, node in enumerate(self.defined):
            name = self.names[node]
            if name in fields:
                self.lines[i] = f"const {c_type(self.dtype(node))} {name} = row.{fields[name]};"

    # ---- values ----

    def dtype(self, value: Any) -> torch.dtype:
        if isinstance(value, fx.Node):
            dtype: torch.dtype = value.meta["val"].dtype
            return dtype if self.rounds or dtype not in ROUNDED else torch.float32
        return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32

    def value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value in self.captured and value not in self.names:
                self._load(value)
            return self.names[value]
        return literal(value)

    def cast(self, value: Any, dtype: torch.dtype, round_number: bool = True) -> str:
        """Return the C++ expression of ``value`` converted to ``dtype`` as PyTorch does.

        In operators on 16-bit tensors, PyTorch rounds Python numbers to 16 bits, except in sums, products, quotients
        and activations. For these exceptions pass ``round_number=False``.
        """
        if not isinstance(value, fx.Node) and dtype.is_floating_point:
            rounds = round_number and dtype in ROUNDED
            number = float(value)
            value = number_of(lambda: torch.tensor(number, dtype=dtype)) if rounds else number
        source = self.dtype(value)
        text = self.value(value) if isinstance(value, fx.Node) else self._number(value, dtype)
        if dtype == torch.uint8 and source.is_floating_point:
            text = f"static_cast<long long>({text})"  # a negative number must wrap around, as in PyTorch
        text = f"static_cast<{c_type(dtype)}>({text})"
        rounds = dtype in ROUNDED and source != dtype and isinstance(value, fx.Node)
        return f"{ROUNDED[dtype]}({text})" if rounds else text

    def _number(self, number: Any, dtype: torch.dtype) -> str:
        slot = self.numbers.expression(number, dtype) if self.numbers is not None and self._takes_slots else None
        return literal(number) if slot is None else slot

    def enter(self, node: Any) -> str:
        """Prepare for writing an operator or its derivative. Return the operator's name."""
        name = str(node.target).removeprefix("aten.").split(".")[0]
        self._takes_slots = name in _WITH_SLOTS and node.kwargs.get("rounding_mode") is None
        return name

    def _common(self, *values: Any) -> torch.dtype:
        """Return the dtype in which PyTorch compares. A Python number contributes only its category, not its dtype."""
        nodes = [self.dtype(value) for value in values if isinstance(value, fx.Node)]
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
        dtype = self.dtype(node)
        if round_result and dtype in ROUNDED:
            expression = f"{ROUNDED[dtype]}({expression})"
        self.names[node] = f"t{len(self.names)}"
        kind = c_type(dtype)
        self.lines.append(f"const {kind} {self.names[node]} = static_cast<{kind}>({expression});")
        self.defined.append(node)

    # ---- captured tensors ----

    def _capture(self, node: Any) -> None:
        tensor = self.trace.tensors[str(node.target)]
        made = self.slots.captures.position(tensor) is None
        if made and tensor.dim() == 0 and tensor.device.type == "cpu":  # the function made this constant
            self.names[node] = literal(number_of(lambda: tensor))
            return
        self.captured[node] = Element(self.slots.of(tensor, self.name), (None,) * tensor.dim())

    def _load(self, node: Any) -> None:
        """Load the element of a captured tensor that ``node`` selects; every dimension must have an index."""
        element = self.captured[node]
        if not element.is_complete:
            shape = tuple(node.meta["val"].shape)
            raise CannotEmitError(f"{self.name} uses a captured tensor, or a part of one, of shape {shape} as a whole")
        self._define(node, element.load(node.meta["val"].dtype), False)

    def _choose(self, node: Any, source: Any, chosen: dict[int, Any]) -> None:
        """Record that ``node`` is ``source`` with indices for some of the dimensions that have none yet."""
        if source not in self.captured:
            raise CannotEmitError(f"{self.name} indexes a tensor that it created, which has no CUDA implementation")
        self.captured[node] = self.captured[source].select({d: self.value(index) for d, index in chosen.items()})

    # ---- operators ----

    def _call(self, node: Any) -> None:
        result = node.meta.get("val")
        name = self.enter(node)
        if not isinstance(result, Tensor) or node.target._schema.is_mutable or node.target is torch.ops.aten.view.dtype:
            self._refuse(node)
        if name == "index":
            self._choose(node, node.args[0], {d: i for d, i in enumerate(node.args[1]) if i is not None})
            return
        if name == "select":
            dims = node.args[0].meta["val"].dim()
            self._choose(node, node.args[0], {node.args[1] % dims: node.args[2]})
            return
        if result.dim() != 0:
            raise CannotEmitError(f"{self.name} calls {node.target} with a result of shape {tuple(result.shape)}")
        handler: Callable[[fx.Node], None] | None = getattr(self, f"_op_{name}", None)
        if handler is not None:
            handler(node)
        elif name in SAME or name in ("view", "expand", "squeeze", "reshape"):
            self._define(node, self.value(node.args[0]))
        elif name in FILLS:
            self._define(node, str(FILLS[name]))
        elif node.kwargs:
            self._refuse(node)
        elif name in COMPARISONS:
            self._comparison(node, COMPARISONS[name])
        elif name in LOGICAL:
            a, b = (self.cast(value, torch.bool) for value in node.args)
            self._define(node, f"{a} {LOGICAL[name]} {b}")
        elif name in ROUNDINGS and not self.dtype(node).is_floating_point:
            self._define(node, self.value(node.args[0]))
        elif name in UNARY and len(node.args) == 1:
            self._define(node, self._format(node, UNARY[name], node.args))
        elif name in BINARY and len(node.args) == 2:
            self._define(node, self._format(node, BINARY[name], node.args, name != "mul"))
        elif name in WITH_NUMBERS:
            expression, defaults = WITH_NUMBERS[name]
            given = len(node.args) - 1
            self._define(
                node, self._format(node, expression, (*node.args, *defaults[given:]), name in ("hardtanh", "threshold"))
            )
        else:
            self._refuse(node)

    def _refuse(self, node: Any) -> NoReturn:
        options = f" with {', '.join(node.kwargs)}" if node.kwargs else ""
        raise CannotEmitError(f"{self.name} calls {node.target}{options}, which has no CUDA implementation")

    def _format(self, node: Any, expression: str, values: Any, round_numbers: bool = True) -> str:
        """Convert the values to the dtype of the result and insert them into ``expression``."""
        return expression.format(*(self.cast(value, self.dtype(node), round_numbers) for value in values))

    def _comparison(self, node: Any, sign: str) -> None:
        common = self._common(*node.args)
        a, b = (self.cast(value, common) for value in node.args)
        self._define(node, f"{a} {sign} {b}")

    def _sum(self, node: Any, function: str) -> None:
        a, b = (self.cast(value, self.dtype(node), False) for value in node.args)
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1:
            self._define(node, f"{function}({a}, {b})")
        else:
            factor = self.cast(-alpha if function == "minus" else alpha, self.dtype(node))
            self._define(node, f"plus_product({a}, {factor}, {b})")

    def _op_add(self, node: Any) -> None:
        self._sum(node, "plus")

    def _op_sub(self, node: Any) -> None:
        self._sum(node, "minus")

    def _op_rsub(self, node: Any) -> None:
        a, b = (self.cast(value, self.dtype(node), False) for value in node.args[:2])
        if len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1:
            raise CannotEmitError(f"{self.name} calls {node.target} with alpha, which has no CUDA implementation")
        self._define(node, f"minus({b}, {a})")

    def _op_div(self, node: Any) -> None:
        mode = node.kwargs.get("rounding_mode")
        number = node.args[1]
        if mode is None and self.dtype(node) != torch.float64 and isinstance(number, (int, float)) and number != 0:
            # PyTorch's CUDA kernel multiplies by the reciprocal of the number, which may change the last bit.
            reciprocal = number_of(lambda: torch.ones(()) / torch.tensor(float(number), dtype=torch.float32))
            a = self.cast(node.args[0], self.dtype(node), False)
            self._define(node, f"times({a}, static_cast<float>({self._number(reciprocal, torch.float32)}))")
            return
        a, b = (self.cast(value, self.dtype(node), mode is not None) for value in node.args[:2])
        if mode == "trunc" and self.dtype(node) in ROUNDED:
            a, b = f"{ROUNDED[self.dtype(node)]}({a} / {b})", "1.f"
        self._define(node, f"{a} / {b}" if mode is None else f"{mode}_divide({a}, {b})")

    def _op_where(self, node: Any) -> None:
        condition = self.cast(node.args[0], torch.bool)
        a, b = (self.cast(value, self.dtype(node)) for value in node.args[1:3])
        self._define(node, f"{condition} ? {a} : {b}", False)

    def _op_clamp(self, node: Any) -> None:
        dtype = self.dtype(node)
        value = self.cast(node.args[0], dtype)
        bounds = [*node.args[1:], None, None][:2]
        least = node.kwargs.get("min", bounds[0])
        most = node.kwargs.get("max", bounds[1])
        if least is not None:
            value = f"maximum_of({value}, {self.cast(least, dtype)})"
        if most is not None:
            value = f"minimum_of({value}, {self.cast(most, dtype)})"
        self._define(node, value)

    _op_clamp_min = _op_clamp

    def _op_clamp_max(self, node: Any) -> None:
        self._define(node, self._format(node, "minimum_of({0}, {1})", node.args))

    def _op_logical_not(self, node: Any) -> None:
        self._define(node, f"!{self.cast(node.args[0], torch.bool)}")

    def _op_bitwise_not(self, node: Any) -> None:
        sign = "!" if self.dtype(node) == torch.bool else "~"
        self._define(node, self._format(node, sign + "{0}", node.args))

    def _op_isnan(self, node: Any) -> None:
        value = self.value(node.args[0])
        self._define(node, f"{value} != {value}")

    def _op_isinf(self, node: Any) -> None:
        floating = self.dtype(node.args[0]).is_floating_point
        self._define(node, f"absolute({self.value(node.args[0])}) == FLASHBWD_INFINITY" if floating else "false")

    def _op__to_copy(self, node: Any) -> None:
        self._define(node, self.cast(node.args[0], self.dtype(node)))

    def _fill(self, node: Any, position: int = 1) -> None:
        self._define(node, self.cast(node.args[position], self.dtype(node)))

    _op_full = _op_full_like = _fill
    _op_new_full = functools.partialmethod(_fill, position=2)
    _op_scalar_tensor = functools.partialmethod(_fill, position=0)

    def _op_pow(self, node: Any) -> None:
        base, exponent = node.args
        short = None if isinstance(exponent, fx.Node) or not self.dtype(node).is_floating_point else exponent
        if short == 3 and self.dtype(node) in ROUNDED:
            square = f"{ROUNDED[self.dtype(node)]}({self._format(node, POWERS[2], (base,))})"
            self._define(node, f"times({square}, {self.cast(base, self.dtype(node))})")
        elif short in POWERS:
            self._define(node, self._format(node, POWERS[short], (base,)))
        else:
            self._define(node, self._format(node, "power({0}, {1})", node.args))

    def _op_gelu(self, node: Any) -> None:
        function = "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
        self._define(node, self._format(node, f"{function}({{0}})", node.args))

    def _op_masked_fill(self, node: Any) -> None:
        value, mask, fill = node.args
        self._define(node, self._format(node, self.cast(mask, torch.bool) + " ? {0} : {1}", (fill, value)), False)

    def _op_addcmul(self, node: Any) -> None:
        factor = node.kwargs.get("value", 1)
        self._define(node, self._format(node, "plus_product({0}, times({3}, {1}), {2})", (*node.args, factor)))

    def _op_addcdiv(self, node: Any) -> None:
        factor = node.kwargs.get("value", 1)
        self._define(node, self._format(node, "{0} + {3} * {1} / {2}", (*node.args, factor)))

    def _op_lerp(self, node: Any) -> None:
        self._define(node, self._format(node, "lerp({0}, {1}, {2})", node.args))

    def _op_signbit(self, node: Any) -> None:
        self._define(node, f"sign_bit({self.value(node.args[0])})")

    def _op_nan_to_num(self, node: Any) -> None:
        dtype = self.dtype(node)
        if not dtype.is_floating_point:
            return self._define(node, self.value(node.args[0]))
        limits = torch.finfo(node.meta["val"].dtype)
        given = [*node.args[1:], None, None, None][:3]
        fills = [node.kwargs.get(name, given[i]) for i, name in enumerate(("nan", "posinf", "neginf"))]
        nan, most, least = (
            self.cast(default if fill is None else fill, dtype)
            for fill, default in zip(fills, (0.0, limits.max, limits.min), strict=True)
        )
        x = self.cast(node.args[0], dtype)
        infinity = "FLASHBWD_INFINITY"
        self._define(
            node, f"{x} != {x} ? {nan} : {x} == {infinity} ? {most} : {x} == -{infinity} ? {least} : {x}", False
        )
