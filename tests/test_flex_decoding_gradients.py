"""The backward kernel of flex decoding on a GPU: gradients against float64 autograd of the dense formula."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from kit.repeats import differing_elements
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [bf16, fp16, fp32]
NAMES = ("dq", "dk", "dv")

pytestmark = pytest.mark.gpu


def eager(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, mod: Any = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with the rounding of PyTorch's eager operators: fp32 scores, probabilities in the inputs' dtype."""
    group = shape.heads // shape.heads_kv
    keys, values = (t.repeat_interleave(group, 1).expand(shape.batch, -1, -1, -1) for t in (k, v))
    scores = (q.float() @ keys.float().mT) * shape.head_dim**-0.5
    if mod is not None:
        scores = mod(scores, *kit.grids(shape, q.device))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    return weights.to(v.dtype) @ values, torch.logsumexp(scores, -1).masked_fill(empty.squeeze(-1), -torch.inf)


def leaves(tensors: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def gradients(attend: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], with_lse: bool) -> list[Tensor]:
    out, lse = attend(*inputs[:3])
    generator = torch.Generator("cuda").manual_seed(5)
    dout = torch.randn(out.shape, generator=generator, device="cuda").to(bf16)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda")
    loss = (out.double() * dout).sum()
    if with_lse:
        loss = loss + (lse.double() * dlse).masked_fill(lse == -torch.inf, 0.0).sum()
    return list(torch.autograd.grad(loss, inputs))


def ours(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would mean that the reference ran
        return flashbwd.flex_decoding(q, k, v, *args, enable_gqa=True, return_lse=True)


def assert_close(
    got: list[Tensor], rounded: list[Tensor], expected: list[Tensor], dtype: torch.dtype, names: tuple[str, ...] = NAMES
) -> None:
    """Errors against float64 are at most 1.1 times those of ``eager`` (10 times in float32), plus a few roundings."""
    for name, g, r, e in zip(names, got, rounded, expected, strict=True):
        assert g.dtype == r.dtype and g.shape == e.shape
        largest = float(e.abs().max()) if e.numel() else 0.0
        limit = (10 if dtype == fp32 else 1.1) * float((r.double() - e).abs().max())
        error = float((g.double() - e).abs().max())
        assert error <= limit + largest * torch.finfo(dtype).eps * (16 if dtype == fp32 else 0.5), name


def check(
    shape: Shape,
    dtype: torch.dtype,
    mod: Any = None,
    mask: Any = None,
    block: Any = 64,
    with_lse: bool = False,
    tensors: tuple[Tensor, ...] | None = None,
) -> None:
    tensors = tensors or shape.tensors(dtype, "cuda")
    dense = None if mask is None else kit.dense_mask(mask, shape, "cuda")
    block_mask = None if mask is None else kit.block_mask(mask, shape, "cuda", block)
    got = gradients(lambda *x: ours(*x, mod, block_mask), leaves(tensors), with_lse)
    rounded = gradients(lambda *x: eager(shape, *x, mod, dense), leaves(tensors), with_lse)
    expected = gradients(lambda *x: kit.oracle(shape, *x, mod, dense), leaves(tensors, torch.float64), with_lse)
    assert_close(got, rounded, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", sorted(kit.score_mods(Shape())))
def test_gradients_of_every_score_mod_agree_with_the_oracle(mod: str, dtype: torch.dtype) -> None:
    shape = Shape()
    check(shape, dtype, kit.score_mods(shape, "cuda")[mod])


OPERATORS: dict[str, Any] = {
    "rational": lambda s, b, h, q, k: s / (1 + s * s) - s.abs(),
    "roots": lambda s, b, h, q, k: (s * s + 1) ** 0.5 + (s * s + 2).rsqrt() + (s * s + 3).sqrt(),
    "clamps": lambda s, b, h, q, k: s.clamp(-1, 1) + s.clamp(min=0.3) + torch.clamp_max(s, 0.7),
    "extrema": lambda s, b, h, q, k: torch.maximum(s, 0.1 * s) + torch.minimum(s * s, s + 1) + torch.relu(s),
    "exponentials": lambda s, b, h, q, k: torch.log1p(torch.exp(s)) + torch.expm1(s * 0.1) + torch.exp2(s * 0.2),
    "angles": lambda s, b, h, q, k: torch.atan(s) + torch.atan2(s, s * s + 1) + torch.erf(s) + torch.cosh(s * 0.2),
    "hyperbolas": lambda s, b, h, q, k: torch.asinh(s) + torch.hypot(s, s * 0 + 2) + torch.logaddexp(s, 0.5 * s),
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s) + s.masked_fill(s > 1, 0.5) + torch.erfc(s),
    "half": lambda s, b, h, q, k: (s.to(bf16) * 2).float(),
    "flat": lambda s, b, h, q, k: s + torch.floor(s) + torch.where(s > 0, s, 2 * s),
    "detached": lambda s, b, h, q, k: s.detach() * 0.5 + s * 0.25 + (q - k) * 0.01,
}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_derivatives_of_operators_agree_with_the_oracle(name: str) -> None:
    check(Shape(), fp32 if name != "half" else bf16, OPERATORS[name])


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize("block", [64, 128, (1, 32), 20], ids=str)
@pytest.mark.parametrize("mask", sorted(kit.mask_mods(Shape())))
def test_gradients_of_every_mask_agree_with_the_oracle(mask: str, block: Any, dtype: torch.dtype) -> None:
    shape = Shape(seqlen_k=333)
    mod = kit.score_mods(shape, "cuda")["alibi"]
    check(shape, dtype, mod, kit.mask_mods(shape, "cuda")[mask], block, with_lse=True)


@pytest.mark.parametrize("seqlen_q", [1, 3, 16, 100, 127])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 16])
def test_gradients_of_every_group_size_and_query_length_agree_with_the_oracle(group: int, seqlen_q: int) -> None:
    shape = Shape(heads=2 * group, seqlen_q=seqlen_q, seqlen_k=259)
    check(shape, bf16, kit.score_mods(shape, "cuda")["softcap"], kit.mask_mods(shape, "cuda")["causal"])


@pytest.mark.parametrize("seqlen_k", [1, 2, 63, 64, 65, 127, 1000, 4097])
@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_gradients_of_every_key_length_agree_with_the_oracle(seqlen_k: int, dtype: torch.dtype) -> None:
    check(Shape(seqlen_q=1, seqlen_k=seqlen_k), dtype, with_lse=True)


@pytest.mark.parametrize(
    "dims", [(1, 1), (16, 64), (33, 17), (64, 64), (100, 128), (128, 128), (192, 128), (96, 250), (256, 256)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_every_head_dimension_agree_with_the_oracle(dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape(head_dim=dims[0], head_dim_v=dims[1])
    check(shape, dtype, kit.score_mods(shape, "cuda")["alibi"], kit.mask_mods(shape, "cuda")["some_rows_empty"])


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_gradients_of_keys_that_the_batch_shares_are_summed(dtype: torch.dtype) -> None:
    shape = Shape(batch=5, batch_kv=1)
    check(shape, dtype, with_lse=True)
    check(shape, dtype, kit.score_mods(shape, "cuda")["bias_rank4"], kit.mask_mods(shape, "cuda")["per_batch"])


def test_gradients_are_right_for_any_strides() -> None:
    shape = Shape(head_dim=24, head_dim_v=40)
    q, k, v = shape.tensors(bf16, "cuda")
    padded = torch.full((*k.shape[:3], 27), torch.nan, dtype=bf16, device="cuda")[..., 1:25].copy_(k)
    check(shape, bf16, tensors=(q.transpose(1, 2).contiguous().transpose(1, 2), padded, v.mT.contiguous().mT))


def test_captured_tensors_get_gradients() -> None:
    shape = Shape(batch=2, heads=4, seqlen_q=3, seqlen_k=203)
    bias = torch.randn(4, 3, 203, device="cuda")
    slopes = torch.randn(4, device="cuda", dtype=bf16)
    factor = torch.randn((), device="cuda")

    def mod_of(bias: Tensor, slopes: Tensor, factor: Tensor) -> Any:
        return lambda s, b, h, q, k: torch.tanh(s * factor) + bias[h, q, k] + slopes[h] * (k - q) * 0.01

    def all_gradients(attend: Any, dtype: torch.dtype | None) -> list[Tensor]:
        inputs = leaves((*shape.tensors(bf16, "cuda"), bias, slopes, factor), dtype)
        return gradients(lambda *x: attend(*x, mod_of(*inputs[3:])), inputs, False)

    got = all_gradients(ours, None)
    rounded = all_gradients(lambda *x: eager(shape, *x), None)
    expected = all_gradients(lambda *x: kit.oracle(shape, *x), torch.float64)
    assert_close(got[:4], rounded[:4], expected[:4], bf16, (*NAMES, "dbias"))
    for g, e in zip(got[4:], expected[4:], strict=True):  # sums of many terms
        torch.testing.assert_close(g.double(), e, rtol=0.03, atol=0.03)


def test_blocks_in_no_list_are_not_read_and_get_zero_gradients() -> None:
    shape = Shape(seqlen_q=1, seqlen_k=333)
    q, k, v = leaves(shape.tensors(bf16, "cuda"))
    mask = kit.block_mask(lambda b, h, q, k: (k >= 70) & (k < 200), shape, "cuda", 64)
    for dirt in (torch.nan, torch.inf):
        dirty_k, dirty_v = (t.detach().clone() for t in (k, v))
        for t in (dirty_k, dirty_v):
            t[:, :, :70] = dirt
            t[:, :, 200:] = dirt
        clean = gradients(lambda *x: ours(*x, None, mask), [q, k, v], True)
        got = gradients(lambda *x: ours(*x, None, mask), [q, *leaves((dirty_k, dirty_v))], True)
        for g, c in zip(got, clean, strict=True):
            assert torch.equal(g, c)
        assert not got[1][:, :, :70].any() and not got[2][:, :, 200:].any()


def test_gradients_of_pages_in_any_order_agree_with_the_oracle() -> None:
    page, pages = 32, [6, 2, 7, 0]
    shape = Shape(batch=1, seqlen_q=1, seqlen_k=8 * page)
    counts = torch.tensor([[[len(pages)]]], dtype=torch.int32, device="cuda")
    indices = torch.tensor([[[pages + [0] * 4]]], dtype=torch.int32, device="cuda")
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=(1, page), mask_mod=lambda b, h, q, k: k % page < 30, seq_lengths=(1, 8 * page)
    )
    key = torch.arange(8 * page, device="cuda")
    dense = (torch.isin(key // page, torch.tensor(pages, device="cuda")) & (key % page < 30)).expand(1, 4, 1, -1)
    tensors = shape.tensors(bf16, "cuda")
    got = gradients(lambda *x: ours(*x, None, mask), leaves(tensors), False)
    rounded = gradients(lambda *x: eager(shape, *x, None, dense), leaves(tensors), False)
    expected = gradients(lambda *x: kit.oracle(shape, *x, None, dense), leaves(tensors, torch.float64), False)
    assert_close(got, rounded, expected, bf16)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_each_sequence_of_a_shared_cache_may_have_a_page_table_of_its_own(dtype: torch.dtype) -> None:
    page, tables, lengths = 32, [[6, 2, 7], [1, 4, 0, 5]], [70, 128]
    shape = Shape(batch=2, batch_kv=1, seqlen_q=1, seqlen_k=8 * page)
    counts = torch.tensor([[[len(table)]] for table in tables], dtype=torch.int32, device="cuda")
    indices = torch.tensor([[[table + [0] * (8 - len(table))]] for table in tables], dtype=torch.int32, device="cuda")
    position = torch.full((2, 8), 1000, device="cuda")  # position of each page in its sequence
    for b, table in enumerate(tables):
        position[b, table] = torch.arange(len(table), device="cuda")
    length = torch.tensor(lengths, device="cuda")

    def filled(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return position[b, k // page] * page + k % page < length[b]

    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(1, page), mask_mod=filled, seq_lengths=(1, 8 * page))
    dense = kit.dense_mask(filled, shape, "cuda")
    assert dense.sum((1, 2, 3)).tolist() == [4 * n for n in lengths]
    tensors = shape.tensors(dtype, "cuda")
    got = gradients(lambda *x: ours(*x, None, mask), leaves(tensors), True)
    rounded = gradients(lambda *x: eager(shape, *x, None, dense), leaves(tensors), True)
    expected = gradients(lambda *x: kit.oracle(shape, *x, None, dense), leaves(tensors, torch.float64), True)
    assert_close(got, rounded, expected, dtype)


def test_a_captured_graph_reads_changed_lengths() -> None:
    shape = Shape(seqlen_q=1, seqlen_k=300)
    tensors = shape.tensors(bf16, "cuda")
    lengths = torch.tensor([100, 300], device="cuda")
    mask = kit.mask_of_lengths(lengths, 300)
    inputs = leaves(tensors)
    dout = torch.randn(2, 4, 1, 16, device="cuda").to(bf16)

    def step() -> tuple[Tensor, ...]:
        out, _ = ours(*inputs, None, mask)
        return torch.autograd.grad(out, inputs, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for changed in ([100, 300], [17, 203], [0, 1]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        wide = leaves(tensors, torch.float64)
        out, _ = kit.oracle(shape, *wide, None, kit.dense_mask(mask.mask_mod, shape, "cuda"))
        for g, e in zip(got, torch.autograd.grad(out, wide, dout.double()), strict=True):
            torch.testing.assert_close(g.double(), e, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mask", [None, "causal", "per_head"])
def test_repeated_gradients_have_equal_bits(mask: str | None) -> None:
    shape = Shape(heads=8, seqlen_k=2049, head_dim=128, head_dim_v=128)
    inputs = leaves(shape.tensors(bf16, "cuda"))
    block_mask = None if mask is None else kit.block_mask(kit.mask_mods(shape, "cuda")[mask], shape, "cuda")
    out, _ = ours(*inputs, kit.score_mods(shape, "cuda")["alibi"], block_mask)
    dout = torch.randn_like(out)
    assert differing_elements(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)) == 0


def test_deterministic_gradients_of_captured_tensors_come_from_the_reference() -> None:
    shape = Shape()
    inputs = leaves(shape.tensors(bf16, "cuda"))
    offsets = torch.zeros(4, device="cuda", requires_grad=True)
    # Without warn_only, cuBLAS requires an environment variable.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out = flashbwd.flex_decoding(*inputs, lambda s, b, h, q, k: s + offsets[h], enable_gqa=True)
        with pytest.warns(UserWarning, match="captured tensors are added atomically"):
            torch.autograd.grad(out.sum(), offsets)  # type: ignore[union-attr]
    finally:
        torch.use_deterministic_algorithms(False)
