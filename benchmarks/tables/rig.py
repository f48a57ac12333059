"""A broker, and a Spark session whose tables are in a folder of its own, for one measurement."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

from benchmarks.race.process_metrics import usage
from benchmarks.tables.source import PREFIX
from schemas.settings import KafkaSettings, Settings
from schemas.tables import TablesSettings
from services.testbed import jars
from services.testbed.bed import Bed
from services.testbed.java import find_java_home
from spark_consumers.session import start_session


class Rig(NamedTuple):
    """What a measurement has; `folder` is gone after it."""

    spark: SparkSession
    settings: Settings
    folder: Path

    @property
    def servers(self) -> str:
        """The broker."""
        assert self.settings.kafka
        return self.settings.kafka.bootstrap_servers

    @property
    def java_cpu_s(self) -> float:
        """What Spark's Java has used."""
        gateway = self.spark.sparkContext._gateway
        assert gateway is not None
        found = usage(gateway.proc.pid)
        assert found is not None
        return found.cpu_s


@contextlib.contextmanager
def rig(
    *,
    driver_memory: str,
    offsets_per_trigger_max: int,
    spark_options: Mapping[str, str],
    key_index: bool = False,
) -> Iterator[Rig]:
    """Start both, and end them."""
    os.environ["JAVA_HOME"] = str(find_java_home())
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Bed(folder / "bed", lazy=True) as bed:
            bed.start("kafka")
            tables = TablesSettings(
                warehouse=folder / "warehouse",
                offsets_per_trigger_max=offsets_per_trigger_max,
                trigger_interval_ms=100,
                driver_memory=driver_memory,
                key_index=key_index,
                spark_options={
                    "spark.jars": jars.class_path("spark", ","),
                    "spark.local.dir": str(folder / "spark"),
                    **spark_options,
                },
            )
            kafka = KafkaSettings(
                bootstrap_servers=bed.kafka.bootstrap_servers, topic_prefix=PREFIX
            )
            spark = start_session(tables, kafka)
            try:
                yield Rig(spark, Settings(kafka=kafka, tables=tables), folder)
            finally:
                spark.stop()
