"""The FlexAttention backward of a compiled graph: one operator, with the modifications as Python source text.

``flashbwd.integrations.flex_pass`` puts it in the place of PyTorch's operator. The text is that of the graphs that
PyTorch's compiler traced (``flashbwd.mods.in_graph`` says why they are text).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd import _ops
from flashbwd.flex import counts
from flashbwd.flex.cache import keep_for_graph, kernel_lists_maker, kernel_lists_of
from flashbwd.flex.gradients import gradients
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError
from flashbwd.flex.storages import ByStorage
from flashbwd.flex.tile import Tile
from flashbwd.mods.in_graph import as_outside, bound
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.modifications import Mod

__all__ = ["DETERMINISTIC", "GraphMask", "call_of"]

# The kernel option by which flashbwd.flex_attention asks for deterministic gradients in a compiled graph. PyTorch's
# kernels do not read it. Its forward drops options that begin with "bwd_".
DETERMINISTIC = "bwd_FLASHBWD_DETERMINISTIC"
_NAME = "flex_attention_backward_in_graph"
_ENTRIES = 64  # most block masks whose lists are remembered at a time
_remembered: ByStorage[KernelLists] = ByStorage(_ENTRIES)


@dataclass(frozen=True, eq=False)
class GraphMask:
    """The fields of a BlockMask that a backward reads, from the tensors that a graph passes."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    mask_mod: Mod

    def query_lists(self) -> list[Tensor]:
        lists = (self.q_num_blocks, self.q_indices, self.full_q_num_blocks, self.full_q_indices)
        return [tensor for tensor in lists if tensor is not None]


def call_of(
    lengths: tuple[int, int],
    mask: Sequence[Tensor],
    block_size: Sequence[int],
    mask_mod: str,
    mask_captures: Sequence[Tensor],
    mask_numbers: Sequence[int],
    mask_number_positions: Sequence[int],
    score_mod: str,
    score_captures: Sequence[Tensor],
    score_numbers: Sequence[int],
    score_number_positions: Sequence[int],
    scale: float,
) -> DecodingCall:
    """Return the call that the arguments of the operator describe.

    Parameters
    ----------
    mask : sequence of Tensor
        The lists of the block mask in the order of :class:`GraphMask`: none, four, or eight.
    mask_numbers, mask_number_positions : sequence of int
        The numbers that ``mask_mod`` captures, and where they stand among all of its captures.
    score_numbers, score_number_positions : sequence of int
        Those of ``score_mod``.
    score_mod : str
        Empty if there is none.
    """
    blocks = None
    if mask:
        numbers = tuple(zip(mask_number_positions, mask_numbers, strict=True))
        lists = [*mask, *[None] * (8 - len(mask))]
        size = (block_size[0], block_size[1])
        blocks = GraphMask(*lists, size, lengths, bound(mask_mod, mask_captures, numbers))  # type: ignore[arg-type, call-arg]
    numbers = tuple(zip(score_number_positions, score_numbers, strict=True))
    score = bound(score_mod, score_captures, numbers) if score_mod else None
    return DecodingCall(score, blocks, scale, mask_captured=tuple(mask_captures), unrounded=True)


def _lists_of(call: DecodingCall, query: Tensor, key: Tensor, tile: Tile) -> KernelLists:
    """As :func:`~flashbwd.flex.cache.kernel_lists_of`, for the tensors of a graph."""
    mask: GraphMask | None = call.block_mask
    if mask is None:
        return kernel_lists_of(call, query, key, tile)
    key_of_call, make = kernel_lists_maker(mask, query, key, tile)
    identity = (*key_of_call, mask.BLOCK_SIZE, mask.mask_mod.identity)  # type: ignore[attr-defined]
    return keep_for_graph(_remembered.get(identity, [*mask.query_lists(), *call.mask_captured], make))


def _made_lists_of(call: DecodingCall, query: Tensor, key: Tensor, tile: Tile) -> KernelLists:
    """As :func:`_lists_of`, but computed in each call."""
    if call.block_mask is None:
        return kernel_lists_of(call, query, key, tile)
    _, make = kernel_lists_maker(call.block_mask, query, key, tile)
    return keep_for_graph(make())


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor whose dimensions have this order, from the outermost to the innermost."""
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return strides


def _in_order(grad: Tensor, like: Tensor, order: Sequence[int]) -> Tensor:
    """Return a gradient in the dtype of ``like``, dense in this order of dimensions. Copies it only if it must."""
    strides = _dense_strides(like.shape, order)
    pairs = zip(grad.shape, grad.stride(), strides, strict=True)
    if grad.dtype == like.dtype and all(size == 1 or have == want for size, have, want in pairs):
        return grad if list(grad.stride()) == strides else grad.as_strided(grad.shape, strides)
    return like.new_empty_strided(like.shape, strides).copy_(grad)


class _Refusal:
    """Counts a call that the reference has to compute on a GPU, and warns about it.

    The pass replaces only calls that a kernel supports. What it cannot know are the contents of a block mask.
    """

    def __init__(self, query: Tensor) -> None:
        self._on_gpu = query.is_cuda
        self.counted = False

    def __call__(self, reason: UnsupportedError) -> None:
        if not self._on_gpu:
            return  # only tests run the operator there
        self.counted = True
        counts.compiled.fall_back(f"{reason}; the reference ran instead of PyTorch's kernel")
        if not torch.cuda.is_current_stream_capturing():
            warnings.warn(f"flashbwd: a compiled model gets the slow reference backward: {reason}", stacklevel=2)


# ---- the operator ----

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, Tensor[] mask, "
    "SymInt[] block_size, str mask_mod, Tensor[] mask_captures, SymInt[] mask_numbers, int[] mask_number_positions, "
    "str score_mod, Tensor[] score_captures, SymInt[] score_numbers, int[] score_number_positions, bool[] wanted, "
    "float scale, bool remember, int[] orders, "
    "bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dcaptures)"
)
_Grads = tuple[Tensor, Tensor, Tensor, list[Tensor]]


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    mask: list[Tensor],
    block_size: list[int],
    mask_mod: str,
    mask_captures: list[Tensor],
    mask_numbers: list[int],
    mask_number_positions: list[int],
    score_mod: str,
    score_captures: list[Tensor],
    score_numbers: list[int],
    score_number_positions: list[int],
    wanted: list[bool],
    scale: float,
    remember: bool,
    orders: list[int],
    deterministic: bool,
) -> _Grads:
    """Compute the gradients of query, key, value and the wanted ones of the tensors that ``score_mod`` captures.

    Parameters
    ----------
    lse, dlse : Tensor
        Of the natural logarithm.
    remember : bool
        Whether the storages of the block mask stay what they are between calls.
    orders : list of int
        The dimensions of dq, dk and dv, from the outermost to the innermost in memory. They are dense in this order.
    deterministic : bool
        Require gradients with equal bits in every run. ``torch.use_deterministic_algorithms(True)`` implies it.
    """
    captures = [c.detach().requires_grad_(w) for c, w in zip(score_captures, wanted, strict=True)]
    of_mask = (mask, block_size, mask_mod, mask_captures, mask_numbers, mask_number_positions)
    of_score = (score_mod, captures, score_numbers, score_number_positions)
    call = call_of((query.shape[2], key.shape[2]), *of_mask, *of_score, scale)
    dlse = None if dlse is None else dlse.contiguous()
    leaves = [capture for capture in captures if capture.requires_grad]
    order = deterministic or torch.are_deterministic_algorithms_enabled()
    lists_of, refusal = _lists_of if remember else _made_lists_of, _Refusal(query)
    with as_outside():
        dq, dk, dv, found = gradients(
            call, query, key, value, out, lse.contiguous(), dout, dlse, leaves, order, lists_of, refusal
        )
    if not refusal.counted:
        counts.compiled.hit()
    dq, dk, dv = (
        _in_order(grad, like, orders[4 * i : 4 * i + 4])
        for i, (grad, like) in enumerate(zip((dq, dk, dv), (query, key, value), strict=True))
    )
    return dq, dk, dv, [grad.contiguous() for grad in found]


def _backward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> _Grads:
    captures, _, _, wanted, *_, orders, _ = rest[11:]
    dq, dk, dv = (
        like.new_empty_strided(like.shape, _dense_strides(like.shape, orders[4 * i : 4 * i + 4]))
        for i, like in enumerate((query, key, value))
    )
    found = [
        torch.empty_like(c, memory_format=torch.contiguous_format) for c, w in zip(captures, wanted, strict=True) if w
    ]
    return dq, dk, dv, found


torch.library.define(f"flashbwd::{_NAME}", _SCHEMA, lib=_ops.library)
torch.library.impl(f"flashbwd::{_NAME}", "CompositeExplicitAutograd", lib=_ops.library)(_backward)
torch.library.register_fake(f"flashbwd::{_NAME}", _backward_fake, lib=_ops.library)
_ops.library.refuse_derivatives(_NAME)
