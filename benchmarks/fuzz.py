"""Compares random attention-backward calls with float64, with a watchdog that reports calls that never end.

    python benchmarks/fuzz.py --backend sm90 --calls 20000 --out fuzz.json
    python benchmarks/fuzz.py --backend flex --calls 2500         FlexAttention on the kernels; flex_sm80: on that one
    python benchmarks/fuzz.py --backend sm90 --call 123456        repeat one call and print its arguments

Worker processes share one device. Each worker reports when a call begins and how it ended. If a worker reports nothing
for ``--patience-s`` seconds, the script kills it and runs its call again alone, to distinguish a hang from a busy
device. Calls that a backend refuses are counted by reason, and do not count toward ``--calls``.

Exit status: 0 if all calls ran and agree with float64; 1 if a call hung, raised or was wrong, or did not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Backend:
    """Where random calls run. ``module`` draws them, runs them and judges the results."""

    module: str = "fuzz_reference"
    device: str = "cuda"
    patience_s: float = 20.0  # for one call


BACKENDS = {
    "short": Backend(),
    "sm90": Backend(),
    "sm80": Backend(),
    "reference": Backend(device="cpu"),
    "flex": Backend("fuzz_flex_reference", patience_s=60.0),  # the first call with a score_mod compiles a kernel
    "flex_sm80": Backend("fuzz_flex_reference", patience_s=60.0),  # calls that sm90 would take run on sm80 too
    "flex_reference": Backend("fuzz_flex_reference", "cpu"),
}
STRIDE = 1 << 20  # difference between the first call numbers of two workers
STARTUP_S = 60.0  # extra time for the imports of a worker
MOST_FAILURES = 20  # the run ends after this number of failures
MEMORY_SHARE = 0.06  # share of the device memory per worker; PyTorch frees its cache before it exceeds this


@dataclass
class Tally:
    """The combined reports of the workers."""

    calls: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # largest ratio of error to limit, by dtype and gradient
    failures: list[dict[str, Any]] = field(default_factory=list)
    slow: int = 0  # calls that exceeded the patience but finished when they ran alone

    def add(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            self.refusals[message["refused"]] += 1
            return
        self.calls += 1
        self.features.update(message["features"])
        for name, ratio in message["worst"].items():
            self.worst[name] = max(self.worst.get(name, 0.0), ratio)
        if message["failure"]:
            self.fail(message["number"], message["failure"])

    def fail(self, number: int, what: str) -> None:
        self.failures.append({"number": number, "failure": what})


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    number: int  # the last call that it began
    since: float  # time of its last report
    unread: bytes = b""  # an incomplete line


class Watchdog:
    """Keeps workers running until enough calls have ended.

    ``command`` and the number of the first call are the command line of a worker.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        calls: int,
        patience_s: float,
        budget_s: float,
        startup_s: float = STARTUP_S,
    ) -> None:
        self.command, self.calls, self.patience_s, self.startup_s = list(command), calls, patience_s, startup_s
        self.deadline = time.monotonic() + budget_s
        self.selector = selectors.DefaultSelector()
        self.tally = Tally()
        self.workers: list[Worker] = []
        self.count = workers

    def start(self, number: int) -> None:
        process = subprocess.Popen([*self.command, str(number)], stdout=subprocess.PIPE)
        worker = Worker(process, number, time.monotonic() + self.startup_s)
        self.workers.append(worker)
        assert process.stdout is not None
        self.selector.register(process.stdout, selectors.EVENT_READ, worker)

    def stop(self, worker: Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        assert worker.process.stdout is not None
        self.selector.unregister(worker.process.stdout)
        worker.process.stdout.close()
        self.workers.remove(worker)

    def hear(self, worker: Worker) -> None:
        """Process the reports of a worker, or the end of its process."""
        assert worker.process.stdout is not None
        heard = os.read(worker.process.stdout.fileno(), 1 << 16)
        worker.since = time.monotonic()
        if not heard:
            status = worker.process.wait()
            self.stop(worker)
            self.tally.fail(worker.number, f"the process ended with status {status}")
            self.start(worker.number + 1)
            return
        *lines, worker.unread = (worker.unread + heard).split(b"\n")
        for line in lines:
            message = json.loads(line)
            worker.number = message["number"]
            if "begins" not in message:
                self.tally.add(message)

    def suspect(self, worker: Worker) -> None:
        """Stop a worker that has not reported for too long, and check whether its call ends if it runs alone."""
        self.stop(worker)
        try:
            alone = [*self.command, str(worker.number), "one"]
            subprocess.run(alone, stdout=subprocess.DEVNULL, timeout=self.startup_s + self.patience_s, check=False)
            self.tally.slow += 1
        except subprocess.TimeoutExpired:
            self.tally.fail(worker.number, f"did not end, and not in {self.patience_s:.0f} s alone either")
        for other in self.workers:  # the watchdog has not read their reports in the meantime
            other.since = time.monotonic()
        self.start(worker.number + 1)

    def run(self, first: int) -> Tally:
        for i in range(self.count):
            self.start(first + i * STRIDE)
        shown = 0
        while self.tally.calls < self.calls and len(self.tally.failures) < MOST_FAILURES:
            now = time.monotonic()
            if now > self.deadline:
                break
            for key, _ in self.selector.select(timeout=0.2):
                self.hear(key.data)
            for worker in list(self.workers):
                if time.monotonic() - worker.since > self.patience_s:
                    self.suspect(worker)
            if self.tally.calls >= shown + 1000:
                shown = self.tally.calls
                print(f"{shown} of {self.calls} calls, {len(self.tally.failures)} failures", flush=True)
        for worker in list(self.workers):
            self.stop(worker)
        return self.tally


# ---- a worker -------------------------------------------------------------------------------------


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def work(backend: str, first: int, one: bool) -> None:
    """Run calls from number ``first`` on until the process is killed, or only one call."""
    import torch

    calls = importlib.import_module(BACKENDS[backend].module)
    device = torch.device(BACKENDS[backend].device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    side = torch.cuda.Stream() if device.type == "cuda" else None
    factor = torch.randn(2048, 2048, device=device)
    before: Callable[[], Any] | None = None

    def occupy(beside: str) -> None:
        """Start work on a second stream, which runs concurrently with the call."""
        if side is None or beside == "nothing":
            return
        with torch.cuda.stream(side):
            if beside == "products":
                for _ in range(4):
                    torch.mm(factor, factor)
            elif before is not None:
                before()

    number = first
    while True:
        say(number=number, begins=True)
        call = calls.draw(number, backend)
        problem = calls.build(call, device)
        refused = calls.refusal(problem, backend)
        if refused is not None:
            say(number=number, refused=refused)
        else:
            occupy(call.beside)
            ratios = calls.worst(problem, calls.gradients(problem, backend))
            before = calls.repeat(problem, backend)
            bad = {name: ratio for name, ratio in ratios.items() if not ratio <= 1.0}
            failure = f"error over limit {bad} in {call.describe()}" if bad else ""
            worst = {f"{call.dtype} {name}": ratio for name, ratio in ratios.items()}
            say(number=number, features=call.features, worst=worst, failure=failure)
        if one:
            return
        number += 1


def report(tally: Tally, backend: str, seed: int, seconds: float) -> dict[str, Any]:
    from flashbwd.bench import machine

    described = machine.describe(machine.default_device())
    return {
        "backend": backend,
        "seed": seed,
        "seconds": round(seconds),
        "calls": tally.calls,
        "slow": tally.slow,
        "failures": tally.failures,
        "refusals": dict(tally.refusals.most_common()),
        "features": dict(tally.features.most_common()),
        "worst_error_over_limit": {name: round(ratio, 3) for name, ratio in sorted(tally.worst.items())},
        "machine": {name: getattr(described, name) for name in described.__dataclass_fields__},
        "commit": machine.commit(),
        "kernel_sources": machine.kernel_sources_hash(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--calls", type=int, default=20_000, help="number of calls that must finish (default 20000)")
    parser.add_argument("--seed", type=int, help="number of the first call (default: random)")
    parser.add_argument("--workers", type=int, default=14, help="processes that share the device, at most 16")
    parser.add_argument("--patience-s", type=float, help="seconds for one call (default 20, or 60 if calls compile)")
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    parser.add_argument("--call", type=int, help="run only this call, in this process, and print its arguments")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.backend, int(options.work[0]), "one" in options.work)
        return 0
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if options.call is not None:
        calls = importlib.import_module(BACKENDS[options.backend].module)
        print(json.dumps(calls.draw(options.call, options.backend).describe(), indent=1))
        work(options.backend, options.call, one=True)
        return 0
    seed = random.randrange(1 << 40) if options.seed is None else options.seed
    print(f"{options.backend}, seed {seed}", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--backend", options.backend, "--work"]
    begin = time.monotonic()
    patience_s = BACKENDS[options.backend].patience_s if options.patience_s is None else options.patience_s
    tally = Watchdog(command, options.workers, options.calls, patience_s, options.budget_s).run(seed)
    summary = report(tally, options.backend, seed, time.monotonic() - begin)
    print(json.dumps(summary, indent=1))
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    complete = tally.calls >= options.calls
    print(f"{tally.calls} calls, {len(tally.failures)} failures{'' if complete else ', calls are left'}")
    return 0 if complete and not tally.failures else 1


if __name__ == "__main__":
    sys.exit(main())
