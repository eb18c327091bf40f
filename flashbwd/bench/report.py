"""Writes the Markdown tables and plots of a report."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flashbwd.bench.cases import BLOCK_SLOT_MS, COPY, HOST_BAR
from flashbwd.bench.results import COOL, EAGER, OK, SUSTAINED, CaseResult, Change, Report, Verdict, compare
from flashbwd.bench.scale_cases import WITHOUT_EXCHANGE


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with padded columns, which is also readable in a terminal."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def by_table(report: Report) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = {}
    for result in report.results:
        groups.setdefault(result.table, []).append(result)
    return groups


def timed_peers(results: Sequence[CaseResult], figure: str = COOL) -> list[str]:
    """Return the peers for which this time was measured on any of the cases, in the order of measurement."""
    names = itertools.chain.from_iterable(result.peers for result in results)
    return [
        name for name in dict.fromkeys(names) if any(r.peers[name].has(figure) for r in results if name in r.peers)
    ]  # fmt: skip


def rate_cell(result: CaseResult, peer: str, figure: str = COOL) -> str:
    measured = result.peers.get(peer)
    if measured is None or measured.status == "unsupported":
        return "-"
    if not measured.has(figure):
        return "-" if measured.timed else measured.status
    mark = "" if measured.status == OK else " WRONG"
    return f"{result.rate(peer, figure):.4g}{mark}"


FIGURES = {SUSTAINED: "with a settled clock", COOL: "", EAGER: "without a CUDA graph, including host time"}


def rates(results: Sequence[CaseResult]) -> str:
    """Return one table for each kind of time that was measured, beginning with the sustained times."""
    tables = []
    for figure, how in FIGURES.items():
        if peers := timed_peers(results, figure):
            header = [", ".join(filter(None, [results[0].unit, how])) + " of", *peers]
            rows = [[r.name, *(rate_cell(r, peer, figure) for peer in peers)] for r in results]
            tables.append(table(header, rows))
    return "\n\n".join(tables)


def bars(results: Sequence[CaseResult]) -> str:
    """Return a table of the bars that were measured, with the goals for the same ratios; empty without bars."""
    rows: dict[tuple[str, str, str], dict[bool, Verdict]] = {}
    for result in results:
        for bar in result.bars:
            verdict = result.verdict(bar)
            if verdict.passed is not None:
                rows.setdefault((result.name, bar.ours, bar.over), {})[bar.goal] = verdict

    def cell(verdict: Verdict | None) -> str:
        if verdict is None:
            return "-"
        return f"{verdict.bar.at_least:g} {'reached' if verdict.passed else 'missed' if verdict.bar.goal else 'MISSED'}"

    header = ["case", "ratio of", "over", "median (range)", "bar", "goal"]
    cells = [
        [*key, str(next(iter(verdicts.values())).value), cell(verdicts.get(False)), cell(verdicts.get(True))]
        for key, verdicts in rows.items()
    ]
    return table(header, cells) if cells else ""


def host_times(results: Sequence[CaseResult]) -> str:
    """Return a table of the host times of eager calls; empty if none was measured, as on the CPU."""
    peers = [name for name in timed_peers(results) if any(r.peers[name].host_us for r in results if name in r.peers)]

    def cell(result: CaseResult, name: str) -> str:
        measured = result.peers.get(name)
        if measured is None or measured.host_us is None:
            return "-"
        ratio = result.host_ratio(name) if name.startswith("flashbwd") else None
        if ratio is None:
            return f"{measured.host_us:.0f}"
        return f"{measured.host_us:.0f} ({ratio:.2f}{' MISSED' if ratio > HOST_BAR else ''})"

    header = [f"host time in us (over PyTorch's, at most {HOST_BAR:g}) of", *peers]
    return table(header, [[r.name, *(cell(r, name) for name in peers)] for r in results]) if peers else ""


def energy(results: Sequence[CaseResult]) -> str:
    """Return a table of the energy of a call beside its rate with a settled clock; empty if it was not measured."""
    rows = []
    for result in results:
        for name, peer in result.peers.items():
            if not (peer.has(SUSTAINED) and peer.joules):
                continue
            joules, seconds = statistics.median(peer.joules), statistics.median(peer.sustained_ms) / 1e3
            ratio, error = result.energy_ratio(name), max(peer.energy_error)
            rows.append(
                [
                    result.name,
                    name,
                    rate_cell(result, name, SUSTAINED),
                    f"{joules:.4g}",
                    "-" if ratio is None else str(ratio),
                    f"{joules / seconds:.0f}",
                    f"{100 * error:.1f} %",
                ]
            )
    header = ["case", "peer", results[0].unit, "J/call", "over the fastest peer's", "W", "error at most"]
    return table(header, rows) if rows else ""


def details(results: Sequence[CaseResult]) -> str:
    """Return a table of time, spread, host time, error and memory of every timed peer."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            result.name,
            name,
            f"{peer.median_ms:.4g}",
            f"{100 * peer.spread:.1f} %",
            peer.method,
            number(peer.host_us, ".0f"),
            number(max(peer.errors.values(), default=None), ".1e"),
            number(None if peer.extra_bytes is None else peer.extra_bytes / 2**20, ".1f"),
            number(None if peer.workspace_bytes is None else peer.workspace_bytes / 2**20, ".1f"),
        ]
        for result in results
        for name, peer in result.peers.items()
        if peer.timed
    ]
    header = ["case", "peer", "ms", "spread", "timed by", "host us", "worst error", "extra MiB", "workspace MiB"]
    timed = [peer for result in results for peer in result.peers.values() if peer.timed]
    if any(peer.first_ms is not None for peer in timed):
        header.append("first call ms")
        rows = [[*row, number(peer.first_ms, ".0f")] for row, peer in zip(rows, timed, strict=True)]
    return table(header, rows)


def not_measured(report: Report) -> str:
    """Return the peers that were not timed, with one line per peer and reason."""
    reasons: dict[tuple[str, str, str], int] = {}
    for result in report.results:
        for name, peer in result.peers.items():
            if not peer.timed:
                key = (name, peer.status, peer.reason)
                reasons[key] = reasons.get(key, 0) + 1
    return "\n".join(f"- {name}: {status} in {n} cases: {why}" for (name, status, why), n in reasons.items())


def bar_summary(report: Report) -> str:
    """Return the numbers of bars and goals that were reached, missed and not measured."""
    verdicts = [result.verdict(bar) for result in report.results for bar in result.bars]
    lines = []
    for goal, word in ((False, "bars"), (True, "goals")):
        chosen = [verdict for verdict in verdicts if verdict.bar.goal == goal]
        passed = sum(verdict.passed is True for verdict in chosen)
        missed = sum(verdict.passed is False for verdict in chosen)
        lines.append(f"{word}: {passed} reached, {missed} missed, {len(chosen) - passed - missed} not measured")
    return "; ".join(lines)


def changes_table(changes: Sequence[Change]) -> str:
    def percent(ratio: float | None) -> str:
        return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"

    header = ["case", "peer", "old", "new", "change", "relative to fastest peer", "beyond the spread"]
    rows = (
        [
            change.case,
            change.peer,
            f"{change.old:.4g} {change.unit}",
            f"{change.new:.4g} {change.unit}",
            percent(change.change),
            percent(change.relative),
            "yes" if change.significant else "no",
        ]
        for change in changes
    )
    return table(header, rows)


def slots(report: Report) -> str:
    slot_ms = report.settings["slot_ms"]
    text = f"slots of at least {slot_ms:g} ms" if slot_ms else "slots of one call"
    if "block" in by_table(report):
        text += f", for blocks {max(slot_ms, BLOCK_SLOT_MS):g} ms"
    if pause_ms := report.settings.get("pause_ms"):
        text += f", each after a pause of {pause_ms:g} ms"
    if sustained_ms := report.settings.get("sustained_ms"):
        text += f"; with a settled clock, the second half of {sustained_ms:g} ms"
    if report.settings.get("energy"):
        counter = report.machine["energy_counter"]
        text += (
            f", or as long as the energy counter needs, which is updated every {counter['update_ms']:.0f} ms "
            f"(joules include the power of an idle GPU, which was {counter['idle_watts']:.0f} W)"
        )
    return text


def markdown(report: Report, earlier: Report | None = None) -> str:
    machine = report.machine
    versions = [f"torch {machine['torch']}"]
    if machine["driver"]:
        versions += [f"driver {machine['driver']}", f"CUDA {machine['cuda']}", f"cuDNN {machine['cudnn']}"]
    parts = [
        f"# {report.suite} on {machine['device']}",
        f"{report.date}; {', '.join(versions)}; {machine['threads']} CPU threads; commit {machine['commit']}; "
        f"kernel sources {(machine['kernel_sources'] or 'not present')[:12]}."
        + ("" if report.complete else " **The run is not complete.**"),
        f"{report.settings['rounds']} or more interleaved rounds, {slots(report)}; a rate is the median over rounds, "
        "and a ratio is the median (smallest-largest) over rounds. " + bar_summary(report) + ".",
    ]
    if report.results and (ceilings := report.results[-1].ceilings):
        parts.append(
            f"Ceilings in the same run: matrix product {ceilings['matmul_tflops']:.4g} TFLOP/s, "
            f"copy {ceilings['copy_gbs']:.4g} GB/s (bytes read + written)."
        )
    groups = by_table(report)
    for name, results in groups.items():
        parts += [f"## {name.replace('_', ' ')}", rates(results), bars(results), energy(results), host_times(results)]
    if earlier is not None:
        parts += [
            f"## Compared with {earlier.date}, commit {earlier.machine['commit']}",
            changes_table(compare(earlier, report))
            if (earlier.results and report.results)
            else "The two runs have no case in common.",
        ]
    if missing := not_measured(report):
        parts += ["## Not measured", missing]
    parts += ["## Details", *(details(results) for results in groups.values() if timed_peers(results))]
    return "\n\n".join(filter(None, parts)) + "\n"


# ---- plots ---------------------------------------------------------------------------------------


def plots(report: Report, stem: Path) -> list[Path]:
    """Write one PNG per table, named ``stem``-TABLE.png, and return their paths; none without matplotlib.

    If the energy of calls was measured, ``stem``-energy.png shows it for all cases.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    figures = {
        name: _lines(results) if name in _PANELS else _bars(results, CaseResult.rate, results[0].unit)
        for name, results in by_table(report).items()
        if timed_peers(results)
    }
    if metered := [result for result in report.results if any(map(result.energy_ratio, result.peers))]:
        figures["energy"] = _bars(metered, _energy_ratio, "joules of a call over those of the fastest peer", SUSTAINED)
    written = []
    for name, figure in figures.items():
        figure.suptitle(f"{name.replace('_', ' ')}, {report.machine['device']}, torch {report.machine['torch']}")
        path = stem.with_name(f"{stem.name}-{name}.png")
        figure.savefig(path, dpi=110)
        written.append(path)
    return written


# Tables that are drawn as lines -> the properties that define a panel, and the property on its x axis.
_PANELS: dict[str, tuple[tuple[str, ...], str]] = {
    "main": (("head_dim", "causal"), "seqlen"),
    "layer_norm": (("dtype",), "columns"),
    "scale": (("devices", "head_dim"), "seqlen"),
}


def _color(peer: str) -> dict[str, Any]:
    """Return a line style: solid and thick for this library, dashed for other peers, dotted for the copy."""
    if peer.startswith("flashbwd"):
        return {"linewidth": 2.2, "linestyle": "-"}
    return {"linewidth": 1.2, "linestyle": ":" if peer == COPY else "--"}


def _lines(results: Sequence[CaseResult]) -> Any:
    from matplotlib.figure import Figure

    keys, along = _PANELS[results[0].table]
    panels: dict[tuple[Any, ...], list[CaseResult]] = {}
    for result in results:
        panels.setdefault(tuple(result.case[key] for key in keys), []).append(result)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.6 * rows), layout="constrained")
    peers = [peer for peer in timed_peers(results) if not peer.endswith(WITHOUT_EXCHANGE)]
    for index, (panel, members) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, peer in enumerate(peers):
            points = [(r.case[along], r.rate(peer)) for r in members if peer in r.peers and r.peers[peer].timed]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=peer, color=f"C{number}", **_color(peer))
        axes.set_xscale("log", base=2)
        axes.set_title(", ".join(f"{key} {value}" for key, value in zip(keys, panel, strict=True)))
        axes.set_xlabel(along)
        axes.set_ylabel(members[0].unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if index == 0:
            figure.legend(loc="outside lower center", ncols=2 * columns, fontsize="small")
    return figure


def _energy_ratio(result: CaseResult, peer: str) -> float:
    ratio = result.energy_ratio(peer)
    return 0.0 if ratio is None else ratio.median


def _bars(
    results: Sequence[CaseResult], value: Callable[[CaseResult, str], float], unit: str, figure_of: str = COOL
) -> Any:
    from matplotlib.figure import Figure

    peers = timed_peers(results, figure_of)
    height = 0.8 / len(peers)
    figure = Figure(figsize=(10, 1 + len(results) * max(0.4, 0.14 * len(peers))), layout="constrained")
    axes = figure.add_subplot()
    for number, peer in enumerate(peers):
        shown = [(i, r) for i, r in enumerate(results) if peer in r.peers and r.peers[peer].has(figure_of)]
        positions, values = [i + number * height for i, _ in shown], [value(r, peer) for _, r in shown]
        axes.barh(positions, values, height, label=peer, color=f"C{number}", hatch=None if "flashbwd" in peer else "//")
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(results))], [r.name for r in results], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
    axes.margins(y=0.01)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure
