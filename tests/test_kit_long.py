"""On long sequences, the tolerance rule accepts the roundings of a kernel and refuses the loss of any single tile."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from kit import long, oracle, tolerance
from kit.long import BLOCK_M, BLOCK_N, LongCase, LongInputs
from torch import Tensor

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
LEVELLED = LongCase(4096)
ONE_SIGN = LongCase(4096, causal=False, values="one_sign")


@cache  # the tests below share their inputs and the gradients of a right kernel
def build(case: LongCase, dtype: torch.dtype) -> LongInputs:
    return long.build(case, dtype)


@cache
def right_kernel(case: LongCase, dtype: torch.dtype) -> long.Gradients:
    return long.as_a_kernel(build(case, dtype))


@pytest.mark.parametrize("case", [LongCase(200, 16, heads=4, heads_kv=2), LongCase(200, 16, causal=False)], ids=str)
def test_the_chunked_oracle_agrees_with_the_whole_one(case: LongCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "_ELEMENTS", 64 * case.seqlen)
    x = long.build(case, torch.float64)
    whole = oracle.attention(x.q, x.k, x.v, x.dout, causal=case.causal)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(x.reference, name), getattr(whole, name), rtol=1e-11, atol=1e-13)


def test_the_chunked_oracle_has_the_gradient_of_the_lse() -> None:
    x = long.build(LongCase(100, 16, values="one_sign"), torch.float64)
    whole = oracle.attention(x.q, x.k, x.v, x.dout, causal=True, dlse=x.dlse)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(x.reference, name), getattr(whole, name), rtol=1e-11, atol=1e-12)


def accepted_without_tiles(x: LongInputs) -> dict[str, int]:
    """The number of visible tiles of 64 queries and 128 keys whose loss, one at a time, passes the rule."""
    kernel = right_kernel(x.case, x.q.dtype)
    limits = {name: x.limits(name).flatten() for name in ("dq", "dk", "dv")}
    error = {name: (getattr(kernel, name).double() - getattr(x.reference, name))[0, :, 0] for name in limits}
    scale = x.case.head_dim**-0.5
    passed = dict.fromkeys(limits, 0)

    def passes(name: str, first_row: int, lost: Tensor) -> bool:
        off = (error[name][first_row : first_row + len(lost)] - lost).view(-1, BLOCK_M, lost.shape[-1])
        first = first_row // BLOCK_M
        return bool((off.abs().amax((1, 2)) <= limits[name][first : first + len(off)]).all())

    for part in x.scores(torch.float32, BLOCK_M):
        q, dout = (t[0, part.rows, 0].float() for t in (x.q, x.dout))
        for start in range(0, part.keys, BLOCK_N):
            keys = slice(start, min(start + BLOCK_N, part.keys))
            p, ds = part.p[:, keys], part.ds[:, keys]
            passed["dq"] += passes("dq", part.rows.start, scale * (ds @ x.k[0, keys, 0].float()))
            passed["dk"] += passes("dk", start, scale * (ds.T @ q))
            passed["dv"] += passes("dv", start, p.T @ dout)
    return passed


@DTYPES
def test_no_tile_of_a_causal_square_can_be_lost(dtype: torch.dtype) -> None:
    assert accepted_without_tiles(build(LEVELLED, dtype)) == {"dq": 0, "dk": 0, "dv": 0}


@DTYPES
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_the_last_five_blocks_of_random_values_cannot_be_zero(name: str, dtype: torch.dtype) -> None:
    x = build(LongCase(4096, values="normal"), dtype)
    grads = {of: getattr(right_kernel(x.case, dtype), of) for of in ("dq", "dk", "dv")}
    x.check(**grads)
    grads[name] = grads[name].clone()
    grads[name][:, -5 * BLOCK_M :] = 0
    with pytest.raises(AssertionError, match=f"{name}: error .* 5 of 64 blocks"):
        x.check(**grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", [LEVELLED, ONE_SIGN], ids=str)
def test_the_roundings_of_a_kernel_are_within_the_limits(case: LongCase, dtype: torch.dtype) -> None:
    x, kernel = build(case, dtype), right_kernel(case, dtype)
    tolerance.RATIOS.clear()
    x.check(kernel.dq, kernel.dk, kernel.dv)
    assert max(ratio for _, ratio in tolerance.RATIOS) < 0.75


@DTYPES
@pytest.mark.parametrize("of", ["dq", "dk", "dv"])
def test_sums_rounded_between_tiles_are_refused(of: str, dtype: torch.dtype) -> None:
    x = build(ONE_SIGN, dtype)
    kernel = long.as_a_kernel(x, dtype, of)
    with pytest.raises(AssertionError, match=f"{of}: error"):
        x.check(kernel.dq, kernel.dk, kernel.dv)
