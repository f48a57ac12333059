"""The servers and the bridge of one run, and what every fault does with them.

The faults themselves: `brokers`, `bridge_faults`, `database_faults`; `perform` chooses.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from schemas.errors import ExitCode
from schemas.events import progress_topic
from schemas.progress import ProgressRecord
from schemas.settings import KafkaSettings
from services.kafka.records import READ_DEADLINE_S, TopicReader, parse_record
from services.testbed.bed import Bed
from services.testbed.pair import STANDBY_SLOT, set_parameter
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.proxy import Proxy
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually
from tests.torture.brokers import Brokers, insist
from tests.torture.checker import Finding
from tests.torture.clients import Client
from tests.torture.faults import Fault
from tests.torture.supervisor import Supervised

_KILL_EVERY_S: Final = (0.5, 4.0)
_KILLS_IN_A_ROW: Final = 4
_STREAMS_S: Final = 240.0


class Stalled(Exception):
    """The bridge does not come to stream: a finding, and no failure of the rig."""


class TortureRun:
    """Of one run: `primary` and `standby` change places at a failover; `proxies` are before them.

    `foreign` is a server with another database. `findings` are what faults have seen; `faults`
    counts those that were done.
    """

    def __init__(
        self,
        bed: Bed,
        servers: tuple[PostgresServer, PostgresServer],
        folder: Path,
        *,
        foreign: PostgresServer | None,
        brokers: Brokers,
        sabotage: str,
        commits_wait: bool,
        tls: Mapping[str, str] | None = None,
    ) -> None:
        self.dbname = bed.dbname
        self.folder = folder
        self.sabotage = sabotage
        self.brokers = brokers
        self.commits_wait = commits_wait
        self._tls = tls
        self.primary, self.standby = servers
        self.foreign = foreign
        self.proxies = [Proxy(server.port) for server in servers]
        self.faults: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.failovers = 0
        self.rival_kills = 0
        self.repair_kills = 0
        self.hiding = False
        """Whether a fault hides records until the bridge streams again."""
        self.clients: Sequence[Client] = ()
        self._began = time.monotonic()
        self._kill_loop_runs = False
        self._left_alone = threading.Event()

    def begin(self, bridge: Bridge, *failpoints: str) -> None:
        """From now on a bridge runs."""
        self.bridge = bridge
        self.supervised = Supervised(bridge.config, bridge.log, sabotage=self.sabotage)
        self.supervised.start(*failpoints)
        self.bridge_streams()
        set_parameter(self.primary, "synchronous_standby_names", self.synchronous)

    def release(self) -> None:
        """From now on no commit waits for the bridge."""
        set_parameter(self.primary, "synchronous_standby_names", STANDBY_SLOT)

    @property
    def synchronous(self) -> str:
        """Commits wait for the standby; with `commits_wait` for the bridge, too."""
        bridge = f"slotbridge_{self.bridge.slot}"
        return f"FIRST 2 ({STANDBY_SLOT}, {bridge})" if self.commits_wait else STANDBY_SLOT

    def close(self) -> None:
        """End what is left of it."""
        if hasattr(self, "supervised"):
            self.supervised.end()
        for proxy in self.proxies:
            proxy.close()

    @property
    def conninfo(self) -> str:
        """Of the pair, for clients."""
        return self._conninfo([self.primary.port, self.standby.port])

    @property
    def proxied_conninfo(self) -> str:
        """Of the pair, for the bridge: its walsender streams what is larger than 64 kB."""
        more = {"options": "-c logical_decoding_work_mem=64kB"}
        if self._tls is not None:  # the certificate names no address
            more |= {"host": "localhost,localhost", "hostaddr": "127.0.0.1,127.0.0.1", **self._tls}
        return self._conninfo([proxy.port for proxy in self.proxies], **more)

    def _conninfo(self, ports: Sequence[int], **more: str) -> str:
        given = {
            "host": "127.0.0.1,127.0.0.1",
            "port": ",".join(map(str, ports)),
            "target_session_attrs": "read-write",
        }
        return self.primary.conninfo(self.dbname, **(given | more))

    def tls_connections(self) -> int:
        """How many connections to the primary a bridge has, all of them by TLS; 0: not all."""
        with connect(self.primary) as connection:
            row = connection.execute(
                "SELECT count(*), coalesce(bool_and(ssl), false) FROM pg_stat_ssl"
                " JOIN pg_stat_activity USING (pid) WHERE application_name LIKE 'slotbridge%'"
            ).fetchone()
        return int(row[0]) if row is not None and row[1] else 0

    @property
    def given_up(self) -> bool:
        """Whether the bridge has ended with an exit code that asks for an operator."""
        return self.supervised.operator_needed is not None

    def progress(self) -> list[ProgressRecord]:
        """All progress records that are visible."""
        return insist(self.bridge.progress)

    def noted_ends(self) -> dict[str, int]:
        """topic-partition -> the farthest end that any progress record notes, visible or not."""
        topic, found = progress_topic(self.bridge.prefix), dict[str, int]()
        for record in insist(lambda: list(self._all_progress(topic))):
            for name, ends in record.kafka.ends.items():
                for partition, offset, _ in ends:
                    place = f"{name}-{partition}"
                    found[place] = max(offset, found.get(place, 0))
        return found

    def _all_progress(self, topic: str) -> Iterator[ProgressRecord]:
        settings = KafkaSettings(
            bootstrap_servers=self.brokers.bootstrap_servers, topic_prefix=self.bridge.prefix
        )
        with TopicReader(settings, topic, committed=False) as reader:
            deadline = time.monotonic() + READ_DEADLINE_S
            for offset, key, value in reader.between(*reader.bounds(), deadline):
                if key == self.bridge.slot.encode() and value is not None:
                    yield parse_record(ProgressRecord, topic, offset, value)

    def bridge_is_on(self, server: PostgresServer) -> bool:
        """Whether a bridge holds the slot there."""
        with connect(server) as connection:
            row = connection.execute(
                "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [self.bridge.slot]
            ).fetchone()
        return row is not None and bool(row[0])

    def bridge_streams(self) -> None:
        """Wait until a bridge is connected to the primary's slot, or has given up for good.

        Raises Stalled where none does, though nothing is done to any server.
        """
        try:
            with self.left_alone():
                eventually(
                    lambda: self.given_up or self.bridge_is_on(self.primary),
                    what="a bridge streams",
                    timeout_s=_STREAMS_S,
                    interval_s=0.1,
                )
        except AssertionError as error:
            raise Stalled(f"{error}: {self.bridge.output[-1500:]}") from error

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Inside, no kill loop kills the bridge: on a busy machine it would never come far."""
        self._left_alone.set()
        if self._kill_loop_runs:
            self.supervised.disarm()
        try:
            yield
        finally:
            self._left_alone.clear()

    @contextlib.contextmanager
    def refusal(self, code: ExitCode, words: str) -> Iterator[Callable[[PostgresServer], None]]:
        """Inside, the bridge may end with `code`, again and again; it streams at the end.

        What is given waits until it has, with `words` in its error, while it sees one server
        alone; a bridge that streams from there instead is a finding.
        """
        before, seen = self.supervised.ends.codes[code], self.bridge.output.count(words)
        self.supervised.expected = code

        def refused() -> bool:
            ended = self.supervised.ends.codes[code] > before
            return ended and self.bridge.output.count(words) > seen

        def await_refusal(server: PostgresServer) -> None:
            with contextlib.suppress(AssertionError):  # it may be refused in other words only
                eventually(
                    lambda: self.given_up or refused() or self.bridge_is_on(server),
                    what=f"refused: {words}",
                    timeout_s=120,
                    interval_s=0.1,
                )
            if not refused():
                what = f"not refused: {words} (exit code {code:d})"
                self.findings.append(Finding("accepted", what))

        yield await_refusal
        self.bridge_streams()
        self.supervised.expected = None

    def await_ready(self) -> None:
        """Wait until the slot would survive a promotion: the bridge must advance it for that."""
        self.bridge_streams()
        if not self.given_up:
            await_ready(self.primary, self.standby, self.bridge.slot, timeout_s=180)

    def terminate_bridge(self) -> None:
        """End its connections to the primary."""
        with connect(self.primary) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'slotbridge%'"
            )

    @contextlib.contextmanager
    def kill_loop(self, fault: Fault) -> Iterator[None]:
        """Meanwhile the bridge is killed, again and again, where the fault says so.

        After some kills in a row it is left alone until it has confirmed a commit: on a busy
        machine a start takes longer than the pause, and nothing would ever move.
        """
        enough = threading.Event()
        moments = random.Random(f"{fault}")

        def kill_again() -> None:
            before, kills = self._confirmations(), 0
            while not enough.wait(moments.uniform(*_KILL_EVERY_S)):
                if self._confirmations() > before:
                    before, kills = self._confirmations(), 0
                if kills < _KILLS_IN_A_ROW and not self._left_alone.is_set():
                    self.supervised.arm(*fault.points)
                    kills += 1

        thread = threading.Thread(target=kill_again, name="kill loop", daemon=True)
        if fault.kill_loop:
            self._kill_loop_runs = True
            thread.start()
        try:
            yield
        finally:
            self._kill_loop_runs = False
            enough.set()
            if fault.kill_loop:
                thread.join()

    def _confirmations(self) -> int:
        """How often a bridge was about to confirm what Kafka has."""
        return self.supervised.passages()["before feedback"]

    @contextlib.contextmanager
    def clients_held(self) -> Iterator[None]:
        """Inside, no client has a connection."""
        for client in self.clients:
            client.hold.set()
        eventually(lambda: all(c.held.is_set() for c in self.clients), what="held", timeout_s=120)
        try:
            yield
        finally:
            for client in self.clients:
                client.hold.clear()

    def note(self, *words: str) -> None:
        """A line of the run's diary."""
        line = f"{time.monotonic() - self._began:8.2f} {' '.join(filter(None, words))}\n"
        with (self.folder / "faults.log").open("a", encoding="utf-8") as file:
            file.write(line)
