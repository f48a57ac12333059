"""The versions of one row, with their transactions, from Kafka's events."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from itertools import pairwise
from typing import Any

import structlog
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import types as T

from schemas.errors import SettingsError
from schemas.lsn import format_lsn
from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from spark_consumers.epochs.event_reader import EventReader
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.epochs.small_topics import expect_noted_ids
from spark_consumers.events import changes
from spark_consumers.events.shape import CommitPosition, Shape
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, changelog
from spark_consumers.iceberg.layout import METADATA_NAMES, layout_of
from spark_consumers.iceberg.table_note import NEVER, note_of
from spark_consumers.iceberg.tables import Tables
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.shapes import ShapeLog
from spark_consumers.sql import quoted

log = structlog.get_logger()
_OPERATIONS = {"c": "insert", "r": "snapshot", "u": "update", "d": "delete", "t": "truncate"}
_ENDS = ("delete", "truncate")


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a row, with the transaction that made it.

    `row`: its values; of a delete, what the event has of the old row. `changed`: the columns whose
    values differ from the version before. `unchanged`: those whose out-of-line values the event
    leaves out, because the UPDATE left them alone.
    """

    commit_lsn: int
    seq: int
    xid: int | None
    time: datetime
    operation: str
    row: dict[str, Any]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the version as JSON."""
        return {
            "commit_lsn": format_lsn(self.commit_lsn),
            "seq": self.seq,
            "xid": self.xid,
            "commit_time": self.time.isoformat(),
            "operation": self.operation,
            "row": {name: _json(value) for name, value in self.row.items()},
            "changed": list(self.changed),
            "unchanged": list(self.unchanged),
        }

    def line(self) -> str:
        """Return the version as a line of text, with the values that changed."""
        document = self.document()
        values = (f" {name}={document['row'][name]}" for name in self.changed)
        head = (
            document["commit_lsn"],
            document["commit_time"],
            "xid",
            document["xid"],
            document["operation"],
        )
        return " ".join(map(str, head)) + "".join(values)


def blame(spark: SparkSession, settings: Settings, name: str, key: Sequence[str]) -> list[Version]:
    """Return the versions of a row of the table `name` (`schema.table`), the oldest first.

    `key`: the key's values as text. The last version is of the last epoch at most. The table's
    whole topic is read. Raise SettingsError for a table or key that is not there.
    """
    try:
        return _Blame(spark, settings).versions(name, key)
    except FOREIGN as error:
        raise translated(error, "read the versions of a row") from error


class _Blame:
    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        self._kafka = require(settings.kafka, "kafka")
        self._settings = require(settings.tables, "tables")
        self._naming = Naming(self._kafka.topic_prefix, settings.shaping)
        self._topics = TopicOffsets(self._kafka)
        self._tables = Tables(self._kafka, self._settings)
        self._ledger = Ledger(self._tables.namespace, self._settings)
        self._reader = EventReader(spark, self._kafka, self._topics, settings.registry)

    def versions(self, name: str, key: Sequence[str]) -> list[Version]:
        """Return all versions of the row with this key, by the events that Kafka still has."""
        record = self._last_epoch()
        shapes = self._shapes(name, record.commit_lsn)
        self._require_key(shapes[-1], key)
        self._require_followed(name, record)
        events = self._events(name, shapes[0].since, record.commit_lsn)
        own = [
            of_shape.where(f"op = 't' OR {changes.has_key(shape, key)}")
            for of_shape, shape in changes.by_shape(events, shapes)
            if len(shape.key) == len(key)
        ]
        events = reduce(DataFrame.union, own).persist()
        try:
            found = _versions(self._rows(events, shapes), _xids(events))
        finally:
            events.unpersist()
        if all(version.operation == "truncate" for version in found):
            hint = f"key: {', '.join(shapes[-1].key)}; its values are compared as SQL compares them"
            raise _error(name, "Kafka has no event of a row with this key", hint)
        if found[0].operation in ("update", "delete"):
            log.warning("earlier versions are not shown: Kafka lacks their events", table=name)
        return found

    def _last_epoch(self) -> EpochRecord:
        record = self._ledger.last(self._spark)
        if record is None:
            raise _error(self._tables.namespace, "there is no epoch yet", "start `slottables run`")
        return record

    def _require_followed(self, name: str, record: EpochRecord) -> None:
        """Raise SettingsError where the last epoch is not the table's; warn of events left out."""
        if name not in record.tables:
            hint = f"tables: {', '.join(sorted(record.tables))}"
            raise _error(name, "the last epoch does not have the table", hint)
        table = catalog.load(self._spark, self._tables.identifier(*schema_and_table(name)))
        incomplete = note_of(catalog.properties(table)).incomplete
        if incomplete is not None:
            log.warning("versions may be missing", table=name, why=incomplete.text())

    def _shapes(self, name: str, upto_lsn: int) -> list[Shape]:
        """Return the table's shapes, without those of former tables of its name. Raise if none."""
        log_of_shapes = ShapeLog(self._kafka, self._topics, self._naming, name.__eq__)
        try:
            expect_noted_ids(log_of_shapes.tail, self._ledger, self._spark)
            log_of_shapes.read()
        finally:
            log_of_shapes.close()
        shapes = list(log_of_shapes.upto(name, upto_lsn))
        if not shapes or shapes[-1].keyless:
            what = "has no key" if shapes else f"is not in {log_of_shapes.topic}"
            raise _error(name, f"the table {what}", "name a table with a key as schema.table")
        first = 0
        for place, (before, after) in enumerate(pairwise(shapes), 1):
            if before.another_table(after):
                first = place
        return shapes[first:]

    def _require_key(self, shape: Shape, key: Sequence[str]) -> None:
        """Raise SettingsError unless `key` has one value that fits for each column of the key."""
        columns = [shape.columns[place] for place in shape.key_positions]
        wanted = ", ".join(f"{c.name} ({c.data_type.simpleString()})" for c in columns)
        fits = len(key) == len(columns)
        if fits:
            fit = (changes.given(c, text) for c, text in zip(columns, key, strict=True))
            fits = None not in tuple(self._spark.range(1).selectExpr(*fit).first() or (None,))
        if not fits:
            raise _error(
                shape.name, f"the key is {wanted}", "give --key once for each, in this order"
            )

    def _events(self, name: str, since: CommitPosition, upto_lsn: int) -> DataFrame:
        """Return the table's events up to an LSN."""
        topic = self._naming.table(*schema_and_table(name)).name
        partitions = self._topics.all_partitions((topic,))
        starts, ends = self._topics.first(partitions), self._topics.stable(partitions)
        if any(starts[topic].values()):
            log.warning("earlier versions are not shown: Kafka lacks their events", table=name)
        records = self._reader.records(starts, ends)
        events = changes.own_events(changes.events(records, NEVER, upto_lsn, whole=True), topic)
        events = events.where(changes.IS_EVENT)
        return changes.after(events, since._replace(seq=since.seq - 1))

    def _rows(self, events: DataFrame, shapes: Sequence[Shape]) -> list[Row]:
        """Return the events as rows of a changelog."""
        layout = layout_of(self._settings, shapes[-1])
        rows = changelog.of_rows(layout, changes.distinct_events(changes.parsed(events, shapes)))
        cuts = events.where("op = 't'").select("commit_lsn", "seq", "ts_us").distinct().collect()
        if cuts:
            rows = changelog.with_truncates(layout, rows, map(tuple, cuts))
        return rows.selectExpr(*map(_readable, rows.schema.fields)).collect()


def _readable(field: T.StructField) -> str:
    """Return SQL that reads a column; dates and times as text, as Python's end with year 9999."""
    name = quoted(field.name)
    if field.name == "_commit_time":
        return f"unix_micros({name}) AS {name}"
    if isinstance(field.dataType, T.TimestampType):
        return f"concat(CAST({name} AS string), 'Z') AS {name}"
    if isinstance(field.dataType, (T.DateType, T.TimestampNTZType)):
        return f"CAST({name} AS string) AS {name}"
    return name


def _xids(events: DataFrame) -> dict[int, int]:
    """Return the transaction id of each commit LSN."""
    xid = "CAST(get_json_object(value, '$.source.txId') AS bigint) AS xid"
    return dict(map(tuple, events.selectExpr("commit_lsn", xid).distinct().collect()))


def _versions(rows: Sequence[Row], xids: dict[int, int]) -> list[Version]:
    """Put events in order, and fill what an UPDATE left unchanged from the version before."""
    found: list[Version] = []
    for given in sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"])):
        before = found[-1].row if found and found[-1].operation not in _ENDS else {}
        operation = _OPERATIONS[given["_op"]]
        unchanged = tuple(given["_unavailable"])
        row = {n: v for n, v in given.asDict().items() if n not in METADATA_NAMES}
        row |= {name: before.get(name) for name in unchanged}
        changed = [
            name
            for name, value in row.items()
            if name not in unchanged and (name not in before or value != before[name])
        ]
        found.append(
            Version(
                given["_commit_lsn"],
                given["_seq"],
                xids.get(given["_commit_lsn"]),
                datetime.fromtimestamp(given["_commit_time"] / 1_000_000, UTC),
                operation,
                {} if operation == "truncate" else row,
                () if operation in _ENDS else tuple(changed),
                unchanged,
            )
        )
    return found


def _json(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)


def _error(subject: str, message: str, hint: str) -> SettingsError:
    return SettingsError(
        message, operation="read the versions of a row", subject=subject, hint=hint
    )
