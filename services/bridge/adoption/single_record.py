"""Writes one record outside of Kafka transactions, and waits until Kafka has it."""

from typing import Final

from confluent_kafka import KafkaException, Producer

from schemas.errors import ExitCode, Retryable
from schemas.settings import KafkaSettings
from services.kafka.client import client_options, kafka_error, make_client

_FLUSH_S: Final = 30.0
ANY_PARTITION: Final = -1


def write_record(
    kafka: KafkaSettings,
    topic: str,
    key: bytes,
    value: bytes | None,
    *,
    operation: str,
    partition: int = ANY_PARTITION,
) -> None:
    """Write the record; ANY_PARTITION: the one that Java's clients choose for its key.

    Raise Retryable where Kafka does not take it within 30 s.
    """
    failures: list[str] = []
    options = {**client_options(kafka), "acks": "all", "partitioner": "murmur2_random"}
    try:
        producer = make_client(Producer, options)
        producer.produce(
            topic,
            value,
            key,
            partition,
            on_delivery=lambda error, _: failures.append(error.str()) if error else None,
        )
        left = producer.flush(_FLUSH_S)
    except KafkaException as error:
        raise kafka_error(error, operation, f"topic {topic}") from error
    if left or failures:
        raise Retryable(
            f"Kafka did not take the record: {'; '.join(failures) or 'no answer'}",
            operation=operation,
            subject=f"topic {topic}",
            hint="run this again",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )
