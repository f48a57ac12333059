"""Which descriptions a prepared transaction keeps, and that its replay changes no later one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.errors import DescriptionOutdated, OldRowHidden
from services.bridge.events.event import Stamp
from services.bridge.events.sent_relations import SentRelations
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Frame,
    Insert,
    Prepare,
    Relation,
    RelationColumn,
    Row,
    Truncate,
    Update,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.prepared import waiting_place
from services.waiter import Waiter
from tests.promises.bridge.wire import as_it_is, encode

NOW_US = 1_700_000_000_000_000
ROOT = 7


def relation(oid: int, identity: str, keys: tuple[str, ...], width: int = 3) -> Relation:
    names = ("id", "tenant", "note", *(f"column_{number}" for number in range(3, width)))
    columns = (RelationColumn(name, 25, -1, identity == "f" or name in keys) for name in names)
    return Relation(oid, "public", f"t{oid}", identity, tuple(columns))


def keyed(relation: Relation, _stamp: Stamp, _seq: int) -> Described:
    """A table with its identity as its key, and with its id under REPLICA IDENTITY FULL."""
    if relation.replica_identity == "f":
        columns = (replace(column, key=column.name == "id") for column in relation.columns)
        relation = replace(relation, columns=tuple(columns))
    return Described(as_it_is(relation))


class Frames:
    """Keeps frames in memory."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Frame]] = {}

    def append(self, xid: int, frame: Frame) -> None:
        self._kept.setdefault(xid, []).append(frame)

    def replay(self, xid: int) -> Iterator[Frame]:
        yield from self._kept.get(xid, ())

    def rename(self, xid: int, new: int) -> None:
        self._kept[new] = self._kept.pop(xid)

    def drop(self, xid: int) -> None:
        self._kept.pop(xid, None)


class Connection:
    """One connection's messages through a real Pipeline."""

    def __init__(self) -> None:
        self.frames = Frames()
        self.batches: list[EventBatch] = []
        envelope = Envelope("p", "db", 1, keyed, tombstones=True, transaction_metadata=True)
        self.assembler = Assembler(envelope, Position(0, 100, 0), 10**9)
        self.pipeline = Pipeline(
            self.frames,
            self.assembler,
            emit=self.batches.append,
            waiter=Waiter(),
            prepared_topic="p.prepared",
            slot="s",
        )
        self._lsn = 1_000

    def take(self, *messages: AnyMessage) -> None:
        for message in messages:
            self.pipeline.take(encode(message), 1, NOW_US)

    def commit(self, *messages: AnyMessage) -> None:
        """Take an ordinary transaction."""
        self._lsn += 100
        end = Commit(self._lsn, self._lsn + 48, NOW_US)
        self.take(Begin(self._lsn, NOW_US, 3), *messages, end)

    def prepare(self, xid: int, *messages: AnyMessage) -> list[Frame]:
        """Take a prepared transaction; return what is kept of it."""
        self._lsn += 100
        end = (self._lsn, self._lsn + 48, NOW_US, xid, f"gid {xid}")
        self.take(BeginPrepare(*end), *messages, Prepare(*end))
        return [*self.frames.replay(waiting_place(xid))]

    def commit_prepared(self, xid: int) -> None:
        self._lsn += 100
        self.take(CommitPrepared(self._lsn, self._lsn + 48, NOW_US, xid, f"gid {xid}"))

    @property
    def events(self) -> Row:
        return [event.value for batch in self.batches for event in batch.events if event.table]


def kinds(frames: list[Frame]) -> str:
    return b"".join(frame.payload[:1] for frame in frames).decode()


def test_a_block_keeps_one_partition_of_each_replica_identity() -> None:
    """A root with FULL over partitions with DEFAULT is usual, and hides nothing from most."""
    root = relation(ROOT, "f", (), width=20)
    partitions = [relation(100 + number, "d", ("id",), width=20) for number in range(366)]
    new = Insert(root, [b"1"] * 20)
    changed, moved = Update(root, None, None, new.new), Update(root, "O", new.new, new.new)
    connection = Connection()
    described = [(root, partition) for partition in partitions]
    rows = connection.prepare(1, *(one for pair in described for one in (*pair, new)))
    assert kinds(rows) == "R" + "I" * 366
    connection = Connection()
    rows = connection.prepare(2, *(one for pair in described for one in (*pair, changed)))
    assert kinds(rows) == "RR" + "U" * 366
    assert kinds(connection.prepare(3, new)) == "RI"
    assert kinds(connection.prepare(4, Truncate((root,), False, False))) == "RT"
    connection.commit(new)
    frames = connection.prepare(5, new, changed, moved, Delete(root, "O", new.new), new)
    assert kinds(frames) == "RIRRUUDI"
    by_index = relation(99, "i", ("tenant",), width=20)
    frames = connection.prepare(6, root, by_index, new, changed, moved)
    assert kinds(frames) == "RIRRRRUU"


def test_what_an_earlier_transaction_described_refuses_no_change_of_a_block() -> None:
    """It may be another by then: nothing is staged, and the next session is told what is right."""
    root, other = relation(ROOT, "i", ("id", "tenant")), relation(8, "d", ("id",))
    row: Row = [b"1", b"a", b"x"]
    new, changed = Insert(root, row), Update(root, None, None, row)
    moved = Update(root, "K", [b"1", b"b", None], row)
    hidden = Update(root, "K", [b"2", None, None], row)
    for former in ("committed", "prepared"):
        for change in (changed, hidden):
            connection = Connection()
            if former == "committed":
                connection.commit(root, other, new)
            else:
                connection.prepare(4, root, other, new)
            assert kinds(connection.prepare(5, moved)) == "RU"
            with pytest.raises(DescriptionOutdated, match=r"public\.t8 has .* DEFAULT \(id\)"):
                connection.prepare(6, moved, change)
            assert [*connection.frames.replay(waiting_place(6))] == []
            assert kinds(Connection().prepare(6, root, new, changed)) == "RIU"


def test_a_table_whose_settings_are_not_known_yet_is_judged_in_a_new_session() -> None:
    """Also where its key turns out to be told: until it has an event, that is not known."""
    root, other = relation(ROOT, "f", ()), relation(8, "d", ("id",))
    row: Row = [b"1", b"a", b"x"]
    new, changed = Insert(root, row), Update(root, None, None, row)
    connection = Connection()
    connection.prepare(4, root, other, new)
    with pytest.raises(DescriptionOutdated):
        connection.prepare(5, changed)
    connection = Connection()
    connection.prepare(4, root, other, new)
    connection.commit_prepared(4)
    assert kinds(connection.prepare(5, changed)) == "RRU"


def test_a_replay_leaves_later_descriptions_as_they_are() -> None:
    """A partition that the prepared transaction did not change may be altered meanwhile."""
    root = relation(ROOT, "i", ("id", "tenant"))
    other, its_own = relation(8, "d", ("id",)), relation(9, "i", ("id", "tenant"))
    row: Row = [b"1", b"a", b"x"]
    new, changed = Insert(root, [*row]), Update(root, None, None, [*row])
    connection = Connection()
    connection.commit(root, other, new, root, its_own, new)
    connection.prepare(5, Update(root, "K", [b"1", b"b", None], [*row]))
    altered = replace(its_own, oid=other.oid)
    connection.commit(root, altered, new)
    connection.commit(changed)
    connection.commit_prepared(5)
    connection.commit(changed)
    assert len(connection.events) == 8
    assert connection.assembler.sent.relations[other.oid] == altered
    assert {*connection.assembler.sent.partitions(ROOT)} == {altered, its_own}


@pytest.mark.parametrize("altered", [True, False], ids=["altered", "described anew"])
def test_a_hidden_change_that_was_prepared_is_refused(*, altered: bool) -> None:
    """Its partition is judged as it was, also where another one with its identity is staged."""
    root = relation(ROOT, "i", ("id", "tenant"))
    hiding, same = relation(8, "d", ("id",)), relation(9, "d", ("id",))
    new: Row = [b"1", b"a", b"x"]
    connection = Connection()
    described = (root, hiding, Insert(root, new), root, same, Insert(root, new))
    connection.prepare(5, *described, Update(root, None, None, new))
    if altered:
        told = [replace(relation(0, "i", ("id", "tenant")), oid=oid) for oid in (8, 9)]
        connection.commit(root, told[0], Insert(root, new), root, told[1], Insert(root, new))
    with pytest.raises(OldRowHidden, match=r"DEFAULT \(id\)"):
        connection.commit_prepared(5)


Identified = tuple[int, tuple[str, tuple[str, ...]]]
TOLD = {"moved": frozenset({"id"}), "delete": frozenset({"id", "tenant"})}
BY_ID = ("d", ("id",))
IDENTITIES = [
    BY_ID,
    ("i", ("id",)),
    ("i", ("tenant",)),
    ("i", ("id", "tenant")),
    ("f", ()),
]
changes = st.sampled_from(["insert", "update", "moved", "delete"])
described = st.tuples(st.integers(0, 2), st.sampled_from(IDENTITIES))
steps = st.lists(st.one_of(changes, described), max_size=12)


@given(st.lists(described, max_size=4), steps)
@example([(0, BY_ID), (1, BY_ID)], ["update", (1, ("i", ("tenant",))), "update"])
def test_a_replay_knows_each_replica_identity_that_the_connection_knew(
    before: list[Identified], block: list[str | Identified]
) -> None:
    """Also in another session, which knows what the block has kept alone.

    All that were described in the block; and earlier ones that the change may be of: where these
    may be others by then, another session begins with the block.
    """
    try:
        require_known(before, block)
    except DescriptionOutdated:
        assert before
        require_known([], block)


def require_known(before: list[Identified], block: list[str | Identified]) -> None:
    root = relation(ROOT, "i", ("id", "tenant"))
    row: Row = [b"1", b"a", b"x"]
    rows: dict[str, AnyMessage] = {
        "insert": Insert(root, row),
        "update": Update(root, None, None, row),
        "moved": Update(root, "K", [b"1", None, None], row),
        "delete": Delete(root, "K", [b"1", b"a", None]),
    }
    connection, live, of_block = Connection(), SentRelations(), SentRelations()
    expected: list[set[frozenset[str]]] = []
    messages: list[list[AnyMessage]] = [[], [root, rows["insert"]]]
    for number, step in [*((0, step) for step in before), *((1, step) for step in block)]:
        if isinstance(step, str):
            messages[number].append(rows[step])
            if number and step != "insert":
                earlier = {one for one in told(live) if TOLD.get(step, one) == one}
                expected.append(told(of_block) | earlier)
            continue
        partition = relation(8 + step[0], *step[1])
        messages[number] += [root, partition, rows["insert"]]
        for sent in (live, of_block)[: number + 1]:
            sent.take(root)
            sent.take(partition)
            sent.settle([ROOT])
    connection.commit(root, rows["insert"], *messages[0])
    frames = connection.prepare(5, *messages[1])
    decoder, replayed, found = Decoder(), SentRelations(), []
    for frame in frames:
        message = decoder.decode(frame.payload, 1)
        if isinstance(message, Relation):
            replayed.take(message)
            continue
        replayed.settle([ROOT])
        if not isinstance(message, Insert):
            found.append(told(replayed))
    assert len(found) == len(expected)
    for kept, known in zip(found, expected, strict=True):
        assert kept >= known


def told(sent: SentRelations) -> set[frozenset[str]]:
    """The columns of the replica identities that tell less than the root's."""
    found = {
        frozenset(column.name for column in one.columns if column.key)
        for one in sent.partitions(ROOT)
    }
    return {one for one in found if not one >= {"id", "tenant"}}
