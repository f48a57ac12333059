"""Who brings the events into tables: epochs of `slottables`, and the guides' foreachBatch MERGE."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from benchmarks.tables.source import PARTITIONS, TOPIC, Form
from schemas.events import UNAVAILABLE
from schemas.settings import Settings
from spark_consumers.epochs import job
from spark_consumers.epochs.report import EpochReport
from spark_consumers.kafka.reader import TopicOffsets, reader_options

EVENTS_AN_EPOCH = 50_000


class Ours:
    """Epochs of `slottables`."""

    name = "slottables"
    table = "slotbridge.bench.accounts"

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark, self._settings = spark, settings

    def take(self) -> Iterator[tuple[int, float]]:
        """(rows, seconds) of each epoch until all is there; the first one starts the query."""
        taken: list[tuple[int, float]] = []
        since = time.monotonic()

        def done(report: EpochReport) -> None:
            nonlocal since
            rows = sum(table.rows for table in report.tables.values())
            taken.append((rows, time.monotonic() - since))
            since = time.monotonic()

        job.run_epochs(self._spark, self._settings, report=done, stop=threading.Event(), once=True)
        yield from taken

    @contextlib.contextmanager
    def running(self, report: Callable[[EpochReport], None]) -> Iterator[None]:
        """The streaming query goes on in a thread meanwhile, and reports its epochs there."""
        stop = threading.Event()
        failures: list[Exception] = []

        def run() -> None:
            try:
                job.run_epochs(self._spark, self._settings, report=report, stop=stop)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]


class Plain:
    """A streaming query whose batches are merged as the guides show."""

    name = "foreachBatch MERGE"

    def __init__(self, spark: SparkSession, settings: Settings, folder: Path, form: Form) -> None:
        assert settings.kafka
        key = "string" if form.uuid else "int"
        row = f"struct<aid: {key}, bid: int, abalance: int, filler: string>"
        self._event = f"before {row}, after {row}, op string, source struct<lsn: bigint>"
        self._filler = "s.filler"
        if form.toast_bytes:
            self._filler = f"if(s.filler = '{UNAVAILABLE}', t.filler, s.filler)"
        self._spark, self._kafka, self._folder = spark, settings.kafka, folder
        self._starts, self._streams = "earliest", 0
        self._table = "slotbridge.plain.accounts"
        self._batches: list[tuple[int, float]] = []
        spark.sql("CREATE NAMESPACE IF NOT EXISTS slotbridge.plain")
        spark.sql(
            f"CREATE TABLE {self._table} (aid {key}, bid int, abalance int, filler string)"
            " USING iceberg TBLPROPERTIES ('format-version' = '2')"
        )

    def copy(self, table: str) -> None:
        """Take over the rows of a table, and go on after what is in Kafka."""
        self._spark.sql(
            f"INSERT OVERWRITE {self._table} SELECT aid, bid, abalance, filler FROM {table}"
        )
        ends = TopicOffsets(self._kafka).stable({TOPIC: tuple(range(PARTITIONS))})
        self._starts = json.dumps({t: {str(n): o for n, o in p.items()} for t, p in ends.items()})
        self._streams += 1

    def take(self) -> Iterator[tuple[int, float]]:
        """(rows, seconds) of each batch until all is there."""
        self._batches.clear()
        query = (
            self._spark.readStream.format("kafka")
            .options(**reader_options(self._kafka))
            .option("subscribe", TOPIC)
            .option("startingOffsets", self._starts)
            .option("maxOffsetsPerTrigger", EVENTS_AN_EPOCH)
            .load()
            .writeStream.foreachBatch(self._merge)
            .option("checkpointLocation", str(self._folder / f"checkpoint{self._streams}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        yield from self._batches

    def _merge(self, records: DataFrame, _batch: int) -> None:
        started = time.monotonic()
        value = F.from_json(F.col("value").cast("string"), self._event).alias("e")
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
            f" t.filler = {self._filler}"
            " WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT (aid, bid, abalance, filler)"
            " VALUES (s.aid, s.bid, s.abalance, s.filler)"
        )
        count = events.count()
        events.unpersist()
        self._batches.append((count, time.monotonic() - started))
