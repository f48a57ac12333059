"""Who races. Each reads one slot; all but pg_recvlogical write to the same broker.

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

from benchmarks.race.formats import RacedFormat
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer

PUBLICATION: Final = "race"
STOP_S: Final = 60.0
JSON: Final = RacedFormat("json")


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """What one trial gets: a slot of its own on `server`, and topics `<prefix>.public.<table>`."""

    bed: Bed
    server: PostgresServer
    slot: str
    end_lsn: str
    streaming: bool
    dbname: str
    publication: str = PUBLICATION

    @property
    def conninfo(self) -> str:
        """Of the raced database."""
        return self.server.conninfo(self.dbname)

    @property
    def prefix(self) -> str:
        """Of the trial's topics."""
        return self.slot


class Contender(Protocol):
    """Launched without waiting; the race looks at slot and topics itself."""

    name: str
    to_kafka: bool

    def launch(self, slot_copy: SlotCopy) -> None: ...
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
        self._slot_copy: SlotCopy | None = None

    def _spawn(
        self, slot_copy: SlotCopy, argv: list[str | Path], env: Mapping[str, str | None]
    ) -> None:
        self._slot_copy = slot_copy
        self._process = slot_copy.bed.spawn(f"{self.name}-{slot_copy.slot}", argv, env=env)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, f"{self.name} was not launched"
        return self._process.pid

    def stop(self) -> None:
        """In order; killed when it takes too long."""
        if self._process is not None and self._slot_copy is not None:
            self._slot_copy.bed.processes.stop(self._process, grace_s=STOP_S)
            self._process = None

    def complaint(self) -> str:
        """The end of its log."""
        assert self._slot_copy is not None
        path = self._slot_copy.bed.processes.log_path(f"{self.name}-{self._slot_copy.slot}")
        return path.read_text(encoding="utf-8", errors="replace")[-1500:]


class RecvLogical(_Spawned):
    """PostgreSQL's own client; ends by itself at the end of the load."""

    name = "pg_recvlogical"
    to_kafka = False

    def __init__(self, target: str = "/dev/null") -> None:
        super().__init__()
        self._target = target

    def launch(self, slot_copy: SlotCopy) -> None:
        """With the protocol and options that the bridge asks for."""
        options = {
            "proto_version": "4",
            "publication_names": PUBLICATION,
            "messages": "true",
            "streaming": "on" if slot_copy.streaming else "off",
        }
        arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        program = slot_copy.server.tool_path("pg_recvlogical")
        of_slot = ["-d", slot_copy.conninfo, "-S", slot_copy.slot, "--start", "--no-loop"]
        until = ["-f", self._target, f"--endpos={slot_copy.end_lsn}"]
        environment = slot_copy.server.tool_environment()
        self._spawn(slot_copy, [program, *of_slot, *until, *arguments], environment)


class Slotbridge(_Spawned):
    """The product, as a user runs it. `bridge`: settings of that section."""

    name = "slotbridge"

    def __init__(self, form: RacedFormat = JSON, **bridge: Any) -> None:
        super().__init__()
        self._form = form
        self._bridge = bridge

    def launch(self, slot_copy: SlotCopy) -> None:
        """From a configuration file of its own."""
        path = slot_copy.bed.folder / f"{slot_copy.slot}.yaml"
        form = self._form.of_bridge()
        document = {
            **form,
            "source": {
                "conninfo": slot_copy.conninfo,
                "slot": slot_copy.slot,
                "publication": slot_copy.publication,
            },
            "kafka": {
                "bootstrap_servers": slot_copy.bed.kafka.bootstrap_servers,
                "topic_prefix": slot_copy.prefix,
                "partitions": 1,
                **form["kafka"],
            },
            "snapshot": {"mode": "never"},
            "bridge": {
                "spool_folder": str(slot_copy.bed.folder),
                "streaming": slot_copy.streaming,
                **self._bridge,
            },
        }
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        program = Path(sys.executable).parent / "slotbridge"
        self._spawn(slot_copy, [program, "run", "--config", path], {})
