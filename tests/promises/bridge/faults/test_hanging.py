"""Kafka has decided a transaction and told only some partitions, or none, before its broker died.

The markers that were not written are cut off from the broker's files: it finds what it would have
found, had it died a moment before, and, like after such a death, never writes them.
"""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka import Producer

from schemas.errors import ExitCode
from schemas.settings import KafkaSettings
from services.bridge.failpoints import VARIABLE
from services.bridge.hanging import transactions as hanging_transactions
from services.bridge.recovery.last_events import TAIL_RECORDS
from services.bridge.sink.topics import Topics
from services.testbed.kafka import KafkaBroker
from services.testbed.pair import set_parameter
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.following_transaction import begin_following, commit_following
from tests.promises.bridge.faults.load import Load, assert_intact, await_session
from tests.promises.bridge.faults.markers import (
    is_any,
    is_not_of_stagings,
    is_not_of_transactions,
    is_not_the_progress,
    kill_before_markers,
)
from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Provider, Server
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually, patient, patient_ms

ENDS_ARE_TOLD = """
from concurrent.futures import wait
from services.bridge.sink.markers import MarkerCheck
asked = MarkerCheck.flushed
def told(self, topics):
    asked(self, topics)
    wait(self._last.ends.values())
MarkerCheck.flushed = told
"""
"""Where partitions end is told before the commit: else the markers may be there already, and to
take away what the bridge has seen is a loss of committed records.
"""
QUIET = {"heartbeat_interval_ms": 60_000}
"""Without heartbeats: one may be committed alone, and the first commit is to be one of rows."""
FENCED_AFTER_S = 6.0
"""broker.session.timeout.ms, and some more."""


CASES = [
    pytest.param(is_any, False, "abort", id="no marker, the slot knows nothing"),
    pytest.param(is_any, True, "commit", id="no marker, the slot was told"),
    pytest.param(is_not_the_progress, False, "commit", id="only the record is visible"),
    pytest.param(is_not_of_transactions, False, "commit", id="only END is visible"),
]


@pytest.mark.parametrize(("forgotten", "told", "decision"), long_but(CASES[0], CASES))
def test_hanging_transaction_is_ended_as_kafka_decided(
    conninfo: str,
    load: Load,
    own_kafka: KafkaBroker,
    new_bridge: NewBridge,
    forgotten: Callable[[str], bool],
    told: bool,
    decision: str,
) -> None:
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    end_lsn = bridge.progress()[-1].position.end_lsn
    names = kill_before_markers(own_kafka, bridge.prefix, since_ms, forgotten)
    assert len(names) >= 2, names
    if told:
        tell(conninfo, bridge, end_lsn)
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    assert f"decision={decision}" in bridge.output
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_transaction_that_hangs_at_the_stop_is_ended_first(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge, tmp_path: Path
) -> None:
    """No later session comes soon: consumers would not see what the bridge says it has published.

    The broker dies without the markers of the last transaction that has events.
    """
    bridge = new_bridge(conninfo, broker=own_kafka).start().streaming()
    load.more(20)
    # A killed one may leave a transaction to the next, whose first commit would be that one's.
    assert bridge.stop() == 0, bridge.output
    load.more(20)
    load.stop()
    since_ms = int(time.time() * 1000)
    (tmp_path / "sitecustomize.py").write_text(ENDS_ARE_TOLD, encoding="utf-8")
    bridge.start(**{VARIABLE: "after kafka commit:1:stop", "PYTHONPATH": str(tmp_path)})
    process = psutil.Process(bridge.pid)
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, what="it has committed")
    names = kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)
    assert len(names) >= 2, names
    own_kafka.start()
    process.terminate()
    process.resume()
    assert bridge.exit_code() == 0, bridge.output
    assert_rebuilt(bridge)
    assert "decision=commit" in bridge.output


@pytest.mark.long
@pytest.mark.since_18
def test_visible_removal_of_a_staging_proves_its_commit(
    conninfo: str, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """Aborted and sent again, COMMIT PREPARED would find nothing staged."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE p (id int PRIMARY KEY)")
        # Without heartbeats: one may be committed alone, as the first after the restart.
        quiet = {"two_phase": True, "heartbeat_interval_ms": 60_000}
        bridge = new_bridge(conninfo, broker=own_kafka, **quiet).start().streaming()
        connection.execute("INSERT INTO p VALUES (1)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO p VALUES (2)")
        connection.execute("PREPARE TRANSACTION 'waiting'")
        bridge.caught_up(conninfo)
        bridge.kill()
        connection.execute("COMMIT PREPARED 'waiting'")
    since_ms = int(time.time() * 1000)
    bridge.start(SLOTBRIDGE_FAILPOINT="after kafka commit:1")
    bridge.exit_code()
    names = kill_before_markers(own_kafka, bridge.prefix, since_ms, is_not_of_stagings)
    assert len(names) >= 3, names
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    assert "decision=commit" in bridge.output
    bridge.caught_up(conninfo)
    assert bridge.stop() == 0, bridge.output
    assert sorted(event["after"]["id"] for event in bridge.events("p")) == [1, 2]


@pytest.mark.long
def test_a_bridge_with_another_database_decides_nothing(
    conninfo: str,
    load: Load,
    own_kafka: KafkaBroker,
    subscriber: Server,
    new_bridge: NewBridge,
) -> None:
    """Its slot and origin know nothing of what was decided; the right one's do."""
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    end_lsn = bridge.progress()[-1].position.end_lsn
    assert len(kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)) >= 3
    tell(conninfo, bridge, end_lsn)
    own_kafka.start()
    wrong = new_bridge(
        subscriber.conninfo(),
        broker=own_kafka,
        slot=bridge.slot,
        connect_deadline_ms=patient_ms(500),
    )
    assert wrong.start().exit_code() == ExitCode.WRONG_DATABASE, wrong.output
    assert "decision=" not in wrong.output
    bridge.start()
    await_session(bridge, 3)
    assert "decision=commit" in bridge.output
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_the_slot_proves_a_commit_while_commits_wait_for_the_bridge(
    pair: Provider, conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """All that hangs is within what the last visible record announces."""
    bridge = new_bridge(conninfo, broker=own_kafka, heartbeat_interval_ms=200).start().streaming()
    load.more(20)
    with psycopg.connect(pair.primary.conninfo(), autocommit=True) as connection:
        before = connection.execute("SHOW synchronous_standby_names").fetchone()
    assert before is not None
    set_parameter(pair.primary, "synchronous_standby_names", f'"slotbridge_{bridge.slot}"')
    try:
        eventually(lambda: bridge.progress()[-1].position.ahead_lsn > 0, what="commits wait for it")
        bridge.kill()
    finally:
        set_parameter(pair.primary, "synchronous_standby_names", before[0])
    announced = bridge.progress()[-1].position.ahead_lsn
    since_ms = commit_once(bridge, load)
    end_lsn = bridge.progress()[-1].position.end_lsn
    assert end_lsn < announced
    assert len(kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)) >= 3
    tell(conninfo, bridge, end_lsn)
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    assert "decision=commit" in bridge.output
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_abort_of_the_next_transaction_keeps_the_hanging_one(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """The bridge had begun it, with its other producer, before it and the broker died."""
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    record = bridge.progress()[-1]
    names = kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)
    tell(conninfo, bridge, record.position.end_lsn)
    own_kafka.start()
    following = begin_following(bridge, record)
    for place in names:
        topic, _, partition = place.rpartition("-")
        following.produce(f"{bridge.prefix}.{topic}", b"{}", b"{}", partition=int(partition))
    assert following.flush(patient(30)) == 0
    bridge.start()
    await_session(bridge, 3)
    assert "decision=commit" in bridge.output
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_later_record_proves_that_a_hanging_transaction_was_committed(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """Nobody could tell the slot: the network to the server was cut meanwhile. The bridge went on
    with its other producer, whose transaction has no events, and was told to all partitions.
    """
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    record = bridge.progress()[-1]
    assert len(kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)) >= 3
    own_kafka.start()
    commit_following(bridge, record)
    bridge.start()
    await_session(bridge, 3)
    assert_intact(bridge, load, conninfo)
    assert "decision=commit" in bridge.output


@pytest.mark.long
def test_visible_events_prove_a_commit_behind_any_number_of_aborted_records(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """One partition was told. The bridge went on there with its other producer, and was killed: the
    end of that partition has nothing but records of a transaction that was aborted.
    """
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    record = bridge.progress()[-1]
    topic = f"{bridge.prefix}.public.t"
    names = kill_before_markers(
        own_kafka, bridge.prefix, since_ms, lambda name: name != "public.t-0"
    )
    assert "public.t-1" in names and len(names) >= 3, names
    own_kafka.start()
    following = begin_following(bridge, record)
    for _ in range(3 * TAIL_RECORDS):
        following.produce(topic, b"{}", b"{}", partition=0)
    assert following.flush(patient(30)) == 0
    bridge.start()
    await_session(bridge, 3)
    assert "decision=commit" in bridge.output
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_missing_marker_is_checked_before_the_next_transaction(
    conninfo: str, load: Load, own_kafka: KafkaBroker, to_kafka: Proxy, new_bridge: NewBridge
) -> None:
    """What another producer has open in a topic of its own looks like what hangs."""
    options = {"bootstrap.servers": f"127.0.0.1:{to_kafka.port}"}
    bridge = new_bridge(conninfo, broker=own_kafka, options=options).start().streaming()
    load.more(20)
    for _ in range(5):  # a busy Kafka may take longer with its markers than the bridge waits
        before = bridge.sessions
        to_kafka.cut()
        to_kafka.heal()
        load.more(20)
        bridge.caught_up(conninfo)
        if bridge.sessions == before:
            break
    assert bridge.sessions == before, bridge.output
    said = bridge.output.count("did not get its marker")
    other = Producer(
        {
            "bootstrap.servers": own_kafka.bootstrap_servers,
            "transactional.id": bridge.prefix,
            "transaction.timeout.ms": patient_ms(20_000),
        }
    )
    other.init_transactions(patient(30))
    other.begin_transaction()
    other.produce(f"{bridge.prefix}.transaction", b"{}", b"{}")
    assert other.flush(patient(30)) == 0
    to_kafka.cut()
    to_kafka.heal()
    eventually(lambda: bridge.output.count("did not get its marker") > said, what="it looks")
    other.abort_transaction(patient(30))
    await_session(bridge, before + 1)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_partitions_with_a_new_leader_epoch_are_looked_at(
    own_kafka: KafkaBroker, topic_prefix: str
) -> None:
    """Kafka has stood still for longer than its own session: it leads in a new epoch."""
    topics = Topics(
        KafkaSettings(bootstrap_servers=own_kafka.bootstrap_servers, topic_prefix=topic_prefix)
    )
    topics.prepare()
    assert hanging_transactions._unstable(topics) == {}
    own_kafka.pause()
    time.sleep(FENCED_AFTER_S)
    own_kafka.resume()

    for _ in range(6):  # it is some hundred ms until it is told that it had been given up
        assert hanging_transactions._unstable(topics) == {}
        time.sleep(0.5)


def commit_once(bridge: Bridge, load: Load) -> int:
    """It ends right after its first commit, of all that has gathered; the slot knows nothing.

    Returns when it started (ms since 1970).
    """
    load.more(20)
    since_ms = int(time.time() * 1000)
    bridge.start(SLOTBRIDGE_FAILPOINT="after kafka commit:1")
    bridge.exit_code()
    return since_ms


def tell(conninfo: str, bridge: Bridge, lsn: int) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:

        def told() -> bool:
            slot = connection.execute(
                "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [bridge.slot]
            ).fetchone()
            return slot is not None and not slot[0]

        eventually(told, what="the slot is free")
        connection.execute(
            "SELECT pg_replication_slot_advance(%s, '0/0'::pg_lsn + %s)", [bridge.slot, lsn]
        )
