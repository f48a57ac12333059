"""Who races. Each reads one slot; all but pg_recvlogical write to the same broker, in JSON.

pg_recvlogical    -f /dev/null: what a C client of the same protocol reaches, without a sink
slotbridge        slotbridge run: exactly-once, its settings' defaults
debezium          Kafka Connect standalone, newest locked version: at-least-once
debezium-eos      Kafka Connect distributed with exactly.once.source.support, KIP-618
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer

PUBLICATION: Final = "race"
STOP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Lane:
    """What one lap gets: a slot of its own on `server`, and topics `<prefix>.public.<table>`."""

    bed: Bed
    server: PostgresServer
    slot: str
    end_lsn: str
    streaming: bool
    dbname: str

    @property
    def conninfo(self) -> str:
        """Of the raced database."""
        return self.server.conninfo(self.dbname)

    @property
    def prefix(self) -> str:
        """Of the lap's topics."""
        return self.slot


class Contender(Protocol):
    """Launched without waiting; the race looks at slot and topics itself."""

    name: str
    to_kafka: bool

    def launch(self, lane: Lane) -> None: ...
    def stop(self) -> None: ...
    @property
    def pid(self) -> int: ...
    def complaint(self) -> str: ...


class _Spawned:
    """A contender that is one process of the bed."""

    name = ""
    to_kafka = True

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lane: Lane | None = None

    def _spawn(self, lane: Lane, argv: list[str | Path], env: Mapping[str, str | None]) -> None:
        self._lane = lane
        self._process = lane.bed.spawn(f"{self.name}-{lane.slot}", argv, env=env)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, f"{self.name} was not launched"
        return self._process.pid

    def stop(self) -> None:
        """In order; killed when it takes too long."""
        if self._process is not None and self._lane is not None:
            self._lane.bed.processes.stop(self._process, grace_s=STOP_S)
            self._process = None

    def complaint(self) -> str:
        """The end of its log."""
        assert self._lane is not None
        path = self._lane.bed.processes.log_path(f"{self.name}-{self._lane.slot}")
        return path.read_text(encoding="utf-8", errors="replace")[-1500:]


class RecvLogical(_Spawned):
    """PostgreSQL's own client; ends by itself at the end of the load."""

    name = "pg_recvlogical"
    to_kafka = False

    def __init__(self, target: str = "/dev/null") -> None:
        super().__init__()
        self._target = target

    def launch(self, lane: Lane) -> None:
        """With the protocol and options that the bridge asks for."""
        options = {
            "proto_version": "4",
            "publication_names": PUBLICATION,
            "messages": "true",
            "streaming": "on" if lane.streaming else "off",
        }
        arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        program = lane.server.tool_path("pg_recvlogical")
        of_slot = ["-d", lane.conninfo, "-S", lane.slot, "--start", "--no-loop"]
        until = ["-f", self._target, f"--endpos={lane.end_lsn}"]
        environment = lane.server.tool_environment()
        self._spawn(lane, [program, *of_slot, *until, *arguments], environment)


class Slotbridge(_Spawned):
    """The product, as a user runs it. `bridge`: settings of that section."""

    name = "slotbridge"

    def __init__(self, **bridge: Any) -> None:
        super().__init__()
        self._bridge = bridge

    def launch(self, lane: Lane) -> None:
        """From a configuration file of its own."""
        path = lane.bed.folder / f"{lane.slot}.yaml"
        document = {
            "source": {
                "conninfo": lane.conninfo,
                "slot": lane.slot,
                "publication": PUBLICATION,
            },
            "kafka": {
                "bootstrap_servers": lane.bed.kafka.bootstrap_servers,
                "topic_prefix": lane.prefix,
                "partitions": 1,
            },
            "bridge": {
                "spool_folder": str(lane.bed.folder),
                "streaming": lane.streaming,
                **self._bridge,
            },
        }
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        program = Path(sys.executable).parent / "slotbridge"
        self._spawn(lane, [program, "run", "--config", path], {})
