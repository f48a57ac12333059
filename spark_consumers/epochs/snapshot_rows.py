"""The LSN up to which inserts may concern rows that a snapshot has brought already.

A chunk of rows (op r) is read a moment after its place among the transactions, and may show what
commits after that place: an insert of such a row comes once more, as a change, maybe in a later
epoch. Up to the LSN that the rows tell, inserts are therefore merged by key instead of appended. A
property says so, written down before anything of the epoch is.
"""

from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from spark_consumers.iceberg import catalog, commits
from spark_consumers.iceberg.tables import OpenTable, State, sealed_of
from spark_consumers.liveness import tick


def note_bound(
    spark: SparkSession,
    seen: Mapping[str, int],
    opened: dict[str, OpenTable],
    states: dict[str, State],
) -> None:
    """Note the bound of tables that an epoch brings rows of a snapshot: in Iceberg and here.

    Raise Retryable (LOCKED) where another writer has brought one of them an epoch.
    """
    for name, lsn in seen.items():
        table, state = opened[name], states.get(name)
        if lsn <= table.seen_lsn:
            continue
        opened[name] = replace(table, seen_lsn=lsn)
        if state is not None:
            states[name] = replace(state, seen_lsn=lsn)
        values = {catalog.SEEN_LSN: str(lsn)}
        commits.set_known(spark, table.identifier, sealed_of(state), values)
        tick()
