"""Changes rows of a large table: those that changed are deleted by position, and added anew.

MERGE joins the whole table with the changes by shuffling and sorting both. Here the rows are found
by the index of the table's keys (indexed_delete.py), or only the keys are read, and the changes are
sent to wherever they are (a broadcast). The two commits go to the epoch's branch (staging.py), so
that readers see both or none.
"""

from collections.abc import Callable
from typing import Literal

from pyspark.sql import DataFrame

from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.current import insert
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import quoted

SENT_EVENTS_MAX = 200_000
"""With more events Spark decides whether the changes are sent, or both sides are shuffled."""


Found = Literal["index", "scan"]
"""How the rows that changed were found."""
Deletes = Callable[[DataFrame], bool]
"""Deletes the rows that changes are of, by an index; False: it does not cover them."""


def delete_and_insert(
    identifier: str,
    layout: Layout,
    changes: DataFrame,
    *,
    events: int,
    by_index: Deletes | None = None,
) -> Found:
    """Bring changes into a large table: delete the changed rows by position, then insert them.

    `changes` has at most one change for each key, all after the table's last epoch, so that none
    gives way to a row of the table. `events`: how many events the changes were made of, at least as
    many as there are changes.
    """
    changes = changes.persist()
    try:
        found: Found = "index" if by_index is not None and by_index(changes) else "scan"
        if found == "scan":
            with catalog.viewed(changes, identifier) as view:
                sql = _delete_sql(identifier, layout, view, send=events <= SENT_EVENTS_MAX)
                changes.sparkSession.sql(sql)
        insert(identifier, layout, changes.where("op <> 'd'"))
    finally:
        changes.unpersist()
    return found


def _delete_sql(identifier: str, layout: Layout, view: str, *, send: bool) -> str:
    """Return the DELETE of the changed keys; `send`: broadcast the keys instead of a shuffle."""
    keys = ", ".join(f"t.{quoted(field.name)}" for field in layout.key)
    changed = ", ".join(f"s.c{field.source_index}" for field in layout.key)
    hint = "/*+ BROADCAST(s) */ " if send else ""
    return (
        f"DELETE FROM {identifier} t"  # noqa: S608 - names are quoted
        f" WHERE ({keys}) IN (SELECT {hint}{changed} FROM {view} s)"
    )
