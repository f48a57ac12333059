"""Audit, verify and restore by spark-submit, on executors that do not see the driver's folders.

The driver's folder for temporary files is `/proc/self/cwd/…`: a path that leads each process to its
own working folder, so that executors, like those in pods of their own, do not have it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import yaml

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.testbed import jars
from services.testbed.java import find_java_home
from spark_consumers import submit
from spark_consumers.epochs.audit_log import AuditLog
from tests.promises.bridge.conftest import NewBridge
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.standalone_cluster import (
    QUICK,
    SPARK_HOME,
    Cluster,
    standalone_cluster,
)
from tests.promises.tables.test_audit import beside, plant, writer
from tests.providers.interface import Provider
from tests.providers.waiting import patient

PRIVATE = "private"
INSERT = r"INSERT INTO {table} SELECT i, E'a\n\u2028b' FROM generate_series(1, 500) i"


class Done(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    log: str

    def document(self) -> dict[str, Any]:
        """The last line that it has printed."""
        assert self.stdout, self.log[-5000:]
        found: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return found


@pytest.fixture
def cluster(servers: None, tmp_path: Path) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path) as made:
        yield made


def submitted(cluster: Cluster, config: Path, folder: Path, *arguments: str) -> Done:
    """Run a command by spark-submit, in `folder`, which has the driver's temporary files."""
    (folder / PRIVATE).mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
        *("--jars", jars.class_path("spark", ",")),
        *("--driver-memory", "700m", "--executor-memory", "500m"),
        *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.sql.shuffle.partitions=2"),
        *("--conf", f"spark.driver.extraJavaOptions={' '.join(QUICK)}"),
        *("--conf", f"spark.executor.extraJavaOptions={' '.join(QUICK)}"),
        *(submit.__file__, *arguments, "--config", str(config)),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(200),
        env={
            **os.environ,
            "TMPDIR": f"/proc/self/cwd/{PRIVATE}",
            "JAVA_HOME": str(find_java_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(submit.__file__).parents[1]),
        },
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def followed(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> tuple[Pipeline, str]:
    """Two tables that a bridge streams, and that the Iceberg tables have."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(b"CREATE TABLE items (id int PRIMARY KEY, note text)")
        connection.execute(b"CREATE TABLE others (id int PRIMARY KEY, note text)")
    bridge = new_bridge(conninfo, snapshot={"mode": "initial"})
    bridge.start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("items", "others"):
            connection.execute(INSERT.format(table=table).encode())
    bridge.caught_up()
    publication = f"p_{topic_prefix}"
    pipeline = new_pipeline(conninfo, publication=publication, slot=bridge.slot)
    assert pipeline.stream(once=True)
    return pipeline, conninfo


def config_of(pipeline: Pipeline, conninfo: str, folder: Path) -> Path:
    """The configuration of a pipeline as a file."""
    source = pipeline.settings.source
    assert source
    options = {"audit_busy_percent": 50, "audit_deadline_ms": 600_000, "spark_options": {}}
    document = {
        "source": {"conninfo": conninfo, "slot": source.slot, "publication": source.publication},
        "kafka": {
            "bootstrap_servers": pipeline.kafka.bootstrap_servers,
            "topic_prefix": pipeline.kafka.topic_prefix,
        },
        "tables": json.loads(pipeline.tables.model_dump_json()) | options,
    }
    config = folder / "tables.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    return config


@pytest.mark.long
def test_executors_that_do_not_see_the_drivers_folder_name_planted_differences(
    followed: tuple[Pipeline, str], cluster: Cluster, pair: Provider, tmp_path: Path
) -> None:
    pipeline, conninfo = followed
    config, folder = config_of(pipeline, conninfo, tmp_path), tmp_path / "driver"
    plant(
        pipeline,
        "items",
        "UPDATE {table} SET note = 'flipped' WHERE id = 7",
        "DELETE FROM {table} WHERE id = 8",
        "INSERT INTO {table} SELECT * FROM {table} WHERE id = 9",
    )
    with beside(writer(pipeline)):
        audited = submitted(cluster, config, folder, "audit", "--json")
    tables = {table["table"]: table for table in audited.document()["tables"]}
    assert audited.code == ExitCode.CHECK_FAILED, audited.log[-5000:]
    assert tables["public.others"]["verdict"] == "equal"
    assert [(row["kind"], row["key"]) for row in tables["public.items"]["rows"]] == [
        ("different", '{"id":7}'),
        ("extra", '{"id":9}'),
        ("missing", '{"id":8}'),
    ]
    found = AuditLog(pipeline.kafka.topic_prefix).findings(pipeline.spark)
    assert {name: one.differences for name, one in found.items()} == {
        "public.items": 3,
        "public.others": 0,
    }
    verified = submitted(cluster, config, folder, "verify", "--json", "--examples")
    tables = {table["table"]: table for table in verified.document()["tables"]}
    assert verified.code == ExitCode.CHECK_FAILED, verified.log[-5000:]
    assert tables["public.others"]["equal"] and tables["public.others"]["source_rows"] == 500
    assert sorted(tables["public.items"]["examples"]) == [
        'different {"id":7}',
        'extra {"id":9}',
        'missing {"id":8}',
    ]
    with psycopg.connect(pair.primary.conninfo("postgres"), autocommit=True) as connection:
        name = f"restored_{pipeline.kafka.topic_prefix}".replace("-", "_").lower()
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    try:
        arguments = ("--as-of", format_lsn(pipeline.runner.record.commit_lsn), "--table")
        into = ("--into", pair.primary.conninfo(name))
        restored = submitted(cluster, config, folder, "restore", *arguments, "public.others", *into)
        assert restored.code == ExitCode.OK, restored.log[-5000:]
        with psycopg.connect(pair.primary.conninfo(name)) as connection:
            assert connection.execute("SELECT count(*) FROM others").fetchall() == [(500,)]
    finally:
        with psycopg.connect(pair.primary.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
