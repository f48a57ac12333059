"""Where epochs are cut of the transactions that were read, and what the topic's records say."""

from collections import Counter
from collections.abc import Iterable

import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from schemas.settings import KafkaSettings
from spark_consumers.epochs import quiet
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.transaction_topic import TransactionTopic
from spark_consumers.kafka.transactions import EndEvent, Transactions

TOPIC = "p.transaction"
HOUR_MS = 3600_000


def end(number: int, **counts: int) -> EndEvent:
    """The END of transaction `number`: three offsets each, LSNs grow by 100."""
    return EndEvent(3 * number + 1, 100 * number, number, number, Counter(counts))


def taken(ends: Iterable[EndEvent], offset: int = 1000) -> Transactions:
    found = Transactions(None, -1)
    found.take(ends, offset)
    return found


def test_a_cut_has_at_most_so_many_events_and_at_least_one_transaction() -> None:
    log = taken(end(n, t=10) for n in range(1, 6))
    for events_max, transactions in ((25, 2), (1, 1), (100, 2)):
        cut = log.cut(events_max)
        assert cut is not None
        assert (cut.transactions, cut.counts["t"]) == (transactions, 10 * transactions)
        log.done(cut)
    assert log.cut(1) is None


def test_a_cut_ends_before_a_change_and_is_found_again_by_its_lsn() -> None:
    log = taken([end(1, t=1), end(2), end(3, t=1), end(4, t=1), end(5)])
    cut = log.cut(100, before_lsn=400)
    assert cut is not None and cut.commit_lsn == 300
    again = log.upto(300)
    assert again is not None
    assert (again.counts, again.offset) == (cut.counts, end(3).offset + 1)
    assert log.upto(350) is None


def test_the_rest_is_what_brings_nothing_and_only_while_nothing_else_waits() -> None:
    log = taken([end(1), end(2), end(3)])
    rest = log.rest()
    assert rest is not None
    assert (rest.commit_lsn, rest.offset, rest.ts_ms, rest.counts) == (300, 1000, 3, {})
    log.take([end(4, t=1), end(5)], 2000)
    assert log.rest() is None
    cut = log.cut(100)
    assert cut is not None
    log.done(cut)
    last = log.rest()
    assert last is not None and (last.commit_lsn, last.offset) == (500, 2000)
    log.done(last)
    assert log.rest() is None


def test_an_epoch_without_events_that_is_made_again_is_found_by_its_lsn() -> None:
    log = Transactions(None, -1, 200)
    log.take((end(n) for n in range(1, 5)), 1000)
    again = log.upto(200)
    assert again is not None and again.commit_lsn == 200
    log.done(again)
    rest = log.rest()
    assert rest is not None and rest.commit_lsn == 400


@pytest.mark.parametrize(
    ("commit_ms", "recorded_ms", "due"),
    [(0, 0, True), (0, 9 * HOUR_MS, False), (9 * HOUR_MS, 0, False), (8 * HOUR_MS, 0, True)],
)
def test_when_transactions_without_events_are_recorded(
    commit_ms: int, recorded_ms: int, *, due: bool
) -> None:
    assert quiet.is_due(commit_ms, recorded_ms, 9 * HOUR_MS + 1) == due


def test_a_cut_ends_before_a_split_unless_that_is_the_first() -> None:
    log = taken([end(1, t=1), end(2, t=1), end(3), end(4, t=1), end(5, t=1)])
    first = log.cut(100, split_lsn=300)
    assert first is not None and (first.commit_lsn, first.offset) == (200, end(2).offset + 1)
    log.done(first)
    for split_lsn, before_lsn, upto in ((300, None, 500), (400, None, 500), (450, 500, 400)):
        cut = log.cut(100, before_lsn, split_lsn)
        assert cut is not None and cut.commit_lsn == upto
    last = log.cut(100, split_lsn=10_000)
    assert last is not None and last.commit_lsn == 500


def test_the_last_cut_goes_on_after_everything_that_was_read() -> None:
    log = taken([end(1, t=1), end(2, t=1), end(3)], offset=77)
    first = log.cut(1)
    assert first is not None and first.offset == end(1).offset + 1
    log.done(first)
    last = log.cut(1)
    assert last is not None and last.offset == 77


def test_transactions_taken_before_change_nothing() -> None:
    log = taken([end(1, t=1), end(2, t=1)], offset=10)
    log.take([end(1, t=1), end(2, t=1), end(3, t=1)], 20)
    cut = log.cut(100)
    assert cut is not None and (cut.transactions, cut.offset) == (3, 20)
    log.done(cut)
    log.take([end(3, t=1)], 30)
    assert log.waiting() == (0, 0)


@pytest.fixture
def topic() -> TransactionTopic:
    kafka = KafkaSettings(bootstrap_servers="none:1", topic_prefix="p")
    return TransactionTopic(kafka, TopicOffsets(kafka), lambda name: name != "public.other")


def ends(spark: SparkSession, topic: TransactionTopic, *values: str | None) -> list[EndEvent]:
    """The ENDs of records that have these values, after LSN 100."""
    rows = [(0, n, value and value.encode(), 1) for n, value in enumerate(values)]
    schema = "partition int, offset bigint, value binary, ts bigint"
    records = spark.createDataFrame(rows, schema)
    records = records.selectExpr("partition", "offset", "value", "timestamp_millis(ts) timestamp")
    return list(topic.ends(records, 100))


@pytest.mark.long
def test_ends_are_read_in_order_and_others_left_out(
    spark: SparkSession, topic: TransactionTopic
) -> None:
    found = ends(
        *(spark, topic, '{"status": "BEGIN", "commit_lsn": 200}', None),
        '{"status": "END", "commit_lsn": 100, "ts_ms": 1, "data_collections": null}',
        '{"status": "END", "commit_lsn": 200, "ts_ms": 7, "data_collections": ['
        '{"data_collection": "public.t", "event_count": 2},'
        ' {"data_collection": "public.other", "event_count": 9}]}',
        '{"status": "END", "commit_lsn": 300, "ts_ms": 8, "data_collections": null}',
    )
    assert found == [
        EndEvent(3, 200, 1, 7, Counter({"public.t": 2})),
        EndEvent(4, 300, 1, 8, Counter()),
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "value",
    [
        "no json",
        '{"status": "END", "commit_lsn": 200}',
        '{"status": "ENDED", "commit_lsn": 50, "ts_ms": 1}',
        '{"status": "END", "commit_lsn": 200, "ts_ms": 1, "data_collections": [{}]}',
        '{"status": "END", "commit_lsn": 200, "ts_ms": 1, "data_collections": ['
        '{"data_collection": "public.t", "event_count": -1}]}',
    ],
)
def test_a_record_that_is_not_a_transactions_is_passed_and_named(
    spark: SparkSession, topic: TransactionTopic, value: str
) -> None:
    end = '{"status": "END", "commit_lsn": 300, "ts_ms": 8, "data_collections": null}'
    with capture_logs() as lines:
        found = ends(spark, topic, '{"status": "BEGIN"}', value, end)
    assert found == [EndEvent(2, 300, 1, 8, Counter())]
    assert [(line["topic"], line["offset"]) for line in lines] == [("p.transaction", 1)]
