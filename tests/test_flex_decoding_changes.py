"""Warm calls on a GPU: a modification always reads current values, never those of an earlier call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.changing import CHANGES, ring
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import flashbwd
from flashbwd.mods import kernels

pytestmark = pytest.mark.gpu


def never(*_: Any) -> Any:
    pytest.fail("traced or compiled")


@pytest.fixture
def gpu_case() -> tuple[Shape, tuple[Tensor, Tensor, Tensor]]:
    shape = Shape(batch=1, heads=4, heads_kv=4, seqlen_q=2, seqlen_k=256, head_dim=64, head_dim_v=64)
    return shape, shape.tensors(torch.float32, "cuda")


def assert_right(shape: Shape, tensors: tuple[Tensor, ...], mod: Any, same: Any, mask: Any = None) -> None:
    """Assert that a call with ``mod`` gives the oracle's result for ``same``, which has the numbers as literals.

    ``mask`` is a pair of mask functions: one for the call, one for the oracle.
    """
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(mask[0], None, None, shape.seqlen_q, shape.seqlen_k, device="cuda")
    dense = None if mask is None else kit.dense_mask(mask[1], shape, "cuda")
    with torch.no_grad():
        out = flashbwd.flex_decoding(*tensors, mod, block_mask)
    expected, _ = kit.oracle(shape, *tensors, same, dense)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


def relative(bias: Tensor) -> Any:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        n = bias.shape[0]
        return s + bias[torch.clamp(k - q + n // 2, 0, n - 1)]

    return mod


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("make", [relative, ring])
def test_each_call_uses_the_shape_of_its_own_tensors(make: Any, calls: int, gpu_case: Any) -> None:
    for size in (8, 64, 200, 16):
        pool = torch.full((4096,), 50.0, device="cuda")
        bias = pool[:size]  # reads past the end of the bias would change the result
        bias.normal_()
        for _ in range(calls):
            assert_right(*gpu_case, make(bias), make(bias.clone()))


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "shape"])
def test_a_call_sees_changes_of_values_that_a_function_reads(
    name: str, gpu_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mods, change, same = CHANGES[name]
    score_mod, mask_mod = (*mods(), None)[:2]
    for _ in range(3):
        kind = None if mask_mod is None else (mask_mod, mask_mod)
        assert_right(*gpu_case, score_mod, score_mod, kind)
    change(monkeypatch)
    literal, literal_mask = (*same(), None)[:2]
    for _ in range(3):
        assert_right(*gpu_case, score_mod, literal, None if mask_mod is None else (mask_mod, literal_mask))


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_a_warm_call_sees_every_change(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(seqlen_q=1)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    length = torch.tensor(150, device="cuda")
    weight = torch.ones(4, device="cuda")
    factor = 1.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * weight[h] * factor

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < length

    mask = None
    if masked:  # all blocks are partial, so a changed length needs no other lists
        number = torch.tensor([[[4]]], dtype=torch.int32, device="cuda")
        indices = torch.arange(4, dtype=torch.int32, device="cuda").view(1, 1, 1, 4)
        sizes = {"BLOCK_SIZE": (1, 64), "seq_lengths": (1, shape.seqlen_k)}
        mask = BlockMask.from_kv_blocks(number, indices, mask_mod=mask_mod, **sizes)
    traced: list[int] = []
    real = kernels.trace
    monkeypatch.setattr(kernels, "trace", lambda *a: traced.append(1) or real(*a))

    def check(known: bool) -> None:
        traced.clear()
        with torch.no_grad():
            out = flashbwd.flex_decoding(*tensors, mod, mask, enable_gqa=True)
        dense = kit.dense_mask(mask_mod, shape, "cuda") if masked else None
        expected, _ = kit.oracle(shape, *tensors, mod, dense)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
        assert (traced == []) == known

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
    weight = weight.bfloat16()
    check(known=False)
    weight = weight.float()
    check(known=True)
    factor = 3.0
    check(known=False)
    factor = 1.0
    check(known=True)
    if mask is not None:
        mask.kv_num_blocks.fill_(1)  # the GPU reads the lists in each call
        length.fill_(64)
        check(known=True)


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
def test_a_warm_call_returns_the_requested_outputs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(seqlen_q=1)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    weight = torch.rand(4, device="cuda")
    causal = kit.mask_mods(shape, "cuda")["causal"]
    mask = create_block_mask(causal, None, None, 1, shape.seqlen_k, device="cuda", BLOCK_SIZE=64)  # for all heads

    def call(tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
        mod = lambda s, b, h, q, k: s * weight[h]  # noqa: E731
        with torch.no_grad():
            results: Any = flashbwd.flex_decoding(*tensors, mod, mask, enable_gqa=True, **options)
        if "return_aux" in options:
            return [results[0], results[1].lse, results[1].max_scores]
        return list(results) if options.get("return_lse") else [results]

    call(tensors)
    weight.mul_(2)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "trace", never)
        found = call(tensors)
    for got, want in zip(found, call(tuple(t.double() for t in tensors)), strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
    with torch.autocast("cuda", torch.float16):
        cast = call(tensors)[0]
        assert cast is not None and cast.dtype == torch.float16


def test_a_warm_call_has_a_gradient_if_a_tensor_requires_one() -> None:
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


def test_a_second_trace_with_the_same_graph_compiles_nothing(gpu_case: Any) -> None:
    shape, tensors = gpu_case
    numbers = [0.5]
    mod = lambda s, b, h, q, k: s + numbers[0] * torch.sin(k * 1.0)  # noqa: E731
    assert_right(shape, tensors, mod, lambda s, b, h, q, k: s + 0.5 * torch.sin(k * 1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_build", never)
        assert_right(shape, tensors, mod, lambda s, b, h, q, k: s + 0.5 * torch.sin(k * 1.0))
    numbers.append(numbers.pop() * 2)
    assert_right(shape, tensors, mod, lambda s, b, h, q, k: s + 1.0 * torch.sin(k * 1.0))
