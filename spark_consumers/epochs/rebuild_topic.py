"""Asks Kafka for the topic of a table that is made anew, and judges whether it can fill the table.

A broker may answer before it knows of a topic, or of a partition, that was just made: it is asked
again, as for an epoch's events (epochs/event_reader), before anything is judged.
"""

from collections.abc import Mapping
from typing import NamedTuple

from spark_consumers.epochs import event_reader
from spark_consumers.iceberg.table_note import RebuildNote
from spark_consumers.kafka.reader import TopicOffsets


class RebuildTopic(NamedTuple):
    """The topic `name` of the source table `table`.

    `read`: partition -> where the next event is for the epochs; None where the epochs do not tell.
    """

    offsets: TopicOffsets
    table: str
    name: str
    read: Mapping[int, int] | None

    @property
    def id(self) -> str:
        """Kafka's id of the topic, as of the last `require_shown`; "" without one."""
        return self.offsets.id(self.name)

    def require_shown(self, note: RebuildNote | None) -> str:
        """Ask anew until a broker shows all of the topic that was read; return the topic's id.

        `note`: how far the rebuild is, None before its beginning. Raise OperatorNeeded where
        partitions that had events are missing for ARRIVAL_DEADLINE_S.
        """
        missing: dict[int, int] = {}

        def shown() -> bool:
            nonlocal missing
            self.offsets.refresh(self.name)
            there = self.offsets.partitions(self.name)
            missing = missing_partitions(there, self.id, self.read, note)
            nameless = note is not None and note.topic_id and not self.id
            return not (missing or nameless)

        event_reader.await_shown(shown)
        event_reader.require_first(self.table, max(missing.values(), default=0))
        return self.id

    def first(self) -> dict[int, int]:
        """Return partition -> its first offset, of those that `require_shown` has found."""
        numbers = {self.name: self.offsets.partitions(self.name)}
        return dict(self.offsets.first(numbers)[self.name])

    def ends(self, note: RebuildNote) -> dict[int, int]:
        """Return partition -> where it ends, of the partitions that `require_shown` has found.

        Raise OperatorNeeded where Kafka has not all events from the rebuild's place on, nor the
        offsets that the epochs have read: the topic was made anew then.
        """
        numbers = {self.name: self.offsets.partitions(self.name)}
        first = self.first()
        last = self.offsets.stable(numbers)[self.name]
        gone = (
            0
            if note.lost_beginning
            else max((at - note.start(n) for n, at in first.items()), default=0)
        )
        short = max((at - last.get(n, 0) for n, at in (self.read or {}).items()), default=0)
        event_reader.require_first(self.table, max(gone, short))
        return last


def missing_partitions(
    shown: tuple[int, ...],
    topic_id: str,
    read: Mapping[int, int] | None,
    note: RebuildNote | None,
) -> dict[int, int]:
    """Return the partitions that must be there and are not `shown`, each with how far it was read.

    Those of a note count for the note's own topic alone. If the epochs do not tell what they have
    read (`read`: None), there must be one partition at least. Pure.
    """
    if read is None and not shown:
        return {0: 1}
    of_note = note.offsets or {} if note and topic_id in ("", note.topic_id) else {}
    return {n: at for n, at in {**of_note, **(read or {})}.items() if n not in shown}
