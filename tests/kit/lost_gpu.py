"""Ends test processes whose GPU context is lost, as after an illegal memory access, so that other tests still run."""

from __future__ import annotations

import os
import sys

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


def end_lost_worker(report: pytest.TestReport) -> None:
    """End a worker of pytest-xdist whose test lost the GPU. pytest-xdist names the test and starts another worker."""
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and gpu_is_lost():
        print(f"{report.nodeid}, {report.when}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
        os._exit(1)
