"""float32 products are rounded to TF32 only if PyTorch allows TF32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit import cases, inputs
from kit.host import dense_problem, device_info, load_host
from support import arguments_of, run, skip_where_refused
from torch.utils._python_dispatch import TorchDispatchMode

import flashbwd

CASE = cases.Case("plain", heads=4, heads_kv=2, seqlen_q=150, seqlen_k=170, head_dim=64, head_dim_v=64, causal=True)


@pytest.fixture
def allowed() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    yield
    matmul.fp32_precision = before


class Calls(TorchDispatchMode):
    """Records ``allow_tf32`` of each backward that is called within the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_tf32: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.flashbwd.attention_backward.default:
            names = (argument.name for argument in func._schema.arguments)
            given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
            self.allow_tf32.append(given.get("allow_tf32", False))
        return func(*args, **(kwargs or {}))


def calls_of(dtype: torch.dtype) -> list[bool]:
    x = inputs.build(cases.BY_NAME["heads_4to2"], dtype)
    leaves = [x.arguments[name].detach().requires_grad_() for name in ("q", "k", "v")]
    with Calls() as calls:
        flashbwd.attention_backward(**arguments_of(x))
        flashbwd.attention(*leaves, causal=True).sum().backward()
    return calls.allow_tf32


def test_tf32_is_off_by_default() -> None:
    assert calls_of(torch.float32) == [False, False]


@pytest.mark.usefixtures("allowed")
def test_tf32_is_on_if_pytorch_allows_it() -> None:
    assert calls_of(torch.float32) == [True, True]
    assert calls_of(torch.bfloat16) == [False, False]


def test_pytorchs_older_switch_allows_tf32_too() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert calls_of(torch.float32) == [True, True]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("tf32", [False, True])
def test_the_schedule_of_a_plan_names_tf32(tf32: bool) -> None:
    host = load_host()
    problem = dense_problem(host, dtype=host.DType.kFloat32, tf32=tf32)
    gpu = device_info(
        host, usable=True, cc_major=8, cc_minor=0, sm_count=108, smem_per_block=163 * 1024, has_attention_sm80=True
    )
    assert ("TF32" in host.plan_attention(problem, gpu).schedule) == tf32


def relative_errors(x: inputs.Inputs) -> list[float]:
    grads = run(x, "sm80")
    wanted = (x.reference.dq, x.reference.dk, x.reference.dv)
    return [float((g.double().cpu() - w).norm() / w.norm()) for g, w in zip(grads[:3], wanted, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256, 320])
@pytest.mark.usefixtures("allowed")
def test_errors_are_those_of_tf32_if_it_is_allowed(head_dim: int) -> None:
    """Each operand of a TF32 product is rounded once to 11 bits, which changes it by about 2^-12, at random."""
    x = inputs.build(cases.replace(CASE, head_dim=head_dim, head_dim_v=head_dim), torch.float32, "cuda")
    skip_where_refused(x, "sm80")
    for error in relative_errors(x):
        assert 5e-5 < error < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256, 320])
def test_errors_are_those_of_float32_if_tf32_is_not_allowed(head_dim: int) -> None:
    x = inputs.build(cases.replace(CASE, head_dim=head_dim, head_dim_v=head_dim), torch.float32, "cuda")
    skip_where_refused(x, "sm80")
    for error in relative_errors(x):
        assert error < 2e-5
