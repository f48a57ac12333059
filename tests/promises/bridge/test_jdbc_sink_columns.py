"""What Debezium's JDBC sink makes of other columns, of truncates and of flat rows."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from schemas.errors import ExitCode
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_jdbc_sink import JSON, run
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.providers.interface import Broker, Provider, Server
from tests.providers.jdbc_sink import JdbcSink
from tests.providers.waiting import eventually, patient

TYPES = "CREATE TYPE mood AS ENUM ('sad', 'ok')"
TABLES = """
    CREATE TABLE arrays (id int PRIMARY KEY, ints int[], longs bigint[], texts text[],
        names varchar(9)[], flags boolean[], tokens uuid[], docs jsonb[], scores float8[]);
    CREATE TABLE named (id int PRIMARY KEY, m mood, i inet, c cidr, mac macaddr, r int4range,
        x xid8);
    CREATE TABLE floats (id int PRIMARY KEY, r real, d double precision);
    CREATE TABLE toasted (id int PRIMARY KEY, n int, t text, b bytea);
    CREATE TABLE toasted_full (id int PRIMARY KEY, n int, t text, b bytea, j jsonb);
    CREATE TABLE emptied (id int PRIMARY KEY, v text);
    CREATE TABLE finished (id int PRIMARY KEY);
"""
STORED_APART = """
    ALTER TABLE toasted ALTER t SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL;
    ALTER TABLE toasted_full ALTER t SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL,
        ALTER j SET STORAGE EXTERNAL;
    ALTER TABLE toasted_full REPLICA IDENTITY FULL;
"""
CHANGES = (
    """INSERT INTO arrays VALUES (2, NULL, '{}', '{}', NULL, NULL, NULL, NULL, NULL),
        (1, '{1,NULL,-3}', '{9223372036854775807}', '{a,"b,c",NULL,""}', '{x}', '{t,f}',
         '{10000000-0000-0000-0000-000000000000}', '{"{\\"a\\": 1}"}', '{1.5}')""",
    """INSERT INTO named VALUES
        (1, 'ok', '10.0.0.1', '10.0.0.0/8', '08:00:2b:01:02:03', '[1,3)', '7')""",
    "INSERT INTO floats VALUES (1, 1.5, 2.5)",
    """INSERT INTO toasted SELECT 1, 1, s, s::bytea FROM repeat('0123456789', 1000) s""",
    "INSERT INTO toasted_full SELECT *, to_jsonb(t) FROM toasted",
    "UPDATE toasted SET n = 2",
    "UPDATE toasted_full SET n = 2",
    "INSERT INTO emptied VALUES (1, 'a'), (2, 'b')",
    "TRUNCATE emptied",
    "INSERT INTO emptied VALUES (3, 'c')",
)
EQUAL = ("arrays", "named", "toasted_full", "emptied")
PLACEHOLDER = "__debezium_unavailable_value"
ENVELOPE = dict.fromkeys(("key_format", "value_format"), "json_schema_envelope")
UNFIT = ("'NaN', 0", "0, '-Infinity'")


class Ground:
    """A bridge, a sink behind it, and both databases."""

    def __init__(self, bridge: Bridge, sink: JdbcSink, target: str) -> None:
        self.bridge, self.sink, self.target = bridge, sink, target

    def rows(self, conninfo: str, table: str, columns: str = "*") -> list[Any]:
        """All rows of a table, in order."""
        with psycopg.connect(conninfo, autocommit=True) as connection:
            query = f"SELECT {columns} FROM {table} ORDER BY id"
            return connection.execute(query.encode()).fetchall()

    def arrived(self, table: str, count: int) -> None:
        """Wait until the target's table has `count` rows."""

        def there() -> bool:
            assert self.sink.works, self.sink.output
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                return len(self.rows(self.target, table, "id")) == count
            return False

        eventually(there, what=f"{count} rows of {table}", timeout_s=120, interval_s=0.5)


@pytest.fixture
def target(subscriber: Server, fresh_subscriber_database: str) -> str:
    return subscriber.conninfo(fresh_subscriber_database)


@pytest.fixture
def ground(
    pair: Provider, fresh_database: str, target: str, kafka: Broker, tmp_path: Path
) -> Iterator[Ground]:
    source = pair.primary.conninfo(fresh_database)
    run(source, TYPES, TABLES, STORED_APART)
    run(target, TYPES, TABLES)
    formats = {**ENVELOPE, "partitions": 1}  # the sink knows the order within one partition
    bridge = Bridge(tmp_path, source, kafka, fresh_database, formats=formats, **DEBEZIUM)
    sink = JdbcSink(
        *(tmp_path, target, kafka.bootstrap_servers, f"{fresh_database}\\\\.public\\\\..*", JSON),
        parameters="?stringtype=unspecified",
        truncate_enabled="true",
    )
    yield Ground(bridge, sink, target)
    sink.kill()
    bridge.end()


@pytest.mark.long
def test_arrays_named_types_truncates_and_unchanged_large_values(ground: Ground) -> None:
    bridge = ground.bridge.start().streaming()
    run(bridge.conninfo, *CHANGES)
    bridge.caught_up()
    _as_before_the_bridge_refused_it(bridge)
    run(bridge.conninfo, "INSERT INTO finished VALUES (1)")
    ground.sink.start()
    for table, count in (("finished", 1), ("floats", 2), ("emptied", 1), ("named", 1)):
        ground.arrived(table, count)
    for table, count in (("arrays", 2), ("toasted", 1), ("toasted_full", 1)):
        ground.arrived(table, count)
    for table in EQUAL:
        assert ground.rows(ground.target, table) == ground.rows(bridge.conninfo, table), table
    assert ground.rows(ground.target, "toasted") == [(1, 2, PLACEHOLDER, PLACEHOLDER.encode())]
    assert ground.rows(ground.target, "floats") == [(1, 1.5, 2.5), (2, 0.0, 0.0)]
    assert bridge.stop() == 0


def _as_before_the_bridge_refused_it(bridge: Bridge) -> None:
    """Send a row with the text NaN in place of a number, as Debezium's JsonConverter writes it."""
    ((key, value),) = bridge.records("public.floats")
    documents = json.loads(key or b""), json.loads(value or b"")
    documents[0]["payload"]["id"] = documents[1]["payload"]["after"]["id"] = 2
    documents[1]["payload"]["after"] |= {"r": "NaN", "d": "-Infinity"}
    producer = Producer({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    topic = f"{bridge.prefix}.public.floats"
    producer.produce(topic, json.dumps(documents[1]), json.dumps(documents[0]))
    assert producer.flush(patient(30)) == 0


@pytest.mark.long
@pytest.mark.parametrize("numbers", UNFIT)
def test_a_number_that_connect_would_read_as_zero_stops_the_bridge(
    ground: Ground, numbers: str
) -> None:
    bridge = ground.bridge.start().streaming()
    run(bridge.conninfo, f"INSERT INTO floats VALUES (1, {numbers})")
    assert bridge.exit_code() == ExitCode.UNDECODABLE
    last = bridge.output.splitlines()[-1]
    assert "NaN or infinite" in last and "public.floats" in last and "avro" in last


@pytest.mark.long
def test_flat_rows(
    pair: Provider, fresh_database: str, target: str, kafka: Broker, tmp_path: Path
) -> None:
    """The sink makes the table, with a column for each field of the event."""
    source = pair.primary.conninfo(fresh_database)
    run(source, "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(8, 2), doc jsonb)")
    shaping = {"topic": "{prefix}_{table}", "flat": {"deletes": "tombstone", "fields": ["op"]}}
    bridge = Bridge(
        *(tmp_path, source, kafka, fresh_database), formats=ENVELOPE, shaping=shaping, **DEBEZIUM
    )
    name = f"{fresh_database}_t"
    sink = JdbcSink(
        *(tmp_path, target, kafka.bootstrap_servers, name, JSON),
        collection_name_format="${topic}",
    )
    ground = Ground(bridge, sink, target)
    try:
        bridge.start().streaming()
        run(
            source,
            "INSERT INTO t SELECT i, 'v' || i, i / 4.0, '{}' FROM generate_series(1, 40) i",
            "UPDATE t SET v = NULL, n = -n WHERE id % 3 = 0",
            "DELETE FROM t WHERE id > 30",
            "UPDATE t SET id = -id WHERE id = 7",
        )
        bridge.caught_up()
        sink.start()
        columns = "id, v, n, doc"
        expected = ground.rows(source, "t", columns)

        def equal() -> bool:
            assert sink.works, sink.output
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                return ground.rows(target, name, columns) == expected
            return False

        with contextlib.suppress(AssertionError):
            eventually(equal, what="the rows are equal", timeout_s=120, interval_s=0.5)
        assert ground.rows(target, name, columns) == expected
        assert {op for (op,) in ground.rows(target, name, "__op")} == {"c", "u"}
        assert bridge.stop() == 0
    finally:
        sink.kill()
        bridge.end()
