"""One Spark session for all tests, and a warehouse for each."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from schemas.errors import SlotbridgeError
from schemas.registry import RegistrySettings
from schemas.settings import KafkaSettings, Settings, SourceSettings
from schemas.shaping import ShapingSettings
from schemas.tables import TablesSettings
from services.testbed import jars
from services.testbed.java import find_java_home, short_lived_spark
from spark_consumers.epochs import job
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.parking import Parking
from spark_consumers.epochs.report import EpochReport
from spark_consumers.iceberg import catalog, commits
from spark_consumers.iceberg.layout import METADATA_NAMES
from spark_consumers.iceberg.table_note import Incomplete, TableNote, note_of
from spark_consumers.session import start_session
from spark_consumers.sql import quoted
from tests.promises.bridge.conftest import new_bridge
from tests.promises.bridge.running import SLOT_OF_TEST
from tests.promises.tables.publisher import Publisher
from tests.providers.interface import Broker
from tests.providers.waiting import eventually, patient

__all__ = ["new_bridge"]
IDLE_S = 1.0
NO_SOURCE = "host=127.0.0.1 port=1 dbname=none user=none"
"""The source of tables that nobody compares with it."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """PySpark's own collect() leaves its socket to the garbage collector."""
    item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


def pytest_exception_interact() -> None:
    """Close the connection to Java of a test that failed: the next call makes another.

    A test that pytest-timeout interrupts while it waits for Java leaves the answer on its
    connection, where py4j takes it for that of the next call, in whatever test that is.
    """
    gateway = SparkContext._gateway
    if gateway is None:
        return
    connection = gateway._gateway_client.get_thread_connection()
    if connection is not None:
        connection.close()


@pytest.fixture(scope="session")
def spark_jars(servers: None) -> str:
    """Spark's jars as `spark.jars` wants them, PostgreSQL's driver, which Debezium has, and S3."""
    driver = [jar for jar in jars.resolve("debezium") if jar.name.startswith("postgresql-")]
    return ",".join(map(str, [*jars.resolve("spark"), *driver, *jars.resolve("iceberg-aws")]))


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
            **short_lived_spark(tmp_path_factory.mktemp("spark")),
            "spark.jars": spark_jars,
        },
    )
    session = start_session(tables, KafkaSettings(bootstrap_servers="none:1", topic_prefix="test"))
    yield session
    session.stop()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=patient(30))
    patch.undo()


@dataclass
class Pipeline:
    """A publisher of events, and the tables that follow them."""

    spark: SparkSession
    settings: Settings
    publisher: Publisher

    def __post_init__(self) -> None:
        self._runner: EpochRunner | None = None

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
    def runner(self) -> EpochRunner:
        """What brings epochs; `restart` makes it know nothing but what the tables say."""
        if self._runner is None:
            self._runner = EpochRunner(self.spark, self.settings)
        return self._runner

    def set_tables(self, **values: Any) -> None:
        """Set settings of its tables, also those that users may not set."""
        found = self.tables.model_copy(update=values)
        self.settings = self.settings.model_copy(update={"tables": found})

    def restart(self) -> None:
        """End the runner, as a kill does."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def step(self) -> EpochReport | None:
        """Bring one epoch of what Kafka has, None without any: a micro-batch without the query."""
        self.publisher.await_shown()
        topic = self.runner.topic
        if topic.exists():
            start, end = topic.require(self.runner.offset), topic.stable()
            if start < end:
                self.runner.take(topic.between(self.spark, start, end), end)
        return self.runner.step()

    def apply(self) -> EpochReport:
        """Bring epochs until the last published transaction is there; the last one's report."""
        found: list[EpochReport] = []

        def done() -> bool:
            report = self.step()
            found.extend([report] if report else [])
            return self.runner.record.commit_lsn >= self.publisher.commit_lsn

        eventually(done, what="every transaction is applied", timeout_s=90)
        return found[-1]

    def stream(self, *, idle_s: float | None = IDLE_S, once: bool = False) -> list[EpochReport]:
        """Run the job until nothing comes any more, or `once`."""
        self.publisher.await_shown()
        self.restart()
        reports: list[EpochReport] = []
        job.run_epochs(
            self.spark,
            self.settings,
            report=reports.append,
            stop=threading.Event(),
            until_idle_s=None if once else idle_s,
            once=once,
        )
        return reports

    def identifier(self, table: str) -> str:
        """The Iceberg table's name."""
        return f"slotbridge.{self.kafka.topic_prefix}.{table}"

    def note(self, table: str) -> TableNote:
        """The note on an Iceberg table's state, as readers see it."""
        return note_of(catalog.properties(catalog.load(self.spark, self.identifier(table))))

    def rows(self, table: str, *order: str) -> list[Row]:
        """The Iceberg table's rows without our own columns, sorted."""
        frame = self.spark.table(self.identifier(table))
        names = [name for name in frame.columns if name not in METADATA_NAMES]
        columns = [F.col(quoted(name)) for name in names]
        return frame.orderBy(*(order or columns[:1])).select(*columns).collect()

    def snapshots(self, table: str) -> int:
        """How often the Iceberg table was written."""
        return self.spark.table(f"{self.identifier(table)}.snapshots").count()


NewPipeline = Callable[..., Pipeline]


def mark_incomplete(pipeline: Pipeline, table: str, *, of_kafka: bool = False) -> None:
    """Let a table say that it lacks events."""
    lacks, place = Incomplete(1, "it lacks one", of_kafka), pipeline.identifier(table)
    commits.change_note(pipeline.spark, place, None, lambda note: replace(note, incomplete=lacks))


def _raise(_parking: Parking, _name: str, error: SlotbridgeError) -> None:
    raise error


@pytest.fixture
def new_pipeline(
    spark: SparkSession,
    kafka: Broker,
    topic_prefix: str,
    warehouse: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[NewPipeline]:
    """`new_pipeline(conninfo=…, publication="p", shaping={}, **tables_settings)`, also `slot`,
    `formats` (of kafka), `registry`: nothing is published yet. With a source, the slot is that of
    the test's bridge. Unless `parks`, what a table is refused for is raised, and nothing is done.
    """

    made: list[Pipeline] = []

    def make(
        conninfo: str = NO_SOURCE,
        publication: str = "p",
        slot: str = "",
        shaping: dict[str, Any] | None = None,
        formats: dict[str, Any] | None = None,
        registry: dict[str, Any] | None = None,
        *,
        parks: bool = False,
        **tables: Any,
    ) -> Pipeline:
        shaped = ShapingSettings.model_validate(shaping or {})
        slot = slot or (
            "slotbridge" if conninfo == NO_SOURCE else SLOT_OF_TEST.format(topic_prefix)
        )
        source = {"conninfo": conninfo, "publication": publication, "slot": slot}
        settings = Settings(
            source=SourceSettings.model_validate(source),
            kafka=KafkaSettings(
                bootstrap_servers=kafka.bootstrap_servers,
                topic_prefix=topic_prefix,
                **(formats or {}),
            ),
            registry=RegistrySettings.model_validate(registry) if registry else None,
            shaping=shaped,
            tables=TablesSettings.model_validate(
                {"warehouse": warehouse, "trigger_interval_ms": 200} | tables
            ),
        )
        if not parks:
            monkeypatch.setattr(Parking, "_park", _raise)
        publisher = Publisher(kafka.bootstrap_servers, topic_prefix, shaped)
        made.append(Pipeline(spark, settings, publisher))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.restart()


@pytest.fixture
def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark applies all epochs, as it does large ones."""
    monkeypatch.setattr("spark_consumers.kafka.few_records.RECORDS_MAX", -1)


@pytest.fixture
def any_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second epoch on."""
    monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """A pipeline with default settings."""
    return new_pipeline()
