"""Compares the speed of two or more builds of flashbwd on one device, case by case, in interleaved slots.

    python benchmarks/compare.py old=PATH new=PATH [more=PATH ...] [--suite attention] [--cases TEXT] [--peer TEXT]

Each PATH is a folder that contains a built package `flashbwd`. Each build runs in its own process, because one process
cannot load two builds. The processes stay alive and use the device alternately, one slot at a time. Each process finds
the case and prepares the call with its own `flashbwd.bench`. The script names each case that it skips because a build
does not know or support it.

A ratio is the time of the first build over the time of another build: the median over rounds of the ratio in a round.
If it is above 1, the other build is faster. The table ends with geometric means. --out writes all times as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CALLS_OF_A_GRAPH = 40  # largest number of calls in one CUDA graph


# ---- one build, in its own process ---------------------------------------------------------------


def serve() -> None:
    """Answer requests: read one JSON object per line of stdin, write one per line of stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr, so that it does not mix with the answers
    server = _Server()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:  # the table shows an error of the build under test
            answer = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class _Server:
    def __init__(self) -> None:
        self.call: Any = None

    def cases(self, suite: str, text: str) -> dict[str, Any]:
        """Return the names of the cases that contain the text."""
        from flashbwd.bench import machine

        try:
            from flashbwd.bench import suites
        except ImportError:  # older builds, in which cases.py contained the suites
            from flashbwd.bench import cases as suites  # type: ignore[no-redef]
        self.device = machine.default_device()
        found = {f"{case.table}: {case.name}": case for case in suites.suite(suite, self.device.type)}
        self.found = {name: case for name, case in found.items() if text in name}
        return {"names": list(self.found)}

    def prepare(self, name: str, peer: str, slot_ms: float) -> dict[str, Any]:
        """Create the inputs, run the call once, and choose the number of calls per slot."""
        import torch

        try:
            from flashbwd.bench import contenders
        except ImportError:  # builds before November 2026
            from flashbwd.bench import runner as contenders  # type: ignore[no-redef]
        self.call = None
        case = self.found[name]
        chosen = [found for found in contenders.peers_of(case, self.device) if found.name == peer]
        if not chosen:
            raise ValueError(f"no peer {peer!r}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        prepared = chosen[0].prepare(case, contenders.make_inputs(case, self.device, contenders.SEED))
        with prepared.scope():
            prepared.backward()
            once = self._milliseconds(prepared.backward, 2)
            calls = max(2, math.ceil(slot_ms / max(once, 1e-3)))
            self._use(prepared, calls)
        return {"plan": prepared.plan}

    def _use(self, prepared: Any, calls: int) -> None:
        """Use replays of a CUDA graph as a slot if the call can be captured, so that the time excludes the host."""
        import torch

        if self.device.type != "cuda" or not prepared.capturable:
            self.call, self.repeats, self.scope, self.calls = prepared.backward, calls, prepared.scope, calls
            return
        within = min(calls, CALLS_OF_A_GRAPH)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            prepared.backward()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(within):
                prepared.backward()
        self.call, self.repeats, self.scope = graph.replay, math.ceil(calls / within), prepared.scope
        self.calls = within * self.repeats
        graph.replay()
        torch.cuda.synchronize()

    def slot(self) -> dict[str, Any]:
        """Return the milliseconds of one call."""
        with self.scope():
            return {"ms": self._milliseconds(self.call, self.repeats) * self.repeats / self.calls}

    def _milliseconds(self, call: Any, repeats: int) -> float:
        import torch

        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / repeats


# ---- the comparison ------------------------------------------------------------------------------


class Build:
    """A build and the process that loaded it."""

    def __init__(self, name: str, path: Path) -> None:
        if not (path / "flashbwd" / "__init__.py").is_file():
            raise SystemExit(f"compare.py: {name} is {path}, expected a folder with a built package flashbwd")
        self.name = name
        command = [sys.executable, os.path.abspath(__file__), "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(path.resolve()), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"compare.py: the process of {self.name!r} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Row:
    """Milliseconds of one call: one value per round for each build."""

    case: str
    times: dict[str, list[float]]

    def ratio(self, build: str) -> float:
        """Return the time of the first build over the time of ``build``: the median over rounds."""
        first = next(iter(self.times.values()))
        return statistics.median(a / b for a, b in zip(first, self.times[build], strict=True))

    @property
    def table(self) -> str:
        return self.case.split(":")[0]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def measure(builds: Sequence[Build], case: str, options: argparse.Namespace) -> Row | str:
    """Return the times of one case, or the reason why it is skipped."""
    for build in builds:
        answer = build.ask("prepare", name=case, peer=options.peer, slot_ms=options.slot_ms)
        if "error" in answer:
            return f"{build.name}: {answer['error']}"
    times: dict[str, list[float]] = {build.name: [] for build in builds}
    for turn in range(options.rounds + 1):
        for build in builds if turn % 2 else reversed(builds):
            answer = build.ask("slot")
            if "error" in answer:
                return f"{build.name}: {answer['error']}"
            if turn > 0:  # the first round is warm-up
                times[build.name].append(answer["ms"])
    return Row(case, times)


def summary(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the geometric mean, smallest and largest ratio of each table of cases, and of all cases."""
    lines = []
    groups = {table: [row for row in rows if row.table == table] for table in dict.fromkeys(row.table for row in rows)}
    for title, group in [*groups.items(), ("all", list(rows))]:
        for name in names[1:]:
            ratios = [row.ratio(name) for row in group]
            lines.append(
                f"{title}, {len(group)} cases: {name} {geometric_mean(ratios):.4f} times as fast as {names[0]} "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )
    return lines


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("builds", nargs="+", metavar="NAME=PATH")
    suites = ("attention", "attention_features", "layer_norm", "decoding", "block", "flex", "short", "triangle")
    parser.add_argument("--suite", default="attention", choices=suites)
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--peer", default="flashbwd sm90", help="the peer of this library to time, by its exact name")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slot-ms", type=float, default=12.0)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no case after this many seconds")
    parser.add_argument("--out", type=Path, help="JSON file for all times")
    options = parser.parse_args(words)
    pairs = [word.partition("=") for word in options.builds]
    if len({name for name, _, _ in pairs}) < 2 or not all(name and path for name, _, path in pairs):
        parser.error("expected at least two builds of different names, each as NAME=PATH")
    options.builds = {name: Path(path) for name, _, path in pairs}
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    begin = time.monotonic()
    builds: list[Build] = []
    rows: list[Row] = []
    try:
        for name, path in options.builds.items():
            builds.append(Build(name, path))
        known = []
        for build in builds:
            answer = build.ask("cases", suite=options.suite, text=options.cases)
            if "error" in answer:
                raise SystemExit(f"compare.py: {build.name}: {answer['error']}")
            known.append(answer["names"])
        width = max(map(len, known[0]), default=0)
        print(f"{'case':{width}}  " + "  ".join(f"{build.name + ' ms':>10}" for build in builds) + "  ratios")
        for case in known[0]:
            if time.monotonic() - begin > options.budget_s:
                print(f"{case}: skipped: the time budget is used up")
                continue
            row = (
                measure(builds, case, options) if all(case in names for names in known) else "a build has no such case"
            )
            if isinstance(row, str):
                print(f"{case:{width}}  skipped: {row}", flush=True)
                continue
            rows.append(row)
            times = "  ".join(f"{statistics.median(values):10.4f}" for values in row.times.values())
            ratios = "  ".join(f"{row.ratio(build.name):.3f}" for build in builds[1:])
            print(f"{case:{width}}  {times}  {ratios}", flush=True)
    finally:
        for build in builds:
            build.close()
    if not rows:
        raise SystemExit("compare.py: no case was measured")
    print("\n".join(summary(rows, list(options.builds))))
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
