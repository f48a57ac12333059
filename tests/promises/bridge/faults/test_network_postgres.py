"""The network between the bridge and PostgreSQL: cut, stalled, slow, half-open."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from schemas.errors import ExitCode
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, assert_intact, await_session
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually, patient, patient_ms

QUICK = {  # what must pass where the network is broken, and not where the machine is slow
    "wal_sender_timeout_ms": patient_ms(500),
    "sql_deadline_ms": patient_ms(500),
    "transaction_timeout_ms": patient_ms(1_700),
    "origin_idle_timeout_ms": patient_ms(1_800),
}
DELAY_S = 0.05

FAULTS: dict[str, Callable[[Proxy], None]] = {
    "cut": lambda proxy: proxy.cut(),
    "stalled": lambda proxy: proxy.stall(),
    "stalled to the bridge": lambda proxy: proxy.stall("to_client"),
    "stalled to the server": lambda proxy: proxy.stall("to_server"),
    "half-open at the bridge": lambda proxy: proxy.half_open("client"),
    "half-open at the server": lambda proxy: proxy.half_open("server"),
}


def through(proxy: Proxy, conninfo: str) -> str:
    return f"{conninfo} port={proxy.port} connect_timeout={patient(1):.0f}"


@pytest.mark.parametrize("fault", long_but("cut", FAULTS))
def test_the_bridge_comes_back(
    conninfo: str, load: Load, to_server: Proxy, new_bridge: NewBridge, fault: str
) -> None:
    bridge = new_bridge(through(to_server, conninfo), **QUICK).start().streaming(conninfo)
    load.more()
    FAULTS[fault](to_server)
    eventually(lambda: "session lost" in bridge.output, what="the session is given up")
    load.more()
    to_server.heal()
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_slow_network_costs_no_session(
    conninfo: str, load: Load, to_server: Proxy, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(through(to_server, conninfo)).start().streaming(conninfo)
    to_server.delay(DELAY_S)
    load.more(100)
    assert_intact(bridge, load, conninfo)
    assert bridge.sessions == 1, bridge.output


@pytest.mark.long
def test_no_server_within_the_deadline_is_an_exit_code_to_retry(
    conninfo: str, load: Load, to_server: Proxy, new_bridge: NewBridge
) -> None:
    settings = QUICK | {"sql_deadline_ms": 20_000, "connect_deadline_ms": patient_ms(2_000)}
    bridge = new_bridge(through(to_server, conninfo), **settings).start().streaming(conninfo)
    to_server.cut()
    assert bridge.exit_code() == ExitCode.SERVER_UNREACHABLE, bridge.output
    to_server.heal()
    bridge.start().streaming(conninfo)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_two_bridges_on_two_sides_of_a_partition(
    conninfo: str,
    load: Load,
    to_server: Proxy,
    new_bridge: NewBridge,
    tmp_path: Path,
) -> None:
    """The cut-off one has events in an open Kafka transaction; the other takes over, it is fenced.

    It is held still until then, else it could commit these before, and rightly so.
    """
    cut_off = new_bridge(through(to_server, conninfo))
    cut_off.start(SLOTBRIDGE_FAILPOINT="before kafka commit:5:stop").streaming(conninfo)
    load.more()
    stopped = psutil.STATUS_STOPPED
    eventually(lambda: psutil.Process(cut_off.pid).status() == stopped, what="it stands still")
    to_server.half_open("client")
    other = new_bridge(conninfo, spool_folder=str(tmp_path)).start()
    await_session(other, 1)
    os.kill(cut_off.pid, signal.SIGCONT)
    assert cut_off.exit_code() == ExitCode.FENCED, cut_off.output
    assert "Kafka has fenced this producer" in cut_off.output
    to_server.heal()
    cut_off.start()
    eventually(lambda: "hot standby" in cut_off.output, what="restarted, it waits")
    assert_intact(other, load, conninfo)
    await_session(cut_off, 2)
    assert cut_off.stop() == 0, cut_off.output
