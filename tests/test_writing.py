"""Pages and files have a bounded length, and use the vocabulary of the field."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE_LINES = 350
FILE_LINES = 400
# Files that may be longer, with the reason.
LONGER: dict[str, str] = {}
# Private names of former versions, and the field's word for each.
PRIVATE = {
    r"jobs?|JobCursor": "work tile",
    r"walks?|walked": "query loop",
    r"chores?": "fused dq postprocess",
    r"multiprocessors?": "SM",
    r"copy engine": "TMA",
    r"wide tiles?": "large head dimensions",
    r"heads_apart|rotation of heads": "staggered start",
    r"ordinary (call|run|mod|mode|modification)s?": "default, built-in",
    r"nobody": "no CTA, no thread, no caller",
}
# make, nvcc and CI also use the word "job".
ELSEWHERE = {"jobs?|JobCursor": re.compile(r"MAX_JOBS|nvcc|--jobs|parallel|at the same time")}


def tracked(*folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    try:
        names = subprocess.run(
            ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name.endswith(suffixes) and (ROOT / name).exists()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_page_has_at_most_350_lines() -> None:
    pages = tracked("docs", suffixes=(".md",))
    assert {name_of(page): len(lines_of(page)) for page in pages if len(lines_of(page)) > PAGE_LINES} == {}


def test_a_source_file_has_at_most_400_lines_unless_a_reason_is_listed() -> None:
    files = tracked("csrc", "flashbwd", suffixes=(".cpp", ".h", ".cu", ".cuh", ".py"))
    long = {name_of(path): len(lines_of(path)) for path in files if len(lines_of(path)) > FILE_LINES}
    assert {name: lines for name, lines in long.items() if name not in LONGER} == {}
    assert set(LONGER) <= set(long), "a file of LONGER is short now: remove it there"


@pytest.mark.parametrize("words", PRIVATE)
def test_sources_and_pages_use_the_words_of_the_field(words: str) -> None:
    pattern = re.compile(rf"\b({words})\b", re.IGNORECASE)
    files = tracked("csrc", "flashbwd", "docs", suffixes=(".cpp", ".h", ".cu", ".cuh", ".py", ".md"))
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in files
        if not name_of(path).startswith("docs/lab/")
        for number, line in enumerate(lines_of(path), 1)
        if pattern.search(line) and not (words in ELSEWHERE and ELSEWHERE[words].search(line))
    ]
    assert found == [], f"write: {PRIVATE[words]}"
