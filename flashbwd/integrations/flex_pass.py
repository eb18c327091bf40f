"""A pass over Inductor's graphs that replaces PyTorch's FlexAttention backward by the operator of this library.

``flashbwd.integrations.flex_node`` reads PyTorch's operator. A backward that no kernel of this library computes stays
as it is, and :func:`flashbwd.stats` counts the reason.

In PyTorch's operator the LSE has base 2, and so has its gradient: ``lse = lse_2 * ln 2``, ``dlse = dlse_2 / ln 2``.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flashbwd import _ops
from flashbwd._attention_arguments import backend as backend_option
from flashbwd.flex import backends, counts, graph_operator
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError
from flashbwd.flex.score_change import hides_above_diagonal
from flashbwd.flex.tile import Tile
from flashbwd.integrations.flex_node import AFTER_PYTORCH, DeclinedError, Mask, Node, Score, call_of, mask_of, score_of
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.modifications import IN_16_BITS

__all__ = ["flex_pass_key", "replace_flex_backwards"]

_OURS = torch.ops.flashbwd.flex_attention_backward_in_graph.default
_SAME_MEMORY = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_SOURCES = ("flex", "integrations", "mods", "reference")
_COMPUTED_BY_THE_REFERENCE: frozenset[str] = frozenset()  # device types; tests add the CPU


def replace_flex_backwards(graph: fx.Graph) -> None:
    """Replace every FlexAttention backward of a graph that a kernel of this library computes."""
    for node in graph.find_nodes(op="call_function", target=AFTER_PYTORCH):
        try:
            call = call_of(node)
            mask, score = mask_of(call, graph), score_of(call, graph)
            _check_users(node, score)
            orders = [dim for i in range(3) for dim in _order(node.meta["val"][i])]
            _check_backend(call, mask, score)
        except DeclinedError as reason:
            counts.compiled.fall_back(str(reason))
        except Exception as error:  # a graph of a PyTorch that this library does not know must still compile
            counts.compiled.fall_back(f"the pass failed: {type(error).__name__}: {error}")
        else:
            _replace(graph, node, call, mask, score, orders)


def flex_pass_key() -> tuple[str, ...]:
    """Return what the pass depends on besides the graph, for the keys of Inductor's cache."""
    return (*_installation(), backend_option(), *sorted(_COMPUTED_BY_THE_REFERENCE))


@functools.cache
def _installation() -> tuple[str, ...]:
    """Identify the sources and libraries of this package, which determine the calls that have kernels."""
    package = Path(_ops.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (package / folder).glob("*.py")):
        digest.update(path.read_bytes())
    libraries = [(package / f"{name}.so").stat() for name in _ops.loaded]
    return digest.hexdigest(), *(f"{stat.st_size} {stat.st_mtime_ns}" for stat in libraries)


def _check_users(node: Node, score: Score) -> None:
    for user in node.users:
        if user.target is not operator.getitem:
            raise DeclinedError(f"the graph passes all gradients to {user.target}")
        if user.args[1] != 3:
            continue
        for captured in user.users:
            if captured.target is not operator.getitem:
                raise DeclinedError(f"the graph passes all gradients of captured tensors to {captured.target}")
            if captured.users and captured.args[1] not in _with_gradients(score):
                raise DeclinedError("the graph reads a gradient that the derivative of score_mod does not have")


def _with_gradients(score: Score) -> list[int]:
    """Return the places of the captured tensors that get a gradient, in PyTorch's list of captured values."""
    return [position for position, wanted in zip(score.positions, score.wanted, strict=True) if wanted]


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


def _check_backend(call: dict[str, Any], mask: Mask, score: Score) -> None:
    from torch._inductor import config

    names = ("query", "key", "value", "out", "logsumexp")
    query, key, value, out, lse = (_value(call[name]) for name in names)
    if not query.dtype == key.dtype == value.dtype:
        raise DeclinedError("query, key and value have different dtypes")
    rounds = config.emulate_precision_casts or not config.triton.codegen_upcast_to_fp32
    if rounds and _has_values_in_16_bits(mask, score, query.dtype):
        raise DeclinedError("an option of Inductor lets it round values in 16 bits")
    if query.device.type in _COMPUTED_BY_THE_REFERENCE:
        return
    if query.device.type != "cuda":
        raise DeclinedError(f"query is on the device {query.device.type}")
    if config.cpp_wrapper:
        raise DeclinedError("Inductor's cpp_wrapper calls no operators in Python")
    dlse = None if call["grad_logsumexp"] is None else lse
    try:
        _plan(call["scale"], mask, score, (out, query, key, value, out, lse, dlse), call["deterministic"])
    except UnsupportedError as reason:
        # With gradients of captured tensors, PyTorch's kernel is not deterministic. The reference is.
        if not (call["deterministic"] and any(score.wanted)):
            raise DeclinedError(str(reason)) from None


def _has_values_in_16_bits(mask: Mask, score: Score, dtype: torch.dtype) -> bool:
    """Whether a modification computes in 16 bits. In PyTorch's graph, the score has the dtype of the query."""
    if (score.text and dtype in IN_16_BITS) or "float16" in mask.text + score.text:
        return True
    return any(_value(node).dtype in IN_16_BITS for node in (*mask.captures, *score.captures))


def _plan(
    scale: float, mask: Mask, score: Score, tensors: Sequence[Tensor | None], deterministic: bool = False
) -> None:
    """Raise UnsupportedError unless a kernel computes the backward, as far as this does not depend on values.

    Parameters
    ----------
    tensors : sequence of Tensor
        dout, query, key, value, out, lse and dlse.
    """
    from torch._inductor import config

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
            [_hint(_value(number)) for number in score.numbers],
            score.number_positions,
            scale,
        )
        wanted = [capture for capture, want in zip(score_captures, score.wanted, strict=True) if want]
        kernels = [backends.choose(call, query, key, value, wanted, deterministic, _any_lists)]
        if _may_need_another(kernels[0], *tensors[1:3]):
            kernels.append(backends.choose(call, query, key, value, wanted, deterministic, _any_lists, recognise=False))
        device = query.device.index or 0
        pairs = query.shape[2] * key.shape[2]
        if any(tensor.numel() >= pairs for tensor in wanted) and not all(map(_is_fast_for_biases, kernels)):
            raise UnsupportedError("PyTorch's kernel is faster for the gradient of a tensor with an element per pair")
    if config.triton.cudagraphs and any(map(_may_take_lists, kernels)):
        raise UnsupportedError("CUDA graphs cannot compute the lists of block_mask (mode='reduce-overhead')")
    with unset_fake_temporarily():
        metas: list[Any] = [None if t is None else _like(t, torch.device("meta")) for t in tensors]
        dout, query, key, value, out, lse, dlse = metas
        for kernel in kernels:
            kernel.plan(dout, query, key, value, out, lse, dlse, device)


def _is_fast_for_biases(kernel: backends.KernelCall) -> bool:
    """Return whether a kernel computes the gradient of a tensor with an element per pair faster than PyTorch's.

    Kernels that are compiled at run time add to it atomically, and none for Hopper computes it after a softcap
    (docs/lab/flex_attention.md).
    """
    return kernel.score_mod is None and "softcap" not in kernel.options


def _may_take_lists(kernel: backends.KernelCall) -> bool:
    """Return whether the call needs lists, or would if the rows of its bias were not aligned."""
    return kernel.lists is not None or (kernel.bias is not None and not kernel.bias.has_gradient)


def _may_need_another(kernel: backends.KernelCall, query: Tensor | None, key: Tensor | None) -> bool:
    """Return whether another kernel computes the call if Sk - Sq changes, because ALiBi's distance does not follow."""
    assert query is not None and key is not None
    if kernel.slopes is None:
        return False
    return not statically_known_true(key.shape[2] - query.shape[2] == kernel.slopes.alibi.offset)


def _like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return an empty tensor of the sizes and strides that a tensor was traced with."""
    sizes, strides = _hints(tensor)
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=device or tensor.device)


def _any_lists(call: DecodingCall, query: Tensor, key: Tensor, tile: Tile) -> KernelLists:
    """Lists for a plan. Whether a kernel takes a call does not depend on how long the lists are.

    ALiBi without an absolute value needs a mask that hides later keys. Here ``mask_mod`` must prove this.
    """
    shapes = ((1, 1, -(-key.shape[2] // tile.keys), 4), (1, 4), (1, tile.queries * tile.keys // 32))
    with unset_fake_temporarily():
        lists, entries, bits = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes)
    mask = call.block_mask
    hides_above = mask is not None and hides_above_diagonal(mask.mask_mod, key.shape[2] - query.shape[2])
    return KernelLists(lists, entries, bits, False, tile, hides_above)


# ---- replacing it ----


def _replace(graph: fx.Graph, node: Node, call: dict[str, Any], mask: Mask, score: Score, orders: list[int]) -> None:
    with graph.inserting_before(node):
        lse = _times(graph, call["logsumexp"], math.log(2))
        dlse = call["grad_logsumexp"]
        dlse = None if dlse is None else _times(graph, dlse, 1 / math.log(2))
        args = (
            *(call[name] for name in ("query", "key", "value", "out")),
            *(lse, call["grad_out"], dlse),
            *(mask.lists, mask.block_size, mask.text, mask.captures, mask.numbers, mask.number_positions),
            *(score.text, score.captures, score.numbers, score.number_positions, score.wanted, call["scale"]),
            all(map(_is_input, (*mask.lists, *mask.captures))),
            orders,
            call["deterministic"],
        )
        ours = graph.call_function(_OURS, args)
    *gradients, captured = node.meta["val"]
    kept = _with_gradients(score)
    ours.meta = dict(node.meta)
    ours.meta["val"] = (*gradients, [captured[i] for i in kept])
    # Without it, Inductor would choose strides of its own for the arguments.
    ours.meta["eager_input_vals"] = fx.node.map_arg((ours.args, ours.kwargs), _value)
    for user in list(node.users):
        user.replace_input_with(node, ours)
        if user.args[1] == 3:
            user.meta["val"] = ours.meta["val"][3]
            _renumber(graph, user, kept)
    subgraphs = [call["fw_graph"], call["joint_graph"], call["block_mask"]["mask_mod"]]
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
