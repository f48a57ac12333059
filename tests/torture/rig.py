"""One run: servers, a bridge under supervision, clients, faults from a seed, and the verdict."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psycopg import sql
from typer.testing import CliRunner

from schemas.events import ProgressRecord, progress_topic, table_topic, transaction_topic
from services.failover.command import app as slotfailover
from services.local.bed import Bed
from services.local.pair import STANDBY_SLOT, alter_system, clone, execute
from services.local.postgres import PostgresServer
from tests.bridge.oracle import assert_rebuilt
from tests.bridge.reading import read_committed
from tests.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually
from tests.torture import bank
from tests.torture.checker import Finding, Truth, check
from tests.torture.clients import Client, Outcomes, decide_leftovers, stop_all
from tests.torture.faults import DATABASE_AND_BROKER, Fault, first_failpoint, schedule
from tests.torture.supervisor import Supervised

TABLES: Final = ("ledger", "account", "item", "whole", "scratch", "shape")
_CLIENTS: Final = 5
_FAILPOINT_WAIT_S: Final = 4.0


@dataclass
class Report:
    """What a run was and found."""

    seed: int
    seconds: float
    transactions: int
    events: int
    outcomes: Counter[str]
    sigkills: int
    failpoints: Counter[str]
    faults: Counter[str]
    failovers: int
    findings: list[Finding]
    exit_codes: Counter[int] = field(default_factory=Counter)

    @property
    def other_faults(self) -> int:
        """Faults of the broker and of the database, failovers not counted."""
        return sum(n for name, n in self.faults.items() if name in DATABASE_AND_BROKER)

    def as_json(self) -> str:
        """One line."""
        kinds = Counter(finding.kind for finding in self.findings)
        return json.dumps(
            {
                "seed": self.seed,
                "seconds": round(self.seconds),
                "transactions": self.transactions,
                "events": self.events,
                "acknowledged": self.outcomes["acknowledged"],
                "sigkills": self.sigkills,
                "failovers": self.failovers,
                "server_faults": self.other_faults,
                "lost": kinds["lost"] + kinds["missing"],
                "duplicated": kinds["duplicated"] + kinds["phantom"] + kinds["resurrected"],
                "torn": kinds["torn"] + kinds["disordered"] + kinds["wrong"],
                "failpoints": dict(self.failpoints),
                "faults": dict(self.faults),
                "exit_codes": dict(self.exit_codes),
            }
        )


class Rig:
    """A started bed, used for one run or for several with different seeds."""

    def __init__(self, bed: Bed, folder: Path, seed: int, *, pause_s: float = 0.03) -> None:
        self._bed = bed
        self._folder = folder
        self._seed = seed
        self._pause_s = pause_s
        self._faults: Counter[str] = Counter()
        self._failovers = 0

    def run(self, pair_servers: tuple[PostgresServer, PostgresServer], seconds: float) -> Report:
        """Torture for about `seconds`; then everything recovers and is compared."""
        self.primary, self.standby = pair_servers
        started = time.monotonic()
        with connect(self.primary, self._bed.dbname) as connection:
            for statement in bank.SCHEMA.split(";"):
                if statement.strip():
                    connection.execute(statement.encode())
        self.bridge = self._configured()
        self._supervised = Supervised(self.bridge.config, self.bridge.log)
        self._supervised.start(first_failpoint(self._seed))
        self.bridge_streams()
        with connect(self.primary, self._bed.dbname) as connection:
            bank.open_accounts(connection)
        outcomes = Outcomes()
        clients = [
            Client(number, self._seed, self.bridge.conninfo, outcomes, self._pause_s)
            for number in range(1, _CLIENTS + 1)
        ]
        for client in clients:
            client.start()
        for fault in schedule(self._seed):
            time.sleep(fault.pause_s)
            if time.monotonic() - started > seconds or self._supervised.operator_needed:
                break
            self._perform(fault)
        findings = self._end(clients)
        found, ledger, events = self._verdict(outcomes)
        ends = self._supervised.ends
        return Report(
            seed=self._seed,
            seconds=time.monotonic() - started,
            transactions=ledger,
            events=events,
            outcomes=outcomes.counts(),
            sigkills=ends.sigkills,
            failpoints=ends.failpoints,
            faults=self._faults,
            failovers=self._failovers,
            findings=findings + found,
            exit_codes=ends.codes,
        )

    def _configured(self) -> Bridge:
        ports = f"{self.primary.port},{self.standby.port}"
        conninfo = self.primary.conninfo(
            self._bed.dbname,
            host="127.0.0.1,127.0.0.1",
            port=ports,
            target_session_attrs="read-write",
        )
        return Bridge(
            self._folder,
            conninfo,
            self._bed.kafka,
            f"torture{self._seed}",
            two_phase=True,
            transaction_bytes_max=2**18,
            commit_bytes_max=2**17,
            spool_memory_bytes_max=2**16,
            spool_folder=str(self._folder),
            wal_sender_timeout_ms=4_000,
            transaction_timeout_ms=8_000,
            sql_deadline_ms=8_000,
            connect_deadline_ms=600_000,
        )

    def bridge_streams(self) -> None:
        """Wait until a bridge is connected to the primary's slot."""
        with connect(self.primary) as connection:

            def active() -> bool:
                if self._supervised.operator_needed is not None:
                    raise AssertionError(self.bridge.output[-2000:])
                row = connection.execute(
                    "SELECT active FROM pg_replication_slots WHERE slot_name = %s",
                    [self.bridge.slot],
                ).fetchone()
                return row is not None and bool(row[0])

            eventually(active, what="a bridge streams", timeout_s=120, interval_s=0.1)

    def _perform(self, fault: Fault) -> None:
        self._faults[fault.name] += 1
        broker = self._bed.kafka
        match fault.name:
            case "kill":
                self._supervised.kill()
            case "failpoint":
                count = self._supervised.ends.sigkills + 2
                self._supervised.arm(fault.failpoint)
                self._supervised.await_end(count, _FAILPOINT_WAIT_S)
            case "freeze":
                self._supervised.freeze(2 * fault.seconds)
            case "terminate":
                self._terminate_bridge()
            case "broker killed":
                broker.kill()
                time.sleep(fault.seconds)
                broker.start()
            case "broker paused":
                broker.pause()
                time.sleep(2 * fault.seconds)
                broker.resume()
            case "primary restarted":
                self.primary.restart("immediate")
            case "standby killed":
                self.standby.kill()
                time.sleep(fault.seconds)
                self.standby.start()
            case "failover":
                self._fail_over()

    def _terminate_bridge(self) -> None:
        with connect(self.primary) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'slotbridge%'"
            )

    def _fail_over(self) -> None:
        """The primary dies; the runbook command; the old one comes back as a new standby."""
        self.bridge_streams()
        await_ready(self.primary, self.standby, self.bridge.slot, timeout_s=120)
        self.primary.kill()
        config = self._folder / "failover.yaml"
        nodes = {s.name: s.conninfo() for s in (self.primary, self.standby)}
        config.write_text(json.dumps({"failover": {"nodes": nodes, "connect_timeout_s": 2}}))
        done = CliRunner().invoke(slotfailover, ["failover", "--config", str(config), "--yes"])
        assert done.exit_code == 0, done.output + done.stderr
        self._failovers += 1
        self.primary, self.standby = self.standby, self.primary
        self._rebuild_standby()

    def _rebuild_standby(self) -> None:
        with connect(self.primary) as connection:
            known = connection.execute(
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [STANDBY_SLOT]
            ).fetchone()
        if known is None:
            query = sql.SQL("SELECT pg_create_physical_replication_slot({}, true)")
            execute(self.primary, query.format(STANDBY_SLOT))
        self.standby.remove_data()
        clone(self.primary, self.standby, slot=STANDBY_SLOT, dbname=self._bed.dbname)
        self.standby.start()
        for name in ("synchronized_standby_slots", "synchronous_standby_names"):
            alter_system(self.primary, name, STANDBY_SLOT)

    def _end(self, clients: list[Client]) -> list[Finding]:
        """Clients end, what is undecided is rolled back, the bridge catches up and stops."""
        stop_all(clients, 60)
        code = self._supervised.operator_needed
        if code is not None:
            return [Finding("wrong", f"exit code {code}: {self.bridge.output[-1500:]}")]
        with connect(self.primary, self._bed.dbname) as connection:
            decide_leftovers(connection)
            row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None

            def confirmed() -> bool:
                found = connection.execute(
                    "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots"
                    " WHERE slot_name = %s",
                    [row[0], self.bridge.slot],
                ).fetchone()
                return found is not None and bool(found[0])

            eventually(confirmed, what=f"caught up to {row[0]}", timeout_s=180, interval_s=0.1)
        code = self._supervised.stop()
        return [Finding("wrong", f"SIGTERM ended in {code}")] if code else []

    def _verdict(self, outcomes: Outcomes) -> tuple[list[Finding], int, int]:
        """(findings, transactions in the ledger, events)."""
        servers, prefix = self.bridge.kafka.bootstrap_servers, self.bridge.prefix
        with connect(self.primary, self._bed.dbname) as connection:
            rows = connection.execute("SELECT tid, expected FROM ledger").fetchall()
        ledger = {tid: json.loads(expected) for tid, expected in rows}
        parted = {
            record.commit_lsn
            for entry in read_committed(servers, [progress_topic(prefix)])
            if entry.value is not None
            and (record := ProgressRecord.model_validate_json(entry.value)).seq
        }
        topics = [table_topic(prefix, "public", table) for table in TABLES]
        boundaries = transaction_topic(prefix)
        records = read_committed(servers, [*topics, boundaries])
        truth = Truth(ledger, outcomes.found, parted)
        findings = check(records, boundaries, truth)
        try:
            assert_rebuilt(self.bridge, unknown=None)
        except AssertionError as error:
            findings.append(Finding("wrong", str(error)[:500]))
        return findings, len(ledger), len(records)


def kept(folder: Path, report: Report) -> None:
    """Write the findings beside the logs."""
    lines: list[Any] = [report.as_json(), *report.findings]
    (folder / "findings.txt").write_text("\n".join(map(str, lines)), encoding="utf-8")
