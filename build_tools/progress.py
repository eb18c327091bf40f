"""Runs ninja and shows which unit was compiled and how long the rest of the build will take.

The estimate starts from the CPU seconds in build_tools/budget.json. While the build runs, the times of the finished
units correct it, so it is also right on a faster machine or with a compiler cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HOST_SECONDS = 4.0  # CPU seconds of a C++ unit; the budget contains only CUDA units
_EDGE = re.compile(r"\[\d+/\d+\] (g\+\+|nvcc|link) (\S+)$")


@dataclass(frozen=True)
class Limits:
    """The number of jobs that run at the same time, and the number of nvcc jobs among them."""

    jobs: int
    nvcc_jobs: int


def unit_seconds(budget: Path, shares: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU seconds of each CUDA unit. ``shares`` is the fraction of its GPU targets that are compiled."""
    units = json.loads(budget.read_text())["units"]
    return {name: units[name]["cpu_seconds"] * share for name, share in shares.items() if name in units}


def wall_seconds(units: Iterable[str], seconds: Mapping[str, float], limits: Limits) -> float:
    """Estimate the time of a build: the time of its longest unit or, if that is longer, its work per parallel job."""
    costs = {unit: seconds.get(unit, HOST_SECONDS) for unit in units}
    cuda = [cost for unit, cost in costs.items() if unit.endswith(".cu")]
    return max(
        max(costs.values(), default=0.0),
        sum(costs.values()) / limits.jobs,
        sum(cuda) / limits.nvcc_jobs,
    )


def in_words(seconds: float) -> str:
    """Format a duration: in steps of ten seconds up to two minutes, otherwise in minutes."""
    if seconds < 120:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{round(seconds / 60)} min"


class Progress:
    """Adds the remaining time of the build to ninja's lines."""

    def __init__(self, units: Iterable[str], seconds: Mapping[str, float], limits: Limits) -> None:
        self._left = dict.fromkeys(units)  # in order, without duplicates
        self._count = len(self._left)
        self._seconds, self._limits = seconds, limits
        self._expected = self._estimate()
        self._start = time.monotonic()

    def _estimate(self) -> float:
        return wall_seconds(self._left, self._seconds, self._limits)

    def announcement(self) -> str:
        """Return what the build will compile, and how long it will take at most."""
        if not self._left:
            return "everything is up to date"
        kernels = sum(unit.endswith(".cu") for unit in self._left)
        what = [f"{kernels} CUDA units"] * (kernels > 0) + [f"{self._count - kernels} C++ units"] * (
            self._count > kernels
        )
        bound = f" (at most {self._limits.nvcc_jobs} of nvcc)" if kernels else ""
        cores = f"{self._limits.jobs} jobs{bound}"
        return f"compiling {' and '.join(what)} with {cores}: about {in_words(self._expected)}"

    def line(self, text: str) -> str:
        """Return a line of ninja's output, with the remaining time if it reports a finished unit."""
        match = _EDGE.match(text)
        if match is None or match[1] == "link":
            return text
        self._left.pop(match[2], None)
        done = self._count - len(self._left)
        elapsed = time.monotonic() - self._start
        # The ratio of the elapsed time to the expected time of the finished units is the speed of this machine.
        finished = self._expected - self._estimate()
        speed = elapsed / finished if finished > 0.1 * self._expected else 1.0
        rest = f", about {in_words(speed * self._estimate())} left" if self._left else ""
        return f"[{done}/{self._count}] {match[1]} {match[2]}{rest}"


def outdated(command: list[str], folder: Path) -> list[str]:
    """Return the sources that ninja would compile now."""
    dry = subprocess.run([*command, "-n"], cwd=folder, capture_output=True, text=True, check=False, env=_environment())
    edges = (_EDGE.match(line) for line in dry.stdout.splitlines())
    return [edge[2] for edge in edges if edge and edge[1] != "link"]


def run_ninja(command: list[str], folder: Path, seconds: Mapping[str, float], limits: Limits) -> int:
    """Run ninja, show its progress, and return its exit status."""
    progress = Progress(outdated(command, folder), seconds, limits)
    print(f"flashbwd: {progress.announcement()}", flush=True)
    with subprocess.Popen(
        command, cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ninja:
        assert ninja.stdout is not None
        for text in ninja.stdout:
            print(progress.line(text.rstrip("\n")), flush=True)
    return ninja.returncode


def _environment() -> dict[str, str]:
    return {**os.environ, "NINJA_STATUS": "[%f/%t] "}
