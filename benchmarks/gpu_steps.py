"""The steps of benchmarks/gpu_run.py: the commands of each stage, and how their output is judged.

A stage consists of steps, and a step is one command. No other step may use a GPU
while a step with ``alone`` runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LIBRARIES = ("_C.so", "_C_cuda.so")
TEST_MODULES = ("fault_kernels.so", "flashbwd_host_tests" + sysconfig.get_config_var("EXT_SUFFIX"))  # for this Python
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")  # slowest first, so that the last steps are short
PASSED, FAILED, LEFT = "passed", "FAILED", "left"
INCOMPLETE = 3
SANITIZER_FOUND = 86  # exit status of compute-sanitizer if it found an error
REFUSED_AS_DECLARED = "refused as declared: "  # first words of the reason of an expected skip
STACKS_AFTER_S = 90  # a test that runs longer, for example because it hangs, prints its stack
PROPERTY_PROFILE = "random"  # hypothesis profile in tests/conftest.py
HOST = "host"  # the stage of the tests that need no GPU
TOOLS_AT_ONCE = 3  # a step of the sanitizer stage runs one tool on a share of the tests
ALONE = "alone"  # marks tests that need up to 70 GiB, or all GPUs of the machine
# Mark -> text that each file with such a test contains. Targets of tests/support.py add the mark gpu to their tests.
# The function "small" of some test files adds the mark sanitizer.
WORDS = {"gpu": r"mark\.gpu|TARGETS", "sanitizer": r"mark\.sanitizer|import [^\n]*\bsmall\b", ALONE: r"mark\.alone"}


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
    alone: bool = False  # no other step may use a GPU at the same time

    @property
    def title(self) -> str:
        return f"{self.stage}: {self.name}"

    @property
    def log_name(self) -> str:
        return file_name(self.title) + ".log"


@dataclass(frozen=True)
class Plan:
    """The options of a run that its steps depend on."""

    out: Path  # the folder of the run
    jobs: dict[str, int]  # processes by stage
    select: str = ""  # pytest's -k
    seed: int = 0  # seed of the property tests
    step_tests: int = 0  # minimum tests per step; 0 puts all tests that may share the GPU into one step
    fuzz_calls: int = 20_000  # random calls per kernel family; an eighth of it for FlexAttention
    quick: bool = False  # the short benchmark grid


def shared_jobs(jobs: int, concurrent: bool) -> dict[str, int]:
    """Return the number of processes by stage. Concurrent stages together get at most 1.75 times ``jobs``.

    More processes than cores keep the cores busy while one stage starts, collects or waits for its last tests. The
    sanitizer and the fuzzer get fewer processes, because each of them takes more of the GPU's memory. The stage
    ``host`` is not counted: it usually ends before the other stages use all their processes.
    """
    if not concurrent:
        return {HOST: jobs, "tests": jobs, "sanitizer": jobs, "fuzz": min(14, jobs)}
    return {HOST: max(1, jobs // 2), "tests": jobs, "sanitizer": max(1, jobs // 2), "fuzz": max(1, jobs // 4)}


# ---- judges ---------------------------------------------------------------------------------------


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ")[:100] if lines else ""


def plain(status: int, output: str) -> tuple[str, str]:
    return (PASSED, "") if status == 0 else (FAILED, f"status {status}: {last_line(output)}")


def pytest_summary(output: str) -> str:
    """Return the counts in the last line of pytest's output: "3 failed, 20 passed"."""
    found = re.findall(r"^(?:=+ )?(\d+ \w+.*) in [\d.]+s", output, re.MULTILINE)
    return found[-1] if found else last_line(output)


def by_pytest(status: int, output: str) -> tuple[str, str]:
    """Judge a step of tests. It passes only if at least one test passed; skipped tests alone are not a success."""
    summary = pytest_summary(output)
    return (PASSED if status == 0 and re.search(r"\b[1-9]\d* passed", summary) else FAILED), summary


def by_sanitizer(status: int, output: str) -> tuple[str, str]:
    """Judge a sanitizer step. Every test must run, except refusals declared in tests/kit/support_matrix.py."""
    found = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", output)
    verdict, summary = by_pytest(status, output)
    skips = [line for line in re.findall(r"^SKIPPED .*$", output, re.MULTILINE) if REFUSED_AS_DECLARED not in line]
    return (FAILED if skips else verdict), ", ".join([summary, *found[-1:], *skips[:1]])


def by_bench(status: int, output: str) -> tuple[str, str]:
    bars = re.findall(r"^bars: .*$", output, re.MULTILINE)
    return {0: PASSED, INCOMPLETE: LEFT}.get(status, FAILED), bars[-1] if bars else last_line(output)


def by_fuzz(status: int, output: str) -> tuple[str, str]:
    """Judge a fuzz step. If time ran out before all calls ran, the step is incomplete, but has not failed."""
    found = last_line(output)
    without_failure = status != 0 and found.endswith(" calls, 0 failures, calls are left")
    return (PASSED if status == 0 else LEFT if without_failure else FAILED), found


# ---- steps ----------------------------------------------------------------------------------------


def build_steps(plan: Plan) -> Iterator[Step]:
    """Yield steps that build missing libraries and test modules."""
    if not all((ROOT / "flashbwd" / library).exists() for library in LIBRARIES):
        yield Step("build", "libraries", [sys.executable, "setup.py", "build_ext", "--inplace"], plain)
    if not all((ROOT / "tests" / "_built" / module).exists() for module in TEST_MODULES):
        yield Step("build", "test modules", [sys.executable, "setup.py", "build_test_modules"], plain)


def check_steps(plan: Plan) -> Iterator[Step]:
    yield Step("check", "python -m flashbwd", [sys.executable, "-m", "flashbwd"], plain)
    example = [sys.executable, "examples/train_gpt.py", "--out", str(plan.out / "example")]
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
    def files(self) -> list[str]:
        """Return the files that can contain such tests. Importing all other files would take seconds."""
        wanted = re.sub(r"not \w+", "", self.marks)
        words = [word for mark, word in WORDS.items() if mark in wanted]
        texts = {file: file.read_text() for file in sorted((ROOT / "tests").glob("test_*.py"))}
        found = [file for file, text in texts.items() if all(re.search(word, text) for word in words)]
        return [str(file.relative_to(ROOT)) for file in found]

    @property
    def collection(self) -> list[str]:
        return [sys.executable, "-m", "pytest", *self.arguments, "--collect-only", "-q", *self.files]

    def tests(self) -> list[str]:
        """Return the pytest ids of the tests."""
        listed = subprocess.run(self.collection, cwd=ROOT, capture_output=True, text=True)
        return re.findall(r"^tests/[^:\s]+\.py::.*$", listed.stdout, re.MULTILINE)

    def step_without_tests(self, stage: str) -> Step:
        """Return a step that fails, because a stage without tests proves nothing."""
        found = f'no test is marked "{self.marks}"' + (f' and matches "{self.select}"' if self.select else "")
        return Step(stage, "collection", [sys.executable, "-c", ""], lambda status, output: (FAILED, found))

    def title(self, name: str) -> str:
        return f"{name}, {self.select}" if self.select else name


def host_steps(plan: Plan) -> Iterator[Step]:
    """Yield the step of all tests that need no GPU, with the examples of CI. It may run beside any other step."""
    selection = Selection("not gpu", plan.select)
    command = [sys.executable, "-m", "pytest", *selection.arguments, "-q", "tests"]
    command += ["-n", str(plan.jobs[HOST]), "--dist", "worksteal", "--durations=20"]
    yield Step(HOST, selection.title("tests"), command, by_pytest)


def groups_of(counts: dict[str, int], least: int) -> Iterator[list[str]]:
    """Divide consecutive files into groups of at least ``least`` tests. The last group may have fewer tests."""
    group: list[str] = []
    for file in counts:
        group.append(file)
        if sum(counts[file] for file in group) >= least:
            yield group
            group = []
    if group:
        yield group


def test_steps(plan: Plan) -> Iterator[Step]:
    """Yield one step for the tests that run alone on the GPUs, and one or more for all other tests.

    Tests that need much memory are skipped if the contexts and caches of other processes take it. NCCL's kernels wait
    for each other, so beside other work on the GPUs such a test can take minutes. Tests are collected in advance only
    if their number matters, because collection takes as long as 100 tests.
    """
    little, much = (Selection(f"gpu and {mark}", plan.select) for mark in (f"not {ALONE}", ALONE))
    if not plan.select and not plan.step_tests:
        yield _test_step(plan, much, ALONE, much.files)
        yield _test_step(plan, little, "all others", little.files)
        return
    found = {selection: Counter(test.split("::")[0] for test in selection.tests()) for selection in (much, little)}
    if not any(found.values()):
        yield little.step_without_tests("tests")
    if found[much]:
        yield _test_step(plan, much, ALONE, list(found[much]))
    least = plan.step_tests or sum(found[little].values())
    for files in groups_of(found[little], least):
        name = files[0] if len(files) == 1 else f"{files[0]} to {Path(files[-1]).name}"
        yield _test_step(plan, little, name, files)


def _test_step(plan: Plan, selection: Selection, name: str, files: list[str]) -> Step:
    alone = selection.marks.endswith(f"and {ALONE}")
    report = plan.out / "reports" / f"{file_name(name)}.xml"
    command = [sys.executable, "-m", "pytest", *selection.arguments, "-q", f"--junitxml={report}", *files]
    command += [f"--hypothesis-seed={plan.seed}", "-o", f"faulthandler_timeout={STACKS_AFTER_S}", "--durations=20"]
    if plan.jobs["tests"] > 1 and not alone:
        command += ["-n", str(plan.jobs["tests"]), "--dist", "worksteal"]
    environment = {"HYPOTHESIS_PROFILE": PROPERTY_PROFILE}
    return Step("tests", selection.title(name), command, by_pytest, environment, alone)


def sanitizer_steps(plan: Plan) -> Iterator[Step]:
    """Yield steps that run each tool on shares of the tests marked for it, because the tools slow down the host.

    PyTorch's memory cache is off, so that an access past the end of a tensor leaves its allocation. initcheck must see
    the writes of all kernels, including PyTorch's. The other tools check only this library's kernels. initcheck does
    not see TMA stores (a kernel with a single ``cp.async.bulk`` to global memory shows this), with which the sm90
    kernel writes its gradients. For sm90, tests with NaN in the workspace and the outputs replace initcheck.
    """
    selection = Selection("gpu and sanitizer", plan.select)
    tests = selection.tests()
    if not tests:
        yield selection.step_without_tests("sanitizer")
    shares = min(max(1, plan.jobs["sanitizer"] // TOOLS_AT_ONCE), len(tests))
    for tool in TOOLS:
        for share in range(shares):
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


def fuzz_steps(plan: Plan) -> Iterator[Step]:
    """Yield steps that run random attention calls of each kernel family. fuzz.py has its own watchdog.

    FlexAttention has fewer calls, because many of them compile a kernel.
    """
    for backend, calls in (
        ("short", plan.fuzz_calls),
        ("sm90", plan.fuzz_calls),
        ("sm80", plan.fuzz_calls),
        ("flex", max(1, plan.fuzz_calls // 8)),
        ("flex_sm80", max(1, plan.fuzz_calls // 16)),
    ):
        command = [sys.executable, "benchmarks/fuzz.py", "--backend", backend, "--calls", str(calls)]
        command += ["--workers", str(plan.jobs["fuzz"]), "--out", str(plan.out / f"fuzz-{backend}.json")]
        yield Step("fuzz", backend, command, by_fuzz)


def bench_steps(plan: Plan) -> Iterator[Step]:
    for suite in ("attention", "attention_features", "layer_norm", "decoding", "block", "flex", "short", "triangle"):
        command = [sys.executable, "-m", "flashbwd", "bench", "--suite", suite, "--out", str(plan.out / "results")]
        yield Step("bench", suite, command + ["--resume"] + (["--quick"] if plan.quick else []), by_bench)


def steps_of(stage: str, plan: Plan) -> Iterator[Step]:
    steps: dict[str, Callable[[Plan], Iterator[Step]]] = {
        "build": build_steps,
        "check": check_steps,
        HOST: host_steps,
        "tests": test_steps,
        "sanitizer": sanitizer_steps,
        "fuzz": fuzz_steps,
        "bench": bench_steps,
    }
    return steps[stage](plan)
