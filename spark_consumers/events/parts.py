"""Where the events of a rebuild's part end: DataFrame -> DataFrame, as in `changes`. Pure."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.events.changes import IS_EVENT


def cut_at(events: DataFrame, upto_lsn: int) -> DataFrame:
    """Return `events` with another LSN after which they are `beyond`."""
    return events.withColumn("beyond", F.expr(f"coalesce(commit_lsn > {upto_lsn}, false)"))


def own_ends(events: DataFrame) -> DataFrame:
    """Return where the next events of each topic and partition are that has events of the part.

    That is the offset after the last of these, or the first offset `beyond` if it is before: in a
    topic that is not in order, events of the part are read again then.
    """
    own, beyond = f"{IS_EVENT} AND NOT beyond", "min(CASE WHEN beyond THEN offset END)"
    last = f"max(CASE WHEN {own} THEN offset END)"
    ends = events.groupBy("topic", "partition").agg(
        F.expr(f"CASE WHEN {last} IS NOT NULL THEN least({last} + 1, {beyond}) END AS end")
    )
    return ends.where("end IS NOT NULL")


def last_lsns(events: DataFrame) -> DataFrame:
    """Return the last commit LSN of each topic and partition: `commit_lsn`, NULL without events."""
    return events.groupBy("topic", "partition").agg(F.max("commit_lsn").alias("commit_lsn"))
