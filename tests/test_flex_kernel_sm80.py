"""The sm80 kernel with block lists agrees with float64 autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_flex_kernel import Case, alibi_mods, build, check, check_graph, check_invisible_blocks, public_problem, small

import flashbwd

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _needs_ampere() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("block lists run from compute capability 8.0 on")


@pytest.fixture
def sm80() -> Iterator[None]:
    with flashbwd.use_backend("sm80"):
        yield


CASES = [
    Case("causal"),
    Case("causal", head_dim=64, dtype=FP16),
    Case("causal", head_dim=128, dtype=FP32),
    Case("documents", seqlen_q=1024, seqlen_k=1024),
    Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=64, heads_kv=1),
    Case("documents", seqlen_q=700, seqlen_k=700, head_dim=64, dtype=FP32, dlse=True),
    small(Case("prefix", seqlen_q=260, seqlen_k=515, head_dim=64, dtype=FP16)),
    small(Case("prefix", seqlen_q=131, seqlen_k=257, head_dim=40, dtype=FP32)),
    Case("window", seqlen_q=1025, seqlen_k=1025, head_dim=96, heads_kv=4),
    Case("random_blocks", seqlen_q=1024, seqlen_k=640, head_dim=192),
    Case("random_blocks", seqlen_q=640, seqlen_k=1024, head_dim=64, heads=6, heads_kv=2, dtype=FP32),
    Case("random_pairs", seqlen_q=384, seqlen_k=300, head_dim=256),
    small(Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=256, heads=2, dtype=FP32)),
    small(Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=48)),
    Case("random_pairs", seqlen_q=200, seqlen_k=333, head_dim=160, dtype=FP32),
    Case("by_head", seqlen_q=513, seqlen_k=511, heads=4, heads_kv=1),
    Case("by_head", seqlen_q=513, seqlen_k=511, head_dim=64, dtype=FP32),
    small(Case("full", seqlen_q=127, seqlen_k=129, head_dim=80, head_dim_v=112)),
    Case("full", seqlen_q=129, seqlen_k=65, head_dim=200, head_dim_v=37, dtype=FP32),
    Case("full", seqlen_q=1, seqlen_k=1, head_dim=64),
    Case("nothing", seqlen_q=200, seqlen_k=200),
    small(Case("nothing", seqlen_q=200, seqlen_k=200, head_dim=64, dtype=FP32)),
    Case("causal", block_size=256, seqlen_q=600, seqlen_k=600),
    Case("window", block_size=64, seqlen_q=600, seqlen_k=600, head_dim=64),
    small(Case("causal", softcap=5.0)),
    Case("documents", softcap=5.0, head_dim=192, dtype=FP16),
    Case("prefix", alibi=True),
    Case("window", alibi=True, head_dim=64, seqlen_q=500, seqlen_k=500, dtype=FP32),
    Case("random_blocks", softcap=3.0, alibi=True, seqlen_q=700, seqlen_k=700, dtype=FP32),
    Case("documents", dlse=True, head_dim=256, heads=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sm80_gradients_agree_with_the_plain_formula(case: Case, deterministic: bool) -> None:
    p = build(case, "sm80")
    check(p, p.run(deterministic=deterministic))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sm80_deterministic_results_repeat_bit_for_bit(head_dim: int, dtype: torch.dtype) -> None:
    p = build(Case("random_blocks", seqlen_q=2048, seqlen_k=2048, head_dim=head_dim, heads=8, dtype=dtype), "sm80")
    first = p.run(deterministic=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run(deterministic=True), strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_sm80_does_not_read_invisible_blocks(head_dim: int, dtype: torch.dtype) -> None:
    case = Case("random_blocks", seqlen_q=640, seqlen_k=640, head_dim=head_dim, heads_kv=4, dtype=dtype)
    check_invisible_blocks(build(case, "sm80"))


def test_sm80_calls_can_be_captured_in_a_graph() -> None:
    check_graph(build(Case("documents", seqlen_q=1024, seqlen_k=1024, dtype=FP32), "sm80"))


PUBLIC = [
    Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=101, dtype=FP32),
    Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=64, softcap=5.0, dtype=FP32),
    Case("causal", seqlen_q=500, seqlen_k=500, head_dim=160, softcap=5.0, dtype=FP32),
]


@pytest.mark.parametrize("case", PUBLIC, ids=str)
def test_the_public_function_runs_sm80(case: Case, sm80: None) -> None:
    p, block_mask = public_problem(case)
    cap = case.softcap
    score_mod = (lambda s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    dout, q, k, v, out = p.tensors
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True}
    plan = flashbwd.plan_flex_attention_backward(dout, q, k, v, out, p.lse, **options)
    assert plan.backend == "sm80", plan.reasons
    check(p, flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)[:3])


@pytest.mark.parametrize("form", ["signed", "absolute", "by_batch"])
def test_alibi_as_a_score_mod_runs_sm80(form: str, sm80: None) -> None:
    p, block_mask = public_problem(Case("documents", seqlen_q=777, seqlen_k=777, head_dim=64, alibi=True))
    dout, q, k, v, out = p.tensors
    options = {"score_mod": alibi_mods(p)[form], "block_mask": block_mask, "enable_gqa": True}
    assert flashbwd.plan_flex_attention_backward(dout, q, k, v, out, p.lse, **options).backend == "sm80"
    check(p, flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)[:3])


@pytest.fixture
def matmul() -> Iterator[Any]:
    """PyTorch's settings of matrix products; the precision is restored after the test."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


def test_float32_products_round_to_tf32_only_if_pytorch_allows_it(sm80: None, matmul: Any) -> None:
    p, block_mask = public_problem(Case("documents", seqlen_q=500, seqlen_k=500, head_dim=64, dtype=FP32))

    def grads() -> Any:
        return flashbwd.flex_attention_backward(*p.tensors, p.lse, block_mask=block_mask, enable_gqa=True)[:3]

    matmul.fp32_precision = "ieee"
    exact = grads()
    check(p, exact)
    matmul.fp32_precision = "tf32"
    for rounded, precise in zip(grads(), exact, strict=True):
        error = (rounded - precise).norm() / precise.norm()
        assert 1e-5 < error < 3e-3


def truncated(x: torch.Tensor) -> torch.Tensor:
    """x without the 13 bits that TF32 lacks."""
    return (x.view(torch.int32) & ~0x1FFF).view(FP32)


@pytest.mark.parametrize("generated", [False, True], ids=["block_mask", "generated"])
def test_tf32_products_for_scores_and_dp_truncate_their_operands(generated: bool, sm80: None, matmul: Any) -> None:
    p, block_mask = public_problem(Case("documents", seqlen_q=500, seqlen_k=500, head_dim=64, dtype=FP32))
    dout, q, k, v, out = p.tensors
    score_mod = (lambda s, b, h, i, j: s + 0.1 * torch.sin(0.3 * (i - j))) if generated else None
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True, "deterministic": True}
    matmul.fp32_precision = "tf32"

    def grads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flashbwd.flex_attention_backward(dout, q, k, v, out, p.lse, **options)

    dq, dk, dv, *_ = grads(q, k, v)
    other_dq, other_dk, same_dv, *_ = grads(truncated(q), truncated(k), v)
    assert torch.equal(same_dv, dv)  # the same scores
    assert not torch.equal(other_dq, dq)  # a product with k rounded
    assert not torch.equal(other_dk, dk)
    same_dq, same_dk, *_ = grads(q, k, truncated(v))
    assert torch.equal(same_dq, dq)  # the same dp
    assert torch.equal(same_dk, dk)
