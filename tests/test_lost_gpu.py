"""A test that breaks the GPU context of its worker fails alone, and the others run in a new worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PLUGIN = """
import torch

lost = False


def synchronize():
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize
"""
BREAKS = """
import fake_gpu
import pytest


@pytest.mark.parametrize("number", range(9))
def test_call(number):
    fake_gpu.lost = fake_gpu.lost or number == 4
    fake_gpu.synchronize()


def test_that_fails_alone():
    assert False
"""


@pytest.mark.parametrize(("workers", "failed"), [(("-n", "1"), 2), (("-n", "0"), 6)])
def test_only_the_test_that_breaks_the_gpu_of_a_worker_fails(
    workers: tuple[str, ...], failed: int, tmp_path: Path
) -> None:
    (tmp_path / "fake_gpu.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(BREAKS)
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "FLASHBWD_TEST"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, tmp_path)))}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(tmp_path), *workers, "test_it.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"{failed} failed, {10 - failed} passed" in ended.stdout, ended.stdout + ended.stderr
    assert re.search(r"test_call\[4\]", ended.stdout)
    assert "an illegal memory access" in ended.stdout + ended.stderr
