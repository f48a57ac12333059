"""The records that an interrupted settling lost, by the records of their partition. Pure.

    there    what the noted range holds, whatever became of it (read_uncommitted)
    seen     what readers of committed records have from the range's start on

A record is lost where it is this bridge's, the progress covers it, so that the server does not send
it again, and readers don't have it: neither where it was nor written again behind the range.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from schemas.events import PreparedKey, prepared_topic
from schemas.progress import HangingRange, ProgressRecord
from services.bridge.recovery.event_positions import (
    EventPosition,
    KafkaRecord,
    Lost,
    SchemaText,
    has,
    is_settling,
    position_of_record,
    remaining,
)


class Terms(NamedTuple):
    """The evidence by which a noted range of records is judged.

    `covers`: the furthest record, visible or noted. `own`: nobody else writes to the topic.
    `outbox`: its messages may be of an outbox; `shared`: of another bridge's too. `schema_text`: of
    the schema registry, where there is one.
    """

    prefix: str
    covers: ProgressRecord | None
    lost: Lost
    own: bool = False
    outbox: bool = False
    shared: bool = False
    schema_text: SchemaText | None = None


class Judged(NamedTuple):
    """The records to write `again`, in order, and their `positions`; a `problem`: why not."""

    again: Sequence[KafkaRecord] = ()
    problem: str = ""
    positions: Sequence[EventPosition] = ()


_Identity = tuple[EventPosition | None, bytes | str | None, bool]


def judge_range(
    noted: HangingRange,
    all_records: Sequence[KafkaRecord],
    committed_records: Sequence[KafkaRecord],
    terms: Terms,
) -> Judged:
    """Judge one noted range by its records, all and those committed, in order of offsets."""
    offsets = {record.offset for record in committed_records}
    identities = {
        _identity(record, position) for record, position in _positioned(committed_records, terms)
    }
    again, strangers = [], 0
    for record, position in _positioned(all_records, terms):
        visible = record.offset in offsets
        if position is None:
            strangers += terms.own and not visible
        elif remaining(position, terms.lost) is None or not has(terms.covers, position):
            continue
        elif not visible and _identity(record, position) not in identities:
            again.append((record, position))
    gone = noted.records - len(all_records)
    # The range begins with what hung. Where readers have that record, they had all of it, and
    # compaction has removed replaced records; records of other transactions prove nothing.
    if gone > 0 and (again or strangers or noted.start not in offsets):
        return Judged(problem=f"{gone} of {noted.records} records are gone")
    if strangers:
        return Judged(problem=f"{strangers} records do not tell which transaction they are of")
    if again and terms.shared:
        return Judged(problem="the records may be of another bridge, which writes there too")
    first = min((position for _, position in again), default=None)
    if first is not None and any(
        _behind(position, first, terms) for _, position in _positioned(committed_records, terms)
    ):
        return Judged(problem="later events are visible there: the order would be lost")
    return Judged(
        [record for record, _ in again], positions=tuple(position for _, position in again)
    )


def each_once(
    judged_ranges: Iterable[tuple[HangingRange, Judged]],
) -> list[tuple[int, KafkaRecord]]:
    """Return (partition, record) of all that is lost, in order, each record once.

    Several notes may tell of one transaction: of two attempts to end it, or of a copy that an
    attempt to publish it again has left.
    """
    wanted: dict[tuple[str, int, _Identity], tuple[EventPosition, KafkaRecord]] = {}
    for noted, judged in judged_ranges:
        for record, position in zip(judged.again, judged.positions, strict=True):
            at = (noted.topic, noted.partition, _identity(record, position))
            wanted.setdefault(at, (position, record))
    in_order = sorted(wanted.items(), key=lambda one: one[1][0][:2])
    return [(partition, record) for (_, partition, _), (_, record) in in_order]


def further(one: ProgressRecord | None, other: ProgressRecord | None) -> ProgressRecord | None:
    """Return the record that covers more; `one` where both cover the same."""
    if one is None or other is None:
        return one or other
    return other if _reach(other) > _reach(one) else one


def _reach(record: ProgressRecord) -> tuple[int, int, int]:
    position = record.position
    return position.end_lsn, position.commit_lsn if position.seq else 0, position.seq


def _behind(position: EventPosition | None, first: EventPosition, terms: Terms) -> bool:
    position = remaining(position, terms.lost)
    return position is not None and position[:2] > first[:2]


def _identity(record: KafkaRecord, position: EventPosition | None) -> _Identity:
    return position, record.key, record.value is None


def _positioned(
    records: Sequence[KafkaRecord], terms: Terms
) -> Iterator[tuple[KafkaRecord, EventPosition | None]]:
    """Yield each record and its position, without those that only end a transaction.

    A tombstone of a table follows its delete, with the same key. Pieces of a staging have that
    of its part 0, which comes last; without that part they are left out, as the progress does not
    cover them.
    """
    pieces = _pieces(records, terms)
    before: dict[bytes | str | None, EventPosition | None] = {}
    for record in records:
        if is_settling(record.key, record.value):
            continue
        position = position_of_record(
            record, terms.prefix, outbox=terms.outbox, schema_text=terms.schema_text
        )
        if record.offset in pieces:
            position = pieces[record.offset]
            if position is None:
                continue
        elif position is None and record.value is None:
            position = before.get(record.key)
        before[record.key] = position
        yield record, position


def _pieces(records: Sequence[KafkaRecord], terms: Terms) -> dict[int, EventPosition | None]:
    """Return the offset of each piece of a staging -> the position of its part 0, which follows."""
    found: dict[int, EventPosition | None] = {}
    headers: dict[tuple[str, str], EventPosition | None] = {}
    for record in reversed(records):
        if record.topic != prepared_topic(terms.prefix):
            break
        try:
            key = PreparedKey.model_validate_json(record.key or b"")
        except ValidationError:
            continue
        if record.value is None:
            continue
        if key.part == 0:
            headers[key.slot, key.gid] = position_of_record(record, terms.prefix, outbox=False)
        else:
            found[record.offset] = headers.get((key.slot, key.gid))
    return found
