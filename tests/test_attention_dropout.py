"""The backward regenerates the dropout mask of the forward bit for bit."""

from __future__ import annotations

import pytest
import torch
from kit import cases, dropout, inputs, oracle
from kit.summary import DECLARED
from support import TARGETS, Target, backward, run, skip_where_refused
from torch import Tensor

import flashbwd


def mask_drawn(
    state: flashbwd.RngState,
    p: float,
    shape: tuple[int, int, int, int],
    target: Target,
    heads_kv: int | None = None,
    columns: int = 128,
) -> Tensor:
    """(B, H, Sq, Sk) bool: the keep mask that attention_backward used, computed from dv.

    With q = 0 all weights are 1 / Sk; with dout a slice of the identity, dv[j, i] is z[i, j] / Sk for one head.
    ``columns`` is the head dimension of v, which selects the kernel's tile.
    """
    device, backend, dtype = target
    batch, heads, seqlen_q, seqlen_k = shape
    heads_kv = heads if heads_kv is None else heads_kv
    q = torch.zeros(batch, seqlen_q, heads, 8, dtype=dtype, device=device)
    k = torch.zeros(batch, seqlen_k, heads_kv, 8, dtype=dtype, device=device)
    lse = torch.full((batch, heads, seqlen_q), 0.0, dtype=inputs.lse_dtype(dtype), device=device)
    kept = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    with flashbwd.use_backend(backend):
        for head in range(heads):
            for start in range(0, seqlen_q, columns):
                width = min(columns, seqlen_q - start)
                dout = torch.zeros(batch, seqlen_q, heads, columns, dtype=dtype, device=device)
                dout[:, start : start + width, head, :width] = torch.eye(width, dtype=dtype, device=device)
                v = torch.zeros(batch, seqlen_k, heads_kv, columns, dtype=dtype, device=device)
                dv = backward(dout, q, k, v, torch.zeros_like(dout), lse, dropout_p=p, rng_state=state).dv
                kv = head // (heads // heads_kv)
                kept[:, head, start : start + width] = dv[:, :, kv, :width].transpose(1, 2) != 0
    return kept.cpu()


def skip_without_dropout(target: Target, layout: str) -> None:
    device, backend, dtype = target
    skip_where_refused(inputs.build(cases.BY_NAME[f"dropout_{layout}_small"], dtype, device), backend)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", cases.RNG_LAYOUTS)
@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [(0, 0, 0.5), (2**64 - 1, 7, 0.25), (0x1234_5678_9ABC_DEF0, 2**34 + 1, 0.8), (42, 2**64 - 4096, 0.5)],
)
def test_the_backward_draws_the_mask_of_the_forward_bit_for_bit(
    layout: str, seed: int, offset: int, p: float, target: Target
) -> None:
    skip_without_dropout(target, layout)
    shape = (2, 3, 70, 141)
    drawn = mask_drawn(flashbwd.RngState(seed, offset, layout), p, shape, target)
    expected = dropout.keep_masks(
        layout,
        seed,
        offset,
        p,
        heads=3,
        seqlens_q=[70] * 2,
        seqlens_k=[141] * 2,
        max_seqlen_q=70,
        max_seqlen_k=141,
    )
    assert torch.equal(drawn, torch.stack(expected))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", cases.RNG_LAYOUTS)
@pytest.mark.parametrize("columns", [32, 64, 96, 160, 192, 256, 320])
def test_every_tile_draws_the_mask_of_the_forward(columns: int, layout: str, target: Target) -> None:
    skip_without_dropout(target, layout)
    if target[1] == "sm90" and columns > 256:
        pytest.skip(DECLARED + "sm90 takes no dropout at head dimensions above 256")
    drawn = mask_drawn(flashbwd.RngState(5, 6, layout), 0.5, (1, 2, 150, 203), target, columns=columns)
    expected = dropout.keep_masks(
        layout, 5, 6, 0.5, heads=2, seqlens_q=[150], seqlens_k=[203], max_seqlen_q=150, max_seqlen_k=203
    )
    assert torch.equal(drawn[0], expected[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", cases.RNG_LAYOUTS)
def test_each_query_head_of_a_group_has_a_mask_of_its_own(layout: str, target: Target) -> None:
    skip_without_dropout(target, layout)
    state = flashbwd.RngState(11, 8, layout)
    drawn = mask_drawn(state, 0.5, (1, 4, 20, 40), target, heads_kv=1)
    assert torch.equal(drawn, mask_drawn(state, 0.5, (1, 4, 20, 40), target))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", cases.RNG_LAYOUTS)
@pytest.mark.parametrize("p", [1 / 255, 1 / 256, 0.1, 127.5 / 255, 0.999])
def test_the_mask_is_right_at_rates_that_round_up_or_down(layout: str, p: float, target: Target) -> None:
    skip_without_dropout(target, layout)
    drawn = mask_drawn(flashbwd.RngState(3, 4, layout), p, (1, 2, 64, 96), target)
    expected = dropout.keep_masks(
        layout, 3, 4, p, heads=2, seqlens_q=[64], seqlens_k=[96], max_seqlen_q=64, max_seqlen_k=96
    )
    assert torch.equal(drawn[0], expected[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["int64", "uint64", "one_element"])
def test_seed_and_offset_may_be_tensors(kind: str, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.BY_NAME["dropout_flash_half_causal"], dtype, device)
    skip_where_refused(x, backend)
    seed, offset, layout = x.rng_state() or (0, 0, "")
    for at in {"cpu", device}:
        tensors = [
            torch.tensor([value] if kind == "one_element" else value, dtype=torch.int64).to(at)
            for value in (seed, offset)
        ]
        if kind == "uint64":
            tensors = [tensor.view(torch.uint64) for tensor in tensors]
        x.check(*run(x, backend, rng_state=flashbwd.RngState(*tensors, layout)))


@pytest.mark.parametrize("layout", cases.RNG_LAYOUTS)
def test_head_dimension_and_masking_do_not_change_the_mask(layout: str) -> None:
    """The mask element depends only on (b, h, i, j), so a causal call uses the causal part of the same mask."""
    state = flashbwd.RngState(5, 12, layout)
    target: Target = ("cpu", "reference", torch.float64)
    whole = mask_drawn(state, 0.5, (1, 2, 50, 50), target)
    x = inputs.build(cases.Case("p", seqlen_q=50, seqlen_k=50, batch=1, causal=True), torch.float64)
    q, k, v, dout = (x.canonical[name] for name in ("q", "k", "v", "dout"))
    expected = oracle.attention(q, k, v, dout, causal=True, keep=[whole[0]], keep_scale=2.0)
    lse = expected.lse
    grads = backward(dout, q, k, v, expected.out, lse, causal=True, dropout_p=0.5, rng_state=state)
    torch.testing.assert_close(grads.dq, expected.dq, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grads.dv, expected.dv, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["efficient32", "efficient64"])
def test_kept_elements_have_the_factor_of_the_forward(layout: str, target: Target) -> None:
    """The memory-efficient forward rounds 1 / (1 - p) to its dtype.

    With one key of value 1, out is that factor; dp * z and delta cancel only if the backward uses the same factor.
    """
    skip_without_dropout(target, layout)
    device, backend, dtype = target
    p, seqlen_q = 0.1, 64
    (kept,) = dropout.keep_masks(
        layout, 5, 6, p, heads=2, seqlens_q=[seqlen_q], seqlens_k=[1], max_seqlen_q=seqlen_q, max_seqlen_k=1
    )
    factor = dropout.keep_scale(layout, p, dtype)
    out = (kept.transpose(0, 1) * factor).expand(1, seqlen_q, 2, 8).to(dtype)
    generator = torch.Generator().manual_seed(0)
    dout = torch.randint(-8, 9, (1, seqlen_q, 2, 8), generator=generator).to(dtype)
    q, k = torch.ones(1, seqlen_q, 2, 8, dtype=dtype), torch.full((1, 1, 2, 8), 4.0, dtype=dtype)
    lse = torch.full((1, 2, seqlen_q), 32 / 8**0.5, dtype=inputs.lse_dtype(dtype))
    tensors = (x.contiguous().to(device) for x in (dout, q, k, torch.ones_like(k), out, lse))
    with flashbwd.use_backend(backend):
        dq = backward(*tensors, dropout_p=p, rng_state=flashbwd.RngState(5, 6, layout)).dq
    assert float(dq.abs().max()) < 1e-3  # up to 0.05 with a factor that is not rounded


@pytest.mark.parametrize("target", TARGETS)
def test_rng_state_is_ignored_without_dropout(target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.Case("plain"), dtype, device)
    skip_where_refused(x, backend)
    x.check(*run(x, backend, rng_state=flashbwd.RngState(1, 2, "flash")))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "sm80", "sm90"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_equals_that_of_pytorchs_flash_forward(backend: str, p: float) -> None:
    target: Target = ("cuda", backend, torch.float16)
    skip_without_dropout(target, "flash")
    q = torch.zeros(2, 200, 3, 128, dtype=torch.float16, device="cuda")
    eye = torch.eye(128, dtype=torch.float16, device="cuda")[None, :, None].expand(2, 128, 3, 128).contiguous()
    out, _, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
        q, torch.zeros_like(eye), eye, None, None, 200, 128, p, False, False
    )
    words = rng_state.view(torch.int64)
    drawn = mask_drawn(flashbwd.RngState(words[0], words[1], "flash"), p, (2, 3, 200, 128), target)
    assert torch.equal(drawn, (out != 0).permute(0, 2, 1, 3).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "sm80", "sm90"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_equals_that_of_pytorchs_memory_efficient_forward(backend: str, p: float) -> None:
    target: Target = ("cuda", backend, torch.float16)
    skip_without_dropout(target, "efficient32")
    q = torch.zeros(2, 200, 3, 128, dtype=torch.float16, device="cuda")
    eye = torch.eye(128, dtype=torch.float16, device="cuda")[None, :, None].expand(2, 128, 3, 128).contiguous()
    out, _, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
        q, torch.zeros_like(eye), eye, None, None, None, 200, 128, p, 0, False
    )
    for layout in ("efficient32", "efficient64"):  # the same below 2^32 elements
        drawn = mask_drawn(flashbwd.RngState(seed, offset, layout), p, (2, 3, 200, 128), target)
        assert torch.equal(drawn, (out != 0).permute(0, 2, 1, 3).cpu()), layout
