"""Which tables' parts of an epoch the driver applies, and why Spark does the others."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.tables import TableRule
from spark_consumers.apply.look import Look
from spark_consumers.epochs.choice import ROWS_MAX, by_spark
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import CommitPosition, Shape
from spark_consumers.iceberg.fills import Fill
from spark_consumers.iceberg.layout import Layout
from spark_consumers.iceberg.tables import OpenTable

SHAPE = Shape("public", "t", (ColumnShape("id", "int4", -1, True),), ("id",))
LAYOUT = Layout(SHAPE, TableRule())
TABLE = OpenTable("slotbridge.`n`.`t`", LAYOUT, 1)
LOOK = Look(
    uuid="uuid",
    metadata="place",
    format=3,
    spec=0,
    partitioned=False,
    sorted=False,
    schema={},
    properties={},
    summary={"total-records": "5"},
    snapshot=7,
    branches=(),
    data_path="a",
    vector_path="b",
)
HISTORY = replace(LAYOUT, rule=TableRule(kind="history"))
BY_REAL = replace(SHAPE, columns=(ColumnShape("id", "float8", -1, True),))
KEYLESS = replace(SHAPE, columns=(ColumnShape("id", "int4", -1, False),), key=())


def why(
    table: OpenTable = TABLE, look: Look = LOOK, summary: TopicSummary | None = None, **given: Any
) -> str:
    values: dict[str, Any] = {"unread": "", "shapes": 1, "summed": False, "indexed": False}
    return by_spark(table, summary or TopicSummary("t"), look, **values | given)


def test_a_plain_table_is_the_drivers() -> None:
    assert why() == ""
    assert why(look=replace(LOOK, snapshot=None, summary={})) == ""
    large = replace(LOOK, summary={"total-records": str(ROWS_MAX + 1)})
    assert why(look=large, indexed=True) == ""
    keyless = replace(TABLE, layout=replace(LAYOUT, shape=KEYLESS))
    assert why(keyless, replace(large, format=2)) == ""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"unread": "many events"}, "many events"),
        ({"shapes": 2}, "columns change"),
        ({"table": replace(TABLE, drops=("v",))}, "columns change"),
        ({"table": replace(TABLE, fills={"v": Fill("int4", -1, "1")})}, "columns change"),
        ({"table": replace(TABLE, layout=HISTORY)}, "kind history"),
        ({"table": replace(TABLE, rebuilt=True)}, "rows are replaced"),
        ({"table": replace(TABLE, replaced=CommitPosition(1, 1))}, "rows are replaced"),
        ({"summary": TopicSummary("t", truncates={(1, 1, 1)})}, "rows are replaced"),
        ({"summary": TopicSummary("t", unavailable=True)}, "unchanged values"),
        ({"summed": True}, "sums"),
        ({"look": replace(LOOK, format=2)}, "format version 2"),
        ({"look": replace(LOOK, partitioned=True)}, "partitions"),
        ({"look": replace(LOOK, sorted=True)}, "sorted files"),
        (
            {"look": replace(LOOK, properties={"write.format.default": "ORC"})},
            "another file format",
        ),
        (
            {"table": replace(TABLE, layout=replace(LAYOUT, shape=BY_REAL))},
            "a key of another type",
        ),
        ({"look": replace(LOOK, summary={"total-records": "6000000"})}, "a large table"),
    ],
)
def test_the_reason_is_named(given: dict[str, Any], reason: str) -> None:
    assert why(**given) == reason
