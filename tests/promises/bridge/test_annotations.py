"""Annotations: headers on each event of a transaction, however it is cut, streamed or prepared."""

import json
import signal
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.events import HEARTBEAT_PREFIX
from schemas.shaping import ShapingSettings
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event, Stamp
from services.bridge.events.schema_events import Shapes
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler, EventBatch
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import Record, read_committed
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Provider

ANNOTATIONS: dict[str, Any] = {"annotations": {"message_prefix": "audit"}}
EMIT = "SELECT pg_logical_emit_message(true, 'audit', %s)"
NOW_US = 1_700_000_000_000_000
T = Relation(7, "public", "t", "d", (RelationColumn("id", 23, -1, True),))
changes = st.lists(
    st.one_of(
        st.just(Message(True, 9, "audit", b"who")),
        st.just(Message(True, 9, "audit", b"why")),
        st.just(Message(True, 9, "other", b"x")),
        st.just(Message(True, 9, HEARTBEAT_PREFIX, b"")),
        st.integers(0, 9).map(lambda n: Insert(T, [b"%d" % n])),
        st.integers(0, 9).map(lambda n: Delete(T, "K", [b"%d" % n])),
    ),
    max_size=12,
)


def assembler(start: Position, counts: dict[str, int] | None = None, size: int = 600) -> Assembler:
    shaping = Shaping(ShapingSettings(**ANNOTATIONS), "bank")
    shapes = Shapes("bank", {})

    def describe(found: Relation, stamp: Stamp, seq: int) -> Described:
        plan = shaping.plan(found)
        return Described(plan, shapes.change(plan.relation, stamp, seq))

    envelope = Envelope(*("bank", "db", 3, describe), tombstones=True, transaction_metadata=True)
    return Assembler(envelope, start, size, counts, shaping)


def run(machine: Assembler, found: list[AnyMessage]) -> list[EventBatch]:
    messages = [Begin(200, NOW_US, 77), *found, Commit(200, 248, NOW_US)]
    return [one for one in (machine.feed(m, 9, NOW_US) for m in messages) if one is not None]


def sent(batches: list[EventBatch]) -> list[Event]:
    return [event for batch in batches for event in batch.events]


def told(batches: list[EventBatch]) -> list[tuple[Any, ...]]:
    """What a resumption must not change; schema events come once a session in this test."""
    return [(*e[:2], e.headers, e.seq) for e in sent(batches) if e.topic != "bank.schema"]


def annotations_of(event: Event) -> list[bytes]:
    return [value for name, value in event.headers or () if name == "annotation"]  # type: ignore[misc]


@given(changes, st.data())
def test_each_event_has_what_stands_at_the_beginning_also_after_a_resumption(
    found: list[AnyMessage], data: st.DataObject
) -> None:
    expected: list[bytes] = []
    for message in found:
        if isinstance(message, Message) and message.prefix == HEARTBEAT_PREFIX:
            continue
        if not isinstance(message, Message) or message.prefix != "audit":
            break
        expected.append(message.content)
    batches = run(assembler(Position(0, 100, 0)), found)
    for event in sent(batches):
        assert annotations_of(event) == ([] if event.topic == "bank.schema" else expected)
    later = [m for m in found if isinstance(m, Message) and m.prefix == "audit"]
    published = [e for e in sent(batches) if e.topic == "bank.message"]
    assert len(published) == len(later) - len(expected)
    assert sum(batch.bytes for batch in batches) >= sum(
        len(name) + len(value or b"")
        for event in sent(batches)
        for name, value in event.headers or ()
        if event.topic != "bank.transaction"
    )
    cut = data.draw(st.integers(1, len(batches)))
    last = batches[cut - 1]
    resumed = run(assembler(last.position, dict(last.counts or {})), found)
    assert told(batches[cut:]) == told(resumed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"annotations": {"message_prefix": "slotbridge.x"}},
        {"annotations": {"message_prefix": "a", "header": "commit_lsn"}},
        {"annotations": {"message_prefix": "a", "header": "__op"}},
        {"annotations": {"message_prefix": "a"}, "outbox": {"message_prefix": "a"}},
    ],
)
def test_settings_that_would_confuse_records_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ShapingSettings.model_validate(wrong)


def headers(bridge: Bridge, *topics: str) -> dict[str, list[Record]]:
    """The committed records of these topics by the value of their header."""
    found: dict[str, list[Record]] = {}
    names = [f"{bridge.prefix}.{topic}" for topic in topics]
    for record in read_committed(bridge.kafka.bootstrap_servers, names):
        value = record.headers.get("annotation", b"")
        assert isinstance(value, bytes)
        found.setdefault(value.decode(), []).append(record)
    return found


@pytest.mark.long
def test_streamed_prepared_and_interrupted_transactions_keep_their_annotations(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    settings: dict[str, Any] = {
        "shaping": ANNOTATIONS,
        "two_phase": True,
        "transaction_bytes_max": 2**18,
        "spool_memory_bytes_max": 2**16,
    }
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        bridge = new_bridge(conninfo, **settings)
        bridge.start(SLOTBRIDGE_FAILPOINT="between parts:3").streaming()
        connection.execute("INSERT INTO t VALUES (-1, 'without')")
        with connection.transaction():
            connection.execute(EMIT, ['{"user":"ada"}'])
            connection.execute(
                "INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(1, 20000) g"
            )
        assert bridge.exit_code() == -signal.SIGKILL
        assert 0 < bridge.progress()[-1].position.seq < 20000
        bridge.start().streaming()
        for statement in (
            "BEGIN",
            "SELECT pg_logical_emit_message(true, 'audit', 'bea')",
            "UPDATE t SET v = 'y' WHERE id BETWEEN 1 AND 3000",
            "DELETE FROM t WHERE id = 1",
            "SELECT pg_logical_emit_message(true, 'audit', 'late')",
            f"PREPARE TRANSACTION '{fresh_database}'",
        ):
            connection.execute(statement.encode())
        bridge.caught_up()
        bridge.kill()
        bridge.start().streaming()
        connection.execute(f"COMMIT PREPARED '{fresh_database}'".encode())
        connection.execute("INSERT INTO t VALUES (-2, 'without')")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    found = headers(bridge, "public.t", "transaction", "message")
    assert {value: len(records) for value, records in found.items()} == {
        "": 2 * (1 + 2),
        '{"user":"ada"}': 20000 + 2,
        "bea": 3000 + 2 + 1 + 2,  # a tombstone, the late message
    }
    [late] = [r for r in found["bea"] if r.topic.endswith(".message")]
    assert json.loads(late.value or b"")["op"] == "m"
    assert len(bridge.identities("t")) == 20000 + 3001 + 2
    assert set(bridge.identities("t").values()) == {1}
    bridge.assert_kafka_equals(conninfo, "t")
