"""The operators meet the requirements of PyTorch: schemas, fake tensors, autograd, FLOP counts, dispatch modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import cases, inputs, oracle
from support import MAIN, arguments_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import flashbwd

ops = torch.ops.flashbwd

SAMPLES: dict[str, cases.Case] = {
    "plain": cases.Case("plain", seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=4),
    "grouped_causal_window": cases.Case(
        "g", heads=4, seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=6, causal=True, window_size=(3, 0)
    ),
    "bias_sink_dlse_softcap": cases.Case(
        "b", seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=4, bias="1h1k", sink="finite", dlse=True, softcap=2.0
    ),
    "varlen_alibi": cases.Case(
        "v", seqlens_q=(3, 5), seqlens_k=(4, 2), head_dim=4, head_dim_v=4, alibi="batch", causal="top_left"
    ),
    "key_mask_bias": cases.Case(
        "k", seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=4, bias="1hqk", key_mask="empty", key_mask_layout="strided"
    ),
    "dropout": cases.Case("d", seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=4, dropout_p=0.3),
    "strided": cases.Case("s", seqlen_q=5, seqlen_k=5, head_dim=4, head_dim_v=4, layout="packed_qkv"),
    "empty": cases.Case("e", seqlen_q=0, seqlen_k=7, head_dim=4, head_dim_v=4),
}


def operator_options(x: inputs.Inputs) -> dict[str, Any]:
    """The keyword arguments of the operators, from those of the public function."""
    a = x.arguments
    left, right = a["window_size"]
    options = {
        "softmax_scale": a["softmax_scale"],
        "causal": {False: "none", True: "bottom_right", "top_left": "top_left"}[a["causal"]],
        "window_left": left,
        "window_right": right,
        "dropout_p": a["dropout_p"],
    }
    same = ["attn_bias", "key_mask", "alibi_slopes", "sink", "dlse", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q"]
    same += ["max_seqlen_k", "softcap", "deterministic"]
    options |= {name: a[name] for name in same if name in a}
    if (state := x.rng_state()) is not None:
        seed, offset, layout = state
        options |= {"rng_seed": torch.tensor(seed), "rng_offset": torch.tensor(offset), "rng_layout": layout}
    return options


def tensors_for_opcheck(x: inputs.Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments without NaN, which opcheck cannot compare."""

    def clean(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
            return value.nan_to_num(0.0)
        return value

    main = tuple(clean(x.arguments[name]) for name in MAIN)
    return main, {name: clean(value) for name, value in operator_options(x).items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_attention_backward_passes_opcheck(name: str) -> None:
    main, options = tensors_for_opcheck(inputs.build(SAMPLES[name], torch.float32))
    torch.library.opcheck(ops.attention_backward.default, main, options)


@pytest.mark.parametrize("name", SAMPLES)
def test_attention_backward_out_passes_opcheck(name: str) -> None:
    main, options = tensors_for_opcheck(inputs.build(SAMPLES[name], torch.float32))
    options |= {f"d{of}": torch.empty_like(main[1 + n]) for n, of in enumerate("qkv")}
    torch.library.opcheck(ops.attention_backward_out.default, main, options)


@pytest.mark.parametrize("name", SAMPLES)
def test_attention_passes_opcheck(name: str) -> None:
    x = inputs.build(SAMPLES[name], torch.float32)
    (_, q, k, v, _, _), o = tensors_for_opcheck(x)
    if name == "dropout":  # each call draws a new mask, which opcheck would report as an error
        o["dropout_p"] = 0.0
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    scale = q.shape[-1] ** -0.5 if o["softmax_scale"] is None else o["softmax_scale"]
    tensors = [o[name] for name in ("attn_bias", "key_mask", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k")]
    rest = (o["causal"], o["window_left"], o["window_right"], o["softcap"], o["dropout_p"])
    lengths = (o.get("max_seqlen_q"), o.get("max_seqlen_k"))
    torch.library.opcheck(ops.attention.default, (q, k, v, *tensors, scale, *rest, *lengths, False, "auto"))


@pytest.mark.parametrize("name", SAMPLES)
def test_fake_tensors_on_cuda_have_the_shapes_and_strides_of_real_ones(name: str) -> None:
    """The test needs no GPU, because fake tensors have no data."""
    x = inputs.build(SAMPLES[name], torch.bfloat16)
    real = flashbwd.attention_backward(**arguments_of(x))
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

        grads = flashbwd.attention_backward(**{name: fake(value) for name, value in arguments_of(x).items()})
    for expected, actual in zip(real, grads, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert actual.device.type == "cuda"
            assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_meta_tensors_are_planned_without_data() -> None:
    x = inputs.build(SAMPLES["bias_sink_dlse_softcap"], torch.bfloat16)
    meta = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in arguments_of(x).items()}
    plan = flashbwd.plan_attention_backward(**meta, device="cpu")
    assert plan.backend == "reference"
    assert plan.tile is None
    assert set(plan.reasons) == {"short", "sm90", "sm80"}
    assert all(plan.reasons.values())
    assert plan == flashbwd.plan_attention_backward(**arguments_of(x))


def test_make_fx_records_one_backward_operator() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.autograd.grad(flashbwd.attention(q, k, v, causal=True).sum(), q)[0]

    leaves = [torch.randn(1, 6, 2, 4, requires_grad=True) for _ in range(3)]
    graph = make_fx(loss, tracing_mode="symbolic")(*leaves)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(ops.attention_backward.default) == 1
    assert called.count(ops.attention.default) == 1
    longer = [torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3)]
    torch.testing.assert_close(graph(*longer), loss(*longer))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [(-1, -1), (5, 3), (0, 100)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(13, 13), (7, 20), (20, 7)])
def test_flops_count_the_visible_pairs(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int], causal: bool | str
) -> None:
    q = torch.randn(2, seqlen_q, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, seqlen_k, 2, dim, requires_grad=True) for dim in (8, 16))
    pairs = 2 * 4 * int(oracle.visible_pairs(seqlen_q, seqlen_k, causal, window).sum())
    with FlopCounterMode(display=False) as forward:
        out = flashbwd.attention(q, k, v, causal=causal, window_size=window)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    counted = forward.get_flop_counts()["Global"]
    assert counted[ops.attention] == pairs * (2 * 8 + 2 * 16)
    assert backward.get_flop_counts()["Global"][ops.attention_backward] == pairs * (6 * 8 + 4 * 16)


def test_deterministic_algorithms_reach_the_operator() -> None:
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.flags: list[bool] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ops.attention_backward.default:
                names = [argument.name for argument in func._schema.arguments]
                bound = dict(zip(names, args, strict=False)) | (kwargs or {})
                self.flags.append(bound.get("deterministic", False))
            return func(*args, **(kwargs or {}))

    arguments = arguments_of(inputs.build(SAMPLES["plain"], torch.float32))
    with Seen() as seen:
        flashbwd.attention_backward(**arguments)
        torch.use_deterministic_algorithms(True)
        try:
            flashbwd.attention_backward(**arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        flashbwd.attention_backward(**arguments | {"deterministic": True})
    assert seen.flags == [False, True, True]


def test_vmap_over_the_batch_agrees_with_a_loop() -> None:
    x = inputs.build(SAMPLES["plain"], torch.float64)
    q, k, v = (torch.stack([x.arguments[name]] * 3) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None, None]
               for name in ("q", "k", "v"))  # fmt: skip
    expected = torch.stack([flashbwd.attention(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(flashbwd.attention)(q, k, v), expected)


def test_gradients_do_not_alias_each_other_or_an_input() -> None:
    x = inputs.build(cases.Case("tiny", seqlen_q=4, seqlen_k=4, head_dim=4, head_dim_v=4), torch.float32)
    grads = flashbwd.attention_backward(**arguments_of(x))
    storages = [t.untyped_storage().data_ptr() for t in (*x.tensors().values(), grads.dq, grads.dk, grads.dv)]
    assert len(set(storages)) == len(storages)


def test_dropout_is_tagged_as_random() -> None:
    """Otherwise a compiler could run the forward again for the backward, with another mask."""
    assert torch.Tag.nondeterministic_seeded in ops.attention.default.tags


def norm_operators(rows: int = 3, columns: int = 8) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], int]]:
    """Operators with an output_mask: tensors, options and the number of gradients."""
    x, rs, gamma = torch.randn(rows, columns), torch.ones(rows), torch.ones(columns)
    return {
        "layer_norm_backward": (ops.layer_norm_backward, (x, x, rs, rs, gamma), {}, 3),
        "rms_norm_backward": (ops.rms_norm_backward, (x, x, rs, gamma), {}, 2),
        "norm_backward_from_output": (ops.norm_backward_from_output, (x, x, rs, gamma), {}, 3),
        "norm_backward_from_output_rms": (ops.norm_backward_from_output, (x, x, rs, gamma), {"rms": True}, 3),
        "dropout_add_norm_backward": (ops.dropout_add_norm_backward, (x, x, rs, rs, gamma), {}, 4),
        "dropout_add_rms_norm_backward": (ops.dropout_add_norm_backward, (x, x, None, rs, gamma), {}, 4),
    }


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 1000])
@pytest.mark.parametrize("name", norm_operators())
def test_an_output_mask_of_another_length_is_refused_by_the_operator(name: str, length: int) -> None:
    operator, tensors, options, gradients = norm_operators()[name]
    if length == gradients:
        operator(*tensors, **options, output_mask=[True] * length)
        return
    with pytest.raises((ValueError, RuntimeError), match=f"output_mask has {length} elements, expected {gradients}"):
        operator(*tensors, **options, output_mask=[True] * length)
