"""Maintains all tables of a namespace, by the epochs that are to stay readable.

So is the quarantine, which no epoch names.
"""

from collections.abc import Callable, Iterable, Iterator

import structlog
from pyspark.sql import SparkSession

from schemas.errors import SetupError, SlotbridgeError
from schemas.tables import TablesSettings
from spark_consumers.epochs.ledger import Ledger, recorded_of
from spark_consumers.epochs.quarantine import NAME as QUARANTINE
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, rollback
from spark_consumers.iceberg.maintenance import Maintained, maintain, maintain_without_epochs
from spark_consumers.iceberg.tables import State
from spark_consumers.liveness import tick

log = structlog.get_logger()


def maintain_all(
    spark: SparkSession,
    settings: TablesSettings,
    ledger: Ledger,
    states: Iterable[State],
    *,
    orphans: bool = False,
    compacted: Callable[[State, int], None] | None = None,
) -> Iterator[Maintained | SlotbridgeError]:
    """Thin the record of epochs, then maintain tables; yield what was done, or how it failed.

    A table whose maintenance fails stays as it is, and the others are maintained. With `compacted`,
    which the tables' writer gives, raise Retryable (LOCKED) where somebody has rolled a table back.
    """
    records = ledger.try_to_thin(spark)
    if isinstance(records, SlotbridgeError):
        yield records
        records = []
    for state in states:
        tick()
        try:
            if compacted is not None:
                _require_known(spark, state)
            recorded = recorded_of(records, state.source)
            yield maintain(
                spark, settings, state, orphans=orphans, recorded=recorded, compacted=compacted
            )
        except (*FOREIGN, SetupError) as error:
            yield _failed(error, state.source)
    quarantine = catalog.identifier(ledger.namespace, QUARANTINE)
    try:
        if spark.catalog.tableExists(quarantine):
            yield maintain_without_epochs(spark, settings, QUARANTINE, quarantine, orphans=orphans)
    except (*FOREIGN, SetupError) as error:
        yield _failed(error, QUARANTINE)


def _failed(error: Exception, name: str) -> SlotbridgeError:
    failure = translated(error, "maintain tables")
    failure.subject = failure.subject or name
    log.warning("maintenance of a table failed", table=name, error=str(failure))
    return failure


def _require_known(spark: SparkSession, state: State) -> None:
    """Raise Retryable (LOCKED) where a table is not as its writer has left it: a start judges it.

    What is parked, or is to be computed anew, is known to be so.
    """
    if state.note.parked is not None or state.rolled_back:
        return
    table = catalog.load(spark, state.identifier)
    found = catalog.require_known(table, state.identifier, state.sealed)
    if rollback.rolled_back(table, found):
        raise catalog.overtaken(state.identifier)
