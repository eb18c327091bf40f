"""``python -m flashbwd``: its options, exit status and files."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashbwd
from flashbwd import __main__ as cli
from flashbwd.bench import bug_report, errors, machine, measure, results, runner, suites
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


def test_every_parser_refuses_abbreviated_options():
    """A script that abbreviates an option would change its meaning when a new option begins with the same letters."""
    paths = [
        path for folder in ("flashbwd", "benchmarks", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    calls = [
        node
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".ArgumentParser", ".add_parser"))
    ]
    assert len(calls) >= 11
    for call in calls:
        assert "allow_abbrev=False" in [ast.unparse(keyword) for keyword in call.keywords], ast.unparse(call)


def test_the_help_of_bench_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--suite", "--quick", "--out", "--compare", "--resume", "--budget-s", "--cases", "--peers"):
        assert option in shown


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_check_describes_the_machine_and_the_plans_and_passes(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert flashbwd.__version__ in shown
    assert torch.__version__ in shown
    assert "_C loaded" in shown
    assert "sm90: " in shown  # the reason why sm90 was not chosen
    assert shown.count("right") == len(SHAPES) + 1  # once per shape, and once in the verdict


def test_the_description_says_from_where_the_package_is_imported():
    lines = bug_report.machine_lines(machine.describe(torch.device("cpu")))
    assert f"  package {Path(flashbwd.__file__).parent}" in lines


@pytest.mark.usefixtures("_few_cpu_shapes")
def test_check_on_a_cpu_makes_inputs_once_and_compares_only_this_library_with_float64(monkeypatch):
    monkeypatch.setattr(measure, "input_sets", lambda input_bytes, device: 64)  # as many as for the cache of a server
    counts = {"make_inputs": 0, "attention_errors": 0, "norm_errors": 0}

    def count(module, name):
        right = getattr(module, name)

        def counted(*args):
            counts[name] += 1
            return right(*args)

        monkeypatch.setattr(module, name, counted)

    count(runner, "make_inputs")
    count(errors, "attention_errors")
    count(errors, "norm_errors")
    assert cli.main([]) == 0
    assert counts == {"make_inputs": len(SHAPES), "attention_errors": 1, "norm_errors": 1}


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
def test_bench_writes_files_and_compares_with_an_earlier_run(tmp_path, capsys):
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
def test_bench_resumes_after_the_case_that_broke_the_device(monkeypatch, tmp_path, capsys):
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
def test_bench_reports_that_no_case_matches(tmp_path, capsys):
    assert cli.main(["bench", "--cases", "nothing like it", "--out", str(tmp_path)]) == 2
    assert "nothing like it" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["block", "flex"])
def test_bench_of_a_suite_without_cpu_cases_names_the_suites_that_run_on_a_cpu(suite, monkeypatch, capsys):
    monkeypatch.setattr(machine, "default_device", lambda: torch.device("cpu"))
    assert cli.main(["bench", "--suite", suite]) == 2
    expected = f"suite {suite} has no cases for a machine without a GPU. These suites run on a CPU: "
    assert f"{expected}attention, layer_norm, decoding, scale, all\n" in capsys.readouterr().err


def test_results_go_into_the_source_tree_or_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SOURCE_TREE", ROOT)
    assert cli.default_directory() == ROOT / "benchmarks" / "results"
    monkeypatch.setattr(machine, "SOURCE_TREE", tmp_path)
    assert cli.default_directory() == Path("flashbwd-results")
