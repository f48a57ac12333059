"""Every document is in the index, and every link between documents leads somewhere."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = sorted(
    path for folder in (ROOT, DOCS, ROOT / "benchmarks/results") for path in folder.glob("*.md")
)
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


def test_the_index_names_every_page() -> None:
    named = set(LINK.findall((DOCS / "index.md").read_text(encoding="utf-8")))
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= named


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_yaml_are_yaml(path: Path) -> None:
    """One that was set as prose is a single text, or nothing that a parser takes."""
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M):
        assert isinstance(yaml.safe_load(block), dict | list), block
