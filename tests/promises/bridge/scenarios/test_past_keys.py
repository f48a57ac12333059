"""Keys under REPLICA IDENTITY FULL and NOTHING, where the stream does not tell the primary key.

The catalog has today's, and the changes may be old: they get the key of their time, or none.
"""

from collections.abc import Sequence

import pytest

from tests.promises.bridge.oracle import Copy
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.scenarios.conftest import Scene


def keys(copy: Copy, table: str) -> list[str | None]:
    """The key columns of each announced shape; the records' keys are checked by the oracle."""
    return [
        ",".join(c.name for c in shape.after if c.key) or None
        for shape in copy.shapes
        if shape.table == table
    ]


@pytest.fixture
def behind(scene: Scene) -> Scene:
    """Tables that the bridge has published and, now that it is down, does not follow."""
    scene.run(
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "CREATE TABLE nothing (id int PRIMARY KEY, code text NOT NULL)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    )
    scene.start()
    scene.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')", "INSERT INTO nothing VALUES (1, 'a')")
    scene.bridge.caught_up()
    scene.bridge.kill()
    return scene


BEFORE = ("INSERT INTO t VALUES (3, 'a')", "UPDATE t SET id = 4 WHERE id = 2")
AFTER = ("INSERT INTO t (id, code) VALUES (9, 'z')", "UPDATE t SET code = code || '!'")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        (["ALTER TABLE t ALTER id TYPE bigint"], ["id", "id"]),
        (["ALTER TABLE t RENAME id TO number", "ALTER TABLE t RENAME number TO id"], ["id"]),
        (["ALTER TABLE t DROP CONSTRAINT t_pkey"], ["id", None]),
        (
            [
                "ALTER TABLE t DROP CONSTRAINT t_pkey",
                "UPDATE t SET code = id",
                "ALTER TABLE t ADD PRIMARY KEY (code)",
            ],
            ["id", None, "code"],
        ),
        (["REINDEX TABLE CONCURRENTLY t", "CLUSTER t USING t_pkey"], ["id"]),
    ],
    ids=["type", "renamed and back", "dropped", "another", "rebuilt"],
)
def test_a_key_that_changed_since(
    behind: Scene, ddl: Sequence[str], expected: list[str | None]
) -> None:
    behind.run(*BEFORE, *ddl, *AFTER)
    behind.start()
    copy = behind.finish()
    assert keys(copy, "t") == expected


@pytest.mark.long
def test_a_key_column_that_was_renamed_since(behind: Scene) -> None:
    behind.run(*BEFORE, "ALTER TABLE t RENAME id TO number", "INSERT INTO t VALUES (9, 'z')")
    behind.run("UPDATE t SET code = code || '!'")
    behind.start()
    copy = behind.finish()
    assert keys(copy, "t") == ["id", "number"]


@pytest.mark.long
def test_a_table_that_is_gone(behind: Scene) -> None:
    """With its types: they are not in the catalog any more."""
    behind.run("CREATE TYPE mood AS ENUM ('sad')", "CREATE DOMAIN amount AS int")
    behind.run("ALTER TABLE nothing ADD m mood DEFAULT 'sad', ADD n amount[] DEFAULT '{7}'")
    behind.run(*BEFORE, "DROP TABLE t", "CREATE TABLE t (code text PRIMARY KEY, id int)")
    behind.run("INSERT INTO t VALUES ('a', 1)", "INSERT INTO nothing VALUES (2, 'b')")
    behind.run("DROP TABLE nothing", "DROP TYPE mood", "DROP DOMAIN amount")
    behind.start()
    copy = behind.finish()
    assert keys(copy, "t") == ["id", "code"]
    assert keys(copy, "nothing") == ["id", "id"]
    last = [shape for shape in copy.shapes if shape.table == "nothing"][-1]
    assert [column.type for column in last.after[2:]] == ["public.mood", "public._amount"]
    (event,) = [e for e in copy.of("nothing") if e.after and e.after["id"] == 2]
    assert event.after == {"id": 2, "code": "b", "m": "sad", "n": "{7}"}
    topic = f"{behind.bridge.prefix}.public.nothing"
    records = read_committed(behind.bridge.kafka.bootstrap_servers, [topic])
    assert sorted(record.key or b"" for record in records) == [b'{"id":1}', b'{"id":2}']


@pytest.mark.long
def test_a_key_of_a_table_that_was_never_published(behind: Scene) -> None:
    """Its rows before it got its key have none, those after it have it."""
    behind.run(
        "CREATE TABLE young (id int NOT NULL, code text)",
        "ALTER TABLE young REPLICA IDENTITY FULL",
        "INSERT INTO young VALUES (1, 'a'), (1, 'b')",
        "DELETE FROM young WHERE code = 'b'",
        "ALTER TABLE young ADD PRIMARY KEY (id)",
        "INSERT INTO young VALUES (2, 'a')",
        "UPDATE young SET id = id + 10",
    )
    behind.start()
    copy = behind.finish()
    assert keys(copy, "young") == [None, "id"]
