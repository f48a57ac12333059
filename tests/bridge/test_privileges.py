"""The bridge with exactly the privileges that docs/OPERATIONS.md lists."""

import psycopg
from psycopg import sql

from tests.bridge.conftest import NewBridge
from tests.providers.interface import Provider

FUNCTIONS = (
    "pg_replication_origin_create(text)",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
    "pg_replication_origin_progress(text, boolean)",
)


def test_the_documented_privileges_are_enough(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    role = sql.Identifier(f"r_{topic_prefix}")
    admin = pair.primary.conninfo(fresh_database)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN REPLICATION").format(role))
        for function in FUNCTIONS:
            connection.execute(
                sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(sql.SQL(function), role)
            )
        connection.execute(
            sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(
                sql.Identifier(f"p_{topic_prefix}")
            )
        )
        conninfo = pair.primary.conninfo(fresh_database, user=f"r_{topic_prefix}")
        bridge = new_bridge(conninfo).start().streaming(admin)
        connection.execute("INSERT INTO t SELECT generate_series(1, 10)")
        bridge.caught_up(admin)
        assert bridge.stop() == 0, bridge.output
        bridge.assert_kafka_equals(admin, "t")
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))
