"""Writes records outside of Kafka transactions, and waits until Kafka has them."""

import time
from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.errors import ExitCode, Retryable
from schemas.settings import KafkaSettings
from services.kafka.client import client_options, kafka_error, make_client
from services.waiter import Waiter

ANY_PARTITION: Final = -1
_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.05
_QUEUED_MAX: Final = 50_000
"""Records that wait in the client, whatever room the settings give to the producer of events."""
_OPTIONS: Final = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 0,
    "queue.buffering.max.messages": 2 * _QUEUED_MAX,
    "queue.buffering.max.kbytes": 2**20,
    "compression.type": "lz4",
    "partitioner": "murmur2_random",
}


def deliver(
    kafka: KafkaSettings,
    topic: str,
    records: Mapping[bytes, bytes | None],
    *,
    operation: str,
    hint: str,
    partition: int = 0,
    waiter: Waiter | None = None,
) -> None:
    """Write `records`, in order; ANY_PARTITION: where Java's clients put a record of that key.

    Raise Retryable, with `hint`, where no broker acknowledges them within 30 s, and SlotbridgeError
    for what Kafka refuses.
    """
    refused: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            refused.append(error)

    producer = make_client(Producer, {**client_options(kafka), **_OPTIONS})
    deadline = time.monotonic() + _DEADLINE_S

    def down_to(left: int) -> bool:
        """Wait until at most so few records wait; tell whether that came in time."""
        while len(producer) > left and not refused and time.monotonic() < deadline:
            producer.poll(_POLL_S)
            if waiter is not None:
                waiter.turn()
        return len(producer) <= left and not refused

    try:
        for key, value in records.items():
            if not down_to(_QUEUED_MAX):
                break
            producer.produce(topic, value, key, partition, on_delivery=delivered)
        down_to(0)
    except KafkaException as error:
        raise kafka_error(error, operation, topic) from error
    if refused:
        raise kafka_error(KafkaException(refused[0]), operation, topic)
    if len(producer):
        producer.purge()
        raise Retryable(
            "no broker acknowledges the record",
            operation=operation,
            subject=topic,
            hint=hint,
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )
