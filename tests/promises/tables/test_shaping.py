"""Tables under topics of any name, and what Kafka has refused."""

from typing import Any

import pytest

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable

ONE = SourceTable("one", {"id": ("int4", -1), "v": ("text", -1)})
TWO = SourceTable("two", {"id": ("int4", -1), "v": ("text", -1)})
OUTBOX = SourceTable("outbox", {"id": ("int4", -1)})


def publish(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ONE, TWO)
    with pipeline.publisher.transaction() as t:
        for table in (ONE, TWO):
            t.insert(table, {"id": 1, "v": "a"})


@pytest.mark.long
def test_topics_of_a_template_and_a_route_are_followed(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(
        shaping={
            "topic": "{prefix}.t.{table}",
            "routes": [{"tables": r"public\.two", "topic": "{prefix}-second"}],
        }
    )
    publish(pipeline)
    assert [sorted(report.tables) for report in pipeline.stream()] == [["public.one", "public.two"]]
    assert [tuple(row) for row in pipeline.rows("two")] == [(1, "a")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ({"routes": [{"tables": ".*", "topic": "{prefix}.all"}]}, "share one topic"),
        ({"keys": {"public.two": ["v"]}}, "public.two has another key"),
        ({"flat": {"tables": ["public.two"]}}, "public.two has flat rows"),
    ],
)
def test_shaping_that_tables_can_not_follow_is_refused(
    shaping: dict[str, Any], expected: str, new_pipeline: NewPipeline
) -> None:
    pipeline = new_pipeline(shaping=shaping)
    publish(pipeline)
    with pytest.raises(SetupError, match=expected) as caught:
        pipeline.apply()
    assert "tables.tables" in caught.value.hint


@pytest.mark.long
def test_a_dead_letter_of_a_followed_table_stops_or_is_reported(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(shaping={"outbox": {"table": "public.outbox"}})
    publish(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(ONE, {"id": 2, "v": "b"})
        t.refuse("public.outbox", 1)
        t.refuse("", 2)
    report = pipeline.apply()
    assert report.dead_letters == 0
    with pipeline.publisher.transaction() as t:
        t.insert(ONE, {"id": 3, "v": "c"})
        for seq in (2, 1):
            t.refuse("public.one", seq)
    with pytest.raises(OperatorNeeded, match=r"an event of public\.one .* seq 2") as caught:
        pipeline.apply()
    assert caught.value.exit_code is ExitCode.RECORD_REFUSED
    assert caught.value.lsn == pipeline.publisher.commit_lsn
    going_on = new_pipeline(on_bad_event="quarantine")
    going_on.publisher.commit_lsn = pipeline.publisher.commit_lsn
    report = going_on.apply()
    assert report.document()["dead_letters"] == 2
    assert len(going_on.rows("one")) == 3
    not_following = new_pipeline(tables=("public.two",))
    reports = not_following.stream()
    assert not any(report.dead_letters for report in reports)
