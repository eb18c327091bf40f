"""Calls score_mod and mask_mod: on scalars, in modes that find what they capture, and vectorised over indices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from flashbwd.reference.modes import INDEX_OPERATORS, index_dtype

Mod = Callable[..., Tensor]


class LeavesFor(TorchFunctionMode):
    """Replaces each of these tensors by a leaf when a function reads it.

    The gradient of a captured tensor then stops at the leaf, even if another captured tensor was its input. The leaves
    of 16-bit tensors are float32, so that no sum is made in 16 bits. With ``rounds``, elements are in 16 bits again
    after they are gathered, and so is each contribution to their gradient. Other tensors that were made in inference
    mode are replaced by copies, because autograd saves none of them.
    """

    def __init__(self, tensors: Sequence[Tensor], rounds: bool = True) -> None:
        super().__init__()
        self._rounds = rounds
        self._leaves = {id(t): t.detach().to(sum_dtype(t)).requires_grad_() for t in tensors}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that ids stay unique

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._leaves[id(tensor)] for tensor in tensors]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (func is Tensor.__getitem__ or func in INDEX_OPERATORS) and id(args[0]) in self._leaves:
            return self._like(args[0], func(self._leaves[id(args[0])], *args[1:]))
        args, kwargs = tree_map_only(Tensor, self._leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _leaf(self, tensor: Tensor) -> Tensor:
        leaf = self._leaves.get(id(tensor))
        if leaf is not None:
            return self._like(tensor, leaf)
        if not tensor.is_inference():
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, tensor.clone()
        return self._copies[id(tensor)][1]

    def _like(self, tensor: Tensor, leaf: Tensor) -> Tensor:
        return leaf.to(tensor.dtype) if self._rounds else leaf


IN_16_BITS = (torch.float16, torch.bfloat16)
_CASTS = (Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as, torch.ops.aten._to_copy.default)
_CONSTANTS = (torch.tensor, torch.as_tensor)  # Inductor's kernels read their values as they are, in 16 bits
# Functions that choose elements of a tensor, which may be large. Their results are exact.
_CHOICES = frozenset(
    {"__getitem__", "index", "select", "slice", "narrow", "gather", "index_select", "take", "take_along_dim", "detach"}
    | {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "permute", "transpose", "unbind"}
    | {"movedim", "alias", "clone", "contiguous"}
)


class Unrounded(TorchFunctionMode):
    """Computes values in 16 bits in float32, and does not round them, as Inductor's kernels do.

    A function is called on scalars: parts of captured tensors have dimensions, and stay as they are.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).split(".")[0]
        if name == "__get__":  # an attribute, such as shape
            return func(*args, **kwargs)
        if name not in _CHOICES:
            args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
            if func not in (*_CASTS, *_CONSTANTS):  # makes or converts values
                args, kwargs = tree_map_only(torch.dtype, _wide_dtype, (args, kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype not in IN_16_BITS:
            return result
        if func in _CASTS:
            return args[0].to(torch.float32, copy=True)
        return result.float() if result.dim() == 0 else result


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in IN_16_BITS else tensor


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in IN_16_BITS else dtype


def _as_written(mod: Mod) -> Mod:
    """Return the function of which ``torch.compile`` made this one, if it did.

    Dynamo would trace the modes of this module too. If it breaks a graph in one of them, torch 2.11 computes other
    indices.
    """
    return getattr(mod, "_torchdynamo_orig_callable", mod)


def unrounded(mod: Mod) -> Mod:
    """Return a modification that does not round values in 16 bits."""
    mod = _as_written(mod)

    def call(*args: Tensor) -> Tensor:
        with Unrounded():
            return mod(*args)

    return call


def sum_dtype(captured: Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of a captured tensor is summed."""
    return torch.promote_types(captured.dtype, torch.float32)


def without_hooks() -> AbstractContextManager[Any]:
    """Hide tensors that autograd saves from the caller's hooks, such as those of a checkpoint, which counts them."""
    if torch._C._are_functorch_transforms_active():  # they support no hooks
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def scalars(device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
    """Return arguments for a call on scalars: a score of this dtype, except for None, and four indices."""
    score = [] if dtype is None else [torch.zeros((), device=device, dtype=dtype)]
    return [*score, *torch.zeros(4, device=device, dtype=index_dtype(device)).unbind()]


def run_mod(name: str, mod: Mod, *args: Tensor) -> Tensor:
    """Call a modification. If it raises, raise RuntimeError with the name of the modification."""
    if torch.compiler.is_compiling():
        return mod(*args)
    try:
        return mod(*args)
    except Exception as error:
        raise RuntimeError(f"flashbwd: {name} failed: {error}") from error


def result_of(mod: Mod, *args: Tensor) -> Tensor:
    """Call a modification. A captured tensor that is its result counts as read, for the modes of this module."""
    result = _as_written(mod)(*args)
    return result.view(()) if isinstance(result, Tensor) and result.dim() == 0 else result


def vectorised(mod: Mod, with_score: bool) -> Mod:
    """Vectorise a function of scalars over (B, H, Sq, n) scores and (B,), (H,), (Sq,) and (n,) indices."""
    score = (0,) if with_score else ()
    mod = functools.partial(result_of, mod)
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mod = torch.vmap(mod, in_dims=(*score, *dims))
    return mod


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
