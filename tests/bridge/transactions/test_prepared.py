"""Prepared transactions come out as ordinary ones would at their commit, after any crash."""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded
from schemas.events import PreparedKey
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event
from services.bridge.pgoutput.decoder import DecodeError
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Frame,
    Insert,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from services.bridge.progress.ledger import Position
from services.bridge.recovery import staged_transactions
from services.bridge.recovery.staged_transactions import load_staged
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.spool import Spool
from services.bridge.transactions.staging import read_frames, staged_parts
from services.kafka.records import Record
from services.waiter import Waiter
from tests.promises.bridge.wire import encode, plainly

NOW_US = 1_700_000_000_000_000
START = Position(0, 100, 0)
TABLES = [
    Relation(oid, "public", f"t{oid}", "d", (RelationColumn("id", 23, -1, True),)) for oid in (7, 8)
]


@dataclass
class Topic:
    """The records of <prefix>.prepared, in memory."""

    topic: str = "p.prepared"
    records: list[Record] = field(default_factory=list)

    def bounds(self) -> tuple[int, int]:
        return 0, len(self.records)

    def between(self, start: int, stop: int, _deadline: float) -> Iterator[Record]:
        yield from self.records[start:stop]

    def add(self, event: Event) -> None:
        self.records.append((len(self.records), event.key, event.value))

    def live(self) -> set[bytes]:
        last = {key: value for _, key, value in self.records}
        return {key for key, value in last.items() if value is not None}  # type: ignore[misc]


@dataclass(frozen=True)
class Unit:
    """Messages that the server sends again unless `end_lsn` is confirmed."""

    end_lsn: int
    payloads: list[bytes]
    plain: list[AnyMessage]
    """What an ordinary transaction with the same effect would have been."""


@dataclass(frozen=True)
class Transaction:
    kind: str  # ordinary, whole, streamed
    rows: list[tuple[int, int]]  # (table, subtransaction)
    aborted: set[int]
    verdict: str  # commit, rollback, open


transactions = st.builds(
    Transaction,
    st.sampled_from(["ordinary", "whole", "whole", "streamed"]),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=6),
    st.sets(st.integers(1, 2)),
    st.sampled_from(["commit", "commit", "rollback", "open"]),
)


def units(chosen: list[Transaction], order: list[int]) -> Iterator[Unit]:
    """The server's messages: each transaction's PREPARE in turn, its decision `order` later."""
    clock = itertools.count(1000, 100)
    waiting: list[tuple[int, Transaction, int]] = []
    for number, transaction in enumerate(chosen):
        xid = 100 * (number + 1)
        yield _first(transaction, xid, next(clock))
        if transaction.kind != "ordinary" and transaction.verdict != "open":
            waiting.append((number + order[number], transaction, xid))
        for due in [w for w in waiting if w[0] <= number]:
            waiting.remove(due)
            yield _decision(due[1], due[2], next(clock))
    for _, transaction, xid in waiting:
        yield _decision(transaction, xid, next(clock))


def _rows(transaction: Transaction, xid: int) -> list[tuple[int, Insert]]:
    return [
        (xid + sub, Insert(TABLES[table], [str(xid + number).encode()]))
        for number, (table, sub) in enumerate(transaction.rows)
    ]


def _first(transaction: Transaction, xid: int, lsn: int) -> Unit:
    rows = _rows(transaction, xid)
    end = (lsn, lsn + 48, NOW_US, xid, f"gid {xid}")
    described = [encode(relation) for relation in TABLES]
    if transaction.kind == "ordinary":
        messages: list[AnyMessage] = [
            Begin(lsn, NOW_US, xid),
            *(row for _, row in rows),
            Commit(lsn, lsn + 48, NOW_US),
        ]
        return Unit(lsn + 48, described + [encode(m) for m in messages], messages)
    if transaction.kind == "whole":
        prepared: list[AnyMessage] = [BeginPrepare(*end), *(row for _, row in rows), Prepare(*end)]
        sent = [encode(m) for m in prepared]
        return Unit(lsn + 48, [*sent[:1], *described, *sent[1:]], [])
    sent = [encode(StreamStart(xid, True))]
    sent += [encode(relation, xid) for relation in TABLES]
    sent += [encode(row, subxid) for subxid, row in rows]
    sent += [encode(StreamStop())]
    sent += [b"A" + xid.to_bytes(4) + (xid + sub).to_bytes(4) for sub in transaction.aborted]
    return Unit(lsn + 48, [*sent, encode(StreamPrepare(*end))], [])


def _decision(transaction: Transaction, xid: int, lsn: int) -> Unit:
    if transaction.verdict == "rollback":
        message: AnyMessage = RollbackPrepared(
            lsn - 50, lsn + 48, NOW_US, NOW_US, xid, f"gid {xid}"
        )
        return Unit(lsn + 48, [encode(message)], [])
    gone = {xid + sub for sub in transaction.aborted} if transaction.kind == "streamed" else set()
    kept = [row for subxid, row in _rows(transaction, xid) if subxid not in gone]
    message = CommitPrepared(lsn, lsn + 48, NOW_US, xid, f"gid {xid}")
    plain: list[AnyMessage] = [
        Begin(lsn, NOW_US, xid),
        *kept,
        Commit(lsn, lsn + 48, NOW_US),
    ]
    return Unit(lsn + 48, [encode(message)], plain)


def assembler(
    start: Position, bytes_max: int, counts: Mapping[str, int] | None = None
) -> Assembler:
    envelope = Envelope("p", "db", 1, plainly, tombstones=True, transaction_metadata=True)
    return Assembler(envelope, start, bytes_max, counts or {})


class Crash(Exception):
    """The process ends here."""


@dataclass
class Kafka:
    """What has committed: events, staging, the position."""

    topic: Topic = field(default_factory=Topic)
    events: list[Event] = field(default_factory=list)
    position: Position = START
    counts: Mapping[str, int] | None = None
    crash_in: int = -1

    def emit(self, batch: EventBatch) -> None:
        if self.crash_in == 0:
            self.crash_in = -1
            raise Crash
        self.crash_in -= 1
        self.events += batch.events
        for event in batch.staging:
            self.topic.add(event)
        assert batch.position.end_lsn >= self.position.end_lsn
        self.position = batch.position
        if batch.counts is not None:
            self.counts = batch.counts


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "spool"


@given(
    chosen=st.lists(transactions, max_size=6),
    order=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    bytes_max=st.sampled_from([700, 10**6]),
    crashes=st.lists(st.integers(0, 6), max_size=4),
    repeats=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_prepared_transactions_equal_ordinary_ones_after_any_crash(
    folder: Path,
    chosen: list[Transaction],
    order: list[int],
    bytes_max: int,
    crashes: list[int],
    repeats: list[bool],
) -> None:
    """`repeats`: the sessions in which the server sends again also what Kafka has."""
    sent = list(units(chosen, order))
    kafka = Kafka()
    for crash_in, repeat in zip([*crashes, -1], repeats, strict=False):
        kafka.crash_in = crash_in
        spool = Spool(folder, memory_bytes_max=100, bytes_max=10**9)
        try:
            _session(kafka, spool, bytes_max, sent, repeats=repeat)
        except Crash:
            continue
        finally:
            spool.close()
        break
    plain = assembler(START, 10**9)
    expected: list[Event] = []
    for unit in sent:
        for message in unit.plain:
            batch = plain.feed(message, 1, NOW_US)
            expected += batch.events if batch is not None else []
    assert list(map(_content, kafka.events)) == list(map(_content, expected))
    undecided = [
        (n, t) for n, t in enumerate(chosen) if t.kind != "ordinary" and t.verdict == "open"
    ]
    gids = {json.loads(key)["gid"] for key in kafka.topic.live()}
    assert gids == {f"gid {100 * (n + 1)}" for n, _ in undecided}


def _session(
    kafka: Kafka, spool: Spool, bytes_max: int, sent: list[Unit], *, repeats: bool
) -> None:
    pipeline = Pipeline(
        spool,
        assembler(kafka.position, bytes_max, kafka.counts),
        emit=kafka.emit,
        waiter=Waiter(),
        prepared_topic="p.prepared",
        slot="s",
        staged=load_staged(kafka.topic, "s", spool),
    )
    for unit in sent:
        if repeats or unit.end_lsn > kafka.position.end_lsn:
            for payload in unit.payloads:
                pipeline.take(payload, 1, NOW_US)
    pipeline.advance(10**6)


def _content(event: Event) -> object:
    """An event without the position of the commit before it, which a restart does not know."""
    if event.value is None or event.topic.endswith(".transaction"):
        return event
    value = json.loads(event.value)
    value["source"].pop("sequence")
    return (event.topic, event.key, json.dumps(value))


@pytest.fixture
def pipeline(folder: Path) -> Iterator[Pipeline]:
    spool = Spool(folder, memory_bytes_max=10**6, bytes_max=10**9)
    yield Pipeline(
        spool,
        assembler(START, 10**6),
        emit=lambda batch: None,
        waiter=Waiter(),
        prepared_topic="p.prepared",
        slot="s",
    )
    spool.close()


END = (1000, 1048, NOW_US, 5, "g")


@pytest.mark.parametrize(
    "messages",
    [
        [Prepare(*END)],
        [StreamPrepare(*END)],
        [Begin(900, NOW_US, 3), BeginPrepare(*END)],
        [BeginPrepare(*END), Prepare(1000, 1048, NOW_US, 5, "other")],
        [StreamStart(5, True), StreamPrepare(*END)],
        [BeginPrepare(*END), Begin(900, NOW_US, 3)],
        [BeginPrepare(*END), Insert(TABLES[0], [b"1"])],
    ],
)
def test_a_message_out_of_place_is_an_error(pipeline: Pipeline, messages: list[AnyMessage]) -> None:
    with pytest.raises(DecodeError, match="out of place"):
        for message in messages:
            pipeline.take(encode(message), 1, NOW_US)


def test_a_commit_without_its_staging_stops_the_bridge(pipeline: Pipeline) -> None:
    with pytest.raises(OperatorNeeded, match="'g' was committed, but its changes are not in"):
        pipeline.take(encode(CommitPrepared(*END)), 1, NOW_US)


def test_rollback_of_an_unstaged_transaction_writes_nothing(pipeline: Pipeline) -> None:
    rollback = RollbackPrepared(900, 1048, NOW_US, NOW_US, 5, "g")
    pipeline.take(encode(rollback), 1, NOW_US)


def test_a_description_in_a_prepared_block_counts_at_once(pipeline: Pipeline) -> None:
    """The server takes it for told: changes outside of the block come without it."""
    for message in (BeginPrepare(*END), TABLES[0]):
        pipeline.take(encode(message), 1, NOW_US)
    assert pipeline._assembler.sent.relations == {TABLES[0].oid: TABLES[0]}


def test_a_gid_staged_twice_stops_the_bridge(pipeline: Pipeline) -> None:
    pipeline.take(encode(BeginPrepare(*END)), 1, NOW_US)
    pipeline.take(encode(Prepare(*END)), 1, NOW_US)
    pipeline.take(encode(BeginPrepare(1100, 1148, NOW_US, 6, "g")), 1, NOW_US)
    with pytest.raises(OperatorNeeded, match="another transaction 'g'"):
        pipeline.take(encode(Prepare(1100, 1148, NOW_US, 6, "g")), 1, NOW_US)


frames = st.lists(
    st.builds(Frame, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=300))
)


@given(frames, st.integers(1, 50))
def test_frames_come_back_from_their_parts(given_frames: list[Frame], size: int) -> None:
    events = staged_parts("t", "s", "g", given_frames)
    parts = [e.value or b"" for e in events if e is not None]
    assert list(read_frames(parts)) == given_frames
    whole = b"".join(parts)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert list(read_frames(pieces)) == given_frames
    with pytest.raises(ValueError, match=r"missing|compressed"):
        list(read_frames(pieces[:-1]))


def test_staging_answers_the_server_however_well_it_compresses() -> None:
    same = (Frame(1, 1, b"I" + bytes(40)) for _ in range(20_000))
    assert sum(event is None for event in staged_parts("t", "s", "g", same)) >= 4


def test_however_much_is_staged_each_read_has_a_deadline_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans: list[tuple[int, int]] = []

    class Read(Topic):
        def between(self, start: int, stop: int, _deadline: float) -> Iterator[Record]:
            spans.append((start, stop))
            return super().between(start, stop, _deadline)

    monkeypatch.setattr(staged_transactions, "_STEP", 2)
    key = PreparedKey(slot="another", gid="g", part=1).model_dump_json().encode()
    assert load_staged(Read(records=[(n, key, b"") for n in range(5)]), "s") == []
    assert spans == [(0, 2), (2, 4), (4, 5)]
