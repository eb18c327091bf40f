"""The gates on a build fail if part of it is missing. Each test puts one fault into a report or a listing."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

from build_tools import native  # noqa: E402
from scripts import audit, check_budget  # noqa: E402

BUDGET = json.loads(check_budget.BUDGET.read_text())
SM80_UNIT = "csrc/attention/sm80/instantiations/d128_bf16.cu"
FAMILIES_ON = [
    (family, target)
    for family, (_, targets) in native.FAMILIES.items()
    for target in sorted(native.machine_targets(targets))
]


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA_ARCHS", "all")
    for name in ("FLASHBWD_FAMILIES", "FLASHBWD_HEAD_DIMS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def report() -> list[check_budget.Row]:
    """A report of a build that is within the budget: one kernel of each unit has all of its registers and spills."""
    units = []
    for source, row in BUDGET["units"].items():
        kernels = [
            {
                "name": f"kernel{n}",
                "arch": target,
                "registers": row["registers"][target] if n == 0 else 32,
                "spills": row["spilled_bytes"][target] if n == 0 else 0,
            }
            for target, count in row["kernels"].items()
            for n in range(count)
        ]
        units.append({"source": source, "cpu_seconds": row["cpu_seconds"], "warnings": [], "kernels": kernels})
    for path in (ROOT / "csrc").rglob("*.cpp"):
        units.append({"source": str(path.relative_to(ROOT)), "cpu_seconds": 2.0, "warnings": [], "kernels": []})
    return units


def problems(report: list[check_budget.Row], slower: float = 1.0) -> list[str]:
    return check_budget.check(report, BUDGET, BUDGET["calibration_seconds"] * slower)


def unit(report: list[check_budget.Row], source: str = SM80_UNIT) -> check_budget.Row:
    return next(unit for unit in report if unit["source"] == source)


def test_a_build_within_the_budget_passes(report):
    assert problems(report) == []


@pytest.mark.parametrize(("family", "target"), FAMILIES_ON)
def test_a_family_without_kernels_for_one_gpu_fails(report, family, target):
    folder = native.FAMILIES[family][0]
    for each in report:
        if each["source"].startswith(folder + "/"):
            each["kernels"] = [kernel for kernel in each["kernels"] if kernel["arch"] != target]
    sources = [source for source in BUDGET["units"] if source.startswith(folder + "/")]
    found = problems(report)
    for source in set(sources) - check_budget.HOST_ONLY:
        assert f"{source}: no kernels for {target} in the build" in found


@pytest.mark.parametrize(("family", "target"), FAMILIES_ON)
def test_a_family_that_is_missing_in_build_and_budget_fails(report, family, target):
    """This happens after --update from a build that lacks the family."""
    budget = copy.deepcopy(BUDGET)
    folder = native.FAMILIES[family][0]
    for each in report:
        if each["source"].startswith(folder + "/"):
            each["kernels"] = [kernel for kernel in each["kernels"] if kernel["arch"] != target]
            for what in ("kernels", "registers", "spilled_bytes"):
                if each["source"] in budget["units"]:
                    budget["units"][each["source"]][what].pop(target, None)
    assert any(f"no kernels for {target}" in line for line in check_budget.check(report, budget, 1e-3))


@pytest.mark.parametrize("source", [SM80_UNIT, "csrc/attention/params.cpp"])
def test_a_source_that_was_not_built_fails(report, source):
    report.remove(unit(report, source))
    assert f"{source}: not in the build" in problems(report)


def test_an_update_from_an_incomplete_build_writes_nothing(report, monkeypatch, tmp_path):
    monkeypatch.setattr(check_budget, "BUDGET", tmp_path / "budget.json")
    check_budget.update(report, 1.0)
    (tmp_path / "budget.json").unlink()
    unit(report)["kernels"] = []
    with pytest.raises(SystemExit, match="no kernels for sm_80"):
        check_budget.update(report, 1.0)
    assert not (tmp_path / "budget.json").exists()


def test_an_update_from_a_build_that_equals_the_budget_changes_no_byte(report, monkeypatch, tmp_path):
    written = tmp_path / "budget.json"
    committed = check_budget.BUDGET.read_text()
    monkeypatch.setattr(check_budget, "BUDGET", written)
    check_budget.update(report[::-1], BUDGET["calibration_seconds"])  # units may end in any order
    assert written.read_text() == committed


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_missing_kernel_on_one_gpu_fails(report, target):
    kernels = unit(report)["kernels"]
    kernels.remove([kernel for kernel in kernels if kernel["arch"] == target][-1])
    count = BUDGET["units"][SM80_UNIT]["kernels"][target]
    assert problems(report) == [f"{SM80_UNIT}: {count - 1} kernels on {target}, the budget says {count}"]


@pytest.mark.parametrize("source", sorted(BUDGET["units"].keys() - check_budget.HOST_ONLY))
def test_spills_in_any_unit_fail(report, source):
    kernel = unit(report, source)["kernels"][-1]
    kernel["spills"] += 4
    allowed = BUDGET["units"][source]["spilled_bytes"][kernel["arch"]]
    assert f"{source}: {allowed + 4} spilled_bytes on {kernel['arch']}, the budget says {allowed}" in problems(report)


def test_a_kernel_with_more_registers_fails(report):
    unit(report)["kernels"][0]["registers"] += 1
    assert any("registers on sm_80" in line for line in problems(report))


@pytest.mark.parametrize("source", [SM80_UNIT, "csrc/attention/params.cpp"])
def test_a_warning_in_any_unit_fails(report, source):
    unit(report, source)["warnings"] = ["warning: unused variable"]
    assert problems(report) == [f"{source}: warning: unused variable"]


# ---- CPU seconds ----------------------------------------------------------------------------------


def test_a_machine_that_is_slower_for_all_units_passes(report):
    for each in report:
        each["cpu_seconds"] *= 3
    assert problems(report, slower=3.0) == []


def test_growth_of_all_units_fails_on_a_machine_of_equal_speed(report):
    for each in report:
        each["cpu_seconds"] *= 3
    assert [line.split(" CPU seconds")[1] for line in problems(report)] == [" in all, the limit is 2400"]


@pytest.mark.parametrize("cached", [False, True])
def test_growth_of_a_single_unit_fails(report, cached):
    for each in report:
        each["cpu_seconds"] *= 0.0 if cached else 1.0
    unit(report)["cpu_seconds"] = 15 + 2.1 * BUDGET["units"][SM80_UNIT]["cpu_seconds"]
    (found,) = problems(report)
    assert found.startswith(f"{SM80_UNIT}: ")
    assert "CPU seconds to compile" in found


@pytest.mark.parametrize(("seconds", "fails"), [(35.0, False), (35.1, True)])
def test_a_unit_may_take_15_seconds_more_than_twice_its_budget(seconds, fails):
    allowed = {"cpu_seconds": 10.0, "kernels": {}, "registers": {}, "spilled_bytes": {}}
    assert bool(check_budget.compare("a.cu", allowed | {"cpu_seconds": seconds}, allowed, 1.0)) is fails


@pytest.mark.parametrize("what", ["registers", "spilled_bytes"])
@pytest.mark.parametrize("number", [1, 32])
def test_the_budget_of_a_gpu_that_is_not_listed_is_zero(number, what):
    allowed = {"cpu_seconds": 10.0, "kernels": {}, "registers": {}, "spilled_bytes": {}}
    (problem,) = check_budget.compare("a.cu", allowed | {what: {"sm_80": number}}, allowed, 1.0)
    assert problem == f"a.cu: {number} {what} on sm_80, the budget says 0"
    assert check_budget.compare("a.cu", allowed | {what: {"sm_80": 0}}, allowed, 1.0) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_gpu_that_the_build_lacks_counts_as_zero_kernels(number):
    allowed = {"cpu_seconds": 10.0, "kernels": {"sm_80": number}, "registers": {}, "spilled_bytes": {}}
    (problem,) = check_budget.compare("a.cu", allowed | {"kernels": {}}, allowed, 1.0)
    assert problem == f"a.cu: 0 kernels on sm_80, the budget says {number}"


@pytest.mark.parametrize(("then", "now", "said"), [(2.0, 5.0, "2.50"), (4.0, 1.0, "0.25")])
def test_the_total_says_how_much_slower_the_machine_is(then, now, said, capsys):
    check_budget.total_problems([{"cpu_seconds": 7.0}, {"cpu_seconds": 5.0}], then, now)
    limit = 2400 * max(float(said), 1.0)
    expected = f"2 units, 12 CPU seconds of {limit:.0f} (a machine {said} times as slow)\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("seconds", "calibration", "fails"),
    [(2400.0, 1.0, False), (2401.0, 1.0, True), (2400.0, 0.5, False), (4800.0, 2.0, False), (4801.0, 2.0, True)],
)
def test_all_units_may_take_40_minutes_or_more_on_a_slower_machine(seconds, calibration, fails):
    assert bool(check_budget.total_problems([{"cpu_seconds": seconds}], 1.0, calibration)) is fails


def test_a_compiler_that_fails_ends_the_calibration(monkeypatch):
    monkeypatch.setattr(native, "cxx", lambda: "false")
    with pytest.raises(check_budget.subprocess.CalledProcessError):
        check_budget.calibration_seconds()


def test_the_calibration_takes_the_compiler_some_time(monkeypatch):
    monkeypatch.setattr(check_budget, "CALIBRATION", "#include <map>\nstd::map<int, int> table;\n")
    assert check_budget.calibration_seconds() > 0


def test_the_calibration_is_the_shortest_cpu_time_of_three_children(monkeypatch):
    """The CPU time of a child is the increase of user and system time, which contain the time of earlier children."""
    children = iter([(5.0, 1.0), (6.5, 1.5), (9.0, 2.0), (9.753, 2.5), (20.0, 4.0), (22.0, 5.0)])
    usage = lambda who: SimpleNamespace(**dict(zip(("ru_utime", "ru_stime"), next(children), strict=True)))  # noqa: E731
    monkeypatch.setattr(check_budget.resource, "getrusage", usage)
    monkeypatch.setattr(check_budget.subprocess, "run", lambda *args, **kwargs: None)
    assert check_budget.calibration_seconds() == 1.25


@pytest.mark.parametrize(("now", "budget", "factor"), [(3.0, 0.5, 3.0), (3.0, 2.0, 1.5), (1.0, 2.0, 1.0)])
def test_units_of_less_than_a_second_do_not_count_in_the_speed_of_a_machine(now, budget, factor):
    rows = ({"unit": {"cpu_seconds": seconds}} for seconds in (now, budget))
    assert check_budget.slowness(*rows) == factor


@pytest.fixture
def built(report, monkeypatch, tmp_path) -> Path:
    """Write the report and the budget to the files that main reads; return the path of the budget."""
    for name, text in (("REPORT", json.dumps(report)), ("BUDGET", check_budget.BUDGET.read_text())):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(check_budget, name, tmp_path / name)
    monkeypatch.setattr(check_budget, "calibration_seconds", lambda: BUDGET["calibration_seconds"])
    monkeypatch.setattr(sys, "argv", ["check_budget.py"])
    return tmp_path / "BUDGET"


def test_the_check_shows_every_unit_and_passes_within_the_budget(built, capsys):
    check_budget.main()
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert BUDGET["units"].keys() <= shown.keys()
    row = BUDGET["units"][SM80_UNIT]
    use = f"sm_80 {row['kernels']['sm_80']}/{row['registers']['sm_80']}/{row['spilled_bytes']['sm_80']}"
    assert use in shown[SM80_UNIT]


def test_the_check_fails_beyond_the_budget_and_writes_nothing(built, capsys):
    smaller = copy.deepcopy(BUDGET)
    smaller["units"][SM80_UNIT]["registers"]["sm_80"] -= 1
    built.write_text(json.dumps(smaller))
    with pytest.raises(SystemExit, match="registers on sm_80, the budget says"):
        check_budget.main()
    assert json.loads(built.read_text()) == smaller


def test_an_update_writes_the_budget_of_the_build(built, monkeypatch):
    smaller = copy.deepcopy(BUDGET)
    smaller["units"][SM80_UNIT]["registers"]["sm_80"] -= 1
    built.write_text(json.dumps(smaller))
    monkeypatch.setattr(sys, "argv", ["check_budget.py", "--update"])
    check_budget.main()
    assert json.loads(built.read_text()) == BUDGET


# ---- .ci/run ----


def test_ci_runs_the_commands_of_the_readme_before_it_installs_anything():
    readme = (ROOT / "README.md").read_text()
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    script = "\n".join(lines)
    first_install = script.index("pip install")
    for command in ("python3 dev.py demo", "python3 dev.py test"):
        assert f"    {command}" in readme
        assert script.index(f"\n{command}\n") < first_install


@pytest.mark.parametrize(
    "gate",
    [
        "scripts/check_budget.py",
        "scripts/audit.py flashbwd",
        "scripts/figures.py --check",
        'scripts/test_install.sh "$PWD/$python" shared dist/flashbwd-*.tar.gz',
        'scripts/test_install.sh "${oldest:-python3}" torch==2.10.0',
        "scripts/test_wheel.sh dist/repaired/flashbwd-*.whl torch tests",
    ],
)
def test_ci_has_every_gate(gate):
    assert gate in (ROOT / ".ci" / "run").read_text()


# ---- the library ----------------------------------------------------------------------------------


def listings(pieces: Counter[str], kernels: Counter[str]) -> tuple[str, str, str]:
    """The output of cuobjdump."""
    elf = [f"ELF file {n}: _C_cuda.{n}.{t}.cubin" for t, count in pieces.items() if "sm" in t for n in range(count)]
    ptx = [f"PTX file {n}: _C_cuda.{n}.sm_90.ptx" for n in range(pieces["compute_90"])]
    line = "FUNC          GLOBAL  DEFAULT    {}                                _ZN8flashbwd1kEv"
    parts = [
        "\n".join(["Fatbin elf code:", f"arch = {target}", line.format("-"), *[line.format("ENTRY")] * count])
        for target, count in kernels.items()
    ]
    return "\n".join(elf), "\n".join(ptx), "\n".join(parts)


def expected_code() -> tuple[Counter[str], Counter[str]]:
    return audit.expected_code(native.cuda_units(native.chosen_families()), BUDGET)


def test_the_contents_of_a_library_are_read_from_the_listings():
    pieces, kernels = expected_code()
    assert min(pieces.values()) > 10
    assert min(kernels.values()) > 100
    assert set(pieces) == {"sm_80", "sm_90", "sm_90a", "compute_90"}
    assert audit.code_found(*listings(pieces, kernels)) == (pieces, kernels)


@pytest.mark.parametrize(("family", "target"), FAMILIES_ON)
def test_a_library_without_a_familys_kernels_for_one_gpu_fails(monkeypatch, family, target):
    pieces, kernels = expected_code()
    folder = native.FAMILIES[family][0]
    lost = [row["kernels"].get(target, 0) for source, row in BUDGET["units"].items() if source.startswith(folder + "/")]
    shown = iter(listings(pieces, kernels - Counter({target: sum(lost)})))
    monkeypatch.setattr(audit, "cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(audit, "output", lambda *command: next(shown))
    (problem,) = audit.code(Path("_C_cuda.so"))
    assert "holds kernels" in problem


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_90a", "compute_90"])
def test_a_library_without_the_code_of_one_source_fails(monkeypatch, target):
    pieces, kernels = expected_code()
    shown = iter(listings(pieces - Counter({target: 1}), kernels))
    monkeypatch.setattr(audit, "cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(audit, "output", lambda *command: next(shown))
    (problem,) = audit.code(Path("_C_cuda.so"))
    assert "holds pieces of code" in problem
