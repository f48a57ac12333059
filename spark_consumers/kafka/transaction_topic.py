"""Reads `<prefix>.transaction` by Spark: as the stream that drives epochs, or a range of it.

    BEGIN, END   JSON; an END has commit_lsn, ts_ms, data_collections, an array of
                 {data_collection, event_count}

The topic has one partition, in commit order, and shows whole Kafka transactions: any range of its
offsets is a set of whole source transactions.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog
from pyspark.sql import DataFrame, Row, SparkSession

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError
from schemas.events import transaction_topic
from schemas.settings import KafkaSettings
from schemas.tracing import TRACEPARENT
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.few_records import Record, RecordReader
from spark_consumers.kafka.reader import TopicOffsets, reader_options
from spark_consumers.kafka.transactions import EndEvent

_END = (
    "status string, commit_lsn bigint, ts_ms bigint,"
    " data_collections array<struct<data_collection: string, event_count: bigint>>"
)
_TRACE = f"CAST(filter(headers, h -> h.key = '{TRACEPARENT}')[0].value AS string)"
OPERATION = "read transactions"
_BEFORE_ALL = -1
_AFTER_ALL = 2**63 - 1
_FIRST_RECORDS = 1_000
log = structlog.get_logger()


class TransactionTopic:
    """The topic of a prefix, and which of its transactions' events are the tables'."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: TopicOffsets,
        follows: Callable[[str], bool],
        *,
        traced: bool = False,
        few: RecordReader | None = None,
    ) -> None:
        """Read also the headers `traceparent` where it is `traced`.

        `few`: reads few records into this process.
        """
        self.name = transaction_topic(kafka.topic_prefix)
        self._kafka = kafka
        self._topics = topics
        self._traced = traced
        self._follows = follows
        self._names: dict[str, bool] = {}
        self._warned = False
        self._few = few

    def exists(self) -> bool:
        """Tell whether the bridge has made the topic. Raise SetupError where its order is lost."""
        self._topics.refresh()
        partitions = self._topics.partitions(self.name)
        if partitions not in ((), (0,)):
            raise self._order_lost(len(partitions))
        return bool(partitions)

    def first(self) -> int:
        """Return the offset of the first record that Kafka still has."""
        return self._topics.first({self.name: (0,)})[self.name][0]

    def oldest_lsn(self, spark: SparkSession) -> int:
        """Return the commit LSN of the first transaction that Kafka has; 2^63 - 1 without any."""
        if not self._topics.partitions(self.name):
            return _AFTER_ALL
        first = self.first()
        end = min(first + _FIRST_RECORDS, self.stable())
        found = self.ends(self.between(spark, first, end), _BEFORE_ALL) if first < end else iter(())
        return next((event.commit_lsn for event in found), _AFTER_ALL)

    def stable(self) -> int:
        """Return the offset up to which it can be read now."""
        return self._topics.stable({self.name: (0,)})[self.name][0]

    def require(self, offset: int | None) -> int:
        """Return the offset where reading begins: `offset`, or the first record's for None.

        Raise OperatorNeeded where Kafka does not have that record any more, or never had it.
        """
        first = self.first()
        if offset is None:
            return first
        if not first <= offset <= self.stable():
            raise OperatorNeeded(
                "Kafka has deleted events that the tables have not read",
                operation="read Kafka",
                subject=self.name,
                hint="topic retention was too short, or a topic was recreated: drop the table "
                "`_epochs` and start; the tables go on with what their own topics have, uncounted. "
                "Then audit them. Those that differ get rows by `slotbridge snapshot start`, or a "
                "rebuild if their topics still have their first events (docs/guides/tables.md)",
            )
        return offset

    def require_same(self, known_id: str, *, before: bool) -> str:
        """Return the topic's id. Raise OperatorNeeded for another one than `known_id`.

        before: the tables have read this topic before, so that an empty `known_id` is unknown.

        Offsets of a topic that was made again under its name mean other records: transactions
        would be left out, and nothing else counts them. Where an id is unknown, nothing is judged,
        and the log says so once. Raise Retryable where Kafka does not show the topic.
        """
        self._topics.refresh()
        if not self._topics.partitions(self.name):
            raise Retryable(
                "Kafka does not show the topic",
                operation=OPERATION,
                subject=self.name,
                hint="check that nobody has deleted it and that this principal may describe it",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            )
        found = self._topics.id(self.name)
        if before and not (known_id and found):
            self._not_judged("Kafka tells no id" if known_id else "its id was not noted then")
        elif known_id and found != known_id:
            raise OperatorNeeded(
                "the topic was deleted and made again: it may lack transactions that the tables "
                "have not read",
                operation=OPERATION,
                subject=self.name,
                hint="restore the topic, or fill new tables under another tables.namespace",
            )
        return found or known_id

    def _not_judged(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "not judged: whether the topic was deleted and created again since the last epoch",
                topic=self.name,
                why=why,
            )

    def options(self) -> dict[str, str]:
        """Return Spark's options of a source that reads this topic."""
        own = {
            "subscribe": self.name,
            "kafka.group.id": f"slottables-{self._kafka.topic_prefix}",
            "failOnDataLoss": "true",
            **({"includeHeaders": "true"} if self._traced else {}),
        }
        return reader_options(self._kafka) | own

    def between(self, spark: SparkSession, start: int, end: int) -> DataFrame:
        """Read the records of a range of offsets."""
        reader = spark.read.format("kafka").options(**self.options())
        for name, offset in (("startingOffsets", start), ("endingOffsets", end)):
            reader = reader.option(name, self.at(offset))
        return reader.load()

    def at(self, offset: int) -> str:
        """Format an offset as Spark's Kafka source writes it."""
        return json.dumps({self.name: {"0": offset}})

    def taken(
        self, records: DataFrame, start: int | None, end: int, after_lsn: int
    ) -> Iterator[EndEvent]:
        """Yield the ENDs after `after_lsn` between offsets, in order: those among `records`.

        This process reads them by itself where they are few, and Spark where they are not, or
        where one is not what the bridge writes.
        """
        try:
            rows = self._few_ends(start, end, after_lsn)
        except Unsuited:
            yield from self.ends(records, after_lsn)
            return
        for row in sorted(rows, key=lambda row: row.offset):
            found = self._end(row)
            if found is not None:
                yield found

    def _few_ends(self, start: int | None, end: int, after_lsn: int) -> "list[EndRow]":
        """Return the ENDs between offsets; raise Unsuited where Spark is to read them."""
        if self._few is None or start is None or self._traced:
            raise Unsuited("the first records, or their headers")
        found = self._few.read({self.name: {0: start}}, {self.name: {0: max(start, end)}})
        rows = map(end_of, found[self.name])
        return [row for row in rows if row is not None and row.commit_lsn > after_lsn]

    def ends(self, records: DataFrame, after_lsn: int) -> Iterator[EndEvent]:
        """Yield the ENDs after `after_lsn` among records of the topic, in order: one Spark job.

        A record that is neither BEGIN nor END is not the bridge's: the log names it. Where it was
        an END, its transaction's events are more than the ENDs count (epochs.event_count).
        """
        for row in sorted(ends(records, after_lsn).collect(), key=lambda row: row.offset):
            end = self._end(row)
            if end is not None:
                yield end

    def _end(self, row: "Row | EndRow") -> EndEvent | None:
        """Return the END in a row of the topic; None, with a warning, for another record.

        Raise SetupError where the topic has several partitions.
        """
        if row.partition != 0:
            raise self._order_lost(row.partition + 1)
        collections = [tuple(found) for found in row.data_collections or ()]
        needed = (row.commit_lsn, row.ts_ms, *(value for c in collections for value in c))
        if row.status != "END" or None in needed or any(count < 0 for _, count in collections):
            log.warning(
                "passed a record that is not the END of a transaction: only the bridge may write "
                "to its topics",
                topic=self.name,
                offset=row.offset,
            )
            return None
        counts = Counter({name: n for name, n in collections if self._followed(name)})
        return EndEvent(row.offset, row.commit_lsn, row.read_ms, row.ts_ms, counts, row.trace or "")

    def _followed(self, name: str) -> bool:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = self._follows(name)
        return known

    def _order_lost(self, partitions: int) -> SetupError:
        return SetupError(
            f"the topic has {partitions} partitions, so its order is lost",
            operation=OPERATION,
            subject=self.name,
            hint="delete the topic and let the bridge create it",
        )


class EndRow(NamedTuple):
    """A row of `ends`."""

    partition: int
    offset: int
    read_ms: int
    status: str
    commit_lsn: int
    ts_ms: int
    data_collections: list[tuple[str, int]]
    trace: str = ""


def end_of(record: Record) -> EndRow | None:
    """Return an END, None for a BEGIN; raise Unsuited for any other record. Pure."""
    try:
        found = json.loads(record.value)
        if found["status"] == "BEGIN":
            return None
        numbers = found["commit_lsn"], found["ts_ms"]
        counts = [(c["data_collection"], c["event_count"]) for c in found["data_collections"]]
        plain = all(type(n) is int for n in (*numbers, *(count for _, count in counts)))
        plain = plain and found["status"] == "END" and all(type(n) is str for n, _ in counts)
    except (ValueError, LookupError, TypeError) as error:
        raise Unsuited("a record that is not an END") from error
    if not plain:
        raise Unsuited("a record that is not an END")
    return EndRow(record.partition, record.offset, record.ts_ms, "END", *numbers, counts)


def ends(records: DataFrame, after_lsn: int) -> DataFrame:
    """Return one row for each END after `after_lsn`, and for each record of another kind. Pure.

    partition, offset, read_ms     of the record in Kafka
    status, commit_lsn, ts_ms      NULL where the record is not a transaction's
    data_collections               array of (data_collection, event_count)
    trace                          its header `traceparent`; NULL without, or where none are read
    """
    trace = _TRACE if "headers" in records.columns else "CAST(NULL AS string)"
    return (
        # A record without value ends a transaction that hangs, and means nothing.
        records.where("value IS NOT NULL")
        .selectExpr(
            "partition",
            "offset",
            "unix_millis(timestamp) AS read_ms",
            f"from_json(CAST(value AS string), '{_END}') AS found",
            f"{trace} AS trace",
        )
        .select("partition", "offset", "read_ms", "found.*", "trace")
        .where("partition <> 0 OR NOT (status <=> 'BEGIN')")
        .where(f"commit_lsn IS NULL OR commit_lsn > {after_lsn} OR NOT (status <=> 'END')")
    )
