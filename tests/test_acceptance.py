"""A release needs a complete record of the GPU tests and of compute-sanitizer for its kernel sources."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from kit import summary

from flashbwd.bench import acceptance, machine

ROOT = Path(__file__).resolve().parents[1]


def _record(**changes) -> dict:
    steps = {stage: {f"{stage}: x": {"status": "passed", "seconds": 1.0}} for stage in acceptance.STAGES}
    steps["sanitizer"] = {f"sanitizer: {t}": {"status": "passed", "seconds": 1.0} for t in acceptance.SANITIZER_TOOLS}
    outcomes = steps["tests"] | steps["sanitizer"]
    session = {"counts": {"passed": 9}, "refusals": {}, "skips": {}, "error_over_limit": {}}
    outcomes |= changes.get("outcomes", {})
    summaries = {title: session | changes.get("session", {}) for title in outcomes}
    of = {"kind": "cuda", "kernel_sources": machine.kernel_sources_hash()} | changes.get("machine", {})
    return acceptance.record(of, changes.get("select", ""), outcomes, summaries, seed=7)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"machine": {"kernel_sources": "0" * 64}}, "its kernel sources differ from csrc"),
        ({"machine": {"kernel_sources": None}}, "its kernel sources differ from csrc"),
        ({"machine": {"kind": "cpu"}}, "its tests did not run on a GPU"),
        ({"select": "sm90"}, 'only tests that match "sm90" ran'),
        ({"session": {"counts": {"skipped": 968}}}, "no test of the stage tests passed"),
        ({"session": {"counts": {"passed": 9, "failed": 1}}}, "tests: 1 failed"),
        ({"outcomes": {"tests: y": {"status": "left", "seconds": 0.0}}}, "tests: y: left"),
        ({"session": {"skips": {"needs 70 GiB of free GPU memory": 3}}}, "tests: 3 skipped, needs 70 GiB of free GPU"),
        ({"session": {"skips": {"there is no C++ compiler": 1}}}, "sanitizer: 4 skipped, there is no C++ compiler"),
    ],
)
def test_a_release_needs_a_whole_run_of_its_kernel_sources(changes, problem, tmp_path, capsys):
    check = _script("check_release")
    (tmp_path / "good.json").write_text(json.dumps(_record()))
    assert check.main([str(tmp_path)]) == 0
    (tmp_path / "good.json").write_text(json.dumps(_record(**changes)))
    assert check.main([str(tmp_path)]) == 1
    assert problem in capsys.readouterr().out


def test_no_record_is_accepted_if_the_sources_are_unknown():
    """An installed package has no csrc, so a record that it wrote contains no hash."""
    assert acceptance.problems(_record(machine={"kernel_sources": None}), None) == [
        "its kernel sources differ from csrc"
    ]


@pytest.mark.parametrize(
    ("stage", "outcomes", "problem"),
    [
        ("tests", {}, "the stage tests did not run"),
        ("sanitizer", {"sanitizer: memcheck": {"status": "passed", "seconds": 1.0}}, "racecheck did not run"),
    ],
)
def test_a_release_needs_both_stages_and_all_tools(stage, outcomes, problem):
    record = _record()
    kept = _record(outcomes=outcomes)["stages"][stage]["steps"]
    record["stages"][stage]["steps"] = {title: kept[title] for title in outcomes}
    assert problem in acceptance.problems(record, machine.kernel_sources_hash())


def test_a_record_has_the_sums_of_its_steps_and_their_worst_errors():
    outcomes = {f"tests: {name}": {"status": "passed", "seconds": 1.0} for name in "ab"}
    ratios = {"sm90": {"dq": 0.51251, "dk": 0.25}}, {"sm90": {"dq": 0.5, "dk": 0.75}, "sm80": {"dv": 2.0}}
    summaries = {
        title: {"counts": {"passed": n, name: 1}, "refusals": {name: n}, "skips": {"s": n}, "error_over_limit": worst}
        for n, (title, worst) in enumerate(zip(outcomes, ratios, strict=True), 2)
        for name in title[-1]
    }
    tests = acceptance.record({}, "", outcomes, summaries, seed=7)["stages"]["tests"]
    assert tests["counts"] == {"a": 1, "b": 1, "passed": 5}
    assert (tests["refusals"], tests["skips"]) == ({"a": 2, "b": 3}, {"s": 5})
    assert tests["error_over_limit"] == {"sm90": {"dq": 0.513, "dk": 0.75}, "sm80": {"dv": 2.0}}


def test_a_record_has_the_seconds_of_each_stage():
    outcomes = {f"tests: {name}": {"status": "passed", "seconds": n} for name, n in (("a", 10.25), ("b", 100.5))}
    outcomes["sanitizer: memcheck"] = {"status": "passed", "seconds": 7.0}
    stages = acceptance.record({}, "", outcomes, {}, seed=7)["stages"]
    assert {name: stage["seconds"] for name, stage in stages.items()} == {"tests": 110.8, "sanitizer": 7.0}


@pytest.mark.parametrize("reason", [summary.NO_CASE + "RMSNorm has no bias", "needs 2 GPUs"])
def test_a_record_is_accepted_if_its_skips_hide_nothing(reason):
    record = _record(session={"skips": {reason: 3}})
    assert acceptance.problems(record, machine.kernel_sources_hash()) == []


def test_a_release_without_a_record_is_refused(tmp_path, capsys):
    assert _script("check_release").main([str(tmp_path)]) == 1
    assert f"no record in {tmp_path} is complete and belongs to these kernel sources" in capsys.readouterr().out


def test_one_good_record_among_others_is_enough(tmp_path, capsys):
    (tmp_path / "good.json").write_text(json.dumps(_record()))
    (tmp_path / "part.json").write_text(json.dumps(_record(select="sm90")))
    assert _script("check_release").main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == 'good.json: accepted\npart.json: only tests that match "sm90" ran\n'


@pytest.fixture
def written(monkeypatch, tmp_path):
    """``written(outcomes, **machine)``: the folder of the record of these outcomes, on an H100."""
    described = {"device": "NVIDIA H100 (80 GB)", "kernel_sources": "0123456789abcdef", "kind": "cuda"}
    monkeypatch.setattr(machine, "describe", lambda device: type("Machine", (), {"as_dict": lambda self: described})())

    def write(outcomes, **changes):
        described.update(changes)
        acceptance.write(tmp_path, "", outcomes, {title: title.replace(": ", "-") for title in outcomes}, seed=7)
        return tmp_path / "acceptance"

    return write


RAN = {"tests: x": {"status": "passed", "seconds": 1.0}}


def test_a_record_is_named_by_its_device_and_its_kernel_sources(written):
    assert list(acceptance.load(written(RAN))) == ["nvidia-h100-80-gb-0123456789ab.json"]
    both = acceptance.load(written(RAN, kernel_sources=None))
    assert list(both) == ["nvidia-h100-80-gb-0123456789ab.json", "nvidia-h100-80-gb-unknown.json"]


def test_a_record_holds_what_its_steps_have_summed_up_and_no_step_of_another_stage(written, tmp_path):
    (tmp_path / "summaries").mkdir()
    session = {"counts": {"passed": 9}, "refusals": {}, "skips": {}, "error_over_limit": {}}
    (tmp_path / "summaries" / "tests-x.json").write_text(json.dumps(session))
    outcomes = RAN | {f"{title}: y": {"status": "passed", "seconds": 1.0} for title in ("tests", "benchmarks")}
    (record,) = acceptance.load(written(outcomes)).values()
    assert record["stages"]["tests"]["steps"] == {"tests: x": "passed", "tests: y": "passed"}
    assert record["stages"]["tests"]["counts"] == {"passed": 9}


def test_without_a_stage_of_tests_there_is_no_record(written):
    assert not written({"benchmarks: y": {"status": "passed", "seconds": 1.0}}).exists()


def test_a_record_begins_as_the_committed_ones_do(written):
    """The file has one field per line and indents by one space per level."""
    (path,) = written(RAN).iterdir()
    committed = next((ROOT / "benchmarks" / "acceptance").glob("*.json"))
    first, second = (file.read_text().splitlines()[:3] for file in (path, committed))
    assert first[:2] == second[:2]
    assert [len(line) - len(line.lstrip()) for line in first] == [len(line) - len(line.lstrip()) for line in second]


def test_records_are_read_from_the_tree_if_no_folder_is_named(monkeypatch, tmp_path):
    check = _script("check_release")
    (tmp_path / "benchmarks" / "acceptance").mkdir(parents=True)
    (tmp_path / "benchmarks" / "acceptance" / "good.json").write_text(json.dumps(_record()))
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.main([]) == 0


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
