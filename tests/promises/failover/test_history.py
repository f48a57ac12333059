"""The checker of histories: it accepts what one primary does, and finds what is planted."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.promises.failover.rounds.history import (
    AcceptedLoss,
    Append,
    Operation,
    Outcome,
    Read,
    check,
)

KEYS = 3
Draw = Callable[..., Any]
BYTES = 100
"""What each transaction takes of WAL."""


@dataclass
class World:
    """One primary at a time; each transaction takes effect at once, at a whole second."""

    history: list[Operation] = field(default_factory=list)
    lists: dict[int, tuple[int, ...]] = field(default_factory=dict)
    accepted: list[AcceptedLoss] = field(default_factory=list)
    timeline: int = 1
    value: int = 0
    unreplicated: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    """The lists as they were before each of the last commits."""

    @property
    def now(self) -> float:
        return float(len(self.history))

    @property
    def lsn(self) -> int:
        return BYTES * len(self.history)

    def transact(self, draw: st.DrawFn) -> None:
        """One transaction, of whatever outcome."""
        lists = dict(self.lists)
        micros: list[Append | Read] = []
        for appends in draw(st.lists(st.booleans(), min_size=1, max_size=4)):
            key = draw(st.integers(0, KEYS - 1))
            if appends:
                self.value += 1
                lists[key] = (*lists.get(key, ()), self.value)
                micros.append(Append(key, self.value))
            else:
                micros.append(Read(key, lists.get(key, ())))
        outcome = draw(st.sampled_from([Outcome.OK] * 4 + [Outcome.FAIL, Outcome.INFO]))
        self.take(draw, lists, micros, outcome)

    def append_and_read(self, draw: Draw) -> None:
        """One transaction of which a test can be sure."""
        self.value += 1
        values = (*self.lists.get(0, ()), self.value)
        micros: list[Append | Read] = [Append(0, self.value), Read(0, values)]
        self.take(draw, {**self.lists, 0: values}, micros, Outcome.OK)

    def take(
        self,
        draw: Draw,
        lists: dict[int, tuple[int, ...]],
        micros: list[Append | Read],
        outcome: Outcome,
    ) -> None:
        """Note the transaction that leaves `lists`, and let it take effect if it was committed."""
        invoked, committing = sorted(draw(st.tuples(st.floats(-3, 0), st.floats(-3, 0))))
        operation = Operation(
            "ab"[self.timeline % 2],
            outcome,
            tuple(micros),
            self.now + invoked,
            self.now + committing,
            self.now + draw(st.floats(0, 3)),
            *((self.timeline, self.lsn + BYTES) if outcome is Outcome.OK else (0, 0)),
        )
        self.unreplicated.append(self.lists)
        if outcome is Outcome.OK or (outcome is Outcome.INFO and draw(st.booleans())):
            self.lists = lists
        self.history.append(operation)

    def promote(self, draw: st.DrawFn) -> None:
        """The other node, which may lack the last transactions: that was accepted."""
        missing = draw(st.sampled_from([0, 0, 1, 2]))
        if 0 < missing <= len(self.unreplicated):
            self.lists = self.unreplicated[-missing]
            size = missing * BYTES
            self.accepted.append(AcceptedLoss(self.timeline, self.lsn - size, size))
        self.unreplicated.clear()
        self.timeline += 1


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World()
    for promotes in draw(st.lists(st.sampled_from([False] * 5 + [True]), max_size=30)):
        if promotes:
            world.promote(draw)
        else:
            world.transact(draw)
    world.promote(draw)
    world.append_and_read(draw)
    return world


def kinds(world: World) -> set[str]:
    return {anomaly.kind for anomaly in check(world.history, world.lists, world.accepted)}


def kept(world: World) -> list[int]:
    """Which acknowledged transactions are there and have written something."""
    there = {value for values in world.lists.values() for value in values}
    return [
        number
        for number, each in enumerate(world.history)
        if each.outcome is Outcome.OK
        and any(append.value in there for append in each.appends)
        and not any(loss.covers(each) for loss in world.accepted)
    ]


@given(worlds())
def test_history_of_one_primary_has_no_anomaly(world: World) -> None:
    assert check(world.history, world.lists, world.accepted) == []


@given(worlds(), st.data())
def test_an_append_that_is_missing_is_lost(world: World, data: st.DataObject) -> None:
    each = world.history[data.draw(st.sampled_from(kept(world)))]
    append = data.draw(st.sampled_from(each.appends))
    left = [value for value in world.lists[append.key] if value != append.value]
    world.lists[append.key] = tuple(left)
    assert "lost" in kinds(world)


@given(worlds(), st.data())
def test_an_append_that_is_there_twice_is_duplicated(world: World, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([key for key, values in world.lists.items() if values]))
    world.lists[key] = (*world.lists[key], data.draw(st.sampled_from(world.lists[key])))
    assert "duplicated" in kinds(world)


@given(worlds(), st.data())
def test_a_read_that_the_final_list_does_not_begin_with_is_divergent(
    world: World, data: st.DataObject
) -> None:
    reads = [
        (number, place, micro)
        for number in kept(world)
        for place, micro in enumerate(world.history[number].micros)
        if isinstance(micro, Read) and micro.values
    ]
    number, place, read = data.draw(st.sampled_from(reads))
    micros = list(world.history[number].micros)
    at = data.draw(st.integers(0, len(read.values) - 1))
    micros[place] = Read(read.key, (*read.values[:at], -1, *read.values[at + 1 :]))
    world.history[number] = replace(world.history[number], micros=tuple(micros))
    assert "divergent" in kinds(world)


@given(worlds(), st.integers(1, 3), st.data())
def test_only_what_was_accepted_in_bytes_may_be_lost(
    world: World, missing: int, data: st.DataObject
) -> None:
    lists, lsn = world.lists, world.lsn
    for _ in range(missing):
        world.append_and_read(data.draw)
    world.lists = lists
    size = missing * BYTES
    world.accepted.append(AcceptedLoss(world.timeline, lsn, size))
    assert kinds(world) == set()
    world.accepted[-1] = AcceptedLoss(world.timeline, lsn, data.draw(st.integers(0, size - 1)))
    assert "lost" in kinds(world)


@given(worlds(), st.data())
def test_an_old_primary_that_goes_on_is_a_second_one(world: World, data: st.DataObject) -> None:
    """Its write is lost, or it is there by chance: the time alone tells."""
    promoted = [each for each in world.history if each.timeline > 1]
    newer = data.draw(st.sampled_from(promoted))
    after = newer.completed + data.draw(st.floats(0.001, 10))
    world.history.append(
        Operation("b", Outcome.OK, (), newer.completed, after, after, newer.timeline - 1, 0)
    )
    assert "two primaries" in kinds(world)


def test_two_nodes_on_one_timeline_are_two_primaries() -> None:
    ops = [Operation(node, Outcome.OK, (), 0, 0, 1, 2) for node in "ab"]
    assert [anomaly.kind for anomaly in check(ops, {})] == ["two primaries"]


def test_a_commit_that_was_sent_before_the_new_primary_answered_is_no_second_one() -> None:
    """Its answer came late, that is all."""
    old = Operation("a", Outcome.OK, (), 0, 1, 5, 1)
    new = Operation("b", Outcome.OK, (), 2, 2, 3, 2)
    assert check([old, new], {}) == []


def _operation(number: int, *micros: Append | Read, outcome: Outcome = Outcome.OK) -> Operation:
    return Operation("a", outcome, micros, number, number + 0.1, number + 0.2, 1, number)


HISTORIES: dict[str, Callable[[], tuple[list[Operation], dict[int, tuple[int, ...]]]]] = {
    "unknown": lambda: ([_operation(0, Append(0, 1), outcome=Outcome.FAIL)], {0: (1,)}),
    "torn": lambda: (
        [_operation(0, Append(0, 1), Append(1, 2), outcome=Outcome.INFO)],
        {0: (1,)},
    ),
    "internal": lambda: ([_operation(0, Append(0, 1), Read(0, ()))], {0: (1,)}),
    "stale": lambda: ([_operation(0, Append(0, 1)), _operation(1, Read(0, ()))], {0: (1,)}),
    "reordered": lambda: (
        [_operation(0, Append(0, 1)), _operation(1, Append(0, 2))],
        {0: (2, 1)},
    ),
    "cycle": lambda: (
        [
            replace(_operation(0, Append(0, 1), Read(1, ())), completed=9.0),
            replace(_operation(0, Append(1, 2), Read(0, ())), completed=9.0),
        ],
        {0: (1,), 1: (2,)},
    ),
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_each_kind_of_anomaly_is_found_and_no_other_is_told(kind: str) -> None:
    history, final = HISTORIES[kind]()
    assert {anomaly.kind for anomaly in check(history, final)} == {kind}
