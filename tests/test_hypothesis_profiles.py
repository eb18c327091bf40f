"""Property tests get the same examples in every run of CI. Other runs get new examples and print their seed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PROPERTY = """
import os
from pathlib import Path
from hypothesis import given, strategies as st

HERE = Path(__file__).parent

@given(st.integers(0, 2**60))
def test_property(number):
    with (HERE / "examples").open("a") as file:
        file.write(f"{number}\\n")

def test_seed_0(request):
    (HERE / "seed_0").write_text(str(request.config.getoption("--hypothesis-seed")))

def test_seed_1(request):
    (HERE / "seed_1").write_text(str(request.config.getoption("--hypothesis-seed")))
"""


def examples(folder: Path, profile: str | None, *options: str, ci: bool = False) -> tuple[list[str], str]:
    """The examples of a property under a profile, in the order of the run, and the output of pytest."""
    folder.mkdir()
    (folder / "test_it.py").write_text(PROPERTY)
    outer = ("HYPOTHESIS_PROFILE", "FLASHBWD_TEST_SUMMARY", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    environment |= {} if profile is None else {"HYPOTHESIS_PROFILE": profile}
    environment |= {"CI": "true"} if ci else {}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(folder), "-q", *options, "test_it.py"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return (folder / "examples").read_text().split(), ended.stdout


def printed_seed(output: str) -> str:
    found = re.search(r"repeat with HYPOTHESIS_PROFILE=\w+ and --hypothesis-seed=(\d+)$", output, re.MULTILINE)
    assert found is not None, output
    return found[1]


def test_without_a_profile_the_examples_are_the_same_in_every_run(tmp_path: Path) -> None:
    first, second = (examples(tmp_path / name, None)[0] for name in "ab")
    assert first == second


@pytest.mark.parametrize("ci", [False, True])
def test_a_random_run_has_new_examples_which_its_printed_seed_repeats(tmp_path: Path, ci: bool) -> None:
    (first, said), (second, _) = (examples(tmp_path / name, "random", ci=ci) for name in "ab")
    assert first != second
    assert examples(tmp_path / "c", "random", f"--hypothesis-seed={printed_seed(said)}", ci=ci)[0] == first


def test_a_thorough_run_has_many_examples_and_prints_its_seed(tmp_path: Path) -> None:
    found, said = examples(tmp_path / "a", "thorough")
    assert len(found) >= 2000
    assert printed_seed(said)


def test_workers_share_the_drawn_seed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.pluginmanager.hasplugin("xdist"):
        pytest.skip("needs pytest-xdist")
    examples(tmp_path / "a", "random", "-n", "2")
    assert (tmp_path / "a" / "seed_0").read_text() == (tmp_path / "a" / "seed_1").read_text() != "None"
