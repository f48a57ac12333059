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
from spark_consumers.epochs.parts import Part, put_together
from spark_consumers.events import changes
from spark_consumers.kafka.reader import Offsets, Topics, reader_options
from spark_consumers.kafka.transactions import Cut

log = structlog.get_logger()
ARRIVAL_DEADLINE_S = 60.0
_ARRIVAL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read of a topic: the table's name, how many events its transactions count, and
    what the table has where that is not what the group has."""

    table: str
    events: int
    after_lsn: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """An epoch's events, persisted, what each topic brings, and where the next ones are."""

    events: DataFrame
    parts: dict[str, Part]
    offsets: Offsets


class EventReader:
    """Reads whole transactions of the tables' topics."""

    def __init__(self, spark: SparkSession, kafka: KafkaSettings, topics: Topics) -> None:
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
        """The events of the topics in `wanted` after `after_lsn`, up to `cut`.

        Kafka shows a transaction's partitions one after the other: what its END counts is waited
        for. Raises OperatorNeeded when it does not come. `check(topic, first offset)` is asked for
        each topic that is read from its beginning.
        """
        partitions = {topic: self._topics.partitions(topic) for topic in wanted}
        starts = self._starts(partitions, wanted, known, check)
        others = {t: w.after_lsn for t, w in wanted.items() if w.after_lsn is not None}
        deadline = time.monotonic() + ARRIVAL_DEADLINE_S
        near = cut.read_ms or None
        while True:
            ends = self._ends(partitions, starts, near)
            records = self._records(starts, ends)
            events = changes.events(records, after_lsn, cut.commit_lsn, others)
            # One task per core: every partition of Kafka would be a task in each of the merges.
            cores = self._spark.sparkContext.defaultParallelism
            events = events.coalesce(cores).persist(StorageLevel.MEMORY_AND_DISK)
            parts = put_together(changes.summary(events).collect())
            short = [
                (topic, want.events - (part.counted(after_lsn) if part else 0))
                for topic, want in wanted.items()
                for part in (parts.get(topic),)
                if (part.counted(after_lsn) if part else 0) < want.events
            ]
            if not short:
                return Taken(events, parts, _next(ends, parts))
            events.unpersist()
            if time.monotonic() > deadline:
                topic, count = short[0]
                raise OperatorNeeded(
                    f"{count} events of {wanted[topic].table} are not there, whose transactions "
                    "are",
                    operation="read events",
                    subject=topic,
                    lsn=cut.commit_lsn,
                    hint="topic retention was too short or a topic was made anew: "
                    "rebuild the tables",
                )
            near = None
            time.sleep(_ARRIVAL_INTERVAL_S)

    def _starts(
        self,
        partitions: Mapping[str, tuple[int, ...]],
        wanted: Mapping[str, Wanted],
        known: Offsets,
        check: Callable[[str, int], None],
    ) -> Offsets:
        """Where reading begins: after the last epoch, of a table that has nothing at the first."""
        first = self._topics.first(partitions)
        starts: Offsets = {}
        for topic, numbers in partitions.items():
            anew = wanted[topic].after_lsn is not None or topic not in known
            before = {} if anew else known[topic]
            starts[topic] = {n: before.get(n, first[topic][n]) for n in numbers}
            if anew:
                check(wanted[topic].table, max(first[topic].values(), default=0))
        return starts

    def _ends(
        self, partitions: Mapping[str, tuple[int, ...]], starts: Offsets, near: int | None
    ) -> Offsets:
        """Where reading ends: at what was written after the last END, `near` its time stamp."""
        ends = self._topics.stable(partitions)
        if near is not None:
            for topic, later in self._topics.later_than(partitions, near).items():
                for number, offset in later.items():
                    if offset >= 0:
                        ends[topic][number] = min(ends[topic][number], offset)
        return {
            topic: {n: max(end, starts[topic][n]) for n, end in numbers.items()}
            for topic, numbers in ends.items()
        }

    def _records(self, starts: Offsets, ends: Offsets) -> DataFrame:
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


def _next(ends: Offsets, parts: Mapping[str, Part]) -> Offsets:
    return {
        topic: {
            number: (parts[topic].next_offsets.get(number, end) if topic in parts else end)
            for number, end in numbers.items()
        }
        for topic, numbers in ends.items()
    }


def _json(offsets: Offsets) -> str:
    return json.dumps({t: {str(n): at for n, at in parts.items()} for t, parts in offsets.items()})
