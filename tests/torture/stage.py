"""The servers and the bridge, and how each fault is done to them. Every fault ends healed."""

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import yaml
from psycopg import sql
from psycopg.errors import LockNotAvailable
from typer.testing import CliRunner

from services.failover.command import app as slotfailover
from services.local.bed import Bed
from services.local.pair import STANDBY_SLOT, alter_system, clone, execute
from services.local.postgres import PostgresServer
from tests.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.proxy import Proxy
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually
from tests.torture.clients import Client
from tests.torture.faults import Fault
from tests.torture.supervisor import Supervised

_FAILPOINT_WAIT_S: Final = 8.0
_STREAMING_S: Final = 1.5
_LOOK_S: Final = 0.05
_FAR_AWAY_S: Final = 0.08
"""Each way: 160 ms for a round trip, as between continents."""
_HARASSED_EVERY_S: Final = (0.5, 4.0)
_TAKE_OVER_S: Final = 60.0
OLD_PRIMARY: Final = "it is an old primary"
GHOST: Final = "ghost"
"""The tid of what only a revived old primary has: it must never be in Kafka."""


class Stage:
    """Of one run: `primary` and `standby` change places at a failover."""

    def __init__(
        self,
        bed: Bed,
        servers: tuple[PostgresServer, PostgresServer],
        folder: Path,
        *,
        to_kafka: Proxy | None,
        sabotage: str,
        commits_wait: bool,
    ) -> None:
        self._bed = bed
        self._folder = folder
        self._sabotage = sabotage
        self._to_kafka = to_kafka
        self._commits_wait = commits_wait
        self.primary, self.standby = servers
        self._proxies = [Proxy(server.port) for server in servers]
        self.faults: Counter[str] = Counter()
        self.failovers = 0
        self.rival_kills = 0
        self.clients: Sequence[Client] = ()
        self._began = time.monotonic()

    def begin(self, bridge: Bridge, *failpoints: str) -> None:
        """From now on a bridge runs."""
        self.bridge = bridge
        self.supervised = Supervised(bridge.config, bridge.log, sabotage=self._sabotage)
        self.supervised.start(*failpoints)
        self.bridge_streams()
        alter_system(self.primary, "synchronous_standby_names", self._synchronous)

    def release(self) -> None:
        """From now on no commit waits for the bridge."""
        alter_system(self.primary, "synchronous_standby_names", STANDBY_SLOT)

    @property
    def _synchronous(self) -> str:
        """Commits wait for the standby; with `commits_wait` for the bridge, too."""
        bridge = f"slotbridge_{self.bridge.slot}"
        return f"FIRST 2 ({STANDBY_SLOT}, {bridge})" if self._commits_wait else STANDBY_SLOT

    def close(self) -> None:
        """End what is left of it."""
        if hasattr(self, "supervised"):
            self.supervised.end()
        for proxy in self._proxies:
            proxy.close()

    @property
    def conninfo(self) -> str:
        """Of the pair, for clients."""
        return self._conninfo([self.primary.port, self.standby.port])

    @property
    def proxied_conninfo(self) -> str:
        """Of the pair, for the bridge: its walsender streams what is larger than 64 kB."""
        options = "-c logical_decoding_work_mem=64kB"
        return self._conninfo([proxy.port for proxy in self._proxies], options=options)

    def _conninfo(self, ports: Sequence[int], **more: str) -> str:
        return self.primary.conninfo(
            self._bed.dbname,
            host="127.0.0.1,127.0.0.1",
            port=",".join(map(str, ports)),
            target_session_attrs="read-write",
            **more,
        )

    def bridge_streams(self) -> None:
        """Wait until a bridge is connected to the primary's slot, or has given up for good."""
        with connect(self.primary) as connection:

            def active() -> bool:
                if self.supervised.operator_needed is not None:
                    return True
                row = connection.execute(
                    "SELECT active FROM pg_replication_slots WHERE slot_name = %s",
                    [self.bridge.slot],
                ).fetchone()
                return row is not None and bool(row[0])

            eventually(active, what="a bridge streams", timeout_s=120, interval_s=0.1)

    def perform(self, fault: Fault) -> None:
        """Do it, and undo what it does to servers and network."""
        self.faults[fault.name] += 1
        self._note(fault.name, *fault.points, "harassed" if fault.harassed else "")
        match fault.name:
            case "kill":
                self.supervised.kill()
            case "failpoint" | "crash loop":
                self._crash(fault.points)
            case "sigterm":
                self._crash(fault.points, terminate=True)
            case "freeze":
                self.supervised.freeze()
                time.sleep(2 * fault.seconds)
                self.supervised.thaw()
            case "rival":
                self._rival(fault)
            case "terminate":
                self._terminate_bridge()
            case _:
                if fault.name == "failover":
                    self._await_ready()
                with self._harassed(fault):
                    self._to_servers(fault)
        self._note(fault.name, "done")

    def _to_servers(self, fault: Fault) -> None:
        broker = self._bed.kafka
        match fault.name:
            case "network cut":
                for proxy in self._proxies:
                    proxy.cut()
                self._heal_after(fault.seconds)
            case "network stalled":
                for proxy in self._proxies:
                    proxy.stall()
                self._heal_after(2 * fault.seconds)
            case "broker cut off":
                if self._to_kafka is not None:
                    self._to_kafka.cut()
                    time.sleep(1 + 2 * fault.seconds)
                    self._to_kafka.heal()
            case "broker killed":
                broker.kill()
                time.sleep(fault.seconds / 2)
                broker.start()
            case "broker paused":
                broker.pause()
                time.sleep(2 * fault.seconds)
                broker.resume()
            case "broker far away":
                if self._to_kafka is not None:
                    self._to_kafka.delay(_FAR_AWAY_S)
                    self.supervised.kill()
                    time.sleep(2 * fault.seconds)
                    self._to_kafka.heal()
            case "publication altered":
                self._alter_publication(fault.seconds)
            case "tables locked":
                self._lock_tables()
            case "primary restarted":
                self.primary.restart("immediate")
            case "standby killed":
                self.standby.kill()
                time.sleep(fault.seconds)
                self.standby.start()
            case "failover":
                self._fail_over(revived=fault.revived)
            case _:
                raise AssertionError(fault.name)

    def _alter_publication(self, seconds: float) -> None:
        """Set what is set already: the server's output plugin reads it anew, also in a stream."""
        query = sql.SQL("ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate')")
        until = time.monotonic() + seconds
        with connect(self.primary, self._bed.dbname) as connection:
            while time.monotonic() < until:
                connection.execute(query.format(sql.Identifier(self.bridge.publication)))
                time.sleep(_LOOK_S)

    def _lock_tables(self) -> None:
        """A killed bridge starts and streams although nobody else can open a published table."""
        with connect(self.primary, self._bed.dbname) as connection, connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '10s'")
            try:
                connection.execute("LOCK TABLE routed IN ACCESS EXCLUSIVE MODE")
            except LockNotAvailable:
                self.faults["tables locked"] -= 1  # it was not done, so the report must not say so
                return
            ends = self.supervised.ends.sigkills
            self.supervised.kill()
            self.supervised.await_end(ends + 1, _FAILPOINT_WAIT_S)
            self.bridge_streams()

    def _heal_after(self, seconds: float) -> None:
        time.sleep(seconds)
        for proxy in self._proxies:
            proxy.heal()

    def _crash(self, points: Sequence[str], *, terminate: bool = False) -> None:
        """Each bridge in turn runs into its failpoint, or is killed without having met it.

        SIGTERM leads it there with `terminate`.
        """
        kills = self.supervised.ends.sigkills
        self.supervised.arm(*points)
        self.supervised.await_end(kills + 1, _FAILPOINT_WAIT_S)
        if terminate:
            self.bridge_streams()
            self.supervised.terminate()
        for number, _ in enumerate(points, 2):
            if not self._ends(kills + number):
                self.supervised.kill()

    def _ends(self, kills: int) -> bool:
        """Whether there were so many, before the bridge has streamed for long enough."""
        sessions = self._sessions()
        give_up = time.monotonic() + _FAILPOINT_WAIT_S
        while not self.supervised.await_end(kills, _LOOK_S):
            if self._sessions() != sessions:
                sessions = self._sessions()
                give_up = time.monotonic() + _STREAMING_S
            if time.monotonic() > give_up:
                return False
        return True

    def _sessions(self) -> int:
        passages = self.supervised.passages()
        return passages["started"] + passages["resumed inside"]

    @contextlib.contextmanager
    def _harassed(self, fault: Fault) -> Iterator[None]:
        """Meanwhile the bridge is killed, again and again, where the fault says so."""
        enough = threading.Event()
        moments = random.Random(f"{fault}")

        def harass() -> None:
            while not enough.wait(moments.uniform(*_HARASSED_EVERY_S)):
                self.supervised.arm(*fault.points)

        thread = threading.Thread(target=harass, name="harass", daemon=True)
        if fault.harassed:
            thread.start()
        try:
            yield
        finally:
            enough.set()
            if fault.harassed:
                thread.join()

    def _terminate_bridge(self) -> None:
        with connect(self.primary) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'slotbridge%'"
            )

    def _rival(self, fault: Fault) -> None:
        """The bridge stops dead with a Kafka transaction open; another takes over; it goes on."""
        self.supervised.arm("before kafka commit:2:stop")
        with contextlib.suppress(AssertionError):
            eventually(self.supervised.stopped, what="it has stopped", timeout_s=_FAILPOINT_WAIT_S)
        self.supervised.freeze()
        self._terminate_bridge()
        document = yaml.safe_load(self.bridge.config.read_text(encoding="utf-8"))
        folder = self._folder / "rival"
        folder.mkdir(exist_ok=True)
        document["bridge"]["spool_folder"] = str(folder)
        config = folder / "rival.yaml"
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        log = folder / "rival.log"
        seen = log.read_text(encoding="utf-8").count(" streaming ") if log.exists() else 0
        rival = Supervised(config, log, sabotage=self._sabotage)
        rival.start()
        try:
            eventually(
                lambda: (
                    rival.operator_needed is not None
                    or (log.exists() and log.read_text("utf-8").count(" streaming ") > seen)
                ),
                what="the rival streams",
                timeout_s=_TAKE_OVER_S,
            )
            time.sleep(fault.seconds / 4)
            self.supervised.thaw()
            time.sleep(fault.seconds)
        finally:
            self.supervised.thaw()
            rival.end()
            self.rival_kills += rival.ends.sigkills
            if rival.operator_needed is not None:
                self.supervised.operator_needed = rival.operator_needed

    def _await_ready(self) -> None:
        """Wait until the slot would survive a promotion: the bridge must advance it for that."""
        self.bridge_streams()
        if self.supervised.operator_needed is None:
            await_ready(self.primary, self.standby, self.bridge.slot, timeout_s=120)

    def _fail_over(self, *, revived: bool) -> None:
        """The primary dies; the runbook command; the old one comes back as a new standby."""
        if self.supervised.operator_needed is not None:
            return
        self.primary.kill()
        config = self._folder / "failover.yaml"
        nodes = {s.name: s.conninfo() for s in (self.primary, self.standby)}
        config.write_text(json.dumps({"failover": {"nodes": nodes, "connect_timeout_s": 2}}))
        done = CliRunner().invoke(slotfailover, ["failover", "--config", str(config), "--yes"])
        assert done.exit_code == 0, done.output + done.stderr
        self.failovers += 1
        self.primary, self.standby = self.standby, self.primary
        if revived:
            self._revive_the_old_one()
        self._rebuild_standby()

    def _revive_the_old_one(self) -> None:
        """It comes back alone, as a primary, and commits what nobody must ever see.

        Clients wait meanwhile: what they wrote there would be lost, as an operator's mistake.
        """
        self.faults["old primary revived"] += 1
        self.bridge_streams()
        for client in self.clients:
            client.hold.set()
        eventually(lambda: all(c.held.is_set() for c in self.clients), what="held", timeout_s=90)
        self._note("revived")
        self.primary.kill()
        self.standby.start()
        refused = self.bridge.output.count(OLD_PRIMARY)
        for name in ("synchronized_standby_slots", "synchronous_standby_names"):
            alter_system(self.standby, name, "")
        with connect(self.standby, self._bed.dbname) as connection:
            connection.execute("SET synchronous_commit = local")
            for _ in range(2):  # beyond whatever Kafka has
                connection.execute("SELECT pg_switch_wal()")
                connection.execute(
                    "INSERT INTO ledger VALUES (%s || gen_random_uuid()::text, 'ghost', '{}')",
                    [GHOST],
                )

            def noticed() -> bool:
                row = connection.execute(
                    "SELECT active FROM pg_replication_slots WHERE slot_name = %s",
                    [self.bridge.slot],
                ).fetchone()
                taken = self.supervised.operator_needed or (row is not None and bool(row[0]))
                return bool(taken) or self.bridge.output.count(OLD_PRIMARY) > refused

            eventually(noticed, what="the bridge has met the old primary", timeout_s=60)
        time.sleep(0.5)
        self.standby.kill()
        self.primary.start()
        for client in self.clients:
            client.hold.clear()

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
        alter_system(self.primary, "synchronized_standby_slots", STANDBY_SLOT)
        alter_system(self.primary, "synchronous_standby_names", self._synchronous)

    def _note(self, *words: str) -> None:
        line = f"{time.monotonic() - self._began:8.2f} {' '.join(filter(None, words))}\n"
        with (self._folder / "faults.log").open("a", encoding="utf-8") as file:
            file.write(line)
