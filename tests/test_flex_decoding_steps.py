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
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask

import flashbwd
from flashbwd.mods import run, steps

INPUTS = tuple(torch.zeros(1, 1, 1, 8) for _ in range(3))
OUTPUT = (True, 0, False, False, False)
table = torch.zeros(3)


@pytest.fixture(autouse=True)
def _no_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_steps", {})
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(steps, "_at_once", None)  # which serves CUDA tensors alone


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
        monkeypatch.setattr(steps, "_operators", [[lambda q, k, v, number, *tensors: list(tensors)]] * 9)
        settings = run._settings_of(0, None, OUTPUT)
        for _ in range(2):
            steps.remember(score_mod, mask, None, OUTPUT, settings, captured, list(places or range(len(captured))))
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


def test_a_call_that_wants_more_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[int, Any] = {2: (table, table), 3: (table, table, table)}
    operators = [lambda *_, number=number: results[number] for number in (2, 3)]
    monkeypatch.setattr(steps, "_operators", [[lambda *_: table, *operators]] * 5)
    for wanted in (OUTPUT, (True, 0, True, False, False), (True, 0, True, True, False), (True, 4, True, False, False)):
        settings = run._settings_of(0, None, wanted)
        steps.remember(None, None, None, wanted, settings, [], [])
        more = steps.beside_the_output(wanted)
        assert more == {OUTPUT: False, (True, 0, True, False, False): True}.get(wanted, wanted[1:])
        ((step, _),) = steps._steps[id(None), id(None), None, True, more]
        number = 1 + wanted[2] + wanted[3]
        assert step(*INPUTS, None, None) is (table if number == 1 else results[number])
    assert len(steps._steps) == 4
    results[2] = (None, None)
    ((step, _),) = steps._steps[id(None), id(None), None, True, True]
    assert step(*INPUTS, None, None) is None


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

        def __init__(self) -> None:
            self.bias = one

        def method(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * self.weight[h]

        def biased(self) -> Any:
            return lambda s, b, h, q, k: getattr(self, "bias")[h] + self.bias[h]  # noqa: B009

        def weighted(self) -> Any:
            return lambda s, b, h, q, k: s * self.weight[h]

    def with_a_keyword(s: Any, b: Any, h: Any, q: Any, k: Any, *, w: Any = one) -> Any:
        return s + w

    def again(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return again(s, b, h, q, k)

    of_objects = [Mod().method, Mod().biased(), Mod().weighted(), plus(Mod)]
    for mod in [*of_objects, plus([one]), with_a_keyword, again]:
        assert Recogniser(monkeypatch, mod, [one]).steps == []


def test_functions_and_tuples_that_a_function_reaches_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (torch.zeros(3) for _ in range(3))

    def mod(inner: Any, *others: Any) -> Any:
        return lambda s, b, h, q, k: inner(s, b, h, q, k) + others[0]

    known = Recogniser(monkeypatch, mod(plus(one, 2.0), two, (True,)), [one, two])
    assert_found(known(mod(plus(one, 2.0), two, (True,))), one, two)
    assert_found(known(mod(plus(three, 2.0), one, (True,))), three, one)
    others = [(plus(one, 3.0), two, (True,)), (plus(one, 2.0), two, (False,)), (plus(one, 2.0), two, ())]
    for other in [*others, (plus(one, 2.0), two), (one, two, (True,)), (plus(one, 2.0), 2.0, (True,))]:
        assert known(mod(*other)) is None


def test_a_tensor_of_two_names_is_passed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = torch.zeros(3), torch.zeros(3)
    known = Recogniser(monkeypatch, plus(one, one), [one])
    assert_found(known(plus(two, two)), two)
    assert known(plus(one, two)) is None
    known = Recogniser(monkeypatch, plus(plus(one), one), [one])
    assert_found(known(plus(plus(two), two)), two)
    assert known(plus(plus(one), two)) is None


def test_attributes_that_a_function_reads_of_an_object_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pages:
        def __init__(self, table: Tensor, size: int) -> None:
            self.table, self.size, self.unused = table, size, [object()]

        def mod(self, inner: Any) -> Any:
            return lambda s, b, h, q, k: inner(s, b, h, q, k) + self.table[k // self.size]

    one, two, three = (torch.zeros(3) for _ in range(3))
    pages = Pages(one, 16)
    known = Recogniser(monkeypatch, pages.mod(plus(two)), [two, one])
    assert_found(known(pages.mod(plus(three))), three, one)
    assert_found(known(Pages(three, 16).mod(plus(two))), two, three)
    pages.table = three
    assert_found(known(pages.mod(plus(two))), two, three)
    pages.unused.append(object())
    assert_found(known(pages.mod(plus(two))), two, three)
    for name, value in (("size", 8), ("table", [one])):
        setattr(pages, name, value)
        assert known(pages.mod(plus(two))) is None
        pages = Pages(one, 16)
    assert known(type("Other", (Pages,), {})(one, 16).mod(plus(two))) is None
    del pages.table
    with pytest.raises(AttributeError):
        known(pages.mod(plus(two)))


def test_defaults_are_what_a_function_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = torch.zeros(3), torch.zeros(3)

    def mod(weight: Any, factor: Any = True) -> Any:
        return lambda s, b, h, q, k, w=weight, f=factor: s * w[h] * f

    known = Recogniser(monkeypatch, mod(one), [one])
    assert_found(known(mod(two)), two)
    assert known(mod(one, False)) is None
    assert known(mod(2.0)) is None
    without = mod(one)
    without.__defaults__ = None
    assert known(without) is None


def test_masks_that_pytorch_puts_together_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, starts = torch.tensor([200]), torch.tensor([5])
    mask = mask_of(and_masks(lambda b, h, q, k: k < lengths[b], lambda b, h, q, k: k >= starts[b]))
    known = Recogniser(monkeypatch, None, [lengths, starts], mask)
    assert_found(known(None), lengths, starts)
    before, starts = starts, torch.tensor([6])
    assert_found(known(None), lengths, starts)
    assert before is not starts


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


def test_another_block_mask_of_the_same_blocks_passes_its_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    length = torch.tensor(100)
    mod = lambda b, h, q, k: k < length  # noqa: E731
    monkeypatch.setattr(steps, "_operators", [[lambda q, k, v, number, *tensors: list(tensors)]] * 9)
    settings = run._settings_of(0, None, OUTPUT)
    for _ in range(3):
        steps.remember(None, mask_of(mod), None, OUTPUT, settings, [length], [0])
    ((kind, known),) = steps._steps.items()
    assert kind[1] == id(mod.__code__)
    inputs = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 256, 8), torch.zeros(1, 1, 256, 8)
    mask = mask_of(mod)
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    step = known[0][0]
    assert_found(step(*inputs, None, mask), *lists, length)  # type: ignore[arg-type]
    assert step(inputs[0], inputs[1][:, :, 1:], inputs[2], None, mask) is None
    others = [mask_of(lambda b, h, q, k: k < length), create_block_mask(mod, None, None, 1, 256, "cpu", BLOCK_SIZE=64)]
    for other in [*others, BlockMask.from_kv_blocks(*lists[:2], BLOCK_SIZE=128, mask_mod=mod, seq_lengths=(1, 256))]:
        assert step(*inputs, None, other) is None


def test_a_block_mask_that_comes_again_gets_a_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_operators", [[lambda q, k, v, number, *_: number]] * 9)
    mod = lambda b, h, q, k: k < 100  # noqa: E731
    settings = run._settings_of(0, None, OUTPUT)
    inputs = tuple(torch.zeros(1, 1, length, 8) for length in (1, 256, 256))

    def call(mask: BlockMask) -> Any:
        found = steps.run_step(*inputs, None, mask, None, True, False)
        if found is None:
            steps.remember(None, mask, None, OUTPUT, settings, [], [])
        return found

    first, second = mask_of(mod), mask_of(mod)
    assert call(first) is None
    of_any = call(second)
    assert of_any is not None
    for mask in (first, second):
        assert call(mask) is None
        assert call(mask) not in (None, of_any)
    assert call(mask_of(mod)) == of_any
    assert len(steps._steps) == 3


def test_a_mask_of_something_else_than_a_function_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mask:
        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return k < 100

    monkeypatch.setattr(steps, "_operators", [[lambda q, k, v, number, *_: number]] * 9)
    settings = run._settings_of(0, None, OUTPUT)
    mask = mask_of(Mask())
    for block_mask in (None, mask, mask):
        steps.remember(None, block_mask, None, OUTPUT, settings, [], [])
    assert steps.run_step(*INPUTS, None, None, None, True, False) is not None
    assert steps.run_step(*INPUTS, None, mask, None, True, False) is None


def test_the_lists_of_a_block_mask_are_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(lambda b, h, q, k: k < 100)
    lists = weakref.ref(mask.kv_indices)
    code = mask.mask_mod.__code__
    Recogniser(monkeypatch, None, [], mask)
    assert {kind[1] for kind in steps._steps} == {id(code), id(mask)}
    del mask
    gc.collect()
    assert [kind[1] for kind in steps._steps] == [id(code)]
    assert lists() is None


def test_there_is_an_end_to_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = run._settings_of(0, None, OUTPUT)
    for value in range(100):
        steps.remember(plus(value), None, None, OUTPUT, settings, [], [])
    assert sum(map(len, steps._steps.values())) == steps._MOST_OF_A_KIND
    monkeypatch.setattr(steps, "_MOST_KINDS", 10)
    for value in range(100):
        steps.remember(None, None, float(value), OUTPUT, settings, [], [])
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
    if mask is not None:
        first = mask
        mask = BlockMask.from_kv_blocks(number.clone(), indices.clone(), mask_mod=mask_mod, **sizes)
        number.fill_(0)
        check(known=True)
        number.fill_(4)
        mask = first
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
@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"return_aux": AuxRequest(lse=True)},
        {"return_aux": AuxRequest(max_scores=True)},
        {"return_aux": AuxRequest(lse=True, max_scores=True)},
        {"kernel_options": {"SPLIT_KV": 3}},
        {"kernel_options": {"SPLIT_KV": 2}, "return_lse": True},
    ],
    ids=str,
)
def test_a_known_call_returns_the_statistics_that_are_wanted(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(seqlen_q=1)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    weight = torch.rand(4, device="cuda")
    causal = kit.mask_mods(shape, "cuda")["causal"]
    mask = create_block_mask(causal, None, None, 1, shape.seqlen_k, device="cuda", BLOCK_SIZE=64)  # of all heads

    def call(tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
        mod = lambda s, b, h, q, k: s * weight[h]  # noqa: E731
        with torch.no_grad():
            results: Any = flashbwd.flex_decoding(*tensors, mod, mask, enable_gqa=True, **options)
        if "return_aux" in options:
            return [results[0], results[1].lse, results[1].max_scores]
        return list(results) if options.get("return_lse") else [results]

    for _ in range(3):
        call(tensors)
    longer_ways: list[int] = []
    real = run._decoding_forward
    monkeypatch.setattr(run, "_decoding_forward", lambda *a: longer_ways.append(1) or real(*a))
    weight.mul_(2)
    found = call(tensors)
    assert longer_ways == []
    for got, want in zip(found, call(tuple(t.double() for t in tensors)), strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
    with torch.autocast("cuda", torch.float16):
        cast = call(tensors)[0]
        assert cast is not None and cast.dtype == torch.float16


@pytest.mark.gpu
def test_calls_with_the_paged_cache_of_pytorch_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, page = Shape(batch=1, seqlen_q=1, seqlen_k=256), 64
    q, k, v = shape.tensors(torch.bfloat16, "cuda")
    slopes = torch.rand(4, device="cuda")
    cache = PagedAttention(4, page, 1, device="cuda")
    cache.reserve(torch.tensor([0], device="cuda"), torch.tensor([256], device="cuda"))
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    cache.page_table[0] = order
    cache.physical_to_logical[0, order] = torch.arange(4, device="cuda")
    places = (order[:, None] * page + torch.arange(page, device="cuda")).flatten()
    physical = [torch.empty_like(t).index_copy_(2, places, t) for t in (k, v)]
    causal = kit.mask_mods(shape, "cuda")["causal"]
    mask = cache.convert_logical_block_mask(create_block_mask(causal, 1, None, 1, 256, "cuda", BLOCK_SIZE=page))
    mod = lambda s, b, h, q, k: s * slopes[h] + k / 256  # noqa: E731
    longer_ways: list[int] = []
    real = run._decoding_forward
    monkeypatch.setattr(run, "_decoding_forward", lambda *a: longer_ways.append(1) or real(*a))
    for _ in range(4):
        longer_ways.clear()
        slopes.add_(1)
        with torch.no_grad():
            out = flashbwd.flex_decoding(q, *physical, cache.get_score_mod(mod), mask, enable_gqa=True)
        expected, _ = kit.oracle(shape, q, k, v, mod)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    assert longer_ways == []


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
