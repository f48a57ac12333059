"""The database side of a snapshot: marks, xids, and SQL sessions that the server ends."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import psycopg
import pytest

from schemas.errors import Retryable
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import Insert
from services.bridge.snapshot import copied_rows, ranges
from services.bridge.snapshot import reader as module
from services.bridge.snapshot.places import RowsBefore
from services.bridge.snapshot.ranges import RangeReader
from services.bridge.snapshot.reader import SnapshotReader
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.tables import Chunk, TableShape
from services.bridge.snapshot.visibility import PublishedXids
from services.postgres.published_tables import published_tables
from services.postgres.rows import one_row
from services.postgres.server import read_server
from services.postgres.sessions import ROWS
from tests.providers.databases import Connection, connect
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient_ms

Make = Callable[..., SnapshotReader]


@pytest.fixture
def connection(pair: Provider, fresh_database: str) -> Iterator[Connection]:
    with connect(pair.primary, fresh_database) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, c0 text, wanted int)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        yield connection


@pytest.fixture
def make(pair: Provider, fresh_database: str, connection: Connection) -> Iterator[Make]:
    with contextlib.ExitStack() as opened:

        def new(
            *, options: str = "", publication: str = "p", workers: int = 1, **other: Any
        ) -> SnapshotReader:
            conninfo = pair.primary.conninfo(fresh_database, options=options)
            server = replace(read_server(connection), **other)
            found = SnapshotReader(
                *(conninfo, publication, "s", server),
                deadline_ms=patient_ms(10_000),
                workers=workers,
            )
            opened.callback(found.close)
            return found

        yield new


def rows_of(shape: TableShape, chunk: Chunk) -> list[Any]:
    """Return a chunk's rows, as the long way decodes them."""
    decoder = Decoder()
    decoder.relations[shape.relation.oid] = shape.relation
    messages = [part[index][1] for part in chunk.parts for index in range(len(part))]
    return [cast("Insert", decoder.decode(message, 0)).new for message in messages]


def end_sessions(connection: Connection) -> None:
    """End the reader's sessions, as a fence does."""
    connection.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = %s",
        [ROWS.application],
    )


@pytest.mark.long
def test_all_that_has_an_xid_must_have_ended_before_rows_are_read(
    make: Make, pair: Provider, fresh_database: str
) -> None:
    """The newest transaction: a snapshot's xmax is not above its xid."""
    reader = make()
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as writer:
        writer.execute("INSERT INTO t VALUES (1)")
        seen = reader.inspect()
        published = PublishedXids()
        published.floor = seen.xid
        assert not published.seen_by(reader.begin(seen.shapes[0]))
        reader.end()
        writer.commit()
        assert published.seen_by(reader.begin(seen.shapes[0]))


@pytest.mark.long
def test_a_transaction_that_began_before_its_table_joined_must_have_ended(
    make: Make, pair: Provider, fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first changes are not published: the xid is taken after the tables were read."""
    reader = make()
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as writer:

        def tables(*given: Any) -> Any:
            writer.execute("INSERT INTO t VALUES (1)")  # in the moment before
            return published_tables(*given)

        monkeypatch.setattr(module, "published_tables", tables)
        seen = reader.inspect()
        row = writer.execute("SELECT pg_current_xact_id()::text").fetchone()
        assert row is not None and seen.xid > int(row[0])


@pytest.mark.long
def test_a_locked_table_with_a_row_filter_is_told_and_ends_no_session(
    make: Make, connection: Connection, pair: Provider, fresh_database: str
) -> None:
    connection.execute("ALTER PUBLICATION p SET TABLE t WHERE (id > 0)")
    reader = make()
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as holder:
        holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(NotNow, match="a published table with a row filter is locked"):
            reader.inspect()
        assert reader.connected
    assert [shape.row_filter for shape in reader.inspect().shapes] == ["(id > 0)"]


@pytest.mark.long
def test_nothing_is_written_on_a_server_that_takes_no_writes(
    make: Make, connection: Connection
) -> None:
    reader = make(options="-c default_transaction_read_only=on")
    query = "SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())"
    before = connection.execute(query).fetchone()
    with pytest.raises(NotNow, match="takes no writes"):
        reader.inspect()
    with pytest.raises(NotNow, match="takes no writes"):
        reader.mark("token")
    after = connection.execute(query).fetchone()
    assert before is not None and after is not None
    assert before[1] == after[1], "an xid was taken"


@pytest.mark.long
def test_sessions_that_the_server_ends_are_opened_again(make: Make, connection: Connection) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'a', 2)")
    reader = make()
    (shape,) = reader.inspect().shapes
    reader.begin(shape)
    end_sessions(connection)
    with pytest.raises(NotNow, match="has ended"):
        reader.read(shape, None, "", rows_max=5, bytes_max=99)
    reader.end()
    assert reader.mark("token")
    reader.begin(shape)
    assert reader.read(shape, None, "", rows_max=5, bytes_max=99).looked_at == 1
    reader.end()


@pytest.mark.long
def test_another_server_is_not_read_from(make: Make) -> None:
    with pytest.raises(Retryable, match="another server"):
        make(timeline=99)
    with pytest.raises(Retryable, match="another server"):
        make(system_identifier="1")


@pytest.mark.long
def test_rows_that_are_not_wanted_are_looked_at_and_counted(
    make: Make, connection: Connection
) -> None:
    """Whatever the columns are called; the server never looks for a wanted row without end."""
    connection.execute("INSERT INTO t SELECT g, 'x' || g, -g FROM generate_series(1, 25) g")
    reader = make()
    (shape,) = reader.inspect().shapes
    found, last, chunks = [], None, []
    while True:
        reader.begin(shape)
        chunk = reader.read(shape, last, "id IN (7, 9, 24)", rows_max=10, bytes_max=10_000)
        reader.end()
        found += rows_of(shape, chunk)
        chunks.append((chunk.looked_at, chunk.last, chunk.ends))
        last = chunk.last
        if chunk.ends:
            break
    assert found == [[b"7", b"x7", b"-7"], [b"9", b"x9", b"-9"], [b"24", b"x24", b"-24"]]
    assert chunks == [(10, ["10"], False), (10, ["20"], False), (5, ["25"], True)]


@pytest.mark.long
def test_a_row_has_the_values_that_were_inserted(
    make: Make, connection: Connection, twin: str
) -> None:
    """COPY writes NULL, tabs, line ends and backslashes in ways of its own; the key has them, too.

    The same with the C extension and without it.
    """
    texts: list[str | None] = [chr(number) for number in range(1, 128)]
    texts += [f"a{text}b{text}{text}" for text in texts]
    texts += ["", r"\N", r"\.", r"\t", "\\", "ä€𝄞", "'; --", None]
    connection.execute('CREATE TABLE odd (id text COLLATE "C" PRIMARY KEY, a text, b text)')
    connection.execute("ALTER PUBLICATION p SET TABLE odd")
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO odd VALUES (%s, %s, %s)",
            [[f"{text}{number:3}", text, texts[-number]] for number, text in enumerate(texts)],
        )
    reader = make()
    (shape,) = reader.inspect().shapes
    for where in ("", "id <> 'x'"):
        found, last, ends = [], None, False
        while not ends:
            reader.begin(shape)
            chunk = reader.read(shape, last, where, rows_max=7, bytes_max=10_000)
            reader.end()
            found += rows_of(shape, chunk)
            last, ends = chunk.last, chunk.ends
        expected = connection.execute("SELECT id, a, b FROM odd ORDER BY id").fetchall()
        assert found == [
            [None if one is None else one.encode() for one in row] for row in expected
        ], twin


@pytest.mark.long
def test_rows_that_become_large_are_read_a_few_at_once(
    make: Make, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows before: what comes beyond the bytes of a chunk is bounded, too."""
    monkeypatch.setattr(copied_rows, "DROPPED_BYTES_MAX", 200_000)
    connection.execute("INSERT INTO t SELECT g, 'x', g FROM generate_series(1, 500) g")
    connection.execute(
        "INSERT INTO t SELECT g, repeat('x', 9000), g FROM generate_series(501, 800) g"
    )
    reader = make()
    (shape,) = reader.inspect().shapes
    count, last, ends, refused = 0, None, False, 0
    while not ends:
        reader.begin(shape)
        try:
            chunk = reader.read(shape, last, "", rows_max=250, bytes_max=20_000)
        except NotNow as reason:
            assert "larger than before" in str(reason)
            refused += 1
            reader.mark("opens the sessions again")
            continue
        finally:
            reader.end()
        assert chunk.bytes < 30_000
        count, last, ends = count + chunk.looked_at, chunk.last, chunk.ends
    assert (count, refused) == (800, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ("char(4)", ["a", "ab", "abc", "abcd", "b"]),
        ("bit(4)", ["0001", "0101", "0111", "1000", "1111"]),
        ('code COLLATE "C"', ["B", "Ba", "a", "ab", "b"]),
    ],
    ids=["char", "bit", "domain of another collation"],
)
def test_rows_are_read_on_after_a_whole_key(
    column: str, texts: list[str], make: Make, connection: Connection
) -> None:
    connection.execute('CREATE DOMAIN code AS varchar(9) COLLATE "pg_c_utf8"')
    connection.execute(f"CREATE TABLE keyed (id {column} PRIMARY KEY)".encode())
    connection.execute("ALTER PUBLICATION p SET TABLE keyed")
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO keyed VALUES (%s)", [[text] for text in texts])
    reader = make()
    (shape,) = reader.inspect().shapes
    reader.begin(shape)
    last, found = None, []
    for _ in texts:
        chunk = reader.read(shape, last, "", rows_max=1, bytes_max=99)
        last = chunk.last
        found += [value.decode().strip() for (value,) in rows_of(shape, chunk)]
    assert found == texts and chunk.ends


@pytest.mark.long
@pytest.mark.parametrize("table", ["keyed", "keyless"])
def test_several_workers_read_the_rows_that_one_reads(
    table: str, make: Make, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all sizes, so that ranges are cut; rows that come later are not seen by any."""
    connection.execute(
        """
        CREATE TABLE keyed (a text, b int, note text, PRIMARY KEY (a, b));
        CREATE TABLE keyless (a text, b int, note text);
        INSERT INTO keyed SELECT chr(65 + 32 * (g % 2) + g % 13), g, repeat('x', g * g % 900)
          FROM generate_series(1, 700) g;
        INSERT INTO keyless SELECT * FROM keyed;
        CREATE PUBLICATION q FOR TABLE keyed, keyless"""
    )
    read, shared = RangeReader.read, set()

    def noted(self: RangeReader, sessions: Any, queries: Any, *rest: Any, **each: int) -> Any:
        shared.add(len(queries))
        return read(self, sessions, queries, *rest, **each)

    monkeypatch.setattr(RangeReader, "read", noted)
    found = []
    for workers in (1, 3):
        reader = make(publication="q", workers=workers)
        (shape,) = (one for one in reader.inspect().shapes if one.relation.table == table)
        last, rows, before = None, [], None
        while True:
            sight = reader.begin(shape)
            if table == "keyless":
                before = before or RowsBefore(sight, file_of(connection, table))
            chunk = reader.read(shape, last, "", before, rows_max=100, bytes_max=20_000)
            reader.end()
            rows += rows_of(shape, chunk)
            assert chunk.looked_at <= 100
            last = chunk.last
            if chunk.ends:
                break
        found.append(rows)
    assert found[0] == found[1] and len(found[0]) == 700
    assert shared >= {1, 3}


def file_of(connection: Connection, table: str) -> int:
    """Return the table's relfilenode."""
    query = "SELECT relfilenode::bigint FROM pg_class WHERE oid = %s::regclass"
    (found,) = one_row(connection.execute(query, [table]))
    return int(found)


@pytest.mark.long
def test_a_worker_that_sees_another_snapshot_reads_nothing(
    make: Make, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a balancer: the name of the snapshot may be known on another server, too."""
    connection.execute("INSERT INTO t SELECT g, 'x', g FROM generate_series(1, 99) g")
    reader = make(workers=2)
    (shape,) = reader.inspect().shapes

    def read() -> int:
        reader.begin(shape)
        try:
            return reader.read(shape, None, "", rows_max=50, bytes_max=10_000).looked_at
        finally:
            reader.end()

    assert (read(), read()) == (50, 50)
    monkeypatch.setattr(ranges, "_SEEN", "SELECT pg_backend_pid()")
    assert read() == 25  # what the first one has read
    assert read() == 50  # alone
    monkeypatch.undo()
    monkeypatch.setattr(ranges, "RETRY_S", 0.0)
    assert read() == 50


@pytest.mark.long
def test_fewer_workers_read_where_the_server_lets_no_more_in(
    pair: Provider, make: Make, fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes need two connections of a snapshot; others are opened when rows need them."""
    monkeypatch.setattr(ranges, "RETRY_S", 0.1)
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
    with connect(pair.primary, "postgres") as connection:

        def connections() -> int:
            (found,) = one_row(connection.execute(query, [fresh_database, ROWS.application]))
            return int(found)

        with connect(pair.primary, fresh_database) as filling:
            filling.execute("INSERT INTO t SELECT g, 'x', g FROM generate_series(1, 99) g")
        reader = make(workers=4)
        (shape,) = reader.inspect().shapes
        for allowed, expected in (("false", 2), ("true", 5)):
            connection.execute(f"ALTER DATABASE {fresh_database} ALLOW_CONNECTIONS {allowed}")

            def read(count: int = expected) -> bool:
                reader.begin(shape)
                chunk = reader.read(shape, None, "", rows_max=40, bytes_max=10_000)
                reader.end()
                assert chunk.looked_at == 40
                return connections() == count

            read()  # the first chunk of a table is read by one connection
            eventually(read, what=f"{expected} connections are there")


@pytest.mark.long
def test_a_key_whose_type_the_role_may_not_use_is_denied(
    connection: Connection, make: Make, fresh_database: str
) -> None:
    """The second chunk would name the type."""
    role = f"weak_{fresh_database}"
    for statement in (
        "CREATE SCHEMA types",
        "CREATE TYPE types.mood AS ENUM ('a', 'b')",
        "CREATE TABLE moods (id types.mood PRIMARY KEY, other types.mood)",
        "CREATE TABLE other (id int PRIMARY KEY, other types.mood)",
        "ALTER PUBLICATION p ADD TABLE moods, other",
        f"CREATE ROLE {role}",
        f"GRANT SELECT ON moods, other, t TO {role}",
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pg_catalog TO {role}",
    ):
        connection.execute(statement.encode())
    try:
        denied = make(options=f"-c role={role}").inspect().denied
        (oid,) = one_row(connection.execute("SELECT 'moods'::regclass::oid::bigint"))
        assert denied == {oid}
    finally:
        for statement in (f"DROP OWNED BY {role}", f"DROP ROLE {role}"):
            connection.execute(statement.encode())
