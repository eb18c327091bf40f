"""Dropout, residual addition and norm in one function: results and gradients agree with float64 autograd."""

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
from flashbwd.philox import keep_elements

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    rows: int = 9
    columns: int = 64
    x: torch.dtype = fp32
    residual: torch.dtype | None = None  # None: the dtype of x
    gamma: torch.dtype | None = None  # None: the dtype of x
    rms: bool = False
    with_gamma: bool = True
    zero_centered: bool = False
    dropout_p: float = 0.25
    given: bool = False  # the caller passes the mask, instead of a seed
    dresidual: bool = True
    offset: int = 0  # elements between a 16-byte boundary and the first element of x, residual and mask

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return "-".join(part.replace("torch.", "") for part in changed) or "default"


@dataclass(frozen=True)
class Inputs:
    """Arguments of the forward, gradients of its results, and the expected values."""

    x: Tensor
    residual: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    dz: Tensor
    dh: Tensor | None
    keep: Tensor
    state: flashbwd.RngState
    expected: dict[str, Tensor]  # z, h, mu, rs and the gradients, float64
    naive: dict[str, Tensor]  # the gradients in float32 steps, rounded to their dtypes


def _shifted(tensor: Tensor, offset: int) -> Tensor:
    memory = tensor.new_zeros(tensor.numel() + offset)
    view = memory[offset:].view(tensor.shape)
    view.copy_(tensor)
    return view


def make(case: Case, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    shape = (case.rows, case.columns)

    def random(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*size, device=device, dtype=fp64).to(dtype)

    residual_dtype, gamma_dtype = case.residual or case.x, case.gamma or case.x
    x = _shifted(random(*shape, dtype=case.x), case.offset)
    residual = _shifted(random(*shape, dtype=residual_dtype) + 0.5, case.offset)
    gamma = random(case.columns, dtype=gamma_dtype) if case.with_gamma else None
    beta = None if case.rms else random(case.columns, dtype=gamma_dtype)
    dz, dh = random(*shape, dtype=case.x), random(*shape, dtype=residual_dtype) if case.dresidual else None
    state = flashbwd.RngState(1234567890123 + seed, 44, "efficient64")
    keep = torch.rand(shape, device=device) >= case.dropout_p
    if not case.given and case.dropout_p > 0.0:
        keep = keep_elements(state[0], state[1], case.dropout_p, 0, x.numel(), torch.device(device)).view(shape)
    keep = _shifted(keep, case.offset)

    # The forward rounds h when it writes it, and computes z from the rounded h.
    branch = torch.where(keep, x.double(), 0.0) / (1.0 - case.dropout_p)
    rounded = (residual.double() + branch).to(residual_dtype)
    h = rounded.double().requires_grad_()
    weight = (torch.ones(case.columns, device=device, dtype=fp64) if gamma is None else gamma.double()).requires_grad_()
    bias = (torch.zeros_like(weight) if beta is None else beta.double()).detach().requires_grad_()
    mean = torch.zeros_like(h[:, :1]) if case.rms else h.mean(-1, keepdim=True)
    rs = ((h - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    z = (h - mean) * rs * (1 + weight if case.zero_centered else weight) + bias
    dresidual, dgamma, dbeta = torch.autograd.grad(z, (h, weight, bias), dz.double())
    if dh is not None:
        dresidual = dresidual + dh.double()
    dx = torch.where(keep, dresidual, 0.0) / (1.0 - case.dropout_p)
    expected = {"z": z, "h": residual.double() + branch, "mu": mean, "rs": rs}
    expected |= {"dx": dx, "dresidual": dresidual, "dgamma": dgamma, "dbeta": dbeta}
    expected = {name: value.detach() for name, value in expected.items()}

    xhat = (rounded.float() - expected["mu"].float()) * expected["rs"].float()
    factor = 1.0 if gamma is None else gamma.float() + float(case.zero_centered)
    dy = dz.float() * factor
    plain = dy - xhat * (dy * xhat).mean(-1, keepdim=True)
    plain = (plain if case.rms else plain - dy.mean(-1, keepdim=True)) * expected["rs"].float()
    plain = plain if dh is None else plain + dh.float()
    naive = {
        "dresidual": plain.to(residual_dtype),
        "dx": (torch.where(keep, plain, 0.0) / (1.0 - case.dropout_p)).to(case.x),
        "dgamma": (dz.float() * xhat).sum(0).to(gamma_dtype),
        "dbeta": dz.float().sum(0).to(gamma_dtype),
    }
    return Inputs(x, residual, gamma, beta, dz, dh, keep, state, expected, naive)


def backward(inputs: Inputs, case: Case, **options: Any) -> dict[str, Tensor | None]:
    h = inputs.expected["h"].to(inputs.residual.dtype)
    statistics = torch.float64 if case.x == fp64 else torch.float32
    mu, rs = inputs.expected["mu"].to(statistics), inputs.expected["rs"].to(statistics)
    mask = {"keep": inputs.keep} if case.given else {"rng_state": inputs.state}
    options = {
        "dresidual": inputs.dh,
        "dropout_p": case.dropout_p,
        "zero_centered_gamma": case.zero_centered,
        **(mask if case.dropout_p > 0.0 else {}),
        **options,
    }
    if case.rms:
        return flashbwd.dropout_add_rms_norm_backward(inputs.dz, h, rs, inputs.gamma, **options)._asdict()
    return flashbwd.dropout_add_layer_norm_backward(inputs.dz, h, mu, rs, inputs.gamma, **options)._asdict()


def check(grads: dict[str, Tensor | None], inputs: Inputs, case: Case) -> None:
    for name, grad in grads.items():
        if (name == "dgamma" and inputs.gamma is None) or (name == "dbeta" and case.rms):
            assert grad is None
            continue
        assert grad is not None, f"{name} is missing"
        assert grad.dtype == inputs.naive[name].dtype
        expected = inputs.expected[name]
        reached = tolerance.largest_error(expected, [inputs.naive[name]])
        limit = tolerance.bound(expected, reached, grad.dtype)
        if case.columns == 1 and name in ("dx", "dresidual"):  # terms of the size of rs * dz cancel
            limit += 2**-20 * float((inputs.expected["rs"] * inputs.dz).abs().max()) / (1.0 - case.dropout_p)
        tolerance.assert_within(grad, expected, limit, f"{name} of {case}")


BASE = Case()
CASES = [
    BASE,
    replace(BASE, x=bf16),
    replace(BASE, x=fp16),
    replace(BASE, x=bf16, residual=fp32),
    replace(BASE, x=fp16, residual=fp32, gamma=fp32),
    replace(BASE, x=bf16, gamma=fp32),
    replace(BASE, rms=True),
    replace(BASE, x=bf16, rms=True, zero_centered=True),
    replace(BASE, with_gamma=False),
    replace(BASE, zero_centered=True, dresidual=False),
    replace(BASE, dropout_p=0.0),
    replace(BASE, dropout_p=0.0, x=bf16, residual=fp32),
    replace(BASE, dropout_p=0.9, x=bf16),
    replace(BASE, given=True),
    replace(BASE, given=True, x=bf16, residual=fp32),
]


@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 4095, 20000])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_agree_with_the_definition(device: str, case: Case, columns: int) -> None:
    case = replace(case, columns=columns)
    inputs = make(case, device)
    check(backward(inputs, case), inputs, case)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [768, 1024, 4096, 5000, 5120, 7919, 8192, 12288, 16384, 65536, 131072])
def test_gradients_of_every_width_agree_for_rows_around_the_number_of_sms(columns: int) -> None:
    chance = random.Random(columns)
    for rows in (3, 131, 132, 133) if columns < 65536 else (3, 132):
        case = replace(chance.choice(CASES), rows=rows, columns=columns, offset=chance.choice((0, 0, 1)))
        inputs = make(case, "cuda")
        check(backward(inputs, case), inputs, case)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(8192, 1024), (8192, 4095), (2**18 + 1, 64), (4100, 12288)])
def test_gradients_of_many_rows_agree_with_the_definition(rows: int, columns: int, given: bool) -> None:
    case = Case(rows=rows, columns=columns, x=bf16, given=given)
    inputs = make(case, "cuda")
    check(backward(inputs, case), inputs, case)


@pytest.mark.gpu
@pytest.mark.alone
def test_gradients_are_right_beyond_2_to_31_elements() -> None:
    rows, columns, p = 2**18 + 1, 8192, 0.25
    torch.manual_seed(0)
    dz, h, dh = (torch.randn(rows, columns, device="cuda", dtype=bf16) for _ in range(3))
    rs = torch.rand(rows, device="cuda") + 0.5
    seed, offset = torch.tensor(987654321, device="cuda"), torch.tensor(8, device="cuda")
    state = flashbwd.RngState(seed, offset, "efficient64")
    grads = flashbwd.dropout_add_rms_norm_backward(dz, h, rs, dresidual=dh, dropout_p=p, rng_state=state)
    assert grads.dx is not None
    assert grads.dresidual is not None
    for first in (0, 2**17 - 100, 2**18 + 1 - 500):  # element 2^31 is in row 2^18
        rows_here = slice(first, first + 500)
        dy, xhat = dz[rows_here].double(), h[rows_here].double() * rs[rows_here, None].double()
        want = rs[rows_here, None] * (dy - xhat * (dy * xhat).mean(-1, keepdim=True)) + dh[rows_here].double()
        error = (grads.dresidual[rows_here].double() - want).abs()
        assert bool((error <= 2**-8 * want.abs() + 1e-4).all())
        keep = keep_elements(987654321, 8, p, first * columns, 500 * columns, dz.device).view(500, columns)
        want = torch.where(keep, want, 0.0) / (1 - p)
        error = (grads.dx[rows_here].double() - want).abs()
        assert bool((error <= 2**-8 * want.abs() + 1e-4).all())


@pytest.mark.parametrize("rows", [0, 1, 131, 700])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_results_are_right_for_any_memory_offset(device: str, given: bool, offset: int, rows: int) -> None:
    for columns in (96, 77):
        case = Case(rows=rows, columns=columns, x=bf16, given=given, offset=offset)
        inputs = make(case, device)
        check(backward(inputs, case), inputs, case)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_mask_omits_gradients_and_does_not_change_the_others(device: str) -> None:
    case = Case(x=bf16, residual=fp32)
    inputs = make(case, device)
    every = backward(inputs, case)
    for bits in range(16):
        mask = tuple(bool(bits >> i & 1) for i in range(4))
        grads = backward(inputs, case, output_mask=mask)
        for wanted, (name, grad) in zip(mask, grads.items(), strict=True):
            assert (grad is not None) == wanted
            if grad is not None:
                want = every[name]
                assert want is not None
                assert torch.equal(grad, want), name


def test_a_drawn_mask_starts_at_a_block_of_four_random_numbers() -> None:
    """Philox generates four numbers per call. Such an offset aligns them with the vectors of the kernels."""
    x = torch.ones(1, 4)
    torch.manual_seed(0)
    drawn = [torch.ops.flashbwd.dropout_add_norm(x, x, None, None, None, 1, 0.5, EPS, False)[-1] for _ in range(20)]
    offsets = torch.stack(drawn)[:, 1]
    assert len(set(offsets.tolist())) == 20
    assert not bool((offsets % 4).any())


def _forward(inputs: Inputs, case: Case, **tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    given = {"x": inputs.x, "residual": inputs.residual, "gamma": inputs.gamma} | tensors
    options: dict[str, Any] = {
        "dropout_p": case.dropout_p,
        "keep": inputs.keep if case.given else None,
        "eps": EPS,
        "zero_centered_gamma": case.zero_centered,
    }
    if case.rms:
        return flashbwd.dropout_add_rms_norm(*given.values(), **options)  # type: ignore[arg-type]
    return flashbwd.dropout_add_layer_norm(*given.values(), beta=inputs.beta, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 4095, 20000])
@pytest.mark.parametrize("case", [c for c in CASES if c.given or c.dropout_p == 0.0], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_forward_agrees_with_the_definition(device: str, case: Case, columns: int) -> None:
    case = replace(case, columns=columns)
    inputs = make(case, device)
    z, h = _forward(inputs, case)
    assert (z.dtype, h.dtype) == (inputs.x.dtype, inputs.residual.dtype)
    for name, got in (("z", z), ("h", h)):
        expected = inputs.expected[name]
        reached = tolerance.largest_error(expected, [expected.float().to(got.dtype)])
        slack = 1e-5 * float(expected.abs().max())
        limit = tolerance.bound(expected, reached, got.dtype) + slack
        tolerance.assert_within(got, expected, limit, f"{name} of {case}")


# Counters around 2^32 carry into the upper half. The offset need not be a multiple of four.
@pytest.mark.parametrize("first", [0, 5, 2**34 - 40_000, 2**34 - 20_001])
@pytest.mark.parametrize("columns", [64, 77, 1000, 9000])
@pytest.mark.parametrize("dtypes", [(bf16, bf16), (bf16, fp32), (fp32, fp32)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_backward_use_the_documented_mask(
    device: str, dtypes: tuple[torch.dtype, torch.dtype], columns: int, first: int
) -> None:
    x = torch.ones(37, columns, device=device, dtype=dtypes[0])
    rng = torch.tensor([987654321, first], device=device)
    keep = keep_elements(987654321, first, 0.5, 0, x.numel(), x.device).view(x.shape)
    for offset in (0, 1):  # of the residual; tensors with different alignments are read element by element
        residual = _shifted(torch.zeros_like(x, dtype=dtypes[1]), offset)
        z, h, _, _ = torch.ops.flashbwd.dropout_add_norm_forward(
            x, residual, None, None, None, rng, 0.5, EPS, False, False
        )
        assert torch.equal(h, keep.to(dtypes[1]) * 2)
        assert torch.isfinite(z).all()
    state = flashbwd.RngState(987654321, first, "efficient64")
    dz = torch.zeros_like(x)
    grads = flashbwd.dropout_add_layer_norm_backward(
        dz,
        h,
        torch.zeros(37, device=device),
        torch.ones(37, device=device),
        dresidual=torch.ones_like(h),
        dropout_p=0.5,
        rng_state=state,
    )
    assert grads.dx is not None
    assert torch.equal(grads.dx, keep.to(x.dtype) * 2)


@pytest.mark.parametrize("case", [BASE, replace(BASE, x=bf16, residual=fp32), replace(BASE, rms=True)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_backward_regenerates_the_mask_of_the_forward(device: str, case: Case) -> None:
    inputs = make(replace(case, rows=50, columns=72), device)
    x = inputs.x.detach().requires_grad_()
    residual = inputs.residual.detach().requires_grad_()
    z, h = _forward(inputs, case, x=x, residual=residual)
    (z.float().square().sum() + h.float().sum()).backward()
    dropped = (h.detach() == inputs.residual) & (inputs.x != 0)
    assert 0.1 < float(dropped.float().mean()) < 0.4
    assert x.grad is not None
    assert residual.grad is not None
    assert torch.equal(x.grad == 0, dropped)
    want = (residual.grad.double() / (1 - case.dropout_p)).masked_fill(dropped, 0.0)
    torch.testing.assert_close(x.grad.double(), want, rtol=2e-2 if case.x == bf16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_seed_and_offset_may_be_numbers_or_tensors(device: str) -> None:
    case = replace(BASE, columns=77)
    inputs = make(case, device)
    numbers = inputs.state[:2]
    want = backward(inputs, case)
    side_by_side = torch.tensor(numbers, device=device)
    the_other_way_round = torch.tensor(numbers[::-1], device=device)
    apart = torch.tensor([numbers[0], 0, numbers[1]], device=device)
    for seed, offset in (
        tuple(side_by_side),
        (the_other_way_round[1], the_other_way_round[0]),
        (apart[0], apart[2]),
        tuple(torch.tensor(number, device=device) for number in numbers),
        tuple(side_by_side.view(torch.uint64)),
        (numbers[0], side_by_side[1]),
    ):
        state = flashbwd.RngState(seed, offset, "efficient64")
        got = backward(replace(inputs, state=state), case)
        assert all(torch.equal(got[name], want[name]) for name in want)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_the_generator_determines_the_mask(device: str) -> None:
    x, residual = (torch.randn(8, 128, device=device) for _ in range(2))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(flashbwd.dropout_add_layer_norm(x, residual, dropout_p=0.3)[1])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("rms", [False, True])
def test_gradients_pass_gradcheck(rms: bool) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 11, dtype=fp64, requires_grad=True) for _ in range(2))
    gamma, beta = (torch.randn(11, dtype=fp64, requires_grad=True) for _ in range(2))
    keep = torch.rand(3, 11) < 0.7

    def block(x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        if rms:
            return flashbwd.dropout_add_rms_norm(x, residual, gamma, dropout_p=0.3, keep=keep)
        return flashbwd.dropout_add_layer_norm(x, residual, gamma, beta, dropout_p=0.3, keep=keep)

    assert torch.autograd.gradcheck(block, (x, residual, gamma, beta))


@pytest.mark.parametrize("device", DEVICES)
def test_either_result_alone_may_be_used(device: str) -> None:
    x, residual = (torch.randn(5, 32, device=device, requires_grad=True) for _ in range(2))
    z, h = flashbwd.dropout_add_layer_norm(x, residual)
    (dz_only,) = torch.autograd.grad(z.square().sum(), residual, retain_graph=True)
    (dh_only,) = torch.autograd.grad(h.square().sum(), residual, retain_graph=True)
    (both,) = torch.autograd.grad(z.square().sum() + h.square().sum(), residual)
    torch.testing.assert_close(both, dz_only + dh_only)
    torch.testing.assert_close(dh_only, 2 * h.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str) -> None:
    x, residual, dz = (torch.randn(3, 4, 24, device=device) for _ in range(3))
    gamma, beta = (torch.randn(24, device=device) for _ in range(2))
    leaves = [t.clone().requires_grad_() for t in (x, residual, gamma, beta)]
    keep = torch.rand(x.shape, device=device) < 0.5
    rng = torch.tensor([3, 4], device=device)
    mu, rs = torch.randn(12, device=device), torch.rand(12, device=device)
    ops = torch.ops.flashbwd
    torch.library.opcheck(ops.dropout_add_norm.default, (*leaves, keep, 0, 0.5, EPS, False))
    torch.library.opcheck(ops.dropout_add_norm.default, (*leaves[:3], None, None, 1, 0.0, EPS, True))
    for mask in (keep, None):
        args = (dz, x, mu, rs, gamma, residual, mask, rng if mask is None else None)
        torch.library.opcheck(ops.dropout_add_norm_backward.default, args, {"dropout_p": 0.5})
    partly = {"output_mask": [True, False, True, False]}
    torch.library.opcheck(ops.dropout_add_norm_backward.default, (dz, x, None, rs, gamma), partly)


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_compiles_in_one_graph_with_the_same_gradients(device: str) -> None:
    def loss(x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        z, h = flashbwd.dropout_add_layer_norm(x * 1.5, residual, gamma, beta)
        return (z * h).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    torch.manual_seed(0)
    tensors = [torch.randn(s, device=device, requires_grad=True) for s in ((7, 48), (7, 48), (48,), (48,))]
    for got, want in zip(
        torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(loss(*tensors), tensors), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_double_backward_is_refused(device: str) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    z, _ = flashbwd.dropout_add_layer_norm(x, x.detach())
    (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [768, 4095, 65536])
def test_a_thousand_runs_give_the_same_bits(columns: int) -> None:
    case = Case(rows=2000, columns=columns, x=bf16) if columns < 65536 else Case(rows=200, columns=columns, x=bf16)
    inputs = make(case, "cuda")
    assert differing_elements(lambda: list(backward(inputs, case).values())) == 0


@pytest.mark.gpu
def test_each_replay_of_a_captured_step_draws_a_new_mask() -> None:
    x, residual = (torch.randn(64, 1024, device="cuda", requires_grad=True) for _ in range(2))

    def step() -> tuple[Tensor, Tensor]:
        z, h = flashbwd.dropout_add_layer_norm(x, residual, dropout_p=0.5)
        return h.detach(), torch.autograd.grad(z.square().sum() + h.sum(), x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, dx = step()
    masks = []
    for _ in range(2):
        graph.replay()
        dropped = h == residual.detach()
        assert torch.equal(dx == 0, dropped)
        masks.append(dropped.clone())
    assert not torch.equal(*masks)


# ---- errors ----

X = torch.randn(4, 6)
KEEP = torch.ones(4, 6, dtype=torch.bool)
STATE = flashbwd.RngState(1, 0, "efficient64")
GOOD: dict[str, Any] = {"dz": X, "h": X, "mu": X[:, 0], "rs": X[:, 1], "gamma": X[0]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"dz": X[:3]}, "dz has shape (3, 6), expected h's (4, 6)"),
    ({"h": X.half()}, "h is float16, expected dz's float32"),
    ({"rs": X[:3, 1]}, "rs has shape (3,), expected (4,) or h's (4, 6) with 1 for the last"),
    ({"dresidual": X.half()}, "dresidual is float16, expected h's float32"),
    ({"dropout_p": 1.0}, "dropout_p is 1, expected 0 <= dropout_p < 1"),
    ({"dropout_p": 0.5}, "dropout_p is 0.5, expected keep or rng with it"),
    ({"dropout_p": 0.5, "keep": KEEP[:, :5]}, "keep has shape (4, 5), expected h's (4, 6)"),
    ({"dropout_p": 0.5, "keep": X}, "keep is float32, expected bool"),
    ({"dropout_p": 0.5, "keep": KEEP, "rng_state": STATE}, "keep and rng are both given, expected one of them"),
    (
        {"dropout_p": 0.5, "rng_state": flashbwd.RngState(1, 0, "flash")},
        "rng_state.layout is 'flash', expected 'efficient64'",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_the_error_names_the_bad_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        flashbwd.dropout_add_layer_norm_backward(**(GOOD | change))
    assert str(raised.value) == f"flashbwd: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": X[:3]}, "residual has shape (3, 6), expected x's (4, 6)"),
        ({"residual": X.half()}, "residual is float16, expected x's float32"),
        ({"dropout_p": -0.5}, "dropout_p is -0.5, expected 0 <= dropout_p < 1"),
        ({"dropout_p": 1.5}, "dropout_p is 1.5, expected 0 <= dropout_p < 1"),
        ({"keep": KEEP[0]}, "keep has shape (6,), expected x's (4, 6)"),
        ({"beta": X[0, :5]}, "beta has shape (5,), expected (6,)"),
    ],
)
def test_the_error_of_the_forward_names_the_bad_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        flashbwd.dropout_add_layer_norm(**({"x": X, "residual": X} | change))
    assert str(raised.value) == f"flashbwd: {message}"
