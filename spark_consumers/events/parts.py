"""Where the events of a rebuild's part end: pure DataFrame -> DataFrame, as in `changes`."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.events.changes import IS_EVENT


def cut_at(events: DataFrame, upto_lsn: int) -> DataFrame:
    """Return `events` with another LSN after which they are `beyond`."""
    return events.withColumn("beyond", F.expr(f"coalesce(commit_lsn > {upto_lsn}, false)"))


def own_ends(events: DataFrame) -> DataFrame:
    """Return the offset after the last event of each topic and partition that is not `beyond`."""
    own = events.where(f"{IS_EVENT} AND NOT beyond")
    return own.groupBy("topic", "partition").agg(F.expr("max(offset) + 1 AS end"))


def last_lsns(events: DataFrame) -> DataFrame:
    """Return the last commit LSN of each topic and partition: `commit_lsn`, NULL without events."""
    return events.groupBy("topic", "partition").agg(F.max("commit_lsn").alias("commit_lsn"))
