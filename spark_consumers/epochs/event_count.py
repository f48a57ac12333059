"""Refuses events of a table that the transaction topic does not count."""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from schemas.errors import OperatorNeeded
from spark_consumers.epochs.ledger import EpochRecord
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events import changes
from spark_consumers.iceberg.table_note import NEVER
from spark_consumers.kafka.transaction_topic import TransactionTopic
from spark_consumers.kafka.transactions import EndEvent

_PLACES_MAX: Final = 20
"""Events of a transaction that an error names."""


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
        self._judged = record.transaction_offset is not None or _counts_all(topic, record, events)
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


def _counts_all(topic: TransactionTopic, record: EpochRecord, events: DataFrame) -> bool:
    """Tell whether Kafka has all transactions after those that the tables had without a record.

    A topic that was made again begins at offset 0, too, and lacks what came before.
    """
    if topic.first() > 0:
        return False
    had = record.commit_lsn
    return had == NEVER or topic.oldest_lsn(events.sparkSession) <= had
