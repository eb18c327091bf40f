"""The sm90 kernels for head dimensions 257 to 512: gradients and bitwise determinism."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kit import cases, inputs, long
from kit.cases import Case
from kit.long import LongCase
from support import arguments_of, refusal, run, skip_where_refused, with_nan_outputs, workspace_of

import flashbwd

pytestmark = pytest.mark.gpu

BACKEND = "sm90"
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = [(264, 264), (288, 288), (320, 320), (384, 384), (392, 392), (512, 512), (512, 256), (128, 320), (304, 504)]
EDGES = [1, 63, 64, 65, 127, 128, 129, 193]  # one to four blocks of 64
DENSE = Case("dense", batch=2, heads=4, heads_kv=2, seqlen_q=200, seqlen_k=270, head_dim=512, head_dim_v=512)
PACKED = dataclasses.replace(
    DENSE, name="packed", seqlens_q=(150, 1, 0, 77), seqlens_k=(140, 65, 3, 130), causal=True, trailing=3
)
SHAPES = [
    dataclasses.replace(DENSE, name="full"),
    dataclasses.replace(DENSE, name="causal", causal=True, dlse=True),
    dataclasses.replace(DENSE, name="top_left_longer_queries", causal="top_left", seqlen_q=300, seqlen_k=100),
    dataclasses.replace(DENSE, name="queries_without_keys", causal=True, seqlen_q=300, seqlen_k=100),
    dataclasses.replace(DENSE, name="keys_without_queries", window_size=(10, 0), seqlen_q=70, seqlen_k=400),
    dataclasses.replace(DENSE, name="window", window_size=(70, 20)),
    dataclasses.replace(DENSE, name="softcap_sink", softcap=3.0, sink="finite", causal=True),
    dataclasses.replace(DENSE, name="eight_heads_per_kv_head", heads=16, heads_kv=2, batch=1, causal=True),
    dataclasses.replace(DENSE, name="used", seqused_q=(200, 65), seqused_k=(0, 129)),
    PACKED,
    dataclasses.replace(
        PACKED, name="packed_window_used", seqused_k=(140, 40, 3, 66), causal=False, window_size=(40, 20)
    ),
]


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    x = inputs.build(DENSE, torch.bfloat16, "cuda")
    skip_where_refused(x, BACKEND)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_head_dimension_agrees_with_the_oracle(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = dataclasses.replace(DENSE, head_dim=head_dims[0], head_dim_v=head_dims[1], window_size=(150, 40))
    x = inputs.build(case, dtype, "cuda")
    x.check(*run(x, BACKEND))


@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mask_agrees_with_the_oracle(shape: Case, head_dim: int) -> None:
    x = inputs.build(dataclasses.replace(shape, head_dim=head_dim, head_dim_v=head_dim), torch.bfloat16, "cuda")
    x.check(*run(x, BACKEND))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", EDGES)
@pytest.mark.parametrize("keys", EDGES)
def test_lengths_around_blocks_agree_with_the_oracle(queries: int, keys: int, causal: bool) -> None:
    case = dataclasses.replace(DENSE, seqlen_q=queries, seqlen_k=keys, causal=causal, batch=1, heads=1, heads_kv=1)
    x = inputs.build(case, torch.bfloat16, "cuda")
    x.check(*run(x, BACKEND))


@pytest.mark.parametrize(("queries", "keys"), [(0, 70), (70, 0), (0, 0)])
def test_empty_lengths_give_zero_gradients(queries: int, keys: int) -> None:
    x = inputs.build(dataclasses.replace(DENSE, seqlen_q=queries, seqlen_k=keys), torch.bfloat16, "cuda")
    x.check(*run(x, BACKEND))


@pytest.mark.parametrize("head_dim", [288, 384, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_more_work_tiles_than_multiprocessors_agree_with_the_oracle(causal: bool, head_dim: int) -> None:
    x = long.build(LongCase(4096, head_dim, heads=4, heads_kv=2, causal=causal), torch.bfloat16, "cuda")
    with flashbwd.use_backend(BACKEND):
        grads = flashbwd.attention_backward(**with_nan_outputs(x.arguments()))
    x.check(*grads[:3])


@pytest.mark.parametrize("shape", [SHAPES[1], PACKED], ids=str)
def test_gradients_do_not_change_from_run_to_run(shape: Case) -> None:
    x = inputs.build(dataclasses.replace(shape, seqlen_q=900, seqlen_k=1000), torch.bfloat16, "cuda")
    first = run(x, BACKEND)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(run(x, BACKEND)[:3], first[:3], strict=True))


def test_the_contents_of_the_workspace_do_not_matter() -> None:
    x = inputs.build(PACKED, torch.bfloat16, "cuda")
    with flashbwd.use_backend(BACKEND):
        size = flashbwd.plan_attention_backward(**arguments_of(x)).workspace_bytes
    x.check(*run(x, BACKEND, workspace=workspace_of(size, "cuda", fill=255)))


@settings(max_examples=30)
@given(
    case=cases.any_case(max_seqlen=200),
    head_dims=st.tuples(st.integers(1, 64), st.integers(1, 64)).filter(lambda dims: max(dims) > 32),
    seed=st.integers(0, 1000),
)
def test_random_cases_agree_with_the_oracle(case: Case, head_dims: tuple[int, int], seed: int) -> None:
    case = dataclasses.replace(
        case,
        head_dim=8 * head_dims[0],
        head_dim_v=8 * head_dims[1],
        layout="contiguous",
        bias=None,
        key_mask=None,
        alibi=None,
        dropout_p=0.0,
    )
    x = inputs.build(case, torch.bfloat16, "cuda", seed)
    assume(refusal(x, BACKEND) is None)
    x.check(*run(x, BACKEND))
