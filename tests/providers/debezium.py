"""A real Debezium: Kafka Connect in one process, from locked jars, one connector for each slot.

    folder/worker.properties offsets    Connect's own, JsonConverter without schemas
    folder/NAME.properties              a connector's

The slot and the publication exist already (pg_copy_logical_replication_slot gives a connector the
WAL that another client of the source reads); a snapshot is not taken.
"""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from schemas.errors import ExitCode, Retryable, SetupError
from services.testbed import procfs
from services.testbed.jars import class_path
from services.testbed.java import find_java_home
from services.testbed.ports import LOOPBACK, free_port
from services.testbed.processes import Processes
from tests.providers.waiting import patient

_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 120.0
_REST_TIMEOUT_S = 900.0
_JVM_OPTIONS = (
    *("-Xms128m", "-XX:+UseSerialGC", "-Xshare:auto", "-Djava.awt.headless=true"),
    "-Duser.timezone=UTC",  # else arrays of times are shifted
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)

_PLAIN_JSON = {"": "org.apache.kafka.connect.json.JsonConverter", ".schemas.enable": "false"}


@dataclass(frozen=True, slots=True)
class Connector:
    """One Debezium connector: its source and its topics; `options` are added to its properties."""

    name: str
    conninfo: str
    slot: str
    publication: str
    topic_prefix: str
    options: Mapping[str, str | int] = field(default_factory=dict)

    def properties(self) -> dict[str, str | int]:
        """Write the properties file of one connector."""
        source = conninfo_to_dict(self.conninfo)
        return {
            "name": self.name,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": 1,
            "database.hostname": source["host"] or LOOPBACK,
            "database.port": source["port"] or 5432,
            "database.user": source["user"] or "",
            "database.password": source.get("password") or "none",
            "database.dbname": source["dbname"] or "",
            "topic.prefix": self.topic_prefix,
            "plugin.name": "pgoutput",
            "slot.name": self.slot,
            "publication.name": self.publication,
            "publication.autocreate.mode": "disabled",
            "snapshot.mode": "no_data",
            "topic.creation.default.replication.factor": 1,
            "topic.creation.default.partitions": 1,
            **self.options,
        }


class Debezium:
    """Kafka Connect in standalone mode with some connectors; offsets stay over restarts."""

    def __init__(
        self,
        folder: Path,
        connectors: Sequence[Connector],
        *,
        bootstrap_servers: str,
        processes: Processes,
        name: str = "debezium",
        java_home: Path | None = None,
        heap: str = "512m",
        jvm_options: Sequence[str] = (),
        settings: Mapping[str, str | int] | None = None,
        jars: Sequence[str] = ("debezium",),
    ) -> None:
        """Note how to start it.

        `settings`: of the worker; `jars`: groups of the lock file, in the class path's order.
        """
        self.name = name
        self.folder = folder
        self.connectors = tuple(connectors)
        self._bootstrap_servers = bootstrap_servers
        self._processes = processes
        self._java_home = java_home
        self._jvm_options = (*_JVM_OPTIONS, f"-Xmx{heap}", *jvm_options)
        self._settings = dict(settings or {})
        self._class_path = ":".join(map(class_path, jars))
        self._worker: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The warnings and errors in Connect's log."""
        return self._processes.log_path(self.name)

    @property
    def running(self) -> bool:
        """True while Connect's process runs."""
        return self._worker is not None and self._worker.poll() is None

    @property
    def pid(self) -> int:
        """Return the process id of Kafka Connect."""
        if self._worker is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._worker.pid

    def start(self, *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start, and wait until every connector streams from its slot.

        Raise SetupError with Connect's own reason when it ends, and Retryable (DEADLINE) when a
        slot is not in use within `timeout_s` seconds.
        """
        worker = self.launch()
        streaming = procfs.wait_until(
            lambda: worker.poll() is not None or self._streaming(), timeout_s=timeout_s
        )
        if worker.poll() is not None:
            self._processes.forget(worker)
            raise SetupError(
                self._reason(),
                operation="start Debezium",
                hint=f"read {self.log}",
                exit_code=ExitCode.PROGRAM_MISSING,
            )
        if not streaming:  # a connector that looks for its offset in the WAL connects once more
            self.kill()
            raise Retryable(
                f"not all slots are in use after {timeout_s:.0f} s: {self._reason()}",
                operation="start Debezium",
                hint=f"read {self.log}",
                exit_code=ExitCode.DEADLINE,
            )

    def launch(self) -> subprocess.Popen[bytes]:
        """Start without waiting, and return the process: a benchmark's clock runs from here."""
        assert not self.running, f"{self.name} runs already"
        home = self._java_home or find_java_home()
        self.folder.mkdir(exist_ok=True)
        worker = self._write("worker", self._worker_properties())
        files = [self._write(one.name, one.properties()) for one in self.connectors]
        self._worker = self._processes.spawn(
            self.name,
            [
                home / "bin" / "java",
                *self._jvm_options,
                *("-cp", self._class_path, "org.apache.kafka.connect.cli.ConnectStandalone"),
                worker,
                *files,
            ],
            cwd=self.folder,
        )
        return self._worker

    def stop(self) -> None:
        """Stop in order; SIGKILL after 30 s."""
        if self._worker is not None:
            self._processes.stop(self._worker, grace_s=_STOP_TIMEOUT_S)
            self._worker = None

    def kill(self) -> None:
        """Kill Connect (SIGKILL) and wait for its end."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait(timeout=_STOP_TIMEOUT_S)
            self._processes.forget(self._worker)
            self._worker = None

    def _worker_properties(self) -> dict[str, str | int]:
        return {
            "bootstrap.servers": self._bootstrap_servers,
            **{
                f"{part}.converter{key}": value
                for part in ("key", "value", "header")
                for key, value in _PLAIN_JSON.items()
            },
            "offset.storage.file.filename": str(self.folder / "offsets"),
            "offset.flush.interval.ms": 1000,
            "listeners": f"http://{LOOPBACK}:{free_port()}",
            "plugin.discovery": "service_load",
            **self._settings,
        }

    def _write(self, name: str, properties: Mapping[str, str | int]) -> Path:
        path = self.folder / f"{name}.properties"
        text = "".join(f"{key}={value}\n" for key, value in properties.items())
        path.write_text(text, encoding="utf-8")
        return path

    def _streaming(self) -> bool:
        """Tell whether every connector's slot is in use."""
        return all(_in_use(connector) for connector in self.connectors)

    def _reason(self) -> str:
        """Return the last line of the log that names an error."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if "Exception" in line or "ERROR" in line]
        return (telling or lines or ["it has said nothing"])[-1][:300]


class DistributedDebezium(Debezium):
    """A worker group of one, exactly-once (exactly.once.source.support).

    Offsets, configuration and status are topics of the worker's own.
    """

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the worker, wait for its REST interface, hand over the connectors; return it."""
        home = self._java_home or find_java_home()
        self.folder.mkdir(exist_ok=True)
        port = free_port()
        group = self.folder.name
        properties = self._worker_properties() | {
            "listeners": f"http://{LOOPBACK}:{port}",
            "group.id": group,
            "exactly.once.source.support": "enabled",
        }
        del properties["offset.storage.file.filename"]  # it would be taken for a topic's setting
        for kind in ("offset", "config", "status"):
            properties[f"{kind}.storage.topic"] = f"{group}-connect-{kind}"
            properties[f"{kind}.storage.replication.factor"] = 1
        worker = self._write("worker", properties)
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        self._worker = self._processes.spawn(
            self.name,
            [
                home / "bin" / "java",
                *self._jvm_options,
                *("-cp", self._class_path, main),
                worker,
            ],
            cwd=self.folder,
        )
        for connector in self.connectors:
            self._hand_over(f"http://{LOOPBACK}:{port}/connectors", connector)
        return self._worker

    def _hand_over(self, url: str, connector: Connector) -> None:
        """Make the connector, or find it as it is; a worker that was killed has it still."""
        config = {key: str(value) for key, value in connector.properties().items()}
        request = urllib.request.Request(
            f"{url}/{connector.name}/config",
            data=json.dumps(config).encode(),
            headers={"Content-Type": "application/json"},
            method="PUT",
        )

        def handed_over() -> bool:
            if not self.running:
                log = self.log.read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"Connect ended:\n{log[-3000:]}")
            try:
                with urllib.request.urlopen(request, timeout=patient(10)) as answer:
                    return bool(answer.status in (200, 201))
            except urllib.error.HTTPError as error:
                if error.code in (404, 409, 500, 503):  # the worker still joins its group
                    return False
                raise RuntimeError(error.read().decode(errors="replace")) from error
            except OSError:
                return False

        if not procfs.wait_until(handed_over, timeout_s=_REST_TIMEOUT_S):
            raise RuntimeError(f"Connect took no connector: {self._reason()}")


def _in_use(connector: Connector) -> bool:
    with psycopg.connect(connector.conninfo, autocommit=True) as connection:
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [connector.slot]
        ).fetchone()
    return row is not None and bool(row[0])
