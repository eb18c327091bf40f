"""README and docs: links have targets, the API reference is complete, and quoted messages are those of the library."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import flashbwd

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_every_page_is_reached_from_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.name != "index.md"]
    assert [page for page in pages if f"]({page})" not in index] == []


PUBLIC = [name for name in flashbwd.__all__ if not name.startswith("__")]


def test_the_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_no_page_has_more_than_350_lines() -> None:
    long = {page.name: len(page.read_text().splitlines()) for page in (ROOT / "docs").rglob("*.md")}
    assert {name: lines for name, lines in long.items() if lines > 350} == {}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    docs = ROOT / "docs"
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md")]
    assert [page for page in pages if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)] == []


def test_api_page_has_a_section_with_the_docstring_of_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    sections = dict(re.findall(r"^## (flashbwd\.\w+)\n\n::: (\S+)$", page, re.MULTILINE))
    assert sections.pop("flashbwd.integrations").startswith("flashbwd.integrations.")
    # For these two names the site's generator would take the module of the same name.
    modules = {f"flashbwd.{name}": f"flashbwd.{name}.{name}" for name in ("attention", "layer_norm")}
    assert sections == {f"flashbwd.{name}": f"flashbwd.{name}" for name in PUBLIC} | modules


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_names_every_argument(name: str) -> None:
    public = getattr(flashbwd, name)
    documented = inspect.getdoc(public) or ""
    for other in re.findall(r":func:`(\w+)`", documented):  # "as for" the other function
        documented += inspect.getdoc(getattr(flashbwd, other, None)) or ""
    if inspect.isclass(public):
        names = list(getattr(public, "__dataclass_fields__", ()))
    else:
        names = list(inspect.signature(public).parameters)
    missing = [argument for argument in names if not re.search(rf"\b{argument}\b", documented)]
    assert missing == []


def test_troubleshooting_quotes_the_messages_of_the_library() -> None:
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 3, 16)
    packed, cu_seqlens = q[0], torch.tensor([0, 4], dtype=torch.int32)
    quoted = re.findall(r"^    (flashbwd: .*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    said = []
    for call in (
        lambda: flashbwd.attention(q, k, k),
        lambda: flashbwd.attention_backward(q, q, q, q, q, torch.zeros(1, 8, 4, dtype=torch.bfloat16)),
        lambda: flashbwd.attention(packed, packed, packed, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens),
    ):
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    assert quoted == said
