"""Checks the last build against the checked-in budget: kernels, registers, spills and CPU seconds of every unit.

A compiler warning in any unit is also a failure.

Usage: check_budget.py [--update]

Reads build/resource_usage.json, which every build writes. The sources and the families in build_tools/native.py
determine which units must exist and for which GPUs each must have kernels. build_tools/budget.json limits the number of
kernels, their registers and spills, and the CPU seconds. --update writes the budget from the last build, which must be
complete and must have run without a compiler cache (CCACHE_DISABLE=1).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_tools import native

ROOT = native.ROOT
REPORT = ROOT / "build" / "resource_usage.json"
BUDGET = ROOT / "build_tools" / "budget.json"
TOTAL_CPU_SECONDS = 40 * 60  # on the machine that wrote the budget
# These units have no kernels; they launch kernels of other units.
HOST_ONLY = {
    "csrc/attention/short/launch.cu",
    "csrc/attention/sm90/head_dim_512/launch.cu",
    "csrc/attention/sm90/launch.cu",
    "csrc/common/tensor_map.cu",
}
# Parallel compilations slow one another down, and start-up dominates the time of a short unit.
SLACK_FACTOR, SLACK_SECONDS = 2.0, 15.0
CALIBRATION = """
#include <functional>
#include <map>
#include <regex>
std::regex expression("(a|b+)[0-9]*");
std::map<std::string, std::function<int(int)>> table;
"""

Row = dict[str, Any]


def required_units() -> dict[str, set[str]]:
    """Return every CUDA source of the tree, with the GPUs for which it must have kernels."""
    units = {}
    for path in sorted((ROOT / "csrc").rglob("*.cu")):
        source = path.relative_to(ROOT)
        targets = next((t for folder, t in native.FAMILIES.values() if source.is_relative_to(folder)), native.PORTABLE)
        units[str(source)] = set() if str(source) in HOST_ONLY else native.machine_targets(targets)
    return units


def row(unit: Row) -> Row:
    """Return the budget line of a unit: kernels, largest register count and total spilled bytes per GPU."""
    by_target: dict[str, list[Row]] = {}
    for kernel in unit["kernels"]:
        by_target.setdefault(kernel["arch"], []).append(kernel)
    return {
        "cpu_seconds": unit["cpu_seconds"],
        "kernels": {target: len(kernels) for target, kernels in by_target.items()},
        "registers": {target: max(kernel["registers"] for kernel in kernels) for target, kernels in by_target.items()},
        "spilled_bytes": {target: sum(kernel["spills"] for kernel in kernels) for target, kernels in by_target.items()},
    }


def missing(rows: dict[str, Row], required: dict[str, set[str]], where: str) -> list[str]:
    """Return units and kernels that ``where`` (the build or the budget) lacks, or has without a source for them."""
    problems = [f"{source}: not in the {where}" for source in sorted(required.keys() - rows.keys())]
    problems += [f"{source}: in the {where}, but no source" for source in sorted(rows.keys() - required.keys())]
    for source in sorted(rows.keys() & required.keys()):
        found = {target for target, count in rows[source]["kernels"].items() if count}
        problems += [f"{source}: no kernels for {t} in the {where}" for t in sorted(required[source] - found)]
        problems += [f"{source}: kernels for {t} in the {where}" for t in sorted(found - required[source])]
    return problems


def slowness(rows: dict[str, Row], budget: dict[str, Row]) -> float:
    """Return the compile time of all units on this machine over their time in the budget, at least 1."""
    shared = rows.keys() & budget.keys()
    allowed = sum(budget[source]["cpu_seconds"] for source in shared)
    return max(1.0, sum(rows[source]["cpu_seconds"] for source in shared) / max(allowed, 1.0))


def compare(source: str, now: Row, allowed: Row, factor: float) -> list[str]:
    """Return the ways in which a unit exceeds its budget. ``factor`` is the result of ``slowness``."""
    problems = []
    for target, count in allowed["kernels"].items():
        if (built := now["kernels"].get(target, 0)) != count:
            problems.append(f"{source}: {built} kernels on {target}, the budget says {count}")
    limit = allowed["cpu_seconds"] * SLACK_FACTOR * factor + SLACK_SECONDS
    if now["cpu_seconds"] > limit:
        problems.append(f"{source}: {now['cpu_seconds']} CPU seconds to compile, the limit is {limit:.0f}")
    for what in ("registers", "spilled_bytes"):
        for target, value in now[what].items():
            if value > allowed[what].get(target, 0):
                problems.append(f"{source}: {value} {what} on {target}, the budget says {allowed[what].get(target, 0)}")
    return problems


def total_problems(units: list[Row], then: float, now: float) -> list[str]:
    """Compare the total time with its limit. The calibration times, ``then`` and ``now``, scale the limit."""
    total, limit = sum(unit["cpu_seconds"] for unit in units), TOTAL_CPU_SECONDS * max(1.0, now / then)
    print(f"{len(units)} units, {total:.0f} CPU seconds of {limit:.0f} (a machine {now / then:.2f} times as slow)")
    return [f"{total:.0f} CPU seconds in all, the limit is {limit:.0f}"] if total > limit else []


def check(units: list[Row], budget: Row, calibration: float) -> list[str]:
    """Return all reasons why the report of a build does not pass."""
    rows = {unit["source"]: row(unit) for unit in units if unit["source"].endswith(".cu")}
    table, required = budget["units"], required_units()
    problems = missing(rows, required, "build") + missing(table, required, "budget")
    host = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")}
    problems += [f"{source}: not in the build" for source in sorted(host - {unit["source"] for unit in units})]
    problems += [f"{unit['source']}: {warning}" for unit in units for warning in unit["warnings"]]
    factor = slowness(rows, table)
    for source in sorted(rows.keys() & table.keys()):
        problems += compare(source, rows[source], table[source], factor)
    return problems + total_problems(units, budget["calibration_seconds"], calibration)


def calibration_seconds() -> float:
    """Measure the speed of this machine: the CPU seconds in which the C++ compiler compiles a fixed program."""
    command = [native.cxx(), "-std=c++17", "-O2", "-x", "c++", "-c", "-o", os.devnull, "-"]
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, input=CALIBRATION, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(min(times), 2)


def update(units: list[Row], calibration: float) -> None:
    rows = {unit["source"]: row(unit) for unit in units if unit["source"].endswith(".cu")}
    if problems := missing(rows, required_units(), "build"):
        sys.exit("\n".join(problems))
    BUDGET.write_text(json.dumps({"calibration_seconds": calibration, "units": rows}, indent=2, sort_keys=True) + "\n")


def main() -> None:
    units = json.loads(REPORT.read_text())
    calibration = calibration_seconds()
    if "--update" in sys.argv[1:]:
        update(units, calibration)
    print(f"{'unit':60} {'CPU s':>6}  kernels, registers, spilled bytes")
    for unit in sorted((unit for unit in units if unit["source"].endswith(".cu")), key=lambda unit: unit["source"]):
        now = row(unit)
        use = ", ".join(
            f"{target} {count}/{now['registers'][target]}/{now['spilled_bytes'][target]}"
            for target, count in now["kernels"].items()
        )
        print(f"{unit['source']:60} {now['cpu_seconds']:6.1f}  {use}")
    if problems := check(units, json.loads(BUDGET.read_text()), calibration):
        sys.exit("\n".join(problems) + "\nIf the change is intended: python scripts/check_budget.py --update")


if __name__ == "__main__":
    main()
