"""A rule that was changed: nothing is written into a table that was made by another one."""

from typing import Any

import pytest

from schemas.errors import ExitCode, SetupError
from schemas.tables import TableRule
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import START, Shape
from spark_consumers.iceberg import catalog, rules
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
