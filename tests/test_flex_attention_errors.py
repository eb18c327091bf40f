"""Invalid input of FlexAttention: a table of calls, and the error that each call raises before it computes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import flashbwd

SHAPE = Shape(seqlen_q=40, seqlen_k=40)
Arguments = dict[str, Any]


def causal(**changes: Any) -> BlockMask:
    mask = kit.block_mask(lambda b, h, q, k: q >= k, changes.pop("shape", SHAPE), block=16)
    for name, value in changes.items():
        setattr(mask, name, value)
    return mask


def with_entry(name: str, value: int) -> BlockMask:
    mask = causal()
    getattr(mask, name)[..., 0] = value
    return mask


def transposed() -> BlockMask:
    mask = causal()
    lists = ("num_blocks", "indices")
    of_keys = {name: getattr(mask, f"kv_{name}") for name in lists}
    for name in lists:
        setattr(mask, f"q_{name}", of_keys[name])
    return mask


def with_full_blocks_of_partial_ones() -> BlockMask:
    mask = causal()
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        setattr(mask, f"full_{name}", getattr(mask, name))
    return mask


def reading(name: str) -> Callable[[Arguments], Arguments]:
    def change(call: Arguments) -> Arguments:
        tensor = call[name]
        return {"score_mod": lambda s, b, h, q, k: s + tensor[0, 0, q, 0]}

    return change


def in_place(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    BIAS[h] += 1
    return s + BIAS[h]


def moves_queries(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    q += 1
    return s + q


BIAS = torch.zeros(4)
META = torch.zeros(4, device="meta")

# The change of a valid call, and the words of the error.
BAD: dict[str, tuple[Arguments | Callable[[Arguments], Arguments], str]] = {
    "query_type": ({"query": 3}, "query is 3, expected a tensor"),
    "key_dims": ({"key": torch.zeros(2, 40, 16)}, "key has 3 dimensions, expected 4"),
    "value_dtype": ({"value": torch.zeros(2, 2, 40, 16).half()}, "value is float16, expected query's float32"),
    "key_layout": (
        {"key": torch.zeros(2, 2, 40, 16).to_sparse()},
        "key has layout torch.sparse_coo, expected torch.strided",
    ),
    "nested": (
        {"query": torch.nested.nested_tensor([torch.zeros(4, 40, 16)] * 2)},
        "query is a nested tensor, expected one with strides",
    ),
    "key_device": ({"key": torch.zeros(2, 2, 40, 16, device="meta")}, "key is on meta, expected query's cpu"),
    "heads": ({"enable_gqa": False}, "key has 2 heads, expected query's 4"),
    "deterministic": ({"deterministic": 1}, "deterministic is 1, expected a bool"),
    "scale": ({"scale": "1"}, "scale is '1', expected a number"),
    "scale_of_nan": ({"scale": float("nan")}, "scale is nan, expected a finite number"),
    "mask_type": ({"block_mask": lambda b, h, q, k: q >= k}, "block_mask is a function, expected a BlockMask"),
    "mask_lengths": (
        {"block_mask": causal(shape=Shape(seqlen_q=40, seqlen_k=80))},
        r"block_mask was made for lengths \(40, 80\), expected query's and key's \(40, 40\)",
    ),
    "mask_device": ({"block_mask": causal().to("meta")}, "block_mask.kv_num_blocks is on meta, expected query's cpu"),
    "mask_heads": (
        {"block_mask": causal(shape=Shape(heads=3, seqlen_q=40, seqlen_k=40))},
        r"block_mask.kv_num_blocks has shape \(2, 3, 3\)",
    ),
    "mask_rows": (
        {"block_mask": causal(kv_num_blocks=torch.ones(1, 1, 2, dtype=torch.int32))},
        r"block_mask.kv_num_blocks has shape \(1, 1, 2\), expected 3 blocks",
    ),
    "mask_columns": (
        {"block_mask": causal(q_indices=torch.zeros(1, 1, 2, 3, dtype=torch.int32))},
        r"block_mask.q_indices has shape \(1, 1, 2, 3\), expected 3 blocks",
    ),
    "query_lists_device": (
        {"block_mask": causal(q_indices=torch.zeros(1, 1, 3, 3, device="meta", dtype=torch.int32))},
        "block_mask.q_indices is on meta, expected query's cpu",
    ),
    "keys_beyond": (
        {"block_mask": with_entry("kv_indices", 3)},
        "block_mask.kv_indices names block 3, expected 0 to 2",
    ),
    "keys_before": ({"block_mask": with_entry("kv_indices", -1)}, "block_mask.kv_indices names block -1, expected"),
    "queries_beyond": (
        {"block_mask": with_entry("q_indices", 9)},
        "block_mask.q_indices names block 9, expected 0 to 2",
    ),
    "counts_beyond": ({"block_mask": with_entry("kv_num_blocks", 7)}, "block_mask.kv_num_blocks holds the count 7"),
    "no_q_indices": ({"block_mask": causal(q_indices=None)}, "block_mask.q_indices is None, expected a tensor"),
    "no_kv_indices": ({"block_mask": causal(kv_indices=None)}, "block_mask.kv_indices is None, expected a tensor$"),
    "no_full_query_lists": (
        {"block_mask": causal(full_q_num_blocks=None, full_q_indices=None)},
        "block_mask.full_q_num_blocks is None, expected a tensor, or None for all of full_kv_num_blocks, ",
    ),
    "list_dtype": (
        {"block_mask": causal(kv_indices=torch.zeros(2, 4, 3, 3))},
        "block_mask.kv_indices is float32, expected int32",
    ),
    "list_type": ({"block_mask": causal(kv_indices=[0])}, "block_mask has lists of type list, expected tensors"),
    "mask_mod_type": ({"block_mask": causal(mask_mod=None)}, "block_mask.mask_mod is None, expected a function"),
    "block_size": ({"block_mask": causal(BLOCK_SIZE=(0, 16))}, r"block_mask.BLOCK_SIZE is \(0, 16\), expected a tuple"),
    "block_size_type": ({"block_mask": causal(BLOCK_SIZE=16)}, "block_mask.BLOCK_SIZE is 16, expected a tuple of two"),
    "seq_lengths": (
        {"block_mask": causal(seq_lengths=[40, 40])},
        r"block_mask.seq_lengths is \[40, 40\], expected a tuple of two ints",
    ),
    "other_query_lists": (
        {"block_mask": causal(q_num_blocks=torch.zeros(2, 4, 3, dtype=torch.int32))},
        "block_mask.q_indices and block_mask.kv_indices list different blocks, expected in the lists of queries what",
    ),
    "query_lists_of_equal_length": (
        {"block_mask": transposed()},
        "block_mask.q_indices and block_mask.kv_indices list different blocks",
    ),
    "block_twice": (
        {"block_mask": with_entry("kv_indices", 1)},
        r"block_mask.kv_indices names a block twice in its row \(0, 0, 2\), expected each block at most once",
    ),
    "block_in_both_lists": (
        {"block_mask": with_full_blocks_of_partial_ones()},
        "block_mask.full_kv_indices and block_mask.kv_indices name the same block, expected each block in one of them",
    ),
    "list_shapes": (
        {"block_mask": causal(q_num_blocks=torch.zeros(1, 1, 3, dtype=torch.int32))},
        r"block_mask.q_indices has shape \(2, 4, 3, 3\), expected one row for each element of block_mask.q_num_blocks",
    ),
    "mask_result": (
        {"block_mask": causal(mask_mod=lambda b, h, q, k: q - k)},
        "mask_mod returned int64, expected a bool",
    ),
    "score_mod_type": ({"score_mod": 1}, "score_mod is 1, expected a function or None"),
    "score_shape": ({"score_mod": lambda s, b, h, q, k: s + BIAS}, r"score_mod returned shape \(4,\) for scalars"),
    "score_dtype": ({"score_mod": lambda s, b, h, q, k: q - k}, "score_mod returned int64, expected a floating-point"),
    "score_type": ({"score_mod": lambda s, b, h, q, k: 1.0}, "score_mod returned 1.0, expected a floating-point score"),
    "score_device": (
        {"score_mod": lambda s, b, h, q, k: torch.zeros((), device="meta")},
        "score_mod returned a tensor on meta, expected query's cpu",
    ),
    "reads_query": (reading("query"), "score_mod reads query, expected a function of the score"),
    "reads_key": (reading("key"), "score_mod reads key, expected a function of the score"),
    "in_place": ({"score_mod": in_place}, "score_mod writes to a captured tensor with aten.copy_"),
    "writes_to_an_index": ({"score_mod": moves_queries}, "score_mod writes to q_idx with aten.add_"),
    "writes_to_the_score": (
        {"score_mod": lambda s, b, h, q, k: s.add_(BIAS[h])},
        "score_mod writes to score with",
    ),
    "writes_to_a_view": (
        {"block_mask": causal(mask_mod=lambda b, h, q, k: q.view(1).add_(1)[0] >= k)},
        "mask_mod writes to q_idx with aten.add_",
    ),
    "captured_device": (
        {"score_mod": lambda s, b, h, q, k: s + META[h]},
        "score_mod captures a tensor on meta, expected query's cpu",
    ),
    "both_requests": ({"return_lse": True, "return_aux": AuxRequest()}, "return_lse and return_aux are both given"),
    "request": ({"return_aux": True}, "return_aux is True, expected"),
    "unknown_option": ({"kernel_options": {"BLOCK_X": 1}}, "kernel_options has an unknown key 'BLOCK_X'"),
    "option_type": ({"kernel_options": {1: 2}}, "kernel_options has the key 1, expected a string"),
    "precision": (
        {"kernel_options": {"FLOAT32_PRECISION": "'ieee'"}},
        r"""kernel_options\['FLOAT32_PRECISION'\] is "'ieee'", expected None for float32 inputs""",
    ),
}

OF_THE_FORWARD = {"unknown_option", "both_requests", "request", "option_type", "precision"}
# What flex_decoding does not have or allows: query lists, deterministic, reading the operands.
NOT_OF_DECODING = {name for name in BAD if "quer" in name and name not in ("query_type", "nested")} | {
    *("mask_columns", "no_q_indices", "list_shapes", "deterministic", "reads_key")
}
BAD_GRADIENTS: dict[str, tuple[Arguments, str]] = {
    "dout": ({"dout": torch.zeros(2, 4, 40, 15)}, r"dout has shape \(2, 4, 40, 15\), expected \(2, 4, 40, 16\)"),
    "out": ({"out": None}, "out is None, expected a tensor"),
    "lse": ({"lse": torch.zeros(2, 4, 41)}, r"lse has shape \(2, 4, 41\), expected \(2, 4, 40\)"),
    "lse_dtype": ({"lse": torch.zeros(2, 4, 40).bfloat16()}, "lse is bfloat16, expected float32 for query in float32"),
    "dout_dtype": ({"dout": torch.zeros(2, 4, 40, 16).double()}, "dout is float64, expected float32 for query in"),
    "out_layout": ({"out": torch.zeros(2, 4, 40, 16).to_sparse()}, "out has layout torch.sparse_coo, expected"),
    "dlse": ({"dlse": torch.zeros(2, 4, 40, device="meta")}, "dlse is on meta, expected query's cpu"),
}


def good() -> Arguments:
    query, key, value = (tensor.requires_grad_() for tensor in SHAPE.tensors(torch.float32))
    return {"query": query, "key": key, "value": value, "enable_gqa": True}


@pytest.mark.parametrize("case", sorted(BAD))
def test_the_error_of_flex_attention_names_the_bad_argument(case: str) -> None:
    change, message = BAD[case]
    call = good()
    call |= change(call) if callable(change) else change
    with pytest.raises(ValueError, match=f"^flashbwd: {message}"):
        flashbwd.flex_attention(**call)
    assert not BIAS.any()


@pytest.mark.parametrize("case", sorted(set(BAD) - NOT_OF_DECODING))
def test_the_error_of_flex_decoding_names_the_bad_argument(case: str) -> None:
    change, message = BAD[case]
    call = good()
    call |= change(call) if callable(change) else change
    if case == "list_type":
        message = "block_mask.kv_indices is a list, expected a tensor"
    with pytest.raises(ValueError, match=f"^flashbwd: {message}"):
        flashbwd.flex_decoding(**call)
    assert not BIAS.any()


def test_a_block_size_may_be_a_list() -> None:
    outs = [flashbwd.flex_attention(**good(), block_mask=causal(**change)) for change in ({}, {"BLOCK_SIZE": [16, 16]})]
    assert torch.equal(outs[0], outs[1])  # type: ignore[arg-type]


def test_a_number_of_numpy_is_a_scale() -> None:
    scale = numpy.float32(0.125)
    outs = [flashbwd.flex_attention(**good(), scale=value) for value in (scale, 0.125)]
    assert torch.equal(outs[0], outs[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [flashbwd.flex_attention_backward, flashbwd.plan_flex_attention_backward])
@pytest.mark.parametrize("case", [*sorted(BAD_GRADIENTS), *sorted(set(BAD) - OF_THE_FORWARD)])
def test_the_errors_of_backward_and_plan_name_the_bad_argument(case: str, function: Any) -> None:
    change, message = {**BAD, **BAD_GRADIENTS}[case]
    call = good()
    out, lse = flashbwd.flex_attention(**call, return_lse=True)
    call |= {"dout": out, "out": out, "lse": lse}
    call |= change(call) if callable(change) else change
    with pytest.raises(ValueError, match=f"^flashbwd: {message}"):
        function(**call)


def test_the_error_names_a_modification_that_raises() -> None:
    def broken(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise KeyError("missing")

    with pytest.raises(RuntimeError, match="flashbwd: score_mod failed: 'missing'"):
        flashbwd.flex_attention(**good(), score_mod=broken)


def test_a_mask_may_lack_query_lists_in_a_call_without_gradients() -> None:
    call = {name: value.detach() if isinstance(value, Tensor) else value for name, value in good().items()}
    with torch.no_grad():
        out = flashbwd.flex_attention(**call, block_mask=causal(q_indices=None, q_num_blocks=None))
    assert torch.equal(out, flashbwd.flex_attention(**call, block_mask=causal()))  # type: ignore[arg-type]


def test_a_mask_may_lack_query_lists_if_no_input_requires_a_gradient() -> None:
    flashbwd.flex_attention(*SHAPE.tensors(torch.float32), block_mask=causal(q_indices=None), enable_gqa=True)


def test_a_compiled_call_refuses_a_wrong_value_of_deterministic() -> None:
    compiled = torch.compile(flashbwd.flex_attention, backend="eager")
    with pytest.raises(Exception, match="deterministic is 1, expected a bool"):
        compiled(**good(), deterministic=1)
