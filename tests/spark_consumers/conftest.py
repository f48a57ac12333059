"""One Spark session for all tests, and a warehouse for each."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from schemas.naming import Naming
from schemas.settings import KafkaSettings, Settings, SourceSettings, TablesSettings
from schemas.shaping import ShapingSettings
from services.local import jars
from services.local.java import find_java_home
from spark_consumers import job
from spark_consumers.batches import Applier, BatchReport
from spark_consumers.columns import METADATA
from spark_consumers.session import start_session
from spark_consumers.source import reader_options, topic_pattern
from spark_consumers.tables import quoted
from tests.providers.interface import Broker
from tests.spark_consumers.publisher import Publisher

IDLE_S = 1.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark's own collect() leaves its socket to the garbage collector."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session")
def spark_jars() -> str:
    """Spark's jars as `spark.jars` wants them."""
    return ",".join(map(str, jars.resolve("spark")))


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One warehouse for the session; every test has a namespace of its own in it."""
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="session")
def spark(
    spark_jars: str, warehouse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """The embedded session as `slottables run` starts it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("JAVA_HOME", str(find_java_home()))
    tables = TablesSettings(
        warehouse=warehouse,
        driver_memory="1g",
        spark_options={
            "spark.jars": spark_jars,
            "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        },
    )
    session = start_session(tables, KafkaSettings(bootstrap_servers="none:1", topic_prefix="test"))
    yield session
    session.stop()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)
    patch.undo()


@dataclass
class Pipeline:
    """A publisher of events, and the tables that follow them."""

    spark: SparkSession
    settings: Settings
    publisher: Publisher

    def __post_init__(self) -> None:
        self.applier = self.new_applier()
        self._taken: dict[str, dict[str, int]] = {}

    @property
    def kafka(self) -> KafkaSettings:
        """Its broker and topics."""
        assert self.settings.kafka
        return self.settings.kafka

    @property
    def tables(self) -> TablesSettings:
        """Its warehouse."""
        assert self.settings.tables
        return self.settings.tables

    @property
    def naming(self) -> Naming:
        """Its topics."""
        return Naming(self.kafka.topic_prefix, self.settings.shaping)

    def new_applier(self) -> Applier:
        """An applier that knows nothing but what the tables say, as after a restart."""
        return Applier(self.kafka, self.naming, self.tables)

    def records(self) -> DataFrame:
        """All committed records, as a batch."""
        return (
            self.spark.read.format("kafka")
            .options(**reader_options(self.kafka))
            .option("subscribePattern", self._topics())
            .load()
        )

    def _topics(self) -> str:
        return topic_pattern(self.kafka.topic_prefix, self.naming, self.tables.tables)

    def apply(self, condition: str = "true", batch: int = 0) -> BatchReport | None:
        """Apply the committed records that meet an SQL condition, as one batch."""
        return self.applier.apply(self.records().where(condition), batch)

    def stream(self, *, idle_s: float = IDLE_S) -> list[BatchReport]:
        """Run the streaming job until nothing comes any more."""
        reports: list[BatchReport] = []
        job.run(
            self.spark,
            self.settings,
            report=reports.append,
            stop=threading.Event(),
            until_idle_s=idle_s,
        )
        return reports

    def identifier(self, table: str) -> str:
        """The Iceberg table's name."""
        return f"slotbridge.{self.kafka.topic_prefix}.{table}"

    def rows(self, table: str, *order: str) -> list[Row]:
        """The Iceberg table's rows without our own columns, sorted."""
        frame = self.spark.table(self.identifier(table))
        names = [name for name in frame.columns if name not in METADATA]
        columns = [F.col(quoted(name)) for name in names]
        return frame.orderBy(*(order or columns[:1])).select(*columns).collect()

    def snapshots(self, table: str) -> int:
        """How often the Iceberg table was written."""
        return self.spark.table(f"{self.identifier(table)}.snapshots").count()


NewPipeline = Callable[..., Pipeline]


@pytest.fixture
def new_pipeline(
    spark: SparkSession, kafka: Broker, topic_prefix: str, warehouse: Path
) -> NewPipeline:
    """`new_pipeline(conninfo="", publication="p", shaping={}, **tables_settings)`: nothing is
    published yet."""

    def make(
        conninfo: str = "",
        publication: str = "p",
        shaping: dict[str, Any] | None = None,
        **tables: Any,
    ) -> Pipeline:
        shaped = ShapingSettings.model_validate(shaping or {})
        settings = Settings(
            source=SourceSettings.model_validate(
                {"conninfo": conninfo, "publication": publication}
            ),
            kafka=KafkaSettings(
                bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix
            ),
            shaping=shaped,
            tables=TablesSettings(warehouse=warehouse, trigger_interval_ms=200, **tables),
        )
        return Pipeline(spark, settings, Publisher(kafka.bootstrap_servers, topic_prefix, shaped))

    return make


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """A pipeline with default settings."""
    return new_pipeline()
