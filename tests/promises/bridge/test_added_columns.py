"""What schema events tell of columns that were added with a default, on real servers."""

import json
from typing import Any

import psycopg
import pytest

from schemas.schema_events import SchemaEvent
from tests.promises.bridge.conftest import NewBridge
from tests.providers.interface import Provider


@pytest.mark.long
def test_masked_and_partitioned(pair: Provider, fresh_database: str, new_bridge: NewBridge) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    shaping: dict[str, Any] = {
        "masks": {"public.person": {"phone": {"text": "-"}, "mail": {"truncate": 2}}},
        "large_values": {"public.person": {"cv": {"truncate_bytes": 3}}},
        "columns": {"public.person": {"exclude": ["ssn"]}},
    }
    bridge = new_bridge(conninfo, shaping=shaping)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(b"""
            CREATE TABLE person (id int PRIMARY KEY);
            CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
            CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10);
            CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20);
        """)
        name = bridge.publication.encode()
        connection.execute(
            b"CREATE PUBLICATION " + name + b" FOR ALL TABLES WITH (publish_via_partition_root)"
        )
        bridge.start().streaming()
        connection.execute(b"INSERT INTO person VALUES (1); INSERT INTO parts VALUES (1), (11)")
        connection.execute(
            b"ALTER TABLE person ADD phone text DEFAULT 'secret',"
            b" ADD mail text DEFAULT 'secret', ADD cv text DEFAULT 'secret',"
            b" ADD ssn text DEFAULT 'secret';"
            b" ALTER TABLE parts ADD c int DEFAULT 7;"
            b" INSERT INTO person (id) VALUES (2); INSERT INTO parts VALUES (2)"
        )
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    records = [(json.loads(key or b""), value) for key, value in bridge.records("schema")]
    told = {key["table"]: json.loads(value or b"") for key, value in records}
    assert told["person"]["missing"].keys() == {"phone", "mail", "cv"}
    assert (told["person"]["missing"]["phone"], told["person"]["missing"]["mail"]) == ("-", "se")
    assert "secret" not in json.dumps(told)
    assert (told["parts"]["missing"], told["parts"].get("unsent")) == ({"c": 7}, None)
    row = next(event["after"] for event in bridge.events("person") if event["after"]["id"] == 2)
    assert told["person"]["missing"] == {name: row[name] for name in ("phone", "mail", "cv")}


@pytest.mark.long
def test_a_column_that_was_not_published(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Rows may have got another value in it meanwhile, of which no event tells."""
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo)
    publication = bridge.publication

    def last() -> SchemaEvent:
        bridge.caught_up()
        values = [value for _, value in bridge.records("schema") if value]
        return SchemaEvent.model_validate_json(values[-1])

    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(b"CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute(f"CREATE PUBLICATION {publication} FOR TABLE t (id)".encode())
        bridge.start().streaming()
        connection.execute(b"INSERT INTO t VALUES (1)")
        assert last().publication == ""
        connection.execute(b"ALTER TABLE t ADD c int DEFAULT 5; INSERT INTO t VALUES (2, 9)")
        connection.execute(f"ALTER PUBLICATION {publication} SET TABLE t".encode())
        connection.execute(b"INSERT INTO t VALUES (3, 3)")
        assert (last().missing, last().unsent) == ({}, ["c"])
        connection.execute(b"ALTER TABLE t ADD d int DEFAULT 6; INSERT INTO t VALUES (4)")
        assert (last().missing["d"], "d" in last().unsent) == (6, False)
        assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_large_defaults_do_not_stop_the_bridge(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """One value, and all of one event together: Kafka would refuse it again at each start."""
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo, on_refused="dead_letter")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(b"CREATE TABLE t (id int PRIMARY KEY)")
        bridge.start().streaming()
        connection.execute(b"INSERT INTO t VALUES (1)")
        bridge.caught_up()
        huge = (b"ADD h%d text DEFAULT repeat('x', 500000)" % n for n in range(3))
        large = (b"ADD c%d text DEFAULT repeat('x', 30000)" % n for n in range(3))
        added = b", ".join((*huge, *large, b"ADD last int DEFAULT 7"))
        connection.execute(b"ALTER TABLE t " + added)
        connection.execute(b"INSERT INTO t (id, h0, h1, h2) VALUES (2, '', '', '')")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    values = [value for _, value in bridge.records("schema") if value]
    told = SchemaEvent.model_validate_json(values[-1])
    assert told.missing.keys() == {"c0", "c1", "last"}
    assert told.unsent == ["h0", "h1", "h2", "c2"]
    assert "older rows may have values that are in no event" in bridge.output
