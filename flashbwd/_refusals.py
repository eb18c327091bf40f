"""Completes the messages of the C++ checks with what only Python knows: names of dtypes, and hints about the layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flashbwd import _arguments

# The operators whose q, k and v are the caller's. flex_attention transposes its tensors, and checks them itself.
_LAYOUT_OF_CALLER = (
    "attention",
    "attention_backward",
    "attention_backward_out",
    "check_attention_inputs",
    "plan_attention_backward",
)
_OF_SDPA = "(batch, heads, seqlen, head_dim), the layout of scaled_dot_product_attention"
_UNNAMED_DTYPE = re.compile(r"flashbwd: (\S+) is another dtype,")
_HEADS = re.compile(r"flashbwd: k has \d+ heads, which does not divide q's \d+")
_SHAPE = re.compile(r"flashbwd: (\w+) has shape \(([\d, ]*)\), expected (?:[qkv]'s )?\(([\d, ]*)\)")


def complete(refusal: str, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message of a refused call with the name of an unusual dtype, or a hint about the layout."""
    given = _arguments.by_name(schema, args, kwargs)
    if (unnamed := _UNNAMED_DTYPE.match(refusal)) and isinstance(tensor := given.get(unnamed[1]), Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        return refusal.replace("another dtype", dtype, 1)
    if schema.name.removeprefix("flashbwd::") in _LAYOUT_OF_CALLER:
        return refusal + _layout_hint(refusal, given)
    return refusal


def _layout_hint(refusal: str, given: Mapping[str, Any]) -> str:
    """Return a hint if the refused shapes fit (batch, heads, seqlen, head_dim); otherwise an empty string."""
    if given.get("cu_seqlens_q") is not None:
        return ""
    shape = _SHAPE.match(refusal)
    if shape is not None:
        name, got, expected = shape[1], _sizes(shape[2]), _sizes(shape[3])
        if len(got) == 4 and name != "attn_bias" and (got[0], got[2], got[1], got[3]) == expected:
            return f"; its shape fits {_OF_SDPA}: pass {name}.transpose(1, 2)"
        fits = _all_fit(given) and _fits_other_layout(name, got, given)
    else:
        fits = _HEADS.fullmatch(refusal) is not None and _all_fit(given)
    return f"; the shapes fit {_OF_SDPA}: pass q.transpose(1, 2), and the same for the other tensors" if fits else ""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _all_fit(given: Mapping[str, Any]) -> bool:
    """Return whether q, k and v are a valid call in the other layout, and their keys have fewer heads than positions.

    Without the second condition, a wrong number of heads in the right layout could look like the other layout.
    """
    q, k, v = (given[name].shape for name in "qkv")
    if not len(q) == len(k) == len(v) == 4:
        return False
    heads_divide = k[1] > 0 and q[1] % k[1] == 0
    return heads_divide and k[1] < k[2] and q[0] == k[0] and q[3] == k[3] and k[:3] == v[:3]


def _fits_other_layout(name: str, got: tuple[int, ...], given: Mapping[str, Any]) -> bool:
    """Return whether the refused shape of an argument fits q and k in the other layout."""
    batch, heads, seqlen_q, _ = given["q"].shape
    if name in ("softmax_lse", "dlse"):
        rows = (batch, heads, seqlen_q)
        return got in (rows, (*rows, 1), (batch, heads, -(-seqlen_q // 32) * 32))
    if name == "attn_bias":
        full = (batch, heads, seqlen_q, given["k"].shape[2])
        return len(got) == 4 and all(size in (1, whole) for size, whole in zip(got, full, strict=True))
    return name in ("alibi_slopes", "sink") and got in ((heads,), (batch, heads))
