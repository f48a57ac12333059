"""One run of the league: a pair, a contender, a load, faults from a seed, and the verdict."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from typer.testing import CliRunner

from services.failover.cli.app import app as slotfailover
from services.testbed.bed import Bed
from services.testbed.pair import STANDBY_SLOT
from services.testbed.postgres import PostgresServer
from tests.league.contenders import CONTENDERS, Contender, Ground
from tests.league.load import SETUP, Client, compare, ends, has_last, write_last
from tests.league.verdict import Verdict
from tests.providers.databases import connect
from tests.providers.proxy import Proxy
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually
from tests.torture.brokers import Brokers
from tests.torture.database_faults import rebuild_standby
from tests.torture.faults import Fault

_CLIENTS: Final = 3
_STREAMS_S: Final = 180.0
_DELIVERS_S: Final = (0.5, 2.0)
"""Between two faults it streams for at least so long, and the fault's pause."""
_LAST_S: Final = 240.0
_SETTLES_S: Final = 20.0
"""So long nothing more has come at the end: partitions may get their last records one by one."""
_ALSO: Final = ("failpoint", "crash loop")
"""Faults of the torture rig that strike the bridge inside: here a SIGKILL, for everybody."""
FAIR: Final = frozenset(
    {"kill", "sigterm", "freeze", "terminate", "network cut", "network stalled"}
    | {"broker killed", "broker paused", "broker cut off"}
    | {"primary restarted", "standby killed", "failover"}
)
"""Faults that can be done to every contender."""


@dataclass
class Run:
    """What came of one run."""

    contender: str
    seed: int
    verdict: Verdict = field(default_factory=Verdict)
    faults: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    seconds: float = 0.0
    stopped: str = ""
    """Why it did not deliver to the end; what it had not delivered counts as lost."""

    def as_json(self) -> dict[str, Any]:
        """Return one line of the trace."""
        own = vars(self) | {"faults": dict(self.faults), "seconds": round(self.seconds)}
        return own | {"verdict": asdict(self.verdict)}


def fair(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Turn the torture rig's faults into those that every contender can meet."""
    for fault in faults:
        name = "kill" if fault.name in _ALSO else fault.name
        if name in FAIR:
            yield fault._replace(name=name, kill_loop=False, revived=False)


class Match:
    """One contender on a pair of its own."""

    def __init__(self, bed: Bed, brokers: Brokers, name: str, seed: int, folder: Path) -> None:
        self._bed = bed
        self._brokers = brokers
        self._seed = seed
        self._folder = folder
        self._prefix = f"league{seed}-{name}"
        self._run = Run(name, seed)

    def play(
        self, primary: PostgresServer, standby: PostgresServer, faults: Iterable[Fault]
    ) -> Run:
        """Do all of `faults` under load, then let everything recover, and judge."""
        began = time.monotonic()
        self.primary, self.standby = primary, standby
        self._proxy = Proxy(primary.port)
        dbname = self._bed.dbname
        slot = self._prefix.replace("-", "_")
        conninfo = primary.conninfo(dbname, host="127.0.0.1", port=str(self._proxy.port))
        ground = Ground(self._bed, self._brokers, conninfo, self._prefix, slot, self._folder)
        contender = CONTENDERS[self._run.contender](ground)
        try:
            with connect(primary, dbname) as connection:
                connection.execute(SETUP.encode())
            contender.prepare()
            contender.start()
            self._under_fire(contender, faults)
        finally:
            contender.end()
            self._proxy.close()
        self._run.starts = contender.starts
        self._run.seconds = time.monotonic() - began
        return self._run

    def _under_fire(self, contender: Contender, faults: Iterable[Fault]) -> None:
        self._streams(contender)
        await_ready(self.primary, self.standby, contender.ground.slot, timeout_s=180)
        enough = threading.Event()
        servers = (self.primary, self.standby)
        conninfo = self.primary.conninfo(
            self._bed.dbname,
            host="127.0.0.1,127.0.0.1",
            port=",".join(str(server.port) for server in servers),
            target_session_attrs="read-write",
        )
        clients = [Client(number, self._seed, conninfo, enough) for number in range(_CLIENTS)]
        for client in clients:
            client.start()
        try:
            for fault in faults:
                self._streams(contender)
                if contender.needs_operator or self._run.stopped:
                    break
                low, high = _DELIVERS_S
                time.sleep(low + (high - low) * fault.pause_s)
                self._do(contender, fault)
        finally:
            enough.set()
            for client in clients:
                client.join(60)
        self._judge(contender, {tid for client in clients for tid in client.acknowledged})

    def _judge(self, contender: Contender, acknowledged: set[str]) -> None:
        run, servers = self._run, self._brokers.bootstrap_servers
        with connect(self.primary, self._bed.dbname) as connection:
            write_last(connection)
            until = time.monotonic() + _LAST_S
            while not has_last(servers, self._prefix):
                if contender.needs_operator or time.monotonic() > until:
                    run.stopped = contender.needs_operator or f"not delivered in {_LAST_S:.0f} s"
                    break
                time.sleep(1.0)
            self._settle()
            run.verdict = compare(connection, servers, self._prefix)
            kept = {tid for (tid,) in connection.execute("SELECT tid FROM ledger").fetchall()}
        assert acknowledged <= kept, f"the pair lost {len(acknowledged - kept)} transactions"

    def _settle(self) -> None:
        """Wait until no partition of a table has grown for a while."""
        before, since = -1, time.monotonic()
        while time.monotonic() - since < _SETTLES_S:
            now = ends(self._brokers.bootstrap_servers, self._prefix)
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(1.0)

    def _streams(self, contender: Contender) -> None:
        """Wait until the contender uses its slot."""
        until = time.monotonic() + _STREAMS_S
        while not contender.streams(self.primary.conninfo(self._bed.dbname)):
            if contender.needs_operator or time.monotonic() > until:
                self._run.stopped = contender.needs_operator or f"idle for {_STREAMS_S:.0f} s"
                return
            time.sleep(0.1)

    def _do(self, contender: Contender, fault: Fault) -> None:
        self._run.faults[fault.name] += 1
        if self._brokers.perform(fault, self._prefix):
            return
        match fault.name:
            case "kill":
                contender.kill()
            case "sigterm":
                contender.terminate()
            case "freeze":
                contender.freeze()
                time.sleep(2 * fault.seconds)
                contender.thaw()
            case "terminate":
                self._terminate(contender.ground.slot)
            case "network cut" | "network stalled":
                (self._proxy.cut if fault.name == "network cut" else self._proxy.stall)()
                time.sleep(2 * fault.seconds)
                self._proxy.heal()
            case "primary restarted":
                self.primary.restart("immediate")
            case "standby killed":
                self.standby.kill()
                time.sleep(fault.seconds)
                self.standby.start()
            case "failover":
                self._fail_over(contender)

    def _terminate(self, slot: str) -> None:
        with connect(self.primary) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active",
                [slot],
            )

    def _fail_over(self, contender: Contender) -> None:
        """The primary dies with a slot that is ready; the address follows, as a proxy's would."""
        await_ready(self.primary, self.standby, contender.ground.slot, timeout_s=180)
        self._proxy.cut()
        self.primary.kill()
        config = self._folder / "failover.yaml"
        nodes = {server.name: server.conninfo() for server in (self.primary, self.standby)}
        config.write_text(
            yaml.safe_dump({"failover": {"nodes": nodes, "connect_timeout_s": 2}}), encoding="utf-8"
        )
        done = CliRunner().invoke(slotfailover, ["failover", "--config", str(config), "--yes"])
        assert done.exit_code == 0, done.output + done.stderr
        self.primary, self.standby = self.standby, self.primary
        self._proxy.target_port = self.primary.port
        self._proxy.heal()
        eventually(lambda: self._takes_writes(), what="the new primary takes writes")
        rebuild_standby(self.primary, self.standby, self._bed.dbname, STANDBY_SLOT)

    def _takes_writes(self) -> bool:
        with connect(self.primary) as connection:
            row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        return row is not None and not row[0]
