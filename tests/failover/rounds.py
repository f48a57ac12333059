"""Rounds of what tempts a failover manager into two primaries, under load, and their history.

    python -m tests.failover.rounds --case cut-off --rounds 20
    python -m tests.failover.rounds --case freeze --rounds 20
    python -m tests.failover.rounds --case signals --rounds 20

cut-off   we alone do not reach the primary: its address refuses, resets, or takes and never answers
freeze    the postmaster, or all of the server, stands still; it is thawed, or fenced by its command
signals   INT, TERM or HUP, some of them twice, at any time of a switchover

A client at each node writes numbers and notes when which node acknowledged which. Judged after
every round: nodes acknowledge writes in turns, not more of them than there were promotions; and the
primary has every number that was ever acknowledged.
"""

import argparse
import contextlib
import itertools
import json
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import yaml

from services.local.bed import Bed
from services.local.ports import free_port
from services.local.postgres import PostgresServer
from tests.failover.conftest import end, machines
from tests.failover.freezing import frozen
from tests.failover.servers import COMMAND, Ran, ask, slotfailover_process, subscribe
from tests.providers.databases import connect
from tests.providers.interface import Trio
from tests.providers.proxy import Proxy
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

CASES = ("cut-off", "freeze", "signals")
PROMOTED, REFUSED = (0, 1), 35
PATIENCE_S = 300.0
"""On a machine that does other work, a command takes its time."""
KILL = 'p=$(head -n 1 "$1/postmaster.pid"); kill -KILL $(cat /proc/$p/task/$p/children) $p'
"""A `fence` command: SIGKILL every process of a server, also of one that is frozen."""


@dataclass
class Client:
    """Writes numbers of its own to one node, whenever that takes them."""

    name: str
    conninfo: str
    start: int
    acknowledged: list[tuple[float, int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until it is stopped."""
        number = self.start
        while not self._stop.wait(0.01):
            with (
                contextlib.suppress(psycopg.Error),
                psycopg.connect(self.conninfo, autocommit=True, connect_timeout=2) as connection,
            ):
                while not self._stop.wait(0.003):
                    number += 2
                    connection.execute("INSERT INTO t VALUES (%s, %s)", [number, self.name])
                    self.acknowledged.append((time.monotonic(), number))

    def stop(self) -> None:
        """End it."""
        self._stop.set()


@dataclass
class Round:
    """What was tried, and what came of it."""

    what: str
    codes: list[int]
    primary: str


class Rig:
    """A pair with a subscriber, a client at each node, and a proxy before each."""

    def __init__(self, folder: Path, trio: Trio, bed: Bed, seed: int) -> None:
        self.trio = trio
        self.dice = random.Random(seed)
        self.servers: dict[str, Any] = {"a": trio.primary, "b": trio.standby}
        self.proxies = {name: Proxy(server.port) for name, server in self.servers.items()}
        self.clients = [
            Client(name, server.conninfo(trio.dbname), start)
            for start, (name, server) in enumerate(self.servers.items())
        ]
        self.folder = folder
        self._machines = machines(trio, bed)
        for name, given in self._machines.items():
            data = str(self.servers[name].data)
            given["fence"] = shlex.join(["sh", "-c", KILL, "kill", data])

    @property
    def primary(self) -> str:
        """The node out of recovery; raises AssertionError for none or two."""
        found = [name for name in self.servers if not self._in_recovery(name)]
        assert len(found) == 1, f"primaries: {found}"
        return found[0]

    def other(self, name: str) -> str:
        """The other node."""
        return "b" if name == "a" else "a"

    def settings(self, **refused: str) -> Path:
        """`refused`: another conninfo for a node."""
        nodes = {
            name: refused.get(name) or server.conninfo() for name, server in self.servers.items()
        }
        given = {
            "nodes": nodes,
            "advertised": {n: f"host=127.0.0.1 port={s.port}" for n, s in self.servers.items()},
            "subscribers": {"sub": self.trio.subscriber.conninfo(self.trio.dbname)},
            "machines": self._machines,
            "synchronous_standbys": 1,
            "connect_timeout_s": 2,
            "step_deadline_ms": 30_000,
            "journal": str(self.folder / "journal"),
        }
        path = self.folder / "failover.yaml"
        path.write_text(yaml.safe_dump({"failover": given}))
        return path

    def order(self, *words: str, **refused: str) -> Ran:
        """Run a command."""
        command = (*words, "--config", str(self.settings(**refused)), "--yes")
        return slotfailover_process(*command, timeout_s=PATIENCE_S)

    def hand_over(self) -> None:
        """A switchover to the other node, complete."""
        ran = self.order("switchover", "--to", self.other(self.primary))
        assert ran.code == 0, ran.err + ran.out

    def settle(self) -> None:
        """Writes go on, the pair is whole, and what was acknowledged is there."""
        name = self.primary
        client = next(each for each in self.clients if each.name == name)
        count = len(client.acknowledged)
        eventually(
            lambda: len(client.acknowledged) > count + 5,
            what=f"{name} takes writes",
            timeout_s=PATIENCE_S,
        )
        standby = self.servers[self.other(name)]
        await_ready(self.servers[name], standby, "s1", timeout_s=PATIENCE_S)
        self.judge()

    def judge(self) -> None:
        """Raise AssertionError where two nodes acknowledged in turns, or a number is lost."""
        acknowledged = sorted(
            (at, each.name, number) for each in self.clients for at, number in each.acknowledged
        )
        turns = [name for _, name, _ in acknowledged]
        changes = sum(a != b for a, b in itertools.pairwise(turns))
        assert changes <= self.promotions, f"{changes} changes, {self.promotions} promotions"
        with connect(self.servers[self.primary], self.trio.dbname) as connection:
            kept = {row[0] for row in connection.execute("SELECT id FROM t").fetchall()}
        lost = {number for _, _, number in acknowledged} - kept
        assert not lost, f"{len(lost)} acknowledged writes are lost, as {sorted(lost)[:5]}"

    @property
    def promotions(self) -> int:
        """How often the pair has changed its primary: its timeline tells."""
        query = "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int"
        return int(ask(self.servers[self.primary], query)) - 1

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """The clients write until the end of the block."""
        threads = [threading.Thread(target=client.run) for client in self.clients]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for client in self.clients:
                client.stop()
            for thread in threads:
                thread.join(60)
            for proxy in self.proxies.values():
                proxy.close()

    @property
    def runs(self) -> int:
        """How many runs the journal has."""
        path = self.folder / "journal"
        return path.read_text().count('"step": "begin"') if path.exists() else 0

    def _in_recovery(self, name: str) -> bool:
        try:
            return bool(ask(self.servers[name], "SELECT pg_is_in_recovery()"))
        except psycopg.Error:
            return True


def cut_off(rig: Rig) -> Round:
    """Nothing that is tried promotes; afterwards the roles are changed in order."""
    name = rig.primary
    proxy = rig.proxies[name]
    what = rig.dice.choice(["refused", "reset", "stalled", "unknown host"])
    refused = {}
    if what == "refused":
        refused = {name: f"host=127.0.0.1 port={free_port()} user=postgres"}
    elif what == "unknown host":
        refused = {name: "host=nowhere.invalid user=postgres"}
    else:  # nodes are named themselves else: a proxy takes connections for a server that is down
        refused = {name: rig.servers[name].conninfo(port=proxy.port)}
        (proxy.cut if what == "reset" else proxy.stall)()
    orders = [["failover"], ["failover", "--old-primary-is-off"], ["resume"]]
    codes = [rig.order(*order, **refused).code for order in orders]
    proxy.heal()
    assert codes[:2] == [REFUSED, REFUSED], (what, codes)
    assert codes[2] in (34, REFUSED), (what, codes)
    rig.settle()
    assert rig.primary == name
    rig.hand_over()
    return Round(what, codes, rig.primary)


def freeze(rig: Rig) -> Round:
    """Frozen, it is not replaced; thawed, it goes on; fenced by its command, it is replaced."""
    name = rig.primary
    server: PostgresServer = rig.servers[name]
    wholly, shot = rig.dice.random() < 0.5, rig.dice.random() < 0.5
    with frozen(server, wholly=wholly):
        codes = [rig.order("failover").code, rig.order("failover", "--old-primary-is-off").code]
        assert codes == [REFUSED, REFUSED], codes
        if shot:
            ran = rig.order("failover", "--fence")
            assert ran.code in PROMOTED, ran.err
            codes.append(ran.code)
    if shot:
        eventually(lambda: not server.running, what="a child of ours is reaped")
        rejoined = rig.order("rejoin", name)
        assert rejoined.code == 0, rejoined.err
        assert rig.primary == rig.other(name)
    rig.settle()
    what = f"{'the server' if wholly else 'the postmaster'}, {'fenced' if shot else 'thawed'}"
    return Round(what, codes, rig.primary)


def signals(rig: Rig) -> Round:
    """A signal at any time: what is said is so, and `resume` or the same order completes it."""
    name = rig.primary
    new = rig.other(name)
    number = rig.dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    after_s, twice = rig.dice.uniform(0.0, 1.5), rig.dice.random() < 0.5
    begun = rig.runs
    command = [sys.executable, "-c", COMMAND, "switchover", "--to", new, "--yes"]
    with subprocess.Popen(
        [*command, "--config", str(rig.settings())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        eventually(
            lambda: rig.runs > begun or process.poll() is not None,
            what="it has begun",
            timeout_s=PATIENCE_S,
        )
        for _ in range(1 + twice):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            after_s = 0.05
        said = process.communicate(timeout=PATIENCE_S)[1]
    codes = [process.returncode]
    if "; it was taken back" in said:
        now = said.rpartition("Now ")[2]
        assert f"{name} is the primary" in now, said
        assert f"{new} is a standby" in now, said
        assert rig.primary == name, said
    elif codes != [0]:
        assert "nothing was taken back" in said or rig.primary == name, said
    if codes != [0]:
        codes.append(rig.order("resume").code)
        for order in (["switchover", "--to", new], ["rejoin", name]):
            ran = rig.order(*order)
            codes.append(ran.code)
            assert ran.code == 0, (codes, said, ran.err)
    rig.settle()
    assert rig.primary == new
    return Round(f"{number.name} {'twice' if twice else 'once'}", codes, rig.primary)


def play(case: str, rounds: int, seed: int, folder: Path, trio: Trio, bed: Bed) -> list[Round]:
    """The rounds of one case; raises AssertionError at the first that is not as it must be."""
    subscribe(trio, "s1")
    rig = Rig(folder, trio, bed, seed)
    one = {"cut-off": cut_off, "freeze": freeze, "signals": signals}[case]
    done: list[Round] = []
    with rig.load():
        rig.settle()
        for number in range(rounds):
            done.append(one(rig))
            sys.stderr.write(f"{case} {number + 1}: {done[-1]}\n")
    rig.judge()
    return done


def main() -> None:
    """Play one case and print what was seen as one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rounds-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Bed(folder / "bed", lazy=True) as bed, bed.new_pair() as (pair, subscriber):
            trio = Trio(pair.primary, pair.standby, subscriber, pair.dbname)
            with contextlib.ExitStack() as stack:
                for server in (pair.primary, pair.standby):
                    stack.callback(end, server)
                done = play(given.case, given.rounds, given.seed, folder, trio, bed)
    kinds = {what: sum(each.what == what for each in done) for what in {d.what for d in done}}
    report = {"case": given.case, "rounds": len(done), "failed": 0, "kinds": kinds}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
