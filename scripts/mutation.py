"""Mutation testing: change one operator or constant at a time, and see whether the fast tests of that module fail.

    python scripts/mutation.py --seed 1                    a random sample of every group
    python scripts/mutation.py reference --sample 100      a larger sample of one group
    python scripts/mutation.py flashbwd/reference/spans.py --all    every mutant of one module

The mutants come from cosmic-ray (``pip install '.[mutation]'``). They are written to a copy of the tree in a temporary
folder, so the tree itself never holds one. A mutant is killed if a test fails or if the tests exceed the time limit.
The table has one row per module. ``OUT/survivors.diff`` holds the surviving mutants, ``OUT/results.json`` all of them.
Mutants of ``scripts/equivalent_mutants.json`` cannot change any result on a CPU: the score leaves them out.

Exit status: 0 if the score of every group reaches ``--least``, 1 if one does not, 2 if tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.json"

# One replacement per operator, or two for an order: more of them at one place fail in the same tests.
_BINARY = """Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_Add Pow_Mul RShift_LShift LShift_RShift BitOr_BitAnd
    BitAnd_BitOr BitXor_BitOr"""
_COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISON.split()),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("USub", "Invert", "Not")),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    "ZeroIterationForLoop",
)

SHORTEST_LIMIT_S = 20.0
LIMIT_FACTOR = 4.0  # times what the tests take without a mutant
MEMORY_BYTES = 8 * 2**30  # of one test process
PRELOADED = ("torch", "torch.utils.flop_counter", "torch.nn.attention.flex_attention", "numpy", "hypothesis", "pytest")

REFERENCE = "tests/test_reference.py"
_SLOW_CASES = (
    "obey random norm wide_ many_b many_h few_keys bias_tiles tiles_ _tiles] seqlen_ head_dim efficient32 40x70 "
    "one_sign bias_shared of_keys long forked capture score_matrix only_matrix"
)
_FAST = " and ".join(f"not {name}" for name in _SLOW_CASES.split())
_ATTENTION = (*(f"tests/test_reference{name}.py" for name in ("_cuts", "_hidden_rows", "_products", "")), "-k", _FAST)
_FORWARD = ("tests/test_reference_cuts.py", REFERENCE, "-k", f"(test_forward or lengths or neither) and {_FAST}")
_NORM_FILES = ("tests/test_layer_norm_from_output.py", "tests/test_dropout_add_norm.py")
_NORMS = ("tests/test_reference_cuts.py", *_NORM_FILES, REFERENCE, "-k", "norm or cpu")
_DECODING = (
    *(f"tests/test_flex_decoding{name}.py" for name in ("_tiles", "_autograd", "_reference", "")),
    "tests/test_reference_cuts.py",
)
_EMIT = tuple(f"tests/test_flex_decoding_{name}.py" for name in ("slots", "emission", "derivative"))
_RECOGNITION = (
    *(f"tests/test_flex_decoding_{name}.py" for name in ("values", "built_in", "meaning")),
    "-k",
    "not generated and not captured_integer",
)
_KEYS = (
    "tests/test_flex_decoding_slots.py",
    "tests/test_flex_decoding_keys.py",
    "tests/test_flex_decoding_compiler.py",
)
_SLOW_PEERS = (
    "cpu_peer peers_are gpu_peers peer_that block_peers norm_peers attention_peers wrong_peer compile drawn plots "
    "goes_on slots_of_blocks report_of_blocks side_by_side first-d last-d"
)
_SLOW = " and ".join(f"not {name}" for name in _SLOW_PEERS.split())
_BENCH = ("tests/test_bench_errors.py", "tests/test_bench.py", "-k", _SLOW)
_GATES = ("tests/test_gates.py",)

# Group -> module -> arguments of pytest that select the tests which own the module. Modules that run on a GPU only
# (flashbwd/mods/backward.py, in_graph.py, run.py) and what runs and times the benchmarks are left out.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "reference": {
        **{
            f"flashbwd/reference/{name}.py": _ATTENTION
            for name in ("backward", "bias_gradient", "blocks", "operands", "scores", "sink", "spans")
        },
        "flashbwd/reference/forward.py": _FORWARD,
        "flashbwd/reference/workers.py": ("tests/test_workers.py",),
        **{f"flashbwd/reference/{name}.py": _DECODING for name in ("decoding", "modifications")},
        "flashbwd/reference/norms.py": _NORMS,
    },
    "mods": {
        **{f"flashbwd/mods/{name}.py": _EMIT for name in ("derivative", "element", "emit", "operators", "row")},
        **{f"flashbwd/mods/{name}.py": _KEYS for name in ("captures", "kernels")},
        "flashbwd/mods/nvrtc.py": ("tests/test_disk_cache.py", *_KEYS),
        "flashbwd/mods/handle.py": ("tests/test_compile_mods.py",),
        **{f"flashbwd/mods/{name}.py": _RECOGNITION for name in ("built_in", "rules", "values")},
        "flashbwd/mods/trace.py": ("tests/test_flex_decoding_emission.py", *_KEYS),
    },
    "bench": {
        **{f"flashbwd/bench/{name}.py": _BENCH for name in ("cases", "errors", "oracle", "results")},
        "flashbwd/bench/acceptance.py": (
            "tests/test_acceptance.py",
            "tests/test_cli.py",
            "-k",
            "acceptance or records",
        ),
    },
    "gates": {
        "scripts/audit.py": ("tests/test_audit.py", *_GATES),
        "scripts/check_budget.py": _GATES,
        "scripts/check_release.py": ("tests/test_acceptance.py",),
        "scripts/figures.py": ("tests/test_figures.py",),
    },
}
METHODS_ONLY = {"flashbwd/bench/cases.py"}  # the rest are names of peers


@dataclass(frozen=True)
class Mutant:
    """One changed place of a module."""

    group: str
    module: str
    line: int
    operator: str
    source: str  # of the whole module, changed
    before: str  # the changed lines, stripped
    after: str


@dataclass
class Result:
    module: str
    line: int
    operator: str
    before: str
    after: str
    outcome: str  # "killed", "timeout", "survived" or "equivalent"
    seconds: float


# ---- mutants --------------------------------------------------------------------------------------


def meaning(source: str) -> str | None:
    """The syntax tree as text; None where the source does not compile.

    Left out is what no call can show: annotations, ``frozen`` of dataclasses, and the start of a script.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test))]
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Name("annotation", ast.Load()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "frozen"]
    return ast.dump(tree)


def changed_lines(old: str, new: str) -> tuple[str, str]:
    """The lines that differ, stripped and joined."""
    difference = list(difflib.ndiff(old.splitlines(), new.splitlines()))
    return tuple(" ".join(line[2:].strip() for line in difference if line[0] == sign) for sign in "-+")  # type: ignore


Place = tuple[int, int]


def places_of(source: str) -> dict[Place, list[tuple[str, int]]]:
    """(line, column) -> (operator, occurrence) of all mutants there."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    tree = get_ast(source)
    found: dict[Place, list[tuple[str, int]]] = {}
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        positions = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            found.setdefault(start, []).append((name, occurrence))
    return dict(sorted(found.items()))


def in_a_class(source: str, place: Place) -> bool:
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return any(node.lineno <= place[0] <= (node.end_lineno or 0) for node in classes)


def mutant_of(group: str, module: str, source: str, place: Place, operator: str, occurrence: int) -> Mutant | None:
    """None where the changed source does not compile or means the same."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    try:
        changed = mutate_code(source, get_operator(f"core/{operator}")(), occurrence)
    except AttributeError:  # ExceptionReplacer fails on a tuple with a dotted name
        return None
    if changed is None or meaning(changed) in (None, meaning(source)):
        return None
    return Mutant(group, module, place[0], operator, changed, *changed_lines(source, changed))


def mutants_of(group: str, modules: Iterable[str], chance: random.Random, sample: int | None) -> list[Mutant]:
    """All mutants, or at ``sample`` places, drawn from all modules alike, one each."""
    sources = {module: (ROOT / module).read_text() for module in modules}
    places = [
        (module, place, options)
        for module, text in sources.items()
        for place, options in places_of(text).items()
        if module not in METHODS_ONLY or in_a_class(text, place)
    ]
    if sample is not None:
        chance.shuffle(places)
    found: list[Mutant] = []
    for module, place, options in places:
        if sample is not None:
            options = chance.sample(options, len(options))
        made = (mutant_of(group, module, sources[module], place, *option) for option in options)
        usable = [mutant for mutant in made if mutant] if sample is None else [next((m for m in made if m), None)]
        found += [mutant for mutant in usable if mutant]
        if len(found) == sample:
            break
    return sorted(found, key=lambda mutant: (mutant.module, mutant.line))


# ---- running --------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of all files that git does not ignore; built libraries are links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory(prefix="flashbwd-mutants-") as folder:
        tree = Path(folder) / "tree"
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        for built in [*(ROOT / "flashbwd").glob("*.so"), ROOT / "tests" / "_built"]:
            if built.exists():
                (tree / built.relative_to(ROOT)).symlink_to(built)
        for name in ("tmp", "cache"):
            (Path(folder) / name).mkdir()
        yield tree


def in_child(tree: Path, tests: Sequence[str], write_bytecode: bool) -> None:
    """Run the tests in this process, a fork, and end it with pytest's status."""
    os.setsid()
    log = os.open(tree.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "ci", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    environment |= {"TMPDIR": str(tree.parent / "tmp"), "XDG_CACHE_HOME": str(tree.parent / "cache")}
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "scripts")))]
    sys.dont_write_bytecode = not write_bytecode
    if not write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    status = 3
    try:
        import pytest

        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_tests(tree: Path, tests: Sequence[str], limit_s: float | None, write_bytecode: bool = False) -> int | None:
    """The exit status of pytest, negative after a signal; None where the limit was exceeded."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        in_child(tree, tests, write_bytecode)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if deadline is not None and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started


def outcome_of(mutant: Mutant, tree: Path, tests: Sequence[str], limit_s: float) -> str:
    path = tree / mutant.module
    original = path.read_text()
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(mutant.source)
    try:
        status = run_tests(tree, tests, limit_s)
    finally:
        path.write_text(original)
    if status in (4, 5):
        raise SystemExit(f"pytest ran no test of {mutant.module}: {' '.join(tests)}")
    return "survived" if status == 0 else "timeout" if status is None else "killed"


# ---- results --------------------------------------------------------------------------------------


def score(results: Iterable[Result]) -> float:
    """Killed mutants over those that are not equivalent; 1 where there are none."""
    counted = [result.outcome for result in results if result.outcome != "equivalent"]
    return (len(counted) - counted.count("survived")) / len(counted) if counted else 1.0


def table(results: dict[str, list[Result]]) -> str:
    """Rows of modules, and of each group in all."""
    lines = ["| module | mutants | killed | survived | equivalent | score |", "| --- | --- | --- | --- | --- | --- |"]

    def row(name: str, some: list[Result]) -> str:
        outcomes = [result.outcome for result in some]
        numbers = [len(some), len(some) - outcomes.count("survived") - outcomes.count("equivalent")]
        numbers += [outcomes.count("survived"), outcomes.count("equivalent")]
        return f"| {name} | {' | '.join(map(str, numbers))} | {score(some):.0%} |"

    for group, of_group in results.items():
        for module in dict.fromkeys(result.module for result in of_group):
            lines.append(row(module, [result for result in of_group if result.module == module]))
        lines.append(row(f"**{group}**", of_group))
    return "\n".join(lines)


def diff_of(mutant: Mutant) -> str:
    old = (ROOT / mutant.module).read_text().splitlines(keepends=True)
    new = mutant.source.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, f"a/{mutant.module}", f"b/{mutant.module}", n=2))


def known_equivalents() -> set[tuple[str, str, str]]:
    """(module, before, after)."""
    if not EQUIVALENT.exists():
        return set()
    return {(entry["module"], entry["before"], entry["after"]) for entry in json.loads(EQUIVALENT.read_text())}


def chosen(names: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Of GROUPS, those named, by group or by module; all where none is named."""
    unknown = [name for name in names if name not in GROUPS and not any(name in of for of in GROUPS.values())]
    if unknown:
        modules = [module for of in GROUPS.values() for module in of]
        raise SystemExit(f"unknown: {', '.join(unknown)}; groups: {', '.join(GROUPS)}; modules: {', '.join(modules)}")
    found = {
        group: {m: tests for m, tests in of.items() if not names or group in names or m in names}
        for group, of in GROUPS.items()
    }
    return {group: of for group, of in found.items() if of}


def limits(
    tree: Path, selections: Iterable[tuple[str, ...]], say: Callable[[str], None]
) -> dict[tuple[str, ...], float]:
    """Seconds that a mutant may take, by selection of tests. Ends the program if tests fail without a mutant."""
    found = {}
    for tests in dict.fromkeys(selections):
        for write_bytecode in (True, False):
            begin = time.monotonic()
            status = run_tests(tree, tests, None, write_bytecode)
            seconds = time.monotonic() - begin
            if status:
                say((tree.parent / "log").read_text()[-4000:])
                say(f"tests fail without a mutant: {' '.join(tests)}")
                raise SystemExit(2)
            if seconds < SHORTEST_LIMIT_S / LIMIT_FACTOR:
                break
        found[tests] = max(SHORTEST_LIMIT_S, LIMIT_FACTOR * seconds)
        say(f"{seconds:5.1f} s without a mutant: {' '.join(tests)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", help=f"modules, or groups: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--sample", type=int, default=40, help="mutants per group (default 40)")
    parser.add_argument("--all", action="store_true", help="all mutants instead of a sample")
    parser.add_argument(
        "--timeout-s", type=float, help="per mutant (default: 4 times the tests' own time, at least 20)"
    )
    parser.add_argument("--least", type=float, default=0.9, help="score that every group must reach (default 0.9)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutation", help="folder for results")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args(arguments)
    groups = chosen(options.names)
    sample = None if options.all else options.sample
    work = {g: mutants_of(g, of, random.Random(f"{options.seed} {g}"), sample) for g, of in groups.items()}
    if options.list:
        for mutant in (m for mutants in work.values() for m in mutants):
            print(f"{mutant.module}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
        return 0
    for name in PRELOADED:
        __import__(name)
    equivalents = known_equivalents()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Result]] = {group: [] for group in work}
    total, number = sum(map(len, work.values())), 0

    def say(text: str) -> None:
        print(text, flush=True)

    with copied_tree() as tree, (options.out / "survivors.diff").open("w") as survivors:
        limit_of = limits(tree, (groups[m.group][m.module] for ms in work.values() for m in ms), say)
        for group, mutants in work.items():
            for mutant in mutants:
                number += 1
                tests = groups[group][mutant.module]
                begin = time.monotonic()
                outcome = "equivalent"
                if (mutant.module, mutant.before, mutant.after) not in equivalents:
                    outcome = outcome_of(mutant, tree, tests, options.timeout_s or limit_of[tests])
                seconds = time.monotonic() - begin
                shown = (mutant.module, mutant.line, mutant.operator, mutant.before, mutant.after)
                results[group].append(Result(*shown, outcome, round(seconds, 1)))
                say(f"{number}/{total} {outcome:10} {seconds:5.1f} s  {mutant.module}:{mutant.line}  {mutant.operator}")
                if outcome == "survived":
                    survivors.write(diff_of(mutant) + "\n")
                    survivors.flush()
    found = {
        "seed": options.seed,
        "sample": sample,
        "results": {g: [asdict(r) for r in rs] for g, rs in results.items()},
    }
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    say(f"\nseed {options.seed}, {'all mutants' if sample is None else f'at most {sample} mutants per group'}\n")
    say(table(results))
    return 0 if all(score(of_group) >= options.least for of_group in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
