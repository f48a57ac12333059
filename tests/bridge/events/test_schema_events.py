"""What is announced of a table, and which columns are its key, whatever is known when."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.schema_events import SchemaEvent
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Stamp
from services.bridge.events.keys import key_columns, settled
from services.bridge.events.schema_events import Shapes
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    Commit,
    Insert,
    Relation,
    RelationColumn,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler
from services.postgres.publications import PrimaryKey
from tests.promises.bridge.wire import as_it_is

NOW_US = 1_700_000_000_000_000
XIDS = 2**32
xids = st.integers(0, XIDS - 1)


@pytest.mark.parametrize(
    ("found", "last", "expected"),
    [
        (PrimaryKey(["id"], 50, 50, 900), [], "id"),  # made with the table
        (PrimaryKey(["id"], 950, 950, 990), ["code"], "id"),
        (PrimaryKey(["id"], 60, 50, 900), [], "id"),  # made before the change
        (PrimaryKey(["id"], 100, 50, 900), [], "id"),  # made by the transaction itself
        (PrimaryKey(["code"], 101, 50, 900), ["id"], ""),  # made later: it was another one
        (PrimaryKey(["code"], 101, 50, 900), [], ""),
        (PrimaryKey(["id"], 101, 50, 900), ["id"], "id"),  # made again later: a new type
        (PrimaryKey(["ident"], 60, 50, 900), ["id"], "id"),  # renamed later
        (PrimaryKey(["ident"], 60, 50, 900), ["id", "code"], ""),
        (PrimaryKey([], 0, 50, 900), ["id"], ""),  # dropped: before or after the change?
        (None, ["id"], "id"),  # the table is gone
        (None, ["other"], ""),
        (None, [], ""),
    ],
)
def test_a_key_is_what_is_certain(found: PrimaryKey | None, last: list[str], expected: str) -> None:
    assert key_columns(["id", "code"], 100, found, last) == frozenset(expected.split())


@given(xid=xids, age=st.integers(1, 2**31), lead=st.integers(1, 2**31 - 1), table=xids)
def test_only_a_key_made_later_is_uncertain(xid: int, age: int, lead: int, table: int) -> None:
    """Transaction ids are circular, and may be long past."""
    next_xid = (xid + lead) % XIDS
    older = PrimaryKey(["id"], (xid - age) % XIDS, table, next_xid)
    assert settled(xid, older)
    newer = PrimaryKey(["id"], (xid + lead // 2) % XIDS, table, next_xid)
    assert settled(xid, newer) == (lead < 2 or newer.made_by == table)


NARROW = Relation(7, "public", "t", "d", (RelationColumn("id", 23, -1, True),))
WIDE = Relation(
    7, "public", "t", "d", (*NARROW.columns, RelationColumn("n", 90001, -1, False, "public.mood"))
)
ANOTHER = Relation(8, "public", "t", "d", NARROW.columns)


@given(
    changes=st.lists(st.sampled_from([NARROW, WIDE, ANOTHER]), min_size=1, max_size=12),
    bytes_max=st.sampled_from([1, 1000, 10**6]),
    resumptions=st.integers(0, 3),
    data=st.data(),
)
def test_every_shape_is_announced_once_before_its_first_event(
    changes: list[Relation], bytes_max: int, resumptions: int, data: st.DataObject
) -> None:
    """One transaction with DDL in it, interrupted after any of its parts and resumed there."""
    topic: list[SchemaEvent] = []
    position = Position(0, 100, 0)
    for attempt in range(resumptions + 1):
        known = {(event.schema_, event.table): event for event in topic}
        parts = _transaction(changes, position, known, bytes_max)
        kept = data.draw(st.integers(0, len(parts))) if attempt < resumptions else len(parts)
        topic += [shape for _position, shapes in parts[:kept] for shape in shapes]
        position = parts[kept - 1][0] if kept else position
        if position.commit_lsn and not position.seq:
            break
    expected = [
        (seq, relation.oid, len(relation.columns))
        for seq, relation in enumerate(changes)
        if seq == 0 or changes[seq - 1] is not relation
    ]
    assert [(e.seq, e.oid, len(e.after)) for e in topic] == expected
    assert {e.commit_lsn for e in topic} == {200}
    assert topic[0].before is None
    for earlier, later in itertools.pairwise(topic):
        assert later.before == earlier.after


def _transaction(
    changes: Iterable[Relation],
    start: Position,
    known: dict[tuple[str, str], SchemaEvent],
    bytes_max: int,
) -> list[tuple[Position, list[SchemaEvent]]]:
    shapes = Shapes("bank", known)

    def describe(relation: Relation, stamp: Stamp, seq: int) -> Described:
        return Described(as_it_is(relation), shapes.change(relation, stamp, seq))

    envelope = Envelope("bank", "db", 3, describe, tombstones=True, transaction_metadata=True)
    machine = Assembler(envelope, start, bytes_max)
    messages: list[AnyMessage] = [Begin(200, NOW_US, 77)]
    for _key, run in itertools.groupby(changes):
        described = replace(next(run))  # the server describes a table anew whenever it changes
        messages += [Insert(described, [b"1"] * len(described.columns)) for _ in (0, *run)]
    messages.append(Commit(200, 248, NOW_US))
    batches = [machine.feed(message, 1, NOW_US) for message in messages]
    return [
        (
            batch.position,
            [
                SchemaEvent.model_validate_json(event.value)
                for event in batch.events
                if event.topic == "bank.schema" and event.value is not None
            ],
        )
        for batch in batches
        if batch is not None
    ]


def test_an_uncertain_key_is_asked_for_again_in_the_next_transaction() -> None:
    asked: list[int] = []

    def describe(relation: Relation, stamp: Stamp, _seq: int) -> Described:
        asked.append(stamp.commit_lsn)
        return Described(as_it_is(relation), None, settled=stamp.commit_lsn >= 400)

    envelope = Envelope("bank", "db", 3, describe, tombstones=True, transaction_metadata=True)
    machine = Assembler(envelope, Position(0, 100, 0), 10**6)
    for lsn in (200, 300, 400, 500):
        for message in (
            Begin(lsn, NOW_US, 77),
            Insert(NARROW, [b"1"]),
            Insert(NARROW, [b"2"]),
            Commit(lsn, lsn + 48, NOW_US),
        ):
            machine.feed(message, 1, NOW_US)
    assert asked == [200, 300, 400]
