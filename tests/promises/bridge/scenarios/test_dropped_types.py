"""Rows from before a type was dropped have the values of their neighbours."""

from operator import itemgetter

from tests.promises.bridge.scenarios.conftest import Scene

COLUMNS = {
    "n": ("integer", "5"),
    "flag": ("boolean", "true"),
    "at": ("timestamp", "'2024-01-01'"),
    "data": ("bytea", "'\\x00ff'"),
    "moods": ("mood[]", "'{a,b}'"),
}


def test_a_domain_that_is_dropped_before_the_bridge_comes(scene: Scene) -> None:
    """The stream names its base type; the catalog of now does not have it."""
    scene.run("CREATE TYPE mood AS ENUM ('a', 'b')")
    for name, (kind, _) in COLUMNS.items():
        scene.run(f"CREATE DOMAIN d_{name} AS {kind}")
    columns = ", ".join(f"{name} d_{name}" for name in COLUMNS)
    values = ", ".join(value for _, value in COLUMNS.values())
    scene.run(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    scene.start()
    scene.run(f"INSERT INTO t VALUES (1, {values})")
    scene.bridge.caught_up()
    assert scene.bridge.stop() == 0, scene.bridge.output
    scene.run(f"INSERT INTO t VALUES (2, {values})")
    for name, (kind, _) in COLUMNS.items():
        scene.run(f"ALTER TABLE t ALTER {name} TYPE {kind}", f"DROP DOMAIN d_{name}")
    scene.run(f"INSERT INTO t VALUES (3, {values})")
    scene.start()
    scene.bridge.caught_up()
    assert scene.bridge.stop() == 0, scene.bridge.output
    rows = sorted((event["after"] for event in scene.bridge.events("t")), key=itemgetter("id"))
    first = {name: value for name, value in rows[0].items() if name != "id"}
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert rows[1:] == [{"id": 2, **first}, {"id": 3, **first}]
    assert "domains of columns were dropped" in scene.bridge.output
