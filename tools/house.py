"""What the house weighs: lines, settings, commands, names, rooms, and the length of sentences.

python -m tools.house            a table
python -m tools.house --json     the same as JSON, to compare two commits

A room is a folder with modules; an arrow is a pair of rooms of one service, of which the first
imports the second; the floors are the rooms on the longest way along the arrows.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from schemas.errors import ExitCode
from schemas.json_schema import all_models
from services.adoption.command import app as slotbridge
from services.failover.cli.app import app as slotfailover
from spark_consumers.command import app as slottables
from tools.metrics_page import all_metrics

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("slotbridge", "schemas", "services", "spark_consumers", "sql")
SERVICES: Final = ("services/bridge", "services/failover", "spark_consumers")
CODE: Final = (".py", ".pyx", ".pxd", ".sql", ".java")
LONG_SENTENCE: Final = 35
"""Words of a sentence that has to be read twice."""
_TELLING: Final = re.compile(r"(^|_)(un)?(tells?|told|telling)(_|$)", re.IGNORECASE)
_TABLE_OR_CODE: Final = re.compile(r"^(\||```|    |#|<).*$", re.MULTILINE)
_FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

Figures = dict[str, Any]
Tree = ast.Module


def main() -> None:
    """Print the figures of the checkout."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    measured = figures()
    if parser.parse_args().json:
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")
        return
    for title, values in measured.items():
        table = Table(title, "", box=None)
        for name, value in values.items():
            table.add_row(name, json.dumps(value).strip('"'))
        Console(soft_wrap=True).print(table, "")


def figures() -> Figures:
    """Return title -> name -> figure."""
    files = tracked()
    trees = {
        path: ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for path in files
        if path.endswith(".py") and path.startswith(PRODUCT)
    }
    return {
        "lines": lines(files),
        "to know": to_know(),
        "lines of code": habits(trees),
        **{f"rooms of {service}": rooms(trees, service) for service in SERVICES},
        "words a sentence, sentences over 35": pages(files),
    }


def tracked() -> list[str]:
    """Return the files that git tracks."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in done.stdout.splitlines() if (ROOT / path).is_file()]


def lines(files: Iterable[str]) -> Figures:
    """Return folder -> lines of its code, with sums of product and tests."""
    counts: Counter[str] = Counter()
    for path in files:
        top, _, rest = path.partition("/")
        if not path.endswith(CODE) or not rest:
            continue
        number = (ROOT / path).read_text(encoding="utf-8").count("\n")
        parts = path.split("/")
        counts["/".join(parts[:2]) if top == "services" and len(parts) > 2 else top] += number
        counts["product"] += number * (top in PRODUCT)
    return dict(sorted(counts.items()))


def to_know() -> Figures:
    """Return what a user can meet: settings, commands, options, exit codes, metrics."""
    programs = [*map(typer.main.get_command, (slotbridge, slotfailover, slottables))]
    commands = [leaf for program in programs for leaf in _leaves(program)]
    options = sum(
        parameter.param_type_name == "option" and "--help" not in parameter.opts
        for command in commands
        for parameter in command.params
    )
    return {
        "settings": sum(len(model.model_fields) for model in all_models()),
        "commands": len(commands),
        "options": options,
        "exit codes": len(ExitCode),
        "metrics": sum(map(len, all_metrics().values())),
    }


def _leaves(command: Any) -> Iterator[Any]:
    """Yield the commands that are no groups; `command` is click's."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield command
    else:
        for each in inner.values():
            yield from _leaves(each)


def habits(trees: dict[str, Tree]) -> Figures:
    """Return how the lines of the product are written."""
    texts = [(ROOT / path).read_text(encoding="utf-8").splitlines() for path in trees]
    comments = sum(line.lstrip().startswith("#") for text in texts for line in text)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    return {
        "modules": len(trees),
        "modules of 390 lines and more": sum(len(text) >= 390 for text in texts),
        "comments, % of lines": round(100 * comments / sum(map(len, texts)), 2),
        "names with tell, told": sum(_TELLING.search(name) is not None for name in _names(nodes)),
        "calls that unpack a tuple of their own": sum(map(_unpacks, nodes)),
    }


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def _unpacks(node: ast.AST) -> int:
    """Return how many literal tuples and lists a call unpacks."""
    if not isinstance(node, ast.Call):
        return 0
    starred = [value.value for value in node.args if isinstance(value, ast.Starred)]
    return sum(isinstance(value, ast.Tuple | ast.List) for value in starred)


def rooms(trees: dict[str, Tree], service: str) -> Figures:
    """Return the rooms, floors and arrows of a service."""
    own = {path: tree for path, tree in trees.items() if path.startswith(f"{service}/")}
    folders = {str(Path(path).parent) for path in own}
    arrows = {
        (str(Path(path).parent), room)
        for path, tree in own.items()
        for name in _imported(tree)
        if (room := _room(name, folders)) and room != str(Path(path).parent)
    }
    return {"rooms": len(folders), "floors": _floors(folders, arrows), "arrows": len(arrows)}


def _imported(tree: Tree) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _room(name: str, folders: set[str]) -> str:
    """Return the folder that an imported name comes from, "" for another service's."""
    parts = name.split(".")
    places = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((place for place in places if place in folders), "")


def _floors(folders: set[str], arrows: set[tuple[str, str]]) -> int | None:
    """Return the number of rooms on the longest way along the arrows; None if there is a circle."""
    below = {folder: {to for at, to in arrows if at == folder} for folder in folders}
    try:
        order = [*TopologicalSorter(below).static_order()]
    except CycleError:
        return None
    height: dict[str, int] = {}
    for folder in order:
        height[folder] = 1 + max((height[each] for each in below[folder]), default=0)
    return max(height.values())


def pages(files: Iterable[str]) -> Figures:
    """Return page -> words a sentence on average, and the sentences over LONG_SENTENCE words."""
    found: Figures = {}
    for path in files:
        if not path.endswith(".md") or path.startswith(("benchmarks", "docs/reference")):
            continue
        text = _TABLE_OR_CODE.sub("", _FENCED.sub("", (ROOT / path).read_text(encoding="utf-8")))
        sentences = [each.split() for each in re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n- ", text)]
        lengths = [len(words) for words in sentences if len(words) > 2]
        if lengths:
            over = sum(length > LONG_SENTENCE for length in lengths)
            found[path] = [round(sum(lengths) / len(lengths), 1), over]
    return found


if __name__ == "__main__":
    main()
