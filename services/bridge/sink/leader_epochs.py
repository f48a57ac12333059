"""Whether the records before an offset are still those that were there, though others follow now.

A leader that lacks the last records of a partition (an unclean election, a disk that was lost, a
topic that was made again) writes on where its own end: the partition may by now end beyond what was
noted, and no offset tells. But each leader has an epoch of its own:

    noted     … 99 | end 100, epoch 4
    now       … 94 | 95 … 120 of epoch 6             epoch 4 ends at 95: 95 to 99 are lost

OffsetForLeaderEpoch (KIP-320) tells where an epoch has ended. librdkafka asks for it where a
consumer seeks to a position with an epoch, and reports an error that names _LOG_TRUNCATION.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemas.settings import KafkaSettings
from services.bridge.sink.offsets import End, Partition, in_parts
from services.kafka.client import client_options, kafka_error, make_client, passing
from services.kafka.records import REQUEST_TIMEOUT_S

_POLL_S: Final = 0.1
_TRUNCATED: Final = KafkaError(KafkaError._LOG_TRUNCATION).str()
_OPTIONS: Final = {
    "enable.auto.commit": False,
    "isolation.level": "read_uncommitted",
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 50,
    "queued.min.messages": 1,
}


def cut_off(
    settings: KafkaSettings,
    then: Mapping[Partition, End],
    while_waiting: Callable[[], None] = lambda: None,
) -> dict[Partition, bool]:
    """Tell of each partition whether it lacks records that it had before the end of `then`.

    Without those whose leader has not told. `then`: of brokers that tell epochs.
    """
    found: dict[Partition, bool] = {}
    for some in in_parts([*then.items()]):
        found |= _cut_off(settings, dict(some), while_waiting)
    return found


def _cut_off(
    settings: KafkaSettings, then: Mapping[Partition, End], while_waiting: Callable[[], None]
) -> dict[Partition, bool]:
    group = {"group.id": f"slotbridge-start-{uuid.uuid4()}"}
    consumer = make_client(Consumer, {**client_options(settings), **_OPTIONS, **group})
    sought = {
        (topic, partition): TopicPartition(topic, partition, end.offset, leader_epoch=end.epoch)
        for (topic, partition), end in then.items()
    }
    found: dict[Partition, bool] = {}
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    try:
        consumer.assign([*sought.values()])
        waiting = {*sought}
        while len(found) < len(sought) and time.monotonic() < deadline:
            waiting -= {place for place in waiting if _seek(consumer, sought[place])}
            message = consumer.poll(_POLL_S)
            while_waiting()
            if message is None:
                continue
            place = (message.topic() or "", message.partition() or 0)
            if place not in sought or place in waiting or place in found:
                continue  # what was fetched before the seek
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                found[place] = False
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                found[place] = _TRUNCATED in error.str() or _shorter(consumer, sought[place])
            elif not passing(error):
                del sought[place]
    finally:
        consumer.close()
    return found


def _seek(consumer: Consumer, where: TopicPartition) -> bool:
    """Seek, which alone asks for the leader's epoch; return False until fetching has begun."""
    with contextlib.suppress(KafkaException):
        consumer.seek(where)
        return True
    return False


def _shorter(consumer: Consumer, where: TopicPartition) -> bool:
    """Tell whether the partition ends before `where`; if not, retention deleted old records."""
    try:
        end: int = consumer.get_watermark_offsets(where, timeout=REQUEST_TIMEOUT_S)[1]
    except KafkaException as error:
        raise kafka_error(error, "compare the ends of partitions", where.topic) from error
    return end < where.offset
