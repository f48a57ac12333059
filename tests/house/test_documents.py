"""Every document is in the index; its links, settings and commands exist."""

import ast
import functools
import re
from pathlib import Path

import typer
import yaml

from schemas.events import Envelope
from services.adoption.command import app as slotbridge
from services.failover.cli.app import app as slotfailover
from spark_consumers.command import app as slottables
from tests.house.test_english import MODULES, texts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = sorted([*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")])
NAMING = {".py", ".pyx", ".sql", ".yaml", ".yml", ".txt", ".service", ".tpl", ".in", ".toml", ""}
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s:]*)#([^)]+)\)")
CALL = re.compile(r"\b(slotbridge|slotfailover|slottables)((?: +[a-z][a-z-]*)+)([^`|#\n]*)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
COMMANDS = {
    "slotbridge": typer.main.get_command(slotbridge),
    "slotfailover": typer.main.get_command(slotfailover),
    "slottables": typer.main.get_command(slottables),
}


def test_the_index_names_every_page() -> None:
    named = set(LINK.findall((DOCS / "index.md").read_text(encoding="utf-8")))
    assert {path.relative_to(DOCS).as_posix() for path in PAGES} - {"index.md"} <= named


def test_links_lead_to_files_that_exist() -> None:
    links = [(path, link) for path, text in pages() for link in LINK.findall(text)]
    assert [(path, link) for path, link in links if not (path.parent / link).exists()] == []


def test_pages_that_code_and_settings_name_exist() -> None:
    folders = ("schemas", "services", "slotbridge", "spark_consumers", "sql", "examples", "helm")
    files = [path for name in (*folders, "tests") for path in (ROOT / name).rglob("*")]
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in (*files, ROOT / "Makefile", ROOT / "pyproject.toml")
        if path.suffix in NAMING and path.is_file() and "__pycache__" not in path.parts
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(path, page) for path, page in named if not (ROOT / page).exists()} == set()


def test_anchors_lead_to_headings_that_exist() -> None:
    missing = [
        (path, file, anchor)
        for path, text in pages()
        for file, anchor in ANCHOR.findall(text)
        if anchor not in headings(path.parent / file if file else path)
    ]
    assert missing == []


def test_options_of_commands_exist() -> None:
    """A name whose next word is not a command is prose, such as `slottables stops`."""
    wrong = []
    for path, name, words, rest in [
        (at, *call) for at, text in pages() for call in CALL.findall(text)
    ]:
        command = COMMANDS[name]
        for word in words.split():
            command = getattr(command, "commands", {}).get(word, command)
        known = {option for parameter in command.params for option in parameter.opts}
        if command is not COMMANDS[name]:
            known |= {"--help"}
            wrong += [(path, name, words, o) for o in OPTION.findall(rest) if o not in known]
    assert wrong == []


def test_every_test_that_is_named_exists() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in (path.stem, *re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8")))
    }
    reference = re.compile(r"`(?:[\w./]*/)?(test_\w+)(?:\.py)?`")
    named = [(path, name) for path, text in pages() for name in reference.findall(text)]
    assert [(path, name) for path, name in named if name not in tests] == []


def test_the_glossary_names_modules_that_exist() -> None:
    rows = (DOCS / "contributing/glossary.md").read_text(encoding="utf-8").splitlines()
    named = re.findall(
        r"`([a-z_]+(?:/[a-z_]+)+)`", " ".join(row.split("|")[-2] for row in rows[4:])
    )
    product = [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for package in ("services", "spark_consumers")
        for path in (ROOT / package).rglob("*")
    ]
    assert [n for n in named if not any(f"/{at}".endswith(f"/{n}") for at in product)] == []


def test_examples_of_yaml_are_yaml() -> None:
    """One that was set as prose is a single text, or nothing that a parser takes."""
    wrong = []
    for path, text in pages():
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.S | re.M):
            try:
                value = yaml.safe_load(block)
            except yaml.YAMLError:
                value = None
            if not isinstance(value, dict | list):
                wrong.append((path, block))
    assert wrong == []


def test_refusals_that_a_page_explains_are_said_by_the_code() -> None:
    page = (DOCS / "guides/operate.md").read_text(encoding="utf-8")
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
    text = (DOCS / "reference/events.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.S | re.M)
    assert Envelope.model_validate_json(example).after == {"id": 1, "balance": "9.50"}


def pages() -> list[tuple[Path, str]]:
    """Each page with its text."""
    return [(path, path.read_text(encoding="utf-8")) for path in WRITTEN]


@functools.cache
def headings(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
        anchors.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return anchors
