"""Every backend refuses invalid input with the same message, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import cases, inputs
from support import arguments_of, storage_bytes, workspace_of
from torch import Tensor

import flashbwd

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]

BASES = {
    "dense": cases.Case("dense", heads=4, seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=6),
    "varlen": cases.Case("varlen", heads=4, seqlens_q=(5, 3), seqlens_k=(7, 2), head_dim=8, head_dim_v=6),
    "dropout": cases.Case("dropout", seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=6, dropout_p=0.5),
}


def base(name: str) -> Arguments:
    return arguments_of(inputs.build(BASES[name], torch.float32))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def to(name: str, dtype: torch.dtype) -> Change:
    return lambda a: {name: a[name].to(dtype)}


def put(**values: Any) -> Change:
    return lambda a: values


def meta(name: str) -> Change:
    return lambda a: {name: a[name].to("meta")}


def last_strided(name: str) -> Change:
    return lambda a: {name: torch.stack([a[name]] * 2, dim=-1)[..., 0]}


def rng(seed: Any = 1, offset: Any = 2, layout: str = "flash") -> Change:
    return put(rng_state=flashbwd.RngState(seed, offset, layout))


NAN, INF = float("nan"), float("inf")

# (base, change, message after "flashbwd: ")
TABLE: dict[str, tuple[str, Change, str]] = {
    # Shapes.
    "q_dim": ("dense", lambda a: {"q": a["q"][0]},
              "q has shape (5, 4, 8), expected 4 dimensions (batch, seqlen_q, heads, head_dim)"),
    "q_dim_varlen": ("varlen", lambda a: {"q": a["q"][None]},
                     "q has shape (1, 8, 4, 8), expected 3 dimensions (total_q, heads, head_dim) with cu_seqlens"),
    "k_dim": ("dense", lambda a: {"k": a["k"][0]}, "k has shape (7, 2, 8), expected 4 dimensions as q"),
    "v_dim": ("dense", lambda a: {"v": a["v"][0]}, "v has shape (7, 2, 6), expected 4 dimensions as q"),
    "out_dim": ("dense", lambda a: {"out": a["out"][0]}, "out has shape (5, 4, 6), expected 4 dimensions as q"),
    "dout_dim": ("dense", lambda a: {"dout": a["dout"][0]}, "dout has shape (5, 4, 6), expected 4 dimensions as q"),
    "heads": ("dense", lambda a: {"k": torch.zeros(2, 7, 3, 8), "v": torch.zeros(2, 7, 3, 6)},
              "k has 3 heads, which does not divide q's 4"),
    "more_kv_heads": ("dense", lambda a: {"k": torch.zeros(2, 7, 8, 8), "v": torch.zeros(2, 7, 8, 6)},
                      "k has 8 heads, which does not divide q's 4"),
    "no_kv_heads": ("dense", lambda a: {"k": torch.zeros(2, 7, 0, 8), "v": torch.zeros(2, 7, 0, 6)},
                    "k has 0 heads, which does not divide q's 4"),
    "head_dim_0": ("dense", lambda a: {"q": a["q"][..., :0], "k": a["k"][..., :0]},
                   "q has head dimension 0, expected at least 1"),
    "head_dim_v_0": ("dense", lambda a: {name: a[name][..., :0] for name in ("v", "out", "dout")},
                     "v has head dimension 0, expected at least 1"),
    "k_head_dim": ("dense", put(k=torch.zeros(2, 7, 2, 9)), "k has shape (2, 7, 2, 9), expected (2, 7, 2, 8)"),
    "k_batch": ("dense", put(k=torch.zeros(3, 7, 2, 8)), "k has shape (3, 7, 2, 8), expected (2, 7, 2, 8)"),
    "v_length": ("dense", put(v=torch.zeros(2, 8, 2, 6)), "v has shape (2, 8, 2, 6), expected (2, 7, 2, 6)"),
    "v_heads": ("dense", put(v=torch.zeros(2, 7, 4, 6)), "v has shape (2, 7, 4, 6), expected (2, 7, 2, 6)"),
    "out_shape": ("dense", put(out=torch.zeros(2, 5, 4, 8)), "out has shape (2, 5, 4, 8), expected (2, 5, 4, 6)"),
    "dout_shape": ("dense", put(dout=torch.zeros(2, 4, 5, 6)), "dout has shape (2, 4, 5, 6), expected (2, 5, 4, 6)"
                   "; its shape fits (batch, heads, seqlen, head_dim), "
                   "the layout of scaled_dot_product_attention: pass dout.transpose(1, 2)"),
    "k_shape_varlen": ("varlen", put(k=torch.zeros(9, 2, 9)), "k has shape (9, 2, 9), expected (9, 2, 8)"),
    "v_rows_varlen": ("varlen", put(v=torch.zeros(8, 2, 6)), "v has shape (8, 2, 6), expected (9, 2, 6)"),
    "out_shape_varlen": ("varlen", put(out=torch.zeros(8, 4, 8)), "out has shape (8, 4, 8), expected (8, 4, 6)"),
    "dout_shape_varlen": ("varlen", put(dout=torch.zeros(7, 4, 6)), "dout has shape (7, 4, 6), expected (8, 4, 6)"),
    # Types, devices, strides.
    "q_dtype": ("dense", lambda a: {name: a[name].int() for name in ("q", "k", "v", "out", "dout")},
                "q is int32, expected float16, bfloat16, float32 or float64"),
    "k_dtype": ("dense", to("k", torch.float16), "k is float16, expected float32 as q"),
    "v_dtype": ("dense", to("v", torch.bfloat16), "v is bfloat16, expected float32 as q"),
    "out_dtype": ("dense", to("out", torch.float64), "out is float64, expected float32 as q"),
    "dout_dtype": ("dense", to("dout", torch.float16), "dout is float16, expected float32 as q"),
    "q_strided": ("dense", last_strided("q"), "q's last dimension has stride 2, expected 1 (contiguous)"),
    "k_strided": ("dense", last_strided("k"), "k's last dimension has stride 2, expected 1 (contiguous)"),
    "v_strided": ("dense", last_strided("v"), "v's last dimension has stride 2, expected 1 (contiguous)"),
    "out_strided": ("dense", last_strided("out"), "out's last dimension has stride 2, expected 1 (contiguous)"),
    # LSE and its gradient.
    "lse_dtype": ("dense", to("softmax_lse", torch.float64), "softmax_lse is float64, expected float32"),
    "lse_shape": ("dense", put(softmax_lse=torch.zeros(2, 5, 4)),
                  "softmax_lse has shape (2, 5, 4), expected (2, 4, 5), (2, 4, 5, 1) or (2, 4, 32)"),
    "lse_shape_varlen": ("varlen", put(softmax_lse=torch.zeros(8, 4)),
                         "softmax_lse has shape (8, 4), expected (4, 8) or (2, 4, 32)"),
    "dlse_dtype": ("dense", put(dlse=torch.zeros(2, 4, 5, dtype=torch.bfloat16)),
                   "dlse is bfloat16, expected float32"),
    "dlse_shape": ("dense", put(dlse=torch.zeros(2, 4, 6)),
                   "dlse has shape (2, 4, 6), expected (2, 4, 5), (2, 4, 5, 1) or (2, 4, 32)"),
    # Packed sequences.
    "no_cu_seqlens_k": ("varlen", put(cu_seqlens_k=None),
                        "cu_seqlens_k is missing, expected both cu_seqlens_q and cu_seqlens_k or neither"),
    "no_cu_seqlens_q": ("varlen", put(cu_seqlens_q=None),
                        "cu_seqlens_q is missing, expected both cu_seqlens_q and cu_seqlens_k or neither"),
    "no_max_seqlen_q": ("varlen", put(max_seqlen_q=None), "max_seqlen_q is missing, expected it with cu_seqlens_q"),
    "no_max_seqlen_k": ("varlen", put(max_seqlen_k=None), "max_seqlen_k is missing, expected it with cu_seqlens_k"),
    "max_seqlen_q_negative": ("varlen", put(max_seqlen_q=-1), "max_seqlen_q is -1, expected at least 0"),
    "max_seqlen_k_negative": ("varlen", put(max_seqlen_k=-2), "max_seqlen_k is -2, expected at least 0"),
    "max_seqlen_q_dense": ("dense", put(max_seqlen_q=6),
                           "max_seqlen_q is 6, expected q's own length 5 without cu_seqlens_q"),
    "max_seqlen_k_dense": ("dense", put(max_seqlen_k=6),
                           "max_seqlen_k is 6, expected k's own length 7 without cu_seqlens_k"),
    "cu_seqlens_q_shape": ("varlen", put(cu_seqlens_q=int32(0, 5, 8)[None]),
                           "cu_seqlens_q has shape (1, 3), expected (batch + 1,)"),
    "cu_seqlens_q_empty": ("varlen", put(cu_seqlens_q=int32()),
                           "cu_seqlens_q has shape (0,), expected (batch + 1,)"),
    "cu_seqlens_q_dtype": ("varlen", to("cu_seqlens_q", torch.int64), "cu_seqlens_q is int64, expected int32"),
    "cu_seqlens_k_dtype": ("varlen", to("cu_seqlens_k", torch.int64), "cu_seqlens_k is int64, expected int32"),
    "cu_seqlens_k_size": ("varlen", put(cu_seqlens_k=int32(0, 9)),
                          "cu_seqlens_k has shape (2,), expected (3,): one more than the sequences of cu_seqlens_q"),
    "cu_seqlens_q_strided": ("varlen", put(cu_seqlens_q=int32(0, 0, 5, 0, 8, 0)[::2]),
                             "cu_seqlens_q has stride 2, expected 1 (contiguous)"),
    "cu_seqlens_q_start": ("varlen", put(cu_seqlens_q=int32(1, 5, 8)), "cu_seqlens_q starts at 1, expected 0"),
    "cu_seqlens_k_start": ("varlen", put(cu_seqlens_k=int32(2, 7, 9)), "cu_seqlens_k starts at 2, expected 0"),
    "cu_seqlens_decrease": ("varlen", put(cu_seqlens_q=int32(0, 5, 4)),
                            "cu_seqlens_q decreases from 5 to 4 at index 2, expected values that do not decrease"),
    "cu_seqlens_longest": ("varlen", put(max_seqlen_k=6),
                           "cu_seqlens_k holds a sequence of length 7, expected at most max_seqlen, 6"),
    "cu_seqlens_end": ("varlen", put(cu_seqlens_k=int32(0, 7, 10)),
                       "cu_seqlens_k ends at 10, expected at most the number of rows, 9"),
    "seqused_q_dtype": ("varlen", put(seqused_q=torch.tensor([1, 2])), "seqused_q is int64, expected int32"),
    "seqused_q_shape": ("varlen", put(seqused_q=int32(1, 2, 3)),
                        "seqused_q has shape (3,), expected (2,): the batch"),
    "seqused_k_shape": ("dense", put(seqused_k=int32(1)), "seqused_k has shape (1,), expected (2,): the batch"),
    "seqused_q_too_long": ("varlen", put(seqused_q=int32(5, 4)),
                           "seqused_q holds 4 at index 1, expected at least 0 and at most the sequence's length, 3"),
    "seqused_k_negative": ("dense", put(seqused_k=int32(-1, 7)),
                           "seqused_k holds -1 at index 0, expected at least 0 and at most the sequence's length, 7"),
    # Masks and scalars.
    "causal": ("dense", put(causal="bottom"),
               "causal is bottom, expected False, True or \"top_left\""),
    "window_left": ("dense", put(window_size=(-2, 0)), "window_size[0] is -2, expected -1 (unbounded) or more"),
    "window_right": ("dense", put(window_size=(0, -5)), "window_size[1] is -5, expected -1 (unbounded) or more"),
    "window_pair": ("dense", put(window_size=(1, 2, 3)),
                    "window_size is (1, 2, 3), expected a pair (left, right)"),
    "softmax_scale_nan": ("dense", put(softmax_scale=NAN), "softmax_scale is nan, expected a finite number"),
    "softmax_scale_inf": ("dense", put(softmax_scale=INF), "softmax_scale is inf, expected a finite number"),
    "softcap_negative": ("dense", put(softcap=-1.0), "softcap is -1, expected 0 (none) or a positive number"),
    "softcap_inf": ("dense", put(softcap=INF), "softcap is inf, expected 0 (none) or a positive number"),
    # Bias, slopes, sink.
    "bias_dim": ("dense", put(attn_bias=torch.zeros(4, 5, 7)),
                 "attn_bias has shape (4, 5, 7), expected (2, 4, 5, 7) where any dimension may be 1"),
    "bias_shape": ("dense", put(attn_bias=torch.zeros(2, 2, 5, 7)),
                   "attn_bias has shape (2, 2, 5, 7), expected (2, 4, 5, 7) where any dimension may be 1"),
    "bias_shape_varlen": ("varlen", put(attn_bias=torch.zeros(1, 4, 8, 9)),
                          "attn_bias has shape (1, 4, 8, 9), expected (2, 4, 5, 7) where any dimension may be 1"),
    "bias_dtype": ("dense", put(attn_bias=torch.zeros(1, 1, 5, 7, dtype=torch.bool)),
                   "attn_bias is bool, expected q's float32 or float32"),
    "key_mask_dtype": ("dense", put(key_mask=torch.ones(2, 7)), "key_mask is float32, expected bool"),
    "key_mask_dim": ("dense", put(key_mask=torch.ones(2, 1, 1, 7, dtype=torch.bool)),
                     "key_mask has shape (2, 1, 1, 7), expected (2, 7)"),
    "key_mask_batch": ("dense", put(key_mask=torch.ones(1, 7, dtype=torch.bool)),
                       "key_mask has shape (1, 7), expected (2, 7)"),
    "key_mask_keys": ("dense", put(key_mask=torch.ones(2, 5, dtype=torch.bool)),
                      "key_mask has shape (2, 5), expected (2, 7)"),
    "key_mask_varlen": ("varlen", put(key_mask=torch.ones(2, 7, dtype=torch.bool)),
                        "key_mask came with cu_seqlens_q and cu_seqlens_k, expected it without them: pack only the "
                        "keys that the mask shows"),
    "slopes_dtype": ("dense", put(alibi_slopes=torch.zeros(4, dtype=torch.float64)),
                     "alibi_slopes is float64, expected float32"),
    "slopes_shape": ("dense", put(alibi_slopes=torch.zeros(2)),
                     "alibi_slopes has shape (2,), expected (4,) or (2, 4)"),
    "slopes_strided": ("dense", put(alibi_slopes=torch.zeros(8)[::2]),
                       "alibi_slopes's last dimension has stride 2, expected 1 (contiguous)"),
    "sink_shape": ("dense", put(sink=torch.zeros(2)), "sink has shape (2,), expected (4,)"),
    "sink_strided": ("dense", put(sink=torch.zeros(8)[::2]),
                     "sink's last dimension has stride 2, expected 1 (contiguous)"),
    # Dropout.
    "dropout_p_1": ("dropout", put(dropout_p=1.0), "dropout_p is 1, expected 0 <= dropout_p < 1"),
    "dropout_p_negative": ("dropout", put(dropout_p=-0.5), "dropout_p is -0.5, expected 0 <= dropout_p < 1"),
    "dropout_p_nan": ("dropout", put(dropout_p=NAN), "dropout_p is nan, expected 0 <= dropout_p < 1"),
    "no_rng_state": ("dropout", put(rng_state=None), "rng_state is missing, expected it with dropout_p 0.5"),
    "rng_layout": ("dropout", rng(layout="philox"),
                   'rng_state.layout is "philox", expected "flash", "efficient32" or "efficient64"'),
    "rng_layout_cudnn": ("dropout", rng(layout="cudnn"),
                         'rng_state.layout is "cudnn", expected "flash", "efficient32" or "efficient64"; '
                         "cuDNN does not say how it draws its mask, so it cannot be drawn again"),
    "seed_shape": ("dropout", rng(seed=torch.zeros(2, dtype=torch.int64)),
                   "rng_state.seed has shape (2,), expected one element"),
    "offset_dtype": ("dropout", rng(offset=torch.tensor(1, dtype=torch.int32)),
                     "rng_state.offset is int32, expected int64 or uint64"),
    # Outputs and scratch.
    "dq_shape": ("dense", put(dq=torch.zeros(2, 5, 4, 6)), "dq has shape (2, 5, 4, 6), expected q's (2, 5, 4, 8)"),
    "dk_shape": ("dense", put(dk=torch.zeros(2, 7, 4, 8)), "dk has shape (2, 7, 4, 8), expected k's (2, 7, 2, 8)"),
    "dv_shape": ("dense", put(dv=torch.zeros(2, 7, 2, 8)), "dv has shape (2, 7, 2, 8), expected v's (2, 7, 2, 6)"),
    "dq_dtype": ("dense", put(dq=torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16)),
                 "dq is bfloat16, expected q's float32"),
    "dk_dtype_16_bit": ("dense",
                        lambda a: {name: a[name].half() for name in ("q", "k", "v", "out", "dout")}
                        | {"dk": torch.zeros(2, 7, 2, 8, dtype=torch.bfloat16)},
                        "dk is bfloat16, expected k's float16 or float32"),
    "dq_strided": ("dense", put(dq=torch.zeros(2, 5, 4, 16)[..., ::2]),
                   "dq's last dimension has stride 2, expected 1 (contiguous)"),
    "dv_expanded": ("dense", put(dv=torch.zeros(7, 2, 6).expand(2, 7, 2, 6)),
                    "dv has stride 0 in dimension 0 of size 2, expected memory of its own for every element"),
    "dq_is_q": ("dense", lambda a: {"dq": a["q"]},
                "dq shares its memory with q, expected memory of its own: inputs are never written to"),
    "dk_is_k": ("dense", lambda a: {"dk": a["k"]},
                "dk shares its memory with k, expected memory of its own: inputs are never written to"),
    "dk_is_dv": ("dense",
                 lambda a: {"v": a["k"], "out": a["q"], "dout": a["q"], **dict.fromkeys(["dk", "dv"], a["k"] + 1)},
                 "dk shares its memory with dv, expected memory of its own"),
    "workspace_dtype": ("dense", put(workspace=torch.zeros(8)), "workspace is float32, expected uint8"),
    "workspace_dim": ("dense", put(workspace=torch.zeros(8, 8, dtype=torch.uint8)),
                      "workspace has shape (8, 8), expected one dimension"),
    "workspace_misaligned": ("dense", put(workspace=workspace_of(512, "cpu", offset=64)),
                             "workspace starts at an address that is 64 modulo 256, expected one aligned to 256 bytes"),
    "workspace_strided": ("dense", put(workspace=workspace_of(512, "cpu")[::2]),
                          "workspace's last dimension has stride 2, expected 1 (contiguous)"),
}  # fmt: skip

# Every machine has the meta device besides the CPU. A meta tensor among the arguments of an operator selects another
# kernel, so these cases call the plan, which accepts tensors of both devices.
DEVICES = {
    "k": "dense",
    "v": "dense",
    "out": "dense",
    "dout": "dense",
    "softmax_lse": "dense",
    "cu_seqlens_q": "varlen",
    "cu_seqlens_k": "varlen",
}


@pytest.mark.parametrize("backend", ["auto", "reference", "short", "sm80", "sm90"])
@pytest.mark.parametrize("name", TABLE)
def test_every_backend_refuses_bad_arguments_with_the_same_message(name: str, backend: str) -> None:
    base_name, change, message = TABLE[name]
    arguments = base(base_name)
    arguments |= change(arguments)
    with flashbwd.use_backend(backend):
        with pytest.raises(ValueError) as called:  # the whole message is compared
            flashbwd.attention_backward(**arguments)
        with pytest.raises(ValueError) as planned:
            flashbwd.plan_attention_backward(**arguments)
    assert str(called.value) == f"flashbwd: {message}"
    assert str(planned.value) == f"flashbwd: {message}"


def test_the_unchanged_arguments_of_the_table_are_accepted() -> None:
    for name in BASES:
        flashbwd.attention_backward(**base(name))


# Tensors in the layout of scaled_dot_product_attention, and the same tensors in the layout of this library.
Q, K, LSE = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16), torch.zeros(2, 4, 8)
RIGHT_Q, RIGHT_K = Q.transpose(1, 2), K.transpose(1, 2)
backward = flashbwd.attention_backward

# A call, and the beginning of its refusal.
OTHER_LAYOUT: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (lambda: flashbwd.attention(Q, K[:, :, :7], K[:, :, :7]), "k has 7 heads, which does not divide q's 8"),
    "bias": (lambda: flashbwd.attention(Q, K, K, attn_bias=torch.zeros(1, 4, 8, 8)),
             "attn_bias has shape (1, 4, 8, 8), expected (2, 8, 4, 2)"),
    "slopes": (lambda: flashbwd.attention(Q, K, K, alibi_slopes=LSE[..., 0]),
               "alibi_slopes has shape (2, 4), expected (8,) or (2, 8)"),
    "sink": (lambda: flashbwd.attention(Q, K, K, sink=torch.zeros(4)), "sink has shape (4,), expected (8,)"),
    "softmax_lse": (lambda: backward(Q, Q, K, K, Q, LSE), "softmax_lse has shape (2, 4, 8), expected (2, 8, 4)"),
    "v": (lambda: flashbwd.attention(RIGHT_Q, RIGHT_K, K), "v has shape (2, 2, 8, 16), expected (2, 8, 2, 16)"),
    "out": (lambda: backward(RIGHT_Q, RIGHT_Q, RIGHT_K, RIGHT_K, Q, LSE),
            "out has shape (2, 4, 8, 16), expected (2, 8, 4, 16)"),
    "dq": (lambda: backward(RIGHT_Q, RIGHT_Q, RIGHT_K, RIGHT_K, RIGHT_Q, LSE, dq=torch.zeros_like(Q)),
           "dq has shape (2, 4, 8, 16), expected q's (2, 8, 4, 16)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_LAYOUT)
def test_shapes_that_fit_the_layout_of_sdpa_are_refused_with_a_hint(name: str) -> None:
    call, message = OTHER_LAYOUT[name]
    with pytest.raises(ValueError, match=rf"^flashbwd: {re.escape(message)}.*scaled_dot_product_attention: pass "):
        call()


def test_wrong_heads_in_the_right_layout_give_no_hint() -> None:
    q, k = torch.zeros(2, 128, 8, 16), torch.zeros(2, 128, 3, 16)
    with pytest.raises(ValueError, match=r"which does not divide q's 8$"):
        flashbwd.attention(q, k, k)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout", "softmax_lse"])
def test_the_refusal_of_an_fp8_tensor_names_its_dtype(name: str) -> None:
    arguments = base("dense")
    arguments[name] = arguments[name].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"^flashbwd: {name} is float8_e4m3fn, expected float"):
        flashbwd.attention_backward(**arguments)


def test_the_refusal_of_fp8_by_the_forward_names_the_dtype_and_the_supported_ones() -> None:
    x = torch.zeros(2, 5, 4, 8).to(torch.float8_e5m2)
    expected = "^flashbwd: q is float8_e5m2, expected float16, bfloat16, float32 or float64$"
    with pytest.raises(ValueError, match=expected):
        flashbwd.attention(x, x, x)


@pytest.mark.parametrize("name", DEVICES)
def test_a_tensor_on_another_device_is_refused(name: str) -> None:
    arguments = base(DEVICES[name])
    if name.startswith("cu_"):
        arguments[name] = arguments[name].to("meta")
    else:
        arguments |= {key: x.to("meta") for key, x in arguments.items() if isinstance(x, Tensor) and key != name}
    there, expected = ("meta", "cpu") if name.startswith("cu_") else ("cpu", "meta")
    with pytest.raises(ValueError, match=rf"^flashbwd: {name} is on {there}, expected q's {expected}$"):
        flashbwd.plan_attention_backward(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["seqused_q", "attn_bias", "sink", "alibi_slopes", "dlse", "dq", "workspace", *DEVICES]
)
def test_a_tensor_on_the_cpu_beside_a_gpu_is_refused(name: str) -> None:
    arguments = base("varlen")
    arguments |= {
        "seqused_q": int32(5, 3),
        "attn_bias": torch.zeros(1, 1, 5, 7),
        "sink": torch.zeros(4),
        "alibi_slopes": torch.zeros(4),
        "dlse": torch.zeros(4, 8),
        "dq": torch.zeros(8, 4, 8),
        "workspace": workspace_of(1 << 20, "cpu"),
    }
    arguments = {
        key: x.cuda() if isinstance(x, Tensor) and key not in (name, "workspace") else x for key, x in arguments.items()
    }
    if name != "workspace":
        arguments["workspace"] = workspace_of(1 << 20, "cuda")
    with pytest.raises(ValueError, match=rf"^flashbwd: {name} is on cpu, expected q's cuda:0$"):
        flashbwd.attention_backward(**arguments)


def test_a_forced_backend_that_cannot_run_gives_the_reason() -> None:
    with (
        flashbwd.use_backend("sm90"),
        pytest.raises(ValueError, match=r'^flashbwd: backend "sm90" cannot run this: q is on the CPU$'),
    ):
        flashbwd.attention_backward(**base("dense"))


def test_an_unknown_backend_is_refused_before_any_call() -> None:
    message = r'^flashbwd: backend is "sm75", expected "auto", "sm90", "sm80", "short" or "reference"$'
    with pytest.raises(ValueError, match=message):
        flashbwd.use_backend("sm75")


def test_a_forced_backend_is_forgotten_after_an_error() -> None:
    with pytest.raises(ValueError, match="sm90"), flashbwd.use_backend("sm90"):
        flashbwd.attention_backward(**base("dense"))
    flashbwd.attention_backward(**base("dense"))


def test_an_unknown_option_of_the_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="plan_attention_backward has no argument 'is_causal'"):
        flashbwd.plan_attention_backward(**base("dense"), is_causal=True)


@pytest.mark.parametrize(
    "name",
    [
        "heads",
        "k_dtype",
        "causal",
        "window_left",
        "bias_shape",
        "slopes_shape",
        "softcap_negative",
        "no_cu_seqlens_k",
        "key_mask_dtype",
        "key_mask_keys",
        "key_mask_varlen",
    ],
)
def test_the_forward_refuses_with_the_message_of_the_backward(name: str) -> None:
    base_name, change, message = TABLE[name]
    arguments = base(base_name)
    arguments |= change(arguments)
    for other in ("dout", "out", "softmax_lse", "rng_state", "dlse", "seqused_q", "seqused_k"):
        arguments.pop(other, None)
    with pytest.raises(ValueError) as caught:  # the whole message is compared
        flashbwd.attention(**arguments)
    assert str(caught.value) == f"flashbwd: {message}"


def test_a_refused_call_does_not_write_to_given_outputs() -> None:
    arguments = base("dense")
    dq = torch.full_like(arguments["q"], torch.nan)
    before = storage_bytes(dq)
    with pytest.raises(ValueError, match="dk has shape"):
        flashbwd.attention_backward(**arguments, dq=dq, dk=torch.zeros(1, 2, 3, 4))
    assert torch.equal(storage_bytes(dq), before)
