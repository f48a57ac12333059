"""Ends transactions that Kafka has decided, but whose marker some partitions lack.

A coordinator writes the markers of a transaction that it has decided, and then takes it for
complete. The brokers of `hanging` skip the markers of partitions that have no leader at that
moment, as if they were deleted: of all partitions, where a broker without replicas elsewhere stops
or dies (measured: one stop in ten to forty under load). Kafka's own remedy is an operator with
`kafka-transactions.sh abort`, which loses what was decided to be committed.

A marker of the same producer id ends it as well. So at the start of a session, when no transaction
of ours can be open, every partition that stays unstable gets one record that means nothing, and

    commit   where its events are among what the last visible progress record covers, or where a
             witness shows that Kafka had decided so: the origin is beyond that record, the slot is
             beyond what it announces or was told of all that the first hidden one has, some
             partition shows events beyond it, the other producer's record stands behind the hidden
             one
    abort    else: the slot sends again what it had

of the producer that has written it (`producer_pair`; of both where that is not known). Committed,
that record is a tombstone of a key that no table has. A partition is ours to end where the record
at its last stable offset is: that one belongs to what is open. What other producers have open is
left alone, or none the worse for a marker of ours.
"""

import time
from collections.abc import Mapping
from typing import Final, Protocol

import structlog

from schemas.errors import ExitCode, Retryable
from schemas.events import SETTLED_KEY, prepared_topic, progress_topic
from schemas.progress import ProgressRecord
from services.bridge.events.event import Event
from services.bridge.failpoints import reach
from services.bridge.hanging.decision import (
    Ending,
    covered,
    how_to_end,
    was_committed,
)
from services.bridge.hanging.notes import clear, write_note
from services.bridge.recovery.event_positions import (
    NO_STAGING_KEY,
    EventPosition,
    Lost,
    is_note,
    is_settling,
    remaining,
)
from services.bridge.recovery.last_events import OTHERS_RECORDS, last_positions, position_in
from services.bridge.recovery.visible_record import read_visible
from services.bridge.sink.markers import TransactionHangs
from services.bridge.sink.offsets import Partition
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.database import Primary
from services.kafka.records import (
    READ_DEADLINE_S,
    REQUEST_TIMEOUT_S,
    TopicReader,
    parse_record,
)

logger = structlog.get_logger(__name__)

PATIENCE_S: Final = 1.5
"""How long a partition's last stable offset must stay the same to count as stuck."""
_SOON_S: Final = 0.02
_LOOK_S: Final = 0.25
_ROUNDS_MAX: Final = 4
"""Two transactions may hang, each of either producer; what then stays is not ours."""


class Judge(Protocol):
    """Judges whether this server's slot and origin may show how a transaction was decided."""

    def may_decide(self, record: ProgressRecord | None) -> None:
        """Raise SlotbridgeError where `record`, visible or hidden, is not of this server."""

    def lost(self) -> Lost:
        """Return a function of (timeline or 0, commit_lsn): whether the server lacks that event."""


def settle(
    topics: Topics,
    producer: TransactionalProducer,
    primary: Primary,
    slot: str,
    judge: Judge,
) -> None:
    """End hanging transactions in the topics of the prefix. `producer` has begun its session.

    Raise what `judge` raises where another server than this one knows how it was decided.
    """
    tried: set[Partition] = set()
    for _ in range(_ROUNDS_MAX):
        stuck = _stuck(topics)
        if not stuck:
            return
        ours, record = _ours(topics, slot, stuck)
        if not ours:
            break
        lost = judge.lost()
        ours = {where: remaining(position, lost) for where, position in ours.items()}
        last = topics.last_progress(slot, until=stuck.get((progress_topic(topics.prefix), 0)))
        judge.may_decide(last)
        judge.may_decide(record)
        commit = (
            None
            if covered(ours, last)
            else _was_committed(topics, primary, slot, last, record, stuck, lost)
        )
        ending = how_to_end(ours, stuck, last, record, tried, commit=commit)
        tried |= {*ending.partitions}
        _end(topics, producer, slot, ending, last if covered(ours, last) else record)
    else:
        require_none_hanging(topics, slot)
        stuck = _stuck(topics)
        if not stuck:
            return
    logger.warning(
        "not judged: what other producers' open transactions hide in our topics",
        partitions=_names(stuck),
        hint="kafka-transactions.sh describe-producers names them; once they have ended, the "
        "bridge ends what it finds hanging behind them",
    )
    producer.markers.hide(stuck)


def require_none_hanging(topics: Topics, slot: str) -> None:
    """Raise TransactionHangs if a transaction of this bridge hangs; none of them may be open.

    After the loss of a broker: before the producer of the last transaction but one writes again.
    """
    stuck = _stuck(topics)
    if stuck and _ours(topics, slot, stuck)[0]:
        raise TransactionHangs(
            f"Kafka has decided a transaction, but {_names(stuck)} did not get its marker",
            operation="begin a Kafka transaction",
            subject=f"slot {slot}",
            hint="the next session of the bridge ends the transaction",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )


def _was_committed(
    topics: Topics,
    primary: Primary,
    slot: str,
    last: ProgressRecord | None,
    record: ProgressRecord | None,
    stuck: Mapping[Partition, int],
    lost: Lost,
) -> bool:
    """Ask the server and Kafka for what `was_committed` judges a hanging transaction by."""
    found = primary.slot()
    return was_committed(
        last,
        record,
        confirmed_lsn=(found.confirmed_flush_lsn if found is not None else None) or 0,
        origin_lsn=max(primary.origin_lsn() or 0, primary.former_lsn() or 0),
        shown=[position for position in last_positions(topics, stuck) if remaining(position, lost)],
        behind=read_visible(topics, slot).hidden if record is not None else (),
    )


def _end(
    topics: Topics,
    producer: TransactionalProducer,
    slot: str,
    ending: Ending,
    covers: ProgressRecord | None,
) -> None:
    """End a hanging transaction by records that mean nothing and a marker of the same producer.

    A kill before the commit makes Kafka abort what hangs. A note written before lets the next start
    publish those records again.
    """
    logger.warning(
        "ending a transaction that Kafka has decided and left open",
        decision="commit" if ending.commit else "abort",
        partitions=_names(ending.partitions),
    )
    notes: list[bytes] = []
    if ending.commit:
        notes = write_note(topics, slot, ending.partitions, covers)
        reach("noted")
    prepared = prepared_topic(topics.prefix)
    records = [
        (partition, Event(topic, NO_STAGING_KEY if topic == prepared else SETTLED_KEY, None))
        for topic, partition in ending.partitions
    ]
    producer.settle(records, ending.turns, commit=ending.commit)
    if notes:
        reach("settled")
        clear(topics, notes)


def _stuck(topics: Topics) -> dict[Partition, int]:
    """Return the partitions that stay stuck for PATIENCE_S -> their last stable offset.

    The first looks follow each other quickly: markers being written take some milliseconds.
    """
    found = _unstable(topics)
    until, pause_s = time.monotonic() + PATIENCE_S, _SOON_S
    while found and time.monotonic() < until:
        topics.waiter.pause(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)
        now = _unstable(topics)
        found = {where: at for where, at in found.items() if now.get(where) == at}
    return found


def _unstable(topics: Topics) -> dict[Partition, int]:
    """Return the last stable offset of each partition that has more than that; retry for a while.

    A broker that was lost may come back within the deadline, with partitions of a new leader epoch.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while True:
        try:
            return topics.unstable()
        except Retryable:
            if time.monotonic() > deadline:
                raise
        topics.waiter.pause(_LOOK_S)
        topics.refresh()


def _ours(
    topics: Topics, slot: str, stuck: Mapping[Partition, int]
) -> tuple[dict[Partition, EventPosition | None], ProgressRecord | None]:
    """Return the stuck partitions that hide records of this bridge, and the first progress record.

    Each partition comes with the position of the first event that it hides, None where that is
    unknown.
    """
    progress, own = progress_topic(topics.prefix), topics.own()
    ours: dict[Partition, EventPosition | None] = {}
    record = None
    for (topic, partition), offset in stuck.items():
        with topics.reader(topic, partition, committed=False) as reader:
            if topic == progress:
                records = reader.first_from(offset)
            else:
                position, mine = _first_position(topics, reader, offset, alone=topic in own)
                if mine:
                    ours[topic, partition] = position
                continue
        for at, key, value in records:
            if key == slot.encode() and value is not None:
                record = parse_record(ProgressRecord, topic, at, value)
            if key == slot.encode() or is_settling(key, value) or is_note(key):
                ours[topic, partition] = None
    return ours, record


def _first_position(
    topics: Topics, reader: TopicReader, offset: int, *, alone: bool
) -> tuple[EventPosition | None, bool]:
    """Return the position of this bridge's first event from `offset` on, the last stable offset.

    And whether the transaction that is open there is this bridge's: the record at `offset` belongs
    to it. If that does not have a position of this bridge, it is another producer's; what follows
    may be decided and told, and proves nothing. Only in a topic that this bridge writes `alone` are
    later records looked at: of a staged transaction, the last part alone tells the LSN. What
    was to end a transaction under our prefix, and hangs itself, has no position and is ours.
    """
    prepared = reader.topic == prepared_topic(topics.prefix)
    end = reader.bounds()[1]
    stop = end if prepared else min(end, offset + OTHERS_RECORDS)
    under_prefix = reader.topic.startswith(f"{topics.prefix}.")
    deadline = time.monotonic() + READ_DEADLINE_S
    for message in reader.messages(offset, stop, deadline):
        position = position_in(topics, message)
        settles = is_settling(message.key(), message.value())
        alone = alone or (settles and under_prefix and message.offset() == offset)
        if position is not None or not (alone or settles):
            return position, alone or position is not None
    return None, alone


def _names(partitions: Mapping[Partition, int]) -> str:
    return ", ".join(f"{topic}[{partition}]@{at}" for (topic, partition), at in partitions.items())
