"""Records that a real broker refuses: the bridge stops and names them, or they are dead letters."""

import json
import random
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from schemas.events import DeadLetter
from services.testbed.kafka import KafkaBroker
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient, patient_ms

ALLOW, DENY = AclPermissionType.ALLOW, AclPermissionType.DENY


def noise(size: int) -> str:
    """Text of `size` characters that does not compress below two thirds."""
    return b64encode(random.Random(size).randbytes(size)).decode()[:size]


def dead(bridge: Bridge) -> list[DeadLetter]:
    return [DeadLetter.model_validate_json(v) for _, v in bridge.records("dead") if v is not None]


def assert_all_there(bridge: Bridge, connection: psycopg.Connection[Any], *tables: str) -> None:
    """Topics and dead letters together have each event once, as many as END counts."""
    letters = dead(bridge)
    ends: dict[str, int] = {}
    for _, value in bridge.records("transaction"):
        for part in json.loads(value or b"{}").get("data_collections") or ():
            name = part["data_collection"]
            ends[name] = ends.get(name, 0) + part["event_count"]
    for table in tables:
        known = f"{bridge.prefix}.public.{table}" in bridge.topics()
        sent = list(bridge.identities(table).elements()) if known else []
        refused = [(x.commit_lsn, x.seq) for x in letters if x.table == f"public.{table}"]
        assert len(set(sent + refused)) == len(sent) + len(refused) == ends[f"public.{table}"]
        row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert row == (ends[f"public.{table}"],)


def test_a_record_too_large_for_the_client(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        bridge = new_bridge(conninfo).start().streaming()
        with connection.transaction():
            for number, size in ((1, 10), (2, 1_200_000), (3, 10)):
                connection.execute("INSERT INTO t VALUES (%s, repeat('ä', %s))", [number, size])
        assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
        line = bridge.output.splitlines()[-1]
        for part in (f"topic {bridge.prefix}.public.t", "table public.t", "seq 1", "2400", "LSN"):
            assert part in line, line
        going_on = new_bridge(conninfo, on_refused="dead_letter").start().streaming()
        going_on.caught_up()
        assert going_on.stop() == 0, going_on.output
        assert_all_there(bridge, connection, "t")
    (letter,) = dead(bridge)
    assert letter.topic == f"{bridge.prefix}.public.t"
    assert letter.seq == 1
    assert letter.end_lsn is not None and letter.end_lsn > letter.commit_lsn
    assert letter.key is not None and letter.key.text == '{"id":2}'
    assert letter.value is not None and letter.value.truncated
    assert letter.value.bytes > 2_400_000
    assert '"seq":1' not in (letter.value.text or "")
    assert "dead letters committed" in going_on.output
    assert {e["after"]["id"] for e in bridge.events("t")} == {1, 3}


@pytest.mark.long
def test_no_login_stops_the_bridge_by_a_message(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """As no grant is needed to write one: neither without a topic nor too large for Kafka."""
    conninfo = pair.primary.conninfo(fresh_database)
    shaping = {"outbox": {"message_prefix": "outbox"}, "annotations": {"message_prefix": "audit"}}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
        connection.execute("SELECT pg_logical_emit_message(false, 'outbox', 'x')")
        connection.execute(
            "SELECT pg_logical_emit_message(true, 'outbox', jsonb_build_object("
            "'aggregatetype', 'a', 'aggregateid', '1', 'payload', repeat('a', 3000000))::text)"
        )
        connection.execute("SELECT pg_logical_emit_message(false, 'audit', repeat('a', 3000000))")
        connection.execute("INSERT INTO t VALUES (1, 'x')")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert_all_there(bridge, connection, "t")
    assert len(dead(bridge)) == 3


@pytest.mark.long
@pytest.mark.parametrize("policy", ["stop", "dead_letter"])
def test_records_too_large_for_a_topic(
    policy: str, pair: Provider, kafka: Broker, fresh_database: str, new_bridge: NewBridge
) -> None:
    """The broker refuses whole batches: only the culprits may go, though killed in between."""
    conninfo = pair.primary.conninfo(fresh_database)
    large = (0, 7, 300)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("t", "other"):
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)".encode())
        bridge = new_bridge(conninfo, on_refused=policy)
        topic = NewTopic(f"{bridge.prefix}.public.t", 1, 1, config={"max.message.bytes": "20000"})
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_topics([topic])[topic.topic].result(patient(60))
        bridge.start().streaming()
        with connection.transaction(), connection.cursor() as cursor:
            rows = [(n, noise(40_000 if n in large else 500)) for n in range(400)]
            for table in ("t", "other"):
                cursor.executemany(f"INSERT INTO {table} VALUES (%s, %s)".encode(), rows)
        if policy == "stop":
            assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
            assert "seq 0," in bridge.output.splitlines()[-1]
            assert not list(bridge.events("t"))
            return
        eventually(lambda: "will be dead letters" in bridge.output, what="a culprit is found")
        bridge.kill()
        bridge.start().streaming().caught_up()
        connection.execute("INSERT INTO t VALUES (1000, 'x')")
        bridge.caught_up()
        connection.execute("INSERT INTO other VALUES (1000, 'x')")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert_all_there(bridge, connection, "t", "other")
    letters = dead(bridge)
    assert sorted(letter.seq for letter in letters) == list(large)
    for letter in letters:
        assert letter.value is not None and letter.value.text is not None
        assert not letter.value.truncated
        assert json.loads(letter.value.text)["after"]["id"] == letter.seq
    assert "full batches again" in bridge.output


@pytest.fixture(scope="module")
def guarded(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker that checks permissions, and gives all of them where none are set."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    folder.parent.chmod(0o755)
    settings: dict[str, str | int] = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Processes(folder, server_user()) as processes:
        broker = KafkaBroker(folder / "kafka", processes=processes, settings=settings)
        broker.start()
        yield broker
        broker.stop()


def permit(broker: KafkaBroker, *rules: tuple[ResourceType, str, AclOperation, Any]) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    bindings = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:*", "*", operation, permission)
        for kind, name, operation, permission in rules
    ]
    for done in admin.create_acls(bindings).values():
        done.result(patient(60))
    denied = next(rule for rule in rules if rule[3] is DENY)
    eventually(lambda: not allowed(admin, *denied[:3]), what=f"{denied} holds")


def allowed(admin: AdminClient, kind: ResourceType, name: str, operation: AclOperation) -> bool:
    if kind is ResourceType.TOPIC:
        asked = admin.describe_topics(TopicCollection([name]), include_authorized_operations=True)
        return operation in asked[name].result(patient(60)).authorized_operations
    found = admin.describe_cluster(include_authorized_operations=True).result(patient(60))
    return operation in found.authorized_operations


@pytest.mark.long
def test_a_topic_that_must_not_be_written(
    pair: Provider,
    fresh_database: str,
    guarded: KafkaBroker,
    tmp_path: Path,
    topic_prefix: str,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    settings = {"folder": tmp_path, "conninfo": conninfo, "kafka": guarded, "prefix": topic_prefix}
    bridge = Bridge(**settings)  # type: ignore[arg-type]
    going_on = Bridge(**settings, on_refused="dead_letter")  # type: ignore[arg-type]
    secret = f"{topic_prefix}.public.secret"
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            for table in ("secret", "open"):
                connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)".encode())
            bridge.start().streaming()
            connection.execute("INSERT INTO secret VALUES (0)")
            bridge.caught_up()
            permit(
                guarded,
                (ResourceType.TOPIC, secret, AclOperation.DESCRIBE, ALLOW),
                (ResourceType.TOPIC, secret, AclOperation.READ, ALLOW),
                (ResourceType.TOPIC, secret, AclOperation.WRITE, DENY),
            )
            with connection.transaction():
                connection.execute("INSERT INTO open SELECT generate_series(1, 50)")
                connection.execute("INSERT INTO secret SELECT generate_series(1, 50)")
            assert bridge.exit_code() == ExitCode.PRIVILEGE_MISSING, bridge.output
            assert "table public.secret" in bridge.output.splitlines()[-1]
            assert "seq 50," in bridge.output.splitlines()[-1]
            going_on.start().streaming().caught_up()
            connection.execute("INSERT INTO secret VALUES (51)")
            connection.execute("INSERT INTO open VALUES (51)")
            going_on.caught_up()
            assert going_on.stop() == 0, going_on.output
            assert_all_there(bridge, connection, "secret", "open")
        assert len(dead(bridge)) == 51
        assert {letter.table for letter in dead(bridge)} == {"public.secret"}
    finally:
        bridge.end()
        going_on.end()


@pytest.mark.long
def test_a_topic_that_is_gone_and_must_not_be_made(
    pair: Provider,
    fresh_database: str,
    guarded: KafkaBroker,
    tmp_path: Path,
    topic_prefix: str,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = Bridge(
        tmp_path,
        conninfo,
        guarded,
        topic_prefix,
        on_refused="dead_letter",
        transaction_timeout_ms=patient_ms(1_700),
    )
    admin = AdminClient({"bootstrap.servers": guarded.bootstrap_servers})
    cluster = (ResourceType.BROKER, "kafka-cluster")
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            for table in ("gone", "open", "new"):
                connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)".encode())
            bridge.start().streaming()
            connection.execute("INSERT INTO open VALUES (1)")
            bridge.caught_up()
            connection.execute("INSERT INTO gone VALUES (1)")
            bridge.caught_up()
            letters_topic, gone = f"{topic_prefix}.dead", f"{topic_prefix}.public.gone"
            admin.create_topics([NewTopic(letters_topic, 1, 1)])[letters_topic].result(patient(60))
            permit(
                guarded,
                (ResourceType.TOPIC, f"{topic_prefix}.public.new", AclOperation.DESCRIBE, ALLOW),
                (ResourceType.TOPIC, gone, AclOperation.DESCRIBE, ALLOW),
                (ResourceType.TOPIC, gone, AclOperation.WRITE, ALLOW),
                (ResourceType.TOPIC, gone, AclOperation.DELETE, ALLOW),
                (*cluster, AclOperation.ALL, ALLOW),
                (*cluster, AclOperation.CREATE, DENY),
            )
            admin.delete_topics([gone])[gone].result(patient(60))
            with connection.transaction():
                connection.execute("INSERT INTO gone VALUES (2)")
                connection.execute("INSERT INTO open VALUES (2)")
                connection.execute("INSERT INTO new VALUES (1)")
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
        letters = dead(bridge)
        assert sorted(letter.table for letter in letters) == ["public.gone", "public.new"]
        assert all("uthorization" in letter.reason for letter in letters)
        assert sorted(e["after"]["id"] for e in bridge.events("open")) == [1, 2]
        stopping = Bridge(tmp_path, conninfo, guarded, topic_prefix)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("INSERT INTO new VALUES (2)")
        code = stopping.start().exit_code()
        assert code == ExitCode.PRIVILEGE_MISSING, stopping.output
        assert "table public.new" in stopping.output.splitlines()[-1]
    finally:
        bridge.end()
