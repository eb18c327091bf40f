"""``python -m flashbwd`` and the script for GPU machines: options, exit status, files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kit import summary

import flashbwd
from flashbwd import __main__ as cli
from flashbwd.bench import acceptance, machine, measure, results, runner, suites
from flashbwd.bench.cases import AttentionCase, NormCase
from flashbwd.bench.measure import Settings

ROOT = Path(__file__).resolve().parents[1]
SHAPES = (
    AttentionCase("smoke", 1, 32, 2, 1, 16, 16, causal=True, dtype="fp32"),
    NormCase("smoke", 1024, 16, "fp32", compiled=False),
)


@pytest.fixture
def _few_cpu_shapes(monkeypatch):
    monkeypatch.setitem(suites.SMOKE_CASES, "cpu", SHAPES)
    monkeypatch.setattr(suites, "CPU_ATTENTION_CASES", (replace(SHAPES[0], table="cpu"),))
    monkeypatch.setattr(suites, "CPU_NORM_CASES", (replace(SHAPES[1], table="cpu_norm"),))
    monkeypatch.setattr(suites, "CPU_DECODING_CASES", ())
    monkeypatch.setattr(measure, "input_sets", lambda input_bytes, device: 1)
    monkeypatch.setattr(measure, "ceilings", lambda device, settings: {"matmul_tflops": 1.0, "copy_gbs": 1.0})
    monkeypatch.setattr(machine, "default_device", lambda: torch.device("cpu"))


def _spoil(monkeypatch):
    right = flashbwd.attention_backward

    def wrong(*args, **kwargs):
        grads = right(*args, **kwargs)
        return grads._replace(dk=grads.dk * 1.1)

    monkeypatch.setattr(flashbwd, "attention_backward", wrong)


def test_help_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "flashbwd", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "bench" in done.stdout


@pytest.mark.parametrize(
    ("device", "arguments", "settings"),
    [
        ("cuda", [], Settings(7, 30.0, 50.0, 500.0)),
        ("cuda", ["--rounds", "24", "--slot-ms", "20"], Settings(24, 20.0, 50.0, 500.0)),
        ("cuda", ["--quick"], Settings(5, 10.0)),
        ("cpu", [], Settings(7, 30.0)),
    ],
)
def test_a_full_run_on_a_gpu_has_cool_slots_and_slots_with_a_settled_clock(device, arguments, settings):
    options = cli._parser().parse_args(["bench", *arguments])
    assert cli.settings_of(options, torch.device(device)) == settings


def test_bench_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--suite", "--quick", "--out", "--compare", "--resume", "--budget-s", "--cases", "--peers"):
        assert option in shown


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_check_describes_plans_and_passes(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert flashbwd.__version__ in shown
    assert torch.__version__ in shown
    assert "_C loaded" in shown
    assert "sm90: " in shown  # why not
    assert shown.count("right") == len(SHAPES)


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_check_fails_on_a_wrong_gradient(monkeypatch, capsys):
    _spoil(monkeypatch)
    assert cli.main([]) == 1
    shown = capsys.readouterr()
    assert "WRONG" in shown.out
    assert "dk is off by 1.00e-01" in shown.err


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_check_fails_on_a_backend_that_raises(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("flashbwd: broken")

    monkeypatch.setattr(flashbwd, "attention_backward", broken)
    assert cli.main([]) == 1
    assert "RuntimeError: flashbwd: broken" in capsys.readouterr().err


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_bench_writes_and_compares(tmp_path, capsys):
    assert cli.main(["bench", "--quick", "--suite", "attention", "--out", str(tmp_path)]) == 0
    (first,) = tmp_path.glob("*.json")
    assert first.with_suffix(".md").exists()
    assert results.load(first).complete
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "second"), "--compare", str(first)]) == 0
    shown = capsys.readouterr().out
    assert "relative to fastest peer" in shown
    assert "bars: " in shown
    (second,) = (tmp_path / "second").glob("*.json")
    assert {result.table for result in results.load(second).results} == {"cpu", "cpu_norm"}


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_bench_fails_on_a_wrong_gradient(monkeypatch, tmp_path):
    _spoil(monkeypatch)
    assert cli.main(["bench", "--quick", "--suite", "attention", "--out", str(tmp_path)]) == 1


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_bench_stopped_by_its_budget_resumes(tmp_path):
    arguments = ["bench", "--quick", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--budget-s", "-1"]) == cli.STOPPED_EARLY
    assert cli.main([*arguments, "--resume"]) == 0
    (path,) = tmp_path.glob("*.json")
    assert len(results.load(path).results) == 2


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_bench_goes_on_behind_a_case_that_broke_the_device(monkeypatch, tmp_path, capsys):
    arguments = ["bench", "--quick", "--out", str(tmp_path)]
    right = flashbwd.attention_backward

    def broken(*args, **kwargs):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(flashbwd, "attention_backward", broken)
    monkeypatch.setattr(runner, "is_broken", lambda device: True)
    assert cli.main(arguments) == cli.STOPPED_EARLY
    assert "unusable after flashbwd reference: illegal memory access" in capsys.readouterr().err
    monkeypatch.setattr(flashbwd, "attention_backward", right)
    assert cli.main([*arguments, "--resume"]) == 1  # the first case stays failed
    (path,) = tmp_path.glob("*.json")
    statuses = [[p.status for n, p in r.peers.items() if "flashbwd" in n] for r in results.load(path).results]
    assert statuses == [["failed"], ["ok"]]


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_bench_without_a_case_says_so(tmp_path, capsys):
    assert cli.main(["bench", "--cases", "nothing like it", "--out", str(tmp_path)]) == 2
    assert "nothing like it" in capsys.readouterr().err


def test_results_go_into_the_source_tree_or_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SOURCE_TREE", ROOT)
    assert cli.default_directory() == ROOT / "benchmarks" / "results"
    monkeypatch.setattr(machine, "SOURCE_TREE", tmp_path)
    assert cli.default_directory() == Path("flashbwd-results")


# ---- benchmarks/gpu_run.py ------------------------------------------------------------------------


@pytest.fixture
def gpu_run(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "benchmarks" / "gpu_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the tree, which processes of later tests would import
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIBRARIES", ("__init__.py",))  # always there
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(module, "identity", lambda: {"commit": "c"})
    return module


def _python(gpu_run, name: str, code: str, stage: str = "check"):
    return gpu_run.Step(stage, name, [sys.executable, "-c", code], gpu_run.plain)


def _steps(gpu_run, monkeypatch, *steps):
    monkeypatch.setattr(gpu_run, "steps_of", lambda stage, out, options: [s for s in steps if s.stage == stage])


def test_gpu_run_reports_and_packs(gpu_run, monkeypatch, tmp_path, capsys):
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


def test_gpu_run_stops_a_step_whose_time_is_up(gpu_run, tmp_path):
    endless = _python(gpu_run, "endless", "import time; time.sleep(1000)")
    outcome = gpu_run.run(endless, tmp_path, 0.5)
    assert (outcome.status, outcome.detail) == (gpu_run.LEFT, "stopped after 0 s")


def test_gpu_run_resumes_what_is_left(gpu_run, monkeypatch, tmp_path):
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
    monkeypatch.setattr(gpu_run, "identity", lambda: {"commit": "d"})
    gpu_run.main([str(out), "--stage", "check", "--resume"])
    assert mark.read_text() == "11"


def test_gpu_run_without_libraries_runs_nothing_else(gpu_run, monkeypatch, tmp_path):
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
def test_gpu_run_judges_pytest(gpu_run, status, output, outcome):
    assert gpu_run.by_pytest(status, output) == outcome


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
def test_gpu_run_judges_the_sanitizer(gpu_run, status, output, outcome):
    assert gpu_run.by_sanitizer(status, output) == outcome


@pytest.mark.parametrize(("status", "word"), [(0, "passed"), (3, "left"), (1, "FAILED")])
def test_gpu_run_judges_the_benchmark(gpu_run, status, word):
    assert gpu_run.by_bench(status, "x\nbars: 3 reached\nwritten: y") == (word, "bars: 3 reached")


def _session(gpu_run, name: str, stage: str, passed: int):
    """A step that writes what a test session would."""
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
    assert acceptance.problems(found, sources) == ["it was not taken on a GPU"]
    found["machine"]["kind"] = "cuda"
    assert acceptance.problems(found, sources) == []
    assert acceptance.problems(found, "other") == ["its kernel sources are not those of csrc"]


def test_gpu_run_knows_declared_refusals_as_the_tests_write_them(gpu_run):
    assert gpu_run.REFUSED_AS_DECLARED == summary.DECLARED


def test_gpu_run_wants_a_gpu(gpu_run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_run, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu_run.main([str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gpu_run_gives_each_tool_every_test_once(gpu_run, monkeypatch):
    tests = [f"tests/test_x.py::test_y[{n}-{backend}]" for n in range(5) for backend in ("sm80", "sm90")]
    monkeypatch.setattr(gpu_run.Selection, "tests", lambda self: tests if self.marks == "gpu and sanitizer" else [])
    for jobs in (1, 6, 100):
        given = {tool: [] for tool in gpu_run.TOOLS}
        steps = list(gpu_run.sanitizer_steps(jobs, ""))
        for step in steps:
            given[step.name.split(",")[0]] += [word for word in step.command if "::" in word]
        assert len({step.log_name for step in steps}) == len(steps)
        assert all(step.command[step.command.index("--tool") + 1] == step.name.split(",")[0] for step in steps)
        unseen = {"initcheck": "sm90"}  # what bulk copies write
        for tool, found in given.items():
            assert sorted(found) == sorted(test for test in tests if unseen.get(tool, "no backend") not in test)


def test_gpu_run_gives_each_tool_the_flags_that_let_it_find_something(gpu_run, monkeypatch):
    """Errors fail the run, accesses past a tensor leave its allocation, and initcheck sees PyTorch's writes too."""
    tests = ["tests/test_x.py::test_y[sm80]", "tests/test_x.py::test_y[sm90]"]
    monkeypatch.setattr(gpu_run.Selection, "tests", lambda self: tests)
    steps = list(gpu_run.sanitizer_steps(1, ""))
    assert {step.command[2] for step in steps} == {"memcheck", "racecheck", "initcheck", "synccheck"}
    for step in steps:
        before_python = step.command[: step.command.index(sys.executable)]
        options = dict(zip(before_python[1::2], before_python[2::2], strict=True))
        assert before_python[0] == "compute-sanitizer"
        assert options["--error-exitcode"] == str(gpu_run.SANITIZER_FOUND) != "0"
        assert options.get("--kernel-name") == (None if step.command[2] == "initcheck" else "kns=flashbwd")
        assert step.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_gpu_run_tests_every_file_once(gpu_run, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_run, "TESTS_OF_A_STEP", 500)
    files = {f"tests/test_{n}.py": count for n, count in enumerate((3, 700, 1, 450, 60, 2))}
    tests = [f"{file}::test_y[{n}]" for file, count in files.items() for n in range(count)]
    monkeypatch.setattr(gpu_run.Selection, "tests", lambda self: tests if self.marks == "gpu" else [])
    steps = list(gpu_run.test_steps(tmp_path, 4, "", seed=7))
    of_a_step = [[word for word in step.command if word in files] for step in steps]
    assert [file for found in of_a_step for file in found] == list(files)
    assert all(sum(files[file] for file in found) >= gpu_run.TESTS_OF_A_STEP for found in of_a_step[:-1])
    assert len({word for step in steps for word in step.command if "--junitxml" in word}) == len(steps) == 3


def test_gpu_run_gives_every_step_of_tests_the_seed(gpu_run, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_run, "TESTS_OF_A_STEP", 500)
    tests = [f"tests/test_{n}.py::test_y[{i}]" for n in "ab" for i in range(600)]
    monkeypatch.setattr(gpu_run.Selection, "tests", lambda self: tests)
    steps = list(gpu_run.test_steps(tmp_path, 4, "", seed=7))
    assert len(steps) == 2
    assert all("--hypothesis-seed=7" in step.command for step in steps)
    assert all(step.environment == {"HYPOTHESIS_PROFILE": "random"} for step in steps)


def _seeds(gpu_run, monkeypatch, out: Path, *arguments: str) -> tuple[int, int, int]:
    """Of a run of the stage tests: what its steps get, what its record holds, and what it prints."""
    got = []

    def steps_of(stage, out, options):
        got.append(options.seed)
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


def test_gpu_run_takes_a_given_seed(gpu_run, monkeypatch, tmp_path):
    assert _seeds(gpu_run, monkeypatch, tmp_path, "--seed", "11") == (11, 11, 11)


def test_gpu_run_resumes_with_no_other_seed(gpu_run, monkeypatch, tmp_path, capsys):
    _seeds(gpu_run, monkeypatch, tmp_path, "--seed", "11")
    with pytest.raises(SystemExit):
        gpu_run.main([str(tmp_path), "--stage", "tests", "--resume", "--seed", "12"])
    assert "the run to resume has seed 11" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["tests", "sanitizer"])
def test_gpu_run_fails_where_it_finds_no_tests(gpu_run, tmp_path, stage, capsys):
    assert gpu_run.main([str(tmp_path), "--stage", stage, "--select", "no_such_test"]) == 1
    assert 'and matches "no_such_test"' in capsys.readouterr().out


def test_gpu_run_takes_sanitizer_steps_side_by_side(gpu_run, monkeypatch, tmp_path):
    def meets(mine: str, other: str):
        code = f"import pathlib, time; here = pathlib.Path({str(tmp_path)!r}); (here / {mine!r}).touch()\n"
        code += f"while not (here / {other!r}).exists(): time.sleep(0.01)"
        return _python(gpu_run, mine, code, stage="sanitizer")

    _steps(gpu_run, monkeypatch, meets("one", "two"), meets("two", "one"))
    assert gpu_run.main([str(tmp_path / "out"), "--stage", "sanitizer", "--jobs", "2", "--budget-s", "60"]) == 0


def test_gpu_run_measures_every_suite(gpu_run, tmp_path):
    suites = list(gpu_run.bench_steps(tmp_path, quick=True))
    assert [step.name for step in suites] == ["attention", "layer_norm", "decoding", "block"]
    assert all({"--quick", "--resume"} <= set(step.command) for step in suites)
