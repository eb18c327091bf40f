"""Many work tiles have keys that no query sees, and a bias has a gradient. Every such call must end with the right
gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit import inputs
from kit.cases import Case
from support import GPU_TARGETS, Target, refusal, run

pytestmark = pytest.mark.gpu

# There are more work tiles than SMs on an H100, and most have no queries, because of few queries and a window or a mask
# that is aligned with the first query and key.
DENSE = Case("unseen_keys", batch=1, heads=132, heads_kv=132, bias="bhqk")
WINDOW = replace(DENSE, seqlen_q=64, seqlen_k=256, window_size=(3, 20), bias="11qk")
CASES = [
    replace(WINDOW, name="d128", head_dim=128, head_dim_v=128),
    replace(WINDOW, name="d64_v32", head_dim=64, head_dim_v=32, seqlen_k=900),
    replace(WINDOW, name="d192", head_dim=192, head_dim_v=192, seqlen_q=200, seqlen_k=900, window_size=(100, 0)),
    replace(DENSE, name="d192_v128", head_dim=192, head_dim_v=128, seqlen_q=200, seqlen_k=900, window_size=(127, 20)),
    replace(DENSE, name="d48_top_left", head_dim=48, head_dim_v=48, seqlen_q=64, seqlen_k=1025, causal="top_left"),
    replace(DENSE, name="d80_grouped", head_dim=80, head_dim_v=80, heads_kv=66, seqlen_q=64, seqlen_k=900,
            window_size=(64, 0)),
    replace(DENSE, name="d128_grouped", batch=2, heads=68, heads_kv=17, head_dim=128, head_dim_v=128, seqlen_q=64,
            seqlen_k=1025, window_size=(100, 0)),
]  # fmt: skip


@pytest.mark.parametrize("target", [target for target in GPU_TARGETS if "-sm" in str(target.id)])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls_with_unseen_keys_and_a_bias_end_with_the_right_gradients(
    case: Case, deterministic: bool, target: Target
) -> None:
    device, backend, dtype = target
    x = inputs.build(replace(case, deterministic=deterministic), dtype, device)
    assert refusal(x, backend) is None
    for _ in range(5):
        gradients = run(x, backend)
    x.check(*gradients)
