"""The same changes published by a real Debezium and by the bridge, in two sets of modes."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from confluent_kafka.schema_registry import SchemaRegistryClient
from psycopg import sql

from services.demo.copies import committed_messages
from services.testbed.java import SHORT_LIVED
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.promises.bridge.reading import committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.values import samples
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.providers.debezium import Connector, Debezium
from tests.providers.interface import Broker
from tests.providers.serial_registry import SerialRegistry, serial_registry
from tests.providers.waiting import eventually, patient

Decode = Callable[[bytes, str, str], Any]
"""Bytes, topic, and `key`, `value` or `header` -> what they say."""
Tables = Mapping[str, Mapping[str, tuple[str | None, ...]]]
Modes = Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]]
"""Name of a set of modes -> settings of the bridge, properties of Debezium."""
MODES = pytest.mark.parametrize("mode", ["default", "other"])
"""The keys of what `published` returns."""
OTHER_MODES = {
    "decimal_handling": "string",
    "time_precision": "isostring",
    "interval_handling": "string",
    "binary_handling": "hex",
    "hstore_handling": "map",
    "structures": "json",
}
DEBEZIUM_OTHER_MODES = {
    "decimal.handling.mode": "string",
    "time.precision.mode": "isostring",
    "interval.handling.mode": "string",
    "binary.handling.mode": "hex",
    "hstore.handling.mode": "map",
    "column.exclude.list": "public.toasted.blobs",  # it would fail on the unchanged value
}
EVERYTHING = {"skipped.operations": "none", "message.prefix.include.list": "slotbridge.failover"}
"""Truncates too; but not the heartbeats of the bridges."""
WITHOUT_SPECIAL = {"table.exclude.list": "public.special"}
TWO_MODES: Modes = {
    "default": (DEBEZIUM, WITHOUT_SPECIAL),
    "other": (OTHER_MODES, DEBEZIUM_OTHER_MODES),
}
TABLES: Tables = {"scalars": samples.SCALARS, "arrays": samples.ARRAYS, "special": samples.SPECIAL}
OTHERS = """
    CREATE TABLE changing (a int, b text, note text, PRIMARY KEY (a, b));
    CREATE TABLE whole (id int PRIMARY KEY, note text, n numeric(6, 2));
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE keyless (note text);
    CREATE TABLE toasted (
        id int PRIMARY KEY, n int, t text, b bytea, j jsonb, texts text[], blobs bytea[], h hstore,
        ints int[]
    );
    ALTER TABLE toasted ALTER t SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL,
        ALTER j SET STORAGE EXTERNAL, ALTER texts SET STORAGE EXTERNAL,
        ALTER blobs SET STORAGE EXTERNAL, ALTER h SET STORAGE EXTERNAL,
        ALTER ints SET STORAGE EXTERNAL;
    CREATE TABLE finished (id int PRIMARY KEY);
"""
CHANGES = """
    INSERT INTO changing VALUES (1, 'x', 'one'), (2, 'y', NULL);
    UPDATE changing SET note = 'two' WHERE a = 1;
    UPDATE changing SET a = 3 WHERE a = 2;
    DELETE FROM changing WHERE a = 1;
    INSERT INTO whole VALUES (1, 'one', 1.5), (2, NULL, NULL);
    UPDATE whole SET note = 'two' WHERE id = 1;
    UPDATE whole SET id = 7 WHERE id = 2;
    DELETE FROM whole WHERE id = 1;
    INSERT INTO keyless VALUES ('a'), (NULL);
    INSERT INTO toasted SELECT 1, 1, s, s::bytea, to_jsonb(s), ARRAY[s], ARRAY[s::bytea],
        hstore('k', s), array_agg(i) FROM (SELECT repeat('0123456789', 1000) AS s) x,
        generate_series(1, 3000) i GROUP BY s;
    UPDATE toasted SET n = 2;
    BEGIN;
    INSERT INTO changing VALUES (4, 'z', 'four');
    SELECT pg_logical_emit_message(true, 'slotbridge.failover', 'inside');
    DELETE FROM changing WHERE a = 4;
    COMMIT;
    TRUNCATE changing, whole;
    INSERT INTO finished VALUES (1);
"""


@dataclass
class Record:
    """A record of a topic, decoded; `value` None is a tombstone."""

    key: Any
    value: Any
    headers: dict[str, Any]


@dataclass
class Source:
    """The two copies of everything, by topic without its prefix."""

    theirs: dict[str, list[Record]] = field(default_factory=dict)
    ours: dict[str, list[Record]] = field(default_factory=dict)


def published(
    conninfo: str,
    name: str,
    kafka: Broker,
    folder: Path,
    *,
    modes: Modes = TWO_MODES,
    tables: Tables = TABLES,
    formats: Mapping[str, str] | None = None,
    converters: Mapping[str, str] | None = None,
    transforms: Mapping[str, str] | None = None,
    shaping: dict[str, Any] | None = None,
    registry: str | None = None,
    decode: Decode | None = None,
) -> dict[str, Source]:
    """Mode -> what both have published: of `tables` (type -> texts), and of OTHERS.

    `formats`: settings of the bridge's section kafka; `shaping`: its section;
    `converters`: Connect's properties; `transforms`: those of each connector; `registry`: the
    bridge's; `decode`: reads a part of a record, by default as JSON.
    """
    folder.chmod(0o755)
    connectors, bridges = [], []
    with psycopg.connect(conninfo, autocommit=True) as connection, contextlib.ExitStack() as stack:
        connection.execute(samples.SETUP.encode())
        make_tables(connection, tables)
        for mode, (ours, theirs) in modes.items():
            prefix, slot = f"{name}{mode}", f"d_{name}_{mode}"
            connection.execute(f"CREATE PUBLICATION p_{prefix} FOR ALL TABLES".encode())
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
            connectors.append(
                Connector(
                    *(mode, conninfo, slot, f"p_{prefix}", f"d{prefix}"),
                    {**EVERYTHING, **theirs, **(transforms or {})},
                )
            )
            _make_topics(kafka, prefix)
            bridge = Bridge(
                *(folder, conninfo, kafka, prefix),
                transaction_metadata=False,
                formats=formats,
                shaping=shaping,
                registry={"url": registry} if registry else None,
                **ours,
            )
            stack.callback(bridge.end)
            bridges.append(bridge.start())
        for bridge in bridges:
            bridge.streaming()
        fill(connection, tables)
        processes = stack.enter_context(Processes(folder, server_user()))
        debezium = Debezium(
            folder / "connect",
            connectors,
            bootstrap_servers=kafka.bootstrap_servers,
            processes=processes,
            jvm_options=SHORT_LIVED,
            settings=converters,
            jars=("debezium", "connect-avro") if registry else ("debezium",),
        )
        debezium.start()
        for mode in modes:
            _await_last(kafka, f"d{name}{mode}", debezium.log)
        debezium.stop()  # which has sent what it sends beside the last row then
        for bridge in bridges:
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
        return {
            mode: Source(
                _read(kafka, f"d{name}{mode}", decode or _json),
                _read(kafka, f"{name}{mode}", decode or _json),
            )
            for mode in modes
        }


def published_by_registry(
    conninfo: str,
    name: str,
    kafka: Broker,
    registry_folder: Path,
    folder: Path,
    *,
    modes: Modes = TWO_MODES,
    tables: Tables,
    form: str,
    converter: Mapping[str, str],
    decode: Callable[[SchemaRegistryClient, SerialRegistry], Decode],
    transforms: Mapping[str, str] | None = None,
) -> dict[str, Source]:
    """As `published`, with one registry of both; `form`: the bridge's, of keys and values.

    `converter`: of Connect for both; `decode`: makes the reader of a record's parts.
    """
    with (
        serial_registry(registry_folder) as registry,
        SchemaRegistryClient({"url": registry.url}) as client,
    ):
        named = {**converter, ".apicurio.registry.url": registry.native_url}
        return published(
            *(conninfo, name, kafka, folder),
            modes=modes,
            tables=tables,
            formats=dict.fromkeys(("key_format", "value_format"), form),
            converters={
                f"{part}.converter{key}": text
                for part in ("key", "value")
                for key, text in named.items()
            },
            transforms=transforms,
            registry=registry.url,
            decode=decode(client, registry),
        )


def make_tables(connection: psycopg.Connection[Any], tables: Tables) -> None:
    """One column a type, named like it; and OTHERS."""
    for table, types in tables.items():
        columns = sql.SQL(", ").join(
            sql.SQL("{} " + kind).format(sql.Identifier(kind)) for kind in types
        )
        connection.execute(
            sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, {})").format(
                sql.Identifier(table), columns
            )
        )
    connection.execute(OTHERS.encode())


def fill(connection: psycopg.Connection[Any], tables: Tables) -> None:
    """A row for each text of the types, then CHANGES."""
    for table, types in tables.items():
        casts = sql.SQL(", ").join(sql.SQL("%s::text::" + kind) for kind in types)
        for number, row in enumerate(samples.rows(types)):
            query = sql.SQL("INSERT INTO {} VALUES (%s, {})").format(sql.Identifier(table), casts)
            connection.execute(query, [number, *row])
    for statement in CHANGES.split(";\n"):
        connection.execute(statement.encode())


def _make_topics(kafka: Broker, prefix: str) -> None:
    """With one partition each, so that the order is that of the changes."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    tables = (*TABLES, "changing", "whole", "keyless", "toasted", "finished")
    names = [f"{prefix}.message", *(f"{prefix}.public.{table}" for table in tables)]
    for future in admin.create_topics([NewTopic(topic, 1) for topic in names]).values():
        future.result(patient(30))


def _await_last(kafka: Broker, prefix: str, log: Path) -> None:
    """Wait until the row that is written last is in the topics of `prefix`."""
    topic = f"{prefix}.public.finished"
    try:
        eventually(
            lambda: topic in _topics(kafka) and any(committed(kafka.bootstrap_servers, topic)),
            what=f"{prefix}: the last row has come",
            timeout_s=60,
            interval_s=0.5,
        )
    except AssertionError as error:
        raise AssertionError(f"{error}: {log.read_text(encoding='utf-8')[-3000:]}") from None


def _topics(kafka: Broker) -> list[str]:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    return [*admin.list_topics(timeout=patient(60)).topics]


def _read(kafka: Broker, prefix: str, decode: Decode) -> dict[str, list[Record]]:
    """Everything of `prefix`, whose publisher writes no more."""
    names = re.compile(rf"{re.escape(prefix)}\.(public\..*|message)")
    topics = [topic for topic in _topics(kafka) if names.fullmatch(topic)]
    found: dict[str, list[Record]] = {}
    for message in committed_messages(kafka.bootstrap_servers, topics, decided_s=30):
        topic = str(message.topic())
        headers: dict[str, Any] = dict(message.headers() or [])
        found.setdefault(topic.removeprefix(f"{prefix}."), []).append(
            Record(
                decode(message.key() or b"", topic, "key"),
                decode(message.value() or b"", topic, "value"),
                {
                    name: decode(content or b"", topic, "header")
                    for name, content in headers.items()
                },
            )
        )
    return found


def _json(data: bytes, _topic: str, _part: str) -> Any:
    return json_or_text(data) if data else None


def json_or_text(data: bytes) -> Any:
    """What JSON says, and the bytes themselves where it is other text."""
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return data
