"""One run: servers, a bridge under supervision, clients, faults from a seed, and the verdict."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from schemas.events import (
    SETTLING_KEY_PREFIX,
    PreparedKey,
    prepared_topic,
    progress_topic,
    recovery_topic,
    snapshot_topic,
    table_topic,
    transaction_topic,
)
from schemas.lsn import format_lsn
from schemas.naming import Naming
from schemas.progress import ProgressRecord
from schemas.recovery import RecoveryRecord
from schemas.shaping import ShapingSettings
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.reading import Record, read_committed
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.slots import await_ready
from tests.torture import bank
from tests.torture.brokers import Brokers, insist
from tests.torture.checker import Finding, Repair, Truth, check
from tests.torture.clients import Client, Outcomes, decide_leftovers, stop_all
from tests.torture.faults import Fault, first_failpoint, schedule
from tests.torture.folds import check_folds
from tests.torture.perform import perform
from tests.torture.report import Report
from tests.torture.snapshot_checker import (
    Told,
    check_snapshots,
    incomplete,
    told_of,
    unfinished,
)
from tests.torture.snapshot_goal import Asking, Met, faults_until
from tests.torture.tables import RESTORABLE, compare_tables
from tests.torture.torture_run import Stalled, TortureRun
from tests.torture.watch import Watch

_PART_BYTES: Final = (2**22, 2**16, 2**16)
"""By seed: what a Kafka transaction holds. The large one holds every source transaction, and has
several requests for one partition.
"""
_CLIENTS: Final = 5
_TOPICS_S: Final = 30.0
_STALLED_S: Final = 120.0
"""All servers are healthy by then."""
_PARTITIONS: Final = 2
_MEETS_S: Final = 400.0


class Rig:
    """For one run with one seed, on a started bed."""

    def __init__(
        self,
        bed: Bed,
        folder: Path,
        seed: int,
        *,
        pause_s: float = 0.18,
        brokers: Brokers | None = None,
        sabotage: str = "",
        faults: Iterator[Fault] | None = None,
        commits_wait: bool = False,
        to_tables: bool = False,
        tls: Mapping[str, str] | None = None,
        goal: Met | None = None,
    ) -> None:
        """`brokers`: by default the bed's, straight. `to_tables`: what Kafka has at the end also
        goes into Iceberg tables, compared too. `tls`: as Tls.conninfo, which the bridge must use.
        `goal`: kills and failovers within snapshots until it is met, instead of `faults`.
        """
        self._bed = bed
        self._folder = folder
        self._seed = seed
        self._pause_s = pause_s
        self._brokers = brokers or Brokers(bed.kafka)
        self._sabotage = sabotage
        self._goal = goal
        if goal is not None:
            faults = faults_until(seed, goal, self._met)
        self._faults = faults or schedule(seed, self._brokers.count)
        self._commits_wait = commits_wait
        self._to_tables = to_tables
        self._tls = tls
        self._part_bytes = _PART_BYTES[seed % len(_PART_BYTES)]

    def run(
        self,
        pair_servers: tuple[PostgresServer, PostgresServer],
        seconds: float,
        foreign: PostgresServer | None = None,
        met: Callable[[TortureRun], bool] = lambda _run: True,
    ) -> Report:
        """Torture for about `seconds`, a slow machine for up to _MEETS_S more, until `met`.

        Then everything recovers and is compared. A stray bridge sees `foreign`, another database.
        """
        started = time.monotonic()
        run = self._run = TortureRun(
            self._bed,
            pair_servers,
            self._folder,
            foreign=foreign,
            brokers=self._brokers,
            sabotage=self._sabotage,
            commits_wait=self._commits_wait,
            tls=self._tls,
        )
        try:
            report = self._tortured(seconds, met)
        except Stalled as error:
            findings = [*run.findings, Finding("stalled", str(error))]
            report = Report(self._seed, self._brokers.count, findings=findings)
        finally:
            run.close()
        if not report.findings:
            self._brokers.forget(self._is_ours)
        report.seconds = time.monotonic() - started
        return report

    def _tortured(self, seconds: float, met: Callable[[TortureRun], bool]) -> Report:
        run = self._run
        with connect(run.primary, self._bed.dbname) as connection:
            schema = bank.SCHEMA + (RESTORABLE if self._to_tables else "")
            for statement in schema.split(";"):
                if statement.strip():
                    connection.execute(statement.encode())
            bank.fill(connection)
        self._bridge = self._configured()
        run.begin(self._bridge, first_failpoint(self._seed))
        await_ready(run.primary, run.standby, self._bridge.slot)
        watch = Watch(
            *(self._brokers.bootstrap_servers, self._is_ours),
            pid=lambda: run.supervised.pid,
            hiding=lambda: run.hiding,
        )
        watch.start()
        outcomes = Outcomes()
        clients = run.clients = [
            Client(number, self._seed, run.conninfo, outcomes, self._pause_s)
            for number in range(1, _CLIENTS + 1)
        ]
        for client in clients:
            client.start()
        began = time.monotonic()
        until = began + seconds
        asking = Asking()
        for fault in self._faults:
            if self._goal is not None:
                asking.keep_reading(run, self._told())
            time.sleep(fault.pause_s)
            late_s = time.monotonic() - until
            enough = late_s > 0 and (met(run) or late_s > max(_MEETS_S, 3 * seconds))
            if enough or run.supervised.operator_needed:
                break
            perform(run, fault)
        fire_s = time.monotonic() - began
        ended = self._end(clients)
        if self._goal is not None and not self._met().covers(self._goal):
            ended.append(Finding("stalled", f"{self._met()} of {self._goal} in {fire_s:.0f} s"))
        report = self._report(outcomes, ended + watch.end() + run.findings)
        report.fire_s = fire_s
        report.hidden_s_max = round(watch.hidden.longest_s, 1)
        report.rss_mib_max = round(watch.rss_mib_max)
        return report

    def _met(self) -> Met:
        return Met(self._run.supervised.ends.sigkills, self._run.failovers)

    def _is_ours(self, topic: str) -> bool:
        prefix = self._bridge.prefix
        routed = Naming(prefix, self._bridge.shaping).table("public", "routed").name
        return topic.startswith(f"{prefix}.") or topic == routed

    def _configured(self) -> Bridge:
        return Bridge(
            self._folder,
            self._run.proxied_conninfo,
            self._brokers.kafka,
            f"torture{self._seed}",
            bootstrap_servers=self._brokers.proxied_servers,
            options=self._brokers.options,
            shaping=bank.SHAPING,
            snapshot=self._snapshot(),
            two_phase=self._bed.major >= 18,
            transaction_bytes_max=self._part_bytes,
            commit_bytes_max=self._part_bytes,
            spool_memory_bytes_max=2**13,
            spool_folder=str(self._folder),
            wal_sender_timeout_ms=4_000,
            transaction_timeout_ms=3_000,
            sql_deadline_ms=8_000,
            origin_idle_timeout_ms=10_000,
            connect_deadline_ms=600_000,
        )

    def _snapshot(self) -> dict[str, Any]:
        """Return how rows are read: with an odd seed from the standby, by 2 or 3 workers."""
        if self._seed % 2 == 0:
            return bank.SNAPSHOT
        where = make_conninfo(self._run.proxied_conninfo, target_session_attrs="prefer-standby")
        return {**bank.SNAPSHOT, "conninfo": where, "workers": 2 + self._seed // 2 % 2}

    def _end(self, clients: list[Client]) -> list[Finding]:
        """Clients end, what is undecided is rolled back, the bridge catches up and stops."""
        run = self._run
        supervised = run.supervised
        if supervised.operator_needed is not None:
            run.release()  # else they would wait for it for ever
        stop_all(clients, 180)
        run.release()
        supervised.arm()
        with connect(run.primary, self._bed.dbname) as connection:
            decide_leftovers(connection)
            stalled = self._catch_up(connection) or self._read_all(connection)
        self._by_tls = run.tls_connections()
        if self._tls is not None and not self._by_tls and not run.given_up:
            stalled.append(Finding("wrong", "a connection of the bridge's is not by TLS"))
        code = supervised.operator_needed
        if code is not None:
            return [Finding("wrong", f"exit code {code}: {self._bridge.output[-1500:]}")]
        code = supervised.stop()
        return stalled + ([Finding("wrong", f"SIGTERM ended in {code}")] if code else [])

    def _catch_up(self, connection: bank.Connection) -> list[Finding]:
        """Wait for it, as long as the slot moves: the machine may be busy, the backlog large."""
        row = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
        assert row is not None
        reached, since = 0, time.monotonic()
        while not self._run.given_up:
            found = connection.execute(
                "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots"
                " WHERE slot_name = %s",
                [self._bridge.slot],
            ).fetchone()
            assert found is not None, f"slot {self._bridge.slot} is gone"
            if found[0] >= row[0]:
                break
            if found[0] > reached:
                reached, since = found[0], time.monotonic()
            if time.monotonic() - since > _STALLED_S:
                what = f"the slot has stood at {format_lsn(reached)} for {_STALLED_S:.0f} s"
                return [Finding("stalled", f"{what}: {self._bridge.output[-1500:]}")]
            time.sleep(0.1)
        return []

    def _read_all(self, connection: bank.Connection) -> list[Finding]:
        """Wait until all rows are read that are asked for; first ask for what was given up."""
        bank.ask_alone(connection, "end resume", "resume")
        if some := incomplete(self._told(), bank.READ):
            bank.ask_alone(connection, "end read", "execute", *some)
        if stalled := self._catch_up(connection):
            return stalled
        count, since = 0, time.monotonic()
        while not self._run.given_up:
            told = self._told()
            left = unfinished(told, bank.READ)
            if not left:
                break
            if len(told.progress) > count:
                count, since = len(told.progress), time.monotonic()
            if time.monotonic() - since > _STALLED_S:
                what = f"rows of {', '.join(left)} are not read for {_STALLED_S:.0f} s"
                return [Finding("stalled", f"{what}: {self._bridge.output[-1500:]}")]
            time.sleep(0.5)
        return self._catch_up(connection)

    def _told(self) -> Told:
        servers, topic = self._bridge.kafka.bootstrap_servers, snapshot_topic(self._bridge.prefix)
        return told_of(_committed(servers, topic))

    def _report(self, outcomes: Outcomes, findings: list[Finding]) -> Report:
        servers, prefix = self._bridge.kafka.bootstrap_servers, self._bridge.prefix
        with connect(self._run.primary, self._bed.dbname) as connection:
            rows = connection.execute("SELECT tid, kind, expected FROM ledger").fetchall()
            signals = [row[0] for row in connection.execute("SELECT id FROM signals").fetchall()]
        ledger = {tid: json.loads(expected) for tid, _, expected in rows}
        boundaries = transaction_topic(prefix)
        records = _committed(servers, *_event_topics(servers, prefix), boundaries)
        undivided = self._part_bytes == max(_PART_BYTES)
        parted = _parted(servers, prefix)
        repairs = _repairs(servers, prefix)
        truth = Truth(ledger, outcomes.found, parted, _PARTITIONS, undivided, repairs)
        topics = {record.topic for record in records}
        kafka_transaction_of = self._brokers.kafka_transactions(topics)
        found = check(records, boundaries, truth, kafka_transaction_of)
        told = self._told()
        found += check_folds(records)
        found += check_snapshots(records, told, signals, kafka_transaction_of, repairs)
        if self._run.supervised.operator_needed is not None:
            findings += [finding for finding in found if finding.kind != "lost"]  # it has stopped
        else:
            findings += found + _left_staged(servers, prefix)
            try:
                insist(
                    lambda: assert_rebuilt(
                        self._bridge, unknown=None, outbox_topics=_outbox_topics(prefix)
                    )
                )
            except AssertionError as error:
                findings.append(Finding("wrong", str(error)[:500]))
        run, ends = self._run, self._run.supervised.ends
        table_rows = 0
        if self._to_tables:
            table_rows, found = compare_tables(self._bridge, run.conninfo, self._folder)
            findings += found
        return Report(
            seed=self._seed,
            brokers=self._brokers.count,
            transactions=len(ledger),
            events=len(records),
            acknowledged=outcomes.counts()["acknowledged"],
            sigkills=ends.sigkills + run.rival_kills + run.repair_kills,
            failovers=run.failovers,
            starts=ends.starts,
            failpoints=ends.failpoints,
            passages=run.supervised.passages(),
            faults=run.faults,
            kinds=Counter(kind for _, kind, _ in rows),
            decided=outcomes.decided,
            chunks=len(told.progress),
            repairs=len(repairs),
            rows_read=sum(
                1 for one in records if one.value is not None and b'"op":"r"' in one.value
            ),
            exit_codes=ends.codes,
            table_rows=table_rows,
            by_tls=self._by_tls,
            findings=findings,
        )


def _committed(servers: str, *topics: str) -> list[Record]:
    return insist(lambda: read_committed(servers, topics))


def _event_topics(servers: str, prefix: str) -> list[str]:
    """Return the topics of all tables, the routed one's and the outbox's."""
    admin = AdminClient({"bootstrap.servers": servers})
    known = insist(lambda: admin.list_topics(timeout=_TOPICS_S)).topics
    naming = Naming(prefix, ShapingSettings.model_validate(bank.SHAPING))
    others = {naming.table("public", "routed").name, *_outbox_topics(prefix)}
    tables = table_topic(prefix, "public", "")
    return sorted(name for name in known if name.startswith(tables) or name in others)


def _outbox_topics(prefix: str) -> list[str]:
    naming = Naming(prefix, ShapingSettings.model_validate(bank.SHAPING))
    return [naming.outbox(kind) for kind in bank.AGGREGATE_TYPES]


def _parted(servers: str, prefix: str) -> set[int]:
    """The commits of which a progress record says that Kafka has a part."""
    return {
        record.position.commit_lsn
        for entry in _committed(servers, progress_topic(prefix))
        if entry.value is not None
        and not (entry.key or b"").startswith(SETTLING_KEY_PREFIX)
        and (record := ProgressRecord.model_validate_json(entry.value)).position.seq
    }


def _repairs(servers: str, prefix: str) -> list[Repair]:
    found = _committed(servers, recovery_topic(prefix)) if _there(servers, prefix) else []
    records = [RecoveryRecord.model_validate_json(entry.value) for entry in found if entry.value]
    return [Repair(one.from_lsn, one.lsn, one.commit_lsn) for one in records]


def _there(servers: str, prefix: str) -> bool:
    admin = AdminClient({"bootstrap.servers": servers})
    return recovery_topic(prefix) in insist(lambda: admin.list_topics(timeout=_TOPICS_S)).topics


def _left_staged(servers: str, prefix: str) -> list[Finding]:
    """Prepared transactions that are decided, and still staged."""
    last = {entry.key: entry.value for entry in _committed(servers, prepared_topic(prefix))}
    left = [PreparedKey.model_validate_json(key or b"") for key, value in last.items() if value]
    return [Finding("wrong", f"{key.gid!r} part {key.part} is still staged") for key in left]


def kept(folder: Path, report: Report) -> None:
    """Write the findings beside the logs."""
    lines: list[Any] = [report.as_json(), *report.findings]
    (folder / "findings.txt").write_text("\n".join(map(str, lines)), encoding="utf-8")
