"""Iceberg's own sink in a real Kafka Connect appends each event once (docs/guides/formats.md)."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_jdbc_sink import AVRO, FILL, JSON, TABLES, run
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.providers.iceberg_sink import IcebergSink
from tests.providers.interface import Broker, Provider, Server
from tests.providers.waiting import eventually

KEYS: Final = {"account": ("id",), "part": ("a", "b")}
CHANGES: Final = (
    ("INSERT INTO account (id, owner) VALUES (-1, 'nothing else')", 1),
    ("UPDATE account SET balance = -balance, doc = NULL, photo = '\\x00ff' WHERE id % 3 = 0", 1),
    ("UPDATE account SET id = id + 1000000 WHERE id BETWEEN 10 AND 20", 2),
    ("DELETE FROM account WHERE id % 5 = 0", 1),
    ("INSERT INTO part SELECT i, 'b', 'n' || i FROM generate_series(1, 200) i", 1),
    ("UPDATE part SET b = 'c', note = NULL WHERE a < 50", 2),
    ("DELETE FROM part WHERE a > 150", 1),
    ("ALTER TABLE part ADD COLUMN extra bigint", 0),
    ("UPDATE part SET extra = a * 3 WHERE a < 100", 1),
    (FILL.format(601, 700), 1),
)
"""Statements, and the events of each row: a new key is a delete and an insert."""
FLAT: Final = {
    "key.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
    "iceberg.tables": "lake.account,lake.part",
    "iceberg.tables.route-field": "__table",
    "iceberg.table.lake.account.route-regex": "account",
    "iceberg.table.lake.part.route-regex": "part",
}
EVENTS: Final = {
    "transforms": "rows",
    "transforms.rows.type": "org.apache.iceberg.connect.transforms.DebeziumTransform",
    "transforms.rows.cdc.target.pattern": "lake.{table}",
    "iceberg.tables.dynamic-enabled": "true",
    "iceberg.tables.route-field": "_cdc.target",
}
SAME: Final = {
    **dict.fromkeys(("owner", "doc"), "string"),
    "id": "long",
    "small": "int",
    "score": "double",
    "open": "boolean",
    "photo": "binary",
}
MADE: Final = {**SAME, "balance": "decimal(38, 2)", "seen": "string", "token": "string"}
TYPED: Final = {
    "id": "long",
    "balance": "decimal(12, 2)",
    "since": "date",
    "at": "timestamp",
    "seen": "timestamptz",
    "wakes_at": "time",
    "token": "uuid",
}
"""Of a table that is made before the sink starts, which adds the other columns."""


class Case(NamedTuple):
    """What is published and read, and the types of `account` in Iceberg, beside `ratio`."""

    form: str
    time_precision: str
    sink: Mapping[str, str]
    types: Mapping[str, str]
    made_before: bool = False


CASES: Final = {
    "flat rows": Case(
        *("json_schema_envelope", "connect", FLAT),
        {**MADE, "since": "date", "at": "timestamptz", "wakes_at": "time"},
    ),
    "events into a table with types": Case(
        *("json_schema_envelope", "connect", EVENTS),
        {**SAME, **{name: str(kind) for name, kind in TYPED.items()}},
        made_before=True,
    ),
    "flat rows in Avro": Case(
        *("avro", "adaptive", FLAT), {**MADE, "since": "int", "at": "long", "wakes_at": "long"}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_each_event_is_appended_once_through_changes_and_kills(
    case: str,
    request: pytest.FixtureRequest,
    pair: Provider,
    subscriber: Server,
    fresh_database: str,
    fresh_subscriber_database: str,
    kafka: Broker,
    tmp_path: Path,
) -> None:
    form, time_precision, properties, types, made_before = CASES[case]
    source = pair.primary.conninfo(fresh_database)
    catalog = subscriber.conninfo(fresh_subscriber_database)
    converter, urls = JSON, {}
    if form == "avro":
        schemas = request.getfixturevalue("schemas")
        converter, urls = (
            {**AVRO, ".apicurio.registry.url": schemas.native_url},
            {"url": schemas.url},
        )
    run(source, TABLES, FILL.format(1, 300))
    bridge = Bridge(
        *(tmp_path, source, kafka, fresh_database),
        formats={"key_format": form, "value_format": form},
        registry=urls,
        shaping={"flat": {"fields": ["table"]}} if properties is FLAT else None,
        snapshot={"mode": "initial"},
        **DEBEZIUM | {"time_precision": time_precision},
    )
    topics = f"{fresh_database}\\\\.public\\\\..*"
    sink = IcebergSink(tmp_path, catalog, kafka.bootstrap_servers, topics, converter, properties)
    if made_before:
        sink.make_table("account", TYPED)
    try:
        bridge.start().streaming()
        sink.start()
        arrived(sink, 300)
        events = 300 + changed(source, [(FILL.format(301, 600), 1)])
        arrived(sink, 301)
        sink.kill()
        bridge.kill()
        events += changed(source, CHANGES[:4])
        bridge.start().streaming()
        sink.start()
        events += changed(source, CHANGES[4:])
        arrived(sink, events)
        events += changed(source, [(FILL.format(701, 701), 1)])  # what is late comes before it
        arrived(sink, events)
        bridge.caught_up()
        assert bridge.stop() == 0
    finally:
        sink.kill()
        bridge.end()
    found = {field.name: str(field.field_type) for field in sink.table("account").schema().fields}
    assert {name: found[name] for name in types} == types
    rows = {name: sink.rows(name) for name in KEYS}
    assert sum(map(len, rows.values())) == events
    for name, key in KEYS.items():
        assert len({identity(row, key) for row in rows[name]}) == len(rows[name])
        expected = source_rows(source, name, key, milliseconds=time_precision == "connect")
        assert folded(rows[name], key) == expected


@pytest.mark.long
def test_microseconds_in_a_timestamp_column_are_wrong_and_a_truncated_event_stops_the_sink(
    pair: Provider,
    subscriber: Server,
    fresh_database: str,
    fresh_subscriber_database: str,
    kafka: Broker,
    tmp_path: Path,
) -> None:
    """The sink takes any number for milliseconds, and its DebeziumTransform knows no truncate."""
    source = pair.primary.conninfo(fresh_database)
    run(source, "CREATE TABLE t (id int PRIMARY KEY, at timestamp)")
    formats = dict.fromkeys(("key_format", "value_format"), "json_schema_envelope")
    bridge = Bridge(tmp_path, source, kafka, fresh_database, formats=formats, **DEBEZIUM)
    sink = IcebergSink(
        *(tmp_path, subscriber.conninfo(fresh_subscriber_database), kafka.bootstrap_servers),
        *(f"{fresh_database}\\\\.public\\\\.t", JSON, EVENTS),
    )
    sink.make_table("t", {"id": "long", "at": "timestamp"})
    try:
        bridge.start().streaming()
        run(source, "INSERT INTO t VALUES (1, '1970-01-02 00:00')")
        sink.start()
        eventually(lambda: sink.rows("t") or not sink.works, what="the row is there", timeout_s=120)
        assert [str(row["at"]) for row in sink.rows("t")] == ["1972-09-27 00:00:00"]
        run(source, "TRUNCATE t")
        eventually(lambda: not sink.works, what="the sink's task fails", timeout_s=120)
        failure = "NullPointerException"
        eventually(lambda: failure in sink.log.read_text(), what="it logs why", timeout_s=120)
    finally:
        sink.kill()
        bridge.end()


def changed(conninfo: str, statements: Sequence[tuple[str, int]]) -> int:
    """Run the statements; return how many events they make."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        return sum(
            connection.execute(statement.encode()).rowcount * events
            for statement, events in statements
        )


def arrived(sink: IcebergSink, events: int) -> None:
    """Wait until both tables together have `events` rows."""

    def there() -> bool:
        assert sink.works, sink.output
        return sum(len(sink.rows(name)) for name in KEYS) >= events

    eventually(there, what=f"{events} rows", timeout_s=120, interval_s=0.5)


def identity(row: dict[str, Any], key: tuple[str, ...]) -> tuple[Any, ...]:
    """What tells a row's event from all others of the table."""
    if "_cdc" in row:  # a key is in one partition, whose offsets differ
        return *(row[column] for column in key), row["_cdc"]["offset"]
    return row["__commit_lsn"], row["__seq"]


def folded(rows: list[dict[str, Any]], key: tuple[str, ...]) -> dict[Any, dict[str, Any]]:
    """The table as its events leave it, by key."""
    found: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: identity(row, ())):
        place = tuple(row[column] for column in key)
        if row.get("__deleted") == "true" or row.get("_cdc", {}).get("op") == "D":
            del found[place]
        else:
            found[place] = {name: read(name, row[name]) for name in row if name[0] != "_"}
    return found


def read(name: str, value: Any) -> Any:
    """A value as psycopg has it."""
    if isinstance(value, dict):
        unscaled = int.from_bytes(value["value"], "big", signed=True)
        return Decimal(unscaled).scaleb(-value["scale"])
    if isinstance(value, int | str) and name in READ:
        return READ[name](value)
    return value.replace(tzinfo=None) if name == "at" and value is not None else value


def _since_1970(microseconds: int) -> datetime:
    return datetime.fromtimestamp(0, UTC).replace(tzinfo=None) + timedelta(
        microseconds=microseconds
    )


READ: Final[dict[str, Callable[[Any], Any]]] = {
    "since": lambda days: date(1970, 1, 1) + timedelta(days),
    "at": _since_1970,
    "wakes_at": lambda microseconds: _since_1970(microseconds).time(),
    "seen": datetime.fromisoformat,
    "token": UUID,
    "doc": json.loads,
}
"""Of what the sink has as numbers and texts."""


def source_rows(
    conninfo: str, name: str, key: tuple[str, ...], *, milliseconds: bool
) -> dict[Any, dict[str, Any]]:
    """The table's rows by key; `milliseconds`: without what is less in `at` and `wakes_at`."""
    with psycopg.connect(conninfo, row_factory=dict_row) as connection:
        connection.execute("SET timezone = 'UTC'")
        rows = connection.execute(f"SELECT * FROM {name}".encode()).fetchall()
    for row in rows if milliseconds else ():
        for column in ("at", "wakes_at"):
            if row.get(column) is not None:
                cut = row[column].microsecond // 1000 * 1000
                row[column] = row[column].replace(microsecond=cut)
    return {tuple(row[column] for column in key): row for row in rows}
