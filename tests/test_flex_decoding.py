"""flex_decoding: outputs, LSE and largest scores agree with a dense float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flashbwd

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW = [bf16, fp16]
MODS = sorted(kit.score_mods(Shape()))
MASKS = sorted(kit.mask_mods(Shape()))

pytestmark = pytest.mark.parametrize("device", DEVICES)


def run(shape: Shape, tensors: tuple[Tensor, ...], *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return flashbwd.flex_decoding(*tensors, *args, enable_gqa=True, return_lse=True, **options)  # type: ignore[return-value]


def check(
    shape: Shape, dtype: torch.dtype, device: str, mod: Any = None, mask: Any = None, block: Any = 64, **options: Any
) -> None:
    """Errors against float64 are at most 1.1 times those of the dense computation with the rounding of PyTorch's eager
    operators."""
    q, k, v = shape.tensors(dtype, device)
    dense = None if mask is None else kit.dense_mask(mask, shape, device)
    scale = options.get("scale")
    out, lse = run(
        shape, (q, k, v), mod, None if mask is None else kit.block_mask(mask, shape, device, block), **options
    )
    expected, expected_lse = kit.oracle(shape, q, k, v, mod, dense, scale)
    assert out.dtype == dtype and out.shape == expected.shape
    assert lse.dtype == (fp64 if dtype == fp64 else fp32)
    if dtype == fp64:
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-11, atol=1e-11)
        return
    eager, eager_lse = kit.oracle(shape, q, k, v, mod, dense, scale, dtype=fp32)
    factor = 1.1 if dtype in LOW else 10
    rounding = float(expected.abs().max()) * torch.finfo(fp32).eps * 8
    limit = factor * float((eager.to(dtype).double() - expected).abs().max()) + rounding
    assert float((out.double() - expected).abs().max()) <= limit
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert bool((lse[~finite] == -torch.inf).all())
    largest = float(expected_lse[finite].abs().max()) if bool(finite.any()) else 0.0
    limit = 10 * float((eager_lse - expected_lse)[finite].abs().max()) if bool(finite.any()) else 0.0
    error = float((lse - expected_lse)[finite].abs().max()) if bool(finite.any()) else 0.0
    assert error <= limit + largest * torch.finfo(fp32).eps * 8


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64], ids=str)
@pytest.mark.parametrize("mod", MODS)
def test_every_score_mod_agrees_with_the_oracle(mod: str, dtype: torch.dtype, device: str) -> None:
    shape = Shape()
    check(shape, dtype, device, kit.score_mods(shape, device)[mod])


@pytest.mark.parametrize("dtype", [bf16, fp32, fp64], ids=str)
@pytest.mark.parametrize("block", [64, 128, (1, 32)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_agrees_with_the_oracle(mask: str, block: Any, dtype: torch.dtype, device: str) -> None:
    shape = Shape(seqlen_k=333)
    check(shape, dtype, device, kit.score_mods(shape, device)["alibi"], kit.mask_mods(shape, device)[mask], block)


@pytest.mark.parametrize("seqlen_q", [1, 3, 16, 100, 127])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 16])
def test_every_group_size_and_query_length_agrees_with_the_oracle(group: int, seqlen_q: int, device: str) -> None:
    shape = Shape(heads=2 * group, seqlen_q=seqlen_q, seqlen_k=259)
    check(shape, bf16, device, kit.score_mods(shape, device)["bias_rank3"], kit.mask_mods(shape, device)["causal"])


@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("dims", [(64, 64), (128, 96), (256, 256)], ids=str)
def test_heads_of_a_group_may_have_different_masks(group: int, dims: tuple[int, int], device: str) -> None:
    shape = Shape(heads=2 * group, seqlen_q=5, seqlen_k=259, head_dim=dims[0], head_dim_v=dims[1])
    for mask in ("per_head", "some_rows_empty"):
        for mod in ("alibi", "trig"):
            mods = kit.score_mods(shape, device)
            check(shape, bf16, device, mods[mod], kit.mask_mods(shape, device)[mask])


@pytest.mark.parametrize("seqlen_k", [1, 2, 63, 64, 65, 127, 129, 1000, 1023, 4097])
@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_every_key_length_agrees_with_the_oracle(seqlen_k: int, dtype: torch.dtype, device: str) -> None:
    shape = Shape(seqlen_q=1, seqlen_k=seqlen_k)
    check(shape, dtype, device)
    check(shape, dtype, device, mask=kit.mask_mods(shape, device)["causal"])


@pytest.mark.parametrize(
    "dims", [(1, 1), (16, 64), (33, 17), (64, 64), (100, 128), (128, 128), (192, 128), (96, 250), (256, 256)], ids=str
)
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
def test_every_head_dimension_agrees_with_the_oracle(dims: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check(Shape(head_dim=dims[0], head_dim_v=dims[1]), dtype, device)


def test_many_queries_agree_with_the_oracle(device: str) -> None:
    shape = Shape(batch=1, seqlen_q=700, seqlen_k=900)
    check(shape, bf16, device, kit.score_mods(shape, device)["alibi"], kit.mask_mods(shape, device)["causal"], 128)


def test_the_batch_may_share_keys(device: str) -> None:
    shape = Shape(batch=3, batch_kv=1)
    check(shape, bf16, device)
    check(shape, fp64, device, kit.score_mods(shape, device)["bias_rank4"], kit.mask_mods(shape, device)["per_batch"])


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_the_scale_may_be_zero_or_negative(scale: float, device: str) -> None:
    check(Shape(), fp64, device, scale=scale)
    check(Shape(), fp64, device, scale=scale, kernel_options={"PRESCALE_QK": True})


@pytest.mark.parametrize("layout", ["bshd", "padded", "offset", "transposed"])
def test_strides_do_not_change_the_result(layout: str, device: str) -> None:
    shape = Shape(head_dim=24, head_dim_v=24)
    tensors = shape.tensors(bf16, device)

    def laid_out(tensor: Tensor) -> Tensor:
        b, h, s, d = tensor.shape
        if layout == "bshd":
            view = tensor.new_full((b, s, h, d), torch.nan).transpose(1, 2)
        elif layout == "padded":
            view = tensor.new_full((b, h, s + 3, d + 8), torch.nan)[:, :, :s, :d]
        elif layout == "offset":
            view = tensor.new_full((tensor.numel() + 1,), torch.nan)[1:].view(tensor.shape)
        else:
            view = tensor.new_full((b, h, d, s), torch.nan).mT
        return view.copy_(tensor)

    mod = kit.score_mods(shape, device)["alibi"]
    mask = kit.block_mask(kit.mask_mods(shape, device)["causal"], shape, device)
    expected = run(shape, tensors, mod, mask)
    moved = tuple(laid_out(t) for t in tensors)
    result = run(shape, moved, mod, mask)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert result[0].stride(-1) == 1
    if layout == "bshd":
        assert result[0].stride() == moved[0].stride()


def test_rows_without_a_key_are_zero_and_their_lse_is_minus_infinity(device: str) -> None:
    shape = Shape()
    tensors = shape.tensors(bf16, device)
    for mod in (None, lambda s, b, h, q, k: torch.where(q == 1, -float("inf"), s)):
        mask = kit.mask_mods(shape, device)["some_rows_empty"]
        out, lse = run(shape, tensors, mod, kit.block_mask(mask, shape, device))
        empty = [0, 2] if mod is None else [0, 1, 2]
        assert bool((out[:, :, empty] == 0).all()) and bool((lse[:, :, empty] == -torch.inf).all())
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", [bf16, fp64], ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(seqlen_k=0), Shape(seqlen_q=0), Shape(batch=0), Shape(heads=0, heads_kv=0)], ids=str
)
def test_empty_inputs_give_empty_or_zero_results(shape: Shape, dtype: torch.dtype, device: str) -> None:
    tensors = tuple(t.requires_grad_() for t in shape.tensors(dtype, device))
    out, lse = run(shape, tensors, lambda s, b, h, q, k: s * 2)
    assert out.shape == (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim_v) and out.dtype == dtype
    assert lse.shape == out.shape[:3] and bool((lse == -torch.inf).all()) and bool((out == 0).all())
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(bool((g == 0).all()) and g.shape == t.shape for g, t in zip(grads, tensors, strict=True))


# ---- block lists ----


def lists(rows: list[list[int]], columns: int, device: str) -> tuple[Tensor, Tensor]:
    """(1, 1, rows) counts and (1, 1, rows, columns) indices, padded with block 0 after the count."""
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[row + [0] * (columns - len(row)) for row in rows]]], dtype=torch.int32, device=device)
    return counts, indices


@pytest.mark.parametrize("dtype", [bf16, fp64], ids=str)
def test_only_listed_blocks_are_computed_and_full_blocks_are_not_masked(dtype: torch.dtype, device: str) -> None:
    shape = Shape(seqlen_q=2, seqlen_k=160)
    q, k, v = shape.tensors(dtype, device)

    def odd(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % 2 == 1

    partial, full = lists([[4, 0]], 5, device), lists([[2]], 5, device)
    mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=(2, 32), mask_mod=odd, seq_lengths=(2, 160))
    block, odd_key = torch.arange(160, device=device) // 32, torch.arange(160, device=device) % 2 == 1
    visible = (block == 2) | (((block == 4) | (block == 0)) & odd_key)
    expected = kit.oracle(shape, q, k, v, None, visible.expand(2, 4, 2, 160))
    tolerance = 1e-11 if dtype == fp64 else 4e-3
    for got, want in zip(run(shape, (q, k, v), None, mask), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [bf16, fp64], ids=str)
@pytest.mark.parametrize("block", [64, 20])
def test_the_values_of_hidden_keys_do_not_matter(block: int, dtype: torch.dtype, device: str) -> None:
    shape = Shape(seqlen_q=1, seqlen_k=333)
    q, k, v = (t.requires_grad_() for t in shape.tensors(dtype, device))
    mask = kit.block_mask(lambda b, h, q, k: (k >= 70) & (k < 200), shape, device, block)
    clean = run(shape, (q, k, v), lambda s, b, h, q, k: s * 2, mask)
    poisoned = [t.detach().clone() for t in (k, v)]
    for tensor in poisoned:
        tensor[:, :, :70] = torch.nan
        tensor[:, :, 200:] = torch.inf
        tensor.requires_grad_()
    dirty = run(shape, (q, *poisoned), lambda s, b, h, q, k: s * 2, mask)
    for got, want in zip(dirty, clean, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(dirty[0].sum() + dirty[1].sum(), (q, *poisoned))
    for got, want in zip(grads, torch.autograd.grad(clean[0].sum() + clean[1].sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [bf16, fp64], ids=str)
def test_block_indices_in_any_order_give_a_paged_cache(dtype: torch.dtype, device: str) -> None:
    shape, page = Shape(batch=1, seqlen_q=1, seqlen_k=5 * 32), 32
    q, k, v = shape.tensors(dtype, device)
    length = 4 * page + 7
    pages = torch.tensor([6, 2, 7, 0, 4], device=device)  # pages of the physical cache, which has 8
    physical = [torch.full((1, 2, 8 * page, 16), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for cache, tensor in zip(physical, (k, v), strict=True):
        for i, where in enumerate(pages.tolist()):
            rows = min(page, length - i * page)
            cache[:, :, where * page : where * page + rows] = tensor[:, :, i * page : i * page + rows]
    logical = torch.full((8,), -1, device=device)
    logical[pages] = torch.arange(5, device=device)

    def valid(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (logical[kv_idx // page] >= 0) & (logical[kv_idx // page] * page + kv_idx % page < length)

    counts, indices = lists([pages.tolist()], 8, device)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(1, page), mask_mod=valid, seq_lengths=(1, 8 * page))
    visible = (torch.arange(160, device=device) < length).expand(1, 4, 1, 160)
    expected = kit.oracle(shape, q, k, v, None, visible)
    tolerance = 1e-11 if dtype == fp64 else 4e-3
    for got, want in zip(run(shape, (q, *physical), None, mask), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [bf16, fp64], ids=str)
def test_the_paged_cache_of_pytorch_agrees_with_the_oracle(dtype: torch.dtype, device: str) -> None:
    shape, page = Shape(seqlen_q=1, seqlen_k=5 * 32), 32
    q, k, v = shape.tensors(dtype, device)
    cache = PagedAttention(16, page, shape.batch, device=device)
    physical = [torch.full((1, 2, 16 * page, 16), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for b in (1, 0):
        cache.reserve(torch.tensor([b], device=device), torch.tensor([shape.seqlen_k], device=device))
    everyone = torch.arange(shape.batch, device=device)
    cache.assign(everyone, torch.arange(shape.seqlen_k, device=device).expand(shape.batch, -1), k, v, *physical)
    mods, masks = kit.score_mods(shape, device, dtype), kit.mask_mods(shape, device)
    logical = create_block_mask(masks["window"], shape.batch, None, 1, shape.seqlen_k, device, BLOCK_SIZE=page)
    for name in ("alibi", "bias_rank4"):
        mask, mod = cache.convert_logical_block_mask(logical), cache.get_score_mod(mods[name])
        expected = kit.oracle(shape, q, k, v, mods[name], kit.dense_mask(masks["window"], shape, device))
        tolerance = 1e-11 if dtype == fp64 else 4e-3
        for got, want in zip(run(shape, (q, *physical), mod, mask), expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_a_call_sees_a_changed_closure(device: str) -> None:
    shape = Shape()
    tensors = shape.tensors(fp64, device)
    weight = torch.ones(4, dtype=fp64, device=device)
    factor = 1.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * weight[h] * factor

    for factor in (1.0, 0.5):
        for value in (1.0, 3.0):
            weight.fill_(value)
            scale = 0.25 * value * factor
            for got, want in zip(run(shape, tensors, mod), kit.oracle(shape, *tensors, scale=scale), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


# ---- options ----


@pytest.mark.parametrize("dtype", [bf16, fp64], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 7, 500])
def test_the_number_of_splits_changes_only_rounding(splits: int, dtype: torch.dtype, device: str) -> None:
    shape = Shape()
    for name in ("causal", "per_head", "some_rows_empty"):
        check(shape, dtype, device, None, kit.mask_mods(shape, device)[name], kernel_options={"SPLIT_KV": splits})


def test_hints_are_accepted(device: str) -> None:
    hints = {"num_warps": 4, "fwd_BLOCK_M": 16, "bwd_BLOCK_N1": 32, "BACKEND": "AUTO", "BLOCKS_ARE_CONTIGUOUS": True}
    check(Shape(), fp64, device, kernel_options={**hints, "ROWS_GUARANTEED_SAFE": True})


def test_auxiliary_outputs_are_returned_as_requested(device: str) -> None:
    shape = Shape()
    tensors = shape.tensors(fp64, device)
    mod = kit.score_mods(shape, device, fp64)["alibi"]
    out, lse = run(shape, tensors, mod)
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), AuxRequest(True, True)):
        same, aux = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True, return_aux=request)
        assert torch.equal(same, out)  # type: ignore[arg-type]
        assert (aux.lse is not None) == request.lse and (aux.max_scores is not None) == request.max_scores
        if request.lse:
            assert torch.equal(aux.lse, lse)
        if request.max_scores:
            keys = tensors[1].repeat_interleave(2, 1)
            scores = mod(tensors[0] @ keys.mT / 4, *kit.grids(shape, device))
            torch.testing.assert_close(aux.max_scores, scores.amax(-1), rtol=1e-11, atol=1e-11)
    alone = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)
    assert isinstance(alone, Tensor) and torch.equal(alone, out)


def test_results_share_no_memory(device: str) -> None:
    """The LSE and the largest scores share no memory with the output, whatever its size."""
    tensors = Shape(batch=1, heads=3, heads_kv=1, seqlen_q=1, head_dim_v=17).tensors(bf16, device)
    out, aux = flashbwd.flex_decoding(*tensors, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    results = [out, aux.lse, aux.max_scores]
    expected = [result.clone() for result in results]
    for i in range(3):
        results[i].fill_(float("nan"))
        for result, value in list(zip(results, expected, strict=True))[i + 1 :]:
            assert torch.equal(result, value)


def test_inputs_are_not_written_to(device: str) -> None:
    shape = Shape()
    tensors = shape.tensors(bf16, device)
    copies = [t.clone() for t in tensors]
    run(shape, tensors, kit.score_mods(shape, device)["alibi"])
    assert all(torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))


def test_autocast_casts_as_pytorch_does(device: str) -> None:
    shape = Shape()
    tensors = shape.tensors(fp32, device)
    with torch.autocast(device, bf16):
        out, _ = run(shape, tensors)
    assert out.dtype == bf16
    assert torch.equal(out, run(shape, tuple(t.to(bf16) for t in tensors))[0])


class _Largest(TorchDispatchMode):
    """The largest result of any operator, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


def test_no_tensor_is_as_large_as_the_score_matrix(device: str) -> None:
    q = torch.randn(1, 64, 64, 8, device=device)
    k = torch.randn(1, 1, 20000, 8, device=device)

    def call() -> None:
        flashbwd.flex_decoding(q, k, k, lambda s, b, h, i, j: s + j * 0.001, enable_gqa=True)

    if device == "cuda":  # a dispatch mode does not see what the kernel's operator allocates
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        call()
        largest = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before  # all tensors together
    else:
        with _Largest() as seen:
            call()
        largest = seen.bytes
    assert 0 < largest < 4 * 64 * 64 * 20000 // 20
