"""Changes rows of a large table: those that changed are deleted by position, and added anew.

MERGE joins the whole table with the changes by shuffling and sorting both. Here only the table's
keys are read, and the changes are sent to wherever they are (a broadcast). The two commits go to
the epoch's branch (staging.py), so that readers see both or none.
"""

from pyspark.sql import DataFrame

from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.current import insert
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import quoted

SENT_EVENTS_MAX = 200_000
"""With more events Spark decides whether the changes are sent, or both sides are shuffled."""


def delete_and_insert(identifier: str, layout: Layout, changes: DataFrame, *, events: int) -> None:
    """Bring changes into a large table: delete the changed rows by position, then insert them.

    `changes` has at most one change for each key, all after the table's last epoch, so that none
    gives way to a row of the table. `events`: how many events the changes were made of, at least as
    many as there are changes.
    """
    changes = changes.persist()
    try:
        with catalog.viewed(changes, identifier) as view:
            sql = _delete_sql(identifier, layout, view, send=events <= SENT_EVENTS_MAX)
            changes.sparkSession.sql(sql)
        insert(identifier, layout, changes.where("op <> 'd'"))
    finally:
        changes.unpersist()


def _delete_sql(identifier: str, layout: Layout, view: str, *, send: bool) -> str:
    keys = ", ".join(f"t.{quoted(field.name)}" for field in layout.key)
    changed = ", ".join(f"s.c{field.source_index}" for field in layout.key)
    hint = "/*+ BROADCAST(s) */ " if send else ""
    return (
        f"DELETE FROM {identifier} t"  # noqa: S608 - names are quoted
        f" WHERE ({keys}) IN (SELECT {hint}{changed} FROM {view} s)"
    )
