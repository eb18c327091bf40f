"""The record of a test run on a GPU: passed tests and refusals, the kernel sources, and the device.

``benchmarks/gpu_run.py`` writes such records. ``scripts/check_release.py`` reads the records in
``benchmarks/acceptance/``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashbwd.bench import machine

STAGES = ("tests", "sanitizer")
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Reasons of skips that leave no case untested: parameters that describe no case (tests/kit/summary.py), tests that need
# several GPUs, and code of a docs page that calls FlashAttention's own package.
HARMLESS_SKIP = re.compile(r"no such case: |needs \d+ GPUs|needs the package flash_attn")

Json = dict[str, Any]


def record(here: Json, select: str, outcomes: dict[str, Json], summaries: dict[str, Json], seed: int) -> Json:
    """Return the record of one run.

    Parameters
    ----------
    here
        The machine, as flashbwd.bench.machine describes it, with the hash of the kernel sources.
    select
        The pytest expression that selected tests; empty for a complete run.
    outcomes
        ``status``, ``seconds`` and ``commit`` of each step, by the step's title, "stage: name".
    summaries
        The summary that the test session of each step wrote (tests/kit/summary.py), by the step's title.
    seed
        The seed from which the property tests drew their examples.
    """
    return {
        "machine": here,
        "select": select,
        "seed": seed,
        "stages": {s: _stage(s, outcomes, summaries) for s in STAGES},
    }


def _stage(stage: str, outcomes: dict[str, Json], summaries: dict[str, Json]) -> Json:
    steps = {title: outcome for title, outcome in outcomes.items() if title.startswith(f"{stage}: ")}
    found = [summaries[title] for title in steps if title in summaries]
    ratios: dict[str, dict[str, float]] = {}
    for summary in found:
        for target, worst in summary["error_over_limit"].items():
            of_target = ratios.setdefault(target, {})
            for gradient, ratio in worst.items():
                of_target[gradient] = max(of_target.get(gradient, 0.0), round(ratio, 3))
    return {
        "steps": {title: outcome["status"] for title, outcome in steps.items()},
        "commits": sorted({outcome.get("commit", "") for outcome in steps.values()}),
        "seconds": round(sum(outcome["seconds"] for outcome in steps.values()), 1),
        "counts": _added(summary["counts"] for summary in found),
        "refusals": _added(summary["refusals"] for summary in found),
        "skips": _added(summary["skips"] for summary in found),
        "error_over_limit": ratios,
    }


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def write(out: Path, select: str, outcomes: dict[str, Json], files: dict[str, str], seed: int) -> None:
    """Write the record of the steps in ``outcomes`` if any of them ran tests.

    ``files`` names the summary of each step in the folder ``out``/summaries.
    """
    outcomes = {title: outcome for title, outcome in outcomes.items() if title.split(":")[0] in STAGES}
    if not outcomes:
        return
    paths = {title: out / "summaries" / f"{files[title]}.json" for title in outcomes}
    summaries = {title: json.loads(path.read_text()) for title, path in paths.items() if path.exists()}
    here = machine.describe(machine.default_device()).as_dict()
    device = re.sub(r"[^a-z0-9]+", "-", here["device"].lower()).strip("-")
    path = out / "acceptance" / f"{device}-{(here['kernel_sources'] or 'unknown')[:12]}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record(here, select, outcomes, summaries, seed), indent=1) + "\n")


def problems(found: Json, kernel_sources: str | None) -> list[str]:
    """Return the reasons why a record does not qualify these kernel sources for a release; empty if it does."""
    wrong = []
    if kernel_sources is None or found["machine"]["kernel_sources"] != kernel_sources:
        wrong.append("its kernel sources differ from csrc")
    if found["machine"]["kind"] != "cuda":
        wrong.append("its tests did not run on a GPU")
    if found["select"]:
        wrong.append(f'only tests that match "{found["select"]}" ran')
    for stage in STAGES:
        part = found["stages"][stage]
        if not part["steps"]:
            wrong.append(f"the stage {stage} did not run")
            continue
        wrong += [f"{title}: {status}" for title, status in part["steps"].items() if status != "passed"]
        if part["counts"].get("passed", 0) == 0:
            wrong.append(f"no test of the stage {stage} passed")
        wrong += [f"{stage}: {n} {word}" for word, n in part["counts"].items() if word in ("failed", "error")]
        skips = {reason: n for reason, n in part["skips"].items() if not HARMLESS_SKIP.match(reason)}
        wrong += [f"{stage}: {n} skipped, {reason}" for reason, n in skips.items()]
    tools = found["stages"]["sanitizer"]["steps"]
    wrong += [f"{tool} did not run" for tool in SANITIZER_TOOLS if tools and not any(tool in title for title in tools)]
    return wrong


def load(folder: Path) -> dict[str, Json]:
    """Return the records in a folder, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
