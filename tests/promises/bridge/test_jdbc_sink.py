"""Debezium's JDBC sink in a real Kafka Connect keeps another PostgreSQL's tables equal."""

import contextlib
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.promises.bridge.running import Bridge
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.providers.interface import Broker, Provider, Server
from tests.providers.jdbc_sink import JdbcSink
from tests.providers.registry import Registry
from tests.providers.waiting import eventually

TABLES = """
    CREATE TABLE account (
        id bigint PRIMARY KEY, owner text NOT NULL, balance numeric(12, 2), ratio numeric,
        score double precision, small smallint, open boolean, since date, at timestamp,
        seen timestamptz, wakes_at time, token uuid, doc jsonb, photo bytea
    );
    CREATE TABLE part (a int, b text, note text, PRIMARY KEY (a, b));
"""
FILL = """
    INSERT INTO account SELECT i, 'o' || i, i * 1.25, i / 7.0, i / 3.0, i % 100, i % 2 = 0,
        DATE '2024-01-01' + i, TIMESTAMP '2024-01-01 01:02:03.456789' + i * INTERVAL '1 hour',
        TIMESTAMPTZ '2024-01-01 01:02:03.456789+02' + i * INTERVAL '1 hour', '10:20:30.123456',
        md5(i::text)::uuid, jsonb_build_object('i', i, 'text', 'é"\\'), decode(md5(i::text), 'hex')
    FROM generate_series({}, {}) i
"""
CHANGES = (
    "INSERT INTO account (id, owner) VALUES (-1, 'nothing else')",
    "UPDATE account SET balance = -balance, doc = NULL, photo = '\\x00ff' WHERE id % 3 = 0",
    "UPDATE account SET id = id + 1000000 WHERE id BETWEEN 10 AND 20",
    "DELETE FROM account WHERE id % 5 = 0",
    "INSERT INTO part SELECT i, 'b', 'n' || i FROM generate_series(1, 200) i",
    "UPDATE part SET b = 'c', note = NULL WHERE a < 50",
    "DELETE FROM part WHERE a > 150",
    "ALTER TABLE part ADD COLUMN extra bigint",
    "UPDATE part SET extra = a * 3 WHERE a < 100",
)
JSON = {"": "org.apache.kafka.connect.json.JsonConverter", ".schemas.enable": "true"}
AVRO = {
    "": "io.apicurio.registry.utils.converter.AvroConverter",
    ".apicurio.registry.as-confluent": "true",
    ".apicurio.registry.use-id": "contentId",
}


@pytest.mark.long
@pytest.mark.parametrize("form", ["json_schema_envelope", "avro"])
def test_tables_stay_equal_through_changes_and_a_kill(
    form: str,
    schemas: Registry,
    pair: Provider,
    subscriber: Server,
    fresh_database: str,
    fresh_subscriber_database: str,
    kafka: Broker,
    tmp_path: Path,
) -> None:
    source = pair.primary.conninfo(fresh_database)
    target = subscriber.conninfo(fresh_subscriber_database)
    run(source, TABLES, FILL.format(1, 300))
    run(target, TABLES)
    converter = JSON
    if form == "avro":
        converter = {**AVRO, ".apicurio.registry.url": schemas.native_url}
    bridge = Bridge(
        *(tmp_path, source, kafka, fresh_database),
        formats={"key_format": form, "value_format": form},
        registry={"url": schemas.url},
        snapshot={"mode": "initial"},
        **DEBEZIUM,
    )
    topics = f"{fresh_database}\\\\.public\\\\..*"
    sink = JdbcSink(tmp_path, target, kafka.bootstrap_servers, topics, converter)
    try:
        bridge.start().streaming()
        sink.start()
        run(source, FILL.format(301, 600))
        bridge.kill()
        run(source, *CHANGES[:4])
        bridge.start().streaming()
        run(source, *CHANGES[4:], FILL.format(601, 700))
        bridge.caught_up()
        expected = rows(source)

        def equal() -> bool:
            return not sink.works or rows(target) == expected

        with contextlib.suppress(AssertionError):
            eventually(equal, what="the tables are equal", timeout_s=120, interval_s=0.5)
        assert sink.works, sink.output
        assert rows(target) == expected
        assert len(expected[0]) > 500
        assert bridge.stop() == 0
    finally:
        sink.kill()
        bridge.end()


def run(conninfo: str, *statements: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def rows(conninfo: str) -> list[list[Any]]:
    """All rows of both tables."""
    queries = ("SELECT * FROM account ORDER BY id", "SELECT * FROM part ORDER BY a, b")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        return [connection.execute(query.encode()).fetchall() for query in queries]
