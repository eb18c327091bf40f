"""Warm calls: what is recognised as a call like one before, and what is read anew."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashbwd
from flashbwd.mods import run, steps

INPUTS = tuple(torch.zeros(1, 1, 1, 8) for _ in range(3))
table = torch.zeros(3)


@pytest.fixture(autouse=True)
def _no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_steps", {})
    monkeypatch.setattr(steps, "_met", {})


def plus(*values: Any) -> Any:
    a, b = (*values, 0.0)[:2]
    return lambda s, b_, h, q, k: s + a + b


def mask_of(mask_mod: Any, device: str = "cpu") -> BlockMask:
    return create_block_mask(mask_mod, None, None, 1, 256, device=device)


class Recogniser:
    """A step of a call with these functions, whose operator returns the captured tensors that it is given."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        score_mod: Any,
        captured: list[Tensor],
        mask: BlockMask | None = None,
        places: list[int] | None = None,
    ) -> None:
        monkeypatch.setattr(steps, "_operators", [lambda q, k, v, number, *tensors: list(tensors)] * 5)
        wanted = (True, 0, False, False, False)
        settings = run._settings_of(0, None, wanted)
        for _ in range(2):
            steps.remember(score_mod, mask, None, True, settings, captured, list(places or range(len(captured))))
        self.mask = mask
        self.steps = [step for kind in steps._steps.values() for step, _ in kind]

    def __call__(self, score_mod: Any, mask: BlockMask | None = None) -> list[Tensor] | None:
        return self.steps[-1](*INPUTS, score_mod, mask or self.mask)


def assert_found(found: list[Tensor] | None, *expected: Tensor) -> None:
    assert found is not None and len(found) == len(expected)
    assert all(got is want for got, want in zip(found, expected, strict=True))


def test_tensors_of_a_closure_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (torch.zeros(3) for _ in range(3))
    known = Recogniser(monkeypatch, plus(one, two), [one, two])
    assert_found(known(plus(one, two)), one, two)
    assert_found(known(plus(three, one)), three, one)
    value = one

    def rebound(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + value

    known = Recogniser(monkeypatch, rebound, [one])
    value = two
    assert_found(known(rebound), two)
    value = 2.0  # type: ignore[assignment]
    assert known(rebound) is None


def test_the_kernel_gets_its_tensors_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = torch.zeros(3), torch.ones(3)
    known = Recogniser(monkeypatch, plus(one, two), [two, one], places=[1, 0])
    assert_found(known(plus(one, two)), two, one)
    known = Recogniser(monkeypatch, plus(one, two), [two], places=[1])
    assert_found(known(plus(two, one)), one)


def test_tensors_of_globals_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(s) + table[h]

    known = Recogniser(monkeypatch, mod, [table])
    assert_found(known(mod), table)
    other = torch.ones(3)
    monkeypatch.setitem(globals(), "table", other)
    assert_found(known(mod), other)
    monkeypatch.setitem(globals(), "torch", None)
    assert known(mod) is None


def test_another_constant_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Recogniser(monkeypatch, plus(2.0), [])
    for value in (3.0, 2, True, None, torch.zeros(1)):
        assert known(plus(value)) is None


def test_another_function_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = plus(2.0)
    known = Recogniser(monkeypatch, mod, [])
    assert known(mod) == []
    assert known(lambda s, b, h, q, k: s + 2.0) is None
    assert known(None) is None
    mod.__code__ = plus(1).__code__.replace(co_name="edited")
    assert known(mod) is None


def test_a_tensor_that_needs_a_gradient_goes_the_longer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.zeros(3)
    known = Recogniser(monkeypatch, plus(one), [one])
    learned = torch.zeros(3, requires_grad=True)
    assert known(plus(learned)) is None
    with torch.no_grad():
        assert_found(known(plus(learned)), learned)


def test_what_identities_do_not_tell_about_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.zeros(3)

    class Mod:
        weight = one

        def method(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * self.weight[h]

    mods = [Mod().method, plus([one]), plus(one, one), plus(Mod), lambda s, b, h, q, k, w=one: s + w]
    for mod in mods:
        assert Recogniser(monkeypatch, mod, [one]).steps == []


def test_a_block_mask_is_known_by_its_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(lambda b, h, q, k: k < 100)
    known = Recogniser(monkeypatch, None, [], mask)
    assert known(None) == []
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        before = getattr(mask, name)
        setattr(mask, name, before.clone())
        assert known(None) is None
        setattr(mask, name, before)
    assert known(None) == []
    mask.mask_mod = lambda b, h, q, k: k < 99
    assert known(None) is None


def test_a_block_mask_of_one_call_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = run._settings_of(0, None, (True, 0, False, False, False))
    for _ in range(3):
        steps.remember(None, mask_of(lambda b, h, q, k: k < 100), None, True, settings, [], [])
    assert steps._steps == {}


def test_the_lists_of_a_block_mask_are_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(lambda b, h, q, k: k < 100)
    lists = weakref.ref(mask.kv_indices)
    Recogniser(monkeypatch, None, [], mask)
    assert len(steps._steps) == 1
    del mask
    gc.collect()
    assert steps._steps == {} and lists() is None


def test_there_is_an_end_to_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = run._settings_of(0, None, (True, 0, False, False, False))
    for value in range(100):
        steps.remember(plus(value), None, None, True, settings, [], [])
    assert sum(map(len, steps._steps.values())) == steps._MOST_OF_A_KIND
    monkeypatch.setattr(steps, "_MOST_KINDS", 10)
    for value in range(100):
        steps.remember(None, None, float(value), True, settings, [], [])
    assert len(steps._steps) <= 10


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_a_known_call_sees_what_has_changed(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(seqlen_q=1)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    length = torch.tensor(150, device="cuda")
    weight = torch.ones(4, device="cuda")
    one = factor = 1.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * weight[h] * factor

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < length

    mask = None
    if masked:  # all blocks are partial ones, so that a changed length needs no other lists
        number = torch.tensor([[[4]]], dtype=torch.int32, device="cuda")
        indices = torch.arange(4, dtype=torch.int32, device="cuda").view(1, 1, 1, 4)
        sizes = {"BLOCK_SIZE": (1, 64), "seq_lengths": (1, shape.seqlen_k)}
        mask = BlockMask.from_kv_blocks(number, indices, mask_mod=mask_mod, **sizes)
    longer_ways: list[int] = []
    real = run._decoding_forward
    monkeypatch.setattr(run, "_decoding_forward", lambda *a: longer_ways.append(1) or real(*a))

    def check(known: bool) -> None:
        longer_ways.clear()
        with torch.no_grad():
            out = flashbwd.flex_decoding(*tensors, mod, mask, enable_gqa=True)
        dense = kit.dense_mask(mask_mod, shape, "cuda") if masked else None
        expected, _ = kit.oracle(shape, *tensors, mod, dense)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
        assert (longer_ways == []) == known

    for _ in range(3):
        flashbwd.flex_decoding(*tensors, mod, mask, enable_gqa=True)
    check(known=True)
    weight.fill_(2.0)
    length.fill_(33)
    check(known=True)
    weight = torch.full((4,), 0.5, device="cuda")
    length = torch.tensor(100, device="cuda")
    check(known=True)
    weight = weight.bfloat16()  # a kernel reads it as what it was compiled for
    check(known=False)
    weight = weight.float()
    check(known=True)
    factor = 3.0
    check(known=False)
    factor = one
    check(known=True)
    if mask is not None:
        mask.kv_num_blocks.fill_(1)  # the GPU reads the lists in each call
        length.fill_(64)
        check(known=True)


@pytest.mark.gpu
def test_a_known_call_still_has_a_gradient_when_one_is_asked_for() -> None:
    tensors = Shape().tensors(torch.bfloat16, "cuda")
    weight = torch.ones(4, device="cuda")

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * weight[h]

    for _ in range(3):
        out = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)
        assert not out.requires_grad
    weight.requires_grad_()
    assert flashbwd.flex_decoding(*tensors, mod, enable_gqa=True).requires_grad
    with torch.autocast("cuda", torch.float16):
        assert flashbwd.flex_decoding(*(t.detach() for t in tensors), mod, enable_gqa=True).dtype == torch.float16
