"""The records of results: their JSON file, whether they reach the bars, and the comparison of two files."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashbwd.bench.cases import (
    ANY_PEER,
    BLOCK,
    BLOCK_COMPILED,
    COPY,
    TORCH_BLOCK,
    TORCH_BLOCK_COMPILED,
    VARIANTS,
    Bar,
)

SCHEMA = 1

OK = "ok"  # correct and timed
WRONG = "wrong"  # timed, but a gradient differs from the reference
UNSUPPORTED = "unsupported"  # the peer does not support the case
FAILED = "failed"  # the peer raised

# The three times of a peer: in short slots after pauses; with a settled clock; without a CUDA graph.
COOL, SUSTAINED, EAGER = "times_ms", "sustained_ms", "eager_ms"


@dataclass
class PeerResult:
    """One peer on one case.

    ``times_ms``, ``sustained_ms`` and ``eager_ms`` have one value per round; the last two are empty if they were not
    measured. ``joules`` is the energy of one call in the slots of ``sustained_ms``. ``energy_error`` is the largest
    error of each of these values because of the interval of the GPU's counter, as a fraction. ``errors`` is
    ||g - ref|| / ||ref|| of each gradient on the checked slices. ``work`` is the work of one call in FLOPs or bytes.
    """

    status: str
    reason: str = ""
    times_ms: list[float] = field(default_factory=list)
    method: str = ""
    host_us: float | None = None
    work: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    extra_bytes: int | None = None
    workspace_bytes: int | None = None
    plan: str = ""
    refusals: dict[str, str] = field(default_factory=dict)
    eager_ms: list[float] = field(default_factory=list)
    sustained_ms: list[float] = field(default_factory=list)
    first_ms: float | None = None  # the first call, with compilation and the lists of its mask
    joules: list[float] = field(default_factory=list)
    energy_error: list[float] = field(default_factory=list)

    @property
    def timed(self) -> bool:
        return self.status in (OK, WRONG) and bool(self.times_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        return (max(self.times_ms) - min(self.times_ms)) / self.median_ms

    def has(self, figure: str) -> bool:
        return self.timed and bool(getattr(self, figure))

    def rates(self, figure: str = COOL) -> list[float]:
        """Return the work per millisecond in each round."""
        return [self.work / time for time in getattr(self, figure)]


@dataclass
class CaseResult:
    """All peers on one case. ``ceilings`` are the upper bounds measured in the same process."""

    name: str
    table: str
    unit: str
    tolerance: float
    case: dict[str, Any]
    peers: dict[str, PeerResult]
    bars: list[Bar]
    ceilings: dict[str, float]
    input_sets: int = 1

    def rate(self, peer: str, figure: str = COOL) -> float:
        """Return the median rate of a peer, in ``unit``."""
        scale = 1e9 if self.unit == "TFLOP/s" else 1e6
        return statistics.median(self.peers[peer].rates(figure)) / scale

    def ratio(self, ours: str, over: str, figure: str = COOL) -> Ratio | None:
        """Return the speed of one peer over the fastest correct variant of another; None if either is missing."""
        a, others = self.peers.get(ours), [self.peers.get(name) for name in VARIANTS.get(over, (over,))]
        right = [peer for peer in others if peer is not None and peer.status == OK and peer.has(figure)]
        if a is None or not a.has(figure) or not right:
            return None
        b = max(right, key=lambda peer: statistics.median(peer.rates(figure)))
        return Ratio.of([x / y for x, y in zip(a.rates(figure), b.rates(figure), strict=True)])

    def host_ratio(self, name: str) -> float | None:
        """Return the host time of a peer over the least of PyTorch's operators; None if either was not measured.

        PyTorch's compiled flex_attention counts if no operator computes the case. Blocks are compared with the same
        kind of model.
        """
        measured = {peer: found.host_us for peer, found in self.peers.items() if found.host_us is not None}
        same = {BLOCK: TORCH_BLOCK, BLOCK_COMPILED: TORCH_BLOCK_COMPILED}.get(name)
        others = [peer for peer in measured if peer.startswith("torch") and same in (None, peer)]
        others = others or [peer for peer in measured if peer.startswith("flex")]
        if name not in measured or not others:
            return None
        return measured[name] / min(measured[peer] for peer in others)

    def energy_ratio(self, name: str) -> Ratio | None:
        """Return the joules of a peer over those of the fastest foreign peer; None if they were not measured."""
        fastest = self.fastest_peer(SUSTAINED)
        if fastest is None or not self.peers[name].joules or not self.peers[fastest].joules:
            return None
        pairs = zip(self.peers[name].joules, self.peers[fastest].joules, strict=True)
        return Ratio.of([ours / others for ours, others in pairs])

    def fastest_peer(self, figure: str = COOL) -> str | None:
        """Return the fastest peer with correct gradients that does not belong to this library."""
        others = [
            name
            for name, peer in self.peers.items()
            if peer.status == OK and peer.has(figure) and not name.startswith("flashbwd") and name != COPY
        ]
        return max(others, key=lambda name: self.rate(name, figure), default=None)

    def verdict(self, bar: Bar) -> Verdict:
        """Return whether a bar is reached. Times with a settled clock decide if they were measured."""
        ours = self.peers.get(bar.ours)
        if ours is None or not ours.timed:
            return Verdict(bar, None, None)
        if bar.over == self.unit:
            rate = self.rate(bar.ours, SUSTAINED if ours.has(SUSTAINED) else COOL)
            value: Ratio | None = Ratio(rate, rate, rate)
        else:
            value = self._ratio_of(bar, SUSTAINED) or self._ratio_of(bar, COOL)
        if value is None:
            return Verdict(bar, None, None)
        return Verdict(bar, value, ours.status == OK and value.median >= bar.at_least)

    def _ratio_of(self, bar: Bar, figure: str) -> Ratio | None:
        over = self.fastest_peer(figure) if bar.over == ANY_PEER else bar.over
        return None if over is None else self.ratio(bar.ours, over, figure)


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, with the smallest and the largest value."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        return Ratio(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.median:.4g}"
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


@dataclass(frozen=True)
class Verdict:
    """Whether a bar was reached; ``passed`` is None if it could not be measured."""

    bar: Bar
    value: Ratio | None
    passed: bool | None


@dataclass
class Report:
    """One run of a suite."""

    suite: str
    date: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    results: list[CaseResult] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    def by_name(self) -> dict[str, CaseResult]:
        return {f"{result.table}: {result.name}": result for result in self.results}

    def wrong(self) -> list[str]:
        """Return the gradients of this library that are wrong or could not be computed."""
        return [
            f"{result.name}, {name}: {peer.status}, {peer.reason}"
            for result in self.results
            for name, peer in result.peers.items()
            if name.startswith("flashbwd") and peer.status in (WRONG, FAILED)
        ]

    def save(self, path: Path) -> None:
        """Write the JSON file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        os.replace(part, path)


def load(path: Path) -> Report:
    """Read a file that ``Report.save`` wrote.

    Raises
    ------
    ValueError
        If the file is not a result file, or has another schema.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"flashbwd: {path} has schema {data['schema']}, expected {SCHEMA}")
        results = [
            CaseResult(
                **{
                    **result,
                    "peers": {name: PeerResult(**peer) for name, peer in result["peers"].items()},
                    "bars": [Bar(**bar) for bar in result["bars"]],
                }
            )
            for result in data.pop("results")
        ]
        return Report(results=results, **data)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"flashbwd: {path} is not a file of benchmark results: {error!r}") from error


@dataclass(frozen=True)
class Change:
    """One peer on one case in two runs.

    ``change`` is the new rate over the old rate. ``relative`` is the same ratio after each rate is divided by the rate
    of the fastest foreign peer in the same run, so it can be compared across days and cards. ``significant`` says
    whether ``relative`` (or ``change`` if ``relative`` is None) differs from 1 by more than the sum of both spreads.
    """

    case: str
    peer: str
    unit: str
    old: float
    new: float
    change: float
    relative: float | None
    significant: bool


def compare(old: Report, new: Report) -> list[Change]:
    """Compare every peer and case that both runs timed, in the order of ``new``."""
    changes = []
    before = old.by_name()
    for key, now in new.by_name().items():
        then = before.get(key)
        if then is None:
            continue
        anchor = now.fastest_peer()
        if anchor is not None and not (anchor in then.peers and then.peers[anchor].timed):
            anchor = None
        for name, peer in now.peers.items():
            earlier = then.peers.get(name)
            if earlier is None or not earlier.timed or not peer.timed:
                continue
            change = now.rate(name) / then.rate(name)
            relative = None
            if anchor is not None and anchor != name:
                relative = change / (now.rate(anchor) / then.rate(anchor))
            moved = abs((change if relative is None else relative) - 1)
            changes.append(
                Change(
                    key,
                    name,
                    now.unit,
                    then.rate(name),
                    now.rate(name),
                    change,
                    relative,
                    moved > peer.spread + earlier.spread,
                )
            )
    return changes
