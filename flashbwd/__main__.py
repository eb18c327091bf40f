"""``python -m flashbwd``: describe this machine, check gradients on it and time them, for a bug report.

``python -m flashbwd bench`` compares the speed of a suite of cases with PyTorch's kernels and writes JSON, a Markdown
table and plots. Both exit with status 1 if a gradient is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashbwd.bench import bug_report, machine, report, results, runner, suites
from flashbwd.bench.energy import EnergyError
from flashbwd.bench.measure import Settings

SUITES = (
    *("attention", "attention_features", "layer_norm", "decoding", "block", "flex", "short", "triangle"),
    *("scale", "all"),
)
STOPPED_EARLY = 3  # exit status of an unfinished `bench`
PAUSE_MS, SUSTAINED_MS = 50.0, 500.0  # on a GPU: pause before a short slot; length of a slot with a settled clock


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "bench":
        return bench(options)
    return bug_report.main()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashbwd",
        allow_abbrev=False,
        description="Without a command: describe this machine, show which backend ten common shapes use and why, check "
        "their gradients against float64, compare their speed with PyTorch's, and, on a GPU, show what "
        "flashbwd.enable() takes over in a Transformers model. Paste the output into a bug report. Exit status 1 if a "
        "gradient is wrong.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    bench_parser = commands.add_parser(
        "bench",
        allow_abbrev=False,  # a subparser does not inherit it
        help="compare a suite of cases with PyTorch's kernels; writes JSON, a Markdown table and plots",
        description="Compare a suite of cases with PyTorch's kernels on this machine's GPU, or on the CPU if it has no "
        "GPU. Every gradient is checked. Exit status 1 if a gradient of flashbwd is wrong, 3 if the run ended early: "
        "because of --budget-s, or because the GPU became unusable.",
    )
    add = bench_parser.add_argument
    add(
        "--suite",
        choices=SUITES,
        default="all",
        help="scale: attention split over all GPUs, or over two processes on the CPU; not part of all",
    )
    add("--quick", action="store_true", help="fewer cases, 5 short rounds")
    add("--out", type=Path, help="folder for the results (default: benchmarks/results of a source tree, else here)")
    add("--compare", type=Path, metavar="FILE", help="an earlier result file to compare with")
    add(
        "--cases",
        default="",
        metavar="TEXTS",
        help='only cases whose "table: name" contains one of these, comma-separated',
    )
    add("--peers", default="", metavar="NAMES", help="only peers whose names contain one of these, comma-separated")
    add(
        "--rounds",
        type=int,
        help="interleaved rounds, at least 5 (default 7), rounded up to a multiple of the number of peers",
    )
    add("--slot-ms", type=float, help="minimum duration of one peer's slot in a round, in milliseconds (default 30)")
    add(
        "--energy",
        action="store_true",
        help="also measure the joules of a call with a settled clock, from the GPU's energy counter; needs a GPU that "
        "nothing else uses, and the package nvidia-ml-py (pip install nvidia-ml-py)",
    )
    add("--budget-s", type=float, default=float("inf"), help="start no new case after this many seconds")
    add("--resume", action="store_true", help="continue the newest unfinished file in --out")
    return parser


# ---- python -m flashbwd bench --------------------------------------------------------------------


def settings_of(options: argparse.Namespace, device: torch.device) -> Settings:
    """Return how long to measure. A GPU also gets pauses and slots with a settled clock, except with --quick.

    Energy is measured in slots with a settled clock, also with --quick.
    """
    rounds = options.rounds if options.rounds is not None else (5 if options.quick else 7)
    slot_ms = options.slot_ms if options.slot_ms is not None else (10.0 if options.quick else 30.0)
    if options.quick and options.energy:
        return Settings(rounds, slot_ms, 0.0, SUSTAINED_MS, energy=True)
    if device.type != "cuda" or options.quick:
        return Settings(rounds, slot_ms, energy=options.energy)
    return Settings(rounds, slot_ms, PAUSE_MS, SUSTAINED_MS, energy=options.energy)


def bench(options: argparse.Namespace) -> int:
    """Run a suite and write its report."""
    if options.suite == "scale":
        if options.energy:
            print("flashbwd: --energy measures one GPU, so it does not support suite scale", file=sys.stderr)
            return 2
        return bench_scale(options)
    device = machine.default_device()
    earlier = None if options.compare is None else results.load(options.compare)
    settings = settings_of(options, device)
    cases = suites.suite(options.suite, device.type, options.quick)
    if not cases:
        runnable = ", ".join(name for name in SUITES if name == "scale" or suites.suite(name, device.type))
        print(
            f"flashbwd: suite {options.suite} has no cases for a machine without a GPU. These suites run on a CPU: "
            f"{runnable}",
            file=sys.stderr,
        )
        return 2
    texts = [part.strip() for part in options.cases.split(",") if part.strip()] or [""]
    chosen = [case for case in cases if any(text in f"{case.table}: {case.name}" for text in texts)]
    if not chosen:
        print(no_case(options, cases), file=sys.stderr)
        return 2
    name = options.suite + ("-quick" if options.quick else "")
    directory = options.out or default_directory()
    where = machine.describe(device)
    path = runner.unfinished(directory, name, where, settings) if options.resume else None
    path = path or runner.result_path(directory, name, where.device)
    only = [part.strip() for part in options.peers.split(",") if part.strip()]
    try:
        found = runner.run_suite(
            name,
            chosen,
            device,
            settings,
            path,
            only=only,
            budget_s=options.budget_s,
            progress=sys.stderr.isatty(),
        )
    except runner.DeviceLostError as lost:
        print(f"{lost}\n{path} has the results so far; --resume continues with the next case", file=sys.stderr)
        return STOPPED_EARLY
    except EnergyError as error:
        saved = f"\n{path} has the results so far; --resume continues with the next case" if path.exists() else ""
        print(f"{error}{saved}", file=sys.stderr)
        return STOPPED_EARLY if saved else 2
    write_report(found, path, options.compare, earlier)
    if found.wrong():
        return 1
    return 0 if found.complete else STOPPED_EARLY


def write_report(found: results.Report, path: Path, compare: Path | None, earlier: results.Report | None) -> None:
    """Write the Markdown file and the plots beside ``path``, and print the tables."""
    path.with_suffix(".md").write_text(report.markdown(found, earlier))
    images = report.plots(found, path.with_suffix(""))
    for table, members in report.by_table(found).items():
        parts = [report.rates(members), report.bars(members), report.energy(members), report.host_times(members)]
        print("\n\n".join(filter(None, [f"\n{table.replace('_', ' ')}", *parts])))
    if earlier is not None:
        print(f"\ncompared with {compare}\n{report.changes_table(results.compare(earlier, found))}")
    print(f"\n{report.bar_summary(found)}")
    print(f"written: {path}, {path.with_suffix('.md').name}, {len(images)} plots")
    if not images:
        print("no plots: they need matplotlib (pip install matplotlib)")
    for line in found.wrong():
        print(f"WRONG: {line}", file=sys.stderr)


def no_case(options: argparse.Namespace, cases: Sequence[Any]) -> str:
    """Return the message that ``--cases`` selects no case of a suite, with some that it could."""
    names = [f'"{case.table}: {case.name}"' for case in cases]
    step = -(-len(names) // 5)
    return (
        f"flashbwd: --cases is {options.cases!r}, expected a part of the name of a case of suite {options.suite}, such "
        f"as {', '.join(names[::step])}"
    )


def bench_scale(options: argparse.Namespace) -> int:
    """Run the suite that needs several devices, and write its report."""
    from flashbwd.bench import scale  # imports torch.distributed

    where = machine.default_device()
    name = machine.describe(where).device
    directory = options.out or default_directory()
    suite = f"{scale.SUITE}_{scale.devices()}"  # a machine has one result per number of devices
    path = runner.result_path(directory, suite + ("-quick" if options.quick else ""), name)
    texts = [part.strip() for part in options.cases.split(",") if part.strip()] or [""]
    if not scale.chosen_cases(options.quick, texts):
        print(no_case(options, scale.chosen_cases(options.quick, [""])), file=sys.stderr)
        return 2
    try:
        found = scale.run_suite(path, quick=options.quick, texts=texts)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return STOPPED_EARLY
    tables = scale.efficiency_table(found.results)
    path.with_suffix(".md").write_text(report.markdown(found) + "\n## Efficiency\n\n" + tables + "\n")
    images = report.plots(found, path.with_suffix(""))
    print("\n" + "\n\n".join(filter(None, [tables, report.bars(found.results), report.bar_summary(found)])))
    print(f"written: {path}, {path.with_suffix('.md').name}, {len(images)} plots")
    for line in found.wrong():
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if found.wrong() else 0


def default_directory() -> Path:
    """Return benchmarks/results in a source tree; for an installed package, flashbwd-results in the current folder."""
    results_of_tree = machine.SOURCE_TREE / "benchmarks" / "results"
    return results_of_tree if (machine.SOURCE_TREE / "csrc").is_dir() else Path("flashbwd-results")


if __name__ == "__main__":
    sys.exit(main())
