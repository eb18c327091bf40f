"""A pass over Inductor's graphs that replaces PyTorch's FlexAttention backward by the operator of this library.

PyTorch's operator takes graphs: the score modification, its derivative and the mask. The operator of this library takes
the first and the last as text. A backward that no kernel of this library computes stays as it is, and
:func:`flashbwd.stats` counts the reason.

In PyTorch's operator the LSE has base 2, and so has its gradient: ``lse = lse_2 * ln 2``, ``dlse = dlse_2 / ln 2``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flashbwd import _ops
from flashbwd.flex import backends, counts, graph_operator
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError, kernel_tile
from flashbwd.flex.score_change import hides_above_diagonal
from flashbwd.mods.in_graph import text_of

__all__ = ["flex_pass_key", "replace_flex_backwards"]

Node = Any  # fx.Node, whose arguments are of every type

_AFTER_PYTORCH = torch.ops.higher_order.flex_attention_backward
_OURS = torch.ops.flashbwd.flex_attention_backward_in_graph.default
_ARGUMENTS = (
    *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph"),
    *("block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers"),
)
_FIELDS_OF_MASK = 13
_UNLIMITED = 1 << 30  # the block size of PyTorch's mask that hides nothing
_TRUE = (torch.ops.aten.new_ones.default, torch.ops.aten.ones.default, torch.ops.aten.full.default)
_SAME_MEMORY = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_SOURCES = ("flex", "integrations", "mods", "reference")
_COMPUTED_BY_THE_REFERENCE: frozenset[str] = frozenset()  # device types; tests add the CPU


class _DeclinedError(Exception):
    """A backward stays PyTorch's. The message says why."""


@dataclass
class _Mask:
    """A block mask in a graph: its lists, in the order of :class:`~flashbwd.flex.graph_operator.GraphMask`."""

    lists: list[Node]
    block_size: list[Any]
    text: str
    captures: list[Node]
    numbers: list[Any]
    number_positions: list[int]


_NO_MASK = _Mask([], [], "", [], [], [])


@dataclass
class _Score:
    """A score modification in a graph. ``wanted`` are the captured tensors that get a gradient."""

    text: str
    captures: list[Node]
    wanted: list[bool]


def replace_flex_backwards(graph: fx.Graph) -> None:
    """Replace every FlexAttention backward of a graph that a kernel of this library computes."""
    for node in graph.find_nodes(op="call_function", target=_AFTER_PYTORCH):
        try:
            call = _call_of(node)
            mask, score = _mask_of(call, graph), _score_of(call, graph)
            _check_users(node, score)
            orders = [dim for i in range(3) for dim in _order(node.meta["val"][i])]
            _check_backend(call, mask, score)
        except _DeclinedError as reason:
            counts.compiled.fall_back(str(reason))
        except Exception as error:  # a graph of a PyTorch that this library does not know must still compile
            counts.compiled.fall_back(f"the pass failed: {type(error).__name__}: {error}")
        else:
            _replace(graph, node, call, mask, score, orders)


def flex_pass_key() -> tuple[str, ...]:
    """Return what the pass depends on besides the graph, for the keys of Inductor's cache."""
    return (*_installation(), *sorted(_COMPUTED_BY_THE_REFERENCE))


@functools.cache
def _installation() -> tuple[str, ...]:
    """Identify the sources and libraries of this package, which determine the calls that have kernels."""
    package = Path(_ops.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (package / folder).glob("*.py")):
        digest.update(path.read_bytes())
    libraries = [(package / f"{name}.so").stat() for name in _ops.loaded]
    return digest.hexdigest(), *(f"{stat.st_size} {stat.st_mtime_ns}" for stat in libraries)


# ---- reading PyTorch's node ----


def _call_of(node: Node) -> dict[str, Any]:
    """Return the arguments by name."""
    parameters = list(inspect.signature(type(_AFTER_PYTORCH).__call__).parameters)[1:]
    if tuple(parameters) != _ARGUMENTS:
        raise _DeclinedError("this PyTorch's flex_attention_backward has other arguments than the known ones")
    call = {"score_mod_other_buffers": (), "mask_mod_other_buffers": ()}
    call |= dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    if len(call["block_mask"]) != _FIELDS_OF_MASK:
        raise _DeclinedError(f"block_mask has {len(call['block_mask'])} fields, expected {_FIELDS_OF_MASK}")
    if type(call["scale"]) is not float:
        raise _DeclinedError("scale is not a constant")
    options = call["kernel_options"]
    if options.get("BACKEND", "AUTO") not in ("AUTO", "TRITON"):
        raise _DeclinedError(f"kernel_options asks for BACKEND {options['BACKEND']!r}")
    if options.get("PRESCALE_QK") or options.get("bwd_PRESCALE_QK"):
        raise _DeclinedError("PRESCALE_QK rounds the query before the products")
    return call


def _graph_module(graph: fx.Graph, node: Node) -> fx.GraphModule:
    is_attribute = isinstance(node, fx.Node) and node.op == "get_attr"
    found = getattr(graph.owning_module, str(node.target), None) if is_attribute else None
    if not isinstance(found, fx.GraphModule):
        raise _DeclinedError("a modification is not a graph")
    return found


def _text(name: str, module: fx.GraphModule) -> str:
    try:
        return text_of(name, _without_prims(module))
    except RuntimeError as error:  # it reads a constant tensor
        raise _DeclinedError(str(error).removeprefix("flashbwd: ")) from None


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


def _mask_of(call: dict[str, Any], graph: fx.Graph) -> _Mask:
    _, _, *lists, q_block, kv_block, mask_graph = call["block_mask"]
    module, captures = _graph_module(graph, mask_graph), list(call["mask_mod_other_buffers"])
    result = _result(module)
    hides_nothing = isinstance(result, fx.Node) and result.target in _TRUE and _is_true(result)
    if hides_nothing and all(type(size) is int and size >= _UNLIMITED for size in (q_block, kv_block)):
        return _NO_MASK
    kv, full_kv, q, full_q = (lists[i : i + 2] for i in range(0, 8, 2))
    if None in q:
        raise _DeclinedError("block_mask has no q_indices")
    full = [*full_kv, *full_q]
    if None in full and full != [None] * 4:
        raise _DeclinedError("block_mask has some lists of full blocks, but not all")
    positions = [i for i, capture in enumerate(captures) if _is_number(capture)]
    tensors = [capture for capture in captures if not _is_number(capture)]
    if not all(_is_tensor(tensor) for tensor in tensors):
        raise _DeclinedError("mask_mod captures something else than tensors and integers")
    return _Mask(
        lists=[*kv, *q, *(full if None not in full else [])],
        block_size=[q_block, kv_block],
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


def _score_of(call: dict[str, Any], graph: fx.Graph) -> _Score:
    module, joint = (_graph_module(graph, call[name]) for name in ("fw_graph", "joint_graph"))
    captures = list(call["score_mod_other_buffers"])
    if not all(map(_is_tensor, captures)):
        raise _DeclinedError("score_mod captures something else than tensors")
    wanted = [gradient is not None for gradient in _result(joint)[5:]]
    if len(wanted) != len(captures):
        raise _DeclinedError("the derivative of score_mod has another number of results than expected")
    if _result(module) is next(iter(module.graph.nodes)):  # the score itself
        return _Score("", [], [])
    return _Score(_text("score_mod", module), captures, wanted)


def _check_users(node: Node, score: _Score) -> None:
    for user in node.users:
        if user.target is not operator.getitem:
            raise _DeclinedError(f"the graph passes all gradients to {user.target}")
        if user.args[1] != 3:
            continue
        for captured in user.users:
            if captured.target is not operator.getitem:
                raise _DeclinedError(f"the graph passes all gradients of captured tensors to {captured.target}")
            if captured.users and not (score.wanted and score.wanted[captured.args[1]]):
                raise _DeclinedError("the graph reads a gradient that the derivative of score_mod does not have")


# ---- what computes it ----


def _hint(size: Any) -> int:
    """Return a size, or the example that a symbolic one was traced with."""
    return size if isinstance(size, int) else int(size.node.hint)


def _hints(value: Tensor) -> tuple[list[int], list[int]]:
    return [_hint(size) for size in value.shape], [_hint(stride) for stride in value.stride()]


def _order(value: Tensor) -> list[int]:
    """Return the dimensions from the outermost to the innermost in memory. Those of size 1 come last among equals."""
    sizes, strides = _hints(value)
    return sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1, dim))


def _value(node: Node) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


def _check_backend(call: dict[str, Any], mask: _Mask, score: _Score) -> None:
    names = ("query", "key", "value", "out", "logsumexp")
    query, key, value, out, lse = (_value(call[name]) for name in names)
    if not query.dtype == key.dtype == value.dtype:
        raise _DeclinedError("query, key and value have different dtypes")
    if query.device.type in _COMPUTED_BY_THE_REFERENCE:
        return
    if query.device.type != "cuda":
        raise _DeclinedError(f"query is on the device {query.device.type}")
    from torch._inductor import config

    if config.cpp_wrapper:
        raise _DeclinedError("Inductor's cpp_wrapper calls no operators in Python")
    if mask.lists and config.triton.cudagraphs:
        raise _DeclinedError("CUDA graphs cannot compute the lists of block_mask (mode='reduce-overhead')")
    dlse = None if call["grad_logsumexp"] is None else lse
    try:
        _plan(call["scale"], mask, score, (out, query, key, value, out, lse, dlse))
    except UnsupportedError as reason:
        raise _DeclinedError(str(reason)) from None


def _plan(scale: float, mask: _Mask, score: _Score, tensors: Sequence[Tensor | None]) -> None:
    """Raise UnsupportedError unless a kernel computes the backward, as far as this does not depend on values.

    Parameters
    ----------
    tensors : sequence of Tensor
        dout, query, key, value, out, lse and dlse.
    """
    with unset_fake_temporarily(), FakeTensorMode():
        query, key, value = (_like(t) for t in tensors[1:4] if t is not None)
        captures, score_captures = ([_like(_value(n)) for n in nodes] for nodes in (mask.captures, score.captures))
        call = graph_operator.call_of(
            (query.shape[2], key.shape[2]),
            [_like(_value(node)) for node in mask.lists],
            [_hint(_value(size)) for size in mask.block_size],
            mask.text,
            captures,
            [_hint(_value(number)) for number in mask.numbers],
            mask.number_positions,
            score.text,
            score_captures,
            scale,
        )
        wanted = [capture for capture, want in zip(score_captures, score.wanted, strict=True) if want]
        kernel = backends.choose(call, query, key, value, wanted, False, _any_lists)
        device = query.device.index or 0
    seqlen_q, seqlen_k = (t.shape[2] for t in tensors[1:3] if t is not None)
    if kernel.slopes is not None and not statically_known_true(seqlen_k - seqlen_q == kernel.slopes.alibi.offset):
        raise UnsupportedError("score_mod is ALiBi, and Sk - Sq may change")
    with unset_fake_temporarily():
        metas: list[Any] = [None if t is None else _like(t, torch.device("meta")) for t in tensors]
        dout, query, key, value, out, lse, dlse = metas
        kernel.plan(dout, query, key, value, out, lse, dlse, device)


def _like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return an empty tensor of the sizes and strides that a tensor was traced with."""
    sizes, strides = _hints(tensor)
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=device or tensor.device)


def _any_lists(
    mask: Any, _captured: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor, _deterministic: bool
) -> KernelLists:
    """Lists for a plan, which depends on the number of lists and the tile but not on how long the lists are.

    ALiBi without an absolute value needs a mask that hides later keys. Here ``mask_mod`` must prove this.
    """
    tile = kernel_tile(query.shape[3], value.shape[3])
    shapes = ((1, 1, -(-key.shape[2] // tile.keys), 4), (1, 4), (1, 4 * tile.queries))
    with unset_fake_temporarily():
        lists, entries, bits = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes)
    hides_above = hides_above_diagonal(mask.mask_mod, key.shape[2] - query.shape[2])
    return KernelLists(lists, entries, bits, covers=False, hides_above_diagonal=hides_above)


# ---- replacing it ----


def _replace(graph: fx.Graph, node: Node, call: dict[str, Any], mask: _Mask, score: _Score, orders: list[int]) -> None:
    with graph.inserting_before(node):
        lse = _times(graph, call["logsumexp"], math.log(2))
        dlse = call["grad_logsumexp"]
        dlse = None if dlse is None else _times(graph, dlse, 1 / math.log(2))
        args = (
            *(call[name] for name in ("query", "key", "value", "out")),
            *(lse, call["grad_out"], dlse),
            *(mask.lists, mask.block_size, mask.text, mask.captures, mask.numbers, mask.number_positions),
            *(score.text, score.captures, score.wanted, call["scale"]),
            all(map(_is_input, (*mask.lists, *mask.captures))),
            orders,
        )
        ours = graph.call_function(_OURS, args)
    *gradients, captured = node.meta["val"]
    kept = [i for i, wanted in enumerate(score.wanted) if wanted]
    ours.meta = dict(node.meta)
    ours.meta["val"] = (*gradients, [captured[i] for i in kept])
    # Without it, Inductor would choose strides of its own for the arguments.
    ours.meta["eager_input_vals"] = fx.node.map_arg((ours.args, ours.kwargs), _value)
    for user in list(node.users):
        user.replace_input_with(node, ours)
        if user.args[1] == 3:
            user.meta["val"] = ours.meta["val"][3]
            _renumber(graph, user, kept)
    subgraphs = [call["fw_graph"], call["joint_graph"], call["block_mask"][-1]]
    graph.erase_node(node)
    for subgraph in subgraphs:
        if not subgraph.users:
            graph.erase_node(subgraph)


def _renumber(graph: fx.Graph, captured: Node, kept: list[int]) -> None:
    """Let the elements of a list of all captured tensors' gradients read a list of those that exist."""
    for element in list(captured.users):
        if element.args[1] in kept:
            element.args = (captured, kept.index(element.args[1]))
        else:
            graph.erase_node(element)  # it has no users
    if not captured.users:
        graph.erase_node(captured)


def _times(graph: fx.Graph, node: Node, factor: float) -> Node:
    product = graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
    product.meta["val"] = node.meta["val"] * factor
    return product


def _is_input(node: Node) -> bool:
    """Whether a tensor is an input of the graph, so that no kernel of the graph writes to its memory before it runs."""
    while node.op == "call_function" and node.target in _SAME_MEMORY:
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")
