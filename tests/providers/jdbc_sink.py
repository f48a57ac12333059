"""A real Kafka Connect with Debezium's JDBC sink, which writes topics into another PostgreSQL."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from services.testbed import jars
from services.testbed.java import SHORT_LIVED, find_java_home
from services.testbed.ports import LOOPBACK, free_port

_OPTIONS = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-Duser.timezone=UTC")
_LOG_LEVEL = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


class JdbcSink:
    """One sink: the tables that `source.table` names, each row by its key."""

    def __init__(
        self,
        folder: Path,
        conninfo: str,
        bootstrap_servers: str,
        topics: str,
        converter: Mapping[str, str],
        *,
        parameters: str = "",
        **options: str,
    ) -> None:
        """`topics`: a regular expression; `converter`: properties, its class under no name.

        `parameters`: of the URL; `options`: of the sink, with `_` for each dot.
        """
        self._folder = folder
        self.log = folder / "sink.log"
        target = conninfo_to_dict(conninfo)
        parts = ("key", "value")
        self._worker = {
            "bootstrap.servers": bootstrap_servers,
            **{f"{part}.converter{k}": v for part in parts for k, v in converter.items()},
            # The default reads a header's JSON as a map without a schema: the sink refuses that.
            "header.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
            "offset.storage.file.filename": str(folder / "offsets"),
            "offset.flush.interval.ms": "1000",
            "consumer.isolation.level": "read_committed",
            "consumer.auto.offset.reset": "earliest",
            "consumer.metadata.max.age.ms": "1000",
            "listeners": f"http://{LOOPBACK}:{free_port()}",
            "plugin.discovery": "service_load",
        }
        self._sink = {
            "name": f"sink-{target['dbname']}",
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "tasks.max": "1",
            "topics.regex": topics,
            "connection.url": f"jdbc:postgresql://{LOOPBACK}:{target['port']}/{target['dbname']}"
            + parameters,
            "connection.username": str(target["user"]),
            "connection.password": str(target.get("password") or "none"),
            "collection.name.format": "${source.table}",
            "insert.mode": "upsert",
            "delete.enabled": "true",
            "primary.key.mode": "record_key",
            "schema.evolution": "basic",
            **{key.replace("_", "."): value for key, value in options.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "JdbcSink":
        """Start it; returns at once."""
        java = find_java_home() / "bin" / "java"
        files = [self._write("worker", self._worker), self._write("sink", self._sink)]
        class_path = f"{jars.class_path('connect-jdbc')}:{jars.class_path('connect-avro')}"
        command: list[str | Path] = [
            "-cp",
            class_path,
            "org.apache.kafka.connect.cli.ConnectStandalone",
            *files,
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [java, *_OPTIONS, *SHORT_LIVED, _LOG_LEVEL, *command],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        return self

    @property
    def works(self) -> bool:
        """Whether its process runs and its task has not failed."""
        text = self.log.read_text(errors="replace")
        running = self._process is not None and self._process.poll() is None
        return running and "Task threw an uncaught" not in text

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)

    def _write(self, name: str, properties: Mapping[str, str]) -> Path:
        path = self._folder / f"{name}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        return path
