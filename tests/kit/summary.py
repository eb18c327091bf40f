"""The summary of a test run: counts, refusals, other skips, and the largest ratios of errors to their limits.

``FLASHBWD_TEST_SUMMARY`` names a JSON file to which the summary is written; benchmarks/gpu_run.py adds up these files.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from . import tolerance

DECLARED = "refused as declared: "  # prefix of the skip reason of a case that a backend is expected to refuse
NO_CASE = "no such case: "  # prefix of the skip reason if the parameters describe no case, so nothing could run
PROPERTY = "error_over_limit"

Ratios = dict[str, dict[str, float]]  # "sm90 bfloat16" -> gradient -> largest ratio of an error to its limit


def target_of(item: pytest.Item) -> str:
    """ "backend dtype" of a test, as far as its parameters contain them."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    device, backend, dtype = parameters.get("target", ("", parameters.get("backend", "auto"), parameters.get("dtype")))
    words = ["cpu" if device == "cpu" else "", backend, str(dtype or "").removeprefix("torch.")]
    return " ".join(word for word in words if word)


def take_ratios(item: pytest.Item) -> None:
    """Attach the ratios that the comparisons of a test recorded to the report of the test."""
    worst: dict[str, float] = {}
    for gradient, ratio in tolerance.RATIOS:
        worst[gradient] = max(worst.get(gradient, 0.0), ratio)
    tolerance.RATIOS.clear()
    if worst:
        item.user_properties.append((PROPERTY, {"target": target_of(item), "worst": worst}))


class Summary:
    """Collects test reports; under pytest-xdist, the process that starts the workers gets all reports."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.ratios: Ratios = {}

    def add(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome if report.when == "call" or report.skipped else "error"] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith(DECLARED):
                self.refusals[reason.removeprefix(DECLARED)] += 1
            else:
                self.skips[reason] += 1
        if report.when == "call":
            for name, found in report.user_properties:
                if name == PROPERTY and isinstance(found, dict):
                    of_target = self.ratios.setdefault(found["target"], {})
                    for gradient, ratio in found["worst"].items():
                        of_target[gradient] = max(of_target.get(gradient, 0.0), ratio)

    def table(self) -> list[str]:
        """A table of the largest ratio of an error to its limit by backend, dtype and gradient."""
        gradients = list(tolerance.GRADIENTS)
        width = max([len(target) for target in self.ratios], default=0)
        lines = [" ".join([" " * width, *(f"{gradient:>6}" for gradient in gradients)])]
        for target, worst in sorted(self.ratios.items()):
            cells = (f"{worst[gradient]:6.3f}" if gradient in worst else "     -" for gradient in gradients)
            lines.append(" ".join([f"{target:{width}}", *cells]))
        return lines if self.ratios else []

    def write(self, path: Path, seconds: float) -> None:
        found: dict[str, Any] = {
            "counts": dict(self.counts),
            "refusals": dict(self.refusals),
            "skips": dict(self.skips),
            "seconds": round(seconds, 1),
            "error_over_limit": self.ratios,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
