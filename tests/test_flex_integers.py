"""Integers of modifications beyond 32 bits, and indices beyond a captured tensor.

PyTorch's CUDA kernels have int32 indices, which become int64 beside an int64 scalar. Its CPU kernels and its eager mode
have int64 indices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Mod, Shape
from test_flex_decoding_meaning import FEW, Linear
from test_flex_lists import dense
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashbwd
from flashbwd.flex.lists import key_block_lists
from flashbwd.flex.tile import Tile
from flashbwd.mods.captures import CannotEmitError, Captures, Slots
from flashbwd.reference.modes import AsInKernels, OnScalars

SHAPE = Shape(batch=2, heads=4, heads_kv=2, seqlen_q=70, seqlen_k=150, head_dim=64, head_dim_v=64)


def masks(device: str) -> dict[str, Mod]:
    """Masks that differ if an int64 number is cut to 32 bits."""
    largest, beyond = (torch.tensor(n, device=device) for n in (sys.maxsize, 2**40 + 50))
    seed = torch.tensor(2654435761, device=device)
    ends = torch.tensor([2**40, 2**32 + 5], device=device)
    return {
        "limit": lambda b, h, q, k: (k < largest) & (k <= q + 80),
        "floor": lambda b, h, q, k: k + (k + beyond) // 2**33 >= q + 128,
        "hash": lambda b, h, q, k: ((q * seed + k * 40503) % 7 < 3) | (q == k),
        "where": lambda b, h, q, k: torch.where(q < 9, k + 5, beyond) > 2**33 + 100 - ends[b] // 2**40,
        "clamp": lambda b, h, q, k: (q + beyond).clamp(max=largest) >= (k + beyond) - 9 * b,
    }


def scores(device: str) -> dict[str, Mod]:
    offset, scale = torch.tensor(2**33, device=device), torch.tensor(0.3, dtype=torch.float64, device=device)
    return {
        "factor": lambda s, b, h, q, k: s + 1e-9 * (q + offset) * (k % 3),
        "quotient": lambda s, b, h, q, k: s + ((q + offset) * (h + 1) // (offset // 64)) * 0.001,
        "scale of 64 bits": lambda s, b, h, q, k: s * scale,
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_vectorised_function_computes_what_it_computes_on_scalars(seed: int) -> None:
    compared = 0
    for i in range(40):
        linear = Linear(1000 * seed + i)
        text = linear.mask().replace(" + b * 0", "")  # which would make every operand depend on an index
        mod = eval(f"lambda b, h, q, k: {text}", linear.names)
        try:
            want = torch.stack([mod(*point.unbind()) for point in FEW])
        except (RuntimeError, OverflowError, AttributeError):  # PyTorch refuses the function
            continue
        with OnScalars():
            assert torch.equal(torch.vmap(mod)(*FEW.unbind(1)), want), text
        compared += 1
    assert compared > 10


WIDE = torch.tensor(2**33 + 5)
SMALL = torch.tensor([7, -3], dtype=torch.int8)
ON_SCALARS = [
    "q / 2**33",
    "k.to(torch.uint8) / 300",
    "SMALL[b % 2] / 1000",
    "(((q * 1103515245 + k * 12345) & 0x7FFFFFFF) / 2**31 < 0.9)",
    "torch.div(q, 2**33)",
    "torch.div(2**33, q + 1)",
    "torch.true_divide(2**31, q + 1)",
    "WIDE.to(q) + k",
    "WIDE.type_as(q) + k",
    "(q - k).add_(WIDE)",
    "(q - k).clamp_(max=WIDE - 2**33)",
    "(q - k).masked_fill(k > 3, WIDE - 2**33) * 3",
    "torch.where(k > q, q, WIDE)",
    "torch.clamp(q, WIDE - 2**33, WIDE)",
    "torch.addcmul(q, k, WIDE)",
    "torch.isin(q, WIDE - 2**33)",
    "torch.logical_and(q, WIDE)",
    "q.eq(WIDE) | q.lt(WIDE)",
    "(q * 0.5 < torch.tensor(0.1, dtype=torch.float64))",
    "torch.where(q > 2, q * 0.1, torch.tensor(0.1, dtype=torch.float64))",
]


@pytest.mark.parametrize("text", ON_SCALARS)
def test_an_operator_computes_what_it_computes_on_scalars(text: str) -> None:
    mod = eval(f"lambda b, h, q, k: {text}", {"torch": torch, "WIDE": WIDE, "SMALL": SMALL})
    want = torch.stack([mod(*point.unbind()) for point in FEW])
    with OnScalars():
        found = torch.vmap(mod)(*FEW.unbind(1))
    assert found.dtype == want.dtype and torch.equal(found, want)


@pytest.mark.parametrize("name", masks("cpu"))
def test_mask_bits_have_the_pairs_of_a_mask_with_64_bits(name: str) -> None:
    mask = create_block_mask(masks("cpu")[name], 2, 1, 70, 150, device="cpu", BLOCK_SIZE=64)
    expected = kit.dense_mask(masks("cpu")[name], SHAPE, "cpu").expand(2, 4, 70, 150)
    assert 0 < int(expected.sum()) < expected.numel()
    assert torch.equal(dense(key_block_lists(mask, (2, 4, 70, 150)), (2, 4, 70, 150)), expected)


def band(device: str, form: str = "bounds[(q - k).abs()]") -> tuple[BlockMask, Tensor]:
    """A mask whose table has no element for pairs outside of the listed blocks, and its dense form."""
    bounds = torch.arange(70, device=device) < 30
    seen = (torch.arange(128, device=device).view(-1, 1) - torch.arange(128, device=device)).abs() < 30
    mask = create_block_mask(lambda b, h, q, k: (q - k).abs() < 30, None, None, 128, 128, device=device, BLOCK_SIZE=32)
    mask.mask_mod = eval(f"lambda b, h, q, k: {form}", {"torch": torch, "bounds": bounds})
    return mask, seen


@pytest.mark.parametrize("form", ["bounds[(q - k).abs()]", "torch.take(bounds, (q - k).abs().long())"])
def test_a_mask_mod_is_evaluated_for_pairs_of_partial_blocks_only(form: str) -> None:
    mask, seen = band("cpu", form)
    lists = key_block_lists(mask, (1, 1, 128, 128), Tile(128, 128))
    assert torch.equal(dense(lists, (1, 1, 128, 128))[0, 0], seen)


TABLE = torch.arange(60.0).view(4, 5, 3)
INDICES = ["0, -1, 2", "4, 9, 0", "-7, 3, -5", "1, :, 7", "..., 8", "9, ..., -9", "2, None, 6, 1", ":, 11", "-5"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("index", INDICES)
def test_an_index_is_bounded_as_in_kernels(index: str, dtype: torch.dtype) -> None:
    """One of -n - 1 or less becomes the last one too."""

    class Subscript:
        def __getitem__(self, entries: Any) -> tuple[Any, ...]:
            return entries if isinstance(entries, tuple) else (entries,)

    given: tuple[Any, ...] = eval(f"subscript[{index}]", {"subscript": Subscript()})
    ellipsis = given.index(Ellipsis) if Ellipsis in given else len(given)
    right, dim = [], 0
    for position, entry in enumerate(given):
        if isinstance(entry, int):
            size = TABLE.shape[dim if position < ellipsis else position - len(given)]
            right.append(entry if -size <= entry < size else size - 1)
        else:
            right.append(entry)
        dim += entry is not None
    with AsInKernels():
        found = TABLE[tuple(torch.tensor(i, dtype=dtype) if isinstance(i, int) else i for i in given)]
    assert torch.equal(found, TABLE[tuple(right)])


@pytest.mark.parametrize("named", [False, True])
def test_an_operator_of_a_graph_is_bounded_too(named: bool) -> None:
    index: list[Any] = [torch.tensor(9), None, torch.tensor(-9)]
    with AsInKernels():
        found = torch.ops.aten.index(TABLE, indices=index) if named else torch.ops.aten.index.Tensor(TABLE, index)
        chosen = TABLE[torch.tensor([True, False, False, True])]
    assert torch.equal(found, TABLE[3, :, 2]) and torch.equal(chosen, TABLE[::3])
    with OnScalars(), pytest.raises(IndexError):
        TABLE[torch.tensor(4)]


def test_a_tensor_without_elements_is_not_passed_to_a_kernel() -> None:
    with pytest.raises(CannotEmitError, match=r"score_mod captures a tensor without elements, of shape \(0, 3\)"):
        Slots(Captures(), "cpu").of(torch.zeros(0, 3), "score_mod")


def results(attend: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the inputs, out, lse and the gradients of these two."""
    out, lse = attend(*inputs)
    dout = torch.linspace(-1, 1, out.numel()).bfloat16().to(out).view(out.shape)
    dlse = (lse != -torch.inf).to(lse)
    grads = torch.autograd.grad((out * dout).sum() + (lse.nan_to_num(neginf=0.0) * dlse).sum(), inputs)
    return [*grads, out.detach(), lse.detach(), dout, dlse]


def expected(kind: str) -> list[Tensor]:
    """The oracle has int64 indices and float64 scores."""
    same = [tensor.bfloat16().double().requires_grad_() for tensor in SHAPE.tensors(torch.float64)]
    mask = masks("cpu").get(kind)
    visible = None if mask is None else kit.dense_mask(mask, SHAPE, "cpu")
    return results(lambda *inputs: kit.oracle(SHAPE, *inputs, scores("cpu").get(kind), visible, None), same)


def call_of(kind: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Return query, key and value, and the other arguments of the call."""
    inputs = [t.bfloat16().to(device, dtype) for t in SHAPE.tensors(torch.float64)]
    mask_mod = masks(device).get(kind)
    mask = None if mask_mod is None else kit.block_mask(mask_mod, SHAPE, device)
    return inputs, {"score_mod": scores(device).get(kind), "block_mask": mask, "enable_gqa": True}


@pytest.mark.parametrize("kind", [*masks("cpu"), *scores("cpu")])
def test_integers_of_64_bits_on_a_cpu(kind: str) -> None:
    inputs, options = call_of(kind, "cpu", torch.float64)
    leaves = [t.requires_grad_() for t in inputs]
    got = results(lambda *args: flashbwd.flex_attention(*args, **options, return_lse=True), leaves)
    for found, right in zip(got, expected(kind), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float32, 2e-3)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", [*masks("cpu"), *scores("cpu")])
def test_integers_of_64_bits_on_a_gpu(kind: str, dtype: torch.dtype, tolerance: float, deterministic: bool) -> None:
    (q, k, v), options = call_of(kind, "cuda", dtype)
    *right, out, lse, dout, dlse = expected(kind)
    given = {"dlse": dlse.float().cuda(), "deterministic": deterministic}
    out, dout = (t.to("cuda", dtype) for t in (out, dout))
    grads = flashbwd.flex_attention_backward(dout, q, k, v, out, lse.float().cuda(), **options, **given)
    for found, gradient in zip(grads[:3], right, strict=True):
        torch.testing.assert_close(found.cpu().double(), gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_an_index_beyond_a_tensor_ends_no_process_on_a_gpu(dtype: torch.dtype) -> None:
    """In float64 the reference computes the call. PyTorch's forward takes no blocks of 32, so none runs here."""
    mask, seen = band("cuda")
    q, k, v, dout = (torch.randn(1, 2, 128, 64, device="cuda").to(dtype) for _ in range(4))
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    scores = (inputs[0] @ inputs[1].mT / 8).masked_fill(~seen, -torch.inf)
    out, lse = scores.softmax(-1) @ inputs[2], scores.logsumexp(-1)
    want = torch.autograd.grad(out, inputs, dout.double())
    if dtype != torch.float64:
        lse = lse.float()
    grads = flashbwd.flex_attention_backward(dout, q, k, v, out.to(dtype), lse, block_mask=mask)
    for found, right in zip((grads.dq, grads.dk, grads.dv), want, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("attend", [flashbwd.flex_attention, flashbwd.flex_decoding])
@pytest.mark.parametrize("trains_all", [False, True])
def test_a_captured_tensor_that_is_the_score_gets_a_gradient(attend: Callable[..., Any], trains_all: bool) -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=trains_all) for _ in range(3))
    score = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    _, lse = attend(q, k, v, lambda s, b, h, i, j: score, return_lse=True)
    (gradient,) = torch.autograd.grad(lse.sum(), [score])
    assert float(gradient) == pytest.approx(5.0)
