"""The short family against the oracle: every tile, with and without features, and many sequences per CTA."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kit import inputs
from kit.cases import Case
from support import GPU_TARGETS, Target, arguments_of, run, run_copies, skip_where_refused, workspace_of

import flashbwd

pytestmark = pytest.mark.gpu

KERNELS = [target for target in GPU_TARGETS if "-short-" in str(target.id)]
PLAIN = Case("plain", heads=3, heads_kv=3)
LENGTHS = [(49, 49), (64, 64), (100, 100), (128, 128), (1, 1), (17, 17), (33, 97), (128, 20), (20, 128), (64, 1)]
EVERY_LENGTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "shared_bias": {"bias": "1hqk"},
    "key_mask": {"key_mask": "random"},
    "groups": {"heads": 4, "heads_kv": 2},
}
FEATURES: dict[str, dict[str, Any]] = {
    "top_left": {"causal": "top_left"},
    "window": {"window_size": (9, 4)},
    "window_of_groups": {"window_size": (0, -1), "causal": True, "heads": 6, "heads_kv": 2},
    "own_bias": {"bias": "bhqk"},
    "own_bias_float32_causal": {"bias": "bhqk", "bias_float32": True, "causal": True},
    "own_bias_hides_rows": {"bias": "bhqk", "bias_hides_rows": True},
    "bias_of_all": {"bias": "11qk"},
    "bias_of_all_groups": {"bias": "11qk", "heads": 4, "heads_kv": 1},
    "shared_bias_float32": {"bias": "1hqk", "bias_float32": True, "batch": 9},
    "shared_bias_hides_rows": {"bias": "1hqk", "bias_hides_rows": True},
    "alibi": {"alibi": "heads"},
    "everything": {"alibi": "batch", "causal": True, "key_mask": "random", "bias": "1hqk"},
    "empty_key_mask": {"key_mask": "empty"},
    "dlse": {"dlse": True},
    "minus_infinite_lse": {"causal": True, "empty_lse": float("-inf")},
    "used": {"seqused_q": (20, 0), "seqused_k": (3, 40)},
    "used_own_bias": {"seqused_q": (20, 0), "seqused_k": (3, 40), "bias": "bhqk"},
    "shared_bias_float32_head_dim_80": {"bias": "1hqk", "bias_float32": True, "head_dim": 80, "head_dim_v": 80},
    "shared_bias_float32_head_dim_96": {"bias": "1hqk", "bias_float32": True, "head_dim": 96, "head_dim_v": 96},
    "used_shared_bias": {"seqused_q": (20, 0), "seqused_k": (3, 40), "bias": "1hqk"},
    "head_dims": {"head_dim": 24, "head_dim_v": 56},
    "head_dims_causal": {"head_dim": 72, "head_dim_v": 40, "causal": True},
    "heads_first": {"layout": "bhsd"},
    "one_buffer": {"layout": "packed_qkv"},
}
PACKED = Case(
    "packed",
    heads=4,
    heads_kv=2,
    seqlens_q=(40, 0, 64, 1, 17, 33, 64),
    seqlens_k=(40, 5, 0, 64, 2, 33, 50),
    trailing=5,
    head_dim=32,
    head_dim_v=32,
)


def check(case: Case, target: Target) -> None:
    """Compare with the oracle, with NaN in the outputs and in the workspace, and compare two runs bit for bit."""
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        plan = flashbwd.plan_attention_backward(**arguments_of(x))
    assert plan.deterministic
    first, second = (run(x, backend, workspace=workspace_of(plan.workspace_bytes, device)) for _ in range(2))
    x.check(*first)
    for one, other in zip(first, second, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("feature", EVERY_LENGTH)
def test_every_tile_agrees_with_the_oracle(
    feature: str, lengths: tuple[int, int], head_dim: int, target: Target
) -> None:
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "head_dim": head_dim, "head_dim_v": head_dim}
    check(dataclasses.replace(PLAIN, **sizes, **EVERY_LENGTH[feature]), target)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("lengths", [(49, 49), (64, 57), (100, 93)], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_agree_with_the_oracle(feature: str, lengths: tuple[int, int], target: Target) -> None:
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "head_dim": 32, "head_dim_v": 32}
    check(dataclasses.replace(PLAIN, **{**sizes, **FEATURES[feature]}), target)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"seqused_q": (39, 0, 64, 1, 0, 33, 2), "seqused_k": (3, 5, 0, 64, 2, 0, 50)},
        {"heads_kv": 4, "bias": "bhqk"},
        {"heads_kv": 4, "bias": "1hqk", "bias_float32": True},
        {"heads_kv": 4, "bias": "1hqk"},
        {"slack": 60, "head_dim": 64, "head_dim_v": 64},
    ],
    ids=str,
)
def test_packed_sequences_agree_with_the_oracle(changes: dict[str, Any], target: Target) -> None:
    check(dataclasses.replace(PACKED, **changes), target)


# A GPU runs up to five CTAs per SM at the same time, so each CTA processes several of these sequences.
@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize(("seqlen", "head_dim"), [(49, 32), (100, 64), (128, 80)])
def test_a_cta_processes_several_sequences(seqlen: int, head_dim: int, target: Target) -> None:
    case = dataclasses.replace(PLAIN, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, head_dim_v=head_dim)
    sms = torch.cuda.get_device_properties(target[0]).multi_processor_count
    run_copies(case, target, 4 * sms)
    run_copies(case, target, 4 * sms, heads=True)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("bias", ["1hqk", "11qk"])
def test_a_cta_sums_the_gradient_of_a_shared_bias_over_sequences(bias: str, target: Target) -> None:
    sizes = {"seqlen_q": 20, "seqlen_k": 20, "head_dim": 32, "head_dim_v": 32}
    check(dataclasses.replace(PLAIN, batch=90, heads=24, heads_kv=24, bias=bias, **sizes), target)


@pytest.mark.parametrize("target", KERNELS)
def test_gradients_in_float32_are_not_rounded(target: Target) -> None:
    device, backend, dtype = target
    sizes = {"seqlen_q": 49, "seqlen_k": 49, "head_dim": 32, "head_dim_v": 32}
    x = inputs.build(dataclasses.replace(PLAIN, **sizes), dtype, device)
    skip_where_refused(x, backend)
    outputs = {
        name: torch.full_like(x.arguments[name[1:]], torch.nan, dtype=torch.float32) for name in ("dq", "dk", "dv")
    }
    grads = run(x, backend, **outputs)
    x.check(*grads)
    assert all(not torch.equal(grad, grad.to(dtype).float()) for grad in grads[:3])
