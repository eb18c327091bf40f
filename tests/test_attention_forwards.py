"""attention_backward accepts the out, LSE and Philox state of PyTorch's own forwards unchanged."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import cases, inputs
from support import backward, skip_where_refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashbwd
from flashbwd import _forward
from flashbwd.options import AttentionOptions

aten = torch.ops.aten

DENSE = cases.Case("dense", heads=4, heads_kv=4, seqlen_q=75, seqlen_k=75, head_dim=64, head_dim_v=64)
BACKENDS = ["auto", "reference", "short", "sm80", "sm90"]


def on_gpu(case: cases.Case, backend: str, dtype: torch.dtype = torch.float16) -> inputs.Inputs:
    x = inputs.build(case, dtype, "cuda")
    skip_where_refused(x, backend)
    return x


def main(x: inputs.Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dout = (x.arguments[name] for name in ("q", "k", "v", "dout"))
    return q, k, v, dout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_after_the_cpu_flash_forward_are_right(causal: bool, dtype: torch.dtype) -> None:
    x = inputs.build(dataclasses.replace(DENSE, causal="top_left" if causal else False), dtype)
    q, k, v, dout = main(x)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal
    )
    out, lse = out.transpose(1, 2), lse.to(inputs.lse_dtype(dtype))
    x.check(*backward(dout, q, k, v, out, lse, causal=x.case.causal))


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_on_a_cpu_give_the_output_of_repeated_heads(causal: bool) -> None:
    q, k, v = (torch.randn(2, 33, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 2))
    grouped = flashbwd.attention(q, k, v, causal=causal, return_lse=True)
    repeated = flashbwd.attention(
        q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), causal=causal, return_lse=True
    )
    for actual, expected in zip(grouped, repeated, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", [75, 130])
def test_gradients_after_the_flash_forward_are_right(seqlen_k: int, causal: bool, backend: str) -> None:
    x = on_gpu(dataclasses.replace(DENSE, causal=causal, seqlen_k=seqlen_k), backend)
    q, k, v, dout = main(x)
    out, lse, _, _, _ = aten._flash_attention_forward(q, k, v, None, None, 75, seqlen_k, 0.0, causal, False)
    with flashbwd.use_backend(backend):
        x.check(*backward(dout, q, k, v, out, lse, causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_after_the_flash_forward_of_packed_sequences_are_right(backend: str) -> None:
    case = dataclasses.replace(DENSE, seqlens_q=(40, 1, 75), seqlens_k=(60, 80, 75), causal=True)
    x = on_gpu(case, backend)
    q, k, v, dout = main(x)
    lengths = {name: x.arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    out, lse, _, _, _ = aten._flash_attention_forward(q, k, v, *lengths.values(), 0.0, True, False)
    with flashbwd.use_backend(backend):
        x.check(*backward(dout, q, k, v, out, lse, causal=True, **lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_type", [0, 1, 2])
@pytest.mark.parametrize("bias", [None, "bhqk"])
def test_gradients_after_the_memory_efficient_forward_are_right(bias: str | None, mask_type: int, backend: str) -> None:
    causal = (False, "top_left", True)[mask_type]
    x = on_gpu(dataclasses.replace(DENSE, causal=causal, seqlen_k=104, bias=bias), backend)
    q, k, v, dout = main(x)
    attn_bias = x.arguments["attn_bias"]
    out, lse, _, _, _, _ = aten._efficient_attention_forward(
        q, k, v, attn_bias, None, None, None, None, 0.0, mask_type, True
    )
    assert lse.shape[-1] == 96  # roundup(75, 32)
    with flashbwd.use_backend(backend):
        x.check(*backward(dout, q, k, v, out, lse, causal=causal, attn_bias=attn_bias))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_after_the_cudnn_forward_are_right(causal: bool, backend: str) -> None:
    x = on_gpu(dataclasses.replace(DENSE, causal="top_left" if causal else False, heads_kv=2), backend)
    q, k, v, dout = main(x)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, causal, False
    )
    with flashbwd.use_backend(backend):
        x.check(*backward(dout, q, k, v, out.transpose(1, 2), lse, causal=x.case.causal))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forward", ["flash", "efficient32"])
def test_gradients_after_a_forward_with_dropout_are_those_of_pytorch(forward: str, backend: str) -> None:
    """The expected values come from PyTorch's own backward of the same call."""
    x = on_gpu(dataclasses.replace(DENSE, dropout_p=0.25, rng_layout=forward), backend)
    q, k, v, dout = main(x)
    if forward == "flash":
        out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, None, None, 75, 75, 0.25, False, False)
        expected = aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, 75, 75, 0.25, False, state, unused
        )
        seed, offset = state.view(torch.int64).unbind()
    else:
        out, lse, seed, offset, _, _ = aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.25, 0, True
        )
        *expected, _ = aten._efficient_attention_backward(
            dout, q, k, v, None, out, None, None, 75, 75, lse, 0.25, seed, offset, 0, False
        )
    with flashbwd.use_backend(backend):
        state = flashbwd.RngState(seed, offset, forward)
        actual = backward(dout, q, k, v, out, lse, dropout_p=0.25, rng_state=state)
    for name, a, e in zip(("dq", "dk", "dv"), actual[:3], expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


ON_A_GPU = {
    "plain": DENSE,
    "causal": dataclasses.replace(DENSE, causal=True),
    "longer_keys": dataclasses.replace(DENSE, causal=True, seqlen_k=90),
    "top_left": dataclasses.replace(DENSE, causal="top_left", seqlen_k=90),
    "window": dataclasses.replace(DENSE, causal=True, window_size=(9, 0)),
    "grouped": dataclasses.replace(DENSE, heads_kv=1),
    "unequal": dataclasses.replace(DENSE, head_dim_v=32),
    "odd": dataclasses.replace(DENSE, head_dim=36, head_dim_v=36),
    "bias": dataclasses.replace(DENSE, bias="1hqk"),
    "causal_bias": dataclasses.replace(DENSE, bias="bhqk", causal=True, seqlen_k=90),
    "key_mask": dataclasses.replace(DENSE, key_mask="empty"),
    "key_mask_causal": dataclasses.replace(DENSE, key_mask="empty", causal=True, seqlen_k=90),
    "key_mask_top_left": dataclasses.replace(DENSE, key_mask="random", causal="top_left", sink="finite"),
    "key_mask_bias": dataclasses.replace(DENSE, key_mask="empty", bias="bhqk", bias_hides_rows=True),
    "key_mask_shared_bias": dataclasses.replace(DENSE, key_mask="empty", bias="1hqk", bias_hides_rows=True),
    "key_mask_shared_bias_causal": dataclasses.replace(DENSE, key_mask="random", bias="11qk", causal=True),
    "key_mask_window": dataclasses.replace(DENSE, key_mask="random", window_size=(9, 0)),
    "column_bias": dataclasses.replace(DENSE, bias="bhq1"),
    "sink": dataclasses.replace(DENSE, sink="finite", causal=True),
    "sink_and_empty_rows": dataclasses.replace(DENSE, sink="finite", seqlen_q=90, causal=True),
    "softcap": dataclasses.replace(DENSE, softcap=3.0),
    "packed": dataclasses.replace(DENSE, seqlens_q=(40, 0, 75), seqlens_k=(60, 8, 75), causal=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_gpu_agrees_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    x = inputs.build(ON_A_GPU[name], dtype, "cuda")
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x.arguments[n] for n in LEAVES)]
    q, k, v, bias, sink = leaves
    options = {n: x.arguments[n] for n in OPTIONS if n in x.arguments}
    out, lse = flashbwd.attention(q, k, v, attn_bias=bias, sink=sink, return_lse=True, **options)
    given = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(out, given, x.arguments["dout"]))
    x.check(*(None if leaf is None else next(grads) for leaf in leaves))  # type: ignore[arg-type]
    torch.testing.assert_close(out.double().cpu(), x.reference.out, rtol=2e-2, atol=2e-2)
    seen = ~x.reference.empty
    torch.testing.assert_close(lse.double().cpu()[seen], x.reference.lse[seen], rtol=1e-2, atol=1e-2)


FORWARDS = {
    ("plain", "sm90"): "torch_cudnn",
    ("plain", "sm80"): "torch_flash",
    ("causal", "sm90"): "torch_cudnn",
    ("longer_keys", "sm90"): "torch_flash",
    ("top_left", "sm90"): "torch_cudnn",
    ("top_left", "sm80"): "torch_efficient",
    ("window", "sm90"): "torch_flash",
    ("grouped", "sm90"): "torch_cudnn",
    ("unequal", "sm90"): "torch_efficient",
    ("odd", "sm90"): "reference",
    ("bias", "sm90"): "torch_efficient",
    ("key_mask", "sm90"): "torch_efficient",
    ("key_mask_causal", "sm80"): "torch_efficient",
    ("key_mask_bias", "sm90"): "torch_efficient",
    ("key_mask_shared_bias", "sm90"): "torch_efficient",
    ("key_mask_window", "sm90"): "reference",
    ("column_bias", "sm90"): "reference",
    ("sink", "sm90"): "torch_cudnn",
    ("sink_and_empty_rows", "sm90"): "torch_flash",
    ("softcap", "sm90"): "reference",
    ("packed", "sm90"): "torch_flash",
}


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch has no CUDA forwards to choose from")
@pytest.mark.parametrize(("name", "generation"), FORWARDS)
def test_the_best_forward_is_chosen_for_a_gpu(name: str, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpu(generation, monkeypatch)
    assert _forward.choose(*call_on_gpu(ON_A_GPU[name])) == FORWARDS[name, generation]


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch has no CUDA forwards to choose from")
def test_a_graph_capture_uses_cudnn_only_after_a_call_outside_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpu("sm90", monkeypatch)
    monkeypatch.setattr(_forward, "_cudnn_plans", set())
    longer = dataclasses.replace(DENSE, seqlen_q=76, seqlen_k=76)

    def chosen(capturing: bool, case: cases.Case) -> str:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        return _forward.choose(*call_on_gpu(case))

    calls = [(True, DENSE), (False, DENSE), (True, DENSE), (True, longer), (False, longer), (True, longer)]
    expected = ["torch_flash", "torch_cudnn", "torch_cudnn", "torch_flash", "torch_cudnn", "torch_cudnn"]
    assert [chosen(*call) for call in calls] == expected
    with ThreadPoolExecutor(1) as other_thread:
        assert other_thread.submit(chosen, True, longer).result() == "torch_flash"


def imitate_gpu(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0) if generation == "sm90" else (8, 0)
    monkeypatch.setattr(_forward, "_has_cudnn", _forward._has_cudnn.__wrapped__)  # without its cache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


def call_on_gpu(case: cases.Case) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """q, k, v and the options, with fake tensors on a GPU."""
    x = inputs.build(case, torch.bfloat16)
    causal = case.causal if isinstance(case.causal, str) else "bottom_right" if case.causal else "none"
    call = dict(x.arguments) | {"causal": causal, "deterministic": False, "dropout_p": 0.0}
    call |= {"window_left": case.window_size[0], "window_right": case.window_size[1], "softmax_scale": 0.125}
    with FakeTensorMode():
        for tensor in ("q", "k", "v", "attn_bias", "key_mask"):
            if (given := call[tensor]) is not None:
                call[tensor] = torch.empty(given.shape, dtype=given.dtype, device="cuda")
    options = AttentionOptions(**{name: call[name] for name in _forward.OPTIONS if name in call})
    return call["q"], call["k"], call["v"], options


LEAVES = ("q", "k", "v", "attn_bias", "sink")
OPTIONS = ("causal", "window_size", "softcap", "key_mask", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")
OPTIONS += ("max_seqlen_k",)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_and_backward_on_a_gpu_use_one_dropout_mask(dtype: torch.dtype) -> None:
    """out is linear in v, so its derivative along v equals out, but only if forward and backward used one mask."""
    x = inputs.build(DENSE, dtype, "cuda")
    q, k, v = (x.arguments[name].detach().requires_grad_() for name in ("q", "k", "v"))
    out = flashbwd.attention(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    along, total = (dv.double() * v.detach().double()).sum(), out.detach().double().sum()
    scale = out.detach().double().abs().sum()
    assert abs(float(along - total)) < 1e-2 * float(scale)


SCALES = [-0.125, 0.0, -0.0, 1e-50, -1e-50]  # float32 rounds the last two to 0
SCALED = {
    "plain": (40, 40, {}),
    "causal": (40, 40, {"causal": True}),
    "longer_keys": (40, 75, {"causal": True}),
    "top_left": (40, 75, {"causal": "top_left"}),
    "window": (75, 75, {"window_size": (9, 4)}),
    "sink": (75, 75, {"causal": True, "sink": 0.5}),
}


def check_scale(scale: float, name: str, dtype: torch.dtype, device: str) -> None:
    """Compare output, LSE and gradients with float64 autograd. Head dimension 72 uses another tile than 64."""
    seqlen_q, seqlen_k, options = SCALED[name]
    generator = torch.Generator().manual_seed(3)
    sizes = (seqlen_q, seqlen_k, seqlen_k)
    tensors = [torch.randn(2, n, 2, 72, generator=generator, dtype=torch.float64).to(dtype) for n in sizes]
    leaves = [t.to(device).requires_grad_() for t in tensors]
    sink = torch.full((2,), options["sink"], device=device) if "sink" in options else None
    out, lse = flashbwd.attention(*leaves, softmax_scale=scale, return_lse=True, **(options | {"sink": sink}))
    exact = [t.double().requires_grad_() for t in tensors]
    q, k, v = (t.transpose(1, 2) for t in exact)
    causal, (left, right) = options.get("causal"), options.get("window_size", (-1, -1))
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - offset
    hidden = (distance > (0 if causal else right)) if causal or right >= 0 else distance > seqlen_k
    hidden = hidden | (distance < -left) if left >= 0 else hidden
    scores = (scale * q @ k.mT).masked_fill(hidden, -math.inf)
    expected_lse = scores.logsumexp(-1)
    if sink is not None:
        expected_lse = torch.logaddexp(expected_lse, torch.tensor(options["sink"], dtype=torch.float64))
    expected = ((scores - expected_lse[..., None]).exp() @ v).transpose(1, 2)
    dout = torch.randn(*expected.shape, generator=generator, dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(out, leaves, dout.to(device))
    expected_grads = torch.autograd.grad(expected, exact, dout.double())
    tolerance = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip((out, lse, *grads), (expected, expected_lse, *expected_grads), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", SCALES)
def test_results_are_right_for_any_finite_scale_under_every_mask(scale: float, name: str, dtype: torch.dtype) -> None:
    check_scale(scale, name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", SCALES)
def test_results_on_a_gpu_are_right_for_any_finite_scale_under_every_mask(
    scale: float, name: str, dtype: torch.dtype
) -> None:
    check_scale(scale, name, dtype, "cuda")


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"flashbwd: softmax_scale is -?(inf|nan), expected a finite number"):
        flashbwd.attention(q, q, q, softmax_scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_its_bias_hides_is_zero_on_a_gpu(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(2, 40, 3, 32, generator=generator, device="cuda", dtype=dtype) for _ in range(3)]
    bias = torch.zeros(1, 3, 40, 40, device="cuda", dtype=dtype)
    bias[:, 1, 7] = -torch.inf
    leaves = [leaf.requires_grad_() for leaf in (*leaves, bias)]
    out = flashbwd.attention(*leaves[:3], attn_bias=leaves[3])
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert not out[:, 7, 1].any()
    assert not grads[0][:, 7, 1].any() and not grads[3][:, 1, 7].any()
    assert all(bool(t.isfinite().all()) for t in (out, *grads))
