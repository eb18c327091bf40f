"""Every named case on every backend: the gradients and their memory are right, and inputs are not written to."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from kit import cases, inputs
from support import MAIN, TARGETS, Target, run, skip_where_refused, storage_bytes

import flashbwd
from flashbwd import _ops

SOME = cases.with_prefix(
    "layout_", "dout_", "lse_", "packed_", "varlen_", "dense_", "bias_bhqk", "sink", "dropout_flash"
)


def is_needed(case: cases.Case, target: Target) -> bool:
    """Cases with more work tiles than a GPU has SMs take seconds on a CPU, where one dtype is enough."""
    device, _, dtype = target
    return device != "cpu" or not case.name.startswith("many_") or dtype == torch.float32


CALLS = [
    pytest.param(case, *target.values, id=f"{case}-{target.id}", marks=target.marks)
    for case, target in itertools.product(cases.CASES, TARGETS)
    if is_needed(case, *target.values)
]


@pytest.mark.parametrize(("case", "target"), CALLS)
def test_gradients_agree_with_the_oracle(case: cases.Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    x.check(*run(x, backend))
    x.check(*run(x, backend, poison=False))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_inputs_are_not_written_to(case: cases.Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    before = {name: storage_bytes(tensor) for name, tensor in x.tensors().items()}
    run(x, backend)
    for name, tensor in x.tensors().items():
        assert torch.equal(storage_bytes(tensor), before[name]), name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_gradients_have_shape_dtype_and_strides_of_empty_like(case: cases.Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    grads = run(x, backend, poison=False)
    pairs = {"dq": "q", "dk": "k", "dv": "v", "dbias": "attn_bias", "dsink": "sink"}
    for gradient, of in pairs.items():
        actual, source = getattr(grads, gradient), x.arguments[of]
        if source is None:
            assert actual is None, gradient
            continue
        like = torch.empty_like(source)
        expected = (like.shape, like.dtype, like.stride(), like.device)
        assert (actual.shape, actual.dtype, actual.stride(), actual.device) == expected, gradient


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case",
    cases.named("varlen_seqused", "varlen_trailing_rows", "dense_seqused", "empty_rows_lse_inf", "varlen_zero_lengths"),
    ids=str,
)
def test_gradients_of_unused_rows_and_keys_are_exactly_zero(case: cases.Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    grads = run(x, backend)
    blind = x.reference.empty.any(dim=-2)  # a row is blind for all heads or for none: (total_q,) or (B, Sq)
    assert bool(blind.any())
    assert not grads.dq[blind.to(device)].any()
    for name in ("dk", "dv"):
        unseen = (getattr(x.reference, name) == 0).all(-1).all(-1)
        assert not getattr(grads, name)[unseen.to(device)].any(), name
    if grads.dbias is not None:
        assert not grads.dbias[(x.reference.dbias == 0).to(device)].any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [*cases.with_prefix("bias_", "varlen_bias", "rows_"), cases.BY_NAME["dense_seqused"]], ids=str
)
def test_dq_dk_and_dv_are_right_without_the_gradient_of_the_bias(
    case: cases.Case, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)

    call = _ops.call
    monkeypatch.setattr(_ops, "call", lambda *args, **kwargs: call(*args, **kwargs, need_dbias=False))
    skip_where_refused(x, backend, need_dbias=False)
    grads = run(x, backend)
    assert grads.dbias is not None
    assert grads.dbias.numel() == 0
    x.check(*grads[:3], x.reference.dbias, grads.dsink)


@pytest.mark.parametrize("target", TARGETS)
def test_scores_far_from_zero_do_not_overflow(target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.Case("large_scores", head_dim=64, softmax_scale=8.0, causal=True), dtype, device)
    skip_where_refused(x, backend)
    grads = run(x, backend)
    x.check(*grads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["mask_40x70_True_-1_-1", "varlen_many", "bias_bhqk", "dropout_flash_bias_softcap"])
def test_deterministic_runs_agree_bitwise(name: str, target: Target) -> None:
    device, backend, dtype = target
    case = dataclasses.replace(cases.BY_NAME[name], deterministic=True)
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    first = run(x, backend)
    for _ in range(5):
        for a, b in zip(first, run(x, backend), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", ["dout_expanded_scalar", "dout_expanded_row"])
def test_an_expanded_dout_equals_its_copy(name: str) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.float32)
    dout = x.arguments["dout"]
    assert 0 in dout.stride()
    for a, b in zip(run(x), run(x, dout=dout.contiguous()), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_positional_arguments_and_results_have_the_documented_order() -> None:
    x = inputs.build(cases.Case("plain"), torch.float32)
    by_position = flashbwd.attention_backward(*(x.arguments[name] for name in MAIN))
    assert by_position._fields == ("dq", "dk", "dv", "dbias", "dsink")
    assert by_position.dbias is None
    assert by_position.dsink is None
    x.check(*by_position)


def test_the_reference_allocates_no_score_matrix() -> None:
    """1 x 1 x 12288 x 12288 scores in fp32 are 576 MiB; a process may not grow by half of that."""
    program = """
import resource, torch, flashbwd
x = {name: torch.zeros(1, 12288, 1, 8) for name in ("dout", "q", "k", "v", "out")}
lse = torch.full((1, 1, 12288), 9.4)
small = {name: tensor[:, :64].contiguous() for name, tensor in x.items()}
flashbwd.attention_backward(**small, softmax_lse=lse[..., :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
flashbwd.attention_backward(**x, softmax_lse=lse)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""
    grown = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert grown < 12288**2 * 4 / 2
