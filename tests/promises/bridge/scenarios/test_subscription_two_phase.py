"""PostgreSQL's own scenarios of two-phase commit, src/test/subscription/t/021 to 023, by name.

And DDL in prepared transactions: what is announced is what was committed.
"""

import pytest

from tests.promises.bridge.scenarios.conftest import Scene

pytestmark = pytest.mark.since_18
QUOTED = "a \"gid\", it''s quoted"
BULK = "INSERT INTO t SELECT g, md5(g::text) FROM generate_series({0}, {0} + 1499) g"


@pytest.fixture
def table(scene: Scene) -> Scene:
    scene.configure(two_phase=True)
    scene.run("CREATE TABLE t (a int PRIMARY KEY, b text)", "CREATE TABLE other (a int)")
    scene.start()
    scene.run("INSERT INTO t VALUES (1, 'foo'), (2, 'bar')")
    return scene


def prepare(scene: Scene, gid: str, *statements: str) -> None:
    scene.run("BEGIN", *statements, f"PREPARE TRANSACTION '{gid}'")


def test_021_twophase(table: Scene) -> None:
    """Committed and rolled back, with savepoints, truncates, empty, and restarts in between."""
    prepare(table, "commit", "INSERT INTO t VALUES (11)", "UPDATE t SET a = 12 WHERE a = 1")
    table.run("COMMIT PREPARED 'commit'")
    prepare(table, "rollback", "INSERT INTO t VALUES (13)", "TRUNCATE other")
    table.run("ROLLBACK PREPARED 'rollback'", "INSERT INTO t VALUES (13, 'plain')")
    prepare(
        table,
        QUOTED,
        "INSERT INTO t VALUES (21)",
        "SAVEPOINT s",
        "INSERT INTO t VALUES (22)",
        "ROLLBACK TO s",
        "DELETE FROM t WHERE a = 2",
        "TRUNCATE other",
    )
    prepare(table, "across a restart", "INSERT INTO t VALUES (51)")
    table.bridge.caught_up()
    table.bridge.kill()
    table.bridge.start().streaming()
    table.run("COMMIT PREPARED 'across a restart'")
    table.run(f"COMMIT PREPARED '{QUOTED}'")
    table.finish()


@pytest.mark.long
def test_022_twophase_cascade(table: Scene) -> None:
    """Nested savepoints, partly rolled back before the PREPARE."""
    prepare(
        table,
        "outer",
        "INSERT INTO t VALUES (21, 'kept')",
        "SAVEPOINT sp_inner",
        "INSERT INTO t VALUES (22)",
        "ROLLBACK TO SAVEPOINT sp_inner",
        "SAVEPOINT two",
        "INSERT INTO t VALUES (23)",
        "RELEASE two",
    )
    table.run("COMMIT PREPARED 'outer'")
    copy = table.finish()
    assert sorted(row["a"] for row in copy.table("t").rows) == [1, 2, 21, 23]


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed between"])
def test_023_twophase_stream(table: Scene, killed: bool) -> None:
    """Large ones are streamed and staged; decided in another order, with others in between."""
    for gid, start in (("first", 1000), ("second", 5000), ("dropped", 9000)):
        prepare(
            table,
            gid,
            BULK.format(start),
            f"UPDATE t SET b = 'x' WHERE a % 2 = 0 AND a >= {start}",
            "SAVEPOINT s",
            BULK.format(start + 2000),
            "ROLLBACK TO s",
            f"DELETE FROM t WHERE a % 3 = 0 AND a >= {start}",
        )
    table.run("INSERT INTO t VALUES (99999, 'after the PREPARE')")
    table.bridge.caught_up()
    if killed:
        table.bridge.kill()
        table.start()
    table.run("COMMIT PREPARED 'second'", "ROLLBACK PREPARED 'dropped'")
    table.run("INSERT INTO t VALUES (99998, 'between')", "COMMIT PREPARED 'first'")
    table.finish()
    if not killed:
        assert table.streamed() >= 3


@pytest.mark.long
@pytest.mark.parametrize("rows", ["INSERT INTO t VALUES (7, 'x')", BULK.format(1000)])
def test_a_table_changed_in_a_prepared_transaction(table: Scene, rows: str) -> None:
    """Small, and streamed. What is rolled back is not announced; what is committed is, once."""
    table.bridge.caught_up()
    prepare(table, "dropped", "ALTER TABLE t ADD COLUMN never int", rows)
    table.bridge.caught_up()
    table.run("ROLLBACK PREPARED 'dropped'", "INSERT INTO t VALUES (3, 'plain')")
    prepare(table, "kept", rows, "ALTER TABLE t ADD COLUMN c int", "UPDATE t SET c = a")
    table.bridge.caught_up()
    table.bridge.kill()
    table.start()
    table.run("COMMIT PREPARED 'kept'", "INSERT INTO t VALUES (4, 'plain', 4)")
    copy = table.finish()
    assert copy.columns("t") == [["a", "b"], ["a", "b", "c"]]


@pytest.mark.long
def test_a_table_first_seen_in_a_transaction_that_is_rolled_back(table: Scene) -> None:
    """The server describes it once; its first event comes later."""
    prepare(table, "dropped", "INSERT INTO other VALUES (1)")
    prepare(table, "kept", "INSERT INTO other VALUES (2)")
    table.bridge.caught_up()
    table.run("ROLLBACK PREPARED 'dropped'", "INSERT INTO other VALUES (3)")
    table.run("COMMIT PREPARED 'kept'")
    copy = table.finish()
    assert [e.after for e in copy.of("other")] == [{"a": 3}, {"a": 2}]


@pytest.mark.long
def test_a_type_made_in_a_prepared_transaction(table: Scene) -> None:
    """The catalog does not have it before the COMMIT PREPARED, and is asked after it."""
    prepare(
        table,
        "type",
        "CREATE TYPE mood AS ENUM ('sad', 'happy')",
        "CREATE TABLE moods (id int PRIMARY KEY, moods mood[])",
        "INSERT INTO moods VALUES (1, '{sad}')",
    )
    table.bridge.caught_up()
    table.run("COMMIT PREPARED 'type'", "UPDATE moods SET id = id")
    table.run("INSERT INTO moods VALUES (2, '{happy,NULL}')")
    copy = table.finish()
    assert [event.after["moods"] for event in copy.of("moods", "c", "u") if event.after] == [
        ["sad"],
        ["sad"],
        ["happy", None],
    ]
