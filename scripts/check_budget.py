"""Holds the last build to the checked-in budget: kernels, CPU seconds, registers and spills of each CUDA unit.

A compiler's warning, in any unit, is a failure too.

Usage: check_budget.py [--update]

Reads build/resource_usage.json, which every build writes, and compares it with build_tools/budget.json. --update
writes the budget from the last build, which must not have come out of a compiler cache (CCACHE_DISABLE=1).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "resource_usage.json"
BUDGET = ROOT / "build_tools" / "budget.json"
TOTAL_CPU_SECONDS = 40 * 60
# Units that are compiled side by side slow one another down, and a short unit's time is mostly start-up. A machine that
# is slower than the one that wrote the table, or busy, is slower with all of them.
SLACK_FACTOR, SLACK_SECONDS = 2.0, 15.0

Row = dict[str, Any]


def row(unit: Row) -> Row:
    """A unit's line of the table: the largest register count and all spilled bytes, by architecture."""
    targets = sorted({kernel["arch"] for kernel in unit["kernels"]})
    by_target = {target: [kernel for kernel in unit["kernels"] if kernel["arch"] == target] for target in targets}
    return {
        "kernels": max((len(kernels) for kernels in by_target.values()), default=0),
        "cpu_seconds": unit["cpu_seconds"],
        "registers": {target: max(kernel["registers"] for kernel in by_target[target]) for target in targets},
        "spilled_bytes": {target: sum(kernel["spills"] for kernel in by_target[target]) for target in targets},
    }


def slowness(rows: dict[str, Row], budget: dict[str, Row]) -> float:
    """How many times the seconds of the table this machine takes for all units together, 1 at least."""
    shared = rows.keys() & budget.keys()
    allowed = sum(budget[source]["cpu_seconds"] for source in shared)
    return max(1.0, sum(rows[source]["cpu_seconds"] for source in shared) / max(allowed, 1.0))


def compare(source: str, now: Row, allowed: Row, factor: float) -> list[str]:
    problems = []
    if now["kernels"] != allowed["kernels"]:
        problems.append(f"{source}: {now['kernels']} kernels, the budget says {allowed['kernels']}")
    limit = allowed["cpu_seconds"] * SLACK_FACTOR * factor + SLACK_SECONDS
    if now["cpu_seconds"] > limit:
        problems.append(f"{source}: {now['cpu_seconds']} CPU seconds to compile, the limit is {limit:.0f}")
    for what in ("registers", "spilled_bytes"):
        for target, value in now[what].items():
            if value > allowed[what].get(target, 0):
                problems.append(f"{source}: {value} {what} on {target}, the budget says {allowed[what].get(target, 0)}")
    return problems


def main() -> None:
    units = json.loads(REPORT.read_text())
    rows = {unit["source"]: row(unit) for unit in units if unit["source"].endswith(".cu")}
    total = sum(unit["cpu_seconds"] for unit in units)
    if "--update" in sys.argv[1:]:
        BUDGET.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")
    budget = json.loads(BUDGET.read_text())
    problems = [f"{source}: not in the budget" for source in sorted(rows.keys() - budget.keys())]
    problems += [f"{source}: in the budget, but not built" for source in sorted(budget.keys() - rows.keys())]
    problems += [f"{unit['source']}: {warning}" for unit in units for warning in unit["warnings"]]
    print(f"{'unit':60} {'kernels':>7} {'CPU s':>6}  registers, spilled bytes")
    factor = slowness(rows, budget)
    for source in sorted(rows.keys() & budget.keys()):
        now = rows[source]
        use = ", ".join(
            f"{target} {now['registers'][target]}/{now['spilled_bytes'][target]}" for target in now["registers"]
        )
        print(f"{source:60} {now['kernels']:7} {now['cpu_seconds']:6.1f}  {use}")
        problems += compare(source, now, budget[source], factor)
    print(f"{len(units)} units, {total:.0f} CPU seconds of {TOTAL_CPU_SECONDS}, {factor:.2f} times those of the budget")
    if total > TOTAL_CPU_SECONDS:
        problems.append(f"{total:.0f} CPU seconds in all, the limit is {TOTAL_CPU_SECONDS}")
    if problems:
        sys.exit("\n".join(problems) + "\nIf this is meant: python scripts/check_budget.py --update")


if __name__ == "__main__":
    main()
