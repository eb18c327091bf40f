"""A key mask hides keys as if the call did not have them, in the gradients, in the forward and in compiled code."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from kit import cases, inputs
from kit.cases import Case
from support import TARGETS, Target, run, skip_where_refused
from torch import Tensor

import flashbwd
from flashbwd import _forward

DENSE = Case("dense", batch=3, heads=4, heads_kv=2, seqlen_q=70, seqlen_k=150, head_dim=64, head_dim_v=64)
MASKED = [
    dataclasses.replace(DENSE, key_mask="empty", bias="1hqk"),
    dataclasses.replace(DENSE, name="causal", key_mask="empty", causal=True, head_dim=24),
    dataclasses.replace(DENSE, name="softcap_of_wide", key_mask="random", softcap=2.0, head_dim=264, bias="bhqk"),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", MASKED, ids=str)
def test_hidden_keys_get_gradients_of_exactly_zero(case: Case, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(case, dtype, device)
    skip_where_refused(x, backend)
    grads = run(x, backend)
    mask = x.arguments["key_mask"]
    assert not grads.dk[~mask].any()
    assert not grads.dv[~mask].any()
    assert not grads.dq[~mask.any(1)].any()
    if grads.dbias is not None:
        hidden = ~(mask if case.bias == "bhqk" else mask.any(0, keepdim=True))
        assert not grads.dbias[hidden[:, None, None].expand_as(grads.dbias)].any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_of_hidden_keys_do_not_matter(value: float, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(dataclasses.replace(DENSE, key_mask="random", softcap=3.0, dlse=True), dtype, device)
    skip_where_refused(x, backend)
    hidden = ~x.arguments["key_mask"]
    changed = {name: x.arguments[name].clone() for name in ("k", "v")}
    for tensor in changed.values():
        tensor[hidden] = value
    x.check(*run(x, backend, **changed))


@pytest.mark.parametrize("target", TARGETS)
def test_a_mask_that_hides_nothing_changes_no_gradient(target: Target) -> None:
    device, backend, dtype = target
    case = dataclasses.replace(DENSE, bias="1hqk", deterministic=True)
    x = inputs.build(case, dtype, device)
    mask = torch.ones(case.batch, case.seqlen_k, dtype=torch.bool, device=device)
    skip_where_refused(x, backend, key_mask=mask)
    x.check(*run(x, backend, key_mask=mask))


@pytest.mark.parametrize("case", [*MASKED, dataclasses.replace(DENSE, key_mask="empty", sink="finite")], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_the_forward_hides_keys_that_hold_nan(case: Case, target: Target) -> None:
    device, _, dtype = target
    x = inputs.build(case, dtype, device)
    names = ("attn_bias", "key_mask", "causal", "softcap", "sink")
    q, k, v = (x.arguments[name] for name in ("q", "k", "v"))
    out, lse = flashbwd.attention(q, k, v, **{name: x.arguments[name] for name in names}, return_lse=True)
    expected = x.reference
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(out.double().cpu(), expected.out, **tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected.lse, **tolerance)  # -inf in rows without a key
    assert not out.cpu()[expected.empty.transpose(1, 2)].any()


def brute_force(key_mask: Tensor, rows: int, causal: str) -> Tensor:
    offset = {"none": key_mask.shape[1], "top_left": 0, "bottom_right": key_mask.shape[1] - rows}[causal]
    found = [[not bool(mask[: max(i + offset + 1, 0)].any()) for i in range(rows)] for mask in key_mask]
    return torch.tensor(found)


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (3, 5), (7, 7), (5, 9)])
def test_rows_without_keys_are_found(rows: int, keys: int, causal: str) -> None:
    key_mask = torch.rand(20, keys, generator=torch.Generator().manual_seed(keys)) < 0.3
    found = _forward._rows_without_keys(key_mask, rows, causal)
    assert torch.equal(found.expand(-1, rows), brute_force(key_mask, rows, causal))


@pytest.mark.parametrize("bias_shape", [None, (1, 2, 6, 7), (3, 2, 6, 7), (1, 1, 6, 7), (3, 1, 1, 7)])
def test_operands_with_hidden_keys_have_scores_of_minus_infinity(bias_shape: tuple[int, ...] | None) -> None:
    """These operands go to a forward of PyTorch that has no key mask."""
    q, k, v = torch.randn(3, 6, 2, 8), torch.randn(3, 7, 2, 8), torch.randn(3, 7, 2, 8)
    key_mask = torch.rand(3, 7) < 0.6
    bias = None if bias_shape is None else torch.randn(bias_shape)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) + (0.0 if bias is None else bias)
    expected = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    k[~key_mask] = torch.nan
    v[~key_mask] = torch.nan
    new_q, new_k, new_v, new_bias = _forward._hide_keys(q, k, v, bias, key_mask)
    torch.testing.assert_close(torch.einsum("bihd,bjhd->bhij", new_q, new_k) + new_bias, expected)
    assert new_q.shape[-1] % 8 == 0
    assert not new_v[~key_mask].any()
    if bias is not None:
        assert new_bias.numel() <= bias.numel()  # a shared bias is not copied for each batch


def test_an_exported_program_keeps_the_key_mask() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: Tensor, key_mask: Tensor) -> Any:
            return flashbwd.attention(x, x, x, key_mask=key_mask)

    length = torch.export.Dim("length", min=2, max=64)
    x, key_mask = torch.randn(2, 9, 2, 8), torch.rand(2, 9) < 0.5
    shapes = {"x": {1: length}, "key_mask": {1: length}}
    program = torch.export.export(Masked(), (x, key_mask), dynamic_shapes=shapes)
    x, key_mask = torch.randn(2, 20, 2, 8), torch.rand(2, 20) < 0.5
    torch.testing.assert_close(program.module()(x, key_mask), Masked()(x, key_mask))


def test_a_plan_gives_the_reason_why_hopper_refuses_a_key_mask() -> None:
    x = inputs.build(cases.BY_NAME["key_mask_tiles"], torch.bfloat16)
    plan = flashbwd.plan_attention_backward(**x.arguments)
    assert plan.backend == "reference"
    assert plan.reasons["sm80"] == "q is on the CPU"
