"""The plugin of pytest in ``run_pytorch_flex_tests.py``: switches the backward, counts it, and records the outcomes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import lost_gpu
from kit.gpu_lock import devices_from

import flashbwd

OPERATOR = "higher_order::flex_attention_backward"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backward", choices=("on", "off"), default="on", help="whether flashbwd computes the backward")
    parser.addoption("--tests", type=Path, help="run only the tests of this list")
    parser.addoption("--outcomes", type=Path, help="append the outcome of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(lost_gpu)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.environ |= devices_from(int(worker.removeprefix("gw")), torch.cuda.device_count())
    if config.getoption("--backward") == "on":
        flashbwd.enable()
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tests"):
        chosen = set(config.getoption("--tests").read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_runtest_setup() -> None:
    flashbwd.stats(reset=True)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append(("flashbwd", tuple(flashbwd.stats()[OPERATOR])))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an error of a kernel is a failure of this test, not of the next one
        torch.cuda.empty_cache()  # for the tests of other processes


class Recorder:
    """Appends the outcome of each test to a file, in the process that prints them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures: dict[str, str] = {}
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        if report.failed:
            self.failures.setdefault(test, report.longreprtext[-3000:])
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.add(test)
        if report.when in ("setup", "call"):
            return  # any other is the last one; that of a process that died has no phase
        outcome = "failed" if test in self.failures else "skipped" if test in self.skipped else "passed"
        counts: Any = dict(report.user_properties).get("flashbwd", (0, {}))
        record = {"test": test, "outcome": outcome, "hits": counts[0], "fallbacks": counts[1]}
        with self.path.open("a") as file:
            file.write(json.dumps(record | {"error": self.failures.pop(test, "")}) + "\n")
