"""Runs everything that needs a GPU: tests, compute-sanitizer, random calls, benchmarks; packs the results.

    python benchmarks/gpu_run.py OUT                          all stages, one after the other
    python benchmarks/gpu_run.py OUT --stage tests --resume   one stage, without what an earlier run finished
    python benchmarks/gpu_run.py OUT --select sm90 --jobs 15  of tests those that match, with as many processes
    python benchmarks/gpu_run.py OUT --stage tests --seed 7   property tests with the examples of an earlier run

Existing libraries are used as they are; missing ones are built first. Each stage consists of steps. ``OUT/state.json``
records the finished steps. With ``--resume``, a run continues where an earlier run was interrupted, for example by
``--budget-s``, which applies to each stage. Outcomes of other sources or libraries are discarded.

The property tests of the stage ``tests`` draw their examples from a seed that is new in every run. The run prints it,
and ``OUT/state.json`` and the record hold it. A resumed run keeps the seed.

Exit status: 0 all passed, 1 something failed, 3 nothing failed but steps are left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STAGES = ("check", "tests", "sanitizer", "fuzz", "bench")
LIBRARIES = ("_C.so", "_C_cuda.so")
TEST_MODULES = ("fault_kernels.so", "flashbwd_host_tests" + sysconfig.get_config_var("EXT_SUFFIX"))  # for this Python
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PASSED, FAILED, LEFT = "passed", "FAILED", "left"
ARCHIVE = "flashbwd-gpu.tar.gz"
INCOMPLETE = 3
SHORTEST_STEP_S = 15.0  # no step is begun with less time left
TO_FINISH_A_CASE_S = 45.0  # the benchmark stops by itself so long before it would be stopped
SANITIZER_FOUND = 86  # exit status by which compute-sanitizer says that it found something
REFUSED_AS_DECLARED = "refused as declared: "  # how the tests begin the reason of a skip that they expect
TESTS_OF_A_STEP = 2000  # at least
STACKS_AFTER_S = 90  # a test that runs longer, as in a hang, prints its stack
PROPERTY_PROFILE = "random"  # of hypothesis, in tests/conftest.py
TOOLS_AT_ONCE = 3  # a step of the sanitizer stage is one tool over a share of the tests


@dataclass
class Outcome:
    """How a step ended: PASSED, FAILED, or LEFT if time ran out."""

    status: str
    seconds: float = 0.0
    detail: str = ""


def file_name(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", title.replace(": ", "-", 1))


@dataclass(frozen=True)
class Step:
    """One command. ``judge`` maps its exit status and output to the status and detail of an outcome."""

    stage: str
    name: str
    command: list[str]
    judge: Callable[[int, str], tuple[str, str]]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.stage}: {self.name}"

    @property
    def log_name(self) -> str:
        return file_name(self.title) + ".log"


# ---- judges ---------------------------------------------------------------------------------------


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ")[:100] if lines else ""


def plain(status: int, output: str) -> tuple[str, str]:
    return (PASSED, "") if status == 0 else (FAILED, f"status {status}: {last_line(output)}")


def pytest_summary(output: str) -> str:
    """The counts in the last line of pytest's output: "3 failed, 20 passed"."""
    found = re.findall(r"^(?:=+ )?(\d+ \w+.*) in [\d.]+s", output, re.MULTILINE)
    return found[-1] if found else last_line(output)


def by_pytest(status: int, output: str) -> tuple[str, str]:
    """A step passes only if at least one test passed; skipped tests alone are not a success."""
    summary = pytest_summary(output)
    return (PASSED if status == 0 and re.search(r"\b[1-9]\d* passed", summary) else FAILED), summary


def by_sanitizer(status: int, output: str) -> tuple[str, str]:
    """Every test must run, except those that a backend refuses as declared in tests/kit/support_matrix.py."""
    found = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", output)
    verdict, summary = by_pytest(status, output)
    skips = [line for line in re.findall(r"^SKIPPED .*$", output, re.MULTILINE) if REFUSED_AS_DECLARED not in line]
    return (FAILED if skips else verdict), ", ".join([summary, *found[-1:], *skips[:1]])


def by_bench(status: int, output: str) -> tuple[str, str]:
    bars = re.findall(r"^bars: .*$", output, re.MULTILINE)
    return {0: PASSED, INCOMPLETE: LEFT}.get(status, FAILED), bars[-1] if bars else last_line(output)


# ---- steps ----------------------------------------------------------------------------------------


def build_steps() -> Iterator[Step]:
    """Steps that build missing libraries and test modules."""
    if not all((ROOT / "flashbwd" / library).exists() for library in LIBRARIES):
        yield Step("build", "libraries", [sys.executable, "setup.py", "build_ext", "--inplace"], plain)
    if not all((ROOT / "tests" / "_built" / module).exists() for module in TEST_MODULES):
        yield Step("build", "test modules", [sys.executable, "setup.py", "build_test_modules"], plain)


def check_steps(out: Path) -> Iterator[Step]:
    yield Step("check", "python -m flashbwd", [sys.executable, "-m", "flashbwd"], plain)
    example = [sys.executable, "examples/train_gpt.py", "--out", str(out / "example")]
    yield Step("check", "example", example, plain)


@dataclass(frozen=True)
class Selection:
    """The tests with these marks that match ``select`` (pytest's -k)."""

    marks: str
    select: str

    @property
    def arguments(self) -> list[str]:
        return ["-m", self.marks] + (["-k", self.select] if self.select else [])

    @property
    def collection(self) -> list[str]:
        return [sys.executable, "-m", "pytest", *self.arguments, "--collect-only", "-q", "tests"]

    def tests(self) -> list[str]:
        """The tests by their pytest ids."""
        listed = subprocess.run(self.collection, cwd=ROOT, capture_output=True, text=True)
        return re.findall(r"^tests/[^:\s]+\.py::.*$", listed.stdout, re.MULTILINE)

    def step_without_tests(self, stage: str) -> Step:
        found = f'no test is marked "{self.marks}"' + (f' and matches "{self.select}"' if self.select else "")
        return Step(stage, "collection", self.collection, lambda status, output: (FAILED, found))

    def title(self, name: str) -> str:
        return f"{name}, {self.select}" if self.select else name


def test_steps(out: Path, jobs: int, select: str, seed: int) -> Iterator[Step]:
    """The files with tests that need a GPU, some to a step: workers take seconds to start."""
    selection = Selection("gpu", select)
    counts = Counter(test.split("::")[0] for test in selection.tests())
    if not counts:
        yield selection.step_without_tests("tests")
    steps: list[list[str]] = []
    room = 0
    for file, count in counts.items():
        if room <= 0:
            steps.append([])
            room = TESTS_OF_A_STEP
        steps[-1].append(file)
        room -= count
    for files in steps:
        name = files[0] if len(files) == 1 else f"{files[0]} to {Path(files[-1]).name}"
        report = out / "reports" / f"{Path(files[0]).stem}.xml"
        command = [sys.executable, "-m", "pytest", *selection.arguments, "-q", f"--junitxml={report}", *files]
        command += [f"--hypothesis-seed={seed}", "-o", f"faulthandler_timeout={STACKS_AFTER_S}"]
        if jobs > 1:
            command += ["-n", str(jobs), "--dist", "worksteal"]
        yield Step("tests", selection.title(name), command, by_pytest, {"HYPOTHESIS_PROFILE": PROPERTY_PROFILE})


def sanitizer_steps(jobs: int, select: str) -> Iterator[Step]:
    """Steps that run each tool on the tests marked for it, in shares, because the tools slow down the host.

    PyTorch's memory cache is off, so that an access past the end of a tensor leaves its allocation. initcheck must see
    the writes of every kernel, also of PyTorch's; the other tools check only this library's kernels. initcheck does not
    see TMA stores (a kernel with a single ``cp.async.bulk`` to global memory shows this), with which the sm90 kernel
    writes its gradients. Tests with NaN in the workspace and the outputs replace it for sm90.
    """
    selection = Selection("gpu and sanitizer", select)
    tests = selection.tests()
    if not tests:
        yield selection.step_without_tests("sanitizer")
    shares = min(max(1, jobs // TOOLS_AT_ONCE), len(tests))
    for share in range(shares):
        for tool in TOOLS:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND)]
            command += ["--print-limit", "20"]
            chosen = tests[share::shares]
            if tool == "initcheck":
                chosen = [test for test in chosen if "sm90" not in test]
            else:
                command += ["--kernel-name", "kns=flashbwd"]
            command += [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *chosen]
            name = selection.title(f"{tool}, {share + 1} of {shares}")
            if chosen:
                yield Step("sanitizer", name, command, by_sanitizer, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def by_fuzz(status: int, output: str) -> tuple[str, str]:
    return (PASSED if status == 0 else FAILED), last_line(output)


def fuzz_steps(out: Path, calls: int) -> Iterator[Step]:
    """Steps that run random attention calls of each kernel family; fuzz.py has its own watchdog."""
    for backend in ("sm90", "sm80"):
        command = [sys.executable, "benchmarks/fuzz.py", "--backend", backend, "--calls", str(calls)]
        yield Step("fuzz", backend, [*command, "--out", str(out / f"fuzz-{backend}.json")], by_fuzz)


def bench_steps(out: Path, quick: bool) -> Iterator[Step]:
    for suite in ("attention", "layer_norm", "decoding", "block"):
        command = [sys.executable, "-m", "flashbwd", "bench", "--suite", suite, "--out", str(out / "results")]
        yield Step("bench", suite, command + ["--resume"] + (["--quick"] if quick else []), by_bench)


def steps_of(stage: str, out: Path, options: argparse.Namespace) -> Iterator[Step]:
    if stage == "build":
        return build_steps()
    if stage == "check":
        return check_steps(out)
    if stage == "tests":
        return test_steps(out, options.jobs, options.select, options.seed)
    if stage == "sanitizer":
        return sanitizer_steps(options.jobs, options.select)
    if stage == "fuzz":
        return fuzz_steps(out, options.fuzz_calls)
    return bench_steps(out, options.quick)


# ---- running --------------------------------------------------------------------------------------


def run(step: Step, out: Path, seconds: float) -> Outcome:
    """Run a step for at most ``seconds``; its output goes to its log."""
    command = list(step.command)
    if step.stage in ("bench", "fuzz"):
        command += ["--budget-s", f"{max(1.0, seconds - TO_FINISH_A_CASE_S):.0f}"]
    if shutil.which(command[0]) is None:
        return Outcome(FAILED, 0.0, f"{command[0]} is not on the PATH")
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **step.environment, "PYTHONPATH": search}
    environment["FLASHBWD_TEST_SUMMARY"] = str(out / "summaries" / f"{file_name(step.title)}.json")
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


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def identity() -> dict[str, object]:
    """The sources and libraries of an outcome; outcomes of others are stale."""
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
            self.outcomes = {title: Outcome(**outcome) for title, outcome in data["outcomes"].items()}
            self.identity = data["identity"]
            self.seed = data.get("seed")

    def belongs_to(self, now: dict[str, object]) -> None:
        """Discard outcomes of other sources or libraries."""
        if self.identity not in (None, now):
            print("sources or libraries have changed: starting over", flush=True)
            self.outcomes = {title: o for title, o in self.outcomes.items() if title.startswith("build")}
        self.identity = now
        self.save()

    def ended(self, title: str) -> bool:
        return title in self.outcomes and self.outcomes[title].status != LEFT

    def record(self, title: str, outcome: Outcome) -> None:
        with self.lock:
            self.outcomes[title] = outcome
            self.save()

    def save(self) -> None:
        outcomes = {title: asdict(outcome) for title, outcome in self.outcomes.items()}
        part = self.path.with_suffix(".part")
        part.write_text(
            json.dumps({"identity": self.identity, "seed": self.seed, "outcomes": outcomes}, indent=1) + "\n"
        )
        os.replace(part, self.path)


def run_stage(stage: str, state: State, out: Path, options: argparse.Namespace) -> None:
    """Run the steps of a stage one after the other; in the sanitizer stage, ``--jobs`` steps in parallel.

    Steps of the sanitizer stage leave the GPU idle most of the time.
    """
    deadline = time.monotonic() + options.budget_s

    def take(step: Step) -> None:
        seconds = deadline - time.monotonic()
        if seconds < min(SHORTEST_STEP_S, options.budget_s / 2):
            state.record(step.title, Outcome(LEFT, 0.0, "not started: the time of the stage is used up"))
            return
        print(f"{step.title} ...", flush=True)
        outcome = run(step, out, seconds)
        print(f"{step.title}: {outcome.status} in {outcome.seconds:.0f} s, {outcome.detail}", flush=True)
        state.record(step.title, outcome)

    left = (step for step in steps_of(stage, out, options) if not state.ended(step.title))
    if stage != "sanitizer":
        for step in left:
            take(step)
        return
    pool = ThreadPoolExecutor(options.jobs)
    try:
        for ended in [pool.submit(take, step) for step in left]:
            ended.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, only the running steps finish


def pack(out: Path) -> Path:
    """One archive of everything under ``out``."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for logs, results and the archive")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this stage; may be repeated")
    parser.add_argument("--resume", action="store_true", help="skip steps that ended in an earlier run")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for each stage (default 480)")
    parser.add_argument("--quick", action="store_true", help="the short benchmark grid")
    parser.add_argument("--jobs", type=int, default=min(6, os.cpu_count() or 1), help="pytest workers (default 6)")
    parser.add_argument("--fuzz-calls", type=int, default=20_000, help="of each kernel family (default 20000)")
    parser.add_argument("--seed", type=int, help="of the property tests (default: drawn; resumed: the earlier run's)")
    parser.add_argument("--select", default="", help="only tests that match, as pytest's -k")
    options = parser.parse_args(arguments)
    if not has_gpu():
        parser.error("no CUDA device: every GPU test would be skipped")
    sys.path.insert(0, str(ROOT))
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    state = State(out / "state.json", options.resume)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32) if state.seed is None else state.seed
    elif state.seed not in (None, options.seed):
        parser.error(f"the run to resume has seed {state.seed}: its record can't hold tests of another")
    state.seed = options.seed
    print(f"property tests: seed {options.seed}; --stage tests --seed {options.seed} repeats them", flush=True)
    stages = options.stage or list(STAGES)
    run_stage("build", state, out, options)
    if all((ROOT / "flashbwd" / library).exists() for library in LIBRARIES):
        state.belongs_to(identity())
        for stage in stages:
            run_stage(stage, state, out, options)
        from flashbwd.bench import acceptance

        files = {title: file_name(title) for title in state.outcomes}
        acceptance.write(out, options.select, {t: asdict(o) for t, o in state.outcomes.items()}, files, options.seed)
    stages = ["build", *stages]
    outcomes = {title: o for title, o in state.outcomes.items() if title.split(":")[0] in stages}
    archive = pack(out)
    print(f"\n{summary(outcomes)}\n\nwritten: {archive} ({archive.stat().st_size / 2**20:.1f} MiB)")
    statuses = [outcome.status for outcome in outcomes.values()]
    return 1 if FAILED in statuses else INCOMPLETE if LEFT in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
