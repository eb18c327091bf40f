"""Flex decoding inside torch.compile: one operator in the graph, with the modifications as Python source text.

PyTorch's compiler can trace the functions that are passed to its own flex_attention. This module registers the same
tracing for a higher-order operator. That operator passes the source text of the traced graphs, and the tensors that
they capture, to a normal operator, which runs the code that is used without a compiler. The modifications are text,
because another process may load the compiled graph from a disk cache and does not have this process's objects.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from flashbwd._ops import library
from flashbwd.mods.captures import FixedMod
from flashbwd.reference.decoding import Blocks, DecodingCall
from flashbwd.reference.modifications import IN_16_BITS, Mod, accumulator

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, lse, max_scores, and out in the accumulation dtype
Forward = Callable[[DecodingCall, Tensor, Tensor, Tensor, bool], Results]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, list[Tensor]]]

_NAME = "flashbwd_flex_decoding"
_KNOWN_NAMES = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan, "NoneType": type(None)}


# ---- while the compiler traces ----


class _FlexDecoding(HigherOrderOperator):
    """The higher-order operator in the traced program. The compiler replaces its functions by graphs."""

    def __init__(self) -> None:
        super().__init__(_NAME)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: fx.GraphModule,
        block_mask: tuple[Any, ...],
        scale: float,
        options: dict[str, Any],
        score_captures: Sequence[Any],
        mask_captures: Sequence[Any],
    ) -> Results:
        *lists, q_block, kv_block, mask_mod = block_mask
        result: Results = torch.ops.flashbwd.flex_decoding_in_graph(
            query,
            key,
            value,
            [tensor for tensor in lists if tensor is not None],
            _tensors(score_captures, query),
            _tensors(mask_captures, query),
            text_of("score_mod", score_mod) if options["score_mod"] else "",
            text_of("mask_mod", mask_mod) if lists[0] is not None else "",
            q_block,
            kv_block,
            scale,
            options["splits"],
            options["prescale"],
            options["rows_safe"],
            options["exact"],
        )
        return result


_flex_decoding: Callable[..., Results] = _FlexDecoding()


def compiler_traces_functions() -> bool:
    """Register how PyTorch's compiler traces the operator's functions. Return False if this PyTorch cannot trace them.

    The compiler calls this function while it traces. Until then, nothing imports the compiler.
    """
    try:
        from torch._dynamo.variables import higher_order_ops as known

        known._hop_name_to_variable_class[_NAME] = known.FlexAttentionHigherOrderVariable
    except (ImportError, AttributeError):
        return False
    return True


# torch.compiler.assume_constant_result sets the same attribute, but imports the compiler.
compiler_traces_functions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attend_in_graph(call: DecodingCall, query: Tensor, key: Tensor, value: Tensor) -> Results:
    """Call the higher-order operator. The compiler traces this function."""
    mask = call.block_mask
    blocks: tuple[Any, ...] = (None, None, None, None, 1, 1, None)
    if mask is not None:
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        blocks = (*lists, *mask.BLOCK_SIZE, mask.mask_mod)
    options = {
        "score_mod": call.score_mod is not None,
        "splits": call.splits or 0,
        "prescale": call.prescale,
        "rows_safe": call.rows_safe,
        "exact": torch.is_grad_enabled(),
    }
    score_mod = _unchanged if call.score_mod is None else call.score_mod
    return _flex_decoding(query, key, value, score_mod, blocks, call.scale, options)


def _unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _tensors(captures: Sequence[Any], like: Tensor) -> list[Tensor]:
    """Convert captured Python numbers, which the compiler treats as dynamic, to tensors."""
    return [c if isinstance(c, Tensor) else torch.full((), c, device=like.device) for c in captures]


def text_of(name: str, graph_module: fx.GraphModule) -> str:
    """Return the Python source of a graph, with the imports that it needs, as JSON.

    JSON has no line breaks: the compiler writes string arguments into comments of the code that it generates.
    """
    graph = _with_numbers(graph_module)
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise RuntimeError(f"flashbwd: {name} uses {node.target}, which is not supported inside torch.compile")
    code = graph.python_code("self")
    imports = [
        f"import {value.__name__} as {name}"
        if isinstance(value, type(torch))
        else f"from {value.__module__} import {value.__qualname__} as {name}"
        for name, value in code.globals.items()
        if name not in _KNOWN_NAMES and name in code.src
    ]
    return json.dumps("\n".join(["from __future__ import annotations", *imports, code.src]))


def _with_numbers(graph_module: fx.GraphModule) -> fx.Graph:
    """Return a copy of a graph whose constant tensors of one number, such as the 0 in ``bias[0]``, are in its code."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, node.target, None)
        if not isinstance(constant, Tensor) or isinstance(constant, FakeTensor):
            continue
        if constant.dim() != 0 or constant.device.type != "cpu":
            continue  # reading a tensor on another device would wait for that device
        with graph.inserting_before(node), unset_fake_temporarily():
            options: dict[str, Any] = {"dtype": constant.dtype, "device": constant.device}
            number = graph.call_function(torch.ops.aten.full.default, ([], constant.item()), options)
        node.replace_all_uses_with(number)
        graph.erase_node(node)
    return graph


# ---- when the graph runs ----


@functools.lru_cache(maxsize=1024)
def function_of(text: str) -> Callable[..., Tensor]:
    names: dict[str, Any] = dict(_KNOWN_NAMES)
    exec(compile(json.loads(text), f"<{_NAME}>", "exec"), names)
    function: Callable[..., Tensor] = names["forward"]
    return function


def bound(text: str, captures: Sequence[Tensor], numbers: tuple[tuple[int, int], ...] = ()) -> Mod:
    """Return the function of a text. Text and numbers are its identity: they determine what the function computes.

    Parameters
    ----------
    numbers : tuple of (int, int)
        Captured numbers: the position among all captures, in ascending order, and the value.
    """
    function = function_of(text)

    def call(arguments: tuple[Tensor, ...], tensors: Sequence[Tensor]) -> Tensor:
        everything: list[Any] = list(tensors)
        for position, number in numbers:
            everything.insert(position, number)
        return function(None, *arguments, *everything)

    return FixedMod((text, numbers), call, captures)


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] mask, Tensor[] score_captures, Tensor[] mask_captures, "
    "str score_mod, str mask_mod, int q_block, int kv_block, float scale, int splits, bool prescale, bool rows_safe, "
    "bool exact"
)


def _call_of(
    lengths: tuple[int, int],
    mask: list[Tensor],
    score_captures: list[Tensor],
    mask_captures: list[Tensor],
    score_mod: str,
    mask_mod: str,
    q_block: int,
    kv_block: int,
    scale: float,
    splits: int,
    prescale: bool,
    rows_safe: bool,
    exact: bool,
) -> DecodingCall:
    blocks = None
    if mask:
        counts, indices = (mask[2], mask[3]) if len(mask) == 4 else (None, None)
        mod = bound(mask_mod, mask_captures)
        blocks = Blocks(mask[0], mask[1], counts, indices, (q_block, kv_block), lengths, mod)
    score = bound(score_mod, score_captures) if score_mod else None
    return DecodingCall(score, blocks, scale, prescale, rows_safe, splits or None)


def shaped_like_query(query: Tensor, head_dim: int) -> Tensor:
    """Return an empty (B, H, Sq, head_dim) tensor with query's dtype and order of strides, and a last stride of 1.

    It is no view: autograd refuses writes to a view that a function returns.
    """
    given, sizes = query.stride(), (*query.shape[:3], head_dim)
    strides, elements = [0] * 4, 1
    for dim in (3, *sorted(range(2, -1, -1), key=lambda dim: given[dim])):
        strides[dim], elements = elements, elements * sizes[dim]
    return query.new_empty_strided(sizes, strides)


_excluded_at_import = torch._C._dispatch_tls_local_exclude_set()


def as_outside() -> AbstractContextManager[None]:
    """Reset the dispatcher to its state outside of an operator, because the reference uses vmap and autograd."""
    included = torch._C._dispatch_tls_local_include_set()
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(included, _excluded_at_import)
    return guard


def apart(tensor: Tensor, *others: Tensor) -> Tensor:
    """Return the tensor, or a copy if it shares its storage with one of the others.

    The results of an operator in a graph must not share storage, but the kernels return out, lse and max_scores in one
    allocation.
    """
    storages = [other.untyped_storage()._cdata for other in others]
    return tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor


def _exact_size(query: Tensor, value: Tensor, exact: bool) -> tuple[int, ...]:
    """Return the shape of the unrounded output: empty if it is not requested, or equal to the rounded one."""
    return (*query.shape[:3], value.shape[3]) if exact and query.dtype in IN_16_BITS else (0,)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Results:
    lse = query.new_empty(query.shape[:3], dtype=accumulator(query.dtype))
    exact = lse.new_empty(_exact_size(query, value, rest[-1]))
    return shaped_like_query(query, value.shape[3]), lse, torch.empty_like(lse), exact


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    wanted, query, key, value, _, captures = args[4:10]
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
    return dq, dk, dv, [torch.empty_like(c) for c, w in zip(captures, wanted, strict=True) if w]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    query, key, value, mask, score_captures, mask_captures, *ctx.rest = inputs
    ctx.counts = (len(mask), len(score_captures))
    out, lse, _, exact = output
    ctx.save_for_backward(
        exact if exact.numel() else out, lse, query, key, value, *mask, *score_captures, *mask_captures
    )
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    out, lse, query, key, value, *tensors = ctx.saved_tensors
    lists, scores = ctx.counts
    mask, captures, others = tensors[:lists], tensors[lists : lists + scores], tensors[lists + scores :]
    wanted = list(ctx.needs_input_grad[4])
    dq, dk, dv, found = torch.ops.flashbwd.flex_decoding_in_graph_backward(
        out, lse, dout, dlse, wanted, query, key, value, mask, captures, others, *ctx.rest
    )
    grads = iter(found)
    dcaptures = [next(grads) if w else None for w in wanted]
    return dq, dk, dv, [None] * lists, dcaptures, [None] * len(others), *[None] * len(ctx.rest)


def implement(forward: Forward, backward: Backward) -> None:
    """Define the operators. ``forward`` and ``backward`` are the functions that run without a compiler."""

    def run_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Results:
        call = _call_of((query.shape[2], key.shape[2]), *rest)
        with as_outside():
            out, lse, largest, exact = forward(call, query, key, value, rest[-1])
        empty = _exact_size(query, value, rest[-1]) == (0,)
        unrounded = lse.new_empty(0) if empty else exact.float().contiguous()
        return out, apart(lse, out), apart(largest, out, lse), unrounded

    def run_backward(
        out: Tensor,
        lse: Tensor,
        dout: Tensor | None,
        dlse: Tensor | None,
        wanted: list[bool],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: list[Tensor],
        score_captures: list[Tensor],
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        captures = [c.detach().requires_grad_(w) for c, w in zip(score_captures, wanted, strict=True)]
        leaves = [c for c in captures if c.requires_grad]
        call = _call_of((query.shape[2], key.shape[2]), mask, captures, *rest)
        with as_outside():
            dq, dk, dv, dleaves = backward(call, query, key, value, out, lse, dout, dlse, leaves)
        grads = [g.to(t.dtype) for g, t in zip((dq, dk, dv, *dleaves), (query, key, value, *leaves), strict=True)]
        return grads[0], grads[1], grads[2], grads[3:]

    name = "flashbwd::flex_decoding_in_graph"
    gradients = "(Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, bool[] wanted, "
    torch.library.define(
        name, f"({_INPUTS}) -> (Tensor out, Tensor lse, Tensor max_scores, Tensor exact_out)", lib=library
    )
    torch.library.define(
        f"{name}_backward",
        f"{gradients}{_INPUTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dcaptures)",
        lib=library,
    )
    torch.library.impl(name, "CompositeExplicitAutograd", lib=library)(run_forward)
    torch.library.impl(f"{name}_backward", "CompositeExplicitAutograd", lib=library)(run_backward)
    torch.library.register_fake(name, _forward_fake, lib=library)
    torch.library.register_fake(f"{name}_backward", _backward_fake, lib=library)
    torch.library.register_autograd(name, _gradients, setup_context=_save_for_backward, lib=library)
