"""What must agree at start, made to disagree on live servers: exit code, positions, remedy.

../test_refusals.py has: slot ahead of Kafka's record, no record though the origin has
moved, another system identifier; ../test_failover.py: older timeline, divergence.
"""

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode
from schemas.events import progress_topic
from schemas.lsn import format_lsn
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, await_session
from tests.promises.bridge.recover_process import drop_slot
from tests.promises.bridge.test_refusals import last_line, taken_slot
from tests.providers.databases import once_free
from tests.providers.waiting import eventually, patient, patient_ms

QUICK = {"connect_deadline_ms": patient_ms(6_700)}
"""What is refused here is refused at once; a start on a busy machine may need a second attempt."""


def test_the_origin_is_ahead_of_kafkas_record(
    conninfo: str, load: Load, new_bridge: NewBridge
) -> None:
    """As when Kafka has lost committed data."""
    bridge = new_bridge(conninfo, **QUICK).start().streaming()
    load.more()
    assert bridge.stop() == 0, bridge.output
    record = bridge.progress()[-1]
    ahead = record.position.end_lsn + 1000
    with psycopg.connect(conninfo, autocommit=True) as connection:
        advance = "SELECT pg_replication_origin_advance(%s, %s)"
        once_free(connection, advance, f"slotbridge_{bridge.slot}", format_lsn(ahead))
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    line = last_line(bridge.output)
    assert "Kafka lost committed data" in line
    assert format_lsn(ahead) in line and format_lsn(record.position.end_lsn) in line
    assert "restore the topics, or run `slotbridge recover`, or start over" in line


@pytest.mark.long
def test_the_records_of_the_progress_topic_are_gone(
    conninfo: str, load: Load, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, **QUICK).start().streaming()
    load.more()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    name = progress_topic(bridge.prefix)
    for future in admin.delete_topics([name]).values():
        future.result(patient(60))
    eventually(lambda: name not in bridge.topics(), what="the topic is gone")
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert "Kafka has no progress record" in last_line(bridge.output)


def test_the_slot_is_gone(conninfo: str, load: Load, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo, **QUICK).start().streaming()
    load.more()
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    line = last_line(bridge.output)
    assert "the slot is gone, although Kafka has its progress record" in line
    assert "start over with a new slot" in line


@pytest.mark.long
def test_the_slot_is_active_until_another_client_has_gone(
    conninfo: str, load: Load, new_bridge: NewBridge
) -> None:
    """The bridge waits, then streams; with a deadline: test_a_slot_taken_by_another_process."""
    bridge = new_bridge(conninfo).start().streaming()
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        taken = taken_slot(f"{conninfo} options='-c wal_sender_timeout=0'", bridge)
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [bridge.slot]
        ).fetchone()
        assert row == (True,)
        bridge.start()
        eventually(lambda: "is active for PID" in bridge.output, what="it waits")
        taken.finish()
        await_session(bridge, 2)
    load.more()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
