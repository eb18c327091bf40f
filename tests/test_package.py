"""Importing the package, and calling it from several threads."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kit import cases, inputs
from support import run

import flashbwd
from flashbwd import _environment, _ops


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_starts_no_cuda_and_no_compiler() -> None:
    heavy = "[m for m in ('torch._inductor.codecache', 'matplotlib', 'transformers') if m in sys.modules]"
    before = f"import sys, torch; before = {heavy}"
    assert python(f"{before}; import flashbwd; print(torch.cuda.is_initialized(), {heavy} == before)") == "False True"


def test_importing_warns_once_of_an_unknown_variable_and_of_no_known_one() -> None:
    names = ["FLASHBWD_CACHE_DIRS", *_environment.BUILD, *_environment.RUN, *_environment.TESTS]
    program = f"import os; os.environ.update(dict.fromkeys({names}, '1')); import warnings\n"
    program += "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
    program += "    import flashbwd\nprint([str(each.message).partition(' is')[0] for each in caught])"
    assert python(program) == "['flashbwd: the environment variable FLASHBWD_CACHE_DIRS']"


def test_every_variable_that_the_code_reads_is_known() -> None:
    """Parses every source file for the names of variables, so it also finds those that tests and the build read."""
    root, read = Path(__file__).resolve().parents[1], set()
    reading = re.compile(r"""(?:environ\b|getenv\(|names_from_env\()[^\n"']*["'](FLASHBWD_\w+)""")
    for folder in ("flashbwd", "build_tools", "tests", "benchmarks", "scripts", "examples"):
        for path in (root / folder).rglob("*.py"):
            read |= set(reading.findall(path.read_text(encoding="utf-8")))
    assert read == {*_environment.BUILD, *_environment.RUN, *_environment.TESTS}


def test_an_import_from_a_source_tree_without_libraries_names_both_fixes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(_ops, "_PACKAGE", tmp_path / "flashbwd")
    monkeypatch.setattr(_ops, "loaded", [])
    monkeypatch.setattr(_ops, "not_loaded", {})
    with pytest.raises(ImportError, match=r"start Python in another folder.*`python setup\.py build_ext --inplace`"):
        _ops._load_libraries()


def test_the_check_of_an_installation_passes() -> None:
    script = Path(__file__).resolve().parents[1] / "scripts" / "smoke.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_form_no_import_cycle() -> None:
    """Imports within functions count too, because they hide a cycle without breaking it."""
    root = Path(flashbwd.__file__).parent
    paths = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in paths.items()}
    imports = {name: set(_imported(tree, set(modules))) - {name} for name, tree in modules.items()}
    graphlib.TopologicalSorter(imports).prepare()  # CycleError names the modules


def _imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else str(node.module)


def test_importing_changes_no_setting_of_torch() -> None:
    state = "(torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), "
    state += "torch.get_default_dtype(), torch.backends.cuda.flash_sdp_enabled())"
    assert python(f"import torch; before = {state}; import flashbwd; print({state} == before)") == "True"


@pytest.mark.parametrize("name", flashbwd.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    value = getattr(flashbwd, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__


def test_threads_do_not_disturb_each_other() -> None:
    names = ["heads_4to2", "bias_bhqk", "varlen_seqused", "dropout_flash_half_causal", "sink", "softcap"]
    problems = [inputs.build(cases.BY_NAME[name], torch.float32) for name in names] * 4
    bad = dict(problems[0].arguments) | {"causal": "nowhere"}

    def one(problem: inputs.Inputs) -> None:
        for _ in range(5):
            problem.check(*run(problem))
            with pytest.raises(ValueError, match="causal is nowhere"):
                flashbwd.attention_backward(**bad)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, problems))


def test_packages_without_which_tests_are_skipped_are_requirements_of_the_tests() -> None:
    tests = Path(__file__).parent
    skipping = re.compile(r"""importorskip\(\s*["'](\w+)""")
    wanted = {name for path in tests.glob("**/*.py") for name in skipping.findall(path.read_text(encoding="utf-8"))}
    extras = (tests.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = extras.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert {"expecttest", "transformers"} <= wanted
    assert {name.replace("_", "-") for name in wanted} <= set(re.findall(r'"([\w-]+)', extras))
