"""Starts the Spark session: embedded and local, or the one that spark-submit has prepared."""

import logging
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from schemas.errors import ExitCode, SetupError
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings

CATALOG = "slotbridge"
_CATALOGS = "spark.sql.catalog."
_EXTENSIONS = "spark.sql.extensions"
_OURS = ("org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",)
_REQUIRED = {
    # What the rows are made by: with other values they would be other rows.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.json.enableExactStringParsing": "true",
}
_PREFERRED = {
    # What spark-submit or a cluster's defaults may give otherwise.
    "spark.ui.showConsoleProgress": "false",
    # Where in Python each column was made: five calls to Java for each.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Copy-on-write is for small tables; looking for files to leave out would read changes twice.
    "spark.sql.optimizer.runtime.rowLevelOperationGroupFilter.enabled": "false",
    "spark.shuffle.compress": "false",
    # An epoch's events are kept until its tables are written: not worth being compressed.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    "spark.kafka.consumer.cache.capacity": "512",
    # Each select is planned once for each batch; its text would only fill the driver's memory.
    "spark.sql.ui.retainedExecutions": "1",
}
_EMBEDDED = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    # Micro-batches are small: planning again at run time costs more than it saves.
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
    "spark.master": "local[*]",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_QUIET = (
    # Adaptive execution is off in the query alone, not in the epochs, which use the session itself.
    "org.apache.spark.sql.execution.streaming.ResolveWriteToStream",
    # Every batch that takes longer than the trigger's interval; the report says how long it took.
    "org.apache.spark.sql.execution.streaming.ProcessingTimeExecutor",
    # Tables are merged in threads, where a consumer can't be interrupted.
    "org.apache.spark.sql.kafka010.KafkaDataConsumer",
    # Partitions are assigned, and no offset is committed: the group's id only names the consumers.
    "org.apache.spark.sql.kafka010.KafkaSourceProvider",
    "org.apache.spark.sql.catalyst.util.SparkStringUtils",
    "org.apache.hadoop.util.NativeCodeLoader",
)


def start_session(tables: TablesSettings, kafka: KafkaSettings) -> SparkSession:
    """Return a session with the Iceberg catalog `slotbridge`; `spark_options` override the rest.

    SIGINT's handler stays as it was. Raises SetupError (PROGRAM_MISSING) when Java does not start.
    """
    options = session_options(tables, kafka, _submitted())
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    builder = SparkSession.builder
    for name, value in options.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except (PySparkException, FileNotFoundError) as error:
        raise SetupError(
            "Java did not start",
            operation="start Spark",
            hint="install Java 17 or 21, or set JAVA_HOME",
            exit_code=ExitCode.PROGRAM_MISSING,
        ) from error
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
    # Not before: what the builder has is on the command line of Java, where all users of the
    # machine read it. Spark loads a catalog when it is first named.
    given = {n: v for n, v in tables.spark_options.items() if n.startswith(_CATALOGS)}
    for name, value in (catalog_options(tables) | given).items():
        session.conf.set(name, value)
    _quieten(session)
    return session


def session_options(
    tables: TablesSettings, kafka: KafkaSettings, submitted: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the options that Spark is started with. Pure.

    `submitted`: the options that spark-submit was given, None without spark-submit. They go before
    our own preferences, and say how Spark shuffles.
    """
    own = {
        "spark.app.name": f"slottables {kafka.topic_prefix}",
        "spark.sql.warehouse.dir": str(tables.warehouse.resolve()),
        "spark.driver.memory": tables.driver_memory,
    }
    preferred = _PREFERRED | own | (_EMBEDDED if submitted is None else {})
    given = submitted or {}
    options = {name: value for name, value in preferred.items() if name not in given} | _REQUIRED
    extensions = [tables.spark_options.get(_EXTENSIONS) or given.get(_EXTENSIONS), *_OURS]
    asked = {n: v for n, v in tables.spark_options.items() if not n.startswith(_CATALOGS)}
    return options | asked | {_EXTENSIONS: ",".join(filter(None, extensions))}


def _submitted() -> dict[str, str] | None:
    """Return the configuration that spark-submit has prepared, None where we start Java."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def catalog_options(tables: TablesSettings) -> dict[str, str]:
    """Spark's configuration of the Iceberg catalog: JDBC, by default on SQLite in the warehouse.

    A REST catalog says itself where its warehouse is and how files are read.
    """
    warehouse = tables.warehouse.resolve()
    name = f"spark.sql.catalog.{CATALOG}"
    kind: dict[str, str] = {f"{name}.type": tables.catalog_type}
    if tables.catalog_type == "rest":
        kind |= {f"{name}.uri": tables.catalog_uri}
    else:
        kind |= {
            f"{name}.uri": tables.catalog_uri or _sqlite(warehouse),
            f"{name}.jdbc.schema-version": "V1",
            f"{name}.warehouse": str(warehouse),
            f"{name}.io-impl": "org.apache.iceberg.hadoop.HadoopFileIO",
        }
    return {
        name: "org.apache.iceberg.spark.SparkCatalog",
        **kind,
        **{f"{name}.{key}": value for key, value in tables.catalog_options.items()},
        # A session must see at once what another session of this process has committed.
        f"{name}.cache-enabled": "false",
    }


def _sqlite(warehouse: Path) -> str:
    warehouse.mkdir(parents=True, exist_ok=True)
    return f"jdbc:sqlite:{warehouse / 'catalog.db'}?journal_mode=WAL&busy_timeout=20000"


def _quieten(session: SparkSession) -> None:
    session.sparkContext.setLogLevel("WARN")
    # It would print the traceback of every error that leaves foreachBatch; we report them.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    jvm = session.sparkContext._jvm
    assert jvm is not None
    log4j = jvm.org.apache.logging.log4j
    for logger in _QUIET:
        log4j.core.config.Configurator.setLevel(logger, log4j.Level.ERROR)
