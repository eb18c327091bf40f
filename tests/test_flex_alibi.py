"""ALiBi in FlexAttention training: which functions the kernels compute, and with which slopes. No test needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flex_lists import Sizes, dense, random_mask
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import create_block_mask

from flashbwd.flex import backends, cache
from flashbwd.flex.diagonal import hides_above
from flashbwd.flex.lists import key_block_lists
from flashbwd.flex.score_change import Slopes, hides_above_diagonal, score_change_of
from flashbwd.flex.tile import Tile
from flashbwd.integrations import flex_node, flex_pass
from flashbwd.mods.in_graph import text_of
from flashbwd.reference.decoding import DecodingCall

B, H = 2, 6
CPU = torch.device("cpu")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, -0.3, 0.7])
BY_BATCH = torch.rand(B, H)
OFTEN = torch.rand(2 * H)[::2]
HALF = SLOPES.to(torch.bfloat16)
STEP = torch.tensor(0.01)
HEAD = torch.arange(H, dtype=torch.float32)
BY_FORMULA = torch.exp2(-(HEAD + 1) * 8.0 / H)


class Layer:
    def __init__(self) -> None:
        self.slopes = SLOPES.clone()

    def score_mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.slopes[h] * (k - q)


def offset_of_mean(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    bias = (q + 3 - k) * SLOPES[h]
    return 5 * torch.tanh(s / 5) - bias


# name: (score_mod, its slopes, whether the distance is absolute)
FORMS: dict[str, tuple[Any, Tensor, bool]] = {
    "keys_minus_queries": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), SLOPES, False),
    "queries_minus_keys": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), SLOPES, False),
    "absolute": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), SLOPES, True),
    "absolute_of_the_other_difference": (lambda s, b, h, q, k: s + (k - q).abs() * -SLOPES[h], SLOPES, True),
    "minus_absolute": (lambda s, b, h, q, k: s + -torch.abs(q - k) * SLOPES[h], SLOPES, True),
    "absolute_of_floats": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).float().abs(), SLOPES, True),
    "absolute_cast": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs().float(), SLOPES, True),
    "absolute_scaled": (lambda s, b, h, q, k: s - SLOPES[h] * 2 * ((k - q).abs() * 0.25), SLOPES / 2, True),
    "attention_gym": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)), BY_FORMULA, False),
    "exp2": (lambda s, b, h, q, k: s + torch.exp2(-(h + 1) * 8.0 / H) * (k - q), BY_FORMULA, False),
    "power": (lambda s, b, h, q, k: s - 2 ** (-8.0 * (h + 1) / H) * (q - k).abs(), BY_FORMULA, True),
    "power_of_a_half": (lambda s, b, h, q, k: s - 0.5 ** (h + 1) * (q - k).abs(), 0.5 ** (HEAD + 1), True),
    "exp": (lambda s, b, h, q, k: s + torch.exp(-0.3 * h) * (k - q), torch.exp(-0.3 * HEAD), False),
    "quotient": (lambda s, b, h, q, k: s - (q - k).abs() * (1 / (h + 1.0)), 1 / (HEAD + 1), True),
    "linear": (lambda s, b, h, q, k: s - (q - k).abs() * (0.1 * h), 0.1 * HEAD, True),
    "two_ranges": (
        lambda s, b, h, q, k: (
            s - torch.where(h < 4, torch.exp2(-(h + 1.0)), torch.exp2(-(h - 3) * 0.5)) * (q - k).abs()
        ),
        torch.where(HEAD < 4, torch.exp2(-(HEAD + 1)), torch.exp2(-(HEAD - 3) * 0.5)),
        True,
    ),
    "number": (lambda s, b, h, q, k: s - (q - k).abs() * 0.05, torch.full((H,), 0.05), True),
    "one": (lambda s, b, h, q, k: s - (q - k).abs(), torch.ones(H), True),
    "relative": (lambda s, b, h, q, k: s + (q - k), -torch.ones(H), False),
    "captured_number": (lambda s, b, h, q, k: s - STEP * (q - k).abs(), torch.full((H,), 0.01), True),
    "by_batch": (lambda s, b, h, q, k: s - BY_BATCH[b, h] * (q - k).abs(), BY_BATCH, True),
    "by_batch_in_two_steps": (lambda s, b, h, q, k: s + BY_BATCH[b][h] * (k - q), BY_BATCH, False),
    "strided": (lambda s, b, h, q, k: s + OFTEN[h] * (k - q), OFTEN, False),
    "bfloat16": (lambda s, b, h, q, k: s + HALF[h].float() * (k - q), HALF.float(), False),
    "bfloat16_products": (lambda s, b, h, q, k: s - HALF[h] * (q - k), HALF.float(), False),
    "softcap_first": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5) - SLOPES[h] * (q - k).abs(), SLOPES, True),
    "method": (Layer().score_mod, SLOPES, False),
    "offset": (offset_of_mean, SLOPES, False),
}
OTHERS: dict[str, Any] = {
    "table": lambda s, b, h, q, k: s + SLOPES[(q - k).abs() % H],
    "no_distance": lambda s, b, h, q, k: s + SLOPES[h],
    "key_alone": lambda s, b, h, q, k: s + SLOPES[h] * k,
    "sum": lambda s, b, h, q, k: s + SLOPES[h] * (q + k),
    "twice_the_key": lambda s, b, h, q, k: s - SLOPES[h] * (q - 2 * k).abs(),
    "square": lambda s, b, h, q, k: s - SLOPES[h] * (q - k) * (q - k),
    "root": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs().sqrt(),
    "logarithm": lambda s, b, h, q, k: s - SLOPES[h] * torch.log1p((q - k).abs().float()),
    "two_biases": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() + (k - q) * 0.1,
    "bias_before_the_softcap": lambda s, b, h, q, k: 5 * torch.tanh((s - SLOPES[h] * (q - k).abs()) / 5),
    "slope_of_the_query": lambda s, b, h, q, k: s - torch.exp2(-q * 0.01) * (q - k).abs(),
    "length": lambda s, b, h, q, k: s - SLOPES[h] * (q + torch.arange(3)[b] - k),
    "clamped": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).clamp(max=4),
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s - SLOPES[h] * (q - k), -math.inf),
    "score_twice": lambda s, b, h, q, k: s + s - SLOPES[h] * (q - k),
    "random_slope": lambda s, b, h, q, k: s - torch.rand_like(s) * (q - k),
    "infinite_softcap": lambda s, b, h, q, k: math.inf * torch.tanh(s / math.inf),
}


def slopes_of(mod: Any, batch: int = B, heads: int = H) -> Slopes:
    change = score_change_of(mod)
    assert change is not None and change.alibi is not None
    return Slopes(change.alibi, mod, batch, heads)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_alibi_gives_its_slopes(name: str) -> None:
    mod, expected, absolute = FORMS[name]
    slopes = slopes_of(mod)
    found = slopes.tensor(CPU)
    assert slopes.alibi.absolute is absolute
    assert slopes.alibi.offset == (3 if name == "offset" else 0)
    assert slopes.shape == found.shape == expected.shape and found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    change = score_change_of(mod)
    assert change is not None and change.softcap == (5 if name in ("softcap_first", "offset") else 0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_not_alibi(name: str) -> None:
    assert score_change_of(OTHERS[name]) is None


def test_fewer_heads_than_slopes_read_the_first_ones() -> None:
    assert torch.equal(slopes_of(FORMS["absolute"][0], heads=3).tensor(CPU), SLOPES[:3])


def test_slopes_follow_writes_to_the_captured_tensor_and_to_the_object() -> None:
    table, layer = SLOPES.clone(), Layer()
    mods = (
        lambda s, b, h, q, k: s - table[h] * (q - k).abs(),
        lambda s, b, h, q, k: s - table[h].exp() * (q - k).abs(),
        layer.score_mod,
    )
    before = [slopes_of(mod).tensor(CPU).clone() for mod in mods]
    table += 1
    layer.slopes = table
    after = [slopes_of(mod).tensor(CPU) for mod in mods]
    assert not any(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(after[0], table) and torch.equal(after[2], table)


numbers = st.floats(-2, 2).filter(lambda x: abs(x) > 1e-3).map(lambda x: round(x, 3))
slope_functions = st.one_of(
    numbers.map(lambda x: lambda b, h: x),
    st.tuples(numbers, numbers).map(lambda x: lambda b, h: torch.exp2(h * x[0] + x[1])),
    numbers.map(lambda x: lambda b, h: SLOPES[h] * x),
    numbers.map(lambda x: lambda b, h: BY_BATCH[b, h] - x),
    numbers.map(lambda x: lambda b, h: torch.tanh(h * x) + b.float()),
)
INDICES = torch.randint(0, 3000, (2, 50))


@settings(max_examples=60, deadline=None)
@given(
    slope=slope_functions,
    offset=st.integers(-500, 500),
    sign=st.sampled_from([1, -1]),
    absolute=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_the_slopes_reproduce_the_function(
    slope: Callable[[Tensor, Tensor], Any], offset: int, sign: int, absolute: bool, softcap: float
) -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        distance = sign * (q + offset - k)
        return s - slope(b, h) * (distance.abs() if absolute else distance)

    found = slopes_of(mod)
    slopes = found.tensor(CPU).double().expand(B, H)
    assert (found.alibi.offset, found.alibi.absolute) == (offset, absolute)
    for b in range(B):
        for h in range(H):
            q, k = INDICES
            distance = (q + offset - k).abs() if absolute else q + offset - k
            score = torch.randn(50, dtype=torch.float64)
            expected = mod(score, torch.tensor(b), torch.tensor(h), q, k)
            capped = softcap * torch.tanh(score / softcap) if softcap else score
            torch.testing.assert_close(capped - slopes[b, h] * distance, expected, rtol=2e-6, atol=2e-5)


# ---- the diagonal ----


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 300), st.integers(1, 300)),
    block=st.sampled_from([(64, 64), (128, 128), (20, 48), (1 << 30, 1 << 30)]),
    shift=st.integers(-200, 200),
    offset=st.integers(-200, 200),
    tile=st.sampled_from([Tile(), Tile(128, 128)]),
    seed=st.integers(0, 2**31),
)
def test_whether_a_mask_hides_all_pairs_above_a_diagonal(
    sizes: Sizes, block: tuple[int, int], shift: int, offset: int, tile: Tile, seed: int
) -> None:
    mask, _ = random_mask(sizes, block, (False, False), seed)
    random = mask.mask_mod
    mask.mask_mod = lambda b, h, q, k: random(b, h, q, k) & (k <= q + shift)
    lists = key_block_lists(mask, sizes, tile)
    visible = dense(lists, sizes)
    above = torch.arange(sizes[3]) > torch.arange(sizes[2])[:, None] + offset
    assert hides_above(lists, offset) == (not bool((visible & above).any()))


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("length", [1, 63, 128, 129, 300])
def test_a_causal_mask_hides_exactly_the_pairs_above_its_diagonal(length: int, offset: int) -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    lists = key_block_lists(mask, (1, 1, length, length))
    assert hides_above(lists, offset) == (offset >= 0)


DOCUMENT = torch.arange(100) // 30
PROVABLE = {
    "causal": (lambda b, h, q, k: q >= k, True),
    "strict": (lambda b, h, q, k: k < q, True),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 9), True),
    "documents": (lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k), True),
    "of_three": (lambda b, h, q, k: torch.logical_and((k > 3) & (q >= k), (k % 2 == 0) | (q > 7)), True),
    "two_sided": (lambda b, h, q, k: (q - k).abs() < 9, False),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < 9), False),
    "next_key": (lambda b, h, q, k: q + 1 >= k, False),
    "opposite": (lambda b, h, q, k: ~(q >= k), False),
    "table": (lambda b, h, q, k: DOCUMENT[q] >= DOCUMENT[k], False),
}


@pytest.mark.parametrize("name", PROVABLE)
def test_a_mask_mod_that_combines_a_causal_mask_by_and_provably_hides_later_keys(name: str) -> None:
    mod, expected = PROVABLE[name]
    assert hides_above_diagonal(mod, 0) is expected
    assert not hides_above_diagonal(mod, -2)


# ---- the choice ----


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())  # a GPU would say which


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The score_mods that were compiled at run time: they capture tensors on the CPU, so they cannot be compiled."""
    mods: list[Any] = []
    real = cache.visible_everywhere
    monkeypatch.setattr(cache, "visible_everywhere", lambda queries, keys, _: real(queries, keys, CPU))
    monkeypatch.setattr(backends, "generated", lambda mod, *_: mods.append(mod))
    return mods


def chosen(mod: Any, seqlen_q: int, seqlen_k: int, mask: Any = None) -> backends.KernelCall:
    """The kernel call for tensors on a GPU, with the lists of a mask on the CPU."""
    with FakeTensorMode():
        query, key = (torch.empty(B, H, n, 64, device="cuda") for n in (seqlen_q, seqlen_k))
    return backends.choose(DecodingCall(mod, mask, 0.1), query, key, key, [], False)


def block_mask(mod: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return create_block_mask(mod, None, None, seqlen_q, seqlen_k, device="cpu")


def test_an_absolute_distance_needs_no_mask() -> None:
    call = chosen(FORMS["absolute"][0], 75, 75)
    assert call.lists is None and call.slopes is not None
    assert torch.equal(call.slopes.tensor(CPU), SLOPES)


def test_a_signed_distance_is_compiled_without_a_mask_that_hides_later_keys(compiled: list[Any]) -> None:
    signed = FORMS["keys_minus_queries"][0]
    call = chosen(signed, 100, 100, block_mask(PROVABLE["documents"][0], 100, 100))
    assert call.lists is not None and call.lists.hides_above_diagonal and call.slopes is not None
    assert compiled == []
    for mask in (block_mask(PROVABLE["next_key"][0], 100, 100), None):
        call = chosen(signed, 100, 100, mask)
        assert call.operator is torch.ops.flashbwd.score_mod_attention_backward and call.slopes is None
        assert "softcap" not in call.options
    assert compiled == [signed, signed]


def test_distances_that_do_not_align_the_last_query_with_the_last_key_are_compiled(compiled: list[Any]) -> None:
    plain, shifted = FORMS["absolute"][0], (lambda s, b, h, q, k: s - SLOPES[h] * (q + 40 - k).abs())
    assert chosen(shifted, 100, 140).slopes is not None and compiled == []
    for mod, lengths in ((plain, (100, 140)), (shifted, (100, 100)), (shifted, (140, 100))):
        assert chosen(mod, *lengths).slopes is None
    assert compiled == [plain, shifted, shifted]


def test_lists_know_the_diagonal_of_unequal_lengths(compiled: list[Any]) -> None:
    mod = lambda s, b, h, q, k: s + SLOPES[h] * (k - q - 40)  # noqa: E731
    assert chosen(mod, 100, 140, block_mask(lambda b, h, q, k: q + 40 >= k, 100, 140)).slopes is not None
    assert compiled == []
    assert chosen(mod, 100, 140, block_mask(lambda b, h, q, k: q + 41 >= k, 100, 140)).slopes is None
    assert compiled == [mod]


def test_a_plan_reads_only_the_shape_of_the_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slopes, "tensor", lambda *_: pytest.fail("evaluated"))
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        backends._ops, "call_below_autograd", lambda *_, **options: seen.update(options) or '{"backend": "sm90"}'
    )
    call = chosen(FORMS["by_batch"][0], 75, 75)
    rows = torch.empty(B, H, 75, 64, device="meta", dtype=torch.bfloat16)
    call.plan(rows, rows, rows, rows, rows, torch.empty(B, H, 75, device="meta"), None, 0)
    slopes = seen["alibi_slopes"]
    assert (slopes.shape, slopes.dtype, slopes.device.type) == ((B, H), torch.float32, "meta")


@pytest.mark.parametrize("together", [True, False])
def test_a_graph_is_also_planned_with_the_compiled_kernel_if_only_one_length_may_change(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[backends.KernelCall] = []
    monkeypatch.setattr(backends.KernelCall, "plan", lambda call, *_: planned.append(call))
    indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    text = text_of("score_mod", make_fx(FORMS["number"][0])(torch.zeros(()), *indices))
    shapes = ShapeEnv(duck_shape=False)
    symbols = [shapes.create_symbol(640, ConstantSource(name)) for name in ("queries", "keys")]
    seqlen_q, seqlen_k = (shapes.create_symintnode(symbols[i], hint=640) for i in (0, 0 if together else 1))
    with FakeTensorMode(shape_env=shapes):
        query, key = (torch.empty(B, H, n, 64, device="cuda") for n in (seqlen_q, seqlen_k))
        lse = torch.empty(B, H, seqlen_q, device="cuda")
    tensors = (query, query, key, key, query, lse, None)
    score = flex_node.Score(text, [], [], [])
    flex_pass._plan(0.1, flex_node._NO_MASK, score, tensors)
    assert [call.score_mod is None for call in planned] == ([True] if together else [True, False])
