"""Kafka shows END before all that it counts: events are waited for as long as they may come."""

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest

from schemas.errors import OperatorNeeded, Retryable
from spark_consumers.epochs.epoch_events import EpochEvents
from spark_consumers.kafka.reader import TopicOffsets
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.lagging_broker import lag
from tests.promises.tables.test_current import HISTORY, ITEMS, item, rows
from tests.promises.tables.test_rebuilds import delete_topic
from tests.providers.waiting import patient


@pytest.mark.long
def test_events_that_are_stamped_later_than_their_transactions_end(
    pipeline: Pipeline,
) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1))
        publisher.produce(ITEMS, None, None, 1, ts_ms=int(time.time() * 1000) + 3_600_000)
        t.insert(ITEMS, item(2), partition=1)
    pipeline.apply()
    assert len(rows(pipeline)) == 2


@pytest.mark.long
def test_read_records_may_expire_and_unread_ones_may_not(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last event that was read stands a marker, which retention removes with it."""
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.1)
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1))
    pipeline.apply()
    publisher.forget(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(2))
    pipeline.apply()
    assert len(rows(pipeline)) == 2
    with publisher.transaction() as t:
        t.insert(ITEMS, item(3))
    publisher.forget(ITEMS)
    with pytest.raises(OperatorNeeded, match=r"Kafka lacks 1 events of public\.items"):
        pipeline.apply()


def test_events_that_never_come_stop_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.1)
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, item(1))
        t.counts["public.items"] += 1
    with pytest.raises(OperatorNeeded, match=r"Kafka lacks 1 events of public\.items"):
        pipeline.apply()


@pytest.mark.long
@pytest.mark.parametrize("shown", [(), (0,)], ids=["no topic", "fewer partitions"])
def test_partitions_that_a_broker_does_not_show_yet_are_asked_for_again(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, shown: tuple[int, ...]
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.1)
    topic, original = f"{pipeline.kafka.topic_prefix}.public.items", TopicOffsets._describe
    stale = [shown]

    def describe(offsets: TopicOffsets, topics: Collection[str]) -> dict[str, tuple[int, ...]]:
        """The first answer is that of a broker whose metadata lags behind."""
        found = original(offsets, topics)
        return found | {topic: stale.pop()} if topic in found and stale else found

    monkeypatch.setattr(TopicOffsets, "_describe", describe)
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, item(1), partition=2)
    pipeline.apply()
    assert not stale
    assert len(rows(pipeline)) == 1
    assert len(pipeline.runner.record.offsets[topic]) == 3


def two_items(pipeline: Pipeline) -> Callable[[], None]:
    """A transaction whose second event Kafka shows when the answer is called."""
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1), partition=0)
        show = publisher.hidden(ITEMS, item(2))
        t.counts["public.items"] += 1
    return show


@pytest.mark.long
def test_hidden_records_are_awaited_and_read_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    original = EpochEvents.read

    def records(*arguments: Any) -> Any:
        reads.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(EpochEvents, "read", records)
    monkeypatch.setattr("spark_consumers.epochs.event_reader.VISIBLE_DEADLINE_S", patient(60))
    show = two_items(pipeline)
    shown = threading.Timer(1.5, show)
    shown.start()
    pipeline.apply()
    shown.join()
    assert len(rows(pipeline)) == 2
    assert len(reads) == 1


@pytest.mark.long
def test_a_read_that_takes_longer_than_the_deadline_is_not_the_last(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.0)
    monkeypatch.setattr("spark_consumers.epochs.event_reader.VISIBLE_DEADLINE_S", 0.0)
    show = two_items(pipeline)
    original = EpochEvents.read

    def records(*arguments: Any) -> Any:
        """What comes while it is read is not in it."""
        found = original(*arguments)
        monkeypatch.setattr(EpochEvents, "read", original)
        show()
        return found

    monkeypatch.setattr(EpochEvents, "read", records)
    pipeline.apply()
    assert len(rows(pipeline)) == 2


def shown_after_the_first_read(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, show: Callable[[], None]
) -> None:
    """Kafka shows an event only when the epoch was read once, and its deadlines are over."""
    monkeypatch.setattr("spark_consumers.epochs.event_reader.VISIBLE_DEADLINE_S", 0.0)
    original = EpochEvents.read

    def records(*arguments: Any) -> Any:
        found = original(*arguments)
        monkeypatch.setattr(EpochEvents, "read", original)
        show()
        return found

    monkeypatch.setattr(EpochEvents, "read", records)


@pytest.mark.long
@pytest.mark.parametrize("partition", [0, 2])
def test_a_duplicate_does_not_stand_in_for_an_event_that_is_not_to_be_seen_yet(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, partition: int
) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1), partition=0)
        t.insert(ITEMS, item(1), partition=partition, seq=0)
        show = publisher.hidden(ITEMS, item(2))
        t.counts["public.items"] += 1
    shown_after_the_first_read(pipeline, monkeypatch, show)
    assert pipeline.apply().tables["public.items"].duplicates == 1
    assert [row[0] for row in rows(pipeline)] == [1, 2]


@pytest.mark.long
def test_a_foreign_record_does_not_stand_in_for_an_event_that_is_not_to_be_seen_yet(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(on_bad_event="quarantine")
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1), partition=0)
        publisher.produce(ITEMS, "{}", "no event", 0)
        show = publisher.hidden(ITEMS, item(2))
        t.counts["public.items"] += 1
    shown_after_the_first_read(pipeline, monkeypatch, show)
    assert pipeline.apply().quarantined == 1
    assert [row[0] for row in rows(pipeline)] == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize("before", [False, True], ids=["new to the tables", "left out"])
def test_events_that_no_epoch_has_counted_are_read_once_kafka_shows_them(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, *, before: bool
) -> None:
    """The epochs had their transaction when its partition was still to be seen."""
    others = ("public.history",)
    pipeline = new_pipeline(tables=() if before else others)
    publisher = pipeline.publisher
    publisher.announce(ITEMS, HISTORY)
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "a"})
        t.insert(ITEMS, item(1), partition=0)
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(tables=others)
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "b"})
        show = publisher.hidden(ITEMS, item(2))
        t.counts["public.items"] += 1
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(tables=())
    for deadline in ("VISIBLE_DEADLINE_S", "ARRIVAL_DEADLINE_S"):
        monkeypatch.setattr(f"spark_consumers.epochs.event_reader.{deadline}", 0.1)
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "c"})
    with pytest.raises(Retryable, match=r"not show all events of public\.items yet"):
        pipeline.apply()
    show()
    pipeline.restart()
    pipeline.apply()
    assert [row[0] for row in rows(pipeline)] == [1, 2]


@pytest.mark.long
def test_events_that_no_epoch_has_counted_and_that_are_stamped_later_are_read(
    new_pipeline: NewPipeline,
) -> None:
    """The bridge publishes events again that Kafka has aborted, or a broker's clock is ahead."""
    pipeline = new_pipeline(tables=("public.history",))
    publisher = pipeline.publisher
    publisher.announce(ITEMS, HISTORY)
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "a"})
        publisher.produce(ITEMS, None, None, 1, ts_ms=int(time.time() * 1000) + 3_600_000)
        t.insert(ITEMS, item(1), partition=1)
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(tables=())
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "b"})
    pipeline.apply()
    assert [row[0] for row in rows(pipeline)] == [1]


@pytest.mark.long
@pytest.mark.parametrize("shown", [(), (0,)], ids=["no topic", "fewer partitions"])
def test_a_table_is_made_anew_of_all_partitions_that_were_read(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, shown: tuple[int, ...]
) -> None:
    """A broker whose metadata lags shows some of them: no END counts what former epochs brought."""
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(ITEMS, HISTORY)
    with pipeline.publisher.transaction() as t:
        for number in range(6):
            t.insert(ITEMS, item(number), partition=number % 3)
    pipeline.apply()
    pipeline.restart()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
    stale = lag(monkeypatch, f"{pipeline.kafka.topic_prefix}.public.items")
    stale[:] = [shown]
    with pipeline.publisher.transaction() as t:
        t.insert(HISTORY, {"note": "a"})
    pipeline.apply()
    assert not stale
    assert not pipeline.runner.parking.tables
    assert [row[0] for row in rows(pipeline)] == [*range(6)]
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.1)
    pipeline.restart()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
    stale[:] = [shown] * 100
    with pipeline.publisher.transaction() as t:
        t.insert(HISTORY, {"note": "b"})
    assert "no longer has the first events" in pipeline.apply().refused["public.items"]


@pytest.mark.long
@pytest.mark.parametrize("shown", [(), (0,)], ids=["no topic", "fewer partitions"])
def test_a_table_that_was_left_out_gets_the_events_of_all_partitions_that_were_read(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, shown: tuple[int, ...]
) -> None:
    """A broker whose metadata lags shows some of them: nobody has counted their events."""
    pipeline = new_pipeline()
    pipeline.publisher.announce(ITEMS, HISTORY)
    for numbers, tables in ((range(3), ()), (range(3, 6), ("public.history",))):
        pipeline.restart()
        pipeline.set_tables(tables=tables)
        with pipeline.publisher.transaction() as t:
            t.insert(HISTORY, {"note": "a"})
            for number in numbers:
                t.insert(ITEMS, item(number), partition=number % 3)
        pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(tables=())
    stale = lag(monkeypatch, f"{pipeline.kafka.topic_prefix}.public.items")
    stale[:] = [shown]
    with pipeline.publisher.transaction() as t:
        t.insert(HISTORY, {"note": "b"})
    pipeline.apply()
    assert not stale
    assert [row[0] for row in rows(pipeline)] == [*range(6)]


@pytest.mark.long
def test_a_dropped_table_is_not_filled_from_a_topic_that_is_shorter_now(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic was made again: it has rows, but not those that former epochs brought."""
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(ITEMS, HISTORY)
    with pipeline.publisher.transaction() as t:
        for number in range(6):
            t.insert(ITEMS, item(number), partition=number % 3)
    pipeline.apply()
    pipeline.restart()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
    delete_topic(pipeline, f"{pipeline.kafka.topic_prefix}.public.items")
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, item(9), partition=1)
        t.insert(HISTORY, {"note": "a"})
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.5)
    assert "no longer has the first events" in pipeline.apply().refused["public.items"]
    assert not rows(pipeline)
    assert pipeline.spark.table(pipeline.identifier("history")).count() == 1
