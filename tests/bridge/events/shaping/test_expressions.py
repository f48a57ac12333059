"""NULL in filters and computed columns: NULL where it is the reason, never hiding a failure."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.events.errors import ExpressionFailed
from tests.bridge.events.shaping.test_row_rules import value

NULL_INT: tuple[str, bytes | None] = ("int4", None)
NULL_TEXT: tuple[str, bytes | None] = ("text", None)
NULL_BOOL: tuple[str, bytes | None] = ("bool", None)
NULL_JSON: tuple[str, bytes | None] = ("jsonb", None)


@pytest.mark.parametrize(
    ("text", "nulls"),
    [
        ("s == 'x' || d.n > 5", {"s": NULL_TEXT}),
        ("s == 'x' || d.none > 5", {"s": NULL_TEXT}),
        ("s == 'x' || d.n.m", {"s": NULL_TEXT}),
        ("s == 'x' || !d.n", {"s": NULL_TEXT}),
        ("b || d.n > 5", {"b": NULL_BOOL}),
        ("a > 0 || d.n > 5", {"a": NULL_INT}),
        ("a > 0 && d.n > 5 || !b && d.n > 5", {"a": NULL_INT, "b": NULL_BOOL}),
        ("j == 'x' || d.n.m > 5", {"j": NULL_JSON}),
        ("a == 1 || dyn(s) > 5", {"a": NULL_INT, "s": ("text", b"7")}),
        ("a == 1 || [1, s][1] > 5", {"a": NULL_INT, "s": ("text", b"7")}),
        ("j.n > 5 || d.n > 5 || s == 'x'", {"s": NULL_TEXT, "j": ("jsonb", b'{"n": 1}')}),
    ],
)
def test_a_null_does_not_hide_a_failure_of_json(
    text: str, nulls: dict[str, tuple[str, bytes | None]]
) -> None:
    with pytest.raises(ExpressionFailed):
        value(text, d=("jsonb", b'{"n": "7", "none": null}'), **nulls)


@pytest.mark.parametrize(
    ("text", "null"),
    [
        *[("s.startsWith('x')", NULL_TEXT), ("d[s] > 5", NULL_TEXT), ("int(s) > 5", NULL_TEXT)],
        *[("10 / a > 5", NULL_INT), ("a + 1 > 5", NULL_INT), ("[1, 2][a] > 1", NULL_INT)],
        *[("!b", NULL_BOOL), ("b ? true : false", NULL_BOOL), ("d.n == 7 && b", NULL_BOOL)],
        *[("j > 5", NULL_JSON), ("!j", NULL_JSON), ("j.n.m > 5", NULL_JSON)],
        *[("'x' in j", NULL_JSON), ("j.exists(v, v > 1)", NULL_JSON), ("j['x']", NULL_JSON)],
        *[("j[0]", NULL_JSON), ("has(j.n)", NULL_JSON), ("size(j) > 1", NULL_JSON)],
        *[("t.getFullYear() > 1", ("timestamptz", None)), ("f * 2.0 > 1.0", ("float8", None))],
        ("r.size() > 1", ("bytea", None)),
    ],
)
def test_what_can_not_be_computed_of_a_null_is_null_beside_json(
    text: str, null: tuple[str, bytes | None]
) -> None:
    [name] = {*"sabjtfr"} & {*re.findall(r"\b[a-z]\b", text)}
    assert value(text, d=("jsonb", b'{"n": 7}'), **{name: null}) is None


FAILS = "fails"
LEAVES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a > 0": lambda row: None if row["a"] is None else row["a"] > 0,
    "s == 'x'": lambda row: row["s"] == "x",
    "s.startsWith('x')": lambda row: None if row["s"] is None else row["s"].startswith("x"),
    "b": lambda row: row["b"],
    "d.n > 5": lambda row: row["d"]["n"] > 5 if isinstance(row["d"].get("n"), int) else FAILS,
    "j.n > 5": lambda row: None if row["j"] is None else row["j"]["n"] > 5,
    "j == 'x'": lambda row: False,
}
Condition = tuple[str, Callable[[dict[str, Any]], set[Any]]]


def combined(operator: str, left: Condition, right: Condition) -> Condition:
    """A condition of two: the results that it may have."""
    strong = operator == "||"

    def results(row: dict[str, Any]) -> set[Any]:
        found = [left[1](row), right[1](row)]
        if {strong} in found:
            return {strong}
        undecided = (found[0] | found[1]) - {True, False}
        return undecided or {not strong}

    return f"({left[0]} {operator} {right[0]})", results


def negated(inner: Condition) -> Condition:
    opposite = {True: False, False: True}
    return f"!({inner[0]})", lambda row: {opposite.get(x, x) for x in inner[1](row)}


conditions = st.recursive(
    st.sampled_from([*LEAVES]).map(lambda text: (text, lambda row: {LEAVES[text](row)})),
    lambda inner: st.one_of(
        st.builds(combined, st.sampled_from(["&&", "||"]), inner, inner),
        inner.map(negated),
    ),
    max_leaves=5,
)
rows = st.fixed_dictionaries(
    {
        "a": st.sampled_from([None, -1, 1]),
        "s": st.sampled_from([None, "x", "y"]),
        "b": st.sampled_from([None, True, False]),
        "d": st.sampled_from([{}, {"n": None}, {"n": "7"}, {"n": {"m": 1}}, {"n": 1}, {"n": 9}]),
        "j": st.sampled_from([None, {"n": 1}, {"n": 9}]),
    }
)
KINDS_OF_ROWS = {"a": "int4", "s": "text", "b": "bool", "d": "jsonb", "j": "jsonb"}


def given_text(value: Any) -> bytes | None:
    """A value of a row, as pgoutput has it."""
    if value is None or isinstance(value, str):
        return None if value is None else value.encode()
    if isinstance(value, bool):
        return b"t" if value else b"f"
    return json.dumps(value).encode()


@given(conditions, rows)
def test_conditions_are_true_false_null_or_fail_as_their_parts(
    condition: Condition, row: dict[str, Any]
) -> None:
    text, results = condition
    columns = {name: (KINDS_OF_ROWS[name], given_text(row[name])) for name in row}
    try:
        found = value(text, **columns)
    except ExpressionFailed:
        found = FAILS
    assert found in results(row)
