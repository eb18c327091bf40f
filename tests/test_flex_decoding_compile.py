"""flex_decoding inside torch.compile is one operator of the graph, and gives the same results as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor, fx
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest

import flashbwd
from flashbwd.mods import in_graph, run

fp64 = torch.float64
SHAPE = Shape()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True)


def assert_same(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mod", list(kit.score_mods(SHAPE)))
def test_every_score_mod_agrees_with_the_oracle(mod: str) -> None:
    tensors = SHAPE.tensors(fp64)
    score_mod = kit.score_mods(SHAPE, dtype=fp64)[mod]

    def attend(*inputs: Tensor) -> Any:
        return flashbwd.flex_decoding(*inputs, score_mod, enable_gqa=True, return_lse=True)

    assert_same(compiled(attend)(*tensors), kit.oracle(SHAPE, *tensors, score_mod))


@pytest.mark.parametrize("mask", list(kit.mask_mods(SHAPE)))
def test_every_mask_agrees_with_the_oracle(mask: str) -> None:
    tensors = SHAPE.tensors(fp64)
    mask_mod = kit.mask_mods(SHAPE)[mask]
    block_mask = kit.block_mask(mask_mod, SHAPE)

    def attend(*inputs: Tensor) -> Any:
        return flashbwd.flex_decoding(*inputs, None, block_mask, enable_gqa=True, return_lse=True)

    want = kit.oracle(SHAPE, *tensors, None, kit.dense_mask(mask_mod, SHAPE, "cpu"))
    assert_same(compiled(attend)(*tensors), want)


def test_options_and_auxiliary_outputs_work_in_a_compiled_graph() -> None:
    q, k, v = SHAPE.tensors(fp64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        request = AuxRequest(lse=True, max_scores=True)
        options = {"SPLIT_KV": 3, "PRESCALE_QK": True}
        return flashbwd.flex_decoding(q, k, v, scale=0.3, enable_gqa=True, kernel_options=options, return_aux=request)

    out, aux = compiled(attend)(q, k, v)
    assert_same((out, aux.lse), kit.oracle(SHAPE, q, k, v, scale=0.3))
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    assert_same((aux.max_scores,), (scores.amax(-1),))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_compiled_graph_agree_with_the_oracle(device: str) -> None:
    inputs = tuple(t.requires_grad_() for t in SHAPE.tensors(fp64, device))
    bias = torch.randn(4, 203, dtype=fp64, device=device, requires_grad=True)
    factor = torch.tensor(0.5, dtype=fp64, device=device)
    mask = kit.mask_mods(SHAPE, device)["per_head"]
    block_mask = kit.block_mask(mask, SHAPE, device)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s.tanh() * factor + bias[h, k]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashbwd.flex_decoding(q * 2, k, v, mod, block_mask, enable_gqa=True, return_lse=True)

    got = compiled(attend)(*inputs)
    want = kit.oracle(SHAPE, inputs[0] * 2, *inputs[1:], mod, kit.dense_mask(mask, SHAPE, device))
    assert_same(got, want)
    losses = [out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum() for out, lse in (got, want)]
    assert_same(*(torch.autograd.grad(loss, (*inputs, bias)) for loss in losses))


def test_the_graph_contains_one_operator_and_no_matrix_product() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    targets: list[str] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashbwd.flex_decoding(q, k, v, lambda s, b, h, i, j: s * 2, enable_gqa=True)

    compiled(attend, aot_autograd(fw_compiler=keep))(*SHAPE.tensors(torch.float32))
    assert [name for name in targets if "getitem" not in name] == ["flashbwd.flex_decoding_in_graph.default"]


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="Dynamo does not trace the name of a method, which modes read")
def test_a_pytorch_that_cannot_trace_functions_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no() -> bool:
        return False

    no._dynamo_marked_constant = True  # type: ignore[attr-defined]
    monkeypatch.setattr("flashbwd.decoding.compiler_traces_functions", no)
    inputs = tuple(t.requires_grad_() for t in SHAPE.tensors(fp64))
    mod = kit.score_mods(SHAPE, dtype=fp64)["alibi"]
    mask = kit.mask_mods(SHAPE)["per_head"]
    block_mask = kit.block_mask(mask, SHAPE)

    def attend(*inputs: Tensor) -> Any:
        return flashbwd.flex_decoding(*inputs, mod, block_mask, enable_gqa=True, return_lse=True)

    got = compiled(attend)(*inputs)
    want = kit.oracle(SHAPE, *inputs, mod, kit.dense_mask(mask, SHAPE, "cpu"))
    assert_same(got, want)
    assert_same(*(torch.autograd.grad(out.sin().sum(), inputs) for out, _ in (got, want)))


def test_changed_tensors_and_growing_numbers_compile_at_most_twice() -> None:
    q, k, v = SHAPE.tensors(fp64)
    counter = CompileCounterWithBackend("aot_eager")

    def attend(slopes: Tensor, length: int) -> Any:
        def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(j < length, s + slopes[h], -float("inf"))

        return flashbwd.flex_decoding(q, k, v, mod, enable_gqa=True, return_lse=True), mod

    step = compiled(lambda slopes, length: attend(slopes, length)[0], counter)
    for length in range(20, 30):
        slopes = torch.randn(4, dtype=fp64)
        assert_same(step(slopes, length), kit.oracle(SHAPE, q, k, v, attend(slopes, length)[1]))
    assert counter.frame_count <= 2  # the second compilation treats the length as dynamic


def test_the_error_names_a_modification_that_branches_on_a_value() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashbwd.flex_decoding(q, k, v, lambda s, b, h, i, j: s if j > 3 else -s, enable_gqa=True)

    with pytest.raises(Exception, match=r"score_mod(.|\n)*data-dependent|data-dependent(.|\n)*score_mod"):
        compiled(attend)(*SHAPE.tensors(fp64))


def test_a_graph_copies_results_that_share_one_allocation() -> None:
    out, lse, largest = torch.randn(12).split(4)
    results = (out, in_graph.apart(lse, out), in_graph.apart(largest, out, lse))
    assert len({t.untyped_storage().data_ptr() for t in results}) == 3
    for got, want in zip(results, (out, lse, largest), strict=True):
        assert torch.equal(got, want)


def test_a_graph_does_not_copy_results_with_separate_memory() -> None:
    out, lse = torch.randn(4), torch.randn(4)
    assert in_graph.apart(lse, out) is lse


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*output of this custom operator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_run_inside_a_graph_of_inductor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tuple(t.requires_grad_() for t in SHAPE.tensors(dtype, "cuda"))
    bias = torch.randn(4, 203, dtype=torch.float32, device="cuda", requires_grad=True)
    mask = kit.mask_mods(SHAPE, "cuda")["document"]
    block_mask = kit.block_mask(mask, SHAPE, "cuda")
    launched: list[Tensor] = []
    real = run._decoding_forward

    def counted(*arguments: Any) -> list[Tensor]:
        results: list[Tensor] = real(*arguments)
        launched.extend(results[:1])  # empty if the call had to be prepared first
        return results

    monkeypatch.setattr(run, "_decoding_forward", counted)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s.tanh() + bias[h, k]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashbwd.flex_decoding(q * 2, k, v, mod, block_mask, enable_gqa=True).sin()

    out = compiled(attend, "inductor")(*inputs)
    assert len(launched) == 1
    want, _ = kit.oracle(SHAPE, inputs[0] * 2, *inputs[1:], mod, kit.dense_mask(mask, SHAPE, "cuda"))
    tolerance = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), want.sin(), **tolerance)
    got = torch.autograd.grad(out.float().sum(), (*inputs, bias))
    expected = torch.autograd.grad(want.sin().sum(), (*inputs, bias))
    for g, w in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), w.double(), **tolerance)
