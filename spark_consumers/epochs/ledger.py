"""The record of epochs: an Iceberg table without rows whose snapshots tell what each epoch is.

    _epochs' snapshot summary   slotbridge.epoch, .commit_lsn, .commit_ts_ms, .tag
                                slotbridge.tables    {source: {table, snapshot, uuid}}
                                slotbridge.offsets   {topic: {partition: offset}}
                                slotbridge.transaction_offset, .transaction_topic_id
                                slotbridge.parked    {source: {table, snapshot, uuid, events,
                                                               counted_after, note}}

An epoch is done, and there for readers, when its snapshot is: it is published with all its tables
(publication), or after them where the catalog can't commit several tables in one transaction.
It is also all that a start needs; without it, the tables themselves tell what they have.
"""

import json
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import structlog
import tenacity
from pyspark.sql import SparkSession

from schemas.errors import OperatorNeeded, SettingsError, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.tables import TablesSettings
from spark_consumers.epochs import quiet
from spark_consumers.epochs.audit_log import AuditLog
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, retention
from spark_consumers.iceberg.layout import FEW_METADATA_FILES
from spark_consumers.iceberg.maintenance import Recorded
from spark_consumers.iceberg.retention import Retention
from spark_consumers.iceberg.table_note import NEVER, Parked
from spark_consumers.java import table_files
from spark_consumers.kafka.reader import Offsets
from spark_consumers.sql import pairs

log = structlog.get_logger()
NAME = "_epochs"
_EXPIRED_EVERY = 64
ASKED = "slotbridge.asked"
"""A property of the record's table: what was last asked of some tables, whose notes say more."""
PARKED = "slotbridge.parked"
"""In the summaries of snapshots: the tables that do not have the epoch."""
_ASKING_MAX = 20
_PROPERTIES = {"write.metadata.compression-codec": "gzip"}
"""Each commit writes all epochs that are kept anew, each with all tables."""


_AGAIN = tenacity.retry(
    retry=tenacity.retry_if_exception_type(FOREIGN),
    wait=tenacity.wait_random(0.1, 0.5),
    stop=tenacity.stop_after_attempt(_ASKING_MAX),
    reraise=True,
)
"""Another writer commits to the record after each epoch."""


class Place(NamedTuple):
    """An Iceberg table as of an epoch.

    `snapshot` is None while the table has none. `uuid` tells the table from one that was made anew
    under its name.
    """

    identifier: str
    snapshot: int | None
    uuid: str


class ParkedTable(NamedTuple):
    """A table that stays behind the epoch.

    `place`: the table as of its own last epoch, None if the table was never made. `events`: how
    many events of the table the transactions after `counted_after` count, None if that is unknown.
    `counted_after`: the commit LSN that the others had when it was parked; the table may have less.
    """

    parked: Parked
    place: Place | None
    events: int | None
    counted_after: int


class Entered(NamedTuple):
    """A transaction that records an epoch, and what was last asked of the tables (`Ledger.ask`)."""

    transaction: Any
    asked: str


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch that is done: its tables have everything up to `commit_lsn`, and nothing after it.

    `offsets` are where the next events are; `transaction_offset` where the next transaction is,
    None: at the beginning. `tables`: by source table; the snapshot is that of the last epoch that
    brought the table something. `transaction_topic_id`: Kafka's id of the transaction topic.
    `parked`: tables that are not among `tables`, as they stay behind.
    """

    epoch: int
    commit_lsn: int
    commit_ts_ms: int
    offsets: Offsets
    transaction_offset: int | None
    tables: dict[str, Place]
    transaction_topic_id: str = ""
    parked: dict[str, ParkedTable] = field(default_factory=dict)


class Ledger:
    """Reads and writes the record of epochs of one namespace."""

    def __init__(self, namespace: str, settings: TablesSettings) -> None:
        self.namespace = namespace
        self.identifier = catalog.identifier(namespace, NAME)
        self.audits = AuditLog(namespace)
        self._most = settings.epochs_kept
        self._retention = Retention.of(settings)
        self._made = False

    def last(self, spark: SparkSession) -> EpochRecord | None:
        """Return the last epoch, None before the first."""
        if not spark.catalog.tableExists(self.identifier):
            return None
        return _record(catalog.summary(catalog.load(spark, self.identifier)))

    def all(self, spark: SparkSession) -> list[EpochRecord]:
        """Return the epochs that are kept, the oldest first."""
        if not spark.catalog.tableExists(self.identifier):
            return []
        return [entry.record for entry in _entries(catalog.load(spark, self.identifier))]

    def prepare(self, spark: SparkSession, record: EpochRecord) -> Entered:
        """Prepare the commit that records an epoch as done; a crash before it leaves it undone.

        Raise Retryable (LOCKED) where another writer has recorded the epoch already.
        """
        if not self._made and not spark.catalog.tableExists(self.identifier):
            spark.sql(
                f"CREATE TABLE {self.identifier} (note string) USING iceberg"
                f" TBLPROPERTIES ({pairs(_PROPERTIES | FEW_METADATA_FILES)})"
            )
        table = catalog.load(spark, self.identifier)
        self._made = True
        values = {f"slotbridge.{name}": value for name, value in _values(record).items()}
        given = json.dumps(values), catalog.EPOCH, record.epoch
        transaction = table_files(table).record(table, *given)
        if transaction is None:
            raise catalog.overtaken(self.identifier)
        asked = transaction.startMetadata().properties().get(ASKED)
        return Entered(transaction, asked or "")

    def thin_at_times(self, spark: SparkSession, epoch: int) -> None:
        """Thin the record once in 64 epochs."""
        if epoch % _EXPIRED_EVERY == 0:
            self.try_to_thin(spark)

    def try_to_thin(self, spark: SparkSession) -> list[EpochRecord] | SlotbridgeError:
        """Thin the record as of now; return the epochs that stay, or why all stay for now."""
        try:
            return self.thin(spark, int(time.time() * 1000))
        except FOREIGN as error:
            failure = translated(error, "thin the record of epochs")
            log.warning("old epochs stay for now", error=str(failure))
            return failure

    @_AGAIN
    def thin(self, spark: SparkSession, now_ms: int) -> list[EpochRecord]:
        """Remove the epochs that are not to be read any more; return those that stay.

        The age of an epoch is that of its record: a reader has it for this time, however late the
        epoch came.
        """
        if not spark.catalog.tableExists(self.identifier):
            return []
        table = catalog.load(spark, self.identifier)
        entries = _entries(table)
        refs = catalog.metadata(table).get("refs", {})
        named = {int(ref["snapshot-id"]) for ref in refs.values()}
        stay = staying(entries, named, self._retention, self._most, now_ms)
        gone = {entry.snapshot for entry in entries} - {entry.snapshot for entry in stay}
        if gone:
            # Else Iceberg would also remove what is older than five days.
            work = table.expireSnapshots().expireOlderThan(0)
            for snapshot in gone:
                work.expireSnapshotId(snapshot)
            work.commit()
        return [entry.record for entry in stay]

    @_AGAIN
    def ask(self, spark: SparkSession, what: str) -> None:
        """Let `run` look at its tables after its next epoch: something is asked of some."""
        if spark.catalog.tableExists(self.identifier):
            catalog.set_property(catalog.load(spark, self.identifier), ASKED, what)

    def asked(self, spark: SparkSession) -> str:
        """Return what was last asked of the tables (`ask`), "" for nothing."""
        return self.noted(spark).get(ASKED, "")

    def noted(self, spark: SparkSession) -> Mapping[str, str]:
        """Return the properties of the record's table, which commands and `run` set."""
        if not spark.catalog.tableExists(self.identifier):
            return {}
        return catalog.properties(catalog.load(spark, self.identifier))

    @_AGAIN
    def note(self, spark: SparkSession, values: Mapping[str, str]) -> None:
        """Set properties of the record's table, which must exist."""
        catalog.set_properties(catalog.load(spark, self.identifier), values)


def staying(
    entries: Sequence["Entry"], named: Container[int], ages: Retention, most: int, now_ms: int
) -> list["Entry"]:
    """Return the epochs that stay recorded, also those whose snapshot is `named`. Pure.

    Iceberg does not remove a snapshot that a reference names.
    """
    times_ms = [entry.time_ms for entry in entries]
    news = quiet.with_news([entry.record.tables for entry in entries], times_ms, now_ms)
    places = retention.kept([times_ms[place] for place in news], now_ms, ages)[-most:]
    stay = {news[place] for place in places}
    return [e for place, e in enumerate(entries) if place in stay or e.snapshot in named]


def epoch_of(epochs: list[EpochRecord], commit_lsn: int) -> EpochRecord:
    """Return the last epoch up to an LSN. Raise SettingsError where no such epoch is kept."""
    found = [epoch for epoch in epochs if epoch.commit_lsn <= commit_lsn]
    if not found:
        first = format_lsn(epochs[0].commit_lsn) if epochs else "none"
        raise SettingsError(
            f"no epoch of {format_lsn(commit_lsn)} or before is kept; the first is {first}",
            operation="read the record of epochs",
            hint="tables.epochs_kept and the settings after it say which epochs are kept",
        )
    return found[-1]


def recorded_of(records: Sequence[EpochRecord], source: str) -> Recorded:
    """Return what epochs name of a table."""
    places = [record.tables.get(source) for record in records]
    places += [found.place for r in records if (found := r.parked.get(source)) is not None]
    snapshots = frozenset(p.snapshot for p in places if p is not None and p.snapshot is not None)
    return Recorded(frozenset(record.commit_lsn for record in records), snapshots)


def require_snapshot(
    table: Any, place: Place | None, *, operation: str, subject: str, commit_lsn: int
) -> int:
    """Return the snapshot that an Iceberg table has as of an epoch.

    Raise OperatorNeeded where the table has lost it, or is another one than in the epoch.
    """
    snapshot = None if place is None else place.snapshot
    there = snapshot is not None and table.snapshot(snapshot) is not None
    if snapshot is None or not there or (place and place.uuid != str(table.uuid())):
        raise OperatorNeeded(
            "the Iceberg table no longer has its snapshot of the epoch",
            operation=operation,
            subject=subject,
            lsn=commit_lsn,
            hint="choose a later epoch (slottables epochs): the snapshot was removed, or "
            "the table was rebuilt since",
        )
    return snapshot


class Entry(NamedTuple):
    """The snapshot of the record's table that has an epoch, and when it was written."""

    record: EpochRecord
    snapshot: int
    time_ms: int


def _entries(table: Any) -> list[Entry]:
    """Return what the record's table has, the first epoch first."""
    found = []
    for snapshot in catalog.metadata(table).get("snapshots", ()):
        record = _record(snapshot["summary"])
        if record is not None:
            found.append(Entry(record, snapshot["snapshot-id"], snapshot["timestamp-ms"]))
    return sorted(found, key=lambda entry: entry.record.epoch)


def _values(record: EpochRecord) -> dict[str, str]:
    """Return an epoch's record as properties of the snapshot that completes it."""
    tables = {
        source: {"table": name.replace("`", ""), "snapshot": snapshot, "uuid": uuid}
        for source, (name, snapshot, uuid) in sorted(record.tables.items())
    }
    return {
        "epoch": str(record.epoch),
        "commit_lsn": str(record.commit_lsn),
        "lsn": format_lsn(record.commit_lsn),
        "commit_ts_ms": str(record.commit_ts_ms),
        "tag": catalog.tag_name(record.commit_lsn),
        "tables": json.dumps(tables),
        "offsets": json.dumps(record.offsets),
        "transaction_offset": json.dumps(record.transaction_offset),
        "transaction_topic_id": record.transaction_topic_id,
        "parked": json.dumps({name: _of_parked(p) for name, p in sorted(record.parked.items())}),
    }


def _of_parked(found: ParkedTable) -> dict[str, object]:
    """Return a parked table as JSON of the record."""
    place = found.place
    return {
        "table": place and place.identifier.replace("`", ""),
        "snapshot": place and place.snapshot,
        "uuid": place and place.uuid,
        "events": found.events,
        "counted_after": found.counted_after,
        "note": asdict(found.parked),
    }


def _parked(found: dict[str, Any]) -> ParkedTable:
    place = Place(found["table"], found["snapshot"], found["uuid"]) if found["table"] else None
    note = Parked(**found["note"])
    return ParkedTable(note, place, found["events"], found["counted_after"])


def _record(summary: dict[str, str]) -> EpochRecord | None:
    """Return the epoch's record in a snapshot's summary, None in another snapshot."""
    if catalog.EPOCH not in summary:
        return None
    given: dict[str, Any] = {
        name: json.loads(summary[f"slotbridge.{name}"])
        for name in ("offsets", "tables", "transaction_offset", "commit_ts_ms")
    }
    return EpochRecord(
        int(summary[catalog.EPOCH]),
        int(summary.get(catalog.COMMIT_LSN, NEVER)),
        given["commit_ts_ms"],
        {topic: {int(p): o for p, o in parts.items()} for topic, parts in given["offsets"].items()},
        given["transaction_offset"],
        {
            name: Place(place["table"], place["snapshot"], place["uuid"])
            for name, place in given["tables"].items()
        },
        summary["slotbridge.transaction_topic_id"],
        {n: _parked(f) for n, f in json.loads(summary[PARKED]).items()},
    )
