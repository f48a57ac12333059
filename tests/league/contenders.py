"""Whoever moves a slot into Kafka, kept running as a supervisor would keep it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg

from schemas.errors import SlotbridgeError
from services.testbed.bed import Bed
from services.testbed.java import SHORT_LIVED
from tests.league.load import PUBLICATION
from tests.promises.bridge.running import Bridge
from tests.providers.debezium import Connector, Debezium, DistributedDebezium
from tests.torture.brokers import Brokers

_RESTART_PAUSE_S: Final = 0.5
_IDLE_MAX_S: Final = 30.0
"""So long a slot may be idle while the process runs: then it is started again (liveness probe)."""
_OPERATOR: Final = frozenset({2, *range(20, 64)})
"""Exit codes of Slotbridge after which a supervisor does not start it again."""
DEBEZIUM: Final[Mapping[str, str | int]] = {
    "topic.creation.default.partitions": 2,
    "poll.interval.ms": 100,
    "heartbeat.interval.ms": 500,
    "retriable.restart.connector.wait.ms": 1000,
}
"""Besides the defaults: nothing here makes it lose or repeat more than they do."""
WORKER: Final[Mapping[str, str | int]] = {"offset.flush.interval.ms": 1000}
"""Kafka Connect's default is 60,000: what was published since is published again after a kill."""


class Ground(NamedTuple):
    """Where a contender works: `conninfo` and `brokers` lead through proxies."""

    bed: Bed
    brokers: Brokers
    conninfo: str
    prefix: str
    slot: str
    folder: Path


class Contender:
    """A process of `ground`; a thread starts it again whenever it ends, until `end`."""

    name = ""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.starts = 0
        self.needs_operator = ""
        """Why nobody may start it again."""
        self._ending = threading.Event()
        self._idle_since = time.monotonic()
        self._keeper = threading.Thread(target=self._keep, name=f"keep {self.name}", daemon=True)

    def prepare(self) -> None:
        """Make what must be there before its first start."""

    def start(self) -> None:
        """From now on it runs."""
        self._keeper.start()

    def kill(self) -> None:
        """SIGKILL the present process."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM the present process."""
        self._signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP the present process."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT the present process."""
        self._idle_since = time.monotonic()
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End it for good."""
        self._ending.set()
        self.kill()
        if self._keeper.ident is not None:
            self._keeper.join(400)

    def streams(self, conninfo: str) -> bool:
        """Tell whether its slot is in use on the server of `conninfo`."""
        try:
            with psycopg.connect(conninfo, autocommit=True, connect_timeout=3) as connection:
                row = connection.execute(
                    "SELECT active FROM pg_replication_slots WHERE slot_name = %s",
                    [self.ground.slot],
                ).fetchone()
        except psycopg.OperationalError:
            return False
        return row is not None and bool(row[0])

    def _keep(self) -> None:
        while not self._ending.is_set() and not self.needs_operator:
            try:
                if not self._running():
                    self._restart()
                elif not self._alive():
                    self.kill()
            except (RuntimeError, SlotbridgeError, OSError) as error:
                self._note(f"start failed: {error}")
            self._ending.wait(_RESTART_PAUSE_S)

    def _restart(self) -> None:
        raise NotImplementedError

    def _running(self) -> bool:
        raise NotImplementedError

    def _pid(self) -> int:
        raise NotImplementedError

    def _alive(self) -> bool:
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(), number)

    def _note(self, text: str) -> None:
        with (self.ground.folder / f"{self.name}.notes").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


class Slotbridge(Contender):
    """`slotbridge run` with its defaults, but for short deadlines and heartbeats."""

    name = "slotbridge"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._process: subprocess.Popen[bytes] | None = None
        self._bridge = Bridge(
            *(ground.folder, ground.conninfo, ground.brokers.kafka, ground.prefix),
            slot=ground.slot,
            publication=PUBLICATION,
            bootstrap_servers=ground.brokers.proxied_servers,
            snapshot={"mode": "never"},
            spool_folder=str(ground.folder),
        )

    def _restart(self) -> None:
        code = None if self._process is None else self._process.returncode
        if code in _OPERATOR:
            self.needs_operator = f"exit code {code}: {self._bridge.output[-600:]}"
            return
        program = Path(sys.executable).parent / "slotbridge"
        with self._bridge.log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "run", "--config", self._bridge.config], stdout=log, stderr=log
            )
        self.starts += 1

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _pid(self) -> int:
        return self._process.pid if self._process is not None else 0


class AtLeastOnce(Contender):
    """Debezium in Kafka Connect's standalone mode."""

    name = "debezium"
    _kind: type[Debezium] = Debezium
    _options: Mapping[str, str | int] = {}

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        connector = Connector(
            *(ground.slot, ground.conninfo, ground.slot, PUBLICATION, ground.prefix),
            {**DEBEZIUM, **self._options},
        )
        self._connect = self._kind(
            ground.folder / "connect",
            [connector],
            bootstrap_servers=ground.brokers.proxied_servers,
            processes=ground.bed.processes,
            name=f"{self.name}-{ground.prefix}",
            jvm_options=SHORT_LIVED,
            settings=WORKER,
        )

    def prepare(self) -> None:
        """Make the failover slot: the connector is told to use the one that is there."""
        with psycopg.connect(self.ground.conninfo, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)",
                [self.ground.slot],
            )

    def _restart(self) -> None:
        self._connect.kill()  # the process has ended: nothing of it is left
        self.starts += 1
        self._idle_since = time.monotonic()
        self._connect.launch()

    def _running(self) -> bool:
        return self._connect.running

    def _pid(self) -> int:
        return self._connect.pid

    def _alive(self) -> bool:
        """Tell whether the connector has used its slot lately: a failed task stays failed."""
        now = time.monotonic()
        if self.streams(self.ground.conninfo):
            self._idle_since = now
        return now - self._idle_since < _IDLE_MAX_S

    def end(self) -> None:
        """End it for good, and leave no process."""
        super().end()
        self._connect.kill()


class ExactlyOnce(AtLeastOnce):
    """Debezium in a distributed worker with `exactly.once.source.support` (KIP-618)."""

    name = "debezium-eos"
    _kind = DistributedDebezium
    _options: Mapping[str, str | int] = {"exactly.once.support": "required"}


CONTENDERS: Final[dict[str, type[Contender]]] = {
    kind.name: kind for kind in (Slotbridge, AtLeastOnce, ExactlyOnce)
}


def configuration() -> dict[str, Any]:
    """Return what is set besides defaults, for the report."""
    return {"connector": dict(DEBEZIUM), "worker": dict(WORKER)}
