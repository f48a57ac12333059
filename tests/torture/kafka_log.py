"""Which Kafka transaction a record belongs to, read from the broker's own log files.

A consumer is not told. A gap between two offsets is not evidence of a border: with two producers
in turns, the other producer's marker may lie between two records of one Kafka transaction. The
header of each record batch says whose the batch is (Kafka's documentation, "Record Batch"):

    baseOffset int64 | batchLength int32 | partitionLeaderEpoch int32 | magic int8 | crc uint32 |
    attributes int16 | lastOffsetDelta int32 | baseTimestamp int64 | maxTimestamp int64 |
    producerId int64 | producerEpoch int16 | baseSequence int32 | recordCount int32

Bit 4 of the attributes marks a transactional batch, bit 5 a control batch (a marker), which ends
what its producer id has open in the partition.
"""

import bisect
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH_AT: Final = 12
"""`batchLength` counts what comes after itself: baseOffset and batchLength are 12 bytes."""
_CONTROL: Final = 0x20


class Batch(NamedTuple):
    """The header of one record batch."""

    first_offset: int
    last_offset: int
    producer_id: int
    control: bool


class KafkaTransaction(NamedTuple):
    """One Kafka transaction in one partition: the producer's id, and its number there."""

    producer_id: int
    number: int


class PartitionLog:
    """The Kafka transactions of one partition, found by offset."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        """`batches` are in the order of their offsets."""
        self._first_offsets: list[int] = []
        self._transactions: list[KafkaTransaction] = []
        ended: Counter[int] = Counter()
        for batch in batches:
            self._first_offsets.append(batch.first_offset)
            number = ended[batch.producer_id]
            self._transactions.append(KafkaTransaction(batch.producer_id, number))
            ended[batch.producer_id] += batch.control

    def transaction_at(self, offset: int) -> KafkaTransaction:
        """Return the transaction of the record at `offset`. Raises LookupError before the log."""
        index = bisect.bisect_right(self._first_offsets, offset) - 1
        if index < 0:
            raise LookupError(f"the log begins after offset {offset}")
        return self._transactions[index]


def read_partitions(data_folder: Path, topics: set[str]) -> Mapping[tuple[str, int], PartitionLog]:
    """Return the logs of all partitions of `topics` below a broker's `log.dirs` folder."""
    logs = {}
    for folder in data_folder.iterdir():
        topic, _, partition = folder.name.rpartition("-")
        if topic in topics and partition.isdecimal():
            segments = sorted(folder.glob("*.log"))
            batches = (batch for segment in segments for batch in batches_of(segment.read_bytes()))
            logs[topic, int(partition)] = PartitionLog(batches)
    return logs


def batches_of(content: bytes) -> Iterator[Batch]:
    """Yield the headers of a log segment; zeros at its end are space that was reserved."""
    at = 0
    while at + _HEADER.size <= len(content):
        base, length, _, magic, _, attributes, delta, _, _, producer_id, *_ = _HEADER.unpack_from(
            content, at
        )
        if not length:
            return
        if magic != 2:
            raise ValueError(f"a record batch of format {magic} at byte {at}, expected 2")
        yield Batch(base, base + delta, producer_id, bool(attributes & _CONTROL))
        at += _LENGTH_AT + length
