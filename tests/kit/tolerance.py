"""How far a gradient may be from the float64 reference.

The rule is FlashAttention's: the largest error is at most twice (three times with softcap) that of a plain PyTorch
computation in the same precision, plus twice what rounding a value near 0.3 in that precision costs. NaN never passes.
What exact arithmetic makes of the given, rounded out and LSE counts as a plain computation too. To that come a few
roundings of fp32, in which sums are accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_FLOAT64_RELATIVE = 1e-11  # the reference is float64 itself, so the rule has nothing to compare with
_FLOAT32_ROUNDINGS = 32 * torch.finfo(torch.float32).eps


def largest_error(expected: Tensor, results: Iterable[Tensor]) -> float:
    """Largest absolute error of several results of one float64 reference."""
    if expected.numel() == 0:
        return 0.0
    return max((float((x.double() - expected).abs().max()) for x in results), default=0.0)


def bound(expected: Tensor, naive_error: float, dtype: torch.dtype, *, softcap: bool = False) -> float:
    """Largest allowed absolute error of a ``dtype`` result whose float64 reference is ``expected``.

    ``naive_error`` is what plain PyTorch computations in ``dtype`` reach.
    """
    if expected.numel() == 0:
        return 0.0
    largest = max(1.0, float(expected.abs().max()))
    if dtype == torch.float64:
        return _FLOAT64_RELATIVE * largest
    noise = float(((expected.to(dtype) + 0.3 - 0.3).double() - expected).abs().max())
    return (3 if softcap else 2) * naive_error + 2 * noise + _FLOAT32_ROUNDINGS * largest


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
    limit = bound(expected, largest_error(expected, naive), dtype or actual.dtype, softcap=softcap)
    assert_within(actual, expected, limit, name)
