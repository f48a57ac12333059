"""What identifies a row: replica identities, changed keys, no keys, partitions, unchanged TOAST."""

import psycopg
import pytest

from schemas.errors import ExitCode
from schemas.events import UNAVAILABLE
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.scenarios.conftest import Scene

LONG = "repeat(md5(random()::text), 100)"


def test_the_identity_is_an_index(scene: Scene) -> None:
    """The key is the index's columns; a new primary key alone is no new key."""
    scene.run(
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE, note text)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key",
    )
    scene.start()
    scene.run(
        "INSERT INTO t VALUES (1, 'a', 'x'), (2, 'b', 'x'), (3, 'c', 'x')",
        "UPDATE t SET id = 10 WHERE code = 'a'",
        "UPDATE t SET code = 'z', note = 'y' WHERE id = 2",
        "DELETE FROM t WHERE id = 3",
    )
    copy = scene.finish()
    assert copy.table("t").keyed.keys() == {b'{"code":"a"}', b'{"code":"z"}'}
    assert [e.op for e in copy.of("t")] == ["c", "c", "c", "u", "d", "c", "d"]


def test_a_changed_key_is_a_delete_a_tombstone_and_a_create(scene: Scene) -> None:
    """With headers that name the other key, and with the unchanged TOASTed values left out."""
    scene.run(
        "CREATE TABLE t (a int, b text, big text, PRIMARY KEY (b, a))",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
    )
    scene.start()
    scene.run(
        f"INSERT INTO t VALUES (1, 'x', {LONG}), (5, 'x', {LONG})",
        "UPDATE t SET a = a + 1",
        "UPDATE t SET b = 'y' WHERE a = 6",
    )
    copy = scene.finish()
    (first, *_others) = copy.of("t", "d")
    assert first.before == {"a": 1, "b": "x", "big": None}
    assert [e.after["big"] for e in copy.of("t", "c") if e.after][2:] == [UNAVAILABLE] * 3
    servers, topic = scene.bridge.kafka.bootstrap_servers, f"{scene.bridge.prefix}.public.t"
    headers = [
        (record.key, name, value)
        for record in read_committed(servers, [topic])
        for name, value in record.headers.items()
    ]
    assert (b'{"a":1,"b":"x"}', "__debezium.newkey", b'{"a":2,"b":"x"}') in headers
    assert (b'{"a":2,"b":"x"}', "__debezium.oldkey", b'{"a":1,"b":"x"}') in headers
    assert len(headers) == 9


def test_a_table_without_a_key(scene: Scene) -> None:
    """Null keys; whole rows before under FULL; else the server refuses updates and deletes."""
    scene.run("CREATE TABLE full_rows (a int, b text)", "CREATE TABLE plain (a int, b text)")
    scene.run("ALTER TABLE full_rows REPLICA IDENTITY FULL")
    scene.start()
    for table in ("full_rows", "plain"):
        scene.run(f"INSERT INTO {table} VALUES (1, 'x'), (1, 'x'), (2, NULL)")
    scene.run("UPDATE full_rows SET b = 'y' WHERE a = 2", "DELETE FROM full_rows WHERE a = 1")
    for statement in ("UPDATE plain SET b = 'y'", "DELETE FROM plain"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            scene.run(statement)
    scene.run("TRUNCATE plain", "INSERT INTO plain VALUES (3, 'z')")
    copy = scene.finish()
    assert copy.table("full_rows").keyless == [{"a": 2, "b": "y"}]
    assert [e.before for e in copy.of("full_rows", "u")] == [{"a": 2, "b": None}]
    topics = [f"{scene.bridge.prefix}.public.{table}" for table in ("full_rows", "plain")]
    records = read_committed(scene.bridge.kafka.bootstrap_servers, topics)
    assert {record.key for record in records} == {None}


def test_unchanged_toast(scene: Scene) -> None:
    """Known from the old row under FULL, else the placeholder; never NULL, never lost."""
    for table in ("sparse", "whole"):
        scene.run(
            f"CREATE TABLE {table} (id int PRIMARY KEY, big text, raw bytea, small text)",
            f"ALTER TABLE {table} ALTER big SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL",
        )
    scene.run("ALTER TABLE whole REPLICA IDENTITY FULL")
    scene.run("CREATE TABLE toasted_key (big text PRIMARY KEY, note text)")
    scene.run("ALTER TABLE toasted_key ALTER big SET STORAGE EXTERNAL")
    scene.start()
    for table in ("sparse", "whole"):
        scene.run(
            f"INSERT INTO {table} VALUES (1, {LONG}, {LONG}::bytea, 'x'), (2, {LONG}, NULL, 'x')",
            f"UPDATE {table} SET small = 'y'",
            f"UPDATE {table} SET big = 'short' WHERE id = 1",
            f"UPDATE {table} SET raw = big::bytea WHERE id = 2",
        )
    scene.run("INSERT INTO toasted_key SELECT repeat('k', 2500), 'x'")
    scene.run("UPDATE toasted_key SET note = 'y'")
    copy = scene.finish()
    updates = [e.after for e in copy.of("sparse", "u") if e.after is not None]
    assert updates[0]["big"] == updates[1]["big"] == UNAVAILABLE
    assert UNAVAILABLE not in str([e.after for e in copy.of("whole")])
    assert UNAVAILABLE not in str([e.after for e in copy.of("toasted_key")])


def partitioned(scene: Scene, root: str, identity: str) -> None:
    scene.run(
        f"CREATE TABLE {root} (id int, region text, note text, PRIMARY KEY (id, region))"
        " PARTITION BY LIST (region)",
        f"CREATE TABLE {root}_north PARTITION OF {root} FOR VALUES IN ('n')",
        f"CREATE TABLE {root}_rest PARTITION OF {root} DEFAULT PARTITION BY RANGE (id)",
        f"CREATE TABLE {root}_rest_low PARTITION OF {root}_rest FOR VALUES FROM (0) TO (1000)",
        f"CREATE TABLE {root}_rest_high (note text, region text NOT NULL, id int NOT NULL)",
        f"ALTER TABLE {root}_rest ATTACH PARTITION {root}_rest_high "
        "FOR VALUES FROM (1000) TO (9000)",
    )
    for table in (root, f"{root}_north", f"{root}_rest", f"{root}_rest_low", f"{root}_rest_high"):
        scene.run(f"ALTER TABLE {table} REPLICA IDENTITY {identity}")


def move_rows(scene: Scene, root: str) -> None:
    scene.run(
        f"INSERT INTO {root} SELECT g, CASE g % 2 WHEN 0 THEN 'n' ELSE 's' END, 'x'"
        " FROM generate_series(1, 2000) g",
        f"UPDATE {root} SET note = 'y' WHERE id < 20",
        f"UPDATE {root} SET region = 'n' WHERE id IN (1, 3, 1001)",
        f"UPDATE {root} SET id = id + 3000 WHERE id IN (5, 6, 7)",
        f"DELETE FROM {root} WHERE id BETWEEN 100 AND 1900",
    )


@pytest.mark.long
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_013_partition_each_for_itself(scene: Scene, identity: str) -> None:
    """A topic for each leaf; a row that moves is deleted there and created here."""
    partitioned(scene, "p", identity)
    scene.start()
    move_rows(scene, "p")
    scene.run("TRUNCATE p_north", "INSERT INTO p VALUES (2, 'n', 'z'), (4, 'n', 'z')")
    scene.run("TRUNCATE p_rest", "INSERT INTO p VALUES (5, 's', 'z')")
    copy = scene.finish()
    leaves = ["p_north", "p_rest_low", "p_rest_high"]
    assert {shape.table for shape in copy.shapes} == set(leaves) == tables_with_topics(scene)
    assert copy.columns("p_rest_high") == [["note", "region", "id"]]
    assert [len(copy.of(leaf, "t")) for leaf in leaves] == [1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_013_partition_as_their_root(scene: Scene, identity: str) -> None:
    """One topic and one shape; the server keeps a TRUNCATE of a single partition to itself."""
    partitioned(scene, "p", identity)
    scene.publish("FOR TABLE p WITH (publish_via_partition_root)")
    scene.start()
    scene.run("INSERT INTO p VALUES (1, 's', 'a')", "TRUNCATE p", "TRUNCATE p_north")
    move_rows(scene, "p")
    copy = scene.finish()
    assert {shape.table for shape in copy.shapes} == {"p"} == tables_with_topics(scene)
    assert copy.columns("p") == [["id", "region", "note"]]
    assert len(copy.of("p", "t")) == 1
    assert all(b'"id"' in key and b'"region"' in key for key in copy.table("p").keyed)


def tables_with_topics(scene: Scene) -> set[str]:
    prefix = f"{scene.bridge.prefix}.public."
    return {t.removeprefix(prefix) for t in scene.bridge.topics() if t.startswith(prefix)}


def test_a_partition_with_another_identity_than_its_root(scene: Scene) -> None:
    """FULL at the leaf gives more than the root asks for."""
    partitioned(scene, "p", "DEFAULT")
    scene.run("ALTER TABLE p_north REPLICA IDENTITY FULL")
    scene.publish("FOR TABLE p WITH (publish_via_partition_root)")
    scene.start()
    move_rows(scene, "p")
    scene.finish()


@pytest.mark.long
def test_a_partition_whose_identity_is_not_its_roots_key_is_refused(scene: Scene) -> None:
    """The WAL has another key than the root's: the error names the table, and nothing is lost."""
    partitioned(scene, "p", "DEFAULT")
    scene.run("CREATE UNIQUE INDEX by_note ON p_rest_high (note, region)")
    scene.run("ALTER TABLE p_rest_high ALTER note SET NOT NULL")
    scene.run("ALTER TABLE p_rest_high REPLICA IDENTITY USING INDEX by_note")
    scene.publish("FOR TABLE p WITH (publish_via_partition_root)")
    scene.start()
    scene.run("INSERT INTO p VALUES (1001, 's', 'x'), (7, 's', 'x')", "DELETE FROM p WHERE id = 7")
    scene.run("DELETE FROM p WHERE id = 1001")
    assert scene.bridge.exit_code() == ExitCode.UNDECODABLE, scene.bridge.output
    assert "does not tell the old row's key: partition public.p_rest_high" in scene.bridge.output
    assert "(public.p, at LSN" in scene.bridge.output


@pytest.mark.long
def test_a_key_that_changes_unseen_in_a_partition_is_refused(scene: Scene) -> None:
    """Without an old row the old key would stay in Kafka; other partitions are not disturbed."""
    partitioned(scene, "p", "DEFAULT")
    scene.run("CREATE UNIQUE INDEX by_note ON p_rest_high (note, region)")
    scene.run("ALTER TABLE p_rest_high ALTER note SET NOT NULL")
    scene.publish("FOR TABLE p WITH (publish_via_partition_root)")
    scene.start()
    scene.run("INSERT INTO p VALUES (1001, 's', 'x'), (7, 's', 'x')", "UPDATE p SET id = id + 1")
    scene.run("UPDATE p SET note = 'y' WHERE id = 8")
    scene.bridge.caught_up()
    scene.run("ALTER TABLE p_rest_high REPLICA IDENTITY USING INDEX by_note")
    scene.run("UPDATE p SET id = 1003 WHERE id = 1002")
    assert scene.bridge.exit_code() == ExitCode.UNDECODABLE, scene.bridge.output
    said = scene.bridge.output.splitlines()[-1]
    for part in (
        "does not tell the old row's key: partition public.p_rest_high",
        "REPLICA IDENTITY USING INDEX (note, region)",
        "(public.p, at LSN",
        "ALTER TABLE public.p_rest_high REPLICA IDENTITY FULL",
    ):
        assert part in said
    keys = {key for key, _ in scene.bridge.records("public.p")}
    assert b'{"id":8,"region":"s"}' in keys and b'{"id":1003,"region":"s"}' not in keys


@pytest.mark.long
def test_a_deferrable_primary_key_is_not_used_as_key(scene: Scene) -> None:
    """Two rows have it at a time, within a transaction: as a key it would lose one of them."""
    scene.run("CREATE TABLE t (a int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, b text)")
    scene.run("ALTER TABLE t REPLICA IDENTITY FULL")
    scene.start()
    scene.run("INSERT INTO t VALUES (1, 'x'), (2, 'y')", "UPDATE t SET a = 3 - a")
    copy = scene.finish()
    assert not copy.table("t").keyed
