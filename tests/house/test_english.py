"""The worst of our own English stays out of the product: patterns that a reader stumbles over.

What a reviewer has to judge (is the sentence understood without the body?) can't be a test. These
patterns were found by reading: each has a plain way to say the same.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("slotbridge", "schemas", "services", "spark_consumers")
WORDS_MIN = 4
LINES_MAX = 10
FORBIDDEN = {
    r"(?<!there )\b(is|are|was|were) no\b(?! longer| more| later| older)": "write `is not a …`",
    r"\bso (much|long|many)\b(?! that| as)": "name the amount or the constant",
    r"\bof which it is known\b": "name what was verified",
    r"\b(whose it is|for whom)\b": "name the owner",
    r"\bnot so\b": "say what is not met",
    r"\bby the gulp\b|\bthe short way\b|\bthe compiled way\b": "use the field's word",
    r"\bnobody expected\b": "call it an internal error",
}
PRONOUN = re.compile(r"(It|Its|They|Their|Them|He|His|In a row)\b")
UNNAMED = re.compile(r"What\b")
HELP_OF = {
    "Counter",
    "Gauge",
    "Histogram",
    "CounterMetricFamily",
    "GaugeMetricFamily",
    "_gauge",
    "Family",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

MODULES = sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every string with its line, an f-string as one text with `…` for its values."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= set(node.values)
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and node not in inside and isinstance(node.value, str):
            yield node.lineno, node.value


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def undocumented(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the functions of more than LINES_MAX lines that do not say what they do.

    A body of one statement, a nested function (its factory says it) and a check, whose decorator
    has a title, need no docstring.
    """
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    for node in (node for scope in scopes for node in scope.body):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) == 1:
            continue
        decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
        if "check" in decorators or node.name[:2] == "__" or ast.get_docstring(node) is not None:
            continue
        if (node.end_lineno or 0) - node.lineno >= LINES_MAX:
            yield node.lineno, node.name


def helps(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the HELP texts of metrics, and the `help` of options."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        given = [key.value for key in node.keywords if key.arg == "help"]
        if name in HELP_OF:
            given += node.args[1:2]
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def wrong(source: str) -> list[str]:
    """Return what is wrong with the English of a module, with lines."""
    tree = ast.parse(source)
    found = []
    for line, text in texts(tree):
        plain = " ".join(text.split())
        found += [
            f"line {line}: {remedy}: {match[0]!r} in {plain[:80]!r}"
            for pattern, remedy in FORBIDDEN.items()
            if (match := re.search(pattern, plain, re.IGNORECASE))
        ]
    for line, text in docstrings(tree):
        if len(text.split()) < WORDS_MIN:
            found.append(f"line {line}: a docstring needs subject, verb and object: {text!r}")
        if PRONOUN.match(text) or UNNAMED.match(text):
            found.append(f"line {line}: a docstring names its subject: {text[:60]!r}")
    found += [
        f"line {line}: {name} has more than {LINES_MAX} lines: say what it does in a docstring"
        for line, name in undocumented(tree)
    ]
    for line, text in helps(tree):
        if PRONOUN.match(text) or len(text.split()) < 3:
            found.append(f"line {line}: a help text stands alone: {text!r}")
    return found


def test_each_pattern_is_found() -> None:
    for text in (
        "x is no LSN",
        "yield not more than so much",
        "a version of which it is known where it keeps it",
        "a start of the bridge whose it is ends it",
        "what it compared is not so",
        "Reading by the gulp",
        "TypeError that nobody expected",
    ):
        assert wrong(f"MESSAGE = {text!r}"), text
    assert wrong('def f():\n    """All of it."""')
    assert wrong('def f():\n    """Its first host as an address."""')
    assert wrong('class C:\n    """What Kafka has of the slot."""')
    assert wrong('Gauge("slotfailover_timeline", "Its timeline.")')
    assert wrong('x = f"{name} is no node"')
    assert wrong('GaugeMetricFamily("n", "In a row.", value=1)')
    body = "    x = 1\n" * LINES_MAX
    assert wrong(f"def f():\n{body}")
    assert not wrong(f"@check('name', title='it is on')\ndef f():\n{body}")
    assert not wrong('x = f"there is no slot {name}"\ny = "it is no longer there"')


def test_modules_speak_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}, {what}"
        for path in MODULES
        for what in wrong(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
