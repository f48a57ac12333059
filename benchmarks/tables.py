"""Rows per second into Iceberg tables: epochs of `slottables`, and a plain foreachBatch MERGE.

`python -m benchmarks.tables --rows 1000000` prints a JSON line for each load and contender. Both
read the same topics with the same Spark session, into tables of the same columns. The plain way is
what Debezium's and Spark's guides show: parse, keep the last event of a key, MERGE; without
transactions, without order across partitions, with default table properties.
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from schemas.events import schema_topic, transaction_topic
from schemas.settings import KafkaSettings, Settings
from schemas.tables import TablesSettings
from services.local import jars
from services.local.bed import Bed
from services.local.java import find_java_home
from spark_consumers.epochs.follower import Follower
from spark_consumers.kafka.reader import reader_options
from spark_consumers.session import start_session

PREFIX = "bench"
TABLE = "accounts"
TOPIC = f"{PREFIX}.public.{TABLE}"
PARTITIONS = 2
ROWS_A_TRANSACTION = 10
EVENTS_AN_EPOCH = 50_000
_COLUMNS = (("aid", "int4"), ("bid", "int4"), ("abalance", "int4"), ("filler", "text"))
_FILLER = "x" * 40
_ROW = (
    "before struct<aid: int, bid: int, abalance: int, filler: string>,"
    " after struct<aid: int, bid: int, abalance: int, filler: string>, op string,"
    " source struct<lsn: bigint>"
)


class Source:
    """Writes events of one table as the bridge does, transaction by transaction."""

    def __init__(self, servers: str, rows: int) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "transactional.id": PREFIX,
                "linger.ms": 20,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 1_000_000,
                "partitioner": "murmur2_random",
            }
        )
        self._producer.init_transactions(30)
        own = {schema_topic(PREFIX): 1, transaction_topic(PREFIX): 1, TOPIC: PARTITIONS}
        admin = AdminClient({"bootstrap.servers": servers})
        made = admin.create_topics(
            [NewTopic(name, num_partitions=count) for name, count in own.items()]
        )
        for future in made.values():
            future.result(30)
        self._lsn = 1000
        self._next = 0
        self._live: list[int] = []
        self._random = random.Random(1)
        self._rows = rows

    def write(self, load: str, events: int) -> None:
        """So many events of a load, in one Kafka transaction per 10,000."""
        done = 0
        while done < events:
            self._producer.begin_transaction()
            if self._lsn == 1000:
                self._producer.produce(schema_topic(PREFIX), _shape(), "{}")
            for _ in range(min(10_000, events - done) // ROWS_A_TRANSACTION):
                self._transaction(load)
                done += ROWS_A_TRANSACTION
            self._producer.commit_transaction(60)

    def _transaction(self, load: str) -> None:
        self._lsn += 100
        for seq in range(ROWS_A_TRANSACTION):
            op = {"insert": "c", "update": "u"}.get(load) or self._random.choice("ucud"[:4])
            self._event(op if self._live else "c", seq)
        counts = f'[{{"data_collection":"public.{TABLE}","event_count":{ROWS_A_TRANSACTION}}}]'
        end = (
            f'{{"status":"END","id":"1:{self._lsn}","ts_ms":{int(time.time() * 1000)},'
            f'"commit_lsn":{self._lsn},"event_count":{ROWS_A_TRANSACTION},'
            f'"data_collections":{counts}}}'
        )
        self._producer.produce(transaction_topic(PREFIX), end, "{}")
        self._producer.poll(0)

    def _event(self, op: str, seq: int) -> None:
        if op == "c":
            aid = self._next
            self._next += 1
            self._live.append(aid)
        else:
            place = self._random.randrange(len(self._live))
            aid = self._live[place]
            if op == "d":
                self._live[place] = self._live[-1]
                self._live.pop()
        row = (
            f'{{"aid":{aid},"bid":{aid // 100_000},"abalance":{self._random.randrange(10**6)},'
            f'"filler":"{_FILLER}"}}'
        )
        before, after = (row, "null") if op == "d" else ("null", row)
        now_us = int(time.time() * 1_000_000)
        value = (
            f'{{"before":{before},"after":{after},"source":{{"version":"1","connector":'
            f'"postgresql","name":"{PREFIX}","ts_ms":{now_us // 1000},"ts_us":{now_us},"snapshot":'
            f'"false","db":"bench","sequence":"[]","schema":"public","table":"{TABLE}","txId":1,'
            f'"lsn":{self._lsn + seq},"commit_lsn":{self._lsn},"seq":{seq},"timeline":1}},'
            f'"transaction":null,"op":"{op}","ts_ms":{now_us // 1000}}}'
        )
        self._producer.produce(TOPIC, value, f'{{"aid":{aid}}}')


class Ours:
    """Epochs of `slottables`."""

    name = "slottables"

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._follower = Follower(spark, settings)

    def take(self) -> Iterator[tuple[int, float]]:
        """(rows, seconds) of each epoch until all is there."""
        idle = 0
        while idle < 5:
            started = time.monotonic()
            report = self._follower.step()
            if report is None:
                idle += 1
            else:
                idle = 0
                rows = sum(table.rows for table in report.tables.values())
                yield rows, time.monotonic() - started


class Plain:
    """A streaming query whose batches are merged as the guides show."""

    name = "foreachBatch MERGE"

    def __init__(self, spark: SparkSession, settings: Settings, folder: Path) -> None:
        assert settings.kafka
        self._spark, self._kafka, self._folder = spark, settings.kafka, folder
        self._table = "slotbridge.plain.accounts"
        self._batches: list[tuple[int, float]] = []
        spark.sql("CREATE NAMESPACE IF NOT EXISTS slotbridge.plain")
        spark.sql(
            f"CREATE TABLE {self._table} (aid int, bid int, abalance int, filler string)"
            " USING iceberg TBLPROPERTIES ('format-version' = '2')"
        )

    def take(self) -> Iterator[tuple[int, float]]:
        """(rows, seconds) of each batch until all is there."""
        self._batches.clear()
        query = (
            self._spark.readStream.format("kafka")
            .options(**reader_options(self._kafka))
            .option("subscribe", TOPIC)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", EVENTS_AN_EPOCH)
            .load()
            .writeStream.foreachBatch(self._merge)
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        yield from self._batches

    def _merge(self, records: DataFrame, _batch: int) -> None:
        started = time.monotonic()
        value = F.from_json(F.col("value").cast("string"), _ROW).alias("e")
        events = records.select(value, "offset").select("e.*", "offset").persist()
        row = F.coalesce("after", "before").alias("row")
        changes = events.select(row, "op", F.col("source.lsn").alias("lsn"), "offset")
        changes = changes.select("row.*", "op", "lsn", "offset")
        order = Window.partitionBy("aid").orderBy(F.desc("lsn"), F.desc("offset"))
        last = changes.withColumn("n", F.row_number().over(order)).where("n = 1").drop("n")
        last.createOrReplaceTempView("plain_changes")
        last.sparkSession.sql(
            f"MERGE INTO {self._table} t USING plain_changes s ON t.aid = s.aid"
            " WHEN MATCHED AND s.op = 'd' THEN DELETE"
            " WHEN MATCHED THEN UPDATE SET t.bid = s.bid, t.abalance = s.abalance,"
            " t.filler = s.filler"
            " WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT (aid, bid, abalance, filler)"
            " VALUES (s.aid, s.bid, s.abalance, s.filler)"
        )
        count = events.count()
        events.unpersist()
        self._batches.append((count, time.monotonic() - started))


def _shape() -> str:
    columns = [
        {"name": name, "type": kind, "type_oid": 0, "typmod": -1, "key": name == "aid"}
        for name, kind in _COLUMNS
    ]
    event = {
        "schema": "public",
        "table": TABLE,
        "oid": 1,
        "commit_lsn": 1000,
        "seq": 0,
        "ts_ms": 0,
        "replica_identity": "default",
        "before": None,
        "after": columns,
    }
    return json.dumps(event)


def measure(contender: Ours | Plain, load: str, rows: int) -> dict[str, Any]:
    """What a contender does with what is in Kafka."""
    cpu = _cpu_s()
    started = time.monotonic()
    taken = list(contender.take())
    seconds = time.monotonic() - started
    events = sum(count for count, _ in taken)
    each = sorted(s for _, s in taken)
    return {
        "load": load,
        "table_rows": rows,
        "contender": contender.name,
        "events": events,
        "epochs": len(taken),
        "events_per_s": round(events / seconds) if events else 0,
        "events_per_cpu_s": round(events / max(0.01, _cpu_s() - cpu)),
        "median_epoch_s": round(each[len(each) // 2], 2) if each else None,
    }


def _cpu_s() -> float:
    own, java = 0.0, 0.0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = usage.ru_utime + usage.ru_stime
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[1]) == os.getpid():
            java += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + java


def main() -> None:
    """Fill, then measure each load for both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=200_000)
    options = parser.parse_args()
    os.environ["JAVA_HOME"] = str(find_java_home())
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        _measure_all(Path(name), options.rows, options.events, sys.stdout.write)


def _measure_all(folder: Path, rows: int, events: int, write: Callable[[str], Any]) -> None:
    with Bed(folder / "bed", lazy=True) as bed:
        bed.start("kafka")
        servers = bed.kafka.bootstrap_servers
        tables = TablesSettings(
            warehouse=folder / "warehouse",
            offsets_per_trigger_max=EVENTS_AN_EPOCH,
            driver_memory="3g",
            spark_options={
                "spark.jars": ",".join(map(str, jars.resolve("spark"))),
                "spark.local.dir": str(folder / "spark"),
            },
        )
        kafka = KafkaSettings(bootstrap_servers=servers, topic_prefix=PREFIX)
        settings = Settings(kafka=kafka, tables=tables)
        spark = start_session(tables, kafka)
        source = Source(servers, rows)
        contenders = (Ours(spark, settings), Plain(spark, settings, folder))
        for load, count in (("insert", rows), ("update", events), ("mixed", events)):
            source.write(load, count)
            for contender in contenders:
                write(json.dumps(measure(contender, load, rows)) + "\n")
                sys.stdout.flush()
        spark.stop()


if __name__ == "__main__":
    main()
