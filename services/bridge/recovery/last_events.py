"""The positions of the last events of each partition that readers of committed records have."""

import time
from collections.abc import Container, Iterable
from typing import Final

from confluent_kafka import Message

from services.bridge.recovery.event_positions import EventPosition, position_of_record, record_of
from services.bridge.sink.offsets import Partition
from services.bridge.sink.topics import Topics
from services.kafka.records import READ_DEADLINE_S

TAIL_RECORDS: Final = 20
OTHERS_RECORDS: Final = 1000
"""A look for a position ends after this number of records that have none, such as those of other
producers."""


def last_positions(topics: Topics, without: Container[Partition] = ()) -> Iterable[EventPosition]:
    """Yield the positions of the last visible events of each partition but those of `without`."""
    for topic, partition in topics.event_partitions():
        if (topic, partition) not in without:
            yield from _last_of(topics, topic, partition)


def position_in(topics: Topics, message: Message) -> EventPosition | None:
    """Return the position of the event that a record of these topics is, None if it is none."""
    record = record_of(message)
    outbox, schema_text = topics.is_outbox(record.topic), topics.schema_text
    return position_of_record(record, topics.prefix, outbox=outbox, schema_text=schema_text)


def _last_of(topics: Topics, topic: str, partition: int) -> list[EventPosition]:
    """Read backwards, more at each step, until visible events have positions.

    A transaction that was aborted since may have left any number of records behind them.
    """
    with topics.reader(topic, partition) as reader:
        deadline = time.monotonic() + READ_DEADLINE_S
        low, stop = reader.bounds()
        step, silent = TAIL_RECORDS, 0
        while stop > low and silent < OTHERS_RECORDS:
            start = max(low, stop - step)
            tail = [position_in(topics, one) for one in reader.messages(start, stop, deadline)]
            if positions := [position for position in tail if position is not None]:
                return positions
            silent += len(tail)  # of other producers
            stop, step = start, 2 * step
    return []
