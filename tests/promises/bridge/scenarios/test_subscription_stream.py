"""PostgreSQL's own scenarios of streaming, src/test/subscription/t/015 to 019, by their names.

Where a subscriber's tables are compared there, the tables made from Kafka are compared here.
"""

import pytest

from tests.promises.bridge.scenarios.conftest import Scene

TABLE = "CREATE TABLE test_tab (a int PRIMARY KEY, b bytea)"
ROW = "SELECT i, sha256(i::text::bytea) FROM generate_series({}, {}) s(i)"


def rows(start: int, end: int) -> str:
    return f"INSERT INTO test_tab {ROW.format(start, end)}"


def test_015_stream(scene: Scene) -> None:
    """Interleaved, with updates and deletes; then while the identity is of another kind."""
    scene.run(TABLE, "CREATE TABLE test_tab_2 (a int)", "ALTER TABLE test_tab ADD c int DEFAULT 9")
    scene.start()
    scene.run("INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')")
    with scene.other() as one:
        one.execute(rows(3, 1500).replace("test_tab ", "test_tab (a, b) "))
        one.execute("UPDATE test_tab SET b = sha256(b) WHERE mod(a, 2) = 0")
        one.execute("DELETE FROM test_tab WHERE mod(a, 3) = 0")
        scene.run("INSERT INTO test_tab_2 SELECT generate_series(1, 900)")
        one.execute("INSERT INTO test_tab_2 VALUES (0)")
    scene.run("ALTER TABLE test_tab REPLICA IDENTITY FULL")
    scene.together(
        "UPDATE test_tab SET b = sha256(b)",
        "DELETE FROM test_tab WHERE a > 1000",
        "UPDATE test_tab SET a = a + 10000 WHERE a < 100",
    )
    copy = scene.finish()
    assert scene.streamed() >= 2
    assert [shape.replica_identity for shape in copy.shapes if shape.table == "test_tab"] == [
        "default",
        "full",
    ]


@pytest.mark.long
def test_016_stream_subxact(scene: Scene) -> None:
    scene.run(TABLE)
    scene.start()
    scene.run("INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')")
    scene.run("BEGIN")
    for number in range(4):
        start = 3 + number * 500
        scene.run(
            rows(start, start + 499),
            "UPDATE test_tab SET b = sha256(b) WHERE mod(a, 2) = 0",
            "DELETE FROM test_tab WHERE mod(a, 3) = 0",
            f"SAVEPOINT s{number}",
        )
    scene.run("COMMIT")
    scene.finish()
    assert scene.streamed() >= 1


@pytest.mark.long
def test_017_stream_ddl(scene: Scene) -> None:
    """Each statement's rows have the columns of its moment, within one streamed transaction."""
    scene.run(TABLE)
    scene.start()
    scene.run("INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')")
    scene.together(
        "INSERT INTO test_tab VALUES (3, 'x')",
        "ALTER TABLE test_tab ADD COLUMN c int",
        "SAVEPOINT s1",
        "INSERT INTO test_tab VALUES (4, 'x', 4)",
    )
    scene.together(
        "INSERT INTO test_tab SELECT i, sha256(i::text::bytea), -i FROM generate_series(5, 1000) i",
        "ALTER TABLE test_tab ADD COLUMN d int",
        "SAVEPOINT s1",
        "INSERT INTO test_tab SELECT i, 'x', -i, 2 * i FROM generate_series(1001, 2000) i",
        "ALTER TABLE test_tab ADD COLUMN e int",
        "SAVEPOINT s2",
        "INSERT INTO test_tab SELECT i, 'x', -i, 2 * i, -3 * i FROM generate_series(2001, 3000) i",
        "ALTER TABLE test_tab DROP COLUMN c",
        "UPDATE test_tab SET b = 'y' WHERE a % 100 = 0",
    )
    scene.run("INSERT INTO test_tab VALUES (3001, 'z', 1, 2)")
    copy = scene.finish(unknown=3 * 2 + 1 * 2 + (996 - 10) * 2 + (1000 - 10))
    assert scene.streamed() >= 1
    assert copy.columns("test_tab") == [
        ["a", "b"],
        ["a", "b", "c"],
        ["a", "b", "c", "d"],
        ["a", "b", "c", "d", "e"],
        ["a", "b", "d", "e"],
    ]


def test_018_stream_subxact_abort(scene: Scene) -> None:
    scene.run(TABLE)
    scene.start()
    scene.run("INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')")
    scene.together(
        rows(3, 500),
        "SAVEPOINT s1",
        rows(501, 1000),
        "SAVEPOINT s2",
        rows(1001, 1500),
        "ROLLBACK TO s2",
        rows(2001, 2500),
        "ROLLBACK TO s1",
        rows(2501, 3000),
        "SAVEPOINT s1",
        rows(3001, 3500),
        "SAVEPOINT s2",
        rows(3501, 4000),
        "ROLLBACK TO s1",
    )
    scene.run("BEGIN", rows(5000, 6000), "SAVEPOINT s1", rows(6001, 7000), "ROLLBACK")
    scene.run("BEGIN", rows(8000, 9000), "SAVEPOINT s1", rows(9001, 9500), "ROLLBACK TO s1")
    scene.run("COMMIT")
    scene.finish()
    assert scene.streamed() >= 2


@pytest.mark.long
def test_019_stream_subxact_ddl_abort(scene: Scene) -> None:
    """Columns that were rolled back are in no event, and are not announced."""
    scene.run(TABLE)
    scene.start()
    scene.run("INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')")
    scene.together(
        rows(3, 500),
        "ALTER TABLE test_tab ADD COLUMN c int",
        "SAVEPOINT s1",
        "INSERT INTO test_tab SELECT i, 'x', -i FROM generate_series(501, 1000) i",
        "ALTER TABLE test_tab ADD COLUMN d int",
        "SAVEPOINT s2",
        "INSERT INTO test_tab SELECT i, 'x', -i, 2 * i FROM generate_series(1001, 1500) i",
        "ALTER TABLE test_tab ADD COLUMN e int",
        "SAVEPOINT s3",
        "INSERT INTO test_tab SELECT i, 'x', -i, 2 * i, -i FROM generate_series(1501, 2000) i",
        "ROLLBACK TO s1",
        "INSERT INTO test_tab SELECT i, 'y', -i FROM generate_series(501, 1000) i",
    )
    copy = scene.finish(unknown=500)
    assert scene.streamed() >= 1
    assert copy.columns("test_tab") == [["a", "b"], ["a", "b", "c"]]
