"""How far a gradient may be from the float64 reference.

The rule is FlashAttention's: the largest error is at most twice (three times with softcap) that of a plain PyTorch
computation in the same precision, plus twice what rounding a value near 0.3 in that precision costs. NaN never passes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_FLOAT64_RELATIVE = 1e-11  # the reference is float64 itself, so the rule has nothing to compare with


def bound(expected: Tensor, naive: Iterable[Tensor], dtype: torch.dtype, *, softcap: bool = False) -> float:
    """Largest allowed absolute error of a ``dtype`` result whose float64 reference is ``expected``.

    ``naive`` holds the results of plain PyTorch computations in ``dtype``; the one with the larger error counts.
    """
    if expected.numel() == 0:
        return 0.0
    largest = max(1.0, float(expected.abs().max()))
    if dtype == torch.float64:
        return _FLOAT64_RELATIVE * largest
    rounded = expected.to(dtype)
    noise = float(((rounded + 0.3 - 0.3).double() - expected).abs().max())
    reached = max((float((x.double() - expected).abs().max()) for x in naive), default=0.0)
    return (3 if softcap else 2) * reached + 2 * noise


def assert_within(actual: Tensor, expected: Tensor, limit: float, name: str) -> None:
    """Raise AssertionError, saying where the worst element is, unless |actual - expected| <= limit everywhere."""
    assert actual.shape == expected.shape, (
        f"{name} has shape {tuple(actual.shape)}, the reference {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    got, want = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert bool(want.isfinite().all()), f"the reference of {name} is not finite: the case is ill-posed"
    error = (got - want).abs()
    bad = ~(error <= limit)  # true for NaN too
    if not bool(bad.any()):
        return
    worst = int(torch.where(error.isnan(), torch.inf, error).argmax())
    at = tuple(int(x) for x in torch.unravel_index(torch.tensor(worst), error.shape))
    raise AssertionError(
        f"{name}: error {float(error[at]):.3e} at {at} exceeds {limit:.3e} "
        f"(got {float(got[at]):.6g}, expected {float(want[at]):.6g}); "
        f"{int(bad.sum())} of {bad.numel()} elements are off, {int(got.isnan().sum())} are NaN"
    )


def assert_close(
    actual: Tensor,
    expected: Tensor,
    naive: Iterable[Tensor],
    name: str,
    *,
    dtype: torch.dtype | None = None,
    softcap: bool = False,
) -> None:
    """The rule, for one tensor. ``dtype`` is the precision of the computation (default: of ``actual``)."""
    assert_within(actual, expected, bound(expected, naive, dtype or actual.dtype, softcap=softcap), name)
