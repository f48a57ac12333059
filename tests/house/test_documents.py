"""Every document is in the index; its links, settings and commands exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from schemas.events import Envelope
from services.bridge.command import app as slotbridge
from services.failover.cli.app import app as slotfailover
from spark_consumers.command import app as slottables
from tests.house.test_english import MODULES, texts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = sorted(
    path for folder in (ROOT, DOCS, ROOT / "benchmarks/results") for path in folder.glob("*.md")
)
TESTS = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in (path.stem, *re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8")))
}
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s:]*)#([^)]+)\)")
CALL = re.compile(r"\b(slotbridge|slotfailover|slottables)((?: +[a-z-]+)+)([^`|#\n]*)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
COMMANDS = {
    "slotbridge": typer.main.get_command(slotbridge),
    "slotfailover": typer.main.get_command(slotfailover),
    "slottables": typer.main.get_command(slottables),
}


def test_the_index_names_every_page() -> None:
    named = set(LINK.findall((DOCS / "index.md").read_text(encoding="utf-8")))
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= named


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_lead_to_headings_that_exist(path: Path) -> None:
    anchors = ANCHOR.findall(path.read_text(encoding="utf-8"))
    missing = [
        (file, anchor)
        for file, anchor in anchors
        if anchor not in set(headings(path.parent / file if file else path))
    ]
    assert missing == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_of_commands_exist(path: Path) -> None:
    """A name whose next word is not a command is prose, such as `slottables stops`."""
    wrong = []
    for name, words, rest in CALL.findall(path.read_text(encoding="utf-8")):
        command = COMMANDS[name]
        for word in words.split():
            command = getattr(command, "commands", {}).get(word, command)
        known = {option for parameter in command.params for option in parameter.opts}
        if command is not COMMANDS[name]:
            wrong += [(name, words, o) for o in OPTION.findall(rest) if o not in known | {"--help"}]
    assert wrong == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_is_named_exists(path: Path) -> None:
    named = re.findall(r"`(?:[\w./]*/)?(test_\w+)(?:\.py)?`", path.read_text(encoding="utf-8"))
    assert sorted(set(named) - TESTS) == []


def test_the_glossary_names_modules_that_exist() -> None:
    rows = (DOCS / "GLOSSARY.md").read_text(encoding="utf-8").splitlines()
    named = re.findall(
        r"`([a-z_]+(?:/[a-z_]+)+)`", " ".join(row.split("|")[-2] for row in rows[4:])
    )
    product = [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for package in ("services", "spark_consumers")
        for path in (ROOT / package).rglob("*")
    ]
    assert [n for n in named if not any(f"/{at}".endswith(f"/{n}") for at in product)] == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_yaml_are_yaml(path: Path) -> None:
    """One that was set as prose is a single text, or nothing that a parser takes."""
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M):
        assert isinstance(yaml.safe_load(block), dict | list), block


def test_refusals_that_operations_explains_are_said_by_the_code() -> None:
    page = (DOCS / "OPERATIONS.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| it says \| do \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.M)
    told = [re.sub(r" \(\d+\)$", "", row.split(" | ")[0].strip("| ")) for row in table.splitlines()]
    said = "\n".join(
        text
        for module in MODULES
        for _, text in texts(ast.parse(module.read_text(encoding="utf-8")))
    )
    assert len(told) >= 6
    assert [words for words in told if words not in said] == []


def test_the_example_of_an_event_fits_the_contract() -> None:
    text = (DOCS / "DEBEZIUM.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.S | re.M)
    assert Envelope.model_validate_json(example).after == {"id": 1, "balance": "9.50"}


def headings(path: Path) -> Iterator[str]:
    """Yield the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
        yield re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
