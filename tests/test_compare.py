"""benchmarks/compare.py, run on made-up builds: each call of a build advances a clock of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).resolve().parent.parent / "benchmarks" / "compare.py"

BENCH = """
import time, types
now = 0.0
def call():
    global now
    now += {milliseconds} / 1e3
    {action}
time.perf_counter = lambda: now
suites = types.SimpleNamespace(
    suite=lambda name, device: [types.SimpleNamespace(table=t, name=n) for t, n in {cases!r}])
machine = types.SimpleNamespace(default_device=lambda: types.SimpleNamespace(type="cpu"))
import contextlib
def prepare(case, inputs):
    print("a library may print")
    return types.SimpleNamespace(backward=call, scope=contextlib.nullcontext, capturable=True, plan="")
contenders = types.SimpleNamespace(
    SEED=0, make_inputs=lambda case, device, seed: None,
    peers_of=lambda case, device: [types.SimpleNamespace(name="flashbwd sm90", prepare=prepare)],
)
"""
TWO_CASES = (("main", "short"), ("window", "long"))


def build(
    folder: Path, name: str, milliseconds: float, cases: tuple[tuple[str, str], ...] = TWO_CASES, action: str = "pass"
) -> str:
    """NAME=PATH of a build whose calls take ``milliseconds`` on its own clock."""
    package = folder / name / "flashbwd"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "bench.py").write_text(BENCH.format(milliseconds=milliseconds, cases=cases, action=action))
    return f"{name}={folder / name}"


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMPARE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_build_that_takes_half_the_time_is_twice_as_fast(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    builds = [build(tmp_path, "old", 3.0), build(tmp_path, "new", 1.5), build(tmp_path, "same", 3.0)]
    done = compare(*builds, "--rounds", "3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "all, 2 cases: new 2.0000 times as fast as old (2.000 to 2.000)" in lines
    assert "window, 1 cases: same 1.0000 times as fast as old (1.000 to 1.000)" in lines
    rows = json.loads(out.read_text())
    assert [row["case"] for row in rows] == ["main: short", "window: long"]
    assert [len(values) for values in rows[0]["times"].values()] == [3, 3, 3]
    assert rows[0]["times"]["new"] == pytest.approx([1.5] * 3)


def test_a_case_that_one_build_does_not_know_is_named_and_left_out(tmp_path: Path) -> None:
    done = compare(build(tmp_path, "new", 1.0), build(tmp_path, "old", 1.0, (("main", "short"),)), "--rounds", "3")
    assert "skipped: a build has no such case" in done.stdout
    assert "all, 1 cases:" in done.stdout


def test_a_case_that_one_build_refuses_is_named_and_left_out(tmp_path: Path) -> None:
    bad = build(tmp_path, "bad", 1.0, action='raise ValueError("no such tile")')
    done = compare(build(tmp_path, "old", 1.0), bad)
    assert done.stdout.count("skipped: bad: no such tile") == 2
    assert done.returncode != 0
    assert "no case was measured" in done.stderr


def test_a_build_whose_process_ends_ends_the_comparison(tmp_path: Path) -> None:
    done = compare(build(tmp_path, "old", 1.0), build(tmp_path, "dead", 1.0, action="import os; os._exit(7)"))
    assert done.returncode != 0
    assert "the process of 'dead' ended with 7" in done.stderr


def test_only_the_cases_asked_for_are_measured(tmp_path: Path) -> None:
    done = compare(build(tmp_path, "old", 1.0), build(tmp_path, "new", 1.0), "--cases", "long")
    assert "window: long" in done.stdout
    assert "main: short" not in done.stdout


@pytest.mark.parametrize("words", [["one=."], ["a=.", "a=."], ["a=.", "b"]])
def test_fewer_than_two_named_builds_are_refused(words: list[str]) -> None:
    done = compare(*words)
    assert done.returncode == 2
    assert "expected at least two builds of different names, each as NAME=PATH" in done.stderr


def test_a_folder_without_a_package_is_refused(tmp_path: Path) -> None:
    done = compare(build(tmp_path, "old", 1.0), f"new={tmp_path / 'nothing'}")
    assert done.returncode != 0
    assert "expected a folder with a built package flashbwd" in done.stderr


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    """A ratio of medians would be wrong, because the clock of the device drifts from round to round."""
    sys.path.insert(0, str(COMPARE.parent))
    try:
        from compare import Row, geometric_mean
    finally:
        sys.path.remove(str(COMPARE.parent))
    row = Row("main: short", {"old": [2.0, 8.0, 6.0], "new": [1.0, 2.0, 6.0]})
    assert row.ratio("new") == 2.0  # the ratios are 2, 4 and 1; the medians are 6 and 2
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
