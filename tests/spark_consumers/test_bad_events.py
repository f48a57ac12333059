"""Events that can't be read or don't fit: put aside, named, and never a silent NULL."""

import pytest

from tests.spark_consumers.conftest import NewPipeline
from tests.spark_consumers.publisher import SourceTable

ITEMS = SourceTable("items", {"id": ("int4", -1), "name": ("text", -1), "n": ("int4", -1)})
LOG = SourceTable("log", {"n": ("int4", -1)}, key=(), identity="nothing")


@pytest.mark.parametrize("kind", ["current", "history"])
def test_bad_events_are_put_aside_once_and_the_others_go_on(
    new_pipeline: NewPipeline, kind: str
) -> None:
    rules = {"public.items": {"kind": kind}}
    pipeline = new_pipeline(on_bad_event="quarantine", rules=rules)
    publisher = pipeline.publisher
    publisher.announce(ITEMS, LOG)
    with publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "good", "n": 1}, partition=0)
        t.insert(ITEMS, {"id": 2, "name": "secret", "n": 2**40}, partition=1)
        t.insert(ITEMS, {"id": 3, "name": "more", "n": 3, "surprise": 1}, partition=1)
        t.insert(ITEMS, {"id": 4, "name": "less"}, partition=1)
        t.raw(ITEMS, "no JSON", partition=2)
        t.insert(LOG, {"n": "x"}, partition=0)
        t.insert(LOG, {"n": 5}, partition=0)
    first = pipeline.apply()
    with publisher.transaction() as t:
        t.update(ITEMS, {"id": 1, "name": "bad", "n": "y"}, partition=0)
        t.insert(ITEMS, {"id": 5, "name": "good", "n": 5}, partition=2)
    second = pipeline.apply()
    assert (first.quarantined, second.quarantined) == (5, 1)
    assert [row.id for row in pipeline.rows("items", "id")] == [1, 5]
    assert [row.n for row in pipeline.rows("log")] == [5]
    aside = pipeline.spark.table(pipeline.identifier("_quarantine"))
    found = aside.select("partition", "offset", "op", "reason", "epoch")
    assert sorted(map(tuple, found.where("topic LIKE '%items'").collect()), key=str) == [
        (0, 2, "u", "column n", 2),
        (1, 0, "c", "column n", 1),
        (1, 1, "c", "the row", 1),
        (1, 2, "c", "the row", 1),
        (2, 0, None, "no event of a table", 1),
    ]
    assert aside.where("value LIKE '%secret%'").count() == 1
