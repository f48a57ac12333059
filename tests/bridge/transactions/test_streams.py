"""Streamed transactions come out as if they had never been streamed, whatever interleaves."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.errors import Retryable
from services.bridge.events.envelope import Envelope
from services.bridge.pgoutput.decoder import DecodeError, Decoder
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    Commit,
    Frame,
    Insert,
    Message,
    Relation,
    RelationColumn,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.spool import Spool, SpoolFull
from services.bridge.transactions.streams import MessageUnclear, Streams
from services.waiter import Waiter
from tests.promises.bridge.wire import encode, plainly

NOW_US = 1_700_000_000_000_000
ENVELOPE = partial(Envelope, "bank", "db", 1, plainly, tombstones=True, transaction_metadata=True)
TABLE = Relation(7, "public", "t", "d", (RelationColumn("id", 23, -1, True),))


def assembler() -> Assembler:
    return Assembler(ENVELOPE(), Position(0, 100, 0), 4096)


def row(number: int) -> Insert:
    return Insert(TABLE, [str(number).encode()])


@dataclass
class Streamed:
    """A transaction in progress: `changes` are (subxid, row) in order."""

    xid: int
    changes: list[tuple[int, int]]
    aborted: set[int]
    commits: bool
    sent: int = 0
    described: bool = False
    ended: set[int] = field(default_factory=set)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Streamed], list[tuple[Streamed, int]]]:
    """Transactions, and the order and size of their blocks."""
    transactions = []
    for number in range(draw(st.integers(1, 4))):
        xid = 100 * (number + 1)
        subxids = [xid + sub for sub in range(draw(st.integers(1, 4)))]
        order = sorted(draw(st.lists(st.sampled_from(subxids), min_size=1, max_size=12)))
        changes = [(subxid, 1000 * number + n) for n, subxid in enumerate(order)]
        aborted = draw(st.sets(st.sampled_from(subxids))) - {xid}
        transactions.append(Streamed(xid, changes, aborted, draw(st.booleans())))
    blocks = [
        (transaction, draw(st.integers(1, 6)))
        for transaction in transactions
        for _ in transaction.changes
    ]
    return transactions, draw(st.permutations(blocks))


def wire(schedule: list[tuple[Streamed, int]]) -> Iterator[tuple[AnyMessage | None, bytes]]:
    """The messages as the server sends them: (message, None) outside blocks, bytes inside."""
    commit_lsn = 1000
    for transaction, size in schedule:
        if transaction.sent == len(transaction.changes):
            continue
        xid = transaction.xid
        yield StreamStart(xid, transaction.sent == 0), b""
        if not transaction.described:
            transaction.described = True
            yield None, encode(TABLE, xid)
        part = transaction.changes[transaction.sent : transaction.sent + size]
        for subxid, number in part:
            yield None, encode(row(number), subxid)
        transaction.sent += len(part)
        yield StreamStop(), b""
        left = {subxid for subxid, _ in transaction.changes[transaction.sent :]}
        for subxid in transaction.aborted - left - transaction.ended:
            transaction.ended.add(subxid)
            yield StreamAbort(xid, subxid), b""
        if transaction.sent == len(transaction.changes):
            if transaction.commits:
                yield StreamCommit(xid, commit_lsn, commit_lsn + 48, NOW_US), b""
            else:
                yield StreamAbort(xid, xid), b""
            commit_lsn += 100


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "spool"


@given(case=schedules(), memory=st.sampled_from([0, 60, 10**6]))
def test_streamed_transactions_equal_those_sent_whole(
    folder: Path, case: tuple[list[Streamed], list[tuple[Streamed, int]]], memory: int
) -> None:
    _transactions, schedule = case
    spool = Spool(folder, memory_bytes_max=memory, bytes_max=10**9)
    machine = assembler()
    streams = Streams(spool, machine, Decoder())
    plain = assembler()
    streamed: list[EventBatch] = []
    expected: list[EventBatch] = []
    for message, payload in wire(schedule):
        if message is None:
            assert streams.inside
            streams.hold(payload, 1)
            continue
        streamed += [p for p in streams.feed(message, 1, NOW_US) if p is not None]
        if isinstance(message, StreamCommit):
            owner = next(t for t, _ in schedule if t.xid == message.xid)
            expected += _plainly(plain, owner, message)
    assert streamed == expected
    assert not spool.xids
    assert not streams.open_xids
    assert spool.bytes == 0
    spool.close()


def _plainly(machine: Assembler, owner: Streamed, commit: StreamCommit) -> list[EventBatch]:
    kept = [row(number) for subxid, number in owner.changes if subxid not in owner.aborted]
    messages: list[AnyMessage] = [
        Begin(commit.commit_lsn, NOW_US, owner.xid),
        *kept,
        Commit(commit.commit_lsn, commit.end_lsn, NOW_US),
    ]
    found = (machine.feed(message, 1, NOW_US) for message in messages)
    return [batch for batch in found if batch is not None]


@pytest.fixture
def streams(folder: Path) -> Iterator[Streams]:
    spool = Spool(folder, memory_bytes_max=10**6, bytes_max=10**9)
    yield Streams(spool, assembler(), Decoder())
    spool.close()


def test_a_message_that_may_be_rolled_back_is_left_to_the_server(streams: Streams) -> None:
    """pgoutput tells the top-level xid of messages only; others, and other aborts, are harmless."""
    blocks = {1: [Message(True, 5, "app", b"x")], 2: [Message(False, 5, "app", b"x")], 3: []}
    for xid, messages in blocks.items():
        list(streams.feed(StreamStart(xid, True), 1, NOW_US))
        for message in messages:
            streams.hold(encode(message, xid), 1)
        list(streams.feed(StreamStop(), 1, NOW_US))
    for xid in (2, 3):
        list(streams.feed(StreamAbort(xid, xid + 100), 1, NOW_US))
    with pytest.raises(MessageUnclear):
        list(streams.feed(StreamAbort(1, 101), 1, NOW_US))
    list(streams.feed(StreamAbort(1, 1), 1, NOW_US))
    assert streams.open_xids == {2, 3}


@pytest.mark.parametrize(
    "messages",
    [
        [StreamStop()],
        [StreamStart(1, False)],
        [StreamStart(1, True), StreamStart(2, True)],
        [StreamStart(1, True), StreamStop(), StreamStart(1, True)],
        [StreamStart(1, True), StreamCommit(1, 200, 248, NOW_US)],
        [StreamCommit(1, 200, 248, NOW_US)],
    ],
)
def test_a_message_out_of_place_is_an_error(streams: Streams, messages: list[AnyMessage]) -> None:
    with pytest.raises(DecodeError, match="out of place"):
        for message in messages:
            list(streams.feed(message, 1, NOW_US))


def test_bytes_that_belong_to_no_block_are_an_error(streams: Streams) -> None:
    list(streams.feed(StreamStart(1, True), 1, NOW_US))
    for short in (b"", b"I\0"):
        with pytest.raises(DecodeError, match="out of place"):
            streams.hold(short, 1)
    with pytest.raises(DecodeError, match="out of place"):
        streams.hold(encode(Begin(200, NOW_US, 7)), 1)


class Server:
    """pgoutput's cache of one relation (RelationSyncEntry), and what it sends by it.

    Version n of the table has n columns. `invalidate` stands for any change of the table that
    commits: a server of 17.4 does not have transactions in progress describe it anew at once.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.columns = 1
        self.sent = False
        self.streamed: set[int] = set()
        self.subxids: dict[int, int] = {}
        self.stamp = 1000
        self.expected: list[int] = []

    def invalidate(self, _xid: int) -> None:
        self.columns, self.sent, self.streamed = self.columns + 1, False, set()

    def plain(self, _xid: int) -> None:
        self.stamp += 100
        self._send(Begin(self.stamp, NOW_US, 9))
        if not self.sent:
            self._send(self._relation())
            self.sent = True
        self._send(self._row())
        self._send(Commit(self.stamp, self.stamp + 48, NOW_US))
        self.expected.append(self.columns)

    def stream(self, xid: int) -> None:
        first = xid not in self.subxids
        subxid = self.subxids.setdefault(xid, xid + 1)
        self._send(StreamStart(xid, first))
        if xid not in self.streamed:
            self._send(self._relation(), subxid)
            self.streamed.add(xid)
        self._send(self._row(), subxid)
        self._send(StreamStop())

    def roll_back_to_savepoint(self, xid: int) -> None:
        if xid in self.subxids:
            self._send(StreamAbort(xid, self.subxids[xid]))
            self.subxids[xid] += 1
            self.streamed.discard(xid)

    def commit(self, xid: int) -> None:
        if self.subxids.pop(xid, None) is not None:
            self.stamp += 100
            self._send(StreamCommit(xid, self.stamp, self.stamp + 48, NOW_US))
            self.sent = self.sent or xid in self.streamed
            self.streamed.discard(xid)

    def _relation(self) -> Relation:
        names = [RelationColumn(f"c{n}", 23, -1, not n) for n in range(self.columns)]
        return Relation(7, "public", "t", "d", tuple(names))

    def _row(self) -> Insert:
        return Insert(self._relation(), [b"1"] * self.columns)

    def _send(self, message: AnyMessage, xid: int | None = None) -> None:
        self.pipeline.take(encode(message, xid), 1, NOW_US)


RENAMED_BETWEEN = [
    (Server.stream, 100),
    (Server.invalidate, 0),
    (Server.plain, 0),
    (Server.commit, 100),
    (Server.plain, 0),
]


@example(RENAMED_BETWEEN)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    Server.invalidate,
                    Server.plain,
                    Server.stream,
                    Server.roll_back_to_savepoint,
                    Server.commit,
                ]
            ),
            st.sampled_from([100, 200]),
        ),
        max_size=20,
    )
)
def test_a_row_has_the_shape_that_the_server_described_last(
    folder: Path, steps: list[tuple[Callable[[Server, int], None], int]]
) -> None:
    found: list[EventBatch] = []
    with contextlib.closing(Spool(folder, memory_bytes_max=10**6, bytes_max=10**9)) as spool:
        pipeline = Pipeline(
            *(spool, assembler()),
            emit=found.append,
            waiter=Waiter(),
            prepared_topic="p",
            slot="s",
        )
        server = Server(pipeline)
        for step, xid in steps:
            step(server, xid)
    values = [json.loads(event.value or b"{}") for batch in found for event in batch.events]
    rows = [value for value in values if value.get("after")]
    plain = [len(row["after"]) for row in rows if row["source"]["txId"] == 9]
    assert plain == server.expected


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2**32 - 1), st.binary(max_size=2000)),
        max_size=40,
    ),
    st.sampled_from([0, 500, 10**6]),
)
def test_the_spool_gives_back_what_it_was_given(
    folder: Path, given_frames: list[tuple[int, int, bytes]], memory: int
) -> None:
    spool = Spool(folder, memory_bytes_max=memory, bytes_max=10**9)
    for xid, subxid, payload in given_frames:
        spool.append(xid, Frame(subxid, 5, payload))
    for xid in (1, 2, 3):
        expected = [Frame(subxid, 5, payload) for x, subxid, payload in given_frames if x == xid]
        assert list(spool.replay(xid)) == expected
        spool.drop(xid)
    assert spool.bytes == 0
    assert not list(folder.iterdir())
    spool.close()


def test_a_full_spool_says_so_and_a_new_one_starts_empty(folder: Path) -> None:
    spool = Spool(folder, memory_bytes_max=100, bytes_max=1000)
    with pytest.raises(SpoolFull, match="spool_bytes_max"):
        for number in range(1000):
            spool.append(1, Frame(1, number, number.to_bytes(30)))
    with pytest.raises(Retryable, match="another bridge uses this spool folder"):
        Spool(folder, memory_bytes_max=100, bytes_max=1000)
    spool.close()
    fresh = Spool(folder, memory_bytes_max=100, bytes_max=1000)
    assert fresh.bytes == 0
    assert list(fresh.replay(1)) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    fresh.close()
