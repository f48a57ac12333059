"""Lines of the product that hide what they do are refused."""

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("slotbridge", "schemas", "services", "spark_consumers")
VAGUE = re.compile(r"(?i:(^|_)(un)?(tell|tells|told|telling)(_|$))|(^|[a-z])T(ell|old)([A-Z_]|$)")


def unpacked_tuples(source: str) -> list[str]:
    """Return the calls that unpack a tuple or list of their own: `f(*(a, b))`."""
    return [
        f"line {value.lineno}: {ast.unparse(value)}: pass the arguments, or a named record"
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        for value in call.args
        if isinstance(value, ast.Starred) and isinstance(value.value, ast.Tuple | ast.List)
    ]


def vague_names(source: str) -> list[str]:
    """Return the names that say that somebody tells something, and not what it is.

    Only `tell` is allowed: it is the standard method of a file.
    """
    return [
        f"line {token.start[0]}: {token.string}: name what it holds, or what it does"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME and token.string != "tell" and VAGUE.search(token.string)
    ]


def offences(find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return module -> what `find` returns of it, for all Python of the product."""
    paths = (path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py")))
    found = {
        path.relative_to(ROOT).as_posix(): find(path.read_text(encoding="utf-8")) for path in paths
    }
    return {name: lines for name, lines in found.items() if lines}


def require_none(found: dict[str, list[str]]) -> None:
    """Refuse what is found."""
    refused = [f"{name}, {line}" for name, lines in found.items() for line in lines]
    assert not refused, "\n".join(refused)


def test_a_call_unpacks_no_tuple_of_its_own() -> None:
    assert unpacked_tuples("f(*(a, b), c=1)")
    assert not unpacked_tuples("f(a, *rest)\nx = {*(a, b)}")
    require_none(offences(unpacked_tuples))


def test_no_name_says_that_it_tells() -> None:
    for name in ("told", "_tell", "Told", "require_untold", "as_told", "TOLD_S"):
        assert vague_names(f"{name} = 1"), name
    assert not vague_names("intellect = 1  # told")
    require_none(offences(vague_names))
