"""Runs cases of the kit through flashbwd, on a device and with a forced backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import cases, inputs
from kit.inputs import Inputs
from kit.summary import DECLARED
from kit.support_matrix import declared_refusals
from torch import Tensor

import flashbwd

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
MAIN = ("dout", "q", "k", "v", "out", "softmax_lse")

# (device, backend, dtype): all dtypes that a backend supports.
CPU_TARGETS = [
    pytest.param(("cpu", "reference", dtype), id=f"cpu-reference-{str(dtype).removeprefix('torch.')}")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
]
GPU_TARGETS = [
    pytest.param(
        ("cuda", backend, dtype), id=f"cuda-{backend}-{str(dtype).removeprefix('torch.')}", marks=pytest.mark.gpu
    )
    for backend, dtypes in {
        "reference": (torch.float64, torch.bfloat16),
        "short": (torch.bfloat16, torch.float16),
        "sm80": (torch.bfloat16, torch.float16, torch.float32),
        "sm90": (torch.bfloat16, torch.float16),
    }.items()
    for dtype in dtypes
]
TARGETS = CPU_TARGETS + GPU_TARGETS

Target = tuple[str, str, torch.dtype]


def arguments_of(x: Inputs, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of attention_backward for the inputs of a case; ``changes`` replace or add arguments."""
    return with_rng_state(x.case, x.arguments) | changes


def with_rng_state(case: cases.Case, arguments: dict[str, Any]) -> dict[str, Any]:
    if case.dropout_p == 0:
        return dict(arguments)
    return arguments | {"rng_state": flashbwd.RngState(case.rng_seed, case.rng_offset, case.rng_layout)}


def run(x: Inputs, backend: str = "auto", *, poison: bool = True, **changes: Any) -> flashbwd.AttentionGrads:
    """Run attention_backward of a case on a forced backend, with outputs that contain NaN before the call.

    Without ``poison`` the operator allocates its outputs.
    """
    arguments = arguments_of(x, **changes)
    with flashbwd.use_backend(backend):
        return flashbwd.attention_backward(**(with_nan_outputs(arguments) if poison else arguments))


def with_nan_outputs(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with outputs full of NaN for dq, dk and dv if they are not given.

    dbias and dsink cannot be given. Instead, blocks of their sizes are filled with NaN and freed, so that the caching
    allocator reuses them.
    """
    for name in ("attn_bias", "sink"):
        if arguments.get(name) is not None:
            torch.full_like(arguments[name], torch.nan)  # freed immediately
    outputs = {gradient: arguments[source] for gradient, source in (("dq", "q"), ("dk", "k"), ("dv", "v"))}
    poisoned = {name: torch.full_like(x, torch.nan) for name, x in outputs.items() if arguments.get(name) is None}
    return arguments | poisoned


def backward(*tensors: Tensor, **options: Any) -> flashbwd.AttentionGrads:
    """attention_backward of ``tensors`` in the order of MAIN, with outputs that contain NaN before the call."""
    return flashbwd.attention_backward(**with_nan_outputs(dict(zip(MAIN, tensors, strict=True)) | options))


def refusal_of(arguments: dict[str, Any], backend: str) -> str | None:
    """The reason with which a backend refuses a call; None if it does not."""
    flashbwd.plan_attention_backward(**arguments)  # raises if the case itself is wrong
    try:
        with flashbwd.use_backend(backend):
            flashbwd.plan_attention_backward(**arguments)
    except ValueError as error:
        return str(error)
    return None


def as_declared(reason: str | None, expected: list[str], backend: str) -> str | None:
    """Return ``reason``, a refusal or None, if it is expected; otherwise fail the running test."""
    if reason is None and expected:
        pytest.fail(f"{backend} runs what the support matrix says it refuses: {' or '.join(expected)}")
    if reason is not None and not any(words in reason for words in expected):
        pytest.fail(f"{backend} refuses what the support matrix says it runs, or for another reason: {reason}")
    return reason


def declared_refusal(arguments: dict[str, Any], backend: str, need_dbias: bool = True) -> str | None:
    """The reason with which a backend refuses a call, or None; fails the test if the support matrix disagrees."""
    device = arguments["q"].device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    expected = declared_refusals(arguments, backend, capability, need_dbias)
    return as_declared(refusal_of(arguments, backend), expected, backend)


def refusal(x: Inputs, backend: str, **changes: Any) -> str | None:
    """``declared_refusal`` for a case."""
    return declared_refusal(arguments_of(x, **changes), backend)


def skip_where_refused(x: Inputs, backend: str, need_dbias: bool = True, **changes: Any) -> None:
    """Skip the running test if a backend refuses the case as the support matrix declares; fail it if they disagree."""
    skip_where_arguments_refused(arguments_of(x, **changes), backend, need_dbias)


def skip_where_arguments_refused(arguments: dict[str, Any], backend: str, need_dbias: bool = True) -> None:
    """``skip_where_refused`` for the arguments of a call."""
    if (reason := declared_refusal(arguments, backend, need_dbias)) is not None:
        pytest.skip(DECLARED + reason)


def skip_without_kernels(target: Target) -> None:
    """Skip the running test if a backend does not even support a plain case: another GPU, or a build without it."""
    device, backend, dtype = target
    skip_where_refused(inputs.build(cases.BY_NAME["heads_4to2"], dtype, device), backend)


def repeated(x: Tensor, times: int, heads: bool = False) -> Tensor:
    """``times`` copies of a dense input (1, S, H, D) or of its LSE (1, H, S), along the batch or the heads."""
    along = [1] * x.dim()
    along[{4: 2, 3: 1}[x.dim()] if heads else 0] = times
    return x.repeat(along)


def run_copies(case: cases.Case, target: Target, copies: int, heads: bool = False) -> None:
    """Run copies of a dense case of batch 1 in one call, as a batch or as heads; check the gradients of each copy."""
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    tensors: dict[str, Any] = {name: repeated(x.arguments[name], copies, heads) for name in MAIN}
    grads = run(x, backend, **tensors)
    dim = 2 if heads else 0
    dq, dk, dv = (grad.unflatten(dim, (copies, -1)).movedim(dim, 0) for grad in grads[:3])
    for at in {0, 1, copies // 2, copies - 2, copies - 1}:
        x.check(dq[at], dk[at], dv[at], None, None)
    for grad in (dq, dk, dv):
        spread = (grad - grad[:1]).abs().amax()
        assert float(spread) <= 0.02 * float(grad[0].abs().max())  # NaN fails too


def storage_bytes(tensor: Tensor) -> Tensor:
    """A copy of the whole storage of a tensor, including gaps between its elements."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


def workspace_of(size: int, device: torch.device | str, fill: int = 0xFF, offset: int = 0) -> Tensor:
    """``size`` bytes with the value ``fill`` (0xFF: NaN in every format), ``offset`` bytes past a multiple of 256."""
    memory = torch.full((size + 512,), fill, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256 + offset
    return memory[start : start + size]
