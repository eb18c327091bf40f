"""Gradients of flex_decoding, captured CUDA graphs, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import flashbwd

fp64 = torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMOOTH = [
    "alibi",
    "bias_rank2",
    "bias_rank3",
    "bias_rank4",
    "causal",
    "head_offset_times",
    "silu",
    "softcap",
    "squared",
]


def assert_same(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


def gradients(out: Tensor, lse: Tensor, inputs: Any) -> tuple[Tensor, ...]:
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum()
    return torch.autograd.grad(loss + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum(), inputs, retain_graph=True)


def leaves(shape: Shape, device: str, dtype: torch.dtype = fp64) -> tuple[Tensor, ...]:
    return tuple(t.requires_grad_() for t in shape.tensors(dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [None, "causal", "per_head", "some_rows_empty"])
@pytest.mark.parametrize("mod", SMOOTH)
def test_gradients_of_query_key_and_value_agree_with_the_oracle(mod: str, mask: str | None, device: str) -> None:
    shape = Shape()
    inputs = leaves(shape, device)
    score_mod = kit.score_mods(shape, device, fp64)[mod]
    mask_mod = None if mask is None else kit.mask_mods(shape, device)[mask]
    block_mask = None if mask_mod is None else kit.block_mask(mask_mod, shape, device)
    out, lse = flashbwd.flex_decoding(*inputs, score_mod, block_mask, enable_gqa=True, return_lse=True)
    dense = None if mask_mod is None else kit.dense_mask(mask_mod, shape, device)
    assert_same(gradients(out, lse, inputs), gradients(*kit.oracle(shape, *inputs, score_mod, dense), inputs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=3, batch_kv=1),
        Shape(heads=6, heads_kv=1),
        Shape(head_dim=9, head_dim_v=5),
        Shape(batch=1, seqlen_q=520, seqlen_k=530),
        Shape(seqlen_q=1, seqlen_k=1),
    ],
    ids=str,
)
def test_gradients_of_any_shape_agree_with_the_oracle(shape: Shape, device: str) -> None:
    inputs = leaves(shape, device)
    out, lse = flashbwd.flex_decoding(*inputs, enable_gqa=True, return_lse=True)
    assert_same(gradients(out, lse, inputs), gradients(*kit.oracle(shape, *inputs), inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_captured_tensors_agree_with_the_oracle(device: str) -> None:
    shape = Shape()
    inputs = leaves(shape, device)
    bias, weight, unused = (
        torch.randn(size, dtype=fp64, device=device, requires_grad=True) for size in ((4, 3, 203), (4,), (2,))
    )
    doubled = bias * 2  # not a leaf
    layer = nn.Linear(1, 1, bias=False, dtype=fp64, device=device)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(s) * weight[h] + doubled[h, q, k] + layer.weight[0, 0] * k * 0.01 + unused.shape[0]

    mask = kit.mask_mods(shape, device)["some_rows_empty"]
    inputs = (*inputs, bias, weight, layer.weight)
    block_mask = kit.block_mask(mask, shape, device)
    out, lse = flashbwd.flex_decoding(*inputs[:3], mod, block_mask, enable_gqa=True, return_lse=True)
    expected = kit.oracle(shape, *inputs[:3], mod, kit.dense_mask(mask, shape, device))
    assert_same(gradients(out, lse, inputs), gradients(*expected, inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_have_the_inputs_dtype_and_16_bit_ones_are_close(device: str) -> None:
    shape = Shape()
    inputs = leaves(shape, device, torch.bfloat16)
    out, lse = flashbwd.flex_decoding(*inputs, enable_gqa=True, return_lse=True)
    grads = gradients(out, lse, inputs)
    doubles = tuple(t.detach().double().requires_grad_() for t in inputs)
    for got, want in zip(grads, gradients(*kit.oracle(shape, *doubles), doubles), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=0.03, atol=0.03 * float(want.abs().max()))


def test_gradients_pass_gradcheck() -> None:
    shape = Shape(batch=1, heads=2, heads_kv=1, seqlen_q=2, seqlen_k=5, head_dim=3, head_dim_v=2)
    bias = torch.randn(2, 5, dtype=fp64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return flashbwd.flex_decoding(
            q, k, v, lambda s, b, h, i, j: s.sin() + bias[i, j], enable_gqa=True, return_lse=True
        )

    assert torch.autograd.gradcheck(attend, (*leaves(shape, "cpu"), bias))


def test_the_lse_has_gradients_and_the_largest_score_has_none() -> None:
    shape = Shape(heads=2)
    inputs = leaves(shape, "cpu")
    _, aux = flashbwd.flex_decoding(*inputs, return_aux=AuxRequest(lse=True, max_scores=True))
    assert not aux.max_scores.requires_grad
    dq, dk, dv = torch.autograd.grad(aux.lse.sum(), inputs)
    _, lse = kit.oracle(shape, *inputs)
    assert_same((dq, dk), torch.autograd.grad(lse.sum(), inputs[:2]))
    assert not dv.any()


def test_double_backward_is_refused() -> None:
    inputs = leaves(Shape(heads=2), "cpu")
    out = flashbwd.flex_decoding(*inputs)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(out.sum() + dq.square().sum(), inputs[:1])  # out alone has a gradient


def captured(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    flashbwd.flex_decoding(q, k, v, None, block_mask, enable_gqa=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashbwd.flex_decoding(q, k, v, None, block_mask, enable_gqa=True)
    return graph, out


@pytest.mark.gpu
def test_a_captured_graph_reads_changed_lengths() -> None:
    shape = Shape(batch=2, seqlen_q=1, seqlen_k=300)
    q, k, v = shape.tensors(torch.bfloat16, "cuda")
    lengths = torch.tensor([100, 300], device="cuda", dtype=torch.int32)
    block_mask = kit.mask_of_lengths(lengths, 300)
    with torch.no_grad():
        graph, out = captured(q, k, v, block_mask)
        for changed in ([100, 300], [17, 203], [0, 1]):
            lengths.copy_(torch.tensor(changed))
            graph.replay()
            expected, _ = kit.oracle(shape, q, k, v, None, kit.dense_mask(block_mask.mask_mod, shape, "cuda"))
            torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3])
def test_a_captured_graph_reads_changed_block_lists(group: int) -> None:
    shape = Shape(batch=1, heads=2 * group, seqlen_q=1, seqlen_k=5 * 64)
    q, k, v = shape.tensors(torch.bfloat16, "cuda")
    int32 = {"dtype": torch.int32, "device": "cuda"}
    counts, indices = torch.zeros(1, 1, 1, **int32), torch.zeros(1, 1, 1, 5, **int32)
    full_counts, full_indices = torch.zeros(1, 1, 1, **int32), torch.zeros(1, 1, 1, 5, **int32)
    block_mask = BlockMask.from_kv_blocks(
        *(counts, indices, full_counts, full_indices),
        BLOCK_SIZE=(1, 64),
        mask_mod=lambda b, h, i, j: j % 64 < 30,
        seq_lengths=(1, 320),
    )
    with torch.no_grad():
        graph, out = captured(q, k, v, block_mask)
        key = torch.arange(320, device="cuda")
        for partial, full in (([4, 1], [0]), ([], [0, 1, 2, 3, 4]), ([2], []), ([0, 1], [3, 2])):
            counts.fill_(len(partial))
            full_counts.fill_(len(full))
            indices[..., : len(partial)] = torch.tensor(partial, **int32)
            full_indices[..., : len(full)] = torch.tensor(full, **int32)
            graph.replay()
            block = key // 64
            dense = torch.isin(block, torch.tensor(full, device="cuda", dtype=torch.int64))
            dense |= torch.isin(block, torch.tensor(partial, device="cuda", dtype=torch.int64)) & (key % 64 < 30)
            expected, _ = kit.oracle(shape, q, k, v, None, dense.expand(1, shape.heads, 1, 320))
            torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


# ---- errors ----


def small(**changed: Any) -> dict[str, Any]:
    q, k, v = Shape(heads=2).tensors(torch.float32)
    return {"query": q, "key": k, "value": v} | changed


TENSOR = torch.zeros(2, 2, 203, 16)
MASK = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 3, 203, device="cpu")
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "dims": ({"query": TENSOR[0]}, "query has 3 dimensions, expected 4"),
    "dtype": ({"key": TENSOR.double()}, "key is float64, expected query's float32"),
    "integers": ({"query": torch.zeros(2, 2, 3, 16, dtype=torch.int32)}, "query is int32, expected float16, bfloat16"),
    "device": ({"value": TENSOR.to("meta")}, "value is on meta, expected query's cpu"),
    "head_dim": ({"key": TENSOR[..., :8]}, "key has head dimension 8, expected query's 16"),
    "length": (
        {"value": TENSOR[:, :, 1:]},
        r"value has shape \(2, 2, 202, 16\), expected key's batch, heads and length",
    ),
    "batch": ({"query": torch.zeros(3, 2, 3, 16)}, "key has batch 2, expected 1 or query's 3"),
    "no_gqa": ({"query": torch.zeros(2, 4, 3, 16)}, r"key has 2 heads, expected query's 4 \(enable_gqa=True"),
    "heads": (
        {"query": torch.zeros(2, 3, 3, 16), "enable_gqa": True},
        "key has 2 heads, which does not divide query's 3",
    ),
    "aux": ({"return_lse": True, "return_aux": AuxRequest()}, "return_lse and return_aux are both given"),
    "unknown_option": (
        {"kernel_options": {"BLOCK_Q": 3}},
        "kernel_options has an unknown key 'BLOCK_Q', expected one of",
    ),
    "splits": ({"kernel_options": {"SPLIT_KV": 0}}, r"kernel_options\['SPLIT_KV'\] is 0, expected a positive int"),
    "prescale": ({"kernel_options": {"PRESCALE_QK": 1}}, r"kernel_options\['PRESCALE_QK'\] is 1, expected a bool"),
    "backend": ({"kernel_options": {"BACKEND": "CPU"}}, r"kernel_options\['BACKEND'\] is 'CPU', expected one of"),
    "no_mask": ({"block_mask": TENSOR}, "block_mask is a Tensor, expected a BlockMask"),
    "mask_lengths": (
        {"block_mask": create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 4, 203, device="cpu")},
        r"block_mask was made for lengths \(4, 203\), expected query's and key's \(3, 203\)",
    ),
    "mask_heads": (
        {"block_mask": create_block_mask(lambda b, h, q, k: q >= k, 1, 3, 3, 203, device="cpu")},
        r"block_mask.kv_num_blocks has shape \(1, 3, 1\), expected 3 dimensions that begin with \(1 or 2, 1 or 2\)",
    ),
    "mask_device": ({"block_mask": MASK.to("meta")}, "block_mask.kv_num_blocks is on meta, expected query's cpu"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_names_the_bad_argument(name: str) -> None:
    changed, message = ERRORS[name]
    with pytest.raises(ValueError, match=f"flashbwd: {message}"):
        flashbwd.flex_decoding(**small(**changed))


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda s, b, h, q, k: s if q > 1 else -s, "score_mod failed: .*data-dependent control flow"),
        (lambda s, b, h, q, k: s * q.item(), r"score_mod failed: .*\.item\(\)"),
        (lambda s, b, h: s, "score_mod failed"),
    ],
    ids=["branch", "item", "arity"],
)
def test_the_error_names_a_modification_that_cannot_be_vectorised(mod: Any, message: str) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"flashbwd: {message}"):
        flashbwd.flex_decoding(**small(score_mod=mod))


def test_the_error_names_a_modification_of_the_wrong_type() -> None:
    with pytest.raises(ValueError, match="flashbwd: score_mod returned bool, expected a floating-point score"):
        flashbwd.flex_decoding(**small(score_mod=lambda s, b, h, q, k: q > k))
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 3, 203, device="cpu")
    mask.mask_mod = lambda b, h, q, k: q - k
    with pytest.raises(ValueError, match="flashbwd: mask_mod returned int64, expected a bool"):
        flashbwd.flex_decoding(**small(block_mask=mask))
    sliced = mask[:, :, 0]
    with pytest.raises(RuntimeError, match="flashbwd: mask_mod failed: Cannot use mask_mod from a sliced BlockMask"):
        flashbwd.flex_decoding(**small(block_mask=sliced))
