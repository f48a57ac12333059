"""The bridge's own process: stopped for too long, without descriptors or disk, by a wrong clock."""

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from schemas.errors import ExitCode
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, assert_intact, await_session
from tests.promises.bridge.oracle import assert_rebuilt
from tests.providers.waiting import eventually, patient_ms

SHORT: dict[str, Any] = {
    "wal_sender_timeout_ms": patient_ms(700),
    "transaction_timeout_ms": patient_ms(1_300),
    "origin_idle_timeout_ms": patient_ms(1_700),
}
FAR_S = 10 * 365 * 86_400
CLOCK = """
import time
true_time, true_time_ns, since = time.time, time.time_ns, time.monotonic()
def skew_s():  # it jumps back and forth, every second
    return {far} * (1 if int(time.monotonic() - since) % 2 else -1)
time.time = lambda: true_time() + skew_s()
time.time_ns = lambda: true_time_ns() + skew_s() * 1_000_000_000
"""


def test_stopped_for_longer_than_every_time_out_another_takes_over(
    conninfo: str, load: Load, new_bridge: NewBridge, tmp_path: Path
) -> None:
    """Continued, it finds itself fenced, or without its session and waits; no event comes twice."""
    frozen = new_bridge(conninfo, **SHORT).start().streaming()
    load.more()
    os.kill(frozen.pid, signal.SIGSTOP)
    other = new_bridge(conninfo, **SHORT, spool_folder=str(tmp_path)).start()
    await_session(other, 1)
    load.more()
    os.kill(frozen.pid, signal.SIGCONT)
    try:
        # The other one may have lost its session by these short times, too: one of the two streams.
        eventually(
            lambda: not frozen.running or "hot standby" in frozen.output or frozen.sessions > 1,
            what="it finds itself fenced, waits, or streams again",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{frozen.output}\nthe other:\n{other.output}") from error
    assert frozen.running or frozen.exit_code() == ExitCode.FENCED, frozen.output
    load.more()
    frozen.end()
    if not other.running:
        assert other.exit_code() == ExitCode.FENCED, other.output
        other.start()
    assert_intact(other, load, conninfo)


@pytest.mark.long
def test_stopped_for_longer_than_every_time_out_alone(
    conninfo: str, load: Load, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, **SHORT).start().streaming()
    load.more()
    os.kill(bridge.pid, signal.SIGSTOP)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        eventually(lambda: not _sessions(connection), what="the server has ended its sessions")
    os.kill(bridge.pid, signal.SIGCONT)
    eventually(lambda: not bridge.running or "session lost" in bridge.output, what="it has noticed")
    if not bridge.running:
        assert bridge.exit_code() == ExitCode.FENCED, bridge.output
        bridge.start()
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


def _sessions(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    return connection.execute(
        "SELECT FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'slotbridge%'"
    ).rowcount


@pytest.mark.long
def test_out_of_file_descriptors(conninfo: str, load: Load, new_bridge: NewBridge) -> None:
    """An exit code to retry, which frees those that are open."""
    bridge = new_bridge(conninfo, connect_deadline_ms=patient_ms(2_000)).start().streaming()
    load.more()
    resource.prlimit(bridge.pid, resource.RLIMIT_NOFILE, (3, 3))
    assert bridge.exit_code() == ExitCode.NO_DESCRIPTORS, bridge.output
    assert "Too many open files" in bridge.output.splitlines()[-1], bridge.output
    bridge.start().streaming()
    assert_intact(bridge, load, conninfo)


def test_the_spool_has_no_disk(conninfo: str, new_bridge: NewBridge) -> None:
    """A file that can't grow is what a full disk is to it."""
    small = f"{conninfo} options='-c logical_decoding_work_mem=64kB'"
    bridge = new_bridge(small, spool_memory_bytes_max=0).start().streaming()
    limit = (20_000, 20_000)
    resource.prlimit(bridge.pid, resource.RLIMIT_FSIZE, limit)
    with psycopg.connect(small, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 9000) g")
    assert bridge.exit_code() == ExitCode.DISK_FULL, bridge.output
    assert "free disk space there" in bridge.output.splitlines()[-1]
    bridge.start().streaming().caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_rebuilt(bridge)


@pytest.mark.long
def test_the_wall_clock_jumps_back_and_forth_by_years(
    conninfo: str, load: Load, new_bridge: NewBridge, tmp_path: Path
) -> None:
    """Nothing depends on it but the timestamps in events: no jump is taken for a time-out."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(far=FAR_S), encoding="utf-8")
    bridge = new_bridge(conninfo)
    bridge.start(PYTHONPATH=str(tmp_path)).streaming()
    load.more(150)
    assert_intact(bridge, load, conninfo)
    assert bridge.sessions == 1, bridge.output
    now = time.time()
    encoded = {round((e["ts_ms"] / 1000 - now) / FAR_S) for e in bridge.events("t")}
    assert encoded == {-1, 1}, "the clock did not jump"
