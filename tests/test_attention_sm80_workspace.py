"""The public function reaches each way in which the sm80 family accumulates dq."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kit import cases, inputs
from kit.summary import NO_CASE
from support import GPU_TARGETS, MAIN, Target, arguments_of, repeated, run, run_copies, skip_where_refused, workspace_of

import flashbwd

pytestmark = pytest.mark.gpu

KERNELS = [target for target in GPU_TARGETS if "-sm80-" in str(target.id)]
DENSE = cases.Case("dense", batch=2, heads=4, heads_kv=2, seqlen_q=200, seqlen_k=270, head_dim=64, head_dim_v=64)
PACKED = cases.Case(
    "packed", heads=4, heads_kv=2, seqlens_q=(150, 1, 0, 77), seqlens_k=(140, 65, 3, 130), head_dim=64, head_dim_v=64
)


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "in_order"])
@pytest.mark.parametrize("head_dim", [32, 64, 90, 320])
@pytest.mark.parametrize("shape", [DENSE, PACKED], ids=str)
def test_key_blocks_add_into_a_compact_accumulator(
    shape: cases.Case, head_dim: int, deterministic: bool, target: Target
) -> None:
    device, backend, dtype = target
    case = dataclasses.replace(shape, causal=True, head_dim=head_dim, deterministic=deterministic)
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        plan = flashbwd.plan_attention_backward(**arguments_of(x))
    rows = sum(case.physical_q)
    assert plan.accumulator_bytes == case.heads * rows * -(-head_dim // 4) * 4 * 4
    assert ("in order of the key blocks" if deterministic else "by atomics") in plan.schedule
    x.check(*run(x, backend, workspace=workspace_of(plan.workspace_bytes, device)))


@pytest.mark.parametrize("target", [target for target in KERNELS if "float32" not in str(target.id)])
@pytest.mark.parametrize("seqlen_k", [60, 270, 640, 641])
@pytest.mark.parametrize(("heads_kv", "head_dim"), [(4, 256), (2, 200)])
def test_the_first_key_block_of_a_query_tile_stores_dq(
    heads_kv: int, head_dim: int, seqlen_k: int, target: Target
) -> None:
    """With up to ten key blocks and a tile of 128 x 64, dq is never added to the NaN in the workspace."""
    device, backend, dtype = target
    case = dataclasses.replace(DENSE, heads_kv=heads_kv, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim)
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        plan = flashbwd.plan_attention_backward(**arguments_of(x))
    if plan.tile != (128, 64):
        pytest.skip(NO_CASE + "a smaller tile")
    assert ("by the first key block" in plan.schedule) == (seqlen_k <= 640)
    x.check(*run(x, backend, workspace=workspace_of(plan.workspace_bytes, device)))


@pytest.mark.parametrize("target", [target for target in KERNELS if "float32" not in str(target.id)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "head_dim"),
    [(2, 200, 270, 32), (2, 200, 270, 64), (4, 300, 300, 90), (2, 257, 400, 128)],
)
def test_calls_in_whole_heads_need_no_accumulator(
    heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool, deterministic: bool, target: Target
) -> None:
    """The call has at least one KV head per SM."""
    device, backend, dtype = target
    case = dataclasses.replace(
        DENSE, batch=1, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim
    )
    case = dataclasses.replace(case, causal=causal, deterministic=deterministic)
    copies = torch.cuda.get_device_properties(device).multi_processor_count
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    many = {name: repeated(x.arguments[name], copies) for name in MAIN}
    with flashbwd.use_backend(backend):
        plan = flashbwd.plan_attention_backward(**arguments_of(x, **many))
    assert plan.accumulator_bytes == 0
    assert "its key blocks in order" in plan.schedule
    run_copies(case, target, copies)
