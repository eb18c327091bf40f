"""The kit: the oracle agrees with PyTorch's attention, dropout masks with known answers, and the rule finds errors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import cases, dropout, inputs, oracle, tolerance
from support import run, with_nan_outputs
from torch import Tensor

import flashbwd

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


def gradients_of(result: oracle.AttentionResult) -> dict[str, Tensor]:
    return {name: getattr(result, name) for name in GRADIENTS if getattr(result, name) is not None}


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_autograd_agrees_with_the_written_out_formulas(case: cases.Case) -> None:
    x = inputs.build(case, torch.float64)
    main = [x.canonical[name] for name in ("q", "k", "v", "dout", "out", "lse")]
    written = oracle.attention_from_lse(*main, **inputs.forward_arguments(x.canonical))
    for name, expected in gradients_of(x.reference).items():
        tolerance.assert_close(getattr(written, name), expected, [], name)


@given(cases.any_case(), st.integers(0, 1000))
def test_random_cases_are_well_posed(case: cases.Case, seed: int) -> None:
    x = inputs.build(case, torch.float32, seed=seed)
    for name, expected in gradients_of(x.reference).items():
        assert expected.isfinite().all(), name
        assert all(getattr(result, name).isfinite().all() for result in x.draw.naive), name
    assert x.reference.out.isfinite().all()


@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("grouped", [False, True])
def test_oracle_agrees_with_scaled_dot_product_attention(causal: bool | str, grouped: bool) -> None:
    case = cases.Case("sdpa", heads=4, heads_kv=2 if grouped else 4, seqlen_q=19, seqlen_k=31, causal=causal)
    x = inputs.build(case, torch.float64)
    q, k, v, dout = (x.canonical[name].transpose(1, 2).detach() for name in ("q", "k", "v", "dout"))
    leaves = [y.requires_grad_() for y in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=causal == "top_left", enable_gqa=grouped, scale=None
    )
    grads = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(x.reference.out, out.detach().transpose(1, 2), rtol=1e-10, atol=1e-12)
    for name, expected in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(getattr(x.reference, name), expected.transpose(1, 2), rtol=1e-10, atol=1e-12)


def test_oracle_agrees_with_scaled_dot_product_attention_with_a_bias() -> None:
    x = inputs.build(cases.Case("sdpa_bias", seqlen_q=19, seqlen_k=31, bias="bhqk"), torch.float64)
    q, k, v, dout = (x.canonical[name].transpose(1, 2).detach() for name in ("q", "k", "v", "dout"))
    leaves = [y.requires_grad_() for y in (q, k, v, x.canonical["attn_bias"].clone())]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
    *grads, dbias = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(x.reference.dbias, dbias, rtol=1e-10, atol=1e-12)
    for name, expected in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(getattr(x.reference, name), expected.transpose(1, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 8), (8, 5)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (2, 1), (0, 0)])
def test_visible_pairs_follow_the_definition(
    seqlen_q: int, seqlen_k: int, causal: bool | str, window: tuple[int, int]
) -> None:
    left, right = window[0], 0 if causal else window[1]
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    seen = oracle.visible_pairs(seqlen_q, seqlen_k, causal, window)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            lowest = -math.inf if left < 0 else i + offset - left
            highest = math.inf if right < 0 else i + offset + right
            assert bool(seen[i, j]) == (lowest <= j <= highest)


def test_a_sink_is_a_key_without_a_value() -> None:
    x = inputs.build(cases.Case("sink", sink="finite", seqlen_q=9, seqlen_k=7), torch.float64)
    q, k, v = (x.canonical[name] for name in ("q", "k", "v"))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    s = torch.cat([s, x.canonical["sink"][None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
    v = torch.cat([v, torch.zeros_like(v[:, :1])], dim=1)
    torch.testing.assert_close(x.reference.out, torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v))


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (10, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (7, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ],
)
def test_philox_gives_the_known_answers(rounds: int, expected: list[int]) -> None:
    words = dropout.philox4x32([np.zeros(1, dtype=np.uint64)] * 4, 0, rounds)
    assert [int(word[0]) for word in words] == expected


def test_ten_rounds_of_philox_give_the_known_answers_for_ones_and_pi() -> None:
    ones = dropout.philox4x32([np.full(1, 0xFFFFFFFF, dtype=np.uint64)] * 4, 0xFFFFFFFFFFFFFFFF, 10)
    assert [int(word[0]) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [np.array([word], dtype=np.uint64) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    pi = dropout.philox4x32(digits, 0x299F31D0_A4093822, 10)
    assert [int(word[0]) for word in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("layout", cases.RNG_LAYOUTS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_expected_share(layout: str, p: float) -> None:
    (mask,) = dropout.keep_masks(
        layout, 7, 8, p, heads=2, seqlens_q=[200], seqlens_k=[300], max_seqlen_q=200, max_seqlen_k=300
    )
    share = (math.floor((1 - p) * 255) + 1) / 256 if layout == "flash" else 1 - p
    assert abs(float(mask.double().mean()) - share) < 5 * math.sqrt(p * (1 - p) / mask.numel())
    assert not torch.equal(mask[0], mask[1])


def test_the_two_memory_efficient_numberings_differ_only_beyond_32_bits() -> None:
    def corner(wide: bool, heads: int, h: int, length: int, first_row: int) -> np.ndarray:
        return dropout.keep_efficient(
            3, 16, 0.5, b=0, h=h, heads=heads, seqlen_q=8, seqlen_k=64, max_seqlen_q=length, max_seqlen_k=length,
            wide=wide, first_row=first_row, row_stride=length,
        )  # fmt: skip

    assert np.array_equal(corner(False, 4, 3, 1024, 100), corner(True, 4, 3, 1024, 100))
    assert not np.array_equal(corner(False, 4, 3, 65536, 100), corner(True, 4, 3, 65536, 100))  # head part >= 2^32
    assert not np.array_equal(corner(False, 1, 0, 70000, 69000), corner(True, 1, 0, 70000, 69000))  # element >= 2^32


def test_efficient_words_come_from_consecutive_counters() -> None:
    row = dropout.keep_efficient(
        5, 2, 0.5, b=0, h=0, heads=1, seqlen_q=1, seqlen_k=11, max_seqlen_q=1, max_seqlen_k=11, wide=True
    )
    for j in range(11):
        n = 2 + j
        words = dropout.philox4x32([np.array([w], dtype=np.uint64) for w in (n // 4, 0, 0, 0)], 5, 10)
        x = np.float32(np.uint32(int(words[n % 4][0])))
        assert row[0, j] == (x * np.float32(2.0**-32) + np.float32(2.0**-33) > np.float32(0.5))


def test_flash_bytes_of_one_block_are_each_used_once() -> None:
    seen = set()
    for r in range(16):
        for c in range(32):
            seen.add(((r % 8) * 4 + (c % 8) // 2, (c // 16) * 8 + ((c % 16) // 8) * 4 + (r // 8) * 2 + c % 2))
    assert len(seen) == 16 * 32
    row = dropout.keep_flash(9, 12, 0.5, b=1, h=2, heads=3, seqlen_q=40, seqlen_k=70)
    i, j = 37, 66  # block (2, 2), r = 5, c = 2: lane 21, byte 0
    low = 12 + (1 * 3 + 2) * 32 + 21
    words = dropout.philox4x32([np.array([w], dtype=np.uint64) for w in (low, 0, i // 16, j // 32)], 9, 7)
    assert row[i, j] == ((int(words[0][0]) & 0xFF) <= 127)


def test_memory_outside_the_logical_lengths_contains_nan() -> None:
    case = dataclasses.replace(cases.BY_NAME["varlen_seqused"], bias="bhqk", layout="odd_strides", lse_form="padded")
    x = inputs.build(case, torch.float32)
    for name in ("q", "k", "v", "dout", "out"):
        tensor = x.arguments[name]
        logical, physical = (
            (case.logical_q, case.physical_q)
            if name in ("q", "dout", "out")
            else (case.logical_k, case.physical_k)
        )  # fmt: skip
        assert int(tensor.isnan().any(-1).any(-1).sum()) == sum(physical) - sum(logical), name
    assert x.arguments["q"].as_strided((3,), (1,), case.head_dim).isnan().all()
    assert not x.arguments["softmax_lse"][0, :, :13].isnan().any()
    assert x.arguments["softmax_lse"][0, :, 13:].isnan().all()
    assert int((~x.arguments["attn_bias"].isnan()).sum()) == case.heads * sum(
        a * b for a, b in zip(case.logical_q, case.logical_k, strict=True)
    )


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_every_layout_contains_the_values_with_a_contiguous_last_dimension(layout: str) -> None:
    case = dataclasses.replace(cases.Case("layout"), layout=layout)
    x = inputs.build(case, torch.bfloat16)
    for name in ("q", "k", "v", "dout", "out"):
        assert x.arguments[name].stride(-1) == 1
        assert torch.equal(x.arguments[name], x.canonical[name])
    strides = {
        "contiguous": (528 * 2, 32, 16),
        "packed_qkv": (528 * 6, 96, 16),
        "bhsd": (528 * 2, 16, 528),
        "odd_strides": (627 * 2, 38, 19),
        "offset": (528 * 2, 32, 16),
        "every_other_row": (528 * 4, 64, 16),
    }
    assert x.arguments["q"].stride()[:3] == strides[layout]
    assert x.arguments["q"].storage_offset() == (1 if layout == "offset" else 0)


def test_the_rule_accepts_rounding_and_refuses_twice_the_naive_error() -> None:
    expected = torch.linspace(-2, 2, 101, dtype=torch.float64)
    naive = [expected + 0.01]
    tolerance.assert_close(expected.bfloat16(), expected, [expected], "dq")
    tolerance.assert_close((expected + 0.019).float(), expected, naive, "dq")
    tolerance.assert_close((expected + 0.029).float(), expected, naive, "dq", softcap=True)
    off = expected.clone()
    off[7] += 0.021
    with pytest.raises(AssertionError, match=r"dq: error 2\.1\d\de-02 at \(7,\) exceeds"):
        tolerance.assert_close(off.float(), expected, naive, "dq")


def test_the_rule_refuses_nan_wrong_shapes_and_a_float64_error() -> None:
    expected = torch.ones(3, 4, dtype=torch.float64)
    poisoned = expected.clone()
    poisoned[1, 2] = torch.nan
    with pytest.raises(AssertionError, match=r"at \(1, 2\).*1 are NaN"):
        tolerance.assert_close(poisoned.float(), expected, [expected + 100], "dk")
    with pytest.raises(AssertionError, match=r"shape \(4, 3\)"):
        tolerance.assert_close(expected.T, expected, [expected], "dk")
    with pytest.raises(AssertionError, match="dk: error"):
        tolerance.assert_close(expected + 1e-9, expected, [], "dk")


@pytest.mark.parametrize("name", ["layout_every_other_row", "varlen_seqused", "bias_bhqk"])
def test_calls_get_outputs_full_of_nan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.bfloat16)
    given: dict[str, Tensor] = {}

    def writes_nothing(**arguments: Tensor) -> flashbwd.AttentionGrads:
        given.update(arguments)
        return flashbwd.AttentionGrads(arguments["dq"], arguments["dk"], arguments["dv"], x.reference.dbias, None)

    monkeypatch.setattr(flashbwd, "attention_backward", writes_nothing)
    grads = run(x)
    for gradient, source in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        assert given[gradient].isnan().all()
        assert given[gradient].stride() == torch.empty_like(x.arguments[source]).stride()
    with pytest.raises(AssertionError, match="dq: error nan"):
        x.check(*grads)


@pytest.mark.parametrize(("name", "of"), [("bias_bhqk", "attn_bias"), ("sink", "sink")])
def test_memory_of_the_size_of_a_gradient_that_cannot_be_given_is_filled_with_nan(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dbias and dsink then come from the caching allocator and contain NaN."""
    filled: list[tuple[torch.Size, torch.dtype]] = []
    full_like = torch.full_like

    def noted(x: Tensor, value: float) -> Tensor:
        result = full_like(x, value)
        if bool(result.isnan().all()):
            filled.append((x.shape, x.dtype))
        return result

    monkeypatch.setattr(torch, "full_like", noted)
    x = inputs.build(cases.BY_NAME[name], torch.bfloat16)
    filled.clear()
    with_nan_outputs(dict(x.arguments))
    assert (x.arguments[of].shape, x.arguments[of].dtype) in filled


SIXTEEN_BIT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def rounded_as_a_kernel(x: inputs.Inputs) -> dict[str, Tensor | None]:
    """The gradients in fp32, except for P and dS, which are rounded once to the precision of the inputs."""
    main = [x.canonical[name] for name in ("q", "k", "v", "dout", "out", "lse")]
    options = inputs.forward_arguments(x.canonical)
    result = oracle.attention_from_lse(*main, **options, dtype=torch.float32, operands=x.dtype)
    found = {name: getattr(result, name) for name in GRADIENTS}
    return {name: None if g is None else g if name == "dsink" else g.to(x.dtype) for name, g in found.items()}


@SIXTEEN_BIT
@pytest.mark.parametrize("case", cases.with_prefix("many_", "few_", "heads_", "bias_", "varlen_", "sink"), ids=str)
def test_the_roundings_of_a_kernel_are_within_the_limits(case: cases.Case, dtype: torch.dtype) -> None:
    x = inputs.build(case, dtype)
    x.check(**rounded_as_a_kernel(x))


@SIXTEEN_BIT
@pytest.mark.parametrize("name", ["bias_one_sign_heads", "bias_one_sign_group", "bias_one_sign_batches"])
def test_a_bias_gradient_that_is_rounded_between_heads_is_refused(name: str, dtype: torch.dtype) -> None:
    x = inputs.build(cases.BY_NAME[name], dtype)
    main = [x.canonical[of] for of in ("q", "k", "v", "dout", "out", "lse")]
    shape = (x.case.batch, x.case.heads, x.case.seqlen_q, x.case.seqlen_k)
    options = inputs.forward_arguments(x.canonical) | {"attn_bias": x.canonical["attn_bias"].expand(shape)}
    shares = oracle.attention_from_lse(*main, **options, dtype=torch.float32).dbias
    dim = 0 if shape[0] > 1 else 1
    total = torch.zeros_like(shares.select(dim, 0), dtype=dtype)
    for share in shares.unbind(dim):
        total = (total.float() + share).to(dtype)
    grads = rounded_as_a_kernel(x)
    x.check(**grads)
    with pytest.raises(AssertionError, match="dbias: error"):
        x.check(**grads | {"dbias": total.unsqueeze(dim)})


@pytest.mark.parametrize("gradient", ["dq", "dk", "dv", "dbias"])
def test_each_block_of_64_rows_of_each_head_has_a_separate_limit(gradient: str) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(2, 3, 150, 8, generator=generator, dtype=torch.float64)  # batches, heads, rows
    expected[:, :2] *= 1000
    expected[:, 2, :128] *= 1000
    if gradient != "dbias":
        expected = expected.transpose(1, 2)
    blocks = tolerance.Blocks(gradient, expected, torch.bfloat16)
    limits = blocks.limits(blocks.errors([expected.bfloat16()]))
    assert limits.shape == (2, 3, 3)
    blocks.check(expected.bfloat16(), limits)
    row = (1, 2, 149) if gradient == "dbias" else (1, 149, 2)
    off = expected.clone()
    off[row] = 0  # an error that is smaller than the rounding errors of other blocks
    with pytest.raises(
        AssertionError, match=rf"{gradient}: error .* at \({row[0]}, {row[1]}, {row[2]}, \d\) .* 1 of 18"
    ):
        blocks.check(off, limits)
    off[row] = torch.nan
    with pytest.raises(AssertionError, match="8 elements are NaN"):
        blocks.check(off, limits)


def test_limits_shrink_with_the_values_of_a_block() -> None:
    expected = torch.randn(1, 64, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in (1.0, 2.0**-12):
        blocks = tolerance.Blocks("dq", scale * expected, torch.bfloat16)
        (limit,) = blocks.limits(blocks.errors([(scale * expected).bfloat16()])).flatten().tolist()
        assert 0.002 < limit / (scale * float(expected.abs().max())) < 0.05


def test_a_block_with_few_different_values_may_have_the_usual_error() -> None:
    """All elements of dv are 0 or one value, which plain computations round well by chance."""
    sizes = {"heads": 1, "heads_kv": 1, "head_dim": 24, "head_dim_v": 24, "seqlen_q": 13, "seqlen_k": 13}
    lengths = {"seqlens_q": (13, 46), "seqlens_k": (13, 46), "seqused_q": (0, 4), "seqused_k": (0, 2), "slack": 1}
    options = {"softmax_scale": 0.0, "bias": "11qk", "dropout_p": 0.9, "rng_seed": 0, "rng_offset": 0}
    case = cases.Case("one_value", **sizes, **lengths, **options, dout_layout="expanded_scalar")
    x = inputs.build(case, torch.float16, seed=123)
    grads = {name: getattr(x.reference, name) for name in GRADIENTS}
    rounding = torch.finfo(torch.float16).eps / 2
    assert float(x.limits("dv", "reordered").max()) < rounding / 2 * float(x.reference.dv.max())
    x.check(**grads | {"dv": x.reference.dv * (1 + rounding)})
    with pytest.raises(AssertionError, match="dv: error"):
        x.check(**grads | {"dv": x.reference.dv * (1 + 64 * rounding)})


@pytest.mark.parametrize("rms", [False, True])
def test_norm_oracle_agrees_with_torch(rms: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dz, gamma = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 5, 17), (3, 5, 17), (17,)))
    result = oracle.layer_norm(x, dz, gamma, rms=rms)
    leaves = [y.clone().requires_grad_() for y in (x, gamma)]
    normalize = torch.nn.functional.rms_norm if rms else torch.nn.functional.layer_norm
    z = normalize(leaves[0], (17,), leaves[1], eps=1e-5)
    dx, dgamma = torch.autograd.grad(z, leaves, dz)
    torch.testing.assert_close(result.z, z.detach())
    torch.testing.assert_close(result.dx, dx)
    torch.testing.assert_close(result.dgamma, dgamma)
    if not rms:
        torch.testing.assert_close(result.dbeta, dz.sum((0, 1)))
