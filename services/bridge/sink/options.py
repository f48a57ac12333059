"""The options of the bridge's producer, in librdkafka's names."""

from collections.abc import Iterable
from typing import Any, Final

from schemas.settings import BridgeSettings, KafkaSettings
from services.kafka.client import client_options

BATCH_BYTES_MAX: Final = 900_000
BATCH_OVERHEAD_BYTES: Final = 256
LINGER_MS: Final = 20
"""While a batch is on its way, librdkafka does not sleep once another is full or this old. A commit
does not wait for it.
"""
IN_FLIGHT: Final = 1
"""Nothing is under way behind a request that may be refused. A broker that knows of no sequence in
a partition (a new topic, or a producer silent for producer.id.expiration.ms) takes any: where it
refuses one request, as it does not lead the partition yet, and takes the next, librdkafka has the
first one for written (rd_kafka_dr_implicit_ack), and commits without it.
"""
MESSAGE_BYTES_MAX: Final = 1_000_000
"""librdkafka's message.max.bytes where kafka.options has none."""
QUEUE_KIB: Final = 10 * 1024
"""What librdkafka holds: some batches, so that few are left for a commit to wait for, and what it
compresses is still in the processor's cache.
"""


def producer_options(
    kafka: KafkaSettings, bridge: BridgeSettings, slot: str, limits: Iterable[int], careful: bool
) -> dict[str, Any]:
    """Return the options of the producer of `slot`.

    `limits`: the max.message.bytes of topics that are known to matter. Kafka would refuse a batch
    that is larger than a topic's limit, even if each record in it is not. `careful`: each record is
    sent alone, with a report of its own.
    """
    smallest = min(limits, default=BATCH_BYTES_MAX) - BATCH_OVERHEAD_BYTES
    largest = int(kafka.options.get("message.max.bytes", MESSAGE_BYTES_MAX))
    return {
        "compression.type": "lz4",
        "linger.ms": LINGER_MS,
        "queue.buffering.max.messages": 200_000,
        "queue.buffering.max.kbytes": max(QUEUE_KIB, 2 * largest // 1024),
        "batch.size": max(1, min(BATCH_BYTES_MAX, smallest)),
        "topic.metadata.propagation.max.ms": 10_000,
        **client_options(kafka),
        **({"batch.size": 1} if careful else {}),
        "delivery.report.only.error": True,
        "partitioner": "murmur2_random",
        "transactional.id": f"slotbridge.{kafka.topic_prefix}.{slot}",
        "transaction.timeout.ms": bridge.transaction_timeout_ms,
        "enable.idempotence": True,
        **dict.fromkeys(("max.in.flight.requests.per.connection", "max.in.flight"), IN_FLIGHT),
    }
