"""What both attention implementations for Transformers use: their names, and a cache."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashbwd.flex.cache import address_of

__all__ = ["FLEX_NAME", "NAME", "OncePerTensor"]

#: The value of ``attn_implementation`` that selects :func:`flashbwd.attention`.
NAME = "flashbwd"
#: The value of ``attn_implementation`` that selects :func:`flashbwd.flex_attention`. Transformers treats a name with
#: "flash" as FlashAttention, which refuses chunked masks. It checks that a model supports FlexAttention if the name
#: contains "flex_attention".
FLEX_NAME = "flex_attention_bwd"


class OncePerTensor:
    """Caches a function's result for the last tensor argument, because all layers of a model pass the same tensor.

    It caches nothing for inference tensors, which do not count the writes to them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._last: tuple[weakref.ref[Tensor], tuple[Any, ...], Any] | None = None
        functools.update_wrapper(self, function)

    def __call__(self, tensor: Tensor, *args: Any) -> Any:
        if tensor.is_inference():
            return self._function(tensor, *args)
        key = (tensor._version, address_of(tensor), *args)
        if self._last is not None and self._last[0]() is tensor and self._last[1] == key:
            return self._last[2]
        result = self._function(tensor, *args)
        self._last = (weakref.ref(tensor), key, result)
        return result
