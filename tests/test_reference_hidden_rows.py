"""The reference backend finds rows for which a bias hides every key, whatever their LSE is."""

from __future__ import annotations

import pytest
import torch
from kit import cases, inputs
from support import run

from flashbwd.reference.scores import sees_nothing


@pytest.mark.parametrize("lse", [0.0, 5.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["bias_hides_rows", "bias_hides_rows_sink"])
def test_the_lse_of_a_hidden_row_changes_no_gradient(name: str, lse: float) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.float64)
    hidden = (x.arguments["attn_bias"] == -torch.inf).all(-1)  # (B, H, Sq)
    assert hidden.any()
    given = x.arguments["softmax_lse"].masked_fill(hidden, lse)
    x.check(*run(x, "reference", softmax_lse=given))


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, -(2.0**24)), (torch.float64, -(2.0**53))], ids=str)
def test_an_lse_whose_last_bit_exceeds_1_marks_a_row_without_keys(dtype: torch.dtype, least: float) -> None:
    lse = torch.tensor([torch.inf, -torch.inf, 2 * least, least, least + 1, 0.0, -least], dtype=dtype)
    assert sees_nothing(lse).tolist() == [True, True, True, True, False, False, False]
