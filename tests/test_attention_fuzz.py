"""Random combinations of all features of attention_backward agree with the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kit import cases, inputs, support_matrix_short
from support import TARGETS, Target, refusal, run, skip_without_kernels


def case_for(backend: str, case: cases.Case) -> cases.Case:
    return support_matrix_short.nearest_case(case) if backend == "short" else case


@pytest.mark.parametrize("target", TARGETS)
@given(case=cases.any_case(), seed=st.integers(0, 1000))
@example(case=cases.BY_NAME["dense_seqused"], seed=0)
def test_random_cases_agree_with_the_oracle(target: Target, case: cases.Case, seed: int) -> None:
    skip_without_kernels(target)
    device, backend, dtype = target
    x = inputs.build(case_for(backend, case), dtype, device, seed)
    assume(refusal(x, backend) is None)
    x.check(*run(x, backend))


@given(case=cases.any_case(max_seqlen=200, max_head_dim=20), seed=st.integers(0, 1000))
def test_random_longer_cases_agree_with_the_oracle(case: cases.Case, seed: int) -> None:
    x = inputs.build(case, torch.float64, seed=seed)
    x.check(*run(x, "reference"))


@pytest.mark.parametrize("target", TARGETS)
@given(case=cases.any_case(), seed=st.integers(0, 1000))
def test_random_cases_fill_given_outputs(target: Target, case: cases.Case, seed: int) -> None:
    skip_without_kernels(target)
    device, backend, dtype = target
    x = inputs.build(case_for(backend, case), dtype, device, seed)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    given_outputs = {
        "dq": torch.full(x.arguments["q"].shape, torch.nan, dtype=wide, device=device),
        "dk": inputs.lay_out(x.case.layout, torch.full(x.arguments["k"].shape, torch.nan, dtype=dtype, device=device)),
        "dv": torch.full(x.arguments["v"].shape, torch.nan, dtype=wide, device=device),
    }
    assume(refusal(x, backend, **given_outputs) is None)
    x.check(*run(x, backend, **given_outputs))
