"""A failover lost what Kafka has: `slotbridge recover` publishes what takes it back."""

import json
import subprocess

import psycopg
import pytest

from schemas.errors import ExitCode
from schemas.recovery import RecoveryRecord
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.faults.load import await_session
from tests.promises.bridge.faults.test_divergence import diverge
from tests.promises.bridge.recover_process import recover
from tests.providers.interface import Trio

pytestmark = pytest.mark.since_18  # with prepared transactions


@pytest.fixture
def trio(new_pair: NewPair) -> Trio:
    return new_pair(synchronous=False)


def test_rows_that_a_failover_lost_are_taken_back(trio: Trio, new_bridge: NewBridge) -> None:
    """Positions go on beyond those of the lost ones, so that consumers may go by them too."""
    bridge = diverge(trio, new_bridge)
    before, standby = bridge.sessions, trio.standby.conninfo(trio.dbname)
    with psycopg.connect(standby, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (101), (500)")
        assert _refused(recover(bridge)) == ExitCode.SERVER_SETTING  # p2 is not decided
        connection.execute("COMMIT PREPARED 'p2'")
        done = recover(bridge, "--json")
        assert done.returncode == 0, done.stderr
        record = RecoveryRecord.model_validate_json(done.stdout)
        (table,) = record.tables.values()
        assert (table.created, table.updated, table.deleted) == (2, 0, 2)  # 2 and 500; 100 and 102
        bridge.start()
        await_session(bridge, before + 1)
        connection.execute("INSERT INTO t VALUES (600)")
        bridge.caught_up(standby)
        assert bridge.stop() == 0, bridge.output
    folded = fold(bridge, "t")
    there = {json.dumps({"id": n}, separators=(",", ":")) for n in (1, 2, 101, 500, 600)}
    assert folded.by_offset.keys() == folded.by_position.keys() == there
    assert f"{bridge.prefix}.divergence" not in bridge.topics()


def _refused(done: subprocess.CompletedProcess[str]) -> int:
    assert "p2" in done.stderr
    return done.returncode
