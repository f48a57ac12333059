"""What a real Debezium has written in another form than the bridge would, and hidden witnesses."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest
import yaml
from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource

from schemas.errors import ExitCode
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.promises.adoption.ground import Taken, connectors
from tests.promises.bridge.reading import committed
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

TABLES = """
    CREATE TABLE turned (a int, b int, note text, PRIMARY KEY (b, a));
    CREATE TABLE by_unique (note text, code int NOT NULL UNIQUE);
    CREATE TABLE by_index (id int PRIMARY KEY, code int NOT NULL UNIQUE);
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code_key;
    CREATE TABLE "Mixed" (id int PRIMARY KEY, note text DEFAULT 'none');
    ALTER PUBLICATION pub ADD TABLE turned, by_unique, by_index, "Mixed";
"""
SEED = 5
"""Of a Kafka Connect that writes offsets every 10 s: the slot is behind all that it has sent."""
ROWS = """
    INSERT INTO by_unique VALUES ('x', 3);
    INSERT INTO "Mixed" VALUES (6, NULL);
    INSERT INTO last VALUES (1, 1);
"""
OTHER_ROWS = """
    INSERT INTO turned VALUES (1, 2, 'x');
    INSERT INTO by_index VALUES (4, 5);
"""


@pytest.fixture(scope="module")
def killed(
    pair: Provider, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Taken]]:
    """Two connectors; the last that they have written is a message outside of transactions."""
    folder = tmp_path_factory.mktemp("forms")
    folder.chmod(0o755)
    with (
        Processes(folder, server_user()) as processes,
        connectors(pair.primary, kafka, folder / "c", processes, random.Random(SEED), 2) as (
            debezium,
            taken,
        ),
    ):
        for one in taken:
            _execute(one, TABLES)
        debezium.start(timeout_s=patient(100))
        _execute(taken[1], OTHER_ROWS)
        for one in taken:
            _execute(one, ROWS)
            _execute(one, "SELECT pg_logical_emit_message(false, 'mark', 'the last')")
            eventually(partial(_has_message, one), what="Debezium's message", timeout_s=60)
        debezium.kill()
        for one in taken:
            one.translate()
        yield taken


def _execute(one: Taken, text: str) -> None:
    with psycopg.connect(one.conninfo, autocommit=True) as connection:
        connection.execute(text.encode())


def _has_message(one: Taken) -> bool:
    topic = f"{one.prefix}.message"
    there = AdminClient({"bootstrap.servers": one.broker.bootstrap_servers}).list_topics(
        timeout=patient(60)
    )
    return topic in there.topics and any(
        b"dGhlIGxhc3Q=" in (value or b"")
        for _, _, value in committed(one.broker.bootstrap_servers, topic)
    )


def planned(one: Taken) -> dict[str, Any]:
    done = one.adopt("--dry-run")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(one: Taken) -> str:
    done = one.adopt("--dry-run")
    assert done.returncode == ExitCode.WITNESSES_DISAGREE, done.stderr + done.stdout
    return done.stderr


@pytest.mark.long
def test_a_null_is_not_the_columns_default(killed: list[Taken]) -> None:
    """As docs/guides/adopt.md says of what is different afterwards."""
    topic = f"{killed[0].prefix}.public.Mixed"
    ((_, _, value),) = committed(killed[0].broker.bootstrap_servers, topic)
    assert json.loads(value or b"")["after"] == {"id": 6, "note": "none"}


def _told(one: Taken, *options: str) -> str:
    """Why it is refused."""
    done = one.adopt("--dry-run", *options)
    assert done.returncode == ExitCode.WITNESSES_DISAGREE, done.stderr + done.stdout
    return done.stderr


def _shape(one: Taken, **shaping: Any) -> None:
    settings = yaml.safe_load(one.config.read_text())
    settings["shaping"] |= shaping
    one.config.write_text(yaml.safe_dump(settings))


@pytest.mark.long
def test_keys_of_another_form_are_refused(killed: list[Taken]) -> None:
    _, one = killed
    told = _told(one)
    for table, theirs, ours in (
        ("turned", "(b, a)", "(a, b)"),
        ("by_unique", "(code)", "(none)"),
        ("by_index", "(id)", "(code)"),
    ):
        assert f"{one.prefix}.public.{table}[" in told
        assert f"has key {theirs}, the bridge's is {ours}" in told


@pytest.mark.long
def test_settings_of_kafka_that_hide_records_are_refused(killed: list[Taken]) -> None:
    one, _ = killed
    assert "has key (code), the bridge's is (none)" in _told(one)
    _shape(one, keys={"public.by_unique": ["code"]})
    planned = json.loads(one.adopt("--dry-run").stdout)  # a message is the last of all
    assert planned["left_out"][f"{one.prefix}.message"] == 1

    options = dict(one.connector.options)
    listed = {"table.include.list": r"public\.by_unique,public\.last,public\.mixed"}
    one.connector = replace(one.connector, options={**options, **listed})
    _shape(one, include=["public.by_unique", "public.last", "public.mixed"])
    assert "do not regard upper and lower case: public.Mixed" in _told(one)
    one.connector = replace(one.connector, options=options)
    _shape(one, include=[])

    topic = f"{one.prefix}.public.last"
    partition, key, value = [*committed(one.broker.bootstrap_servers, topic)][-1]
    then_ms = time.time_ns() // 1_000_000 - 7_200_000
    producer = Producer({"bootstrap.servers": one.broker.bootstrap_servers})
    producer.produce(topic, value, key, partition, timestamp=then_ms)
    assert producer.flush(patient(30)) == 0
    assert "Kafka's time of the record is before its transaction was committed" in _told(one)
    _remove_all(one, topic, partition)
    told = _told(one)
    assert f"{topic}[{partition}]" in told and "Kafka has removed records" in told


def _remove_all(one: Taken, topic: str, partition: int) -> None:
    """As retention does: all records of the partition, which are kept for a second."""
    admin = AdminClient({"bootstrap.servers": one.broker.bootstrap_servers})
    entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result(patient(30))
    whole = TopicPartition(topic, partition, OFFSET_END)
    for removed in admin.delete_records([whole]).values():
        removed.result(patient(30))
