"""Makes all tables of an epoch and its record visible in one transaction of the catalog.

    jdbc            one SQL transaction replaces the metadata locations of all of them
    rest            one request `POST …/transactions/commit` (Iceberg's REST specification)
    other catalogs  have no such transaction: one table after the other, and the record last. So it
                    is with a REST server that says at the first request that it has none

All of it or none is there after a kill with the first two. No way commits to a table that is
another one than its change was prepared for: a writer that was frozen and overtaken has no effect.

Sources: `JdbcTableOperations.doCommit` and `JdbcUtil` (Iceberg core) for the rows of
`iceberg_tables`, whose statement this repeats for several tables; `RESTCatalog.commitTransaction`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import structlog
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from spark_consumers.epochs.ledger import Entered
from spark_consumers.epochs.threads import at_once
from spark_consumers.failures import text_of
from spark_consumers.iceberg.commits import compare_and_set
from spark_consumers.iceberg.staging import Adopted
from spark_consumers.java import java_class
from spark_consumers.java import table_files as program
from spark_consumers.session import CATALOG

log = structlog.get_logger()
_OPTIONS = f"spark.sql.catalog.{CATALOG}."
_OF_DRIVER = "jdbc."
_UPDATE = (
    "UPDATE iceberg_tables SET metadata_location = ?, previous_metadata_location = ? WHERE"
    " catalog_name = ? AND table_namespace = ? AND table_name = ? AND metadata_location = ?"
)
_NAME = re.compile("`((?:[^`]|``)*)`")
_ATTEMPTS = 10
"""To commit the record by itself: commands set properties of its table meanwhile."""
_SAYS_NONE = re.compile(r"\(code: (?:405|406|501),")
_ONE_REQUEST: dict[str, bool] = {}
"""URI of a REST server -> whether it commits several tables in one request, once that is known."""


class TableCommit(NamedTuple):
    """A transaction of one table (Iceberg's BaseTransaction) that waits to be committed."""

    identifier: str
    transaction: Any

    @property
    def names(self) -> tuple[str, str]:
        """The namespace and the name of the table."""
        space, name = (part.replace("``", "`") for part in _NAME.findall(self.identifier))
        return space, name


def commits_of(adopted: Iterable[Adopted]) -> list[TableCommit]:
    """Return the commits of tables that an epoch is still to make."""
    return [
        TableCommit(each.state.identifier, each.transaction)
        for each in adopted
        if each.transaction is not None
    ]


def publish(
    spark: SparkSession,
    tables: Sequence[TableCommit],
    record: TableCommit,
    prepare: Callable[[], Entered],
) -> bool:
    """Commit an epoch's changes of its tables, and its record; tell whether they are committed.

    False: another program has changed a table meanwhile, so prepare all of them anew. `prepare`
    prepares the record once more; it raises Retryable (LOCKED) if the epoch is committed. An error
    of the catalog or its database is passed on: what it has committed is then unknown.
    """
    loader = java_class(spark._jsparkSession, "org.apache.iceberg.spark.Spark3Util")
    catalog = loader.loadIcebergCatalog(spark._jsparkSession, CATALOG)
    way = _WAYS.get(str(catalog.getClass().getName()))
    given = None if way is None else way(spark, catalog, tables, record)
    return one_by_one(tables, record, prepare) if given is None else given


def one_by_one(
    tables: Iterable[TableCommit], record: TableCommit, prepare: Callable[[], Entered]
) -> bool:
    """Commit the tables, several at once, and then the record, each by itself.

    The record is prepared anew while commands set properties of its table.
    """
    if not each_alone(tables):
        return False
    for _ in range(_ATTEMPTS):
        if compare_and_set(record.transaction):
            return True
        record = record._replace(transaction=prepare().transaction)
    return False


def each_alone(changes: Iterable[TableCommit]) -> bool:
    """Commit changes of tables, each by itself; tell whether all of them are committed."""
    beaten: list[str] = []

    def commit(change: TableCommit) -> None:
        if not compare_and_set(change.transaction):
            beaten.append(change.identifier)

    at_once(commit, changes)
    return not beaten


def _by_sql(
    spark: SparkSession, catalog: Any, tables: Sequence[TableCommit], record: TableCommit
) -> bool:
    """Write the new metadata files, then name all of them in one SQL transaction.

    The rows are replaced in the order of their names: two writers can't wait for each other.
    """
    changes = sorted((*tables, record), key=lambda change: change.names)
    written: dict[str, str] = {}

    def write(change: TableCommit) -> None:
        written[change.identifier] = _write_metadata(change.transaction)

    at_once(write, changes)
    # If this raises, the files stay: what the database has made of it is not known.
    if not _replace_locations(spark, str(catalog.name()), changes, written):
        for change in changes:
            change.transaction.underlyingOps().io().deleteFile(written[change.identifier])
        program(catalog).removeNew(_transactions(changes))
        return False
    program(catalog).removeOld(_transactions(changes))
    return True


def _write_metadata(transaction: Any) -> str:
    """Write the metadata file that a transaction leads to; return its location."""
    return str(program(transaction).write(transaction))


def _replace_locations(
    spark: SparkSession, catalog_name: str, changes: Sequence[TableCommit], written: dict[str, str]
) -> bool:
    """Let the catalog name the metadata files that were written, all or none; tell which.

    None, if for one table it no longer names the file that the changes began with. The connection
    has the catalog's own options.
    """
    rows = []
    for change in changes:
        before = str(change.transaction.startMetadata().metadataFileLocation())
        rows.append([written[change.identifier], before, catalog_name, *change.names, before])
    uri, options = _database(spark)
    done = program(options).updateAll(uri, options, _UPDATE, json.dumps(rows))
    return bool(done)


@lru_cache(maxsize=2)
def _database(spark: SparkSession) -> tuple[str, Any]:
    """Return the URI of the JDBC catalog's database, and what its driver is given."""
    options = {n: v for n, v in spark.conf.getAll.items() if n.startswith(_OPTIONS)}
    given = {name.removeprefix(_OPTIONS): value for name, value in options.items()}
    properties = java_class(spark._jsparkSession, "java.util.Properties")()
    for name, value in given.items():
        if name.startswith(_OF_DRIVER):
            properties.setProperty(name.removeprefix(_OF_DRIVER), value)
    return given["uri"], properties


def _transactions(changes: Iterable[TableCommit]) -> Any:
    """Return the transactions as a list of Java's."""
    found = None
    for change in changes:
        if found is None:
            found = java_class(change.transaction, "java.util.ArrayList")()
        found.add(change.transaction)
    return found


def _by_rest(
    spark: SparkSession, catalog: Any, tables: Sequence[TableCommit], record: TableCommit
) -> bool | None:
    """Send all changes in one request; return None where the server has no such request.

    Only the first answer can tell that. A server that has once committed, or may have, has it.
    """
    uri = str(catalog.properties().get("uri"))
    if _ONE_REQUEST.get(uri) is False:
        return None
    known = spark._jsparkSession
    commits = java_class(known, "java.util.ArrayList")()
    commit_of = java_class(known, "org.apache.iceberg.catalog.TableCommit").create
    for change in (*tables, record):
        before, now = change.transaction.startMetadata(), change.transaction.currentMetadata()
        commits.add(commit_of(_identifier(known, change), before, now))
    try:
        catalog.commitTransaction(commits)
    except (Py4JJavaError, CapturedException) as error:
        if uri not in _ONE_REQUEST and _has_none(catalog, [c.identifier() for c in commits], error):
            _ONE_REQUEST[uri] = False
            log.warning(
                "the REST catalog can't commit several tables in one request: they are committed "
                "one after the other, and the record of epochs last",
                answer=_name(error),
            )
            return None
        _ONE_REQUEST[uri] = True
        if _name(error) == "CommitFailedException":
            # The record's manifest list stays: a request that was repeated may have been done.
            return False
        raise
    _ONE_REQUEST[uri] = True
    return True


def _identifier(known: Any, change: TableCommit) -> Any:
    """Return a table's name as Iceberg's catalogs take it."""
    identifiers = java_class(known, "org.apache.iceberg.catalog.TableIdentifier")
    separator = java_class(known, "java.util.regex.Pattern").compile("\n")  # makes Java's arrays
    return identifiers.of(separator.split("\n".join(change.names)))


def _has_none(catalog: Any, identifiers: Sequence[Any], error: Exception) -> bool:
    """Tell whether a server's answer says that it can't commit several tables in one request.

    By Iceberg's ErrorHandlers, 404 is a NoSuchTableException: also of a path that is not there.
    """
    name = _name(error)
    if name == "NoSuchTableException":
        return all(catalog.tableExists(identifier) for identifier in identifiers)
    return name == "UnsupportedOperationException" or (
        name == "RESTException" and bool(_SAYS_NONE.search(text_of(error)))
    )


def _name(error: Exception) -> str:
    """Return the name of the class of what Java has raised; PySpark makes its own of some."""
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getClass().getSimpleName())
    return type(error).__name__


_WAYS: Mapping[
    str, Callable[[SparkSession, Any, Sequence[TableCommit], TableCommit], bool | None]
] = {
    "org.apache.iceberg.jdbc.JdbcCatalog": _by_sql,
    "org.apache.iceberg.rest.RESTCatalog": _by_rest,
}
