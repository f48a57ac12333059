"""Reads the bridge's last progress record: up to where Kafka has events, and of which server."""

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.events import SETTLING_KEY_PREFIX, progress_topic
from schemas.progress import ProgressRecord
from schemas.settings import KafkaSettings
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.small_topic_tail import SmallTopicTail

_OFFSETS_MAX = 4_000
"""A record and the end of its Kafka transaction take two."""


class ProgressTail:
    """The records of one slot in `<prefix>.progress`; of any slot where it is None."""

    def __init__(self, kafka: KafkaSettings, topics: TopicOffsets, slot: str | None) -> None:
        self._kafka = kafka
        self._topics = topics
        self._slot = slot
        self._tail = self._make(_OFFSETS_MAX)
        self._last: ProgressRecord | None = None

    def close(self) -> None:
        """Close the connections to the broker."""
        self._tail.close()

    def last(self) -> ProgressRecord:
        """Return the slot's last record. Raise Retryable (NOT_JUDGED) where Kafka has none.

        A failed read forgets the record that was known: the topic may be gone, or another one.
        """
        try:
            self._take()
            if self._last is None:  # other slots have written since
                self._begin(None)
                self._take()
        except SlotbridgeError:
            self._last = None
            self._begin(_OFFSETS_MAX)
            raise
        if self._last is None:
            raise Retryable(
                "Kafka has not a progress record of the slot",
                operation="read Kafka",
                subject=f"slot {self._slot or 'of the bridge'}, topic {self._tail.topic}",
                hint="source.slot and kafka.topic_prefix must be the bridge's",
                exit_code=ExitCode.NOT_JUDGED,
            )
        return self._last

    def _begin(self, offsets_max: int | None) -> None:
        self._tail.close()
        self._tail = self._make(offsets_max)

    def _make(self, offsets_max: int | None) -> SmallTopicTail:
        topic = progress_topic(self._kafka.topic_prefix)
        return SmallTopicTail(self._kafka, self._topics, topic, offsets_max)

    def _take(self) -> None:
        for record in self._tail.new():
            key = record.key or b""
            others = key.startswith(SETTLING_KEY_PREFIX)
            if key == self._slot.encode() if self._slot is not None else not others:
                self._last = self._tail.parsed(record, ProgressRecord)
