"""Kills `slottables run` at random moments under load, fails over in between, compares every row.

At the end, epochs are listed, a table is made anew and all are maintained, beside `run`.

`python -m tests.promises.tables.drill --kills 50` prints one JSON line of totals; exit 0 when all
rows of all tables are equal to the source's, and no reader saw tables of two epochs. A few kills of
it are a test.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import yaml

from services.testbed import jars
from services.testbed.java import short_lived_spark
from tests.promises.bridge.running import Bridge
from tests.promises.tables.one_java import Done, run_all
from tests.promises.tables.own_servers import own_servers
from tests.promises.tables.readers import Readers
from tests.promises.tables.tables import BANK, BANK_TABLES, LARGE, ROWS, TABLES, TRANSFER
from tests.providers.interface import Broker, Server, Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient

PREFIX = "drill"
BALANCES = {f"pgbench_{name}": f"{name[0]}balance" for name in ("accounts", "tellers", "branches")}
"""The columns whose sums are equal after each transaction."""
VERIFY = ("verify", "--json", "--examples")
_CHANGES = (
    "UPDATE types SET small = small % 1000 + 1, middle = %(n)s WHERE id < 6",
    "UPDATE types SET t = repeat(%(n)s::text, 3000), price = %(n)s WHERE id = 1 + %(n)s % 5",
    "DELETE FROM types WHERE id = 3; INSERT INTO types (id, j, free) VALUES (3, '{}', 'NaN')",
    "UPDATE whole SET note = %(n)s::text WHERE id < 4",
    "UPDATE whole SET id = id + 1000 WHERE id = (SELECT max(id) FROM whole)",
    "INSERT INTO log SELECT 'same', %(n)s FROM generate_series(1, 5)",
    "TRUNCATE emptied; INSERT INTO emptied VALUES (1, %(n)s::text), (2, NULL)",
    "UPDATE lists SET ints = ARRAY[%(n)s, NULL] WHERE id = 1 + %(n)s % 3",
)


@dataclass
class Totals:
    """What a drill did and found."""

    seed: int
    kills: int = 0
    failovers: int = 0
    killed_in_rebuild: int = 0
    """Kills while a rebuild was begun and not done."""
    epochs: int = 0
    looks: int = 0
    torn: int = 0
    """Looks of readers beside it, and how many of them saw tables of two epochs."""
    transactions: int = 0
    tables: int = 0
    rows: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Slottables:
    """`slottables` as processes of one configuration."""

    def __init__(
        self,
        folder: Path,
        source: dict[str, Any],
        bootstrap_servers: str,
        prefix: str,
        tables: Sequence[str] = (),
        trigger_interval_ms: int = 100,
        shaping: dict[str, Any] | None = None,
    ) -> None:
        self.config = folder / "tables.yaml"
        self._out = folder / "tables.out"
        self._log = folder / "tables.log"
        self._process: subprocess.Popen[bytes] | None = None
        document = {
            "source": source,
            "shaping": shaping or {},
            "kafka": {"bootstrap_servers": bootstrap_servers, "topic_prefix": prefix},
            "tables": {
                "tables": list(tables),
                "warehouse": str(folder / "warehouse"),
                "trigger_interval_ms": trigger_interval_ms,
                "driver_memory": "1g",
                "spark_options": {
                    **short_lived_spark(folder / "spark"),
                    "spark.jars": jars.class_path("spark", ","),
                },
            },
        }
        self.config.write_text(yaml.safe_dump(document), encoding="utf-8")

    def start(self) -> None:
        """Start `run` and wait until it follows."""
        before = self.log.count("consuming")
        with self._out.open("ab") as out, self._log.open("ab") as log:
            program = Path(sys.executable).parent / "slottables"
            self._process = subprocess.Popen(
                [program, "run", "--config", self.config, "--json"],
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        eventually(
            lambda: self._ended() or self.log.count("consuming") > before,
            what="slottables follows",
            timeout_s=300,
        )
        self.require_running()

    def await_epoch(self) -> None:
        """Wait for an epoch of this start."""
        before = len(self.epochs())
        eventually(
            lambda: self._ended() or len(self.epochs()) > before,
            what="an epoch",
            timeout_s=600,
        )

    def require_running(self) -> None:
        """Fail with its last words when it has ended by itself."""
        assert not self._ended(), self.log[-3000:]

    def kill(self) -> None:
        """SIGKILL the driver: Python and its Java at once."""
        assert self._process is not None
        subprocess.run(["kill", "-9", "--", f"-{self._process.pid}"], check=True)
        self._process.wait(timeout=patient(60))

    def end(self) -> None:
        """End it in any case."""
        if not self._ended():
            self.kill()

    def stop(self) -> None:
        """SIGTERM; it must end with 0."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout=patient(300))
        assert code == 0, self.log[-3000:]

    def verify(self) -> dict[str, Any]:
        """The report of `slottables verify`."""
        (done,) = run_all(self.config, VERIFY)
        return report_of(done)

    @property
    def log(self) -> str:
        """What it has logged, over all starts."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def epochs(self) -> list[dict[str, Any]]:
        """The epochs that it has reported, over all starts."""
        lines = self._out.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"epoch"')]

    @property
    def last_epoch_s(self) -> float:
        """How long the last epoch took; before the first, what one may take."""
        return float(next((e["seconds"] for e in reversed(self.epochs())), 6.0))

    @property
    def rebuilds(self) -> bool:
        """Whether a rebuild was begun, in any start, and is not done."""
        return self.log.rfind("a rebuild begins") > self.log.rfind("a rebuild is done")

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


def report_of(done: Done) -> dict[str, Any]:
    """What `VERIFY` has printed."""
    assert done.stdout, done.log
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Load:
    """Transfers and changes of every type, until it is stopped; follows a failover."""

    def __init__(self, conninfo: str, seed: int, pause_s: float) -> None:
        self._conninfo = conninfo
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self.transactions = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End it after the transaction under way."""
        self._stop.set()
        self._thread.join(timeout=patient(120))
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    while not self._stop.is_set():
                        self._change(connection)
            except psycopg.OperationalError:
                self._stop.wait(0.2)

    def _change(self, connection: psycopg.Connection) -> None:
        for _ in range(30):
            values = [self._random.randint(1, n) for n in (2000, 30, 3)]
            aid, tid, bid = values
            delta = self._random.randint(-5000, 5000)
            connection.execute(TRANSFER.format(aid=aid, tid=tid, bid=bid, delta=delta).encode())
        number = self._random.randint(0, 10_000)
        statement = self._random.choice(_CHANGES).replace("%(n)s", str(number))
        connection.execute(statement.encode())
        if self._random.random() < 0.05:
            connection.execute(LARGE.encode())
        self.transactions += 31
        self._stop.wait(self._pause_s)


def both(trio: Trio) -> str:
    """A connection setting that finds whichever server is primary."""
    return trio.primary.conninfo(
        trio.dbname,
        host="127.0.0.1,127.0.0.1",
        port=f"{trio.primary.port},{trio.standby.port}",
        target_session_attrs="read-write",
    )


def drill(
    trio: Trio,
    kafka: Broker,
    folder: Path,
    *,
    kills: int,
    seed: int,
    minutes: float = 1e6,
    pause_s: float = 0.05,
    within_s: float = 0.0,
    trigger_interval_ms: int = 100,
    rebuilds: bool = False,
) -> Totals:
    """Kill up to `kills` times within `minutes`, fail over early on, and compare.

    `pause_s`: the load's, after each 31 transactions. `within_s`: so long after a start or an
    epoch's end a kill comes; 0: as the last epoch took, so that every part of an epoch is met.
    `trigger_interval_ms`: between epochs; longer than one takes: other work goes on beside it.
    `rebuilds`: before each kill, a table gets a column with a default, and another one is rebuilt.
    """
    totals, chance, started = Totals(seed), random.Random(seed), time.monotonic()
    conninfo = both(trio)
    primary: Server = trio.primary
    bridge = Bridge(folder, conninfo, kafka, PREFIX, transaction_bytes_max=65536)
    source = {"conninfo": conninfo, "publication": bridge.publication, "slot": bridge.slot}
    tables = Slottables(
        folder,
        source,
        kafka.bootstrap_servers,
        PREFIX,
        trigger_interval_ms=trigger_interval_ms,
    )
    try:
        bridge.start().streaming(primary.conninfo(trio.dbname))
        with psycopg.connect(conninfo, autocommit=True) as connection:
            for script in (BANK_TABLES, BANK, TABLES, ROWS):
                connection.execute(script.encode())
        await_ready(trio.primary, trio.standby, bridge.slot)
        load = Load(conninfo, seed, pause_s)
        readers = Readers(folder / "warehouse" / "catalog.db", PREFIX, BALANCES)
        try:
            readers.start()
            for number in range(kills):
                if number > 1 and time.monotonic() - started > minutes * 60:
                    break
                tables.start()
                if chance.random() < 0.7:  # else killed before it has done anything, maybe
                    tables.await_epoch()
                if rebuilds:
                    _change_shape_and_rebuild(tables, conninfo, number)
                time.sleep(chance.uniform(0.0, within_s or tables.last_epoch_s))
                tables.require_running()
                tables.kill()
                totals.kills += 1
                totals.killed_in_rebuild += tables.rebuilds
                if number == min(kills // 2, 3):
                    trio.primary.kill()
                    with psycopg.connect(trio.standby.conninfo(), autocommit=True) as admin:
                        admin.execute("SELECT pg_promote()")
                    primary = trio.standby
                    bridge.streaming(primary.conninfo(trio.dbname))
                    totals.failovers += 1
            tables.start()
            _operate(tables)
        finally:
            load.stop()
            readers.stop()
        bridge.caught_up(primary.conninfo(trio.dbname))
        _await_last(bridge, tables)
        tables.stop()
        assert bridge.stop() == 0, bridge.output
        report = tables.verify()
    finally:
        tables.end()
        bridge.end()
    totals.looks, totals.torn = readers.seen.looks, readers.seen.torn
    totals.transactions = load.transactions
    totals.epochs = max(epoch["epoch"] for epoch in tables.epochs())
    totals.tables = len(report["tables"])
    totals.rows = sum(table["table_rows"] for table in report["tables"])
    totals.different = [json.dumps(t) for t in report["tables"] if not t["equal"]]
    totals.seconds = round(time.monotonic() - started, 1)
    return totals


def _change_shape_and_rebuild(tables: Slottables, conninfo: str, number: int) -> None:
    """Add a column with a default to one table, and have `run` rebuild another one."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE whole ADD d{number} int DEFAULT {number}".encode())
    if not tables.rebuilds:
        (asked,) = run_all(tables.config, ("rebuild", "--table", "public.pgbench_accounts"))
        assert asked.code == 0, asked.log

    def begun() -> bool:
        tables.require_running()
        return tables.rebuilds or "a rebuild is done" in tables.log

    eventually(begun, what="the rebuild begins, after the epoch under way", timeout_s=600)


def _operate(tables: Slottables) -> None:
    """List epochs, blame a row, have a table made anew, maintain all, while `run` goes on."""
    tables.await_epoch()
    known = {epoch["commit_lsn"] for epoch in tables.epochs()}
    epochs, blamed, rebuilt, maintained = run_all(
        tables.config,
        ("epochs", "--json"),
        ("blame", "--table", "public.pgbench_branches", "--key", "1", "--json"),
        ("rebuild", "--table", "public.whole"),
        ("maintain", "--json"),
    )
    listed = {json.loads(line)["commit_lsn"] for line in epochs.stdout.splitlines()}
    assert listed & known, (listed, known)
    versions = [json.loads(line) for line in blamed.stdout.splitlines()]
    assert versions and all(version["xid"] for version in versions), blamed
    for done in (rebuilt, maintained):
        assert done.code == 0, done.log
        assert "whole" in done.stdout, done
    eventually(
        lambda: tables.log.count("a rebuild is done") and not tables.rebuilds,
        what="the rebuild is done",
        timeout_s=300,
    )
    tables.await_epoch()
    tables.require_running()


def _await_last(bridge: Bridge, tables: Slottables) -> None:
    """Wait until the tables are at the last transaction that Kafka has."""
    lsn = max(
        json.loads(value)["commit_lsn"] for _, value in bridge.records("transaction") if value
    )
    last = f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"

    def there() -> bool:
        tables.require_running()
        return any(epoch["commit_lsn"] == last for epoch in tables.epochs()[-3:])

    eventually(there, what=f"the tables are at {last}", timeout_s=600, interval_s=0.2)


def main() -> None:
    """The large drill, on servers of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--pause-s", type=float, default=0.05, help="of the load")
    parser.add_argument("--rebuilds", action="store_true", help="kill within rebuilds and fills")
    options = parser.parse_args()
    with own_servers("drill", synchronous=True) as (trio, kafka, folder):
        totals = drill(
            trio,
            kafka,
            folder,
            kills=options.kills,
            seed=options.seed,
            minutes=options.minutes,
            pause_s=options.pause_s,
            rebuilds=options.rebuilds,
        )
    sys.stdout.write(json.dumps(asdict(totals)) + "\n")
    raise SystemExit(bool(totals.different or totals.torn))


if __name__ == "__main__":
    main()
