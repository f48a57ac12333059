"""What an epoch asks of the driver, counted at many tables of many partitions.

`python -m benchmarks.tables.scale --tables 10,100,1000 --partitions 4,200` prints a JSON line for
each pair: requests to Kafka by kind, Spark jobs, commits to the catalog, bytes of metadata, time.
Kafka is librdkafka's mock cluster, which counts requests and makes topics of any size. Kafka's Java
client can't speak with it: Spark gets the records from memory, and its own requests are not
counted. The catalog is SQLite in the warehouse's folder, where bytes of metadata can be counted
(Iceberg's InMemoryCatalog keeps its files in Java's memory). The tables are there already; each
epoch changes `--touched` of them, whatever their number. So many epochs as `--epochs-kept` are
recorded before.
"""

import argparse
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from benchmarks.tables.mock_cluster import MockCluster, mock_cluster
from schemas.events import (
    DataCollection,
    TransactionEvent,
    dead_topic,
    divergence_topic,
    schema_topic,
    transaction_topic,
)
from schemas.schema_events import Column, SchemaEvent
from schemas.settings import KafkaSettings, Settings
from schemas.tables import TablesSettings
from services.testbed import jars
from services.testbed.java import find_java_home
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.event_reader import EventReader
from spark_consumers.epochs.ledger import EpochRecord, Ledger, Place
from spark_consumers.events.shape import Shape
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.tables import Tables
from spark_consumers.session import start_session

PREFIX: Final = "scale"
EVENTS_A_TABLE: Final = 10
_FIRST_LSN: Final = 1000
_MAIN: Final = ("ListOffsets", "Metadata", "DescribeTopicPartitions", "Fetch")
_OURS: Final = "_epochs"
_TIMEOUT_S: Final = 60
_RECORD: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
)


class Load:
    """Tables in Kafka and in Iceberg, and transactions that change some of them."""

    def __init__(
        self, cluster: MockCluster, spark: SparkSession, settings: Settings, tables: int
    ) -> None:
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
        self._spark = spark
        self._settings = settings
        self._names = [f"t{number}" for number in range(tables)]
        self._lsn = _FIRST_LSN
        self._key = 0
        self._records: dict[str, list[tuple[Any, ...]]] = {}

    def announce(self, cluster: MockCluster, partitions: int) -> None:
        """Make the topics; publish the shapes."""
        for topic in (schema_topic, dead_topic, transaction_topic, divergence_topic):
            cluster.create(topic(PREFIX), 1)
        for name in self._names:
            cluster.create(f"{PREFIX}.public.{name}", partitions)
            event = _shape(name).model_dump_json(by_alias=True)
            self._producer.produce(schema_topic(PREFIX), event, name)
            self._producer.poll(0)
        self._producer.flush(_TIMEOUT_S)

    def make(self, epochs: int) -> None:
        """Make the tables as of some epochs, without Spark's jobs."""
        kafka, tables = self._settings.kafka, self._settings.tables
        assert kafka and tables
        made, places = Tables(kafka, tables), {}
        made.make_namespace(self._spark)
        for name in self._names:
            opened = made.open(self._spark, [Shape.from_event(_shape(name))], None)
            table = catalog.load(self._spark, opened.identifier)
            values = {catalog.EPOCH: "1", catalog.COMMIT_LSN: str(_FIRST_LSN)}
            catalog.set_properties(table, values)
            places[f"public.{name}"] = Place(opened.identifier, None, str(table.uuid()))
        ledger = Ledger(made.namespace, tables)
        for epoch in range(1, epochs + 1):
            record = EpochRecord(epoch, _FIRST_LSN, 0, {}, None, places)
            ledger.prepare(self._spark, record).transaction.commitTransaction()

    def transaction(self, touched: int) -> None:
        """Publish a transaction that changes the first tables."""
        self._lsn += 100
        names = self._names[:touched]
        self._records = {}
        self._send(transaction_topic(PREFIX), "", _mark("BEGIN", self._lsn, None))
        for name in names:
            for seq in range(EVENTS_A_TABLE):
                self._key += 1
                value = _event(name, self._key, self._lsn, seq)
                self._send(f"{PREFIX}.public.{name}", json.dumps({"id": self._key}), value)
        self._producer.flush(_TIMEOUT_S)
        counts = {f"public.{name}": EVENTS_A_TABLE for name in names}
        self._send(transaction_topic(PREFIX), "", _mark("END", self._lsn, counts))
        self._producer.flush(_TIMEOUT_S)

    def _send(self, topic: str, key: str, value: str) -> None:
        def done(_: object, message: Any) -> None:
            at = dt.datetime.fromtimestamp(message.timestamp()[1] / 1000, dt.UTC)
            place = (message.topic(), message.partition(), message.offset(), at)
            own = self._records.setdefault(message.topic(), [])
            own.append((key.encode(), value.encode(), *place))

        self._producer.produce(topic, value, key, on_delivery=done)
        self._producer.poll(0)

    def records(self, topics: Iterable[str]) -> DataFrame:
        """Return the records of the last transaction as Spark's Kafka source returns them."""
        rows = [row for topic in topics for row in self._records.get(topic, ())]
        return self._spark.createDataFrame(rows, _RECORD)


def _shape(name: str) -> SchemaEvent:
    columns = (("id", "int8", True), ("v", "text", False))
    after = [
        Column(name=column, type=kind, type_oid=0, typmod=-1, key=key)
        for column, kind, key in columns
    ]
    return SchemaEvent(
        schema="public",
        table=name,
        oid=1,
        commit_lsn=_FIRST_LSN,
        seq=0,
        ts_ms=0,
        replica_identity="default",
        before=None,
        after=after,
    )


def _mark(status: str, lsn: int, counts: dict[str, int] | None) -> str:
    found = [DataCollection(data_collection=n, event_count=c) for n, c in (counts or {}).items()]
    return TransactionEvent.model_validate(
        {
            "status": status,
            "id": f"1:{lsn}",
            "ts_ms": int(time.time() * 1000),
            "commit_lsn": lsn,
            "event_count": sum(counts.values()) if counts else None,
            "data_collections": None if counts is None else [c.model_dump() for c in found],
        }
    ).model_dump_json()


def _event(name: str, key: int, lsn: int, seq: int) -> str:
    source = {"schema": "public", "table": name, "lsn": lsn, "commit_lsn": lsn, "seq": seq}
    after = {"id": key, "v": "v"}
    return json.dumps({"op": "c", "before": None, "after": after, "source": source | {"ts_us": 1}})


def measured(
    cluster: MockCluster,
    spark: SparkSession,
    runner: EpochRunner,
    load: Load,
    folder: Path,
    touched: int,
) -> dict[str, Any]:
    """Return what one epoch asked for."""
    load.transaction(touched)
    before = _last_metadata(folder)
    jobs = _jobs(spark)
    cluster.forget()
    started, cpu = time.monotonic(), time.process_time()
    runner.topic.exists()
    runner.take(load.records([runner.topic.name]), runner.topic.stable())
    report = runner.step()
    seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu
    assert report is not None and len(report.tables) == touched, report
    requests = cluster.requests()
    new = {path: size for path, size in _last_metadata(folder).items() if path not in before}
    commits = [path for path in new if path.endswith(".metadata.json")]
    own = sum(size for path, size in new.items() if f"/{_OURS}/" in path)
    return {
        "seconds": round(seconds, 2),
        "python_cpu_s": round(cpu_s, 2),
        "requests": {name: requests[name] for name in _MAIN},
        "other_requests": sum(n for name, n in requests.items() if name not in _MAIN),
        "jobs": _jobs(spark) - jobs,
        "commits": len(commits),
        "metadata_bytes": sum(new.values()) - own,
        "record_bytes": own,
    }


def _last_metadata(folder: Path) -> dict[str, int]:
    found = {}
    for place, _, names in os.walk(folder):
        if place.endswith("/metadata"):
            for name in names:
                path = Path(place) / name
                found[str(path)] = path.stat().st_size
    return found


def _jobs(spark: SparkSession) -> int:
    """Return how many jobs Spark has begun."""
    java: Any = spark.sparkContext._jsc
    return int(java.sc().dagScheduler().nextJobId())


def measure(options: argparse.Namespace, tables: int, partitions: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of epochs with some tables of some partitions."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-scale-") as name, mock_cluster() as cluster:
        folder = Path(name)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, topic_prefix=PREFIX)
        settings = TablesSettings.model_validate(
            {
                "warehouse": folder / "warehouse",
                "driver_memory": options.driver_memory,
                "epochs_kept": max(options.epochs_kept, 2),
                "spark_options": {
                    "spark.jars": jars.class_path("spark", ","),
                    "spark.local.dir": str(folder / "spark"),
                },
            }
        )
        spark = start_session(settings, kafka)
        try:
            both = Settings(kafka=kafka, tables=settings)
            load = Load(cluster, spark, both, tables)
            load.announce(cluster, partitions)
            load.make(options.epochs_kept)
            started = time.monotonic()
            runner = EpochRunner(spark, both)
            start_s = time.monotonic() - started
            touched = min(options.touched, tables)
            with patch.object(EventReader, "records", lambda _, starts, __: load.records(starts)):
                found = [
                    measured(cluster, spark, runner, load, folder, touched)
                    for _ in range(options.epochs)
                ]
            runner.close()
            yield {
                "tables": tables,
                "partitions": partitions,
                "touched": touched,
                "start_s": round(start_s, 2),
                **middle(found[1:]),
            }
        finally:
            spark.stop()


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure; the first epoch, which is cold, is not among them."""
    numbers = {
        name: statistics.median(one[name] for one in found)
        for name, value in found[0].items()
        if not isinstance(value, dict)
    }
    requests: Counter[str] = Counter()
    for one in found:
        requests.update(one["requests"])
    return numbers | {name: round(count / len(found), 1) for name, count in requests.items()}


def main() -> None:
    """Measure each pair of numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", default="10,100,1000")
    parser.add_argument("--partitions", default="4,200")
    parser.add_argument("--touched", type=int, default=10, help="tables that an epoch changes")
    parser.add_argument("--epochs", type=int, default=6, help="the first is not counted")
    parser.add_argument("--epochs-kept", type=int, default=2)
    parser.add_argument("--driver-memory", default="2g")
    options = parser.parse_args()
    os.environ["JAVA_HOME"] = str(find_java_home())
    for tables in map(int, options.tables.split(",")):
        for partitions in map(int, options.partitions.split(",")):
            for line in measure(options, tables, partitions):
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
