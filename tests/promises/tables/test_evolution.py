"""Source tables that change: columns come, go, get other names and types; tables made anew."""

from typing import Any

import pytest

from schemas.errors import SettingsError, SetupError
from schemas.events import UNAVAILABLE
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable

Columns = dict[str, tuple[str, int]]
BEFORE: Columns = {"id": ("int4", -1), "name": ("text", -1), "n": ("int4", -1)}
ITEMS = SourceTable("items", BEFORE, oid=1)


def table(columns: Columns, oid: int = 1) -> SourceTable:
    return SourceTable("items", columns, oid=oid)


def start(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "a", "n": 1})
        t.insert(ITEMS, {"id": 2, "name": "b", "n": 2})
    pipeline.apply()


def change(pipeline: Pipeline, new: SourceTable, **row: Any) -> None:
    """The table is `new` from the next transaction on, which inserts a row."""
    pipeline.publisher.reshape(new)
    with pipeline.publisher.transaction() as t:
        t.insert(new, row)


def rows(pipeline: Pipeline) -> list[dict[str, Any]]:
    return [row.asDict() for row in pipeline.rows("items", "id")]


def test_columns_come_go_widen_and_are_renamed_in_one_go(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(on_dropped_column="drop")
    start(pipeline)
    change(pipeline, table({**BEFORE, "more": ("bool", -1)}), id=3, name="c", n=3, more=True)
    renamed: Columns = {"id": ("int8", -1), "title": ("text", -1), "n": ("int4", -1)}
    change(pipeline, table({**renamed, "more": ("bool", -1)}), id=2**40, title="d", n=4, more=None)
    change(pipeline, table({"id": ("int8", -1), "title": ("text", -1)}), id=5, title="e")
    with pipeline.publisher.transaction() as t:
        t.update(table({"id": ("int8", -1), "title": ("text", -1)}), {"id": 1, "title": "A"})
    pipeline.apply()
    assert [tuple(row.values()) for row in rows(pipeline)] == [
        (1, "A"),
        (2, "b"),
        (3, "c"),
        (5, "e"),
        (2**40, "d"),
    ]
    assert [*rows(pipeline)[0]] == ["id", "title"]


@pytest.mark.long
def test_a_dropped_column_is_kept_and_one_of_its_name_is_another(pipeline: Pipeline) -> None:
    start(pipeline)
    narrow = table({"id": ("int4", -1), "name": ("text", -1)})
    change(pipeline, narrow, id=3, name="c")
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.update(narrow, {"id": 1, "name": "A"})
        t.insert(narrow, {"id": 5, "name": "e"})
    pipeline.apply()
    assert [(row["name"], row["n"]) for row in rows(pipeline)] == [
        ("A", 1),
        ("b", 2),
        ("c", None),
        ("e", None),
    ]
    pipeline.restart()
    again: Columns = {"id": ("int4", -1), "name": ("text", -1), "n": ("text", -1)}
    change(pipeline, table(again), id=4, name="d", n="new")
    pipeline.apply()
    assert [(row["n__old1"], row["n"]) for row in rows(pipeline)] == [
        (1, None),
        (2, None),
        (None, None),
        (None, "new"),
        (None, None),
    ]


@pytest.mark.long
def test_another_type_stops_it_or_gets_a_column_of_its_own(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline()
    start(pipeline)
    change(pipeline, table({**BEFORE, "n": ("text", -1)}), id=3, name="c", n="three")
    with pytest.raises(SetupError, match="column n was int and is string") as raised:
        pipeline.apply()
    assert (raised.value.subject, len(rows(pipeline))) == ("public.items", 2)
    going_on = new_pipeline(on_changed_type="new_column")
    going_on.publisher.commit_lsn = pipeline.publisher.commit_lsn
    going_on.apply()
    assert [(row["n__old1"], row["n"]) for row in rows(going_on)] == [
        (1, None),
        (2, None),
        (None, "three"),
    ]


@pytest.mark.long
def test_a_change_in_the_middle_of_a_transaction(pipeline: Pipeline) -> None:
    start(pipeline)
    renamed = table({"id": ("int4", -1), "title": ("text", -1), "n": ("int8", -1)})
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, {"id": 1, "name": "early", "n": 1})
        t.insert(ITEMS, {"id": 3, "name": "early", "n": 3})
        pipeline.publisher.shape_at(renamed, t.commit_lsn, t.seq)
        t.update(renamed, {"id": 3, "title": UNAVAILABLE, "n": 2**40})
    pipeline.apply()
    assert [tuple(row.values()) for row in rows(pipeline)] == [
        (1, "early", 1),
        (2, "b", 2),
        (3, "early", 2**40),
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["current", "history", "changelog"])
def test_a_table_that_is_made_anew_under_its_name(new_pipeline: NewPipeline, kind: str) -> None:
    pipeline = new_pipeline(rules={"public.items": {"kind": kind}})
    start(pipeline)
    anew = SourceTable("items", {"id": ("int4", -1), "n": ("text", -1)}, oid=2)
    pipeline.publisher.reshape(anew)
    with pipeline.publisher.transaction() as t:
        t.insert(anew, {"id": 2, "n": "x"})
        t.insert(anew, {"id": 3, "n": "y"})
    pipeline.apply()
    holding = {"history": "_valid_to IS NULL", "changelog": "_commit_lsn > 1100"}.get(kind, "true")
    frame = pipeline.spark.table(pipeline.identifier("items"))
    found = frame.where(holding).select("id", "n").orderBy("id").collect()
    assert [tuple(row) for row in found] == [(2, "x"), (3, "y")]
    assert frame.count() == {"current": 2, "history": 4, "changelog": 4}[kind]


@pytest.mark.long
def test_a_column_whose_name_has_a_dot_comes_later(pipeline: Pipeline) -> None:
    start(pipeline)
    dotted = table({**BEFORE, "a.b": ("text", -1)})
    change(pipeline, dotted, id=3, name="c", n=3, **{"a.b": "x"})
    pipeline.apply()
    wider = table({**BEFORE, "c.d": ("text", -1), "n.o": ("int4", -1)})
    change(pipeline, wider, id=4, name="d", n=4, **{"c.d": "y", "n.o": 1})
    pipeline.apply()
    found = pipeline.spark.table(pipeline.identifier("items")).where("id > 2").orderBy("id")
    assert [(row["a.b"], row["c.d"], row["n.o"]) for row in found.collect()] == [
        ("x", None, None),
        (None, "y", 1),
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["_pos", "_row_id"])
def test_a_name_that_iceberg_needs_is_refused_until_it_is_renamed(
    new_pipeline: NewPipeline, name: str
) -> None:
    source = SourceTable("items", {"id": ("int4", -1), name: ("text", -1)})
    pipeline = new_pipeline()
    pipeline.publisher.announce(source)
    with pipeline.publisher.transaction() as t:
        t.insert(source, {"id": 1, name: "x"})
    with pytest.raises(SettingsError, match=f"column {name} has a name that .* rename it"):
        pipeline.apply()
    renaming = new_pipeline(rules={"public.items": {"rename": {name: "renamed"}}})
    renaming.publisher.commit_lsn = pipeline.publisher.commit_lsn
    renaming.apply()
    assert [row["renamed"] for row in rows(renaming)] == ["x"]


@pytest.mark.long
def test_another_key_is_refused(pipeline: Pipeline) -> None:
    start(pipeline)
    other = SourceTable("items", BEFORE, key=("id", "n"), oid=1)
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, {"id": 1, "name": "a", "n": 7})
        t.delete(ITEMS, {"id": 2, "name": "b", "n": 2})
    change(pipeline, other, id=3, name="c", n=3)
    for drops in range(2):
        with pytest.raises(SetupError, match="the key was id and is id, n"):
            pipeline.apply()
        if not drops:
            pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
            pipeline.restart()
