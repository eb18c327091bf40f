"""The calls that the short family must refuse, and why: its part of ``support_matrix``."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from kit.cases import Case

LONGEST = 128  # queries or keys
HEAD_DIMS = (32, 64, 80, 96)  # of its tiles
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}  # per block
SHARED_BYTES_OF_OTHERS = 99 * 1024

LENGTH = f"it takes at most {LONGEST} queries and keys"
HEAD_DIMENSION = "it has no tile for head dimensions"
WHOLE_VECTORS = "that are multiples of 16 bytes"
SUM_OVER_ROWS = "it does not sum the gradient of attn_bias over queries or keys"
SUM_OVER_HEADS = "it does not sum the gradient of attn_bias over the heads of each sequence"
SUM_WITH_GROUPS = "it does not sum the gradient of attn_bias over batches with grouped-query attention"
SHARED_MEMORY = "bytes of shared memory per block, the device has"


def refusals(arguments: dict[str, Any], capability: tuple[int, int], need_dbias: bool) -> list[str]:
    """Reasons, as parts of the message; empty dimensions, dtypes and alignment are those of other families."""
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    longest = longest_of(arguments)
    head_dim = max(q.shape[-1], v.shape[-1])
    reasons = []
    for option, feature in (("softcap", "softcap"), ("dropout_p", "dropout")):
        if arguments.get(option, 0.0) > 0:
            reasons.append(f"it takes no {feature}")
    if arguments.get("sink") is not None:
        reasons.append("it takes no sink")
    if max(longest) > LONGEST:
        reasons.append(LENGTH)
    if head_dim > max(HEAD_DIMS):
        reasons.append(HEAD_DIMENSION)
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        reasons.append(WHOLE_VECTORS)
    heads = q.shape[-2]
    groups = heads != k.shape[-2]
    bias = arguments.get("attn_bias") if need_dbias else None
    broadcast = broadcast_of(bias, (batch_of(arguments), heads, *longest)) if bias is not None else (False,) * 4
    reasons += _refusals_of_gradient(broadcast, batch_of(arguments), groups)
    if max(longest) <= LONGEST and head_dim <= max(HEAD_DIMS):
        needed = shared_bytes(max(longest), head_dim, groups, any(broadcast[:2]))
        if needed > SHARED_BYTES.get(capability, SHARED_BYTES_OF_OTHERS):
            reasons.append(SHARED_MEMORY)
    return reasons


def nearest_case(case: Case) -> Case:
    """Return ``case`` without the features that the family refuses for every shape.

    Random cases of the whole contract have one of them so often that few would be left.
    """
    changes: dict[str, Any] = {"softcap": 0.0, "dropout_p": 0.0, "sink": None}
    for name in ("head_dim", "head_dim_v"):
        changes[name] = -(-getattr(case, name) // 8) * 8
    if case.bias is not None:
        changes["bias"] = case.bias[:2] + "qk"
    return dataclasses.replace(case, **changes)


def batch_of(arguments: dict[str, Any]) -> int:
    lengths = arguments.get("cu_seqlens_q")
    return arguments["q"].shape[0] if lengths is None else len(lengths) - 1


def longest_of(arguments: dict[str, Any]) -> tuple[int, int]:
    """The longest sequence of queries and of keys."""
    packed = arguments.get("cu_seqlens_q") is not None
    queries, keys = (arguments[f"max_seqlen_{x}"] if packed else arguments[x].shape[1] for x in "qk")
    return queries, keys


def broadcast_of(bias: Tensor, full: tuple[int, int, int, int]) -> tuple[bool, ...]:
    """Which dimensions of a bias are broadcast."""
    return tuple(size != whole for size, whole in zip(bias.shape, full, strict=True))


def _refusals_of_gradient(broadcast: tuple[bool, ...], batch: int, groups: bool) -> list[str]:
    over_batches, over_heads, over_queries, over_keys = broadcast
    reasons = []
    if over_queries or over_keys:
        reasons.append(SUM_OVER_ROWS)
    if over_heads and not over_batches and batch > 1:
        reasons.append(SUM_OVER_HEADS)
    if over_batches and not over_heads and groups:
        reasons.append(SUM_WITH_GROUPS)
    return reasons


def shared_bytes(longest: int, head_dim: int, groups: bool, sums_bias: bool) -> int:
    """Bytes of shared memory without which the kernel cannot run."""
    rows = 64 if longest <= 64 else 128
    columns = next(tile for tile in HEAD_DIMS if head_dim <= tile)
    tiles, scores = 4 * rows * columns * 2, 2 * rows * 64 * 2
    sums = (2 * rows * columns * 4 if groups else 0) + (rows * rows * 4 if sums_bias else 0)
    return tiles + scores + sums
