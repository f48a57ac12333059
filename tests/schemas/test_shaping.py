"""The settings of `shaping`: patterns, templates, routes, and what is refused at start."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.naming import Naming, column_matches, table_matches
from schemas.shaping import ShapingSettings


def test_topics_by_template_and_route() -> None:
    settings = ShapingSettings(
        topic="{prefix}.{table}",
        routes=(
            {"tables": r"public\.orders_(?P<year>\d+)", "topic": "{prefix}.orders.{year}"},
            {"tables": r"log\..*", "topic": "logs"},
        ),
        outbox={"table": "public.outbox"},
    )
    naming = Naming("bank", settings)
    assert naming.table("public", "a b") == ("bank.a_b", False)
    assert naming.table("public", "orders_2026") == ("bank.orders.2026", True)
    assert naming.table("log", "x") == ("logs", True)
    pattern = re.compile(naming.pattern())
    for name in ("bank.a_b", "bank.orders.2026", "logs"):
        assert pattern.fullmatch(name)
    for name in ("bank.schema", "bank.dead", "bank.progress", "bank.outbox.order", "log", "x.a_b"):
        assert not pattern.fullmatch(name)


@pytest.mark.parametrize(
    ("pattern", "table", "expected"),
    [
        ("public.person", ("public", "person"), True),
        ("public.*", ("public", "a.b"), True),
        ("*.log_*", ("x", "log_1"), True),
        ("public.a.b", ("public", "a.b"), True),
        ("public.p", ("public", "person"), False),
        ("pub*.x", ("public.q", "x"), True),
        ("public.a?", ("public", "ab"), False),
    ],
)
def test_patterns(pattern: str, table: tuple[str, str], expected: bool) -> None:
    assert table_matches(pattern, *table) is expected


@pytest.mark.parametrize(
    "settings",
    [
        {"include": ["person"]},
        {"masks": {"a.b": {"c": {"hash": "sha256"}}}},
        {"masks": {"a.b": {"c": {"text": "x", "truncate": 1}}}},
        {"masks": {"a.b": {"c": {}}}},
        {"topic": "{prefix}.{schema}"},
        {"topic": "{table}/{x}"},
        {"topic": "{table!r}"},
        {"topic": "{table.__class__}"},
        {"routes": [{"tables": "(", "topic": "x"}]},
        {"routes": [{"tables": "x", "topic": "{year}"}]},
        {"keys": {"a.b": []}},
        {"skip": {"a.b": ["x"]}},
        {"outbox": {"table": "a.b", "topic": "{table}"}},
    ],
)
def test_wrong_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ShapingSettings(**settings)


@given(st.text("ab*"), st.text("ab\n"))
def test_a_star_stands_for_any_characters(pattern: str, name: str) -> None:
    wanted = ".*".join(map(re.escape, pattern.split("*")))
    assert column_matches(pattern, name) is bool(re.fullmatch(wanted, name, re.DOTALL))


def test_no_pattern_takes_long() -> None:
    """It ends: each `a` that such a pattern may be tried with doubled the time."""
    assert not column_matches("*a" * 40 + "*b", "a" * 63)
