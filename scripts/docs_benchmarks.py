"""An mkdocs hook that adds to the benchmark page the measuring rules of benchmarks/README.md and the newest results.

Other pages in docs/ may show a plot of benchmarks/results by its path in the repository.

The newest results of a suite on a machine are all result files of the commit of its newest file, with their plots.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PAGE = "benchmarks.md"
PLOTS = "images/results"


def newest_results() -> list[Path]:
    """Return the tables of the newest results in benchmarks/results/, per machine and suite.

    File names consist of machine, suite, "quick" for a --quick run, date and time.
    """
    by_suite: dict[str, list[tuple[str, Path]]] = {}
    for path in (BENCHMARKS / "results").glob("*.md"):
        if match := re.fullmatch(r"(.+?)(?:-quick)?-(\d{8}-\d{6})", path.stem):
            suite, when = match.groups()
            by_suite.setdefault(suite, []).append((when, path))
    newest = []
    for _, results in sorted(by_suite.items()):
        paths = [path for _, path in sorted(results)]
        newest += [path for path in paths if commit_of(path) == commit_of(paths[-1])]
    return newest


def commit_of(result: Path) -> str:
    found = re.search(r"commit (\w+)", result.read_text())
    return found[1] if found else ""


def plots_of(result: Path) -> list[Path]:
    return sorted(result.parent.glob(f"{result.stem}-*.png"))


def one_level_down(markdown: str) -> str:
    return re.sub(r"^#", "##", markdown, flags=re.MULTILINE)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for result in newest_results():
        for plot in plots_of(result):
            files.append(File.generated(config, f"{PLOTS}/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != PAGE:
        up = "../" * page.file.src_uri.count("/")  # from the page to docs/
        return markdown.replace(f"]({up}../benchmarks/results/", f"]({up}{PLOTS}/")
    rules = (BENCHMARKS / "README.md").read_text().replace("](../docs/", "](")
    parts = [markdown, rules[rules.index("## ") :]]
    for result in newest_results():
        title, tables = one_level_down(result.read_text()).split("\n", 1)
        images = [f"![{plot.stem.removeprefix(result.stem + '-')}]({PLOTS}/{plot.name})" for plot in plots_of(result)]
        parts += [title, *images, tables]
    return "\n\n".join(parts)
