"""Loads the C++ libraries and registers what PyTorch needs in Python for each operator.

Schemas, checks, plans and CPU/CUDA implementations are C++ (``csrc/api``). This module registers the shapes for fake
tensors, the autograd rules, the FLOP formulas and the implementation of the reference backend.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flashbwd import _arguments, _refusals, reference
from flashbwd._autograd import OperatorLibrary, may_be_refused
from flashbwd.options import AttentionOptions

_PACKAGE = Path(__file__).parent

#: The names of the loaded libraries; for each library that was not loaded, the reason.
loaded: list[str] = []
not_loaded: dict[str, str] = {}


def _load(name: str) -> None:
    path = _PACKAGE / f"{name}.so"
    if not path.exists():
        not_loaded[name] = f"{path.name} is not part of this installation"
        return
    torch.ops.load_library(path)
    loaded.append(name)


def _why_missing() -> str:
    """Return why the package has no libraries, and what to do about it."""
    tree = _PACKAGE.parent
    if (tree / "setup.py").is_file():
        return (
            f"Python imported the source tree {tree}, which is not built. To use an installed flashbwd, start Python "
            f"in another folder. To use the source tree, run `python setup.py build_ext --inplace` in {tree}."
        )
    return "the package was not built. Run `pip install .` in the source tree of flashbwd."


def _load_libraries() -> None:
    _load("_C")
    if "_C" not in loaded:
        raise ImportError(f"flashbwd: {_PACKAGE / '_C.so'} is missing: {_why_missing()}")
    if torch.version.cuda is None:
        not_loaded["_C_cuda"] = "this PyTorch was built without CUDA"
        return
    _load("_C_cuda")  # after _C, because it uses symbols of _C


_load_libraries()
_last_refusal = ctypes.CDLL(str(_PACKAGE / "_C.so")).flashbwd_last_refusal
_last_refusal.restype = ctypes.c_char_p

library = OperatorLibrary("flashbwd")


# The C++ operators call the reference through PyTorch's C interface, which turns every exception into a plain
# RuntimeError. The original exception is kept here, and call() raises it.
_failure = threading.local()


def tf32_allowed() -> bool:
    """Return whether PyTorch's own float32 matrix products may use TF32 on CUDA devices."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# torch.compiler.assume_constant_result sets the same attribute, but imports the compiler.
tf32_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def allow_tf32(q: Tensor) -> bool:
    """Return the option ``allow_tf32`` of an attention backward."""
    return q.dtype == torch.float32 and tf32_allowed()


def implement_reference(name: str, implementation: Callable[..., Any]) -> None:
    """Register the reference implementation that a C++ operator calls if it has no kernel for a call."""

    def keep_error(*args: Any) -> Any:
        try:
            return implementation(*args)
        except Exception as error:
            _failure.error = error
            raise

    for key in ("CPU", "CUDA"):
        library.impl(name, keep_error, key)


_REFUSED = (RuntimeError, TypeError, ValueError)


def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator. Bad arguments raise ValueError; an exception of the reference backend is raised unchanged."""
    try:
        return operator(*args, **kwargs)
    except _REFUSED as caught:
        _explain(caught, operator, args, kwargs)
        raise


def call_below_autograd(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator without a gradient as :func:`call` does, but skip an autograd kernel that could not raise.

    The autograd kernel is Python code, and takes longer than the rest of a small call.
    """
    if torch.compiler.is_compiling() or may_be_refused(args, kwargs):
        return call(operator, *args, **kwargs)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)
    except _REFUSED as caught:
        _explain(caught, operator, args, kwargs)
        raise


def _explain(caught: Exception, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise the error that a caller should see in place of ``caught``, if there is a better one."""
    error, _failure.error = getattr(_failure, "error", None), None
    if error is not None:
        raise error from None
    about_types = _arguments.is_about_types(caught)
    if about_types and (message := _arguments.misfit(operator.default._schema, args, kwargs)):
        raise ValueError(message) from None
    refusal = _last_refusal().decode()
    if refusal and str(caught).startswith(refusal):
        raise ValueError(_refusals.complete(refusal, operator.default._schema, args, kwargs)) from None


def register_fake(name: str, main: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a fake implementation. It also checks that all tensors are on the device of argument `main`."""
    names = [argument.name for argument in getattr(torch.ops.flashbwd, name).default._schema.arguments]

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            _arguments.check_devices(main, dict(zip(names, args, strict=False)) | kwargs)
            return fake(*args, **kwargs)

        torch.library.register_fake(f"flashbwd::{name}", checked, lib=library)
        return fake

    return register


def output_mask_for(x: Tensor, mask: Sequence[bool]) -> list[bool]:
    """Return the operator's output mask. A DTensor requests all gradients, because its cache key ignores the mask."""
    return [True] * len(mask) if type(x) is not Tensor and hasattr(x, "placements") else list(mask)


_REFERENCE = [argument.name for argument in torch.ops.flashbwd.attention_backward_reference.default._schema.arguments]


def _attention_backward_reference(*args: Any) -> None:
    """Run the reference. ``args`` are six tensors, then the options, then five outputs."""
    options = AttentionOptions(*args[6:-5])
    reference.attention_backward(*(*args[:6], options, *args[-5:]))


implement_reference("attention_backward_reference", _attention_backward_reference)


_SCHEMA = torch.ops.flashbwd.attention_backward.default._schema
_ARGUMENTS = [argument.name for argument in _SCHEMA.arguments]


def _bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Arguments that the caller did not pass are absent."""
    return dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs)


def _optional_gradients(call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return fake dbias and dsink; a gradient that was not requested is empty."""
    q, sink = call["q"], call.get("sink")
    bias = call.get("attn_bias") if call.get("need_dbias", True) else None
    dbias = q.new_empty(0) if bias is None else torch.empty_like(bias)
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return dbias, dsink


@register_fake("attention_backward", "q")
def _attention_backward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = _bind(args, kwargs)
    return *(torch.empty_like(call[name]) for name in ("q", "k", "v")), *_optional_gradients(call)


@register_fake("score_mod_attention_backward", "q")
@register_fake("block_mask_attention_backward", "q")
def _block_mask_attention_backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@register_fake("attention_backward_out", "q")
def _attention_backward_out_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _optional_gradients(_bind(args, kwargs))


@torch.library.register_fake("flashbwd::attention_backward_reference")
def _attention_backward_reference_fake(*args: Any, **kwargs: Any) -> None:
    return None


def _refuse_derivatives() -> None:
    """Make differentiating the C++ operators an error: they compute gradients, or a differentiable operator calls them.

    This function skips the flex decoding operators, because an autograd kernel would slow down each call in a decoding
    loop. :func:`flashbwd.flex_decoding` handles gradients and tangents itself. The norms have autograd rules.
    """
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "flashbwd" and not name.startswith("decoding_") and name not in ("layer_norm", "rms_norm"):
            library.refuse_derivatives(name)


_refuse_derivatives()


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: str, window: tuple[int, int]) -> int:
    """Return the number of visible (query, key) pairs of one head of one sequence."""
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    left, right = window[0], 0 if causal != "none" else window[1]
    if left < 0 and right < 0:
        return seqlen_q * seqlen_k

    def keys_up_to(bound_from_diagonal: int, rows: int) -> int:
        """Count the pairs with j <= i + bound: the sum over rows i of clamp(i + bound + 1, 0, seqlen_k)."""
        first = min(max(-bound_from_diagonal, 0), rows)  # rows [0, first) see no key
        full = min(max(seqlen_k - bound_from_diagonal - 1, first), rows)  # rows [full, rows) see all keys
        count = full - first
        return count * (2 * bound_from_diagonal + first + full + 1) // 2 + (rows - full) * seqlen_k

    upper = seqlen_q * seqlen_k if right < 0 else keys_up_to(offset + right, seqlen_q)
    lower = 0 if left < 0 else keys_up_to(offset - left - 1, seqlen_q)
    return upper - lower


def pairs_of_call(call: Mapping[str, Any]) -> int:
    """Return the number of visible (query, key) pairs of a call, over all batches and heads.

    ``call`` has shapes in place of tensors, so the lengths of packed sequences are unknown. The function assumes that
    all lengths are ``max_seqlen_q`` and ``max_seqlen_k``, and that there are as many sequences as fill the rows of q.
    """
    q, k = call["q"], call["k"]
    mask = (call.get("causal", "none"), (call.get("window_left", -1), call.get("window_right", -1)))
    if len(q) == 4:
        return q[0] * q[2] * visible_pairs(q[1], k[1], *mask)
    seqlen_q = call["max_seqlen_q"]
    sequences = min(call["cu_seqlens_q"][0] - 1, math.ceil(q[0] / max(seqlen_q, 1)))
    return sequences * q[1] * visible_pairs(seqlen_q, call["max_seqlen_k"], *mask)


def attention_backward_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the floating-point operations of five products over the visible pairs: ``pairs * (6 D + 4 Dv)``."""
    call = _bind(shapes, kwargs)
    return pairs_of_call(call) * (6 * call["q"][-1] + 4 * call["v"][-1])


register_flop_formula([torch.ops.flashbwd.attention_backward, torch.ops.flashbwd.attention_backward_out])(
    attention_backward_flops
)
