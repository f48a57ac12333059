"""Decides by the witnesses whether to commit or abort a hanging transaction. Pure.

`transactions` finds what hangs, asks the witnesses, and ends it.
"""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from schemas.progress import ProgressRecord
from services.bridge.hanging.republish_plan import further
from services.bridge.recovery.event_positions import EventPosition, has
from services.bridge.sink.offsets import Partition
from services.bridge.sink.producer_pair import BOTH


class Ending(NamedTuple):
    """How to end a hanging transaction: its partitions, producers (`turns`), commit or abort."""

    partitions: Mapping[Partition, int]
    turns: tuple[int, ...]
    commit: bool


def covered(
    ours: Mapping[Partition, EventPosition | None], last: ProgressRecord | None
) -> list[Partition]:
    """Return the partitions that hide what the last visible record covers. Pure.

    The transaction that hangs there was committed.
    """
    return [
        where for where, position in ours.items() if position is not None and has(last, position)
    ]


def how_to_end(
    ours: Mapping[Partition, EventPosition | None],
    stuck: Mapping[Partition, int],
    last: ProgressRecord | None,
    record: ProgressRecord | None,
    tried: Set[Partition],
    *,
    commit: bool | None,
) -> Ending:
    """Decide which hanging transaction to end first, and whether to commit or abort it. Pure.

    `stuck`: partition -> its last stable offset, whoever's transaction hangs there. `ours`: those
    of `stuck` that hide records of this bridge, with the position of the first one. `record`: the
    first progress record that is hidden. `tried`: partitions that were committed before and hang
    again. `commit`: what the witnesses say, needed where `last` covers nothing. A partition whose
    first event is beyond what is committed comes later: it may hide what was aborted.
    """
    if last is not None and (found := covered(ours, last)):
        partitions = found if record is not None else _not_beyond(ours, last)
        # It is of the transaction of `last`, or of the one before, which was the other's: not where
        # a later one exists, which began only once that one had all markers. Markers may be late.
        # A record that is no further than `last` is of records that were published again, by its
        # producer, once nothing else hung (`republish`).
        again = record is not None and further(last, record) is last
        later = record is not None or len(found) < sum(map(bool, ours.values()))
        turn = (record if record is not None and again else last).kafka.producer
        if tried >= {*partitions} and (again or not later):
            turn = 1 - turn
        return Ending({where: stuck[where] for where in partitions}, (turn,), commit=True)
    if not commit:  # of which nothing could be seen
        return Ending(stuck, BOTH, commit=False)
    turns = BOTH if record is None else (record.kafka.producer,)
    partitions = [*ours] if record is None else _not_beyond(ours, record)
    return Ending({where: stuck[where] for where in partitions}, turns, commit=True)


def _not_beyond(
    ours: Mapping[Partition, EventPosition | None], record: ProgressRecord
) -> list[Partition]:
    return [where for where, position in ours.items() if position is None or has(record, position)]


def was_committed(
    last: ProgressRecord | None,
    hanging: ProgressRecord | None = None,
    *,
    confirmed_lsn: int = 0,
    origin_lsn: int = 0,
    shown: Iterable[EventPosition] = (),
    behind: Iterable[ProgressRecord] = (),
) -> bool:
    """Tell whether a witness shows that Kafka had decided to commit the hanging transaction. Pure.

    `last`: the last visible record, `hanging`: the first that is not. `confirmed_lsn`,
    `origin_lsn`: how far the slot and the origin have been told. `shown`: positions of the last
    visible events. `behind`: the records from `hanging` on, whether Kafka has committed them or
    not. The bridge begins a transaction only once the one before, which is the other producer's,
    has committed. Slot and origin need not know: they are never told of a part of a transaction,
    and may be out of reach.

    Where commits wait, the slot is told of what was announced: but of a position with events only
    once Kafka had committed them, so also of the end of a record that covers whole transactions.
    A repair makes the slot anew before Kafka has committed what it publishes: then the slot tells
    nothing.
    """
    if last is not None and last.repairing:
        confirmed_lsn = 0
    recorded = last.position.end_lsn if last is not None else 0
    announced = max(recorded, last.position.ahead_lsn) if last is not None else 0
    whole = hanging.position if hanging is not None and not hanging.position.seq else None
    turns = {one.kafka.producer for one in ([hanging, *behind] if hanging is not None else [])}
    return (
        (whole is not None and confirmed_lsn >= whole.end_lsn)
        or origin_lsn > recorded
        or confirmed_lsn > announced
        or any(not has(last, position) for position in shown)
        or len(turns) > 1
    )
