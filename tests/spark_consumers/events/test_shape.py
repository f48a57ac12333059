"""What a change of shape needs, without Spark: pure."""

import pytest
from structlog.testing import capture_logs

from schemas.errors import SetupError
from schemas.tables import TableRule, TablesSettings
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import (
    START,
    CommitPosition,
    Shape,
    filled,
    survivors_of,
    unsent_columns,
)
from spark_consumers.iceberg.evolution import needed, retyped
from spark_consumers.iceberg.fills import Fill, wanted
from spark_consumers.iceberg.layout import Layout
from tests.promises.tables.publisher import SourceTable


def shape(*columns: tuple[str, str], oid: int = 1) -> Shape:
    """A shape of (name, type) with the key id."""
    found = tuple(ColumnShape(name, kind, -1, name == "id") for name, kind in columns)
    return Shape("public", "t", found, ("id",), oid, START)


def renamed(before: Shape, after: Shape) -> dict[str, str]:
    """Old name -> new name of the columns that were renamed from one shape to the next."""
    return {old: new for old, new in survivors_of(before, after).items() if old != new}


BEFORE = shape(("id", "int4"), ("a", "text"), ("n", "int4"))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (shape(("id", "int4"), ("b", "text"), ("n", "int4")), {"a": "b"}),
        (shape(("id", "int8"), ("b", "text"), ("m", "int4")), {"a": "b", "n": "m"}),
        (shape(("id", "int4"), ("b", "int4"), ("n", "int4")), {}),
        (shape(("id", "int4"), ("n", "text"), ("a", "int4")), {}),
        (shape(("id", "int4"), ("n", "int4")), {}),
        (shape(("id", "int4"), ("a", "text"), ("n", "int4"), ("x", "text")), {}),
        (shape(("id", "int4"), ("b", "text"), ("n", "int4"), oid=2), {}),
    ],
)
def test_a_rename_is_told_by_place_and_type(after: Shape, expected: dict[str, str]) -> None:
    assert renamed(BEFORE, after) == expected


def test_a_column_of_an_event_that_the_topic_has_lost_is_untold() -> None:
    def event(*names: str, former: str, missing: dict[str, int] | None = None) -> Shape:
        before = table(*former.split()).shape_event(1).after
        told = table(*names).shape_event(2).model_copy(update={"before": before})
        return Shape.from_event(told.model_copy(update={"missing": missing or {}}))

    def table(*names: str) -> SourceTable:
        return SourceTable("t", dict.fromkeys(names, ("int4", -1)), oid=1)

    first = Shape.from_event(table("id", "a").shape_event(0))
    last = event("id", "a", "c", "d", former="id a c", missing={"d": 6})
    assert (unsent_columns(first, last), filled(first, last)) == (["c"], {"d": "6"})
    assert unsent_columns(event("id", "a", "c", former="id a"), last) == []
    assert unsent_columns(first, event("id", "a", "d", former="id a c")) == ["d"]
    assert unsent_columns(first, event("id", "b", former="id a")) == []


def test_null_takes_back_fills_that_were_noted() -> None:
    fills = {"c": Fill("int4", -1, "7")}
    assert wanted(settings(), "public.t", fills) == fills
    with capture_logs() as told:
        assert wanted(settings(on_column_default="null"), "public.t", fills) == {}
    assert [line["columns"] for line in told] == [["c"]]


def settings(**given: str) -> TablesSettings:
    return TablesSettings.model_validate({"warehouse": "/w", **given})


def test_columns_are_matched_as_they_are_kept() -> None:
    rule = TableRule(rename={"a": "title"}, exclude=("secret",))
    after = shape(("id", "int8"), ("a", "text"), ("n", "int4"), ("secret", "text"), ("x", "bool"))
    found = needed(
        settings(),
        Layout(BEFORE, rule),
        Layout(after, rule),
        ["id", "title", "n", "_commit_lsn", "_seq"],
        replaced=False,
    )
    assert found.adds == (("x", "boolean"),)
    assert found.widened == (("id", "bigint"),)
    assert not found.renames and not found.drops


def test_a_name_that_is_taken_by_a_kept_column_is_set_aside() -> None:
    rule = TableRule()
    without = shape(("id", "int4"), ("a", "text"))
    names = ["id", "a", "n", "n__old1"]
    found = needed(settings(), Layout(without, rule), Layout(BEFORE, rule), names, replaced=False)
    assert (found.renames, found.adds) == ((("n", "n__old2"),), (("n", "int"),))


def test_types_that_don_t_hold_the_old_values() -> None:
    rule = TableRule()
    after = shape(("id", "int4"), ("a", "int4"), ("n", "int4"))
    layouts = (Layout(BEFORE, rule), Layout(after, rule))
    with pytest.raises(SetupError, match="column a was string and is int"):
        needed(settings(), *layouts, BEFORE.names, replaced=False)
    chosen = settings(on_changed_type="new_column")
    found = needed(chosen, *layouts, BEFORE.names, replaced=False)
    assert (found.renames, found.adds) == ((("a", "a__old1"),), (("a", "int"),))
    key = Layout(shape(("id", "text"), ("a", "text"), ("n", "int4")), rule)
    with pytest.raises(SetupError, match="column id was int and is string"):
        needed(chosen, Layout(BEFORE, rule), key, BEFORE.names, replaced=False)


def test_columns_that_are_of_another_type_only_at_the_source_are_told() -> None:
    after = shape(("id", "int4"), ("b", "jsonb"), ("n", "int8"))
    rule = TableRule(rename={"b": "title"})
    before = Layout(shape(("id", "int4"), ("b", "text"), ("n", "int4")), rule)
    assert retyped(before, Layout(after, rule)) == ["title"]
    assert retyped(before, before) == []


def test_a_shape_is_kept_with_its_table_and_read_back() -> None:
    given = Shape("a", "b.c", BEFORE.columns, ("id",), 7, CommitPosition(5, 6))
    assert Shape.from_document("a.b.c", given.document()) == given
