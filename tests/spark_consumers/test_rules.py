"""A rule that was changed: nothing is written into a table that was made by another one."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from schemas.tables import TableRule
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import START, Shape
from spark_consumers.iceberg import catalog, rules
from spark_consumers.iceberg.layout import METADATA
from tests.spark_consumers.conftest import NewPipeline, Pipeline
from tests.spark_consumers.publisher import SourceTable

ITEMS = SourceTable("items", {"id": ("int4", -1), "name": ("text", -1), "note": ("text", -1)})
MADE_BY: dict[str, Any] = {"rename": {"name": "title"}, "exclude": ["note"]}
SHAPE = Shape(
    "public",
    "items",
    tuple(ColumnShape(name, "text", -1, name == "id") for name in ("id", "name", "note")),
    ("id",),
    1,
    START,
)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({}, ""),
        ({"include": ["id", "name"], "exclude": []}, ""),
        ({"properties": {"write.format.default": "orc"}}, ""),
        ({"kind": "changelog"}, "kind is changelog and was current"),
        ({"rename": {"name": "label"}}, "rename: column name is label and was title"),
        ({"rename": {}}, "rename: column name is name and was title"),
        ({"exclude": []}, "include or exclude admits column note"),
        ({"exclude": ["n*"]}, "include or exclude leaves out column name"),
        ({"partition": ["bucket(4, id)"]}, r"partition is [bucket(4, id)] and was []"),
        ({"sort": ["title"]}, r"sort is [title] and was []"),
    ],
)
def test_a_difference_is_named_by_its_key(now: dict[str, Any], expected: str) -> None:
    made_by = TableRule.model_validate(MADE_BY)
    kept = rules.from_document(rules.document(made_by))
    found = rules.difference(SHAPE, kept, TableRule.model_validate(MADE_BY | now))
    assert found.startswith(expected)
    assert bool(found) is bool(expected)


def shape(*names: str, key: str = "id", **numbers: int) -> Shape:
    """A shape whose columns have the numbers of their places, or those that are given."""
    columns = tuple(ColumnShape(name, "text", -1, name == key) for name in names)
    attnums = tuple(numbers.get(name, place) for place, name in enumerate(names, 1))
    return Shape("public", "items", columns, (key,), 1, START, attnums=attnums)


THEN = shape("id", "name", "note")
LATER = shape("id", "title", "note")
LAST = shape("id", "title", title=2)
SWAPPED = shape("id", "note", "name", note=2, name=3)


@pytest.mark.parametrize(
    ("rule", "shapes", "columns", "expected"),
    [
        ({}, [THEN, LATER, LAST], ["id", "name", "note"], {}),
        ({"include": ["id", "title"]}, [THEN, LATER], ["id", "name"], {"include": ["id", "name"]}),
        ({"include": ["id", "name"]}, [THEN, LATER], ["id", "name"], {}),
        ({"include": ["id", "name", "title"]}, [THEN, LATER], ["id", "name"], {}),
        # The dropped column by its last name; the other one by that of before.
        (
            {"include": ["id", "title", "note"]},
            [THEN, LATER, LAST],
            ["id", "name", "note"],
            {"include": ["id", "name", "note"]},
        ),
        ({"exclude": ["title"]}, [THEN, LATER], ["id", "note"], {"include": ["id", "note"]}),
        ({"exclude": ["t*"]}, [THEN, LATER], ["id", "name", "note"], {}),
        (
            {"rename": {"title": "label"}},
            [THEN, LATER],
            ["id", "label", "note"],
            {"rename": {"name": "label"}},
        ),
        (
            {"partition": ["bucket(4, title)", "truncate(2,note)"], "sort": ["title desc"]},
            [THEN, LATER],
            ["id", "name", "note"],
            {"partition": ["bucket(4, name)", "truncate(2, note)"], "sort": ["name DESC"]},
        ),
        (
            {"include": ["key", "title"]},
            [THEN, shape("key", "title", "note", key="key")],
            ["id", "name"],
            {"include": ["id", "name"]},
        ),
        # Names that two columns took over from each other: the Iceberg table tells.
        ({"include": ["id", "name"]}, [THEN, SWAPPED], ["id", "name"], {}),
        ({"include": ["id", "name"]}, [THEN, SWAPPED], ["id", "note"], {"include": ["id", "note"]}),
    ],
)
def test_a_rule_is_read_by_the_names_of_an_earlier_time(
    rule: dict[str, Any], shapes: list[Shape], columns: list[str], expected: dict[str, Any]
) -> None:
    given = TableRule.model_validate(rule)
    found = rules.rule_as_of(given, shapes, columns)
    changed = {
        key: list(v) if key != "rename" else v for key, v in found if v != getattr(given, key)
    }
    changed.pop("exclude", None)
    assert changed == expected
    metadata = [name for name, _ in METADATA["current"]]
    assert rules.layout_as_of(given, shapes, [*columns, *metadata]).rule == found
    # What the present names say is not read as a change of the rule.
    assert not rules.difference(shapes[0], found, rules.rule_as_of(given, shapes, columns))


def test_a_rule_with_two_meanings_for_an_earlier_time_is_refused() -> None:
    rule = TableRule(include=("id", "name"))
    columns = ["id", "name", "note", "_commit_lsn", "_seq"]
    with pytest.raises(OperatorNeeded, match="two meanings") as found:
        rules.layout_as_of(rule, [THEN, SWAPPED], columns)
    assert found.value.subject == "public.items" and found.value.hint
    with pytest.raises(OperatorNeeded, match="name is not there"):
        rules.layout_as_of(rule, [THEN], ["id", "_commit_lsn", "_seq"])


def made(new_pipeline: NewPipeline) -> Pipeline:
    """A table made by MADE_BY, with a row."""
    pipeline = new_pipeline(rules={"public.items": MADE_BY})
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "one", "note": "x"})
    pipeline.apply()
    return pipeline


def changed(new_pipeline: NewPipeline, before: Pipeline, rule: dict[str, Any]) -> Pipeline:
    """The same tables by another rule, and an event for them."""
    before.restart()
    pipeline = new_pipeline(rules={"public.items": rule})
    pipeline.publisher.commit_lsn = before.publisher.commit_lsn
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, {"id": 1, "name": "uno", "note": "y"})
    return pipeline


def forget_the_rule(pipeline: Pipeline) -> None:
    """As an earlier version has made the table."""
    table = catalog.load(pipeline.spark, pipeline.identifier("items"))
    table.updateProperties().remove(catalog.RULE).remove(catalog.KEPT).commit()


@pytest.mark.parametrize(
    ("recorded", "now", "key"),
    [
        (True, {"rename": {"name": "label"}}, "rename"),
        (True, {"kind": "changelog"}, "kind"),
        (False, {"rename": {"name": "label"}}, "rename"),
        (False, {"exclude": []}, "exclude"),
    ],
)
def test_another_rule_is_refused_and_nothing_written(
    new_pipeline: NewPipeline, recorded: bool, now: dict[str, Any], key: str
) -> None:
    before = made(new_pipeline)
    if not recorded:
        forget_the_rule(before)
    pipeline = changed(new_pipeline, before, MADE_BY | now)
    with pytest.raises(SetupError, match=key) as raised:
        pipeline.apply()
    assert raised.value.exit_code == ExitCode.RECORD_REFUSED
    assert raised.value.subject == "public.items"
    found = pipeline.spark.table(pipeline.identifier("items"))
    assert [tuple(row)[:2] for row in found.collect()] == [(1, "one")]
    again = changed(new_pipeline, pipeline, MADE_BY)
    again.apply()
    assert [tuple(row) for row in again.rows("items")] == [(1, "uno")]


def test_a_rule_with_two_meanings_is_refused_until_it_is_put_back(
    new_pipeline: NewPipeline,
) -> None:
    """Two columns have taken each other's names while the rule was changed."""
    before = new_pipeline()
    before.publisher.announce(replace(ITEMS, attnums=(1, 2, 3)))
    with before.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "one", "note": "x"})
    before.apply()
    columns = {name: ITEMS.columns[name] for name in ("id", "note", "name")}
    swapped = SourceTable("items", columns, attnums=(1, 2, 3))
    before.publisher.reshape(swapped)
    with before.publisher.transaction() as t:
        t.insert(swapped, {"id": 2, "name": "y", "note": "two"})
    before.restart()
    with pytest.raises(OperatorNeeded, match="two meanings") as raised:
        new_pipeline(rules={"public.items": {"include": ["id", "name"]}}).apply()
    assert "put tables.rules back" in raised.value.hint and "epoch" not in raised.value.hint
    again = new_pipeline()
    again.apply()
    found = [{name: row[name] for name in columns} for row in again.rows("items")]
    assert found == [
        {"id": 1, "note": "one", "name": "x"},
        {"id": 2, "note": "two", "name": "y"},
    ]


def test_a_column_that_somebody_adds_is_refused_until_it_is_gone(new_pipeline: NewPipeline) -> None:
    before = made(new_pipeline)
    before.spark.sql(f"ALTER TABLE {before.identifier('items')} ADD COLUMN extra string")
    pipeline = changed(new_pipeline, before, MADE_BY)
    with pytest.raises(SetupError, match="somebody has added its column extra"):
        pipeline.apply()
    pipeline.spark.sql(f"ALTER TABLE {pipeline.identifier('items')} DROP COLUMN extra")
    pipeline.restart()
    pipeline.apply()
    assert [tuple(row) for row in pipeline.rows("items")] == [(1, "uno")]
