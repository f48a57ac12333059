"""A pair with a subscriber under load, the orders that are given to it, and what is judged."""

import contextlib
import random
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
import yaml

from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.running import Bridge
from tests.promises.failover.conftest import machines
from tests.promises.failover.frozen_server import postmaster_of
from tests.promises.failover.rounds.clients import Client, Values, lists_of, pause, resume, writing
from tests.promises.failover.rounds.history import AcceptedLoss, Operation, check
from tests.promises.failover.rounds.paths import Paths
from tests.promises.failover.servers import Ran, ask, slotfailover_process
from tests.promises.failover.watch.watch_process import SETTINGS
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient, patient_ms

PROMOTED, REFUSED = (0, 1), 35
PATIENCE_S = 200.0
"""On a machine that does other work, a command takes its time."""
CLIENTS_A_NODE = 2
KILL = (
    'p=$(head -n 1 "$1/postmaster.pid") && kill -STOP $p || exit 1; '
    "kill -KILL $(cat /proc/$p/task/$p/children) 2> /dev/null; kill -KILL $p"
)
"""A `fence` command: SIGKILL every process of a server, also of one that is frozen. A child that
ends by itself meanwhile is no failure.
"""


@dataclass
class Round:
    """What was tried, the exit codes of the orders, and the primary in the end."""

    what: str
    codes: list[int]
    primary: str


@dataclass
class Rig:
    """Nodes a and b, the subscriber `sub`, clients at each node."""

    folder: Path
    trio: Trio
    bed: Bed
    seed: int
    step_deadline_ms: int = patient_ms(10_000)
    bridge: Bridge | None = None
    paths: Paths | None = field(default=None, init=False)
    history: list[Operation] = field(default_factory=list)
    accepted: list[AcceptedLoss] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What each order has told."""

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        nodes = {"a": self.trio.primary, "b": self.trio.standby}
        self.servers: dict[str, PostgresServer] = {}
        for name, server in {**nodes, "sub": self.trio.subscriber}.items():
            assert isinstance(server, PostgresServer)
            self.servers[name] = server
        values = Values(self.seed)
        self.clients = [
            Client(name, self._conninfo(name, self.servers[name].port), values, self.history)
            for name in nodes
            for _ in range(CLIENTS_A_NODE)
        ]
        self._machines = machines(self.trio, self.bed)
        for name, given in self._machines.items():
            data = str(self.servers[name].data)
            given["fence"] = shlex.join(["sh", "-c", KILL, "kill", data])

    @property
    def primary(self) -> str:
        """The node out of recovery; raises AssertionError for none or two."""
        found = self.writable()
        assert len(found) == 1, f"primaries: {found}"
        return found[0]

    def writable(self) -> list[str]:
        """The nodes out of recovery."""
        return [name for name in "ab" if not self._in_recovery(name)]

    def is_standby(self, name: str) -> bool:
        """Whether it answers in recovery."""
        try:
            return bool(ask(self.servers[name], "SELECT pg_is_in_recovery()"))
        except psycopg.Error:
            return False

    @property
    def timeline(self) -> int:
        """The primary's."""
        query = "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int"
        return int(ask(self.servers[self.primary], query))

    def through(self, paths: Paths) -> None:
        """Let clients, before they begin, come through proxies, and the nodes be known by them."""
        self.paths = paths
        for client in self.clients:
            client.conninfo = self._conninfo(client.node, paths.proxy("client", client.node).port)

    def other(self, name: str) -> str:
        """The other node."""
        return "b" if name == "a" else "a"

    def settings(self, file: str = "failover.yaml", **refused: str) -> Path:
        """`refused`: another conninfo for a server."""
        nodes = {name: refused.get(name) or self.servers[name].conninfo() for name in "ab"}
        subscriber = self.servers["sub"].conninfo(self.trio.dbname)
        given = {
            "nodes": nodes,
            "advertised": {name: self._addresses(name) for name in "ab"},
            "subscribers": {"sub": refused.get("sub") or subscriber},
            "machines": self._machines,
            "synchronous_standbys": 1,
            "connect_timeout_s": round(patient(0.7)),
            "step_deadline_ms": self.step_deadline_ms,
            "journal": str(self.folder / "journal"),
            "watch": SETTINGS,
        }
        document = yaml.safe_load(self.bridge.config.read_text()) if self.bridge else {}
        path = self.folder / file
        path.write_text(yaml.safe_dump({**document, "failover": given}))
        return path

    def order(self, *words: str, **refused: str) -> Ran:
        """Run a command."""
        command = (*words, "--config", str(self.settings(**refused)), "--yes")
        ran = slotfailover_process(*command, timeout_s=PATIENCE_S)
        self.said.append(f"{' '.join(words)}: {ran.code}\n{ran.err}{ran.out}")
        return ran

    def hand_over(self) -> None:
        """A switchover to the other node, complete."""
        self.complete("switchover", "--to", self.other(self.primary))

    def complete(self, *words: str) -> None:
        """Run a command that must succeed."""
        ran = self.order(*words)
        assert ran.code == 0, ran.err + ran.out

    def kill(self, name: str) -> None:
        """SIGKILL every process of a server at once, as when its machine dies, if it runs."""
        server = self.servers[name]
        try:
            postmaster = postmaster_of(server)
            if str(server.data) not in postmaster.cmdline():
                return
            processes = [postmaster, *postmaster.children()]
        except (psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError):
            return
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        eventually(lambda: not server.running, what="a child of ours is reaped")
        eventually(
            lambda: not any(psutil.pid_exists(each.pid) for each in processes),
            what=f"{name} is gone",
        )

    def settle(self) -> None:
        """Writes go on, the pair is whole and synchronous, and what was acknowledged is there."""
        name = self.primary
        writers = [client for client in self.clients if client.node == name]
        before = sum(client.acknowledged for client in writers)
        eventually(
            lambda: sum(client.acknowledged for client in writers) > before + 5,
            what=f"{name} takes writes",
            timeout_s=PATIENCE_S,
        )
        standby = self.servers[self.other(name)]
        await_ready(self.servers[name], standby, "s1", timeout_s=PATIENCE_S)
        eventually(
            lambda: ask(self.servers[name], "SHOW synchronous_standby_names"),
            what=f"commits at {name} wait for the standby",
            timeout_s=PATIENCE_S,
        )
        self.judge()

    def judge(self) -> None:
        """Raise AssertionError where the history has an anomaly, or a copy is another."""
        pause(self.clients)
        primary = self.primary
        final = lists_of(self.servers[primary], self.trio.dbname)
        anomalies = check(self.history, final, self.accepted)
        assert not anomalies, f"{len(anomalies)} anomalies: {anomalies[:10]}"
        for name in (self.other(primary), "sub"):
            eventually(
                lambda name=name: lists_of(self.servers[name], self.trio.dbname) == final,  # type: ignore[misc]
                what=f"{name} has what {primary} has",
                timeout_s=PATIENCE_S,
            )
        if self.bridge is not None:
            conninfo = self.servers[primary].conninfo(self.trio.dbname)
            self.bridge.caught_up(conninfo)
            self.bridge.assert_kafka_equals(conninfo, "lists")
        resume(self.clients)

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """The clients write until the end of the block; servers that others end are reaped."""
        ended = threading.Event()

        def reap() -> None:
            while not ended.wait(0.1):
                for server in self.servers.values():
                    server.running  # noqa: B018 - it polls a child of ours

        reaper = threading.Thread(target=reap)
        reaper.start()
        try:
            with writing(self.clients):
                yield
        finally:
            ended.set()
            reaper.join()

    def entries(self, step: str) -> int:
        """How many entries the journal has of steps that begin so."""
        path = self.folder / "journal"
        return path.read_text().count(f'"step": "{step}') if path.exists() else 0

    def _addresses(self, name: str) -> list[str]:
        ports = [self.servers[name].port, *(self.paths.ports_of(name) if self.paths else [])]
        return [f"host=127.0.0.1 port={port}" for port in ports]

    def _conninfo(self, name: str, port: int) -> str:
        return self.servers[name].conninfo(self.trio.dbname, port=port)

    def _in_recovery(self, name: str) -> bool:
        try:
            return bool(ask(self.servers[name], "SELECT pg_is_in_recovery()"))
        except psycopg.Error:
            return True
