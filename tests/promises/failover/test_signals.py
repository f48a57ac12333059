"""INT, TERM and HUP inside every step: what is said afterwards is so, and nobody loses a write."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from services.failover.execute import perform_step, promotion_order
from services.failover.model.destination import MARK
from services.failover.plan.steps.step import Action, Step
from tests.conftest import NewPair
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.servers import (
    COMMAND,
    Ran,
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.test_held_up import replay_held_up
from tests.providers.databases import connect
from tests.providers.interface import Server, Trio
from tests.providers.waiting import eventually, patient

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BEFORE = (Action.FENCE, Action.MARK, Action.DISABLE)
AFTER = (Action.REPOINT, Action.ENABLE)


@contextmanager
def interrupted(action: Action, number: signal.Signals, *, done: bool) -> Iterator[None]:
    """Send the signal, twice, inside the first step of that kind: before or after its order."""
    original: Callable[..., Any] = perform_step._order
    sent: list[Step] = []

    def ordering(step: Step, *arguments: Any) -> Any:
        here = step.action is action and not sent
        if here:
            sent.append(step)
        if here and not done:
            os.kill(os.getpid(), number)
        answer = original(step, *arguments)
        if here:
            os.kill(os.getpid(), number)
        return answer

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(perform_step, "_order", ordering)
        yield
    assert sent


def assert_taken_back(trio: Trio, ran: Ran, config: Path, row: int) -> None:
    assert ran.code == 13, ran.err
    assert "the run was interrupted by SIG" in ran.err
    assert "it was taken back, a goes on" in ran.err
    assert "Now a is the primary; b is a standby" in ran.err
    write(trio.primary, trio.dbname, row, 1)
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    assert ask(trio.subscriber, "SELECT bool_and(subenabled) FROM pg_subscription", trio.dbname)
    last = slotfailover("history", "--config", config, "--json").json["entries"][-1]
    assert (last["step"], "taken back" in last["outcome"]) == ("end", True)


def test_before_the_promotion_every_signal_inside_every_step_is_taken_back(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    row = 0
    for action in BEFORE:
        for number in SIGNALS:
            row += 1
            write(trio.primary, trio.dbname, 1000 + row, 1)
            with interrupted(action, number, done=row % 2 == 0):
                ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
            assert_taken_back(trio, ran, config, row)
    await_equal(trio, trio.primary)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_a_promotion_that_was_ordered_is_never_taken_back(
    local_trio: NewTrio, tmp_path: Path, number: signal.Signals
) -> None:
    """The promotion takes its time; the signal comes right after its order."""
    trio = local_trio()
    subscribe(trio, "s1")
    tell(trio.standby, "ALTER SYSTEM SET recovery_end_command = 'sleep 1'")
    trio.standby.restart()
    config = configuration(tmp_path, trio)
    original = promotion_order._order
    sent: list[signal.Signals] = []

    def ordering(*arguments: Any) -> None:
        original(*arguments)
        sent.append(number)
        os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(promotion_order, "_order", ordering)
        ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b", "--no-rejoin")
    assert sent
    if number is signal.SIGHUP:  # nobody is there to go on with it
        assert ran.code == 1, ran.err
    else:
        assert ran.code == 13, ran.err
        assert "b had been told to promote itself, so nothing was taken back" in ran.err
        assert "Now a is the primary, fenced; b is the primary" in ran.err
        back = slotfailover("resume", "--config", config, "--yes", "--rollback")
        assert (back.code, "b was promoted" in back.err) == (35, True), back.err
        on = slotfailover("resume", "--config", config, "--yes")
        assert on.code == 1, on.err
    assert "transaction_read_only" in _refused(trio.primary)
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_a_rollback_refuses_while_a_standby_is_being_promoted(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """Nor does `repoint` enable what waits for that standby, which still answers as one."""
    trio = local_trio(settings={"max_standby_streaming_delay": "-1"})
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    system = ask(trio.primary, "SELECT system_identifier::text FROM pg_control_system()")
    mark = f"[slotfailover leads to b: system {system}, beyond timeline 1] {MARK}"
    with psycopg.connect(trio.subscriber.conninfo(trio.dbname)) as connection:
        connection.execute("ALTER SUBSCRIPTION s1 DISABLE")
        connection.execute(f"COMMENT ON SUBSCRIPTION s1 IS '{mark}'")
    with replay_held_up(trio):
        tell(trio.standby, "SELECT pg_promote(false)")
        ran = slotfailover("resume", "--config", config, "--yes", "--rollback")
        assert (ran.code, "b has been told to promote itself" in ran.err) == (35, True), ran.err
        ran = slotfailover("repoint", "--config", config, "--yes")
        told = "b has been told to promote itself" in ran.out
        assert (ran.code, told) == (1, True), (ran.out, ran.err)
        assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    enabled = "SELECT subenabled FROM pg_subscription WHERE subname = 's1'"
    assert ask(trio.subscriber, enabled, trio.dbname) is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_after_the_promotion_a_signal_ends_the_run_and_a_lost_terminal_does_not(
    new_pair: NewPair, tmp_path: Path, number: signal.Signals
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    write(trio.primary, trio.dbname, 1)
    trio.primary.kill()
    command = ("failover", "--config", config, "--yes")
    for action in AFTER:
        with interrupted(action, number, done=True):
            ran = slotfailover(*command)
        if number is signal.SIGHUP:
            assert ran.code == 0, ran.err
            break
        assert ran.code == 13, ran.err
        assert "Now a is down; b is the primary" in ran.err
    assert slotfailover(*command).code == 0
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_a_failover_that_is_broken_off_leaves_everything_as_it_was(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    led = ask(trio.standby, "SHOW primary_conninfo")
    trio.primary.kill()
    for action in (Action.DISABLE, Action.CUT):
        with interrupted(action, signal.SIGTERM, done=True):
            ran = slotfailover("failover", "--config", config, "--yes")
        assert (ran.code, "; it was taken back, no primary" in ran.err) == (13, True), ran.err
        assert _same(ask(trio.standby, "SHOW primary_conninfo"), led)
        assert ask(trio.subscriber, "SELECT bool_and(subenabled) FROM pg_subscription", trio.dbname)
    trio.primary.start()  # the standby finds it again
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)


CONFIRMED_BEFORE_THE_FENCE = """
from services.failover.execute import perform_step
perform_step._confirmed = lambda *_: True
"""
"""Put before COMMAND: a consumer that is stuck is not seen before the fence."""


@pytest.mark.long
def test_a_terminal_that_is_lost_while_it_waits_leaves_no_fence(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """SIGHUP to the process itself, whose pipes are closed with it."""
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    late = f"{CONFIRMED_BEFORE_THE_FENCE}{COMMAND}"
    command = [sys.executable, "-c", late, "switchover", "--config", str(config), "--yes"]
    with connect(trio.subscriber, trio.dbname) as locker, locker.transaction():
        locker.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        write(trio.primary, trio.dbname, 1)
        with subprocess.Popen([*command, "--to", "b"], stderr=subprocess.PIPE) as process:
            eventually(lambda: _is_fenced(trio.primary), what="it is fenced")
            assert process.stderr is not None
            process.stderr.close()
            process.send_signal(signal.SIGHUP)
            assert process.wait(patient(120)) != 0
    write(trio.primary, trio.dbname, 101)
    await_equal(trio, trio.primary)


def _refused(server: Server) -> str:
    """What a write gets there."""
    return "transaction_read_only" if ask(server, "SHOW transaction_read_only") == "on" else ""


def _is_fenced(server: Server) -> bool:
    """Whether new sessions are fenced: the fence ends the sessions that there were before."""
    try:
        return bool(
            ask(server, "SELECT coalesce(current_setting('slotfailover.fenced', true), '') <> ''")
        )
    except psycopg.OperationalError:  # also one that is still being opened
        return False


def _same(conninfo: str, other: str) -> bool:
    """Whether both mean the same, however they are quoted."""
    return sorted(conninfo.replace("'", "").split()) == sorted(other.replace("'", "").split())
