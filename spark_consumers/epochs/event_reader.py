"""Reads an epoch's events from Kafka into Spark, all of them and no others."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from schemas.errors import OperatorNeeded
from schemas.settings import KafkaSettings
from spark_consumers.epochs.topic_summary import TopicSummary, summarize
from spark_consumers.events import changes
from spark_consumers.kafka.reader import Offsets, TopicOffsets, reader_options
from spark_consumers.kafka.transactions import Cut

log = structlog.get_logger()
ARRIVAL_DEADLINE_S = 60.0
VISIBLE_DEADLINE_S = 5.0
_ARRIVAL_INTERVAL_S = 0.05
SMALL_RECORDS_MAX = 5_000
"""An epoch of up to this many records is read by one task for each table."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a topic to read.

    `table`: the source table. `events`: how many events the transactions' ENDs count. `after_lsn`:
    the commit LSN that the table has, where it differs from the group's.
    """

    table: str
    events: int
    after_lsn: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """An epoch's events, persisted, what each topic brings, and where the next ones are."""

    events: DataFrame
    summaries: dict[str, TopicSummary]
    offsets: Offsets


class EventReader:
    """Reads whole transactions of the tables' topics."""

    def __init__(
        self,
        spark: SparkSession,
        kafka: KafkaSettings,
        topics: TopicOffsets,
        *,
        whole: bool = False,
    ) -> None:
        """Read events from Kafka; with `whole`, the events keep their text."""
        self._whole = whole
        self._spark = spark
        self._kafka = kafka
        self._topics = topics

    def read(
        self,
        cut: Cut,
        after_lsn: int,
        wanted: Mapping[str, Wanted],
        known: Offsets,
        check: Callable[[str, int], None],
    ) -> Taken:
        """Return the events of the topics in `wanted` after `after_lsn`, up to `cut`.

        Kafka shows a transaction's partitions one after the other, so wait until all events that an
        END counts can be read. `check(topic, first offset)` is called for each topic that is read
        from its beginning. Raise OperatorNeeded when events are missing for ARRIVAL_DEADLINE_S; a
        read may itself take longer.
        """
        partitions = self._topics.all_partitions(wanted)
        starts = self._starts(partitions, wanted, known, check)
        others = {t: w.after_lsn for t, w in wanted.items() if w.after_lsn is not None}
        deadline: float | None = None
        near = cut.read_ms or None
        while True:
            ends, settled = self._ends(partitions, starts, near, cut.read_ms)
            records = self.records(starts, ends)
            events = changes.events(records, after_lsn, cut.commit_lsn, others, whole=self._whole)
            events = events.coalesce(self._tasks(starts, ends)).persist(
                StorageLevel.MEMORY_AND_DISK
            )
            summaries = summarize(
                changes.summary(events).collect(), changes.positions(events).collect()
            )
            short = _short(wanted, summaries, after_lsn, settled=settled)
            if not short:
                return Taken(events, summaries, _next(ends, summaries))
            events.unpersist()
            now = time.monotonic()
            deadline = now + ARRIVAL_DEADLINE_S if deadline is None else deadline
            if now > deadline:
                topic, count = short[0]
                raise OperatorNeeded(
                    f"Kafka lacks {count} events of {wanted[topic].table} that its transaction "
                    "topic counts",
                    operation="read events",
                    subject=topic,
                    lsn=cut.commit_lsn,
                    hint="topic retention was too short or a topic was made anew: "
                    "rebuild the tables",
                )
            near = None
            time.sleep(_ARRIVAL_INTERVAL_S)

    def _tasks(self, starts: Offsets, ends: Offsets) -> int:
        """Return into how many Spark tasks an epoch's events are split.

        Without this, each of Kafka's partitions would be a task in each merge. A small epoch is one
        task: shuffling it costs more than it saves.
        """
        records = sum(
            end - starts[topic][number]
            for topic, numbers in ends.items()
            for number, end in numbers.items()
        )
        small = records <= SMALL_RECORDS_MAX
        return 1 if small else self._spark.sparkContext.defaultParallelism

    def _starts(
        self,
        partitions: Mapping[str, tuple[int, ...]],
        wanted: Mapping[str, Wanted],
        known: Offsets,
        check: Callable[[str, int], None],
    ) -> Offsets:
        """Return where reading begins: after the last epoch; for a new table, at the beginning.

        Where Kafka has removed what lies before, it begins later: behind the last event there is a
        marker, which retention removes with it. That an event is missing is told by the counts.
        """
        befores = {
            topic: {} if wanted[topic].after_lsn is not None else known.get(topic, {})
            for topic in partitions
        }
        first = self._topics.first({t: numbers for t, numbers in partitions.items() if numbers})
        for topic, offsets in first.items():
            if not befores[topic]:
                check(wanted[topic].table, max(offsets.values()))
        return {
            topic: {n: max(befores[topic].get(n, 0), first[topic][n]) for n in numbers}
            for topic, numbers in partitions.items()
        }

    def _ends(
        self,
        partitions: Mapping[str, tuple[int, ...]],
        starts: Offsets,
        near: int | None,
        read_ms: int,
    ) -> tuple[Offsets, bool]:
        """Return the offsets where reading ends, and whether the last END's events can be read.

        The first is what was written after the last END. `near` is the END's time stamp: wait until
        all records before it are visible, so that they are read in one pass. The second answers for
        records up to the time of the last END, `read_ms`.
        """
        until = self._topics.written_until(partitions, read_ms)
        ends = self._topics.stable(partitions)
        if near is not None:
            deadline = time.monotonic() + VISIBLE_DEADLINE_S
            while _some_before(ends, until) and time.monotonic() < deadline:
                time.sleep(_ARRIVAL_INTERVAL_S)
                ends = self._topics.stable(partitions)
        settled = read_ms > 0 and not _some_before(ends, until)
        if near is not None:
            ends = {t: {n: min(at, until[t][n]) for n, at in p.items()} for t, p in ends.items()}
        return {
            topic: {n: max(end, starts[topic][n]) for n, end in numbers.items()}
            for topic, numbers in ends.items()
        }, settled

    def records(self, starts: Offsets, ends: Offsets) -> DataFrame:
        """Return the committed records of topics between offsets."""
        topics = {topic: sorted(numbers) for topic, numbers in starts.items() if numbers}
        return (
            self._spark.read.format("kafka")
            .options(**reader_options(self._kafka))
            .option("kafka.group.id", f"slottables-{self._kafka.topic_prefix}")
            .option("assign", json.dumps(topics))
            .option("startingOffsets", _json(starts))
            .option("endingOffsets", _json(ends))
            .option("failOnDataLoss", "true")
            .load()
        )


def _short(
    wanted: Mapping[str, Wanted],
    summaries: Mapping[str, TopicSummary],
    after_lsn: int,
    *,
    settled: bool,
) -> list[tuple[str, int]]:
    """Return (topic, number of missing events) for each topic that lacks some.

    A record that can't be read may be one of the counted events, or anybody's: it stands in for a
    counted one only where nothing else can come any more (`settled`). Pure.
    """
    found = []
    for topic, want in wanted.items():
        summary = summaries.get(topic, TopicSummary(topic))
        there = summary.counted(after_lsn) + (summary.refused_count if settled else 0)
        if there < want.events:
            found.append((topic, want.events - there))
    return found


def _some_before(some: Offsets, others: Offsets) -> bool:
    return any(
        at < others[topic][n] for topic, partitions in some.items() for n, at in partitions.items()
    )


def _next(ends: Offsets, summaries: Mapping[str, TopicSummary]) -> Offsets:
    return {
        topic: {
            number: (summaries[topic].next_offsets.get(number, end) if topic in summaries else end)
            for number, end in numbers.items()
        }
        for topic, numbers in ends.items()
    }


def _json(offsets: Offsets) -> str:
    return json.dumps({t: {str(n): at for n, at in parts.items()} for t, parts in offsets.items()})
