"""Whole transactions, whatever order partitions are read in and wherever the reader is killed."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import assume, given
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


@given(
    log=logs(),
    order=st.lists(st.integers(0, 4), max_size=40),
    lost=st.integers(0, 6),
    holes=st.booleans(),
)
def test_events_without_their_end_are_never_left_out_in_silence(
    log: tuple[list[End], dict[Partition, list[Event]]],
    order: list[int],
    lost: int,
    holes: bool,
) -> None:
    """The transaction topic has lost its first ENDs, or one in the middle."""
    ends, partitions = log
    kept = [*ends[:lost], *ends[lost + 1 :]] if holes else ends[lost:]
    gone = {end.commit_lsn for end in ends} - {end.commit_lsn for end in kept}
    has_events = {event.commit_lsn for events in partitions.values() for event in events}
    last = kept[-1].commit_lsn if kept else -1
    judged = {lsn for lsn in gone & has_events if lsn < last}
    whole = [*order, *[*range(5)] * 80]
    assembly = Assembly(Position(), ENDS)
    try:
        got = read(assembly, (kept, partitions), Position(), whole)
    except OperatorNeeded as error:
        assert error.lsn in judged
        assert "not its END" in error.message
        return
    assert not judged
    assert [one.commit_lsn for one in got] == [end.commit_lsn for end in kept]
    beyond = sorted(lsn for lsn in gone & has_events if lsn > last)
    assert assembly.endless == (beyond[0] if len(beyond) > 1 else None)


@given(
    log=logs(),
    order=st.lists(st.integers(0, 4), max_size=40),
    most=st.integers(0, 3),
)
def test_holding_partitions_back_never_stops_the_next_transaction(
    log: tuple[list[End], dict[Partition, list[Event]]], order: list[int], most: int
) -> None:
    """A partition that is ahead gives nothing, as one that is paused."""
    ends, partitions = log
    assembly = Assembly(Position(), ENDS)
    queues = {where: [*enumerate(events)] for where, events in partitions.items()}
    waiting, got, places = [*ends], 0, [ENDS, *partitions]
    for choice in [*order, *[*range(5)] * 80]:
        where = places[choice % len(places)]
        if assembly.ahead(where, most):
            continue
        if where == ENDS and waiting:
            assembly.take_end(waiting.pop(0))
        elif where != ENDS and queues[where]:
            offset, event = queues[where].pop(0)
            change = Change(event.table, event.seq, None, {"op": "c"})
            assembly.take(where, offset, event.commit_lsn, change)
        while assembly.give() is not None:
            got += 1
    assert got == len(ends)


def test_events_from_before_the_copy_are_told_also_after_a_restart() -> None:
    """The topic of a table is read only once a transaction has events of it."""
    first = Assembly(Position(50), ENDS)
    first.take_end(End("7:100", 100, 0, {}, 1))
    found = first.give()
    assert found is not None
    second = Assembly(Position.parse(found.position.text()), ENDS)
    second.take(("a", 0), 0, 50, Change("a", 0, None, {"op": "c"}))
    second.take(("a", 0), 1, 100, Change("a", 0, None, {"op": "c"}))
    with pytest.raises(OperatorNeeded, match="not its END") as raised:
        second.take(("a", 0), 2, 70, Change("a", 0, None, {"op": "c"}))
    assert (raised.value.lsn, raised.value.subject) == (70, "a[0]@2")


def test_a_transaction_larger_than_what_is_held_is_not_held_back() -> None:
    assembly = Assembly(Position(), ENDS)
    assembly.take_end(End("7:10", 10, 0, {"a": 100}, 1))
    for seq in range(99):
        assert not assembly.ahead(("a", 0), 20)
        assembly.take(("a", 0), seq, 10, Change("a", seq, None, {"op": "c"}))
    for offset in range(30):
        assembly.take(("a", 1), offset, 20, Change("a", offset, None, {"op": "c"}))
    assert assembly.ahead(("a", 1), 20), "the next transaction is past there"
    assert not assembly.ahead(("a", 0), 20)
    assert not assembly.give()
    progress = assembly.progress
    assembly.take(("a", 1), 30, 20, Change("a", 30, None, {"op": "c"}))
    assert assembly.progress == progress, "a later transaction is not what is waited for"
    assembly.take(("a", 0), 99, 10, Change("a", 99, None, {"op": "c"}))
    assert assembly.progress == progress + 1
    found = assembly.give()
    assert found is not None and len(found.events) == 100


@given(log=logs(), order=st.lists(st.integers(0, 4), max_size=40), data=st.data())
def test_an_event_that_no_end_counts_is_refused_whenever_it_is_read(
    log: tuple[list[End], dict[Partition, list[Event]]], order: list[int], data: st.DataObject
) -> None:
    """Nothing is given that has it, or that lacks an event in whose place it stands."""
    ends, partitions = log
    assume(ends)
    lsn = data.draw(st.sampled_from([end.commit_lsn for end in ends]))
    where = data.draw(st.sampled_from(sorted(partitions)))
    queue = partitions[where]
    first = sum(event.commit_lsn < lsn for event in queue)
    last = sum(event.commit_lsn <= lsn for event in queue)
    queue.insert(data.draw(st.integers(first, last)), Event(lsn, where[0], where[1], 99, False))
    with pytest.raises(OperatorNeeded, match="more events of") as raised:
        read(Assembly(Position(), ENDS), log, Position(), [*order, *[*range(5)] * 80])
    assert raised.value.lsn == lsn
    assert f"{where[0]}[" in str(raised.value.subject)


def test_a_position_that_goes_back_is_refused() -> None:
    assembly = Assembly(Position(100), ENDS)
    with pytest.raises(OperatorNeeded, match="earlier position"):
        assembly.take_end(End("7:90", 90, 0, {}, 5))


def test_a_position_is_stored_as_text() -> None:
    position = Position(7, {("a", 0): 5, ("a", 1): 6, ("b", 0): 0})
    assert Position.parse(position.text()) == position
    assert Position.parse('{"commit_lsn":7,"offsets":{"a":{"0":5,"1":6},"b":{"0":0}}}') == position
    begun = position._replace(began=(3, 5))
    assert Position.parse(begun.text()) == begun
    assert Position.after("0/7") == Position.after(7) == Position(7)
    with pytest.raises(SettingsError, match="not an LSN"):
        Position.after("7")
    for wrong in (-1, 2**64):
        with pytest.raises(SettingsError, match="not an LSN"):
            Position.after(wrong)
    for text in ("-2", str(2**64), "1.5", "null", '"7"'):
        with pytest.raises(SettingsError, match=r"Position\.text"):
            Position.parse(f'{{"commit_lsn":{text},"offsets":{{}}}}')
    assert Position.parse(None) == Position()
    with pytest.raises(SettingsError, match=r"Position\.text"):
        Position.parse("{}")
