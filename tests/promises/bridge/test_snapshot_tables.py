"""What a snapshot reads of tables of all kinds: as streaming publishes it, or not at all."""

import json
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from schemas.errors import ExitCode
from services.bridge.cli.app import app
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import DONE, INITIAL, done, read_all, told
from tests.promises.bridge.values.samples import ARRAYS, SCALARS, SETUP
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

SMALL = {**INITIAL, "chunk_rows_max": 3}


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


def run(conninfo: str, *statements: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def values(bridge: Bridge, table: str, *ops: str) -> list[dict[str, Any]]:
    """The rows of these events, in order."""
    events = [event for event in bridge.events(table) if event["op"] in ops]
    events.sort(key=lambda event: (event["source"]["commit_lsn"], event["source"]["seq"]))
    return [event["after"] for event in events]


def linguistic(conninfo: str) -> str:
    """A collation that sorts a before B, where this server has one; else one of its own."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for (name,) in connection.execute(
            "SELECT DISTINCT collname FROM pg_collation WHERE collprovider IN ('c', 'i')"
            " AND collname <> 'default' AND collencoding IN (-1, pg_char_to_encoding('UTF8'))"
        ).fetchall():
            try:
                found = connection.execute(f"SELECT 'a' < 'B' COLLATE \"{name}\"".encode())
                if found.fetchone() == (True,):
                    return str(name)
            except psycopg.Error:  # of another encoding, or gone from the system
                continue
    return "pg_c_utf8"


def test_keys_of_all_kinds_are_read_in_the_servers_order(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """uuid, composite with a collation of its own, citext, numeric, timestamptz, quoted names."""
    collation = linguistic(conninfo)
    run(
        conninfo,
        "CREATE EXTENSION citext",
        "CREATE TABLE words (id citext PRIMARY KEY, n int)",
        "INSERT INTO words SELECT chr(CASE g % 2 WHEN 0 THEN 65 ELSE 97 END + g), g"
        " FROM generate_series(0, 25) g",
        "CREATE TABLE u (id uuid PRIMARY KEY, n int)",
        "INSERT INTO u SELECT gen_random_uuid(), g FROM generate_series(1, 50) g",
        f'CREATE TABLE "Odd ""name" ("a B" text COLLATE "{collation}", n numeric(6,2),'
        ' t timestamptz, PRIMARY KEY (n, "a B", t))',
        """INSERT INTO "Odd ""name"
             SELECT c, g / 7.0, '2000-01-01'::timestamptz + g * '1us'::interval
               FROM generate_series(1, 9) g,
                    unnest(ARRAY['a', 'B', 'b', 'A', 'ä', '', 'é', 'Z', 'x y', '(1,"', '\\']) c""",
        "CREATE TABLE parts (id int, region text, PRIMARY KEY (region, id))"
        " PARTITION BY LIST (region)",
        "CREATE TABLE parts_e PARTITION OF parts FOR VALUES IN ('e')",
        "CREATE TABLE parts_w PARTITION OF parts FOR VALUES IN ('w')",
        "INSERT INTO parts"
        " SELECT g, CASE WHEN g % 2 = 0 THEN 'e' ELSE 'w' END FROM generate_series(1, 9) g",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
        "CREATE TABLE identity (id int NOT NULL, n int)",
        "CREATE UNIQUE INDEX i ON identity (id DESC)",
        "ALTER TABLE identity REPLICA IDENTITY USING INDEX i",
        "INSERT INTO identity SELECT g, g FROM generate_series(1, 8) g",
        "CREATE TABLE whole (id int PRIMARY KEY, n int)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "INSERT INTO whole SELECT g, g FROM generate_series(1, 8) g",
        "CREATE TABLE empty (id int PRIMARY KEY)",
    )
    bridge = read_all(new_bridge(conninfo, snapshot=SMALL))
    run(
        conninfo,
        "UPDATE u SET n = -n WHERE n < 5",
        "UPDATE whole SET n = -n WHERE n < 5",
        "UPDATE identity SET n = -n WHERE n < 5",
        "DELETE FROM parts WHERE id = 2",
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    copy = assert_rebuilt(bridge)
    assert len({shape.table for shape in copy.shapes}) == len(copy.shapes), "announced twice"
    assert len(copy.of("u", "r")) == 50
    assert {one.table for one in told(bridge) if one.done} >= {"u", "empty", "parts_e", "child"}


@pytest.mark.long
def test_a_partitioned_table_is_read_as_its_root(conninfo: str, new_bridge: NewBridge) -> None:
    run(
        conninfo,
        "CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (5)",
        "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (5) TO (100)",
        "INSERT INTO parts SELECT g, g FROM generate_series(1, 9) g",
        "CREATE PUBLICATION root FOR TABLE parts WITH (publish_via_partition_root)",
    )
    bridge = read_all(new_bridge(conninfo, snapshot=SMALL, publication="root"))
    run(conninfo, "UPDATE parts SET n = 0 WHERE id = 6")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert len(assert_rebuilt(bridge).of("parts", "r")) == 9


def test_rows_are_filtered_shaped_and_masked_as_changes_are(
    conninfo: str, new_bridge: NewBridge
) -> None:
    run(
        conninfo,
        "CREATE TABLE p (id int PRIMARY KEY, ssn text, mail text, n int,"
        " twice int GENERATED ALWAYS AS (n * 2) STORED)",
        "CREATE TABLE hidden (id int PRIMARY KEY)",
        "CREATE PUBLICATION few FOR TABLE p (id, ssn, mail, n) WHERE (id < 100), hidden",
        "INSERT INTO p SELECT g, 's' || g, 'm' || g, g FROM generate_series(90, 110) g",
        "INSERT INTO hidden VALUES (1)",
    )
    shaping = {
        "exclude": ["public.hidden"],
        "columns": {"public.p": {"exclude": ["ssn"]}},
        "masks": {"public.p": {"mail": {"text": "-"}}},
    }
    where = {**SMALL, "where": {"public.p": "n > 93 OR n IS NULL"}}
    bridge = read_all(new_bridge(conninfo, snapshot=where, shaping=shaping, publication="few"))
    run(conninfo, "INSERT INTO p VALUES (1, 's', 'm', 1)")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert values(bridge, "p", "r") == [{"id": n, "mail": "-", "n": n} for n in range(94, 100)]
    assert values(bridge, "p", "c") == [{"id": 1, "mail": "-", "n": 1}]
    assert f"{bridge.prefix}.public.hidden" not in bridge.topics()


@pytest.mark.long
def test_a_condition_of_the_settings_finds_operators_of_extensions(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """With an empty search_path, citext's `=` would be that of text, and rows would be left out."""
    run(
        conninfo,
        "CREATE EXTENSION citext",
        "CREATE TABLE people (id int PRIMARY KEY, name citext)",
        "INSERT INTO people VALUES (1, 'Ann'), (2, 'ann'), (3, 'Bob')",
    )
    where = {**SMALL, "where": {"public.people": "name = 'ANN'"}}
    bridge = read_all(new_bridge(conninfo, snapshot=where))
    assert bridge.stop() == 0, bridge.output
    assert [row["id"] for row in values(bridge, "people", "r")] == [1, 2]


def test_values_of_all_types_are_encoded_as_streaming_encodes_them(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Each sample is in the table before, and once more by the stream, of the same shape."""
    samples = SCALARS | ARRAYS
    columns = [f"c{number}" for number in range(len(samples))]
    typed = ", ".join(f"{name} {kind}" for name, kind in zip(columns, samples, strict=True))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in SETUP.split(";"):
            connection.execute(statement.encode())
        connection.execute(f"CREATE TABLE v (id int PRIMARY KEY, {typed})".encode())
        for row in range(max(map(len, samples.values()))):
            values_of = [texts[row] if row < len(texts) else None for texts in samples.values()]
            places = ", ".join(f"%s::{kind}" for kind in samples)
            connection.execute(f"INSERT INTO v VALUES ({row}, {places})".encode(), values_of)
    bridge = read_all(new_bridge(conninfo, snapshot=SMALL))
    run(conninfo, f"INSERT INTO v SELECT id + 1000, {', '.join(columns)} FROM v ORDER BY id")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    read, streamed = values(bridge, "v", "r"), values(bridge, "v", "c")
    assert len(read) == len(streamed) > 5
    for one, other in zip(read, streamed, strict=True):
        assert {**one, "id": one["id"] + 1000} == other
    assert len(bridge.records("schema")) == 1, "the shape was announced twice"


def test_a_table_without_a_key_is_refused_by_name_at_the_beginning(
    conninfo: str, new_bridge: NewBridge
) -> None:
    run(conninfo, "CREATE TABLE log (n int)", "CREATE TABLE t (id int PRIMARY KEY)")
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "without_key": "refuse"}).start()
    assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
    assert "public.log" in bridge.output.splitlines()[-1]
    settings = {**INITIAL, "without_key": "refuse", "exclude": ["public.log"]}
    excluded = read_all(new_bridge(conninfo, snapshot=settings))
    run(conninfo, "INSERT INTO log VALUES (1)")
    excluded.caught_up()
    assert values(excluded, "log", "c") == [{"n": 1}]


@pytest.mark.long
def test_initial_only_ends_when_all_rows_are_read(conninfo: str, new_bridge: NewBridge) -> None:
    run(
        conninfo,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 10)",
    )
    settings = {**SMALL, "mode": "initial_only", "hold_ms": 10_000}  # chunks stay as large
    bridge = new_bridge(conninfo, snapshot=settings).start()
    assert bridge.exit_code() == 0, bridge.output
    told = [bridge.output.index(line) for line in (DONE, "stopped", "from now on the slot keeps")]
    assert told == sorted(told), bridge.output
    assert len(values(bridge, "t", "r")) == 10
    command = ["snapshot", "status", "--config", str(bridge.config), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (table,) = json.loads(done.stdout.splitlines()[-1])["tables"]
    assert (table["table"], table["rows"], table["chunks"], table["done"]) == ("t", 10, 4, True)


@pytest.mark.long
def test_initial_only_fails_where_a_table_can_not_be_read(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """All others are read first; the error names the one whose rows Kafka lacks."""
    run(
        conninfo,
        "CREATE TABLE a (id int PRIMARY KEY)",
        "INSERT INTO a VALUES (1)",
    )
    settings = {**SMALL, "mode": "initial_only", "without_key": "refuse"}
    bridge = new_bridge(conninfo, snapshot=settings).start()
    assert bridge.exit_code() == 0, bridge.output
    run(
        conninfo,
        "CREATE TABLE b (id int PRIMARY KEY)",
        "INSERT INTO b SELECT generate_series(1, 10)",
        "CREATE TABLE log (n int)",
        "INSERT INTO log VALUES (1)",
    )
    for _ in range(2):  # with rows to read, and without
        assert bridge.start().exit_code() == ExitCode.SETTINGS, bridge.output
        assert "public.log has no primary key" in bridge.output.splitlines()[-1]
        assert len(values(bridge, "b", "r")) == 10


def test_a_locked_table_does_not_hold_the_stream(conninfo: str, new_bridge: NewBridge) -> None:
    """And a transaction that was open before is waited for, while changes flow."""
    run(
        conninfo,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 10)",
    )
    bridge = read_all(new_bridge(conninfo, snapshot=INITIAL))
    assert bridge.stop() == 0
    with psycopg.connect(conninfo) as holder:
        holder.execute("CREATE TABLE fresh (id int PRIMARY KEY)")
        holder.execute("INSERT INTO fresh SELECT generate_series(1, 10)")
        holder.commit()
        run(conninfo, "VACUUM FULL fresh")  # its rows may be older than the file: they are read
        holder.execute("LOCK TABLE fresh IN ACCESS EXCLUSIVE MODE")
        holder.execute("SELECT pg_current_xact_id()")
        bridge.start().streaming()
        run(conninfo, "INSERT INTO other VALUES (1)")
        bridge.caught_up()
        eventually(lambda: "postponed a chunk" in bridge.output, what="it is postponed")
        run(conninfo, "INSERT INTO other VALUES (2)")
        bridge.caught_up()
        assert len(values(bridge, "other", "c")) == 2
        holder.rollback()
    done(bridge, times=2)
    assert bridge.stop() == 0, bridge.output
    assert_rebuilt(bridge)


def test_a_table_changes_its_form_in_the_middle(conninfo: str, new_bridge: NewBridge) -> None:
    run(
        conninfo,
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, g FROM generate_series(1, 600) g",
    )
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "chunk_rows_max": 5})
    bridge.start().streaming()
    eventually(
        lambda: f"{bridge.prefix}.snapshot" in bridge.topics() and len(told(bridge)) > 1,
        what="rows",
    )
    run(
        conninfo,
        "UPDATE t SET n = -n WHERE id IN (1, 600)",
        "ALTER TABLE t ADD extra text DEFAULT 'e', ALTER n TYPE bigint",
        "UPDATE t SET extra = 'x' WHERE id IN (2, 599)",
    )
    done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo) as connection:
        rows = connection.execute("SELECT id, n, extra FROM t").fetchall()
    folded = fold(bridge, "t")
    assert folded.by_offset == folded.by_position
    assert {(row["id"], row["n"]) for row in folded.by_offset.values()} == {row[:2] for row in rows}
    events = [json.loads(value) for _, value in bridge.records("schema") if value]
    assert [[c["name"] for c in event["after"]] for event in events] == [
        *(["id", "n"], ["id", "n", "extra"])
    ]
