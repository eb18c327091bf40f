"""The sm90 kernel with block lists agrees with float64 autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kit.tolerance import Blocks
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flashbwd
from flashbwd.flex.backends import KernelCall
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError, kernel_lists, kernel_tile
from flashbwd.flex.lists import key_block_lists

pytestmark = pytest.mark.gpu
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _sm90() -> Iterator[None]:
    """Force the sm90 kernels, so that no test passes because another kernel ran."""
    with flashbwd.use_backend("sm90"):
        yield


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block lists run on compute capability 9.0")


@dataclass(frozen=True)
class Case:
    mask: str
    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    seqlen_q: int = 512
    seqlen_k: int = 512
    head_dim: int = 128
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 128
    softcap: float = 0.0
    alibi: bool = False
    dlse: bool = False


def mask_mod(name: str, case: Case) -> MaskMod:
    generator = torch.Generator("cuda").manual_seed(7)
    if name == "random_blocks":  # empty rows, empty columns, and everything between
        rows, columns = -(-case.seqlen_q // 128), -(-case.seqlen_k // 128)
        table = torch.rand(case.batch, case.heads, rows, columns, device="cuda", generator=generator) < 0.4
        table[:, :, 0] = False
        table[:, :, :, 0] = False
        return lambda b, h, i, j: table[b, h, i // 128, j // 128]
    if name == "late":  # the first 64 queries and keys are hidden
        return lambda b, h, i, j: (i >= j) & (j >= 64)
    if name == "random_pairs":
        table = torch.rand(case.seqlen_q, case.seqlen_k, device="cuda", generator=generator) < 0.3
        return lambda b, h, i, j: table[i, j]
    if name == "documents":
        ends = torch.tensor([0.13, 0.2, 0.61, 0.9], device="cuda") * case.seqlen_q
        document = (torch.arange(case.seqlen_q, device="cuda")[:, None] >= ends.long()).sum(1)
        return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    return {
        "causal": lambda b, h, i, j: i >= j,
        "prefix": lambda b, h, i, j: (i >= j) | (j < 100),
        "window": lambda b, h, i, j: (i >= j) & (i - j < 150),
        "by_head": lambda b, h, i, j: (i >= j + 64 * h) & (j >= 30 * b),
        "full": lambda b, h, i, j: i >= 0,
        "nothing": lambda b, h, i, j: i < 0,
    }[name]


@dataclass
class Problem:
    case: Case
    tensors: list[Tensor]  # dout, query, key, value, out
    lse: Tensor
    dlse: Tensor | None
    slopes: Tensor | None
    mask: Tensor  # (B, H, Sq, Sk)
    lists: KernelLists | None  # None if there is no kernel for the case
    backend: str = "sm90"

    def run(self, *, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        ops = torch.ops.flashbwd
        options = {
            "softmax_scale": self.case.head_dim**-0.5,
            "softcap": self.case.softcap,
            "alibi_slopes": self.slopes,
            "deterministic": deterministic,
            "backend": self.backend,
        }
        call = KernelCall(
            ops.block_mask_attention_backward,
            ops.plan_block_mask_attention_backward,
            options,
            self.lists,
        )
        return call.gradients(*self.tensors, self.lse, self.dlse)[:3]


def forward(case: Case, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    group = case.heads // case.heads_kv
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * case.head_dim**-0.5
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if slopes is not None:
        i, j = torch.arange(case.seqlen_q, device=q.device), torch.arange(case.seqlen_k, device=q.device)
        distance = (i[:, None] + case.seqlen_k - case.seqlen_q - j).abs()
        s = s - slopes.to(s.dtype)[:, None, None] * distance
    s = s.masked_fill(~mask, float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(~mask, 0.0)
    return p @ v, lse


def build(case: Case, backend: str = "sm90") -> Problem:
    torch.manual_seed(3)
    d, dv = case.head_dim, case.head_dim_v or case.head_dim

    def random(heads: int, rows: int, columns: int) -> Tensor:
        memory = torch.randn(case.batch, rows, heads, columns, device="cuda", dtype=case.dtype)
        return memory.transpose(1, 2)

    q, k, v = (
        random(case.heads, case.seqlen_q, d),
        random(case.heads_kv, case.seqlen_k, d),
        random(case.heads_kv, case.seqlen_k, dv),
    )
    dout = random(case.heads, case.seqlen_q, dv)
    slopes = torch.rand(case.heads, device="cuda") * 0.1 if case.alibi else None
    mod = mask_mod(case.mask, case)
    sizes = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    index = [
        torch.arange(n, device="cuda").view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate(sizes)
    ]
    mask = mod(*index).expand(sizes)
    by_head = case.mask in ("random_blocks", "by_head")
    block_mask = create_block_mask(
        mod,
        case.batch if by_head else None,
        case.heads if by_head else None,
        case.seqlen_q,
        case.seqlen_k,
        device="cuda",
        BLOCK_SIZE=case.block_size,
    )
    lists = lists_of(case, block_mask, backend)
    on = oracle_device(case)
    doubles = [x.to(on).double() for x in (q, k, v)]
    out, lse = forward(case, mask.to(on), *doubles, None if slopes is None else slopes.to(on))
    out, lse = out.cuda(), lse.cuda()
    dlse = torch.randn_like(lse).float() if case.dlse else None
    out = out.transpose(1, 2).to(case.dtype).transpose(1, 2)
    return Problem(case, [dout, q, k, v, out], lse.float(), dlse, slopes, mask, lists, backend)


def lists_of(case: Case, block_mask: Any, backend: str) -> KernelLists | None:
    """None if there is no kernel for the case."""
    name, dims = "plan_block_mask_attention_backward", (case.head_dim, case.head_dim_v or case.head_dim)
    try:
        tile = kernel_tile(name, case.dtype, *dims, 0, backend, case.softcap > 0, case.alibi)
    except UnsupportedError:
        return None
    blocks = key_block_lists(block_mask, (case.batch, case.heads, case.seqlen_q, case.seqlen_k), tile)
    return kernel_lists(blocks, case.heads, case.heads_kv)


def oracle_device(case: Case) -> str:
    """The CPU for small cases: compute-sanitizer's racecheck aborts in some matrix products of cuBLAS."""
    return "cpu" if case.seqlen_q * case.seqlen_k <= 512 * 512 else "cuda"


def plain(p: Problem, dtype: torch.dtype) -> list[Tensor]:
    """The gradients by the plain formula in a dtype, from the given out and LSE."""
    case, on = p.case, oracle_device(p.case)
    p = replace(p, mask=p.mask.to(on), lse=p.lse.to(on))
    p.dlse, p.slopes = (None if x is None else x.to(on) for x in (p.dlse, p.slopes))
    dout, q, k, v, out = (x.to(on, dtype) for x in p.tensors)
    group = case.heads // case.heads_kv
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = case.head_dim**-0.5
    s = (q @ keys.transpose(-1, -2)).double() * scale
    slope = torch.ones_like(s)
    if case.softcap:
        t = torch.tanh(s / case.softcap)
        s, slope = case.softcap * t, 1 - t * t
    if p.slopes is not None:
        i, j = torch.arange(case.seqlen_q, device=q.device), torch.arange(case.seqlen_k, device=q.device)
        s = s - p.slopes.double()[:, None, None] * (i[:, None] + case.seqlen_k - case.seqlen_q - j).abs()
    seen = p.mask.any(-1, keepdim=True)
    lse = p.lse.double().masked_fill(~seen[..., 0], 0.0)
    prob = (s - lse[..., None]).exp().masked_fill(~p.mask, 0.0)
    delta = (dout.double() * out.double()).sum(-1)
    if p.dlse is not None:
        delta = delta - p.dlse.double()
    ds = prob * ((dout @ values.transpose(-1, -2)).double() - delta[..., None]) * slope
    prob, ds = prob.to(dtype), ds.masked_fill(~p.mask, 0.0).to(dtype)
    dq = ds @ keys * scale
    dk = (ds.transpose(-1, -2) @ q * scale).unflatten(1, (case.heads_kv, group)).sum(2)
    dv = (prob.transpose(-1, -2) @ dout).unflatten(1, (case.heads_kv, group)).sum(2)
    return [x.cuda() for x in (dq, dk, dv)]


def check(p: Problem, grads: tuple[Tensor, ...]) -> None:
    for name, actual, exact, low in zip(
        ("dq", "dk", "dv"), grads, plain(p, torch.float64), plain(p, p.case.dtype), strict=True
    ):
        expected = exact.transpose(1, 2)
        blocks = Blocks(name, expected, p.case.dtype, softcap=p.case.softcap > 0)
        rounded = expected.to(p.case.dtype)
        blocks.check(actual.transpose(1, 2), blocks.limits(blocks.errors([low.transpose(1, 2), rounded])))


def small(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.sanitizer)


CASES = [
    Case("causal"),
    Case("causal", head_dim=64),
    Case("causal", head_dim=32, heads=2, heads_kv=2, dtype=torch.float16),
    Case("documents", seqlen_q=1024, seqlen_k=1024),
    Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=64, heads_kv=1),
    Case("prefix", seqlen_q=777, seqlen_k=777, head_dim=96),
    small(Case("prefix", seqlen_q=260, seqlen_k=515, head_dim=64, dtype=torch.float16)),
    Case("window", seqlen_q=1025, seqlen_k=1025, head_dim=128, heads_kv=4),
    Case("random_blocks", seqlen_q=1024, seqlen_k=640),
    Case("random_blocks", seqlen_q=640, seqlen_k=1024, head_dim=64, heads=6, heads_kv=2),
    Case("random_pairs", seqlen_q=384, seqlen_k=300),
    small(Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=48, dtype=torch.float16)),
    Case("by_head", seqlen_q=513, seqlen_k=511, heads=4, heads_kv=1),
    Case("by_head", seqlen_q=513, seqlen_k=511, head_dim=64),
    small(Case("full", seqlen_q=127, seqlen_k=129, head_dim=80, head_dim_v=112)),
    Case("full", seqlen_q=1, seqlen_k=1, head_dim=64),
    Case("nothing", seqlen_q=200, seqlen_k=200),
    small(Case("nothing", seqlen_q=200, seqlen_k=200, head_dim=64)),
    Case("causal", block_size=256, seqlen_q=600, seqlen_k=600),
    Case("window", block_size=64, seqlen_q=600, seqlen_k=600, head_dim=64),
    small(Case("causal", softcap=5.0)),
    Case("documents", softcap=5.0, head_dim=64),
    Case("prefix", alibi=True),
    Case("window", alibi=True, head_dim=64, seqlen_q=500, seqlen_k=500),
    Case("random_blocks", softcap=3.0, alibi=True, seqlen_q=700, seqlen_k=700, dtype=torch.float16),
    Case("documents", dlse=True),
    # large enough for an overlapped preprocess, with and without queries that see no key
    Case("documents", heads=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048),
    Case("documents", heads=32, heads_kv=32, seqlen_q=2048, seqlen_k=2048, head_dim=64),
    Case("random_blocks", heads=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048),
    Case("random_blocks", dlse=True, head_dim=64),
    # the shortest lists first: with an order of adds, and without one because the last add writes dq
    small(Case("documents", batch=1, heads=40, heads_kv=40)),
    small(Case("causal", batch=1, heads=40, heads_kv=40, softcap=5.0, head_dim=64)),
    Case("documents", heads=106, heads_kv=106, seqlen_q=520, seqlen_k=520),
    Case("window", heads=106, heads_kv=106, seqlen_q=520, seqlen_k=520, head_dim=64),
    # the same for grouped heads
    small(Case("documents", batch=1, heads=80, heads_kv=40)),
    Case("documents", heads=80, heads_kv=40, softcap=5.0, head_dim=64),
    Case("window", heads=128, heads_kv=32, seqlen_q=1025, seqlen_k=1025, head_dim=64),
    Case("documents", heads=16, heads_kv=8, seqlen_q=2048, seqlen_k=2048, head_dim=256),
    # a cluster of two CTAs per key block
    Case("causal", head_dim=192),
    small(Case("documents", head_dim=192, head_dim_v=128)),
    Case("window", seqlen_q=1025, seqlen_k=1025, head_dim=160, heads_kv=4),
    small(Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=256, dtype=torch.float16)),
    Case("random_blocks", seqlen_q=640, seqlen_k=1024, head_dim=256, heads=6, heads_kv=2),
    Case("by_head", seqlen_q=513, seqlen_k=511, heads=4, heads_kv=1, head_dim=192),
    Case("full", seqlen_q=65, seqlen_k=63, head_dim=256, head_dim_v=200),
    Case("nothing", seqlen_q=200, seqlen_k=200, head_dim=256),
    Case("documents", dlse=True, head_dim=256, heads=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048),
    small(Case("causal", softcap=5.0, head_dim=192)),
    Case("documents", softcap=5.0, dlse=True, head_dim=256),
    Case("prefix", alibi=True, head_dim=192, head_dim_v=128),
    small(Case("window", alibi=True, head_dim=256, seqlen_q=300, seqlen_k=300)),
    Case("random_blocks", softcap=3.0, alibi=True, seqlen_q=700, seqlen_k=700, head_dim=136, dtype=torch.float16),
    Case("by_head", softcap=3.0, alibi=True, seqlen_q=513, seqlen_k=511, head_dim=256, heads_kv=1),
    Case("nothing", softcap=5.0, seqlen_q=200, seqlen_k=200, head_dim=192),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sm90_gradients_agree_with_the_plain_formula(case: Case, deterministic: bool) -> None:
    p = build(case)
    check(p, p.run(deterministic=deterministic))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_operator_takes_any_stride_of_a_batch_of_one(head_dim: int) -> None:
    """dk and dv get the strides of k and v, and TMA stores them."""
    p = build(Case("documents", batch=1, head_dim=head_dim))
    dout, q, k, v, out = (x.transpose(1, 2) for x in p.tensors)
    k, v = (x.as_strided(x.shape, (x.numel() + 4, *x.stride()[1:])) for x in (k, v))
    assert p.lists is not None
    dq, dk, dv = torch.ops.flashbwd.block_mask_attention_backward(
        dout, q, k, v, out, p.lse, *p.lists.operands(), softmax_scale=head_dim**-0.5, backend="sm90"
    )
    assert dk.stride(0) == k.stride(0)
    check(p, tuple(x.transpose(1, 2) for x in (dq, dk, dv)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_results_of_reversed_lists_of_grouped_heads_repeat_bit_for_bit(head_dim: int) -> None:
    p = build(Case("documents", heads=16, heads_kv=8, seqlen_q=2048, seqlen_k=2048, head_dim=head_dim))
    first = p.run(deterministic=True)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run(deterministic=True), strict=True))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("heads_kv", [2, 8])
def test_deterministic_results_repeat_bit_for_bit(heads_kv: int, head_dim: int, softcap: float) -> None:
    sizes = {"heads": 8, "heads_kv": heads_kv, "seqlen_q": 2048, "seqlen_k": 2048}
    p = build(Case("random_blocks", **sizes, head_dim=head_dim, softcap=softcap))
    first = p.run(deterministic=True)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run(deterministic=True), strict=True))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_kernel_does_not_read_invisible_blocks(head_dim: int, softcap: float) -> None:
    case = Case("random_blocks", seqlen_q=640, seqlen_k=640, head_dim=head_dim, heads_kv=4, softcap=softcap)
    check_invisible_blocks(build(case))


def check_invisible_blocks(p: Problem) -> None:
    """NaN in the first blocks of a call with the mask "random_blocks" changes nothing."""
    expected = p.run(deterministic=True)
    for x in (p.tensors[2], p.tensors[3]):
        x[:, :, :128] = float("nan")  # no query sees the first block of keys
    for x in (p.tensors[0], p.tensors[1], p.tensors[4]):
        x[:, :, :128] = float("nan")  # the first block of queries sees no key
    found = p.run(deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_calls_can_be_captured_in_a_graph() -> None:
    check_graph(build(Case("documents", seqlen_q=1024, seqlen_k=1024)))


def check_graph(p: Problem) -> None:
    """A graph of a deterministic call repeats it bit for bit."""
    expected = p.run(deterministic=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        p.run(deterministic=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = p.run(deterministic=True)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def public_problem(case: Case) -> tuple[Problem, Any]:
    """A problem and the BlockMask of its mask."""
    p = build(case)
    block_mask = create_block_mask(
        mask_mod(case.mask, case), None, None, case.seqlen_q, case.seqlen_k, device="cuda", BLOCK_SIZE=case.block_size
    )
    return p, block_mask


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "softcap"),
    [
        *((n, n, softcap) for n in (60, 64, 101, 128) for softcap in (0.0, 5.0)),  # 60 and 101 are padded for TMA
        *((n, n, 0.0) for n in (129, 136, 191, 192, 193, 256)),
        *((*dims, 0.0) for dims in ((24, 128), (100, 61), (192, 128), (128, 192), (64, 256), (256, 16), (250, 1))),
        *((*dims, 5.0) for dims in ((129, 129), (192, 128), (256, 256))),
    ],
)
def test_the_public_function_runs_the_kernel_that_its_plan_names(
    head_dim: int, head_dim_v: int, softcap: float
) -> None:
    case = Case("documents", 1, 4, 2, 1000, 1000, head_dim, head_dim_v, softcap=softcap)
    p, block_mask = public_problem(case)
    score_mod = (lambda s, b, h, i, j: softcap * torch.tanh(s / softcap)) if softcap else None
    dout, q, k, v, out = p.tensors
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True}
    plan = flashbwd.plan_flex_attention_backward(dout, q, k, v, out, p.lse, **options)
    assert plan.backend == "sm90"
    assert "sm80" in plan.reasons
    grads = flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)
    check(p, grads[:3])


def test_keys_and_values_of_one_batch_get_the_sum_of_the_gradients() -> None:
    case = Case("documents", seqlen_q=500, seqlen_k=500, head_dim=64)
    dout, q, k, v, _ = build(case).tensors
    # PyTorch takes keys of one batch only beside a mask of all batches.
    block_mask = create_block_mask(mask_mod("documents", case), case.batch, None, 500, 500, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k[:1], v[:1])]
    repeated = [leaves[0], *(x.expand(q.shape[0], -1, -1, -1) for x in leaves[1:])]
    found, expected = (
        torch.autograd.grad(flashbwd.flex_attention(*x, block_mask=block_mask, enable_gqa=True), leaves, dout)
        for x in (leaves, repeated)
    )
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_autograd_through_pytorchs_forward_agrees_with_the_plain_formula() -> None:
    case = Case("prefix", seqlen_q=515, seqlen_k=515)
    p, block_mask = public_problem(case)
    dout, q, k, v, _ = p.tensors
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flashbwd.flex_attention(*inputs, block_mask=block_mask, enable_gqa=True)
    check(p, torch.autograd.grad(out, inputs, dout))


def alibi_mods(p: Problem) -> dict[str, Any]:
    """Forms of ALiBi with the slopes of a problem, whose lengths are equal."""
    slopes, cap = p.slopes, p.case.softcap
    assert slopes is not None
    by_batch = slopes.expand(p.case.batch, -1).contiguous()
    return {
        "signed": lambda s, b, h, i, j: s + slopes[h] * (j - i),
        "absolute": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        "function": lambda s, b, h, i, j: s - slopes[h].sqrt().square() * (i - j).abs(),
        "by_batch": lambda s, b, h, i, j: s + by_batch[b, h] * (j - i),
        "softcap": lambda s, b, h, i, j: cap * torch.tanh(s / cap) - slopes[h] * (i - j).abs(),
    }


@pytest.mark.parametrize(
    ("form", "mask", "head_dim", "softcap"),
    [
        ("signed", "documents", 128, 0.0),
        ("signed", "causal", 64, 0.0),
        ("absolute", "prefix", 128, 0.0),
        ("absolute", "random_pairs", 64, 0.0),
        ("function", "random_pairs", 128, 0.0),
        ("by_batch", "window", 64, 0.0),
        ("signed", "causal", 192, 0.0),
        ("absolute", "prefix", 256, 0.0),
        ("softcap", "documents", 256, 5.0),
        ("softcap", "documents", 128, 5.0),
    ],
)
def test_alibi_as_a_score_mod_runs_the_kernel(form: str, mask: str, head_dim: int, softcap: float) -> None:
    case = Case(mask, seqlen_q=777, seqlen_k=777, head_dim=head_dim, softcap=softcap, alibi=True)
    p, block_mask = public_problem(case)
    dout, q, k, v, out = p.tensors
    options = {"score_mod": alibi_mods(p)[form], "block_mask": block_mask, "enable_gqa": True}
    assert flashbwd.plan_flex_attention_backward(dout, q, k, v, out, p.lse, **options).backend == "sm90"
    check(p, flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)[:3])


def test_alibi_without_a_block_mask_runs_the_kernels_of_attention() -> None:
    case = Case("full", seqlen_q=500, seqlen_k=500, head_dim=64, alibi=True)
    p = build(case)
    dout, q, k, v, out = p.tensors
    options = {"score_mod": alibi_mods(p)["absolute"], "enable_gqa": True}
    assert flashbwd.plan_flex_attention_backward(dout, q, k, v, out, p.lse, **options).backend == "sm90"
    check(p, flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)[:3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 264, "head_dim_v": 64}, "it takes no block mask at head dimensions above 256"),
        ({"head_dim": 64, "head_dim_v": 257}, "it takes no block mask at head dimensions above 256"),
        ({"dtype": torch.float32}, "it takes float16 and bfloat16, got float32"),
    ],
)
def test_the_reference_computes_a_call_without_a_kernel_and_the_plan_gives_the_reason(
    change: dict[str, Any], words: str
) -> None:
    p, block_mask = public_problem(Case("causal", **change))
    dout, q, k, v, out = p.tensors
    options = {"block_mask": block_mask, "enable_gqa": True}
    plan = flashbwd.plan_flex_attention_backward(dout, q, k, v, out, p.lse, **options)
    assert plan.backend == "reference"
    assert words in plan.reasons["sm90"], plan.reasons
    check(p, flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)[:3])
