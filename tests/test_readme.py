"""README and docs say what is true: their links lead somewhere, the API page is complete, quoted messages come."""

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
def test_links_lead_somewhere(page: Path) -> None:
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


def api_sections() -> dict[str, str]:
    parts = re.split(r"^## flashbwd\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


PUBLIC = [name for name in flashbwd.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_api_page_names_every_argument_and_default(name: str) -> None:
    sections = api_sections()
    assert name in sections, f"docs/api.md has no section flashbwd.{name}"
    public = getattr(flashbwd, name)
    if inspect.isclass(public):
        fields = getattr(public, "_fields", None) or getattr(public, "__dataclass_fields__", ())
        for field in fields:
            assert re.search(rf"\b{field}\b", sections[name]), f"flashbwd.{name} has a field {field}"
        return
    signature = re.sub(r"\s+", " ", sections[name])
    for parameter in inspect.signature(public).parameters.values():
        shown = parameter.name
        if parameter.default is not inspect.Parameter.empty:
            shown += f"={parameter.default!r}".replace("1e-05", "1e-5")
        assert shown in signature, f"flashbwd.{name} has an argument {shown}"


def test_api_page_has_no_section_for_what_is_not_there() -> None:
    assert set(api_sections()) == set(PUBLIC)


def test_messages_quoted_on_troubleshooting_are_those_of_the_calls() -> None:
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
