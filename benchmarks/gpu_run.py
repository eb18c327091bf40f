"""Runs everything that needs a GPU: tests, compute-sanitizer, random calls, benchmarks; packs the results.

    python benchmarks/gpu_run.py OUT                          all stages, one after the other
    python benchmarks/gpu_run.py OUT --concurrent             host, tests, sanitizer and fuzz at the same time
    python benchmarks/gpu_run.py OUT --stage tests --resume   one stage, without the steps that an earlier run finished
    python benchmarks/gpu_run.py OUT --select sm90 --jobs 15  only tests that match, in 15 processes
    python benchmarks/gpu_run.py OUT --stage tests --seed 7   property tests with the examples of an earlier run

The script uses existing libraries and builds missing ones. Each stage consists of steps, and ``OUT/state.json`` records
the finished steps. With ``--resume``, a run continues where an earlier run was interrupted, for example by
``--budget-s``, which applies to each stage, or ``--stage-budget``. ``--step-tests`` divides the tests into steps that
can be resumed one by one. Outcomes of other kernel sources or libraries are discarded. If only the commit differs,
failed steps run again and passed ones stay; the record lists the commits.

On a machine with several GPUs, every step uses another one as its first GPU, and so does every test process. Failures
of tests are in ``OUT/summaries/STEP.failures.txt`` as soon as they happen, also if the step is stopped later.

The stage ``host`` runs the tests that need no GPU: some of them take another way on a machine that has one.

The property tests of the stage ``tests`` draw their examples from a seed, which is new in every run. The run prints the
seed, and ``OUT/state.json`` and the record contain it. A resumed run keeps the seed.

Exit status: 0 if everything passed, 1 if something failed, 3 if nothing failed but some steps did not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from gpu_steps import FAILED, HOST, INCOMPLETE, LEFT, LIBRARIES, Plan, Step, file_name, shared_jobs, steps_of  # noqa: E402
from kit.gpu_lock import devices_from  # noqa: E402

STAGES = ("check", HOST, "tests", "sanitizer", "fuzz", "bench")
CONCURRENT = (HOST, "tests", "sanitizer", "fuzz")  # stages that do not measure time
ARCHIVE = "flashbwd-gpu.tar.gz"
SHORTEST_STEP_S = 15.0  # with less time left, no step begins
TO_FINISH_A_CASE_S = 45.0  # the benchmark starts no new case in the last seconds of its step
MOST_JOBS = 16  # default limit: each process takes about 1 GiB of GPU memory before its first test


@dataclass
class Outcome:
    """The end of a step: PASSED, FAILED, or LEFT if time ran out. ``commit`` is that of the tree that it ran in."""

    status: str
    seconds: float = 0.0
    detail: str = ""
    commit: str = ""


# ---- running --------------------------------------------------------------------------------------


def run(step: Step, out: Path, seconds: float, first_device: int = 0) -> Outcome:
    """Run a step for at most ``seconds``; its output goes to its log."""
    command = list(step.command)
    if step.stage in ("bench", "fuzz"):
        command += ["--budget-s", f"{max(1.0, seconds - TO_FINISH_A_CASE_S):.0f}"]
    if shutil.which(command[0]) is None:
        return Outcome(FAILED, 0.0, f"{command[0]} is not on the PATH")
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        **devices_from(first_device, number_of_gpus()),
        **step.environment,
        "PYTHONPATH": search,
    }
    summary_file = out / "summaries" / f"{file_name(step.title)}.json"
    environment["FLASHBWD_TEST_SUMMARY"] = str(summary_file)
    summary_file.with_suffix(".failures.txt").unlink(missing_ok=True)  # of an earlier run; tests/conftest.py appends
    log = out / "logs" / step.log_name
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(process)
            return Outcome(LEFT, time.monotonic() - start, f"stopped after {seconds:.0f} s")
    status, detail = step.judge(process.returncode, log.read_text(errors="replace"))
    return Outcome(status, time.monotonic() - start, detail)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a step and the processes that it started."""
    for how, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 30)):
        try:
            os.killpg(process.pid, how)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def number_of_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def identity() -> dict[str, object]:
    """Return the hashes of sources and libraries. Outcomes with other hashes are stale."""
    from flashbwd.bench import machine

    libraries = {path.name: machine.sha256([path]) for path in sorted(machine.PACKAGE.glob("*.so"))}
    return {"commit": machine.commit(), "kernel_sources": machine.kernel_sources_hash(), "libraries": libraries}


class State:
    """The outcomes by step, saved to a file."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.outcomes: dict[str, Outcome] = {}
        self.identity: dict[str, object] | None = None
        self.seed: int | None = None
        if resume and path.exists():
            data = json.loads(path.read_text())
            self.identity = data["identity"]
            of = {"commit": str(data["identity"]["commit"])}
            self.outcomes = {title: Outcome(**of | outcome) for title, outcome in data["outcomes"].items()}
            self.seed = data.get("seed")

    def belongs_to(self, now: dict[str, object]) -> None:
        """Discard outcomes of other kernel sources or libraries, and failures of other commits."""
        if self.identity is not None and self.identity | {"commit": now["commit"]} != now:
            print("sources or libraries have changed: starting over", flush=True)
            self.outcomes = {title: o for title, o in self.outcomes.items() if title.startswith("build")}
        elif self.identity not in (None, now):
            print("the kernels are those of an earlier commit: only its failed steps run again", flush=True)
            self.outcomes = {title: o for title, o in self.outcomes.items() if o.status != FAILED}
        self.identity = now
        self.save()

    def ended(self, title: str) -> bool:
        """Return whether a step ended. A build step exists only if a library is missing, so it has not ended."""
        of_build = title.startswith("build: ")
        return not of_build and title in self.outcomes and self.outcomes[title].status != LEFT

    def record(self, title: str, outcome: Outcome) -> None:
        with self.lock:
            commit = str((self.identity or {}).get("commit", ""))
            self.outcomes[title] = dataclasses.replace(outcome, commit=commit)
            self.save()

    def save(self) -> None:
        outcomes = {title: asdict(outcome) for title, outcome in self.outcomes.items()}
        part = self.path.with_suffix(".part")
        part.write_text(
            json.dumps({"identity": self.identity, "seed": self.seed, "outcomes": outcomes}, indent=1) + "\n"
        )
        os.replace(part, self.path)


class Stage:
    """Runs the steps of a stage until its time is used up. The time starts with the first step."""

    _started = itertools.count()  # steps of all stages

    def __init__(self, name: str, state: State, plan: Plan, budget_s: float) -> None:
        self.name, self.state, self.plan, self.budget_s = name, state, plan, budget_s
        self.deadline: float | None = None

    def take(self, step: Step) -> None:
        if self.deadline is None:
            self.deadline = time.monotonic() + self.budget_s
        seconds = self.deadline - time.monotonic()
        if seconds < min(SHORTEST_STEP_S, self.budget_s / 2):
            self.state.record(step.title, Outcome(LEFT, 0.0, "not started: the time of the stage is used up"))
            return
        print(f"{step.title} ...", flush=True)
        outcome = run(step, self.plan.out, seconds, next(self._started))
        print(f"{step.title}: {outcome.status} in {outcome.seconds:.0f} s, {outcome.detail}", flush=True)
        self.state.record(step.title, outcome)

    def run(self, steps: Iterable[Step] | None = None) -> None:
        """Run ``steps``, by default all steps of the stage, one after the other.

        Steps of the sanitizer stage leave the GPU idle most of the time, so as many run in parallel as the stage has
        jobs.
        """
        if steps is None:
            steps = steps_of(self.name, self.plan)
        left = (step for step in steps if not self.state.ended(step.title))
        if self.name != "sanitizer":
            for step in left:
                self.take(step)
            return
        in_parallel([partial(self.take, step) for step in left], self.plan.jobs["sanitizer"])


def in_parallel(calls: Sequence[Callable[[], None]], workers: int) -> None:
    pool = ThreadPoolExecutor(max(1, workers))
    try:
        for ended in [pool.submit(call) for call in calls]:
            ended.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, only the running steps finish


def run_concurrently(stages: Sequence[Stage]) -> None:
    """Run stages at the same time, after the steps that must be alone on the GPUs; the stage ``host`` beside them."""
    steps = {stage: list(steps_of(stage.name, stage.plan)) for stage in stages if stage.name != HOST}
    with ThreadPoolExecutor(1) as beside:
        host = [beside.submit(stage.run) for stage in stages if stage.name == HOST]
        for stage, own in steps.items():
            stage.run([step for step in own if step.alone])
        others = {stage: [step for step in own if not step.alone] for stage, own in steps.items()}
        in_parallel([partial(stage.run, left) for stage, left in others.items()], len(others))
        for ended in host:
            ended.result()


def run_stages(stages: Sequence[Stage], concurrent: bool) -> None:
    """Run the stages in order. With ``concurrent``, all stages of CONCURRENT run with the first one of them."""
    together = [stage for stage in stages if concurrent and stage.name in CONCURRENT]
    for stage in stages:
        if stage not in together:
            stage.run()
        elif stage is together[0]:
            run_concurrently(together)


def pack(out: Path) -> Path:
    """Write one archive of everything under ``out``."""
    archive, part = out / ARCHIVE, out / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz") as tar:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path not in (archive, part):
                tar.add(path, Path("flashbwd-gpu") / path.relative_to(out))
    os.replace(part, archive)
    return archive


def summary(outcomes: dict[str, Outcome]) -> str:
    width = max(map(len, outcomes), default=0)
    return "\n".join(f"{title:{width}}  {o.status:6} {o.seconds:5.0f} s  {o.detail}" for title, o in outcomes.items())


def budget_of_a_stage(text: str) -> tuple[str, float]:
    stage, _, seconds = text.partition("=")
    if stage not in STAGES:
        raise argparse.ArgumentTypeError(f"expected STAGE=SECONDS with a stage of {', '.join(STAGES)}, got {text!r}")
    return stage, float(seconds)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, help="folder for logs, results and the archive")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this stage; may be repeated")
    parser.add_argument("--concurrent", action="store_true", help=f"run {', '.join(CONCURRENT)} at the same time")
    parser.add_argument("--resume", action="store_true", help="skip steps that ended in an earlier run")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for each stage (default 480)")
    parser.add_argument(
        "--stage-budget",
        action="append",
        default=[],
        type=budget_of_a_stage,
        metavar="STAGE=SECONDS",
        help="for one stage, instead of --budget-s; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="the short benchmark grid")
    cores = min(MOST_JOBS, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=cores, help=f"test processes (default: cores, at most {MOST_JOBS})")
    parser.add_argument("--step-tests", type=int, default=0, help="minimum tests per step (default: one step)")
    parser.add_argument("--fuzz-calls", type=int, default=20_000, help="calls per kernel family (default 20000)")
    parser.add_argument("--seed", type=int, help="seed of the property tests (default: random, or the resumed run's)")
    parser.add_argument("--select", default="", help="only tests that match this pytest -k expression")
    options = parser.parse_args(arguments)
    if number_of_gpus() == 0:
        parser.error("no CUDA device: every GPU test would be skipped")
    return options


def seed_of(options: argparse.Namespace, state: State) -> int:
    """Return the requested seed, else the seed of the run to resume, else a new seed."""
    if options.seed is None:
        return random.SystemRandom().randrange(2**32) if state.seed is None else state.seed
    if state.seed not in (None, options.seed):
        sys.exit(f"--seed is {options.seed}, expected {state.seed}, the seed of the run to resume")
    return options.seed


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    sys.path.insert(0, str(ROOT))
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    state = State(out / "state.json", options.resume)
    state.seed = seed_of(options, state)
    print(f"property tests: seed {state.seed}; --stage tests --seed {state.seed} repeats them", flush=True)
    names = options.stage or list(STAGES)
    jobs = shared_jobs(options.jobs, options.concurrent)
    plan = Plan(out, jobs, options.select, state.seed, options.step_tests, options.fuzz_calls, options.quick)
    budgets = dict.fromkeys(STAGES, options.budget_s) | dict(options.stage_budget)
    Stage("build", state, plan, options.budget_s).run()
    if all((ROOT / "flashbwd" / library).exists() for library in LIBRARIES):
        state.belongs_to(identity())
        run_stages([Stage(name, state, plan, budgets[name]) for name in names], options.concurrent)
        from flashbwd.bench import acceptance

        files = {title: file_name(title) for title in state.outcomes}
        acceptance.write(out, options.select, {t: asdict(o) for t, o in state.outcomes.items()}, files, state.seed)
    outcomes = {title: o for title, o in state.outcomes.items() if title.split(":")[0] in ["build", *names]}
    archive = pack(out)
    print(f"\n{summary(outcomes)}\n\nwritten: {archive} ({archive.stat().st_size / 2**20:.1f} MiB)")
    statuses = [outcome.status for outcome in outcomes.values()]
    return 1 if FAILED in statuses else INCOMPLETE if LEFT in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
