"""What is done to the PostgreSQL servers and the network to them. Every fault ends healed."""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Final

from psycopg import sql
from psycopg.errors import LockNotAvailable
from typer.testing import CliRunner

from schemas.errors import ExitCode
from services.failover.cli.app import app as slotfailover
from services.testbed.pair import STANDBY_SLOT, clone, execute, set_parameter
from services.testbed.postgres import PostgresServer
from services.testbed.shared_memory import release
from tests.promises.bridge.evidence.ground import promote, wal_lsn
from tests.providers.databases import connect
from tests.providers.waiting import eventually
from tests.torture.bridge_faults import FAILPOINT_WAIT_S, refused
from tests.torture.faults import Fault
from tests.torture.torture_run import TortureRun

_ALTERED_EVERY_S: Final = 0.05
_JUST_BEHIND_BYTES: Final = 2048
"""What a server writes by itself while it starts is less."""
_JUST: Final = ("just behind", "just overtaken")
"""Of an image as of the last origin that Kafka's record notes: the WAL alone can tell."""
_OVERTAKES: Final = {"overtakes": "volume overtakes", "just overtaken": "volume just overtaken"}
OLD_PRIMARY: Final = "the server is an old primary"
SAME_TIMELINE: Final = "another timeline of the same number"
SET_BACK: Final = "set back to an earlier state"
GHOST: Final = "ghost"
"""The tid of what only a revived old primary has: it must never be in Kafka."""


def cut_network(run: TortureRun, fault: Fault) -> None:
    """Connections are reset."""
    for proxy in run.proxies:
        proxy.cut()
    _heal_after(run, fault.seconds)


def stall_network(run: TortureRun, fault: Fault) -> None:
    """Nothing is forwarded."""
    for proxy in run.proxies:
        proxy.stall()
    _heal_after(run, 2 * fault.seconds)


def _heal_after(run: TortureRun, seconds: float) -> None:
    time.sleep(seconds)
    for proxy in run.proxies:
        proxy.heal()


def alter_publication(run: TortureRun, fault: Fault) -> None:
    """Set what is set already: the server's output plugin reads it anew, also in a stream."""
    query = sql.SQL("ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate')")
    until = time.monotonic() + fault.seconds
    with connect(run.primary, run.dbname) as connection:
        while time.monotonic() < until:
            connection.execute(query.format(sql.Identifier(run.bridge.publication)))
            time.sleep(_ALTERED_EVERY_S)


def lock_tables(run: TortureRun, _fault: Fault) -> None:
    """A killed bridge starts and streams although nobody else can open a published table."""
    with connect(run.primary, run.dbname) as connection, connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '10s'")
        try:
            connection.execute("LOCK TABLE routed IN ACCESS EXCLUSIVE MODE")
        except LockNotAvailable:
            run.faults["tables locked"] -= 1  # it was not done, so the report must not say so
            return
        ends = run.supervised.ends.sigkills
        run.supervised.kill()
        run.supervised.await_end(ends + 1, FAILPOINT_WAIT_S)
        run.bridge_streams()


def restart_primary(run: TortureRun, _fault: Fault) -> None:
    """It is shut down immediately, and recovers."""
    run.primary.restart("immediate")


def kill_standby(run: TortureRun, fault: Fault) -> None:
    """It dies, and comes again after a while; commits wait for it."""
    run.standby.kill()
    time.sleep(fault.seconds)
    run.standby.start()


def fail_over(run: TortureRun, fault: Fault) -> None:
    """The primary dies; the runbook command; the old one comes back as a new standby."""
    if run.given_up:
        return
    how = random.Random(f"{fault}").choice(["beside", "twice", "met", "alone"])
    met = fault.revived and how == "met"
    if met:
        _cut_off(run)
    run.primary.kill()
    config = run.folder / "failover.yaml"
    nodes = {s.name: s.conninfo() for s in (run.primary, run.standby)}
    config.write_text(json.dumps({"failover": {"nodes": nodes, "connect_timeout_s": 10}}))
    done = CliRunner().invoke(slotfailover, ["failover", "--config", str(config), "--yes"])
    assert done.exit_code == 0, done.output + done.stderr
    run.failovers += 1
    run.primary, run.standby = run.standby, run.primary
    if met:
        _revive_unknown(run)
    elif fault.revived and how == "beside":
        _revive_beside(run)
    elif fault.revived:
        _revive_alone(run, twice=how == "twice")
    rebuild_standby(run.primary, run.standby, run.dbname, run.synchronous)


def _revive_alone(run: TortureRun, *, twice: bool) -> None:
    """It comes back as a primary, and commits what nobody must ever see.

    Clients wait meanwhile: what they wrote there would be lost, as an operator's mistake.
    """
    run.bridge_streams()
    with run.clients_held():
        _meet_the_old_one(run)
        if twice:
            _promote_the_old_one(run)
        else:
            run.primary.start()


def _revive_unknown(run: TortureRun) -> None:
    """The same, where the bridge has seen no more of the new timeline than its beginning."""
    run.faults["timeline only met"] += 1
    with run.clients_held():
        run.supervised.arm("started:1:stop")
        _heal_after(run, 0)
        with contextlib.suppress(AssertionError):
            eventually(run.supervised.stopped, what="it has stopped", timeout_s=FAILPOINT_WAIT_S)
        _meet_the_old_one(run)
        run.primary.start()


def _revive_beside(run: TortureRun) -> None:
    """The old primary is there besides, with a bridge that sees it alone."""
    run.bridge_streams()
    with run.clients_held():
        run.faults["old primary revived"] += 1
        run.note("revived beside")
        run.standby.start()
        _haunt(run.standby, run.dbname)
        _stale_bridge(run)
        run.standby.kill()


def _meet_the_old_one(run: TortureRun) -> None:
    """The new primary dies; the bridge sees the old one alone. At the end none is there."""
    run.faults["old primary revived"] += 1
    run.note("revived")
    run.primary.kill()
    run.standby.start()
    seen = run.bridge.output.count(OLD_PRIMARY)
    _haunt(run.standby, run.dbname)
    run.supervised.kill()  # it may stand still

    def noticed() -> bool:
        taken = run.given_up or run.bridge_is_on(run.standby)
        return taken or run.bridge.output.count(OLD_PRIMARY) > seen

    eventually(noticed, what="the bridge has met the old primary", timeout_s=120)
    time.sleep(0.5)
    run.standby.kill()


def _stale_bridge(run: TortureRun) -> None:
    """One that sees only the old primary, beside the right one, which goes on."""
    run.faults["stale bridge"] += 1
    stale = {"conninfo": run.standby.conninfo(run.dbname)}
    refused(run, "stale", stale, ExitCode.TIMELINE, "old primary", connect_deadline_ms=3000)


def _promote_the_old_one(run: TortureRun) -> None:
    """Both servers were promoted to one timeline number now; the bridge sees the wrong one."""
    run.faults["same timeline twice"] += 1
    old = run.standby
    with run.refusal(ExitCode.TIMELINE, SAME_TIMELINE) as await_refusal:
        promote(old)
        await_refusal(old)
        old.kill()
        run.primary.start()


def restore_volume(run: TortureRun, fault: Fault) -> None:
    """The primary is set back to an earlier state of its volume; later it is put right again."""
    if run.given_up:
        return
    primary = run.primary
    image, future = (primary.data.with_name(f"{primary.data.name}-{n}") for n in ("old", "new"))
    how = random.Random(f"{fault}").choice(["behind", *_JUST, _JUST[1], "overtakes"])
    if run.commits_wait and how in _JUST:
        how = "behind"  # clients could not be held: they would wait for a bridge that stands still
    run.bridge_streams()
    if how in _JUST:
        with run.supervised.paused():  # at its end record and origin are the same
            until = _take_image(primary, image)
            run.supervised.arm("before origin:2:stop")  # the first one moves it nowhere
        how = how if _stops_before_the_origin(run, until) else "behind"
    else:
        until = _take_image(primary, image)
    if how not in _JUST:
        _await_noted(run, until, fault.seconds)
    with run.clients_held():
        run.standby.kill()  # else it would stream what the server that was set back writes
        primary.kill()
        release(primary.data)
        primary.data.rename(future)
        image.rename(primary.data)
        _cut_off(run)
        run.supervised.kill()  # it may stand still
        with run.refusal(ExitCode.TIMELINE, SET_BACK) as await_refusal:
            primary.start()
            _go_on(run, how)
            _heal_after(run, 0)
            await_refusal(primary)
            primary.kill()
            primary.remove_data()
            future.rename(primary.data)
            primary.start()
            run.standby.start()


def _take_image(primary: PostgresServer, image: Path) -> int:
    """Copy its volume, as a snapshot does; return where its WAL ends."""
    primary.kill()
    _copy(primary.data, image)
    primary.start()
    return wal_lsn(primary)


def _cut_off(run: TortureRun) -> None:
    for proxy in run.proxies:
        proxy.cut()


def _stops_before_the_origin(run: TortureRun, until: int) -> bool:
    """Kafka gets what the image lacks, and no record that notes where the origin was since.

    Tell whether it has come to that.
    """
    with contextlib.suppress(AssertionError):
        eventually(run.supervised.stopped, what="it has stopped", timeout_s=FAILPOINT_WAIT_S)
    last = run.progress()[-1]
    end_lsn = last.position.end_lsn - _JUST_BEHIND_BYTES
    if last.witness.lsn <= until < end_lsn and run.supervised.stopped():
        return True
    run.supervised.kill()
    return False


def _await_noted(run: TortureRun, until: int, seconds: float) -> None:
    """The record notes an origin that the image does not have."""
    time.sleep(seconds)
    with run.left_alone():
        eventually(
            lambda: run.given_up or run.progress()[-1].witness.lsn > until,
            what="the record notes a later origin",
            timeout_s=120,
            interval_s=0.5,
        )


def _go_on(run: TortureRun, how: str) -> None:
    """Ghosts are committed: none, one, or until the server is beyond Kafka's record again."""
    if how == "just behind":
        run.faults["volume just behind"] += 1
        return
    _haunt(run.primary, run.dbname, segments=0)
    if how in _OVERTAKES:
        run.faults[_OVERTAKES[how]] += 1
        last = run.progress()[-1]
        while wal_lsn(run.primary) <= max(last.position.end_lsn, last.witness.wal_lsn):
            _haunt(run.primary, run.dbname)


def _copy(source: Path, target: Path) -> None:
    """As a snapshot of the volume of a server that has been killed."""
    subprocess.run(["cp", "-a", source, target], check=True)
    (target / "postmaster.pid").unlink(missing_ok=True)


def _haunt(server: PostgresServer, dbname: str, *, segments: int = 2) -> None:
    """A server that nobody must follow commits ghosts, each after the rest of a WAL segment."""
    for name in ("synchronized_standby_slots", "synchronous_standby_names"):
        set_parameter(server, name, "")
    ghost = "INSERT INTO ledger VALUES (%s || gen_random_uuid()::text, 'ghost', '{}')"
    with connect(server, dbname) as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute(ghost, [GHOST])
        for _ in range(segments):
            connection.execute("SELECT pg_switch_wal()")
            connection.execute(ghost, [GHOST])


def rebuild_standby(
    primary: PostgresServer, standby: PostgresServer, dbname: str, synchronous: str
) -> None:
    """Copy the standby anew from the primary; commits wait for `synchronous` from then on."""
    with connect(primary) as connection:
        known = connection.execute(
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [STANDBY_SLOT]
        ).fetchone()
    if known is None:
        query = sql.SQL("SELECT pg_create_physical_replication_slot({}, true)")
        execute(primary, query.format(STANDBY_SLOT))
    standby.remove_data()
    clone(primary, standby, slot=STANDBY_SLOT, dbname=dbname)
    standby.start()
    set_parameter(primary, "synchronized_standby_slots", STANDBY_SLOT)
    set_parameter(primary, "synchronous_standby_names", synchronous)
