"""Reads a FlexAttention backward of PyTorch in a graph: its arguments, its mask and its score modification.

What this library does not know raises :class:`DeclinedError`. PyTorch's operator takes graphs: the score modification,
its derivative and the mask. The first and the last become text, which a key of a cache can hold.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import BlockMask

from flashbwd.flex.graph_operator import DETERMINISTIC
from flashbwd.integrations.flex_derivative import has_the_derivative
from flashbwd.mods.in_graph import text_of

__all__ = ["AFTER_PYTORCH", "DeclinedError", "Mask", "Node", "Score", "call_of", "mask_of", "score_of"]

Node = Any  # fx.Node, whose arguments are of every type

AFTER_PYTORCH = torch.ops.higher_order.flex_attention_backward
_ARGUMENTS = (
    *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph"),
    *("block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers"),
)
_LISTS = (
    *("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"),
    *("full_kv_num_blocks", "full_kv_indices", "full_q_num_blocks", "full_q_indices"),
)
_SIZES_OF_MASK = {"seq_lengths": ("seqlen_q", "seqlen_k"), "BLOCK_SIZE": ("q_block", "kv_block")}
# PyTorch 2.13 added the last four: the order in which another kernel adds dq, which changes no mask.
_FIELDS_OF_MASK = {*_LISTS, *_SIZES_OF_MASK["seq_lengths"], *_SIZES_OF_MASK["BLOCK_SIZE"], "mask_mod"} | {
    *("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
}
_ARGUMENTS_OF_A_SCORE = 5  # score, b, h, q_idx and kv_idx; captured values follow
_UNLIMITED = 1 << 30  # the block size of PyTorch's mask that hides nothing
_TRUE = (torch.ops.aten.new_ones.default, torch.ops.aten.ones.default, torch.ops.aten.full.default)


class DeclinedError(Exception):
    """A backward stays PyTorch's. The message says why."""


@dataclass
class Mask:
    """A block mask in a graph: its lists, in the order of :class:`~flashbwd.flex.graph_operator.GraphMask`."""

    lists: list[Node]
    block_size: list[Any]
    text: str
    captures: list[Node]
    numbers: list[Any]
    number_positions: list[int]


_NO_MASK = Mask([], [], "", [], [], [])


@dataclass
class Score:
    """A score modification in a graph.

    ``captures`` are the tensors that it captures, ``positions`` their places in PyTorch's list of captured values, and
    ``wanted`` tells which of them get a gradient. ``numbers`` are the numbers that it captures, and
    ``number_positions`` their places among all captured values that it reads.
    """

    text: str
    captures: list[Node]
    wanted: list[bool]
    positions: list[int]
    numbers: list[Any] = field(default_factory=list)
    number_positions: list[int] = field(default_factory=list)


def call_of(node: Node) -> dict[str, Any]:
    """Return the arguments by name, the fields of ``block_mask`` by name too, and ``deterministic``, an option."""
    parameters = list(inspect.signature(type(AFTER_PYTORCH).__call__).parameters)[1:]
    if tuple(parameters) != _ARGUMENTS:
        raise DeclinedError("this PyTorch's flex_attention_backward has other arguments than the known ones")
    call: dict[str, Any] = {"score_mod_other_buffers": (), "mask_mod_other_buffers": ()}
    call |= dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    fields = _fields_of_mask()
    if unknown := set(fields) - _FIELDS_OF_MASK:
        raise DeclinedError(f"this PyTorch's block_mask has unknown fields: {', '.join(sorted(unknown))}")
    call["block_mask"] = dict(zip(fields, call["block_mask"], strict=True))
    call["deterministic"] = bool(call["kernel_options"].get(DETERMINISTIC))
    if type(call["scale"]) is not float:
        raise DeclinedError("scale is not a constant")
    options = call["kernel_options"]
    if options.get("BACKEND", "AUTO") not in ("AUTO", "TRITON"):
        raise DeclinedError(f"kernel_options asks for BACKEND {options['BACKEND']!r}")
    if options.get("PRESCALE_QK") or options.get("bwd_PRESCALE_QK"):
        raise DeclinedError("PRESCALE_QK rounds the query before the products")
    is_float32 = call["query"].meta["val"].dtype == torch.float32
    if is_float32 and any(f"{prefix}FLOAT32_PRECISION" in options for prefix in ("", "fwd_", "bwd_")):
        raise DeclinedError("kernel_options sets FLOAT32_PRECISION")
    return call


@functools.cache
def _fields_of_mask() -> tuple[str, ...]:
    """Return the names of what PyTorch's operator takes for a block mask, in its order, which differs by version."""

    class Names:
        def __getattr__(self, name: str) -> Any:
            return _SIZES_OF_MASK.get(name, name)

    names: Any = Names()
    return BlockMask.as_tuple(names)


def _graph_module(graph: fx.Graph, node: Node) -> fx.GraphModule:
    is_attribute = isinstance(node, fx.Node) and node.op == "get_attr"
    found = getattr(graph.owning_module, str(node.target), None) if is_attribute else None
    if not isinstance(found, fx.GraphModule):
        raise DeclinedError("a modification is not a graph")
    return found


def _text(name: str, module: fx.GraphModule) -> str:
    try:
        return text_of(name, _without_prims(module))
    except RuntimeError as error:  # it reads a constant tensor
        raise DeclinedError(str(error).removeprefix("flashbwd: ")) from None


def _without_prims(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph in operators that autograd and vmap support. Inductor decomposes a cast to another."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        source, dtype = node.args
        node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}
    return fx.GraphModule(module, graph)


def _result(module: fx.GraphModule) -> Any:
    (output,) = module.graph.find_nodes(op="output")
    return output.args[0]


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.SymInt))


def mask_of(call: dict[str, Any], graph: fx.Graph) -> Mask:
    fields = call["block_mask"]
    lists, block_size = [fields[name] for name in _LISTS], [fields["q_block"], fields["kv_block"]]
    module, captures = _graph_module(graph, fields["mask_mod"]), list(call["mask_mod_other_buffers"])
    result = _result(module)
    hides_nothing = isinstance(result, fx.Node) and result.target in _TRUE and _is_true(result)
    if hides_nothing and all(type(size) is int and size >= _UNLIMITED for size in block_size):
        return _NO_MASK
    partial, full = lists[:4], lists[4:]
    if None in partial:
        raise DeclinedError("block_mask has no q_indices")
    if None in full and full != [None] * 4:
        raise DeclinedError("block_mask has some lists of full blocks, but not all")
    positions = [i for i, capture in enumerate(captures) if _is_number(capture)]
    tensors = [capture for capture in captures if not _is_number(capture)]
    if not all(_is_tensor(tensor) for tensor in tensors):
        raise DeclinedError("mask_mod captures something else than tensors and integers")
    return Mask(
        lists=lists if None not in full else partial,
        block_size=block_size,
        text=_text("mask_mod", module),
        captures=tensors,
        numbers=[captures[i] for i in positions],
        number_positions=positions,
    )


def _is_true(node: Node) -> bool:
    """Whether a node that fills a tensor fills it with True."""
    return node.target is not torch.ops.aten.full.default or node.args[1] is True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def score_of(call: dict[str, Any], graph: fx.Graph) -> Score:
    module, joint = (_graph_module(graph, call[name]) for name in ("fw_graph", "joint_graph"))
    captures = list(call["score_mod_other_buffers"])
    has_gradient = [gradient is not None for gradient in _result(joint)[5:]]
    if len(has_gradient) != len(captures):
        raise DeclinedError("the derivative of score_mod has another number of results than expected")
    _check_derivative(module, joint, captures)
    if _result(module) is next(iter(module.graph.nodes)):  # the score itself
        return Score("", [], [], [])
    module, unread = _without_unread_numbers(module, captures)
    read = [i for i in range(len(captures)) if i not in unread]
    numbers = [i for i in read if _is_number(captures[i])]
    positions = [i for i in read if i not in numbers]
    if not all(_is_tensor(captures[i]) for i in positions):
        raise DeclinedError("score_mod captures something else than tensors and integers")
    return Score(
        text=_text("score_mod", module),
        captures=[captures[i] for i in positions],
        wanted=[has_gradient[i] for i in positions],
        positions=positions,
        numbers=[captures[i] for i in numbers],
        number_positions=[read.index(i) for i in numbers],
    )


def _check_derivative(module: fx.GraphModule, joint: fx.GraphModule, captures: list[Node]) -> None:
    values = [value.meta["val"] if isinstance(value, fx.Node) else value for value in captures]
    values = [value if isinstance(value, (int, Tensor)) else value.node.hint for value in values]
    try:
        same = has_the_derivative(_without_prims(module), _without_prims(joint), values)
    except Exception as error:
        raise DeclinedError(f"the derivative of score_mod cannot be checked: {type(error).__name__}: {error}") from None
    if not same:
        raise DeclinedError("score_mod has another derivative than its operators (detach, no_grad, autograd.Function)")


def _without_unread_numbers(module: fx.GraphModule, captures: list[Node]) -> tuple[fx.GraphModule, set[int]]:
    """Return a copy of a score modification without the numbers that it does not read, and their places.

    With dynamic shapes, PyTorch passes the sizes of captured tensors that get a gradient. Only the derivative, which
    this library computes itself, reads them.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    captured = graph.find_nodes(op="placeholder")[_ARGUMENTS_OF_A_SCORE:]
    unread = {i for i, value in enumerate(captures) if _is_number(value) and not captured[i].users}
    for i in unread:
        graph.erase_node(captured[i])
    return fx.GraphModule(module, graph), unread
