"""A rule that was changed: nothing is written into a table that was made by another one."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from schemas.tables import TableRule
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import START, Shape
from spark_consumers.iceberg import catalog, rules
from spark_consumers.iceberg.layout import METADATA, Layout
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable

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


ID_NAME = {"include": ["id", "name"]}
TITLED = {"partition": ["bucket(4, title)", "truncate(2,note)"], "sort": ["title desc"]}
NAMED = {"partition": ["bucket(4, name)", "truncate(2, note)"], "sort": ["name DESC"]}


@pytest.mark.parametrize(
    ("rule", "shapes", "columns", "expected", "made_by"),
    [
        ({}, [THEN, LATER, LAST], ["id", "name", "note"], {}, {}),
        ({"include": ["id", "title"]}, [THEN, LATER], ["id", "name"], ID_NAME, ID_NAME),
        (ID_NAME, [THEN, LATER], ["id", "name"], {}, ID_NAME),
        ({"include": ["id", "name", "title"]}, [THEN, LATER], ["id", "name"], {}, ID_NAME),
        # The dropped column by its last name; the other one by that of before.
        (
            {"include": ["id", "title", "note"]},
            [THEN, LATER, LAST],
            ["id", "name", "note"],
            {"include": ["id", "name", "note"]},
            {"include": ["id", "n*"]},
        ),
        (
            {"exclude": ["title"]},
            [THEN, LATER],
            ["id", "note"],
            {"include": ["id", "note"]},
            {"exclude": ["name"]},
        ),
        ({"exclude": ["t*"]}, [THEN, LATER], ["id", "name", "note"], {}, {}),
        (
            {"rename": {"title": "label"}},
            [THEN, LATER],
            ["id", "label", "note"],
            {"rename": {"name": "label"}},
            {"rename": {"name": "label"}},
        ),
        (TITLED, [THEN, LATER], ["id", "name", "note"], NAMED, NAMED),
        (
            {"include": ["key", "title"]},
            [THEN, shape("key", "title", "note", key="key")],
            ["id", "name"],
            ID_NAME,
            ID_NAME,
        ),
        # Names that two columns took over from each other: the Iceberg table tells.
        (ID_NAME, [THEN, SWAPPED], ["id", "name"], {}, ID_NAME),
        (
            ID_NAME,
            [THEN, SWAPPED],
            ["id", "note"],
            {"include": ["id", "note"]},
            {"exclude": ["name"]},
        ),
    ],
)
def test_a_rule_is_read_by_the_names_of_an_earlier_time(
    rule: dict[str, Any],
    shapes: list[Shape],
    columns: list[str],
    expected: dict[str, Any],
    made_by: dict[str, Any],
) -> None:
    given = TableRule.model_validate(rule)
    found = rules.rule_as_of(given, shapes, columns, "hint")
    assert translation(given, found) == expected
    metadata = [name for name, _ in METADATA["current"]]
    layout = rules.layout_as_of(given, shapes, [*columns, *metadata])
    assert layout.rule == found
    assert [field.name for field in layout.fields] == columns
    # What the present names say is not read as a change of the rule.
    assert rules.difference(shapes[0], TableRule.model_validate(made_by), found) == ""


def translation(given: TableRule, found: TableRule) -> dict[str, Any]:
    """What a translated rule says otherwise, but for `exclude`, which `include` stands for."""
    changed = {
        key: list(v) if key != "rename" else v for key, v in found if v != getattr(given, key)
    }
    changed.pop("exclude", None)
    return changed


PEOPLE = shape("id", "ssn")
WIDER = shape("id", "ssn", "x")
RENAMED = shape("id", "ssn2", "x")


@pytest.mark.parametrize(
    ("made_by", "rule", "shapes", "expected"),
    [
        # The column that was left out stays out, and the one that the table has stays.
        ({"exclude": ["ssn"]}, {"exclude": ["ssn2"]}, [WIDER, RENAMED], {"include": ["id", "x"]}),
        ({"exclude": ["ssn"]}, {"exclude": ["ssn", "ssn2"]}, [WIDER, RENAMED], {}),
        ({}, {"exclude": ["ssn2"]}, [WIDER, RENAMED], {}),
        (
            {"include": ["id", "ssn"]},
            {"include": ["id", "ssn2"]},
            [WIDER, RENAMED],
            {"include": ["id", "ssn"]},
        ),
        ({"include": ["id", "ssn"]}, {"include": ["id", "ssn"]}, [WIDER, RENAMED], {}),
        # A column that the table does not have yet is meant by its last name.
        (
            {},
            {"exclude": ["y"]},
            [WIDER, shape("id", "ssn", "y")],
            {"include": ["id", "ssn"]},
        ),
        (
            {},
            {"include": ["id", "ssn", "y"]},
            [WIDER, shape("id", "ssn", "y")],
            {"include": ["id", "ssn", "x"]},
        ),
        # The column in Iceberg keeps its name.
        (
            {"rename": {"ssn": "label"}},
            {"rename": {"ssn2": "label"}},
            [WIDER, RENAMED],
            {"rename": {"ssn": "label"}},
        ),
        ({}, {"rename": {"ssn2": "label"}}, [WIDER, RENAMED], {}),
        # The last shape is taken as the rule says.
        ({"exclude": ["ssn"]}, {"exclude": ["ssn"]}, [RENAMED], {}),
    ],
)
def test_a_rule_means_the_columns_that_the_table_has_while_their_names_change(
    made_by: dict[str, Any], rule: dict[str, Any], shapes: list[Shape], expected: dict[str, Any]
) -> None:
    given, table = TableRule.model_validate(rule), Layout(PEOPLE, TableRule.model_validate(made_by))
    found = rules.agreeing_rule(given, shapes, table)
    assert translation(given, found) == expected


def test_a_kept_column_of_the_same_name_is_not_taken_for_the_one_left_out() -> None:
    """Iceberg may still have a column that nothing fills, as the source dropped it."""
    given = TableRule(exclude=("ssn2",))
    table = Layout(WIDER, TableRule(exclude=("ssn",)), kept=("ssn",))
    found = rules.agreeing_rule(given, [WIDER, RENAMED], table)
    assert translation(given, found) == {"include": ["id", "x"]}
    assert rules.difference(WIDER, table.rule, found) == ""


def test_a_rule_with_two_meanings_for_an_earlier_time_is_refused() -> None:
    rule = TableRule(include=("id", "name"))
    columns = ["id", "name", "note", "_commit_lsn", "_seq"]
    with pytest.raises(OperatorNeeded, match="two meanings") as found:
        rules.layout_as_of(rule, [THEN, SWAPPED], columns)
    assert found.value.subject == "public.items" and found.value.hint
    with pytest.raises(OperatorNeeded, match="name is not there"):
        rules.layout_as_of(rule, [THEN], ["id", "_commit_lsn", "_seq"])


@pytest.mark.long
def test_a_column_that_is_left_out_stays_out_while_its_name_changes(
    new_pipeline: NewPipeline,
) -> None:
    """The rule has the new name already; one transaction adds a column, then renames."""
    text = ("text", -1)
    people = SourceTable("people", {"id": ("int4", -1), "ssn": text})
    wider = SourceTable("people", {**people.columns, "x": text}, missing={"x": "none"})
    renamed = SourceTable("people", {"id": ("int4", -1), "ssn2": text, "x": text})
    pipeline = new_pipeline(rules={"public.people": {"exclude": ["ssn"]}})
    publisher = pipeline.publisher
    publisher.announce(people)
    with publisher.transaction() as t:
        t.insert(people, {"id": 1, "ssn": "secret"})
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(rules={"public.people": TableRule(exclude=("ssn2",))})
    with publisher.transaction() as t:
        for table, column in ((wider, "ssn"), (renamed, "ssn2")):
            publisher.shape_at(table, publisher.commit_lsn, t.seq)
            t.insert(table, {"id": t.seq + 2, "x": "new", column: "secret"})
    pipeline.apply()
    assert [row.asDict() for row in pipeline.rows("people")] == [
        {"id": 1, "x": "none"},
        {"id": 2, "x": "new"},
        {"id": 3, "x": "new"},
    ]


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("recorded", "now", "key"),
    [
        (True, {"rename": {"name": "label"}}, "rename"),
        pytest.param(True, {"kind": "changelog"}, "kind", marks=pytest.mark.long),
        pytest.param(False, {"rename": {"name": "label"}}, "rename", marks=pytest.mark.long),
        pytest.param(False, {"exclude": []}, "exclude", marks=pytest.mark.long),
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


@pytest.mark.long
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


@pytest.mark.long
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
