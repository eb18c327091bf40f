"""Writes the derivative of a traced score_mod as CUDA, in reverse mode with one rule per operator.

At points without a unique derivative the rules follow PyTorch's autograd: maximum and minimum divide the gradient
equally between equal arguments, clamp treats its bounds as the running version does, and the gradient of abs at 0 is 0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from flashbwd.mods.captures import CannotEmitError, Slots
from flashbwd.mods.emit import struct_of
from flashbwd.mods.emitter import MASK_PARAMETERS, SCORE_PARAMETERS, Emitter
from flashbwd.mods.number_slots import NumberSlots
from flashbwd.mods.numbers import number_of
from flashbwd.mods.operators import c_type
from flashbwd.mods.trace import Trace

# One expression per argument. {g}: gradient of the result, {r}: result, {0} and {1}: arguments, {T}: their C++ type.
_RULES = {
    "neg": ("-{g}",),
    "abs": ("({0} > 0 ? {g} : {0} < 0 ? -{g} : 0)",),
    "exp": ("{g} * {r}",),
    "exp2": (f"{{g}} * {{r}} * {{T}}({math.log(2)!r})",),
    "expm1": ("{g} * ({r} + 1)",),
    "log": ("{g} / {0}",),
    "log2": (f"{{g}} / ({{0}} * {{T}}({math.log(2)!r}))",),
    "log10": (f"{{g}} / ({{0}} * {{T}}({math.log(10)!r}))",),
    "log1p": ("{g} / (1 + {0})",),
    "sqrt": ("{g} / (2 * {r})",),
    "rsqrt": ("{g} * {r} * {r} * {r} / -2",),
    "reciprocal": ("-{g} * {r} * {r}",),
    "sin": ("{g} * cosine({0}, near)",),
    "cos": ("-{g} * sine({0}, near)",),
    "tan": ("{g} * (1 + {r} * {r})",),
    "asin": ("{g} * rsqrt(1 - {0} * {0})",),
    "acos": ("-{g} * rsqrt(1 - {0} * {0})",),
    "atan": ("{g} / (1 + {0} * {0})",),
    "sinh": ("{g} * cosh({0})",),
    "cosh": ("{g} * sinh({0})",),
    "tanh": ("{g} * (1 - {r} * {r})",),
    "asinh": ("{g} * rsqrt({0} * {0} + 1)",),
    "acosh": ("{g} * rsqrt({0} * {0} - 1)",),
    "atanh": ("{g} / (1 - {0} * {0})",),
    "erfc": (f"{{g}} * {{T}}({-2 / math.sqrt(math.pi)!r}) * exp(-{{0}} * {{0}})",),
    "hypot": ("{g} * {0} / {r}", "{g} * {1} / {r}"),
    "logaddexp": ("{g} * exp({0} - {r})", "{g} * exp({1} - {r})"),
    "erf": (f"{{g}} * {{T}}({2 / math.sqrt(math.pi)!r}) * exp(-{{0}} * {{0}})",),
    "sigmoid": ("{g} * {r} * (1 - {r})",),
    "silu": ("{g} * sigmoid({0}) * (1 + {0} * (1 - sigmoid({0})))",),
    "relu": ("({0} > 0 ? {g} : 0)",),
    "mul": ("{g} * {1}", "{g} * {0}"),
    "maximum": ("({0} > {1} ? {g} : {0} == {1} ? {g} / 2 : 0)", "({1} > {0} ? {g} : {0} == {1} ? {g} / 2 : 0)"),
    "minimum": ("({0} < {1} ? {g} : {0} == {1} ? {g} / 2 : 0)", "({1} < {0} ? {g} : {0} == {1} ? {g} / 2 : 0)"),
    "remainder": ("{g}",),
    "fmod": ("{g}",),
    "pow": ("({1} == 0 ? 0 : {g} * {1} * pow({0}, {1} - 1))", "({0} > 0 ? {g} * {r} * log({0}) : 0)"),
    "atan2": (
        "({0} == 0 && {1} == 0 ? 0 : {g} * {1} / ({0} * {0} + {1} * {1}))",
        "({0} == 0 && {1} == 0 ? 0 : -{g} * {0} / ({0} * {0} + {1} * {1}))",
    ),
}
_FLAT = frozenset({"floor", "ceil", "trunc", "round", "sign", "sgn", "detach"})
_PASSES = frozenset({"alias", "clone", "contiguous", "view", "expand", "squeeze", "reshape", "_to_copy", "lift_fresh"})


class Derivative:
    """Appends the derivative to the lines of an emitter. The derivative uses values that these lines compute.

    Parameters
    ----------
    emitter : Emitter
        Emitter of ``score_mod``, whose ``forward`` has been called.
    captured : list of Tensor
        Captured tensors that get a gradient.
    in_sums : bool
        The lines add gradients of captured tensors to the members of ``sums`` (``sums_struct``) instead of to memory.
    """

    def __init__(self, emitter: Emitter, captured: list[Tensor], in_sums: bool) -> None:
        self.emitter = emitter
        self.captured = captured
        self.in_sums = in_sums
        self.sums: list[str] = []  # C++ type of each sum
        self.gradients: dict[fx.Node, list[str]] = {}
        self.slots: dict[int, int] = {}  # position in ``captured`` -> slot among the kernel's captured tensors

    def run(self, output: Any, gradient: str) -> str:
        """Propagate the gradient of ``output`` back through all operators. Return the gradient of the score."""
        nodes = list(self.emitter.trace.graph.nodes)
        score = nodes[0]
        active = {score} | {node for node in nodes if self._captured(node) is not None}
        for node in nodes:
            if any(source in active for source in node.all_input_nodes) and self._is_float(node):
                active.add(node)
        if output in active:
            self.gradients[output] = [gradient]
        for node in reversed(nodes):
            if node not in active or node not in self.gradients or node is score:
                continue
            name = f"g{len(self.emitter.lines)}"
            total = " + ".join(self.gradients[node])
            self.emitter.lines.append(f"const {self._type(node)} {name} = {total};")
            if node in self.emitter.captured:
                self._store(node, name)
            else:
                self._through(node, name, active)
        return " + ".join(self.gradients.get(score, ["0.f"]))

    def _captured(self, node: Any) -> int | None:
        if node.op != "get_attr":
            return None
        tensor = self.emitter.trace.tensors[str(node.target)]
        return next((i for i, known in enumerate(self.captured) if known is tensor), None)

    def _is_float(self, node: Any) -> bool:
        return node.op == "call_function" and self.emitter.dtype(node).is_floating_point

    def _type(self, node: Any) -> str:
        return "double" if self.emitter.dtype(node) == torch.float64 else "float"

    def _add(self, node: Any, active: set[Any], expression: str) -> None:
        if isinstance(node, fx.Node) and node in active:
            self.gradients.setdefault(node, []).append(f"static_cast<{self._type(node)}>({expression})")

    def _store(self, node: Any, gradient: str) -> None:
        """Append the addition to one element of a captured tensor's gradient, which is contiguous.

        It goes to ``sums`` if ``in_sums``, and otherwise atomically to memory.
        """
        selected = self.emitter.captured[node]
        whole = node
        while whole.op != "get_attr":
            whole = whole.args[0]
        position = self._captured(whole)
        if position is None:
            return
        self.slots[position] = selected.slot
        kind = self._type(node)
        element = f"static_cast<{kind}*>(p.gradients[{selected.slot}]) + {selected.contiguous_offset()}"
        value = f"static_cast<{kind}>({gradient})"
        if self.in_sums:
            self.emitter.lines.append(f"sums.sum{len(self.sums)}.add(adds, {element}, {value});")
            self.sums.append(kind)
        else:
            self.emitter.lines.append(f"if (adds) atomicAdd({element}, {value});")

    def sums_struct(self) -> str:
        """Return ``struct Sums``, with a ``GradientSum`` for each access to a captured tensor that gets a gradient."""
        members = "".join(f"    GradientSum<{kind}> sum{i};\n" for i, kind in enumerate(self.sums))
        finish = " ".join(f"sum{i}.finish();" for i in range(len(self.sums)))
        return f"  struct Sums {{\n{members}    __device__ void finish() {{ {finish} }}\n  }};\n"

    def _through(self, node: Any, gradient: str, active: set[Any]) -> None:
        name = self.emitter.enter(node)
        handler = getattr(self, f"_op_{name}", None)
        if name in _FLAT:
            return
        if handler is not None:
            handler(node, gradient, active)
        elif name in _PASSES:
            self._add(node.args[0], active, gradient)
        elif name in _RULES:
            rules = _RULES[name]
            dtype = self.emitter.dtype(node)
            values = [self.emitter.cast(value, dtype) for value in node.args[:2]]
            for position, value in enumerate(node.args[:2]):
                if not isinstance(value, fx.Node) or value not in active:
                    continue
                if position >= len(rules):
                    raise CannotEmitError(f"score_mod calls {node.target}, whose derivative has no CUDA implementation")
                self._add(
                    value,
                    active,
                    rules[position].format(*values, g=gradient, r=self.emitter.value(node), T=c_type(dtype)),
                )
        else:
            raise CannotEmitError(f"score_mod calls {node.target}, whose derivative has no CUDA implementation")

    def _sum(self, node: Any, gradient: str, active: set[Any], sign: str) -> None:
        alpha = self.emitter.cast(node.kwargs.get("alpha", 1), self.emitter.dtype(node))
        self._add(node.args[0], active, gradient)
        self._add(node.args[1], active, f"{sign}{gradient} * {alpha}")

    def _op_add(self, node: Any, gradient: str, active: set[Any]) -> None:
        self._sum(node, gradient, active, "")

    def _op_sub(self, node: Any, gradient: str, active: set[Any]) -> None:
        self._sum(node, gradient, active, "-")

    def _op_rsub(self, node: Any, gradient: str, active: set[Any]) -> None:
        self._add(node.args[0], active, f"-{gradient}")
        self._add(node.args[1], active, gradient)

    def _op_div(self, node: Any, gradient: str, active: set[Any]) -> None:
        if node.kwargs.get("rounding_mode") is not None:
            return
        divisor = self.emitter.cast(node.args[1], self.emitter.dtype(node))
        self._add(node.args[0], active, f"{gradient} / {divisor}")
        self._add(node.args[1], active, f"-{gradient} * {self.emitter.value(node)} / {divisor}")

    def _op_where(self, node: Any, gradient: str, active: set[Any]) -> None:
        condition = self.emitter.cast(node.args[0], torch.bool)
        self._add(node.args[1], active, f"({condition} ? {gradient} : 0)")
        self._add(node.args[2], active, f"({condition} ? 0 : {gradient})")

    def _op_masked_fill(self, node: Any, gradient: str, active: set[Any]) -> None:
        mask = self.emitter.cast(node.args[1], torch.bool)
        self._add(node.args[0], active, f"({mask} ? 0 : {gradient})")
        self._add(node.args[2], active, f"({mask} ? {gradient} : 0)")

    def _op_gelu(self, node: Any, gradient: str, active: set[Any]) -> None:
        if node.kwargs.get("approximate", "none") != "none":
            raise CannotEmitError(
                "score_mod calls gelu with approximate='tanh', whose derivative has no CUDA implementation"
            )
        x = self.emitter.cast(node.args[0], self.emitter.dtype(node))
        kind = c_type(self.emitter.dtype(node))
        root = f"{kind}({math.sqrt(0.5)!r})"
        density = f"{x} * exp({x} * {x} / -2) * {kind}({1 / math.sqrt(2 * math.pi)!r})"
        self._add(node.args[0], active, f"{gradient} * ((1 + erf({x} * {root})) / 2 + {density})")

    def _op_clamp(self, node: Any, gradient: str, active: set[Any]) -> None:
        bounds = [*node.args[1:], None, None][:2]
        self._clamp(node, gradient, active, node.kwargs.get("min", bounds[0]), node.kwargs.get("max", bounds[1]))

    def _op_clamp_min(self, node: Any, gradient: str, active: set[Any]) -> None:
        self._clamp(node, gradient, active, node.args[1], None)

    def _op_clamp_max(self, node: Any, gradient: str, active: set[Any]) -> None:
        self._clamp(node, gradient, active, None, node.args[1])

    def _clamp(self, node: Any, gradient: str, active: set[Any], least: Any, most: Any) -> None:
        if any(isinstance(bound, fx.Node) and bound in active for bound in (least, most)):
            raise CannotEmitError(f"score_mod calls {node.target}, whose derivative has no CUDA implementation")
        dtype = self.emitter.dtype(node)
        x = self.emitter.cast(node.args[0], dtype)
        bounds = {sign: self.emitter.cast(n, dtype) for sign, n in ((">", least), ("<", most)) if n is not None}
        share = _share_at_a_bound(str(node.target).endswith(".Tensor"))
        if share in (0, 1):
            equal = "=" if share else ""
            inside = " && ".join(f"{x} {sign}{equal} {bound}" for sign, bound in bounds.items())
            self._add(node.args[0], active, f"({inside} ? {gradient} : 0)")
        else:
            outside = " || ".join(f"{bound} {sign} {x}" for sign, bound in bounds.items())
            at_one = " != ".join(f"({x} == {bound})" for bound in bounds.values())
            self._add(node.args[0], active, f"({outside} ? 0 : {at_one} ? {gradient} * {share} : {gradient})")


@functools.cache
def _share_at_a_bound(is_tensor: bool) -> float:
    """Return the factor of the gradient of a value that ``clamp`` finds equal to one of its bounds.

    In torch 2.11 it is 1. In torch 2.14 it is 0 if the bounds are numbers, and 0.5 if they are tensors.
    """

    def gradient() -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros((), requires_grad=True)
            return torch.autograd.grad(x.clamp(min=torch.zeros(()) if is_tensor else 0), x)[0]

    return float(number_of(gradient))  # type: ignore[arg-type]


@dataclass(eq=False)
class Gradient:
    """CUDA source of modifications and their derivative.

    Attributes
    ----------
    slots : dict of int to int
        Position among the tensors that get a gradient -> slot among the kernel's captured tensors, for each tensor on
        which the score depends.
    numbers : list of int
        Arguments of the kernel, as :class:`~flashbwd.mods.number_slots.NumberSlots` has them.
    """

    source: str
    slots: dict[int, int]
    numbers: list[int] = field(default_factory=list)


def _bodies(
    score: Trace, slots: Slots, differentiable: list[Tensor], numbers: NumberSlots | None = None
) -> tuple[str, str, Derivative]:
    """Return the bodies of ``score_mod`` and ``score_gradient``, and the derivative that wrote the latter.

    With ``numbers``, they are those of the attention kernels, which do not round and add to sums.
    """
    of_attention = numbers is not None
    if score.changes_gradients:
        raise CannotEmitError(
            "score_mod has a derivative of its own: it uses torch.no_grad() or a torch.autograd.Function"
        )
    score_body = Emitter("score_mod", score, slots, not of_attention, numbers).run(SCORE_PARAMETERS, torch.float32)
    emitter = Emitter("score_mod", score, slots, not of_attention, numbers)
    output = emitter.forward(SCORE_PARAMETERS)
    derivative = Derivative(emitter, differentiable, of_attention)
    result = derivative.run(output, "ds")
    gradient = "\n    ".join([*emitter.lines, f"return static_cast<float>({result});"])
    return score_body, gradient, derivative


def emit_gradient(score: Trace | None, mask: Trace | None, slots: Slots, differentiable: list[Tensor]) -> Gradient:
    """Return the source of ``struct Mod`` for the backward kernel, as :func:`~flashbwd.mods.emit.emit` does.

    Parameters
    ----------
    differentiable : list of Tensor
        Captured tensors that get a gradient.
    """
    score_body, mask_body, gradient = "return score;", "return true;", "return ds;"
    gradient_slots: dict[int, int] = {}
    if score is not None:
        score_body, gradient, derivative = _bodies(score, slots, differentiable)
        gradient_slots = derivative.slots
    if mask is not None:
        mask_body = Emitter("mask_mod", mask, slots).run(MASK_PARAMETERS, torch.bool)
    params = "DecodingBackwardParams"
    function = f"""  __device__ static float score_gradient(
      const {params}& p, float score, int b, int h, int q, int k, float ds, bool adds) {{
    {gradient}
  }}
"""
    source = struct_of(score is not None, mask is not None, params, score_body, mask_body, function)
    return Gradient(source, gradient_slots)


def emit_score_gradient(
    score: Trace | None, mask: Trace | None, slots: Slots, differentiable: list[Tensor]
) -> Gradient:
    """As :func:`emit_gradient`, for the attention kernels of csrc/attention/sm90/score_mod/generated.cuh and
    csrc/attention/sm80/generated_scores.cuh. The source around it defines the type ``GeneratedParams``.

    These kernels read the bits of a block mask, so ``mask`` is None. They use the LSE of PyTorch's compiled forward, so
    they do not round values in 16 bits, as that forward does not.
    """
    assert score is not None
    assert mask is None
    numbers = NumberSlots()
    score_body, gradient, derivative = _bodies(score, slots, differentiable, numbers)
    parameters = "const GeneratedParams& p, float score, int b, int h, int q, int k"
    return Gradient(
        f"""namespace flashbwd {{
struct Mod {{
  static constexpr bool* near = nullptr;
  static constexpr bool kCapturedGradients = {str(bool(derivative.slots)).lower()};
{derivative.sums_struct()}  __device__ static float score_mod({parameters}) {{
    {score_body}
  }}
  __device__ static float score_gradient({parameters}, float ds, bool adds, Sums& sums) {{
    {gradient}
  }}
}};
}}  // namespace flashbwd
""",
        derivative.slots,
        numbers.values,
    )
