"""benchmarks/gpu_run.py: its stages and steps, how it judges their output, and the record of a run."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from kit import gpu_lock, summary

from flashbwd.bench import acceptance, machine

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture
def gpu_run(monkeypatch) -> ModuleType:
    # The module adds the source tree to the path; later tests must not import from there.
    monkeypatch.setattr(sys, "path", [BENCHMARKS, *sys.path])
    for name in ("gpu_steps", "gpu_run"):
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIBRARIES", ("__init__.py",))  # a file that always exists
    monkeypatch.setattr(module, "number_of_gpus", lambda: 1)
    monkeypatch.setattr(module, "identity", lambda: {"commit": "c"})
    return module


@pytest.fixture
def steps(gpu_run) -> ModuleType:
    return sys.modules["gpu_steps"]


def _plan(steps, jobs: int = 4, **changes):
    return steps.Plan(Path("out"), steps.shared_jobs(jobs, concurrent=False), **changes)


def _python(gpu_run, name: str, code: str, stage: str = "check"):
    return sys.modules["gpu_steps"].Step(stage, name, [sys.executable, "-c", code], sys.modules["gpu_steps"].plain)


def _steps(gpu_run, monkeypatch, *steps):
    monkeypatch.setattr(gpu_run, "steps_of", lambda stage, plan: [s for s in steps if s.stage == stage])


def test_gpu_run_reports_each_step_and_packs_the_logs(gpu_run, monkeypatch, tmp_path, capsys):
    _steps(
        gpu_run,
        monkeypatch,
        _python(gpu_run, "good", "print('fine')"),
        _python(gpu_run, "bad", "raise SystemExit('broken')"),
    )
    assert gpu_run.main([str(tmp_path), "--stage", "check"]) == 1
    shown = capsys.readouterr().out
    assert "check: good  passed" in shown
    assert "status 1: broken" in shown
    with tarfile.open(tmp_path / gpu_run.ARCHIVE) as tar:
        names = tar.getnames()
    assert "flashbwd-gpu/state.json" in names
    assert "flashbwd-gpu/logs/check-good.log" in names


def test_gpu_run_stops_a_step_at_its_time_limit(gpu_run, tmp_path):
    endless = _python(gpu_run, "endless", "import time; time.sleep(1000)")
    outcome = gpu_run.run(endless, tmp_path, 0.5)
    assert (outcome.status, outcome.detail) == (gpu_run.LEFT, "stopped after 0 s")


def test_every_step_has_another_gpu_as_device_0(gpu_run, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_run, "number_of_gpus", lambda: 3)
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    _steps(gpu_run, monkeypatch, *(_python(gpu_run, str(i), show) for i in range(4)))
    gpu_run.main([str(tmp_path), "--stage", "check"])
    shown = [(tmp_path / "logs" / f"check-{i}.log").read_text().strip() for i in range(4)]
    assert sorted(set(shown)) == ["0,1,2", "1,2,0", "2,0,1"]
    assert shown[0] == shown[3]


def test_the_gpus_of_a_process_are_among_those_that_it_may_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert gpu_lock.devices_from(3, 2) == {"CUDA_VISIBLE_DEVICES": "7,4"}
    assert gpu_lock.devices_from(3, 1) == {}


FAILURES = """
import os, pathlib
def test_that_fails():
    assert 6 * 7 == 40
def test_that_reads_what_failed():
    told = pathlib.Path(os.environ["FLASHBWD_TEST_SUMMARY"]).with_suffix(".failures.txt").read_text()
    assert "test_that_fails" in told and "6 * 7" in told
"""


def test_a_failure_is_written_before_the_run_ends(tmp_path):
    (tmp_path / "test_it.py").write_text(FAILURES)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment["FLASHBWD_TEST_SUMMARY"] = str(tmp_path / "summaries" / "it.json")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(tmp_path), "-q", "test_it.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr


def test_gpu_run_records_the_seconds_of_a_step(gpu_run, monkeypatch, tmp_path):
    """The clock advances by 30 seconds at each reading."""
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(gpu_run.time, "monotonic", lambda: next(clock))
    for status in ("passed", "FAILED"):
        outcome = gpu_run.run(_python(gpu_run, status, f"raise SystemExit({status == 'FAILED'})"), tmp_path, 60.0)
        assert (outcome.status, outcome.seconds) == (status, 30.0)


def test_gpu_run_resumes_with_the_steps_that_are_left(gpu_run, monkeypatch, tmp_path):
    mark = tmp_path / "ran"
    first = _python(gpu_run, "first", f"open({str(mark)!r}, 'a').write('1')")
    second = _python(gpu_run, "second", "pass")
    _steps(gpu_run, monkeypatch, first, second)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        run, left = gpu_run.run, gpu_run.Outcome(gpu_run.LEFT)
        patch.setattr(gpu_run, "run", lambda step, *rest: left if step is second else run(step, *rest))
        assert gpu_run.main([str(out), "--stage", "check"]) == gpu_run.INCOMPLETE
    assert gpu_run.main([str(out), "--stage", "check", "--resume"]) == 0
    assert mark.read_text() == "1"
    assert gpu_run.main([str(out), "--stage", "check"]) == 0
    assert mark.read_text() == "11"


def test_gpu_run_starts_over_with_other_libraries(gpu_run, monkeypatch, tmp_path):
    mark = tmp_path / "ran"
    _steps(gpu_run, monkeypatch, _python(gpu_run, "first", f"open({str(mark)!r}, 'a').write('1')"))
    out = tmp_path / "out"
    gpu_run.main([str(out), "--stage", "check"])
    monkeypatch.setattr(gpu_run, "identity", lambda: {"commit": "c", "libraries": {"_C.so": "other"}})
    gpu_run.main([str(out), "--stage", "check", "--resume"])
    assert mark.read_text() == "11"


def test_after_another_commit_with_the_same_kernels_only_failed_steps_run_again(gpu_run, monkeypatch, tmp_path):
    ran = tmp_path / "ran"
    for kernels, commit, status, expected in [
        ("k", "a", 1, {"first": "a", "second": "a"}),
        ("k", "a", 0, {"first": "a", "second": "a"}),
        ("k", "b", 0, {"first": "a", "second": "b"}),
        ("l", "c", 0, {"first": "c", "second": "c"}),
    ]:
        first = _python(gpu_run, "first", f"open({str(ran)!r}, 'a').write('1')")
        second = _python(gpu_run, "second", f"open({str(ran)!r}, 'a').write('2'); raise SystemExit({status})")
        _steps(gpu_run, monkeypatch, first, second)
        now = {"kernels": kernels, "commit": commit}
        monkeypatch.setattr(gpu_run, "identity", lambda now=now: now)
        ended = gpu_run.main([str(tmp_path / "out"), "--stage", "check", "--resume"])
        assert ended == (1 if commit == "a" else 0)
        outcomes = json.loads((tmp_path / "out" / "state.json").read_text())["outcomes"]
        assert {title.split(": ")[1]: outcome["commit"] for title, outcome in outcomes.items()} == expected
    assert ran.read_text() == "12" + "2" + "12"


def test_gpu_run_stops_if_the_libraries_cannot_be_built(gpu_run, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_run, "LIBRARIES", ("no such library.so",))
    mark = tmp_path / "ran"
    _steps(
        gpu_run,
        monkeypatch,
        _python(gpu_run, "libraries", "raise SystemExit(1)", stage="build"),
        _python(gpu_run, "first", f"open({str(mark)!r}, 'a')"),
    )
    assert gpu_run.main([str(tmp_path / "out"), "--stage", "check"]) == 1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "== 20 passed, 3 deselected in 4.20s ==", ("passed", "20 passed, 3 deselected")),
        (1, "FAILED tests/x.py\n2 failed, 18 passed in 4.20s", ("FAILED", "2 failed, 18 passed")),
        (0, "968 skipped in 4.20s", ("FAILED", "968 skipped")),
        (0, "1 passed, 968 skipped in 4.20s", ("passed", "1 passed, 968 skipped")),
        (5, "no tests ran", ("FAILED", "no tests ran")),
        (2, "1 error in 0.5s", ("FAILED", "1 error")),
    ],
)
def test_gpu_run_judges_the_output_of_pytest(steps, status, output, outcome):
    assert steps.by_pytest(status, output) == outcome


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "9 passed in 4s\n========= ERROR SUMMARY: 0 errors", ("passed", "9 passed, ERROR SUMMARY: 0 errors")),
        (0, "90 skipped in 4s\n========= ERROR SUMMARY: 0 errors", ("FAILED", "90 skipped, ERROR SUMMARY: 0 errors")),
        (
            0,
            "SKIPPED [1] tests/x.py:3: refused as declared: it needs 9.0\n1 passed, 1 skipped in 4s",
            ("passed", "1 passed, 1 skipped"),
        ),
        (
            0,
            "SKIPPED [1] tests/x.py:3: it takes no softcap\n1 passed, 1 skipped in 4s",
            ("FAILED", "1 passed, 1 skipped, SKIPPED [1] tests/x.py:3: it takes no softcap"),
        ),
        (86, "9 passed in 4s\n========= ERROR SUMMARY: 2 errors", ("FAILED", "9 passed, ERROR SUMMARY: 2 errors")),
    ],
)
def test_gpu_run_judges_the_output_of_the_sanitizer(steps, status, output, outcome):
    assert steps.by_sanitizer(status, output) == outcome


@pytest.mark.parametrize(("status", "word"), [(0, "passed"), (3, "left"), (1, "FAILED")])
def test_gpu_run_judges_the_output_of_the_benchmark(steps, status, word):
    assert steps.by_bench(status, "x\nbars: 3 reached\nwritten: y") == (word, "bars: 3 reached")


def _session(gpu_run, name: str, stage: str, passed: int):
    """A step that writes the summary of a test session."""
    found = {"counts": {"passed": passed, "skipped": 1}, "refusals": {"it needs 9.0": 1}, "skips": {}}
    found["error_over_limit"] = {"sm90 bfloat16": {"dq": passed / 10}}
    code = "import json, os, pathlib; path = pathlib.Path(os.environ['FLASHBWD_TEST_SUMMARY'])\n"
    code += f"path.parent.mkdir(exist_ok=True); path.write_text(json.dumps({found!r}))"
    return _python(gpu_run, name, code, stage)


def test_gpu_run_records_tests_and_sanitizer_for_a_release(gpu_run, monkeypatch, tmp_path):
    tools = [_session(gpu_run, f"{tool}, 1 of 1", "sanitizer", 2) for tool in acceptance.SANITIZER_TOOLS]
    steps = [_session(gpu_run, f"tests/{name}", "tests", n) for name, n in (("a", 3), ("b", 5))]
    _steps(gpu_run, monkeypatch, *steps, *tools)
    assert gpu_run.main([str(tmp_path), "--stage", "tests"]) == 0
    assert gpu_run.main([str(tmp_path), "--stage", "sanitizer", "--resume"]) == 0
    (found,) = acceptance.load(tmp_path / "acceptance").values()
    tests = found["stages"]["tests"]
    assert (tests["counts"], tests["refusals"]) == ({"passed": 8, "skipped": 2}, {"it needs 9.0": 2})
    assert tests["error_over_limit"] == {"sm90 bfloat16": {"dq": 0.5}}
    assert found["stages"]["sanitizer"]["counts"]["passed"] == 8
    sources = machine.kernel_sources_hash()
    assert found["machine"]["kernel_sources"] == sources
    found["machine"]["kind"] = "cpu"
    assert acceptance.problems(found, sources) == ["its tests did not run on a GPU"]
    found["machine"]["kind"] = "cuda"
    assert acceptance.problems(found, sources) == []
    assert acceptance.problems(found, "other") == ["its kernel sources differ from csrc"]


def test_gpu_run_recognises_declared_refusals_as_the_tests_write_them(steps):
    assert steps.REFUSED_AS_DECLARED == summary.DECLARED


def test_gpu_run_fails_without_a_gpu(gpu_run, monkeypatch, tmp_path, capsys):
    _steps(gpu_run, monkeypatch)
    monkeypatch.setattr(gpu_run, "number_of_gpus", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        gpu_run.main([str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gpu_run_gives_each_tool_every_test_once(steps, monkeypatch):
    tests = [f"tests/test_x.py::test_y[{n}-{backend}]" for n in range(5) for backend in ("sm80", "sm90")]
    monkeypatch.setattr(steps.Selection, "tests", lambda self: tests if self.marks == "gpu and sanitizer" else [])
    for jobs in (1, 6, 100):
        given = {tool: [] for tool in steps.TOOLS}
        found = list(steps.sanitizer_steps(_plan(steps, jobs)))
        for step in found:
            given[step.name.split(",")[0]] += [word for word in step.command if "::" in word]
        assert len({step.log_name for step in found}) == len(found)
        assert all(step.command[step.command.index("--tool") + 1] == step.name.split(",")[0] for step in found)
        unseen = {"initcheck": "sm90"}  # initcheck does not see writes of bulk copies
        for tool, of_tool in given.items():
            assert sorted(of_tool) == sorted(test for test in tests if unseen.get(tool, "no backend") not in test)


def test_gpu_run_gives_each_tool_the_flags_that_make_it_find_errors(steps, monkeypatch):
    """With these flags, errors fail the run, an access past a tensor leaves its allocation, and initcheck sees the
    writes of PyTorch's kernels."""
    tests = ["tests/test_x.py::test_y[sm80]", "tests/test_x.py::test_y[sm90]"]
    monkeypatch.setattr(steps.Selection, "tests", lambda self: tests)
    found = list(steps.sanitizer_steps(_plan(steps, 1)))
    assert {step.command[2] for step in found} == {"memcheck", "racecheck", "initcheck", "synccheck"}
    for step in found:
        before_python = step.command[: step.command.index(sys.executable)]
        options = dict(zip(before_python[1::2], before_python[2::2], strict=True))
        assert before_python[0] == "compute-sanitizer"
        assert options["--error-exitcode"] == str(steps.SANITIZER_FOUND) != "0"
        assert options.get("--kernel-name") == (None if step.command[2] == "initcheck" else "kns=flashbwd")
        assert step.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


FILES = {f"tests/test_{n}.py": count for n, count in enumerate((3, 700, 1, 450, 60, 2))}


def _collects(steps, monkeypatch, much: int = 0) -> None:
    """Make collection find FILES, and ``much`` tests that run alone in the first file."""
    tests = [f"{file}::test_y[{n}]" for file, count in FILES.items() for n in range(count)]
    large = [f"tests/test_0.py::test_large[{n}]" for n in range(much)]
    found = {"gpu and not alone": tests, "gpu and alone": large}
    monkeypatch.setattr(steps.Selection, "tests", lambda self: found.get(self.marks, []))


@pytest.mark.parametrize(("least", "count"), [(500, 3), (700, 2), (1_000_000, 1)])
def test_gpu_run_tests_every_file_once(steps, monkeypatch, least, count):
    _collects(steps, monkeypatch)
    found = list(steps.test_steps(_plan(steps, step_tests=least)))
    of_a_step = [[word for word in step.command if word in FILES] for step in found]
    assert [file for files in of_a_step for file in files] == list(FILES)
    assert all(sum(FILES[file] for file in files) >= least for files in of_a_step[:-1])
    assert len({word for step in found for word in step.command if "--junitxml" in word}) == len(found) == count


def _marks(step) -> str:
    return step.command[step.command.index("-m", 3) + 1]  # the first -m belongs to Python


@pytest.mark.parametrize("step_tests", [0, 500])
def test_gpu_run_runs_tests_marked_alone_first_and_in_one_process(steps, monkeypatch, step_tests):
    _collects(steps, monkeypatch, much=2)
    first, *others = steps.test_steps(_plan(steps, step_tests=step_tests))
    assert first.alone
    assert _marks(first) == "gpu and alone"
    assert "-n" not in first.command
    for step in others:
        assert not step.alone
        assert _marks(step) == "gpu and not alone"
        assert step.command[step.command.index("-n") + 1] == "4"


def test_gpu_run_has_no_step_for_tests_marked_alone_if_none_is_selected(steps, monkeypatch):
    _collects(steps, monkeypatch)
    assert [_marks(step) for step in steps.test_steps(_plan(steps, select="x"))] == ["gpu and not alone"]


def test_gpu_run_collects_no_tests_beforehand_if_one_step_runs_all(steps, monkeypatch):
    monkeypatch.setattr(steps.Selection, "tests", lambda self: pytest.fail("collected"))
    assert [step.name for step in steps.test_steps(_plan(steps))] == ["alone", "all others"]


@pytest.mark.parametrize("marks", ["gpu and not alone", "gpu and alone", "gpu and sanitizer"])
def test_gpu_run_finds_every_file_with_tests_of_the_given_marks(steps, marks, request):
    """Checks the files that this pytest session collected."""
    wanted = [word for word in marks.split(" and ") if not word.startswith("not ")]
    items = [item for item in request.session.items if all(item.get_closest_marker(mark) for mark in wanted)]
    assert {str(item.path.relative_to(ROOT)) for item in items} <= set(steps.Selection(marks, "").files)


def test_gpu_run_finds_files_that_name_a_mark_or_a_gpu_target(steps):
    """In one file, tests get the mark from the targets of tests/support.py. The other file names the mark."""
    files = steps.Selection("gpu and not alone", "").files
    assert {"tests/test_attention_features.py", "tests/test_sanitizer.py"} <= set(files)
    assert steps.Selection("gpu and sanitizer", "").files == [
        "tests/test_flex_kernel.py",
        "tests/test_flex_kernel_sm80.py",
        "tests/test_flex_score_mods.py",
        "tests/test_flex_score_mods_sm80.py",
        "tests/test_sanitizer.py",
    ]
    assert "tests/test_sizes.py" in steps.Selection("gpu and alone", "").files


def test_gpu_run_gives_every_step_of_tests_the_seed(steps, monkeypatch):
    _collects(steps, monkeypatch, much=2)
    for step_tests in (0, 500):
        found = list(steps.test_steps(_plan(steps, step_tests=step_tests, seed=7)))
        assert len(found) == (4 if step_tests else 2)
        assert all("--hypothesis-seed=7" in step.command for step in found)
        assert all(step.environment == {"HYPOTHESIS_PROFILE": "random"} for step in found)


# ---- concurrent stages ----


@pytest.mark.parametrize("jobs", [1, 2, 6, 16, 64])
def test_concurrent_stages_start_at_most_seven_quarters_of_the_processes(steps, jobs):
    shares = steps.shared_jobs(jobs, concurrent=True)
    assert set(shares) == {"host", "tests", "sanitizer", "fuzz"}
    assert min(shares.values()) >= 1
    assert shares["tests"] == jobs  # the stage tests keeps all its processes
    assert sum(shares.values()) - shares["host"] <= max(jobs + 2, 1.75 * jobs)


GIB_OF_A_PROCESS = {
    "tests": 2.0,
    "sanitizer": 2.0,
    "fuzz": 0.06 * 79,
}  # context, cache and one test; for fuzz: MEMORY_SHARE


def test_sixteen_concurrent_jobs_fit_the_memory_of_an_h100(steps):
    shares = steps.shared_jobs(16, concurrent=True)
    assert sum(shares[stage] * gib for stage, gib in GIB_OF_A_PROCESS.items()) < 79


@pytest.mark.parametrize("concurrent", [False, True])
def test_the_stages_get_their_share_of_the_processes(steps, monkeypatch, concurrent):
    jobs = steps.shared_jobs(16, concurrent)
    plan = steps.Plan(Path("out"), jobs)
    monkeypatch.setattr(steps.Selection, "tests", lambda self: [f"tests/test_x.py::test[{n}]" for n in range(99)])
    tests = list(steps.steps_of("tests", plan))[-1].command
    assert tests[tests.index("-n") + 1] == str(jobs["tests"])
    for step in steps.steps_of("fuzz", plan):
        assert step.command[step.command.index("--workers") + 1] == str(jobs["fuzz"])
    assert len(list(steps.steps_of("sanitizer", plan))) == 4 * (jobs["sanitizer"] // 3)


def _meets(gpu_run, here: Path, mine: str, other: str, stage: str):
    """A step that ends after another step has begun."""
    code = f"import pathlib, time; here = pathlib.Path({str(here)!r}); (here / {mine!r}).touch()\n"
    code += f"while not (here / {other!r}).exists(): time.sleep(0.01)"
    return _python(gpu_run, mine, code, stage)


def test_concurrent_stages_run_at_the_same_time(gpu_run, monkeypatch, tmp_path):
    pairs = [("tests", "fuzz"), ("fuzz", "sanitizer"), ("sanitizer", "tests")]
    _steps(gpu_run, monkeypatch, *(_meets(gpu_run, tmp_path, mine, other, mine) for mine, other in pairs))
    assert gpu_run.main([str(tmp_path / "out"), "--concurrent", "--budget-s", "60"]) == 0


def _overlap_of(gpu_run, monkeypatch, tmp_path, *steps) -> list[str]:
    """The names of steps in the order in which they began and ended, as in "a+ b+ a- b-"."""
    log = tmp_path / "log"

    def noted(step, *rest):
        with log.open("a") as file:
            file.write(f"{step.name}+\n")
        outcome = run(step, *rest)
        with log.open("a") as file:
            file.write(f"{step.name}-\n")
        return outcome

    run = gpu_run.run
    monkeypatch.setattr(gpu_run, "run", noted)
    _steps(gpu_run, monkeypatch, *steps)
    assert gpu_run.main([str(tmp_path / "out"), "--concurrent"]) == 0
    return log.read_text().split()


def test_no_step_runs_at_the_same_time_as_a_step_that_needs_the_memory(gpu_run, monkeypatch, tmp_path):
    large = replace(_python(gpu_run, "large", "pass", "tests"), alone=True)
    others = [_python(gpu_run, stage, "pass", stage) for stage in ("tests", "sanitizer", "fuzz")]
    assert _overlap_of(gpu_run, monkeypatch, tmp_path, large, *others)[:2] == ["large+", "large-"]


def test_tests_that_need_no_gpu_run_beside_a_step_that_needs_the_memory(gpu_run, monkeypatch, tmp_path):
    large = replace(_meets(gpu_run, tmp_path, "large", "host", "tests"), alone=True)
    _steps(gpu_run, monkeypatch, large, _meets(gpu_run, tmp_path, "host", "large", "host"))
    assert gpu_run.main([str(tmp_path / "out"), "--concurrent", "--budget-s", "60"]) == 0


def test_the_host_stage_runs_all_tests_that_need_no_gpu(steps):
    (step,) = steps.steps_of("host", _plan(steps))
    assert _marks(step) == "not gpu"
    assert "tests" in step.command


def test_no_step_runs_at_the_same_time_as_the_benchmarks(gpu_run, monkeypatch, tmp_path):
    stages = ("check", "host", "tests", "sanitizer", "fuzz", "bench")
    order = _overlap_of(gpu_run, monkeypatch, tmp_path, *(_python(gpu_run, name, "pass", name) for name in stages))
    assert order[:2] == ["check+", "check-"]
    assert order[-2:] == ["bench+", "bench-"]


def test_a_resumed_concurrent_run_repeats_no_step(gpu_run, monkeypatch, tmp_path):
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'a').write('1')"
    large = replace(_python(gpu_run, "large", code, "tests"), alone=True)
    _steps(gpu_run, monkeypatch, large, _python(gpu_run, "small", code, "tests"))
    for arguments in ([], ["--resume"]):
        assert gpu_run.main([str(tmp_path / "out"), "--concurrent", *arguments]) == 0
    assert mark.read_text() == "11"


def test_a_stage_has_a_budget_of_its_own(gpu_run, monkeypatch, tmp_path):
    given = {}

    def run(step, out, seconds, first_device):
        given[step.stage] = seconds
        return gpu_run.Outcome("passed")

    monkeypatch.setattr(gpu_run, "run", run)
    stages = ("check", "tests", "sanitizer", "fuzz", "bench")
    _steps(gpu_run, monkeypatch, *(_python(gpu_run, name, "pass", name) for name in stages))
    budgets = ["--budget-s", "100", "--stage-budget", "tests=300", "--stage-budget", "fuzz=50"]
    assert gpu_run.main([str(tmp_path), "--concurrent", *budgets]) == 0
    assert {stage: round(seconds) for stage, seconds in given.items()} == {
        "check": 100,
        "tests": 300,
        "sanitizer": 100,
        "fuzz": 50,
        "bench": 100,
    }


def test_the_time_of_a_stage_covers_all_its_steps(gpu_run, monkeypatch, tmp_path):
    """The step that runs alone on the GPU shares the budget of the stage with the steps after it."""
    now = [0.0]
    monkeypatch.setattr(gpu_run.time, "monotonic", lambda: now[0])
    given = []

    def run(step, out, seconds, first_device):
        given.append(seconds)
        now[0] += 60.0
        return gpu_run.Outcome("passed")

    monkeypatch.setattr(gpu_run, "run", run)
    large = replace(_python(gpu_run, "large", "pass", "tests"), alone=True)
    _steps(gpu_run, monkeypatch, large, *(_python(gpu_run, name, "pass", "tests") for name in "ab"))
    assert gpu_run.main([str(tmp_path), "--concurrent", "--budget-s", "130"]) == gpu_run.INCOMPLETE
    assert given == [130.0, 70.0]  # 10 seconds are too few for the last one


def test_a_budget_for_an_unknown_stage_is_an_error(gpu_run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_run.main([str(tmp_path), "--stage-budget", "test=300"])
    assert "expected STAGE=SECONDS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "line", "word"),
    [
        (0, "20000 calls, 0 failures", "passed"),
        (1, "900 calls, 0 failures, calls are left", "left"),
        (1, "900 calls, 1 failures, calls are left", "FAILED"),
        (1, "900 calls, 10 failures, calls are left", "FAILED"),
        (1, "20000 calls, 1 failures", "FAILED"),
        (1, "", "FAILED"),
    ],
)
def test_a_random_run_with_calls_left_is_incomplete_and_not_failed(steps, status, line, word):
    assert steps.by_fuzz(status, line)[0] == word


# ---- seeds ----


def _seeds(gpu_run, monkeypatch, out: Path, *arguments: str) -> tuple[int, int, int]:
    """The seeds that a run of the stage tests passes to its steps, writes to its record, and prints."""
    got = []

    def steps_of(stage, plan):
        got.append(plan.seed)
        return [_session(gpu_run, "tests/a", "tests", 3)] if stage == "tests" else []

    said = io.StringIO()
    monkeypatch.setattr(gpu_run, "steps_of", steps_of)
    with contextlib.redirect_stdout(said):
        assert gpu_run.main([str(out), "--stage", "tests", *arguments]) == 0
    (record,) = acceptance.load(out / "acceptance").values()
    printed = re.search(r"--seed (\d+) repeats", said.getvalue())
    assert printed is not None
    return got[-1], record["seed"], int(printed[1])


def test_gpu_run_prints_and_records_the_seed_that_its_tests_get(gpu_run, monkeypatch, tmp_path):
    assert len(set(_seeds(gpu_run, monkeypatch, tmp_path))) == 1


def test_gpu_run_draws_a_seed_for_each_run(gpu_run, monkeypatch, tmp_path):
    first, second = (_seeds(gpu_run, monkeypatch, tmp_path / name)[0] for name in "ab")
    assert first != second


def test_gpu_run_keeps_the_seed_of_the_run_that_it_resumes(gpu_run, monkeypatch, tmp_path):
    first = _seeds(gpu_run, monkeypatch, tmp_path)
    assert _seeds(gpu_run, monkeypatch, tmp_path, "--resume") == first


def test_gpu_run_uses_a_given_seed(gpu_run, monkeypatch, tmp_path):
    assert _seeds(gpu_run, monkeypatch, tmp_path, "--seed", "11") == (11, 11, 11)


def test_gpu_run_refuses_to_resume_with_another_seed(gpu_run, monkeypatch, tmp_path):
    _seeds(gpu_run, monkeypatch, tmp_path, "--seed", "11")
    with pytest.raises(SystemExit, match="expected 11, the seed of the run to resume"):
        gpu_run.main([str(tmp_path), "--stage", "tests", "--resume", "--seed", "12"])


def test_gpu_run_collects_the_tests_that_have_the_marks_and_match(steps, monkeypatch):
    monkeypatch.setattr(steps.Selection, "files", ["tests/test_acceptance.py"])
    (found,) = steps.Selection("not gpu", "is_enough").tests()
    assert found == "tests/test_acceptance.py::test_one_good_record_among_others_is_enough"


@pytest.mark.parametrize("stage", ["tests", "sanitizer"])
def test_gpu_run_fails_if_it_finds_no_tests(gpu_run, steps, monkeypatch, tmp_path, stage, capsys):
    monkeypatch.setattr(steps.Selection, "tests", lambda self: [])
    assert gpu_run.main([str(tmp_path), "--stage", stage, "--select", "no_such_test"]) == 1
    assert 'and matches "no_such_test"' in capsys.readouterr().out


def test_gpu_run_runs_sanitizer_steps_at_the_same_time(gpu_run, monkeypatch, tmp_path):
    pairs = [("one", "two"), ("two", "one")]
    _steps(gpu_run, monkeypatch, *(_meets(gpu_run, tmp_path, *names, "sanitizer") for names in pairs))
    assert gpu_run.main([str(tmp_path / "out"), "--stage", "sanitizer", "--jobs", "2", "--budget-s", "60"]) == 0


def test_gpu_run_measures_every_suite(steps):
    suites = list(steps.bench_steps(_plan(steps, quick=True)))
    assert [step.name for step in suites] == [
        "attention",
        "attention_features",
        "layer_norm",
        "decoding",
        "block",
        "flex",
        "short",
        "triangle",
    ]
    assert all({"--quick", "--resume"} <= set(step.command) for step in suites)
