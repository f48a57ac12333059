"""Debezium's lists of tables and columns, files of properties, and the forms of records."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.kafka import KafkaSettings
from schemas.naming import Naming, table_matches
from schemas.shaping import ShapingSettings
from services.adoption.forms import key_of, unlike
from services.adoption.last_records import DebeziumRecord
from services.adoption.lists import of_other_case, shaping_of
from services.adoption.properties import read_properties
from services.postgres.published_tables import PublishedColumn, PublishedTable

MEANT = st.lists(st.sampled_from(["a", "b", "_", "1", ".*"]), min_size=1).map("".join)
NAMES = st.text("ab_1", min_size=1)


@given(MEANT, MEANT, st.sampled_from([".", r"\."]), NAMES, NAMES)
def test_a_pattern_means_what_the_expression_does(
    schema_part: str, table_part: str, dot: str, schema: str, table: str
) -> None:
    """A dot without a backslash is any character, too: a name that only that fits is no name."""
    expression = f"{schema_part}{dot}{table_part}"
    found, refusals = shaping_of({"table.include.list": expression})
    assert not refusals
    (pattern,) = found["include"]
    escaped = rf"{schema_part}\.{table_part}"
    expected = re.fullmatch(escaped, f"{schema}.{table}") is not None
    assert table_matches(pattern, schema, table) == expected


@pytest.mark.parametrize(
    ("expression", "pattern"),
    [
        ("public.*", "public*.*"),
        (".*", "*.*"),
        ("public..*", "public.*"),
        (r"public\.a\$b", "public.a$b"),
        ("public.a$", None),
        (r"public\.a.b", None),
        (r"public\.a\.b", None),
        (r"public\.(a|b)", None),
        (r"public\.\w+", None),
        (r"public\.a\*", None),
        (".*accounts", None),
    ],
)
def test_expressions_that_mean_more_are_refused(expression: str, pattern: str | None) -> None:
    found, refusals = shaping_of({"table.exclude.list": expression})
    assert found == ({"exclude": [pattern]} if pattern else {})
    assert len(refusals) == (pattern is None)


def test_included_columns_need_the_same_tables_by_name() -> None:
    """Of a table that the list does not name Debezium publishes no column at all."""
    both = {
        "table.include.list": r"public\.a,public\.b",
        "column.include.list": r"public\.a\.id,public\.b\..*,public\.a\.name",
    }
    found, refusals = shaping_of(both)
    assert not refusals
    assert found["columns"] == {
        "public.a": {"include": ["id", "name"]},
        "public.b": {"include": ["*"]},
    }
    for other in (
        {**both, "table.include.list": r"public\.a,public\.b,public\.c"},
        {"column.include.list": r"public\.a\.id"},
        {
            "table.include.list": r"public\.a,public\..*",
            "column.include.list": r"public\.a\.id,public\..*\.name",
        },
    ):
        (refusal,) = shaping_of(other)[1]
        assert refusal.startswith("column.include.list: name the same tables")


@pytest.mark.parametrize("kind", ["schema", "table", "column"])
def test_both_lists_of_a_kind_are_refused(kind: str) -> None:
    named = {"schema": "public", "table": "public.a", "column": "public.a.b"}[kind]
    own = {f"{kind}.include.list": named, f"{kind}.exclude.list": named}
    assert f"{kind}.include.list together with {kind}.exclude.list" in shaping_of(own)[1]


def test_a_table_for_signals_is_always_included() -> None:
    """Source: RelationalTableFilters."""
    own = {"table.include.list": r"public\.a", "signal.data.collection": "public.signals"}
    assert shaping_of(own) == ({"include": ["public.a", "public.signals"]}, [])
    del own["table.include.list"]
    assert shaping_of(own) == ({}, [])


def test_names_in_another_case_are_reported() -> None:
    shaping = ShapingSettings.model_validate(
        {
            "include": ["public.accounts", "public.Orders"],
            "columns": {"public.Orders": {"exclude": ["PIN"]}},
        }
    )
    tables = {("public", "Accounts"): ("id",), ("public", "Orders"): ("id", "pin")}
    assert sorted(of_other_case(shaping, tables)) == ["public.Accounts", "public.Orders.pin"]
    assert not [*of_other_case(shaping, {("public", "accounts"): ("id",)})]


def test_properties_are_read_as_java_does() -> None:
    text = r"""
# transforms=no
  ! nor=this
name = a
topic.prefix:bank
slot.name   dbz
table.include.list=public\\.a,\
    public\\.b
empty
unicode=\u00e4\=\:
snapshot.mode=no_data """
    assert read_properties(text) == {
        "name": "a",
        "topic.prefix": "bank",
        "slot.name": "dbz",
        "table.include.list": r"public\.a,public\.b",
        "empty": "",
        "unicode": "\u00e4=:",
        "snapshot.mode": "no_data",
    }


def table(identity: str, key: str, *identified: str) -> PublishedTable:
    columns = tuple(PublishedColumn(name, 23, -1, "", name in identified) for name in "abc")
    return PublishedTable(
        *(7, "public", "t", False, identity, "", columns),
        key=tuple((name, "integer", "pg_catalog") for name in key),
        rows_estimate=0,
    )


@pytest.mark.parametrize(
    ("made", "keys", "expected"),
    [
        (table("d", "ba", "a", "b"), (), ("a", "b")),
        (table("i", "a", "c"), (), ("c",)),
        (table("f", "ba", "a", "b", "c"), (), ("a", "b")),
        (table("d", ""), (), ()),
        (table("d", ""), ("b",), ("b",)),
    ],
)
def test_the_bridges_key(
    made: PublishedTable, keys: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    shaping = ShapingSettings(keys={"public.t": keys} if keys else {})
    assert key_of(made, Naming("p", shaping)) == expected


def test_records_in_another_form_are_reported() -> None:
    def told(key: Any, value: Any, **kafka: str) -> list[str]:
        record = DebeziumRecord(
            *("p.public.t", 2, 9, 0), None if key is None else json.dumps(key).encode(), value
        )
        settings = KafkaSettings.model_validate(
            {"bootstrap_servers": "k:9092", "topic_prefix": "p", **kafka}
        )
        naming = Naming("p", ShapingSettings())
        return [*unlike({"p.public.t": record}, [table("d", "ba", "a", "b")], naming, settings)]

    assert told({"a": 1, "b": 2}, b"{}") == []
    assert told({"b": 1, "a": 2}, b"{}") == [
        "p.public.t[2]@9 has key (b, a), the bridge's is (a, b)"
    ]
    flat = ["p.public.t[2]@9 is a flat row"]
    assert told({"a": 1, "b": 2}, b'{"__op":"c","a":1,"b":2}') == flat
    assert told(None, b"{}") == ["p.public.t[2]@9 has key (none), the bridge's is (a, b)"]
    whole = {"schema": {}, "payload": {"a": 1, "b": 2}}
    assert told(whole, b"{}", key_format="json_schema_envelope") == []
    assert told(whole, json.dumps(whole).encode()) == [
        "p.public.t[2]@9 has as its key: json_schema_envelope, the bridge would write json",
        "p.public.t[2]@9 has as its value: json_schema_envelope, the bridge would write json",
    ]
