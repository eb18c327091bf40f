"""Every public function refuses arguments of a wrong type with a ValueError that begins with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flashbwd
from flashbwd import RngState

Arguments = dict[str, Any]

# Values by name. TAKES below lists the names that each kind of argument accepts.
WRONG: dict[str, Any] = {
    "none": None,
    "string": "abc",
    "float": 1.5,
    "negative_float": -1.5,
    "int": 3,
    "2**63": 2**63,
    "2**64": 2**64,
    "-2**63-1": -(2**63) - 1,
    "2**2000": 2**2000,
    "nan": float("nan"),
    "complex": 1j,
    "list": [1.0, 2.0],
    "empty_list": [],
    "tuple": (1, 2, 3, 4, 5),
    "nested": [[1], [2]],
    "dict": {"a": 1},
    "object": object(),
    "type": torch.Tensor,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "scalar_tensor": torch.tensor(1.0),
    "long_tensor": torch.zeros(2, 3, dtype=torch.int64),
    "complex_tensor": torch.zeros(2, 3, dtype=torch.complex64),
    "bool_tensor": torch.zeros(2, 3, dtype=torch.bool),
    "rank_7": torch.zeros(1, 1, 1, 1, 1, 1, 1),
    "rank_9": torch.zeros(1, 1, 1, 1, 1, 1, 1, 1, 1),
    "sparse": torch.zeros(2, 3).to_sparse(),
    "meta": torch.zeros(2, 3, device="meta"),
}
ONE_ELEMENT = ("scalar_tensor", "rank_7", "rank_9")  # PyTorch accepts these as numbers
NUMBERS = ("float", "int", "2**63", "2**64", "-2**63-1")
TAKES: dict[str, tuple[str, ...]] = {
    "tensor": (),
    "tensor?": ("none",),
    "q": ("meta",),  # with it, the other arguments are on another device
    "rows": ("meta", "rank_7"),  # a norm takes any number of dimensions; the message names another argument
    "number": (*NUMBERS, "negative_float", *ONE_ELEMENT, "nan"),
    "number?": (*NUMBERS, "negative_float", *ONE_ELEMENT, "nan", "none"),
    "scale": (*NUMBERS, "negative_float", *ONE_ELEMENT, "none"),
    "softcap": ("float", "int", "2**63", "2**64", *ONE_ELEMENT),
    "p": ("rank_7", "rank_9"),
    "length": ("none",),
    "flag": (),
    "causal": (),
    "window": (),
    "rng": (),
    "mask": (),
    "function?": ("none", "type", "dtype"),
    "options": ("none",),
    "decoding_scale": (*NUMBERS, "negative_float", "nan", "none"),
    "block_mask": ("none",),
    "aux": ("none",),
    "plan_device": ("none", "device", "int"),
    "name": ("string",),
    "rng?": ("none",),  # the message names dropout_p or keep
}


def attention_inputs(packed: bool = False) -> Arguments:
    if packed:
        lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
        q, k, v = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 6)
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 5,
                "max_seqlen_k": 5}  # fmt: skip
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
    return {"q": q, "k": k, "v": v, "attn_bias": torch.randn(1, 1, 5, 7), "alibi_slopes": torch.ones(4),
            "sink": torch.zeros(4), "key_mask": torch.ones(2, 7, dtype=torch.bool)}  # fmt: skip


def triangle_inputs() -> Arguments:
    q, k, v = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 7, 8), torch.randn(2, 3, 4, 7, 6)
    mask = torch.ones(2, 3, 1, 1, 7, dtype=torch.bool)
    return {"q": q, "k": k, "v": v, "bias": torch.randn(2, 1, 4, 5, 7), "mask": mask}


def evoformer_inputs() -> Arguments:
    q, k, v = torch.randn(2, 3, 5, 4, 8), torch.randn(2, 3, 5, 4, 8), torch.randn(2, 3, 5, 4, 6)
    return {"q": q, "k": k, "v": v}


def attention_backward_inputs(packed: bool = False) -> Arguments:
    given = attention_inputs(packed)
    out, lse = flashbwd.attention(**given, return_lse=True)
    used = {f"seqused_{x}": torch.tensor([3, 5], dtype=torch.int32) for x in "qk"} if packed else {}
    return {"dout": torch.ones_like(out), **given, "out": out, "softmax_lse": lse, "dlse": torch.ones_like(lse), **used,
            "dropout_p": 0.5, "rng_state": RngState(1, 2, "flash")}  # fmt: skip


SCALARS = {
    "softmax_scale": "scale",
    "causal": "causal",
    "window_size": "window",
    "softcap": "softcap",
    "deterministic": "flag",
}
SEQUENCES = {"cu_seqlens_q": "tensor", "cu_seqlens_k": "tensor", "max_seqlen_q": "tensor", "max_seqlen_k": "tensor"}
QKV = {"q": "q", "k": "tensor", "v": "tensor"}
OPTIONAL = dict.fromkeys(("attn_bias", "key_mask", "alibi_slopes", "sink"), "tensor?")
BACKWARD = dict.fromkeys(("dout", "out", "softmax_lse"), "tensor") | {
    "dlse": "tensor?",
    "dropout_p": "p",
    "rng_state": "rng",
}
OUTPUTS = dict.fromkeys(("dq", "dk", "dv", "workspace"), "tensor?")
PACKED = SEQUENCES | {"max_seqlen_q": "length_needed", "max_seqlen_k": "length_needed"}
TAKES["length_needed"] = ("int", *ONE_ELEMENT)
PACKED_BACKWARD = PACKED | {"seqused_q": "tensor?", "seqused_k": "tensor?"}
X, ROWS, GAMMA = torch.randn(3, 8), torch.ones(3), torch.ones(8)
NORM = {"zero_centered_gamma": "flag", "eps": "number"}
GRADS = {"dz": "tensor", "rs": "tensor", "gamma": "tensor?", "dresidual": "tensor?", "zero_centered_gamma": "flag",
         "output_mask": "mask"}  # fmt: skip
DROPPED = {"dz": X, "h": X, "rs": ROWS, "gamma": GAMMA, "dropout_p": 0.5, "rng_state": RngState(1, 2, "efficient64")}
DROPOUT = GRADS | {"h": "rows", "dropout_p": "p", "rng_state": "rng?", "keep": "tensor?"}
MASK = create_block_mask(lambda b, h, i, j: j >= i, 1, 1, 2, 20, device="cpu")
HEADS = {"query": torch.randn(1, 2, 2, 8), "key": torch.randn(1, 2, 20, 8), "value": torch.randn(1, 2, 20, 8)}


class Function:
    """A function, arguments that it takes, and the kind of each argument that is varied."""

    def __init__(self, call: Callable[..., Any], given: Arguments, kinds: dict[str, str]) -> None:
        self.call, self.given, self.kinds = call, given, kinds


FUNCTIONS = {
    "attention": Function(
        flashbwd.attention,
        attention_inputs(),
        QKV | OPTIONAL | SCALARS | {"dropout_p": "p", "return_lse": "flag", "max_seqlen_q": "length",
         "max_seqlen_k": "length"},
    ),
    "triangle_attention": Function(
        flashbwd.triangle_attention, triangle_inputs(), dict.fromkeys(("q", "k", "v", "bias"), "tensor")
        | {"mask": "tensor?", "scale": "scale"},
    ),
    "evoformer_attention": Function(
        flashbwd.evoformer_attention, evoformer_inputs(), dict.fromkeys(("q", "k", "v"), "tensor"),
    ),
    "attention_packed": Function(flashbwd.attention, attention_inputs(True), QKV | PACKED),
    "attention_backward": Function(
        flashbwd.attention_backward, attention_backward_inputs(), QKV | OPTIONAL | BACKWARD | SCALARS | OUTPUTS
    ),
    "attention_backward_packed": Function(
        flashbwd.attention_backward, attention_backward_inputs(True), QKV | BACKWARD | PACKED_BACKWARD
    ),
    "plan_attention_backward": Function(
        flashbwd.plan_attention_backward,
        attention_backward_inputs(),
        QKV | OPTIONAL | BACKWARD | SCALARS | OUTPUTS | {"device": "plan_device"},
    ),
    "plan_attention_backward_packed": Function(
        flashbwd.plan_attention_backward, attention_backward_inputs(True), QKV | BACKWARD | PACKED_BACKWARD
    ),
    "layer_norm": Function(
        flashbwd.layer_norm,
        {"x": X, "gamma": GAMMA, "beta": GAMMA},
        {"x": "rows", "gamma": "tensor?", "beta": "tensor?", "memory_efficient": "flag", **NORM},
    ),
    "rms_norm": Function(
        flashbwd.rms_norm,
        {"x": X, "gamma": GAMMA},
        {"x": "rows", "gamma": "tensor?", "memory_efficient": "flag", **NORM, "eps": "number?"},
    ),
    "dropout_add_layer_norm": Function(
        flashbwd.dropout_add_layer_norm,
        {"x": X, "residual": X, "gamma": GAMMA, "beta": GAMMA},
        {"x": "rows", "residual": "tensor", **dict.fromkeys(("gamma", "beta", "keep"), "tensor?"), **NORM,
         "dropout_p": "p"},
    ),
    "dropout_add_rms_norm": Function(
        flashbwd.dropout_add_rms_norm,
        {"x": X, "residual": X, "gamma": GAMMA},
        {"x": "rows", "residual": "tensor", **dict.fromkeys(("gamma", "keep"), "tensor?"), **NORM,
         "eps": "number?", "dropout_p": "p"},
    ),
    "layer_norm_backward": Function(
        flashbwd.layer_norm_backward,
        {"dz": X, "x": X, "mu": ROWS, "rs": ROWS, "gamma": GAMMA},
        GRADS | {"x": "rows", "mu": "tensor"},
    ),
    "rms_norm_backward": Function(
        flashbwd.rms_norm_backward, {"dz": X, "x": X, "rs": ROWS, "gamma": GAMMA}, GRADS | {"x": "rows"}
    ),
    "layer_norm_backward_from_output": Function(
        flashbwd.layer_norm_backward_from_output,
        {"dz": X, "z": X, "rs": ROWS, "gamma": GAMMA, "beta": GAMMA},
        GRADS | {"z": "rows", "beta": "tensor?"},
    ),
    "rms_norm_backward_from_output": Function(
        flashbwd.rms_norm_backward_from_output, {"dz": X, "z": X, "rs": ROWS, "gamma": GAMMA}, GRADS | {"z": "rows"}
    ),
    "dropout_add_layer_norm_backward": Function(
        flashbwd.dropout_add_layer_norm_backward, DROPPED | {"mu": ROWS}, DROPOUT | {"mu": "tensor"}
    ),
    "dropout_add_rms_norm_backward": Function(flashbwd.dropout_add_rms_norm_backward, DROPPED, DROPOUT),
    "LayerNorm": Function(flashbwd.LayerNorm(8), {"x": X}, {"x": "tensor"}),
    "RMSNorm": Function(flashbwd.RMSNorm(8), {"x": X}, {"x": "tensor"}),
    "flex_decoding": Function(
        flashbwd.flex_decoding,
        HEADS | {"block_mask": MASK},
        {**dict.fromkeys(HEADS, "tensor"), "score_mod": "function?", "block_mask": "block_mask",
         "scale": "decoding_scale", "enable_gqa": "flag", "return_lse": "flag", "kernel_options": "options",
         "return_aux": "aux"},
    ),
    "use_backend": Function(flashbwd.use_backend, {"name": "reference"}, {"name": "name"}),
    "enable": Function(flashbwd.enable, {}, {"attention": "flag", "norms": "flag"}),
    "stats": Function(flashbwd.stats, {}, {"reset": "flag"}),
}  # fmt: skip


def complaint(f: Function, argument: str, value: Any) -> str | None:
    """Return how the refusal of a value differs from the expected one, or None if they agree."""
    name = "backend" if argument == "name" else argument
    try:
        f.call(**f.given | {argument: value})
    except ValueError as error:
        return None if str(error).startswith(f"flashbwd: {name}") else f"says {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return "accepts it"


@pytest.mark.parametrize(
    ("function", "argument"), [(name, argument) for name, f in FUNCTIONS.items() for argument in f.kinds]
)
def test_values_of_a_wrong_type_are_refused_by_name(function: str, argument: str) -> None:
    f = FUNCTIONS[function]
    refused = {name: value for name, value in WRONG.items() if name not in TAKES[f.kinds[argument]]}
    complaints = {name: found for name, value in refused.items() if (found := complaint(f, argument, value))}
    assert not complaints


# ---- parts of arguments; the whole message is compared ----

PARTS: dict[str, tuple[str, Arguments, str]] = {
    "window_float": ("attention", {"window_size": (1.5, 0)}, "window_size[0] is 1.5, expected a 64-bit integer"),
    "window_none": ("attention_backward", {"window_size": (1, None)},
                    "window_size[1] is None, expected a 64-bit integer"),
    "window_2**63": ("attention_backward", {"window_size": (2**63, 0)},
                     "window_size[0] is 9223372036854775808, expected a 64-bit integer"),
    "window_one": ("attention", {"window_size": (1,)}, "window_size is (1,), expected a pair (left, right)"),
    "window": ("attention", {"window_size": None}, "window_size is None, expected a pair (left, right)"),
    "softcap": ("attention", {"softcap": None}, "softcap is None, expected a number in the range of float64"),
    "scale": ("attention_backward", {"softmax_scale": "0.5"},
              "softmax_scale is '0.5', expected a number in the range of float64 or None"),
    "length": ("attention_packed", {"max_seqlen_q": 5.0},
               "max_seqlen_q is 5.0, expected a 64-bit integer or None"),
    "slopes": ("attention", {"alibi_slopes": [1.0] * 4}, "alibi_slopes is a list, expected a tensor or None"),
    "sink": ("attention", {"sink": 1.0}, "sink is 1.0, expected a tensor"),
    "sink_integers": ("attention_backward", {"sink": torch.zeros(4, dtype=torch.int64)},
                      "sink is int64, expected a floating-point dtype"),
    "rng_two": ("attention_backward", {"rng_state": (1, 2)},
                "rng_state has 2 elements, expected RngState(seed, offset, layout)"),
    "rng_tensor": ("attention_backward", {"rng_state": torch.zeros(2)},
                   "rng_state is a Tensor, expected RngState(seed, offset, layout)"),
    "layout_none": ("attention_backward", {"rng_state": RngState(1, 2, None)},  # type: ignore[arg-type]
                    "rng_state.layout is None, expected a string"),
    "norm_layout_none": ("dropout_add_rms_norm_backward", {"rng_state": (1, 2, None)},
                         "rng_state.layout is None, expected 'efficient64'"),
    "mask_none": ("layer_norm_backward", {"output_mask": (True, None, True)},
                  "output_mask[1] is None, expected a bool"),
    "eps": ("rms_norm", {"eps": 2**1024}, "eps is a 1025-bit integer, expected a number in the range of float64"),
    "mu_none": ("dropout_add_layer_norm_backward", {"mu": None}, "mu is None, expected a tensor"),
    "sparse": ("layer_norm", {"gamma": torch.ones(8).to_sparse()},
               "gamma has layout torch.sparse_coo, expected torch.strided"),
    "dims": ("attention_backward", {"dout": torch.zeros([1] * 9)}, "dout has 9 dimensions, expected at most 8"),
    "meta": ("attention", {"k": torch.zeros(2, 7, 2, 8, device="meta")}, "k is on meta, expected q's cpu"),
}  # fmt: skip
WORDS = {
    None: "is None, expected an integer or a tensor with one element",
    1.5: "is 1.5, expected an integer or a tensor with one element",
    "1": "is '1', expected an integer or a tensor with one element",
    2**64: "is 18446744073709551616, expected a 64-bit integer",
    -(2**63) - 1: "is -9223372036854775809, expected a 64-bit integer",
    torch.zeros(2, dtype=torch.int64): "has shape (2,), expected one element",
    torch.zeros((), dtype=torch.float32): "is float32, expected int64 or uint64",
}
RANDOM = {"attention_backward": "flash", "dropout_add_layer_norm_backward": "efficient64"}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_an_argument_is_refused_by_name(name: str) -> None:
    function, changes, message = PARTS[name]
    f = FUNCTIONS[function]
    with pytest.raises(ValueError) as caught:  # the whole message is compared
        f.call(**f.given | changes)
    assert str(caught.value) == f"flashbwd: {message}"


@pytest.mark.parametrize("function", RANDOM)
@pytest.mark.parametrize("part", ["seed", "offset"])
@pytest.mark.parametrize("value", WORDS, ids=str)
def test_a_seed_or_offset_that_is_no_64_bit_integer_is_refused(value: Any, part: str, function: str) -> None:
    f = FUNCTIONS[function]
    state = RngState(1, 2, RANDOM[function])._replace(**{part: value})
    with pytest.raises(ValueError) as caught:  # the whole message is compared
        f.call(**f.given | {"rng_state": state})
    assert str(caught.value) == f"flashbwd: rng_state.{part} {WORDS[value]}"


@pytest.mark.parametrize("function", RANDOM)
@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, 2**63, -(2**63)])
def test_every_64_bit_integer_is_a_seed(seed: int, function: str) -> None:
    f = FUNCTIONS[function]
    as_tensor = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    results = [f.call(**f.given | {"rng_state": (word, 4, RANDOM[function])}) for word in (seed, as_tensor)]
    for of_int, of_tensor in zip(*results, strict=True):
        torch.testing.assert_close(of_int, of_tensor, rtol=0, atol=0)


@pytest.mark.parametrize("function", [name for name, f in FUNCTIONS.items() if "output_mask" in f.kinds])
def test_an_output_mask_of_another_length_is_refused(function: str) -> None:
    f = FUNCTIONS[function]
    for length in range(7):
        try:
            f.call(**f.given, output_mask=(True,) * length)
        except ValueError as error:
            assert str(error).startswith(f"flashbwd: output_mask has {length} elements, expected ")
        else:
            assert len(f.call(**f.given)) - length == ("dropout_add_rms" in function)  # RMSNorm has no dbeta


def test_workspace_of_another_type_is_refused_before_dq_is_written() -> None:
    given = attention_backward_inputs()
    dq = torch.full_like(given["q"], 7.0)
    with pytest.raises(ValueError, match=r"^flashbwd: workspace is 3, expected a tensor or None$"):
        flashbwd.attention_backward(**given, dq=dq, workspace=3)
    assert dq.eq(7.0).all()
