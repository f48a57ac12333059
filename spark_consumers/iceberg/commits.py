"""Commits to one Iceberg table beside other programs that commit to it.

    replace                  only on the table that the change was prepared for, else not at all
    change_refs, commit_anew on the table as it is then, again until it succeeds

Sources: `BaseTransaction`, `UpdateSnapshotReferencesOperation` (Iceberg core).
"""

import time
from collections.abc import Callable, Collection
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

from spark_consumers.iceberg import catalog

_ATTEMPTS: Final = 10
"""Commits to a table's references that another writer may be ahead of."""


def replace(transaction: Any) -> bool:
    """Commit a transaction if its table is as it was when the transaction began; tell whether.

    Its own commit would put the changes on top of whatever is there by then:
    BaseTransaction.commitSimpleTransaction begins with a refresh, and makes all of them again.
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


def change_refs(table: Any, change: Callable[[Any], None]) -> None:
    """Change a table's tags and branches in one commit, whoever commits to it meanwhile.

    `change` takes a ManageSnapshots of the table as it is now, and may be called again.
    """

    def commit() -> None:
        manage = table.manageSnapshots()
        change(manage)
        manage.commit()

    commit_anew(table, commit)


def commit_anew(table: Any, commit: Callable[[], None]) -> None:
    """Call `commit` again, on the table as it is then, while somebody else commits before it.

    Iceberg repeats a commit of tags and branches in vain: UpdateSnapshotReferencesOperation keeps
    the metadata that it began with.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            commit()
        except Py4JError as error:
            if attempt == _ATTEMPTS or "CommitFailedException" not in str(error):
                raise
            time.sleep(attempt * 0.05)
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
