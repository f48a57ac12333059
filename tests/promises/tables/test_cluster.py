"""The same job by spark-submit, on a standalone cluster of two workers that lose executors."""

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.testbed import jars
from services.testbed.java import find_java_home
from services.testbed.ports import free_port
from spark_consumers import submit
from tests.promises.tables.executor_kills import kill_executors
from tests.promises.tables.publisher import Publisher, SourceTable
from tests.promises.tables.standalone_cluster import (
    QUICK,
    SPARK_HOME,
    WORKERS,
    Cluster,
    standalone_cluster,
)
from tests.providers.interface import Broker
from tests.providers.waiting import eventually, patient

ROWS = SourceTable("rows", {"id": ("int4", -1), "v": ("int4", -1)})


@pytest.fixture
def cluster(servers: None, tmp_path: Path) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path) as made:
        yield made


class Changes:
    """Transactions of any operation on a table, until it is stopped; `truth`: its rows then."""

    def __init__(self, publisher: Publisher, truth: dict[int, int], seed: int) -> None:
        self.truth = truth
        self.transactions = 0
        self._publisher = publisher
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End it after the transaction under way."""
        self._stop.set()
        self._thread.join(timeout=patient(60))
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            with self._publisher.transaction() as t:
                for _ in range(5):
                    row = {"id": self._random.randrange(300), "v": self._random.randrange(10**6)}
                    if row["id"] in self.truth and self._random.random() < 0.2:
                        t.delete(ROWS, row)
                        del self.truth[row["id"]]
                        continue
                    (t.update if row["id"] in self.truth else t.insert)(ROWS, row)
                    self.truth[row["id"]] = row["v"]
            self.transactions += 1


def submitted(cluster: Cluster, config: Path, ui_port: int) -> list[str | Path]:
    """The command: a task that is lost ends Spark's job at once, so that `run` begins it again."""
    return [
        *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
        *("--jars", jars.class_path("spark", ",")),
        *("--driver-memory", "700m", "--executor-memory", "500m"),
        *("--conf", "spark.driver.host=127.0.0.1"),
        *("--conf", "spark.sql.shuffle.partitions=7"),
        *("--conf", "spark.task.maxFailures=1"),
        *("--conf", f"spark.ui.port={ui_port}"),
        *("--conf", f"spark.driver.extraJavaOptions={' '.join(QUICK)}"),
        *("--conf", f"spark.executor.extraJavaOptions={' '.join(QUICK)}"),
        *(submit.__file__, "run", "--config", config, "--json", "--until-idle", "5"),
    ]


def lines(out: Path, begin: str = '{"epoch"') -> list[dict[str, Any]]:
    return [json.loads(x) for x in out.read_text("utf-8").splitlines() if x.startswith(begin)]


@pytest.mark.long
@pytest.mark.parametrize("kills_wanted", [1, 2])
def test_spark_submit_runs_the_same_job_on_two_workers_that_lose_executors(
    cluster: Cluster, kafka: Broker, topic_prefix: str, tmp_path: Path, kills_wanted: int
) -> None:
    seed = random.randrange(10_000)
    chance = random.Random(seed)
    publisher = Publisher(kafka.bootstrap_servers, topic_prefix)
    publisher.announce(ROWS)
    with publisher.transaction() as t:
        for number in range(2000):
            t.insert(ROWS, {"id": number, "v": 0})
    with publisher.transaction() as t:
        for number in range(1000):
            t.update(ROWS, {"id": number, "v": 1})
    config, out, log = (tmp_path / name for name in ("c.yaml", "out", "log"))
    document = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": topic_prefix},
        "tables": {
            "warehouse": str(tmp_path),
            "offsets_per_trigger_max": 2000,
            "trigger_interval_ms": 100,
            "maintenance_interval_ms": 5_000,
        },
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    changes = Changes(publisher, {n: int(n < 1000) for n in range(2000)}, seed)
    kills, ui_port = 0, free_port()
    with streaming_tab(ui_port) as pages, out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            submitted(cluster, config, ui_port),
            stdout=stdout,
            stderr=stderr,
            env={
                **os.environ,
                "JAVA_HOME": str(find_java_home()),
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": str(Path(submit.__file__).parents[1]),
            },
            start_new_session=True,
        )

        def await_epochs(count: int) -> None:
            def there() -> bool:
                assert process.poll() is None, log.read_text()[-3000:]
                return len(lines(out)) >= count

            eventually(there, what=f"{count} epochs", timeout_s=300)

        try:
            await_epochs(2)
            eventually(lambda: len(at_work(tmp_path)) == WORKERS, what="each worker works")
            while kills < kills_wanted:
                await_epochs(len(lines(out)) + 1)
                time.sleep(chance.uniform(0, lines(out)[-1]["seconds"]))
                kills += kill_executors(cluster, chance)
            changes.stop()
            code = process.wait(timeout=patient(300))
        finally:
            changes.stop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=patient(30))
    assert code == 0, log.read_text()[-3000:]
    epochs = lines(out)
    assert epochs[0]["events"] == 2000 and all(epoch["events"] <= 2000 for epoch in epochs)
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, len(epochs) + 1)), seed
    assert sum(epoch["transactions"] for epoch in epochs) == 2 + changes.transactions, seed
    assert not any(epoch["duplicates"] for epoch in epochs), seed
    assert rows(tmp_path, topic_prefix) == sorted(changes.truth.items()), seed
    text = out.read_text(encoding="utf-8")
    (begun, *_) = (json.loads(x) for x in text.splitlines() if '"consuming"' in x)
    assert (begun["shuffle_partitions"], begun["adaptive"]) == ("7", "true")
    assert "refused and parked" not in text + log.read_text()
    assert any(f"slottables {topic_prefix}" in page for page in pages)


def at_work(folder: Path) -> set[str]:
    """The folders of the workers that have started an executor."""
    return {executor.parents[1].name for executor in folder.glob("w*/app-*/*")}


@contextlib.contextmanager
def streaming_tab(port: int) -> Iterator[list[str]]:
    """What the streaming tab of Spark's UI shows meanwhile, again and again."""
    found: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/StreamingQuery/", timeout=patient(10)
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
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog(
        "slotbridge", uri=f"sqlite:///{warehouse / 'catalog.db'}", init_catalog_tables="false"
    )
    try:
        found = catalog.load_table((prefix, "rows")).scan().to_arrow().to_pylist()
    finally:
        catalog.engine.dispose()
    return sorted((row["id"], row["v"]) for row in found)
