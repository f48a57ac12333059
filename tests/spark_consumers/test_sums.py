"""Tables of sums whose source is made anew, and whose settings are changed."""

from typing import Any

import pytest

from tests.spark_consumers.conftest import NewPipeline, Pipeline
from tests.spark_consumers.publisher import SourceTable

LEFT = SourceTable("left_one", {"id": ("int4", -1), "v": ("int4", -1), "w": ("int4", -1)})
RIGHT = SourceTable("right_one", {"id": ("int4", -1), "v": ("int4", -1), "w": ("int4", -1)})


def sums(source: str, **columns: str) -> dict[str, Any]:
    return {"totals": {"source": f"public.{source}", "group_by": ["id"], "sums": columns}}


def both(pipeline: Pipeline, number: int) -> None:
    """One epoch with a row of each table."""
    with pipeline.publisher.transaction() as t:
        for factor, table in ((1, LEFT), (100, RIGHT)):
            t.insert(table, {"id": number, "v": factor * number, "w": factor * number * 10})
    pipeline.apply()


def totals(pipeline: Pipeline, *columns: str) -> list[tuple[int, ...]]:
    frame = pipeline.spark.table(pipeline.identifier("totals")).select("id", *columns)
    return sorted(tuple(row) for row in frame.collect())


def begun(new_pipeline: NewPipeline) -> Pipeline:
    pipeline = new_pipeline(sums=sums("left_one", total="v", other="w"))
    pipeline.publisher.announce(LEFT, RIGHT)
    for number in (1, 2):
        both(pipeline, number)
    assert totals(pipeline, "total", "other", "_rows") == [(1, 1, 10, 1), (2, 2, 20, 1)]
    return pipeline


def test_sums_of_a_table_that_was_dropped_are_those_of_the_table_made_anew(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = begun(new_pipeline)
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('left_one')} PURGE")
    pipeline.restart()
    both(pipeline, 3)
    assert [row.id for row in pipeline.rows("left_one")] == [1, 2, 3]
    assert totals(pipeline, "total", "_rows") == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]


@pytest.mark.parametrize("comes", ["an epoch", "nothing"])
@pytest.mark.parametrize("what", ["the columns", "the source"])
def test_sums_with_other_settings_are_computed_anew(
    new_pipeline: NewPipeline, what: str, comes: str
) -> None:
    begun(new_pipeline)
    source, columns = "left_one", {"total": "w", "other": "v"}
    if what == "the source":
        source, columns = "right_one", {"total": "v", "other": "w"}
    changed = new_pipeline(sums=sums(source, **columns))
    factor = 10 if what == "the columns" else 100
    numbers = [1, 2]
    if comes == "an epoch":
        numbers.append(3)
        changed.publisher.commit_lsn = 1200
        both(changed, 3)
    else:
        changed.stream()
    assert totals(changed, "total", "_rows") == [(n, n * factor, 1) for n in numbers]
