"""flex_decoding on the CPU: hidden keys contribute 0 whatever their score or value is; the effect of kernel options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd

INF, NAN = float("inf"), float("nan")
SHAPE = Shape(seqlen_k=100)
SEEN = 70  # number of visible keys in most tests; the last partial block has visible and hidden keys


def first_keys(count: int = SEEN) -> BlockMask:
    return kit.block_mask(lambda b, h, q, k: k < count, SHAPE)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def decode(inputs: list[Tensor], mod: Any, mask: BlockMask | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    return flashbwd.flex_decoding(*inputs[:3], mod, mask, enable_gqa=True, return_lse=True, **options)  # type: ignore[return-value]


def loss(out: Tensor, lse: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out * weights).sum() + lse.sin().sum()


def assert_gradients(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Assert that ``got`` equals ``want``, which has no hidden keys, and is 0 for hidden keys."""
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape:
            assert not g[:, :, w.shape[2] :].any()  # NaN counts as True
            g = g[:, :, : w.shape[2]]
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


# ---- 0 * inf ----


@pytest.mark.parametrize("score", [INF, -INF, NAN])
def test_an_infinite_score_of_a_hidden_key_has_weight_zero(score: float) -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    inputs = leaves(q, k, v)
    got = decode(inputs, lambda s, b, h, i, j: torch.where(j < SEEN, s, score), first_keys())
    visible = leaves(q, k[:, :, :SEEN], v[:, :, :SEEN])
    want = kit.oracle(SHAPE, *visible)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert_gradients(torch.autograd.grad(loss(*got), inputs), torch.autograd.grad(loss(*want), visible))


@pytest.mark.parametrize("dirt", [INF, -INF, NAN])
def test_hidden_keys_and_values_do_not_change_gradients_of_captured_tensors(dirt: float) -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    factor = torch.tensor([0.5, -1.5, 2.0, 1.0], dtype=torch.float64)

    def mod_of(factor: Tensor) -> Any:
        return lambda s, b, h, i, j: s * factor[h]

    visible = leaves(q, k[:, :, :SEEN], v[:, :, :SEEN], factor)
    want = torch.autograd.grad(loss(*kit.oracle(SHAPE, *visible[:3], mod_of(visible[3]))), visible)
    dirty = [tensor.index_fill(2, torch.arange(SEEN, 100), dirt) for tensor in (k, v)]
    inputs = leaves(q, *dirty, factor)
    got = torch.autograd.grad(loss(*decode(inputs, mod_of(inputs[3]), first_keys())), inputs)
    assert_gradients(got, want)


def test_an_infinite_derivative_at_hidden_scores_gives_no_gradient() -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    # Their scores are 0, where the derivative of the square root is infinite.
    hidden = k.index_fill(2, torch.arange(SEEN, 100), 0.0)

    def mod(s: Tensor, *_: Tensor) -> Tensor:
        return s.abs().sqrt()

    inputs, visible = leaves(q, hidden, v), leaves(q, k[:, :, :SEEN], v[:, :, :SEEN])
    got, want = decode(inputs, mod, first_keys()), kit.oracle(SHAPE, *visible, mod)
    assert_gradients(torch.autograd.grad(loss(*got), inputs), torch.autograd.grad(loss(*want), visible))


def test_a_product_that_overflows_at_a_hidden_score_gives_no_gradient() -> None:
    """dout @ v.T is infinite for query 1 and key 0, but only query 0 sees key 0."""
    shape = Shape(batch=1, heads=1, heads_kv=1, seqlen_q=2, seqlen_k=5, head_dim=4, head_dim_v=4)
    q, k, v = shape.tensors(torch.float64)
    v[:, :, 0] = 1e200
    dout = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    dout[:, :, 0], dout[:, :, 1] = 1e-200, 1e200
    bias = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)

    def mod_of(bias: Tensor) -> Any:
        return lambda s, b, h, i, j: s + bias[i, j]

    inputs = leaves(q, k, v, bias)
    mask = kit.block_mask(lambda b, h, i, j: (i == 0) | (j > 0), shape)
    out, _ = decode(inputs, mod_of(inputs[3]), mask)
    dq, _, _, dbias = torch.autograd.grad(out, inputs, dout)

    alone = leaves(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], bias[1:, 1:])  # query 1 and the keys that it sees
    one = Shape(batch=1, heads=1, heads_kv=1, seqlen_q=1, seqlen_k=4, head_dim=4, head_dim_v=4)
    want, _ = kit.oracle(one, *alone[:3], mod_of(alone[3]))
    want_dq, want_dbias = torch.autograd.grad(want, [alone[0], alone[3]], dout[:, :, 1:])
    torch.testing.assert_close(dq[:, :, 1:], want_dq, rtol=1e-10, atol=0)
    torch.testing.assert_close(dbias[1:, 1:], want_dbias, rtol=1e-10, atol=0)
    assert dbias[1, 0] == 0
    assert bool(dbias.isfinite().all())


def test_a_row_of_nan_scores_does_not_change_the_gradients_of_keys_that_it_does_not_see() -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    inputs = leaves(q, k, v)
    mask = kit.block_mask(lambda b, h, i, j: (i != 1) | (j < 10), SHAPE)
    out, _ = decode(inputs, lambda s, b, h, i, j: torch.where(i == 1, NAN, s), mask)
    assert bool(out[:, :, 1].isnan().all())
    others = [0, 2]
    dk, dv = torch.autograd.grad(out, inputs[1:], torch.ones_like(out))
    alone = leaves(q[:, :, others], k, v)
    want, _ = kit.oracle(Shape(seqlen_q=2, seqlen_k=100), *alone)
    want_dk, want_dv = torch.autograd.grad(want, alone[1:], torch.ones_like(want))
    # The weights of these keys in row 1 are 0, so the row adds nothing to their gradients.
    torch.testing.assert_close(dk[:, :, 10:], want_dk[:, :, 10:], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dv[:, :, 10:], want_dv[:, :, 10:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dirty", ["query", "dout"])
def test_a_row_that_the_mask_hides_from_all_keys_may_hold_nan(dirty: str) -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    inputs = leaves(q.index_fill(2, torch.tensor(1), NAN) if dirty == "query" else q, k, v)
    mask = kit.block_mask(lambda b, h, i, j: (i != 1) & (j < SEEN), SHAPE)
    out, _ = decode(inputs, None, mask)
    dout = torch.ones_like(out)
    dq, *got = torch.autograd.grad(out, inputs, dout.index_fill(2, torch.tensor(1), NAN) if dirty == "dout" else dout)
    others = [0, 2]
    alone = leaves(q[:, :, others], k[:, :, :SEEN], v[:, :, :SEEN])
    want, _ = kit.oracle(Shape(seqlen_q=2, seqlen_k=SEEN), *alone)
    want_dq, *expected = torch.autograd.grad(want, alone, torch.ones_like(want))
    torch.testing.assert_close(out[:, :, others], want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dq[:, :, others], want_dq, rtol=1e-10, atol=1e-10)
    assert_gradients(tuple(got), tuple(expected))


def test_a_row_that_the_score_mod_hides_from_all_keys_has_gradients_of_zero() -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    inputs = leaves(q, k, v)
    out, lse = decode(inputs, lambda s, b, h, i, j: torch.where(i == 1, -INF, s))
    assert bool((lse[:, :, 1] == -INF).all())
    assert not out[:, :, 1].any()
    others = [0, 2]
    alone = leaves(q[:, :, others], k, v)
    want, _ = kit.oracle(Shape(seqlen_q=2, seqlen_k=100), *alone)
    dq, *got = torch.autograd.grad(out, inputs, torch.ones_like(out))
    want_dq, *expected = torch.autograd.grad(want, alone, torch.ones_like(want))
    assert not dq[:, :, 1].any()
    for g, w in zip((dq[:, :, others], *got), (want_dq, *expected), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


# ---- kernel options ----


def parts_of(splits: int | None, seqlen_k: int) -> int:
    """The number of parts of the keys that are reduced separately.

    score_mod is called vectorised once for each part. A call on scalars only checks it.
    """
    calls = 0

    def mod(s: Tensor, *_: Tensor) -> Tensor:
        nonlocal calls
        calls += torch._C._functorch.is_batchedtensor(s)
        return s * 2

    options = {} if splits is None else {"SPLIT_KV": splits}
    with torch.no_grad():
        flashbwd.flex_decoding(*Shape(heads=2, seqlen_k=seqlen_k).tensors(torch.float64), mod, kernel_options=options)
    return calls


@pytest.mark.parametrize("splits", [1, 2, 7, 60, 101, 203, 500])
def test_split_kv_is_a_lower_bound_of_the_number_of_parts(splits: int) -> None:
    seqlen_k = 203
    assert parts_of(None, seqlen_k) == 1
    assert min(splits, seqlen_k) <= parts_of(splits, seqlen_k) <= seqlen_k
    if splits < 3:
        assert parts_of(splits, seqlen_k) <= splits + 1


@pytest.mark.parametrize("splits", [None, 2, 7, 203])
@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("scale", [None, 1.7])
def test_split_kv_and_prescale_qk_do_not_change_gradients(
    scale: float | None, prescale: bool, splits: int | None
) -> None:
    shape = Shape()
    inputs, same = leaves(*shape.tensors(torch.float64)), leaves(*shape.tensors(torch.float64))
    mod = kit.score_mods(shape, dtype=torch.float64)["softcap"]
    options = {"PRESCALE_QK": prescale} | ({} if splits is None else {"SPLIT_KV": splits})
    got = decode(inputs, mod, scale=scale, kernel_options=options)
    want = kit.oracle(shape, *same, mod, scale=scale)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert_gradients(torch.autograd.grad(loss(*got), inputs), torch.autograd.grad(loss(*want), same))


@pytest.mark.parametrize(
    ("prescale", "query", "key", "scale"),
    [
        (True, 2.0**90, 2.0**39, 2.0**-126),  # query * key overflows float32, query * scale does not
        (False, 2.0**64, 2.0**-126, 2.0**64),  # query * scale overflows, query * key does not
    ],
    ids=["the_query", "the_scores"],
)
def test_prescale_qk_scales_the_query_before_the_product(
    prescale: bool, query: float, key: float, scale: float
) -> None:
    """Only one order of the multiplications is finite in float32."""
    shape = Shape(batch=1, heads=1, heads_kv=1, seqlen_q=2, seqlen_k=4, head_dim=1)
    q, k, v = shape.tensors(torch.float32)
    q = torch.tensor([1.0, 1.5]).view(1, 1, 2, 1) * query
    k = torch.tensor([1.0, -1.25, 1.5, 1.75]).view(1, 1, 4, 1) * key
    out, lse = decode([q, k, v], None, scale=scale, kernel_options={"PRESCALE_QK": prescale})
    expected, expected_lse = kit.oracle(shape, q, k, v, scale=scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    other, _ = decode([q, k, v], None, scale=scale, kernel_options={"PRESCALE_QK": not prescale})
    assert not bool(other.isfinite().all())
