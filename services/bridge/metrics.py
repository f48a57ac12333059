"""The bridge's Prometheus metrics, under the names that dashboards and alerts use.

What happened is counted by counters and histograms. What is known of a server or of held
transactions is true for one session only: `LIVE` collects it, and without a session there are no
such series, so that a standby or a bridge that has lost its server shows nothing stale.
"""

import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from schemas.version import version
from services.postgres.slots import Slot, SlotStatistics
from services.runtime.families import Family, one_of
from services.runtime.tracing import HELP as SPANS_HELP

EVENTS = Counter("slotbridge_events_total", "Events published in committed Kafka transactions.")
EVENT_BYTES = Counter(
    "slotbridge_event_bytes_total",
    "Bytes of keys and values of published events, including per-event overhead.",
)
ROWS = Counter(
    "slotbridge_rows_total",
    "Changes of rows published in committed Kafka transactions, by table and operation: "
    "c insert, u update, d delete, t truncate, r row read by a snapshot.",
    ["table", "operation"],
)
ROW_BYTES = Counter(
    "slotbridge_row_bytes_total",
    "Bytes of keys and values of published changes of rows, by table and operation.",
    ["table", "operation"],
)
TRANSACTIONS = Counter(
    "slotbridge_transactions_total",
    "Source transactions whose events are in committed Kafka transactions.",
)
DROPPED = Counter(
    "slotbridge_dropped_events_total",
    "Events that the server sent again and that the bridge dropped because Kafka has them.",
)
DEAD_LETTERS = Counter(
    "slotbridge_dead_letters_total",
    "Records that Kafka refused and that were committed to <prefix>.dead instead.",
)
CLAIM_CHECKS = Counter(
    "slotbridge_claim_checks_total",
    "Large values that were stored in the object storage, to which events refer.",
)
CLAIM_CHECK_BYTES = Counter(
    "slotbridge_claim_check_bytes_total",
    "Bytes of large values that were stored in the object storage.",
)
RECONNECTS = Counter(
    "slotbridge_reconnects_total", "Sessions that the bridge has started after its first one."
)
SQL_SESSIONS_LOST = Counter(
    "slotbridge_sql_sessions_lost_total",
    "SQL sessions that the server ended while the bridge continued to receive changes.",
)
COMMIT_SECONDS = Histogram(
    "slotbridge_kafka_commit_seconds",
    "Seconds to commit a Kafka transaction.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
TRANSACTION_SECONDS = Histogram(
    "slotbridge_kafka_transaction_seconds",
    "Seconds from the first event of a Kafka transaction to the end of its commit.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LAG_SECONDS = Histogram(
    "slotbridge_lag_seconds",
    "Seconds from the commit in PostgreSQL to the commit in Kafka, of the oldest source "
    "transaction in each Kafka transaction, by the clocks of the server and of the bridge.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200),
)
SNAPSHOT_TABLES = Gauge(
    "slotbridge_snapshot_tables",
    "Tables of the snapshot by state: waiting (or being read), done, refused (they can't be read).",
    ["state"],
)
SNAPSHOT_CHUNKS = Counter(
    "slotbridge_snapshot_chunks_total", "Chunks of rows that a snapshot has read and published."
)
SNAPSHOT_HOLD_SECONDS = Histogram(
    "slotbridge_snapshot_hold_seconds",
    "Seconds that the stream of changes stood still while a snapshot read a chunk of rows.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
SNAPSHOT_POSTPONED = Counter(
    "slotbridge_snapshot_postponed_total",
    "Chunks of rows that a snapshot could not read at once, and that it postponed.",
)
SNAPSHOT_WAITING_SECONDS = Gauge(
    "slotbridge_snapshot_waiting_seconds",
    "Seconds for which a snapshot could read no chunk of rows; 0 while it advances or is done.",
)
SPANS = Counter("slotbridge_spans_total", SPANS_HELP, ["outcome"])
BUILD = Gauge(
    "slotbridge_build_info",
    "1, with the version of the bridge, of Python, and whether the compiled part is used.",
    ["version", "python", "compiled"],
)
STREAMING = Gauge("slotbridge_streaming", "1 while the bridge receives changes, else 0.")
RECEIVED_LSN = Gauge(
    "slotbridge_received_lsn_bytes",
    "WAL position up to which the server has sent changes.",
    registry=None,
)
DURABLE_LSN = Gauge(
    "slotbridge_durable_lsn_bytes",
    "WAL position of the progress record: Kafka has all changes up to there.",
    registry=None,
)
ORIGIN_LSN = Gauge(
    "slotbridge_origin_lsn_bytes",
    "WAL position stored in the bridge's replication origin, or in its sequence (source.witness).",
    registry=None,
)
TIMELINE = Gauge(
    "slotbridge_timeline", "Timeline of the server that the bridge is connected to.", registry=None
)
STANDBYS_AWAITED = Gauge(
    "slotbridge_standbys_awaited",
    "Standbys in synchronized_standby_slots for which the server withholds changes.",
    registry=None,
)
OF_A_SESSION: Final = (RECEIVED_LSN, DURABLE_LSN, ORIGIN_LSN, TIMELINE, STANDBYS_AWAITED)
DELIVERY_AGE: Final = Family(
    "slotbridge_delivery_age_seconds",
    "Seconds since the newest time up to which Kafka has every commit of the server; normally at "
    "most about bridge.heartbeat_interval_ms, and rising while nothing is delivered.",
)
TABLES_MAX: Final = 1000
"""Tables that have series of their own; all others share one."""
OTHER_TABLES: Final = "(other tables)"
WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")
INVALIDATIONS: Final = ("wal_removed", "rows_removed", "wal_level_insufficient", "idle_timeout")

_children: dict[tuple[str, str], tuple[Counter, Counter]] = {}
_tables: set[str] = set()


def count_rows(counts: Mapping[tuple[str, str], Sequence[int]]) -> None:
    """Add the rows and bytes of a committed Kafka transaction, by (table, operation)."""
    for key, (rows, size) in counts.items():
        found = _children.get(key)
        if found is None:
            table, operation = key
            if len(_tables) >= TABLES_MAX and table not in _tables:
                table = OTHER_TABLES
            _tables.add(table)
            found = ROWS.labels(table, operation), ROW_BYTES.labels(table, operation)
            _children[key] = found
        found[0].inc(rows)
        found[1].inc(size)


@dataclass(frozen=True, slots=True)
class Held:
    """Transactions that wait in the bridge for their commit or their decision."""

    open: int = 0
    """Streamed transactions in progress."""
    open_bytes: int = 0
    prepared: int = 0
    prepared_bytes: int = 0
    spooled: int = 0
    """Of both kinds, those of which a part is in a file."""
    spooled_bytes: int = 0


_HELD: Final = {
    "open": Family(
        "slotbridge_open_transactions",
        "Source transactions in progress whose changes the bridge holds until they commit.",
    ),
    "open_bytes": Family("slotbridge_open_bytes", "Bytes held of source transactions in progress."),
    "prepared": Family(
        "slotbridge_prepared_transactions",
        "Prepared source transactions whose changes the bridge holds until they are decided.",
    ),
    "prepared_bytes": Family(
        "slotbridge_prepared_bytes", "Bytes held of prepared source transactions."
    ),
    "spooled": Family(
        "slotbridge_spooled_transactions",
        "Held source transactions of which a part is in a file of bridge.spool_folder.",
    ),
    "spooled_bytes": Family(
        "slotbridge_spooled_bytes",
        "Bytes of held source transactions in files of bridge.spool_folder, compressed.",
    ),
}
_SLOT: Final = ("slot",)
_RETAINED: Final = Family(
    "slotbridge_slot_retained_bytes", "Bytes of WAL that the primary keeps for the slot.", _SLOT
)
_SAFE: Final = Family(
    "slotbridge_slot_safe_wal_bytes",
    "Bytes of WAL that can be written before the slot may be lost; "
    "no series without max_slot_wal_keep_size.",
    _SLOT,
)
_ACTIVE: Final = Family(
    "slotbridge_slot_active", "1 while a walsender uses the slot, else 0.", _SLOT
)
_FAILOVER: Final = Family(
    "slotbridge_slot_failover", "1 if standbys synchronize the slot, else 0.", _SLOT
)
_STATUS: Final = Family(
    "slotbridge_slot_wal_status",
    "1 for the present wal_status of the slot, 0 for the others.",
    ("slot", "status"),
)
_INVALIDATED: Final = Family(
    "slotbridge_slot_invalidated",
    "1 for the reason for which the server has invalidated the slot, 0 for the others.",
    ("slot", "reason"),
)
_STATISTICS: Final = {
    "spill_txns": Family(
        "slotbridge_slot_spilled_transactions",
        "Transactions that the server spilled to disk while it decoded for the slot.",
        _SLOT,
        "counter",
    ),
    "spill_count": Family(
        "slotbridge_slot_spills",
        "Times that the server spilled changes to disk while it decoded for the slot.",
        _SLOT,
        "counter",
    ),
    "spill_bytes": Family(
        "slotbridge_slot_spilled_bytes",
        "Bytes of decoded changes that the server spilled to disk for the slot.",
        _SLOT,
        "counter",
    ),
    "stream_txns": Family(
        "slotbridge_slot_streamed_transactions",
        "Transactions that the server sent in blocks before their commit.",
        _SLOT,
        "counter",
    ),
    "stream_count": Family(
        "slotbridge_slot_streams",
        "Times that the server sent blocks of transactions in progress.",
        _SLOT,
        "counter",
    ),
    "stream_bytes": Family(
        "slotbridge_slot_streamed_bytes",
        "Bytes of decoded changes that the server sent in blocks before their commit.",
        _SLOT,
        "counter",
    ),
    "total_txns": Family(
        "slotbridge_slot_decoded_transactions",
        "Transactions that the server decoded for the slot.",
        _SLOT,
        "counter",
    ),
    "total_bytes": Family(
        "slotbridge_slot_decoded_bytes",
        "Bytes of changes that the server decoded for the slot.",
        _SLOT,
        "counter",
    ),
    "reset_s": Family(
        "slotbridge_slot_statistics_reset_timestamp_seconds",
        "Unix time at which the server's statistics of the slot were reset; no series if never.",
        _SLOT,
    ),
}
FAMILIES: Final = (
    *(DELIVERY_AGE, *_HELD.values(), _RETAINED, _SAFE, _ACTIVE, _FAILOVER, _STATUS, _INVALIDATED),
    *_STATISTICS.values(),
)


class Live(Collector):
    """The gauges of a live session, written by the session's thread and read by scrapes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivered_s: float | None = None
        self._connected = False
        self._held: Held | None = None
        self._slot: tuple[Slot, SlotStatistics | None, int] | None = None

    def connect(self) -> None:
        """Show the series of a session from now on."""
        with self._lock:
            self._connected = True
        STREAMING.set(1)

    def disconnect(self) -> None:
        """Hide the series of the session; the delivery age keeps rising."""
        STREAMING.set(0)
        with self._lock:
            self._connected, self._held, self._slot = False, None, None

    def stand_by(self) -> None:
        """Hide the delivery age too: another bridge delivers."""
        with self._lock:
            self._delivered_s = None

    def delivered(self, at_s: float) -> None:
        """Note that Kafka has every commit of the server up to `at_s` (Unix time)."""
        if self._delivered_s is None or at_s > self._delivered_s:
            self._delivered_s = at_s

    def observe(
        self, held: Held, slot: Slot | None, statistics: SlotStatistics | None, wal_lsn: int
    ) -> None:
        """Record the observations of a heartbeat."""
        with self._lock:
            self._held = held
            self._slot = (slot, statistics, wal_lsn) if slot is not None else None

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have a value now."""
        with self._lock:
            connected, held, slot = self._connected, self._held, self._slot
            delivered_s = self._delivered_s
        if delivered_s is not None:
            yield DELIVERY_AGE.of(max(0.0, time.time() - delivered_s))
        if not connected:
            return
        for gauge in OF_A_SESSION:
            yield from gauge.collect()
        if held is not None:
            yield from (family.of(getattr(held, name)) for name, family in _HELD.items())
        if slot is not None:
            yield from _of_slot(*slot)

    def describe(self) -> Iterator[Metric]:
        """Yield every family without samples, so that no other collector takes a name."""
        yield from (family.of({}) for family in FAMILIES)
        for gauge in OF_A_SESSION:
            yield from gauge.describe()


def _of_slot(slot: Slot, statistics: SlotStatistics | None, wal_lsn: int) -> Iterator[Metric]:
    """Yield a slot's metrics: state, retained WAL, and its decoding statistics."""
    name = slot.slot_name
    yield _ACTIVE.of({(name,): slot.active_pid is not None})
    yield _FAILOVER.of({(name,): slot.failover})
    if slot.restart_lsn is not None:
        yield _RETAINED.of({(name,): max(0, wal_lsn - slot.restart_lsn)})
    if slot.safe_wal_size is not None:
        yield _SAFE.of({(name,): slot.safe_wal_size})
    yield _STATUS.of(one_of(WAL_STATUSES, slot.wal_status, name))
    yield _INVALIDATED.of(one_of(INVALIDATIONS, slot.invalidation_reason, name))
    if statistics is not None:
        for column, family in _STATISTICS.items():
            value = getattr(statistics, column)
            if value is not None:
                yield family.of({(name,): value})


LIVE: Final = Live()
REGISTRY.register(LIVE)


def set_build(*, compiled: bool) -> None:
    """Set the metric that tells which build runs."""
    BUILD.labels(version(), platform.python_version(), str(compiled).lower()).set(1)
