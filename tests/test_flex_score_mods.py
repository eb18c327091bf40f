"""Kernels with a score_mod that is compiled at run time agree with float64 autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.tolerance import Blocks
from test_flex_kernel import Case, mask_mod, oracle_device
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashbwd
from flashbwd.flex import backends, generated, gradients, lists
from flashbwd.mods import nvrtc

pytestmark = pytest.mark.gpu
Mod = Callable[..., Tensor]
NAMES = ("dq", "dk", "dv")


@pytest.fixture(autouse=True)
def _sm90() -> Iterator[None]:
    """Force the sm90 kernels, so that no test passes because another kernel ran."""
    with flashbwd.use_backend("sm90"):
        yield


@pytest.fixture(autouse=True)
def _compiles_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("score_mods are compiled for compute capability 9.0")
    # A score_mod that NVRTC rejects would be computed by the reference.
    monkeypatch.setattr(gradients, "decoding_backward", lambda *_: pytest.fail("the reference ran"))


def score_mod(name: str, case: Case, device: str) -> tuple[Mod, list[Tensor]]:
    """A score_mod, and its captured tensors that get a gradient. The values are the same on every device."""
    generator = torch.Generator().manual_seed(11)
    length = case.seqlen_q + case.seqlen_k
    table = (torch.randn(case.heads, length, generator=generator) * 0.5).to(device)
    rates = torch.rand(case.batch, case.heads, generator=generator).to(device, torch.bfloat16)
    scales = (1 + torch.rand(case.heads, generator=generator)).to(device)
    keys = torch.randn(case.seqlen_k, generator=generator).to(device)
    rows = case.seqlen_q if "pair" in name else 0
    pairs = torch.randn(case.heads, rows, case.seqlen_k, generator=generator)
    pairs = pairs.to(device, case.dtype if name.endswith("_16") else torch.float32)
    by_batch = torch.randn(case.seqlen_k, case.batch, rows, case.heads, generator=generator).to(device)
    larger = torch.randn(case.heads + 1, rows + 3, case.seqlen_k + 8, generator=generator).to(device)
    shift, offset = case.seqlen_k - 1, case.seqlen_k - case.seqlen_q
    mods: dict[str, tuple[Mod, list[Tensor]]] = {
        "unchanged": (lambda s, b, h, i, j: s, []),
        "relative_bias": (lambda s, b, h, i, j: s + table[h, i - j + shift], []),
        "cap_and_decay": (lambda s, b, h, i, j: 8 * torch.tanh(s / 8) - rates[b, h] * (i - j).abs().float().sqrt(), []),
        "branches": (lambda s, b, h, i, j: torch.where(i > j, s.sigmoid() * 4, torch.sin(s) + s), []),
        "signed_alibi": (lambda s, b, h, i, j: s + scales[h] / 16 * (j - i), []),
        "hides": (lambda s, b, h, i, j: torch.where((i - j).abs() < 170, s, -float("inf")), []),
        "trained_relative_bias": (lambda s, b, h, i, j: s + table[h, i - j + shift], [table]),
        "pair_bias": (lambda s, b, h, i, j: s + pairs[h, i, j], []),
        "trained_pair_bias": (lambda s, b, h, i, j: s + pairs[h, i, j], [pairs]),
        "pair_bias_of_all_heads": (lambda s, b, h, i, j: s + pairs[0, i, j], [pairs]),
        "pair_bias_by_batch": (lambda s, b, h, i, j: s + by_batch[j, b, i, h], [by_batch]),
        "pair_bias_and_slopes": (
            lambda s, b, h, i, j: s + larger[h, i, j] - scales[h] * (i + offset - j).abs(),
            [larger],
        ),
        "capped_pair_bias": (lambda s, b, h, i, j: 8 * torch.tanh(s / 8) + pairs[h, i, j], [pairs]),
        "trained_scale": (lambda s, b, h, i, j: s * scales[h] + keys[j] * rates[b, h], [scales, keys]),
    }
    mod, differentiable = mods[name.removesuffix("_16")]
    for tensor in differentiable:
        tensor.requires_grad_()
    return mod, differentiable


@dataclass
class Problem:
    case: Case
    name: str
    inputs: list[Tensor]  # query, key, value
    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    mask: Tensor  # (B, H, Sq, Sk)
    block_mask: BlockMask | None
    backend: str = "sm90"

    def arguments(self, *, deterministic: bool) -> tuple[list[Tensor], dict[str, Any]]:
        mod, _ = score_mod(self.name, self.case, "cuda")
        options = {"score_mod": mod, "block_mask": self.block_mask, "enable_gqa": True, "deterministic": deterministic}
        return [self.dout, *self.inputs, self.out, self.lse], options

    def plan(self, *, deterministic: bool = False) -> flashbwd.FlexPlan:
        tensors, options = self.arguments(deterministic=deterministic)
        return flashbwd.plan_flex_attention_backward(*tensors, **options)

    def run(self, *, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor, dict[str | int, Tensor]]:
        plan = self.plan(deterministic=deterministic)
        assert plan.backend == self.backend and plan.compiled, plan
        tensors, options = self.arguments(deterministic=deterministic)
        return flashbwd.flex_attention_backward(*tensors, dlse=self.dlse, **options)


def scores(case: Case, name: str, q: Tensor, k: Tensor, on: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The scores, the modified scores in float64, and the captured tensors that get a gradient."""
    mod, captured = score_mod(name, case, on)
    keys = k.repeat_interleave(case.heads // case.heads_kv, 1)
    s = ((q @ keys.transpose(-1, -2)).double() * case.head_dim**-0.5).requires_grad_()
    index = [torch.arange(n, device=on).view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate(s.shape)]
    return s, mod(s, *index).expand(s.shape), captured


def build(case: Case, name: str, backend: str = "sm90") -> Problem:
    torch.manual_seed(3)
    d, dv = case.head_dim, case.head_dim_v or case.head_dim

    def random(heads: int, rows: int, columns: int) -> Tensor:
        memory = torch.randn(case.batch, rows, heads, columns, device="cuda", dtype=case.dtype)
        return memory.transpose(1, 2)

    q, dout = random(case.heads, case.seqlen_q, d), random(case.heads, case.seqlen_q, dv)
    k, v = random(case.heads_kv, case.seqlen_k, d), random(case.heads_kv, case.seqlen_k, dv)
    mod = mask_mod(case.mask, case)
    sizes = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    index = [
        torch.arange(n, device="cuda").view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate(sizes)
    ]
    mask = mod(*index).expand(sizes)
    block_mask = None
    if case.mask != "full":
        block_mask = create_block_mask(mod, *sizes, device="cuda", BLOCK_SIZE=case.block_size)
    on = oracle_device(case)
    with torch.no_grad():
        _, t, _ = scores(case, name, q.to(on).double(), k.to(on).double(), on)
    t = t.detach().masked_fill(~mask.to(on), -float("inf"))
    lse = t.logsumexp(-1)
    p = (t - lse[..., None]).exp().nan_to_num(0.0)
    out = (p @ v.to(on).double().repeat_interleave(case.heads // case.heads_kv, 1)).cuda()
    dlse = torch.randn_like(lse, dtype=torch.float32).cuda() if case.dlse else None
    out = out.transpose(1, 2).to(case.dtype).transpose(1, 2)
    return Problem(case, name, [q, k, v], dout, out, lse.float().cuda(), dlse, mask, block_mask, backend)


def plain(p: Problem, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """dq, dk and dv, and the gradients of captured tensors, by the plain formula in a dtype."""
    case, on = p.case, oracle_device(p.case)
    dout, q, k, v, out = (x.to(on, dtype) for x in (p.dout, *p.inputs, p.out))
    mask, group = p.mask.to(on), case.heads // case.heads_kv
    s, t, captured = scores(case, p.name, q, k, on)
    weighted = mask & (t.detach() > -float("inf"))
    lse = p.lse.to(on).double().masked_fill(~weighted.any(-1), 0.0)
    prob = (t.detach() - lse[..., None]).exp().masked_fill(~weighted, 0.0)
    delta = (dout.double() * out.double()).sum(-1)
    if p.dlse is not None:
        delta = delta - p.dlse.to(on).double()
    values = v.repeat_interleave(group, 1)
    dt = (prob * ((dout @ values.transpose(-1, -2)).double() - delta[..., None])).masked_fill(~weighted, 0.0)
    ds, *of_captured = torch.autograd.grad(t, [s, *captured], dt)
    prob, ds = prob.to(dtype), ds.masked_fill(~weighted, 0.0).to(dtype)
    scale, keys = case.head_dim**-0.5, k.repeat_interleave(group, 1)
    dq = ds @ keys * scale
    dk = (ds.transpose(-1, -2) @ q * scale).unflatten(1, (case.heads_kv, group)).sum(2)
    dv = (prob.transpose(-1, -2) @ dout).unflatten(1, (case.heads_kv, group)).sum(2)
    return [x.cuda() for x in (dq, dk, dv)], [x.cuda() for x in of_captured]


def check(p: Problem, grads: tuple[Any, ...]) -> None:
    (exact, captured), (low, _) = plain(p, torch.float64), plain(p, p.case.dtype)
    for name, actual, of_exact, of_low in zip(NAMES, grads[:3], exact, low, strict=True):
        expected = of_exact.transpose(1, 2)
        blocks = Blocks(name, expected, p.case.dtype, softcap=True)
        rounded = expected.to(p.case.dtype)
        blocks.check(actual.transpose(1, 2), blocks.limits(blocks.errors([of_low.transpose(1, 2), rounded])))
    for found, want in zip(grads[3].values(), captured, strict=True):
        error = (found.double() - want.double()).norm() / want.double().norm()
        assert error < 0.02, f"gradient of a captured tensor of shape {tuple(want.shape)}: relative error {error:.4f}"


def small(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.sanitizer)


CASES = [
    ("relative_bias", Case("full")),
    ("relative_bias", Case("causal", head_dim=64)),
    small("relative_bias", Case("random_pairs", seqlen_q=260, seqlen_k=385, head_dim=48, dtype=torch.float16)),
    ("relative_bias", Case("random_blocks", seqlen_q=1024, seqlen_k=640)),
    ("cap_and_decay", Case("documents", seqlen_q=1000, seqlen_k=1000)),
    ("cap_and_decay", Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=64, heads_kv=1, dlse=True)),
    ("cap_and_decay", Case("full", seqlen_q=1, seqlen_k=1, head_dim=64)),
    ("branches", Case("prefix", seqlen_q=777, seqlen_k=777, head_dim=96)),
    ("branches", Case("full", seqlen_q=515, seqlen_k=515, head_dim=64, dtype=torch.float16)),
    ("signed_alibi", Case("prefix", seqlen_q=300, seqlen_k=300, head_dim=64)),  # later keys are visible
    ("hides", Case("full", seqlen_q=600, seqlen_k=600)),
    ("hides", Case("causal", seqlen_q=600, seqlen_k=600, head_dim=64)),
    ("trained_relative_bias", Case("causal")),
    ("trained_relative_bias", Case("full", seqlen_q=300, seqlen_k=260, head_dim=64)),
    small("trained_relative_bias", Case("window", seqlen_q=257, seqlen_k=257, head_dim=64, dtype=torch.float16)),
    ("trained_scale", Case("documents", seqlen_q=1000, seqlen_k=1000)),
    small("trained_scale", Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=80)),
    ("trained_scale", Case("random_blocks", seqlen_q=640, seqlen_k=1024, head_dim=64, heads=6, heads_kv=2)),
    # a cluster of two CTAs per key block
    ("relative_bias", Case("full", head_dim=192)),
    small("relative_bias", Case("random_pairs", seqlen_q=260, seqlen_k=385, head_dim=256, dtype=torch.float16)),
    ("relative_bias", Case("random_blocks", seqlen_q=1024, seqlen_k=640, head_dim=160)),
    ("cap_and_decay", Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=192, head_dim_v=128, heads_kv=1)),
    ("cap_and_decay", Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=256, dlse=True)),
    ("branches", Case("full", seqlen_q=515, seqlen_k=515, head_dim=192, dtype=torch.float16)),
    ("branches", Case("prefix", seqlen_q=777, seqlen_k=777, head_dim=64, head_dim_v=250)),
    ("hides", Case("causal", seqlen_q=600, seqlen_k=600, head_dim=256)),
    ("hides", Case("full", seqlen_q=65, seqlen_k=63, head_dim=129)),
    ("trained_relative_bias", Case("causal", head_dim=192)),
    small("trained_relative_bias", Case("window", seqlen_q=257, seqlen_k=257, head_dim=256, dtype=torch.float16)),
    ("trained_relative_bias", Case("by_head", seqlen_q=513, seqlen_k=511, head_dim=256, heads_kv=1, dlse=True)),
    ("trained_scale", Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=256)),
    small("trained_scale", Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=192, head_dim_v=128)),
    ("trained_scale", Case("random_blocks", seqlen_q=640, seqlen_k=1024, head_dim=256, heads=6, heads_kv=2)),
    ("relative_bias", Case("nothing", seqlen_q=200, seqlen_k=200, head_dim=192)),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_sm90_gradients_agree_with_the_plain_formula(name: str, case: Case) -> None:
    p = build(case, name)
    check(p, p.run())


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_sm90_deterministic_results_are_right_and_repeat_bit_for_bit(head_dim: int) -> None:
    p = build(Case("random_blocks", seqlen_q=1024, seqlen_k=1024, head_dim=head_dim, heads=8), "relative_bias")
    first = p.run(deterministic=True)
    check(p, first)
    for _ in range(20):
        again = p.run(deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["relative_bias", "trained_relative_bias"])
def test_sm90_does_not_read_invisible_blocks(name: str, head_dim: int) -> None:
    p = build(Case("random_blocks", seqlen_q=640, seqlen_k=640, head_dim=head_dim, heads_kv=4), name)
    for x in p.inputs[1:]:
        x[:, :, :128] = float("nan")  # no query sees the first block of keys
    for x in (p.dout, p.inputs[0], p.out):
        x[:, :, :128] = float("nan")  # the first block of queries sees no key
    *grads, captured = p.run()
    assert all(x.isfinite().all() for x in (*grads, *captured.values()))


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("modifies", [False, True])
def test_unlisted_blocks_beside_listed_ones_may_hold_nan(modifies: bool, head_dim: int, backend: str) -> None:
    case = Case("late", seqlen_q=300, seqlen_k=300, head_dim=head_dim, heads_kv=1, block_size=64, dlse=True)
    p = build(case, "relative_bias")
    tensors, options = p.arguments(deterministic=True)
    options |= {} if modifies else {"score_mod": None}
    found = []
    with flashbwd.use_backend(backend):
        for poison in (0.0, float("nan")):
            for tensor in (*tensors, p.dlse):
                tensor[:, :, :64] = poison  # type: ignore[index]
            found.append(flashbwd.flex_attention_backward(*tensors, dlse=p.dlse, **options)[:3])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(not grad[:, :, :64].any() and grad[:, :, 64:].any() for grad in found[0])


@pytest.mark.parametrize("trained", [False, True])
def test_hidden_pairs_do_not_reach_beyond_a_captured_tensor(trained: bool) -> None:
    """Visible pairs have indices up to 299, hidden ones up to 598."""
    case = Case("causal", seqlen_q=300, seqlen_k=300, head_dim=64)
    tensors, options = build(case, "unchanged").arguments(deterministic=not trained)
    table = torch.randn(case.heads, 300, device="cuda")
    found = []
    for whole in (table, torch.cat([table, torch.full_like(table, float("nan"))], 1)):
        whole.requires_grad_(trained)
        options["score_mod"] = lambda s, b, h, i, j, whole=whole: s + whole[h, 299 - (i - j)]
        found.append(flashbwd.flex_attention_backward(*tensors, **options))
    if not trained:
        assert all(torch.equal(*pair) for pair in zip(found[0][:3], found[1][:3], strict=True))
        return
    small_table, large_table = (next(iter(grads.captured.values())) for grads in found)
    torch.testing.assert_close(small_table, large_table[:, :300], rtol=1e-3, atol=1e-3)
    assert not large_table[:, 300:].any()


def test_fifty_lengths_compile_one_kernel() -> None:
    table = torch.randn(2, 4096, device="cuda")
    generated._kernel.cache_clear()
    for n in range(200, 700, 10):
        q, k, v, out, dout = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(5))
        lse = torch.full((1, 2, n), 9.0, device="cuda")
        flashbwd.flex_attention_backward(
            dout, q, k, v, out, lse, score_mod=lambda s, b, h, i, j, n=n: s * (1 + n / 1000) + table[h, i - j + n - 1]
        )
    assert generated._kernel.cache_info().misses == 1


@pytest.mark.parametrize("name", ["relative_bias", "cap_and_decay", "trained_scale"])
@pytest.mark.parametrize("case", [Case("documents", seqlen_q=777, seqlen_k=777), Case("random_blocks", head_dim=64)])
def test_a_mask_whose_bits_exceed_the_limit_is_evaluated_in_the_kernel(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "LIMIT", -1)
    p = build(case, name)
    check(p, p.run())


@pytest.mark.parametrize("mask", ["causal", "random_pairs", "by_head", "prefix"])
def test_such_a_mask_needs_no_score_mod(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LIMIT", -1)
    p = build(Case(mask, seqlen_q=515, seqlen_k=515), "unchanged")
    tensors, options = p.arguments(deterministic=False)
    options["score_mod"] = None
    assert flashbwd.plan_flex_attention_backward(*tensors, **options).compiled
    check(p, flashbwd.flex_attention_backward(*tensors, **options))


def test_a_plan_finds_a_kernel_on_disk_and_then_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_loaded", {})
    p = build(Case("full", seqlen_q=128, seqlen_k=128, head_dim=64), "relative_bias")
    generated._kernel.cache_clear()
    assert p.plan().cache is None
    p.run()
    assert p.plan().cache == "memory"
    nvrtc._loaded.clear()
    assert p.plan().cache == "disk"


@pytest.mark.parametrize("name", [None, "relative_bias", "trained_scale"])
def test_the_operators_pass_opcheck(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    p = build(Case("causal", seqlen_q=130, seqlen_k=130, head_dim=64), name or "unchanged")
    tensors, options = p.arguments(deterministic=False)
    called: list[Any] = []
    real = backends._run
    monkeypatch.setattr(backends, "_run", lambda *args: called.append(args) or real(*args))
    flashbwd.flex_attention_backward(*tensors, **options | ({} if name else {"score_mod": None}))
    operator, operands, given = called[-1]  # others are plans
    torch.library.opcheck(operator.default, tuple(operands), given, test_utils=("test_schema", "test_faketensor"))


def test_sm90_calls_can_be_captured_in_a_graph_after_the_first_call() -> None:
    check_graph(build(Case("documents", seqlen_q=1024, seqlen_k=1024), "relative_bias"))


def check_graph(p: Problem) -> None:
    """A graph of a deterministic call, captured after a first call, repeats it bit for bit."""
    tensors, options = p.arguments(deterministic=True)

    def run() -> Any:
        return flashbwd.flex_attention_backward(*tensors, **options)

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for x in found[:3]:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected[:3], found[:3], strict=True))


def test_sm90_autograd_gives_the_gradients_of_captured_tensors() -> None:
    case = Case("prefix", seqlen_q=515, seqlen_k=515)
    p = build(case, "trained_scale")
    mod, captured = score_mod(p.name, case, "cuda")
    inputs = [x.detach().requires_grad_() for x in p.inputs]
    out = flashbwd.flex_attention(*inputs, score_mod=mod, block_mask=p.block_mask, enable_gqa=True)
    *grads, scales, keys = torch.autograd.grad(out, [*inputs, *captured], p.dout)
    check(p, (*grads, {0: scales, 1: keys}))
