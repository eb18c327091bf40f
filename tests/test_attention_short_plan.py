"""Plans of the short family: supported calls, tiles, grid and workspace. The host half runs without a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from kit.host import dense_problem, device_info, load_host

H100 = {"usable": True, "cc_major": 9, "cc_minor": 0, "sm_count": 132, "smem_per_block": 227 * 1024}
A100 = {"cc_major": 8, "sm_count": 108, "smem_per_block": 163 * 1024}
CONSUMER = {"cc_major": 8, "cc_minor": 9, "smem_per_block": 99 * 1024}
SHORT = {
    "batch": 512,
    "heads": 16,
    "heads_kv": 16,
    "head_dim": 32,
    "head_dim_v": 32,
    "seqlen_q": 64,
    "seqlen_k": 64,
    "aligned_16": True,
}
SHARED_BIAS = {"has_bias": True, "bias_broadcast_batch": True, "need_dbias": True}


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return load_host()


def plan_of(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> Any:
    gpu = device_info(host, **{**H100, "has_attention_short": True, **(changed or {})})
    return host.plan_attention(dense_problem(host, **{**SHORT, **changes}), gpu)


def reason(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> str:
    plan = plan_of(host, changed, **changes)
    assert plan.backend == "reference"
    return str(dict(plan.refusals)["short"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "nothing to launch for an empty batch"),
        ({"seqlen_q": 129}, "it takes at most 128 queries and keys, got 129 and 64"),
        ({"seqlen_k": 200}, "it takes at most 128 queries and keys, got 64 and 200"),
        ({"head_dim": 104}, "it has no tile for head dimensions 104 and 32"),
        ({"head_dim_v": 128}, "it has no tile for head dimensions 32 and 128"),
        ({"head_dim": 36}, "rows of q, k, v, out and dout that are multiples of 16 bytes"),
        ({"aligned_16": False}, "rows of q, k, v, out and dout that are multiples of 16 bytes"),
        ({"softcap": 1.0}, "it takes no softcap"),
        ({"dropout_p": 0.1}, "it takes no dropout"),
        ({"has_sink": True}, "it takes no sink"),
        ({**SHARED_BIAS, "bias_broadcast_row": True}, "over queries or keys"),
        (
            {**SHARED_BIAS, "bias_broadcast_batch": False, "bias_broadcast_head": True},
            "over the heads of each sequence",
        ),
        ({**SHARED_BIAS, "heads_kv": 4}, "over batches with grouped-query attention"),
        ({"batch": 1 << 27, "total_q": 0, "total_k": 0}, "too large for one launch"),
    ],
)
def test_a_refusal_names_the_unsupported_property(host: ModuleType, changes: dict[str, Any], words: str) -> None:
    assert words in reason(host, **changes)


def test_float32_is_refused(host: ModuleType) -> None:
    assert "it takes float16 and bfloat16, got float32" in reason(host, dtype=host.DType.kFloat32)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"cc_major": 7, "cc_minor": 5}, "it needs compute capability 8.0, the device has 7.5"),
        ({"usable": False, "why_not": "the driver is old"}, "the driver is old"),
        ({"has_attention_short": False}, "this build holds no short attention kernels"),
    ],
)
def test_an_unsupported_device_is_refused_with_the_reason(host: ModuleType, device: dict[str, Any], words: str) -> None:
    assert words in reason(host, device)


@pytest.mark.parametrize("device", [H100, A100, CONSUMER, {"cc_major": 12, "smem_per_block": 99 * 1024}])
def test_every_device_from_compute_capability_8_on_is_supported(host: ModuleType, device: dict[str, Any]) -> None:
    assert plan_of(host, device).backend == "short"


ALL_BUILT = {"has_attention_sm90": True, "has_attention_sm80": True}


def test_it_is_preferred_to_the_other_families(host: ModuleType) -> None:
    plan = plan_of(host, ALL_BUILT)
    assert (plan.backend, dict(plan.refusals)["sm90"]) == ("short", "short is preferred")


@pytest.mark.parametrize("batch", [1, 127])
def test_another_family_is_preferred_for_few_groups_of_query_heads(host: ModuleType, batch: int) -> None:
    changes = {"batch": batch, "heads": 8, "heads_kv": 1}
    plan = plan_of(host, ALL_BUILT, **changes)
    assert plan.backend == "sm90"
    assert "faster with grouped-query attention if batch * heads_kv is below 128" in dict(plan.refusals)["short"]
    assert plan_of(host, ALL_BUILT, backend="short", **changes).backend == "short"
    assert plan_of(host, **changes).backend == "short", "no other family is built"


def test_the_first_family_runs_if_each_expects_one_that_is_not_built_to_be_faster(host: ModuleType) -> None:
    changes = {"batch": 1, "heads": 8, "heads_kv": 1, "has_bias": True, "bias_dtype": host.DType.kFloat32}
    assert plan_of(host, {"has_attention_sm90": True}, **changes).backend == "short"


@pytest.mark.parametrize(
    "changes", [{"batch": 128, "heads": 8, "heads_kv": 1}, {"batch": 1, "heads": 8, "heads_kv": 8}]
)
def test_it_is_preferred_if_every_sm_has_work_or_no_heads_share_keys(host: ModuleType, changes: dict[str, int]) -> None:
    assert plan_of(host, ALL_BUILT, **changes).backend == "short"


@pytest.mark.parametrize(
    ("lengths", "rows"), [((1, 1), 64), ((64, 64), 64), ((65, 3), 128), ((3, 65), 128), ((128, 128), 128)]
)
def test_one_tile_holds_all_queries_and_keys(host: ModuleType, lengths: tuple[int, int], rows: int) -> None:
    plan = plan_of(host, seqlen_q=lengths[0], seqlen_k=lengths[1])
    assert (plan.block_m, plan.block_n) == (rows, rows)


@pytest.mark.parametrize(
    "changes", [{}, {"has_key_mask": True}, {"has_alibi": True}, {"heads_kv": 4}, {"varlen": True}]
)
def test_a_call_without_a_shared_bias_needs_no_scratch(host: ModuleType, changes: dict[str, Any]) -> None:
    plan = plan_of(host, **changes)
    assert plan.backend == "short"
    assert plan.workspace.bytes == (2 * 513 * 4 if changes.get("varlen") else 0)
    assert plan.workspace.semaphore_bytes == plan.workspace.accumulator_bytes == 0


# Three regions of shared memory at most: tiles, p and ds; dk and dv of a group of heads; the scores of a shared bias.
@pytest.mark.parametrize(
    ("changes", "kib"),
    [
        ({}, 32),
        ({"seqlen_q": 128}, 64),
        ({"head_dim": 64}, 48),
        ({"head_dim": 80}, 56),
        ({"head_dim": 72, "seqlen_k": 100}, 112),
        ({"head_dim": 96, "seqlen_k": 100}, 128),
        ({"heads_kv": 4}, 32 + 16),
        ({"head_dim": 96, "seqlen_k": 100, "heads_kv": 4}, 128 + 96),
        (SHARED_BIAS, 32 + 16 + 8),
        ({**SHARED_BIAS, "need_dbias": False}, 32 + 8),
        ({**SHARED_BIAS, "seqlen_q": 65}, 64 + 64 + 32),
        ({**SHARED_BIAS, "bias_broadcast_batch": False}, 32),
    ],
)
def test_shared_memory_has_the_regions_that_the_call_needs(host: ModuleType, changes: dict[str, Any], kib: int) -> None:
    assert host.short_launch(plan_of(host, **changes))[0] == kib * 1024
    if not changes.get("bias_broadcast_batch"):
        too_little = {"smem_per_block": kib * 1024 - 1}
        assert "bytes of shared memory per block, the device has" in reason(host, too_little, **changes)


def test_a_shared_bias_in_fp32_takes_twice_as_much_shared_memory(host: ModuleType) -> None:
    plan = plan_of(host, **SHARED_BIAS, bias_dtype=host.DType.kFloat32)
    assert host.short_launch(plan)[0] == (32 + 16 + 16) * 1024


def test_a_shared_bias_that_has_no_room_in_shared_memory_stays_in_global_memory(host: ModuleType) -> None:
    changes = {**SHARED_BIAS, "seqlen_q": 65, "head_dim": 96, "bias_dtype": host.DType.kFloat32}
    assert host.short_launch(plan_of(host, **changes))[0] == (128 + 64) * 1024  # tiles, sums of the gradient
    changes["bias_dtype"] = host.DType.kBFloat16
    assert host.short_launch(plan_of(host, **changes))[0] == (128 + 64 + 32) * 1024


@pytest.mark.parametrize("batch", [1, 7, 41, 512, 100_000])
@pytest.mark.parametrize("heads", [1, 3, 16, 700, 4096])
@pytest.mark.parametrize("changes", [{}, SHARED_BIAS, {"head_dim": 64, "seqlen_q": 128}])
def test_the_grid_has_every_head_and_no_idle_cta(
    host: ModuleType, changes: dict[str, Any], heads: int, batch: int
) -> None:
    plan = plan_of(host, batch=batch, heads=heads, heads_kv=heads, **changes)
    slots = host.short_launch(plan)[1]
    assert 1 <= slots <= min(batch, 65535)
    if changes == SHARED_BIAS:
        assert plan.workspace.partial_bytes == slots * heads * 64 * 64 * 4


def test_a_bias_that_all_heads_share_has_one_plane_per_cta(host: ModuleType) -> None:
    plan = plan_of(host, **SHARED_BIAS, bias_broadcast_head=True)
    assert plan.workspace.partial_bytes == host.short_launch(plan)[1] * 16 * 64 * 64 * 4
    assert "gradient of the bias summed over the sequences of a CTA" in plan.schedule
