"""EventBatches come out whole, in commit order, once, whatever the point of resumption."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events import MARKER_PREFIX, MessageEnvelope, TransactionEvent
from schemas.events import Envelope as EnvelopeContract
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event
from services.bridge.pgoutput.decoder import DecodeError
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
    StreamStart,
    Truncate,
    Update,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler, EventBatch
from tests.promises.bridge.wire import plainly

TABLE = Relation(
    7,
    "public",
    "account",
    "d",
    (RelationColumn("id", 23, -1, True), RelationColumn("note", 25, -1, False)),
)
KEYLESS = Relation(8, "public", "history", "n", (RelationColumn("delta", 23, -1, False),))
NOW_US = 1_700_000_000_000_000


START = Position(0, 100, 0)


def assembler(
    start: Position = START, bytes_max: int = 10**9, counts: Mapping[str, int] | None = None
) -> Assembler:
    envelope = Envelope("bank", "db", 3, plainly, tombstones=True, transaction_metadata=True)
    return Assembler(envelope, start, bytes_max, counts)


def transaction(commit_lsn: int, *changes: AnyMessage) -> list[AnyMessage]:
    return [
        Begin(commit_lsn, NOW_US, 77),
        *changes,
        Commit(commit_lsn, commit_lsn + 48, NOW_US),
    ]


def batches(machine: Assembler, messages: Iterable[AnyMessage]) -> list[EventBatch]:
    """What comes out, without the transaction topic."""
    fed = (machine.feed(message, 1, NOW_US) for message in messages)
    return [
        batch._replace(events=[e for e in batch.events if e.topic != "bank.transaction"])
        for batch in fed
        if batch is not None
    ]


def raw_batches(machine: Assembler, messages: Iterable[AnyMessage]) -> list[EventBatch]:
    fed = (machine.feed(message, 1, NOW_US) for message in messages)
    return [batch for batch in fed if batch is not None]


def row(number: int, note: bytes | None = b"x") -> list[Any]:
    return [str(number).encode(), note]


def parsed(event: Event) -> EnvelopeContract:
    assert event.value is not None
    return EnvelopeContract.model_validate_json(event.value)


def test_every_kind_of_change_keeps_the_contract() -> None:
    (batch,) = batches(
        assembler(),
        transaction(
            200,
            Insert(TABLE, row(1)),
            Update(TABLE, None, None, row(1, b"y")),
            Update(TABLE, "K", row(1, None), row(2, b"y")),
            Delete(TABLE, "K", row(2, None)),
            Insert(KEYLESS, [b"5"]),
            Truncate((TABLE, KEYLESS), False, False),
        ),
    )
    assert [e.key for e in batch.events] == [
        b'{"id":1}',
        b'{"id":1}',
        b'{"id":1}',
        b'{"id":1}',
        b'{"id":2}',
        b'{"id":2}',
        b'{"id":2}',
        None,
        None,
        None,
    ]
    valued = [parsed(e) for e in batch.events if e.value is not None]
    assert [e.op for e in valued] == ["c", "u", "d", "c", "d", "c", "t", "t"]
    assert [e.source.seq for e in valued] == list(range(8))
    orders = [
        (e.source.table, e.transaction.total_order, e.transaction.data_collection_order)
        for e in valued
        if e.transaction is not None and e.transaction.id == "77:200"
    ]
    accounts = [("account", n, n) for n in range(1, 6)]
    assert orders == [*accounts, ("history", 6, 1), ("account", 7, 6), ("history", 8, 2)]
    assert {(e.source.commit_lsn, e.source.timeline, e.source.txId) for e in valued} == {
        (200, 3, 77)
    }
    assert valued[3].after == {"id": 2, "note": "y"}
    assert [e.broadcast for e in batch.events if e.value][-2:] == [True, True]
    assert batch.events[2].headers == [("__debezium.newkey", b'{"id":2}')]
    assert batch.events[4].headers == [("__debezium.oldkey", b'{"id":1}')]
    assert batch.position == Position(200, 248, 0)


def test_an_unchanged_value_is_the_placeholder_or_comes_from_the_old_row() -> None:
    (batch,) = batches(
        assembler(),
        transaction(
            200,
            Update(TABLE, None, None, [b"1", UNCHANGED]),
            Update(TABLE, "O", row(1, b"big"), [b"1", UNCHANGED]),
        ),
    )
    after = [parsed(event).after for event in batch.events]
    assert after == [
        {"id": 1, "note": "__debezium_unavailable_value"},
        {"id": 1, "note": "big"},
    ]


def test_messages_inside_and_outside_a_transaction() -> None:
    machine = assembler()
    out = batches(
        machine,
        [
            Message(False, 150, MARKER_PREFIX, b"\0\1"),
            *transaction(
                200, Message(True, 190, "slotbridge", b""), Message(True, 195, MARKER_PREFIX, b"")
            ),
        ],
    )
    assert [p.position for p in out] == [Position(149, 150, 0), Position(200, 248, 0)]
    (outside,) = out[0].events
    (inside,) = out[1].events
    assert outside.value is not None and inside.value is not None
    assert MessageEnvelope.model_validate_json(outside.value).message.content == "AAE="
    assert MessageEnvelope.model_validate_json(inside.value).source.seq == 0


def test_a_message_that_ends_where_a_commit_begins_hides_nothing() -> None:
    """pgoutput gives a non-transactional message the LSN after its record."""
    stream: list[AnyMessage] = [
        Message(False, 200, MARKER_PREFIX, b""),
        *transaction(200, Insert(TABLE, row(1))),
    ]
    first, second = batches(assembler(), stream)
    (again,) = batches(assembler(first.position), stream)
    assert identities([second]) == identities([again]) == [(200, 0, "c")]
    assert first.events[0].value is not None
    source = MessageEnvelope.model_validate_json(first.events[0].value).source
    assert source.commit_lsn < 200


def test_earlier_transactions_do_not_discard_a_resumed_ones_events() -> None:
    large = transaction(900, *(Insert(TABLE, row(n)) for n in range(9)))
    whole = raw_batches(assembler(bytes_max=1500), large)
    start = whole[0].position
    assert start == Position(900, 100, start.seq)
    assert start.seq > 0
    machine = assembler(start, 1500)
    kept = machine.advance(400)
    assert kept is not None
    assert kept.position == Position(900, 400, start.seq)
    (between,) = batches(machine, transaction(500))
    assert between.position == Position(900, 548, start.seq)
    (message,) = batches(machine, [Message(False, 600, MARKER_PREFIX, b"")])
    assert message.position == Position(900, 600, start.seq)
    again = batches(assembler(message.position, 1500), large)
    assert identities(whole[:1]) + identities(again) == identities(whole)


def test_a_keepalive_moves_the_position_only_between_transactions() -> None:
    machine = assembler()
    assert machine.advance(90) is None
    assert machine.advance(180) == EventBatch([], Position(0, 180, 0), 0, 0)
    machine.feed(Begin(200, NOW_US, 77), 1, NOW_US)
    assert machine.advance(500) is None


@pytest.mark.parametrize(
    "messages",
    [
        [Insert(TABLE, row(1))],
        [Commit(200, 248, NOW_US)],
        [Begin(200, NOW_US, 1), Begin(300, NOW_US, 2)],
        [Begin(200, NOW_US, 1), Commit(300, 348, NOW_US)],
        [Message(True, 1, MARKER_PREFIX, b"")],
        [StreamStart(1, True)],
    ],
)
def test_a_message_out_of_place_is_an_error(messages: list[AnyMessage]) -> None:
    with pytest.raises(DecodeError, match="out of place"):
        batches(assembler(), messages)


def identities(found: Iterable[EventBatch]) -> list[tuple[int, int, str]]:
    events = [
        json.loads(event.value)
        for batch in found
        for event in batch.events
        if event.value is not None and event.topic != "bank.transaction"
    ]
    return [(e["source"]["commit_lsn"], e["source"]["seq"], e["op"]) for e in events]


def boundaries(found: Iterable[EventBatch]) -> list[TransactionEvent]:
    return [
        TransactionEvent.model_validate_json(event.value)
        for batch in found
        for event in batch.events
        if event.topic == "bank.transaction" and event.value is not None
    ]


changes = st.lists(
    st.sampled_from(
        [
            Insert(TABLE, row(1)),
            Update(TABLE, "K", row(1, None), row(2)),
            Update(TABLE, "O", row(1), row(1, b"y")),
            Delete(TABLE, "K", row(2, None)),
            Truncate((TABLE, KEYLESS), False, False),
            Message(True, 195, MARKER_PREFIX, b"x"),
        ]
    ),
    max_size=8,
)


@given(st.lists(changes, min_size=1, max_size=6), st.integers(300, 3000), st.data())
def test_resumed_anywhere_nothing_is_lost_and_nothing_repeated(
    bodies: list[list[AnyMessage]], bytes_max: int, data: st.DataObject
) -> None:
    stream = [m for n, body in enumerate(bodies) for m in transaction(200 + 100 * n, *body)]
    whole = batches(assembler(bytes_max=bytes_max), stream)
    raw = raw_batches(assembler(bytes_max=bytes_max), stream)
    cut = data.draw(st.integers(0, len(whole)))
    start, counts = (whole[cut - 1].position, whole[cut - 1].counts) if cut else (START, None)
    again = batches(assembler(start, bytes_max, counts), stream)
    assert identities(whole[:cut]) + identities(again) == identities(whole)
    ends = [p.position.end_lsn for p in whole]
    assert ends == sorted(ends)
    later = raw_batches(assembler(start, bytes_max, counts), stream)
    resumed = boundaries(raw[:cut]) + boundaries(later)
    assert resumed == boundaries(raw)
    truth = Counter(commit_lsn for commit_lsn, _seq, _op in identities(whole))
    assert [b.status for b in resumed] == ["BEGIN", "END"] * len(truth)
    for end in resumed[1::2]:
        assert end.event_count == truth[end.commit_lsn]
        messages = sum(e[0] == end.commit_lsn and e[2] == "m" for e in identities(whole))
        rows = sum(c.event_count for c in end.data_collections or ())
        assert end.event_count == rows + messages


def test_a_transaction_resumed_before_its_first_event_has_a_begin() -> None:
    """The part that Kafka has was schema events alone: BEGIN has not been written."""
    resumed = assembler(Position(200, 100, 1), counts={})
    stream = transaction(200, Delete(TABLE, "K", row(1, None)), Insert(TABLE, row(2)))
    assert [b.status for b in boundaries(raw_batches(resumed, stream))] == ["BEGIN", "END"]
