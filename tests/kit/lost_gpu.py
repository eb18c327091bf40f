"""A plugin of pytest: ends workers whose GPU context is lost, as after an illegal memory access."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest
import torch


def gpu_is_lost() -> bool:
    """Whether CUDA calls of this process fail from now on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End a worker whose test lost the GPU. pytest-xdist names the test and replaces it, so other tests still run."""
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and gpu_is_lost():
        print(f"{report.nodeid}, {report.when}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report
