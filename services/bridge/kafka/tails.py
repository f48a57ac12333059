"""Whether Kafka still has the ends of the partitions that the slot has written, at a start.

An unclean election, a disk that is lost with the only replica, a volume that was set back: the last
records of a partition are gone, and nothing else tells of it. So progress records note where each
partition ended once what was written there was acknowledged, about once a second: at most the last
second before a crash is not judged.
"""

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

import structlog

from schemas.errors import OperatorNeeded
from schemas.events import ProgressRecord
from services.bridge.kafka.offsets import End, Partition, in_parts, name_of, some_answers
from services.bridge.kafka.topics import Topics

logger = structlog.get_logger(__name__)

NOTED_EVERY_S: Final = 1.0
PARTITIONS_MAX: Final = 2000
"""Of those that were written last: 40 kB a second."""
_NAMED_MAX: Final = 5
Noted = dict[str, list[tuple[int, int, int]]]


class Tails:
    """What is known of the ends, for the next progress record. One session's."""

    def __init__(self) -> None:
        self._ends: dict[Partition, End] = {}
        self._due = 0.0

    def learn(self, ends: Mapping[Partition, End]) -> None:
        """Each is where a partition ends now; the last learnt are kept."""
        for place, end in ends.items():
            self._ends.pop(place, None)
            self._ends[place] = end
        for place in list(self._ends)[: max(0, len(self._ends) - PARTITIONS_MAX)]:
            del self._ends[place]

    def note(self) -> Noted:
        """`ProgressRecord.ends` for a record that is written now: about once a second."""
        now = time.monotonic()
        if now < self._due or not self._ends:
            return {}
        self._due = now + NOTED_EVERY_S
        return noted(self._ends)


class Lost(NamedTuple):
    """A partition that ends before the noted offset."""

    place: Partition
    noted: int
    offset: int


def noted(ends: Mapping[Partition, End]) -> Noted:
    """As ProgressRecord has it. Pure."""
    found: Noted = {}
    for (topic, partition), end in ends.items():
        found.setdefault(topic, []).append((partition, end.offset, end.epoch))
    return found


def read_noted(record: ProgressRecord) -> dict[Partition, End]:
    """What a record has noted. Pure."""
    return {
        (topic, partition): End(offset, epoch)
        for topic, ends in record.ends.items()
        for partition, offset, epoch in ends
    }


def lost_tails(then: Mapping[Partition, End], now: Mapping[Partition, End]) -> list[Lost]:
    """The partitions of `then` that end earlier `now`. Pure."""
    return [
        Lost(place, end.offset, now[place].offset)
        for place, end in then.items()
        if place in now and now[place].offset < end.offset
    ]


def check_tails(topics: Topics, record: ProgressRecord, *, go_on: bool) -> dict[Partition, End]:
    """Where the noted partitions end now. Raises OperatorNeeded where one ends earlier.

    `go_on`: an operator accepts that for this start. What can't be judged is told.
    """
    noting = record if record.ends else topics.last_noting_ends(record.slot)
    if noting is None:
        logger.info("not judged: no progress record tells where partitions ended")
        return {}
    then = read_noted(noting)
    gone = sorted({topic for topic, _ in then if not topics.has(topic)})
    if gone:
        logger.warning("not judged: topics that the slot has written are gone", topics=gone)
    there = [place for place in then if topics.has(place[0])]
    now: dict[Partition, End] = {}
    for some in in_parts(there):
        now |= some_answers(topics.ask_ends(some, committed=False))
    silent = [name_of(place) for place in there if place not in now]
    if silent:
        logger.warning("not judged: partitions whose leader does not answer", partitions=silent)
    lost = lost_tails(then, now)
    if lost and go_on:
        logger.warning("going on without records that Kafka has lost", lost=[*map(_told, lost)])
    else:
        refuse_lost(lost, record)
    return {place: now.get(place, then[place]) for place in there}


def _told(lost: Lost) -> str:
    return f"{name_of(lost.place)} ends at {lost.offset}, not {lost.noted}"


def refuse_lost(lost: list[Lost], record: ProgressRecord) -> None:
    """Raise OperatorNeeded that names what is lost, if anything is."""
    if not lost:
        return
    told = ", ".join(map(_told, lost[:_NAMED_MAX]))
    more = len(lost) - _NAMED_MAX
    raise OperatorNeeded(
        f"Kafka lost committed records: {told}" + (f", and {more} more" if more > 0 else ""),
        operation="compare the ends of partitions",
        subject=f"slot {record.slot}",
        lsn=record.end_lsn,
        hint="restore the topics, or start over with a new slot and topic prefix; to go on without "
        "the lost records: bridge.on_lost_records: continue, for one start",
    )
