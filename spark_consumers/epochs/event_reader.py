"""Reads an epoch's events from Kafka into Spark, all of them and no others."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import SlotbridgeError
from schemas.events import PLACEHOLDER_VALUES_HEADER
from schemas.registry import RegistrySettings
from schemas.settings import KafkaSettings
from spark_consumers.epochs import missing_events
from spark_consumers.epochs.epoch_events import EpochEvents
from spark_consumers.epochs.few_events import Bounds
from spark_consumers.epochs.missing_events import Wanted
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events import changes
from spark_consumers.iceberg.table_note import LostBeginningError
from spark_consumers.kafka.few_records import RecordReader
from spark_consumers.kafka.formats import as_plain_json
from spark_consumers.kafka.reader import Offsets, TopicOffsets, reader_options
from spark_consumers.kafka.transactions import Cut
from spark_consumers.liveness import tick, under_way

log = structlog.get_logger()
ARRIVAL_DEADLINE_S = 60.0
VISIBLE_DEADLINE_S = 5.0
_STANDS_IN_AFTER_S = 1.0
"""How long an event that is stamped later than its END is waited for, before an unreadable record
stands in for it."""
_PLACEHOLDER_VALUES = (
    f"CAST(get(filter(headers, h -> h.key = '{PLACEHOLDER_VALUES_HEADER}'), 0).value AS string)"
)
_ARRIVAL_INTERVAL_S = 0.05
_ASKING_INTERVAL_S = 0.2
SMALL_RECORDS_MAX = 5_000
"""An epoch of up to this many records is read by one task for each table."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An epoch's events, what each topic brings, and where the next ones are."""

    events: EpochEvents
    summaries: dict[str, TopicSummary]
    offsets: Offsets


def require_first(table: str, offset: int) -> None:
    """Raise LostBeginningError where Kafka no longer has a topic's first events."""
    if offset > 0:
        raise LostBeginningError(
            "Kafka no longer has the first events of the table",
            operation="make a table from Kafka",
            subject=table,
            hint=f"`slotbridge snapshot start {table}` sends all rows; then `slottables rebuild "
            f"--table {table}` makes the table of what Kafka has, and marks it as incomplete",
        )


def await_shown(shown: Callable[[], bool]) -> None:
    """Have `shown` ask a broker again until it is true, or ARRIVAL_DEADLINE_S are over."""
    deadline = time.monotonic() + ARRIVAL_DEADLINE_S
    while not shown() and time.monotonic() <= deadline:
        tick()
        time.sleep(_ASKING_INTERVAL_S)


def raised(_table: str, error: SlotbridgeError) -> None:
    """Raise the error of a table."""
    raise error


class EventReader:
    """Reads whole transactions of the tables' topics."""

    def __init__(
        self,
        spark: SparkSession,
        kafka: KafkaSettings,
        topics: TopicOffsets,
        registry: RegistrySettings | None,
        *,
        whole: bool = False,
        few: RecordReader | None = None,
    ) -> None:
        """Read events from Kafka, in its formats; with `whole`, the events keep their text.

        `few`: reads small epochs into this process.
        """
        self._registry = registry
        self._whole = whole
        self._spark = spark
        self._kafka = kafka
        self._topics = topics
        self._few = few if {kafka.key_format, kafka.value_format} == {"json"} else None

    def read(
        self,
        cut: Cut,
        after_lsn: int,
        wanted: Mapping[str, Wanted],
        known: Offsets,
        check: Callable[[str, int], None],
        refuse: Callable[[str, SlotbridgeError], None] = raised,
    ) -> Taken:
        """Return the events of the topics in `wanted` after `after_lsn`, up to `cut`.

        Kafka shows a transaction's partitions one after the other, so wait until all events that an
        END counts can be read, also those in partitions that a broker shows only meanwhile.
        `check(table, first offset)` is called for each topic that must have its first events. A
        table whose events are missing for ARRIVAL_DEADLINE_S although all transactions in its topic
        have ended, or which `check` refuses, is given to `refuse(table, error)`; if that returns,
        the others are taken. Raise Retryable where a transaction that has not ended may bring the
        events. A read may itself take longer.
        """
        starts = self._starts(wanted, known, check, refuse)
        others = {t: w.after_lsn for t, w in wanted.items() if w.after_lsn is not None}
        counted = {t: w.counted_after for t, w in wanted.items() if w.counted_after is not None}
        short_since: float | None = None
        # Where nobody has counted the events, none that is stamped later would be found missing.
        near = None if any(want.unread for want in wanted.values()) else cut.read_ms or None
        while True:
            wanted = {topic: want for topic, want in wanted.items() if topic in starts}
            under_way.begin(sum(want.events for want in wanted.values()))
            ends, settled = self._ends(starts, near, cut.read_ms)
            make = partial(self._frame, starts, ends, cut, after_lsn, others, counted)
            had = {
                t: Bounds(others.get(t, after_lsn), cut.commit_lsn, counted.get(t, after_lsn))
                for t in starts
            }
            events = EpochEvents(make).read(self._few, starts, ends, had)
            with ExitStack() as freed:  # not kept by Spark whatever happens here
                freed.callback(events.unpersist)
                summaries = events.summaries()
                now = time.monotonic()
                short_s = -1.0 if short_since is None else now - short_since
                late = short_s >= min(_STANDS_IN_AFTER_S, ARRIVAL_DEADLINE_S)
                short = {t: 0 for t, want in wanted.items() if want.unread and t not in settled}
                short |= missing_events.short(wanted, summaries, after_lsn, settled if late else ())
                if short and short_s > ARRIVAL_DEADLINE_S:
                    missing_events.require_settled(short, wanted, cut, settled)
                    missing_events.refuse(short, wanted, cut, refuse)
                    summaries = {t: s for t, s in summaries.items() if t not in short}
                    ends = {t: numbers for t, numbers in ends.items() if t not in short}
                    short = {}
                if not short:
                    freed.pop_all()
                    return Taken(events, summaries, missing_events.next_offsets(ends, summaries))
            short_since = now if short_since is None else short_since
            near = None
            time.sleep(_ARRIVAL_INTERVAL_S)
            grown = self._grown({topic: starts[topic] for topic in short})
            starts = {topic: at for topic, at in starts.items() if topic not in grown}
            starts |= self._starts({t: wanted[t] for t in grown}, known, check, refuse)

    def _frame(
        self,
        starts: Offsets,
        ends: Offsets,
        cut: Cut,
        after_lsn: int,
        others: Mapping[str, int],
        counted: Mapping[str, int],
    ) -> DataFrame:
        """Return the events between offsets, to be read by Spark."""
        records, upto_lsn = self.records(starts, ends), cut.commit_lsn
        found = changes.events(
            records, after_lsn, upto_lsn, others, counted=counted, whole=self._whole
        )
        return found.coalesce(self._tasks(starts, ends))

    def _grown(self, starts: Offsets) -> set[str]:
        """Ask anew for the partitions of topics; return those that have more than in `starts`.

        A broker may have answered before it knew of a topic, or of a partition, that was just made.
        """
        self._topics.refresh(*starts)
        found = self._topics.all_partitions(starts)
        return {topic for topic, numbers in found.items() if set(numbers) - set(starts[topic])}

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
        wanted: Mapping[str, Wanted],
        known: Offsets,
        check: Callable[[str, int], None],
        refuse: Callable[[str, SlotbridgeError], None],
    ) -> Offsets:
        """Return where reading begins: after the last epoch; for a new table, at the beginning.

        Reading begins later where retention has removed the last event with the marker behind it.
        The counts show a missing event, but not one of earlier epochs: for these, `known` names
        the partitions that they have read. Topics of refused tables are left out.
        """
        befores = {
            topic: known.get(topic, {}) if want.after_lsn is None or want.resumes else {}
            for topic, want in wanted.items()
        }
        whole = [topic for topic, before in befores.items() if not before]
        # A table that was left out may have another topic by now, which may be shorter.
        read = {
            t: known[t] if wanted[t].needs_first else dict.fromkeys(known[t], 0)
            for t in whole
            if t in known
        }
        lacking = self._await_shown(read)
        partitions = self._topics.all_partitions(wanted)
        first = self._topics.first({t: numbers for t, numbers in partitions.items() if numbers})
        refused = set()
        for topic in whole:
            if wanted[topic].needs_first:
                gone = max([*first.get(topic, {}).values(), lacking.get(topic, 0)], default=0)
                try:
                    check(wanted[topic].table, gone)
                except LostBeginningError as error:
                    refuse(wanted[topic].table, error)
                    refused.add(topic)
        return {
            topic: {n: max(befores[topic].get(n, 0), first[topic][n]) for n in numbers}
            for topic, numbers in partitions.items()
            if topic not in refused
        }

    def _await_shown(self, read: Offsets) -> dict[str, int]:
        """Ask anew until brokers show all that was read, or ARRIVAL_DEADLINE_S are over.

        Return the topics that lack some of it, each with the highest offset that was read in a
        partition that is missing, or is shorter now: the topic was made again.
        """
        lacking: dict[str, int] = {}

        def shown() -> bool:
            nonlocal lacking
            there = self._topics.all_partitions(read)
            ends = self._topics.stable({t: numbers for t, numbers in there.items() if numbers})
            lacking = missing_events.lacking(read, ends)
            if lacking:
                self._topics.refresh(*lacking)
            return not lacking

        await_shown(shown)
        return lacking

    def _ends(self, starts: Offsets, near: int | None, read_ms: int) -> tuple[Offsets, set[str]]:
        """Return the offsets where reading ends, and the topics whose END's events can be read.

        The first is what was written after the last END. `near` is the END's time stamp: wait until
        all records before it are visible, so that they are read in one pass. The second answers for
        records up to the time of the last END, `read_ms`.
        """
        partitions = {topic: tuple(numbers) for topic, numbers in starts.items()}
        until = self._topics.written_until(partitions, read_ms)
        ends = self._topics.stable(partitions)
        if near is not None:
            deadline = time.monotonic() + VISIBLE_DEADLINE_S
            while missing_events.some_before(ends, until) and time.monotonic() < deadline:
                time.sleep(_ARRIVAL_INTERVAL_S)
                ends = self._topics.stable(partitions)
        settled = {
            t for t in ends if read_ms > 0 and not missing_events.some_before({t: ends[t]}, until)
        }
        if near is not None:
            ends = {t: {n: min(at, until[t][n]) for n, at in p.items()} for t, p in ends.items()}
        return {
            topic: {n: max(end, starts[topic][n]) for n, end in numbers.items()}
            for topic, numbers in ends.items()
        }, settled

    def records(self, starts: Offsets, ends: Offsets) -> DataFrame:
        """Return the committed records of topics between offsets, in plain JSON.

        `placeholder_values` is the text of that header, NULL in nearly all records.
        """
        topics = {topic: sorted(numbers) for topic, numbers in starts.items() if numbers}
        found = (
            self._spark.read.format("kafka")
            .options(**reader_options(self._kafka))
            .option("kafka.group.id", f"slottables-{self._kafka.topic_prefix}")
            .option("assign", json.dumps(topics))
            .option("startingOffsets", _json(starts))
            .option("endingOffsets", _json(ends))
            .option("failOnDataLoss", "true")
            .option("includeHeaders", "true")
            .load()
            .withColumn("placeholder_values", F.expr(_PLACEHOLDER_VALUES))
            .drop("headers")
        )
        return as_plain_json(found, self._kafka, self._registry)


def _json(offsets: Offsets) -> str:
    return json.dumps({t: {str(n): at for n, at in parts.items()} for t, parts in offsets.items()})
