"""Runs PyTorch's own tests of FlexAttention with the backward of this library in compiled models.

    python scripts/run_pytorch_flex_tests.py PYTORCH/test/inductor/test_flex_attention.py
    python scripts/run_pytorch_flex_tests.py FILE --out OUT --budget-s 400   again with the same OUT: continues
    python scripts/run_pytorch_flex_tests.py FILE --shard 2/4 -k Learnable   a part of the tests

The file is the one of the installed torch version, in a checkout of PyTorch. The tests that fail run a second time with
PyTorch's own backward, so that failures without this library are told apart; ``--both`` runs all of them twice. Every
finished test is in ``OUT/on.jsonl`` or ``OUT/off.jsonl``, with the number of backwards that kernels of this library
computed and the reasons for those that stayed PyTorch's. ``OUT/summary.json`` has what the script prints at its end.
Use another folder after a change of the library.

Exit status: 0 if no test fails because of this library, 1 if one does, 3 if none does but some tests did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS_OF_PYTORCHS_KERNEL = {  # what a test checks besides values; docs/testing.md explains it
    "test_strided_backwards": "the name of the Triton kernel in the generated code",
    "test_flex_attention_logging": "the record of autotuning the Triton kernel",
    "test_symmetric_bias": "that PyTorch refuses two reads of a captured tensor that requires a gradient",
}
CATEGORIES = {
    "passed": "passed",
    "skipped": "skipped",
    "failed_both": "failed with and without flashbwd",
    "failed_by_design": "failed only with flashbwd: checks PyTorch's kernel",
    "failed_with": "failed only with flashbwd",
    "no_memory": "failed because the memory of the GPU was full; another call runs them again",
    "not_run": "not run",
}
# Inductor must not take graphs from its cache, because its passes do not see those. It may share compiled kernels.
ENVIRONMENT = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "INDUCTOR_TEST_DISABLE_FRESH_CACHE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

Outcomes = dict[str, dict[str, Any]]  # by the test's id

# ---- running pytest ----


def command_of(file: Path, out: Path, *options: object) -> list[str]:
    (out / "pytest.ini").write_text("[pytest]\n")  # not this repository's options
    plugins = [part for name in ("pytorch_flex_plugin", "no:cacheprovider", "no:warnings") for part in ("-p", name)]
    command = [sys.executable, "-m", "pytest", file, *plugins, "-c", out / "pytest.ini", "--rootdir", file.parent, "-q"]
    return [str(part) for part in (*command, *options)]


def environment(out: Path) -> dict[str, str]:
    folders = [str(ROOT / "scripts"), str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(folders)
    return os.environ | ENVIRONMENT | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(out / "cache")}


def collected(file: Path, out: Path, expression: str) -> list[str]:
    command = command_of(file, out, "--collect-only", "-k", expression)
    done = subprocess.run(command, env=environment(out), capture_output=True, text=True)
    if done.returncode not in (0, 5):  # 5: no test matches
        raise SystemExit(f"pytest cannot collect {file}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def read(path: Path) -> Outcomes:
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["test"]: record for record in map(json.loads, lines)}


def had_no_memory(outcome: dict[str, Any]) -> bool:
    """Whether a test failed because other processes had filled the memory of the GPU."""
    return "out of memory" in outcome.get("error", "")


def run(backward: str, tests: Sequence[str], args: argparse.Namespace, end: float) -> Outcomes:
    """Run the tests that have no outcome yet, until the time ``end``. Return all outcomes of this backward."""
    path, chosen = args.out / f"{backward}.jsonl", args.out / f"{backward}.txt"
    before = read(path)
    left = [test for test in tests if test not in before or had_no_memory(before[test])]
    print(f"flashbwd {backward}: {len(tests)} tests, {len(left)} of them to run", flush=True)
    if left and end > time.monotonic():
        chosen.write_text("\n".join(left))
        options = ["--backward", backward, "--tests", chosen, "--outcomes", path, "--tb", "short", "--no-summary"]
        options += ["--timeout", args.timeout_s, "-o", "timeout_method=thread"]
        # Each test may end its worker: tests/kit/lost_gpu.py.
        workers = ["-n", args.jobs, "--dist", "worksteal", "--max-worker-restart", len(left)]
        options += workers if args.jobs else []
        command = command_of(args.file, args.out, *options)
        process = subprocess.Popen(command, env=environment(args.out), start_new_session=True)
        try:
            process.wait(None if end == float("inf") else end - time.monotonic())
        except subprocess.TimeoutExpired:
            print("\nthe time is over", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all processes of pytest-xdist
            process.wait()
    return read(path)


# ---- results ----


def shard_of(tests: Sequence[str], shard: str) -> list[str]:
    """Return every n-th test, from the i-th one on, for the shard ``i/n``."""
    number, count = map(int, shard.split("/"))
    if not 1 <= number <= count:
        raise SystemExit(f"--shard {shard}: the first number must be from 1 to the second")
    return list(tests[number - 1 :: count])


def checks_pytorchs_kernel(test: str) -> bool:
    names = "|".join(TESTS_OF_PYTORCHS_KERNEL)
    return re.match(rf"({names})(_|$)", test.rpartition("::")[2]) is not None


def category_of(test: str, on: Outcomes, off: Outcomes) -> str:
    if test not in on:
        return "not_run"
    if on[test]["outcome"] != "failed":
        return str(on[test]["outcome"])
    if had_no_memory(on[test]) or had_no_memory(off.get(test, {})):
        return "no_memory"
    if test not in off:
        return "not_run"
    if off[test]["outcome"] == "failed":
        return "failed_both"
    return "failed_by_design" if checks_pytorchs_kernel(test) else "failed_with"


def summary_of(tests: Sequence[str], on: Outcomes, off: Outcomes) -> dict[str, Any]:
    """Return the tests of each category, and the counts of backwards over all tests that ran with flashbwd."""
    summary: dict[str, Any] = {category: [] for category in CATEGORIES}
    for test in tests:
        summary[category_of(test, on, off)].append(test)
    records = [on[test] for test in tests if test in on]
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record["fallbacks"])
    return summary | {
        "hits": sum(record["hits"] for record in records),
        "tests_with_hits": sum(record["hits"] > 0 for record in records),
        "fallbacks": dict(reasons.most_common()),
    }


def lines_of(summary: dict[str, Any]) -> Iterator[str]:
    for category, words in CATEGORIES.items():
        yield f"{len(summary[category]):6}  {words}"
        if category.startswith(("failed", "no_memory")):
            yield from (f"            {test}" for test in summary[category])
    yield f"{summary['hits']:6}  backwards by kernels of flashbwd, in {summary['tests_with_hits']} tests"
    yield f"{sum(summary['fallbacks'].values()):6}  backwards left to PyTorch"
    yield from (f"            {count}: {reason}" for reason, count in summary["fallbacks"].items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path, help="PyTorch's test_flex_attention.py")
    parser.add_argument("--out", type=Path, default=Path("out/pytorch_flex_tests"))
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="run one of N parts of the tests")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="run the tests that match, as pytest does")
    parser.add_argument("--both", action="store_true", help="run all tests without flashbwd too")
    parser.add_argument("--jobs", type=int, default=min(32, os.cpu_count() or 1), help="test processes")
    parser.add_argument("--timeout-s", type=float, default=180, help="time limit of a test")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="time limit of this call")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.budget_s
    args.file, args.out = args.file.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    tests = shard_of(collected(args.file, args.out, args.k), args.shard)
    on = run("on", tests, args, end)
    failed = {test for test in on if on[test]["outcome"] == "failed" and not had_no_memory(on[test])}
    again = [test for test in tests if args.both or test in failed]
    off = run("off", again, args, end) if again else {}
    summary = summary_of(tests, on, off)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(*lines_of(summary), sep="\n")
    return 1 if summary["failed_with"] else 3 if summary["not_run"] or summary["no_memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
