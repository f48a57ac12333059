"""Refuses events of a table that the transaction topic does not count."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

from pyspark.sql import functions as F

from schemas.errors import OperatorNeeded
from spark_consumers.epochs.epoch_events import EpochEvents
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
        events: EpochEvents,
        counted: Mapping[str, int],
    ) -> None:
        """Compare `events` after the epoch of `record` with `counted`, the sums of `ends`."""
        self._topic = topic
        self._recorded = record.transaction_offset is not None
        self.after_lsn = record.commit_lsn
        self._ends = ends
        self._events = events
        self.counted = counted
        """Source table -> how many events its topic is to bring."""

    @cached_property
    def oldest_lsn(self) -> int:
        """The commit LSN of Kafka's first transaction; NEVER where a record says what is next."""
        return NEVER if self._recorded else self._topic.oldest_lsn(self._events.frame.sparkSession)

    def require(self, name: str, summary: TopicSummary) -> None:
        """Raise OperatorNeeded where a table has more events than are counted.

        Nothing is judged where Kafka has deleted transactions that may count them.
        """
        surplus = summary.counted(self.after_lsn) - self.counted[name]
        if surplus <= 0 or not self._count_all():
            return
        own = changes.own_events(self._events.frame, summary.topic).where("NOT earlier")
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

    def _count_all(self) -> bool:
        """Tell whether Kafka has all transactions after those that the tables have.

        A topic that was made again begins at offset 0, too, and lacks what came before.
        """
        if self.after_lsn == NEVER and not self._recorded:
            return self._topic.first() == 0
        return self.oldest_lsn <= self.after_lsn
