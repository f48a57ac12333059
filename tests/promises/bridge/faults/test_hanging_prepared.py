"""A staging, or its removal, hangs: it is ended as it was decided, and no decision lacks it.

tests/promises/bridge/faults/test_hanging.py tells how markers are lost.
"""

import time
from collections.abc import Callable

import psycopg
import pytest

from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.following_transaction import commit_following
from tests.promises.bridge.faults.load import await_session
from tests.promises.bridge.faults.markers import (
    is_any,
    is_not_the_progress,
    is_of_stagings,
    kill_before_markers,
)
from tests.promises.bridge.faults.test_hanging import tell
from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_two_phase import prepared, staged, values
from tests.providers.waiting import eventually

pytestmark = pytest.mark.since_18

QUIET = {"two_phase": True, "heartbeat_interval_ms": 60_000}
"""Without heartbeats: one before the step may be committed alone, and the first commit is its."""
STEPS = ["PREPARE", "COMMIT PREPARED", "ROLLBACK PREPARED"]
HANGING = [
    pytest.param(is_of_stagings, False, "commit", id="all but the staging is visible"),
    pytest.param(is_not_the_progress, False, "commit", id="only the record is visible"),
    pytest.param(is_any, False, "abort", id="no marker, the slot knows nothing"),
    pytest.param(is_any, True, "commit", id="no marker, the slot was told"),
]


@pytest.mark.long
@pytest.mark.parametrize(("forgotten", "told", "decision"), HANGING)
@pytest.mark.parametrize("step", STEPS)
def test_each_step_of_a_prepared_transaction_is_ended_as_it_was_decided(
    conninfo: str,
    own_kafka: KafkaBroker,
    new_bridge: NewBridge,
    step: str,
    forgotten: Callable[[str], bool],
    told: bool,
    decision: str,
) -> None:
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    since_ms = _commit_once(bridge, conninfo, step)
    end_lsn = bridge.progress()[-1].position.end_lsn
    assert "prepared-0" in kill_before_markers(own_kafka, bridge.prefix, since_ms, forgotten)
    if told:
        tell(conninfo, bridge, end_lsn)
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    _assert_intact(bridge, conninfo, step)
    assert f"decision={decision}" in bridge.output


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_abort_of_a_later_transaction_keeps_hanging_staged_records(
    conninfo: str, own_kafka: KafkaBroker, new_bridge: NewBridge, step: str
) -> None:
    """The step's record is visible; of the next transaction, which has no events, nothing is."""
    bridge = new_bridge(conninfo, broker=own_kafka, **QUIET).start().streaming()
    since_ms = _commit_once(bridge, conninfo, step)
    record = bridge.progress()[-1]
    following = commit_following(bridge, record)
    eventually(lambda: bridge.progress()[-1].kafka == following.kafka, what="its record is visible")
    wanted = ("prepared-", "progress-")
    names = kill_before_markers(
        own_kafka, bridge.prefix, since_ms, lambda name: name.startswith(wanted)
    )
    assert names == ["prepared-0", "progress-0"]
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    _assert_intact(bridge, conninfo, step)
    assert "decision=commit" in bridge.output
    assert "decision=abort" in bridge.output


def _commit_once(bridge: Bridge, conninfo: str, step: str) -> int:
    """Transaction `g` comes as far as `step`, in the bridge's only Kafka transaction, after which
    it ends: the slot knows nothing of it. Returns when that began (ms since 1970).
    """
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (1, 'before')")
    if step != "PREPARE":
        _prepare(conninfo, 2)
    bridge.caught_up()
    bridge.kill()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        if step == "PREPARE":
            _prepare(conninfo, 2)
        else:
            connection.execute(f"{step} 'g'".encode())
    since_ms = int(time.time() * 1000)
    bridge.start(SLOTBRIDGE_FAILPOINT="after kafka commit:1")
    bridge.exit_code()
    return since_ms


def _prepare(conninfo: str, number: int) -> None:
    with prepared(conninfo, "g") as one:
        one.execute("INSERT INTO t VALUES (%s, 'prepared')", [number])


def _assert_intact(bridge: Bridge, conninfo: str, step: str) -> None:
    """What is prepared is decided, and so is another transaction of its name, after a restart."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        if step == "PREPARE":
            connection.execute("COMMIT PREPARED 'g'")
        bridge.caught_up()
        assert staged(bridge) == set()
        _prepare(conninfo, 3)
        bridge.caught_up()
        bridge.kill()
        connection.execute("COMMIT PREPARED 'g'")
        bridge.start().streaming()
        bridge.caught_up()
    assert values(bridge) == ([1, 3] if step == "ROLLBACK PREPARED" else [1, 2, 3])
    assert bridge.stop() == 0, bridge.output
    assert staged(bridge) == set()
    assert_rebuilt(bridge)
