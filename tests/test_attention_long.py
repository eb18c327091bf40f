"""Sequences up to 16384: every tile of the gradients counts, and sums over tiles are fp32 (kit/long.py)."""

from __future__ import annotations

from typing import Any

import pytest
from kit import long
from kit.long import LongCase
from support import CPU_TARGETS, GPU_TARGETS, Target, skip_where_arguments_refused, with_nan_outputs

import flashbwd

KERNELS = [target for target in GPU_TARGETS if "-sm" in str(target.id) and "float32" not in str(target.id)]
REFERENCE = [target for target in CPU_TARGETS if "float16" in str(target.id)]  # bfloat16 too
SQUARES = [
    *(LongCase(4096, head_dim) for head_dim in (32, 64, 96, 128, 192, 256, 320)),
    *(LongCase(4096, head_dim, heads=8, heads_kv=2) for head_dim in (64, 128)),
    LongCase(8192, heads=2, heads_kv=2),
    LongCase(16384, 64),
    LongCase(16384, heads=2),
    LongCase(4096, causal=False),
]
OF_ONE_SIGN = [
    *(LongCase(8192, head_dim, causal=False, values="one_sign") for head_dim in (64, 128, 256, 320)),
    LongCase(16384, heads=4, heads_kv=1, causal=False, values="one_sign"),
    LongCase(8192, values="one_sign"),
]


def gradients(x: long.LongInputs, backend: str, deterministic: bool) -> flashbwd.AttentionGrads:
    arguments: dict[str, Any] = x.arguments() | {"deterministic": deterministic}
    skip_where_arguments_refused(arguments, backend)
    with flashbwd.use_backend(backend):
        return flashbwd.attention_backward(**with_nan_outputs(arguments))


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SQUARES, ids=str)
def test_gradients_of_long_squares_agree_with_the_chunked_oracle(
    case: LongCase, deterministic: bool, target: Target
) -> None:
    device, backend, dtype = target
    x = long.build(case, dtype, device)
    x.check(*gradients(x, backend, deterministic)[:3])


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", OF_ONE_SIGN, ids=str)
def test_sums_of_one_sign_are_not_rounded_between_tiles(case: LongCase, deterministic: bool, target: Target) -> None:
    device, backend, dtype = target
    x = long.build(case, dtype, device)
    x.check(*gradients(x, backend, deterministic)[:3])


@pytest.mark.parametrize("target", REFERENCE)
def test_the_reference_keeps_every_tile_of_a_long_square(target: Target) -> None:
    device, backend, dtype = target
    x = long.build(LongCase(4096), dtype, device)
    x.check(*gradients(x, backend, deterministic=False)[:3])
