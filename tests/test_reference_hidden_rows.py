"""Rows that a bias hides from all keys: the reference backend sees that in the bias, whatever the LSE says."""

from __future__ import annotations

import pytest
import torch
from kit import cases, inputs
from support import run


@pytest.mark.parametrize("lse", [0.0, 5.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["bias_hides_rows", "bias_hides_rows_sink"])
def test_the_lse_of_a_hidden_row_changes_no_gradient(name: str, lse: float) -> None:
    x = inputs.build(cases.BY_NAME[name], torch.float64)
    hidden = (x.arguments["attn_bias"] == -torch.inf).all(-1)  # (B, H, Sq)
    assert hidden.any()
    given = x.arguments["softmax_lse"].masked_fill(hidden, lse)
    x.check(*run(x, "reference", softmax_lse=given))
