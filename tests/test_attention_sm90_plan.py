"""What the sm_90a family takes and asks for: its host half, on a GPU that need not be there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from kit.host import dense_problem, device_info, load_host

H100 = {"usable": True, "cc_major": 9, "cc_minor": 0, "sm_count": 132, "smem_per_block": 227 * 1024}


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return load_host()


def plan_of(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> Any:
    gpu = device_info(host, **{**H100, "has_attention_sm90": True, **(changed or {})})
    return host.plan_attention(dense_problem(host, **{"aligned_16": True, **changes}), gpu)


def reason(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> str:
    plan = plan_of(host, changed, **changes)
    assert plan.backend != "sm90"
    return str(dict(plan.refusals)["sm90"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"has_bias": True}, "it does not take attn_bias"),
        ({"has_alibi": True}, "it does not take alibi_slopes"),
        ({"has_sink": True}, "it does not compute the gradient of sink"),
        ({"dropout_p": 0.1}, "it does not take dropout"),
        ({"softcap": 30.0}, "it does not take softcap"),
        ({"head_dim": 136}, "it holds no tile for head dimensions 136 and 128"),
        ({"head_dim_v": 192}, "it holds no tile for head dimensions 128 and 192"),
        ({"aligned_16": False}, "multiples of 16 bytes"),
        ({"batch": 0}, "nothing to launch for an empty batch"),
        ({"seqlen_q": 1 << 31, "batch": 1, "total_q": 1 << 31}, "too large for one launch"),
    ],
)
def test_each_refusal_says_what_it_does_not_take(host: ModuleType, changes: dict[str, Any], words: str) -> None:
    assert words in reason(host, **changes)


@pytest.mark.parametrize("dtype", ["kFloat32", "kFloat64"])
def test_refuses_other_types_than_16_bit_ones(host: ModuleType, dtype: str) -> None:
    assert "it takes float16 and bfloat16, got float" in reason(host, dtype=getattr(host.DType, dtype))


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"cc_major": 8}, "it needs compute capability 9.0, the device has 8.0"),
        ({"cc_major": 10}, "it needs compute capability 9.0, the device has 10.0"),
        ({"cc_major": 12, "cc_minor": 1}, "the device has 12.1"),
        ({"smem_per_block": 99 * 1024}, "the device gives 101376"),
        ({"usable": False, "why_not": "the driver is old"}, "the driver is old"),
        ({"has_attention_sm90": False}, "this build holds no sm90 attention kernels"),
    ],
)
def test_refuses_other_devices_with_the_reason(host: ModuleType, device: dict[str, Any], words: str) -> None:
    assert words in reason(host, device)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "tile"),
    [
        (8, 8, (128, 128)),
        (64, 64, (128, 128)),
        (72, 64, (64, 128)),
        (64, 72, (64, 128)),
        (128, 8, (64, 128)),
        (128, 128, (64, 128)),
    ],
)
def test_tile_follows_the_wider_head_dimension(
    host: ModuleType, head_dim: int, head_dim_v: int, tile: tuple[int, int]
) -> None:
    plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim_v)
    assert plan.backend == "sm90"
    assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize("dtype", ["kBFloat16", "kFloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_first_add_to_a_tile_of_a_dense_accumulator_stores(host: ModuleType, dtype: str, deterministic: bool) -> None:
    plan = plan_of(host, dtype=getattr(host.DType, dtype), deterministic=deterministic)
    assert plan.deterministic is deterministic
    assert plan.workspace.dq_mode == (host.DqMode.kOrdered if deterministic else host.DqMode.kAtomic)
    assert not plan.workspace.zero_accumulator
    assert plan.workspace.accumulator_bytes == 2 * 6 * 300 * 128 * 4
    counters = 8  # jobs taken, what is finished of 2 * 3 KV heads, padded to 4
    semaphores = 2 * 6 * 5 * 2  # 300 queries are 5 blocks of 64; 2 warpgroups
    assert plan.workspace.semaphore_bytes == (counters + semaphores) * 4


def test_packed_rows_are_added_into_zeros(host: ModuleType) -> None:
    plan = plan_of(host, varlen=True)
    assert plan.workspace.zero_accumulator
    assert plan.workspace.semaphore_bytes == 8 * 4


@pytest.mark.parametrize(
    ("heads_kv", "splits", "pairs"), [(32, 1, False), (4, 1, True), (2, 1, True), (1, 2, True)], ids=str
)
@pytest.mark.parametrize(("batch", "rows"), [(16, 1024), (2, 8192)])
def test_grouped_causal_heads_are_cut_into_a_job_or_two_for_each_multiprocessor(
    host: ModuleType, batch: int, rows: int, heads_kv: int, splits: int, pairs: bool
) -> None:
    sizes = {"batch": batch, "seqlen_q": rows, "seqlen_k": rows, "total_q": batch * rows, "total_k": batch * rows}
    plan = plan_of(host, heads=32, heads_kv=heads_kv, window_right=0, **sizes)
    assert plan.schedule.startswith("pairs") is pairs
    assert ("query heads in 2 parts" in plan.schedule) is (splits == 2)
    sums = splits * batch * heads_kv * rows * 2 * 128 * 4 if splits > 1 else 0
    assert plan.workspace.partial_bytes == sums
    ordered = plan_of(host, heads=32, heads_kv=heads_kv, window_right=0, deterministic=True, **sizes)
    assert not ordered.schedule.startswith("pairs")  # turns would wait for jobs taken later


@pytest.mark.parametrize(("varlen", "rows"), [(False, 2 * 6 * 384), (True, 6 * 896)])
def test_row_statistics_take_two_padded_rows_a_query(host: ModuleType, varlen: bool, rows: int) -> None:
    # Dense: 300 queries padded to 384. Packed: 600 rows and 128 a sequence, padded to 896.
    plan = plan_of(host, varlen=varlen)
    assert plan.workspace.delta_bytes == 2 * rows * 4


def test_windows_packed_and_grouped_heads_are_taken(host: ModuleType) -> None:
    plan = plan_of(host, varlen=True, window_left=7, window_right=0, has_seqused=True, heads=32, heads_kv=1)
    assert plan.backend == "sm90"
