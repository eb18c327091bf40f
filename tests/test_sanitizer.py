"""The tests for compute-sanitizer run each kernel family with every feature, in the smallest shapes that use it.

``benchmarks/gpu_run.py --stage sanitizer`` runs them under memcheck, racecheck, initcheck and synccheck. They also run
without these tools. The expected values of decoding are computed on the CPU, because the tools slow down PyTorch's
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from kit import cases, decoding, inputs
from kit.cases import Case
from kit.decoding import Shape
from support import run, skip_where_refused
from torch.nn.attention.flex_attention import BlockMask

import flashbwd

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]

# Several tiles in both directions; the last tiles are partly filled.
TILES = Case("tiles", batch=1, heads=2, heads_kv=1, seqlen_q=300, seqlen_k=270, head_dim=64, head_dim_v=64, causal=True)
ATTENTION = [
    TILES,
    replace(TILES, name="tiles_96", head_dim=96, head_dim_v=96, causal=False),
    replace(TILES, name="tiles_128", head_dim=128, head_dim_v=128),
    replace(TILES, name="tiles_256", head_dim=256, head_dim_v=256, heads=1),
    replace(TILES, name="tiles_full_256", head_dim=256, head_dim_v=256, causal=False),
    replace(TILES, name="tiles_512", head_dim=512, head_dim_v=320, deterministic=True),
    replace(
        TILES, name="tiles_varlen_320", seqlens_q=(200, 1, 0), seqlens_k=(130, 65, 5), head_dim=320, head_dim_v=320
    ),
    replace(TILES, name="tiles_full", causal=False),
    replace(TILES, name="tiles_long", heads_kv=2, seqlen_q=2100, causal=False),  # dq is converted after the kernel
    replace(TILES, name="tiles_dropout", dropout_p=0.2),
    replace(TILES, name="tiles_dropout_128", dropout_p=0.2, heads_kv=2, head_dim=128, head_dim_v=128),
    replace(TILES, name="tiles_dropout_alibi", dropout_p=0.2, alibi="heads"),
    replace(TILES, name="tiles_efficient_dropout", dropout_p=0.2, rng_layout="efficient64", bias="bh1k"),
    replace(
        TILES, name="tiles_efficient_dropout_128", dropout_p=0.2, rng_layout="efficient64", head_dim=128, head_dim_v=128
    ),
    replace(
        TILES, name="tiles_efficient_dropout_bias", dropout_p=0.2, rng_layout="efficient32", seqlen_k=272, bias="bhqk"
    ),
    replace(TILES, name="tiles_window", window_size=(40, 20), causal=False),
    replace(TILES, name="tiles_deterministic", deterministic=True, head_dim=128, head_dim_v=128),
    replace(TILES, name="tiles_turns", heads_kv=2, head_dim=128, head_dim_v=128),  # the last add writes dq
    replace(
        TILES, name="tiles_window_128", seqlen_q=400, window_size=(40, 20), causal=False, head_dim=128, head_dim_v=128
    ),
    replace(TILES, name="tiles_varlen", seqlens_q=(300, 1, 0, 65), seqlens_k=(270, 130, 5, 0), deterministic=True),
    replace(TILES, name="tiles_whole_heads", batch=33, heads=4, heads_kv=4),  # on 132 SMs
    replace(TILES, name="tiles_many_work_tiles_128", batch=33, heads=4, heads_kv=4, head_dim=128, head_dim_v=128),
    replace(TILES, name="tiles_many_work_tiles_256", batch=33, heads=2, heads_kv=2, head_dim=256, head_dim_v=256),
    replace(TILES, name="tiles_shared_bias", seqlen_q=520, seqlen_k=272, bias="b1qk"),
    replace(TILES, name="tiles_softcap_alibi", softcap=2.0, alibi="heads"),
    replace(TILES, name="tiles_softcap_128", softcap=2.0, heads_kv=2, head_dim=128, head_dim_v=128),
    replace(TILES, name="tiles_bias_128", seqlen_k=272, bias="bhqk", heads_kv=2, head_dim=128, head_dim_v=128),
    *cases.named(
        "head_dim_33x31",
        "heads_6to2",
        "bias_1hqk",
        "bias_bhq1",
        "key_mask_bias_shared_odd",
        "rows_batch_3",
        "rows_window",
        "key_mask_wide_all",
        "wide_bias",
        "wide_varlen",
        "wide_odd_strides",
        "wide_dropout_flash",
        "bias_softcap_alibi_sink",
        "dropout_flash_small",
        "dropout_efficient32_bias_softcap",
        "dlse_sink_causal",
        "varlen_zero_lengths",
        "varlen_seqused",
        "layout_odd_strides",
        "empty_rows_lse_inf",
    ),
]


@pytest.mark.parametrize("backend", ["short", "sm80", "sm90"])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_kernels_agree_with_the_oracle(case: Case, backend: str) -> None:
    x = inputs.build(case, torch.bfloat16, "cuda")
    skip_where_refused(x, backend)
    x.check(*run(x, backend))


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (1, 64),
        (300, 1000),
        (5, 7919),
        (70, 4096),
        (3, 20000),
        (300_000, 64),
    ],  # in the last shape, workers are throttled
)
def test_norm_kernels_agree_with_the_formulas(rows: int, columns: int, dtype: torch.dtype, rms: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, dz = (torch.randn(rows, columns, generator=generator, device="cuda").to(dtype) for _ in range(2))
    gamma = torch.randn(columns, generator=generator, device="cuda").to(dtype)
    x64, dz64, gamma64 = x.double(), dz.double(), gamma.double()
    mu = torch.zeros(rows, device="cuda") if rms else x64.mean(-1).float()
    rs = ((x64 - mu[:, None]).square().mean(-1) + 1e-5).rsqrt().float()
    if rms:
        dx, dgamma = flashbwd.rms_norm_backward(dz, x, rs, gamma)
    else:
        dx, dgamma, dbeta = flashbwd.layer_norm_backward(dz, x, mu, rs, gamma)
        torch.testing.assert_close(dbeta.double(), dz64.sum(0), rtol=1e-2, atol=1e-2 * rows**0.5)
    xhat = (x64 - mu[:, None]) * rs[:, None]
    dy = gamma64 * dz64
    mean_dy = 0.0 if rms else dy.mean(-1, keepdim=True)
    expected = rs[:, None] * (dy - mean_dy - xhat * (dy * xhat).mean(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dgamma.double(), (dz64 * xhat).sum(0), rtol=1e-2, atol=1e-2 * rows**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (70, 1000), (5, 7919), (3, 20000)])
def test_other_forms_of_norms_agree_with_the_cpu(rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    h, dz, dh = (torch.randn(rows, columns, generator=generator, device="cuda").to(dtype) for _ in range(3))
    gamma, beta = (torch.randn(columns, generator=generator, device="cuda").to(dtype) for _ in range(2))
    gamma = gamma.sign() + gamma / 4
    keep = torch.rand(rows, columns, generator=generator, device="cuda") < 0.5
    state = flashbwd.RngState(5, 4, "efficient64")
    z, mu, rs = torch.ops.flashbwd.layer_norm(h, gamma, beta, 1e-5, False)

    def gradients(device: str) -> list[torch.Tensor | None]:
        t = [x.to(device) for x in (dz, h, mu, rs, gamma)]
        given = keep.to(device)
        return [
            *flashbwd.dropout_add_layer_norm_backward(*t, dresidual=dh.to(device), dropout_p=0.5, keep=given),
            *flashbwd.dropout_add_layer_norm_backward(*t, dresidual=dh.to(device), dropout_p=0.5, rng_state=state),
            *flashbwd.layer_norm_backward_from_output(t[0], z.to(device), t[3], t[4], beta.to(device)),
        ]

    for got, want in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got.cpu(), want, rtol=2e-2, atol=5e-2)
    for given, rng in ((keep, None), (None, torch.tensor([5, 4], device="cuda"))):
        forward = torch.ops.flashbwd.dropout_add_norm_forward
        z, total, _, _ = forward(dh, h, gamma, beta, given, rng, 0.5, 1e-5, False, False)
        assert torch.isfinite(z).all()
        assert torch.isfinite(total).all()


SHAPE = Shape(batch=1, heads=4, heads_kv=2, seqlen_q=3, seqlen_k=333, head_dim=64, head_dim_v=64)
DECODING = {
    "plain": (SHAPE, None, None, {}),
    "clusters": (SHAPE, None, None, {"SPLIT_KV": 2}),
    "last_block_adds_up": (SHAPE, None, None, {"SPLIT_KV": 5}),
    "kernel_adds_up": (
        replace(SHAPE, heads=16, seqlen_q=4, head_dim=128, head_dim_v=128),
        None,
        None,
        {"SPLIT_KV": 9},
    ),
    "many_rows": (replace(SHAPE, heads=10, seqlen_q=5, head_dim=128, head_dim_v=128), "softcap", None, {}),
    "many_masked_rows": (replace(SHAPE, heads=10, seqlen_q=5, head_dim=128, head_dim_v=128), "alibi", "causal", {}),
    "256": (replace(SHAPE, head_dim=256, head_dim_v=192), None, "causal", {}),
    "unaligned": (replace(SHAPE, head_dim=33, head_dim_v=17), "alibi", "causal", {}),
    "lists": (replace(SHAPE, seqlen_q=1), "bias_rank4", "window", {}),
    "lists_a_head": (SHAPE, "alibi", "per_head", {}),
    "empty_rows": (SHAPE, None, "some_rows_empty", {}),
    "shared_keys": (replace(SHAPE, batch=3, batch_kv=1), "head_offset", "per_batch", {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", DECODING)
def test_decoding_kernels_agree_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    shape, mod, mask, options = DECODING[name]
    on_cpu, tensors = (tuple(t.requires_grad_() for t in shape.tensors(dtype, device)) for device in ("cpu", "cuda"))
    score_mod, expected_mod = (mod and decoding.score_mods(shape, device)[mod] for device in ("cuda", "cpu"))
    mask_mod = mask and decoding.mask_mods(shape)[mask]
    block_mask = mask_mod and decoding.block_mask(mask_mod, shape).to("cuda")
    out = flashbwd.flex_decoding(*tensors, score_mod, block_mask, enable_gqa=True, kernel_options=options)
    dense = mask_mod and decoding.dense_mask(mask_mod, shape, "cpu")
    expected, _ = decoding.oracle(shape, *on_cpu, expected_mod, dense)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0.02, atol=0.02)
    got = torch.autograd.grad(out, tensors, torch.ones_like(out))
    for g, e in zip(got, torch.autograd.grad(expected, on_cpu, torch.ones_like(expected)), strict=True):
        torch.testing.assert_close(g.cpu(), e, rtol=0.05, atol=0.05)


def test_pages_in_any_order_agree_with_the_oracle() -> None:
    page, pages, length = 32, [6, 2, 7, 0], 3 * 32 + 7
    shape = replace(SHAPE, seqlen_q=1, seqlen_k=8 * page)
    position = torch.full((8,), 8)  # position of each page in the sequence
    position[pages] = torch.arange(4)

    def filled(device: str) -> Callable[..., torch.Tensor]:
        moved = position.to(device)
        return lambda b, h, q, k: moved[k // page] * page + k % page < length

    counts = torch.tensor([[[4]]], dtype=torch.int32, device="cuda")
    indices = torch.tensor([[[pages + [0] * 4]]], dtype=torch.int32, device="cuda")
    sizes = {"BLOCK_SIZE": (1, page), "seq_lengths": (1, 8 * page)}
    mask = BlockMask.from_kv_blocks(counts, indices, mask_mod=filled("cuda"), **sizes)
    on_cpu, tensors = (tuple(t.requires_grad_() for t in shape.tensors(torch.bfloat16, d)) for d in ("cpu", "cuda"))
    out = flashbwd.flex_decoding(*tensors, None, mask, enable_gqa=True)
    expected, _ = decoding.oracle(shape, *on_cpu, None, decoding.dense_mask(filled("cpu"), shape, "cpu"))
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0.02, atol=0.02)
    got = torch.autograd.grad(out, tensors, torch.ones_like(out))
    for g, e in zip(got, torch.autograd.grad(expected, on_cpu, torch.ones_like(expected)), strict=True):
        torch.testing.assert_close(g.cpu(), e, rtol=0.05, atol=0.05)


def test_gradients_of_captured_tensors_agree_with_the_oracle() -> None:
    def out_and_bias(device: str, attend: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.requires_grad_() for t in SHAPE.tensors(torch.bfloat16, device))
        bias = torch.zeros(4, 333, device=device, requires_grad=True)
        return attend(q, k, v, lambda s, b, h, i, j: s + bias[h, j]), bias

    out, bias = out_and_bias("cuda", partial(flashbwd.flex_decoding, enable_gqa=True))
    expected, expected_bias = out_and_bias("cpu", lambda *given: decoding.oracle(SHAPE, *given)[0])
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), expected_bias)
    torch.testing.assert_close(gradient.cpu(), expected_gradient, rtol=0.05, atol=0.05)
