"""Switchovers in a row under load, with a bridge and a subscriber, measured and then compared.

    python -m tests.promises.failover.drill --rounds 20           # switchovers
    python -m tests.promises.failover.drill --rounds 20 --kill    # SIGKILL, failover, rejoin

pgbench and a writer that notes what was acknowledged go on through all rounds. The write gap of a
round is the longest time between two acknowledged writes while it went on. While one lasts for more
than STALL_S, what the servers' processes wait for is printed; so are the steps of such a round.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import yaml

from services.testbed.bed import Bed
from services.testbed.pair import Pair
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.running import Bridge
from tests.promises.failover.conftest import end, machines
from tests.promises.failover.servers import (
    Ran,
    ask,
    create_subscription,
    slotfailover_process,
    tell,
)
from tests.providers.databases import connect
from tests.providers.interface import Server, Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient

STALL_S = 3.0
WAITS = """
    SELECT now()::time(1)::text || ' ' || string_agg(backend_type || ' ' || pid || ' '
           || coalesce(wait_event_type || '/' || wait_event, 'runs')
           || coalesce(' ' || left(query, 60), ''), '; ')
      FROM pg_stat_activity
     WHERE pid <> pg_backend_pid() AND backend_type IN
           ('startup', 'walreceiver', 'walsender', 'slotsync worker', 'client backend',
            'checkpointer')
"""
"""What processes wait for, those of clients with the beginning of their statement."""

BALANCES = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers")
TABLES = (*BALANCES, "pgbench_history", "ticks")

ROWS = (
    "INSERT INTO pgbench_branches SELECT 1, 0",
    "INSERT INTO pgbench_tellers SELECT n, 1, 0 FROM generate_series(1, 10) n",
    "INSERT INTO pgbench_accounts SELECT n, 1, 0, '' FROM generate_series(1, 1000) n",
)
SCRIPT = r"""
\set aid random(1, 1000)
\set tid random(1, 10)
\set delta random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = 1;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
  VALUES (:tid, 1, :aid, :delta, CURRENT_TIMESTAMP);
END;
"""
"""pgbench's own transaction, on a hundredth of the rows: the copies are compared row by row."""


def script(folder: Path) -> Path:
    """The transaction in a file that the servers' user can read."""
    path = folder / "transaction.sql"
    path.write_text(SCRIPT)
    path.chmod(0o644)
    return path


def both(trio: Trio) -> str:
    """A connection setting that names both servers, and finds the one that takes writes."""
    return trio.primary.conninfo(
        trio.dbname,
        host="127.0.0.1,127.0.0.1",
        port=f"{trio.primary.port},{trio.standby.port}",
        target_session_attrs="read-write",
        connect_timeout=round(patient(0.7)),
    )


def prepare(trio: Trio, bridge: Bridge) -> None:
    """Tables on both sides, a subscription, the bridge; all slots ready."""
    primary = trio.primary.conninfo(trio.dbname)
    for server in (trio.primary, trio.subscriber):
        server.run_tool("pgbench", ["-q", "-i", "-I", "dtp", trio.dbname])
        tell(server, "CREATE TABLE ticks (id int PRIMARY KEY)", dbname=trio.dbname)
    tell(trio.primary, "CREATE PUBLICATION p FOR ALL TABLES", dbname=trio.dbname)
    create_subscription(trio, "s1")
    bridge.start().streaming(primary)
    tell(trio.primary, *ROWS, dbname=trio.dbname)
    for slot in ("s1", bridge.slot):
        await_ready(trio.primary, trio.standby, slot)


def drill_settings(folder: Path, trio: Trio, bed: Bed, bridge: Bridge) -> Path:
    """The configuration of bridge and failover in one file."""
    document = yaml.safe_load(bridge.config.read_text())
    document["failover"] = {
        "nodes": {"a": trio.primary.conninfo(), "b": trio.standby.conninfo()},
        "subscribers": {"sub": trio.subscriber.conninfo(trio.dbname)},
        "machines": machines(trio, bed),
        "synchronous_standbys": 1,
        "connect_timeout_s": round(patient(3)),
        "journal": str(folder / "journal"),
    }
    path = folder / "drill.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@dataclass
class Load:
    """pgbench and a writer, both of which reconnect until they are stopped."""

    trio: Trio
    script: Path
    clients: int = 2
    acknowledged: list[tuple[float, int]] = field(default_factory=list)
    failures: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        """Write until the end of the block."""
        threads = [threading.Thread(target=f) for f in (self._write, self._bench)]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: len(self.acknowledged) > 20, what="the writer writes")
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(patient(60))

    def gap_s(self, since: float, until: float) -> float:
        """The longest time between two acknowledged writes then."""
        times = [at for at, _ in self.acknowledged if since - 1 <= at <= until]
        return max(later - at for at, later in itertools.pairwise(times))

    def _write(self) -> None:
        number = 0
        while not self._stop.is_set():
            with (
                contextlib.suppress(psycopg.Error),
                psycopg.connect(both(self.trio), autocommit=True) as connection,
            ):
                while not self._stop.wait(0.002):
                    number += 1  # a number whose fate is unknown is not used again
                    connection.execute("INSERT INTO ticks VALUES (%s)", [number])
                    self.acknowledged.append((time.monotonic(), number))
            self.failures += 1
            time.sleep(0.005)

    def _bench(self) -> None:
        arguments = ["-n", "-c", str(self.clients), "-T", "2", "-f", str(self.script)]
        arguments.append(both(self.trio))
        while not self._stop.is_set():
            self.trio.primary.run_tool("pgbench", arguments, check=False)


@contextlib.contextmanager
def watching(load: Load, trio: Trio) -> Iterator[None]:
    """Print what the pair's processes wait for, while no write is acknowledged."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            since_s = time.monotonic() - load.acknowledged[-1][0]
            for server in (trio.primary, trio.standby) if since_s > STALL_S else ():
                try:
                    said = ask(server, WAITS)
                except psycopg.Error as error:
                    said = str(error).strip().splitlines()[-1]
                sys.stderr.write(f"  no write for {since_s:.1f} s: {server.port}: {said}\n")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(patient(60))


@dataclass
class Round:
    """One switchover: its report, and the write gap."""

    ran: Ran
    gap_s: float


def switch_over(config: Path, load: Load, name: str) -> Round:
    """One switchover to the node `name` under load."""
    since = time.monotonic()
    command = ("switchover", "--to", name, "--config", str(config), "--yes", "--json")
    ran = slotfailover_process(*command)
    acknowledged = len(load.acknowledged)
    eventually(lambda: len(load.acknowledged) > acknowledged + 20, what="writes go on")
    return Round(ran, load.gap_s(since, time.monotonic()))


def fail_over(config: Path, load: Load, name: str, server: PostgresServer) -> Round:
    """SIGKILL the primary, which is the node `name`; fail over, then rejoin it."""
    since = time.monotonic()
    postmaster = psutil.Process(int((server.data / "postmaster.pid").read_text().split()[0]))
    for process in (postmaster, *postmaster.children()):  # as when the machine dies
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    eventually(lambda: not server.running, what="a child of ours is reaped")
    ran = slotfailover_process("failover", "--config", str(config), "--yes", "--json")
    acknowledged = len(load.acknowledged)
    eventually(lambda: len(load.acknowledged) > acknowledged + 20, what="writes go on")
    gap_s = load.gap_s(since, time.monotonic())
    rejoined = slotfailover_process("rejoin", name, "--config", str(config), "--yes")
    return Round(ran if rejoined.code == 0 else rejoined, gap_s)


def compare(trio: Trio, new: Server, bridge: Bridge, load: Load) -> dict[str, int]:
    """What was lost or repeated, of each kind; raises AssertionError where Kafka differs."""
    conninfo = new.conninfo(trio.dbname)
    bridge.caught_up(conninfo)
    bridge.assert_kafka_equals(conninfo, *TABLES)
    count = ask(new, "SELECT count(*) FROM pgbench_history", trio.dbname)
    updates = {t: sum(1 for e in bridge.events(t) if e["op"] == "u") for t in BALANCES}
    with connect(new, trio.dbname) as connection:
        kept = {row[0] for row in connection.execute("SELECT id FROM ticks").fetchall()}
    with connect(new, trio.dbname) as source, connect(trio.subscriber, trio.dbname) as copy:
        for table in TABLES:
            query = f"SELECT md5(string_agg(t::text, ',' ORDER BY t::text)) FROM {table} t".encode()
            expected = source.execute(query).fetchone()
            eventually(
                lambda q=query, e=expected: copy.execute(q).fetchone() == e,  # type: ignore[misc]
                what=f"{table} is the same at the subscriber",
            )
    return {
        "transactions": count + len(kept),
        "events": sum(1 for table in TABLES for _ in bridge.events(table)),
        "events_lost": sum(max(0, count - n) for n in updates.values()),
        "events_duplicated": sum(max(0, n - count) for n in updates.values()),
        "acknowledged_lost": len({number for _, number in load.acknowledged} - kept),
    }


def main() -> None:
    """Run the drill and print its figures as one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Bed(folder / "bed", lazy=True) as bed:
            bed.start("kafka")
            with bed.new_pair() as (pair, subscriber):
                figures = _drill(folder, bed, pair, subscriber, given)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def _drill(
    folder: Path, bed: Bed, pair: Pair, subscriber: Server, given: argparse.Namespace
) -> dict[str, Any]:
    trio = Trio(pair.primary, pair.standby, subscriber, pair.dbname)
    rounds = given.rounds
    bridge = Bridge(folder, both(trio), bed.kafka, "drill")
    with contextlib.ExitStack() as stack:
        for server in (pair.primary, pair.standby):
            stack.callback(end, server)
        stack.callback(bridge.end)
        prepare(trio, bridge)
        config = drill_settings(folder, trio, bed, bridge)
        done = []
        with Load(trio, script(folder), given.clients).running() as load, watching(load, trio):
            for number in range(rounds):
                if given.kill:
                    name, server = (("a", pair.primary), ("b", pair.standby))[number % 2]
                    done.append(fail_over(config, load, name, server))
                else:
                    done.append(switch_over(config, load, "ba"[number % 2]))
                last = done[-1]
                sys.stderr.write(f"{number + 1}: {last.ran.code}, gap {last.gap_s:.3f} s\n")
                if last.ran.code != 0:
                    sys.stderr.write(last.ran.err)
                if last.gap_s > STALL_S:
                    sys.stderr.write(f"{json.dumps(last.ran.json['steps'], indent=1)}\n")
        new = trio.standby if rounds % 2 else trio.primary
        copies = compare(trio, new, bridge, load)
    gaps = [found.gap_s for found in done]
    return {
        "failovers" if given.kill else "switchovers": rounds,
        "failed": sum(found.ran.code != 0 for found in done),
        "write_gap_s": {
            "median": round(statistics.median(gaps), 3),
            "worst": round(max(gaps), 3),
        },
        "command_s": {
            "median": round(statistics.median(found.ran.json["seconds"] for found in done), 3),
            "worst": round(max(found.ran.json["seconds"] for found in done), 3),
        },
        "load_average": round(os.getloadavg()[2], 1),
        "steps_s": _steps(done, statistics.median),
        "steps_worst_s": _steps(done, max),
        **copies,
    }


def _steps(done: list[Round], of: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """What `of` makes of each step's seconds, nodes called X, and of all time between steps."""
    seconds: dict[str, list[float]] = {}
    for report in (found.ran.json for found in done if found.ran.code in (0, 1) and found.ran.out):
        left = report["seconds"]
        for step in report["steps"]:
            seconds.setdefault(re.sub(r"\b[ab]\b", "X", step["step"]), []).append(step["seconds"])
            left -= step["seconds"]
        seconds.setdefault("between steps", []).append(left)
    return {name: round(of(each), 3) for name, each in seconds.items()}


if __name__ == "__main__":
    main()
