"""A program that uses the package passes strict type checkers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import flashbwd

PACKAGE = Path(flashbwd.__file__).parent
PROGRAM = Path(__file__).parent / "typing" / "downstream.py"
CHECKERS = {
    "mypy": ["--strict", "--ignore-missing-imports", "--follow-imports=silent", "--config-file="],
    "pyright": ["--pythonpath", sys.executable],
}


def checked(checker: str, program: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", checker, *CHECKERS[checker], program.name]
    # The type checkers search for the package in the folder from which this process imported it.
    where = {"MYPYPATH": str(PACKAGE.parent), "PYTHONPATH": str(PACKAGE.parent)}
    variables = {**os.environ, **where}
    return subprocess.run(command, cwd=program.parent, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_that_uses_the_package_passes_a_type_checker(checker: str) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    done = checked(checker, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_type_is_an_error(tmp_path: Path) -> None:
    """This shows that the type checker uses the types of the package."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "wrong.py").write_text("import flashbwd\nflashbwd.SelfAttention('64', 4)\n")
    assert "incompatible type" in checked("mypy", tmp_path / "wrong.py").stdout


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
