"""What is left out, for any order in which Debezium has written, crashed and begun again."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded
from schemas.events import SETTLED_KEY
from services.adoption.last_records import DebeziumRecord, Tails, Transaction, said
from services.adoption.overlap import LeftOut
from services.adoption.tails import may_be_removed
from services.bridge.events.event import Event

TOPIC, PREFIX = "p.public.t", "p"
KEYS = 3


class Change(NamedTuple):
    """Of one key; `lsn` is its own, `xid` its transaction's."""

    key: int
    op: str
    xid: int
    lsn: int

    @property
    def key_bytes(self) -> bytes:
        return b'{"id":%d}' % self.key


class Told(NamedTuple):
    """A record: an event, or the tombstone behind a delete; `ours`: of a bridge."""

    change: Change
    tombstone: bool = False
    ours: bool = False


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Transaction], list[Change]]:
    """Transactions in commit order, with their changes; several of one LSN, as COPY makes them."""
    transactions, changes = [], []
    lsn = 100
    for xid in range(1, draw(st.integers(1, 8)) + 1):
        for _ in range(draw(st.integers(1, 3))):
            lsn += 10
            keys = sorted(draw(st.sets(st.integers(0, KEYS - 1), min_size=1)))
            changes += [Change(key, draw(st.sampled_from("cud")), xid, lsn) for key in keys]
        lsn += 10
        transactions.append(Transaction(xid, lsn, lsn + 8, lsn))
        lsn += 8
    return transactions, changes


@st.composite
def logs(draw: st.DrawFn, changes: list[Change]) -> tuple[list[list[Told]], int]:
    """A log for each of two partitions, and up to which transaction the slot is confirmed.

    A run begins behind the confirmed transaction, and is cut anywhere in each partition. It may be
    a bridge's: the slot was given back before.
    """
    partitions: list[list[Told]] = [[], []]
    confirmed = 0
    last = max(change.xid for change in changes)
    for _ in range(draw(st.integers(1, 3))):
        whole, ours = last, draw(st.booleans())
        for number, log in enumerate(partitions):
            told: list[Told] = []
            for change in changes:
                if change.xid > confirmed and change.key % 2 == number:
                    told.append(Told(change, ours=ours))
                    if change.op == "d":
                        told.append(Told(change, True, ours))
            cut = draw(st.integers(0, len(told)))
            log += told[:cut]
            if cut < len(told):
                whole = min(whole, told[cut].change.xid - 1)
        confirmed = draw(st.integers(confirmed, max(confirmed, whole)))
    return partitions, confirmed


@given(st.data())
def test_each_key_goes_on_behind_its_last_record(data: st.DataObject) -> None:
    transactions, changes = data.draw(histories())
    partitions, confirmed = data.draw(logs(changes))
    tails = Tails(PREFIX, 0)
    for number, log in enumerate(partitions):
        for offset, told in enumerate(log):
            tails.take(record_of(told, number, offset))
    slot_lsn = next((one.end_lsn for one in transactions if one.xid == confirmed), 0)
    again = {one.xid: one for one in transactions if one.xid > confirmed}
    beyond = tails.beyond(slot_lsn, again, {})
    left_out = LeftOut(beyond, again, 0)
    everything = [
        told
        for change in changes
        for told in [Told(change), *([Told(change, True)] if change.op == "d" else [])]
    ]
    ours = [
        told
        for told in everything
        if (one := again.get(told.change.xid))
        and (
            one.commit_lsn >= beyond.end_lsn
            or left_out.takes(event_of(told), told.change.xid, told.change.lsn)
        )
    ]
    left_out.finish()
    for key in range(KEYS):
        of_key = [told for told in everything if told.change.key == key]
        there = [told for told in partitions[key % 2] if told.change.key == key]
        theirs = [told._replace(ours=False) for told in there]
        start = of_key.index(theirs[-1]) + 1 if theirs else 0
        before = [told for told in of_key if told.change.xid <= confirmed]
        assert [told for told in ours if told.change.key == key] == of_key[
            max(start, 0 if theirs else len(before)) :
        ]


def record_of(told: Told, partition: int, offset: int) -> DebeziumRecord:
    change = told.change
    source = {"commit_lsn": 1} if told.ours else {}
    value = None if told.tombstone else value_of(change.xid, change.lsn, change.op, source)
    return DebeziumRecord(TOPIC, partition, offset, 0, change.key_bytes, value)


def value_of(
    xid: int, lsn: int, op: str, also: Mapping[str, int] = MappingProxyType({}), **more: Any
) -> bytes:
    source = {"connector": "postgresql", "name": PREFIX, "ts_ms": 0, "txId": xid, "lsn": lsn}
    source |= also
    return json.dumps({"op": op, "before": None, "after": None, "source": source, **more}).encode()


def event_of(told: Told) -> Event:
    change = told.change
    value = None if told.tombstone else b"{}"
    return Event(TOPIC, change.key_bytes, value, None, False, "public.t", 0, change.lsn)


def row(xid: int, lsn: int, after: Any) -> tuple[DebeziumRecord, Event]:
    """A row of a table without a key, as both tell it."""
    theirs = DebeziumRecord(TOPIC, 0, lsn, 0, None, value_of(xid, lsn, "c", after=after))
    ours = json.dumps({"op": "c", "before": None, "after": after}).encode()
    return theirs, Event(TOPIC, None, ours, None, False, "public.t", 0, lsn)


def flat_row(xid: int, lsn: int, after: Any) -> tuple[DebeziumRecord, Event]:
    """As `row`, flat."""
    fields = {"__op": "c", "__deleted": "false", "__txId": xid, "__lsn": lsn}
    theirs = json.dumps({**after, **fields, "__source_ts_ms": 0}).encode()
    ours = json.dumps({**fields, "__commit_lsn": 200, "__seq": 0, **after}).encode()
    return DebeziumRecord(TOPIC, 0, lsn, 0, None, theirs), Event(
        TOPIC, None, ours, None, False, "public.t", 0, lsn
    )


@pytest.mark.parametrize("row", [row, flat_row])
def test_rows_without_a_key_are_counted(
    row: Callable[[int, int, Any], tuple[DebeziumRecord, Event]],
) -> None:
    """Three rows of one LSN, two of them equal: one of these and the other one are there."""
    rows = [row(5, 100, {"a": 1}), row(5, 100, {"a": 1}), row(5, 100, {"a": 2})]
    again = {5: Transaction(5, 200, 208, 0)}
    tails = Tails(PREFIX, 0)
    for theirs, _ in (rows[0], rows[2]):
        tails.take(theirs)
    left_out = LeftOut(tails.beyond(50, again, {}), again, 0)
    assert [left_out.takes(ours, 5, 100) for _, ours in rows] == [False, True, False]
    left_out.finish()


def test_a_record_that_is_decoded_as_something_else_is_refused() -> None:
    theirs, _ = row(5, 100, {"a": "1.50"})
    _, ours = row(5, 100, {"a": "BigA"})
    again = {5: Transaction(5, 200, 208, 0)}
    tails = Tails(PREFIX, 0)
    tails.take(theirs)
    left_out = LeftOut(tails.beyond(50, again, {}), again, 0)
    assert left_out.takes(ours, 5, 100)
    with pytest.raises(OperatorNeeded, match="not what the slot decodes"):
        left_out.finish()


def test_an_event_that_the_server_lacks_is_refused() -> None:
    tails = Tails(PREFIX, 0)
    tails.take(record_of(Told(Change(1, "u", 77, 500)), 0, 0))
    with pytest.raises(OperatorNeeded, match="does not decode"):
        tails.beyond(400, {5: Transaction(5, 450, 458, 0)}, {})


def test_events_that_kafka_lacks_are_counted() -> None:
    again = {5: Transaction(5, 200, 208, 0), 6: Transaction(6, 300, 308, 0)}
    tails = Tails(PREFIX, 0)
    tails.take(record_of(Told(Change(1, "u", 6, 250)), 0, 0))
    left_out = LeftOut(tails.beyond(50, again, {}), again, 208)
    assert left_out.takes(event_of(Told(Change(2, "u", 5, 120))), 5, 120)
    assert not left_out.takes(event_of(Told(Change(1, "u", 6, 250))), 6, 250)
    assert left_out.lacking == Counter({TOPIC: 1})


def test_flat_rows_contain_their_position() -> None:
    fields = {"__op": "d", "__source_txId": 7, "__source_lsn": 9, "__source_ts_ms": 1000}
    found = said(json.dumps({"schema": {}, "payload": {"id": 1, **fields}}).encode(), PREFIX)
    assert found is not None and found[:4] == (7, 9, "d", 1000) and not found.ours
    assert said(json.dumps({**fields, "__op": "r"}).encode(), PREFIX) is None
    ours = said(json.dumps({**fields, "__commit_lsn": 5}).encode(), PREFIX)
    assert ours is not None and ours.ours
    for lacking in fields:
        rest = {name: value for name, value in fields.items() if name != lacking}
        with pytest.raises(ValueError, match="not an event"):
            said(json.dumps(rest).encode(), PREFIX)


def test_other_records_are_refused_and_rows_of_snapshots_are_not() -> None:
    tails = Tails(PREFIX, 0)
    snapshot = value_of(0, 1, "r")
    tails.take(DebeziumRecord(TOPIC, 0, 0, 0, b"k", snapshot))
    assert not tails.last
    for value in (b"x", b"{}", b"[]", value_of(1, 1, "c").replace(b'"p"', b'"q"')):
        with pytest.raises(OperatorNeeded, match="not an event of Debezium"):
            tails.take(DebeziumRecord(TOPIC, 0, 1, 0, b"k", value))


def test_heartbeats_of_a_bridge_that_debezium_has_published_are_passed_over() -> None:
    tails = Tails(PREFIX, 0)
    for prefix in ("slotbridge", "mark"):
        value = value_of(7, len(prefix), "m", message={"prefix": prefix, "content": ""})
        tails.take(DebeziumRecord("p.message", 0, 0, 0, b"k", value))
    assert [*tails.messages] == [("p.message", len("mark"))]


def test_a_tombstone_whose_delete_is_gone_is_refused() -> None:
    """Compaction leaves it alone: it does not tell which change it was."""
    deleted = Told(Change(1, "d", 5, 120))
    alone = record_of(deleted._replace(tombstone=True), 0, 7)
    first = Tails(PREFIX, 0)
    first.take(alone)  # its delete is before what is read
    looked_at = Tails(PREFIX, 0)
    looked_at.look(record_of(deleted, 0, 6))
    looked_at.take(alone)
    settled = Tails(PREFIX, 0)
    settled.take(record_of(Told(Change(2, "u", 5, 110)), 0, 5))
    settled.take(alone._replace(key=SETTLED_KEY))
    with pytest.raises(OperatorNeeded, match="the topic was compacted") as raised:
        settled.take(alone)
    assert raised.value.subject == f"{TOPIC}[0]@7"


def test_records_before_the_first_change_are_checked_for_their_time_only() -> None:
    tails = Tails(PREFIX, 30_000)
    tails.look(DebeziumRecord(TOPIC, 0, 0, 0, b"k", b"anything"))
    tails.look(record_of(Told(Change(1, "u", 77, 500)), 0, 1))
    assert not tails.last and tails.samples[TOPIC].offset == 1
    source = {"connector": "postgresql", "name": PREFIX, "ts_ms": 90_000, "txId": 1, "lsn": 1}
    value = json.dumps({"op": "c", "source": source}).encode()
    with pytest.raises(OperatorNeeded, match="50 s"):
        tails.look(DebeziumRecord(TOPIC, 0, 2, 40_000, b"k", value))


def test_what_retention_may_have_removed() -> None:
    since_ms = time.time_ns() // 1_000_000 - 10_000
    kept = {"retention.ms": "60000", "retention.bytes": "-1"}
    assert not may_be_removed(kept, since_ms)
    for other in ({"retention.ms": "5000"}, {"retention.bytes": "9"}, {"retention.ms": "-1"}):
        assert may_be_removed({**kept, **other}, since_ms)
    assert may_be_removed(None, since_ms)


def test_a_clock_that_is_behind_is_refused() -> None:
    source = {"connector": "postgresql", "name": PREFIX, "ts_ms": 90_000, "txId": 1, "lsn": 1}
    value = json.dumps({"op": "c", "source": source}).encode()
    Tails(PREFIX, 60_000).take(DebeziumRecord(TOPIC, 0, 0, 40_000, b"k", value))
    with pytest.raises(OperatorNeeded, match="50 s"):
        Tails(PREFIX, 30_000).take(DebeziumRecord(TOPIC, 0, 0, 40_000, b"k", value))
