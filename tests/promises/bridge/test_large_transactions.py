"""Streaming of transactions in progress on a live server, with the figures of the articles.

Sources: "pg_stat_replication_slots" (spill 1 / 7 / 396000; stream 1 / 1 / 39600, then
1 / 2 / 40920, with logical_decoding_work_mem = 64kB) and documentation 49.9.
"""

from pathlib import Path

import psycopg
import pytest

from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.providers.databases import Connection
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

SMALL = "-c logical_decoding_work_mem=64kB"
QUIET = {"autovacuum": "off"}
"""The invalidations of a concurrent autovacuum would be counted with the transaction's changes."""


def decoding(connection: Connection, bridge: Bridge, kind: str) -> tuple[int, int, int]:
    """(txns, count, bytes) of pg_stat_replication_slots for "spill" or "stream"."""
    row = connection.execute(
        f"SELECT {kind}_txns, {kind}_count, {kind}_bytes FROM pg_stat_replication_slots"
        " WHERE slot_name = %s".encode(),
        [bridge.slot],
    ).fetchone()
    assert row is not None
    return (int(row[0]), int(row[1]), int(row[2]))


def test_spilled_as_in_the_article_without_streaming(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(settings=QUIET)
    conninfo = trio.primary.conninfo(trio.dbname, options=SMALL)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (i int)")
        bridge = new_bridge(conninfo, streaming=False, heartbeat_interval_ms=60_000)
        bridge.start().streaming()
        connection.execute("INSERT INTO t SELECT generate_series(1, 3000)")
        eventually(
            lambda: decoding(connection, bridge, "spill") == (1, 7, 396_000),
            what="spill statistics of the article",
        )
        assert decoding(connection, bridge, "stream") == (0, 0, 0)
        bridge.caught_up()
    assert sum(1 for _ in bridge.events("t")) == 3000


@pytest.mark.long
def test_streamed_as_in_the_article_and_published_at_commit(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(settings=QUIET)
    conninfo = trio.primary.conninfo(trio.dbname, options=SMALL)
    with (
        psycopg.connect(conninfo, autocommit=True) as connection,
        psycopg.connect(conninfo) as first,
        psycopg.connect(conninfo) as second,
    ):
        connection.execute("CREATE TABLE one (i int)")
        bridge = new_bridge(conninfo, heartbeat_interval_ms=60_000).start().streaming()
        first.execute("INSERT INTO one SELECT generate_series(1, 300)")
        second.execute("INSERT INTO one SELECT generate_series(1001, 1200)")
        eventually(
            lambda: decoding(connection, bridge, "stream") == (1, 1, 39_600),
            what="stream statistics of the article, first",
        )
        first.execute("INSERT INTO one SELECT generate_series(301, 310)")
        second.commit()
        eventually(lambda: _values(bridge) == set(range(1001, 1201)), what="Txn2 is in Kafka")
        first.commit()
        bridge.caught_up()
        assert decoding(connection, bridge, "stream") == (1, 2, 40_920)
        assert decoding(connection, bridge, "spill") == (0, 0, 0)
    assert _values(bridge) == {*range(1, 311), *range(1001, 1201)}
    assert sum(1 for _ in bridge.events("one")) == 510


def _values(bridge: Bridge) -> set[int]:
    topic = f"{bridge.prefix}.public.one"
    if topic not in bridge.topics():
        return set()
    return {event["after"]["i"] for event in bridge.events("one")}


def test_interleaved_with_savepoints_toast_and_truncate(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """The database is the oracle: Kafka makes the same tables, whatever was rolled back."""
    conninfo = pair.primary.conninfo(fresh_database, options=SMALL)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY, note text)")
        connection.execute("ALTER TABLE a REPLICA IDENTITY FULL")
        connection.execute("ALTER TABLE a ALTER COLUMN note SET STORAGE EXTERNAL")
        connection.execute("CREATE TABLE b (id int PRIMARY KEY, note text)")
        connection.execute("CREATE TABLE gone (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo).start().streaming()
        with psycopg.connect(conninfo) as one, psycopg.connect(conninfo) as two:
            one.execute("INSERT INTO gone SELECT generate_series(1, 10)")
            one.execute("INSERT INTO a SELECT g, repeat('x', 3000) FROM generate_series(1, 60) g")
            two.execute("INSERT INTO b SELECT g, 'kept' FROM generate_series(1, 1000) g")
            one.execute("SAVEPOINT s1")
            one.execute("INSERT INTO a SELECT g, 'rolled back' FROM generate_series(100, 900) g")
            one.execute("SAVEPOINT s2")
            one.execute("UPDATE a SET note = 'rolled back too' WHERE id < 30")
            one.execute("ROLLBACK TO s1")
            two.execute("SAVEPOINT s1")
            two.execute("UPDATE b SET note = 'changed' WHERE id <= 700")
            two.execute("RELEASE s1")
            one.execute("UPDATE a SET id = id + 5000 WHERE id > 50")
            one.execute(
                "INSERT INTO a VALUES (1, 'again') ON CONFLICT (id) DO UPDATE SET note='up'"
            )
            two.execute("DELETE FROM b WHERE id > 900")
            one.execute("TRUNCATE gone")
            two.commit()
            one.commit()
        with psycopg.connect(conninfo) as three:
            three.execute("INSERT INTO b SELECT g, 'never' FROM generate_series(2000, 5000) g")
            three.rollback()
        connection.execute("INSERT INTO b VALUES (9999, 'last')")
        bridge.caught_up()
        assert decoding(connection, bridge, "stream")[0] >= 2
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "a", "b", "gone")


def test_killed_while_a_transaction_is_streamed(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database, options=SMALL)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, transaction_bytes_max=2**17).start().streaming()
        with psycopg.connect(conninfo) as large:
            for start in range(0, 20_000, 5_000):
                large.execute(
                    "INSERT INTO t SELECT generate_series(%s::int, %s)", [start, start + 4_999]
                )
                connection.execute("INSERT INTO t VALUES (%s)", [100_000 + start])
                seen = decoding(connection, bridge, "stream")[1]
                eventually(
                    lambda seen=seen: decoding(connection, bridge, "stream")[1] >= seen,  # type: ignore[misc]
                    what="blocks are streamed",
                )
                bridge.kill()
                bridge.start().streaming()
            large.commit()
        eventually(
            lambda: any(r.position.seq for r in bridge.progress()), what="a part is in Kafka"
        )
        bridge.kill()
        bridge.start().streaming().caught_up()
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")
    assert set(bridge.identities("t").values()) == {1}


@pytest.mark.long
def test_past_its_bound_the_spool_gives_way_to_the_server(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, tmp_path: Path
) -> None:
    conninfo = pair.primary.conninfo(fresh_database, options=SMALL)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        bridge = new_bridge(
            conninfo,
            spool_folder=str(tmp_path),
            spool_memory_bytes_max=0,
            spool_bytes_max=2**20,
        )
        bridge.start().streaming()
        connection.execute(
            "INSERT INTO t SELECT g, md5(g::text) || md5((g + 1)::text)"
            " FROM generate_series(1, 40000) g"
        )
        bridge.streaming().caught_up()
        assert "continues with streaming off" in bridge.output
        assert decoding(connection, bridge, "spill")[0] >= 1
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")
    assert not list(tmp_path.glob("*.spool"))
