"""The sm80 kernel with a score_mod that is compiled at run time agrees with float64 autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_flex_kernel import Case
from test_flex_score_mods import build, check, check_graph, small

import flashbwd

pytestmark = pytest.mark.gpu
FP16, FP32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _sm80() -> Iterator[None]:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("score_mods are compiled from compute capability 8.0 on")
    with flashbwd.use_backend("sm80"):
        yield


CASES = [
    ("relative_bias", Case("full")),
    ("relative_bias", Case("causal", head_dim=64, dtype=FP32)),
    small("relative_bias", Case("random_pairs", seqlen_q=260, seqlen_k=385, head_dim=48, dtype=FP16)),
    ("relative_bias", Case("random_blocks", seqlen_q=1024, seqlen_k=640, head_dim=256)),
    ("cap_and_decay", Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=192)),
    ("cap_and_decay", Case("documents", seqlen_q=700, seqlen_k=700, head_dim=64, heads_kv=1, dlse=True, dtype=FP32)),
    ("cap_and_decay", Case("full", seqlen_q=1, seqlen_k=1, head_dim=64)),
    ("branches", Case("prefix", seqlen_q=777, seqlen_k=777, head_dim=96)),
    ("signed_alibi", Case("prefix", seqlen_q=300, seqlen_k=300, head_dim=64)),
    ("hides", Case("full", seqlen_q=600, seqlen_k=600, dtype=FP32)),
    ("trained_relative_bias", Case("causal")),
    small("trained_relative_bias", Case("window", seqlen_q=257, seqlen_k=257, head_dim=64, dtype=FP32)),
    ("trained_scale", Case("documents", seqlen_q=1000, seqlen_k=1000, head_dim=64)),
    ("trained_scale", Case("random_pairs", seqlen_q=300, seqlen_k=384, head_dim=160, head_dim_v=72)),
    ("trained_scale", Case("random_blocks", seqlen_q=640, seqlen_k=1024, heads=6, heads_kv=2, dtype=FP32)),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_sm80_gradients_agree_with_the_plain_formula(name: str, case: Case) -> None:
    p = build(case, name, "sm80")
    check(p, p.run())


def test_sm80_deterministic_results_are_right_and_repeat_bit_for_bit() -> None:
    case = Case("random_blocks", seqlen_q=1024, seqlen_k=1024, head_dim=64, heads=8)
    p = build(case, "relative_bias", "sm80")
    first = p.run(deterministic=True)
    check(p, first)
    for _ in range(20):
        again = p.run(deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


@pytest.mark.parametrize("name", ["relative_bias", "trained_relative_bias"])
def test_sm80_does_not_read_invisible_blocks(name: str) -> None:
    p = build(Case("random_blocks", seqlen_q=640, seqlen_k=640, heads_kv=4), name, "sm80")
    for x in p.inputs[1:]:
        x[:, :, :128] = float("nan")  # no query sees the first block of keys
    for x in (p.dout, p.inputs[0], p.out):
        x[:, :, :128] = float("nan")  # the first block of queries sees no key
    *grads, captured = p.run()
    assert all(x.isfinite().all() for x in (*grads, *captured.values()))


def test_sm80_calls_can_be_captured_in_a_graph_after_the_first_call() -> None:
    check_graph(build(Case("documents", seqlen_q=600, seqlen_k=600, dtype=FP32), "relative_bias", "sm80"))
