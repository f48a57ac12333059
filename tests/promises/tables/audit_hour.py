"""Audits the tables every minute beside `slottables run` and load, and counts false alarms.

`python -m tests.promises.tables.audit_hour --minutes 60` prints one JSON line of totals; exit 0
when no audit found a difference and the tables are equal to the source at rest. Nothing is
planted: each difference that an audit finds is a false alarm, or a defect of the tables.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import yaml

from schemas.settings import KafkaSettings
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.snapshots import read_snapshots
from tests.promises.bridge.running import Bridge
from tests.promises.tables.drill import VERIFY, Load, Slottables, report_of
from tests.promises.tables.one_java import run_all
from tests.promises.tables.own_servers import own_servers
from tests.promises.tables.tables import BANK, BANK_TABLES, ROWS, TABLES
from tests.providers.interface import Broker, Server
from tests.providers.waiting import eventually, patient

PREFIX = "audits"
_TABLES = 10
"""How many tables the load changes."""
_LOAD_STEP = 31
"""Transactions between two pauses of the load."""
_TABLES_SETTINGS = {
    "rules": {"public.whole": {"kind": "history"}},
    "audit_busy_percent": 10,
    "maintenance_interval_ms": 120_000,
}


@dataclass
class Totals:
    """The counts of one run; `judged_equal`, `differences` and `not_judged` are of tables."""

    seconds: float = 0.0
    transactions: int = 0
    epochs: int = 0
    audits: int = 0
    judged_equal: int = 0
    differences: int = 0
    not_judged: dict[str, int] = field(default_factory=dict)
    """By table and reason."""
    failed: dict[str, int] = field(default_factory=dict)
    """Audits without a result, by their error."""
    rows_compared: int = 0
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """What the audits say of tables that differ."""
    different_at_rest: list[str] = field(default_factory=list)

    def add(self, audit: dict[str, Any]) -> None:
        """Count the tables of one audit."""
        self.audits += 1
        for table in audit["tables"]:
            if table["reason"]:
                what = f"{table['table']}: {table['reason']}"
                self.not_judged[what] = self.not_judged.get(what, 0) + 1
                continue
            self.rows_compared += table["source_rows"]
            if table["verdict"] == "equal":
                self.judged_equal += 1
                continue
            self.differences += table["missing"] + table["extra"] + table["different"]
            self.alarms.append(table)

    @property
    def passed(self) -> bool:
        """Whether audits judged tables, none differed, and none differs at rest."""
        return bool(self.judged_equal) and not self.alarms and not self.different_at_rest


def audit_hour(
    primary: Server,
    dbname: str,
    kafka: Broker,
    folder: Path,
    *,
    minutes: float,
    transactions_per_second: float,
    every_s: int,
) -> Totals:
    """Audit each `every_s` seconds for `minutes`, then compare all tables at rest."""
    totals, conninfo = Totals(), primary.conninfo(dbname)
    bridge = Bridge(folder, conninfo, kafka, PREFIX, snapshot={"mode": "initial"})
    source = {"conninfo": conninfo, "publication": bridge.publication, "slot": bridge.slot}
    tables = Slottables(folder, source, kafka.bootstrap_servers, PREFIX, trigger_interval_ms=2_000)
    document = yaml.safe_load(tables.config.read_text(encoding="utf-8"))
    document["tables"] |= _TABLES_SETTINGS
    tables.config.write_text(yaml.safe_dump(document), encoding="utf-8")
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute((BANK_TABLES + TABLES).encode())
        bridge.start().streaming()
        _await_snapshots(kafka, bridge.slot)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(BANK.encode())
            connection.execute(ROWS.encode())
        tables.start()
        tables.await_epoch()
        started = time.monotonic()
        load = Load(conninfo, 1, _LOAD_STEP / transactions_per_second)
        try:
            with _audits(tables.config, folder, every_s) as (out, errors, process):
                while time.monotonic() - started < minutes * 60:
                    time.sleep(1.0)
                    tables.require_running()
                    assert bridge.running, bridge.output[-3000:]
                    assert process.poll() is None, errors.read_text()[-3000:]
                for line in out.read_text(encoding="utf-8").splitlines():
                    totals.add(json.loads(line))
                lines = errors.read_text(encoding="utf-8").splitlines()
                totals.failed = dict(Counter(x for x in lines if x.startswith("error:")))
        finally:
            load.stop()
        totals.seconds = round(time.monotonic() - started, 1)
        bridge.caught_up()
        tables.stop()
        assert bridge.stop() == 0, bridge.output
        brought, verified = run_all(tables.config, ("run", "--once", "--json"), VERIFY)
        assert brought.code == 0, brought.log
        report = report_of(verified)
    finally:
        tables.end()
        bridge.end()
    totals.different_at_rest = [json.dumps(t) for t in report["tables"] if not t["equal"]]
    totals.transactions = load.transactions
    totals.epochs = max(epoch["epoch"] for epoch in tables.epochs())
    return totals


def _await_snapshots(kafka: Broker, slot: str) -> None:
    """Wait until the bridge's snapshot has read all tables, so that absent rows are judged."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=PREFIX)

    def done() -> bool:
        progress = read_snapshots(settings, TopicOffsets(settings), slot).progress
        return len(progress) == _TABLES and all(one.done for one in progress.values())

    eventually(done, what="the snapshot has read all tables", timeout_s=120)


@contextmanager
def _audits(
    config: Path, folder: Path, every_s: int
) -> Iterator[tuple[Path, Path, subprocess.Popen[bytes]]]:
    """`slottables audit --repeat` until the end of the block: its stdout, its stderr, itself."""
    out, errors = folder / "audit.out", folder / "audit.err"
    program = Path(sys.executable).parent / "slottables"
    command: list[str | Path] = [
        program,
        "audit",
        "--json",
        "--repeat",
        f"{every_s}s",
        "--config",
        config,
    ]
    with out.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        yield out, errors, process
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=patient(300))
    finally:
        process.kill()
        process.wait(timeout=patient(30))


def main() -> None:
    """Run it on servers of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--transactions-per-second", type=float, default=50)
    parser.add_argument("--every-s", type=int, default=60, help="from audit to audit")
    options = parser.parse_args()
    with own_servers("audits", synchronous=False) as (trio, kafka, folder):
        totals = audit_hour(
            *(trio.primary, trio.dbname, kafka, folder),
            minutes=options.minutes,
            transactions_per_second=options.transactions_per_second,
            every_s=options.every_s,
        )
    sys.stdout.write(json.dumps(asdict(totals)) + "\n")
    raise SystemExit(not totals.passed)


if __name__ == "__main__":
    main()
