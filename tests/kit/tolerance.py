"""The tolerance rule: the largest allowed difference of a gradient from the float64 reference.

The rule is FlashAttention's. The largest error may be at most twice (with softcap three times) that of a plain PyTorch
computation in the same precision, plus twice the error of rounding a value near 0.3 in that precision. Exact arithmetic
on the given, rounded out and LSE also counts as a plain computation. A few roundings of fp32 are added, because sums
are accumulated in fp32. NaN never passes.

The rule applies to each block of 64 rows of each head separately. A single maximum over a whole gradient would hide
errors: under a causal mask, the first rows of dq and the first keys of dk are so large that a limit derived from them
accepts zero for the last ones. In a block of small values, the rounding allowance is that of a value near 0.3 times the
largest value of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
BLOCK_ROWS = 64
_FLOAT64_RELATIVE = 1e-11  # the reference is float64 itself, so the rule has nothing to compare with
_FLOAT32_ROUNDINGS = 32 * torch.finfo(torch.float32).eps
_NEAR = 0.3

# (gradient, largest ratio of error to limit) of each comparison by blocks that passed; conftest.py collects them.
RATIOS: list[tuple[str, float]] = []


def largest_error(expected: Tensor, results: Iterable[Tensor]) -> float:
    """Largest absolute error of several results against one float64 reference."""
    if expected.numel() == 0:
        return 0.0
    return max((float((x.double() - expected).abs().max()) for x in results), default=0.0)


def bound(expected: Tensor, naive_error: float, dtype: torch.dtype, *, softcap: bool = False) -> float:
    """Largest allowed absolute error of a ``dtype`` result whose float64 reference is ``expected``.

    ``naive_error`` is the largest error of plain PyTorch computations in ``dtype``.
    """
    if expected.numel() == 0:
        return 0.0
    largest = max(1.0, float(expected.abs().max()))
    if dtype == torch.float64:
        return _FLOAT64_RELATIVE * largest
    noise = float(((expected.to(dtype) + _NEAR - _NEAR).double() - expected).abs().max())
    return (3 if softcap else 2) * naive_error + 2 * noise + _FLOAT32_ROUNDINGS * largest


def in_blocks(x: Tensor, gradient: str) -> Tensor:
    """The elements of a gradient as (..., elements): one block per 64 rows of each head, the last one zero-padded.

    Rows of dq, dk and dv (..., S, H, D) are sequence positions, packed or not. Rows of dbias (B, H, Sq, Sk) are
    queries. Any other gradient is a single block.
    """
    if gradient in ("dq", "dk", "dv"):
        x = x.transpose(-3, -2)
    elif gradient != "dbias":
        return x.reshape(1, -1)
    missing = -x.shape[-2] % BLOCK_ROWS
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (x.shape[-2] // BLOCK_ROWS, BLOCK_ROWS)).flatten(-2)


@dataclass(frozen=True)
class Blocks:
    """The reference of a gradient, and the tolerance rule for each of its blocks."""

    gradient: str
    expected: Tensor  # float64
    dtype: torch.dtype
    softcap: bool = False

    def distinct(self) -> Tensor:
        """Number of different values in each block. Hidden rows are zero, and a constant dout makes columns equal."""
        ordered = in_blocks(self.expected, self.gradient).sort(-1).values
        return 1 + (ordered[..., 1:] != ordered[..., :-1]).sum(-1)

    def largest(self) -> Tensor:
        """Largest absolute value of each block."""
        return in_blocks(self.expected, self.gradient).abs().amax(-1)

    def errors(self, results: Iterable[Tensor]) -> Tensor:
        """Largest absolute error of several results in each block."""
        reached = torch.zeros((), dtype=torch.float64, device=self.expected.device)
        for x in results:
            difference = in_blocks(x.double() - self.expected, self.gradient)
            reached = reached.maximum(difference.abs().amax(-1))
        return reached

    def limits(self, naive_errors: Tensor) -> Tensor:
        """Largest allowed absolute error in each block, given the errors of plain computations in each block."""
        expected, largest = in_blocks(self.expected, self.gradient), self.largest()
        floor = float(self.expected.abs().max().clamp(min=1.0))
        if self.dtype == torch.float64:
            return torch.full_like(largest, _FLOAT64_RELATIVE * floor)
        near = (_NEAR * largest).to(self.dtype)[..., None]
        rounded = expected.to(self.dtype)
        noise = torch.minimum(
            ((rounded + _NEAR - _NEAR).double() - expected).abs().amax(-1),
            ((rounded + near - near).double() - expected).abs().amax(-1),
        )
        return (3 if self.softcap else 2) * naive_errors + 2 * noise + _FLOAT32_ROUNDINGS * floor

    def exceeded(self, actual: Tensor, limits: Tensor) -> Tensor:
        """Which blocks have an error that exceeds their limit, or NaN."""
        return ~(self.errors([actual]) <= limits)

    def check(self, actual: Tensor, limits: Tensor) -> None:
        """Raise AssertionError with the position of the worst element if the error of a block exceeds its limit."""
        if self.expected.numel() == 0:
            return
        assert bool(self.expected.isfinite().all()), (
            f"the reference of {self.gradient} is not finite: the case is ill-posed"
        )
        errors = self.errors([actual])
        limits = limits.expand(errors.shape)
        over = torch.where(errors == 0, 0.0, errors / limits)
        bad = ~(errors <= limits)
        if not bool(bad.any()):
            RATIOS.append((self.gradient, float(over.max())))
            return
        worst = int(torch.where(over.isnan(), torch.inf, over).argmax())
        limit = float(limits.flatten()[worst])
        inside = in_blocks((actual.double() - self.expected).abs(), self.gradient).flatten(0, -2)
        outside = torch.arange(inside.shape[0], device=inside.device) != worst
        self._raise(actual, inside.masked_fill(outside[:, None], 0.0), limit, f"{int(bad.sum())} of {bad.numel()}")

    def _raise(self, actual: Tensor, error: Tensor, limit: float, share: str) -> None:
        """``error`` is (blocks, elements), and zero outside of the worst block."""
        flat = torch.arange(self.expected.numel(), dtype=torch.float64, device=error.device).view(self.expected.shape)
        worst = int(torch.where(error.isnan(), torch.inf, error).argmax())
        at = int(in_blocks(flat, self.gradient).flatten()[worst])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), self.expected.shape))
        raise AssertionError(
            f"{self.gradient}: error {float(error.flatten()[worst]):.3e} at {index} exceeds {limit:.3e} (got "
            f"{float(actual[index]):.6g}, expected {float(self.expected[index]):.6g}); {share} blocks of "
            f"{BLOCK_ROWS} rows of a head are off, {int(actual.isnan().sum())} elements are NaN"
        )


def assert_within(actual: Tensor, expected: Tensor, limit: float, name: str) -> None:
    """Raise AssertionError with the position of the worst element unless |actual - expected| <= limit everywhere."""
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
    """Apply the rule to a whole tensor. ``dtype`` is the precision of the computation (default: of ``actual``)."""
    limit = bound(expected, largest_error(expected, naive), dtype or actual.dtype, softcap=softcap)
    assert_within(actual, expected, limit, name)
