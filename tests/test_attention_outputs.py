"""Outputs and workspaces that the caller passes."""

from __future__ import annotations

import pytest
import torch
from kit import cases, inputs
from support import GPU_TARGETS, TARGETS, Target, arguments_of, run, skip_where_refused, storage_bytes, workspace_of
from torch import Tensor

import flashbwd

CASES = cases.named(
    "layout_contiguous",
    "mask_70x40_True_-1_-1",
    "empty_rows_sink",
    "varlen_seqused",
    "varlen_trailing_rows",
    "varlen_zero_lengths",
    "seqlen_0x5",
    "seqlen_5x0",
    "dense_seqused",
    "rows_batch_3",
)


def nan_like(x: inputs.Inputs, name: str, dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """An output for the gradient of an input, full of NaN, in memory of a layout of the kit."""
    source = x.arguments[name]
    return inputs.lay_out(layout, torch.full(source.shape, torch.nan, dtype=dtype, device=source.device))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wide", [False, True], ids=["same_dtype", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_given_outputs_are_written_and_returned(case: cases.Case, wide: bool, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    of = torch.float32 if wide and dtype.itemsize == 2 else dtype
    outputs = {gradient: nan_like(x, name, of) for gradient, name in (("dq", "q"), ("dk", "k"), ("dv", "v"))}
    skip_where_refused(x, backend, **outputs)
    grads = run(x, backend, **outputs)
    for gradient, tensor in outputs.items():
        assert getattr(grads, gradient) is tensor
    x.check(*grads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("only", ["dq", "dk", "dv"])
def test_a_call_may_give_only_one_of_the_outputs(only: str, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.BY_NAME["heads_4to2"], dtype, device)
    given = nan_like(x, only[1], dtype)
    skip_where_refused(x, backend, **{only: given})
    grads = run(x, backend, poison=False, **{only: given})
    assert getattr(grads, only) is given
    x.check(*grads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["bhsd", "odd_strides", "offset", "every_other_row"])
@pytest.mark.parametrize("name", ["heads_4to2", "varlen_seqused"])
def test_given_outputs_may_be_strided_and_nothing_else_is_written(name: str, layout: str, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.BY_NAME[name], dtype, device)
    outputs = {gradient: nan_like(x, of, dtype, layout) for gradient, of in (("dq", "q"), ("dk", "k"), ("dv", "v"))}
    skip_where_refused(x, backend, **outputs)
    x.check(*run(x, backend, **outputs))
    for tensor in outputs.values():
        values = torch.empty(0, dtype=dtype, device=device).set_(tensor.untyped_storage())
        assert int(values.isnan().sum()) == values.numel() - tensor.numel()


@pytest.mark.parametrize("target", TARGETS)
def test_packed_outputs_are_views_of_one_buffer(target: Target) -> None:
    """dq, dk and dv lie in one tensor, as the backward of a fused projection needs them."""
    device, backend, dtype = target
    x = inputs.build(cases.BY_NAME["layout_packed_qkv"], dtype, device)
    heads = [x.arguments[name].shape[-2] for name in ("q", "k", "v")]
    q = x.arguments["q"]
    packed = torch.full((*q.shape[:2], sum(heads), q.shape[-1]), torch.nan, dtype=dtype, device=device)
    outputs = dict(zip(("dq", "dk", "dv"), packed.split(heads, dim=2), strict=True))
    skip_where_refused(x, backend, **outputs)
    x.check(*run(x, backend, **outputs))
    assert not packed.isnan().any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_given_workspace_of_the_planned_size_is_enough(case: cases.Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        size = flashbwd.plan_attention_backward(**arguments_of(x)).workspace_bytes
    guarded = workspace_of(size + 512, device)
    x.check(*run(x, backend, workspace=guarded[:size]))
    assert bool((guarded[size:] == 0xFF).all())


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_a_workspace_one_byte_short_is_refused(target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.BY_NAME["heads_4to2"], dtype, device)
    skip_where_refused(x, backend)
    with flashbwd.use_backend(backend):
        size = flashbwd.plan_attention_backward(**arguments_of(x)).workspace_bytes
    if size == 0:
        run(x, backend, workspace=workspace_of(0, device))
        return
    short = workspace_of(size - 1, device)
    with pytest.raises(ValueError, match=rf"flashbwd: workspace has {size - 1} bytes, expected at least {size}"):
        run(x, backend, workspace=short)


def test_the_same_workspace_serves_call_after_call() -> None:
    x = inputs.build(cases.BY_NAME["varlen_seqused"], torch.float32)
    workspace = workspace_of(1 << 16, "cpu")
    for _ in range(3):
        x.check(*run(x, workspace=workspace))


def test_a_call_with_a_refused_output_writes_nothing() -> None:
    x = inputs.build(cases.Case("plain"), torch.float32)
    dq, dk = nan_like(x, "q", torch.float32), torch.zeros(1, 2, 3, 4)
    before = storage_bytes(dq)
    with pytest.raises(ValueError, match="dk has shape"):
        run(x, dq=dq, dk=dk)
    assert torch.equal(storage_bytes(dq), before)
