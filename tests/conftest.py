"""Configures a test run: GPU skips and memory, hypothesis profiles and seeds, thread limits, the printed summary."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from kit import lost_gpu
from kit.gpu_lock import GpuLock, devices_from
from kit.summary import Summary, take_ratios

# Each profile sets derandomize. Otherwise, hypothesis takes it from its own CI profile if the variable CI is set.
_HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_HEALTH)
settings.register_profile("random", max_examples=60, deadline=None, derandomize=False, suppress_health_check=_HEALTH)
settings.register_profile(
    "thorough", max_examples=2000, deadline=None, derandomize=False, suppress_health_check=_HEALTH
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)
SEED = "--hypothesis-seed"

# Workers of pytest-xdist share the cores, so each worker and each process that it starts uses one thread, unless
# OMP_NUM_THREADS is set.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Keep freed memory in the process: returning it and faulting it in again took two fifths of the reference backend's
# time.
if platform.libc_ver()[0] == "glibc":
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, AT_MOST = -1, -3, 2**31 - 1
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, AT_MOST)

WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # "gw3", or None in the process that starts the workers
if WORKER is not None:
    os.environ.update(devices_from(int(WORKER.removeprefix("gw")), torch.cuda.device_count()))

KEPT_BYTES = 2**29  # GPU memory that a worker may keep cached between tests


SUMMARY = Summary()
STARTED = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads the option
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of the kit. Draw the seed of a run whose examples are random, so that pytest prints it."""
    config.pluginmanager.register(lost_gpu)
    if settings.get_profile(PROFILE).derandomize or config.getoption(SEED) is not None:
        return
    drawn = str(random.SystemRandom().randrange(2**32))
    config.option.hypothesis_seed = getattr(config, "workerinput", {}).get(SEED, drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker of pytest-xdist."""
    node.workerinput[SEED] = node.config.getoption(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        take_ratios(item)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SUMMARY.add(report)
    path = os.environ.get("FLASHBWD_TEST_SUMMARY")
    if report.failed and path and WORKER is None:  # written at once, because a run that is stopped prints no failures
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).with_suffix(".failures.txt").open("a") as file:
            file.write(f"{report.nodeid}, {report.when}\n{report.longreprtext}\n\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not settings.get_profile(PROFILE).derandomize:
        seed = config.getoption(SEED)
        terminalreporter.write_line(f"property tests: repeat with HYPOTHESIS_PROFILE={PROFILE} and {SEED}={seed}")
    if lines := SUMMARY.table():
        terminalreporter.section("largest error over its limit")
        terminalreporter.write("\n".join(lines) + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("FLASHBWD_TEST_SUMMARY")
    if path and WORKER is None:  # workers report to the process that starts them
        SUMMARY.write(Path(path), time.monotonic() - STARTED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _deterministic_mode_is_left_as_it_was() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    assert torch.are_deterministic_algorithms_enabled() == before, "the test did not restore deterministic algorithms"


@pytest.fixture(autouse=True)
def _gpu_memory_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked alone run alone on the GPUs; workers free their cached memory if it is large."""
    if not (torch.cuda.is_available() and request.node.get_closest_marker("gpu")):
        yield
        return
    lock = GpuLock(Path(tempfile.gettempdir()) / f"flashbwd-gpu-tests-{os.getuid()}")
    alone = request.node.get_closest_marker("alone")
    with lock.exclusive() if alone else lock.shared():
        yield
        if torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()
