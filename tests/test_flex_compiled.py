"""FlexAttention in compiled models: the pass over the backward graph, on a CPU.

PyTorch has no FlexAttention backward for a CPU, and Inductor no forward for training. So most tests run the rewritten
backward graph node by node, and some compile only the backward with Inductor. The reference computes the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit import compiled as kit
from kit import decoding
from kit.compiled import OURS, PYTORCHS, Compiled, counted
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import flashbwd
from flashbwd.flex import graph_operator
from flashbwd.integrations import inductor

SHAPE = Shape(batch=2, heads=4, heads_kv=2, seqlen_q=75, seqlen_k=101, head_dim=8, head_dim_v=5)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with kit.on_the_cpu(monkeypatch):
        yield


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def loss(out: Tensor, lse: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()


def attend(q: Tensor, k: Tensor, v: Tensor, mod: Any = None, mask: BlockMask | None = None, **options: Any) -> Any:
    # return_lse=True recompiles once, because PyTorch warns about it once.
    out, auxiliary = flex_attention(q, k, v, mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)
    return out, auxiliary.lse


def check(shape: Shape, mod: Any = None, mask_mod: Any = None, block: Any = 64, **options: Any) -> Compiled:
    """Compare the gradients of a compiled call with float64 autograd of the dense formula."""
    inputs, same = leaves(*shape.tensors(torch.float64)), leaves(*shape.tensors(torch.float64))
    dense = None if mask_mod is None else decoding.dense_mask(mask_mod, shape, "cpu")
    mask = None if mask_mod is None else decoding.block_mask(mask_mod, shape, block=block)
    compiled = Compiled(lambda q, k, v: attend(q, k, v, mod, mask, **options))
    grads = torch.autograd.grad(loss(*compiled(*inputs)), inputs)
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (1, 0)
    assert counted() == (1, {})
    want = torch.autograd.grad(loss(*decoding.oracle(shape, *same, mod, dense, options.get("scale"))), same)
    torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)
    assert [g.stride() for g in grads] == [t.stride() for t in inputs]
    return compiled


def operator_of(compiled: Compiled) -> Any:
    """The only node of this library's operator."""
    (node,) = (node for module in compiled.graphs for node in module.graph.nodes if node.target is OURS)
    return node


# ---- values ----


@pytest.mark.parametrize("mod", ["identity", "softcap", "relative_bias", "bias_rank3", "document", "integers"])
def test_gradients_with_a_score_mod_equal_pytorchs(mod: str) -> None:
    check(SHAPE, decoding.score_mods(SHAPE, dtype=torch.float64)[mod])


@pytest.mark.parametrize("mask", ["causal", "document", "per_batch", "some_rows_empty", "all_rows_empty"])
def test_gradients_with_a_mask_equal_pytorchs(mask: str) -> None:
    check(SHAPE, None, decoding.mask_mods(SHAPE)[mask])


@pytest.mark.parametrize("block", [128, 16, (20, 48)], ids=str)
def test_gradients_with_any_block_size_equal_pytorchs(block: Any) -> None:
    check(SHAPE, decoding.score_mods(SHAPE)["softcap"], decoding.mask_mods(SHAPE)["causal"], block, scale=0.7)


def test_all_batches_can_share_one_batch_of_keys() -> None:
    shape = Shape(batch=3, batch_kv=1, seqlen_q=33, seqlen_k=70)
    check(shape, None, lambda b, h, q, k: k <= q + 3 * b)


def test_casts() -> None:
    """Inductor decomposes them to an operator without a derivative."""
    factor = torch.tensor([1, 2, 3, 4], dtype=torch.int32)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 3 * torch.tanh(s.float() / 3) + factor[h].float() * i.to(torch.int64).float()

    inputs = leaves(*SHAPE.tensors(torch.float32))
    mask = decoding.block_mask(lambda b, h, q, k: q.float() * 0.7 >= k.to(torch.int64), SHAPE)
    compiled = Compiled(lambda q, k, v: attend(q, k, v, mod, mask))
    grads = torch.autograd.grad(loss(*compiled(*inputs)), inputs)
    args = operator_of(compiled).args
    assert all("_to_copy" in text and "prims" not in text for text in (args[9], args[13]))
    same, dense = leaves(*(t.double() for t in inputs)), decoding.dense_mask(mask.mask_mod, SHAPE, "cpu")
    want = torch.autograd.grad(loss(*decoding.oracle(SHAPE, *same, mod, dense)), same)
    torch.testing.assert_close([g.double() for g in grads], list(want), rtol=1e-3, atol=1e-4)


def test_a_call_without_a_block_mask_passes_no_lists() -> None:
    assert operator_of(check(SHAPE)).args[7] == []


def test_a_mask_can_lack_the_lists_of_full_blocks() -> None:
    all_partial = decoding.block_mask(decoding.mask_mods(SHAPE)["per_head"], SHAPE)
    assert all_partial.full_kv_num_blocks is not None and not all_partial.full_kv_num_blocks.any()
    lists, mask_mod = (all_partial.kv_num_blocks, all_partial.kv_indices), all_partial.mask_mod
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=mask_mod, seq_lengths=(75, 101))
    inputs, same = leaves(*SHAPE.tensors(torch.float64)), leaves(*SHAPE.tensors(torch.float64))
    compiled = Compiled(lambda q, k, v: attend(q, k, v, None, mask))
    grads = torch.autograd.grad(loss(*compiled(*inputs)), inputs)
    assert len(operator_of(compiled).args[7]) == 4
    dense = decoding.dense_mask(mask_mod, SHAPE, "cpu")
    want = torch.autograd.grad(loss(*decoding.oracle(SHAPE, *same, None, dense)), same)
    torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_request_for_determinism_reaches_the_operator(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = graph_operator.gradients

    def gradients(*arguments: Any) -> Any:
        asked.append(arguments[9])
        return real(*arguments)

    monkeypatch.setattr(graph_operator, "gradients", gradients)
    inputs = leaves(*SHAPE.tensors(torch.float64))
    options: Any = {"enable_gqa": True, "deterministic": deterministic}
    compiled = Compiled(lambda *tensors: flashbwd.flex_attention(*tensors, **options))
    torch.autograd.grad(compiled(*inputs).sum(), inputs)
    assert (operator_of(compiled).args[-1], asked) == (deterministic, [deterministic])


@pytest.mark.parametrize("used", [0, 1], ids=["out", "lse"])
def test_the_loss_can_use_only_one_of_the_two_results(used: int) -> None:
    inputs, same = leaves(*SHAPE.tensors(torch.float64)), leaves(*SHAPE.tensors(torch.float64))
    compiled = Compiled(lambda q, k, v: attend(q, k, v)[used])
    grads = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs, materialize_grads=True)
    dout, dlse = operator_of(compiled).args[5:7]
    if torch.__version__ >= "2.11":  # earlier, PyTorch passes zeros for the result that is not used
        assert (dout is None, dlse is None) == (used == 1, used == 0)
    want = decoding.oracle(SHAPE, *same)[used].sin().sum()
    expected = torch.autograd.grad(want, same, materialize_grads=True)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-10)


def test_captured_tensors_get_gradients() -> None:
    inputs, same = leaves(*SHAPE.tensors(torch.float64)), leaves(*SHAPE.tensors(torch.float64))
    fixed = torch.randn(101, dtype=torch.float64)
    factor, bias = leaves(torch.randn(4, dtype=torch.float64), torch.randn(75, 101, dtype=torch.float64))

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * factor[h] + fixed[j] + bias[i, j]

    compiled = Compiled(lambda q, k, v: attend(q, k, v, mod))
    grads = torch.autograd.grad(loss(*compiled(*inputs)), [*inputs, factor, bias])
    wanted = [argument.name for argument in OURS._schema.arguments].index("wanted")
    assert sorted(operator_of(compiled).args[wanted]) == [False, True, True]
    want = torch.autograd.grad(loss(*decoding.oracle(SHAPE, *same, mod)), [*same, factor, bias])
    torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)


def test_numbers_can_index_captured_tensors() -> None:
    inputs, same = leaves(*SHAPE.tensors(torch.float64)), leaves(*SHAPE.tensors(torch.float64))
    (factors,) = leaves(torch.randn(3, dtype=torch.float64))

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * factors[0] + factors[-1] * torch.tensor(0.1, dtype=torch.float64)

    compiled = Compiled(lambda q, k, v: attend(q, k, v, mod))
    grads = torch.autograd.grad(loss(*compiled(*inputs)), [*inputs, factors])
    assert counted() == (1, {})
    want = torch.autograd.grad(loss(*decoding.oracle(SHAPE, *same, mod)), [*same, factors])
    torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_are_as_close_as_pytorchs_own_backward(dtype: torch.dtype) -> None:
    def gradients(rewrite: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = leaves(*(t.to(dtype) for t in SHAPE.tensors(torch.bfloat16)))
        return torch.autograd.grad(loss(*Compiled(attend, rewrite)(*inputs)), inputs)

    exact = gradients(lambda graph: None, torch.float64)
    ours, pytorchs = gradients(None, dtype), gradients(lambda graph: None, dtype)
    for got, plain, want in zip(ours, pytorchs, exact, strict=True):
        assert got.dtype == dtype
        error, allowed = ((x.double() - want).abs().max() for x in (got, plain))
        assert error <= 2 * allowed


# ---- layouts ----


def layouts() -> dict[str, list[Tensor]]:
    packed = torch.randn(2, 40, 8, 16, dtype=torch.float64).transpose(1, 2)
    rows = [torch.randn(2, 40, heads, 16, dtype=torch.float64).transpose(1, 2) for heads in (4, 2, 2)]
    return {
        "heads_after_rows": rows,
        "packed": list(packed.split([4, 2, 2], 1)),
        "heads_outermost": [torch.randn(h, 2, 40, 16, dtype=torch.float64).transpose(0, 1) for h in (4, 2, 2)],
        "one_head": [torch.randn(2, 40, 1, 16, dtype=torch.float64).transpose(1, 2) for _ in range(3)],
    }


@pytest.mark.parametrize("layout", sorted(layouts()))
def test_gradients_have_the_strides_of_pytorchs(layout: str) -> None:
    inputs = [t.detach().requires_grad_() for t in layouts()[layout]]
    strides, found = [], []
    for rewrite in (None, lambda graph: None):
        out, _ = Compiled(attend, rewrite)(*inputs)
        found.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
        strides.append([[n for n, size in zip(g.stride(), g.shape, strict=True) if size > 1] for g in found[-1]])
    assert strides[0] == strides[1]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


def test_the_operator_agrees_with_its_schema_and_its_shapes() -> None:
    compiled = check(SHAPE, decoding.score_mods(SHAPE, dtype=torch.float64)["bias_rank2"], lambda b, h, q, k: q >= k)
    node, values = operator_of(compiled), {}

    def real(argument: Any) -> Tensor:
        value = argument.meta["val"]
        if argument not in values:
            values[argument] = torch.ones(value.shape, dtype=value.dtype)
        return values[argument]

    args = torch.fx.node.map_arg(node.args, real)
    torch.library.opcheck(OURS, args, test_utils=("test_schema", "test_faketensor"))


# ---- shapes ----


def test_no_length_recompiles() -> None:
    def one(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Any:
        return attend(q, k, v, lambda s, b, h, i, j: 2 * torch.tanh(s / 2), mask)

    compiled = Compiled(one, dynamic=True)
    for seqlen in (150, 48, 70, 129, 300):  # five blocks first: PyTorch makes equal sizes equal in later calls too
        shape = Shape(batch=2, seqlen_q=seqlen, seqlen_k=seqlen + 5)
        inputs, same = leaves(*shape.tensors(torch.float64)), leaves(*shape.tensors(torch.float64))
        mask = decoding.block_mask(decoding.mask_mods(shape)["causal"], shape, block=32)
        grads = torch.autograd.grad(loss(*compiled(*inputs, mask)), inputs)
        dense = decoding.dense_mask(mask.mask_mod, shape, "cpu")
        mod = decoding.score_mods(shape)["softcap"]
        want = torch.autograd.grad(loss(*decoding.oracle(shape, *same, mod, dense)), same)
        torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)
    assert len(compiled.graphs) == 1
    assert counted() == (5, {})


def test_a_score_mod_that_captures_a_length_recompiles_for_none() -> None:
    table = torch.randn(4, 700, dtype=torch.float64, requires_grad=True)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Any:
        last = k.shape[2] - 1
        return attend(q, k, v, lambda s, b, h, i, j: s + table[h, i - j + last], None)

    compiled = Compiled(one, dynamic=True)
    for seqlen in (150, 48, 70, 129, 300):
        shape = Shape(batch=2, seqlen_q=seqlen, seqlen_k=seqlen + 5)
        inputs, same = leaves(*shape.tensors(torch.float64)), leaves(*shape.tensors(torch.float64))
        grads = torch.autograd.grad(loss(*compiled(*inputs)), [*inputs, table])
        i, j = torch.arange(seqlen).unsqueeze(1), torch.arange(seqlen + 5)
        bias = table[:, i - j + seqlen + 4]
        exact = decoding.oracle(shape, *same, lambda s, b, h, q, k, bias=bias: s + bias[h, q, k])
        want = torch.autograd.grad(loss(*exact), [*same, table])
        torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)
    assert len(compiled.graphs) == 1
    assert counted() == (5, {})


def test_a_captured_tensor_of_any_length_gets_its_gradient_without_recompiling() -> None:
    """PyTorch captures the sizes of such a tensor too, as symbols that only its derivative reads."""

    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor) -> Any:
        return attend(q, k, v, lambda s, b, h, i, j: s * scale[h] + bias[h, j], None)

    compiled = Compiled(one, dynamic=True)
    for seqlen in (33, 48, 70):
        shape = Shape(batch=2, seqlen_q=seqlen, seqlen_k=seqlen + 5)
        bias = torch.linspace(-1, 1, shape.heads * shape.seqlen_k, dtype=torch.float64).view(shape.heads, -1)
        scale = torch.linspace(0.5, 2, shape.heads, dtype=torch.float64)
        inputs, same = (leaves(*shape.tensors(torch.float64), bias, scale) for _ in range(2))
        grads = torch.autograd.grad(loss(*compiled(*inputs)), inputs)
        *qkv, bias, scale = same
        mod = functools.partial(lambda bias, scale, s, b, h, i, j: s * scale[h] + bias[h, j], bias, scale)
        want = torch.autograd.grad(loss(*decoding.oracle(shape, *qkv, mod, None)), same)
        torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)
    assert len(compiled.graphs) == 1
    assert counted() == (3, {})


def test_a_mask_can_capture_a_length() -> None:
    """PyTorch passes the captured number, which differs between calls, as a symbol."""

    def up_to(last: int) -> Any:
        return lambda b, h, q, k: k <= q + last // 2

    def one(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Any:
        return attend(q, k, v, None, mask)

    compiled = Compiled(one, dynamic=True)
    for seqlen in (33, 48, 70):
        shape = Shape(batch=1, seqlen_q=seqlen, seqlen_k=seqlen)
        inputs, same = leaves(*shape.tensors(torch.float64)), leaves(*shape.tensors(torch.float64))
        mask = decoding.block_mask(up_to(seqlen - 3), shape, block=16)
        grads = torch.autograd.grad(loss(*compiled(*inputs, mask)), inputs)
        dense = decoding.dense_mask(mask.mask_mod, shape, "cpu")
        want = torch.autograd.grad(loss(*decoding.oracle(shape, *same, None, dense)), same)
        torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-10)
    assert counted() == (3, {})


# ---- through Inductor ----


def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    out, lse = attend(q, k, v, None, mask)
    return attend(out + lse.unsqueeze(-1), k, v, None, mask)[0]


def test_inductor_compiles_the_backward_of_two_layers() -> None:
    shape = Shape(batch=1, seqlen_q=96, seqlen_k=96)
    mask = decoding.block_mask(decoding.mask_mods(shape)["document"], shape, block=32)
    backend = kit.inductors_backward(**inductor.options())
    inputs, same = leaves(*shape.tensors(torch.float32)), leaves(*shape.tensors(torch.float64))
    compiled = torch.compile(two_layers, backend=backend, fullgraph=True)
    grads = torch.autograd.grad(compiled(*inputs, mask).sin().sum(), inputs)
    assert counted() == (2, {})
    dense = decoding.dense_mask(mask.mask_mod, shape, "cpu")
    out, lse = decoding.oracle(shape, *same, None, dense)
    want = decoding.oracle(shape, out + lse.unsqueeze(-1), *same[1:], None, dense)[0]
    expected = torch.autograd.grad(want.sin().sum(), same)
    torch.testing.assert_close([g.double() for g in grads], list(expected), rtol=1e-4, atol=1e-4)
