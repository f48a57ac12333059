"""The tables as their events make them, compared with the tables as the database has them.

`rebuild` reads all that is committed in Kafka and applies it in (commit_lsn, seq) order, as a
consumer would who knows nothing but the topics: tables by oid, their names and columns from the
schema topic. On the way it checks the contract of each event: announced once, numbered once, of the
announced shape, with the announced key, counted by its transaction's END, deletes followed by
tombstones. `assert_rebuilt` compares the result with what the publication has.
"""

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from schemas.events import (
    SETTLED_KEY,
    UNAVAILABLE,
    Envelope,
    TransactionEvent,
    schema_topic,
    transaction_topic,
)
from schemas.naming import Naming
from schemas.schema_events import SchemaEvent
from schemas.shaping import ShapingSettings
from services.bridge.events.envelope import NEW_KEY_HEADER, OLD_KEY_HEADER
from services.bridge.events.values.encoders import Encoders
from services.bridge.source.type_catalog import read_types
from services.postgres.sessions import ROWS, open_session
from tests.promises.bridge.reading import Record, read_committed
from tests.promises.bridge.row_comparison import compare
from tests.promises.bridge.running import Bridge

UNSHAPED = ShapingSettings()
Values = dict[str, Any]
Position = tuple[int, int]


@dataclass
class Table:
    """A table's present rows: by key, and those without one.

    `snapshot`: rows of it were read, which may show what comes as changes only later; or repaired.
    """

    shape: SchemaEvent
    snapshot: bool = False
    keyed: dict[bytes, Values] = field(default_factory=dict)
    keyless: list[Values] = field(default_factory=list)

    @property
    def rows(self) -> list[Values]:
        """All rows; a column that is younger than a row's event, or its type, is absent from it."""
        return [*self.keyed.values(), *self.keyless]

    def reshape(self, shape: SchemaEvent) -> None:
        """Go on with `shape`: forget what it does not have."""
        old = {(c.name, c.type_oid, c.typmod) for c in self.shape.after}
        kept = {c.name for c in shape.after if (c.name, c.type_oid, c.typmod) in old}
        for row in self.rows:
            for name in row.keys() - kept:
                del row[name]
        self.shape = shape

    def put(self, key: bytes | None, row: Values) -> None:
        """A new row."""
        if key is None:
            self.keyless.append(row)
        else:
            inserted = self.snapshot or key not in self.keyed
            assert inserted, f"{self.shape.table}: {key!r} is inserted twice"
            self.keyed[key] = row

    def take(self, key: bytes | None, before: Values | None) -> Values:
        """Remove and return the row that an update or delete means.

        Empty for one that a snapshot has not read yet.
        """
        if self.snapshot and key is not None:
            return self.keyed.pop(key, {})
        if key is not None and key in self.keyed:
            row = self.keyed.pop(key)
            if self.shape.replica_identity == "full":
                assert before is not None
                assert all(before[name] == row[name] for name in row), f"before of {key!r}"
            return row
        assert before is not None, f"{self.shape.table}: no row {key!r}"
        for row in self.keyless:
            if all(before[name] == row[name] for name in row):
                self.keyless.remove(row)
                return row
        for other, row in self.keyed.items():  # by the key of another time
            if all(before[name] == row[name] for name in row):
                del self.keyed[other]
                return row
        raise AssertionError(f"{self.shape.table}: no row {key!r} {before}")

    def clear(self) -> None:
        """Truncate."""
        self.keyed.clear()
        self.keyless.clear()


@dataclass
class Copy:
    """Everything that the topics of a prefix make. `tables` by oid; `shapes` in commit order."""

    tables: dict[int, Table]
    shapes: list[SchemaEvent]
    events: list[Envelope]

    def table(self, name: str) -> Table:
        """The table that is called `name` now."""
        last = [shape for shape in self.shapes if shape.table == name][-1]
        return self.tables[last.oid]

    def columns(self, name: str) -> list[list[str]]:
        """The columns of each shape that was announced for `name`."""
        return [[c.name for c in shape.after] for shape in self.shapes if shape.table == name]

    def of(self, name: str, *ops: str) -> list[Envelope]:
        """A table's events in (commit_lsn, seq) order."""
        return [e for e in self.events if e.source.table == name and (not ops or e.op in ops)]


@dataclass(frozen=True)
class _Numbered:
    position: Position
    record: Record
    event: Envelope


def rebuild(
    servers: str,
    prefix: str,
    shaping: ShapingSettings = UNSHAPED,
    outbox_topics: Collection[str] = (),
) -> Copy:
    """Apply all committed events. Raises AssertionError for what breaks the contract.

    `outbox_topics` have messages of the outbox table, which count among a transaction's events.
    """
    naming = Naming(prefix, shaping)
    shapes = _shapes(read_committed(servers, [schema_topic(prefix)]))
    topics = {naming.table(shape.schema_, shape.table).name for shape in shapes}
    read = read_committed(servers, [*topics, transaction_topic(prefix)])
    records = [record for record in read if record.key != SETTLED_KEY]
    changes = [r for r in records if r.topic in topics]
    events = _events(changes)
    _check_tombstones(changes)
    messages = Counter(
        int(record.headers["commit_lsn"] or b"")
        for record in read_committed(servers, outbox_topics)
        if "commit_lsn" in record.headers
    )
    outbox = (shaping.outbox and shaping.outbox.table) or ""
    ends = (r for r in records if r.topic not in topics)
    _check_counts(ends, events, {lsn: Counter({outbox: n}) for lsn, n in messages.items()})
    tables: dict[int, Table] = {}
    owners: dict[tuple[str, str], int] = {}
    moved: dict[Position, Values] = {}
    read_tables = {
        one.event.source.table
        for one in events
        if one.event.op == "r" or one.event.source.snapshot == "repair"
    }
    upcoming = iter(shapes)
    shape = next(upcoming, None)
    for numbered in events:
        while shape is not None and (shape.commit_lsn, shape.seq) <= numbered.position:
            owners[shape.schema_, shape.table] = shape.oid
            made = Table(shape, snapshot=shape.table in read_tables)
            tables.setdefault(shape.oid, made).reshape(shape)
            shape = next(upcoming, None)
        source = numbered.event.source
        _apply(tables[owners[source.schema_, source.table]], numbered, moved)
    assert shape is None, f"{shape} is announced for no event"
    return Copy(tables, shapes, [numbered.event for numbered in events])


def _shapes(records: Iterable[Record]) -> list[SchemaEvent]:
    """The announced shapes in order; each must be new."""
    found = [SchemaEvent.model_validate_json(r.value) for r in records if r.value is not None]
    shapes = sorted(found, key=lambda shape: (shape.commit_lsn, shape.seq))
    last: dict[tuple[str, str], SchemaEvent] = {}
    for shape in shapes:
        before = last.get((shape.schema_, shape.table))
        assert shape.before == (before.after if before else None), f"{shape.table}: before"
        if before is not None:
            same = {"commit_lsn", "seq", "ts_ms", "before"}
            assert before.model_dump(exclude=same) != shape.model_dump(exclude=same), (
                f"{shape.table}: the same shape is announced twice"
            )
        last[shape.schema_, shape.table] = shape
    return shapes


def _events(records: Iterable[Record]) -> list[_Numbered]:
    """Events in (commit_lsn, seq) order; a truncate, which every partition has, once."""
    found: dict[Position, _Numbered] = {}
    copies: set[tuple[Position, int]] = set()
    for record in records:
        if record.value is None:
            continue
        event = Envelope.model_validate_json(record.value)
        position = (event.source.commit_lsn, event.source.seq)
        place = record.partition if event.op == "t" else 0
        assert (position, place) not in copies, f"{position} comes twice"
        assert position not in found or event.op == "t", f"{position} is two events"
        copies.add((position, place))
        found[position] = _Numbered(position, record, event)
    return [found[position] for position in sorted(found)]


def _check_tombstones(records: Iterable[Record]) -> None:
    """Right after each delete with a key, and nowhere else."""
    partitions: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        partitions[record.topic, record.partition].append(record)
    for content in partitions.values():
        awaited: bytes | None = None
        for record in content:
            if awaited is not None or record.value is None:
                assert (record.key, record.value) == (awaited, None), f"tombstone of {awaited!r}"
                awaited = None
            elif json.loads(record.value)["op"] == "d":
                awaited = record.key
        assert awaited is None, f"no tombstone of {awaited!r}"


def _check_counts(
    records: Iterable[Record],
    events: Iterable[_Numbered],
    messages: Mapping[int, Counter[str]],
) -> None:
    """Every transaction has one BEGIN and one END, which counts its events of each table.

    `messages`: of an outbox, by commit_lsn; they don't name their transaction.
    """
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for numbered in events:
        order, source = numbered.event.transaction, numbered.event.source
        assert order is not None
        counts = counted[order.id]
        counts[f"{source.schema_}.{source.table}"] += 1
        assert order.data_collection_order == counts[f"{source.schema_}.{source.table}"]
    found: dict[str, list[TransactionEvent]] = defaultdict(list)
    for record in records:
        assert record.value is not None
        boundary = TransactionEvent.model_validate_json(record.value)
        found[boundary.id].append(boundary)
    assert counted.keys() <= found.keys()
    for name, boundaries in found.items():
        assert [b.status for b in boundaries] == ["BEGIN", "END"], f"transaction {name}"
        collections = boundaries[1].data_collections or []
        ends = {c.data_collection: c.event_count for c in collections}
        sent = messages.get(boundaries[1].commit_lsn, Counter())
        assert ends == counted[name] + sent, f"transaction {name}"


def _apply(table: Table, numbered: _Numbered, moved: dict[Position, Values]) -> None:
    event, record = numbered.event, numbered.record
    names = [column.name for column in table.shape.after]
    for row in (event.before, event.after):
        assert row is None or list(row) == names, f"{event.source}: not the announced columns"
    _check_key(table, record, event)
    commit_lsn, seq = numbered.position
    if event.op == "t":
        table.clear()
        return
    if event.op == "r":
        assert event.after is not None
        if record.key is None:
            table.keyless.append(event.after)
        else:
            table.keyed[record.key] = event.after
        return
    old: Values | None = None
    if event.op in ("u", "d"):
        old = table.take(record.key, event.before)
    if NEW_KEY_HEADER in record.headers:
        assert old is not None
        moved[commit_lsn, seq + 1] = old
    if event.after is not None:
        old = moved.pop((commit_lsn, seq), old)
        assert (old is not None) == (event.op == "u" or OLD_KEY_HEADER in record.headers)
        known = old or {}
        if table.snapshot and record.key is not None:
            known = {**table.keyed.get(record.key, {}), **known}
        table.put(
            record.key,
            {
                name: known.get(name, value) if is_placeholder(value) else value
                for name, value in event.after.items()
            },
        )


def _check_key(table: Table, record: Record, event: Envelope) -> None:
    names = [column.name for column in table.shape.after if column.key]
    row = event.after if event.after is not None else event.before
    expected = {name: row[name] for name in names} if row and names else None
    assert expected == (json.loads(record.key) if record.key is not None else None)


def is_placeholder(value: Any) -> bool:
    """Whether an event lacks this value, as an update did not change it."""
    return value in (UNAVAILABLE, base64.b64encode(UNAVAILABLE.encode()).decode(), [UNAVAILABLE])


def assert_rebuilt(
    bridge: Bridge,
    *,
    unknown: int | None = 0,
    where: Mapping[str, str] | None = None,
    outbox_topics: Collection[str] = (),
) -> Copy:
    """What Kafka makes of each published table is what the database has.

    `unknown`: how many values no event has told, as their columns are younger than their rows; None
    for any number.
    `where`: table -> SQL condition, for rows that were written while they were not published.
    """
    copy = rebuild(bridge.kafka.bootstrap_servers, bridge.prefix, bridge.shaping, outbox_topics)
    assert_copied(copy, bridge, unknown=unknown, where=where)
    return copy


def assert_copied(
    copy: Copy,
    bridge: Bridge,
    *,
    tables: Collection[str] = (),
    unknown: int | None = 0,
    where: Mapping[str, str] | None = None,
) -> None:
    """`copy` has the rows of each published table, or of each of `tables`."""
    untold = 0
    with open_session(ROWS, bridge.conninfo) as connection:
        connection.execute("SET statement_timeout = 0; SET lock_timeout = 0")
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for oid, name, query in _queries(connection, bridge, where or {}):
            if not tables or name in tables:
                rebuilt = copy.tables[oid].rows if oid in copy.tables else []
                untold += compare(name, _rows(connection, query), rebuilt)
    assert unknown is None or untold == unknown, f"{untold} values were never told"


def _queries(
    connection: psycopg.Connection[Any], bridge: Bridge, where: Mapping[str, str]
) -> list[tuple[int, str, sql.Composed]]:
    """(oid, table, query) of what the publication has now."""
    tables = connection.execute(
        """
        SELECT c.oid, c.relname, n.nspname, p.attnames::text[], p.rowfilter, c.relkind = 'r'
          FROM pg_publication_tables p
          JOIN pg_namespace n ON n.nspname = p.schemaname
          JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
         WHERE p.pubname = %s
        """,
        [bridge.publication],
    ).fetchall()
    naming = Naming(bridge.prefix, bridge.shaping)
    return [
        (
            oid,
            table,
            sql.SQL("SELECT {} FROM {} {} WHERE ({}) AND ({})").format(
                sql.SQL(", ").join(map(sql.Identifier, columns or ())),
                sql.SQL("ONLY" if plain else ""),
                sql.Identifier(schema, table),
                sql.SQL(condition or "true"),
                sql.SQL(where.get(table, "true")),
            ),
        )
        for oid, table, schema, columns, condition, plain in tables
        if naming.publishes(schema, table)
    ]


def _rows(connection: psycopg.Connection[Any], query: sql.Composed) -> list[Values]:
    """Rows in the events' JSON forms, from the server's text forms."""
    cursor = connection.execute(query)
    result = cursor.pgresult
    assert result is not None and cursor.description is not None
    encoders = Encoders()
    unknown = encoders.unknown(column.type_code for column in cursor.description)
    encoders.learn(read_types(connection, unknown))
    columns = [
        (number, column.name, encoders.of(column.type_code, result.fmod(number)).encode)
        for number, column in enumerate(cursor.description)
    ]
    return [
        {
            name: None
            if (value := result.get_value(row, number)) is None
            else json.loads(encode(value))
            for number, name, encode in columns
        }
        for row in range(result.ntuples)
    ]
