"""A command that dies at any step is gone on with, from another journal too; one at a time."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schemas.settings import FailoverSettings, load_settings
from services.failover.execute import perform_step
from services.failover.execute.lock import locked
from services.failover.execute.run import Run
from services.failover.observe.client_sessions import COMMAND_LOCK
from services.failover.observe.cluster import Cluster
from services.failover.plan.steps.step import Action, Step
from services.testbed.bed import Bed
from tests.conftest import NewPair
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    slotfailover_process,
    subscribe,
    tell,
    write,
)
from tests.providers.databases import connect
from tests.providers.waiting import eventually, patient_ms

DIES_IN_THE_FENCE = """
import os, signal
from services.failover.execute import perform_step
perform_step.end_sessions_before_reload = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
HOLDS_THE_LOCK = """
import sys, time
from pathlib import Path
from services.failover.cli.options import settings_of
from services.failover.observe.cluster import Cluster
from services.failover.execute.lock import locked
settings, _ = settings_of(Path(sys.argv[1]))
with Cluster(settings) as cluster, locked(cluster, cluster.observe(), "postgres", None):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_a_lock_that_was_lost_is_taken_again_or_ends_the_run(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    rivals = [True]
    original: Callable[..., Any] = perform_step._order
    held = (
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        f" AND (classid::bigint << 32) + objid::bigint = {COMMAND_LOCK}"
    )

    def ordering(step: Step, *arguments: Any) -> Any:
        if step.action is Action.FENCE:
            tell(trio.primary, held)
        if step.action is Action.MARK and rivals:
            tell(trio.primary, held)
            rival = stack.enter_context(connect(trio.primary))
            rival.execute("SELECT pg_advisory_lock(%s)", [COMMAND_LOCK])
        return original(step, *arguments)

    command = ("switchover", "--config", config, "--yes", "--to", "b", "--no-rejoin")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(perform_step, "_order", ordering)
        with contextlib.ExitStack() as stack:
            ran = slotfailover(*command)
        assert (ran.code, "another slotfailover command" in ran.err) == (15, True), ran.err
        assert "nothing was taken back" in ran.err
        assert "Now a is the primary, fenced" in ran.err
        rivals.clear()
        ran = slotfailover("resume", "--config", config, "--yes", "--rollback")
        assert ran.code == 0, ran.err
        write(trio.primary, trio.dbname, 1)
        assert slotfailover(*command).code == 1


class Killed(BaseException):
    """Ends a command at once, as SIGKILL does: nothing of ours handles it."""


def dies_after(
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    place_of_step: int,
    actions: frozenset[Action] = frozenset(Action),
) -> set[str]:
    """Let a command die when `place.name` has done its part for such a step, once for each."""
    deaths: set[str] = set()
    original: Callable[..., Any] = getattr(place, name)

    def dying(*arguments: Any) -> Any:
        answer = original(*arguments)
        step: Step = arguments[place_of_step]
        if step.key not in deaths and step.action in actions:
            deaths.add(step.key)
            raise Killed
        return answer

    monkeypatch.setattr(place, name, dying)
    return deaths


def until_done(command: tuple[str, ...], config: Path, again: Path) -> int:
    """Run `command`, and `resume` with the settings `again` until it lives; return its code."""
    arguments: tuple[str | Path, ...] = (*command, "--config", config, "--yes")
    for _ in range(60):
        try:
            return slotfailover(*arguments).code
        except Killed:
            arguments = ("resume", "--config", again, "--yes")
    raise AssertionError("it never came to an end")


def test_a_switchover_that_dies_at_every_step_is_resumed_from_elsewhere(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    given = machines(trio, local_bed)
    config = configuration(tmp_path, trio, machines=given, synchronous_standbys=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = configuration(elsewhere, trio, machines=given, synchronous_standbys=1, journal=None)
    new, old = trio.standby, trio.primary
    for place, name, argument in ((perform_step, "_order", 0), (Run, "_note", 1)):
        write(old, trio.dbname, 1 if new is trio.standby else 1001)
        with pytest.MonkeyPatch.context() as monkeypatch:
            # Killed twice before anything is changed, it is given up: so not once more there.
            changes = frozenset(Action) - {Action.SETTLE}
            deaths = dies_after(monkeypatch, place, name, argument, changes)
            assert (
                until_done(
                    ("switchover", "--to", "b" if new is trio.standby else "a"), config, other
                )
                == 0
            )
        happened = {death.partition(" ")[0] for death in deaths}
        expected = {"fence", "mark", "disable", "stop", "promote", "repoint", "enable", "flow"}
        assert happened >= expected | {"slot", "rejoin", "clean", "reset"}
        assert not ask(new, "SELECT pg_is_in_recovery()")
        assert ask(old, "SELECT pg_is_in_recovery()")
        await_equal(trio, new)
        assert slotfailover("check", "--config", config).code == 0
        again = slotfailover("resume", "--config", other, "--yes", "--json")
        assert (again.code, again.json["steps"]) == (0, [])
        new, old = old, new
    shown = slotfailover("history", "--config", other, "--json", "--last", "99").json["entries"]
    assert {entry["command"] for entry in shown} == {"switchover", "resume"}
    assert shown[0]["intent"]["target"] == "b"


@pytest.mark.long
def test_a_stopped_primary_is_started_again_when_it_is_taken_back(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    with pytest.MonkeyPatch.context() as monkeypatch:
        dies_after(monkeypatch, Run, "_note", 1, frozenset({Action.STOP}))
        with pytest.raises(Killed):
            slotfailover("switchover", "--config", config, "--yes", "--to", "b")
    refused = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
    assert (refused.code, "no node answers as a primary" in refused.err) == (10, True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PGPASSWORD", "hush")
        monkeypatch.setenv("SLOTBRIDGE_SOURCE__CONNINFO", "password=hush")
        back = slotfailover("resume", "--config", config, "--yes", "--rollback", "--json")
    assert back.code == 0, back.err
    # Whatever this server starts (archive_command, COPY PROGRAM) has its environment.
    (pid, *_) = (trio.primary.data / "postmaster.pid").read_text().splitlines()  # type: ignore[attr-defined]
    given = Path(f"/proc/{pid}/environ").read_bytes()
    assert (b"PATH=" in given, b"hush" in given) == (True, False)
    assert [step["step"] for step in back.json["steps"]] == [
        "start a",
        "let a take writes again",
        "enable subscription s1 at sub",
    ]
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)


def test_killed_inside_the_fence_writes_stay_fenced_until_resumed_or_taken_back(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, as_roles=True)
    command = ("switchover", "--config", str(config), "--yes", "--to", "b")
    with connect(trio.primary) as session:
        assert slotfailover_process(*command, before=DIES_IN_THE_FENCE).code == -9
        told = partial(session.execute, "SHOW default_transaction_read_only")
        eventually(lambda: told().fetchone() == ("on",), what="the session is told")
    assert "fence" in slotfailover("resume", "--config", config, "--dry-run").out
    back = slotfailover("resume", "--config", config, "--yes", "--rollback", "--json")
    assert back.code == 0, back.err
    assert [step["step"] for step in back.json["steps"]] == ["let a take writes again"]
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)


@pytest.mark.long
def test_a_consumer_that_does_not_drain_lets_the_switchover_be_taken_back(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """The subscriber waits for a lock: it has all the WAL, and can't confirm it."""
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, step_deadline_ms=patient_ms(2_700))
    with connect(trio.subscriber, trio.dbname) as locker:
        with locker.transaction():
            locker.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            write(trio.primary, trio.dbname, 1)
            ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
        assert ran.code == 13
        assert "read the log of each consumer that is behind" in ran.err
        assert "it was taken back, a goes on" in ran.err
        assert "Now a is the primary; b is a standby" in ran.err
    write(trio.primary, trio.dbname, 101)
    await_equal(trio, trio.primary)
    entries = slotfailover("history", "--config", config, "--json").json["entries"]
    assert "taken back" in entries[-1]["outcome"]
    assert not [entry for entry in entries if entry["step"].startswith("fence")]  # seen before it
    nothing = slotfailover("resume", "--config", config, "--dry-run")
    assert Action.UNFENCE not in nothing.out


def test_two_commands_are_kept_apart_and_a_killed_one_is_not_waited_for(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    config = configuration(tmp_path, trio)
    settings = load_settings(config).failover
    assert isinstance(settings, FailoverSettings)
    command = ("switchover", "--config", config, "--yes", "--to", "b")
    with Cluster(settings) as cluster:
        view = cluster.observe()
        with locked(cluster, view, "postgres", settings.journal):
            here = slotfailover(*command)
            assert here.code == 15
            assert "on this machine: process" in here.err
            elsewhere = configuration(tmp_path, trio, journal=str(tmp_path / "other"))
            there = slotfailover("switchover", "--config", elsewhere, "--yes", "--to", "b")
            assert there.code == 15
            assert re.search(r"on a: \w+ from 127.0.0.1", there.err), there.err
            assert slotfailover("plan", "--config", elsewhere).code == 0
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(config)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert slotfailover(*command).code == 15
        holder.kill()
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    eventually(lambda: ask(trio.primary, held) == 0, what="the lock has ended with its holder")
    tell(
        trio.primary, "ALTER SYSTEM SET synchronized_standby_slots = ''", "SELECT pg_reload_conf()"
    )
    ran = slotfailover(*command)
    assert ran.code == 1, ran.err
    assert "slotfailover rejoin a" in ran.out
