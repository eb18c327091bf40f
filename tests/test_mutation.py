"""The script for mutation testing: its mutants, its scores, and its table of modules and tests."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

from scripts import mutation  # noqa: E402

SOURCE = '''"""A module."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    x: int | None = 1


def f(x: int) -> int:
    return x + 1


if __name__ == "__main__":
    f(1)
'''


def result(outcome: str, module: str = "a.py") -> mutation.Result:
    return mutation.Result(module, 1, "AddNot", "before", "after", outcome, 0.1)


def test_modules_and_tests_of_the_table_exist() -> None:
    for modules in mutation.GROUPS.values():
        for module, tests in modules.items():
            assert (ROOT / module).is_file()
            assert all((ROOT / test).is_file() for test in tests if test.endswith(".py"))


def test_every_module_belongs_to_one_group() -> None:
    modules = [module for of_group in mutation.GROUPS.values() for module in of_group]
    assert len(modules) == len(set(modules))


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("x + 1", "x - 1", False),
        ("x: int |", "x: int &", True),
        ("frozen=True", "frozen=False", True),
        ("f(1)", "f(2)", True),
        ("= 1", "= 2", False),
    ],
)
def test_changes_without_effect_are_no_mutants(old: str, new: str, same: bool) -> None:
    changed = SOURCE.replace(old, new, 1)
    assert changed != SOURCE
    assert (mutation.meaning(changed) == mutation.meaning(SOURCE)) is same


def test_code_that_does_not_compile_is_no_mutant() -> None:
    assert mutation.meaning("def f(:") is None


def test_the_changed_lines_are_those_that_differ() -> None:
    assert mutation.changed_lines(SOURCE, SOURCE.replace("x + 1", "x - 1")) == ("return x + 1", "return x - 1")


def test_the_score_leaves_out_equivalent_mutants() -> None:
    outcomes = ["killed", "killed", "timeout", "survived", "equivalent", "equivalent"]
    assert mutation.score(map(result, outcomes)) == 0.75


def test_the_table_has_a_row_for_each_module_and_one_for_the_group() -> None:
    found = {
        "reference": [result("killed"), result("survived"), result("equivalent", "b.py"), result("timeout", "b.py")]
    }
    assert mutation.table(found).splitlines()[2:] == [
        "| a.py | 2 | 1 | 1 | 0 | 50% |",
        "| b.py | 2 | 1 | 0 | 1 | 100% |",
        "| **reference** | 4 | 2 | 1 | 1 | 67% |",
    ]


def test_names_select_groups_and_modules() -> None:
    assert mutation.chosen([]) == mutation.GROUPS
    assert mutation.chosen(["gates"]) == {"gates": mutation.GROUPS["gates"]}
    spans = "flashbwd/reference/spans.py"
    assert mutation.chosen([spans]) == {"reference": {spans: mutation.GROUPS["reference"][spans]}}
    with pytest.raises(SystemExit, match=r"unknown: nothing"):
        mutation.chosen(["nothing"])


def test_every_equivalent_mutant_names_an_existing_line_and_a_reason() -> None:
    for entry in json.loads(mutation.EQUIVALENT.read_text()):
        lines = [line.strip() for line in (ROOT / entry["module"]).read_text().splitlines()]
        assert entry["before"] in lines
        assert entry["after"] not in lines
        assert entry["reason"]


def test_a_seed_repeats_the_sample_and_another_seed_draws_another() -> None:
    pytest.importorskip("cosmic_ray")
    module = ["scripts/check_budget.py"]
    first, again, other = (mutation.mutants_of("gates", module, random.Random(seed), 5) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == len({mutant.source for mutant in first}) == 5


def test_a_failing_test_kills_a_mutant_and_the_tree_does_not_change(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True)
    (tree / "subject.py").write_text("def f(x):\n    return x + 1\n")
    (tree / "tests" / "test_code.py").write_text("from subject import f\n\ndef test_f():\n    assert f(1) == 2\n")
    original = (tree / "subject.py").read_text()
    outcomes = []
    for operator in "-+":
        changed = original.replace("+", operator)
        mutant = mutation.Mutant("g", "subject.py", 2, "Add_Sub", changed, "", "")
        outcomes.append(mutation.outcome_of(mutant, tree, ["tests/test_code.py"], 60.0))
    endless = mutation.Mutant("g", "subject.py", 2, "Add_Sub", "def f(x):\n    while True: pass\n", "", "")
    outcomes.append(mutation.outcome_of(endless, tree, ["tests/test_code.py"], 3.0))
    assert outcomes == ["killed", "survived", "timeout"]
    assert (tree / "subject.py").read_text() == original


def test_an_exception_with_a_dotted_name_is_left_out() -> None:
    pytest.importorskip("cosmic_ray")
    source = "try:\n    f()\nexcept (KeyError, json.JSONDecodeError):\n    pass\n"
    found = [
        mutation.mutant_of("group", "a.py", source, place, *option)
        for place, options in mutation.places_of(source).items()
        for option in options
        if option[0] == "ExceptionReplacer"
    ]
    assert found
    assert all(mutant is None or "CosmicRay" in mutant.source for mutant in found)
