"""Refuses topics in which some transactions never happened (docs/why/delivery.md)."""

from schemas.errors import OperatorNeeded
from schemas.events import DivergenceRecord, divergence_topic
from schemas.settings import KafkaSettings
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.small_topic_tail import SmallTopicTail


class Divergences:
    """Accepted divergences: the new timeline uses LSNs of the lost transactions again."""

    def __init__(self, kafka: KafkaSettings, topics: TopicOffsets) -> None:
        self.tail = SmallTopicTail(kafka, topics, divergence_topic(kafka.topic_prefix))

    def close(self) -> None:
        """Close the connections to the broker."""
        self.tail.close()

    def require_none(self) -> None:
        """Raise OperatorNeeded if a divergence was accepted."""
        for record in self.tail.new():
            found = self.tail.parsed(record, DivergenceRecord)
            raise OperatorNeeded(
                f"Kafka has {found.count} transactions of timeline {found.lost_timeline} that the "
                "database lost at a failover: tables made of these topics would contain them",
                operation="read transactions",
                subject=self.tail.topic,
                lsn=found.switch_lsn,
                hint="start over: a new slot, a new kafka.topic_prefix, with it a new namespace",
            )
