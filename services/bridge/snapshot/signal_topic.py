"""Records of the signal topic, in order, from where Kafka says that they are taken."""

import json
from collections.abc import Iterable
from typing import Final, NamedTuple

import structlog
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from schemas.errors import ExitCode, Retryable, SetupError
from schemas.settings import KafkaSettings
from schemas.snapshot import SignalPosition
from services.bridge.sink.topic_ids import compare_ids, read_ids
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.requests import Signal
from services.kafka.client import client_options, make_client
from services.kafka.delivery import deliver

logger = structlog.get_logger(__name__)

_OPERATION: Final = "read the signal topic"
_LOOK_S: Final = 0.1
_RECORDS_MAX: Final = 100
"""How many are taken at one place of the stream."""


class TopicSignal(NamedTuple):
    """A record as it is in the topic."""

    offset: int
    key: bytes | None
    value: bytes | None


class SignalTopic:
    """Reads for one session, without blocking. `pending`: what was read and is not taken yet."""

    def __init__(self, topics: Topics, topic: str, position: SignalPosition | None) -> None:
        """Make the topic where it is missing, and begin at `position`, or with the first record.

        Raise SetupError for a topic of several partitions: their records have no order.
        """
        self.name = topics.prepare_late(lambda _: topic)
        if topics.partitions(topic) != 1:
            raise SetupError(
                "a signal topic has one partition",
                operation=_OPERATION,
                subject=topic,
                hint="name another topic in snapshot.signal_topic",
            )
        self.id, self.next = _beginning(topics, topic, position)
        noted = position and (position.offset, position.topic_id)
        self.moved = noted is not None and noted != (self.next, self.id)
        """Whether Kafka is to be told another position or topic, though no record is taken."""
        self.pending: list[TopicSignal] = []
        self._due = 0.0
        self._consumer = make_client(
            Consumer,
            {
                **client_options(topics.settings),
                "group.id": f"slotbridge-signals-{topics.prefix}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
            },
        )
        self._consumer.assign([TopicPartition(topic, 0, self.next)])

    def close(self) -> None:
        """End the consumer of the topic."""
        self._consumer.close()

    def poll(self, now: float) -> None:
        """Look for new records now and then (`now`: time.monotonic).

        Raise Retryable where the topic no longer has the offset: the next start judges why.
        """
        if now < self._due or len(self.pending) >= _RECORDS_MAX:
            return
        self._due = now + _LOOK_S
        while len(self.pending) < _RECORDS_MAX:
            message = self._consumer.poll(0)
            if message is None:
                return
            error = message.error()
            if error is None:
                self.pending.append(_record(message))
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # others pass
                raise Retryable(
                    f"the signal topic has no offset {self.next} any more",
                    operation=_OPERATION,
                    subject=self.name,
                    exit_code=ExitCode.KAFKA_UNREACHABLE,
                )

    def take(self) -> list[TopicSignal]:
        """Return the pending signals, and move `next` behind them."""
        taken, self.pending, self.moved = self.pending, [], False
        if taken:
            self.next = taken[-1].offset + 1
        return taken


def _beginning(topics: Topics, topic: str, position: SignalPosition | None) -> tuple[str, int]:
    """Return the topic's id, "" where it is not known, and the offset of the first record to take.

    A record that may have been obeyed before is passed over, and the log says so.
    """
    with topics.reader(topic) as reader:
        low, end = reader.bounds()
    if position is None:
        return read_ids(topics.admin, [topic]).get(topic, ""), low
    noted = {topic: position.topic_id} if position.topic_id else {}
    ids, made_again = compare_ids(topics.admin, noted, [topic], brokers=topics.brokers)
    id_, first = ids.get(topic, position.topic_id), position.offset
    if made_again or first > end:
        logger.warning(
            "not judged: whether the records of the signal topic were obeyed before; they are "
            "passed over",
            topic=topic,
            reason="the topic was made again" if made_again else "the topic has lost its end",
            offset=first,
            records=end - low,
            hint="send again the signals that are still wanted",
        )
        first = end
    elif first < low:
        logger.warning(
            "Kafka has removed records of the signal topic that nobody has obeyed",
            topic=topic,
            records=low - first,
            hint="send again the signals that are still wanted",
        )
        first = low
    return id_, first


def _record(message: Message) -> TopicSignal:
    key, value = message.key(), message.value()
    return TopicSignal(
        message.offset() or 0,
        key.encode() if isinstance(key, str) else key,
        value.encode() if isinstance(value, str) else value,
    )


def signal_position(
    topic: str, slot: str, known: Iterable[SignalPosition]
) -> SignalPosition | None:
    """Return how far the slot's bridge has taken the topic."""
    own = [one for one in known if (one.slot, one.topic) == (slot, topic)]
    return own[-1] if own else None


def send_to_topic(kafka: KafkaSettings, topic: str, signal: Signal) -> None:
    """Write the signal into the topic. Raise SlotbridgeError where Kafka does not take it."""
    document = {"id": signal.id, "type": signal.type, "data": json.loads(signal.data)}
    deliver(
        kafka,
        topic,
        {kafka.topic_prefix.encode(): json.dumps(document).encode()},
        operation="send a signal",
        hint="correct snapshot.signal_topic, or start the bridge once, which makes the topic",
    )
