"""PostgreSQL's own scenarios of tables, src/test/subscription/t, by their names.

Where a subscriber's tables are compared there, the tables made from Kafka are compared here.
"""

import base64
import json

import psycopg
import pytest

from schemas.events import message_topic
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.scenarios.conftest import SERVERS, SMALL, Scene
from tests.providers import databases
from tests.providers.interface import Provider


@pytest.mark.parametrize("scene", SERVERS, indirect=True)
def test_001_rep_changes(scene: Scene) -> None:
    """Every replica identity, tables that join and leave the publication, what it publishes."""
    scene.run(
        "CREATE TABLE tab_ins (a int)",
        "CREATE TABLE tab_full (a int)",
        "ALTER TABLE tab_full REPLICA IDENTITY FULL",
        "CREATE TABLE tab_full2 (x text)",
        "ALTER TABLE tab_full2 REPLICA IDENTITY FULL",
        "CREATE TABLE tab_full_pk (a int PRIMARY KEY, b text)",
        "ALTER TABLE tab_full_pk REPLICA IDENTITY FULL",
        "CREATE TABLE tab_rep (a int PRIMARY KEY)",
        "CREATE TABLE tab_mixed (a int PRIMARY KEY, b text, c numeric)",
        "CREATE TABLE tab_include (a int, b text, CONSTRAINT covering PRIMARY KEY (a) INCLUDE (b))",
        "CREATE TABLE tab_nothing (a int)",
        "ALTER TABLE tab_nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE tab_no_col ()",
        "CREATE TABLE tab_notrep (a int)",
        "CREATE TABLE temp_later (a int PRIMARY KEY)",
    )
    tables = "tab_ins, tab_full, tab_full2, tab_full_pk, tab_rep, tab_mixed, tab_include, "
    scene.publish(f"FOR TABLE {tables} tab_nothing, tab_no_col")
    scene.start()
    scene.run(
        "INSERT INTO tab_ins SELECT generate_series(1, 50)",
        "INSERT INTO tab_rep SELECT generate_series(1, 50)",
        "DELETE FROM tab_rep WHERE a > 20",
        "UPDATE tab_rep SET a = -a",
        "INSERT INTO tab_full VALUES (1), (1), (2)",
        "UPDATE tab_full SET a = a * a + 1 WHERE a = 1",
        "DELETE FROM tab_full WHERE ctid IN (SELECT min(ctid) FROM tab_full)",
        "INSERT INTO tab_full2 VALUES ('a'), ('a'), ('b'), (NULL)",
        "UPDATE tab_full2 SET x = 'bb' WHERE x = 'b' OR x IS NULL",
        "INSERT INTO tab_full_pk VALUES (1, 'foo'), (2, 'baz')",
        "UPDATE tab_full_pk SET b = 'bar' WHERE a = 1",
        "UPDATE tab_full_pk SET a = 3 WHERE a = 2",
        "INSERT INTO tab_mixed VALUES (2, 'bar', 2.2)",
        "UPDATE tab_mixed SET b = 'baz' WHERE a = 2",
        "INSERT INTO tab_include SELECT g, 'x' FROM generate_series(1, 9) g",
        "DELETE FROM tab_include WHERE a > 4",
        "UPDATE tab_include SET b = 'y', a = -a",
        "INSERT INTO tab_nothing VALUES (20)",
        "INSERT INTO tab_no_col DEFAULT VALUES",
        "INSERT INTO tab_notrep VALUES (1)",
    )
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        scene.run("UPDATE tab_nothing SET a = 1")
    scene.alter("ADD TABLE temp_later")
    scene.run("INSERT INTO temp_later VALUES (1)")
    scene.alter("SET (publish = 'insert, delete')")
    scene.run("UPDATE temp_later SET a = a", "DELETE FROM tab_rep WHERE a = -1")
    scene.alter("SET (publish = 'insert, update, delete, truncate')")
    scene.run("UPDATE temp_later SET a = 2")
    scene.alter("DROP TABLE temp_later")
    scene.run("INSERT INTO temp_later VALUES (3)")
    copy = scene.finish()
    assert list(copy.table("tab_include").keyed) == [
        f'{{"a":{n}}}'.encode() for n in range(-1, -5, -1)
    ]
    assert len(copy.of("temp_later")) == 3
    assert "tab_notrep" not in {shape.table for shape in copy.shapes}


@pytest.mark.long
def test_005_encoding(pair: Provider, topic_prefix: str, new_bridge: NewBridge) -> None:
    """A database in LATIN1: names and values come in UTF-8."""
    name = f"latin_{topic_prefix}"
    known = databases.origins(pair.primary)
    with databases.connect(pair.primary) as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING LATIN1 LOCALE 'C' TEMPLATE template0".encode()
        )
    databases.await_copy(pair.standby, name)
    conninfo = pair.primary.conninfo(name, options=SMALL, client_encoding="UTF8")
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            scene = Scene(connection, new_bridge(conninfo), new_bridge)
            scene.run('CREATE TABLE "größe" ("ärger" text PRIMARY KEY)')
            scene.start()
            scene.run("INSERT INTO \"größe\" VALUES ('Motörhead §')")
            copy = scene.finish()
        assert copy.table("größe").rows == [{"ärger": "Motörhead §"}]
    finally:
        databases.remove(pair.primary, name, keep_origins=known)


@pytest.mark.long
def test_006_rewrite(scene: Scene) -> None:
    """A rewritten table has no rows to decode; what follows has the new columns."""
    scene.run("CREATE TABLE test1 (a int PRIMARY KEY, b text)")
    scene.start()
    scene.run("INSERT INTO test1 VALUES (1, 'one'), (2, 'two')")
    scene.run("ALTER TABLE test1 ADD c int NOT NULL DEFAULT random(1, 1)")
    scene.run("INSERT INTO test1 VALUES (3, 'three', 33)")
    scene.together(
        "INSERT INTO test1 VALUES (4, 'four', 44)",
        "ALTER TABLE test1 ALTER a TYPE bigint, ADD d int NOT NULL DEFAULT 5",
        "INSERT INTO test1 VALUES (5, 'five', 55, 555)",
    )
    scene.run("VACUUM FULL test1", "CLUSTER test1 USING test1_pkey", "UPDATE test1 SET b = 'x'")
    scene.finish()


@pytest.mark.long
def test_009_matviews(scene: Scene) -> None:
    scene.run("CREATE TABLE test1 (a int PRIMARY KEY, b text)")
    scene.start()
    scene.run("INSERT INTO test1 VALUES (1, 'one'), (2, 'two')")
    scene.run("CREATE MATERIALIZED VIEW testmv1 AS SELECT * FROM test1")
    scene.run("INSERT INTO test1 VALUES (3, 'three')", "REFRESH MATERIALIZED VIEW testmv1")
    copy = scene.finish()
    assert {shape.table for shape in copy.shapes} == {"test1"}


def test_010_truncate(scene: Scene) -> None:
    """Cascaded, of several tables at once, with sequences, in large transactions, rolled back."""
    scene.run(
        "CREATE TABLE tab1 (a int PRIMARY KEY)",
        "CREATE TABLE tab2 (a int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, b int)",
        "CREATE TABLE tab3 (a int PRIMARY KEY)",
        "CREATE TABLE tab4 (x int PRIMARY KEY, y int REFERENCES tab3)",
        "CREATE TABLE tab5 (a int)",
    )
    scene.start()
    scene.run(
        "INSERT INTO tab1 VALUES (1), (2), (3)",
        "INSERT INTO tab2 (b) VALUES (1), (2), (3)",
        "INSERT INTO tab3 VALUES (1), (2), (3)",
        "INSERT INTO tab4 VALUES (11, 1), (111, 1), (22, 2)",
        "INSERT INTO tab5 VALUES (1), (1), (2)",
        "TRUNCATE tab1",
        "TRUNCATE tab2 RESTART IDENTITY",
        "INSERT INTO tab2 (b) VALUES (4)",
        "TRUNCATE tab3 CASCADE",
        "INSERT INTO tab3 VALUES (1)",
    )
    scene.run("BEGIN", "TRUNCATE tab5", "ROLLBACK")
    scene.together(
        "INSERT INTO tab1 SELECT generate_series(1, 2000)",
        "SAVEPOINT s",
        "TRUNCATE tab1, tab5, tab4",
        "ROLLBACK TO s",
        "INSERT INTO tab5 VALUES (9)",
        "TRUNCATE tab1, tab2",
        "INSERT INTO tab1 VALUES (77)",
    )
    copy = scene.finish()
    assert scene.streamed() >= 1
    assert [len(copy.of(f"tab{n}", "t")) for n in range(1, 6)] == [2, 2, 1, 1, 0]


@pytest.mark.since_18
def test_011_generated(scene: Scene) -> None:
    """Stored generated columns are published when the publication says so, else left out."""
    scene.run(
        "CREATE TABLE tab1 (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED,"
        " v int GENERATED ALWAYS AS (a + 1) VIRTUAL)",
        "CREATE TABLE tab2 (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
    )
    scene.publish("FOR TABLE tab1, tab2 (a) WITH (publish_generated_columns = stored)")
    scene.start()
    scene.run("INSERT INTO tab1 VALUES (1), (2), (3)", "INSERT INTO tab2 VALUES (1)")
    scene.run("UPDATE tab1 SET a = 6 WHERE a = 3")
    scene.alter("SET (publish_generated_columns = none)")
    scene.run("INSERT INTO tab1 VALUES (4)", "UPDATE tab1 SET a = 10 WHERE a = 1")
    scene.alter("SET (publish_generated_columns = stored)")
    scene.run("INSERT INTO tab1 VALUES (5)", "UPDATE tab1 SET a = -a", "UPDATE tab2 SET a = 2")
    copy = scene.finish()
    assert copy.columns("tab1") == [["a", "b"], ["a"], ["a", "b"]]
    assert copy.columns("tab2") == [["a"]]


def test_020_messages(scene: Scene) -> None:
    """Transactional ones come at their commit or never, others at once; both in large ones."""
    scene.run("CREATE TABLE tab_test (a int PRIMARY KEY)")
    scene.start()
    scene.run(
        "SELECT pg_logical_emit_message(true, 'slotbridge.failover', 'a transactional message')"
    )
    scene.run("SELECT pg_logical_emit_message(false, 'slotbridge.failover', 'non-transactional')")
    scene.run(
        "BEGIN",
        "SELECT pg_logical_emit_message(true, 'slotbridge.failover', 'never')",
        "SELECT pg_logical_emit_message(false, 'slotbridge.failover', 'not to be rolled back')",
        "ROLLBACK",
    )
    scene.together(
        "INSERT INTO tab_test SELECT generate_series(1, 2000)",
        "SELECT pg_logical_emit_message(true, 'slotbridge.failover', 'in a large one')",
        "DELETE FROM tab_test WHERE a < 10",
    )
    scene.bridge.caught_up()
    assert scene.streamed() >= 1
    scene.together(
        "INSERT INTO tab_test SELECT generate_series(3001, 5000)",
        "SAVEPOINT s",
        "SELECT pg_logical_emit_message(true, 'slotbridge.failover', 'never')",
        "INSERT INTO tab_test SELECT generate_series(6001, 8000)",
        "ROLLBACK TO s",
        "SELECT pg_logical_emit_message(true, 'slotbridge.failover', 'after a savepoint')",
        "DELETE FROM tab_test WHERE a > 4000",
    )
    scene.finish()
    assert "continues with streaming off" in scene.bridge.output
    topic = message_topic(scene.bridge.prefix)
    records = read_committed(scene.bridge.kafka.bootstrap_servers, [topic])
    found = [json.loads(r.value)["message"]["content"] for r in records if r.value is not None]
    assert [base64.b64decode(content) for content in found] == [
        b"a transactional message",
        b"non-transactional",
        b"not to be rolled back",
        b"in a large one",
        b"after a savepoint",
    ]


@pytest.mark.long
def test_025_rep_changes_for_schema(scene: Scene) -> None:
    """Tables come and go with their schema."""
    scene.run(
        "CREATE SCHEMA sch1",
        "CREATE TABLE sch1.tab1 (a int PRIMARY KEY)",
        "CREATE TABLE sch1.parent (a int PRIMARY KEY, b int) PARTITION BY LIST (a)",
        "CREATE TABLE public.child PARTITION OF sch1.parent FOR VALUES IN (2)",
    )
    scene.publish("FOR TABLES IN SCHEMA sch1")
    scene.start()
    scene.run("INSERT INTO sch1.tab1 VALUES (1)", "INSERT INTO sch1.parent VALUES (2, 2)")
    scene.run("CREATE TABLE sch1.tab3 (a int PRIMARY KEY)", "INSERT INTO sch1.tab3 VALUES (1)")
    scene.run("ALTER TABLE sch1.tab3 SET SCHEMA public", "INSERT INTO tab3 VALUES (2)")
    scene.run("DROP TABLE sch1.tab1", "CREATE TABLE sch1.tab1 (a int PRIMARY KEY)")
    scene.run("INSERT INTO sch1.tab1 VALUES (7)", "ALTER SCHEMA sch1 RENAME TO sch2")
    scene.run("INSERT INTO sch2.tab1 VALUES (8)")
    copy = scene.finish()
    assert [(shape.schema_, shape.table) for shape in copy.shapes] == [
        ("sch1", "tab1"),
        ("public", "child"),
        ("sch1", "tab3"),
        ("sch1", "tab1"),
        ("sch2", "tab1"),
    ]
    assert copy.shapes[3].oid == copy.shapes[4].oid != copy.shapes[0].oid


def test_028_row_filter(scene: Scene) -> None:
    """An update that moves a row over the filter's border is an insert or a delete."""
    scene.run(
        "CREATE TABLE tab1 (a int PRIMARY KEY, b text)",
        "CREATE TABLE tab2 (a int, b text)",
        "ALTER TABLE tab2 REPLICA IDENTITY FULL",
        "CREATE TABLE tab3 (a int PRIMARY KEY, b int) PARTITION BY RANGE (a)",
        "CREATE TABLE tab3_low PARTITION OF tab3 FOR VALUES FROM (0) TO (1000)",
        "CREATE TABLE tab3_high PARTITION OF tab3 FOR VALUES FROM (1000) TO (5000)",
        "CREATE TABLE toast (a text NOT NULL, b text)",
        "ALTER TABLE toast ALTER a SET STORAGE EXTERNAL, REPLICA IDENTITY FULL",
    )
    scene.publish(
        "FOR TABLE tab1 WHERE (a > 1000), tab2 WHERE (b IS NOT NULL), tab3 WHERE (a < 2000),"
        " toast WHERE (length(a) > 2000) WITH (publish_via_partition_root)"
    )
    scene.start()
    scene.run(
        "INSERT INTO tab1 SELECT g, 'x' FROM generate_series(990, 1010) g",
        "UPDATE tab1 SET b = 'y'",
        "UPDATE tab1 SET a = a + 500 WHERE a IN (995, 1001)",
        "UPDATE tab1 SET a = 5 WHERE a = 1005",
        "DELETE FROM tab1 WHERE a IN (991, 1009)",
        "INSERT INTO tab2 VALUES (1, NULL), (2, 'in'), (3, 'in')",
        "UPDATE tab2 SET b = 'now in' WHERE a = 1",
        "UPDATE tab2 SET b = NULL WHERE a = 2",
        "INSERT INTO tab3 SELECT g, g FROM generate_series(1, 4000) g",
        "DELETE FROM tab3 WHERE a BETWEEN 500 AND 1500",
        "UPDATE tab3 SET a = 700 WHERE a = 3000",
        "UPDATE tab3 SET a = 3000 WHERE a = 1",
        "INSERT INTO toast VALUES (repeat('x', 2200), 'a'), (repeat('y', 20), 'b')",
        "UPDATE toast SET b = 'c'",
    )
    scene.finish()
    assert scene.streamed() >= 1


def test_031_column_list(scene: Scene) -> None:
    """Only the listed columns are there, also when the list changes between rows."""
    scene.run(
        'CREATE TABLE tab1 (a int PRIMARY KEY, "B" int, c int)',
        "CREATE TABLE tab2 (a int PRIMARY KEY, b varchar, c int)",
        "CREATE TABLE tab5 (a int PRIMARY KEY, b int, c int, d int)",
        "CREATE TABLE parted (a int, b int, c int, PRIMARY KEY (a)) PARTITION BY LIST (a)",
        "CREATE TABLE parted_1 (c int, b int, a int NOT NULL)",
        "ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES IN (1, 2, 3)",
    )
    scene.publish(
        'FOR TABLE tab1 (a, "B"), tab2 (a, b), tab5 (d, a), parted (a, c)'
        " WITH (publish_via_partition_root)"
    )
    scene.start()
    scene.run(
        "INSERT INTO tab1 VALUES (1, 2, 3)",
        'UPDATE tab1 SET "B" = 20',
        "INSERT INTO tab2 VALUES (1, 'foo', 1)",
        "UPDATE tab2 SET c = 2",
        "INSERT INTO tab5 VALUES (1, 11, 111, 1111), (2, 22, 222, 2222)",
        "INSERT INTO parted VALUES (1, 11, 111)",
        "UPDATE parted SET a = 2",
    )
    scene.alter("SET TABLE tab1 (a, c), tab2 (a, b, c), tab5 (a), parted (a, b)")
    scene.run(
        "INSERT INTO tab1 VALUES (2, 3, 4)",
        "UPDATE tab1 SET c = c + 1",
        "UPDATE tab2 SET b = 'bar'",
        "UPDATE tab5 SET b = 0 WHERE a = 1",
        "DELETE FROM tab5 WHERE a = 2",
        "UPDATE parted SET b = 0",
    )
    copy = scene.finish()
    assert copy.columns("tab1") == [["a", "B"], ["a", "c"]]
    assert copy.columns("tab5") == [["a", "d"], ["a"]]
    assert copy.columns("parted") == [["a", "c"], ["a", "b"]]
    assert "parted_1" not in {shape.table for shape in copy.shapes}


@pytest.mark.long
@pytest.mark.since_18
def test_034_temporal(scene: Scene) -> None:
    """A primary key WITHOUT OVERLAPS."""
    scene.run(
        "CREATE EXTENSION btree_gist",
        "CREATE TABLE temporal_pk (id int4range, valid_at daterange, a text,"
        " PRIMARY KEY (id, valid_at WITHOUT OVERLAPS))",
        "CREATE TABLE temporal_unique (id int4range NOT NULL, valid_at daterange NOT NULL, a text,"
        " UNIQUE (id, valid_at WITHOUT OVERLAPS))",
        "ALTER TABLE temporal_unique REPLICA IDENTITY FULL",
    )
    scene.start()
    for table in ("temporal_pk", "temporal_unique"):
        scene.run(
            f"INSERT INTO {table} SELECT int4range(g, g + 1), '[2000-01-01,2010-01-01)', 'a'"
            " FROM generate_series(1, 4) g",
            f"UPDATE {table} SET a = 'b' WHERE id = '[2,3)'",
            f"UPDATE {table} SET valid_at = '[2001-01-01,2002-01-01)' WHERE id = '[3,4)'",
            f"DELETE FROM {table} WHERE id = '[4,5)'",
        )
    copy = scene.finish()
    assert len(copy.table("temporal_pk").keyed) == 3
    assert len(copy.table("temporal_unique").keyless) == 3
