"""The bridge dies while it ends what hangs in Kafka as committed: nothing is lost, or repeated.

Kafka aborts the transaction that was to end it, and the marker of that reaches what hangs, which
had been decided to be committed. test_hanging.py tells how markers are lost.
"""

import time
from collections.abc import Callable

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode
from schemas.events import SETTLING_KEY_PREFIX
from services.testbed.kafka import KafkaBroker
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, assert_intact, await_session
from tests.promises.bridge.faults.markers import (
    is_any,
    is_not_of_transactions,
    is_not_the_progress,
    kill_before_markers,
)
from tests.promises.bridge.faults.test_hanging import QUIET, commit_once, tell
from tests.promises.bridge.running import Bridge
from tests.providers.waiting import patient

CASES = [
    pytest.param(is_not_the_progress, False, ["settling"], id="only the record is visible"),
    pytest.param(is_any, True, ["settling"], id="nothing is visible, the slot was told"),
    pytest.param(is_not_of_transactions, False, ["settling"], id="only END is visible"),
    pytest.param(is_any, True, ["settling", "settling"], id="killed again, while it is repeated"),
    pytest.param(is_any, True, ["noted", "settling"], id="noted twice, and killed"),
]


@pytest.mark.parametrize(("forgotten", "told", "points"), long_but(CASES[2], CASES))
def test_aborted_events_are_published_again(
    conninfo: str,
    load: Load,
    own_kafka: KafkaBroker,
    new_bridge: NewBridge,
    forgotten: Callable[[str], bool],
    told: bool,
    points: list[str],
) -> None:
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET)
    leave_hanging(bridge, conninfo, load, own_kafka, forgotten, told=told)
    for point in points:
        assert bridge.start(SLOTBRIDGE_FAILPOINT=f"{point}:1").exit_code() == -9, bridge.output
    bridge.start()
    await_session(bridge, 3)
    assert "publishing records again" in bridge.output
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
@pytest.mark.parametrize("point", ["noted", "settled"])
def test_a_note_that_is_left_over_does_no_harm(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge, point: str
) -> None:
    """Killed before anything was written, and after what hung was committed."""
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET)
    leave_hanging(bridge, conninfo, load, own_kafka, is_any, told=True)
    assert bridge.start(SLOTBRIDGE_FAILPOINT=f"{point}:1").exit_code() == -9, bridge.output
    bridge.start()
    await_session(bridge, 3)
    assert "publishing records again" not in bridge.output
    assert_intact(bridge, load, conninfo)
    assert notes(bridge) == set()


@pytest.mark.long
@pytest.mark.parametrize("producer", [0, 1])
def test_a_transaction_that_publishes_again_may_hang_too(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge, producer: int
) -> None:
    """Kafka has decided that transaction as well, told nobody, and all died. `producer`: of the
    one before, whose record is visible.
    """
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    if bridge.progress()[-1].kafka.producer != producer:
        since_ms = commit_once(bridge, load)
    assert bridge.progress()[-1].kafka.producer == producer
    assert len(kill_before_markers(own_kafka, bridge.prefix, since_ms, is_not_the_progress)) >= 2
    own_kafka.start()
    assert bridge.start(SLOTBRIDGE_FAILPOINT="settling:1").exit_code() == -9, bridge.output
    since_ms = int(time.time() * 1000)
    assert bridge.start(SLOTBRIDGE_FAILPOINT="agreed:1").exit_code() == -9, bridge.output
    assert "publishing records again" in bridge.output
    assert len(kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)) >= 3
    own_kafka.start()
    wanted = bridge.sessions + 1
    bridge.start()
    await_session(bridge, wanted)
    assert_intact(bridge, load, conninfo)
    assert notes(bridge) == set()


@pytest.mark.long
def test_a_transaction_that_ends_a_hanging_one_may_hang_too(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """Of the two producers, the second was told to abort, and no partition heard of it: all that
    hangs there is the record that means nothing.
    """
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET)
    leave_hanging(bridge, conninfo, load, own_kafka, is_any, told=False)
    since_ms = int(time.time() * 1000)
    assert bridge.start(SLOTBRIDGE_FAILPOINT="agreed:1").exit_code() == -9, bridge.output
    assert "decision=abort" in bridge.output
    assert len(kill_before_markers(own_kafka, bridge.prefix, since_ms, is_any)) >= 3
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_events_that_retention_removed_stop_the_bridge(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """The topic's retention has removed it meanwhile; an operator may go on without it."""
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET)
    admin, topic = interrupt_settling(bridge, conninfo, load, own_kafka)
    partitions = admin.list_topics(topic, timeout=patient(30)).topics[topic].partitions
    wanted = [TopicPartition(topic, partition, OFFSET_END) for partition in partitions]
    for done in admin.delete_records(wanted).values():
        done.result(patient(30))
    for _ in range(2):
        assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert "records are gone" in bridge.output
    assert f"{topic}[" in bridge.output
    assert len(notes(bridge)) == 1
    bridge.start(accept=bridge.token)
    await_session(bridge, 3)
    bridge.caught_up(conninfo)
    assert notes(bridge) == set()


@pytest.mark.long
def test_events_of_a_missing_topic_stop_the_bridge(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """It may also be a broker, or a privilege, that does not show the topic."""
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET)
    admin, topic = interrupt_settling(bridge, conninfo, load, own_kafka)
    admin.delete_topics([topic])[topic].result(patient(30))
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert "the topic is gone" in bridge.output
    assert len(notes(bridge)) == 1
    bridge.start(accept=bridge.token)
    await_session(bridge, 3)
    assert notes(bridge) == set()


def interrupt_settling(
    bridge: Bridge, conninfo: str, load: Load, broker: KafkaBroker
) -> tuple[AdminClient, str]:
    """Kill the bridge while it settles what hangs in the table's topic; a client, and the topic."""
    leave_hanging(bridge, conninfo, load, broker, is_not_the_progress, told=False)
    assert bridge.start(SLOTBRIDGE_FAILPOINT="settling:1").exit_code() == -9, bridge.output
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers}), f"{bridge.prefix}.public.t"


def leave_hanging(
    bridge: Bridge,
    conninfo: str,
    load: Load,
    broker: KafkaBroker,
    forgotten: Callable[[str], bool],
    *,
    told: bool,
) -> None:
    """Kafka has decided to commit a transaction, and some partitions don't know; no bridge runs."""
    bridge.start().streaming()
    load.more(20)
    bridge.kill()
    since_ms = commit_once(bridge, load)
    end_lsn = bridge.progress()[-1].position.end_lsn
    assert len(kill_before_markers(broker, bridge.prefix, since_ms, forgotten)) >= 2
    if told:
        tell(conninfo, bridge, end_lsn)
    broker.start()


def notes(bridge: Bridge) -> set[bytes | None]:
    """The keys of the notes that nobody has removed."""
    last = dict(bridge.records("progress"))
    return {
        key
        for key, value in last.items()
        if value is not None and key is not None and key.startswith(SETTLING_KEY_PREFIX)
    }
