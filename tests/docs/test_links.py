"""Links between pages lead to a file and, in a page, to a heading; and docs/README.md lists every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "packages/*/macos/README.md", "tests/*/README.md")
    for page in ROOT.glob(pattern)
)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def links(page: Path) -> list[tuple[str, str]]:
    """(file, heading) of each, either of which may be empty."""
    return re.findall(r"\]\((?!\w+://)([^)#\s]*)#?([^)\s]*)\)", prose(page))


def headings(page: Path) -> set[str]:
    """As a forge makes anchors of them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for file, heading in links(here):
        target = (here.parent / file) if file else here
        assert target.exists(), f"{page} links to {file}"
        assert not heading or heading in headings(target), f"{page} links to {file}#{heading}"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / file).resolve() for file, _ in links(index)}
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - listed == {index.resolve()}
    assert {(ROOT / page).resolve() for page in PAGES} - listed == {index.resolve()}
