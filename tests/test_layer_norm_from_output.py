"""Backwards of LayerNorm and RMSNorm from the output agree with float64 autograd of the norm that gave this output."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kit import tolerance
from kit.repeats import differing_elements
from torch import Tensor

import flashbwd

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEAST_GAMMA = 1e-5


@dataclass(frozen=True)
class Case:
    rows: int = 21
    columns: int = 64
    z: torch.dtype = fp32
    gamma: torch.dtype | None = None  # None: the dtype of z
    rms: bool = False
    with_gamma: bool = True
    with_beta: bool = True
    zero_centered: bool = False
    dresidual: bool = False

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return "-".join(part.replace("torch.", "") for part in changed) or "default"


@dataclass(frozen=True)
class Inputs:
    dz: Tensor
    z: Tensor
    rs: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    dresidual: Tensor | None


def make(case: Case, device: str) -> Inputs:
    torch.manual_seed(0)

    def random(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*size, device=device, dtype=fp64).to(dtype)

    dtype = case.gamma or case.z
    gamma = None
    if case.with_gamma:  # move gamma away from zero
        gamma = random(case.columns, dtype=dtype).sign() * (0.5 + torch.rand(case.columns, device=device)).to(dtype)
        gamma = (gamma - 1).to(dtype) if case.zero_centered else gamma
    beta = random(case.columns, dtype=dtype) if case.with_beta and not case.rms else None
    x = random(case.rows, case.columns, dtype=fp64) * 2 + 0.5
    mean = torch.zeros_like(x[:, :1]) if case.rms else x.mean(-1, keepdim=True)
    rs = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    z = (x - mean) * rs * factor(gamma, case) + (0.0 if beta is None else beta.double())
    statistics = fp64 if case.z == fp64 else fp32
    dresidual = random(case.rows, case.columns, dtype=case.z) if case.dresidual else None
    dz = random(case.rows, case.columns, dtype=case.z)
    return Inputs(dz, z.to(case.z), rs.flatten().to(statistics), gamma, beta, dresidual)


def factor(gamma: Tensor | None, case: Case) -> Any:
    return 1.0 if gamma is None else gamma.double() + float(case.zero_centered)


def expected(inputs: Inputs, case: Case, dtype: torch.dtype = fp64) -> dict[str, Tensor]:
    """The definition in ``dtype``, from the rounded output."""
    scale = factor(inputs.gamma, case)
    divisor = scale
    if isinstance(scale, Tensor):
        divisor = torch.where(scale.abs() < LEAST_GAMMA, LEAST_GAMMA * torch.ones_like(scale).copysign(scale), scale)
        divisor, scale = divisor.to(dtype), scale.to(dtype)
    xhat = (inputs.z.to(dtype) - (0.0 if inputs.beta is None else inputs.beta.to(dtype))) / divisor
    dz, rs = inputs.dz.to(dtype), inputs.rs.to(dtype)[:, None]
    dy = dz * scale
    dx = dy - xhat * (dy * xhat).mean(-1, keepdim=True)
    dx = (dx if case.rms else dx - dy.mean(-1, keepdim=True)) * rs
    if inputs.dresidual is not None:
        dx = dx + inputs.dresidual.to(dtype)
    return {"dx": dx, "dgamma": (dz * xhat).sum(0), "dbeta": dz.sum(0)}


def backward(inputs: Inputs, case: Case, **options: Any) -> dict[str, Tensor | None]:
    options = {"dresidual": inputs.dresidual, "zero_centered_gamma": case.zero_centered, **options}
    if case.rms:
        grads = flashbwd.rms_norm_backward_from_output(inputs.dz, inputs.z, inputs.rs, inputs.gamma, **options)
        return grads._asdict()
    return flashbwd.layer_norm_backward_from_output(
        inputs.dz, inputs.z, inputs.rs, inputs.gamma, inputs.beta, **options
    )._asdict()


def check(grads: dict[str, Tensor | None], inputs: Inputs, case: Case) -> None:
    want, plain = expected(inputs, case), expected(inputs, case, fp64 if case.z == fp64 else fp32)
    for name, grad in grads.items():
        if name == "dgamma" and inputs.gamma is None:
            assert grad is None
            continue
        assert grad is not None, f"{name} is missing"
        reached = tolerance.largest_error(want[name], [plain[name].to(grad.dtype)])
        limit = tolerance.bound(want[name], reached, grad.dtype)
        if name == "dx" and case.columns == 1 and case.rows > 0:  # terms of the size of rs * dz cancel
            limit += 2**-20 * float((inputs.rs[:, None] * inputs.dz).abs().max())
        tolerance.assert_within(grad, want[name], limit, f"{name} of {case}")


BASE = Case()
CASES = [
    BASE,
    replace(BASE, z=bf16),
    replace(BASE, z=fp16),
    replace(BASE, z=bf16, gamma=fp32, dresidual=True),
    replace(BASE, rms=True),
    replace(BASE, rms=True, z=bf16, zero_centered=True),
    replace(BASE, zero_centered=True, dresidual=True),
    replace(BASE, with_gamma=False),
    replace(BASE, with_gamma=False, with_beta=False),
    replace(BASE, with_beta=False),
]


@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 4095, 8192, 20000])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_agree_with_the_definition(device: str, case: Case, columns: int) -> None:
    for rows in (0, 1, 21):
        changed = replace(case, columns=columns, rows=rows)
        inputs = make(changed, device)
        check(backward(inputs, changed), inputs, changed)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [768, 1024, 4096, 5000, 5120, 7919, 12288, 16384, 65536, 131072])
def test_gradients_of_every_width_agree_for_rows_around_the_number_of_sms(columns: int) -> None:
    chance = random.Random(columns)
    for rows in (3, 131, 132, 133) if columns < 65536 else (3, 132):
        case = replace(chance.choice(CASES), rows=rows, columns=columns)
        inputs = make(case, "cuda")
        check(backward(inputs, case), inputs, case)


def test_float64_gradients_are_exact_up_to_rounding() -> None:
    case = replace(BASE, z=fp64)
    inputs = make(case, "cpu")
    check(backward(inputs, case), inputs, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(4000, 1024), (8192, 4095), (2**18 + 1, 64), (300, 65536), (3, 300_001)])
def test_gradients_of_many_rows_and_of_wide_rows_agree_with_the_definition(rows: int, columns: int) -> None:
    case = replace(BASE, z=bf16, rows=rows, columns=columns)
    inputs = make(case, "cuda")
    check(backward(inputs, case), inputs, case)


@pytest.mark.gpu
@pytest.mark.alone
def test_gradients_are_right_beyond_2_to_31_elements() -> None:
    case = replace(BASE, z=bf16, gamma=fp32)
    rows, columns = 2**18 + 1, 8192
    torch.manual_seed(0)
    dz, z = (torch.randn(rows, columns, device="cuda", dtype=bf16) for _ in range(2))
    rs, gamma = torch.rand(rows, device="cuda") + 0.5, torch.rand(columns, device="cuda") + 0.5
    beta = torch.randn(columns, device="cuda")
    dx = flashbwd.layer_norm_backward_from_output(dz, z, rs, gamma, beta).dx
    assert dx is not None
    for first in (0, 2**17 - 100, 2**18 + 1 - 500):  # element 2^31 is in row 2^18
        part = slice(first, first + 500)
        inputs = Inputs(dz[part], z[part], rs[part], gamma, beta, None)
        check({"dx": dx[part]}, inputs, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(2000, 768), (1000, 7919), (200, 65536)])
def test_a_thousand_runs_give_the_same_bits(rows: int, columns: int) -> None:
    case = replace(BASE, z=bf16, rows=rows, columns=columns)
    inputs = make(case, "cuda")
    assert differing_elements(lambda: list(backward(inputs, case).values())) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_gamma_near_zero_is_replaced_by_its_lower_bound(device: str) -> None:
    case = replace(BASE, columns=8)
    inputs = make(case, device)
    gamma = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 1e-5, 1.0, -1.0, 0.5], device=device)
    inputs = replace(inputs, gamma=gamma, z=inputs.z * 1e-4)
    check(backward(inputs, case), inputs, case)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_mask_omits_gradients_and_does_not_change_the_others(device: str) -> None:
    case = replace(BASE, z=bf16)
    inputs = make(case, device)
    every = backward(inputs, case)
    for bits in range(8):
        mask = tuple(bool(bits >> i & 1) for i in range(3))
        for asked, (name, grad) in zip(mask, backward(inputs, case, output_mask=mask).items(), strict=True):
            assert (grad is not None) == asked
            want = every[name]
            assert want is not None
            assert grad is None or torch.equal(grad, want)


@pytest.mark.parametrize("rms", [False, True])
def test_the_memory_efficient_forms_pass_gradcheck(rms: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 11, dtype=fp64, requires_grad=True)
    gamma, beta = (torch.randn(11, dtype=fp64) + 3 for _ in range(2))
    gamma.requires_grad_()
    beta.requires_grad_()

    def norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        if rms:
            return flashbwd.rms_norm(x, gamma, memory_efficient=True)
        return flashbwd.layer_norm(x, gamma, beta, memory_efficient=True)

    assert torch.autograd.gradcheck(norm, (x, gamma, beta))


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_efficient_form_saves_no_input(device: str) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(6, 32, device=device, requires_grad=True)
    gamma, beta = (torch.randn(32, device=device, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        z = flashbwd.layer_norm(x, gamma, beta, memory_efficient=True)
    assert x.data_ptr() not in [tensor.data_ptr() for tensor in kept]
    assert z.data_ptr() in [tensor.data_ptr() for tensor in kept]
    plain = flashbwd.layer_norm(x, gamma, beta)
    weight = torch.randn_like(z)
    for got, want in zip(
        torch.autograd.grad(z, (x, gamma, beta), weight),
        torch.autograd.grad(plain, (x, gamma, beta), weight),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str) -> None:
    x = torch.randn(4, 5, 24, device=device)
    gamma, beta = (torch.randn(24, device=device) for _ in range(2))
    rs = torch.rand(20, device=device)
    ops = torch.ops.flashbwd
    leaves = [t.clone().requires_grad_() for t in (x, gamma, beta)]
    torch.library.opcheck(ops.layer_norm.default, (*leaves, 1e-5, False, True))
    torch.library.opcheck(ops.rms_norm.default, (*leaves[:2], 1e-5, False, True))
    torch.library.opcheck(ops.norm_backward_from_output.default, (x, x, rs, gamma, beta, x))
    partly = {"rms": True, "output_mask": [True, False, False], "zero_centered_gamma": True}
    torch.library.opcheck(ops.norm_backward_from_output.default, (x, x, rs, gamma), partly)


X = torch.randn(4, 6)
GOOD: dict[str, Any] = {"dz": X, "z": X, "rs": X[:, 1], "gamma": X[0], "beta": X[0]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"dz": X[:3]}, "dz has shape (3, 6), expected z's (4, 6)"),
    ({"dz": X.half()}, "dz is float16, expected z's float32"),
    ({"beta": X[0, :5]}, "beta has shape (5,), expected (6,)"),
    ({"beta": X[0].half()}, "beta is float16, expected z's float32"),
    ({"rs": X}, "rs has shape (4, 6), expected (4,) or z's (4, 6) with 1 for the last"),
    ({"dresidual": X.half()}, "dresidual is float16, expected z's float32"),
    ({"gamma": None, "zero_centered_gamma": True}, "zero_centered_gamma is set, expected a gamma with it"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_the_error_names_the_bad_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        flashbwd.layer_norm_backward_from_output(**(GOOD | change))
    assert str(raised.value) == f"flashbwd: {message}"
