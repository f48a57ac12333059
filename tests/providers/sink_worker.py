"""A real Kafka Connect in one process, with one sink that reads topics of the bridge."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from services.testbed.java import SHORT_LIVED, find_java_home
from services.testbed.ports import LOOPBACK, free_port
from tests.providers.waiting import patient

_OPTIONS = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-Duser.timezone=UTC")
_LOG_LEVEL = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


class SinkWorker:
    """One standalone worker with one sink; `kill` and `start` it as often as the test likes."""

    def __init__(
        self,
        folder: Path,
        bootstrap_servers: str,
        converter: Mapping[str, str],
        sink: Mapping[str, str],
        class_path: str,
        **worker: str,
    ) -> None:
        """`converter`: properties of both converters, their class under no name.

        `sink`: properties of the connector; `worker`: more of the worker, with `_` for each dot.
        """
        self._folder = folder
        self._class_path = class_path
        self.log = folder / "sink.log"
        parts = ("key", "value")
        self._worker = {
            "bootstrap.servers": bootstrap_servers,
            **{f"{part}.converter{k}": v for part in parts for k, v in converter.items()},
            "offset.storage.file.filename": str(folder / "offsets"),
            "offset.flush.interval.ms": "1000",
            "consumer.isolation.level": "read_committed",
            "consumer.auto.offset.reset": "earliest",
            "consumer.metadata.max.age.ms": "1000",
            "listeners": f"http://{LOOPBACK}:{free_port()}",
            "plugin.discovery": "service_load",
            **{key.replace("_", "."): value for key, value in worker.items()},
        }
        self._sink = sink
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        java = find_java_home() / "bin" / "java"
        files = [self._write("worker", self._worker), self._write("sink", self._sink)]
        command: list[str | Path] = [
            "-cp",
            self._class_path,
            "org.apache.kafka.connect.cli.ConnectStandalone",
            *files,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [java, *_OPTIONS, *SHORT_LIVED, _LOG_LEVEL, *command],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        """The end of what it has logged."""
        return self.log.read_text(errors="replace")[-6000:]

    @property
    def works(self) -> bool:
        """Whether its process runs and its task has not failed."""
        text = self.log.read_text(errors="replace")
        running = self._process is not None and self._process.poll() is None
        return running and "Task threw an uncaught" not in text

    def kill(self) -> None:
        """SIGKILL, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=patient(30))

    def _write(self, name: str, properties: Mapping[str, str]) -> Path:
        path = self._folder / f"{name}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        return path
