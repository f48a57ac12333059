"""The same job by spark-submit, on a standalone cluster of two workers."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
import yaml
from pyiceberg.catalog.sql import SqlCatalog

from services.testbed import jars
from services.testbed.java import SHORT_LIVED, find_java_home
from services.testbed.ports import free_port
from spark_consumers import submit
from tests.providers.interface import Broker
from tests.providers.waiting import eventually
from tests.spark_consumers.publisher import Publisher, SourceTable

SPARK_HOME = Path(pyspark.__file__).parent
QUICK = ("-XX:+UseSerialGC", *SHORT_LIVED)
ROWS = SourceTable("rows", {"id": ("int4", -1), "v": ("int4", -1)})


@pytest.fixture
def master(servers: None, tmp_path: Path) -> Iterator[str]:
    """The URL of a master with two workers of one core each."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    java = find_java_home() / "bin" / "java"
    log = tmp_path / "cluster.log"
    begin: list[str | Path] = [java, "-Xmx256m", *QUICK]
    begin += ["-cp", f"{SPARK_HOME}/jars/*"]
    place = "org.apache.spark.deploy"
    worker = [f"{place}.worker.Worker", "--cores", "1", "--memory", "700m", "--host", "127.0.0.1"]
    commands = [[f"{place}.master.Master", "--host", "127.0.0.1", "--port", str(port)]]
    commands += [[*worker, "--work-dir", str(tmp_path / f"w{n}"), url] for n in range(2)]
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
            lambda: log.read_text().count("Successfully registered with master") == 2,
            what="two workers",
            timeout_s=120,
        )
        yield url
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)


@pytest.mark.timeout(600)
def test_spark_submit_runs_the_same_job_on_two_workers(
    master: str, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    publisher = Publisher(kafka.bootstrap_servers, topic_prefix)
    publisher.announce(ROWS)
    with publisher.transaction() as t:
        for number in range(200):
            t.insert(ROWS, {"id": number, "v": 0})
    with publisher.transaction() as t:
        for number in range(100):
            t.update(ROWS, {"id": number, "v": 1})
    config = tmp_path / "c.yaml"
    document = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": topic_prefix},
        "tables": {"warehouse": str(tmp_path), "offsets_per_trigger_max": 200},
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    spark_jars = jars.class_path("spark", ",")
    ui_port = free_port()
    with streaming_tab(ui_port) as pages:
        done = subprocess.run(
            [
                *(SPARK_HOME / "bin" / "spark-submit", "--master", master, "--jars", spark_jars),
                *("--driver-memory", "700m", "--executor-memory", "500m"),
                *("--conf", "spark.driver.host=127.0.0.1"),
                *("--conf", "spark.sql.shuffle.partitions=7"),
                *("--conf", f"spark.ui.port={ui_port}"),
                *("--conf", f"spark.driver.extraJavaOptions={' '.join(QUICK)}"),
                *("--conf", f"spark.executor.extraJavaOptions={' '.join(QUICK)}"),
                *(submit.__file__, "run", "--config", config, "--json", "--once"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
            env={
                **os.environ,
                "JAVA_HOME": str(find_java_home()),
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": str(Path(submit.__file__).parents[1]),
            },
        )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"epoch"')]
    assert [line["events"] for line in lines] == [200, 100]
    log = next(json.loads(x) for x in done.stdout.splitlines() if '"consuming"' in x)
    assert (log["shuffle_partitions"], log["adaptive"]) == ("7", "true")
    assert rows(tmp_path, topic_prefix) == [(n, n < 100) for n in range(200)]
    assert any(f"slottables {topic_prefix}" in page for page in pages)
    executors = list(tmp_path.glob("w*/app-*/*"))
    assert len(executors) == 2


@contextlib.contextmanager
def streaming_tab(port: int) -> Iterator[list[str]]:
    """What the streaming tab of Spark's UI shows meanwhile, again and again."""
    found: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/StreamingQuery/", timeout=10
                ) as answer,
            ):
                found.append(answer.read().decode())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def rows(warehouse: Path, prefix: str) -> list[tuple[int, int]]:
    """The Iceberg table's rows, as PyIceberg reads them."""
    catalog = SqlCatalog(
        "slotbridge", uri=f"sqlite:///{warehouse / 'catalog.db'}", init_catalog_tables="false"
    )
    try:
        found = catalog.load_table((prefix, "rows")).scan().to_arrow().to_pylist()
    finally:
        catalog.engine.dispose()
    return sorted((row["id"], row["v"]) for row in found)
