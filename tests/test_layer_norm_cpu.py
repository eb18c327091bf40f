"""The C++ loops of the norms on CPUs convert 16-bit numbers as PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashbwd

NARROW = [torch.bfloat16, torch.float16]


def every_number(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit dtype, including infinities and NaN."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """Equal element by element, where NaN equals NaN."""
    assert actual.dtype == expected.dtype
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    assert not different.any(), (actual[different][:8], expected[different][:8])


@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_number_is_read_and_written_unchanged(dtype: torch.dtype) -> None:
    """With dz = 0, dx is the gradient of the residual connection."""
    numbers = every_number(dtype).view(16, -1)
    x = torch.ones_like(numbers)
    dx, _ = flashbwd.rms_norm_backward(torch.zeros_like(x), x, torch.ones(16), dresidual=numbers)
    assert dx is not None
    assert_same_numbers(dx, numbers)


@pytest.mark.parametrize("dtype", NARROW)
def test_results_round_to_16_bits_as_torch_rounds(dtype: torch.dtype) -> None:
    """With one row, x = 1 and rs = 1, dgamma is dz. Its values are 16-bit numbers and numbers between them."""
    numbers = every_number(dtype).float()
    finite = numbers[numbers.isfinite()].sort().values
    middles = (finite[1:].double() + finite[:-1].double()).div_(2).float()  # ties
    largest = torch.finfo(torch.float32).max
    beyond = torch.tensor([largest, -largest, torch.inf, -torch.inf, torch.nan, 2.0**-40, 65519.0, 65520.0, 65521.0])
    around = [middles, middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))]
    dz = torch.cat([numbers, *around, beyond]).view(1, -1)
    x = torch.ones_like(dz, dtype=dtype)
    _, dgamma = flashbwd.rms_norm_backward(dz, x, torch.ones(1), x[0], output_mask=(False, True))
    assert dgamma is not None
    assert_same_numbers(dgamma, dz[0].to(dtype))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_dgamma_counts_every_row_once(rows: int) -> None:
    """The loops add up blocks of 32 rows, the last of which may be shorter."""
    x, one = torch.ones(rows, 3), torch.ones(rows)
    grads = flashbwd.layer_norm_backward(x, x, torch.zeros(rows), one, torch.ones(3))
    assert grads.dgamma is not None and grads.dbeta is not None
    assert grads.dgamma.tolist() == grads.dbeta.tolist() == [rows] * 3
