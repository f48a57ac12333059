"""Bugs that other tools have published for their snapshots, each as a table that they would spoil.

One bridge reads all tables in chunks of three rows, by two workers, while rows of each table change
all the time; it is killed twice in the middle. Then each table must be in Kafka as it is. `dbz#`:
github.com/debezium/dbz; DBZ-: Debezium's former tracker; the others are repositories' issues.
"""

import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import psycopg
import pytest

from schemas.events import Envelope
from services.bridge.failpoints import VARIABLE
from tests.conftest import database
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.oracle import Copy, assert_copied, assert_rebuilt, rebuild
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    DONE,
    INITIAL,
    Writers,
    chunks,
    done,
    read_all,
    rows_a_second,
    told,
)
from tests.promises.bridge.test_snapshot_tables import linguistic, run
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually

COLLATION: Final = "<collation>"
SMALL: Final = {**INITIAL, "chunk_rows_max": 3, "workers": 2, "without_key": "read"}
CHUNKS_BEFORE_KILL: Final = 10


class Bug(NamedTuple):
    """A published bug. `table`: as SQL names it; `setup`: before the bridge starts.

    `columns`: those that an INSERT may name, with "n" that an UPDATE changes. `changes`: statements
    instead of the usual updates, deletes and inserts. `copied`: rows also come by COPY.
    """

    source: str
    table: str
    setup: tuple[str, ...]
    columns: tuple[str, ...] = ("id", "n")
    changes: tuple[str, ...] = ()
    copied: bool = False


def keyed(source: str, table: str, kind: str, rows: str) -> Bug:
    """A table with a key `id` of a type, and such rows of it."""
    setup = (
        f"CREATE TABLE {table} (id {kind} PRIMARY KEY, n int)",
        f"INSERT INTO {table} SELECT id::{kind}, 1 FROM (VALUES {rows}) v (id)",
    )
    return Bug(source, table, setup)


def listed(*texts: str) -> str:
    return ", ".join(f"('{text}')" for text in texts)


INSERTED: Final = "INSERT INTO {} SELECT {}, (random() * 1e9)::int"
BUGS: Final = (
    keyed(
        "dbz#2333: a numeric key is NaN or infinite",
        "not_a_number",
        "numeric",
        listed("NaN", "Infinity", "-Infinity", "-1e30", "0", "1.50", "1.6", "2e90", "7", "8"),
    ),
    Bug(
        "DBZ-6481: a key is an enum, in another order than its names",
        "moody",
        (
            "CREATE TYPE mood AS ENUM ('z', 'y', 'm', 'a', 'x', 'b', 'w', 'c')",
            "CREATE TABLE moody (id mood PRIMARY KEY, n int)",
            "INSERT INTO moody SELECT unnest(enum_range(NULL::mood)), 1",
        ),
    ),
    keyed(
        "flink-cdc#3108, risingwave#27107: a key is a uuid",
        "uuids",
        "uuid",
        listed(*(str(uuid.UUID(int=n * 0x0123456789ABCDEF0123456789ABCDEF)) for n in range(1, 13))),
    ),
    Bug(
        "flink-cdc#2964: a key of texts, of which one has a collation",
        "collated",
        (
            f'CREATE TABLE collated (id text COLLATE "{COLLATION}", other text, n int,'
            " PRIMARY KEY (id, other))",
            "INSERT INTO collated SELECT a, b, 1 FROM unnest(ARRAY['a', 'B', 'b', 'A', 'ä', '']) a,"
            " unnest(ARRAY['Z', 'z', '']) b",
        ),
        columns=("id", "other", "n"),
    ),
    keyed(
        "ours: a key is a char(n), and a bound of a chunk was one character",
        "padded",
        "char(4)",
        listed("a", "ab", "abc", "abcd", "abce", "abcf", "b", "ba", "bab", "", "Z"),
    ),
    keyed(
        "ours: a key is a bit(n), and a bound of a chunk was one bit",
        "bits",
        "bit(8)",
        listed(*(format(n * 23, "08b") for n in range(11))),
    ),
    Bug(
        "ours: a key is a domain with another collation than its column, over a char(n)",
        "domains",
        (
            f'CREATE DOMAIN code AS char(3) COLLATE "{COLLATION}"',
            'CREATE TABLE domains (id code COLLATE "C" PRIMARY KEY, n int)',
            "INSERT INTO domains SELECT chr(97 + g) || 'bc', 1 FROM generate_series(1, 9) g",
        ),
    ),
    Bug(
        "DBZ-8150, dbz#2020: a column is generated",
        "generated",
        (
            "CREATE TABLE generated (id int PRIMARY KEY,"
            " twice int GENERATED ALWAYS AS (n * 2) STORED, n int, note text)",
            "INSERT INTO generated (id, n, note) SELECT g, g, 'x' FROM generate_series(1, 10) g",
        ),
        columns=("id", "n", "note"),
    ),
    keyed(
        "go-pq-cdc#63: keys are sparse",
        "sparse",
        "bigint",
        listed(
            *("1", "5135169186007355493", "7234567890123456789", "-9223372036854775808"),
            *("9223372036854775807", "2", "3", "4", "5135169186007355494"),
        ),
    ),
    keyed(
        "DBZ-6912, pgstream#451: a timestamp is infinite",
        "infinite",
        "timestamptz",
        listed(
            *("-infinity", "infinity", "0044-03-15 BC", "2000-01-01 00:00:00.000001+00"),
            *("2000-01-01 00:00:00.000002+00", "2000-01-01 00:00:00.000003+00", "4000-01-01"),
        ),
    ),
    *(
        Bug(
            f"DBZ-7193, connect#4811: the WAL lacks a large value, identity {identity}",
            table,
            (
                f"CREATE TABLE {table} (id int PRIMARY KEY, n int, body text, parts text[])",
                f"ALTER TABLE {table} ALTER body SET STORAGE EXTERNAL,"
                f" ALTER parts SET STORAGE EXTERNAL, REPLICA IDENTITY {identity}",
                f"INSERT INTO {table} SELECT g, 1, repeat('b' || g, 3000),"
                " ARRAY[repeat('p' || g, 3000)] FROM generate_series(1, 9) g",
            ),
            columns=("id", "n", "body", "parts"),
        )
        for table, identity in (("toasted", "DEFAULT"), ("toasted_whole", "FULL"))
    ),
    keyed(
        "dbz#2173, DBZ-2452: the name needs quotes",
        '"table_with-pk.1#2/3"',
        "int",
        "(1), (2), (3), (4), (5), (6), (7)",
    ),
    Bug(
        "DBZ-7617: the message key has the columns in another order",
        "turned",
        (
            "CREATE TABLE turned (id int, other int, n int, PRIMARY KEY (id, other))",
            "INSERT INTO turned SELECT g / 3, -g, 1 FROM generate_series(1, 10) g",
        ),
        columns=("id", "other", "n"),
    ),
    Bug(
        "DBZ-1118: partitions have no key",
        "measured",
        (
            "CREATE TABLE measured (id int, n int) PARTITION BY LIST (id)",
            "CREATE TABLE measured_a PARTITION OF measured FOR VALUES IN (0, 1)",
            "CREATE TABLE measured_b PARTITION OF measured DEFAULT",
            "INSERT INTO measured SELECT g % 3, g FROM generate_series(1, 16) g",
        ),
        changes=(INSERTED.format("measured", "(random() * 2)::int"),),
    ),
    Bug(
        "DBZ-5071: the unique column is null",
        "nullable",
        (
            "CREATE TABLE nullable (id int UNIQUE, n int)",
            "INSERT INTO nullable SELECT nullif(g, 3 * (g / 3)), g FROM generate_series(1, 12) g",
        ),
        changes=(INSERTED.format("nullable", "NULL::int"),),
    ),
    Bug(
        "pgstream#700: pages between those with rows are empty",
        "gaps",
        (
            "CREATE TABLE gaps (id int, n int, filler char(1500)) WITH (autovacuum_enabled = off)",
            "INSERT INTO gaps SELECT g, g, '' FROM generate_series(1, 60) g",
            "DELETE FROM gaps WHERE id BETWEEN 7 AND 25 OR id BETWEEN 29 AND 52",
            "VACUUM gaps",
        ),
        changes=("INSERT INTO gaps SELECT 100, (random() * 1e9)::int, ''",),
    ),
    Bug(
        "debezium#6898: the table is empty",
        "empty",
        ("CREATE TABLE empty (id bigint PRIMARY KEY, n int)",),
        changes=("INSERT INTO empty SELECT (random() * 9)::bigint, 1",),
    ),
    Bug(
        "dbz#1554: rows of one COPY share an LSN",
        "copied",
        (
            "CREATE TABLE copied (id int PRIMARY KEY, n int)",
            "INSERT INTO copied SELECT g, 1 FROM generate_series(1, 10) g",
        ),
        copied=True,
    ),
    Bug(
        "flink-cdc#3928, seatunnel#11556: rows move between chunks",
        "moved",
        (
            "CREATE TABLE moved (id int PRIMARY KEY, n int)",
            "INSERT INTO moved SELECT g, 1 FROM generate_series(1, 24) g",
        ),
        changes=tuple(
            f"UPDATE moved SET id = id {step}, n = n + 1"
            f" WHERE id = (SELECT id FROM moved WHERE id {which} ORDER BY random() LIMIT 1)"
            for step, which in (("+ 1000", "<= 24"), ("- 1000", "> 1000"))
        ),
    ),
)
COPIED: Final = 5
"""Rows of a COPY. Few are there at a time: a snapshot of three rows must reach the end."""


class ChangesOfAll(Writers):
    """Inserts, updates, deletes, changed keys and COPY, in one table after the other."""

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        gone: dict[str, list[str]] = defaultdict(list)
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            while not self._stop.wait(0.005):
                try:
                    self._change(connection, chance, chance.choice(BUGS), gone)
                    self.committed += 1
                except psycopg.errors.UniqueViolation:
                    continue

    def _change(
        self,
        connection: psycopg.Connection[Any],
        chance: random.Random,
        bug: Bug,
        gone: dict[str, list[str]],
    ) -> None:
        table = bug.table
        one = f"ctid = (SELECT ctid FROM {table} ORDER BY random() LIMIT 1)"
        if bug.changes:
            connection.execute(chance.choice(bug.changes).encode())
        elif bug.copied and chance.random() < 0.5:
            first = 1_000 + COPIED * chance.randrange(4)
            with connection.transaction(), connection.cursor() as cursor:
                ids = range(first, first + COPIED)
                cursor.execute(f"DELETE FROM {table} WHERE id = ANY (%s)".encode(), [[*ids]])
                with cursor.copy(f"COPY {table} FROM STDIN".encode()) as copy:
                    for id_ in ids:
                        copy.write_row((id_, chance.getrandbits(20)))
        elif chance.random() < 0.5:
            connection.execute(f"UPDATE {table} SET n = n + 1 WHERE {one}".encode())
        elif gone[table]:
            values = ", ".join(f"(r).{column}" for column in bug.columns)
            connection.execute(
                f"INSERT INTO {table} ({', '.join(bug.columns)})"
                f" SELECT {values} FROM (SELECT %s::{table} AS r) given".encode(),
                [gone[table].pop()],
            )
        else:
            query = f"DELETE FROM {table} WHERE {one} RETURNING {table}::text"
            gone[table] += [row for (row,) in connection.execute(query.encode()).fetchall()]


class Outcome(NamedTuple):
    """The bridge that has read all tables, and the tables as its events make them."""

    bridge: Bridge
    copy: Copy


@pytest.fixture(scope="module")
def outcome(
    pair: Provider, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    with database(pair.primary, pair.standby) as name:
        conninfo = pair.primary.conninfo(name, options="-c synchronous_commit=local")
        collation = linguistic(conninfo)
        statements = [one.replace(COLLATION, collation) for bug in BUGS for one in bug.setup]
        run(conninfo, *statements)
        bridge = Bridge(
            *(tmp_path_factory.mktemp("bugs"), conninfo, kafka, f"t{uuid.uuid4().hex[:12]}"),
            snapshot=SMALL,
            shaping={"keys": {"public.turned": ["other", "id"]}},
        )
        try:
            with ChangesOfAll(conninfo, 2) as changes:
                for _ in range(2):
                    bridge.start(**{VARIABLE: f"chunk handed:{CHUNKS_BEFORE_KILL}"})
                    assert bridge.exit_code() == -9, bridge.output
                assert DONE not in bridge.output
                read_all(bridge)
            assert changes.committed > len(BUGS)
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
            yield Outcome(bridge, rebuild(kafka.bootstrap_servers, bridge.prefix, bridge.shaping))
        finally:
            bridge.end()


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=[bug.source for bug in BUGS])
def test_a_published_bug_is_not_ours(bug: Bug, outcome: Outcome) -> None:
    """By (commit_lsn, seq) the topic makes the table; the test of offsets is below."""
    name = bug.table.strip('"')
    tables = [f"{name}_a", f"{name}_b"] if name == "measured" else [name]
    assert_copied(outcome.copy, outcome.bridge, tables=tables)
    rows = sum(len(outcome.copy.of(table, "r")) for table in tables)
    assert rows or name == "empty"


def test_events_are_in_one_order_by_offset_and_by_position(outcome: Outcome) -> None:
    """So the last event of each key is the same one by both; no row is read twice."""
    bridge = outcome.bridge
    topics = [topic for topic in bridge.topics() if topic.startswith(f"{bridge.prefix}.public.")]
    last: dict[tuple[str, int], tuple[int, int]] = {}
    reads = Counter[tuple[str, bytes]]()
    for record in read_committed(bridge.kafka.bootstrap_servers, topics):
        if record.value is None:
            continue
        event = Envelope.model_validate_json(record.value)
        position = event.source.commit_lsn, event.source.seq
        place = record.topic, record.partition
        assert position > last.get(place, (-1, -1)), f"{record.topic}: {position} is out of order"
        last[place] = position
        if event.op == "r" and record.key is not None:
            reads[record.topic, record.key] += 1
    assert len(last) > len(BUGS)
    assert max(reads.values()) == 1


@pytest.mark.long
def test_rows_of_one_copy_share_an_lsn(outcome: Outcome) -> None:
    """What dbz#1554 takes for one event; ours are told apart by seq."""
    events = outcome.copy.of("copied", "c")
    shared = Counter(event.source.lsn for event in events)
    assert max(shared.values()) > 1, "PostgreSQL gave each row of a COPY an LSN of its own"
    positions = {(event.source.commit_lsn, event.source.seq) for event in events}
    assert len(positions) == len(events)


DDL: Final = {
    "a_dropped": ("risingwave#26797", "DROP TABLE a_dropped"),
    "b_renamed": ("DBZ-3725", "ALTER TABLE b_renamed RENAME TO z_renamed"),
    "c_emptied": ("tiflow#12430", "TRUNCATE c_emptied"),
    "d_narrowed": ("DBZ-4272", "ALTER TABLE d_narrowed DROP COLUMN gone"),
    "e_replaced": (
        "DBZ-4196",
        "BEGIN; DROP TABLE e_replaced; CREATE TABLE e_replaced (id text PRIMARY KEY);"
        " INSERT INTO e_replaced VALUES ('one'), ('two'); COMMIT",
    ),
}
"""Table -> the bug, and what happens to the table in the middle of its rows."""


def begun(bridge: Bridge, table: str) -> bool:
    """Whether rows of the table are in Kafka."""
    assert bridge.running, bridge.output
    return any(one.table == table for one in told(bridge))


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    [True, pytest.param(False, marks=pytest.mark.long)],
    ids=["while it runs", "while it is stopped"],
)
def test_a_table_in_the_middle_of_its_rows_is_dropped_renamed_emptied_or_altered(
    runs: bool, pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """The others are read all the same, and the snapshot ends."""
    conninfo = pair.primary.conninfo(fresh_database)
    for table in DDL:
        run(
            conninfo,
            f"CREATE TABLE {table} (id int PRIMARY KEY, gone text, n int)",
            f"INSERT INTO {table} SELECT g, 'x', g FROM generate_series(1, 40) g",
        )
    slow = {**INITIAL, "chunk_rows_max": 4, "rows_per_second_max": rows_a_second(40)}
    bridge = new_bridge(conninfo, snapshot=slow).start().streaming()
    eventually(lambda: chunks(bridge) > 0, what="rows are read", timeout_s=60)
    for table, (_bug, statement) in DDL.items():
        eventually(partial(begun, bridge, table), what=f"rows of {table} are read", timeout_s=120)
        if not runs:
            assert bridge.stop() == 0, bridge.output
        run(conninfo, statement)
        if not runs:
            bridge.start().streaming()
    run(
        conninfo,
        "INSERT INTO z_renamed VALUES (999, 'x', 1)",
        "INSERT INTO c_emptied VALUES (1)",
        "INSERT INTO d_narrowed (id, n) VALUES (999, 1)",  # if all rows were read before: the shape
    )
    with psycopg.connect(conninfo) as connection:
        query = "SELECT oid::bigint FROM pg_class WHERE relkind = 'r' AND relname ~ '^[a-z]_'"
        oids = {oid for (oid,) in connection.execute(query)}

    def all_read() -> bool:
        assert bridge.running, bridge.output
        progress = told(bridge)
        return {one.oid for one in progress if one.done} >= oids and progress[-1].waiting == 0

    eventually(all_read, what="the rows of all tables are read", timeout_s=120)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_rebuilt(bridge)


@pytest.mark.long
def test_a_request_is_not_lost_where_a_restart_reads_other_tables_anew(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """dbz#2325: with a snapshot at each start, the pending one was forgotten."""
    conninfo = pair.primary.conninfo(fresh_database)
    run(
        conninfo,
        "CREATE TABLE asked (id int PRIMARY KEY, n int)",
        "INSERT INTO asked SELECT g, g FROM generate_series(1, 240) g",
        "CREATE TABLE other (id int PRIMARY KEY, n int)",
        "INSERT INTO other SELECT g, g FROM generate_series(1, 5) g",
        "CREATE TABLE signals (id text PRIMARY KEY, type text, data text)",
    )
    settings = {
        "mode": "always",
        "signal_table": "public.signals",
        "exclude": ["public.asked"],
        "chunk_rows_max": 4,
        "rows_per_second_max": rows_a_second(40),
    }
    bridge = read_all(new_bridge(conninfo, snapshot=settings))

    def all_asked() -> bool:
        return any(one.table == "asked" and one.done for one in told(bridge))

    request = """{"data-collections": ["public.asked"]}"""
    run(conninfo, f"INSERT INTO signals VALUES ('1', 'execute-snapshot', '{request}')")

    eventually(partial(begun, bridge, "asked"), what="some rows are read", timeout_s=60)
    bridge.kill()  # with rows left to read, unless this machine stood still for 6 s
    bridge.start().streaming()
    eventually(all_asked, what="all of them are", timeout_s=120)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_rebuilt(bridge)


@pytest.mark.long
def test_rows_of_a_partition_that_is_attached_come_when_they_are_asked_for(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """materialize#38432: where partitions are published as their root, ATTACH is not a change."""
    conninfo = pair.primary.conninfo(fresh_database)
    run(
        conninfo,
        "CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (100)",
        "INSERT INTO parts SELECT g, g FROM generate_series(1, 9) g",
        "CREATE TABLE parts_2 (id int PRIMARY KEY, n int)",
        "INSERT INTO parts_2 SELECT g, g FROM generate_series(100, 109) g",
        "CREATE TABLE signals (id text PRIMARY KEY, type text, data text)",
        "CREATE PUBLICATION root FOR TABLE parts, signals WITH (publish_via_partition_root)",
    )
    settings = {**INITIAL, "signal_table": "public.signals", "chunk_rows_max": 4}
    bridge = read_all(new_bridge(conninfo, snapshot=settings, publication="root"))
    request = """{"data-collections": ["public.parts"]}"""
    run(
        conninfo,
        "ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (100) TO (200)",
        f"INSERT INTO signals VALUES ('1', 'execute-snapshot', '{request}')",
    )
    done(bridge, times=2)
    run(conninfo, "UPDATE parts SET n = -n WHERE id IN (1, 100)")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_rebuilt(bridge)
