"""What has gone wrong before: src/test/subscription/t/100_bugs, and defects of other readers."""

import pytest

from tests.promises.bridge.scenarios.conftest import Scene


@pytest.mark.since_18
def test_100_bugs(scene: Scene) -> None:
    """Functions in indexes, triggers, dropped and generated columns under FULL, root and leaf."""
    scene.run(
        "CREATE TABLE tab1 (a int PRIMARY KEY, b int)",
        "CREATE FUNCTION double(x int) RETURNS int IMMUTABLE LANGUAGE SQL AS 'select x * 2'",
        "CREATE INDEX ON tab1 (b) WHERE a > double(1)",
        "CREATE TABLE copied (a int PRIMARY KEY)",
        "CREATE FUNCTION copy() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO copied VALUES (NEW.a); RETURN NEW; END'",
        "CREATE TRIGGER copy AFTER INSERT ON tab1 FOR EACH ROW EXECUTE FUNCTION copy()",
        "CREATE TABLE dropped_cols (a int, b_drop int, c int)",
        "ALTER TABLE dropped_cols REPLICA IDENTITY FULL",
        "CREATE TABLE generated_cols (a int, b int GENERATED ALWAYS AS (5 * a) STORED, c int)",
        "ALTER TABLE generated_cols REPLICA IDENTITY FULL",
        "CREATE TABLE root (a int PRIMARY KEY, b text) PARTITION BY RANGE (a)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE parent (a int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (a)) INHERITS (parent)",
        "CREATE UNLOGGED TABLE unlogged (a int)",
    )
    scene.publish(
        "FOR TABLE tab1, copied, dropped_cols, generated_cols, root, leaf, parent"
        " WITH (publish_via_partition_root, publish_generated_columns = stored)"
    )
    scene.start()
    scene.run(
        "INSERT INTO tab1 VALUES (1, 2), (5, 6)",
        "INSERT INTO dropped_cols VALUES (1, 1, 1)",
        "INSERT INTO generated_cols (a, c) VALUES (1, 1)",
        "ALTER TABLE dropped_cols DROP COLUMN b_drop",
        "UPDATE dropped_cols SET a = 100",
        "UPDATE generated_cols SET a = 100",
        "DELETE FROM tab1 WHERE a = 1",
        "INSERT INTO root VALUES (1, 'x'), (2, 'x')",
        "UPDATE leaf SET b = 'y' WHERE a = 1",
        "DELETE FROM root WHERE a = 2",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
        "UPDATE parent SET a = a + 10",
        "INSERT INTO unlogged VALUES (1)",
    )
    copy = scene.finish()
    assert {shape.table for shape in copy.shapes} == {
        *("tab1", "copied", "dropped_cols", "generated_cols", "root", "parent", "child")
    }


@pytest.mark.long
def test_upserts_that_lose_their_race(scene: Scene) -> None:
    """Speculative insertions that are taken back leave nothing, also in streamed transactions."""
    scene.run("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scene.start()
    upsert = (
        "INSERT INTO t SELECT g % 300, repeat('x', 20) FROM generate_series({0}, {0} + 299) g"
        " ON CONFLICT (a) DO UPDATE SET b = t.b || '!'"
    )
    with scene.other() as one:
        one.execute(upsert.format(0).encode())
        one.execute(upsert.format(300).encode())
        one.execute((upsert.format(600).split(" DO ")[0] + " DO NOTHING").encode())
    scene.run(
        "MERGE INTO t USING (SELECT generate_series(290, 310) AS a) s ON t.a = s.a"
        " WHEN MATCHED AND s.a % 2 = 0 THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET b = 'merged'"
        " WHEN NOT MATCHED THEN INSERT VALUES (s.a, 'new')",
    )
    scene.finish()
    assert scene.streamed() >= 1


@pytest.mark.long
def test_rows_of_a_table_that_the_same_transaction_made_and_dropped(scene: Scene) -> None:
    scene.run("CREATE TABLE t (a int PRIMARY KEY)")
    scene.start()
    scene.together(
        "INSERT INTO t VALUES (1)",
        "CREATE TABLE brief (a int PRIMARY KEY)",
        "INSERT INTO brief SELECT generate_series(1, 2000)",
        "DROP TABLE brief",
        "CREATE TEMP TABLE own (a int)",
        "INSERT INTO own VALUES (1)",
        "CREATE TABLE lasting AS SELECT generate_series(1, 5) AS a",
    )
    copy = scene.finish()
    assert len(copy.of("brief")) == 2000
    assert len(copy.of("lasting")) == 5
