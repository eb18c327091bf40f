"""Outputs must not share memory with inputs or each other. The host arithmetic agrees with an enumeration of bytes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import cases, inputs
from kit.host import load_host
from support import TARGETS, Target, arguments_of, run, skip_without_kernels, workspace_of
from torch import Tensor

import flashbwd

host = load_host()
BYTES = {host.DType.kFloat16: 2, host.DType.kFloat32: 4, host.DType.kFloat64: 8}
BASE = 1 << 40

View = tuple[int, tuple[int, ...], tuple[int, ...], Any]  # address, sizes, strides, dtype


@st.composite
def views(draw: st.DrawFn) -> View:
    dims = draw(st.integers(0, 3))
    sizes = tuple(draw(st.integers(0 if dims > 2 else 1, 5)) for _ in range(dims))
    strides = tuple(draw(st.integers(0, 40)) for _ in range(dims))
    dtype = draw(st.sampled_from(list(BYTES)))
    return BASE + draw(st.integers(0, 60)), sizes, strides, dtype


def bytes_of(view: View) -> list[int]:
    """The address of each byte of each element."""
    address, sizes, strides, dtype = view
    indices = itertools.product(*(range(size) for size in sizes))
    first = (sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices)
    return [address + BYTES[dtype] * element + byte for element in first for byte in range(BYTES[dtype])]


@given(views(), views())
def test_views_share_memory_if_and_only_if_they_have_a_common_byte(a: View, b: View) -> None:
    expected = bool(set(bytes_of(a)) & set(bytes_of(b)))
    assert host.share_memory(host.view_of(*a), host.view_of(*b)) == expected
    assert host.share_memory(host.view_of(*b), host.view_of(*a)) == expected


@given(views())
def test_elements_overlap_if_and_only_if_two_have_a_common_byte(view: View) -> None:
    found = bytes_of(view)
    assert host.elements_overlap(host.view_of(*view)) == (len(set(found)) < len(found))


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_adjacent_parts_of_one_buffer_do_not_overlap(order: tuple[int, ...], parts: int) -> None:
    """The views have (2**10, 2**15, 2**5, 2**7) elements, any order of dimensions in memory, and are adjacent."""
    sizes = [1 << 10, 1 << 15, 1 << 5, 1 << 7]
    for cut in range(4):
        whole = list(sizes)
        whole[cut] *= parts
        strides, stride = [0] * 4, 1
        for dim in order:
            strides[dim] = stride
            stride *= whole[dim]
        step = 2 * strides[cut] * sizes[cut]
        first, second, last = (
            host.view_of(BASE + n * step, sizes, strides, host.DType.kFloat16) for n in (0, 1, parts - 1)
        )
        assert not host.share_memory(first, second)
        assert not host.share_memory(first, last)
        assert not host.elements_overlap(first)
        shifted = host.view_of(BASE + step - 2 * strides[cut], sizes, strides, host.DType.kFloat16)
        assert host.share_memory(first, shifted)


def test_memory_of_meta_tensors_is_not_shared() -> None:
    view = host.view_of(0, (2, 3), (3, 1), host.DType.kFloat32)
    assert not host.share_memory(view, view)


# ---- attention_backward ----

EVERYTHING = cases.Case(
    "everything", heads=4, seqlens_q=(5, 3), seqlens_k=(7, 2), head_dim=8, head_dim_v=8,
    bias="bhqk", alibi="batch", sink="finite", dlse=True, dropout_p=0.5,
)  # fmt: skip
DENSE = dataclasses.replace(EVERYTHING, seqlens_q=None, seqlens_k=None, seqlen_q=5, seqlen_k=7, key_mask="random")
INPUTS = ("q", "k", "v", "out", "dout", "softmax_lse", "attn_bias", "key_mask", "alibi_slopes", "sink", "dlse",
          "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "rng_state.seed", "rng_state.offset")  # fmt: skip


def with_gradients_around(name: str, output: str) -> dict[str, Any]:
    """Arguments whose input ``name`` lies in the middle of the memory of ``output``."""
    case = DENSE if name == "key_mask" else EVERYTHING
    arguments = arguments_of(inputs.build(case, torch.float32))
    arguments |= {
        "seqused_q": torch.tensor([5, 3], dtype=torch.int32),
        "seqused_k": torch.tensor([7, 2], dtype=torch.int32),
    }
    seed, offset, layout = arguments["rng_state"]
    parts = {"rng_state.seed": torch.tensor([seed]), "rng_state.offset": torch.tensor([offset])}
    moved = parts[name] if name in parts else arguments[name]
    memory = workspace_of(1 << 16, "cpu", fill=0)
    inside = memory[256:][: moved.numel() * moved.element_size()].view(moved.dtype).view(moved.shape)
    inside.copy_(moved)
    parts[name] = inside
    arguments["rng_state"] = flashbwd.RngState(parts.pop("rng_state.seed"), parts.pop("rng_state.offset"), layout)
    arguments |= parts
    if output == "workspace":
        arguments["workspace"] = memory
    else:
        like = arguments[output[1:]]
        arguments[output] = memory[248 : 248 + 4 * like.numel()].view(torch.float32).view(like.shape)
    return arguments


@pytest.mark.parametrize("output", ["dq", "dk", "dv", "workspace"])
@pytest.mark.parametrize("name", INPUTS)
def test_an_output_that_overlaps_an_input_is_refused(name: str, output: str) -> None:
    arguments = with_gradients_around(name, output)
    with pytest.raises(ValueError) as caught:  # the whole message is compared
        flashbwd.attention_backward(**arguments)
    assert str(caught.value) == (
        f"flashbwd: {output} shares its memory with {name}, expected memory of its own: inputs are never written to"
    )


@pytest.mark.parametrize("pair", list(itertools.permutations(["dq", "dk", "dv", "workspace"], 2)))
def test_outputs_that_overlap_each_other_are_refused(pair: tuple[str, str]) -> None:
    arguments = arguments_of(
        inputs.build(cases.Case("e", seqlen_q=5, seqlen_k=5, head_dim=8, head_dim_v=8), torch.float32)
    )
    memory = workspace_of(1 << 16, "cpu", fill=0)
    for n, output in enumerate(pair):
        if output == "workspace":
            arguments[output] = memory if n == 0 else memory[256:]
        else:
            like = arguments[output[1:]]
            arguments[output] = memory[260 * n :][: 4 * like.numel()].view(torch.float32).view(like.shape)
    first, second = sorted(pair, key=["dq", "dk", "dv", "workspace"].index)
    with pytest.raises(ValueError, match=f"^flashbwd: {first} shares its memory with {second}, expected memory of its"):
        flashbwd.attention_backward(**arguments)


def test_an_output_whose_own_elements_overlap_is_refused() -> None:
    arguments = arguments_of(
        inputs.build(cases.Case("e", seqlen_q=5, seqlen_k=5, head_dim=8, head_dim_v=8), torch.float32)
    )
    batch, rows, heads, _ = arguments["q"].shape
    dq = torch.zeros(1000).as_strided((batch, rows, heads, 8), (200, 20, 7, 1))
    with pytest.raises(
        ValueError, match=r"^flashbwd: dq has elements that overlap, expected memory of its own for every"
    ):
        flashbwd.attention_backward(**arguments, dq=dq)


def packed(x: inputs.Inputs, heads_first: bool) -> dict[str, Tensor]:
    """dq, dk and dv as views of one buffer, head beside head or row beside row."""
    q = x.arguments["q"]
    batch, rows, heads, dim = q.shape
    shape = (batch, 3 * heads, rows, dim) if heads_first else (batch, rows, 3 * heads, dim)
    whole = torch.full(shape, torch.nan, dtype=q.dtype, device=q.device)
    return dict(zip(("dq", "dk", "dv"), (whole.transpose(1, 2) if heads_first else whole).chunk(3, 2), strict=True))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_gradients_that_interleave_in_one_packed_buffer_are_right(target: Target, heads_first: bool) -> None:
    device, backend, dtype = target
    skip_without_kernels(target)
    x = inputs.build(
        cases.Case("p", batch=2, heads=2, seqlen_q=33, seqlen_k=33, head_dim=64, head_dim_v=64), dtype, device
    )
    x.check(*run(x, backend, **packed(x, heads_first)))
