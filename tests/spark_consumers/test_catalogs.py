"""Catalogs other than SQLite: PostgreSQL by JDBC, and REST by Iceberg's own server."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyspark
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession

from services.testbed import jars
from services.testbed.java import find_java_home
from services.testbed.ports import free_port, is_free
from spark_consumers.session import catalog_options
from tests.providers.interface import Provider
from tests.providers.waiting import eventually
from tests.spark_consumers.conftest import NewPipeline, Pipeline
from tests.spark_consumers.publisher import SourceTable

TABLE = SourceTable("things", {"id": ("int8", -1), "name": ("text", -1)})


@pytest.fixture
def rest_uri(servers: None, tmp_path: Path) -> Iterator[str]:
    """Of a REST catalog with a warehouse of its own."""
    of_spark = Path(pyspark.__file__).parent / "jars"
    hadoop = [*of_spark.glob("hadoop-client-*.jar"), *of_spark.glob("commons-logging-*.jar")]
    class_path = ":".join(map(str, [*jars.resolve("iceberg-rest"), *hadoop]))
    port, log = free_port(), tmp_path / "rest.log"
    settings = {
        "CATALOG_WAREHOUSE": str(tmp_path / "rest"),
        "CATALOG_URI": f"jdbc:sqlite:{tmp_path / 'rest.db'}",
        "CATALOG_REST_PORT": str(port),
    }
    java = find_java_home() / "bin" / "java"
    command: list[str | Path] = [java, "-Xmx256m", "-XX:+UseSerialGC", "-cp", class_path]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "org.apache.iceberg.rest.RESTCatalogServer"],
            stdout=file,
            stderr=file,
            env=os.environ | settings,
        )
    try:
        eventually(
            lambda: process.poll() is not None or not is_free(port),
            what="the REST catalog",
            timeout_s=60,
        )
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait(timeout=30)


def follow(spark: SparkSession, pipeline: Pipeline) -> None:
    """Two epochs through the catalog of the pipeline's settings, with a restart in between."""
    pipeline.spark = spark.newSession()
    for name, value in catalog_options(pipeline.tables).items():
        if name.startswith("spark.sql.catalog."):
            pipeline.spark.conf.set(name, value)
    pipeline.publisher.announce(TABLE)
    with pipeline.publisher.transaction() as t:
        t.insert(TABLE, {"id": 1, "name": "as it was"})
    pipeline.apply()
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.update(TABLE, {"id": 1, "name": "changed"})
    assert pipeline.apply().epoch == 2
    assert [row["name"] for row in pipeline.rows("things")] == ["changed"]


def test_in_postgresql(
    spark: SparkSession, pair: Provider, fresh_database: str, new_pipeline: NewPipeline
) -> None:
    server = conninfo_to_dict(pair.primary.conninfo(fresh_database))
    uri = f"jdbc:postgresql://127.0.0.1:{server['port']}/{fresh_database}"
    options = {"jdbc.user": server["user"]}
    follow(spark, new_pipeline(catalog_uri=uri, catalog_options=options))
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as connection:
        names = connection.execute("SELECT table_name FROM iceberg_tables").fetchall()
    assert sorted(names) == [("_epochs",), ("things",)]


def test_by_rest(
    spark: SparkSession, rest_uri: str, new_pipeline: NewPipeline, tmp_path: Path
) -> None:
    pipeline = new_pipeline(catalog_type="rest", catalog_uri=rest_uri)
    follow(spark, pipeline)
    assert list((tmp_path / "rest").rglob("things/data/*.parquet"))
