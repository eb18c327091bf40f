"""What the sm_80 family takes and asks for: its host half, on a GPU that need not be there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from kit.host import dense_problem, device_info, load_host

A100 = {"usable": True, "cc_major": 8, "cc_minor": 0, "sm_count": 108, "smem_per_block": 163 * 1024}
CONSUMER = {"cc_minor": 9, "smem_per_block": 99 * 1024}


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return load_host()


def plan_of(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> Any:
    gpu = device_info(host, **{**A100, "has_attention_sm80": True, **(changed or {})})
    return host.plan_attention(dense_problem(host, **changes), gpu)


def reason(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> str:
    plan = plan_of(host, changed, **changes)
    assert plan.backend == "reference"
    return str(dict(plan.refusals)["sm80"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 257}, "it holds no tile for head dimensions 257 and 128 of bfloat16"),
        ({"head_dim_v": 512}, "it holds no tile for head dimensions 128 and 512"),
        ({"batch": 0}, "nothing to launch for an empty batch"),
        ({"seqlen_q": 1 << 31, "batch": 1, "total_q": 1 << 31}, "too large for one launch"),
    ],
)
def test_each_refusal_says_what_it_does_not_take(host: ModuleType, changes: dict[str, Any], words: str) -> None:
    assert words in reason(host, **changes)


def test_refuses_double_precision(host: ModuleType) -> None:
    assert "it takes float16, bfloat16 and float32, got float64" in reason(host, dtype=host.DType.kFloat64)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"cc_major": 7, "cc_minor": 5}, "it needs compute capability 8.0, the device has 7.5"),
        ({"smem_per_block": 48 * 1024}, "in 49152 bytes of shared memory a block"),
        ({"usable": False, "why_not": "the driver is old"}, "the driver is old"),
        ({"has_attention_sm80": False}, "this build holds no sm80 attention kernels"),
    ],
)
def test_refuses_other_devices_with_the_reason(host: ModuleType, device: dict[str, Any], words: str) -> None:
    assert words in reason(host, device)


@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0), (12, 1)])
def test_takes_every_device_from_compute_capability_8_on(host: ModuleType, cc: tuple[int, int]) -> None:
    assert plan_of(host, {"cc_major": cc[0], "cc_minor": cc[1]}).backend == "sm80"


@pytest.mark.parametrize(
    ("head_dims", "large", "small"),
    [
        ((8, 8), (128, 128), (64, 128)),
        ((64, 64), (128, 128), (64, 128)),
        ((72, 64), (64, 128), (64, 64)),
        ((64, 128), (64, 128), (64, 64)),
        ((192, 128), (64, 64), (32, 32)),
        ((256, 256), (64, 64), (32, 32)),
    ],
)
def test_tile_follows_the_wider_head_dimension_and_the_shared_memory(
    host: ModuleType, head_dims: tuple[int, int], large: tuple[int, int], small: tuple[int, int]
) -> None:
    for device, tile in ((None, large), (CONSUMER, small)):
        plan = plan_of(host, device, head_dim=head_dims[0], head_dim_v=head_dims[1])
        assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize(
    "changes", [{"has_bias": True}, {"has_alibi": True}, {"dropout_p": 0.1}, {"softcap": 30.0}], ids=str
)
@pytest.mark.parametrize(("head_dim", "tile"), [(64, (64, 128)), (128, (64, 64)), (256, (64, 64))])
def test_features_have_tiles_with_registers_to_spare(
    host: ModuleType, head_dim: int, tile: tuple[int, int], changes: dict[str, Any]
) -> None:
    plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim, **changes)
    assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize(("head_dim", "takes"), [(64, True), (128, True), (256, False)])
def test_fp32_on_little_shared_memory(host: ModuleType, head_dim: int, takes: bool) -> None:
    plan = plan_of(host, CONSUMER, dtype=host.DType.kFloat32, head_dim=head_dim, head_dim_v=head_dim)
    assert (plan.backend == "sm80") == takes


def test_ordinary_plan_adds_into_one_zeroed_slot(host: ModuleType) -> None:
    plan = plan_of(host)
    assert not plan.deterministic
    assert plan.workspace.dq_mode == host.DqMode.kAtomic
    assert plan.workspace.zero_accumulator
    assert plan.workspace.accumulator_bytes == 2 * 6 * 300 * 128 * 4
    assert plan.workspace.semaphore_bytes == 0


def test_deterministic_plan_takes_turns_by_query_block(host: ModuleType) -> None:
    plan = plan_of(host, deterministic=True)
    assert plan.deterministic
    assert plan.workspace.dq_mode == host.DqMode.kOrdered
    assert plan.workspace.semaphore_bytes == 16 + 2 * 6 * 5 * 4  # jobs taken; 300 queries are 5 blocks of 64; int32


# Scratch for the gradient of a (2, 6, 300, 500) bias with some dimensions broadcast; tile 64 x 64, 4 groups of keys.
@pytest.mark.parametrize(
    ("broadcast", "deterministic", "zeroed", "stored"),
    [
        ((), False, 0, 0),
        ((), True, 0, 0),
        (("batch",), False, 6 * 300 * 500, 0),
        (("batch",), True, 0, 2 * 6 * 300 * 500),
        (("batch", "head"), False, 300 * 500, 0),
        (("row",), True, 2 * 6 * 500, 0),
        (("col",), False, 2 * 6 * 8 * 4 * 300, 0),
        (("batch", "head", "row", "col"), False, 2 * 6 * 500, 0),
    ],
)
def test_scratch_of_the_bias_gradient(
    host: ModuleType, broadcast: tuple[str, ...], deterministic: bool, zeroed: int, stored: int
) -> None:
    changes = {f"bias_broadcast_{name}": True for name in broadcast}
    plan = plan_of(host, has_bias=True, need_dbias=True, deterministic=deterministic, **changes)
    turns = 16 + 2 * 6 * 5 * 4 if deterministic else 0
    assert plan.workspace.semaphore_bytes == turns + zeroed * 4
    assert plan.workspace.partial_bytes == stored * 4
