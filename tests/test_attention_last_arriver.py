"""Last-arriver finalization on Hopper (head dimensions 64 and 128): in windows and short query loops, the last add to a
dq tile reads the sum so far and writes dq. Every dq tile must have a last add, whatever its queries see."""

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
# Head dimensions and lengths with short query loops, with and without a mask.
SHORT_LOOPS = [
    (head_dims, lengths)
    for of_tile, longest in (
        ([(128, 128), (104, 128), (100, 97)], (900, 700)),
        ([(64, 64), (40, 64), (56, 49)], (512, 300)),
    )
    for head_dims in of_tile
    for lengths in [(1, 1), (63, 129), (64, 128), (65, 127), (509, 513), longest]
]


def built(case: Case, target: Target) -> inputs.Inputs:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        schedule = flashbwd.plan_attention_backward(**arguments_of(x)).schedule
    # The last add does not write dq if query 0 sees no key. Masks are aligned with the last query, except "top_left".
    right = 0 if case.causal else case.window_size[1]
    all_see_keys = right < 0 or case.causal == "top_left" or case.seqlen_q - case.seqlen_k <= right
    assert ("the last add writes dq" in schedule) is all_see_keys
    return x


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_in_windows_agree_with_the_oracle(
    head_dim: int, window: tuple[int, int], lengths: tuple[int, int], heads: int, deterministic: bool, target: Target
) -> None:
    """Covers odd numbers of iterations, dq tiles with one key block, fewer queries than keys, and more queries than
    keys (the first queries then see no key)."""
    case = dataclasses.replace(DENSE, heads=heads, head_dim=head_dim, head_dim_v=head_dim)
    case = dataclasses.replace(case, window_size=window, deterministic=deterministic)
    x = built(dataclasses.replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1]), target)
    x.check(*run(x, target[1]))


@pytest.mark.parametrize("target", SM90)
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
@pytest.mark.parametrize(("head_dims", "lengths"), SHORT_LOOPS, ids=str)
def test_gradients_of_short_query_loops_agree_with_the_oracle(
    head_dims: tuple[int, int], lengths: tuple[int, int], case: Case, target: Target
) -> None:
    case = dataclasses.replace(case, head_dim=head_dims[0], head_dim_v=head_dims[1])
    x = built(dataclasses.replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1]), target)
    x.check(*run(x, target[1]))


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads", "length"), [(64, 4, 1000), (64, 6, 300), (64, 16, 250), (128, 4, 500), (128, 9, 300)], ids=str
)
def test_gradients_of_short_query_loops_of_grouped_heads_agree_with_the_oracle(
    head_dim: int, heads: int, length: int, causal: bool, deterministic: bool, target: Target
) -> None:
    case = dataclasses.replace(DENSE, batch=3, heads=heads, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim)
    case = dataclasses.replace(case, causal=causal, seqlen_q=length, seqlen_k=length + 30, deterministic=deterministic)
    x = built(case, target)
    x.check(*run(x, target[1]))


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads", "lengths"),
    [
        (64, 8, (1000, 1000)),
        (64, 8, (1024, 1100)),
        (128, 8, (1000, 1000)),
        (128, 8, (600, 640)),
        (128, 8, (300, 1100)),
        (128, 8, (700, 500)),
    ],
    ids=str,
)
def test_gradients_of_mirrored_tile_pairs_agree_with_the_oracle(
    head_dim: int, heads: int, lengths: tuple[int, int], deterministic: bool, target: Target
) -> None:
    """There are more sequences than run at a time, with odd and even numbers of key blocks."""
    case = dataclasses.replace(DENSE, heads=heads, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim, causal=True)
    case = dataclasses.replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1], deterministic=deterministic)
    run_copies(case, target, 50)


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "mask", "length", "heads"),
    [
        (128, (-1, 0), 1300, 40),
        (128, (-1, -1), 700, 40),
        (128, (-1, -1), 250, 132),
        (128, (150, 0), 1300, 40),
        (64, (-1, 0), 1000, 40),
        (64, (-1, -1), 500, 60),
        (64, (150, 0), 1300, 40),
    ],
    ids=str,
)
def test_gradients_of_more_work_tiles_than_sms_agree_with_the_oracle(
    head_dim: int, mask: tuple[int, int], length: int, heads: int, deterministic: bool, target: Target
) -> None:
    """There are more work tiles than SMs. Without a mask they nearly fill two waves on an H100."""
    causal = mask == (-1, 0)
    case = dataclasses.replace(DENSE, heads=1, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
    case = dataclasses.replace(case, seqlen_q=length, seqlen_k=length)
    case = dataclasses.replace(case, window_size=(-1, -1) if causal else mask, deterministic=deterministic)
    run_copies(case, target, heads, heads=True)


@pytest.mark.parametrize("target", SM90)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dq_at_an_address_that_tma_cannot_store_to_is_right(head_dim: int, target: Target) -> None:
    """dq starts at an address that is no multiple of 16 bytes."""
    case = dataclasses.replace(DENSE, head_dim=head_dim, head_dim_v=head_dim)
    x = built(dataclasses.replace(case, seqlen_q=700, seqlen_k=700, window_size=(100, 0)), target)
    expected = run(x, target[1])
    q = x.arguments["q"]
    storage = torch.full((q.numel() + 1,), torch.nan, dtype=q.dtype, device=q.device)
    dq = storage[1:].view(q.shape)
    with flashbwd.use_backend(target[1]):
        flashbwd.attention_backward(**arguments_of(x), dq=dq)
    assert storage[0].isnan()
    torch.testing.assert_close(dq, expected.dq, rtol=1e-2, atol=1e-3)
