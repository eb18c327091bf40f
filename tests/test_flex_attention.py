"""FlexAttention for training on any device: results and gradients against float64 autograd of the dense formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import flashbwd
from flashbwd.flex import backends
from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.reference.decoding import DecodingCall

SHAPE = Shape(batch=2, heads=4, heads_kv=2, seqlen_q=75, seqlen_k=101, head_dim=8, head_dim_v=5)
BLOCKS = [64, 128, 16, (20, 48), (1, 32)]
NAN = float("nan")


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def loss(out: Tensor, lse: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()


def attend(
    inputs: list[Tensor], mod: Any = None, mask: BlockMask | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    return flashbwd.flex_attention(*inputs[:3], mod, mask, enable_gqa=True, return_lse=True, **options)  # type: ignore[return-value]


def check(shape: Shape, mod: Any = None, mask_mod: Any = None, block: Any = 64, scale: float | None = None) -> None:
    inputs, same = leaves(*shape.tensors(torch.float64)), leaves(*shape.tensors(torch.float64))
    dense = None if mask_mod is None else kit.dense_mask(mask_mod, shape, "cpu")
    mask = None if mask_mod is None else kit.block_mask(mask_mod, shape, block=block)
    got, want = attend(inputs, mod, mask, scale=scale), kit.oracle(shape, *same, mod, dense, scale)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    grads, expected = torch.autograd.grad(loss(*got), inputs), torch.autograd.grad(loss(*want), same)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-10)
    assert [g.stride() for g in grads] == [t.stride() for t in inputs]


@pytest.mark.parametrize("mod", sorted(kit.score_mods(SHAPE)))
def test_every_score_mod_agrees_with_the_oracle(mod: str) -> None:
    check(SHAPE, kit.score_mods(SHAPE, dtype=torch.float64)[mod])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("mask", sorted(kit.mask_mods(SHAPE)))
def test_masks_of_every_block_size_agree_with_the_oracle(mask: str, block: Any) -> None:
    check(SHAPE, kit.score_mods(SHAPE, dtype=torch.float64)["softcap"], kit.mask_mods(SHAPE)[mask], block)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=3, batch_kv=1, seqlen_q=33, seqlen_k=70),
        Shape(heads=6, heads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=3, head_dim_v=7),
        Shape(seqlen_q=129, seqlen_k=7, head_dim=1, head_dim_v=20),
    ],
    ids=str,
)
def test_every_shape_agrees_with_the_oracle(shape: Shape) -> None:
    check(shape, kit.score_mods(shape, dtype=torch.float64)["bias_rank4"], lambda b, h, q, k: k <= q + 3 * b, scale=0.7)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_inputs_and_captured_tensors_pass_gradcheck(masked: bool) -> None:
    shape = Shape(seqlen_q=9, seqlen_k=13, head_dim=3, head_dim_v=2)
    factors, bias = torch.randn(4, dtype=torch.float64), torch.randn(9, 13, dtype=torch.float64)
    mask = kit.block_mask(kit.mask_mods(shape)["per_head"], shape, block=4) if masked else None

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(list(x), lambda s, b, h, q, k: torch.tanh(s * x[3][h]) + x[4][q, k], mask)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(attention, leaves(*shape.tensors(torch.float64), factors, bias), fast_mode=True)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_auxiliary_outputs_agree_with_the_formula(wanted: tuple[bool, bool]) -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    mask = kit.block_mask(lambda b, h, q, k: (q >= k) & (q > 3), SHAPE, block=64)
    request = AuxRequest(lse=wanted[0], max_scores=wanted[1])
    out, found = flashbwd.flex_attention(q, k, v, kit_softcap, mask, enable_gqa=True, return_aux=request)  # type: ignore[misc]
    products = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * SHAPE.head_dim**-0.5
    rows, columns = torch.arange(SHAPE.seqlen_q)[:, None], torch.arange(SHAPE.seqlen_k)
    scores = kit_softcap(products).masked_fill(~((rows >= columns) & (rows > 3)), -torch.inf)
    torch.testing.assert_close(found.lse, scores.logsumexp(-1) if wanted[0] else None)
    torch.testing.assert_close(found.max_scores, scores.amax(-1) if wanted[1] else None)
    assert torch.equal(out, attend([q, k, v], kit_softcap, mask)[0])


def test_the_largest_scores_of_a_differentiable_call_have_no_gradient() -> None:
    inputs = leaves(*SHAPE.tensors(torch.float64))
    options: Any = {"enable_gqa": True, "return_aux": AuxRequest(lse=True, max_scores=True)}
    out, found = flashbwd.flex_attention(*inputs, kit_softcap, **options)  # type: ignore[misc]
    assert found.lse.requires_grad and not found.max_scores.requires_grad
    grads = torch.autograd.grad(loss(out, found.lse), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(loss(*attend(inputs, kit_softcap)), inputs), rtol=0, atol=0)


def test_the_backward_function_names_the_gradients_of_captured_tensors() -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    factor, other = leaves(torch.ones(4, dtype=torch.float64), torch.zeros(101, dtype=torch.float64))

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * factor[h] + other[j]

    inputs = leaves(q, k, v)
    out, lse = attend(inputs, mod)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad([out, lse], [*inputs, factor, other], [dout, dlse])
    got = flashbwd.flex_attention_backward(dout, q, k, v, out, lse, score_mod=mod, enable_gqa=True, dlse=dlse)
    assert set(got.captured) == {"factor", "other"}
    torch.testing.assert_close((*got[:3], got.captured["factor"], got.captured["other"]), want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_captured_16_bit_tensors_are_not_summed_in_16_bits(dtype: torch.dtype) -> None:
    """Each bucket gets the gradients of 32,768 pairs."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, 512, 32) for _ in range(3)]
    grads = []
    for bias in torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=torch.float64):
        bias.requires_grad_()
        tensors = [t.to(torch.promote_types(bias.dtype, torch.float32)) for t in inputs]
        out, _ = attend(tensors, lambda s, b, h, i, j, bias=bias: s + bias[(i - j) % 8])
        grads.append(
            torch.autograd.grad(out, bias, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))[0]
        )
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=4 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dirt", [NAN, float("inf")])
def test_blocks_in_neither_list_are_not_read(dirt: float) -> None:
    """Query block 1 and key block 0 contain NaN or infinity. All other query blocks see only key blocks 1 and 2."""
    shape = Shape(seqlen_q=48, seqlen_k=48)
    states = torch.tensor([[0, 2, 1], [0, 0, 0], [0, 1, 2]])
    mask = mask_of(states, 16, lambda b, h, q, k: q != 3)
    visible = torch.zeros(48, 48, dtype=torch.bool)
    for m, n in ((0, 1), (0, 2), (2, 1), (2, 2)):
        visible[16 * m : 16 * m + 16, 16 * n : 16 * n + 16] = True
    visible[3, 32:] = False
    q, k, v = shape.tensors(torch.float64)
    clean = leaves(q, k, v)
    want = kit.oracle(shape, *clean, None, visible.expand(2, 4, 48, 48))
    for tensor, rows in ((q, slice(16, 32)), (k, slice(0, 16)), (v, slice(0, 16))):
        tensor[:, :, rows] = dirt
    inputs = leaves(q, k, v)
    factor = torch.ones(4, dtype=torch.float64, requires_grad=True)
    got = attend(inputs, lambda s, b, h, i, j: s * factor[h], mask)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    dout = torch.randn_like(want[0])
    expected = torch.autograd.grad(want[0], clean, dout)
    dout[:, :, 16:32] = dirt
    *grads, dfactor = torch.autograd.grad(got[0], [*inputs, factor], dout)
    torch.testing.assert_close(grads, list(expected), rtol=1e-9, atol=1e-10)
    assert bool(dfactor.isfinite().all())


def test_a_block_affects_only_the_rows_that_see_it() -> None:
    shape = Shape(seqlen_q=32, seqlen_k=32)
    mask = mask_of(torch.tensor([[2, 0], [2, 2]]), 16)
    q, k, v = shape.tensors(torch.float64)
    k[:, :, 16:], v[:, :, 16:] = NAN, NAN
    inputs = leaves(q, k, v)
    out, _ = attend(inputs, None, mask)
    dq, *_ = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert bool(dq[:, :, :16].isfinite().all()) and bool(out[:, :, :16].isfinite().all())
    assert bool(out[:, :, 16:].isnan().all())


def mask_of(states: Tensor, block: int, mask_mod: Any = None) -> BlockMask:
    """A BlockMask for one batch and head whose blocks have these states: 0 absent, 1 partial, 2 full."""
    lists = []
    for state in (1, 2):
        listed = states == state
        order = listed.int().argsort(dim=-1, descending=True, stable=True)
        lists += [listed.sum(-1).int()[None, None], order.int()[None, None]]
    lengths = (states.shape[0] * block, states.shape[1] * block)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=lengths)


def test_a_block_may_be_larger_than_the_sequences() -> None:
    """PyTorch's default BlockMask, which hides no key, consists of one such block."""
    mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
        mask_mod=lambda b, h, q, k: q + b >= k,
        seq_lengths=(1, 1),
    )
    inputs, same = leaves(*SHAPE.tensors(torch.float64)), leaves(*SHAPE.tensors(torch.float64))
    dense = kit.dense_mask(mask.mask_mod, SHAPE, "cpu")
    got, want = attend(inputs, None, mask), kit.oracle(SHAPE, *same, None, dense)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    grads, expected = torch.autograd.grad(loss(*got), inputs), torch.autograd.grad(loss(*want), same)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_and_gradients_of_lower_precision_are_rounded_once(dtype: torch.dtype) -> None:
    inputs = leaves(*SHAPE.tensors(dtype))
    exact = leaves(*(tensor.double() for tensor in inputs))
    got, want = attend(inputs), attend(exact)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].double(), want[0], rtol=2 * eps, atol=2 * eps)
    grads, expected = (torch.autograd.grad(x[0].sum(), i) for x, i in ((got, inputs), (want, exact)))
    for g, e in zip(grads, expected, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), e, rtol=8 * eps, atol=16 * eps * float(e.abs().max()))


def test_repeated_gradients_have_equal_bits() -> None:
    mod = kit.score_mods(SHAPE)["bias_rank3"]
    mask = kit.block_mask(kit.mask_mods(SHAPE)["causal"], SHAPE)
    inputs = leaves(*SHAPE.tensors(torch.float32))
    first, second = (
        torch.autograd.grad(loss(*attend(inputs, mod, mask, deterministic=True)), inputs) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_double_backward_is_refused() -> None:
    inputs = leaves(*SHAPE.tensors(torch.float64))
    out = attend(inputs)[0]
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(out.sum() + dq.square().sum(), inputs[:1])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=["no_queries", "no_keys"])
def test_empty_sequences_have_gradients_of_zero(sizes: tuple[int, int]) -> None:
    shape = Shape(seqlen_q=sizes[0], seqlen_k=sizes[1])
    inputs = leaves(*shape.tensors(torch.float64))
    out, lse = attend(inputs)
    assert not out.any() and bool((lse == -torch.inf).all())
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), inputs))
    results: Any = flashbwd.flex_attention(*inputs, enable_gqa=True, return_aux=AuxRequest(max_scores=True))
    assert bool((results[1].max_scores == -torch.inf).all())


def test_the_plan_names_the_reference_and_why_no_kernel_runs() -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    out, lse = attend([q, k, v])
    plan = flashbwd.plan_flex_attention_backward(out, q, k, v, out, lse, enable_gqa=True)
    assert plan.backend == "reference" and plan.deterministic and not plan.compiled
    assert set(plan.reasons) == {"short", "sm90", "sm80"} and all(plan.reasons.values())


def kit_softcap(s: Tensor, *_: Tensor) -> Tensor:
    return 2 * torch.tanh(s / 2)


def on_a_gpu(batch: int = 2) -> Tensor:
    """A tensor without data."""
    with FakeTensorMode():
        return torch.empty(batch, 4, 75, 64, device="cuda")


@pytest.mark.parametrize(("mod", "softcap"), [(None, 0.0), (lambda s, *_: s, 0.0), (kit_softcap, 2.0)])
def test_a_call_on_a_gpu_without_a_block_mask_goes_to_the_kernels_of_attention(mod: Any, softcap: float) -> None:
    q = on_a_gpu()
    kernel = backends.choose(DecodingCall(mod, None, 0.25), q, q, q, [], True)
    assert kernel.operator is torch.ops.flashbwd.attention_backward and kernel.lists is None
    of_softcap = {"softcap": softcap} if softcap else {}
    assert kernel.options == {"softmax_scale": 0.25, "deterministic": True} | of_softcap


@pytest.mark.parametrize(
    ("call", "key", "reason"),
    [
        (DecodingCall(None, None, 1.0, prescale=True), on_a_gpu(), "PRESCALE_QK rounds the query"),
        (DecodingCall(None, None, 1.0), torch.empty(2, 4, 75, 64), "query is on the CPU"),
    ],
    ids=["prescale", "cpu"],
)
def test_the_reference_computes_a_call_without_a_kernel(call: DecodingCall, key: Tensor, reason: str) -> None:
    query = on_a_gpu() if key.is_cuda else key
    with pytest.raises(UnsupportedError, match=reason):
        backends.choose(call, query, key, key, [], False)


def test_a_compiled_model_gets_the_same_gradients() -> None:
    mask = kit.block_mask(kit.mask_mods(SHAPE)["causal"], SHAPE)
    inputs = leaves(*SHAPE.tensors(torch.float64))
    compiled = torch.compile(lambda *x: attend(list(x), kit_softcap, mask), backend="aot_eager")
    got, want = compiled(*inputs), attend(inputs, kit_softcap, mask)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    grads, expected = (torch.autograd.grad(loss(*results), inputs) for results in (got, want))
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_captured_tensors(backend: str) -> None:
    documents, mask_shape = torch.arange(40) // 7, Shape(seqlen_q=40, seqlen_k=40)
    mask = kit.block_mask(lambda b, h, q, k: documents[q] == documents[k], mask_shape, block=16)
    layer = torch.nn.Linear(4, 9)
    inputs = leaves(*mask_shape.tensors(torch.float32))

    def run(*x: Tensor) -> Any:
        return attend(list(x), lambda s, b, h, q, k: s + layer.weight[(q - k) % 9, h], mask)

    wanted = [*inputs, layer.weight]
    grads = torch.autograd.grad(loss(*torch.compile(run, backend=backend)(*inputs)), wanted)
    torch.testing.assert_close(grads, torch.autograd.grad(loss(*run(*inputs)), wanted))


def test_a_compiled_function_may_call_the_backward() -> None:
    q, k, v = SHAPE.tensors(torch.float32)
    bias = torch.randn(4)
    options: Any = {"score_mod": lambda s, b, h, i, j: s + bias[h], "enable_gqa": True}
    out, lse = flashbwd.flex_attention(q, k, v, return_lse=True, **options)
    backward = lambda *x: flashbwd.flex_attention_backward(x[0] + 1, *x[1:], **options)  # noqa: E731
    given = (torch.randn_like(out), q, k, v, out, lse)
    torch.testing.assert_close(torch.compile(backward, backend="eager")(*given), backward(*given))


def test_a_hidden_pair_adds_nothing_to_a_captured_gradient() -> None:
    """The derivative at hidden pairs is infinite."""
    weights = torch.tensor([0.5] * 70 + [0.0] * 31, dtype=torch.float64, requires_grad=True)
    rate = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    mod = lambda s, b, h, q, k: s + torch.log(weights[k]) - torch.sqrt(rate * (q - k))  # noqa: E731
    mask_mod = lambda b, h, q, k: (k < 70) & (k < q)  # noqa: E731
    inputs, dense = leaves(*SHAPE.tensors(torch.float64)), kit.dense_mask(mask_mod, SHAPE, "cpu")
    got = attend(inputs, mod, kit.block_mask(mask_mod, SHAPE, block=64))
    grads = torch.autograd.grad(loss(*got), [*inputs, weights, rate])
    visible = lambda s, b, h, q, k: mod(s, b, h, torch.where(k < q, q, k + 1), k.clamp(max=69))  # noqa: E731
    want = kit.oracle(SHAPE, *inputs, visible, dense)
    expected = torch.autograd.grad(loss(*want), [*inputs, weights, rate])
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_in_inference_mode_are_those_outside(captured: bool) -> None:
    q, k, v = SHAPE.tensors(torch.float32)
    with torch.inference_mode():
        scales = torch.tensor([0.5, 1.0, 2.0, 4.0])
    mod = lambda s, b, h, i, j: torch.tanh(s * scales[h] if captured else s)  # noqa: E731
    out, lse = flashbwd.flex_attention(q, k, v, mod, enable_gqa=True, return_lse=True)
    given: Any = (torch.ones_like(out), q, k, v, out, lse)
    with torch.inference_mode():
        found = flashbwd.flex_attention_backward(*given, score_mod=mod, enable_gqa=True)
    scales = scales.clone()
    torch.testing.assert_close(found, flashbwd.flex_attention_backward(*given, score_mod=mod, enable_gqa=True))


def test_a_captured_tensor_may_be_other_columns_of_the_same_projection() -> None:
    projected = torch.randn(2, 8, 26, requires_grad=True)

    def run(part: Any) -> Tensor:
        *qkv, gate = projected.split([8, 8, 8, 2], -1)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in qkv)
        gate = part(gate)
        return flashbwd.flex_attention(q, k, v, lambda s, b, h, i, j: s + gate[b, j, h]).sin().sum()  # type: ignore[union-attr]

    together, apart = (torch.autograd.grad(run(part), projected) for part in (lambda x: x, Tensor.clone))
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_holds_pytorchs_operator(strict: bool) -> None:
    """PyTorch exports a call without gradients. On a CPU it refuses others."""
    shape = Shape(seqlen_q=40, seqlen_k=40)
    bias, mask = torch.randn(4), kit.block_mask(lambda b, h, q, k: q >= k, shape, block=16)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flashbwd.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], mask, enable_gqa=True)

    inputs = shape.tensors(torch.float32)
    program = torch.export.export(Layer(), inputs, strict=strict)
    assert any("flex_attention" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(program.module()(*inputs), Layer()(*inputs))
