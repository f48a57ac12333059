"""What is refused at a start, one thing at a time, on live servers."""

import json

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode
from schemas.events import progress_topic
from schemas.progress import ProgressRecord
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.evidence.ground import refusal, sessions_after
from tests.promises.bridge.running import Bridge
from tests.providers.databases import once_free
from tests.providers.interface import Provider
from tests.providers.tokens import tokens_of
from tests.providers.waiting import eventually, patient, patient_ms

QUICK = {"connect_deadline_ms": patient_ms(6_700)}
"""What is refused here is refused at once; a start on a busy machine may need a second attempt."""


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    found = pair.primary.conninfo(fresh_database)
    with psycopg.connect(found, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("CREATE TABLE u (id int PRIMARY KEY)")
    return found


def run_once(bridge: Bridge, rows: range) -> None:
    """Rows go to Kafka, and it stops."""
    bridge.start().streaming()
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT unnest(%s::int[])", [list(rows)])
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output


def drop_progress(bridge: Bridge) -> None:
    name = progress_topic(bridge.prefix)
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    for future in admin.delete_topics([name]).values():
        future.result(patient(60))
    eventually(lambda: name not in bridge.topics(), what="the topic is gone")


def drop_origin(bridge: Bridge) -> None:
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        once_free(connection, "SELECT pg_replication_origin_drop(%s)", f"slotbridge_{bridge.slot}")


def test_a_second_slot_under_the_prefix(conninfo: str, new_bridge: NewBridge) -> None:
    """Whether it is new there, or was there before it was refused."""
    bridge = new_bridge(conninfo, **QUICK)
    run_once(bridge, range(3))
    other = new_bridge(conninfo, slot=f"{bridge.slot}x", **QUICK)
    line = refusal(other.start(), ExitCode.WITNESSES_DISAGREE, f"belong to slot {bridge.slot}")
    assert "choose another kafka.topic_prefix" in line
    with psycopg.connect(conninfo) as connection:
        left = connection.execute(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", [other.slot]
        ).fetchone()
    assert left == (0,)
    record = bridge.progress()[-1].model_copy(update={"slot": other.slot})
    put(other, record)
    refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, f"belong to slot {other.slot}")
    put(other, None)
    sessions_after(bridge, bridge.start)
    assert bridge.stop() == 0, bridge.output


def put(bridge: Bridge, record: ProgressRecord | None) -> None:
    """A record of the bridge's slot, or a tombstone, from elsewhere.

    A transaction that a kill has left open hides a record until Kafka ends it: it is waited for.
    """
    put_value(bridge, record.model_dump_json().encode() if record is not None else None)
    if record is not None:
        eventually(
            lambda: bridge.progress()[-1] == record, what="the record can be read", timeout_s=120
        )


def put_value(bridge: Bridge, value: bytes | None) -> None:
    producer = Producer({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    producer.produce(progress_topic(bridge.prefix), value, bridge.slot.encode())
    assert producer.flush(patient(30)) == 0


@pytest.mark.long
def test_progress_is_lost_the_origin_dropped_and_the_topics_are_kept(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, **QUICK)
    run_once(bridge, range(3))
    drop_progress(bridge)
    drop_origin(bridge)
    refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "has records, but Kafka has no progress")


def test_a_dropped_origin(conninfo: str, new_bridge: NewBridge) -> None:
    """The error has the remedy."""
    bridge = new_bridge(conninfo, **QUICK)
    run_once(bridge, range(3))
    drop_origin(bridge)
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "the replication origin has no")
    remedy = line[line.index("SELECT pg_replication_origin_create") : line.index("; else run")]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(remedy.encode())
    run_once(bridge, range(3, 6))
    bridge.assert_kafka_equals(conninfo, "t")


@pytest.mark.long
def test_a_record_of_another_form_is_refused_by_name(conninfo: str, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo, **QUICK)
    run_once(bridge, range(3))
    document = bridge.progress()[-1].model_dump()
    put_value(bridge, json.dumps(document | document.pop("position")).encode())
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "is not a ProgressRecord")
    assert "position: Field required" in line and "start the release that wrote it" in line


@pytest.mark.long
def test_a_publication_is_not_changed_inside_a_large_transaction(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Its changes would be numbered differently: not even accepted, until it is whole."""
    bridge = new_bridge(conninfo, transaction_bytes_max=2**16, **QUICK)
    run_once(bridge, range(3))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION of_u FOR TABLE u")
        connection.execute(
            "DO $$ BEGIN FOR i IN 1..2000 LOOP INSERT INTO t VALUES (100 + i, repeat('x', 100));"
            " INSERT INTO u VALUES (i); END LOOP; END $$"
        )
    assert bridge.start(SLOTBRIDGE_FAILPOINT="between parts:1").exit_code() == -9
    assert bridge.progress()[-1].position.seq > 0
    other = new_bridge(conninfo, publication="of_u", **QUICK)
    line = refusal(other.start(), ExitCode.WITNESSES_DISAGREE, "of_u now")
    assert "would be numbered differently" in line and not tokens_of(line)
    from_none = new_bridge(conninfo, origin="none", **QUICK).start()
    refusal(from_none, ExitCode.WITNESSES_DISAGREE, "source.origin is none now")
    sessions_after(bridge, bridge.start)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t", "u")
    refusal(other.start(), ExitCode.WITNESSES_DISAGREE, "of_u now")
    other.start(accept=other.token).streaming()
    assert other.stop() == 0, other.output
