"""A score_mod that adds an element per pair runs the kernels of the build, which agree with float64 autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_flex_kernel import Case
from test_flex_score_mods import build, check, score_mod

import flashbwd
from flashbwd.flex import gradients

pytestmark = pytest.mark.gpu
FP16, FP32 = torch.float16, torch.float32
CASES = [
    ("pair_bias_16", Case("full")),
    ("pair_bias_16", Case("full", seqlen_q=515, seqlen_k=304, head_dim=64, heads_kv=1)),
    ("pair_bias", Case("full", seqlen_q=200, seqlen_k=200, head_dim=64, dtype=FP32)),
    ("trained_pair_bias", Case("full")),
    ("trained_pair_bias", Case("full", seqlen_q=257, seqlen_k=515, head_dim=64, dlse=True)),
    ("trained_pair_bias", Case("full", seqlen_q=300, seqlen_k=260, head_dim=192, dtype=FP16)),
    ("trained_pair_bias", Case("full", seqlen_q=200, seqlen_k=200, head_dim=64, dtype=FP32)),
    ("trained_pair_bias_16", Case("full", seqlen_q=512, seqlen_k=512)),
    ("trained_pair_bias_16", Case("full", seqlen_q=384, seqlen_k=512, head_dim=64, dtype=FP16, heads_kv=1)),
    ("trained_pair_bias_16", Case("full", seqlen_q=1, seqlen_k=9, head_dim=64)),
    ("trained_pair_bias_16", Case("full", seqlen_q=130, seqlen_k=264, head_dim=256)),
    ("pair_bias_of_all_heads", Case("full", seqlen_q=130, seqlen_k=200, head_dim=64)),
    ("pair_bias_by_batch", Case("full", seqlen_q=130, seqlen_k=200, head_dim=64)),
    ("pair_bias_and_slopes", Case("full", seqlen_q=130, seqlen_k=200, head_dim=64)),
    ("capped_pair_bias", Case("full", seqlen_q=300, seqlen_k=264, head_dim=64)),
    ("capped_pair_bias_16", Case("full", seqlen_q=256, seqlen_k=256)),
]


@pytest.fixture(autouse=True)
def _no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "decoding_backward", lambda *_: pytest.fail("the reference ran"))


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_gradients_agree_with_the_plain_formula(name: str, case: Case) -> None:
    p = build(case, name)
    plan = p.plan()
    assert plan.backend != "reference" and not plan.compiled
    tensors, options = p.arguments(deterministic=False)
    check(p, flashbwd.flex_attention_backward(*tensors, dlse=p.dlse, **options))


@pytest.mark.parametrize("name", ["trained_pair_bias", "trained_pair_bias_16"])
def test_deterministic_gradients_repeat_bit_for_bit(name: str) -> None:
    p = build(Case("full", seqlen_q=640, seqlen_k=640, head_dim=64, heads=8), name)
    tensors, options = p.arguments(deterministic=True)

    def run() -> list[Any]:
        *grads, captured = flashbwd.flex_attention_backward(*tensors, **options)
        return [*grads, *captured.values()]

    first = run()
    check(p, (*first[:3], {"pairs": first[3]}))
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_autograd_and_a_graph_give_the_gradient_of_the_bias() -> None:
    case = Case("full", seqlen_q=512, seqlen_k=512)
    p = build(case, "trained_pair_bias_16")
    mod, (pairs,) = score_mod(p.name, case, "cuda")
    inputs = [x.detach().requires_grad_() for x in p.inputs]
    out: Any = flashbwd.flex_attention(*inputs, score_mod=mod, enable_gqa=True)
    *grads, of_pairs = torch.autograd.grad(out, [*inputs, pairs], p.dout)
    check(p, (*grads, {"pairs": of_pairs}))
    tensors, options = p.arguments(deterministic=False)
    flashbwd.flex_attention_backward(*tensors, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flashbwd.flex_attention_backward(*tensors, **options)
    graph.replay()
    torch.cuda.synchronize()
    check(p, found)


@pytest.mark.parametrize(("head_dim", "name"), [(64, "trained_pair_bias"), (192, "trained_pair_bias_16")])
def test_pytorchs_forward_starts_although_its_own_choice_needs_too_much_shared_memory(head_dim: int, name: str) -> None:
    case = Case("full", seqlen_q=512, seqlen_k=512, head_dim=head_dim)
    p = build(case, name)
    mod, _ = score_mod(p.name, case, "cuda")
    with torch.no_grad():
        results: Any = flashbwd.flex_attention(*p.inputs, score_mod=mod, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(results[0], p.out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(results[1], p.lse, rtol=1e-3, atol=1e-3)
