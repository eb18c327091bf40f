"""Plans of the sm80 family: supported calls, tiles, schedules and workspace. The host half runs without a GPU."""

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
        ({"batch": 0}, "nothing to launch for an empty batch"),
        ({"seqlen_q": 1 << 31, "batch": 1, "total_q": 1 << 31}, "too large for one launch"),
    ],
)
def test_a_refusal_names_the_unsupported_property(host: ModuleType, changes: dict[str, Any], words: str) -> None:
    assert words in reason(host, **changes)


def test_float64_is_refused(host: ModuleType) -> None:
    assert "it takes float16, bfloat16 and float32, got float64" in reason(host, dtype=host.DType.kFloat64)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"cc_major": 7, "cc_minor": 5}, "it needs compute capability 8.0, the device has 7.5"),
        ({"smem_per_block": 64 * 1024}, "in 65536 bytes of shared memory per block"),
        ({"usable": False, "why_not": "the driver is old"}, "the driver is old"),
        ({"has_attention_sm80": False}, "this build holds no sm80 attention kernels"),
    ],
)
def test_an_unsupported_device_is_refused_with_the_reason(host: ModuleType, device: dict[str, Any], words: str) -> None:
    assert words in reason(host, device)


MASKED = {"has_block_mask": True, "list_block_m": 0, "list_block_n": 0, "backend": "sm80"}


@pytest.mark.parametrize(
    ("head_dims", "dtype", "large", "small"),
    [
        ((64, 64), "kBFloat16", (128, 128), (64, 128)),
        ((80, 64), "kFloat16", (64, 128), (64, 64)),
        ((160, 160), "kBFloat16", (64, 64), (32, 32)),
        ((256, 200), "kBFloat16", (64, 64), (32, 32)),
        ((64, 64), "kFloat32", (64, 128), (64, 64)),
        ((65, 128), "kFloat32", (64, 64), (32, 32)),
        ((192, 192), "kFloat32", (32, 32), None),
    ],
)
def test_a_block_mask_has_tiles_of_at_most_128_queries_and_keys(
    host: ModuleType,
    head_dims: tuple[int, int],
    dtype: str,
    large: tuple[int, int],
    small: tuple[int, int] | None,
) -> None:
    masked = {**MASKED, "head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": getattr(host.DType, dtype)}
    for device, tile in ((None, large), (CONSUMER, small)):
        if tile is None:
            with pytest.raises(ValueError, match="no tile with these features for head dimensions 192 and 192"):
                plan_of(host, device, **masked)
            continue
        plan = plan_of(host, device, **masked)
        assert (plan.backend, plan.block_m, plan.block_n) == ("sm80", *tile)
        assert "query loops of a block mask" in plan.schedule
        assert plan.splits == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"list_block_m": 64, "list_block_n": 128},
            "tiles of 64 queries and 128 keys, expected 128 queries and 128 keys",
        ),
        ({"dropout_p": 0.1}, "it takes no dropout with a block mask"),
        ({"has_bias": True}, "it takes no attn_bias with a block mask"),
        ({"has_score_mod": True, "softcap": 1.0}, "no softcap or ALiBi with a score_mod that is compiled at run time"),
        ({"head_dim": 257}, "no tile with these features for head dimensions 257 and 64"),
    ],
)
def test_a_block_mask_is_refused_with_the_reason(host: ModuleType, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_of(host, **{**MASKED, "head_dim": 64, "head_dim_v": 64, **changes})


@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0), (12, 1)])
def test_every_device_from_compute_capability_8_on_is_supported(host: ModuleType, cc: tuple[int, int]) -> None:
    assert plan_of(host, {"cc_major": cc[0], "cc_minor": cc[1]}).backend == "sm80"


@pytest.mark.parametrize(
    ("head_dims", "large", "small"),
    [
        ((8, 8), (128, 128), (64, 128)),
        ((33, 32), (128, 128), (64, 128)),
        ((64, 64), (128, 128), (64, 128)),
        ((72, 64), (64, 128), (64, 64)),
        ((96, 80), (64, 128), (64, 64)),
        ((64, 128), (64, 128), (64, 64)),
        ((160, 129), (128, 64), (32, 32)),
        ((192, 128), (64, 64), (32, 32)),
        ((256, 256), (64, 64), (32, 32)),
    ],
)
def test_the_tile_depends_on_the_larger_head_dimension_and_the_shared_memory(
    host: ModuleType, head_dims: tuple[int, int], large: tuple[int, int], small: tuple[int, int]
) -> None:
    for device, tile in ((None, large), (CONSUMER, small)):
        plan = plan_of(host, device, head_dim=head_dims[0], head_dim_v=head_dims[1])
        assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize(("head_dim", "tile"), [(160, (128, 64)), (192, (128, 64)), (256, (128, 64))])
def test_tiles_are_larger_with_the_shared_memory_of_an_h100(
    host: ModuleType, head_dim: int, tile: tuple[int, int]
) -> None:
    plan = plan_of(host, {"smem_per_block": 227 * 1024}, head_dim=head_dim, head_dim_v=head_dim)
    assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize(("head_dim", "tile"), [(64, (64, 64)), (128, (32, 32)), (256, (64, 64)), (512, (64, 64))])
def test_fp32_has_a_tile_for_little_shared_memory(host: ModuleType, head_dim: int, tile: tuple[int, int]) -> None:
    plan = plan_of(host, CONSUMER, dtype=host.DType.kFloat32, head_dim=head_dim, head_dim_v=head_dim)
    assert (plan.block_m, plan.block_n) == tile


# Each SM has scratch for dk and dv of 64 keys. Columns are rounded up to blocks of 256, or of 128 in fp32.
@pytest.mark.parametrize(
    ("head_dims", "device", "dtype", "tile", "floats"),
    [
        ((257, 128), None, "kBFloat16", (256, 64), 64 * (512 + 256)),
        ((128, 512), None, "kFloat16", (256, 64), 64 * (256 + 512)),
        ((1024, 1024), None, "kBFloat16", (256, 64), 64 * 2048),
        ((1024, 1000), CONSUMER, "kBFloat16", (128, 64), 64 * 2048),
        ((320, 320), None, "kFloat32", (64, 64), 64 * (384 + 384)),
    ],
)
def test_large_head_dimensions_keep_dk_and_dv_in_global_memory(
    host: ModuleType,
    head_dims: tuple[int, int],
    device: dict[str, Any] | None,
    dtype: str,
    tile: tuple[int, int],
    floats: int,
) -> None:
    changes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": getattr(host.DType, dtype)}
    plan = plan_of(host, device, batch=200, **changes)
    assert (plan.block_m, plan.block_n) == tile
    assert plan.workspace.partial_bytes == A100["sm_count"] * floats * 4
    assert plan.workspace.semaphore_bytes == 16  # work tiles taken
    few = plan_of(host, device, batch=1, heads=1, heads_kv=1, seqlen_q=64, seqlen_k=65, **changes)
    assert few.workspace.partial_bytes == 2 * floats * 4  # scratch for each key block, of which there are only two


# Dense: 2 * 6 heads, with rows padded to a multiple of 128. Packed: 6 heads, with 128 more rows per sequence.
@pytest.mark.parametrize(
    ("seqlen_q", "dense_rows", "packed_rows"),
    [(1, 2 * 6 * 128, 6 * 384), (64, 2 * 6 * 128, 6 * 384), (65, 2 * 6 * 128, 6 * 512), (300, 2 * 6 * 384, 6 * 896)],
)
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_the_workspace_has_the_lse_and_delta_of_each_padded_row(
    host: ModuleType, head_dim: int, seqlen_q: int, dense_rows: int, packed_rows: int
) -> None:
    for varlen, rows in ((False, dense_rows), (True, packed_rows)):
        workspace = plan_of(host, varlen=varlen, seqlen_q=seqlen_q, head_dim=head_dim).workspace
        assert workspace.delta_bytes == 2 * rows * 4
        after = [getattr(workspace, f"{region}_offset") for region in ("partial", "lengths")]
        assert all(offset == 0 or offset >= workspace.delta_offset + 2 * rows * 4 for offset in after)
        assert workspace.bytes >= workspace.delta_offset + 2 * rows * 4


@pytest.mark.parametrize("dtype", ["kBFloat16", "kFloat32"])
def test_one_query_row_of_one_head_has_an_lse_and_a_delta(host: ModuleType, dtype: str) -> None:
    sizes = {"batch": 1, "heads": 1, "heads_kv": 1, "seqlen_q": 1, "dtype": getattr(host.DType, dtype)}
    plan = plan_of(host, **sizes)
    assert plan.backend == "sm80"
    assert plan.workspace.delta_bytes == 2 * 128 * 4
    # The accumulator holds one row of head dimension 128. The LSE and delta follow it.
    assert plan.workspace.accumulator_bytes == 128 * 4
    assert plan.workspace.delta_offset >= plan.workspace.accumulator_offset + 128 * 4


# The device has 108 SMs, and each runs one CTA at a time. Tiles are 64 x 128.
@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, 4),  # 24 work tiles of 10 iterations
        ({"batch": 1, "heads": 1, "heads_kv": 1, "seqlen_q": 16384, "seqlen_k": 128}, 86),  # 256 iterations, 3 per CTA
        ({"batch": 1, "heads": 32, "heads_kv": 1, "seqlen_q": 2048, "seqlen_k": 2048}, 13),
        ({"batch": 1, "heads": 8, "heads_kv": 8, "seqlen_q": 8192, "seqlen_k": 512}, 3),
        ({"batch": 8, "heads": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096}, 1),
        ({"heads": 3, "seqlen_q": 16384, "seqlen_k": 128, "window_left": 64, "window_right": 0}, 1),
    ],
)
def test_ctas_share_key_blocks_if_there_are_few(host: ModuleType, changes: dict[str, Any], splits: int) -> None:
    plan = plan_of(host, **changes)
    assert plan.splits == splits
    problem = dense_problem(host, **changes)
    rows = problem.batch * problem.heads_kv * -(-problem.seqlen_k // 128) * 128
    assert plan.workspace.partial_bytes == (splits * rows * 256 * 4 if splits > 1 else 0)


# Two full waves of 108 key blocks, and ``left`` key blocks in an incomplete wave.
@pytest.mark.parametrize(("left", "splits"), [(0, 1), (10, 10), (64, 5), (100, 1)])
def test_ctas_share_the_key_blocks_of_an_incomplete_last_wave(host: ModuleType, left: int, splits: int) -> None:
    heads = 2 * 108 + left
    sizes = {"batch": 1, "heads": heads, "heads_kv": heads, "seqlen_q": 4096, "seqlen_k": 128}
    plan = plan_of(host, **sizes)
    assert plan.splits == splits
    assert plan.workspace.partial_bytes == (left * splits * 128 * 256 * 4 if splits > 1 else 0)
    assert ("queries of the last" in plan.schedule) == (splits > 1)
    # With a mask, short query loops run last, so nothing is split.
    masked = plan_of(host, window_left=64, window_right=0, **sizes)
    assert (masked.splits, masked.workspace.partial_bytes) == (1, 0)


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("dtype", ["kFloat16", "kBFloat16", "kFloat32"])
@pytest.mark.parametrize("features", [False, True])
def test_every_head_dimension_has_a_launch_that_the_device_allows(
    host: ModuleType, kib: int, dtype: str, features: bool
) -> None:
    """The shared memory per block is 99 KB on compute capability 8.6, 8.9 and 12.0, 163 KB on 8.0 and 8.7, and 227 KB
    on 9.0 and 10.0."""
    for wider in [*range(1, 530), 1024, 4096]:
        for head_dims in ((wider, wider), (wider, 64), (64, wider)):
            plan = plan_of(
                host,
                {"smem_per_block": kib * 1024},
                dtype=getattr(host.DType, dtype),
                head_dim=head_dims[0],
                head_dim_v=head_dims[1],
                has_alibi=features,
            )
            assert plan.backend == "sm80"
            shared_bytes, threads = host.sm80_launch(plan)
            assert shared_bytes <= kib * 1024
            assert threads * 255 <= 65536


def test_a_default_plan_adds_into_a_zeroed_accumulator(host: ModuleType) -> None:
    plan = plan_of(host)
    assert not plan.deterministic
    assert plan.workspace.has_accumulator
    assert plan.workspace.zero_accumulator
    assert plan.workspace.accumulator_bytes == 2 * 6 * 300 * 128 * 4
    assert plan.workspace.semaphore_bytes == 16  # work tiles taken


# 132 SMs and 50 MB of L2. Tiles are 128 x 128 for head dimension 64, and 64 x 128 for 128.
H100 = {"cc_major": 9, "sm_count": 132, "smem_per_block": 227 * 1024, "l2_bytes": 50 << 20}
SHORT = {"batch": 32, "heads": 16, "heads_kv": 16, "seqlen_q": 512, "seqlen_k": 512}


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"deterministic": True}, True),
        ({"window_right": 0}, True),
        ({"batch": 2, "heads": 264, "heads_kv": 132}, False),  # two query heads per KV head: 138 MB instead of 69 MB
        ({"batch": 25}, False),  # 400 heads are 3.03 waves
        ({"seqlen_q": 1024, "seqlen_k": 1024}, False),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64, "window_right": 0}, True),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64}, False),  # eight key blocks
        ({"seqlen_q": 640, "seqlen_k": 512, "window_right": 0}, False),  # the first queries see no key
        ({"head_dim": 160}, False),
        ({"has_seqused": True}, False),
        ({"has_bias": True}, False),
        ({"has_key_mask": True}, False),
        ({"has_alibi": True}, False),
        ({"softcap": 1.0}, False),
        ({"dropout_p": 0.5}, False),
        ({"varlen": True}, False),
    ],
)
def test_ctas_compute_whole_heads_if_heads_are_short_and_many(
    host: ModuleType, changes: dict[str, Any], taken: bool
) -> None:
    changes = {**SHORT, **changes}
    plan = plan_of(host, H100, **changes)
    assert (not plan.workspace.has_accumulator) == taken
    assert ("its key blocks in order" in plan.schedule) == taken
    assert (plan.workspace.accumulator_bytes == 0) == taken
    if taken:
        rows = -(-changes["seqlen_q"] // plan.block_m) * plan.block_m
        columns = changes.get("head_dim", 128)
        assert plan.workspace.partial_bytes == 132 * rows * columns * 4
        assert plan.workspace.semaphore_bytes == 16  # the counter of heads; no semaphores
        assert (plan.splits, plan.deterministic) == (1, changes.get("deterministic", False))


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"seqlen_q": 8000}, True),
        ({"heads_kv": 2, "head_dim_v": 200}, True),
        ({"seqlen_k": 640}, True),
        ({"seqlen_k": 641}, False),  # eleven key blocks
        ({"window_right": 0}, False),
        ({"deterministic": True}, False),
        ({"head_dim": 192, "head_dim_v": 192}, False),
        ({"has_seqused": True}, False),
        ({"has_bias": True}, False),
        ({"dropout_p": 0.5}, False),
        ({"varlen": True}, False),
    ],
)
def test_the_first_key_block_stores_dq_if_query_tiles_see_few(
    host: ModuleType, changes: dict[str, Any], taken: bool
) -> None:
    changes = {**SHORT, "head_dim": 256, "head_dim_v": 256, **changes}
    plan = plan_of(host, H100, **changes)
    assert plan.workspace.zero_accumulator != taken
    assert ("stored by the first key block" in plan.schedule) == taken
    if taken:  # the counter of work tiles, and a bit per tile of 128 queries, in words
        words = 32 * 16 * -(-changes["seqlen_q"] // (128 * 32))
        assert plan.workspace.semaphore_bytes == 16 + words * 4


def test_a_deterministic_plan_has_a_semaphore_per_query_block(host: ModuleType) -> None:
    plan = plan_of(host, deterministic=True)
    assert plan.deterministic
    assert plan.workspace.has_accumulator
    assert plan.workspace.semaphore_bytes == 16 + 2 * 6 * 5 * 4  # counter; 5 blocks of 64 queries; int32


# Scratch for the gradient of a (2, 6, 300, 500) bias with some dimensions broadcast; tile 64 x 128, 4 groups of keys,
# each shared by two warps. Two batches add to each of the 6 x 5 x 4 tiles, in the order of semaphores.
@pytest.mark.parametrize(
    ("broadcast", "deterministic", "zeroed", "stored"),
    [
        ((), False, 0, 0),
        ((), True, 0, 0),
        (("batch",), False, 6 * 5 * 4, 6 * 5 * 4 * 64 * 128),
        (("batch",), True, 0, 2 * 6 * 300 * 500),
        (("batch", "head"), False, 300 * 500, 0),
        (("row",), True, 2 * 6 * 2 * 500, 0),
        (("col",), False, 2 * 6 * 4 * 4 * 300, 0),
        (("batch", "head", "row", "col"), False, 2 * 6 * 2 * 500, 0),
    ],
)
def test_the_scratch_of_the_bias_gradient_depends_on_its_broadcast(
    host: ModuleType, broadcast: tuple[str, ...], deterministic: bool, zeroed: int, stored: int
) -> None:
    changes = {f"bias_broadcast_{name}": True for name in broadcast}
    plan = plan_of(host, {"sm_count": 1}, has_bias=True, need_dbias=True, deterministic=deterministic, **changes)
    turns = 2 * 6 * 5 * 4 if deterministic else 0
    assert plan.workspace.semaphore_bytes == 16 + turns + zeroed * 4
    assert plan.workspace.partial_bytes == stored * 4


@pytest.mark.parametrize(
    ("changes", "in_turn"),
    [
        ({}, True),
        ({"seqlen_q": 192}, False),  # three query tiles are too few for two batches
        ({"has_seqused": True}, False),
        ({"varlen": True, "total_q": 600, "total_k": 1000}, False),
        ({"head_dim": 160}, False),
        ({"has_key_mask": True}, False),
        ({"softcap": 1.0}, False),
        ({"dropout_p": 0.5}, False),
    ],
)
def test_few_heads_that_share_a_bias_add_to_its_gradient_in_order(
    host: ModuleType, changes: dict[str, Any], in_turn: bool
) -> None:
    plan = plan_of(host, {}, has_bias=True, need_dbias=True, bias_broadcast_batch=True, **changes)
    added = 6 * changes.get("seqlen_q", 300) * 500 * 4  # fp32 sums of all rows and columns, zeroed
    assert (plan.workspace.semaphore_bytes < added) == in_turn
