"""Whether an epoch has the events that its transactions count: too many, or counted by nobody.

Reading begins at the first transaction that Kafka has, where no record of epochs tells which one is
next. Kafka may have deleted others that came before, or have another topic of that name: what the
rest counts is not the whole then. Nor is it for a table that the settings left out for some epochs:
the transactions of these were read without it.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import OperatorNeeded
from spark_consumers.epochs.ledger import EpochRecord
from spark_consumers.epochs.parking import Parking
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events import changes
from spark_consumers.iceberg.tables import NEVER, OpenTable
from spark_consumers.kafka.transaction_topic import TransactionTopic
from spark_consumers.kafka.transactions import EndEvent

log = structlog.get_logger()
_PLACES_MAX: Final = 20
"""Events of a transaction that an error names."""


def uncounted(
    spark: SparkSession,
    topic: TransactionTopic,
    record: EpochRecord,
    opened: Mapping[str, OpenTable],
    parking: Parking,
) -> set[str]:
    """Return the tables that an epoch after `record` brings events, but may lack some of them.

    These are parked ones that return without a count, tables that the settings left out, and tables
    at a commit LSN whose next transactions Kafka does not have. Tables that are made from Kafka's
    first event on are only named in the log, where Kafka has deleted transactions: what their
    topics have is there.
    """
    found = parking.uncounted() | _left_out(record, opened, parking)
    if record.transaction_offset is not None:
        return found
    whole = topic.first() == 0
    read = {name: table for name, table in opened.items() if table.commit_lsn != NEVER}
    if whole and not read:
        return found
    oldest_lsn = topic.oldest_lsn(spark)
    judged = read if whole else opened
    lacking = {name for name, table in judged.items() if table.commit_lsn < oldest_lsn}
    if lacking:
        log.warning(
            "not judged: whether Kafka has all events that the tables lack, as it does not have "
            "the transactions that count them",
            topic=topic.name,
            tables=", ".join(sorted(lacking)),
        )
    return found | {name for name in lacking if opened[name].commit_lsn != NEVER}


class Counts:
    """Refuses events of a table that no END counts: somebody else has written them."""

    def __init__(
        self,
        topic: TransactionTopic,
        record: EpochRecord,
        ends: Sequence[EndEvent],
        events: DataFrame,
    ) -> None:
        """Compare `events` after the epoch of `record` with the counts of `ends`."""
        self._judged = record.transaction_offset is not None or topic.first() == 0
        self._after_lsn = record.commit_lsn
        self._ends = ends
        self._events = events

    def require(self, name: str, summary: TopicSummary, counted: int) -> None:
        """Raise OperatorNeeded where a table has more events than are counted.

        Nothing is judged where Kafka has deleted transactions that may count them.
        """
        surplus = summary.counted(self._after_lsn) - counted
        if not self._judged or surplus <= 0:
            return
        own = changes.own_events(self._events, summary.topic).where("NOT earlier")
        place = "concat(partition, '@', offset)"
        found = own.groupBy("commit_lsn").agg(
            F.expr("count(DISTINCT seq) AS events"),
            F.expr(f"slice(array_sort(collect_set({place})), 1, {_PLACES_MAX}) AS places"),
        )
        known = {end.commit_lsn: end.counts[name] for end in self._ends}
        for row in found.orderBy("commit_lsn").toLocalIterator():
            if row.events > known.get(row.commit_lsn, 0):
                break
        raise OperatorNeeded(
            f"Kafka has {surplus} events of {name} more than its transaction topic counts",
            operation="read events",
            subject=f"{summary.topic}, partition@offset among {', '.join(row.places)}",
            lsn=row.commit_lsn,
            hint="only the bridge may write to its topics: deny all others to do so (ACLs). Make "
            "the topic equal to its source by `slotbridge recover`; then `slottables rebuild`",
        )


def _left_out(record: EpochRecord, opened: Mapping[str, OpenTable], parking: Parking) -> set[str]:
    """Return the tables that lack epochs which the record does not say that they have."""
    # An earlier version has recorded tables without their uuid: their epochs were counted.
    counted = {name for name, place in record.tables.items() if not place.uuid}
    counted |= parking.tables.keys()
    found = {
        name
        for name, table in opened.items()
        if NEVER < table.commit_lsn < record.commit_lsn and not table.rebuilt
    } - counted
    if found:
        log.warning(
            "not judged: whether Kafka has all events of tables that the settings left out, as the "
            "epochs since did not count them",
            tables=", ".join(sorted(found)),
        )
    return found
