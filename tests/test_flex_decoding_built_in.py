"""Built-in modifications, for which every build has kernels: all their forms are recognised, and no other function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from kit.summary import NO_CASE
from torch import Tensor

import flashbwd
from flashbwd.mods import nvrtc, rules
from flashbwd.mods.built_in import BuiltIn, encode, recognise
from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.trace import Trace, trace
from flashbwd.mods.values import Bounds, OfHead, Sum

B, H, Sq, Sk = 2, 4, 5, 23
INF = float("inf")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LENGTH = torch.tensor(11, dtype=torch.int32)
LENGTHS = torch.tensor([7, 19])
LENGTHS32 = LENGTHS.int()
OFFSET = Sk - Sq


def abs_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + OFFSET - k).abs() <= 4


def scores(device: str = "cpu") -> dict[str, Any]:
    slopes, lengths = SLOPES.to(device), LENGTHS32.to(device)
    return {
        "identity": lambda s, b, h, q, k: s,
        "softcap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
        "softcap_by_products": lambda s, b, h, q, k: torch.tanh(s * 0.05) * 20.0,
        "softcap_in_place_of_names": lambda s, b, h, q, k: s.div(2.5).tanh().mul(2.5),
        "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "alibi_backwards": lambda s, b, h, q, k: s - (q + OFFSET - k) * slopes[h],
        "alibi_of_a_growing_cache": lambda s, b, h, q, k: s - slopes[h] * (lengths[b] - 1 - k),
        "alibi_by_formula": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
        "alibi_by_power": lambda s, b, h, q, k: s + 2 ** (-8.0 * (h + 1) / H) * (k - q),
        "alibi_with_softcap": lambda s, b, h, q, k: 5 * torch.tanh(s / 5) - slopes[h] * 0.5 * (q - k),
        "relative": lambda s, b, h, q, k: s + (q - k),
        "relative_scaled": lambda s, b, h, q, k: 0.1 * (k - q) + s,
        "causal": lambda s, b, h, q, k: torch.where(q + OFFSET >= k, s, -INF),
        "inverse_causal": lambda s, b, h, q, k: torch.where(q <= k, s, -INF),
        "windowed": lambda s, b, h, q, k: torch.where(abs_window(b, h, q, k), s, -INF),
        "alibi_causal": lambda s, b, h, q, k: torch.where(k <= q, s + slopes[h] * (k - q), -INF),
    }


def masks(device: str = "cpu") -> dict[str, Any]:
    length, lengths = LENGTH.to(device), LENGTHS.to(device)
    return {
        "all": lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
        "causal": lambda b, h, q, k: q >= k,
        "causal_shifted": lambda b, h, q, k: k - OFFSET < q + 1,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 4),
        "window_two_sided": abs_window,
        "logical": lambda b, h, q, k: torch.logical_and(k < q + 3, k > q - 3),
        "length": lambda b, h, q, k: k < length,
        "lengths": lambda b, h, q, k: k <= lengths[b] - 1,
        "causal_of_a_growing_cache": lambda b, h, q, k: (q + lengths[b] - 5 >= k) & (k >= length - 7),
    }


SCORES, MASKS = scores(), masks()
# These are only checked on the host. SCORES and MASKS above cover the kernels that they reach.
MORE_SCORES: dict[str, Any] = {
    "rates_added": lambda s, b, h, q, k: s + (k - q) * torch.exp2(h * 0.5 + (h * -0.25 - 1.0)),
    "rates_subtracted": lambda s, b, h, q, k: s + (k - q) * torch.exp2(h * 0.5 - (h * 0.25 + 2.0)),
    "rate_of_a_head_as_float": lambda s, b, h, q, k: s + (k - q) * torch.exp2((h + 1).float() * -0.5),
    "slope_divided": lambda s, b, h, q, k: s + SLOPES[h] / 2 * (k - q) / 4,
    "slope_times_two_numbers": lambda s, b, h, q, k: s + SLOPES[h] * ((k - q) * 0.5) * 3,
    "distance_as_float": lambda s, b, h, q, k: s + (k - q).float() * 0.5,
    "distance_in_64_bits": lambda s, b, h, q, k: s + (k.long() - q) * 0.5,
    "distance_in_64_bits_of_two_queries": lambda s, b, h, q, k: s + (k.long() - 2 * q) * 0.5,
    "constant_of_torch_tensor": lambda s, b, h, q, k: s + torch.tensor(0.5) * (k - q),
    "distance_taken_away": lambda s, b, h, q, k: s - (q - k),
    "minus_a_slope": lambda s, b, h, q, k: s + -SLOPES[h] * (k - q),
    "softcap_then_mask": lambda s, b, h, q, k: torch.where(k < 9, 30 * torch.tanh(s / 30), -INF),
    "constant_of_a_tensor": lambda s, b, h, q, k: s + torch.full((), 0.5) * (k - q),
    "masked_twice": lambda s, b, h, q, k: torch.where(k < 9, torch.where(q >= k, s, -INF), -INF),
}
MORE_MASKS: dict[str, Any] = {
    "length_of_fewer_bits": lambda b, h, q, k: k < LENGTHS[b].int(),
    "length_of_more_bits": lambda b, h, q, k: k < LENGTHS32[b].long() + 2,
    "constant_of_torch_tensor": lambda b, h, q, k: k < torch.tensor(9) + q,
    "length_taken_away": lambda b, h, q, k: k >= q - LENGTH,
    "four_bounds": lambda b, h, q, k: (k > 1) & (k < 20) & (k > q) & (k < q + 9),
    "one_bound_four_times": lambda b, h, q, k: (k > 1) & (k > 1) & (k > 1) & (k > 1) & (k > 1),
    "strictly_inside": lambda b, h, q, k: (q - k).abs() < 3,
}
OTHERS = {
    "score_twice": (lambda s, b, h, q, k: s + s, None),
    "squared": (lambda s, b, h, q, k: s * s, None),
    "scaled": (lambda s, b, h, q, k: s * 2, None),
    "half_a_softcap": (lambda s, b, h, q, k: torch.tanh(s / 30), None),
    "softcap_of_two_caps": (lambda s, b, h, q, k: 20 * torch.tanh(s / 30), None),
    "softcap_of_a_bias": (lambda s, b, h, q, k: 30 * torch.tanh((s + (q - k)) / 30), None),
    "bias_of_the_head_alone": (lambda s, b, h, q, k: s + SLOPES[h], None),
    "two_biases": (lambda s, b, h, q, k: s + (k - q) + SLOPES[h] * (k - q), None),
    "every_second_key": (lambda s, b, h, q, k: s + SLOPES[h] * (2 * k - q), None),
    "where_not_infinite": (lambda s, b, h, q, k: torch.where(q >= k, s, -1.0), None),
    "table": (lambda s, b, h, q, k: s + SLOPES[k % 4], None),
    "document": (None, lambda b, h, q, k: SLOPES[k % 4] == SLOPES[q % 4]),
    "either": (None, lambda b, h, q, k: (q >= k) | (k < 3)),
    "per_head": (None, lambda b, h, q, k: k < 5 * h),
    "rows": (None, lambda b, h, q, k: q >= 3),
    "five_bounds": (None, lambda b, h, q, k: (k > 1) & (k > 2) & (k > 3) & (k > 4) & (k > 5)),
    "three_captured": (None, lambda b, h, q, k: k < LENGTH + LENGTHS[b] + LENGTHS[h % 2]),
    "far": (None, lambda b, h, q, k: k < 2**31 + q),
    "twice_the_length": (None, lambda b, h, q, k: k < 2 * LENGTH),
    "distance_in_64_bits_that_32_do_not_hold": (lambda s, b, h, q, k: s + (k.long() - 3 * q) * 0.5, None),
    "head_in_a_bound": (None, lambda b, h, q, k: k < h + 5),
    "batch_in_a_bound": (None, lambda b, h, q, k: k < b + 5),
    "two_keys_in_a_bound": (None, lambda b, h, q, k: 2 * k < q + 5),
    "eight_bits": (None, lambda b, h, q, k: k.to(torch.int8) < 5),
    "distance_of_a_length": (None, lambda b, h, q, k: (LENGTH - k).abs() < 5),
    "score_taken_away": (lambda s, b, h, q, k: (k - q) - s, None),
    "bias_before_a_softcap": (lambda s, b, h, q, k: torch.tanh((s + (k - q)) / 5) * 5, None),
    "bias_after_a_mask": (lambda s, b, h, q, k: torch.where(q >= k, s, -INF) + (k - q), None),
    "negative_softcap": (lambda s, b, h, q, k: -30 * torch.tanh(s / -30), None),
    "score_divided_by_zero": (lambda s, b, h, q, k: s / 0, None),
    "power_of_three": (lambda s, b, h, q, k: s + 3 ** (-8.0 * (h + 1) / H) * (k - q), None),
    "where_plus_infinite": (lambda s, b, h, q, k: torch.where(q >= k, s, INF), None),
    "unequal": (None, lambda b, h, q, k: q != k),
    "causal_score_and_mask": (SCORES["causal"], MASKS["length"]),
}


def traces(score_mod: Any, mask_mod: Any) -> tuple[Trace | None, Trace | None, Captures]:
    return (
        None if score_mod is None else trace("score_mod", score_mod, True),
        None if mask_mod is None else trace("mask_mod", mask_mod, False),
        Captures(score_mod, mask_mod),
    )


def grids() -> list[Tensor]:
    return [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate((B, H, Sq, Sk))]


class Evaluation:
    """Evaluates a BuiltIn on index tensors that broadcast to (B, H, Sq, Sk)."""

    def __init__(self, found: BuiltIn) -> None:
        self.found = found
        self.b, self.h, self.q, self.k = grids()

    def captured(self, c: Any) -> Tensor:
        index = {"": (), "b": (self.b,), "h": (self.h,)}[c.index]
        return c.tensor[index]

    def sum(self, s: Sum) -> Any:
        return s.q * self.q + s.k * self.k + s.constant + sum(w * self.captured(c) for c, w in s.terms)

    def slope(self, s: OfHead) -> Any:
        table = 1.0 if s.captured is None else self.captured(s.captured).double()
        return s.factor * table * torch.exp2(s.rate * self.h.double() + s.start)

    def inside(self, bounds: Bounds) -> Tensor:
        inside = torch.ones(B, H, Sq, Sk, dtype=torch.bool)
        for bound in bounds.all:
            inside &= bound.k * self.k + bound.sign * self.sum(bound.sum) + bound.q * self.q + bound.constant >= 0
        return inside

    def score(self, s: Tensor) -> Tensor:
        rule = self.found.score
        if rule.softcap:
            s = rule.softcap * torch.tanh(s / rule.softcap)
        if rule.bias is not None:
            s = s + self.slope(rule.bias.slope) * self.sum(rule.bias.sum)
        return torch.where(self.inside(rule.bounds), s, -INF)


@pytest.mark.parametrize("name", SCORES | MORE_SCORES)
def test_a_built_in_score_mod_is_recognised_and_keeps_its_meaning(name: str) -> None:
    mod = (SCORES | MORE_SCORES)[name]
    traced = traces(mod, None)
    found = recognise(*traced)
    assert found is not None and found.mask is None
    score = torch.randn(B, H, Sq, Sk, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    torch.testing.assert_close(Evaluation(found).score(score), mod(score, *grids()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MASKS | MORE_MASKS)
def test_a_built_in_mask_mod_is_recognised_and_keeps_its_meaning(name: str) -> None:
    mod = (MASKS | MORE_MASKS)[name]
    traced = traces(None, mod)
    found = recognise(*traced)
    assert found is not None and found.mask is not None and found.score.untouched
    assert torch.equal(Evaluation(found).inside(found.mask), mod(*grids()).expand(B, H, Sq, Sk))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 16), (128, 128), (192, 256)], ids=str)
@pytest.mark.parametrize("mask", [None, "causal_shifted", "lengths", "causal_of_a_growing_cache"])
@pytest.mark.parametrize("score", [None, *SCORES])
def test_a_built_in_modification_is_right_and_compiles_nothing(
    score: str | None, mask: str | None, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if score in ("causal", "inverse_causal", "windowed", "alibi_causal") and mask is not None:
        pytest.skip(NO_CASE + "bounds in both functions are not built in")
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(nvrtc, "load_kernel", lambda *_: pytest.fail("loaded"))
    shape = Shape(B, H, 2, Sq, Sk, *dims)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    score_mod = None if score is None else scores("cuda")[score]
    mask_mod = None if mask is None else masks("cuda")[mask]
    block_mask = None if mask_mod is None else kit.block_mask(mask_mod, shape, "cuda", (1, 16))
    dense = None if mask_mod is None else kit.dense_mask(mask_mod, shape, "cuda")
    with torch.no_grad():
        out, lse = flashbwd.flex_decoding(*tensors, score_mod, block_mask, enable_gqa=True, return_lse=True)
    for got, want in zip((out, lse), kit.oracle(shape, *tensors, score_mod, dense), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (128, 128), (192, 256), (33, 65)], ids=str)
@pytest.mark.parametrize("mask", [None, "causal_shifted", "lengths", "causal_of_a_growing_cache"])
@pytest.mark.parametrize("score", [None, "softcap", "alibi", "alibi_by_formula", "alibi_with_softcap", "alibi_causal"])
def test_gradients_of_a_built_in_modification_are_right_and_compile_nothing(
    score: str | None, mask: str | None, dims: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if score == "alibi_causal" and mask is not None:
        pytest.skip(NO_CASE + "bounds in both functions are not built in")
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(nvrtc, "load_kernel", lambda *_: pytest.fail("loaded"))
    shape = Shape(B, H, 2, Sq, Sk, *dims)
    tensors = shape.tensors(dtype, "cuda")
    score_mod = None if score is None else scores("cuda")[score]
    mask_mod = None if mask is None else masks("cuda")[mask]
    block_mask = None if mask_mod is None else kit.block_mask(mask_mod, shape, "cuda", (1, 16))
    dense = None if mask_mod is None else kit.dense_mask(mask_mod, shape, "cuda")
    inputs = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().requires_grad_() for t in tensors]
    got = flashbwd.flex_decoding(*inputs, score_mod, block_mask, enable_gqa=True)
    want, _ = kit.oracle(shape, *exact, score_mod, dense)
    dout = torch.randn(got.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda").to(dtype)
    grads = torch.autograd.grad(got, inputs, dout)
    for g, w in zip(grads, torch.autograd.grad(want, exact, dout.double()), strict=True):
        limit = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        assert float((g.double() - w).abs().max()) <= limit * float(w.abs().max())


@pytest.mark.parametrize(
    ("value", "taken"),
    [(2.0**-60, True), (-(2.0**60), True), (0.0, True), (-INF, True), (2.0**-61, False), (2.0**61, False)],
)
def test_only_numbers_whose_products_stay_normal_are_built_in(value: float, taken: bool) -> None:
    assert rules.is_of(value, torch.float32) is taken


def test_a_score_mod_and_a_mask_are_recognised_together() -> None:
    found = recognise(*traces(SCORES["alibi"], MASKS["window"]))
    assert found is not None and found.score.bias is not None
    assert found.mask is not None and len(found.mask.all) == 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_modifications_are_not_recognised(name: str) -> None:
    assert recognise(*traces(*OTHERS[name])) is None


@pytest.mark.parametrize(
    ("score", "mask", "kind"),
    [("alibi", None, 1), (None, "window", 2), ("identity", "window", 2), ("alibi", "window", 3)],
)
def test_the_first_encoded_integer_is_the_kind_of_the_modification(
    score: str | None, mask: str | None, kind: int
) -> None:
    traced = traces(score and SCORES[score], mask and MASKS[mask])
    found = recognise(*traced)
    assert found is not None
    assert encode(found, Slots(traced[2], "cpu"))[0][0] == kind


def test_the_encoding_contains_every_part_of_a_modification() -> None:
    traced = traces(SCORES["alibi_of_a_growing_cache"], MASKS["causal_of_a_growing_cache"])
    found = recognise(*traced)
    assert found is not None
    slots = Slots(traced[2], "cpu")
    integers, floats = encode(found, slots)
    assert slots.tensors() == [SLOPES, LENGTHS32, LENGTHS, LENGTH]
    nothing = [0, 0, 0, 0]
    assert floats == [0.0, -1.0, 0.0, 0.0]
    # -SLOPES[h] * (LENGTHS32[b] - 1 - k)
    assert integers[:14] == [3, 0, -1, *(0, 0, -1), *(1, 1, 1, 0), *nothing]
    # Two bounds. The first is -k + (q - 5 + LENGTHS[b]) >= 0, with a 64-bit sum.
    assert integers[14:30] == [2, *(-1, 1, 0, 0), *(1, 1, -5), *(1, 2, 1, 1), *nothing]
    # The second is k - (LENGTH - 7) >= 0.
    assert integers[30:45] == [*(1, -1, 0, 0), *(0, 0, -7), *(1, 3, 0, 0), *nothing]
    assert len(integers) == 15 + 4 * 15
