"""Publishes records again that were lost as a bridge died while it ended their transaction.

    judge       each note that is left over, by what its partitions show (republish_plan)
    publish     in one Kafka transaction: the lost records, as they were and where they were; the
                progress record that covers them; tombstones of the notes

A kill before that transaction is committed leaves all as it was. Where records can't be published
again, an error names them, and the bridge ends; nothing else was written by then.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog

from schemas.acceptance import Acceptance, Kind, Token, short_digest
from schemas.errors import OperatorNeeded
from schemas.events import progress_topic
from schemas.lsn import format_lsn
from schemas.progress import HangingRange, ProgressRecord, SettlingNote
from services.bridge.events.event import Event
from services.bridge.hanging.notes import clear
from services.bridge.hanging.republish_plan import Judged, Terms, each_once, further, judge_range
from services.bridge.hanging.transactions import Judge
from services.bridge.progress.errors import RECOVER
from services.bridge.recovery.event_positions import KafkaRecord, record_of
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.kafka.records import READ_DEADLINE_S

logger = structlog.get_logger(__name__)

_BREATH_RECORDS: Final = 1000
_NAMED_MAX: Final = 5


class StartJudge(Judge, Protocol):
    """A Judge that also knows what an operator has accepted for this start."""

    accepted: Acceptance


def publish_lost(
    topics: Topics,
    producer: TransactionalProducer,
    slot: str,
    notes: dict[bytes, SettlingNote],
    judge: StartJudge,
) -> None:
    """Publish what the `notes` show to be lost, and remove them.

    Raise OperatorNeeded where that is impossible and no operator has accepted the loss.
    """
    last = topics.last_progress(slot)
    covers = last
    for note in notes.values():
        judge.may_decide(note.record)
        covers = further(covers, note.record)
    judge.may_decide(last)
    terms = Terms(topics.prefix, covers, judge.lost())
    ranges = [noted for note in notes.values() for noted in note.ranges]
    found = [(noted, _judge_range(topics, noted, terms)) for noted in ranges]
    problems = [(noted, judged.problem) for noted, judged in found if judged.problem]
    if problems:
        _require_accepted(problems, slot, covers, judge.accepted)
    again = each_once(found)
    if not again and covers is last:
        clear(topics, notes)
        return
    logger.warning(
        "publishing records again that Kafka aborted while the bridge ended their transaction",
        records=len(again),
        partitions=_names(noted for noted, judged in found if judged.again),
    )
    producer.settle([*_events(again), *_ending(topics, slot, covers, notes)], (0,), commit=True)


def _events(again: Iterable[tuple[int, KafkaRecord]]) -> Iterable[tuple[int, Event]]:
    for partition, (topic, _, key, value, headers) in again:
        name = key.encode() if isinstance(key, str) else key
        listed = [*headers.items()] if isinstance(headers, dict) else headers
        yield partition, Event(topic, name, value, listed)


def _ending(
    topics: Topics, slot: str, covers: ProgressRecord | None, notes: Iterable[bytes]
) -> Iterable[tuple[int, Event]]:
    """Yield the progress record and the tombstones of `notes`, each with its partition.

    The progress record is the first in its topic, as in every Kafka transaction of the bridge.
    """
    topic = progress_topic(topics.prefix)
    if covers is not None:
        kafka = covers.kafka.model_copy(update={"producer": 0})
        own = covers.model_copy(update={"kafka": kafka})
        yield 0, Event(topic, slot.encode(), own.model_dump_json().encode())
    for key in notes:
        yield 0, Event(topic, key, None)


def _judge_range(topics: Topics, noted: HangingRange, terms: Terms) -> Judged:
    """Judge what was noted of a partition by its records as they are now; see judge_range."""
    topic = noted.topic
    if topic == progress_topic(topics.prefix):
        return Judged()  # the note has its record
    if not topics.has(topic) or noted.partition >= topics.partitions(topic):
        return Judged(problem="the topic is gone, or Kafka does not show it to the bridge")
    outbox = topics.is_outbox(topic)
    terms = terms._replace(
        own=topic in topics.own(),
        outbox=outbox,
        shared=outbox and not topics.outbox_is_ours,
        schema_text=topics.schema_text,
    )
    there = _read(topics, noted, committed=False)
    return judge_range(noted, there, _read(topics, noted, committed=True), terms)


def _read(topics: Topics, noted: HangingRange, *, committed: bool) -> list[KafkaRecord]:
    """Read the records of the range; `committed`: those from its start to the partition's end."""
    with topics.reader(noted.topic, noted.partition, committed=committed) as reader:
        low, end = reader.bounds()
        start, stop = max(low, noted.start), end if committed else min(end, noted.end)
        messages = reader.messages(start, stop, time.monotonic() + READ_DEADLINE_S)
        return [record_of(message) for message in topics.waiter.each(messages, _BREATH_RECORDS)]


def _require_accepted(
    problems: Sequence[tuple[HangingRange, str]],
    slot: str,
    covers: ProgressRecord | None,
    accepted: Acceptance,
) -> None:
    """Raise OperatorNeeded for lost records, or only log them if an operator accepts the loss."""
    named = "; ".join(f"{_names([noted])}: {why}" for noted, why in problems[:_NAMED_MAX])
    more = len(problems) - _NAMED_MAX
    named += f"; and {more} more partitions" if more > 0 else ""
    lsn = covers.position.end_lsn if covers is not None else None
    parts = short_digest(_names([noted]) for noted, _ in problems)
    error = OperatorNeeded(
        "Kafka has aborted records that it had decided to commit, as the bridge died while it "
        f"ended their transaction, and they can't be published again: {named}",
        operation="publish again what was aborted",
        subject=f"slot {slot}",
        lsn=lsn,
        hint=f"{RECOVER}; or restore these rows in what has been made of the topics, and go on "
        "without their events",
        token=Token(Kind.ABORTED_RECORDS, slot, f"{format_lsn(lsn or 0)}-{parts}"),
    )
    if not accepted.takes(error.token):
        raise error
    logger.warning("going on without records that Kafka aborted", slot=slot, partitions=named)


def _names(ranges: Iterable[HangingRange]) -> str:
    return ", ".join(f"{one.topic}[{one.partition}]@{one.start}-{one.end}" for one in ranges)
