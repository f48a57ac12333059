"""Starts the Spark session: embedded and local, or the one that spark-submit has prepared."""

import hashlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from schemas.errors import ExitCode, SetupError
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings

CATALOG = "slotbridge"
_PYTHON = "PYSPARK_PYTHON"
"""The variable that names the Python of the tasks which read Avro and Protobuf."""
_LANGUAGE, _ENGLISH = "LC_ALL", "C.UTF-8"
"""Java takes the system's messages, by which `failures` knows a full disk, in this language."""
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
    f"spark.executorEnv.{_LANGUAGE}": _ENGLISH,
    "spark.kafka.consumer.cache.capacity": "512",
    # What the pages of Spark and its plans must not show: a client's key and its login as well.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|keystore[.]key|jaas",
    "spark.sql.redaction.options.regex": "(?i)secret|password|token|keystore[.]key|jaas|url",
    # Records of Avro and Protobuf in a batch for Python; a row may be large.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
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
QUIET = (
    # Adaptive execution is off in the query alone, not in the epochs, which use the session itself.
    "org.apache.spark.sql.execution.streaming.runtime.ResolveWriteToStream",
    # Every batch that takes longer than the trigger's interval; the report says how long it took.
    "org.apache.spark.sql.execution.streaming.runtime.ProcessingTimeExecutor",
    # Tables are merged in threads, where a consumer can't be interrupted.
    "org.apache.spark.sql.kafka010.consumer.KafkaDataConsumer",
    # Partitions are assigned, and no offset is committed: the group's id only names the consumers.
    "org.apache.spark.sql.kafka010.KafkaSourceProvider",
    # The source's rows that are compared are removed at once, and never computed anew.
    "org.apache.spark.rdd.MapPartitionsRDD",
    "org.apache.spark.util.SparkStringUtils",
    "org.apache.hadoop.util.NativeCodeLoader",
)


def start_session(tables: TablesSettings, kafka: KafkaSettings) -> SparkSession:
    """Return a session with the Iceberg catalog `slotbridge`; `spark_options` override the rest.

    SIGINT's handler stays as it was. Raise SetupError (PROGRAM_MISSING) when Java does not start.
    """
    _make_private(local_folder(tables))
    submitted = _submitted()
    options = session_options(tables, kafka, submitted)
    if submitted is None and options["spark.master"].startswith("local"):
        os.environ.setdefault(_PYTHON, sys.executable)
    os.environ[_LANGUAGE] = _ENGLISH
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
    # Set these only now: options of the builder are on Java's command line, which all users of the
    # machine can read. Spark loads a catalog when it is first named.
    _set_catalog(session, tables)
    _quieten(session)
    return session


def session_beside(session: SparkSession, tables: TablesSettings) -> SparkSession:
    """Return another session of the same Spark, for work beside the epochs.

    An epoch gives all reads and writes of its own session a branch, for a while.
    """
    another = session.newSession()
    _set_catalog(another, tables)
    return another


def _set_catalog(session: SparkSession, tables: TablesSettings) -> None:
    given = {n: v for n, v in tables.spark_options.items() if n.startswith(_CATALOGS)}
    for name, value in (catalog_options(tables) | given).items():
        session.conf.set(name, value)


def session_options(
    tables: TablesSettings, kafka: KafkaSettings, submitted: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the options that Spark is started with. Pure.

    `submitted`: the options that spark-submit was given, None without spark-submit. They go before
    our own preferences, and say how Spark shuffles.
    """
    own = {
        "spark.app.name": f"slottables {kafka.topic_prefix}",
        "spark.sql.warehouse.dir": str(local_folder(tables)),
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
    """Return Spark's configuration of the Iceberg catalog: JDBC on SQLite, unless set otherwise.

    A REST catalog says itself where its warehouse is and how its files are read.
    """
    kind: dict[str, str] = {}
    if tables.catalog_type != "custom":
        kind["type"] = tables.catalog_type
    uri = tables.catalog_uri
    if tables.catalog_type == "jdbc":
        kind["jdbc.schema-version"] = "V1"
        uri = uri or _sqlite(tables.warehouse_folder)
    if uri:
        kind["uri"] = uri
    if tables.catalog_type != "rest":
        kind |= {"warehouse": tables.warehouse, "io-impl": tables.file_io}
    name = f"{_CATALOGS}{CATALOG}"
    own = {f"{name}.{key}": value for key, value in (kind | tables.catalog_options).items()}
    # A session must see at once what another session of this process has committed.
    return {
        name: "org.apache.iceberg.spark.SparkCatalog",
        **own,
        f"{name}.cache-enabled": "false",
    }


def local_folder(tables: TablesSettings) -> Path:
    """Return a folder of this machine whose content may be lost.

    It is the warehouse, or a folder for temporary files where the warehouse is in object storage.
    """
    if tables.warehouse_folder is not None:
        return tables.warehouse_folder
    digest = hashlib.sha256(tables.warehouse.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"slottables-{os.getuid()}-{digest}"


def _make_private(folder: Path) -> None:
    """Make a folder for its owner alone; raise SetupError where another user has made it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_relative_to(tempfile.gettempdir()) and folder.stat().st_uid != os.getuid():
        raise SetupError(
            f"{folder} belongs to another user",
            operation="start Spark",
            hint="set tables.checkpoint_location, and TMPDIR to a folder of your own",
        )


def _sqlite(warehouse: Path | None) -> str:
    """Return the URL of the catalog in the warehouse. Raise where that can't be written."""
    if warehouse is None:
        raise LookupError("the settings require catalog_uri for a warehouse in object storage")
    try:
        warehouse.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=warehouse):
            pass
    except OSError as error:
        raise SetupError(
            f"the folder of the Iceberg tables can't be written: {error.strerror}",
            operation="start Spark",
            subject=str(warehouse),
            hint="let the user of slottables write to tables.warehouse; in Kubernetes, by a volume "
            "that takes the pod's fsGroup (a hostPath volume does not)",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        ) from error
    return f"jdbc:sqlite:{warehouse / 'catalog.db'}?journal_mode=WAL&busy_timeout=20000"


def _quieten(session: SparkSession) -> None:
    """Silence loggers that repeat what slottables reports itself."""
    session.sparkContext.setLogLevel("WARN")
    # It would print the traceback of every error that leaves foreachBatch; we report them.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    jvm: Any = session.sparkContext._jvm
    log4j = jvm.org.apache.logging.log4j
    for logger in QUIET:
        log4j.core.config.Configurator.setLevel(logger, log4j.Level.ERROR)
