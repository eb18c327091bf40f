"""Head dimension 128 on Hopper: in windows and short walks who adds last to a tile of dq takes the sums of the others
and writes dq. Every tile has such a one, whatever it sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kit import inputs
from kit.cases import Case
from support import GPU_TARGETS, Target, arguments_of, run, run_copies, skip_where_refused

import flashbwd

pytestmark = pytest.mark.gpu

SM90 = [target for target in GPU_TARGETS if "-sm90" in str(target.id)]
WINDOWS = [(0, 0), (63, 0), (127, 0), (255, 0), (300, 0), (64, 64), (17, 90), (0, 40)]
LENGTHS = [(1100, 1100), (1000, 1030), (1030, 1000), (897, 2000)]
DENSE = Case("dense", batch=1, heads=2, heads_kv=2, head_dim=128, head_dim_v=128)


def built(case: Case, target: Target) -> inputs.Inputs:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        assert "who is last writes it" in flashbwd.plan_attention_backward(**arguments_of(x)).schedule
    return x


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_gradients_in_windows_agree_with_the_oracle(
    window: tuple[int, int], lengths: tuple[int, int], heads: int, deterministic: bool, target: Target
) -> None:
    """An odd number of tiles a walk, tiles of one key block, more queries than keys (the first see none) and fewer."""
    case = dataclasses.replace(DENSE, heads=heads, window_size=window, deterministic=deterministic)
    x = built(dataclasses.replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1]), target)
    x.check(*run(x, target[1]))


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("head_dims", [(128, 128), (104, 128), (100, 97)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(DENSE, name="causal", causal=True),
        dataclasses.replace(DENSE, name="top_left", causal="top_left"),
        dataclasses.replace(DENSE, name="full"),
        dataclasses.replace(DENSE, name="window", window_size=(200, 31)),
        dataclasses.replace(DENSE, name="sink", causal=True, sink="finite", dlse=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(1, 1), (63, 129), (64, 128), (65, 127), (509, 513), (900, 700)], ids=str)
def test_gradients_of_short_walks_agree_with_the_oracle(
    lengths: tuple[int, int], case: Case, head_dims: tuple[int, int], target: Target
) -> None:
    case = dataclasses.replace(case, head_dim=head_dims[0], head_dim_v=head_dims[1])
    x = built(dataclasses.replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1]), target)
    x.check(*run(x, target[1]))


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("mask", "length"), [((-1, 0), 1300), ((-1, -1), 700), ((150, 0), 1300)], ids=str)
def test_heads_that_wait_for_their_turn_beside_others_agree_with_the_oracle(
    mask: tuple[int, int], length: int, deterministic: bool, target: Target
) -> None:
    """40 heads: more jobs than multiprocessors."""
    causal = mask == (-1, 0)
    case = dataclasses.replace(DENSE, heads=1, heads_kv=1, seqlen_q=length, seqlen_k=length, causal=causal)
    case = dataclasses.replace(case, window_size=(-1, -1) if causal else mask, deterministic=deterministic)
    run_copies(case, target, 40, heads=True)


@pytest.mark.parametrize("target", SM90)
def test_dq_that_the_copy_engine_cannot_store_is_converted(target: Target) -> None:
    """Its rows are not multiples of 16 bytes."""
    x = built(dataclasses.replace(DENSE, seqlen_q=700, seqlen_k=700, window_size=(100, 0)), target)
    expected = run(x, target[1])
    q = x.arguments["q"]
    storage = torch.full((q.numel() + 1,), torch.nan, dtype=q.dtype, device=q.device)
    dq = storage[1:].view(q.shape)
    with flashbwd.use_backend(target[1]):
        flashbwd.attention_backward(**arguments_of(x), dq=dq)
    assert storage[0].isnan()
    torch.testing.assert_close(dq, expected.dq, rtol=1e-2, atol=1e-3)
