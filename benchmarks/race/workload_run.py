"""One workload on its own database: its load made once, then trials over copies of its slot.

warm_up  the broker's compiler, which a broker that runs for long has behind it
before   the broker has nothing more to do with topics made and deleted
clock    starts when the trial's slot is in use; ends when a read_committed consumer has the row
         that was committed after the load (pg_recvlogical: when it ends at that LSN)
checked  the topics hold at least one record for each published change
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer, IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from benchmarks.bridge import Connection
from benchmarks.race.contenders import (
    PUBLICATION,
    Contender,
    RecvLogical,
    Slotbridge,
    SlotCopy,
)
from benchmarks.race.environment import Environment
from benchmarks.race.process_metrics import ProcessMetrics, await_rest
from benchmarks.race.workloads import DONE_TABLE, ROWS_A_TRANSACTION, Workload, narrow
from services.testbed.pair import create_database

LOADED_SLOT: Final = "loaded"
WEIGH_S: Final = 3600.0
_LOOK_S: Final = 0.01
_LOOK_AT_KAFKA_S: Final = 0.1
_WARM_UP_ROWS: Final = 400_000
LAPS: Final = 18
_START_S: Final = 120.0
_TOPIC_S: Final = 60.0
_TOPICS_AT_ONCE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Trial:
    """What one contender did with one copy of the load.

    `bytes`: of pgoutput's messages; `form`: the format of keys and values, "" for none;
    `busiest_thread_s`: CPU seconds of the contender's thread that has used most.
    """

    contender: str
    rows: int
    bytes: int
    seconds: float
    cpu_s: float
    busiest_thread_s: float
    peak_mib: float
    walsender_cpu_s: float
    broker_cpu_s: float
    form: str = "json"

    @property
    def rows_s(self) -> float:
        """Rows in a second."""
        return self.rows / self.seconds

    @property
    def mb_s(self) -> float:
        """Megabytes of pgoutput in a second."""
        return self.bytes / self.seconds / 1e6

    @property
    def cpu_s_per_million(self) -> float:
        """CPU seconds of the contender's process for a million rows."""
        return self.cpu_s / self.rows * 1e6

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "rows_s": self.rows_s,
            "mb_s": self.mb_s,
            "cpu_s_per_million": self.cpu_s_per_million,
            "walsender_busy": self.walsender_cpu_s / self.seconds,
            "thread_busy": self.busiest_thread_s / self.seconds,
        }


class WorkloadRun:
    """The load of `workload` with `rows` rows, in a database of the workload's name."""

    def __init__(self, place: Environment, key: str, workload: Workload, rows: int) -> None:
        self._bed, self._server = place
        self._workload = workload
        self.rows = rows
        self._key = "unstreamed" if key == "E" else key
        self._trials = 0
        self._end_lsn = ""
        self._bytes = 0
        self.wal_bytes = 0
        self.dbname = f"race_{self._key}"

    def prepare(self) -> None:
        """Make the tables, a slot, the load, and the last row; measure the load's size.

        `wal_bytes`: what it has written to the WAL.
        """
        create_database(self._server, self.dbname)
        with self._connect() as connection:
            connection.execute("SET synchronous_commit = off")
            if not self._workload.setup:
                self._server.run_tool("pgbench", ["-i", "-q", "-s", "10", self._conninfo])
            else:
                connection.execute(self._workload.setup.encode())
            connection.execute(f"CREATE TABLE {DONE_TABLE} (id int PRIMARY KEY)".encode())
            tables = ", ".join((*self._workload.tables, DONE_TABLE))
            connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {tables}".encode())
            connection.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self._slot("loaded")]
            )
            before = _value(connection, "SELECT pg_current_wal_insert_lsn()::text")
            self._workload.load(self._server, connection, self.rows)
            connection.execute(f"INSERT INTO {DONE_TABLE} VALUES (1)".encode())
            self._end_lsn = _value(connection, "SELECT pg_current_wal_insert_lsn()::text")
            written = "SELECT pg_wal_lsn_diff(%s, %s)::bigint::text"
            self.wal_bytes = int(_value(connection, written, [self._end_lsn, before]))
            connection.execute("CHECKPOINT")
        self._weigh()

    def drop(self) -> None:
        """Drop slots and database, so that their WAL and files can go."""
        with self._connect() as connection:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = %s",
                [self.dbname],
            )
        with psycopg.connect(self._server.conninfo(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {self.dbname} WITH (FORCE)".encode())
            connection.execute("CHECKPOINT")

    def trial(self, contender: Contender, *, form: str = "json", timeout_s: float = 600.0) -> Trial:
        """Race once; `form`: the format in which the contender writes.

        Raises RuntimeError when the contender ends early or takes too long.
        """
        slot_copy = self._slot_copy()
        with self._topics(slot_copy, contender) as consumer, self._connect() as connection:
            await_rest(self._bed.kafka.pid)
            contender.launch(slot_copy)
            try:
                walsender = self._await_start(connection, slot_copy, contender)
                followed = ProcessMetrics(contender.pid, threads=True)
                metrics = [followed, ProcessMetrics(walsender), ProcessMetrics(self._bed.kafka.pid)]
                since = time.monotonic()
                while not _done(consumer, followed, to_kafka=contender.to_kafka):
                    for process in metrics:
                        process.look()
                    if contender.to_kafka and not followed.running:
                        raise RuntimeError(f"{contender.name} ended:\n{contender.complaint()}")
                    if time.monotonic() - since > timeout_s:
                        text = contender.complaint()
                        raise RuntimeError(f"{contender.name}: not done in {timeout_s} s:\n{text}")
                seconds = time.monotonic() - since
                for process in (followed, metrics[2]):
                    process.look()
            finally:
                contender.stop()
            if contender.to_kafka:
                self._check(slot_copy, contender)
            self._free(connection, slot_copy)
        return Trial(
            contender.name,
            self.rows,
            self._bytes,
            seconds,
            followed.cpu_s,
            followed.busiest_thread_s,
            followed.peak_mib,
            metrics[1].cpu_s,
            metrics[2].cpu_s,
            form if contender.to_kafka else "",
        )

    def _weigh(self) -> None:
        path = self._bed.folder / f"{self.dbname}.pgoutput"
        self.trial(RecvLogical(str(path)), timeout_s=WEIGH_S)
        self._bytes = path.stat().st_size
        path.unlink()

    def _slot_copy(self) -> SlotCopy:
        self._trials += 1
        slot_copy = SlotCopy(
            self._bed,
            self._server,
            self._slot(str(self._trials)),
            self._end_lsn,
            self._workload.streaming,
            self.dbname,
        )
        with self._connect() as connection:
            connection.execute(
                "SELECT pg_copy_logical_replication_slot(%s, %s)",
                [self._slot(LOADED_SLOT), slot_copy.slot],
            )
        return slot_copy

    def _slot(self, name: str) -> str:
        return f"{self.dbname}_{name}"

    @contextlib.contextmanager
    def _topics(self, slot_copy: SlotCopy, contender: Contender) -> Iterator[Consumer]:
        """The trial's topics, alike for all that write; a consumer that waits for the last row."""
        servers: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self._bed.kafka.bootstrap_servers
        }
        tables = (*self._workload.tables, DONE_TABLE) if contender.to_kafka else ()
        names = [_topic(slot_copy, table) for table in tables]
        batches = [names[at : at + _TOPICS_AT_ONCE] for at in range(0, len(names), _TOPICS_AT_ONCE)]
        admin = AdminClient(servers)
        for batch in batches:
            for future in admin.create_topics([NewTopic(name, 1, 1) for name in batch]).values():
                future.result(_TOPIC_S)
        consumer = Consumer(
            servers
            | {
                "group.id": slot_copy.slot,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 100,
            }
        )
        consumer.assign([TopicPartition(_topic(slot_copy, DONE_TABLE), 0, 0)])
        try:
            yield consumer
        finally:
            consumer.close()
            for batch in batches:
                for future in admin.delete_topics(batch).values():
                    future.result(_TOPIC_S)

    def _await_start(
        self, connection: Connection, slot_copy: SlotCopy, contender: Contender
    ) -> int:
        """The walsender's pid as soon as the trial's slot is in use."""
        query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
        deadline = time.monotonic() + _START_S
        contender_metrics = ProcessMetrics(contender.pid)
        while time.monotonic() < deadline:
            row = connection.execute(query, [slot_copy.slot]).fetchone()
            if row is not None and row[0] is not None:
                return int(row[0])
            contender_metrics.look()
            if not contender_metrics.running:
                break
            time.sleep(_LOOK_S / 2)
        raise RuntimeError(f"{contender.name} does not stream:\n{contender.complaint()}")

    def _check(self, slot_copy: SlotCopy, contender: Contender) -> None:
        """Each partition was made for this trial: its end is how many records it was given."""
        admin = AdminClient({"bootstrap.servers": self._bed.kafka.bootstrap_servers})
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        tables = [TopicPartition(_topic(slot_copy, table), 0) for table in self._workload.tables]
        ends = admin.list_offsets(
            dict.fromkeys(tables, latest), isolation_level=IsolationLevel.READ_COMMITTED
        )
        records = sum(end.result(_TOPIC_S).offset for end in ends.values())
        wanted = round(self.rows * self._workload.published_share)
        if records < wanted:
            raise RuntimeError(f"{contender.name}: {records} records in Kafka, not {wanted}")

    def _free(self, connection: Connection, slot_copy: SlotCopy) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [slot_copy.slot])
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)
            else:
                return

    @property
    def _conninfo(self) -> str:
        return self._server.conninfo(self.dbname)

    def _connect(self) -> Connection:
        return psycopg.connect(self._conninfo, autocommit=True)


def warm_up(place: Environment, laps: int = LAPS) -> None:
    """Trials that nobody counts: Java's compiler has done its work after seven million records."""
    run = WorkloadRun(place, "warm_up", narrow(ROWS_A_TRANSACTION, _WARM_UP_ROWS), _WARM_UP_ROWS)
    run.prepare()
    for _ in range(laps):
        run.trial(Slotbridge())
    run.drop()


def _done(consumer: Consumer, process: ProcessMetrics, *, to_kafka: bool) -> bool:
    """Wait a moment; whether the trial is over."""
    if to_kafka:
        message = consumer.poll(_LOOK_AT_KAFKA_S)
        return message is not None and message.error() is None
    time.sleep(_LOOK_S / 2)
    return not process.running


def _topic(slot_copy: SlotCopy, table: str) -> str:
    return f"{slot_copy.prefix}.public.{table}"


def _value(connection: Connection, query: str, values: Sequence[Any] = ()) -> str:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return str(row[0])
