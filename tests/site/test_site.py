"""The site has every page, on a shelf of its own, and no link that leads nowhere."""

from pathlib import Path
from typing import Any

import yaml

from tests.site.links import followable

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without MkDocs: Python's objects and the environment are left out."""


_LOADER_TAGS = ("tag:yaml.org,2002:python/", "!ENV")
for _tag in _LOADER_TAGS:
    _Loader.add_multi_constructor(_tag, lambda _loader, _suffix, _node: None)


def navigation() -> dict[str, list[str]]:
    """Shelf -> the paths of its pages; the front page is on the shelf ""."""
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    shelves: dict[str, list[str]] = {"": []}
    for entry in config["nav"]:
        if isinstance(entry, str):
            shelves[""].append(entry)
            continue
        ((name, pages),) = entry.items()
        shelves[name] = [path for page in pages for path in page.values()]
    return shelves


def test_the_site_has_every_page_once() -> None:
    listed = [path for pages in navigation().values() for path in pages]
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_a_shelf_is_a_folder() -> None:
    for name, pages in navigation().items():
        folder = f"{name.lower()}/" if name else ""
        assert [path for path in pages if path.rpartition("/")[0] != folder.rstrip("/")] == []


def test_links_out_of_the_documentation_lead_to_the_repository() -> None:
    text = "[a](../../README.md#install), [b](../guides/shaping.md#outbox), [c](https://x.org/)"
    assert followable(text, "start/quick-start.md", "https://x.org/repository/") == (
        "[a](https://x.org/repository/blob/main/README.md#install), "
        "[b](../guides/shaping.md#outbox), [c](https://x.org/)"
    )
