"""LayerNorm and RMSNorm: gradients agree with a float64 oracle for every size, dtype, option and memory layout."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import tolerance
from kit.repeats import differing_elements
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashbwd

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Case:
    """One backward. ``layout`` is the memory layout of the rows of x and dz."""

    rows: int = 5
    columns: int = 64
    x: torch.dtype = fp32
    dz: torch.dtype | None = None  # None: the dtype of x
    gamma: torch.dtype | None = None  # None: the dtype of x
    stats: torch.dtype | None = None  # None: float32, or float64 if x is float64
    rms: bool = False
    with_gamma: bool = True
    zero_centered: bool = False
    dresidual: bool = False
    layout: str = "contiguous"
    eps: float = 1e-5
    scale: float = 1.0  # a factor on x

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return "-".join(part.replace("torch.", "") for part in changed) or "default"


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout, with NaN everywhere else."""
    rows, columns = tensor.shape
    if layout == "contiguous":
        return tensor
    if layout == "offset":  # starts between 16-byte boundaries
        memory = tensor.new_full((tensor.numel() + 1,), torch.nan)
        view = memory[1:].view(rows, columns)
    elif layout == "strided":  # gaps between rows; every row starts at a 16-byte boundary
        view = tensor.new_full((rows, columns + 64), torch.nan)[:, :columns]
    elif layout == "odd_stride":
        view = tensor.new_full((rows, columns + 5), torch.nan)[:, 2 : 2 + columns]
    elif layout == "transposed":  # the last dimension is not contiguous
        view = tensor.new_full((columns, rows), torch.nan).t()
    else:
        raise AssertionError(layout)
    view.copy_(tensor)
    return view


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    dz: Tensor
    mu: Tensor | None
    rs: Tensor
    gamma: Tensor | None
    dresidual: Tensor | None
    expected: dict[str, Tensor]
    naive: dict[str, Tensor]


def oracle(x: Tensor, dz: Tensor, gamma: Tensor | None, dresidual: Tensor | None, case: Case) -> dict[str, Tensor]:
    """Gradients and statistics by float64 autograd of the definition, a block of rows at a time."""
    columns = x.shape[1]
    block = max(1, 2**26 // columns)
    weight = torch.ones(columns, dtype=fp64, device=x.device) if gamma is None else gamma.double()
    weight = weight.requires_grad_()
    bias = torch.zeros(columns, dtype=fp64, device=x.device, requires_grad=True)
    pieces: dict[str, list[Tensor]] = {"dx": [], "mu": [], "rs": []}
    sums = {"dgamma": torch.zeros_like(weight), "dbeta": torch.zeros_like(bias)}
    for first in range(0, x.shape[0], block):
        rows = x[first : first + block].double().requires_grad_()
        mean = torch.zeros_like(rows[:, :1]) if case.rms else rows.mean(-1, keepdim=True)
        rs = ((rows - mean).square().mean(-1, keepdim=True) + case.eps).rsqrt()
        z = (rows - mean) * rs * (1 + weight if case.zero_centered else weight) + bias
        dx, dgamma, dbeta = torch.autograd.grad(z, (rows, weight, bias), dz[first : first + block].double())
        if dresidual is not None:
            dx = dx + dresidual[first : first + block].double()
        pieces["dx"].append(dx)
        pieces["mu"].append(mean.detach())
        pieces["rs"].append(rs.detach())
        sums["dgamma"] += dgamma
        sums["dbeta"] += dbeta
    return {
        name: torch.cat(parts) if parts else x.new_zeros(0, columns, dtype=fp64) for name, parts in pieces.items()
    } | sums


def written_out(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    """The formulas in plain PyTorch in float32, rounded to the dtypes of the gradients, for the tolerance rule."""
    x, dz, rs = (inputs[name].float() for name in ("x", "dz", "rs"))
    xhat = (x if case.rms else x - inputs["mu"].float()) * rs
    gamma = inputs["gamma"]
    dy = dz if gamma is None else dz * (1 + gamma.float() if case.zero_centered else gamma.float())
    dx = dy - xhat * (dy * xhat).mean(-1, keepdim=True)
    dx = (dx if case.rms else dx - dy.mean(-1, keepdim=True)) * rs
    if inputs["dresidual"] is not None:
        dx = dx + inputs["dresidual"].float()
    parameter = x.dtype if gamma is None else gamma.dtype
    return {"dx": dx.to(case.x), "dgamma": (dz * xhat).sum(0).to(parameter), "dbeta": dz.sum(0).to(parameter)}


def make(case: Case, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    shape = (case.rows, case.columns)

    def random(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*size, device=device, dtype=fp32 if case.x != fp64 else fp64).to(dtype)

    x = ((random(*shape, dtype=case.x) * 2 + 0.5) * case.scale).to(case.x)
    dz = random(*shape, dtype=case.dz or case.x)
    gamma = random(case.columns, dtype=case.gamma or case.x) if case.with_gamma else None
    dresidual = random(*shape, dtype=case.x) if case.dresidual else None
    expected = oracle(x, dz, gamma, dresidual, case)
    stats = case.stats or (fp64 if case.x == fp64 else fp32)
    mu, rs = expected.pop("mu").to(stats), expected.pop("rs").to(stats)
    naive: dict[str, Tensor] = {}
    if case.x != fp64:
        naive = written_out({"x": x, "dz": dz, "mu": mu, "rs": rs, "gamma": gamma, "dresidual": dresidual}, case)
    return Inputs(
        laid_out(x, case.layout),
        laid_out(dz, case.layout),
        None if case.rms else mu.flatten(),
        rs.flatten(),
        gamma,
        None if dresidual is None else laid_out(dresidual, case.layout),
        expected,
        naive,
    )


def backward(inputs: Inputs, case: Case, **options: Any) -> dict[str, Any]:
    options = {"dresidual": inputs.dresidual, "zero_centered_gamma": case.zero_centered} | options
    if case.rms:
        return flashbwd.rms_norm_backward(inputs.dz, inputs.x, inputs.rs, inputs.gamma, **options)._asdict()
    assert inputs.mu is not None
    return flashbwd.layer_norm_backward(inputs.dz, inputs.x, inputs.mu, inputs.rs, inputs.gamma, **options)._asdict()


def check(grads: dict[str, Any], inputs: Inputs, case: Case) -> None:
    for name, grad in grads.items():
        if name == "dgamma" and inputs.gamma is None:
            assert grad is None
            continue
        assert grad is not None, f"{name} is missing"
        expected = inputs.expected[name]
        reached = 0.0
        if inputs.naive and expected.numel() > 0:
            reached = float((inputs.naive[name].double() - expected).abs().max())
        limit = tolerance.bound(expected, reached, grad.dtype)
        if name == "dx" and case.columns == 1 and case.rows > 0:  # dx is 0, because terms of the size of rs * dz cancel
            limit += 2**-20 * float((inputs.rs[:, None] * inputs.dz).abs().max())
        # Compare on the device of the tensors. Large tensors are copied to the CPU only after a failure.
        if not bool(((grad.double() - expected).abs() <= limit).all()):
            tolerance.assert_within(grad, expected, limit, f"{name} of {case}")


def run(case: Case, device: str) -> None:
    inputs = make(case, device)
    check(backward(inputs, case), inputs, case)


COLUMNS = [1, 7, 64, 768, 1000, 1024, 4095, 4096, 5000, 5120, 7919, 8192, 12288, 16384, 65536, 131072]
ROWS = [0, 1, 3, 131, 132, 133, 8192, 2**18 + 1]
MOST_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
DTYPES = [(x, dz, gamma) for x in (bf16, fp16, fp32) for dz in (bf16, fp16, fp32) for gamma in dict.fromkeys((x, fp32))]
OPTIONS = [
    Case(rms=rms, with_gamma=with_gamma, zero_centered=zero_centered, dresidual=dresidual)
    for rms in (False, True)
    for with_gamma in (False, True)
    for zero_centered in (False, True)
    for dresidual in (False, True)
    if with_gamma or not zero_centered
]


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_every_size_agree_with_the_oracle(device: str, columns: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        if rows * columns <= MOST_ELEMENTS[device]:
            run(Case(rows=rows, columns=columns, x=dtype), device)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("device", DEVICES)
def test_dtypes_options_and_layouts_of_every_width_agree_with_the_oracle(device: str, columns: int) -> None:
    chance = random.Random(columns)
    for rows in (1, 3, 131, 132, 133) * (4 if device == "cuda" else 1):
        x, dz, gamma = chance.choice(DTYPES)
        case = replace(chance.choice(OPTIONS), rows=rows, columns=columns, x=x, dz=dz, gamma=gamma)
        if rows * columns <= MOST_ELEMENTS[device]:
            run(replace(case, layout=chance.choice(("contiguous", "offset", "strided", "odd_stride"))), device)


@pytest.mark.parametrize("columns", [48, 77, 4096])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda t: "-".join(str(d).removeprefix("torch.") for d in t))
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_every_dtype_agree_with_the_oracle(
    device: str, dtypes: tuple[torch.dtype, ...], columns: int
) -> None:
    run(Case(rows=67, columns=columns, x=dtypes[0], dz=dtypes[1], gamma=dtypes[2], dresidual=True), device)


@pytest.mark.parametrize("columns", [64, 999, 20480])
@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_with_every_option_agree_with_the_oracle(device: str, case: Case, columns: int) -> None:
    for dtype in (bf16, fp16, fp32):
        run(replace(case, rows=29, columns=columns, x=dtype), device)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_inputs_of_any_scale_agree_with_the_oracle(device: str, scale: float) -> None:
    for dtype in (bf16, fp32):
        for rms in (False, True):
            run(Case(rows=40, columns=264, x=dtype, rms=rms, eps=0.0, scale=scale), device)


@pytest.mark.parametrize("stats", [bf16, fp16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_mu_and_rs_may_be_16_bit(device: str, stats: torch.dtype) -> None:
    case = Case(rows=40, columns=96, x=bf16)
    inputs = make(case, device)
    assert inputs.mu is not None
    rounded = replace(inputs, mu=inputs.mu.to(stats), rs=inputs.rs.to(stats))
    same = replace(inputs, mu=inputs.mu.to(stats).float(), rs=inputs.rs.to(stats).float())
    for got, want in zip(backward(rounded, case).values(), backward(same, case).values(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("columns", [8, 100, 768, 4095, 16391])
@pytest.mark.parametrize("layout", ["offset", "strided", "odd_stride", "transposed"])
@pytest.mark.parametrize("device", DEVICES)
def test_memory_between_rows_is_not_read(device: str, layout: str, columns: int) -> None:
    for dtype in (bf16, fp32):
        run(Case(rows=19, columns=columns, x=dtype, layout=layout, dresidual=True), device)


@pytest.mark.parametrize("columns", [8, 77, 1000, 4095])
@pytest.mark.parametrize("device", DEVICES)
def test_x_and_dz_may_have_different_layouts(device: str, columns: int) -> None:
    case = Case(rows=35, columns=columns, x=bf16)
    inputs = make(case, device)
    for layout in ("offset", "strided", "odd_stride", "transposed"):
        check(backward(replace(inputs, dz=laid_out(inputs.dz, layout)), case), inputs, case)
        check(backward(replace(inputs, x=laid_out(inputs.x, layout)), case), inputs, case)


@pytest.mark.parametrize("device", DEVICES)
def test_dz_may_be_expanded_from_one_element(device: str) -> None:
    case = Case(rows=6, columns=40)
    inputs = make(case, device)
    ones = torch.ones((), device=device).expand(6, 40)
    row = torch.randn(40, device=device).expand(6, 40)
    for dz in (ones, row):
        got = backward(replace(inputs, dz=dz), case)
        want = backward(replace(inputs, dz=dz.contiguous()), case)
        assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_may_have_any_leading_dimensions(device: str) -> None:
    case = Case(rows=24, columns=33, x=bf16)
    inputs = make(case, device)
    assert inputs.mu is not None
    flat = backward(inputs, case)
    x, dz = inputs.x.view(2, 3, 4, 33), inputs.dz.view(2, 3, 4, 33)
    for mu, rs in ((inputs.mu, inputs.rs), (inputs.mu.view(2, 3, 4, 1), inputs.rs.view(2, 3, 4, 1))):
        grads = flashbwd.layer_norm_backward(dz, x, mu, rs, inputs.gamma)
        assert grads.dx is not None
        assert grads.dx.shape == x.shape
        assert torch.equal(grads.dx.view(24, 33), flat["dx"])
        assert grads.dgamma is not None
        assert torch.equal(grads.dgamma, flat["dgamma"])


@pytest.mark.parametrize("device", DEVICES)
def test_dx_has_the_strides_of_empty_like(device: str) -> None:
    x = torch.randn(4, 6, 16, device=device).transpose(0, 1)
    mu, rs = torch.randn(24, device=device), torch.rand(24, device=device)
    dz = torch.randn(6, 4, 16, device=device)
    dx = flashbwd.layer_norm_backward(dz, x, mu, rs).dx
    assert dx is not None
    assert dx.stride() == torch.empty_like(x).stride()
    want = flashbwd.layer_norm_backward(dz, x.contiguous(), mu, rs).dx
    assert want is not None
    assert torch.equal(dx, want)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(50, 72), (1024, 1024), (1024, 3072), (50, 77)])
@pytest.mark.parametrize("device", DEVICES)
def test_the_output_mask_omits_gradients_and_does_not_change_the_others(
    device: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    case = Case(rows=rows, columns=columns, x=dtype)
    inputs = make(case, device)
    assert inputs.mu is not None
    every = backward(inputs, case)
    for mask in [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)]:
        grads = backward(inputs, case, output_mask=mask)
        for asked, name in zip(mask, every, strict=True):
            assert (grads[name] is not None) == asked
            assert not asked or torch.equal(grads[name], every[name])
    case = replace(case, rms=True)
    inputs = make(case, device)
    every = backward(inputs, case)
    for mask2 in [(False, True), (True, False), (False, False)]:
        grads = backward(inputs, case, output_mask=mask2)
        for asked, name in zip(mask2, every, strict=True):
            assert (grads[name] is not None) == asked
            assert not asked or torch.equal(grads[name], every[name])


@pytest.mark.parametrize("device", DEVICES)
def test_parameter_gradients_of_no_rows_are_zero(device: str) -> None:
    case = Case(rows=0, columns=96, x=bf16, gamma=fp32)
    grads = backward(make(case, device), case)
    assert grads["dx"] is not None
    assert grads["dx"].shape == (0, 96)
    for name in ("dgamma", "dbeta"):
        assert torch.equal(grads[name], torch.zeros(96, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_not_written_to(device: str) -> None:
    case = Case(rows=37, columns=129, x=bf16, dresidual=True)
    inputs = make(case, device)
    before = {name: t.clone() for name, t in vars(inputs).items() if isinstance(t, Tensor)}
    backward(inputs, case)
    assert all(torch.equal(getattr(inputs, name), t) for name, t in before.items())


def test_float64_gradients_are_exact_up_to_rounding() -> None:
    for rms in (False, True):
        run(Case(rows=33, columns=70, x=fp64, rms=rms, dresidual=True), "cpu")


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# In float64 every CPU thread gets consecutive chunks of at least 2**18 elements, which are 4 rows here. In float32
# every thread gets an equal share of the rows. The row counts give a chunk that is not full, fewer chunks for the last
# thread than for the others, or fewer chunks than threads.
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [7, 19, 29])
def test_no_row_is_lost_when_cpu_threads_share_the_rows(rows: int, threads: int) -> None:
    columns = 65536
    with cpu_threads(threads):
        for case in (Case(rows=rows, columns=columns, dresidual=True), Case(rows=rows, columns=columns, rms=True)):
            run(case, "cpu")
        x = torch.randn(rows, columns, dtype=fp64, generator=torch.Generator().manual_seed(rows))
        gamma, beta = x[0] + 1, x[1]
        z, mu, rs = torch.ops.flashbwd.layer_norm(x, gamma, beta, 1e-5, False)
        rms_z, rms_rs = torch.ops.flashbwd.rms_norm(x, gamma, 1e-5, False)
    mean = x.sum(-1, keepdim=True) / columns
    want_rs = (((x - mean) ** 2).sum(-1, keepdim=True) / columns + 1e-5) ** -0.5
    want_rms_rs = ((x**2).sum(-1, keepdim=True) / columns + 1e-5) ** -0.5
    for got, want in (
        (mu, mean),
        (rs, want_rs),
        (z, (x - mean) * want_rs * gamma + beta),
        (rms_rs, want_rms_rs),
        (rms_z, x * want_rms_rs * gamma),
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 300),
    x=st.sampled_from([bf16, fp16, fp32]),
    dz=st.sampled_from([bf16, fp16, fp32]),
    fp32_gamma=st.booleans(),
    rms=st.booleans(),
    with_gamma=st.booleans(),
    zero_centered=st.booleans(),
    dresidual=st.booleans(),
    layout=st.sampled_from(["contiguous", "offset", "strided", "odd_stride", "transposed"]),
)
def test_random_combinations_agree_with_the_oracle(
    rows: int,
    columns: int,
    x: torch.dtype,
    dz: torch.dtype,
    fp32_gamma: bool,
    with_gamma: bool,
    zero_centered: bool,
    **rest: Any,
) -> None:
    case = Case(
        rows=rows,
        columns=columns,
        x=x,
        dz=dz,
        gamma=fp32 if fp32_gamma else None,
        with_gamma=with_gamma,
        zero_centered=zero_centered and with_gamma,
        **rest,
    )
    run(case, "cuda" if torch.cuda.is_available() else "cpu")


# ---- properties of the kernels ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 1024), (1024, 3072), (8193, 768), (8193, 4096), (1000, 7919), (300, 65536)]
)
def test_a_thousand_runs_give_the_same_bits(rows: int, columns: int, dtype: torch.dtype) -> None:
    case = Case(rows=rows, columns=columns, x=dtype)
    inputs = make(case, "cuda")
    assert differing_elements(lambda: list(backward(inputs, case).values())) == 0


def check_by_blocks(rows: int, columns: int, dtype: torch.dtype, layout: str = "contiguous") -> None:
    """Compare with float64 by blocks of rows, for tensors that leave no memory for a copy in float64."""
    torch.manual_seed(rows + columns)
    stride = {"contiguous": columns, "odd_stride": columns + 5, "overlapping": 8}[layout]
    memory = (torch.randn(rows * stride + columns + 5, device="cuda", dtype=dtype) for _ in range(2))
    x, dz = (m.as_strided((rows, columns), (stride, 1), 5 if layout == "odd_stride" else 0) for m in memory)
    gamma = torch.randn(columns, device="cuda", dtype=dtype)
    mu, rs = (torch.empty(rows, device="cuda") for _ in range(2))
    blocks = [slice(first, first + 2**26 // columns) for first in range(0, rows, 2**26 // columns)]
    for block in blocks:
        values = x[block].float()
        mu[block], rs[block] = values.mean(-1), (values.var(-1, correction=0) + 1e-5).rsqrt()
    dx, dgamma, dbeta = flashbwd.layer_norm_backward(dz, x, mu, rs, gamma)
    assert dx is not None
    assert dgamma is not None
    assert dbeta is not None
    want_dgamma, want_dbeta = (torch.zeros(columns, device="cuda", dtype=fp64) for _ in range(2))
    resolution = torch.finfo(dtype).eps
    for block in blocks:
        z = dz[block].double()
        xhat = (x[block].double() - mu[block, None].double()) * rs[block, None].double()
        want_dgamma += (z * xhat).sum(0)
        want_dbeta += z.sum(0)
        dy = z * gamma.double()
        want = rs[block, None] * (dy - dy.mean(-1, keepdim=True) - xhat * (dy * xhat).mean(-1, keepdim=True))
        error = (dx[block].double() - want).abs_()
        assert bool((error <= resolution * want.abs() + 2e-5).all()), f"{rows} x {columns} {dtype}, rows {block}"
    for got, wanted in ((dgamma, want_dgamma), (dbeta, want_dbeta)):
        # The sums of terms near 1 are fp32, and are rounded once to the dtype of gamma.
        limit = resolution * wanted.abs() + 1e-5 * rows**0.5
        assert bool(((got.double() - wanted).abs() <= limit).all()), f"{rows} x {columns} {dtype}"


MOST_BYTES_PER_TENSOR = 2**33 + 2**16  # for each of x, dz and dx


@pytest.mark.gpu
@pytest.mark.alone
def test_gradients_of_many_rows_agree_at_every_width() -> None:
    """The sizes that are too large for the other tests: up to 2^18 + 1 rows of 16384 16-bit columns."""
    most = 0
    for columns in COLUMNS:
        for rows in ROWS:
            for dtype in (bf16, fp16, fp32):
                elements = rows * columns
                size = elements * dtype.itemsize
                fits = size <= MOST_BYTES_PER_TENSOR and 3 * size + 2**33 < torch.cuda.mem_get_info()[0]
                if elements > MOST_ELEMENTS["cuda"] and fits:
                    check_by_blocks(rows, columns, dtype)
                    torch.cuda.empty_cache()
                    most = max(most, elements)
    assert most > 2**31


@pytest.mark.gpu
@pytest.mark.alone
def test_unaligned_rows_beyond_2_to_31_elements_have_right_gradients() -> None:
    check_by_blocks(2**18 + 1, 8192, bf16, "odd_stride")
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("columns", [65536, 131072])
def test_the_widest_rows_beyond_2_to_31_elements_have_right_gradients(columns: int) -> None:
    """All rows of x share memory except for 16 bytes per row, and so do the rows of dz. Only dx takes 34 or 69 GB."""
    rows = 2**18 + 1
    if (free := torch.cuda.mem_get_info()[0]) < 2 * rows * columns + 5 * 2**30:
        pytest.skip(f"needs a GPU with {2 * rows * columns / 2**30 + 5:.0f} GiB free, this one has {free / 2**30:.0f}")
    check_by_blocks(rows, columns, bf16, "overlapping")
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_rows_with_gaps_are_not_copied() -> None:
    rows, columns = 2048, 4096
    x, dz, dresidual = (torch.randn(rows, columns + 64, device="cuda", dtype=bf16)[:, :columns] for _ in range(3))
    mu, rs = torch.zeros(rows, device="cuda"), torch.ones(rows, device="cuda")
    gamma = torch.ones(columns, device="cuda", dtype=bf16)
    extra = []
    for tensors in ((x, dz, dresidual), (x.contiguous(), dz.contiguous(), dresidual.contiguous())):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashbwd.layer_norm_backward(tensors[1], tensors[0], mu, rs, gamma, dresidual=tensors[2])
        extra.append(torch.cuda.max_memory_allocated() - before)
    assert extra[0] == extra[1]


@pytest.mark.gpu
@pytest.mark.alone
def test_the_forward_is_right_beyond_2_to_31_elements() -> None:
    x = torch.randn(2**18 + 1, 8192, device="cuda", dtype=bf16)
    gamma, beta = (torch.randn(8192, device="cuda", dtype=bf16) for _ in range(2))
    z = flashbwd.layer_norm(x, gamma, beta)
    for rows in (slice(0, 100), slice(2**17 - 50, 2**17 + 50), slice(2**18 - 99, 2**18 + 1)):
        want = functional.layer_norm(x[rows].double(), (8192,), gamma.double(), beta.double())
        tolerance.assert_close(z[rows], want, [functional.layer_norm(x[rows], (8192,), gamma, beta)], f"rows {rows}")


@pytest.mark.gpu
@pytest.mark.parametrize("gamma", [bf16, fp32], ids=str)
def test_dgamma_of_a_million_rows_is_as_accurate_as_float32_allows(gamma: torch.dtype) -> None:
    case = Case(rows=2**20, columns=256, x=bf16, gamma=gamma)
    inputs = make(case, "cuda")
    grads = backward(inputs, case)
    assert inputs.mu is not None
    assert inputs.gamma is not None
    for name in ("dgamma", "dbeta"):
        got, want = grads[name], inputs.expected[name]
        assert got is not None
        # The sums are near sqrt(rows) = 1e3 and their terms near 1. fp32 resolves 6e-5 at 1e3.
        nearest = want.to(gamma).double()
        assert float((got.double() - nearest).abs().max()) < 5e-3 + float((nearest - want).abs().max())
    theirs = torch.ops.aten.native_layer_norm_backward(
        inputs.dz,
        inputs.x,
        [256],
        inputs.mu[:, None],
        inputs.rs[:, None],
        inputs.gamma.to(bf16),
        None,
        [False, True, False],
    )[1]
    want = inputs.expected["dgamma"]
    ours = grads["dgamma"]
    assert ours is not None
    assert float((ours.double() - want).norm()) <= 1.001 * float((theirs.double() - want).norm())


@pytest.mark.gpu
def test_rows_that_are_read_twice_have_right_gradients() -> None:
    """Rows that do not fit in a cluster use the kernel without clusters, which sm_80 GPUs run for all wide rows."""
    for dtype in (bf16, fp32):
        for rows in (1, 3, 40):
            run(Case(rows=rows, columns=300_001, x=dtype, dresidual=True), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [768, 4095, 65536])
def test_a_replayed_graph_uses_the_new_values(columns: int) -> None:
    case = Case(rows=64, columns=columns, x=bf16)
    inputs, other = make(case, "cuda"), make(case, "cuda", seed=1)
    assert inputs.mu is not None
    assert other.mu is not None
    backward(inputs, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = backward(inputs, case)
    for mine, new in ((inputs.x, other.x), (inputs.dz, other.dz), (inputs.mu, other.mu), (inputs.rs, other.rs)):
        mine.copy_(new)
    graph.replay()
    want = backward(inputs, case)
    assert all(torch.equal(grads[name], want[name]) for name in grads)


@pytest.mark.gpu
def test_work_on_a_side_stream_keeps_its_order() -> None:
    case = Case(rows=4096, columns=4096, x=bf16)
    inputs = make(case, "cuda")
    want = backward(inputs, case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(50):
            dz = inputs.dz * 1.0
            got = backward(replace(inputs, dz=dz), case)
            dz.fill_(torch.nan)
            assert all(torch.equal(got[name], want[name]) for name in got)


# ---- the differentiable forms ----


def forward(case: Case, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    if case.rms:
        return flashbwd.rms_norm(x, gamma, eps=case.eps, zero_centered_gamma=case.zero_centered)
    return flashbwd.layer_norm(x, gamma, beta, eps=case.eps, zero_centered_gamma=case.zero_centered)


@pytest.mark.parametrize("case", [c for c in OPTIONS if not c.dresidual], ids=str)
def test_the_differentiable_forms_pass_gradcheck(case: Case) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 11, dtype=fp64, requires_grad=True)
    gamma = torch.randn(11, dtype=fp64, requires_grad=True) if case.with_gamma else None
    beta = None if case.rms else torch.randn(11, dtype=fp64, requires_grad=True)
    given = [t for t in (x, gamma, beta) if t is not None]

    def of_given(*tensors: Tensor) -> Tensor:
        rest = iter(tensors[1:])
        return forward(case, tensors[0], *(None if t is None else next(rest) for t in (gamma, beta)))

    assert torch.autograd.gradcheck(of_given, given)


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_forward_agrees_with_torch(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 72, device=device).to(dtype)
    gamma, beta = (torch.randn(72, device=device).to(dtype) for _ in range(2))
    z = flashbwd.layer_norm(x, gamma, beta)
    want = functional.layer_norm(x.double(), (72,), gamma.double(), beta.double())
    tolerance.assert_close(z, want, [functional.layer_norm(x, (72,), gamma, beta)], "layer_norm")
    z = flashbwd.rms_norm(x, gamma)
    want = functional.rms_norm(x.double(), (72,), gamma.double(), eps=torch.finfo(fp32).eps)
    tolerance.assert_close(z, want, [functional.rms_norm(x, (72,), gamma)], "rms_norm")


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, torch.float64], ids=str)
def test_the_default_eps_of_rms_norm_equals_that_of_torch(dtype: torch.dtype) -> None:
    x = (3e-4 * torch.randn(6, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)
    want = functional.rms_norm(x, (72,))
    torch.testing.assert_close(flashbwd.rms_norm(x), want)
    torch.testing.assert_close(flashbwd.dropout_add_rms_norm(x, torch.zeros_like(x))[0], want)
    torch.testing.assert_close(flashbwd.RMSNorm(72, dtype=dtype)(x), want)


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize("columns", [*COLUMNS, 24576])
@pytest.mark.parametrize("device", DEVICES)
def test_the_forward_agrees_with_torch_at_every_size(device: str, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    for rows, layout in ((0, "contiguous"), (1, "contiguous"), (5, "odd_stride"), (37, "contiguous")):
        x = laid_out((torch.randn(rows, columns, device=device) + 3).to(dtype), layout)
        gamma, beta = (torch.randn(columns, device=device).to(dtype) for _ in range(2))
        z, mu, rs = torch.ops.flashbwd.layer_norm(x, gamma, beta, 1e-5, True)
        mean = x.double().mean(-1, keepdim=True)
        want_rs = ((x.double() - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        want = (x.double() - mean) * want_rs * (1 + gamma.double()) + beta.double()
        torch.testing.assert_close(mu.double(), mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rs.double(), want_rs, rtol=1e-5, atol=0)
        plain = ((x.float() - mu) * rs * (1 + gamma.float()) + beta.float()).to(dtype)
        tolerance.assert_close(z, want, [plain], f"z of {rows} x {columns}")
        z, rs = torch.ops.flashbwd.rms_norm(x, gamma, 1e-5, False)
        want_rs = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        torch.testing.assert_close(rs.double(), want_rs, rtol=1e-5, atol=0)
        plain = (x.float() * rs * gamma.float()).to(dtype)
        tolerance.assert_close(z, x.double() * want_rs * gamma.double(), [plain], f"rms z of {rows} x {columns}")


@pytest.mark.parametrize("device", DEVICES)
def test_16_bit_input_may_have_float32_parameters(device: str) -> None:
    x = torch.randn(8, 40, device=device).to(bf16).requires_grad_()
    gamma, beta = (torch.randn(40, device=device).requires_grad_() for _ in range(2))
    z = flashbwd.layer_norm(x, gamma, beta)
    z.sum().backward()
    assert z.dtype == bf16
    for leaf in (x, gamma, beta):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_double_backward_is_refused(device: str) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(flashbwd.layer_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


@pytest.mark.parametrize("shape", [(48,), (6, 8)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_modules_give_the_results_of_those_of_torch(device: str, affine: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    pairs: list[tuple[Any, Any]] = [(flashbwd.LayerNorm, torch.nn.LayerNorm), (flashbwd.RMSNorm, torch.nn.RMSNorm)]
    for ours_class, theirs_class in pairs:
        theirs = theirs_class(shape, elementwise_affine=affine, device=device)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        ours = ours_class(shape, elementwise_affine=affine, device=device)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(3, 4, *shape, device=device, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        weight = torch.randn_like(x)
        (ours(x) * weight).sum().backward()
        (theirs(x2) * weight).sum().backward()
        torch.testing.assert_close(x.grad, x2.grad)
        for mine, his in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, his.grad)


def test_a_module_may_have_no_bias() -> None:
    module = flashbwd.LayerNorm(16, bias=False)
    module(torch.randn(2, 16)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_gives_the_same_dtypes_as_torch(device: str) -> None:
    x = torch.randn(4, 32, device=device, dtype=bf16)
    gamma, beta = torch.ones(32, device=device, dtype=bf16), torch.zeros(32, device=device, dtype=bf16)
    with torch.autocast(device, bf16):
        assert flashbwd.layer_norm(x, gamma, beta).dtype == functional.layer_norm(x, (32,), gamma, beta).dtype
        assert flashbwd.rms_norm(x, gamma).dtype == functional.rms_norm(x, (32,), gamma).dtype
        module, linear = flashbwd.LayerNorm(32, device=device), torch.nn.Linear(32, 32, device=device)
        module(linear(x)).float().square().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == fp32


@pytest.mark.parametrize(("dtype", "expected"), [(bf16, fp32), (fp32, fp32), (torch.float64, torch.float64)])
def test_cuda_autocast_casts_to_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast would refuse without a GPU
    try:
        with FakeTensorMode():
            x, gamma = torch.empty(4, 16, device="cuda", dtype=dtype), torch.empty(16, device="cuda", dtype=dtype)
            assert flashbwd.layer_norm(x, gamma, gamma).dtype == expected
            assert flashbwd.layer_norm(x).dtype == expected
            assert flashbwd.rms_norm(x, gamma).dtype == dtype
            integers = flashbwd.layer_norm(x.to(torch.int64))  # a fake operator does not check dtypes
            assert integers.dtype == torch.int64
    finally:
        torch.set_autocast_enabled("cuda", enabled)


# ---- requirements of PyTorch on operators ----


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str) -> None:
    x = torch.randn(4, 5, 24, device=device, requires_grad=True)
    gamma, beta = (torch.randn(24, device=device, requires_grad=True) for _ in range(2))
    dz, mu, rs = torch.randn(4, 5, 24, device=device), torch.randn(20, device=device), torch.rand(20, device=device)
    ops = torch.ops.flashbwd
    plain = [t.detach() for t in (dz, x)]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ops.layer_norm, (x, gamma, beta, 1e-5, False), {}),
        (ops.layer_norm, (x, None, None, 1e-5, False), {}),
        (ops.rms_norm, (x, gamma, 1e-5, True), {}),
        (ops.layer_norm_backward, (*plain, mu, rs, gamma.detach()), {}),
        (ops.layer_norm_backward, (*plain, mu, rs), {"output_mask": [True, True, False]}),
        (ops.layer_norm_backward, (*plain, mu, rs, gamma.detach(), dz), {"zero_centered_gamma": True}),
        (ops.rms_norm_backward, (*plain, rs, gamma.detach()), {"output_mask": [False, True]}),
    ]
    for op, args, kwargs in calls:
        torch.library.opcheck(op.default, args, kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_compiles_in_one_graph_with_the_same_gradients(device: str, dynamic: bool) -> None:
    def loss(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return (flashbwd.rms_norm(flashbwd.layer_norm(x * 1.5, gamma, beta), gamma) ** 2).mean()

    torch._dynamo.reset()
    compiled = torch.compile(
        loss, fullgraph=True, dynamic=dynamic, backend="aot_eager" if device == "cpu" else "inductor"
    )
    for rows in (7, 9):
        torch.manual_seed(rows)
        tensors = [torch.randn(s, device=device, requires_grad=True) for s in ((rows, 48), (48,), (48,))]
        for got, want in zip(
            torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(loss(*tensors), tensors), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_a_norm_can_be_exported() -> None:
    exported = torch.export.export(flashbwd.LayerNorm(16), (torch.randn(2, 16),))
    assert "flashbwd.layer_norm" in str(exported.graph)


def test_checkpointing_may_recompute_or_keep_the_norm() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    gamma = torch.randn(16, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return flashbwd.layer_norm(x, gamma).sin()

    want = torch.autograd.grad(block(x).sum(), (x, gamma))
    recomputed = checkpoint(block, x, use_reentrant=False)
    kept = checkpoint(block, x, use_reentrant=False, context_fn=_keep_layer_norm)
    for out in (recomputed, kept):
        for got, wanted in zip(torch.autograd.grad(out.sum(), (x, gamma)), want, strict=True):
            assert torch.equal(got, wanted)


def _keep_layer_norm() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.flashbwd.layer_norm.default])


def test_parameter_gradients_of_parts_of_the_rows_add_up() -> None:
    case = Case(rows=30, columns=20)
    inputs = make(case, "cpu")
    assert inputs.mu is not None
    whole = backward(inputs, case)
    parts = [
        backward(replace(inputs, x=inputs.x[s], dz=inputs.dz[s], mu=inputs.mu[s], rs=inputs.rs[s]), case)
        for s in (slice(0, 11), slice(11, 30))
    ]
    torch.testing.assert_close(torch.cat([p["dx"] for p in parts]), whole["dx"])
    for name in ("dgamma", "dbeta"):
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name])


# ---- errors ----

X = torch.randn(4, 6)
GOOD: dict[str, Any] = {"dz": X, "x": X, "mu": X[:, 0], "rs": X[:, 1], "gamma": X[0], "dresidual": X}
BAD = [
    ({"x": torch.tensor(1.0)}, "x has no dimensions, expected (..., N)"),
    ({"x": X.int()}, "x is int32, expected float16, bfloat16, float32 or float64"),
    ({"x": X[:, :0]}, "x has shape (4, 0), expected at least 1 in the last dimension"),
    ({"dz": X[:3]}, "dz has shape (3, 6), expected x's (4, 6)"),
    ({"dz": X[None]}, "dz has shape (1, 4, 6), expected x's (4, 6)"),
    ({"dz": X.double()}, "dz is float64, expected float16, bfloat16 or float32"),
    ({"dz": X.long()}, "dz is int64, expected float16, bfloat16 or float32"),
    ({"rs": X[:3, 1]}, "rs has shape (3,), expected (4,) or x's (4, 6) with 1 for the last"),
    ({"rs": X[:, 1].double()}, "rs is float64, expected float32, float16 or bfloat16"),
    ({"mu": X[:, :2]}, "mu has shape (4, 2), expected (4,) or x's (4, 6) with 1 for the last"),
    ({"mu": X[:, 0].half()}, "mu is float16, expected rs's float32"),
    ({"gamma": X[0, :5]}, "gamma has shape (5,), expected (6,)"),
    ({"gamma": X[:1]}, "gamma has shape (1, 6), expected (6,)"),
    ({"gamma": X[0].half()}, "gamma is float16, expected x's float32"),
    (
        {"gamma": X[0].bfloat16(), "x": X.half(), "dresidual": None},
        "gamma is bfloat16, expected x's float16 or float32",
    ),
    ({"dresidual": X[:, :5]}, "dresidual has shape (4, 5), expected x's (4, 6)"),
    ({"dresidual": X.half()}, "dresidual is float16, expected x's float32"),
    ({"gamma": None, "zero_centered_gamma": True}, "zero_centered_gamma is set, expected a gamma with it"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_the_error_names_the_bad_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        flashbwd.layer_norm_backward(**(GOOD | change))
    assert str(raised.value).startswith(f"flashbwd: {message}")
    if "mu" not in change:
        with pytest.raises(ValueError) as raised:
            flashbwd.rms_norm_backward(**({k: v for k, v in GOOD.items() if k != "mu"} | change))
        assert str(raised.value).startswith(f"flashbwd: {message}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flashbwd.layer_norm(X, X[0, :5]), "gamma has shape (5,), expected (6,)"),
        (lambda: flashbwd.layer_norm(X, X[0], X[0].half()), "beta is float16, expected x's float32"),
        (lambda: flashbwd.layer_norm(X.long()), "x is int64, expected float16, bfloat16, float32 or float64"),
        (lambda: flashbwd.layer_norm(torch.tensor(1.0)), "x has no dimensions, expected (..., N)"),
        (lambda: flashbwd.layer_norm(X.half(), X[0].half(), X[0]), "beta is float32, expected gamma's float16"),
        (
            lambda: flashbwd.rms_norm(X, zero_centered_gamma=True),
            "zero_centered_gamma is set, expected a gamma with it",
        ),
        (lambda: flashbwd.LayerNorm(5)(X), "x has shape (4, 6), expected its last dimensions to be (5,)"),
    ],
)
def test_the_error_of_the_forward_names_the_bad_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == f"flashbwd: {message}"


@pytest.mark.gpu
def test_the_error_names_a_tensor_on_another_device() -> None:
    x = X.cuda()
    with pytest.raises(ValueError, match="gamma is on cpu, expected x's cuda:0"):
        flashbwd.layer_norm_backward(x, x, x[:, 0], x[:, 1], X[0])
