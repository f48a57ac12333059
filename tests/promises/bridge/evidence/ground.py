"""A server that can be set back, a load whose rows are never equal, and what Kafka has of them."""

import itertools
import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from schemas.errors import ExitCode
from schemas.events import DivergenceRecord
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.interface import Broker
from tests.providers.waiting import eventually, patient, patient_ms

DBNAME = "bank"
_PAUSE_S = 0.005
_LARGE_ROWS = 700
_numbers = itertools.count(1)
_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Compared:
    """Rows of the database that no event has, and events beyond the first of each row.

    `phantoms`: rows that only Kafka has.
    """

    lost: int
    twice: int
    phantoms: int
    rows: int


class Load:
    """Clients that insert rows into `t` of a server, until `stop`; lost connections are renewed."""

    def __init__(self, server: PostgresServer, rng: random.Random, clients: int = 2) -> None:
        self.committed = 0
        self._server = server
        self._enough = threading.Event()
        seeds = [rng.random() for _ in range(clients)]
        self._threads = [
            threading.Thread(target=self._run, args=[random.Random(seed)], daemon=True)
            for seed in seeds
        ]
        for thread in self._threads:
            thread.start()

    def more(self, count: int) -> None:
        """Wait until `count` more transactions are committed."""
        wanted = self.committed + count
        eventually(lambda: self.committed >= wanted, what=f"{count} more transactions")

    def stop(self) -> None:
        """No more of it."""
        self._enough.set()
        for thread in self._threads:
            thread.join(patient(30))

    def _run(self, rng: random.Random) -> None:
        while not self._enough.is_set():
            try:
                with connect(self._server, DBNAME) as connection:
                    while not self._enough.wait(_PAUSE_S):
                        large = rng.random() < 0.02
                        insert(connection, _LARGE_ROWS if large else rng.randint(1, 5))
                        self.committed += 1
            except psycopg.Error:
                self._enough.wait(0.1)


def insert(connection: psycopg.Connection[Any], rows: int = 1) -> None:
    """One transaction with rows that were never there before."""
    numbers = [next(_numbers) for _ in range(rows)]
    connection.execute("INSERT INTO t SELECT unnest(%s::bigint[]), %s", [numbers, "x" * 100])


@dataclass
class Ground:
    """The servers, bridges and loads of one case, under a prefix of its own; `close` ends them."""

    bed: Bed
    broker: Broker
    folder: Path
    rng: random.Random
    program: Sequence[str | Path] = ()
    """Of the bridges, in place of `slotbridge`."""
    prefix: str = field(default_factory=lambda: f"g{os.urandom(6).hex()}")
    _servers: list[PostgresServer] = field(default_factory=list)
    _bridges: list[Bridge] = field(default_factory=list)
    _loads: list[Load] = field(default_factory=list)

    def close(self) -> None:
        """End and delete everything."""
        for bridge in self._bridges:
            bridge.end()
        for load in self._loads:
            load.stop()
        for server in self._servers:
            server.discard()

    def server(self) -> PostgresServer:
        """A new primary with the table `t`, running."""
        server = self.named()
        server.create()
        server.start()
        with connect(server) as connection:
            connection.execute(f"CREATE DATABASE {DBNAME}".encode())
        with connect(server, DBNAME) as connection:
            connection.execute("CREATE TABLE t (id bigint PRIMARY KEY, note text)")
        return server

    def image(self, server: PostgresServer, name: str = "image") -> Path:
        """What a snapshot of the volume has: `server` dies, is copied, and starts again."""
        server.kill()
        folder = server.data.with_name(f"{server.data.name}-{name}")
        _copy(server.data, folder)
        server.start()
        return folder

    def image_of_idle(self, server: PostgresServer) -> Path:
        """The same of a server that nobody writes to, which goes on running."""
        with connect(server) as connection:
            connection.execute("CHECKPOINT")
        folder = server.data.with_name(f"{server.data.name}-idle")
        _copy(server.data, folder)
        return folder

    def restore(self, server: PostgresServer, image: Path) -> None:
        """The volume of the killed `server` becomes that of the image."""
        assert not server.running
        server.remove_data()
        _copy(image, server.data)

    def copy(self, image: Path) -> PostgresServer:
        """Another server on a copy of the image, not started."""
        server = self.named()
        _copy(image, server.data)
        return server

    def load(self, server: PostgresServer) -> Load:
        """A load on `server`."""
        self._loads.append(Load(server, self.rng))
        return self._loads[-1]

    def bridge(self, *servers: PostgresServer, **settings: Any) -> Bridge:
        """A bridge that knows of `servers`; all of a ground have one slot and publication."""
        first = servers[0]
        conninfo = first.conninfo(
            DBNAME,
            host=",".join(["127.0.0.1"] * len(servers)),
            port=",".join(str(server.port) for server in servers),
        )
        known: dict[str, Any] = {
            "prefix": self.prefix,
            "connect_deadline_ms": patient_ms(10_000),  # a promotion may take some time
            "transaction_bytes_max": 2**16,
            "program": self.program,
            **settings,
        }
        self._bridges.append(Bridge(self.folder, conninfo, self.broker, **known))
        return self._bridges[-1]

    def named(self) -> PostgresServer:
        """A server that is neither created nor started."""
        server = self.bed.server(f"ground-{next(_names)}")
        self._servers.append(server)
        return server


@contextmanager
def new_ground(
    bed: Bed, broker: Broker, folder: Path, seed: int, program: Sequence[str | Path] = ()
) -> Iterator[Ground]:
    """A ground that is closed at the end of the block."""
    ground = Ground(bed, broker, folder, random.Random(seed), program)
    try:
        yield ground
    finally:
        ground.close()


def promote(server: PostgresServer) -> None:
    """Start `server`, which does not run, as a standby without a primary, and promote it."""
    (server.data / "standby.signal").touch()
    server.start()
    with connect(server) as connection:
        connection.execute("SELECT pg_promote()")


def in_recovery(server: PostgresServer) -> bool:
    """Whether it is a standby yet."""
    with connect(server) as connection:
        return connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)


def wal_lsn(server: PostgresServer) -> int:
    """Where its WAL is flushed up to."""
    with connect(server) as connection:
        row = connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])


def await_noted(bridge: Bridge, lsn: int) -> None:
    """Kafka's record says that the origin was beyond `lsn`."""
    eventually(lambda: bridge.progress()[-1].witness.lsn > lsn, what="the record notes the origin")


class NotRefused(AssertionError):
    """A bridge that had to be refused by name goes on, or has ended otherwise."""

    def __init__(self, what: str, *, streams: bool = False) -> None:
        super().__init__(what)
        self.streams = streams


def refusal(bridge: Bridge, code: ExitCode, words: str) -> str:
    """It ends by itself, with `code` and one line that has `words`; return that line.

    Raises NotRefused.
    """
    try:
        found = bridge.exit_code()
    except AssertionError:
        streams = bridge.streams
        what = "it streams" if streams else "it neither streams nor ends"
        raise NotRefused(f"{what}: {bridge.output}", streams=streams) from None
    line = bridge.output.strip().splitlines()[-1]
    if found != code or not line.startswith("error: ") or words not in line:
        raise NotRefused(f"exit code {found}: {bridge.output}")
    return line


def sessions_after(bridge: Bridge, start: Callable[[], object], count: int = 1) -> None:
    """`start` it, and wait until it streams `count` times more."""
    wanted = bridge.sessions + count
    start()

    def streams() -> bool:
        assert bridge.running, bridge.output
        return bridge.sessions >= wanted

    eventually(streams, what="the bridge streams", timeout_s=60)


def compare(server: PostgresServer, bridge: Bridge) -> Compared:
    """Rows against events, without those that an accepted divergence declares void."""
    with connect(server, DBNAME) as connection:
        rows = {row[0] for row in connection.execute("SELECT id FROM t")}
    lost = [
        DivergenceRecord.model_validate_json(value)
        for _, value in (bridge.records("divergence") if _diverged(bridge) else [])
        if value is not None
    ]
    events: Counter[int] = Counter(
        event["after"]["id"]
        for event in bridge.events("t")
        if event["op"] == "c" and not any(is_void(event, one) for one in lost)
    )
    return Compared(
        len(rows - events.keys()),
        sum(count - 1 for count in events.values()),
        len(events.keys() - rows),
        len(rows),
    )


def is_void(event: dict[str, Any], lost: DivergenceRecord) -> bool:
    """As docs/why/delivery.md tells consumers: on one timeline, what came before the divergence."""
    source = event["source"]
    return (
        source["timeline"] == lost.lost_timeline
        and source["commit_lsn"] >= lost.switch_lsn
        and (lost.lost_timeline != lost.timeline or event["ts_ms"] < lost.ts_ms)
    )


def _diverged(bridge: Bridge) -> bool:
    return f"{bridge.prefix}.divergence" in bridge.topics()


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    (target / "postmaster.pid").unlink(missing_ok=True)
