"""Overrides of PyTorch's backward operators: registration, the meaning of arguments, and fallbacks with a reason."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import inputs, oracle
from kit.cases import Case
from torch import Tensor

import flashbwd
from flashbwd.integrations import overrides

ATTENTION = list(overrides._ATTENTION)
NORMS = list(overrides._NORMS)


@pytest.fixture(autouse=True)
def _nothing_stays_overridden() -> Iterator[None]:
    yield
    flashbwd.disable()
    flashbwd.stats(reset=True)


def dispatch_tables() -> dict[str, str]:
    """The registered kernels of each operator, and the dispatch table that the dispatcher computed from them."""
    operators = {name: f"aten::{name}" for name in ATTENTION + NORMS}
    return {
        name: torch._C._dispatch_dump(operator) + torch._C._dispatch_dump_table(operator)
        for name, operator in operators.items()
    }


def overridden(before: dict[str, str]) -> list[str]:
    return [name for name, table in dispatch_tables().items() if table != before[name]]


needs_cuda_torch = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch has no CUDA kernels to override")


# ---- registration ----


@needs_cuda_torch
def test_enable_overrides_each_operator_and_disable_restores_the_dispatcher() -> None:
    before = dispatch_tables()
    flashbwd.enable()
    assert overridden(before) == ATTENTION + NORMS
    flashbwd.disable()
    assert dispatch_tables() == before


@needs_cuda_torch
@pytest.mark.parametrize(
    ("kind", "names"), [({"norms": False}, ATTENTION), ({"attention": False}, NORMS), ({}, ATTENTION + NORMS)]
)
def test_enable_overrides_only_the_requested_operators(kind: dict[str, bool], names: list[str]) -> None:
    before = dispatch_tables()
    with flashbwd.enable(**kind):
        assert overridden(before) == names
    assert dispatch_tables() == before


@needs_cuda_torch
def test_a_second_enable_has_no_effect() -> None:
    before = dispatch_tables()
    flashbwd.enable()
    once = dispatch_tables()
    flashbwd.enable()
    assert dispatch_tables() == once
    flashbwd.disable()
    assert dispatch_tables() == before


@needs_cuda_torch
def test_the_end_of_a_block_keeps_earlier_overrides() -> None:
    before = dispatch_tables()
    flashbwd.enable(norms=False)
    with flashbwd.enable():
        assert overridden(before) == ATTENTION + NORMS
    assert overridden(before) == ATTENTION


@needs_cuda_torch
def test_a_block_that_raises_restores_the_dispatcher() -> None:
    before = dispatch_tables()
    with pytest.raises(KeyError), flashbwd.enable():
        raise KeyError
    assert dispatch_tables() == before


@needs_cuda_torch
def test_enable_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    flashbwd.enable()
    assert not recwarn.list


@needs_cuda_torch
def test_an_override_by_another_library_is_restored() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    try:
        library.impl("_flash_attention_backward", lambda *args, **kwargs: (None,) * 3, allow_override=True)
        before = dispatch_tables()
        with flashbwd.enable():
            pass
        assert dispatch_tables() == before
    finally:
        library._destroy()


@needs_cuda_torch
def test_torch_lists_and_activates_this_attention_implementation() -> None:
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):  # torch 2.10 activates, but cannot restore
        pytest.skip("this PyTorch cannot restore its own attention implementation")
    assert "FLASHBWD" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    before = dispatch_tables()
    attention.activate_flash_attention_impl("FLASHBWD")
    assert overridden(before) == ATTENTION
    attention.restore_flash_attention_impl()
    assert dispatch_tables() == before


@needs_cuda_torch
def test_enable_writes_nothing_to_stderr() -> None:
    """PyTorch would warn of a replaced kernel from C++, once per process."""
    code = "import flashbwd; flashbwd.enable(); flashbwd.disable(); print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


@needs_cuda_torch
@pytest.mark.parametrize("name", ATTENTION)
def test_a_kernel_of_another_library_is_recognised(name: str) -> None:
    """The override must call a foreign kernel through the dispatcher, and not PyTorch's function of that name."""
    operator = f"aten::{name}"
    assert overrides._is_pytorchs(operator, "CUDA")
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, lambda *args, **kwargs: None, "CUDA", allow_override=True)
    try:
        assert not overrides._is_pytorchs(operator, "CUDA")
    finally:
        library._destroy()
    assert overrides._is_pytorchs(operator, "CUDA")


# ---- on the CPU: the arguments that an override passes on, and the reasons that it records ----


class OnCPU:
    """Overrides one operator on the CPU. The previous kernel records its calls and returns zeros."""

    def __init__(self, name: str) -> None:
        self.override = overrides._ALL[name]
        self.operator = getattr(torch.ops.aten, name).default
        self.passed_on: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._library = torch.library.Library("aten", "IMPL", "CPU")

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        self.passed_on.append((args, kwargs))
        return tuple(torch.zeros_like(args[1]) for _ in self.operator._schema.returns)

    def __enter__(self) -> OnCPU:
        overrides._use_up_the_warning()
        self._library.impl(self.override.name, self._original, allow_override=True)
        self.override.register("CPU")
        return self

    def __exit__(self, *_: object) -> None:
        self.override.unregister()
        self._library._destroy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of a call that the override must handle itself."""
        with flashbwd.use_backend("reference"), torch.no_grad():
            results = self.operator(*args, **kwargs)
        assert self.override.stats() == (1, {})
        assert not self.passed_on
        return results

    def refusal(self, *args: Any, backend: str = "auto", **kwargs: Any) -> str:
        """The reason why the override passes a call on."""
        with flashbwd.use_backend(backend), torch.no_grad():
            self.operator(*args, **kwargs)
        hits, fallbacks = self.override.stats()
        assert hits == 0 and len(self.passed_on) == sum(fallbacks.values()) == 1
        return next(iter(fallbacks))


@pytest.fixture
def cudnn() -> Iterator[OnCPU]:
    with OnCPU("_scaled_dot_product_cudnn_attention_backward") as overridden:
        yield overridden


@pytest.fixture
def flash() -> Iterator[OnCPU]:
    with OnCPU("_flash_attention_backward") as overridden:
        yield overridden


@pytest.fixture
def efficient() -> Iterator[OnCPU]:
    with OnCPU("_efficient_attention_backward") as overridden:
        yield overridden


@pytest.fixture
def layer_norm() -> Iterator[OnCPU]:
    with OnCPU("native_layer_norm_backward") as overridden:
        yield overridden


@pytest.fixture
def rms_norm() -> Iterator[OnCPU]:
    with OnCPU("_fused_rms_norm_backward") as overridden:
        yield overridden


def test_stats_list_the_operators_and_can_be_reset(rms_norm: OnCPU) -> None:
    names = [*(f"aten::{name}" for name in ATTENTION + NORMS), "higher_order::flex_attention_backward"]
    assert list(flashbwd.stats()) == names
    x, statistics = torch.randn(5, 8), torch.ones(5, 1)
    with flashbwd.use_backend("reference"):
        rms_norm.operator(x, x, (8,), statistics, None, (True, False))
    rms_norm.operator(x, x, (8,), statistics, None, (True, False))
    counted = flashbwd.OperatorStats(1, {"the tensors are not on a CUDA device": 1})
    assert flashbwd.stats(reset=True)["aten::_fused_rms_norm_backward"] == counted
    assert flashbwd.stats()["aten::_fused_rms_norm_backward"] == flashbwd.OperatorStats(0, {})


def test_printed_stats_of_a_machine_without_a_gpu_say_why_nothing_was_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "Nothing was taken over: " in str(flashbwd.stats(reset=True))


def test_printed_stats_have_a_line_for_each_operator_and_for_each_reason() -> None:
    stats = overrides._Stats(
        {"aten::a": overrides.OperatorStats(3, {}), "aten::b": overrides.OperatorStats(0, {"no": 2, "slow": 5})}
    )
    assert str(stats).splitlines() == [
        "aten::a: 3 by flashbwd, 0 by PyTorch",
        "aten::b: 0 by flashbwd, 7 by PyTorch",
        "    2: no",
        "    5: slow",
    ]


def assert_same_arguments(passed: Sequence[Any], given: Sequence[Any]) -> None:
    for actual, expected in zip(passed, given, strict=True):
        if isinstance(expected, Tensor):
            assert actual.data_ptr() == expected.data_ptr() and actual.stride() == expected.stride()
        else:
            assert actual == (list(expected) if isinstance(expected, tuple) else expected)


def test_a_refused_call_is_passed_on_unchanged(
    cudnn: OnCPU, flash: OnCPU, efficient: OnCPU, layer_norm: OnCPU, rms_norm: OnCPU
) -> None:
    def some(*shape: int) -> Tensor:
        return torch.randn(shape)

    qkv = [some(2, 5, 3, 8).transpose(1, 2) for _ in range(5)]
    calls: list[tuple[OnCPU, tuple[Any, ...], dict[str, Any]]] = [
        (cudnn, (*qkv, some(2, 5, 3), some(1), some(1), None, None, None, 3, 4, 0.25, True), {"scale": 2.0}),
        (
            flash,
            (*qkv, some(2, 5, 3), None, None, 3, 4, 0.25, True, some(2), some(0)),
            {"scale": 2.0, "window_size_left": 3, "window_size_right": 1},
        ),
        (
            efficient,
            (*qkv[:4], some(2, 5, 3, 3), qkv[4], None, None, 3, 4, some(2, 5, 3), 0.25, some(1), some(1), 1, True),
            {"scale": 2.0, "num_splits_key": 7, "window_size": 5, "shared_storage_dqdkdv": True},
        ),
        (layer_norm, (some(6, 8), some(6, 8), (8,), some(6, 1), some(6, 1), some(8), None, (True, False, True)), {}),
        (rms_norm, (some(6, 8), some(6, 8), (8,), some(6, 1), None, (True, False)), {}),
    ]
    for overridden, args, kwargs in calls:
        overridden.operator(*args, **kwargs)
        ((passed, options),) = overridden.passed_on
        assert_same_arguments(passed, args)
        assert options == kwargs


@pytest.fixture
def layer_norm_before_pytorchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[overrides._Override]:
    """The override of LayerNorm on the CPU, which can reach PyTorch's kernel only from C++."""
    override = overrides._ALL["native_layer_norm_backward"]
    assert overrides._is_pytorchs("aten::native_layer_norm_backward", "CPU")
    override.register("CPU")
    monkeypatch.setattr(override, "_original", None)
    yield override
    override.unregister()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_pytorchs_norm_is_called_without_python(
    dtype: torch.dtype, mask: tuple[bool, ...], parameters: int, layer_norm_before_pytorchs: overrides._Override
) -> None:
    x, dz = (torch.randn(5, 3, 4, 2, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(4, 2, dtype=dtype) if i < parameters else None for i in range(2))
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, (4, 2), weight, bias, 1e-5)
    output_mask = [wanted and i <= parameters for i, wanted in enumerate(mask)]
    call = (dz, x, (4, 2), mean, rstd, weight, bias, output_mask)
    actual = torch.ops.aten.native_layer_norm_backward(*call)
    assert layer_norm_before_pytorchs.stats() == (0, {"the tensors are not on a CUDA device": 1})
    layer_norm_before_pytorchs.unregister()
    for got, want in zip(actual, torch.ops.aten.native_layer_norm_backward(*call), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            assert got.stride() == want.stride()


def test_an_error_of_pytorchs_norm_is_raised_unchanged(layer_norm_before_pytorchs: overrides._Override) -> None:
    x, statistics = torch.randn(5, 8), torch.ones(5, 1)
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[9\]"):
        torch.ops.aten.native_layer_norm_backward(x, x, (9,), statistics, statistics, None, None, (True, False, False))


@pytest.mark.parametrize("length", [0, 2, 4, 1000])
def test_an_output_mask_of_another_length_is_refused(
    length: int, layer_norm_before_pytorchs: overrides._Override
) -> None:
    x, statistics = torch.randn(5, 8), torch.ones(5, 1)
    with (
        torch.inference_mode(),  # without autograd, because PyTorch's autograd kernel checks the mask
        pytest.raises((ValueError, RuntimeError), match=f"output_mask has {length} elements, expected 3"),
    ):
        torch.ops.aten.native_layer_norm_backward(x, x, (8,), statistics, statistics, None, None, (True,) * length)


@pytest.mark.parametrize("shape", [(), (5, 8, 1), (1, 5, 8), (4, 8)])
def test_pytorch_gets_calls_with_a_wrong_normalized_shape(
    shape: tuple[int, ...], layer_norm_before_pytorchs: overrides._Override
) -> None:
    x, statistics = torch.randn(5, 8), torch.ones(5, 1)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        torch.ops.aten.native_layer_norm_backward(x, x, shape, statistics, statistics, None, None, (True,) * 3)
    assert layer_norm_before_pytorchs.stats() == (0, {"x does not end with normalized_shape": 1})


# ---- the meaning of each operator's arguments: on the CPU, with the reference backend ----

ROWS = Case("rows", seqlen_q=40, seqlen_k=40, heads=4, heads_kv=4)
GROUPED = Case("grouped", seqlen_q=33, seqlen_k=70, heads=4, heads_kv=2)
PACKED = Case("packed", seqlens_q=(17, 0, 40), seqlens_k=(30, 5, 33), heads=4, heads_kv=2)
CAUSAL = [replace(case, name=f"{case.name}_causal", causal=True) for case in (ROWS, GROUPED, PACKED)]
WINDOW = [replace(case, name=f"{case.name}_window", window_size=(9, 4)) for case in (ROWS, GROUPED, PACKED)]
DROPOUT = [replace(case, name=f"{case.name}_dropout", dropout_p=0.25) for case in (ROWS, PACKED)]
PADDED_LSE = [replace(case, name=f"{case.name}_padded_lse", lse_form="padded") for case in (ROWS, PACKED)]
# PyTorch's memory-efficient kernel counted the elements of its mask in 32 bits up to torch 2.11.
EFFICIENT_DROPOUT = "efficient32" if torch.torch_version.TorchVersion(torch.__version__) < (2, 12) else "efficient64"
EFFICIENT_MASKS = {False: 0, "top_left": 1, True: 2}
FLASH = [ROWS, GROUPED, PACKED, *CAUSAL, *WINDOW, *DROPOUT, replace(ROWS, name="rows_bhsd", layout="bhsd")]
EFFICIENT = [
    *(replace(case, heads=2, heads_kv=2) for case in (ROWS, GROUPED, PACKED, *CAUSAL, *PADDED_LSE)),
    replace(ROWS, name="top_left", seqlen_q=30, causal="top_left", lse_form="padded", empty_lse=0.0),
    replace(ROWS, name="window_top_left", seqlen_q=30, causal="top_left", window_size=(6, -1)),
    replace(GROUPED, name="window_bottom_right", heads_kv=4, causal=True, window_size=(0, -1)),
    replace(ROWS, name="bias", bias="bhqk", seqlen_k=35),
    replace(ROWS, name="dropout", dropout_p=0.25, rng_layout=EFFICIENT_DROPOUT),
]
CUDNN = [
    replace(case, layout="bhsd", lse_form=form) for case, form in itertools.product((ROWS, GROUPED), ("rows", "rows1"))
] + [
    replace(GROUPED, name="cudnn_causal", causal="top_left", lse_form="rows1"),
    replace(ROWS, name="cudnn_causal_head_dim_v", causal="top_left", head_dim_v=24, layout="bhsd"),
]


def given(x: inputs.Inputs, *names: str) -> list[Any]:
    return [x.arguments[name] for name in names]


def rng_tensors(x: inputs.Inputs) -> tuple[Tensor, Tensor]:
    state = x.rng_state()
    seed, offset = (0, 0) if state is None else state[:2]
    return torch.tensor(seed), torch.tensor(offset)


def check(x: inputs.Inputs, results: Any, dbias: Tensor | None = None) -> None:
    x.check(*results[:3], dbias, None)


def flash_arguments(x: inputs.Inputs) -> tuple[list[Any], dict[str, Any]]:
    case = x.case
    seed, offset = rng_tensors(x)
    left, right = case.window_size
    args = [
        *given(x, "dout", "q", "k", "v", "out", "softmax_lse", "cu_seqlens_q", "cu_seqlens_k"),
        case.max_seqlen_q,
        case.max_seqlen_k,
        case.dropout_p,
        case.causal,
        torch.stack([seed, offset]).view(torch.uint64),
        torch.empty(0),
    ]
    windows = {"window_size_left": None if left < 0 else left, "window_size_right": None if right < 0 else right}
    return args, windows | {"scale": case.softmax_scale}


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_flash_arguments_have_the_meaning_that_pytorch_gives_them(case: Case, flash: OnCPU) -> None:
    x = inputs.build(case)
    args, kwargs = flash_arguments(x)
    results = flash(*args, **kwargs)
    check(x, results)
    assert [grad.stride() for grad in results] == [torch.empty_like(t).stride() for t in given(x, "q", "k", "v")]


@pytest.mark.parametrize("case", EFFICIENT, ids=str)
def test_memory_efficient_arguments_have_the_meaning_that_pytorch_gives_them(case: Case, efficient: OnCPU) -> None:
    x = inputs.build(case)
    packed = [t.unsqueeze(0) if case.varlen else t for t in given(x, "dout", "q", "k", "v", "out")]
    results = efficient(
        *packed[:4],
        x.arguments["attn_bias"],
        packed[4],
        *given(x, "cu_seqlens_q", "cu_seqlens_k"),
        case.max_seqlen_q,
        case.max_seqlen_k,
        x.arguments["softmax_lse"],
        case.dropout_p,
        *rng_tensors(x),
        EFFICIENT_MASKS[case.causal],
        case.bias is not None,
        scale=case.softmax_scale,
        window_size=None if case.window_size[0] < 0 else case.window_size[0] + 1,
    )
    assert all(grad.is_contiguous() for grad in results[:3])
    check(x, [grad.squeeze(0) if case.varlen else grad for grad in results[:3]], results[3])
    if case.bias is not None:
        assert results[3].stride()[-2:] == (48, 1)  # rows of 35 padded to a multiple of 16, as PyTorch's


def test_a_bias_that_needs_no_gradient_gets_none(efficient: OnCPU) -> None:
    x = inputs.build(replace(ROWS, bias="bhqk"))
    results = efficient(
        *given(x, "dout", "q", "k", "v", "attn_bias", "out"),
        *(None, None, 40, 40, x.arguments["softmax_lse"], 0.0, *rng_tensors(x), 0, False),
    )
    assert results[3] is None


@pytest.mark.parametrize("case", CUDNN, ids=str)
def test_cudnn_arguments_have_the_meaning_that_pytorch_gives_them(case: Case, cudnn: OnCPU) -> None:
    x = inputs.build(case)
    heads_first = [t.transpose(1, 2) for t in given(x, "dout", "q", "k", "v", "out")]
    results = cudnn(
        *heads_first,
        *(x.arguments["softmax_lse"], *rng_tensors(x), None, None, None, case.seqlen_q, case.seqlen_k, 0.0),
        case.causal == "top_left",
        scale=case.softmax_scale,
    )
    check(x, [grad.transpose(1, 2) for grad in results])
    assert [grad.stride() for grad in results] == [torch.empty_like(t).stride() for t in heads_first[1:4]]


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_cudnn_bias_of_any_dimensions_is_added(dims: int, cudnn: OnCPU) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 9, 3, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    bias = torch.randn((1, 1, 9, 9)[4 - dims :], generator=generator, dtype=torch.float64)
    expected = oracle.attention(q, k, v, dout, attn_bias=bias.view(1, 1, 9, 9))
    results = cudnn(
        *(t.transpose(1, 2) for t in (dout, q, k, v, expected.out)),
        *(expected.lse, None, None, bias, None, None, 9, 9, 0.0, False),
    )
    for grad, name in zip(results, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(grad.transpose(1, 2), getattr(expected, name))


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (3, 4, 6)], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
def test_norm_arguments_have_the_meaning_that_pytorch_gives_them(
    shape: tuple[int, ...], kind: str, mask: Any, layer_norm: OnCPU, rms_norm: OnCPU
) -> None:
    normalized = shape[-2:] if shape == (3, 4, 6) else shape[-1:]
    x, weight, bias, dz = (torch.randn(s, dtype=torch.float64) for s in (shape, normalized, normalized, shape))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    dims = tuple(range(-len(normalized), 0))
    centred = leaves[0] - (leaves[0].mean(dims, keepdim=True) if kind == "layer_norm" else 0)
    rstd = (centred.square().mean(dims, keepdim=True) + 1e-5).rsqrt()
    z = centred * rstd * leaves[1] + (leaves[2] if kind == "layer_norm" else 0)
    expected = torch.autograd.grad(z, leaves if kind == "layer_norm" else leaves[:2], dz)
    if kind == "layer_norm":
        mean = x.mean(dims, keepdim=True)
        results = layer_norm(dz, x, normalized, mean, rstd.detach(), weight, bias, mask)
    else:
        results = rms_norm(dz, x, normalized, rstd.detach(), weight, mask[:2])
    for result, gradient, asked in zip(results, expected, mask, strict=False):
        if asked:
            torch.testing.assert_close(result, gradient)
        else:
            assert result is None


def test_norm_gradients_are_contiguous_for_an_input_that_is_not(layer_norm: OnCPU) -> None:
    x = torch.randn(6, 5, 4).transpose(0, 1)
    statistics = torch.zeros(5, 6, 1)
    dx, _, _ = layer_norm(x, x, (4,), statistics, statistics, None, None, (True, False, False))
    assert dx.is_contiguous() and dx.shape == x.shape


def test_norm_parameters_keep_their_dtype(layer_norm: OnCPU) -> None:
    x, statistics, weight = torch.randn(5, 8).bfloat16(), torch.ones(5, 1), torch.ones(8)
    dx, dweight, dbias = layer_norm(x, x, (8,), statistics, statistics, weight, weight.bfloat16(), (True, True, True))
    assert (dx.dtype, dweight.dtype, dbias.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


# ---- end to end, on the CPU: PyTorch's autograd calls the operator, and the dispatcher calls the override ----


@pytest.fixture
def flash_forward() -> Iterator[None]:
    """Register plain operators as the CPU kernel of aten's flash attention."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)  # causal
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).contiguous()
        rng_state = torch.zeros(2, dtype=torch.uint64)
        return out, scores.logsumexp(-1), rng_state, rng_state.new_empty(()), q.new_empty(0)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", forward)
    yield
    library._destroy()


def flash_gradients(compiled: bool = False) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Gradients of a block that contains aten's flash attention, and the same gradients from float64 operators."""
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(2, 12, 2, 8, generator=generator, requires_grad=True) for _ in range(3)]

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._flash_attention_forward(q * 2, k, v, None, None, 12, 12, 0.0, True, False)[0].sin()

    actual = torch.autograd.grad((torch.compile(block) if compiled else block)(*leaves).sum(), leaves)
    q, k, v = (t.detach().double().requires_grad_() for t in leaves)
    heads_first = [t.transpose(1, 2) for t in (q * 2, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return actual, torch.autograd.grad(out.sin().sum(), (q, k, v))


@pytest.mark.usefixtures("flash_forward")
@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_calls_the_override(flash: OnCPU, compiled: bool) -> None:
    with flashbwd.use_backend("reference"):
        actual, expected = flash_gradients(compiled)
    assert flash.override.stats() == (1, {})
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("flash_forward")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_without_a_kernel_reaches_the_previous_kernel(flash: OnCPU, compiled: bool) -> None:
    actual, _ = flash_gradients(compiled)
    assert flash.override.stats() == (0, {"short: q is on the CPU; sm90: q is on the CPU; sm80: q is on the CPU": 1})
    assert all(not grad.any() for grad in actual)


@contextlib.contextmanager
def deterministic_mode(mode: str) -> Iterator[None]:
    torch.use_deterministic_algorithms(mode != "not asked", warn_only=mode == "warn only")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", ["not asked", "warn only", "asked"])
def test_overrides_read_pytorchs_deterministic_mode(mode: str) -> None:
    with deterministic_mode(mode):
        assert torch.ops.flashbwd.determinism() == mode


@pytest.mark.usefixtures("flash_forward")
@pytest.mark.parametrize("mode", ["not asked", "warn only", "asked"])
def test_an_override_warns_when_pytorch_would_warn(flash: OnCPU, mode: str) -> None:
    with warnings.catch_warnings(record=True) as caught, deterministic_mode(mode), flashbwd.use_backend("reference"):
        warnings.simplefilter("always")
        flash_gradients(compiled=False)
    assert flash.override.stats() == (1, {})
    text = "Flash Attention defaults to a non-deterministic algorithm. "
    warned = [str(warning.message).startswith(text) for warning in caught]
    assert warned == ([True] if mode == "warn only" else [])


# ---- calls without a kernel ----


def test_attention_without_a_kernel_is_refused_with_the_reason_of_each_backend(flash: OnCPU) -> None:
    args, kwargs = flash_arguments(inputs.build(ROWS))
    assert flash.refusal(*args, **kwargs) == "short: q is on the CPU; sm90: q is on the CPU; sm80: q is on the CPU"


def test_the_refusal_of_a_forced_backend_is_a_reason(flash: OnCPU) -> None:
    args, kwargs = flash_arguments(inputs.build(ROWS))
    assert 'backend "sm80" cannot run this: q is on the CPU' in flash.refusal(*args, backend="sm80", **kwargs)


def test_bad_attention_arguments_are_refused_without_an_error(flash: OnCPU) -> None:
    args, kwargs = flash_arguments(inputs.build(ROWS))
    args[2] = args[2][:, :7]
    assert "v has shape (2, 40, 4, 16)" in flash.refusal(*args, backend="reference", **kwargs)


def test_cudnn_dropout_is_refused(cudnn: OnCPU) -> None:
    x = inputs.build(replace(ROWS, layout="bhsd"))
    tensors = [t.transpose(1, 2) for t in given(x, "dout", "q", "k", "v", "out")]
    lse = x.arguments["softmax_lse"]
    refusal = cudnn.refusal(*tensors, lse, *rng_tensors(x), None, None, None, 40, 40, 0.1, False)
    assert "dropout mask" in refusal


def test_an_efficient_window_without_a_causal_mask_is_refused(efficient: OnCPU) -> None:
    x = inputs.build(ROWS)
    refusal = efficient.refusal(
        *given(x, "dout", "q", "k", "v", "attn_bias", "out"),
        *(None, None, 40, 40, x.arguments["softmax_lse"], 0.0, *rng_tensors(x), 0, False),
        window_size=4,
    )
    assert refusal == "a window without a causal mask"


def test_norms_without_a_kernel_are_refused_with_a_reason(rms_norm: OnCPU) -> None:
    x, statistics = torch.randn(5, 8), torch.ones(5, 1)
    refusal = rms_norm.refusal(x, x, (8,), statistics, None, (True, False))
    assert refusal == "the tensors are not on a CUDA device"


def test_bad_norm_arguments_are_refused_without_an_error(rms_norm: OnCPU) -> None:
    x = torch.randn(5, 8)
    refusal = rms_norm.refusal(x, x, (8,), torch.ones(4, 1), None, (True, False), backend="reference")
    assert "rs has shape (4, 1)" in refusal
