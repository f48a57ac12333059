"""Events that can't be read or don't fit: put aside, named, and never a silent NULL."""

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable
from tests.providers.interface import Broker
from tests.providers.waiting import eventually, patient

ITEMS = SourceTable("items", {"id": ("int4", -1), "name": ("text", -1), "n": ("int4", -1)})
LOG = SourceTable("log", {"n": ("int4", -1)}, key=(), identity="nothing")


@pytest.mark.parametrize("kind", ["current", pytest.param("history", marks=pytest.mark.long)])
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


@pytest.mark.long
def test_an_epoch_that_is_cut_larger_after_a_kill_puts_all_its_bad_events_aside(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(on_bad_event="quarantine")
    two_rows(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 3, "name": "bad", "n": "x"})
    kill(monkeypatch, "nothing")
    with pytest.raises(KeyboardInterrupt):
        pipeline.apply()
    monkeypatch.undo()
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 4, "name": "worse", "n": "y"})
    pipeline.apply()
    aside = pipeline.spark.table(pipeline.identifier("_quarantine"))
    commits = [row.commit_lsn for row in aside.orderBy("commit_lsn").collect()]
    assert commits == [pipeline.publisher.commit_lsn - 100, pipeline.publisher.commit_lsn]


def two_rows(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "old", "n": 1})
        t.insert(ITEMS, {"id": 2, "name": "old", "n": 2})
    pipeline.apply()


def lose_a_delete(pipeline: Pipeline, *, refused: bool) -> None:
    """Row 1 is deleted at the source; Kafka refuses the event, or it can't be read."""
    with pipeline.publisher.transaction() as t:
        if refused:
            t.refuse("public.items", t.seq)
        else:
            t.delete(ITEMS, {"id": "one", "name": None, "n": None})


@pytest.mark.long
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("refused", [True, False])
def test_after_an_event_was_left_out_an_insert_replaces_the_row_of_its_key(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, refused: bool, large: bool
) -> None:
    if large:
        monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)
    pipeline = new_pipeline(on_bad_event="quarantine")
    two_rows(pipeline)
    lose_a_delete(pipeline, refused=refused)
    pipeline.apply()
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "new", "n": 3})
    pipeline.apply()
    assert [tuple(row) for row in pipeline.rows("items", "id")] == [(1, "new", 3), (2, "old", 2)]


@pytest.mark.long
def test_a_table_made_anew_remembers_what_kafka_has_refused(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(on_bad_event="quarantine")
    two_rows(pipeline)
    lose_a_delete(pipeline, refused=True)
    pipeline.apply()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 3, "name": "other", "n": 3})
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "new", "n": 1})
    pipeline.apply()
    assert [row.id for row in pipeline.rows("items", "id")] == [1, 2, 3]


@pytest.mark.long
def test_an_event_at_the_place_and_lsn_of_another_one_is_put_aside_too(
    new_pipeline: NewPipeline, kafka: Broker
) -> None:
    """A topic that was made again, from a source that was restored, has both again."""
    pipeline = new_pipeline(on_bad_event="quarantine")
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "first", "n": "x"}, partition=0)
        t.raw(ITEMS, "no JSON", partition=1)
    pipeline.apply()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    prefix = pipeline.kafka.topic_prefix
    names = [
        name for name in admin.list_topics(timeout=patient(30)).topics if name.startswith(prefix)
    ]
    for future in admin.delete_topics(names).values():
        future.result(patient(30))
    eventually(
        lambda: not set(names) & admin.list_topics(timeout=patient(20)).topics.keys(),
        what="they are gone",
    )
    for name in ("items", "_epochs"):
        pipeline.spark.sql(f"DROP TABLE {pipeline.identifier(name)} PURGE")
    pipeline.restart()
    publisher.commit_lsn -= 100
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "second", "n": "y"}, partition=0)
        t.raw(ITEMS, "nor this", partition=1)
    pipeline.apply()
    aside = pipeline.spark.table(pipeline.identifier("_quarantine"))
    found = [(row.partition, row.offset, row.commit_lsn) for row in aside.collect()]
    assert sorted(found, key=str) == sorted(
        [(0, 0, publisher.commit_lsn)] * 2 + [(1, 0, None)] * 2, key=str
    )
    assert aside.where("value LIKE '%second%' OR value = 'nor this'").count() == 2


@pytest.mark.long
def test_the_quarantine_keeps_its_events_and_few_snapshots_and_files(
    new_pipeline: NewPipeline, warehouse: Path
) -> None:
    ages = ("epochs_kept_all_ms", "epochs_kept_minutely_ms", "epochs_kept_hourly_ms")
    pipeline = new_pipeline(
        on_bad_event="quarantine", compact_files_min=2, **dict.fromkeys(ages, 0)
    )
    pipeline.publisher.announce(LOG)
    for number in range(7):
        with pipeline.publisher.transaction() as t:
            t.insert(LOG, {"n": f"no number {number}"})
        pipeline.apply()
    (folder,) = warehouse.glob(f"{pipeline.kafka.topic_prefix}/_quarantine")
    assert len(list(folder.glob("metadata/*.metadata.json"))) <= 6
    pipeline.runner.maintain()
    name = pipeline.identifier("_quarantine")
    assert pipeline.snapshots("_quarantine") == pipeline.spark.table(f"{name}.files").count() == 1
    assert pipeline.spark.table(name).count() == 7
    done = list(Operator(pipeline.spark, pipeline.settings).maintain())
    assert [one.table for one in done][-1] == "_quarantine"


def test_a_table_with_more_events_than_are_counted_is_parked(new_pipeline: NewPipeline) -> None:
    """Somebody else has written a well-formed event into its topic."""
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(ITEMS, LOG)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "name": "good", "n": 1})
        t.insert(LOG, {"n": 1})
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 2, "name": "good", "n": 2}, partition=0)
        t.insert(ITEMS, {"id": 3, "name": "foreign", "n": 3}, partition=2, seq=1000)
        t.insert(LOG, {"n": 2})
    report = pipeline.apply()
    refused = str(report.refused["public.items"])
    assert "Kafka has 1 events of public.items more than its transaction topic counts" in refused
    assert "2@0" in refused
    assert [row.id for row in pipeline.rows("items")] == [1]
    assert sorted(row.n for row in pipeline.rows("log")) == [1, 2]
