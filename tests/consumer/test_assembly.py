"""Whole transactions, whatever order partitions are read in and wherever the reader is killed."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded, SettingsError
from slotbridge.consumer.assembly import Assembly, Change, End, Transaction
from slotbridge.consumer.position import Partition, Position

ENDS: Partition = ("p.transaction", 0)


class Event(NamedTuple):
    """An event in a partition; `table` is also the topic."""

    commit_lsn: int
    table: str
    number: int
    seq: int
    broadcast: bool


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[End], dict[Partition, list[Event]]]:
    """What Kafka has: ENDs, and the records of four partitions, in commit order."""
    ends: list[End] = []
    partitions: dict[Partition, list[Event]] = {(t, n): [] for t in "ab" for n in (0, 1)}
    for lsn in range(100, 100 + 10 * draw(st.integers(0, 6)), 10):
        changes = draw(
            st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.booleans()), max_size=4)
        )
        counts: dict[str, int] = {}
        for seq, (table, number, broadcast) in enumerate(changes):
            counts[table] = counts.get(table, 0) + 1
            for where in (0, 1) if broadcast else (number,):
                partitions[table, where].append(Event(lsn, table, where, seq, broadcast))
        ends.append(End(f"7:{lsn}", lsn, lsn, counts, 2 * len(ends) + 1))
    return ends, partitions


def read(
    assembly: Assembly,
    log: tuple[list[End], dict[Partition, list[Event]]],
    position: Position,
    order: Sequence[int],
) -> list[Transaction]:
    """Read every partition on from `position`, in the order of `order`, and give what is whole."""
    ends, partitions = log
    sources = [(ENDS, [end for end in ends if end.offset >= position.offsets.get(ENDS, 0)])]
    queues: dict[Partition, list[tuple[int, Event]]] = {
        where: [*enumerate(events)][position.offsets.get(where, 0) :]
        for where, events in partitions.items()
    }
    waiting = [*sources[0][1]]
    places = [ENDS, *partitions]
    given_: list[Transaction] = []
    for choice in order:
        where = places[choice % len(places)]
        if where == ENDS and waiting:
            assembly.take_end(waiting.pop(0))
        elif where != ENDS and queues[where]:
            offset, event = queues[where].pop(0)
            change = Change(event.table, event.seq, None, {"op": "t" if event.broadcast else "c"})
            assembly.take(where, offset, event.commit_lsn, change)
        while (found := assembly.give()) is not None:
            given_.append(found)
    return given_


@given(
    log=logs(),
    orders=st.lists(st.lists(st.integers(0, 4), max_size=40), max_size=4),
    stored=st.integers(0, 3),
)
def test_each_transaction_comes_whole_and_once_through_kills(
    log: tuple[list[End], dict[Partition, list[Event]]], orders: list[list[int]], stored: int
) -> None:
    """Of what is given before a kill, the caller stores all but the last `stored`."""
    position, got = Position(), []
    for order in [*orders, [*range(5)] * 80]:
        found = read(Assembly(position, ENDS), log, position, order)
        last = order == [*range(5)] * 80
        kept = found if last else found[: max(0, len(found) - stored)]
        got += kept
        if kept:
            position = Position.parse(kept[-1].position.text())
    ends, partitions = log
    assert [one.commit_lsn for one in got] == [end.commit_lsn for end in ends]
    for one in got:
        events = {(e.table, e.seq) for es in partitions.values() for e in es}
        there = {
            (e.table, e.seq)
            for es in partitions.values()
            for e in es
            if e.commit_lsn == one.commit_lsn
        }
        assert {(e.table, e.seq) for e in one.events} == there <= events
        assert [e.seq for e in one.events] == sorted(e.seq for e in one.events)


def test_a_position_that_goes_back_is_refused() -> None:
    assembly = Assembly(Position(100), ENDS)
    with pytest.raises(OperatorNeeded, match="earlier position"):
        assembly.take_end(End("7:90", 90, 0, {}, 5))


def test_a_position_is_stored_as_text() -> None:
    position = Position(7, {("a", 0): 5, ("a", 1): 6, ("b", 0): 0})
    assert Position.parse(position.text()) == position
    assert Position.parse(None) == Position()
    with pytest.raises(SettingsError, match=r"Position\.text"):
        Position.parse("{}")
