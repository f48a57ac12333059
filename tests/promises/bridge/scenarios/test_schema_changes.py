"""DDL while rows flow: later events have the new shape, earlier ones keep theirs, told once."""

import random
import signal

import pytest

from schemas.errors import ExitCode
from tests.promises.bridge.scenarios.conftest import Scene
from tests.providers.waiting import eventually

CHANGES = (
    ("ALTER TABLE t ADD COLUMN c numeric(8, 2)", "INSERT INTO t VALUES ({}, 'x', 1.5)"),
    ("ALTER TABLE t RENAME COLUMN c TO price", "UPDATE t SET price = 2 WHERE id = {} - 10"),
    ("ALTER TABLE t ALTER price TYPE text", "INSERT INTO t VALUES ({}, 'x', 'text')"),
    ("ALTER TABLE t ALTER note TYPE varchar(40)", "INSERT INTO t VALUES ({}, 'x')"),
    ("ALTER TABLE t DROP COLUMN price", "INSERT INTO t VALUES ({}, 'x')"),
    ("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET note = 'y' WHERE id = {} - 10"),
    ("ALTER TABLE t ADD COLUMN price int DEFAULT 7", "INSERT INTO t VALUES ({}, 'x')"),
    ("ALTER TABLE t ALTER id TYPE bigint", "INSERT INTO t VALUES ({}, 'x')"),
    ("ALTER TABLE t REPLICA IDENTITY DEFAULT", "DELETE FROM t WHERE id = {} - 10"),
    ("CREATE TYPE mood AS ENUM ('sad')", "INSERT INTO t VALUES ({}, 'x')"),
    ("ALTER TABLE t ADD COLUMN m mood DEFAULT 'sad'", "INSERT INTO t VALUES ({}, 'x')"),
)
SHAPES = [
    ["id int4", "note text"],
    ["id int4", "note text", "c numeric"],
    ["id int4", "note text", "price numeric"],
    ["id int4", "note text", "price text"],
    ["id int4", "note varchar", "price text"],
    ["id int4", "note varchar"],
    ["id int4", "note varchar"],  # FULL
    ["id int4", "note varchar", "price int4"],
    ["id int8", "note varchar", "price int4"],
    ["id int8", "note varchar", "price int4"],  # DEFAULT
    ["id int8", "note varchar", "price int4", "m public.mood"],
]
REWRITE = "UPDATE t SET id = id"
"""Tells every value anew."""


def steps() -> list[str]:
    return [
        statement.format(number)
        for number, (ddl, row) in enumerate(CHANGES, 20)
        for statement in (ddl, row)
    ]


def told(scene: Scene) -> list[list[str]]:
    shapes = scene.finish().shapes
    assert {shape.table for shape in shapes} == {"t"}
    return [[f"{column.name} {column.type}" for column in shape.after] for shape in shapes]


@pytest.fixture
def table(scene: Scene) -> Scene:
    """With a table of 20 rows that the bridge has seen."""
    scene.run("CREATE TABLE t (id int PRIMARY KEY, note text)")
    scene.start()
    scene.run("INSERT INTO t SELECT g, 'x' FROM generate_series(0, 19) g")
    return scene


@pytest.mark.long
def test_schema_changes_between_transactions(table: Scene) -> None:
    table.run(*steps(), REWRITE)
    assert told(table) == SHAPES


@pytest.mark.long
def test_schema_changes_within_one_transaction(table: Scene) -> None:
    table.together(*steps(), REWRITE)
    assert told(table) == SHAPES


def test_schema_changes_within_a_streamed_transaction(table: Scene) -> None:
    bulk = "INSERT INTO t SELECT g, 'x' FROM generate_series({0}, {0} + 600) g"
    changes = [
        part
        for number, step in enumerate(steps())
        for part in (step, *([bulk.format(1000 * number)] if number % 6 == 5 else []))
    ]
    table.together(*changes, REWRITE)
    assert told(table) == SHAPES
    assert table.streamed() >= 1


def test_schema_changes_while_the_bridge_is_down(table: Scene) -> None:
    """Everything is decoded later, by the catalog of its time."""
    table.bridge.caught_up()
    table.bridge.kill()
    table.run(*steps(), REWRITE)
    table.start()
    assert told(table) == SHAPES


def test_killed_right_after_each_change(table: Scene) -> None:
    """A shape is told exactly once, wherever between DDL, row and Kafka's commit the kill falls."""
    moments = random.Random(20261121)
    for number, step in enumerate(steps()):
        table.run(step)
        if number % 3 == 0:
            eventually(lambda: moments.random() < 0.2, what="some moment", interval_s=0.01)
            table.bridge.kill()
            table.bridge.start()
    table.bridge.streaming()
    table.run(REWRITE)
    assert told(table) == SHAPES


@pytest.mark.long
def test_a_large_transaction_with_ddl_killed_between_its_parts(scene: Scene) -> None:
    scene.configure(transaction_bytes_max=2**16)
    scene.run("CREATE TABLE t (id int PRIMARY KEY, note text)")
    scene.start(SLOTBRIDGE_FAILPOINT="between parts:2")
    rows = "generate_series({0}, {0} + 799) g"
    bulk = f"INSERT INTO t (id, note) SELECT g, repeat('x', 99) FROM {rows}"
    scene.together(
        bulk.format(0),
        "ALTER TABLE t ADD COLUMN c int",
        bulk.format(10_000),
        "ALTER TABLE t DROP COLUMN c",
        bulk.format(20_000),
        "ALTER TABLE t ADD COLUMN c text",
        "UPDATE t SET note = 'y'",
    )
    again = {"SLOTBRIDGE_FAILPOINT": "between parts:10"}
    for following in (again, again, {}):
        assert scene.bridge.exit_code() == -signal.SIGKILL
        assert scene.bridge.progress()[-1].position.seq, "it is in the middle"
        scene.bridge.start(**following)
    scene.bridge.streaming()
    assert told(scene) == [
        ["id int4", "note text"],
        ["id int4", "note text", "c int4"],
        ["id int4", "note text"],
        ["id int4", "note text", "c text"],
    ]


@pytest.mark.long
def test_tables_renamed_dropped_and_made_again(scene: Scene) -> None:
    """The oid tells which table a name means; equal columns don't make it the same table."""
    scene.run("CREATE TABLE t (id int PRIMARY KEY)")
    scene.start()
    scene.run("INSERT INTO t VALUES (1), (2)", "ALTER TABLE t RENAME TO t_old")
    scene.run("INSERT INTO t_old VALUES (3)", "CREATE TABLE t (id int PRIMARY KEY)")
    scene.run("INSERT INTO t VALUES (1)", "UPDATE t_old SET id = -id")
    scene.together(
        "ALTER TABLE t RENAME TO t_new",
        "ALTER TABLE t_old RENAME TO t",
        "INSERT INTO t VALUES (4)",
        "INSERT INTO t_new VALUES (4)",
    )
    scene.together(
        "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (9)"
    )
    scene.run("CREATE SCHEMA other", "ALTER TABLE t_new SET SCHEMA other")
    scene.run("INSERT INTO other.t_new VALUES (5)", "DELETE FROM other.t_new WHERE id = 1")
    copy = scene.finish()
    first, *others = [shape.oid for shape in copy.shapes if shape.table == "t"]
    assert len({first, *others}) == 3
    assert others.count(first) == 1
    assert [shape.schema_ for shape in copy.shapes if shape.table == "t_new"] == ["public", "other"]


def test_partitions_come_and_go(scene: Scene) -> None:
    """Their own topics: an attached one goes on; a new one begins."""
    scene.run(
        "CREATE TABLE p (id int PRIMARY KEY, b int) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p_2 (id int PRIMARY KEY, b int)",
    )
    scene.start()
    scene.run(
        "INSERT INTO p VALUES (1)",
        "INSERT INTO p_2 VALUES (12)",
        "ALTER TABLE p ATTACH PARTITION p_2 FOR VALUES FROM (10) TO (20)",
        "UPDATE p SET id = id + 1",
        "ALTER TABLE p DETACH PARTITION p_1 CONCURRENTLY",
        "INSERT INTO p_1 VALUES (5)",
        "CREATE TABLE p_3 PARTITION OF p FOR VALUES FROM (20) TO (30)",
        "UPDATE p SET id = id + 10 WHERE id < 20",
        "ALTER TABLE p ADD COLUMN c int",
        "INSERT INTO p VALUES (25, 1, 2)",
    )
    copy = scene.finish(unknown=1)
    assert {shape.table for shape in copy.shapes} == {"p_1", "p_2", "p_3"}


@pytest.mark.long
def test_partitions_of_a_published_root_come_and_go(scene: Scene) -> None:
    scene.run(
        "CREATE TABLE p (id int PRIMARY KEY, b int) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    )
    scene.publish("FOR TABLE p WITH (publish_via_partition_root)")
    scene.start()
    scene.run(
        "INSERT INTO p VALUES (1)",
        "CREATE TABLE p_2 (b int, gone int, id int NOT NULL)",
        "ALTER TABLE p_2 DROP COLUMN gone",
        "ALTER TABLE p ATTACH PARTITION p_2 FOR VALUES FROM (10) TO (20)",
        "INSERT INTO p VALUES (11, 1), (2, 2)",
        "UPDATE p SET id = id + 12 WHERE id < 5",
        "DELETE FROM p WHERE id = 11",
        "ALTER TABLE p DETACH PARTITION p_1",
        "INSERT INTO p_1 VALUES (1000)",
    )
    scene.together("INSERT INTO p VALUES (15, 1)", "ALTER TABLE p ADD c int", "UPDATE p SET c = id")
    copy = scene.finish()
    assert copy.columns("p") == [["id", "b"], ["id", "b", "c"]]
    assert {shape.table for shape in copy.shapes} == {"p"}


@pytest.mark.long
def test_the_publication_changes_while_transactions_are_open(scene: Scene) -> None:
    """Plain and streamed ones: what comes after the change is as the publication is then."""
    scene.run("CREATE TABLE a (id int PRIMARY KEY, b int, c int)")
    scene.run("CREATE TABLE late (id int PRIMARY KEY)", "CREATE TABLE early (id int PRIMARY KEY)")
    scene.publish("FOR TABLE a, early")
    scene.start()
    insert = "INSERT INTO {0} SELECT g FROM generate_series({1}, {1} + 999) g"
    with scene.other() as one, scene.other() as two:
        one.execute(insert.format("a", 1000).encode())
        two.execute(insert.format("a", 2000).encode())
        two.execute(b"INSERT INTO late VALUES (1)")
        scene.run("INSERT INTO early VALUES (1)")
        scene.alter("SET TABLE a (id, b), late")
        scene.run("INSERT INTO a VALUES (1, 1, 1)", "INSERT INTO late VALUES (2)")
        scene.run("INSERT INTO early VALUES (2)")
        one.commit()
        scene.run("INSERT INTO a VALUES (2, 2, 2)", "UPDATE a SET b = 7 WHERE id < 1010")
        two.execute(insert.format("a", 3000).encode())
        two.execute(b"INSERT INTO late VALUES (3)")
        scene.run("INSERT INTO a VALUES (3, 3, 3)")
        two.commit()
        scene.run("INSERT INTO a VALUES (4, 4, 4)", "UPDATE a SET b = 8 WHERE id % 1000 = 0")
    copy = scene.finish(where={"late": "id <> 1"})
    assert scene.streamed() >= 2
    assert len(copy.of("early")) == 1


@pytest.mark.long
def test_an_older_shape_that_is_committed_later_is_not_the_present_one(scene: Scene) -> None:
    """A streamed transaction commits after its table was described anew outside of it.

    Its rows were read before the publication changed; those after it have the present columns.
    """
    scene.run("CREATE TABLE a (id int PRIMARY KEY, b int, c int)", "CREATE TABLE filler (id int)")
    scene.publish("FOR TABLE a, filler")
    scene.start()
    scene.run("INSERT INTO a VALUES (1, 1, 1)")
    with scene.other() as one, scene.other() as two:
        one.execute("INSERT INTO a SELECT g, g, g FROM generate_series(1001, 1300) g")
        two.execute("INSERT INTO filler SELECT generate_series(1, 250)")
        eventually(lambda: scene.streamed() >= 1, what="all of the first one is streamed")
        scene.alter("SET TABLE a (id, b), filler")
        scene.run("INSERT INTO a VALUES (2, 2, 2)")
        one.commit()
        scene.run("INSERT INTO a VALUES (3, 3, 3)", "UPDATE a SET b = 7")
        two.rollback()
    copy = scene.finish()
    assert copy.columns("a") == [["id", "b", "c"], ["id", "b"]] * 2


def test_a_dropped_publication_stops_the_bridge(scene: Scene) -> None:
    """The server only warns in its log, and sends nothing: that would be a silent loss."""
    scene.run("CREATE TABLE t (id int PRIMARY KEY)")
    scene.start()
    scene.run("INSERT INTO t VALUES (1)")
    scene.bridge.caught_up()
    scene.run(f"DROP PUBLICATION {scene.bridge.publication}")
    assert scene.bridge.exit_code() == ExitCode.SERVER_SETTING
    scene.bridge.start()
    assert scene.bridge.exit_code() == ExitCode.SERVER_SETTING
    assert scene.bridge.output.count("the publication is gone") == 2
    scene.publish("FOR ALL TABLES")
    scene.bridge.start()
    assert scene.bridge.exit_code() == ExitCode.WITNESSES_DISAGREE
    scene.start(SLOTBRIDGE_BRIDGE__ACCEPT=f'["{scene.bridge.token}"]')
    scene.run("INSERT INTO t VALUES (2)")
    scene.finish()


NAMES = (
    "MiXed Case",
    "quo\"ted 'name'",
    "dots.in.it",
    "emoji 🐘",
    "back\\slash",
    "é" * 31 + "x",  # 63 bytes, the longest
    "select",
    "%s {} %",
)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def test_names_of_all_kinds(scene: Scene) -> None:
    """Of schemas, tables, columns and types, in events, keys, shapes and counts."""
    for name in NAMES:
        n, kind = quoted(name), quoted(name[1:])
        scene.run(
            f"CREATE SCHEMA {n}",
            f"CREATE TYPE {n}.{kind} AS ENUM ('x')",
            f"CREATE TABLE {n}.{n} ({n} int PRIMARY KEY, y {n}.{kind})",
            f"ALTER TABLE {n}.{n} REPLICA IDENTITY FULL",
        )
    scene.start()
    for n in map(quoted, NAMES):
        scene.run(f"INSERT INTO {n}.{n} VALUES (1, 'x'), (2, NULL)")
        scene.run(f"UPDATE {n}.{n} SET {n} = 3 WHERE {n} = 2", f"DELETE FROM {n}.{n} WHERE {n} = 1")
    copy = scene.finish()
    assert [(shape.schema_, shape.table) for shape in copy.shapes] == [(n, n) for n in NAMES]
    assert [shape.after[0].name for shape in copy.shapes] == list(NAMES)
    assert [shape.after[1].type for shape in copy.shapes] == [f"{n}.{n[1:]}" for n in NAMES]
    assert all(shape.after[0].key for shape in copy.shapes)
