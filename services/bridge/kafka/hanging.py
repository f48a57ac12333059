"""Ends transactions that Kafka has decided without telling every partition.

A broker that dies between its coordinator's decision and the markers may take the transaction for
complete when it comes back (seen with 4.3.0: one SIGKILL in ten under load). Its records then hide
for ever, from readers of committed ones, all that follows them. Kafka's own remedy is an operator
with `kafka-transactions.sh abort`, which loses what was decided to be committed.

A marker of the same producer id ends it as well. So at the start of a session, when no transaction
of ours can be open, every partition that stays unstable gets one record that means nothing, and

    commit   where a witness shows that Kafka had decided so: the origin is beyond the last visible
             progress record, the slot is beyond what that announces or was told of all that the
             first hidden one has, some partition shows events beyond the visible one, or that
             covers what is hidden
    abort    else: the slot sends again what it had

Committed, that record is a tombstone of a key that no table has. What other producers have open is
left alone, or none the worse for a marker of ours.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import structlog

from schemas.events import (
    SETTLED_KEY,
    PreparedKey,
    ProgressRecord,
    prepared_topic,
    progress_topic,
)
from services.bridge.events.event import Event
from services.bridge.kafka.producer import TransactionalProducer
from services.bridge.kafka.topics import Topics
from services.bridge.postgres.database import Primary
from services.kafka.records import READ_DEADLINE_S, parse_record

logger = structlog.get_logger(__name__)

PATIENCE_S: Final = 1.5
"""A partition whose last stable offset stays the same for so long is taken for stuck."""
_LOOK_S: Final = 0.25
_TAIL_RECORDS: Final = 20
Partition = tuple[str, int]


class Place(NamedTuple):
    """An event's place in the order of all."""

    commit_lsn: int
    seq: int


def settle(
    topics: Topics,
    producer: TransactionalProducer,
    primary: Primary,
    slot: str,
    while_waiting: Callable[[], None],
) -> None:
    """End what hangs in the topics of the prefix. `producer` has begun its session."""
    stuck = _stuck(topics, while_waiting)
    if not stuck:
        return
    ours, hidden, record = _ours(topics, slot, stuck)
    if not ours:
        logger.info("transactions of other producers are open", partitions=_names(stuck))
        return
    record_at = ours.get((progress_topic(topics.prefix), 0))
    last = topics.last_progress(slot, until=record_at)
    if record_at is None:
        commit = was_committed(last, hidden=hidden)
    else:
        found = primary.slot()
        commit = was_committed(
            last,
            record,
            confirmed_lsn=(found.confirmed_flush_lsn if found is not None else None) or 0,
            origin_lsn=primary.origin_lsn() or 0,
            shown=_shown(topics, stuck),
        )
    ending = ours if commit else stuck  # an abort leaves nothing that could be seen
    logger.warning(
        "Kafka has left a transaction open after deciding it: ending it",
        decision="commit" if commit else "abort",
        partitions=_names(ending),
    )
    prepared = prepared_topic(topics.prefix)
    nothing = PreparedKey(slot="", gid="", part=0).model_dump_json().encode()
    producer.settle(
        {
            (topic, partition): Event(topic, nothing if topic == prepared else SETTLED_KEY, None)
            for topic, partition in ending
        },
        commit=commit,
    )


def has(last: ProgressRecord | None, place: Place) -> bool:
    """Whether the event at `place` is among what the record covers. Pure."""
    if last is None:
        return False
    in_part = place.commit_lsn == last.commit_lsn and place.seq < last.seq
    return place.commit_lsn < last.end_lsn or in_part


def was_committed(
    last: ProgressRecord | None,
    hanging: ProgressRecord | None = None,
    *,
    confirmed_lsn: int = 0,
    origin_lsn: int = 0,
    shown: Iterable[Place] = (),
    hidden: Iterable[Place] = (),
) -> bool:
    """Whether a witness shows that Kafka had decided to commit what hangs. Pure.

    `last`: the last visible record, `hanging`: the first that is not. `confirmed_lsn`,
    `origin_lsn`: how far the slot and the origin have been told. `shown`: places of the last
    visible events; `hidden`: of the first ones that are not.

    Where commits wait, the slot is told of what was announced: but of a position with events only
    once Kafka had committed them, so also of the end of a record that covers whole transactions.
    """
    recorded = last.end_lsn if last is not None else 0
    announced = max(recorded, last.ahead_lsn) if last is not None else 0
    told = hanging is not None and not hanging.seq and confirmed_lsn >= hanging.end_lsn
    return (
        told
        or origin_lsn > recorded
        or confirmed_lsn > announced
        or any(not has(last, place) for place in shown)
        or any(has(last, place) for place in hidden)
    )


def place_of(value: bytes | None, prefix: str) -> Place | None:
    """Where the event of a record stands; None for what is no event of `prefix`. Pure."""
    try:
        document = json.loads(value or b"null")
        said = document.get("source", document)
        if said.get("name", prefix) != prefix:
            return None
        return Place(int(said["commit_lsn"]), int(said.get("seq", 0)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _stuck(topics: Topics, while_waiting: Callable[[], None]) -> dict[Partition, int]:
    found = topics.unstable()
    until = time.monotonic() + PATIENCE_S
    while found and time.monotonic() < until:
        time.sleep(_LOOK_S)
        while_waiting()
        now = topics.unstable()
        found = {place: at for place, at in found.items() if now.get(place) == at}
    return found


def _ours(
    topics: Topics, slot: str, stuck: Mapping[Partition, int]
) -> tuple[dict[Partition, int], list[Place], ProgressRecord | None]:
    """Those that hide records of this bridge, the places of the first events that they hide, and
    the first progress record."""
    progress, own = progress_topic(topics.prefix), topics.own()
    ours: dict[Partition, int] = {}
    places = []
    record = None
    for (topic, partition), offset in stuck.items():
        with topics.reader(topic, partition, committed=False) as reader:
            for at, key, value in reader.first_from(offset):
                place = place_of(value, topics.prefix)
                if topic == progress:
                    is_ours, place = key == slot.encode(), None
                    if is_ours and value is not None:
                        record = parse_record(ProgressRecord, topic, at, value)
                else:
                    is_ours = topic in own or place is not None
                if is_ours:
                    ours[topic, partition] = offset
                if place is not None:
                    places.append(place)
    return ours, places, record


def _shown(topics: Topics, stuck: Mapping[Partition, int]) -> Iterable[Place]:
    """The places of the last visible events, of every partition that shows all it has."""
    for topic, partition in topics.event_partitions():
        if (topic, partition) not in stuck:
            with topics.reader(topic, partition) as reader:
                deadline = time.monotonic() + READ_DEADLINE_S
                values = [value for _, _, value in reader.last(_TAIL_RECORDS, deadline)]
            places = (place_of(value, topics.prefix) for value in values)
            yield from (place for place in places if place is not None)


def _names(partitions: Mapping[Partition, int]) -> str:
    return ", ".join(f"{topic}[{partition}]@{at}" for (topic, partition), at in partitions.items())
