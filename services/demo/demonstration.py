"""The demonstration, stage by stage.

bed -> tables with rows -> bridge, subscription -> snapshot, slots ready -> pgbench
-> SIGKILL the primary -> slotfailover failover -> pgbench on the new primary -> stop
-> compare the four copies
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from schemas.errors import ExitCode, Retryable
from schemas.events import table_topic
from services.demo import workload
from services.demo.comparison import Copies, IcebergTable, TableResult, compare
from services.demo.copies import database_rows, kafka_tables
from services.demo.display import Board, Display
from services.demo.observer import Observer, table_batches
from services.demo.plant import Fault, plant
from services.demo.services import BRIDGE_SLOT, PREFIX, SUBSCRIPTION, Services
from services.demo.workload import TABLES
from services.testbed.bed import Bed
from services.testbed.pair import hasten_slot_sync

_SETTLE_TIMEOUT_S: Final = 600.0
_WRITABLE_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """How the demonstration is run; `seconds` of load before the kill, half of it after."""

    folder: Path
    scale: int = 1
    clients: int = 4
    seconds: int = 20
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict and its figures, as the JSON line has them."""

    figures: dict[str, Any]
    results: list[TableResult]

    @property
    def agreed(self) -> bool:
        """Whether all copies agree and nothing acknowledged is missing."""
        return bool(self.figures["ok"])


def run_demonstration(options: Options) -> Outcome:
    """Run the whole demonstration; return the verdict. Raise SlotbridgeError when a part fails."""
    started = time.monotonic()
    board = Board()
    with Display(board) as display:
        bed = Bed(options.folder, progress=display.note)
        with display.stage("start PostgreSQL pair, subscriber and Kafka"):
            bed.__enter__()
        try:
            outcome = _Demonstration(options, bed, display, board).run(started)
        finally:
            bed.__exit__(None, None, None)
    display.results(outcome.results)
    return outcome


class _Demonstration:
    def __init__(self, options: Options, bed: Bed, display: Display, board: Board) -> None:
        self._options = options
        self._bed = bed
        self._display = display
        self._services = Services(bed)
        self._observer = Observer(
            board,
            primary=bed.primary.conninfo(bed.dbname),
            standby=bed.standby.conninfo(bed.dbname),
            subscriber=bed.subscriber.conninfo(bed.dbname),
            bootstrap_servers=bed.kafka.bootstrap_servers,
            prefix=PREFIX,
            slots=(BRIDGE_SLOT, SUBSCRIPTION),
            tables_log=bed.processes.log_path("slottables"),
        )

    def run(self, started: float) -> Outcome:
        with self._observer:
            self._prepare()
            failover_seconds = self._load_through_failover()
            self._settle()
        figures, results = self._compare_all()
        figures["failover_seconds"] = round(failover_seconds, 2)
        figures["seconds"] = round(time.monotonic() - started, 1)
        return Outcome(figures, results)

    def _prepare(self) -> None:
        """Make tables, start bridge, subscription and Spark, and wait until all are in sync."""
        bed, services, stage = self._bed, self._services, self._display.stage
        with stage(
            f"make tables with {self._options.scale * workload.ACCOUNTS_PER_SCALE:,} accounts"
        ):
            workload.make_tables(bed.primary, bed.dbname)
            workload.load(bed.primary, bed.dbname, self._options.scale)
            workload.make_tables(bed.subscriber, bed.dbname)
        with stage("start bridge, subscription and Spark"):
            services.write_config()
            services.start_bridge()
            services.wait("the bridge streams", self._bridge_streams, timeout_s=180)
            self._subscribe()
            services.start_tables()
        with stage("wait until Kafka and the subscriber have the rows that were there before"):
            services.wait("the snapshot is done", services.snapshot_done, timeout_s=600)
            services.wait("the subscription is in sync", self._subscription_copied, timeout_s=600)
        with stage("wait until both failover slots are ready"):
            hasten_slot_sync(bed.primary.conninfo(bed.dbname), bed.standby.conninfo(bed.dbname))
            services.wait("all slots are ready", services.slots_ready, timeout_s=300)
        with stage("wait until Spark has applied the load"):
            services.wait("Spark applies changes", self._tables_started, timeout_s=600)

    def _load_through_failover(self) -> float:
        """Load, kill, fail over, load again; return the seconds without a writable primary."""
        bed, options, stage = self._bed, self._options, self._display.stage
        clients = options.clients
        with stage(f"pgbench, {clients} clients, on the primary"):
            load = workload.start_clients(
                bed, bed.primary, "pgbench-1", clients=clients, seconds=options.seconds * 10
            )
            deadline = time.monotonic() + options.seconds
            while time.monotonic() < deadline:
                self._services.require_running()
                time.sleep(0.2)
        with stage("SIGKILL the primary under that load, then slotfailover failover"):
            writable = _Writable(bed.standby.conninfo(bed.dbname))
            writable.start()
            bed.primary.kill()
            self._observer.primary = bed.standby.conninfo(bed.dbname)
            self._observer.standby = None
            self._services.fail_over()
            seconds = writable.seconds()
            load.wait(timeout=180)
        with stage(f"pgbench, {clients} clients, on the new primary"):
            load = workload.start_clients(
                bed,
                bed.standby,
                "pgbench-2",
                clients=clients,
                seconds=max(1, options.seconds // 2),
            )
            load.wait(timeout=options.seconds + 180)
        return seconds

    def _settle(self) -> None:
        """Wait until every copy has everything, then stop bridge and tables in order."""
        bed, services, stage = self._bed, self._services, self._display.stage
        with stage("wait until bridge and subscriber have everything, stop the bridge"):
            with psycopg.connect(bed.standby.conninfo(bed.dbname)) as connection:
                [(lsn,)] = connection.execute("SELECT pg_current_wal_lsn()::text").fetchall()
            services.wait(
                "both slots are confirmed",
                lambda: self._confirmed(lsn),
                timeout_s=_SETTLE_TIMEOUT_S,
            )
            services.stop_bridge()
        with stage("wait until the Iceberg tables have everything, stop Spark"):
            events = sum(table.events for table in self._kafka().values())
            services.wait(
                "all events are applied",
                lambda: self._applied() >= events,
                timeout_s=_SETTLE_TIMEOUT_S,
            )
            services.stop_tables()

    def _compare_all(self) -> tuple[dict[str, Any], list[TableResult]]:
        """Compare the copies; with faults to plant, also once before they are (`before_plant`)."""
        with self._display.stage("verify the Iceberg tables"):
            verified = self._services.verify_tables()
        figures, results = self._compare(verified)
        if not self._options.faults:
            return figures, results
        for fault in self._options.faults:
            topic = table_topic(PREFIX, "public", "pgbench_history")
            plant(fault, self._bed.kafka.bootstrap_servers, topic)
        planted, results = self._compare(verified)
        return {**planted, "before_plant": figures}, results

    def _compare(self, verified: dict[str, Any]) -> tuple[dict[str, Any], list[TableResult]]:
        """Compare all four copies after the load; return figures and a result for each table."""
        bed = self._bed
        with self._display.stage("compare database, subscriber, Kafka and Iceberg"):
            truth = database_rows(bed.standby.conninfo(bed.dbname), TABLES)
            transactions = truth["pgbench_history"].total()
            copies = Copies(
                database=truth,
                subscriber=database_rows(bed.subscriber.conninfo(bed.dbname), TABLES),
                kafka=self._kafka(),
                iceberg={
                    table["table"].removeprefix("public."): IcebergTable(
                        table["table_rows"], table["equal"]
                    )
                    for table in verified["tables"]
                },
                updates=dict.fromkeys(workload.BALANCE_TABLES, transactions),
            )
            results = compare(copies)
        return self._figures(results, transactions), results

    def _figures(self, results: list[TableResult], transactions: int) -> dict[str, Any]:
        """Return counts of transactions and events, and whether all copies are equal."""
        acknowledged = sum(
            workload.acknowledged(self._bed, name) for name in ("pgbench-1", "pgbench-2")
        )
        missing = max(0, acknowledged - transactions)
        figures: dict[str, Any] = {
            "transactions": transactions,
            "acknowledged": acknowledged,
            "acknowledged_missing": missing,
            "kafka_events": sum(result.kafka_events for result in results),
            "lost": sum(result.lost for result in results),
            "duplicated": sum(result.duplicated for result in results),
            "subscriber_equal": all(result.subscriber_equal for result in results),
            "tables_equal": all(result.iceberg_equal for result in results),
        }
        figures["ok"] = all(result.equal for result in results) and not missing and transactions > 0
        return figures

    def _kafka(self) -> dict[str, Any]:
        return kafka_tables(self._bed.kafka.bootstrap_servers, PREFIX, TABLES)

    def _subscribe(self) -> None:
        """Make the publication and the subscription, whose slot is a failover slot."""
        bed = self._bed
        with psycopg.connect(bed.primary.conninfo(bed.dbname), autocommit=True) as connection:
            connection.execute("CREATE PUBLICATION bank_copy FOR ALL TABLES")
        with psycopg.connect(bed.subscriber.conninfo(bed.dbname), autocommit=True) as connection:
            connection.execute(
                sql.SQL(
                    "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION bank_copy"
                    " WITH (failover = true)"
                ).format(sql.Identifier(SUBSCRIPTION), bed.primary.conninfo(bed.dbname))
            )

    def _subscription_copied(self) -> bool:
        with psycopg.connect(self._bed.subscriber.conninfo(self._bed.dbname)) as connection:
            row = connection.execute(
                "SELECT count(*), count(*) FILTER (WHERE srsubstate = 'r') FROM pg_subscription_rel"
            ).fetchone()
        return row is not None and row[0] == row[1] == len(TABLES)

    def _bridge_streams(self) -> bool:
        with psycopg.connect(self._bed.primary.conninfo(self._bed.dbname)) as connection:
            row = connection.execute(
                "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [BRIDGE_SLOT]
            ).fetchone()
        return row is not None and bool(row[0])

    def _confirmed(self, lsn: str) -> bool:
        """Tell whether all logical slots have confirmed `lsn`."""
        with psycopg.connect(self._bed.standby.conninfo(self._bed.dbname)) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_replication_slots"
                " WHERE slot_type = 'logical' AND confirmed_flush_lsn >= %s::pg_lsn",
                [lsn],
            ).fetchone()
        return row is not None and row[0] == len((BRIDGE_SLOT, SUBSCRIPTION))

    def _tables_started(self) -> bool:
        return self._applied() > 0

    def _applied(self) -> int:
        batches = table_batches(self._bed.processes.log_path("slottables"))
        return sum(int(batch["events"]) for batch in batches)


class _Writable(threading.Thread):
    """Tries to write on a server until it takes a transaction; measures from `start`."""

    def __init__(self, conninfo: str) -> None:
        super().__init__(name="writable", daemon=True)
        self._conninfo = conninfo
        self._begun = 0.0
        self._ended: float | None = None

    def start(self) -> None:
        self._begun = time.monotonic()
        super().start()

    def run(self) -> None:
        while time.monotonic() - self._begun < _WRITABLE_TIMEOUT_S:
            try:
                with psycopg.connect(self._conninfo, connect_timeout=2) as connection:
                    connection.execute("SELECT pg_current_xact_id()")
            except psycopg.Error:
                time.sleep(0.02)
            else:
                self._ended = time.monotonic()
                return

    def seconds(self) -> float:
        """Return the seconds from `start` to the first transaction that was accepted."""
        self.join(_WRITABLE_TIMEOUT_S)
        if self._ended is None:
            raise Retryable(
                "the new primary takes no writes",
                operation="fail over",
                exit_code=ExitCode.DEADLINE,
            )
        return self._ended - self._begun
