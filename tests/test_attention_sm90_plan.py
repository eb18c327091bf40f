"""Plans of the sm90 family: supported calls, tiles, schedules and workspace. The host half runs without a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from kit.host import dense_problem, device_info, load_host

EDGES_OF_TILES = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256)  # of block masks
WHOLE_VECTORS = (8, 56, 72, 120, 136)
COUNTER_BYTES = 8 * 4  # work tiles taken, and finished adds of 2 * 3 KV heads, padded to 4 words
H100 = {"usable": True, "cc_major": 9, "cc_minor": 0, "sm_count": 132, "smem_per_block": 227 * 1024}


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return load_host()


def plan_of(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> Any:
    gpu = device_info(host, **{**H100, "has_attention_sm90": True, **(changed or {})})
    dtype = changes.get("dtype", host.DType.kBFloat16)
    given = {"aligned_16": True, "dq_aligned_16": True, "dtype": dtype, "dq_dtype": dtype}
    return host.plan_attention(dense_problem(host, **given | changes), gpu)


def given(host: ModuleType, changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` with enumerators instead of their names, and with dropout if a layout is given."""
    if (dtype := changes.get("bias_dtype")) is not None:
        changes = changes | {"bias_dtype": getattr(host.DType, dtype)}
    if (layout := changes.get("dropout_layout")) is None:
        return changes
    return changes | {"dropout_p": 0.1, "dropout_layout": getattr(host.DropoutLayout, layout)}


def square(batch: int, rows: int) -> dict[str, int]:
    """Sizes of a batch of sequences that have ``rows`` queries and ``rows`` keys."""
    return {"batch": batch, "seqlen_q": rows, "seqlen_k": rows, "total_q": batch * rows, "total_k": batch * rows}


def reason(host: ModuleType, changed: dict[str, Any] | None = None, **changes: Any) -> str:
    plan = plan_of(host, changed, **changes)
    assert plan.backend != "sm90"
    return str(dict(plan.refusals)["sm90"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"has_bias": True, "need_dbias": True, "softcap": 30.0},
            "it does not compute the gradient of attn_bias together with softcap",
        ),
        (
            {"has_bias": True, "need_dbias": True, "head_dim": 200},
            "it does not take the gradient of attn_bias at head dimensions above 192",
        ),
        ({"head_dim": 520}, "it has no tile with these features for head dimensions 520 and 128"),
        ({"head_dim_v": 513}, "it has no tile with these features for head dimensions 128 and 513"),
        ({"head_dim": 264, "has_bias": True}, "it takes no attn_bias at head dimensions above 256"),
        ({"head_dim_v": 257, "has_alibi": True}, "it takes no ALiBi at head dimensions above 256"),
        ({"head_dim": 512, "dropout_p": 0.1}, "it takes no dropout at head dimensions above 256"),
        ({"head_dim": 512, "has_key_mask": True}, "it takes no key_mask at head dimensions above 256"),
        ({"head_dim": 512, "aligned_16": False}, "multiples of 16 bytes"),
        ({"head_dim": 512, "total_k": 1 << 31, "varlen": True}, "too large for one launch"),
        ({"head_dim": 512, "seqlen_q": 1 << 31, "batch": 1, "total_q": 1 << 31}, "too large for one launch"),
        ({"aligned_16": False}, "multiples of 16 bytes"),
        ({"batch": 0}, "nothing to launch for an empty batch"),
        ({"seqlen_q": 1 << 31, "batch": 1, "total_q": 1 << 31}, "too large for one launch"),
    ],
)
def test_a_refusal_names_the_unsupported_property(host: ModuleType, changes: dict[str, Any], words: str) -> None:
    assert words in reason(host, **changes)


@pytest.mark.parametrize("dtype", ["kFloat32", "kFloat64"])
def test_other_dtypes_than_16_bit_ones_are_refused(host: ModuleType, dtype: str) -> None:
    assert "it takes float16 and bfloat16, got float" in reason(host, dtype=getattr(host.DType, dtype))


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"cc_major": 8}, "it needs compute capability 9.0, the device has 8.0"),
        ({"cc_major": 10}, "it needs compute capability 9.0, the device has 10.0"),
        ({"cc_major": 12, "cc_minor": 1}, "the device has 12.1"),
        ({"smem_per_block": 99 * 1024}, "the device has 101376"),
        ({"usable": False, "why_not": "the driver is old"}, "the driver is old"),
        ({"has_attention_sm90": False}, "this build holds no sm90 attention kernels"),
    ],
)
def test_an_unsupported_device_is_refused_with_the_reason(host: ModuleType, device: dict[str, Any], words: str) -> None:
    assert words in reason(host, device)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "tile"),
    [
        (8, 8, (128, 128)),
        (32, 24, (128, 128)),
        (64, 64, (128, 128)),
        (80, 96, (64, 128)),
        (72, 64, (64, 128)),
        (64, 72, (64, 128)),
        (128, 8, (64, 128)),
        (128, 128, (64, 128)),
        (192, 128, (64, 128)),
        (128, 160, (64, 128)),
        (256, 256, (64, 128)),
    ],
)
def test_the_tile_is_the_first_that_fits_both_head_dimensions(
    host: ModuleType, head_dim: int, head_dim_v: int, tile: tuple[int, int]
) -> None:
    plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim_v)
    assert plan.backend == "sm90"
    assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize(
    "feature",
    [
        {"dropout_layout": "kFlash", "softcap": 30.0},
        {"dropout_layout": "kFlash", "has_bias": True, "bias_has_rows": True},
        {"has_alibi": True, "has_bias": True},
        {"has_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "ctas"), [(64, 1), (128, 1), (192, 2), (256, 2)])
def test_combined_features_use_tiles_of_64_keys_per_cta(
    host: ModuleType, head_dim: int, ctas: int, feature: dict[str, Any]
) -> None:
    plan = plan_of(host, head_dim=head_dim, head_dim_v=min(head_dim, 128), **given(host, feature))
    assert plan.backend == "sm90"
    assert (plan.block_m, plan.block_n) == (64, 64 * ctas)
    assert ("by 2 CTAs" in plan.schedule) is (ctas == 2)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (160, 160), (256, 256)])
@pytest.mark.parametrize("scores", [{}, {"softcap": 30.0}, {"has_alibi": True}, {"has_score_mod": True}], ids=str)
def test_block_masks_above_head_dimension_128_use_clusters(
    host: ModuleType, head_dim: int, head_dim_v: int, scores: dict[str, Any]
) -> None:
    masked = {"head_dim": head_dim, "head_dim_v": head_dim_v, "has_block_mask": True}
    plan = plan_of(host, **masked, **scores, backend="sm90")
    assert (plan.backend, plan.block_m, plan.block_n) == ("sm90", 64, 128)
    assert "by 2 CTAs" in plan.schedule


@pytest.mark.parametrize("head_dim_v", [*EDGES_OF_TILES, *WHOLE_VECTORS, 257])
@pytest.mark.parametrize("head_dim", [*EDGES_OF_TILES, *WHOLE_VECTORS, 257])
def test_block_masks_have_a_tile_up_to_head_dimension_256_except_for_cut_vectors_up_to_128(
    host: ModuleType, head_dim: int, head_dim_v: int
) -> None:
    larger = max(head_dim, head_dim_v)
    queries = 128 if larger <= 64 else 64
    masked = {"has_block_mask": True, "list_block_m": queries, "list_block_n": 128}
    if larger > 256:
        refusal = "it takes no block mask at head dimensions above 256"
    elif larger <= 128 and (head_dim % 8 or head_dim_v % 8):
        refusal = "needs head dimensions that are multiples of 8"
    else:
        plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim_v, **masked)
        assert (plan.backend, plan.block_m, plan.block_n) == ("sm90", queries, 128)
        return
    with pytest.raises(ValueError, match=refusal):
        plan_of(host, head_dim=head_dim, head_dim_v=head_dim_v, **masked)


@pytest.mark.parametrize("layout", ["kFlash", "kEfficient32", "kEfficient64"])
@pytest.mark.parametrize(
    ("head_dim", "others", "tile"),
    [
        (32, {}, (128, 128)),
        (40, {"has_alibi": True}, (128, 128)),
        (64, {"deterministic": True}, (128, 128)),
        (80, {"varlen": True}, (64, 128)),
        (128, {"has_bias": True, "bias_of_keys": True}, (64, 128)),
        (128, {"has_bias": True, "bias_of_keys": True, "need_dbias": True}, (64, 64)),
        (128, {"softcap": 30.0}, (64, 64)),
    ],
)
def test_dropout_alone_with_alibi_or_a_bias_of_keys_uses_128_keys_per_cta(
    host: ModuleType, head_dim: int, layout: str, others: dict[str, Any], tile: tuple[int, int]
) -> None:
    drops = given(host, {"dropout_layout": layout})
    plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim, **drops, **others)
    assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize(("layout", "keys"), [("kFlash", 64), ("kEfficient32", 128), ("kEfficient64", 128)])
def test_a_bias_loaded_by_tma_with_memory_efficient_dropout_uses_128_keys_per_cta(
    host: ModuleType, layout: str, keys: int
) -> None:
    drops = given(host, {"dropout_layout": layout})
    plan = plan_of(host, head_dim=128, head_dim_v=128, has_bias=True, bias_has_rows=True, need_dbias=True, **drops)
    assert plan.block_n == keys


@pytest.mark.parametrize(
    ("layout", "seqlen_k", "taken"),
    [("kEfficient32", 2**16, True), ("kEfficient32", 2**16 + 1, False), ("kEfficient64", 2**16 + 1, True)],
)
def test_dropout_numbers_that_wrap_around_within_a_head_are_refused(
    host: ModuleType, layout: str, seqlen_k: int, taken: bool
) -> None:
    drops = given(host, {"dropout_layout": layout})
    plan = plan_of(host, {"has_attention_sm80": True}, seqlen_q=2**16, seqlen_k=seqlen_k, **drops)
    assert (plan.backend == "sm90") is taken
    assert ("wraps around" in dict(plan.refusals).get("sm90", "")) is not taken


CHANGED_SCORES: list[dict[str, Any]] = [
    {"softcap": 30.0},
    {"has_alibi": True},
    {"softcap": 30.0, "has_alibi": True},
]
CHANGED_BY_KEY = [
    *CHANGED_SCORES,
    {"has_bias": True, "bias_of_keys": True},
    {"softcap": 30.0, "has_bias": True, "bias_of_keys": True},
]


@pytest.mark.parametrize("feature", CHANGED_BY_KEY, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "others", "tile"),
    [
        (1, {}, (128, 128)),
        (64, {"varlen": True}, (128, 128)),
        (80, {"deterministic": True}, (64, 128)),
        (128, {"has_sink": True, "has_seqused": True}, (64, 128)),
        (192, {}, (64, 128)),  # two CTAs, 64 keys each
    ],
    ids=str,
)
def test_softcap_alibi_and_a_bias_of_keys_use_128_keys_per_cta(
    host: ModuleType, head_dim: int, others: dict[str, Any], tile: tuple[int, int], feature: dict[str, Any]
) -> None:
    plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim, **feature, **others)
    assert plan.backend == "sm90"
    assert (plan.block_m, plan.block_n) == tile


SHARED_FLOAT32_BIAS = {
    "head_dim": 64,
    "has_bias": True,
    "need_dbias": True,
    "bias_dtype": "kFloat32",
    "bias_broadcast_batch": True,
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_dim": 128, "softcap": 30.0}, ""),
        ({"head_dim": 64, "has_alibi": True}, ""),
        ({"head_dim": 128, "dropout_layout": "kFlash"}, ""),
        ({"head_dim": 192, "dropout_layout": "kFlash"}, ""),
        ({"head_dim": 64, "has_sink": True}, ""),
        ({"head_dim": 192, "has_bias": True, "need_dbias": True}, ""),
        ({"head_dim": 128, "has_bias": True}, "with attn_bias at head dimensions up to 128"),
        ({"head_dim": 128, "has_bias": True, "need_dbias": True, "bias_dtype": "kFloat32"}, ""),
        ({"head_dim": 128, "has_bias": True, "bias_dtype": "kFloat32"}, "with attn_bias at head dimensions up to 128"),
        (SHARED_FLOAT32_BIAS, "with attn_bias at head dimensions up to 128"),
        ({"head_dim": 32, "has_bias": True, "need_dbias": True, "bias_has_rows": True}, ""),
        ({"head_dim": 128, "has_bias": True, "bias_has_rows": True, "softcap": 30.0}, "with attn_bias at head"),
        ({"head_dim": 64, "has_bias": True, "bias_has_rows": True, "dropout_layout": "kEfficient64"}, ""),
        ({"head_dim": 64, "has_bias": True, "bias_has_rows": True, "dropout_layout": "kFlash"}, "with attn_bias at"),
        ({"head_dim": 192, "has_bias": True, "bias_has_rows": True, "dropout_layout": "kEfficient64"}, "attn_bias and"),
        ({"head_dim": 32, "dropout_layout": "kEfficient32"}, ""),
        ({"head_dim": 96, "dropout_layout": "kFlash", "softcap": 30.0}, "with softcap and dropout"),
        ({"head_dim": 128, "dropout_layout": "kFlash", "softcap": 30.0}, "with softcap and dropout"),
        ({"head_dim": 128, "dropout_layout": "kEfficient64", "softcap": 30.0}, "with softcap and dropout"),
        ({"head_dim": 192, "dropout_layout": "kEfficient64"}, ""),
        ({"head_dim": 256, "dropout_layout": "kEfficient32", "softcap": 30.0}, ""),
    ],
    ids=str,
)
def test_the_faster_family_is_chosen(host: ModuleType, changes: dict[str, Any], why: str) -> None:
    changes = given(host, changes) | {"head_dim_v": changes["head_dim"]}
    plan = plan_of(host, {"has_attention_sm80": True}, **changes)
    assert plan.backend == ("sm80" if why else "sm90")
    assert why in dict(plan.refusals).get("sm90", "")
    assert "sm80" in dict(plan.refusals) or why
    # Without the sm80 family, or if a caller forces sm90, the sm90 family runs all calls that it supports.
    assert plan_of(host, **changes).backend == "sm90"
    assert "sm90" not in dict(plan_of(host, **changes).refusals)
    assert plan_of(host, {"has_attention_sm80": True}, backend="sm90", **changes).backend == "sm90"


@pytest.mark.parametrize(
    ("broadcast", "deterministic", "zeroed", "partial"),
    [
        ({}, False, 0, 0),  # dbias itself is written
        ({"bias_broadcast_head": True}, False, 2 * 300 * 500, 0),  # heads add to one plane
        ({"bias_broadcast_head": True}, True, 0, 2 * 6 * 300 * 500),  # one plane per head, summed in order
        ({"bias_broadcast_row": True}, False, 2 * 6 * 500, 0),
        ({"bias_broadcast_col": True}, False, 2 * 6 * 32 * 300, 0),  # a slot per 16 of 512 keys
    ],
)
def test_the_scratch_of_a_bias_gradient_depends_on_its_broadcast(
    host: ModuleType, broadcast: dict[str, bool], deterministic: bool, zeroed: int, partial: int
) -> None:
    plan = plan_of(host, has_bias=True, need_dbias=True, deterministic=deterministic, **broadcast)
    semaphores = 2 * 6 * 5 * 4
    assert plan.workspace.semaphore_bytes == COUNTER_BYTES + semaphores + 4 * zeroed
    assert plan.workspace.partial_bytes == 4 * partial


@pytest.mark.parametrize(
    ("head_dim", "changes", "tile"),
    [
        (128, {}, (64, 128)),
        (96, {"bias_broadcast_batch": True}, (64, 128)),
        (64, {"bias_broadcast_head": True, "need_dbias": True}, (128, 128)),
        (1, {"need_dbias": True, "deterministic": True}, (128, 128)),
        (192, {"need_dbias": True}, (64, 128)),
        (128, {"bias_has_rows": False}, (64, 64)),  # for example fp32, or one row for all queries
        (128, {"varlen": True}, (64, 64)),
        (128, {"has_seqused": True}, (64, 64)),
        (128, {"softcap": 30.0}, (64, 64)),
        (128, {"has_alibi": True}, (64, 64)),
        (128, {"bias_has_rows": False, "bias_of_keys": True, "need_dbias": True}, (64, 64)),
        (128, {"batch": 65, "bias_broadcast_batch": True, "need_dbias": True}, (64, 128)),
    ],
    ids=str,
)
def test_a_bias_alone_that_tma_can_load_uses_128_keys_per_cta(
    host: ModuleType, head_dim: int, changes: dict[str, Any], tile: tuple[int, int]
) -> None:
    bias = {"has_bias": True, "bias_has_rows": True} | changes
    plan = plan_of(host, head_dim=head_dim, head_dim_v=head_dim, **bias)
    assert (plan.block_m, plan.block_n) == tile


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("seqlen_k", "broadcast", "planes"),
    [
        (504, {}, 0),  # dbias itself is written
        (500, {}, 2 * 6),  # its rows do not begin on 16 bytes
        (504, {"bias_broadcast_batch": True}, 6),
        (504, {"bias_broadcast_head": True}, 2),
        (504, {"bias_broadcast_batch": True, "bias_broadcast_head": True}, 1),
    ],
    ids=str,
)
def test_a_bias_gradient_in_tiles_needs_one_fp32_plane_for_all_that_share_it_or_none(
    host: ModuleType, seqlen_k: int, broadcast: dict[str, bool], planes: int, deterministic: bool
) -> None:
    bias = {"has_bias": True, "bias_has_rows": True, "need_dbias": True} | broadcast
    plan = plan_of(host, seqlen_k=seqlen_k, deterministic=deterministic, **bias)
    without = plan_of(host, seqlen_k=seqlen_k, deterministic=deterministic)
    gained = plan.workspace.semaphore_bytes - without.workspace.semaphore_bytes
    semaphores = planes * 5 * 32 if deterministic and broadcast else 0  # tiles of 64 queries, groups of 16 keys
    assert gained == 4 * (planes * 304 * 512 + semaphores)  # blocks of 8 queries and 16 keys
    assert plan.workspace.partial_bytes == without.workspace.partial_bytes


@pytest.mark.parametrize("dtype", ["kBFloat16", "kFloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_first_add_to_a_tile_of_a_dense_accumulator_stores(
    host: ModuleType, dtype: str, deterministic: bool
) -> None:
    plan = plan_of(host, dtype=getattr(host.DType, dtype), deterministic=deterministic)
    assert plan.deterministic is deterministic
    assert not plan.workspace.zero_accumulator
    assert plan.workspace.accumulator_bytes == 2 * 6 * 300 * 128 * 4
    semaphores = 2 * 6 * 5  # 300 queries are 5 blocks of 64
    assert plan.workspace.semaphore_bytes == COUNTER_BYTES + semaphores * 4


def test_the_accumulator_of_packed_rows_is_zeroed(host: ModuleType) -> None:
    plan = plan_of(host, varlen=True)
    assert plan.workspace.zero_accumulator
    assert plan.workspace.semaphore_bytes == 8 * 4


@pytest.mark.parametrize(
    ("heads_kv", "splits", "pairs"), [(32, 1, False), (4, 1, True), (2, 1, True), (1, 2, True)], ids=str
)
@pytest.mark.parametrize(("batch", "rows"), [(16, 1024), (2, 8192)])
def test_causal_heads_of_a_group_form_mirrored_pairs_or_are_split(
    host: ModuleType, batch: int, rows: int, heads_kv: int, splits: int, pairs: bool
) -> None:
    sizes = square(batch, rows)
    plan = plan_of(host, heads=32, heads_kv=heads_kv, window_right=0, **sizes)
    assert (plan.sm90.mirrored_pairs, plan.sm90.gqa_splits) == (pairs, splits)
    assert ("query heads split over 2 CTAs" in plan.schedule) is (splits == 2)
    sums = splits * batch * heads_kv * rows * 2 * 128 * 4 if splits > 1 else 0
    assert plan.workspace.partial_bytes == sums
    ordered = plan_of(host, heads=32, heads_kv=heads_kv, window_right=0, deterministic=True, **sizes)
    assert ordered.schedule.startswith("mirrored pairs of key blocks, static scheduler in waves") is pairs


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads_kv", "rows", "batch", "pairs"),
    [
        # eight waves of key blocks, and two
        (128, 8, 1024, 16, False),
        (128, 8, 1024, 4, True),
        (128, 8, 512, 32, False),
        (128, 8, 4096, 4, True),
        (128, 4, 512, 64, False),
        (128, 4, 1024, 16, True),
        (96, 8, 1024, 16, False),
        (96, 8, 2048, 8, True),
        (64, 8, 2048, 8, False),
        (64, 8, 1024, 4, False),
        (64, 8, 4096, 4, True),
        (64, 4, 1024, 16, True),
    ],
    ids=str,
)
def test_key_blocks_of_short_causal_query_loops_in_many_waves_form_no_pairs(
    host: ModuleType, head_dim: int, heads_kv: int, rows: int, batch: int, pairs: bool, deterministic: bool
) -> None:
    sizes = square(batch, rows)
    sizes |= {"heads": 32, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim, "window_right": 0}
    plan = plan_of(host, **sizes, deterministic=deterministic)
    assert plan.sm90.mirrored_pairs is pairs
    assert (plan.sm90.dispatch == host.Dispatch.kStatic) is (pairs and deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_plans_of_large_head_dimensions_have_a_semaphore_per_cta_and_query_block(
    host: ModuleType, deterministic: bool
) -> None:
    plan = plan_of(host, deterministic=deterministic, head_dim=192)
    assert not plan.workspace.zero_accumulator
    # 300 queries are 5 blocks of 64; 2 CTAs; int32.
    assert plan.workspace.semaphore_bytes == COUNTER_BYTES + 2 * 6 * 5 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "halves"),
    [
        ({}, True),
        ({"deterministic": True}, True),
        ({"window_right": 0}, True),  # a key block sees half of the queries
        ({"window_right": 0, "seqlen_q": 2046}, False),
        ({"window_left": 1000, "window_right": 24}, True),
        ({"window_left": 255, "window_right": 0}, False),
        ({"head_dim": 64}, False),
    ],
    ids=str,
)
def test_warpgroups_split_the_queries_of_long_work_tiles(
    host: ModuleType, changes: dict[str, Any], halves: bool
) -> None:
    sizes = {"head_dim": 32, "head_dim_v": 32, "seqlen_q": 2048, "seqlen_k": 2048, "total_q": 4096, "total_k": 4096}
    plan = plan_of(host, **(sizes | changes))
    assert ("half of the queries per warpgroup" in plan.schedule) is halves


@pytest.mark.parametrize(
    ("changes", "default", "in_order"),
    [
        ({"rows": 1024}, True, True),
        ({"rows": 1025}, False, True),
        ({"rows": 2049}, False, False),
        ({"rows": 2049, "window_right": 0}, True, True),
        ({"rows": 2050, "window_right": 0}, False, True),
        ({"rows": 4098, "window_right": 0}, False, False),
        ({"rows": 16384, "window_left": 4096, "window_right": 0}, True, True),  # a narrow window
        ({"rows": 8192, "window_left": 4096, "window_right": 0}, False, False),
        ({"rows": 16384, "window_left": 4096, "window_right": 0, "heads_kv": 2}, True, True),
        ({"rows": 512, "heads_kv": 2}, True, True),
        ({"rows": 1365, "heads_kv": 2}, True, True),  # groups of 3 heads
        ({"rows": 1366, "heads_kv": 2}, False, False),
        ({"rows": 2731, "heads_kv": 2, "window_right": 0}, True, True),
        ({"rows": 2732, "heads_kv": 2, "window_right": 0}, False, False),
        ({"rows": 512, "head_dim": 96, "head_dim_v": 96}, False, False),
        ({"rows": 512, "head_dim": 104, "head_dim_v": 72}, True, True),
        ({"rows": 512, "has_seqused": True}, False, False),
        ({"rows": 512, "varlen": True}, False, False),
        ({"rows": 512, "softcap": 5.0}, False, False),
        ({"rows": 512, "head_dim": 64, "head_dim_v": 64}, True, True),
        ({"rows": 1025, "head_dim": 64, "head_dim_v": 64}, False, True),
        ({"rows": 2049, "head_dim": 64, "head_dim_v": 64}, False, False),
        ({"rows": 1025, "head_dim": 64, "head_dim_v": 40, "window_right": 0}, True, True),
        ({"rows": 2050, "head_dim": 40, "head_dim_v": 64, "window_right": 0}, False, True),
        ({"rows": 16384, "head_dim": 64, "head_dim_v": 64, "window_left": 2048, "window_right": 0}, True, True),
        ({"rows": 16384, "head_dim": 64, "head_dim_v": 64, "window_left": 2048, "window_right": 1}, False, False),
        # groups of 3 heads
        ({"rows": 1365, "head_dim": 64, "head_dim_v": 64, "heads_kv": 2}, True, True),
        ({"rows": 1366, "head_dim": 64, "head_dim_v": 64, "heads_kv": 2}, False, False),
        ({"rows": 2730, "head_dim": 64, "head_dim_v": 64, "heads_kv": 2, "window_right": 0}, True, True),
        (
            {"rows": 16384, "head_dim": 64, "head_dim_v": 64, "heads_kv": 2, "window_left": 768, "window_right": 0},
            True,
            True,
        ),
        (
            {"rows": 16384, "head_dim": 64, "head_dim_v": 64, "heads_kv": 2, "window_left": 769, "window_right": 0},
            False,
            False,
        ),
        ({"rows": 512, "head_dim": 32, "head_dim_v": 32}, False, False),
    ],
    ids=str,
)
def test_the_last_add_writes_dq_in_short_query_loops_and_narrow_windows(
    host: ModuleType, changes: dict[str, Any], default: bool, in_order: bool
) -> None:
    rows = changes["rows"]
    sizes = {"seqlen_q": rows, "seqlen_k": rows, "total_q": 2 * rows, "total_k": 2 * rows, "heads_kv": 6}
    sizes |= {"head_dim": 128, "head_dim_v": 128, "window_left": -1, "window_right": -1}
    sizes |= {name: value for name, value in changes.items() if name != "rows"}
    for deterministic, writes in ((False, default), (True, in_order)):
        plan = plan_of(host, **sizes, deterministic=deterministic)
        assert plan.sm90.last_add_writes_dq is writes
        order = "kOrdered" if deterministic else "kFirstAndLast" if writes else "kUnordered"
        assert plan.sm90.dq_order == getattr(host.DqOrder, order)


@pytest.mark.parametrize(
    ("changes", "default", "in_order"),
    [
        ({"block_mask_queries_seen": 1088}, True, True),  # causal, 2048 queries
        ({"block_mask_queries_seen": 1216}, True, True),
        ({"block_mask_queries_seen": 1217}, False, True),
        ({"block_mask_queries_seen": 2240}, False, True),
        ({"block_mask_queries_seen": 2241}, False, False),
        ({"block_mask_queries_seen": 1280, "head_dim": 64, "head_dim_v": 64, "list_block_m": 128}, True, True),
        ({"block_mask_queries_seen": 1281, "head_dim": 32, "head_dim_v": 32, "list_block_m": 128}, False, True),
        ({"block_mask_queries_seen": 1088, "batch": 1, "seqlen_k": 22401}, True, True),  # 1056 lists, eight waves
        ({"block_mask_queries_seen": 1088, "batch": 1, "seqlen_k": 22400}, False, True),  # 1050 lists
        # groups of 3 heads
        ({"block_mask_queries_seen": 704, "heads_kv": 2, "seqlen_k": 11265}, True, True),  # 528 lists, four waves
        ({"block_mask_queries_seen": 705, "heads_kv": 2, "seqlen_k": 11265}, False, True),
        ({"block_mask_queries_seen": 704, "heads_kv": 2, "seqlen_k": 11136}, False, True),  # 522 lists
        ({"block_mask_queries_seen": 1557, "heads_kv": 2}, False, True),
        ({"block_mask_queries_seen": 1558, "heads_kv": 2}, False, False),
        ({"block_mask_queries_seen": 1557, "heads_kv": 2, "seqlen_q": 3456}, False, True),  # 0.451 of the queries
        # groups of 4 heads: 0.452 of the queries, and 0.442 if the last query block counts as a whole one
        ({"block_mask_queries_seen": 1216, "heads": 8, "heads_kv": 2, "seqlen_q": 2688}, True, True),
        ({"block_mask_queries_seen": 1216, "heads": 8, "heads_kv": 2, "seqlen_q": 2689}, False, True),
        ({"block_mask_queries_seen": 1152, "heads": 8, "heads_kv": 2, "seqlen_q": 2560}, True, True),  # 0.45 of them
        ({"block_mask_queries_seen": 1088, "block_mask_covers": False}, False, False),
        ({"block_mask_queries_seen": 1088, "softcap": 30.0}, False, False),
        ({"block_mask_queries_seen": 1088, "has_score_mod": True}, False, False),
        ({"block_mask_queries_seen": 1088, "head_dim": 192, "head_dim_v": 128}, False, False),
    ],
    ids=str,
)
def test_the_last_add_writes_dq_in_short_query_loops_of_a_block_mask(
    host: ModuleType, changes: dict[str, Any], default: bool, in_order: bool
) -> None:
    sizes = {"batch": 3, "seqlen_q": 8192, "seqlen_k": 8192, "total_q": 24576, "total_k": 24576, "heads_kv": 6}
    sizes |= {"head_dim": 128, "head_dim_v": 128, "window_left": -1, "window_right": -1}
    masked = {"has_block_mask": True, "block_mask_covers": True, "list_block_m": 64, "list_block_n": 128}
    for deterministic, writes in ((False, default), (True, in_order)):
        plan = plan_of(host, **sizes | masked | changes, deterministic=deterministic)
        assert (plan.backend, plan.sm90.last_add_writes_dq) == ("sm90", writes)
        order = "kOrdered" if deterministic else "kFirstAndLast" if writes else "kUnordered"
        assert plan.sm90.dq_order == getattr(host.DqOrder, order)
        if changes.get("heads_kv", 6) == 6:  # of grouped heads: test_flex_kernel_lists.py
            assert plan.sm90.reversed == (deterministic or writes)


@pytest.mark.parametrize(
    ("batch", "heads", "group"), [(2, (8, 2), 4), (1, (16, 8), 4), (1, (21, 7), 1), (1, (6, 2), 2)]
)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_lists_of_grouped_heads_are_reversed_in_groups_of_four_heads_if_their_number_allows_it(
    host: ModuleType, head_dim: int, batch: int, heads: tuple[int, int], group: int
) -> None:
    sizes = square(batch, 8192) | {"heads": heads[0], "heads_kv": heads[1], "window_left": -1, "window_right": -1}
    masked = {"has_block_mask": True, "block_mask_covers": True, "block_mask_queries_seen": 1024}
    plan = plan_of(host, **sizes | masked, head_dim=head_dim, head_dim_v=head_dim, deterministic=True)
    assert (plan.backend, plan.sm90.reversed, plan.sm90.heads_per_group) == ("sm90", True, group)


@pytest.mark.parametrize("window", [(-1, 0), (1023, 0)])
def test_key_blocks_of_grouped_heads_without_a_block_mask_are_not_reversed(
    host: ModuleType, window: tuple[int, int]
) -> None:
    sizes = square(2, 8192) | {"heads": 32, "heads_kv": 8, "window_left": window[0], "window_right": window[1]}
    plan = plan_of(host, **sizes, head_dim=128, head_dim_v=128, deterministic=True)
    assert (plan.backend, plan.sm90.reversed) == ("sm90", False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dims", "rows", "window", "tile"),
    [
        ((80, 80), 1024, (-1, 0), 128),
        ((72, 64), 1025, (-1, 0), 128),
        ((64, 96), 100, (-1, 5), 128),
        ((80, 80), 1026, (-1, 0), 80),
        ((96, 88), 1026, (-1, 0), 96),
        ((96, 96), 512, (-1, -1), 96),  # work tiles of one length
        ((80, 80), 1024, (127, 0), 80),
        ((64, 64), 512, (-1, 0), 64),
        ((128, 96), 512, (-1, 0), 128),
        ((136, 96), 512, (-1, 0), 192),
    ],
)
def test_short_causal_work_tiles_of_80_and_96_columns_use_the_tile_of_128(
    host: ModuleType, head_dims: tuple[int, int], rows: int, window: tuple[int, int], tile: int, deterministic: bool
) -> None:
    sizes = {"seqlen_q": rows, "seqlen_k": rows, "total_q": 2 * rows, "total_k": 2 * rows}
    sizes |= {"window_left": window[0], "window_right": window[1], "deterministic": deterministic, "heads_kv": 6}

    def config_of(head_dim: int, head_dim_v: int, **changes: Any) -> int:
        return int(plan_of(host, head_dim=head_dim, head_dim_v=head_dim_v, **(sizes | changes)).config)

    own = config_of(tile, min(tile, 128), window_left=-1, window_right=-1)
    assert config_of(*head_dims) == own
    # Two query heads per KV head make work tiles with twice the iterations.
    if rows == 1024 and tile == 128:
        assert config_of(*head_dims, heads_kv=3) != own


@pytest.mark.parametrize(
    ("changes", "staggered"),
    [
        ({}, True),
        ({"head_dim": 200, "head_dim_v": 256}, True),
        ({"seqlen_q": 16384, "total_q": 2 * 16384}, True),
        ({"head_dim": 192, "head_dim_v": 192}, False),
        ({"head_dim": 128, "head_dim_v": 128}, False),
        ({"window_right": 0}, False),
        ({"heads_kv": 4}, False),
        ({"deterministic": True}, True),
        ({"seqlen_q": 900, "total_q": 1800}, True),
        ({"seqlen_q": 900, "total_q": 1800, "deterministic": True}, False),  # fewer query blocks than key blocks
        ({"has_seqused": True}, False),
        ({"varlen": True}, False),
        ({"softcap": 5.0}, False),
        ({"seqlen_q": 0, "total_q": 0}, False),
    ],
    ids=str,
)
def test_work_tiles_of_full_masks_with_head_dimension_256_have_a_staggered_start(
    host: ModuleType, changes: dict[str, Any], staggered: bool
) -> None:
    sizes = square(2, 2048) | {"heads": 8, "heads_kv": 8, "head_dim": 256, "head_dim_v": 256}
    plan = plan_of(host, **(sizes | changes))
    assert (plan.sm90.query_blocks_apart > 0) is staggered
    assert ("staggered start" in plan.schedule) is staggered


@pytest.mark.parametrize(
    ("changes", "ctas"),
    [
        ({}, 24),  # 2 / 11 of 132
        ({"head_dim": 256, "head_dim_v": 256, "window_right": 0}, 12),
        ({"head_dim": 256, "head_dim_v": 256}, 0),  # CTAs that start late would make one more wave
        ({"batch": 1, "total_q": 8192, "total_k": 8192}, 24),  # exactly 32 MB of out and dout
        ({"batch": 1, "seqlen_q": 8191, "total_q": 8191}, 0),
        ({"heads_kv": 4}, 0),
        ({"varlen": True}, 0),
        ({"head_dim_v": 124}, 0),
        ({"seqlen_k": 0, "total_k": 0}, 0),
    ],
    ids=str,
)
def test_large_calls_overlap_the_preprocess(host: ModuleType, changes: dict[str, Any], ctas: int) -> None:
    sizes = square(2, 8192) | {"heads": 8, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
    assert plan_of(host, **(sizes | changes)).sm90.preprocess_ctas == ctas


@hypothesis.given(
    rows=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    batch=st.integers(1, 8),
    heads=st.sampled_from([(1, 1), (7, 7), (16, 16), (16, 4), (32, 2), (6, 2), (132, 132)]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 192, 256]),
    windows=st.sampled_from([(-1, -1), (-1, 0), (255, 0), (100, 100), (5, -1)]),
    deterministic=st.booleans(),
    layout=st.sampled_from(["dense", "packed", "block mask", "sparse block mask"]),
)
def test_every_schedule_covers_its_work_and_groups_whole_heads(
    rows: tuple[int, int],
    batch: int,
    heads: tuple[int, int],
    head_dim: int,
    windows: tuple[int, int],
    deterministic: bool,
    layout: str,
) -> None:
    host = load_host()
    varlen = layout == "packed"
    sizes = {"batch": batch, "seqlen_q": rows[0], "seqlen_k": rows[1], "varlen": varlen}
    sizes |= {"total_q": batch * rows[0], "total_k": batch * rows[1], "deterministic": deterministic}
    sizes |= {"heads": heads[0], "heads_kv": heads[1], "head_dim": head_dim, "head_dim_v": head_dim}
    has_block_mask = layout.endswith("block mask")
    if has_block_mask:
        windows = (-1, -1)
        seen = rows[0] // (4 if layout.startswith("sparse") else 2)
        sizes |= {"has_block_mask": True, "block_mask_covers": True, "block_mask_queries_seen": seen}
        sizes |= {"list_block_m": 128 if head_dim <= 64 else 64, "list_block_n": 128}
    plan = plan_of(host, **sizes, window_left=windows[0], window_right=windows[1])
    schedule = plan.sm90
    key_blocks = -(-rows[1] // plan.block_n)
    assert (schedule.key_blocks, schedule.query_blocks) == (key_blocks, -(-rows[0] // plan.block_m))
    assert schedule.tiles_per_head == (-(-key_blocks // 2) if schedule.mirrored_pairs else key_blocks)
    heads_kv = heads[1] * schedule.gqa_splits
    assert heads[0] // heads[1] % schedule.gqa_splits == 0
    assert 1 <= schedule.heads_per_group <= heads_kv * (1 if varlen else batch)
    if not varlen:
        assert schedule.work_tiles == batch * heads_kv * schedule.tiles_per_head
    ctas = plan.block_n // 64 if head_dim > 128 else 1
    assert schedule.wave_size * ctas <= 132 and (schedule.wave_size > 0) == (schedule.work_tiles > 0)
    waves = schedule.mirrored_pairs or schedule.query_blocks_apart > 0
    assert (schedule.dispatch == host.Dispatch.kStatic) == (deterministic and waves)
    if deterministic and schedule.query_blocks_apart > 0:  # few key blocks that run at the same time share a start
        starts = schedule.query_blocks // schedule.query_blocks_apart
        assert min(key_blocks, 66) <= starts * (2 if key_blocks <= 66 else 1)
    assert (schedule.dq_order == host.DqOrder.kOrdered) == deterministic
    group = schedule.heads_per_group * schedule.tiles_per_head
    if not varlen and group > 0:
        # Whole groups of whole heads come before the last group.
        assert schedule.last_group % group == 0
        left = schedule.work_tiles - schedule.last_group
        if has_block_mask:  # the size of one to three groups, at most half of them, and the heads that remain
            assert 1 <= left // group <= max(1, min(3, schedule.work_tiles // group // 2))
        elif schedule.reversed:
            assert left == group
        else:
            assert left < group
    if schedule.last_add_writes_dq:
        assert schedule.dq_order != host.DqOrder.kUnordered and not varlen


@pytest.mark.parametrize(("varlen", "rows", "flags"), [(False, 2 * 6 * 384, 2 * 6 * 4), (True, 6 * 896, 0)])
def test_the_lse_and_delta_take_two_floats_per_padded_row(
    host: ModuleType, varlen: bool, rows: int, flags: int
) -> None:
    # Dense: 300 queries padded to 384, and a byte per 128 of them. Packed: 600 rows and 128 more per sequence, padded
    # to 896.
    plan = plan_of(host, varlen=varlen)
    assert plan.workspace.delta_bytes == 2 * rows * 4 + flags


WITHOUT_LISTS = [{}, *CHANGED_BY_KEY, {"has_bias": True, "bias_has_rows": True}, {"dropout_layout": "kFlash"}]
WITH_LISTS = [{"has_block_mask": True, **scores} for scores in ({}, *CHANGED_SCORES, {"has_score_mod": True})]


@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 96, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("call", [*WITHOUT_LISTS, *WITH_LISTS], ids=str)
def test_a_kernel_reads_block_lists_or_is_compiled_at_run_time_only_for_calls_that_need_it(
    host: ModuleType, call: dict[str, Any], head_dim: int
) -> None:
    plan = plan_of(host, backend="sm90", head_dim=head_dim, head_dim_v=head_dim, **given(host, call))
    assert host.sm90_needs(plan) == (call.get("has_block_mask", False), call.get("has_score_mod", False))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_score_mod_that_is_compiled_at_run_time_needs_block_lists(host: ModuleType, head_dim: int) -> None:
    with pytest.raises(ValueError, match="it has no tile with these features"):
        plan_of(host, backend="sm90", head_dim=head_dim, head_dim_v=head_dim, has_score_mod=True)


@pytest.mark.parametrize("changes", [{"head_dim": 257}, {"head_dim_v": 512}, {"head_dim": 512, "head_dim_v": 320}])
def test_sm90_takes_head_dimensions_above_256(host: ModuleType, changes: dict[str, int]) -> None:
    assert plan_of(host, {"has_attention_sm80": True}, **changes).backend == "sm90"


def test_head_dimensions_above_256_need_no_accumulator(host: ModuleType) -> None:
    features = {"softcap": 20.0, "has_sink": True, "window_left": 7, "window_right": 0}
    plan = plan_of(host, backend="sm90", head_dim=512, head_dim_v=512, **features)
    assert (plan.block_m, plan.block_n) == (64, 64)
    assert plan.deterministic and not plan.cooperative
    assert plan.workspace.accumulator_bytes == 0
    assert plan.workspace.delta_bytes == 2 * 2 * 6 * 384 * 4
    packed = plan_of(host, backend="sm90", head_dim=512, head_dim_v=512, varlen=True, has_seqused=True)
    assert packed.workspace.delta_bytes == 2 * 6 * 896 * 4


def test_windows_packed_sequences_grouped_heads_and_sinks_are_supported(host: ModuleType) -> None:
    plan = plan_of(
        host, varlen=True, window_left=7, window_right=0, has_seqused=True, heads=32, heads_kv=1, has_sink=True
    )
    assert plan.backend == "sm90"


@hypothesis.given(
    rows=st.sampled_from([64, 200, 256, 512, 1024, 2048, 8192]),
    batch=st.integers(1, 8),
    heads=st.sampled_from([(1, 1), (8, 8), (16, 16), (16, 4), (32, 2), (132, 132)]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 192, 256]),
    windows=st.sampled_from([(-1, -1), (-1, 0), (255, 0), (100, 100)]),
    deterministic=st.booleans(),
)
def test_only_deterministic_plans_are_cooperative_and_the_schedule_is_unambiguous(
    rows: int, batch: int, heads: tuple[int, int], head_dim: int, windows: tuple[int, int], deterministic: bool
) -> None:
    host = load_host()
    sizes = square(batch, rows) | {
        "heads": heads[0],
        "heads_kv": heads[1],
        "head_dim": head_dim,
        "head_dim_v": head_dim,
    }
    sizes |= {"window_left": windows[0], "window_right": windows[1], "deterministic": deterministic}
    plan = plan_of(host, **sizes)
    assert deterministic or not plan.cooperative
    assert plan.cooperative == ("wave" in plan.schedule)
    assert " or " not in plan.schedule


def test_deterministic_mirrored_pairs_and_staggered_starts_need_a_cooperative_launch(
    host: ModuleType,
) -> None:
    sizes = square(2, 8192) | {"heads": 16, "head_dim": 128, "head_dim_v": 128, "deterministic": True}
    assert plan_of(host, **sizes, heads_kv=4, window_right=0).cooperative
    assert not plan_of(host, **sizes, heads_kv=4).cooperative
    assert not plan_of(host, **sizes, heads_kv=16, window_right=0).cooperative
    sizes |= {"heads_kv": 16, "head_dim": 256, "head_dim_v": 256}
    assert plan_of(host, **sizes).cooperative
    assert not plan_of(host, **sizes, window_right=0).cooperative


def test_a_call_without_queries_above_256_has_an_address_for_its_tensor_maps(host: ModuleType) -> None:
    plan = plan_of(host, backend="sm90", head_dim=512, seqlen_q=0, total_q=0)
    assert plan.workspace.delta_bytes == 0
    assert plan.workspace.bytes > 0
