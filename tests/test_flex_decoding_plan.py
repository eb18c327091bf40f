"""Launches of the flex decoding kernel: tiles fit the device, and splits divide into clusters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.host import load_host

host = load_host()

SMEM = {(9, 0): 232448, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376}


def device(capability: tuple[int, int], sm_count: int = 132) -> Any:
    info = host.DeviceInfo()
    info.cc_major, info.cc_minor = capability
    info.sm_count, info.smem_per_block = sm_count, SMEM[capability]
    return info


def shape(**sizes: int) -> Any:
    result = host.DecodingShape()
    for name, size in {"batch": 1, "heads_kv": 8, "rows": 4, "seqlen_k": 8192, **sizes}.items():
        setattr(result, name, size)
    return result


dims = st.integers(1, 256)
shapes = st.builds(
    shape,
    batch=st.integers(1, 300),
    heads_kv=st.integers(1, 128),
    rows=st.one_of(st.integers(1, 40), st.integers(1, 10**6)),
    seqlen_k=st.one_of(st.integers(1, 300), st.integers(1, 10**7)),
    head_dim=dims,
    head_dim_v=dims,
    element_bytes=st.sampled_from([2, 4]),
)


@given(shape=shapes, capability=st.sampled_from(sorted(SMEM)), sm_count=st.integers(1, 160))
def test_every_shape_has_a_tile_that_fits(shape: Any, capability: tuple[int, int], sm_count: int) -> None:
    tile = host.decoding_tile(shape, device(capability, sm_count))
    assert tile.head_dim in (64, 128, 256)
    assert tile.head_dim >= max(shape.head_dim, shape.head_dim_v)
    assert tile.rows in (16, 32) and tile.warps in (2, 4, 8)
    size = host.decoding_shared_bytes(tile.head_dim, tile.rows, tile.warps, shape.element_bytes)
    assert size <= SMEM[capability]


@given(
    shape=shapes,
    capability=st.sampled_from(sorted(SMEM)),
    sm_count=st.integers(1, 160),
    asked=st.sampled_from([0, 0, 0, 1, 2, 7, 500, 10**6]),
)
def test_splits_divide_into_clusters(shape: Any, capability: tuple[int, int], sm_count: int, asked: int) -> None:
    info = device(capability, sm_count)
    chosen = host.decoding_splits(shape, host.decoding_tile(shape, info), info, asked)
    assert 1 <= chosen.splits <= 65535 and chosen.splits % chosen.cluster == 0
    assert chosen.cluster in (1, 2)
    assert chosen.cluster == 1 or capability == (9, 0)
    if asked:
        assert chosen.splits == min(asked, 65535)


def test_head_dimensions_over_256_have_no_tile() -> None:
    assert host.decoding_tile(shape(head_dim=64, head_dim_v=257), device((9, 0))).head_dim == 0


@pytest.mark.parametrize("capability", sorted(SMEM))
def test_one_long_sequence_fills_the_gpu(capability: tuple[int, int]) -> None:
    for heads_kv in (1, 2, 3, 8, 16, 32):
        long = shape(heads_kv=heads_kv, seqlen_k=131072, head_dim=128, head_dim_v=128)
        info = device(capability)
        assert heads_kv * host.decoding_splits(long, host.decoding_tile(long, info), info, 0).splits >= 0.75 * 132
