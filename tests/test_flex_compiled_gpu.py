"""FlexAttention in compiled models on a GPU: Inductor's forward, and the backward of this library or PyTorch's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kit import decoding, tolerance
from kit.compiled import counted, without_caches
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

import flashbwd
from flashbwd.flex import cache
from flashbwd.integrations import inductor

pytestmark = pytest.mark.gpu
Mod = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block lists run on compute capability 9.0")
    torch._dynamo.reset()
    flashbwd.stats(reset=True)
    with without_caches():
        yield


def softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 5 * torch.tanh(s / 5)


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (i - j).abs() * 0.05


def squared(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + 0.01 * s * s


def causal_scores(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, s, float("-inf"))


def slopes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + (j - i) / 3 * torch.exp2(-((h + 1) * 8.0 / 3))


def mask_mod(name: str, shape: Shape) -> Mod | None:
    if name == "documents":
        ends = torch.tensor([0.13, 0.2, 0.61, 0.9], device="cuda") * shape.seqlen_q
        document = (torch.arange(shape.seqlen_q, device="cuda")[:, None] >= ends.long()).sum(1)
        return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    masks: dict[str, Mod | None] = {
        "none": None,
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < 150),
        "by_head": lambda b, h, i, j: (i >= j + 64 * h) & (j >= 30 * b),
        "nothing": lambda b, h, i, j: i < 0,
    }
    return masks[name]


def small(head_dim: int, **changes: Any) -> Shape:
    sizes = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512, "head_dim": head_dim}
    return Shape(**(sizes | {"head_dim_v": head_dim} | changes))


DEFAULT = small(128)


@dataclass(frozen=True)
class Case:
    mask: str
    shape: Shape = DEFAULT
    dtype: torch.dtype = torch.bfloat16
    mod: Mod | None = None
    lse: bool = False

    def block_mask(self) -> BlockMask | None:
        mod, shape = mask_mod(self.mask, self.shape), self.shape
        by_head = self.mask == "by_head"
        sizes = (shape.batch if by_head else None, shape.heads if by_head else None, shape.seqlen_q, shape.seqlen_k)
        return None if mod is None else create_block_mask(mod, *sizes, device="cuda")

    def inputs(self) -> list[Tensor]:
        """Return q, k and v in the memory order of a projection, where heads follow rows."""
        return [
            tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
            for tensor in self.shape.tensors(self.dtype, "cuda")
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> tuple[Tensor, Tensor]:
        out, auxiliary = flex_attention(q, k, v, self.mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, auxiliary.lse

    def loss(self, out: Tensor, lse: Tensor) -> Tensor:
        total = (out.float() * torch.linspace(-1, 1, out.shape[-1], device="cuda")).sum()
        return total + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum() if self.lse else total

    def gradients(self, call: Callable[..., Any]) -> tuple[Tensor, ...]:
        inputs = self.inputs()
        return torch.autograd.grad(self.loss(*call(*inputs, self.block_mask())), inputs)

    def exact(self) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().double().requires_grad_() for tensor in self.inputs()]
        mod = mask_mod(self.mask, self.shape)
        dense = None if mod is None else decoding.dense_mask(mod, self.shape, "cuda")
        out, lse = decoding.oracle(self.shape, *inputs, self.mod, dense)
        return torch.autograd.grad(self.loss(out, lse), inputs)


CASES = {
    "causal": Case("causal"),
    "causal_64": Case("causal", small(64, heads_kv=4), torch.float16),
    "documents": Case("documents", small(128, seqlen_q=1000, seqlen_k=1000)),
    "documents_lse": Case("documents", lse=True),
    "window_softcap": Case("window", small(64, seqlen_q=777, seqlen_k=777), mod=softcap),
    "by_head": Case("by_head", small(64, heads_kv=1)),
    "nothing": Case("nothing"),
    "no_mask": Case("none", small(128, seqlen_q=260, seqlen_k=515), lse=True),
    "no_mask_fp32": Case("none", small(64), torch.float32),
    "fp32": Case("causal", small(64), torch.float32),
    "head_dim_192": Case("causal", small(192)),
    "head_dim_192_128": Case("documents", small(192, head_dim_v=128, seqlen_q=1000, seqlen_k=1000), lse=True),
    "head_dim_256": Case("window", small(256, heads_kv=1), torch.float16),
    "softcap_192": Case("window", small(192, head_dim_v=128), mod=softcap),
    "other_score_mod_256": Case("causal", small(256), mod=squared, lse=True),
    "alibi": Case("causal", mod=alibi),
    "other_score_mod": Case("causal", mod=squared),
    "hidden_scores": Case("none", mod=causal_scores),
    "quotients": Case("causal", mod=slopes),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_gradients_agree_with_float64_and_a_kernel_computes_them(name: str) -> None:
    case = CASES[name]
    pytorchs = case.gradients(torch.compile(case.attend, fullgraph=True))
    torch._dynamo.reset()
    ours = case.gradients(torch.compile(case.attend, fullgraph=True, options=inductor.options()))
    assert counted() == (1, {})
    for i, (got, want, plain) in enumerate(zip(ours, case.exact(), pytorchs, strict=True)):
        assert got.stride() == plain.stride()
        tolerance.assert_close(got, want, [plain.double()], f"gradient {i}", softcap=case.mod is softcap)


def silu(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.nn.functional.silu(s)


def steep(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (h + 1) * 0.01 * (i - j).abs()


IN_16_BITS: dict[str, tuple[Mod, Mod]] = {  # and what they compute without a rounding
    "activation": (silu, silu),
    "slopes": (lambda s, b, h, i, j: s - ((h + 1) * 0.01).to(torch.bfloat16) * (i - j).abs(), steep),
    "distances": (lambda s, b, h, i, j: s - (h + 1) * 0.01 * (i - j).abs().to(torch.bfloat16), steep),
}


@pytest.mark.parametrize("mod", IN_16_BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_16_bit_values_in_a_score_mod_cost_no_accuracy(compiled: bool, dtype: torch.dtype, mod: str) -> None:
    """PyTorch's forward does not round them. A backward that did would belong to other scores than its LSE."""
    function, exact = IN_16_BITS[mod]
    case = Case("none", small(64, heads_kv=4, seqlen_q=2048, seqlen_k=2048), dtype, function)
    pytorchs = case.gradients(torch.compile(case.attend, fullgraph=True))
    torch._dynamo.reset()
    if compiled:
        ours = case.gradients(torch.compile(case.attend, fullgraph=True, options=inductor.options()))
        assert counted() == (1, {})
    else:
        ours = case.gradients(lambda q, k, v, _: (flashbwd.flex_attention(q, k, v, function), torch.empty(0)))
    for got, plain, want in zip(ours, pytorchs, replace(case, mod=exact).exact(), strict=True):
        mean, allowed = ((x.double() - want).abs().mean() for x in (got, plain))
        assert mean <= 1.1 * allowed


@pytest.mark.parametrize("head_dim", [128, 192])
def test_a_learned_scale_gets_its_gradient(head_dim: int) -> None:
    rates = torch.rand(4, device="cuda", requires_grad=True)
    q, k, v = Case("causal", small(head_dim)).inputs()
    compiled = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s * rates[h], enable_gqa=True),
        options=inductor.options(),
    )
    (got,) = torch.autograd.grad(compiled(q, k, v).float().sin().sum(), [rates])
    assert counted() == (1, {})
    exact = rates.detach().double().requires_grad_()
    keys, values = (x.detach().double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.detach().double() @ keys.mT * q.shape[-1] ** -0.5 * exact[:, None, None]
    (want,) = torch.autograd.grad((scores.softmax(-1) @ values).sin().sum(), [exact])
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))


def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    out = flex_attention(q, k, v, None, mask, enable_gqa=True)
    return flex_attention(out, k, v, None, mask, enable_gqa=True)


def test_layers_and_steps_compute_the_lists_of_a_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = cache.kernel_lists
    monkeypatch.setattr(cache, "kernel_lists", lambda *args, **options: made.append(args) or real(*args, **options))
    case = Case("documents")
    mask, inputs = case.block_mask(), case.inputs()
    compiled = torch.compile(two_layers, fullgraph=True, options=inductor.options())
    for _ in range(3):
        torch.autograd.grad(compiled(*inputs, mask).float().square().sum(), inputs)
    assert counted() == (6, {})
    assert len(made) == 1


def test_the_kernel_runs_and_pytorchs_does_not() -> None:
    case = Case("documents")
    compiled = torch.compile(case.attend, fullgraph=True, options=inductor.options())
    case.gradients(compiled)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        case.gradients(compiled)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert any("flashbwd::sm90::backward_kernel" in name for name in names)
    assert not any(re.search("triton_tem.*flex_attention_backward", name) for name in names)


def test_no_length_recompiles() -> None:
    case = Case("causal", small(64, seqlen_q=1300, seqlen_k=1300))
    options = inductor.options()
    ours, pytorchs = (
        torch.compile(case.attend, fullgraph=True, dynamic=True, options=chosen) for chosen in (options, None)
    )
    case.gradients(ours)
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seqlen in (400, 777, 1024, 2000):
            other = Case("causal", small(64, seqlen_q=seqlen, seqlen_k=seqlen))
            found.append((other, other.gradients(ours)))
    assert counted() == (5, {})
    torch._dynamo.reset()
    for other, gradients in found:
        plain = other.gradients(pytorchs)
        for i, (got, want, near) in enumerate(zip(gradients, other.exact(), plain, strict=True)):
            tolerance.assert_close(got, want, [near.double()], f"gradient {i}")


def test_enable_replaces_the_backward_of_models_compiled_after_it() -> None:
    case = Case("causal")
    before = torch.compile(case.attend, fullgraph=True)
    case.gradients(before)
    assert counted() == (0, {})
    with flashbwd.enable():
        case.gradients(before)  # compiled before enable()
        assert counted() == (0, {})
        torch._dynamo.reset()
        case.gradients(torch.compile(case.attend, fullgraph=True))
        assert counted() == (1, {})
    torch._dynamo.reset()
    case.gradients(torch.compile(case.attend, fullgraph=True))
    assert counted() == (1, {})


def test_deterministic_gradients_have_equal_bits() -> None:
    case = Case("documents", small(64, seqlen_q=2048, seqlen_k=2048))
    compiled = torch.compile(case.attend, fullgraph=True, options=inductor.options())
    torch.use_deterministic_algorithms(True)
    try:
        first, second = case.gradients(compiled), case.gradients(compiled)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counted() == (2, {})
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_pytorch_keeps_masked_calls_if_inductor_records_cuda_graphs() -> None:
    case = Case("causal", small(64))
    options = inductor.options() | {"triton.cudagraphs": True}
    compiled = torch.compile(case.attend, fullgraph=True, options=options)
    for _ in range(3):
        case.gradients(compiled)
    (reason,) = counted().fallbacks
    assert counted().hits == 0 and "CUDA graphs" in reason
