"""A real schema registry with Confluent's API: Apicurio, in memory, from its locked archive."""

import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.testbed import jars, procfs
from services.testbed.java import find_java_home
from services.testbed.ports import free_port, is_free
from tests.providers.waiting import patient

API: Final = "/apis/ccompat/v7"
_START_S: Final = 600.0
_JAVA: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class Registry:
    """A registry's process. What it has is in its memory: `freeze` it to have it fail a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._log = folder / "registry.log"
        self._process: subprocess.Popen[bytes] | None = None
        (archive,) = jars.resolve("registry")
        with tarfile.open(archive) as content:
            content.extractall(folder)
        (self._jar,) = folder.glob("*-runner.jar")

    @property
    def native_url(self) -> str:
        """Where its own API is, which its converters of Kafka Connect use."""
        return f"http://127.0.0.1:{self._port}/apis/registry/v2"

    @property
    def url(self) -> str:
        """Where its Confluent API is."""
        return f"http://127.0.0.1:{self._port}{API}"

    def start(self) -> "Registry":
        """Start, and wait until it listens."""
        java = find_java_home() / "bin" / "java"
        listen = f"-Dquarkus.http.port={self._port}", "-Dquarkus.http.host=127.0.0.1"
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [java, *_JAVA, *listen, "-jar", self._jar],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        procfs.wait_until(
            lambda: process.poll() is not None or not is_free(self._port), timeout_s=_START_S
        )
        if process.poll() is not None or is_free(self._port):
            said = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"the schema registry does not listen:\n{said}")
        return self

    def freeze(self) -> None:
        """Let it answer nothing, though it listens."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it answer again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the registry's process, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=patient(30))
            self._process = None


@contextmanager
def registry(folder: Path) -> Iterator[Registry]:
    """Run a registry in an empty folder."""
    made = Registry(folder)
    try:
        yield made.start()
    finally:
        made.stop()
