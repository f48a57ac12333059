"""A standalone cluster of Spark on this machine: a master, and two workers of one core each."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyspark

from services.testbed.java import SHORT_LIVED, find_java_home
from services.testbed.ports import free_port
from tests.providers.waiting import eventually, patient

SPARK_HOME = Path(pyspark.__file__).parent
QUICK = ("-XX:+UseSerialGC", *SHORT_LIVED)
WORKERS = 2


class Cluster(NamedTuple):
    """The URL of the master, and the process ids of the workers."""

    url: str
    workers: list[int]

    def executors(self) -> list[int]:
        """The process ids of the executors that the workers run now."""
        found = []
        for worker in self.workers:
            for place in Path(f"/proc/{worker}/task").glob("*/children"):
                with contextlib.suppress(OSError):  # the thread has ended meanwhile
                    found += [int(pid) for pid in place.read_text().split()]
        return [pid for pid in found if b"CoarseGrainedExecutorBackend" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def standalone_cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster until the end of the block; the workers' folders are `w0`, `w1` in `folder`."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    java = find_java_home() / "bin" / "java"
    log = folder / "cluster.log"
    begin: list[str | Path] = [java, "-Xmx256m", *QUICK]
    begin += ["-cp", f"{SPARK_HOME}/jars/*"]
    place = "org.apache.spark.deploy"
    worker = [f"{place}.worker.Worker", "--cores", "1", "--memory", "700m", "--host", "127.0.0.1"]
    commands = [[f"{place}.master.Master", "--host", "127.0.0.1", "--port", str(port)]]
    commands += [[*worker, "--work-dir", str(folder / f"w{n}"), url] for n in range(WORKERS)]
    processes = []
    environment = {**os.environ, "JAVA_HOME": str(java.parents[1]), "SPARK_HOME": str(SPARK_HOME)}
    environment["SPARK_SCALA_VERSION"] = "2.13"
    try:
        for number, command in enumerate(commands):
            more = ["--webui-port", "0"]
            with log.open("ab") as file:
                processes.append(
                    subprocess.Popen(
                        [*begin, *command[:1], *more, *command[1:]],
                        stdout=file,
                        stderr=file,
                        env=environment,
                    )
                )
            if number == 0:
                eventually(
                    lambda: "New state: ALIVE" in log.read_text(), what="the master", timeout_s=120
                )
        eventually(
            lambda: log.read_text().count("Successfully registered with master") == WORKERS,
            what="two workers",
            timeout_s=120,
        )
        yield Cluster(url, [process.pid for process in processes[1:]])
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=patient(30))
