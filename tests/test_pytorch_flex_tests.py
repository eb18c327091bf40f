"""The script that runs PyTorch's own tests of FlexAttention: its comparison, its counts and its plugin."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

from scripts import pytorch_flex_plugin as plugin  # noqa: E402
from scripts import run_pytorch_flex_tests as script  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # each starts several processes that import torch

# What PyTorch's tests do, but without FlexAttention.
TESTS = """
import sys
import unittest

import pytest

from flashbwd.flex import counts

ON = "flashbwd.integrations.flex_override" in sys.modules  # enable() imports it


class TestTiny(unittest.TestCase):
    def test_passes(self):
        counts.compiled.hit()
        counts.compiled.hit()
        counts.compiled.fall_back("too large")

    def test_counts_alone(self):
        counts.compiled.fall_back("too large")
        counts.compiled.fall_back("too small")

    def test_fails(self):
        raise AssertionError

    def test_fails_with_the_pass(self):
        assert not ON

    def test_strided_backwards_cuda(self):
        assert not ON

    def test_skipped(self):
        self.skipTest("")

    @unittest.expectedFailure
    def test_expected_failure(self):
        raise AssertionError

    @unittest.expectedFailure
    def test_unexpected_success(self):
        pass


@pytest.fixture
def broken():
    yield
    raise AssertionError


def test_with_a_broken_teardown(broken):
    pass


@pytest.mark.parametrize("name", ["a b", "c::d"])
def test_parameter(name):
    pass
"""
PASSED = ["TestTiny::test_counts_alone", "TestTiny::test_expected_failure", "TestTiny::test_passes"]
PARAMETERS = ["test_parameter[a b]", "test_parameter[c::d]"]
FAILED_BOTH = ["TestTiny::test_fails", "TestTiny::test_unexpected_success", "test_with_a_broken_teardown"]


def written(folder: Path, source: str = TESTS) -> Path:
    path = folder / "pytorch" / "test_tiny.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return path


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = folder / "pytorch" / "test_tiny.py"
    status = script.main([str(path), "--out", str(folder / "out"), "--jobs", "0", *options])
    return status, json.loads((folder / "out" / "summary.json").read_text())


def names(tests: Iterable[str]) -> list[str]:
    return sorted(test.removeprefix("test_tiny.py::") for test in tests)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("run")
    written(folder)
    return *run(folder, "-k", "not parameter"), folder


def test_every_test_has_its_category(result) -> None:
    found = {category: names(result[1][category]) for category in script.CATEGORIES}
    assert found == {
        "passed": PASSED,
        "skipped": ["TestTiny::test_skipped"],
        "failed_both": FAILED_BOTH,
        "failed_by_design": ["TestTiny::test_strided_backwards_cuda"],
        "failed_with": ["TestTiny::test_fails_with_the_pass"],
        "no_memory": [],
        "not_run": [],
    }


def test_backwards_are_counted_by_test_and_by_reason(result) -> None:
    _, summary, folder = result
    assert (summary["hits"], summary["tests_with_hits"]) == (2, 1)
    assert summary["fallbacks"] == {"too large": 2, "too small": 1}
    of_one = script.read(folder / "out" / "on.jsonl")["test_tiny.py::TestTiny::test_counts_alone"]
    assert (of_one["hits"], of_one["fallbacks"]) == (0, {"too large": 1, "too small": 1})


def test_only_failed_tests_run_without_the_library(result) -> None:
    off = script.read(result[2] / "out" / "off.jsonl")
    with_pass = ["TestTiny::test_fails_with_the_pass", "TestTiny::test_strided_backwards_cuda"]
    assert names(off) == sorted(FAILED_BOTH + with_pass)


def test_a_failure_because_of_the_library_is_the_exit_status(result) -> None:
    assert result[0] == 1


def test_another_call_runs_the_tests_that_have_no_outcome(result, tmp_path: Path) -> None:
    shutil.copytree(result[2] / "out", tmp_path / "out")
    written(tmp_path, TESTS.replace("counts.compiled.hit()", "raise AssertionError"))
    status, summary = run(tmp_path, "-k", "passes or skipped or parameter", "--both")
    assert (status, summary["hits"]) == (0, 2)
    assert names(summary["passed"]) == ["TestTiny::test_passes", *PARAMETERS]
    off = script.read(tmp_path / "out" / "off.jsonl")  # of all tests, because of --both
    assert off["test_tiny.py::TestTiny::test_passes"]["outcome"] == "failed"
    assert set(PARAMETERS) < set(names(off))


def test_a_process_that_dies_is_a_failure_of_its_test(tmp_path: Path) -> None:
    recorder = plugin.Recorder(tmp_path / "on.jsonl")
    died = pytest.TestReport("t.py::test", ("t.py", None, "test"), {}, "failed", "worker 'gw1' crashed", "???")  # type: ignore[arg-type]
    recorder.pytest_runtest_logreport(died)  # as pytest-xdist reports it
    record = script.read(tmp_path / "on.jsonl")["t.py::test"]
    assert (record["outcome"], record["hits"]) == ("failed", 0)
    assert "crashed" in record["error"]


def test_a_test_that_loses_the_gpu_fails_alone(tmp_path: Path) -> None:
    source = """
import torch

def lost():
    raise torch.AcceleratorError("an illegal memory access")

def test_1_loses_the_gpu():
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = lost

def test_2_works():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
"""
    tests = [f"test_tiny.py::{name}" for name in ("test_1_loses_the_gpu", "test_2_works")]
    (tmp_path / "out").mkdir()
    args = argparse.Namespace(file=written(tmp_path, source), out=tmp_path / "out", jobs=1, timeout_s=180)
    outcomes = script.run("on", tests, args, float("inf"))
    assert [outcomes[test]["outcome"] for test in tests] == ["failed", "passed"]


def test_a_test_without_memory_is_not_judged_and_runs_again(tmp_path: Path) -> None:
    written(tmp_path, "def test_large():\n    raise RuntimeError('CUDA out of memory')\n")
    status, summary = run(tmp_path)
    assert (status, names(summary["no_memory"]), summary["failed_with"]) == (3, ["test_large"], [])
    written(tmp_path, "def test_large():\n    pass\n")
    status, summary = run(tmp_path)
    assert (status, names(summary["passed"]), summary["no_memory"]) == (0, ["test_large"], [])


def test_nothing_runs_without_time(tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path)
    assert script.run("on", ["test_tiny.py::TestTiny::test_passes"], args, 0.0) == {}


def test_a_test_that_did_not_run_is_told(tmp_path: Path) -> None:
    assert script.summary_of(["t"], {}, {})["not_run"] == ["t"]


def test_a_file_that_cannot_be_collected_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "import no_such_module")
    with pytest.raises(SystemExit, match="no_such_module"):
        script.collected(path, tmp_path, "")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_divide_the_tests(count: int) -> None:
    tests = [f"test_{i}" for i in range(5)]
    shards = [script.shard_of(tests, f"{i + 1}/{count}") for i in range(count)]
    assert sorted(test for shard in shards for test in shard) == tests


@pytest.mark.parametrize("shard", ["0/2", "3/2"])
def test_a_shard_that_does_not_exist_is_an_error(shard: str) -> None:
    with pytest.raises(SystemExit, match="--shard"):
        script.shard_of(["test"], shard)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("t.py::T::test_symmetric_bias_batch:2_head:4_mode_default", True),
        ("t.py::T::test_strided_backwards", True),
        ("t.py::T::test_strided_backwards_cuda", True),
        ("t.py::T::test_strided_backwards2", False),
        ("t.py::T::test_gradients_of_strided_backwards", False),
    ],
)
def test_tests_of_pytorchs_kernel_are_known_by_name(test: str, expected: bool) -> None:
    assert script.checks_pytorchs_kernel(test) is expected


def test_a_failure_is_not_judged_before_it_ran_without_the_library() -> None:
    assert script.category_of("t", {"t": {"outcome": "failed"}}, {}) == "not_run"
