"""`slotbridge status` on live servers: where everything is, and what waits for its decision."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from schemas.errors import ExitCode
from services.testbed.pair import set_parameter
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_failover import both
from tests.promises.bridge.test_two_phase import prepared
from tests.providers.interface import Provider
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient


def status(bridge: Bridge, *options: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "status", "--config", str(bridge.config), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def as_json(bridge: Bridge, code: ExitCode = ExitCode.OK) -> dict[str, Any]:
    """What it tells once its exit code is `code`: a busy standby may be behind at one moment."""

    def told() -> dict[str, Any] | None:
        done = status(bridge, "--json")
        return json.loads(done.stdout) if done.returncode == code else None

    found = eventually(told, what=f"the status ends with {code}")
    assert found is not None
    return found


@pytest.mark.since_18
def test_status_tells_slot_progress_readiness_and_prepared_transactions(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair()
    conninfo = trio.primary.conninfo(trio.dbname)
    bridge = new_bridge(both(trio), two_phase=True)
    before = status(bridge)
    assert before.returncode == ExitCode.CHECK_FAILED
    assert "the primary does not have the slot" in before.stdout
    assert "has no progress record" in before.stdout
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge.start().streaming(conninfo)
        await_ready(trio.primary, trio.standby, bridge.slot)
        for gid in ("waits", "abandoned"):
            with prepared(conninfo, gid) as one:
                one.execute("INSERT INTO t SELECT generate_series(%s::int, %s)", _rows(gid))
        bridge.caught_up(conninfo)
        found = as_json(bridge)
        assert (found["streaming"], found["obstacles"]) == (True, [])
        assert found["progress"]["server"]["timeline"] == 1
        assert [host["role"] for host in found["hosts"]] == ["primary", "standby"]
        assert [host["ready"] for host in found["hosts"]] == [False, True]
        assert {(w["gid"], w["changes"], w["in_database"]) for w in found["prepared"]} == {
            ("waits", 5, True),
            ("abandoned", 3, True),
        }
        assert watched(bridge, 2) == [found["slot"]] * 2
        assert bridge.stop() == 0, bridge.output
        connection.execute("ROLLBACK PREPARED 'abandoned'")
        stopped = status(bridge)
        assert stopped.returncode == ExitCode.CHECK_FAILED
        assert "no bridge streams" in stopped.stdout
        assert "'waits': 5 changes" in stopped.stdout
        assert "old, not prepared in the database" in stopped.stdout
        assert "ready for a failover" in stopped.stdout
        trio.standby.stop()
        found = as_json(bridge, ExitCode.CHECK_FAILED)
        assert "refused" in found["hosts"][1]["problem"]
    trio.standby.start()
    with psycopg.connect(trio.standby.conninfo(), autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")
    second = "is a primary, too, on timeline 1, and takes writes that this bridge does not read"
    assert second in status(bridge).stdout
    set_parameter(trio.primary, "default_transaction_read_only", "on")
    assert second not in status(bridge).stdout


def watched(bridge: Bridge, count: int) -> list[str]:
    """The slot as each of `count` looks of `status --watch` names it, before Ctrl-C ends it."""
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "status", "--config", str(bridge.config), "--watch", "--json"]
    with subprocess.Popen(
        [*command, "--every-s", "0.5"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        process.send_signal(signal.SIGINT)
        lines += process.stdout.read().splitlines()
        # Of the last look: on a busy machine, the standby may be behind just then.
        obstacles = json.loads(lines[-1])["obstacles"]
        assert process.wait(patient(60)) == (ExitCode.CHECK_FAILED if obstacles else ExitCode.OK)
    return [json.loads(line)["slot"] for line in lines[:count]]


def test_another_prefix_than_the_running_bridges_is_not_ok(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo)
    bridge.start().streaming()
    bridge.caught_up()
    assert as_json(bridge)["obstacles"] == []
    mistyped = new_bridge(conninfo, slot=bridge.slot, prefix=f"{topic_prefix}x")
    (obstacle,) = as_json(mistyped, ExitCode.CHECK_FAILED)["obstacles"]
    assert f"no progress record of it under the prefix {topic_prefix}x" in obstacle
    assert bridge.stop() == 0, bridge.output


def _rows(gid: str) -> list[int]:
    return [1, 5] if gid == "waits" else [11, 13]
