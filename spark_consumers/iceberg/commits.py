"""Commits to one Iceberg table beside other programs that commit to it.

    compare_and_set          only on the table that a transaction began with, else not at all
    change, set_known        by a transaction that is begun again until it succeeds, while the table
    change_note              has the epoch that its writer knows
    change_refs, forget      tags and branches, on the table as it is then, again until it succeeds

Sources: `BaseTransaction`, `UpdateSnapshotReferencesOperation` (Iceberg core).
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.table_note import PROPERTY, TableNote, note_of

_ATTEMPTS: Final = 10
"""Commits that another program may be ahead of."""
_PAUSE_S: Final = 0.05


def compare_and_set(transaction: Any) -> bool:
    """Commit a transaction if its table is as it was when the transaction began; tell whether.

    Its own commit would put the changes on top of whatever is there by then:
    BaseTransaction.commitSimpleTransaction begins with a refresh, and makes all of them again.
    A REST catalog judges only the references that the changes move, and none for properties alone.
    What the catalog raises goes on; nobody knows then what it has committed.
    """
    before, now = transaction.startMetadata(), transaction.currentMetadata()
    try:
        transaction.underlyingOps().commit(before, now)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getSimpleName() != "CommitFailedException":
            raise
        return False
    return True


def change(
    spark: SparkSession,
    identifier: str,
    sealed: tuple[int, int] | None,
    make: Callable[[Any, Any], None],
) -> None:
    """Commit to a table what `make` adds to a transaction of it, given the table and that.

    `sealed`: the epoch and the commit LSN that the writer left the table with, None for a command,
    which changes the table whatever it has. Raise Retryable (LOCKED) where the table has others:
    its writer was overtaken, and changes nothing. `make` may be called again.
    """
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt * _PAUSE_S)
        table = catalog.load(spark, identifier)
        transaction = table.newTransaction()  # loads the table anew: what follows sees that one
        if sealed is not None:
            catalog.require_known(table, identifier, sealed)
        make(table, transaction)
        if compare_and_set(transaction):
            return
    raise catalog.overtaken(identifier)


def set_known(
    spark: SparkSession, identifier: str, sealed: tuple[int, int], values: Mapping[str, str]
) -> None:
    """Set properties of a table that its writer is to change before, or outside, an epoch's commit.

    Raise Retryable (LOCKED) where the table has another epoch than `sealed`, the writer's.
    """

    def make(_table: Any, transaction: Any) -> None:
        catalog.set_properties(transaction, values)

    change(spark, identifier, sealed, make)


def put_note(transaction: Any, note: TableNote) -> None:
    """Set, or remove, the property that has a table's note, in a transaction of the table."""
    update, text = transaction.updateProperties(), note.text()
    (update.set(PROPERTY, text) if text else update.remove(PROPERTY)).commit()


def change_note(
    spark: SparkSession,
    identifier: str,
    sealed: tuple[int, int] | None,
    change_of: Callable[[TableNote], TableNote],
) -> None:
    """Change a table's note, as it is then, by `change_of`; `sealed`: as for `change`."""

    def make(table: Any, transaction: Any) -> None:
        put_note(transaction, change_of(note_of(catalog.properties(table))))

    change(spark, identifier, sealed, make)


def change_refs(table: Any, change: Callable[[Any], None]) -> None:
    """Change a table's tags and branches in one commit, on the table as it is then.

    `change` takes a ManageSnapshots of the table as it is now, and may be called again. Iceberg
    repeats such a commit in vain: UpdateSnapshotReferencesOperation keeps the metadata that it
    began with.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        manage = table.manageSnapshots()
        change(manage)
        try:
            manage.commit()
        except Py4JError as error:
            if attempt == _ATTEMPTS or "CommitFailedException" not in str(error):
                raise
            time.sleep(attempt * _PAUSE_S)
            table.refresh()
        else:
            return


def forget(table: Any, tags: Collection[str]) -> None:
    """Remove tags, in one commit."""

    def remove(manage: Any) -> None:
        there = catalog.ref_names(table)
        for name in tags:
            if name in there:
                manage.removeTag(name)

    if tags:
        change_refs(table, remove)
