"""Translates what Spark, Iceberg, Java and the system raise into the errors of schemas.errors.

Their messages can hold row values, so that only our own marks and the error's class go on.

What was raised on an executor reaches us as text alone, with Java's stack trace in it: it is
classed by the names of classes and conditions there, and by sentences of Spark, Iceberg and Kafka,
which have no translations. What does have them is not read: databases are classed by SQLSTATE, and
Java gets the system's messages in English (`session.start_session`).
"""

import errno
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException

from schemas.errors import (
    BadInput,
    ExitCode,
    OperatorNeeded,
    Retryable,
    SetupError,
    SlotbridgeError,
)
from spark_consumers.events.changes import REFUSED
from spark_consumers.formats.registry_failure import failure_in

FOREIGN = (PySparkException, Py4JError)
_REFUSAL = re.compile(
    re.escape(REFUSED) + r"\|([^|]*)\|(\d*)\|(\d*)\|(\d*)\|(.*?)(?: SQLSTATE|\n|$)", re.MULTILINE
)
_EXECUTORS_LOST = (
    r"ExecutorLostFailure|has failed the maximum allowable number of times"
    r"|shuffle map stage with indeterminate output was failed"
)
_APPLICATION_ENDED = (
    r"SparkContext was shut down|SparkContext has been shutdown|on a stopped SparkContext"
    r"|Application has been killed|All masters are unresponsive"
)
_JDBC = "java.sql.SQLException: SQLSTATE"
_CLASS = re.compile(r"\b(?:[a-z][a-z0-9_]*\.)+([A-Z]\w*(?:Exception|Error))\b")
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_.]{5,})\]")


class ExecutorsLostError(Retryable):
    """Spark has ended a job because executors died: the same work may succeed at once."""

    exit_code = ExitCode.SERVER_UNREACHABLE


def translated(error: Exception, operation: str) -> SlotbridgeError:
    """Return the error to raise instead of `error`; a SlotbridgeError comes back unchanged."""
    if isinstance(error, SlotbridgeError):
        return error
    text = text_of(error)
    refusal = _REFUSAL.search(text)
    if refusal:
        return _refused(refusal, operation)
    registry = failure_in(text, operation)
    if registry is not None:
        return registry
    for pattern, kind, code, message, hint in _KNOWN:
        if re.search(pattern, text):
            return kind(message, operation=operation, hint=hint, exit_code=code)
    return SlotbridgeError(
        f"Spark failed with {cause_of(error)}",
        operation=operation,
        hint="Spark's own log on stderr has the details",
        exit_code=ExitCode.BUG,
    )


def cause_of(error: Exception) -> str:
    """Return Spark's condition of an error, or its innermost class: the same for any table."""
    if isinstance(error, SlotbridgeError):
        return type(error).__name__
    text = text_of(error)
    condition = _CONDITION.search(text)
    classes = _CLASS.findall(text)
    return condition[1] if condition else classes[-1] if classes else type(error).__name__


def expected(error: Exception, operation: str) -> SlotbridgeError | None:
    """Return the error to raise instead of any exception; None for one that only a bug raises."""
    if isinstance(error, (SlotbridgeError, *FOREIGN)):
        return translated(error, operation)
    if not isinstance(error, OSError) or error.errno not in _SYSTEM:
        return None
    kind, code, hint = _SYSTEM[error.errno]
    return kind(
        f"the system refused a file or a connection: {error.strerror}",
        operation=operation,
        subject=str(error.filename or ""),
        hint=hint,
        exit_code=code,
    )


def failure_of(error: Exception, operation: str) -> SlotbridgeError:
    """Return the error to report instead of any exception, where the work goes on."""
    found = expected(error, operation)
    if found is not None:
        return found
    where = traceback.extract_tb(error.__traceback__)[-1:]
    return SlotbridgeError(
        f"it ended with {type(error).__name__}",
        operation=operation,
        subject="".join(f"{Path(frame.filename).name}, line {frame.lineno}" for frame in where),
        hint="this is a bug in slotbridge: please report it",
    )


def text_of(error: Exception) -> str:
    """Join all that an exception and its causes say, Java's included."""
    parts = [str(error)]
    java = getattr(error, "java_exception", None)
    if java is not None:
        parts.append(str(java.toString()))
    parts.extend(_sql_states(java or getattr(error, "_origin", None)))
    # Spark's own exceptions keep the Java cause in a field of theirs.
    causes = (error.__cause__, getattr(error, "_cause", None))
    parts.extend(text_of(cause) for cause in causes if isinstance(cause, Exception))
    return "\n".join(parts)


def _sql_states(java: Any) -> Iterator[str]:
    """Yield the SQLSTATE of each error of a database among a Java exception and its causes."""
    while java is not None:
        if is_instance_of(SparkContext._gateway, java, "java.sql.SQLException"):
            yield f"{_JDBC} {java.getSQLState()}"
        java = java.getCause()


def _refused(refusal: re.Match[str], operation: str) -> BadInput:
    """Return the error of a value that Spark's expressions have refused, by their message."""
    topic, partition, offset, commit_lsn, what = refusal.groups()
    where = topic + (f", partition {partition}, offset {offset}" if offset else "")
    return BadInput(
        f"{what} has a value that does not fit its type"
        if offset
        else f"{what} was left unchanged by a row that the table does not have",
        operation=operation,
        subject=where,
        lsn=int(commit_lsn) if commit_lsn else None,
        hint="compare the column's type in the schema topic with the event's JSON form"
        if offset
        else "a changed key left an out-of-line value out: set REPLICA IDENTITY FULL on the table",
        exit_code=ExitCode.RECORD_REFUSED,
    )


_FULL = (SetupError, ExitCode.DISK_FULL, "free space on that disk")
_FILES = (Retryable, ExitCode.NO_DESCRIPTORS, "raise the limit of open files (ulimit -n)")
_DENIED = (SetupError, ExitCode.PRIVILEGE_MISSING, "let the user of slottables read and write it")
_AWAY = (Retryable, ExitCode.SERVER_UNREACHABLE, "check that the server runs, and its address")
_SYSTEM: dict[int, tuple[type[SlotbridgeError], ExitCode, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _FILES),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _DENIED),
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT), _AWAY),
}
"""The system's error number -> the error that an operator can act on."""
_KNOWN: tuple[tuple[str, type[SlotbridgeError], ExitCode, str, str], ...] = (
    (
        r"KAFKA_DATA_LOSS|failOnDataLoss|Some data may have been lost|OffsetOutOfRange"
        r"|Partitions .* have been deleted|PARTITION_OFFSET_CHANGED|DATA_LOSS",
        OperatorNeeded,
        ExitCode.WITNESSES_DISAGREE,
        "Kafka has deleted events that the tables have not read",
        "topic retention was too short or a topic was made anew: the next start of `slottables run`"
        " names the topic and what helps",
    ),
    (
        r"No space left on device|Disk quota exceeded|File too large|SQLITE_FULL",
        SetupError,
        ExitCode.DISK_FULL,
        "the disk is full",
        "free space in the warehouse or in spark.local.dir",
    ),
    (
        _EXECUTORS_LOST,
        ExecutorsLostError,
        ExitCode.SERVER_UNREACHABLE,
        "Spark's executors died while they worked, more often than Spark tries again",
        "no row is at fault: start slottables again; if it comes again, see the executors' logs,"
        " and give them more memory (spark.executor.memory)",
    ),
    (
        _APPLICATION_ENDED,
        Retryable,
        ExitCode.SERVER_UNREACHABLE,
        "Spark has ended the application",
        "no row is at fault: see the logs of Spark's master and driver, and start slottables again",
    ),
    (
        r"SaslAuthentication|SslAuthentication|TopicAuthorization|GroupAuthorization",
        SetupError,
        ExitCode.PRIVILEGE_MISSING,
        "Kafka refused the credentials or a topic",
        "allow this principal to read and describe the topics",
    ),
    (
        r"kafka\.common\.errors\.(Timeout|Disconnect|Network|BrokerNotAvailable)"
        r"|No resolvable bootstrap|CALL_TIMED_OUT|KafkaException: Failed to construct",
        Retryable,
        ExitCode.KAFKA_UNREACHABLE,
        "Kafka does not answer",
        "check kafka.bootstrap_servers and the broker",
    ),
    (
        r"CommitStateUnknownException",
        Retryable,
        ExitCode.SERVER_UNREACHABLE,
        "the Iceberg catalog did not say whether it has committed",
        "start slottables again: it reads from the tables what they have",
    ),
    (
        r"CommitFailedException|ValidationException: (?:Found|Missing|Cannot commit)"
        r"|Cannot fast-forward|CONCURRENT_STREAM_LOG_UPDATE",
        Retryable,
        ExitCode.LOCKED,
        "another writer changed a table at the same time",
        "run one slottables for each namespace",
    ),
    (
        rf"{_JDBC} (?:28|3D|42501)",
        SetupError,
        ExitCode.PRIVILEGE_MISSING,
        "the Iceberg catalog's database refuses the role, its password or the database's name",
        "correct tables.catalog_uri and tables.catalog_options, or grant the role what it lacks",
    ),
    (
        r"SQLITE_BUSY|database is locked|UncheckedSQLException|JdbcSQL|PSQLException"
        r"|SQLiteException",
        Retryable,
        ExitCode.SERVER_UNREACHABLE,
        "the Iceberg catalog's database does not answer",
        "check tables.catalog_uri; its driver's jar must be among spark.jars",
    ),
    (
        r"RESTException: Error occurred|ServiceUnavailableException|ServiceFailureException",
        Retryable,
        ExitCode.SERVER_UNREACHABLE,
        "the Iceberg catalog does not answer",
        "check tables.catalog_uri, and the log of the catalog's server",
    ),
    (
        r"SdkClientException|S3Exception|StorageException|UnknownHostException|SSLException"
        r"|SocketTimeoutException|java\.net\.(?:Connect|Socket)Exception",
        Retryable,
        ExitCode.SERVER_UNREACHABLE,
        "the object storage or another server does not answer",
        "check the warehouse's storage, its credentials and the network",
    ),
    (
        r"ModuleNotFoundError: No module named|PYTHON_VERSION_MISMATCH|Cannot run program .*python",
        SetupError,
        ExitCode.PROGRAM_MISSING,
        "Spark's executors lack Python, or the package slotbridge in it",
        "Avro and Protobuf are read by Python: install slotbridge[spark] on Spark's workers, and"
        " name that Python in PYSPARK_PYTHON (docs/guides/tables.md)",
    ),
    (
        r"Failed to find data source: kafka|ClassNotFoundException|Cannot find catalog plugin"
        r"|No suitable driver",
        SetupError,
        ExitCode.PROGRAM_MISSING,
        "a jar of Kafka, Iceberg or the catalog's database is missing",
        'name them in tables.spark_options["spark.jars"] (docs/guides/configure.md)',
    ),
)
