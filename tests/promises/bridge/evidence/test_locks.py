"""A table that somebody has locked does not keep a bridge from starting."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from services.postgres.publications import published_columns
from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from services.testbed.pair import set_parameter
from tests.marks import long_but
from tests.promises.bridge.evidence.ground import (
    DBNAME,
    Ground,
    compare,
    insert,
    new_ground,
    sessions_after,
)
from tests.promises.bridge.evidence.test_rounds import assert_nothing_lost_or_twice
from tests.promises.bridge.running import PATIENCE_S
from tests.providers.databases import connect
from tests.providers.interface import Provider
from tests.providers.steady_kafka import steady_kafka
from tests.providers.waiting import eventually, patient_ms

PAUSED_S = 1.5
SHAPED = {"shaping": {"exclude": ["public.none"]}, "connect_deadline_ms": patient_ms(20_000)}
"""Some shaping, so that patterns are compared with what is published."""


@pytest.fixture(scope="module")
def steady(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker to be stopped in the middle of its work."""
    with steady_kafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def ground(own_bed: Bed, steady: KafkaBroker, tmp_path: Path) -> Iterator[Ground]:
    """A ground of this test alone, on that broker."""
    with new_ground(own_bed, steady, tmp_path, seed=1) as made:
        yield made


def test_a_lock_that_is_held(ground: Ground) -> None:
    server = ground.server()
    bridge = ground.bridge(server, **SHAPED).start().streaming()
    assert bridge.stop() == 0, bridge.output
    with connect(server, DBNAME) as connection, connection.transaction():
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        sessions_after(bridge, bridge.start)
    assert "a pattern of shaping matches no published table" in bridge.output
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_a_commit_that_waits_for_the_bridge_with_its_lock(ground: Ground) -> None:
    """A TRUNCATE waits for the bridge, which must not wait for the table."""
    server = ground.server()
    bridge = ground.bridge(server, **SHAPED).start().streaming()
    with connect(server, DBNAME) as connection:
        insert(connection, 10)
        bridge.caught_up()
        bridge.kill()
        set_parameter(server, "synchronous_standby_names", f'"slotbridge_{bridge.slot}"')
        truncate = threading.Thread(target=_truncate, args=[server.conninfo(DBNAME)])
        truncate.start()
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        eventually(lambda: connection.execute(query.encode()).fetchone() == (1,), what="it waits")
        sessions_after(bridge, bridge.start)
        truncate.join(PATIENCE_S)
        assert not truncate.is_alive()
        insert(connection, 10)
        eventually(lambda: any(e["op"] == "t" for e in bridge.events("t")), what="it is told")
        set_parameter(server, "synchronous_standby_names", "")
    assert bridge.stop() == 0, bridge.output


def _truncate(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("TRUNCATE t")


@pytest.mark.parametrize("level", long_but("on", ["remote_write", "on"]))
def test_a_commit_that_waits_returns_only_when_kafka_has_it(
    ground: Ground, steady: KafkaBroker, level: str
) -> None:
    """At each level of synchronous_commit that waits for a standby at all."""
    server = ground.server()
    bridge = ground.bridge(server).start().streaming()
    set_parameter(server, "synchronous_standby_names", f'"slotbridge_{bridge.slot}"')
    with connect(server, DBNAME) as connection:
        connection.execute(f"SET synchronous_commit = {level}".encode())
        eventually(lambda: bridge.progress()[-1].position.ahead_lsn > 0, what="commits wait for it")
        insert(connection)
        steady.pause()
        returned = threading.Event()

        def write() -> None:
            insert(connection)
            returned.set()

        writer = threading.Thread(target=write)
        try:
            writer.start()
            assert not returned.wait(PAUSED_S), "it returned before Kafka had it"
        finally:
            steady.resume()
        assert returned.wait(PATIENCE_S)
        writer.join(PATIENCE_S)
        set_parameter(server, "synchronous_standby_names", "")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_nothing_lost_or_twice(compare(server, bridge))


PUBLICATIONS = [
    "FOR ALL TABLES",
    "FOR ALL TABLES WITH (publish_via_partition_root = true)",
    "FOR TABLE a (id, twice), root",
    "FOR TABLE root, ONLY a WITH (publish_via_partition_root = true)",
    "FOR TABLE leaf, root (id) WITH (publish_via_partition_root = true)",
    "FOR TABLE leaf",
    "FOR TABLES IN SCHEMA other, public",
    "FOR TABLES IN SCHEMA other, TABLE a",
    "FOR ALL TABLES WITH (publish_generated_columns = stored)",
    "",
]


@pytest.mark.long
@pytest.mark.parametrize("definition", PUBLICATIONS)
def test_published_columns_are_those_of_the_view(
    pair: Provider, fresh_database: str, definition: str
) -> None:
    with connect(pair.primary, fresh_database) as connection:
        connection.execute(
            """
            CREATE SCHEMA other;
            CREATE TABLE a (id int, dropped int, twice int GENERATED ALWAYS AS (id * 2) STORED);
            ALTER TABLE a DROP COLUMN dropped;
            CREATE TABLE other.b (id int);
            CREATE TABLE heir (more int) INHERITS (a);
            CREATE UNLOGGED TABLE fleeting (id int);
            CREATE TABLE root (id int, name text) PARTITION BY RANGE (id);
            CREATE TABLE middle PARTITION OF root FOR VALUES FROM (0) TO (9) PARTITION BY LIST (id);
            CREATE TABLE leaf PARTITION OF middle DEFAULT;
            CREATE TABLE other.branch PARTITION OF root DEFAULT;
            CREATE VIEW seen AS SELECT 1;
            """
        )
        connection.execute(sql.SQL("CREATE PUBLICATION p " + definition))
        rows = connection.execute(
            "SELECT schemaname::text, tablename::text, attnames::text[] FROM pg_publication_tables"
            " WHERE pubname = 'p'"
        ).fetchall()
        view = {(schema, table): tuple(columns) for schema, table, columns in rows}
        assert published_columns(connection, "p") == view
