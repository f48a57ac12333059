"""Detects partitions whose last records were lost and replaced by others of a later leader.

A leader that lacks the last records of a partition (an unclean election, a disk that was lost, a
topic that was made again) writes on where its own end: the partition may by now end beyond what was
noted, and no offset tells. But each leader has an epoch of its own:

    noted     … 99 | end 100, epoch 4
    now       … 94 | 95 … 120 of epoch 6             epoch 4 ends at 95: 95 to 99 are lost

OffsetForLeaderEpoch (KIP-320) tells where an epoch has ended. librdkafka asks for it where a
consumer seeks to a position with an epoch, but tells the answer only where the position is beyond
it: in the text of an error. So the position that is sought is beyond any end, and only that answer
counts: fetching that goes on is none, as librdkafka also goes on where it has not asked.
"""

import contextlib
import re
import time
import uuid
from collections.abc import Mapping
from typing import Final

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from schemas.settings import KafkaSettings
from services.bridge.sink.offsets import Partition, PartitionEnd, in_parts
from services.kafka.client import client_options, make_client, passing
from services.kafka.records import REQUEST_TIMEOUT_S

_POLL_S: Final = 0.1
_BEYOND: Final = 2**62
_TRUNCATED: Final = KafkaError(KafkaError._LOG_TRUNCATION).str()
_ENDED: Final = re.compile(r"broker end offset is (\d+) \(offset leader epoch \d+\)")
_OPTIONS: Final = {
    "enable.auto.commit": False,
    "isolation.level": "read_uncommitted",
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 50,
    "queued.min.messages": 1,
}


def cut_off(
    settings: KafkaSettings,
    then: Mapping[Partition, PartitionEnd],
) -> dict[Partition, bool]:
    """Tell of each partition whether it lacks records that it had before the end of `then`.

    Without those whose leader has not told. `then`: of brokers that tell epochs.
    """
    found: dict[Partition, bool] = {}
    for some in in_parts([*then.items()]):
        found |= _cut_off(settings, dict(some))
    return found


def _cut_off(
    settings: KafkaSettings,
    then: Mapping[Partition, PartitionEnd],
) -> dict[Partition, bool]:
    """Return what `cut_off` does, of as many partitions as one request has."""
    group = {"group.id": f"slotbridge-start-{uuid.uuid4()}"}
    consumer = make_client(Consumer, {**client_options(settings), **_OPTIONS, **group})
    waiting = {**then}
    sought: set[Partition] = set()
    found: dict[Partition, bool] = {}
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    try:
        consumer.assign([TopicPartition(*partition, OFFSET_END) for partition in then])
        while waiting and time.monotonic() < deadline:
            sought |= {at for at in waiting.keys() - sought if _seek(consumer, at, waiting[at])}
            message = consumer.poll(_POLL_S)
            error = message.error() if message is not None else None
            if message is None or error is None or passing(error):
                continue
            partition = (message.topic() or "", message.partition() or 0)
            if partition not in waiting or partition not in sought:
                continue  # what was fetched before the seek
            ended = end_of_epoch(error)
            end = waiting.pop(partition)
            if ended is not None:
                found[partition] = ended < end.offset
    finally:
        consumer.close()
    return found


def _seek(consumer: Consumer, partition: Partition, end: PartitionEnd) -> bool:
    """Seek, which alone asks for the leader's epoch; return False until fetching has begun."""
    with contextlib.suppress(KafkaException):
        consumer.seek(TopicPartition(*partition, _BEYOND, leader_epoch=end.epoch))
        return True
    return False


def end_of_epoch(error: KafkaError) -> int | None:
    """Return where the leader says that the sought epoch ended; None: the error does not tell.

    -1: the leader knows of no epoch that is not later. Pure.
    """
    if error.code() != KafkaError._AUTO_OFFSET_RESET or _TRUNCATED not in error.str():
        return None
    match = _ENDED.search(error.str())
    if match is not None:
        return int(match[1])
    return -1 if "No epoch found" in error.str() else None
