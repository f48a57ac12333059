"""Readers of Iceberg tables that a contender has written: Spark, DuckDB, pyiceberg."""

import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
from pyiceberg.table import StaticTable
from pyspark import SparkContext
from pyspark.sql import SparkSession

from benchmarks.tables.duckdb_reader import duckdb_reader
from services.testbed import jars

_CATALOGS: Final = "spark.sql.catalog"
_MEASURED: Final = 5
_DUCKDB_TIMEOUT_S: Final = 60.0


class SparkReader:
    """A new Java for each contender, so that none finds it warmed up by another's tables."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._spark, self._tables = spark, tables

    def rows(self, table: str, columns: str, live: str) -> Counter[tuple[Any, ...]]:
        """How often each row is there."""
        query = f"SELECT {columns} FROM {self._tables}.{table}{live}"
        found = self._spark.sql(query).toArrow()
        return Counter(zip(*(column.to_pylist() for column in found.columns), strict=True))

    def seconds_of_sum(self, table: str, live: str) -> float:
        """The median of five queries after two that are not counted."""
        query = f"SELECT sum(abalance) FROM {self._tables}.{table}{live}"
        taken = []
        for _ in range(2 + _MEASURED):
            since = time.monotonic()
            self._spark.sql(query).collect()
            taken.append(time.monotonic() - since)
        return round(statistics.median(taken[2:]), 2)


@contextlib.contextmanager
def spark_reader(catalog: str, database: Path, namespace: str) -> Iterator[SparkReader]:
    """Spark with two cores and 2 GiB; `catalog` is the name in the catalog's own table."""
    name = f"{_CATALOGS}.{catalog}"
    options = {
        "spark.master": "local[2]",
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.jars": jars.class_path("spark", ","),
        "spark.sql.warehouse.dir": str(database.parent),
        name: "org.apache.iceberg.spark.SparkCatalog",
        f"{name}.type": "jdbc",
        f"{name}.jdbc.schema-version": "V1",
        f"{name}.uri": f"jdbc:sqlite:{database}",
        f"{name}.warehouse": str(database.parent),
        f"{name}.cache-enabled": "false",
    }
    builder = SparkSession.builder
    for option, value in options.items():
        builder = builder.config(option, value)
    spark = builder.getOrCreate()
    try:
        yield SparkReader(spark, f"{catalog}.{namespace}")
    finally:
        spark.stop()
        _end_java()


def _end_java() -> None:
    gateway: Any = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=60)
    SparkContext._gateway = SparkContext._jvm = None


def seconds_of_duckdb(place: Path, live: str) -> float | str:
    """Seconds of the same sum by DuckDB, or why there are none."""
    with duckdb_reader() as database:
        limit = threading.Timer(_DUCKDB_TIMEOUT_S, database.interrupt)
        limit.start()
        since = time.monotonic()
        try:
            query = f"SELECT sum(abalance) FROM iceberg_scan('{place}'){live}"
            database.execute(query).fetchall()
        except (duckdb.Error, RuntimeError) as error:
            return f"{type(error).__name__} after {time.monotonic() - since:.0f} s"
        finally:
            limit.cancel()
        return round(time.monotonic() - since, 2)


def seconds_of_pyiceberg(place: Path) -> float | str:
    """Seconds in which pyiceberg reads the column, or why it does not."""
    since = time.monotonic()
    try:
        StaticTable.from_metadata(str(place)).scan(selected_fields=("abalance",)).to_arrow()
    except ValueError as error:
        return str(error)
    return round(time.monotonic() - since, 2)
