"""Applies one micro-batch to all its tables, so that applying it again changes nothing."""

import contextlib
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog
import tenacity
from pyspark import InheritableThread, StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from schemas.errors import BadInput, ExitCode, OperatorNeeded
from schemas.events import dead_topic, schema_topic
from schemas.lsn import format_lsn
from schemas.naming import Naming
from schemas.settings import KafkaSettings, TablesSettings
from spark_consumers import changes, tables
from spark_consumers.changes import Position
from spark_consumers.columns import Shape
from spark_consumers.source import read_shapes

log = structlog.get_logger()
_TABLES_AT_ONCE = 4
_SHAPE_DEADLINE_S = 15.0
_SHAPE_INTERVAL_S = 0.3


@dataclass(slots=True)
class TableReport:
    """What a batch brought to one table: row events, all events, and duplicates among them."""

    rows: int = 0
    events: int = 0
    duplicates: int = 0
    commit_lsn_max: int = 0


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a batch brought, by source table, and the latest commit time in it (ms since 1970)."""

    batch: int
    seconds: float
    ts_ms_max: int
    tables: dict[str, TableReport]
    dead_letters: int = 0
    """Events that Kafka has refused, and that the tables therefore lack."""

    def document(self) -> dict[str, object]:
        """The report as JSON; `lag_ms` is from the latest commit to now."""
        reports = self.tables.values()
        return {
            "batch": self.batch,
            "rows": sum(report.rows for report in reports),
            "events": sum(report.events for report in reports),
            "duplicates": sum(report.duplicates for report in reports),
            "commit_lsn_max": format_lsn(max(r.commit_lsn_max for r in reports)),
            "commit_ts_ms_max": self.ts_ms_max,
            "dead_letters": self.dead_letters,
            "lag_ms": max(0, int(time.time() * 1000) - self.ts_ms_max),
            "seconds": round(self.seconds, 3),
            "tables": {
                name: {
                    "rows": report.rows,
                    "events": report.events,
                    "duplicates": report.duplicates,
                    "commit_lsn_max": format_lsn(report.commit_lsn_max),
                }
                for name, report in sorted(self.tables.items())
            },
        }


@dataclass(slots=True)
class _TopicBatch:
    """A topic's part of a batch: `summary` of its partitions, put together."""

    topic: str
    report: TableReport = field(default_factory=TableReport)
    first: dict[int, Position] = field(default_factory=dict)
    last: dict[int, Position] = field(default_factory=dict)
    truncate: Position | None = None
    lsn_min: int = 2**63 - 1
    ts_ms_max: int = 0
    unavailable: bool = False
    keyless_rows: int = 0
    identified_rows: int = 0
    fields: set[str] = field(default_factory=set)
    tables: set[tuple[str, str]] = field(default_factory=set)

    def add(self, row: Row) -> None:
        """Take in the summary of one partition; raises BadInput for a record that is no event."""
        if row.refused_offset is not None:
            raise BadInput(
                "the record is no event of a table",
                operation="read events",
                subject=f"{row.topic}, partition {row.partition}, offset {row.refused_offset}",
                hint="only the bridge may write to its topics",
                exit_code=ExitCode.RECORD_REFUSED,
            )
        self.report.rows += row.rows
        self.report.events += row.events
        self.report.commit_lsn_max = max(self.report.commit_lsn_max, row.lsn_max)
        if row["first"] is not None:
            self.first[row.partition] = Position(*row["first"])
            self.last[row.partition] = Position(*row["last"])
        if row.truncate is not None:
            truncate = Position(*row.truncate)
            self.truncate = max(self.truncate or truncate, truncate)
        self.lsn_min = min(self.lsn_min, row.lsn_min)
        self.ts_ms_max = max(self.ts_ms_max, row.ts_ms_max or 0)
        self.unavailable |= row.unavailable
        self.keyless_rows += row.keyless_rows
        self.identified_rows += row.identified_rows
        self.fields |= set(row.fields or ())
        self.tables |= {(name.schema, name.table) for name in row.tables}

    def comes_again(self, applied: Mapping[int, Position]) -> bool:
        """Whether some events are at or before what the table has of their partition."""
        return any(
            position <= applied.get(partition, Position(-1, -1))
            for partition, position in self.first.items()
        )


class Applier:
    """Applies batches one after the other; keeps the known shapes and the open tables."""

    def __init__(self, kafka: KafkaSettings, naming: Naming, settings: TablesSettings) -> None:
        self._kafka = kafka
        self._naming = naming
        self._settings = settings
        self._dead_topic = dead_topic(kafka.topic_prefix)
        self._dead_letters = 0
        self._schema_topic = schema_topic(kafka.topic_prefix)
        self._shapes: dict[str, Shape] = {}
        self._tables = tables.Tables(kafka, settings)

    def apply(self, records: DataFrame, batch: int) -> BatchReport | None:
        """Bring the records of a batch into their tables; None when they hold no event.

        Every table is written by one MERGE. Raises BadInput naming the record that is refused,
        SetupError for a change of shape that is not taken over, OperatorNeeded for a dead letter.
        """
        started = time.monotonic()
        # One task per core: every partition of Kafka would be a task in each of the merges.
        cores = records.sparkSession.sparkContext.defaultParallelism
        events = changes.events(records).coalesce(cores).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            parts = self._parts(events)
            if not parts:
                return None
            _in_threads(lambda part: self._apply_topic(events, part), parts)
        finally:
            events.unpersist()
        return BatchReport(
            batch,
            time.monotonic() - started,
            max(part.ts_ms_max for part in parts),
            {self._shapes[part.topic].name: part.report for part in parts},
            self._dead_letters,
        )

    def _parts(self, events: DataFrame) -> list[_TopicBatch]:
        """The batch by topic, each with a known shape that has all its fields."""
        parts: defaultdict[str, list[Row]] = defaultdict(list)
        for row in changes.summary(events).collect():
            parts[row.topic].append(row)
        new_shapes = parts.pop(self._schema_topic, None) is not None
        self._dead_letters = self._lacking(events) if parts.pop(self._dead_topic, None) else 0
        topics = []
        for topic, rows in parts.items():
            part = _TopicBatch(topic)
            for row in rows:
                part.add(row)
            topics.append(part)
        if new_shapes or not self._all_known(topics):
            self._learn(events.sparkSession, topics)
        for part in topics:
            _check(part, self._shapes[part.topic])
        return topics

    def _lacking(self, events: DataFrame) -> int:
        """How many events of followed tables Kafka has refused, as told by their dead letters."""
        letters = changes.dead_letters(events.where(F.col("topic") == self._dead_topic)).collect()
        followed = [row for row in letters if self._follows(row.table)]
        for row in followed:
            if self._settings.on_dead_letter == "stop":
                raise OperatorNeeded(
                    f"Kafka has refused {row['count']} events of {row.table} ({row.reason}), the "
                    f"first with seq {row['first'].seq}: its table would lack them",
                    operation="read dead letters",
                    subject=self._dead_topic,
                    lsn=row["first"].commit_lsn,
                    hint="tables.on_dead_letter: report goes on without them; repair the rows "
                    "from the dead letters, or rebuild the table",
                    exit_code=ExitCode.RECORD_REFUSED,
                )
            log.warning(
                "the table lacks events that Kafka has refused",
                table=row.table,
                count=row["count"],
                commit_lsn=format_lsn(row["first"].commit_lsn),
                seq=row["first"].seq,
                reason=row.reason,
            )
        return sum(row["count"] for row in followed)

    def _follows(self, name: str) -> bool:
        tables = self._settings.tables
        return name in tables if tables else self._naming.publishes(*name.split(".", 1))

    def _all_known(self, parts: Iterable[_TopicBatch]) -> bool:
        return all(
            part.topic in self._shapes and part.fields <= set(self._shapes[part.topic].names)
            for part in parts
        )

    def _learn(self, spark: SparkSession, parts: list[_TopicBatch]) -> None:
        """Read the shapes again until they cover `parts`.

        A transaction's markers reach its partitions one by one, so that the events can be there a
        moment before the shape is.
        """
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(_SHAPE_DEADLINE_S),
            wait=tenacity.wait_fixed(_SHAPE_INTERVAL_S),
            retry=tenacity.retry_if_result(lambda known: not known),
            retry_error_callback=lambda _: False,
        )

        def read() -> bool:
            self._shapes = read_shapes(spark, self._kafka, self._naming, self._settings.tables)
            return self._all_known(parts)

        if retrying(read):
            return
        unknown = next(part for part in parts if not self._all_known([part]))
        shape = self._shapes.get(unknown.topic)
        extra = ", ".join(sorted(unknown.fields - set(shape.names))) if shape else ""
        raise OperatorNeeded(
            f"{self._schema_topic} does not know "
            + (f"column {extra} of {shape.name}" if shape else "the table of this topic"),
            operation="read table shapes",
            subject=unknown.topic,
            lsn=unknown.report.commit_lsn_max,
            hint="topic_prefix must be the bridge's own, and no other bridge's may begin with it",
        )

    def _apply_topic(self, events: DataFrame, part: _TopicBatch) -> None:
        spark = events.sparkSession
        table = self._tables.open(spark, self._shapes[part.topic])
        # Spark compiles a plan anew for every other literal in it: filters only where they matter.
        own = events.where(F.col("topic") == part.topic)
        applied = table.applied
        if part.comes_again(applied.partitions):
            part.report.duplicates = changes.duplicates(own, applied.partitions).count()
            if part.report.duplicates == part.report.events:
                return
            own = changes.without_duplicates(own, applied.partitions)
        truncate = max(filter(None, (applied.truncate, part.truncate)), default=None)
        if truncate is not None and part.lsn_min <= truncate.commit_lsn:
            own = changes.after_truncate(own, truncate)
        tables.merge(
            table,
            changes.changes(own, table.shape, unavailable=part.unavailable),
            unavailable=part.unavailable,
            truncate=truncate if truncate != applied.truncate else None,
            lsn_min=part.lsn_min,
        )
        tables.record(spark, table, part.truncate, part.last)


def _in_threads(work: Callable[[_TopicBatch], None], parts: Iterable[_TopicBatch]) -> None:
    """Do `work` for each of `parts`, several at once; then raise the first failure, if any.

    These threads give their connections to Java back when they end, those of an executor do not.
    """
    waiting: queue.SimpleQueue[_TopicBatch] = queue.SimpleQueue()
    failures: list[Exception] = []

    def take() -> None:
        with contextlib.suppress(queue.Empty):
            while not failures:
                part = waiting.get_nowait()
                try:
                    work(part)
                except Exception as error:
                    failures.append(error)

    for part in parts:
        waiting.put(part)
    threads = [InheritableThread(target=take) for _ in range(min(_TABLES_AT_ONCE, waiting.qsize()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _check(part: _TopicBatch, shape: Shape) -> None:
    """Raise for events that don't belong to `shape`'s table or can't be applied to it."""
    wrong = part.tables - {(shape.schema, shape.table)}
    if wrong:
        raise OperatorNeeded(
            f"the topic has events of {'.'.join(map(str, min(wrong)))} besides {shape.name}",
            operation="read events",
            subject=part.topic,
            hint="rename one of the tables: their names are the same for Kafka",
        )
    if shape.keyless and part.identified_rows:
        raise BadInput(
            f"{shape.name} has no key, and the batch updates or deletes rows of it",
            operation="read events",
            subject=part.topic,
            lsn=part.report.commit_lsn_max,
            hint="give the table a primary key, with REPLICA IDENTITY DEFAULT",
            exit_code=ExitCode.RECORD_REFUSED,
        )
    if not shape.keyless and part.keyless_rows:
        raise BadInput(
            f"{part.keyless_rows} events of {shape.name} have no Kafka key",
            operation="read events",
            subject=part.topic,
            lsn=part.report.commit_lsn_max,
            hint="the table's key was added later: rebuild the table",
            exit_code=ExitCode.RECORD_REFUSED,
        )
