"""The gradient of a bias that batch entries or heads share, in the sm90 kernel: its layout and order of adds."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import inputs
from kit.cases import Case
from kit.host import load_host
from support import Target, arguments_of, run, workspace_of
from test_attention_sm90_plan import plan_of, square
from test_triangle import compare, draw

import flashbwd

host = load_host()
QUERIES, KEYS = 8, 16  # of a block


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (7, 15), (8, 16), (9, 17), (127, 257), (768, 768)])
def test_blocks_hold_every_pair_once_and_little_else(seqlen_q: int, seqlen_k: int) -> None:
    places = {
        k // KEYS * host.bias_key_group_elements(seqlen_q)
        + q // QUERIES * QUERIES * KEYS
        + host.element_of_bias_block(q % QUERIES, k % KEYS)
        for q in range(seqlen_q)
        for k in range(seqlen_k)
    }
    assert len(places) == seqlen_q * seqlen_k
    assert 0 <= min(places) <= max(places) < host.bias_plane_elements(seqlen_q, seqlen_k)
    assert host.bias_plane_elements(seqlen_q, seqlen_k) <= (seqlen_q + QUERIES - 1) * (seqlen_k + KEYS - 1)


def test_a_lane_holds_the_values_of_its_accumulators_in_their_order() -> None:
    """Values 0 and 1 of a transposed accumulator are two queries of key lane / 4, values 2 and 3 those of key + 8."""
    for lane, value in itertools.product(range(32), range(4)):
        query, key = lane % 4 * 2 + value % 2, lane // 4 + 8 * (value // 2)
        assert host.element_of_bias_block(query, key) == 4 * lane + value


@dataclass
class Adds:
    """Work tiles of a call with a shared bias in the order in which they are handed out.

    A work tile is a list of iterations (query block, head, number of adds to the bias before, number of adds to dq
    before), with the key of each of the two semaphores.
    """

    batches: int  # or groups of entries that share work tiles
    heads: int
    group: int  # query heads per KV head
    shares_batches: bool
    shares_heads: bool
    visibility: Any
    blocks: tuple[int, int]
    heads_per_group: int
    reverse: bool
    batches_innermost: bool
    tiles: list[list[tuple[Any, int, Any, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sharers = host.BiasSharers(self.shares_batches, self.shares_heads, self.heads)
        v, (block_m, block_n) = self.visibility, self.blocks
        heads_kv, key_blocks = self.heads // self.group, -(-v.seqlen_k // block_n)
        before = host.adds_before_descending if self.reverse else host.adds_before_ascending
        for index in range(self.batches * heads_kv * key_blocks):
            tile = host.dense_work_tile(index, self.batches, heads_kv, key_blocks, self.heads_per_group)
            if self.batches_innermost:
                tile = host.with_batches_innermost(tile, self.batches, heads_kv)
            batch, head_kv, number = tile
            n = key_blocks - 1 - number if self.reverse else number
            queries = list(range(*host.query_blocks(v, n, block_m, block_n)))
            steps = []
            for m in queries if self.reverse or v.full() else reversed(queries):
                for head in range(head_kv * self.group, (head_kv + 1) * self.group):
                    bias = sharers.plane(batch, head), m, n
                    dq = batch, head, m
                    steps.append((bias, sharers.adds_before(batch, head), dq, before(v, m, n, block_m, block_n)))
            self.tiles.append(steps)

    def run(self, workers: int, rng: random.Random) -> bool:
        """Whether all work tiles end if CTAs take them from a counter and advance in random order.

        The consumers of a CTA add to the bias; a store warp adds dq of an iteration after that, with two buffers.
        """
        semaphores: dict[Any, int] = defaultdict(int)
        waiting = list(reversed(self.tiles))
        busy: list[list[Any]] = []  # work tile, iterations of its consumers and of its store warps
        while waiting or busy:
            while waiting and len(busy) < workers:
                busy.append([waiting.pop(), 0, 0])
            able = []
            for cta in busy:
                steps, consumed, stored = cta
                if stored == len(steps):
                    able.append((cta, None))
                if (
                    consumed < min(len(steps), stored + 2)
                    and semaphores["bias", steps[consumed][0]] == steps[consumed][1]
                ):
                    able.append((cta, 1))
                if stored < consumed and semaphores["dq", steps[stored][2]] == steps[stored][3]:
                    able.append((cta, 2))
            if not able:
                return False
            cta, role = rng.choice(able)
            if role is None:
                busy.remove(cta)
                continue
            step = cta[0][cta[role]]
            semaphores[("bias", step[0]) if role == 1 else ("dq", step[2])] += 1
            cta[role] += 1
        return True


CALLS = st.builds(
    lambda lengths, mask, heads_kv, group, **options: Adds(
        heads=heads_kv * group,
        group=group,
        visibility=host.make_visibility(*lengths, *mask),
        reverse=options.pop("reverse") and mask[2] != host.CausalAlignment.kNone,
        **options,
    ),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mask=st.sampled_from(
        [
            (-1, -1, host.CausalAlignment.kNone),
            (-1, 0, host.CausalAlignment.kBottomRight),
            (-1, 0, host.CausalAlignment.kTopLeft),
            (6, 5, host.CausalAlignment.kNone),
        ]
    ),
    heads_kv=st.integers(1, 3),
    group=st.integers(1, 2),
    batches=st.integers(1, 4),
    shares_batches=st.just(True) | st.booleans(),
    shares_heads=st.booleans(),
    blocks=st.tuples(st.sampled_from([7, 16]), st.sampled_from([7, 16])),
    heads_per_group=st.integers(1, 6),
    reverse=st.booleans(),
    batches_innermost=st.booleans(),
)


def is_innermost_with_shared_heads(adds: Adds) -> bool:
    return adds.batches_innermost and adds.shares_heads  # no schedule has both


@given(CALLS.filter(lambda adds: not is_innermost_with_shared_heads(adds)))
@settings(max_examples=300, deadline=None)
def test_work_tiles_add_to_a_tile_of_the_bias_in_the_order_in_which_they_are_handed_out(adds: Adds) -> None:
    orders: dict[Any, list[int]] = defaultdict(list)
    for steps in adds.tiles:
        for tile, before, _, _ in steps:
            orders[tile].append(before)
    for order in orders.values():
        assert order == list(range(len(order)))


@given(CALLS.filter(lambda adds: not is_innermost_with_shared_heads(adds)), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_ordered_adds_to_a_bias_and_to_dq_never_deadlock(adds: Adds, workers: int, seed: int) -> None:
    assert adds.run(workers, random.Random(seed))


def test_the_simulation_finds_the_deadlock_of_adds_in_another_order() -> None:
    full = host.make_visibility(16, 16, -1, -1, host.CausalAlignment.kNone)
    adds = Adds(2, 1, 1, True, False, full, (8, 8), 1, False, False)
    adds.tiles.reverse()
    assert not adds.run(1, random.Random(0))


BIAS = {"has_bias": True, "bias_has_rows": True, "need_dbias": True, "bias_broadcast_batch": True}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
@pytest.mark.parametrize(("rows", "heads"), [(256, 4), (264, 3), (384, 16), (512, 8), (768, 4), (8, 2)])
def test_a_shared_bias_gradient_takes_at_most_1_5_times_its_size_in_fp32(
    rows: int, heads: int, head_dim: int, deterministic: bool
) -> None:
    shape = {**square(rows, rows), "heads": heads, "heads_kv": heads, "head_dim": head_dim, "head_dim_v": head_dim}
    sizes = [
        plan_of(
            host, **shape, backend="sm90", deterministic=deterministic, **BIAS | {"need_dbias": need}
        ).workspace.bytes
        for need in (False, True)
    ]
    assert 0 < sizes[1] - sizes[0] <= 1.5 * 4 * heads * rows * rows + 1024


@pytest.mark.parametrize(
    ("changes", "tile"),
    [
        ({}, (64, 128)),
        ({"head_dim": 24, "head_dim_v": 24}, (64, 128)),
        ({"deterministic": True}, (64, 128)),
        ({"need_dbias": False}, (64, 128)),
        ({"has_key_mask": True}, (64, 128)),
        ({"bias_broadcast_head": True}, (64, 128)),
        ({"heads": 8}, (128, 128)),  # grouped heads
        ({"head_dim_v": 40}, (128, 128)),
        ({"bias_broadcast_batch": False, "bias_broadcast_head": True}, (128, 128)),
        ({"bias_broadcast_batch": False}, (128, 128)),
    ],
    ids=str,
)
def test_two_batch_entries_that_share_a_bias_share_work_tiles(changes: dict[str, Any], tile: tuple[int, int]) -> None:
    shape = {**square(5, 256), "heads": 4, "heads_kv": 4, "head_dim": 32, "head_dim_v": 32}
    plan = plan_of(host, **shape | BIAS | changes)
    assert (plan.block_m, plan.block_n) == tile
    assert ("two batch entries" in plan.schedule) == (tile == (64, 128))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"need_dbias": False},
        {"batch": 64, "total_q": 64 * 256, "total_k": 64 * 256},
        {"bias_broadcast_batch": False},
        {"bias_broadcast_batch": False, "has_key_mask": True},
    ],
    ids=str,
)
def test_sm90_takes_a_bias_that_tma_can_load(changes: dict[str, Any]) -> None:
    shape = {**square(256, 256), "heads": 4, "heads_kv": 4, "head_dim": 32, "head_dim_v": 32}
    assert plan_of(host, {"has_attention_sm80": True}, **shape | BIAS | changes).backend == "sm90"


@pytest.mark.parametrize(("seqlen", "heads", "innermost"), [(768, 4, False), (2048, 16, True), (2048, 1, False)])
def test_batch_entries_follow_one_another_if_l2_does_not_hold_the_gradient(
    seqlen: int, heads: int, innermost: bool
) -> None:
    shape = {**square(4, seqlen), "heads": heads, "heads_kv": heads, "head_dim": 64, "head_dim_v": 64}
    plan = plan_of(host, **shape | BIAS)
    assert plan.sm90.batches_innermost == innermost
    assert ("all batch entries of a head" in plan.schedule) == innermost


# ---- on a GPU ----

SM90 = [
    pytest.param(("cuda", "sm90", dtype), id=f"cuda-sm90-{str(dtype).removeprefix('torch.')}", marks=pytest.mark.gpu)
    for dtype in (torch.bfloat16, torch.float16)
]
ROWS = Case("rows", 37, 4, 4, 264, 264, 32, 32, bias="1hqk")
SHARED = [
    ROWS,
    replace(ROWS, name="masked", key_mask="empty", causal=True),
    replace(ROWS, name="64", head_dim=64, head_dim_v=64),
    replace(ROWS, name="128_all", head_dim=128, head_dim_v=128, bias="11qk", key_mask="padding", batch=9),
    replace(ROWS, name="group_causal", heads=8, heads_kv=2, causal=True, head_dim=64, head_dim_v=64, batch=9),
    replace(ROWS, name="window", heads=4, heads_kv=2, window_size=(100, 50), head_dim=128, head_dim_v=128, batch=9),
    replace(ROWS, name="heads", heads=40, heads_kv=40, batch=3, bias="b1qk", head_dim=96, head_dim_v=96),
]


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_gradients_of_many_sharers_agree_with_the_oracle(case: Case, deterministic: bool, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(replace(case, deterministic=deterministic), dtype, device)
    x.check(*run(x, backend))


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_deterministic_gradients_repeat_bit_for_bit(case: Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(replace(case, deterministic=True), dtype, device)
    first = run(x, backend)
    for _ in range(5):
        again = run(x, backend)
        for name in ("dq", "dk", "dv", "dbias"):
            assert torch.equal(getattr(again, name), getattr(first, name)), name


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_workspace_full_of_nan_changes_nothing(deterministic: bool, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(replace(ROWS, deterministic=deterministic), dtype, device)
    with flashbwd.use_backend(backend):
        size = flashbwd.plan_attention_backward(**arguments_of(x)).workspace_bytes
    workspace = workspace_of(size, device)
    x.check(*run(x, backend, workspace=workspace))


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_of_hidden_keys_do_not_matter(value: float, head_dim: int, target: Target) -> None:
    device, backend, dtype = target
    case = replace(ROWS, batch=5, key_mask="empty", head_dim=head_dim, head_dim_v=head_dim)
    x = inputs.build(case, dtype, device)
    hidden = ~x.arguments["key_mask"]
    changed = {name: x.arguments[name].clone() for name in ("k", "v")}
    for tensor in changed.values():
        tensor[hidden] = value
    grads = run(x, backend, **changed)
    x.check(*grads)
    assert not grads.dk[hidden].any()
    assert not grads.dv[hidden].any()


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_triangle_attention_on_sm90_agrees_with_float64(masked: bool, deterministic: bool) -> None:
    leaves, mask = draw((1, 136, 4, 136, 136), torch.bfloat16, "cuda", masked)
    with flashbwd.use_backend("sm90"):
        torch.use_deterministic_algorithms(deterministic)
        try:
            compare(leaves, mask)
        finally:
            torch.use_deterministic_algorithms(False)
