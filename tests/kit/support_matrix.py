"""The calls that each backend must run and those that it must refuse, with the reason; compare docs/features.md.

The matrix is independent of the library. A test fails if a backend refuses a call that is not refused here, if it
accepts a call that is refused here, or if it gives another reason.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from kit import support_matrix_short

Capability = tuple[int, int]

COPIED = ("q", "k", "v", "out", "dout")  # the sm90 kernels load these in units of 16 bytes
WIDEST_SM90 = 512  # head dimension
WIDEST_SM90_FEATURES = 256  # with a bias, ALiBi or dropout
WIDEST_SM90_BIAS_GRADIENT = 192
WIDEST_SM90_KEY_MASK = 128
EFFICIENT32_NUMBERS = 2**32

CAPABILITY = "it needs compute capability "
NOT_BUILT = "this build holds no "
DTYPE = "it takes float16"
EMPTY = "nothing to launch for an empty batch"
KEY_MASK = "it takes key_mask only beside an attn_bias that TMA can load"
SOFTCAP_AND_BIAS_GRADIENT = "it does not compute the gradient of attn_bias together with softcap"
WIDE_BIAS_GRADIENT = "it does not take the gradient of attn_bias at head dimensions above 192"
HEAD_DIMENSION = "it has no tile with these features for head dimensions"
ALIGNMENT = "that are multiples of 16 bytes"
WIDE_FEATURE = "at head dimensions above 256"
NUMBERS_AGAIN = "PyTorch's 32-bit dropout counter wraps around"


def built(family: str) -> bool:
    """Whether a test run expects this family; FLASHBWD_FAMILIES restricts the families as in the build."""
    families = os.environ.get("FLASHBWD_FAMILIES")
    return not families or f"attention_{family}" in families.replace(",", " ").split()


def declared_refusals(
    arguments: dict[str, Any], backend: str, capability: Capability | None, need_dbias: bool = True
) -> list[str]:
    """Reasons, as parts of the message, for which ``backend`` refuses a call; if empty, the call must run.

    ``capability`` is the compute capability of the GPU of the call; None for a CPU.
    """
    if backend in ("auto", "reference"):
        return []
    if capability is None:
        return ["q is on the CPU"]
    if not built(backend):
        return [NOT_BUILT]
    q, v = arguments["q"], arguments["v"]
    reasons = []
    lengths = arguments.get("cu_seqlens_q")
    if (q.shape[0] if lengths is None else len(lengths) - 1) == 0 or q.shape[-2] == 0:
        reasons.append(EMPTY)
    if backend == "sm80":
        if capability < (8, 0):
            reasons.append(CAPABILITY + "8.0")
        if q.dtype == torch.float64:
            reasons.append(DTYPE)
        return reasons
    if backend == "short":
        if capability < (8, 0):
            reasons.append(CAPABILITY + "8.0")
        if q.dtype.itemsize != 2:
            reasons.append(DTYPE)
        if not all(_in_pieces_of_16_bytes(arguments[name]) for name in COPIED):
            reasons.append(ALIGNMENT)
        return reasons + support_matrix_short.refusals(arguments, capability, need_dbias)
    assert backend == "sm90", backend
    if capability != (9, 0):
        reasons.append(CAPABILITY + "9.0")
    if q.dtype.itemsize != 2:
        reasons.append(DTYPE)
    widest = max(q.shape[-1], v.shape[-1])
    if widest > WIDEST_SM90:
        reasons.append(HEAD_DIMENSION)
    if widest > WIDEST_SM90_FEATURES:
        options = ("attn_bias", "key_mask", "alibi_slopes")
        if arguments.get("dropout_p", 0.0) > 0 or any(arguments.get(name) is not None for name in options):
            reasons.append(WIDE_FEATURE)
    elif arguments.get("attn_bias") is not None and need_dbias:
        if arguments.get("softcap", 0.0) > 0:
            reasons.append(SOFTCAP_AND_BIAS_GRADIENT)
        if widest > WIDEST_SM90_BIAS_GRADIENT:
            reasons.append(WIDE_BIAS_GRADIENT)
    if arguments.get("key_mask") is not None and not _takes_key_mask(arguments, widest, need_dbias):
        reasons.append(KEY_MASK)
    if not all(_in_pieces_of_16_bytes(arguments[name]) for name in COPIED):
        reasons.append(ALIGNMENT)
    if _numbers_of_dropout(arguments) > EFFICIENT32_NUMBERS:
        reasons.append(NUMBERS_AGAIN)
    return reasons


def _in_pieces_of_16_bytes(x: Tensor) -> bool:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()  # as the operator does for an expanded dout
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return all(place % 16 == 0 for place in [x.data_ptr(), *(stride * x.element_size() for stride in strides)])


def _takes_key_mask(arguments: dict[str, Any], widest: int, need_dbias: bool) -> bool:
    """Whether sm90 takes a key mask: beside a bias that TMA can load, with no feature but "efficient" dropout."""
    if arguments.get("attn_bias") is None or widest > WIDEST_SM90_KEY_MASK:
        return False
    if arguments.get("softcap", 0.0) > 0 or arguments.get("alibi_slopes") is not None:
        return False
    if arguments.get("dropout_p", 0.0) > 0 and arguments["rng_state"][2] == "flash":
        return False
    return _is_loaded_by_tma(arguments, need_dbias)


def _is_loaded_by_tma(arguments: dict[str, Any], need_dbias: bool) -> bool:
    bias, q, k = (arguments[name] for name in ("attn_bias", "q", "k"))
    if any(arguments.get(name) is not None for name in ("cu_seqlens_q", "seqused_q", "seqused_k")):
        return False
    of_keys = bias.shape[2] == 1 or bias.stride(2) == 0
    if of_keys and (not need_dbias or q.shape[1] > 1):  # one number per key has another kernel
        return False
    whole = bias.shape[2:] == (q.shape[1], k.shape[1]) and (bias.stride(3) == 1 or k.shape[1] == 1)
    return bias.dtype == q.dtype and whole and _in_pieces_of_16_bytes(bias)


def _numbers_of_dropout(arguments: dict[str, Any]) -> int:
    """Mask elements per (batch, head) that "efficient32" numbers with 32 bits; 0 for other layouts."""
    state = arguments.get("rng_state")
    if arguments.get("dropout_p", 0.0) == 0 or state is None or state[2] != "efficient32":
        return 0
    longest = [arguments.get(f"max_seqlen_{x}") or arguments[x].shape[1] for x in "qk"]
    return longest[0] * longest[1]
