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
from services.testbed.pair import STANDBY_SLOT, alter_system, clone, execute
from services.testbed.postgres import PostgresServer
from services.testbed.shared_memory import release
from tests.bridge.evidence.ground import promote, wal_lsn
from tests.providers.databases import connect
from tests.providers.waiting import eventually
from tests.torture.bridge_faults import FAILPOINT_WAIT_S, refused
from tests.torture.faults import Fault
from tests.torture.stage import Stage

_ALTERED_EVERY_S: Final = 0.05
_JUST_BEHIND_BYTES: Final = 2048
"""What a server writes by itself while it starts is less."""
OLD_PRIMARY: Final = "it is an old primary"
SAME_TIMELINE: Final = "another timeline of the same number"
SET_BACK: Final = "set back to an earlier state"
GHOST: Final = "ghost"
"""The tid of what only a revived old primary has: it must never be in Kafka."""


def cut_network(stage: Stage, fault: Fault) -> None:
    """Connections are reset."""
    for proxy in stage.proxies:
        proxy.cut()
    _heal_after(stage, fault.seconds)


def stall_network(stage: Stage, fault: Fault) -> None:
    """Nothing is forwarded."""
    for proxy in stage.proxies:
        proxy.stall()
    _heal_after(stage, 2 * fault.seconds)


def _heal_after(stage: Stage, seconds: float) -> None:
    time.sleep(seconds)
    for proxy in stage.proxies:
        proxy.heal()


def alter_publication(stage: Stage, fault: Fault) -> None:
    """Set what is set already: the server's output plugin reads it anew, also in a stream."""
    query = sql.SQL("ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate')")
    until = time.monotonic() + fault.seconds
    with connect(stage.primary, stage.dbname) as connection:
        while time.monotonic() < until:
            connection.execute(query.format(sql.Identifier(stage.bridge.publication)))
            time.sleep(_ALTERED_EVERY_S)


def lock_tables(stage: Stage, _fault: Fault) -> None:
    """A killed bridge starts and streams although nobody else can open a published table."""
    with connect(stage.primary, stage.dbname) as connection, connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '10s'")
        try:
            connection.execute("LOCK TABLE routed IN ACCESS EXCLUSIVE MODE")
        except LockNotAvailable:
            stage.faults["tables locked"] -= 1  # it was not done, so the report must not say so
            return
        ends = stage.supervised.ends.sigkills
        stage.supervised.kill()
        stage.supervised.await_end(ends + 1, FAILPOINT_WAIT_S)
        stage.bridge_streams()


def restart_primary(stage: Stage, _fault: Fault) -> None:
    """It is shut down immediately, and recovers."""
    stage.primary.restart("immediate")


def kill_standby(stage: Stage, fault: Fault) -> None:
    """It dies, and comes again after a while; commits wait for it."""
    stage.standby.kill()
    time.sleep(fault.seconds)
    stage.standby.start()


def fail_over(stage: Stage, fault: Fault) -> None:
    """The primary dies; the runbook command; the old one comes back as a new standby."""
    if stage.given_up:
        return
    how = random.Random(f"{fault}").choice(["beside", "twice", "met", "alone"])
    met = fault.revived and how == "met"
    if met:
        _cut_off(stage)
    stage.primary.kill()
    config = stage.folder / "failover.yaml"
    nodes = {s.name: s.conninfo() for s in (stage.primary, stage.standby)}
    config.write_text(json.dumps({"failover": {"nodes": nodes, "connect_timeout_s": 2}}))
    done = CliRunner().invoke(slotfailover, ["failover", "--config", str(config), "--yes"])
    assert done.exit_code == 0, done.output + done.stderr
    stage.failovers += 1
    stage.primary, stage.standby = stage.standby, stage.primary
    if met:
        _revive_unknown(stage)
    elif fault.revived and how == "beside":
        _revive_beside(stage)
    elif fault.revived:
        _revive_alone(stage, twice=how == "twice")
    _rebuild_standby(stage)


def _revive_alone(stage: Stage, *, twice: bool) -> None:
    """It comes back as a primary, and commits what nobody must ever see.

    Clients wait meanwhile: what they wrote there would be lost, as an operator's mistake.
    """
    stage.bridge_streams()
    with stage.clients_held():
        _meet_the_old_one(stage)
        if twice:
            _promote_the_old_one(stage)
        else:
            stage.primary.start()


def _revive_unknown(stage: Stage) -> None:
    """The same, where the bridge has seen no more of the new timeline than its beginning."""
    stage.faults["timeline only met"] += 1
    with stage.clients_held():
        stage.supervised.arm("started:1:stop")
        _heal_after(stage, 0)
        with contextlib.suppress(AssertionError):
            eventually(stage.supervised.stopped, what="it has stopped", timeout_s=FAILPOINT_WAIT_S)
        _meet_the_old_one(stage)
        stage.primary.start()


def _revive_beside(stage: Stage) -> None:
    """The old primary is there besides, with a bridge that sees it alone."""
    stage.bridge_streams()
    with stage.clients_held():
        stage.faults["old primary revived"] += 1
        stage.note("revived beside")
        stage.standby.start()
        _haunt(stage.standby, stage.dbname)
        _stale_bridge(stage)
        stage.standby.kill()


def _meet_the_old_one(stage: Stage) -> None:
    """The new primary dies; the bridge sees the old one alone. At the end none is there."""
    stage.faults["old primary revived"] += 1
    stage.note("revived")
    stage.primary.kill()
    stage.standby.start()
    seen = stage.bridge.output.count(OLD_PRIMARY)
    _haunt(stage.standby, stage.dbname)
    stage.supervised.kill()  # it may stand still

    def noticed() -> bool:
        taken = stage.given_up or stage.bridge_is_on(stage.standby)
        return taken or stage.bridge.output.count(OLD_PRIMARY) > seen

    eventually(noticed, what="the bridge has met the old primary", timeout_s=120)
    time.sleep(0.5)
    stage.standby.kill()


def _stale_bridge(stage: Stage) -> None:
    """One that sees only the old primary, beside the right one, which goes on."""
    stage.faults["stale bridge"] += 1
    stale = {"conninfo": stage.standby.conninfo(stage.dbname)}
    refused(stage, "stale", stale, ExitCode.TIMELINE, "old primary", connect_deadline_ms=3000)


def _promote_the_old_one(stage: Stage) -> None:
    """Both servers were promoted to one timeline number now; the bridge sees the wrong one."""
    stage.faults["same timeline twice"] += 1
    old = stage.standby
    with stage.refusal(ExitCode.TIMELINE, SAME_TIMELINE) as await_refusal:
        promote(old)
        await_refusal(old)
        old.kill()
        stage.primary.start()


def restore_volume(stage: Stage, fault: Fault) -> None:
    """The primary is set back to an earlier state of its volume; later it is put right again."""
    if stage.given_up:
        return
    primary = stage.primary
    image, future = (primary.data.with_name(f"{primary.data.name}-{n}") for n in ("old", "new"))
    how = random.Random(f"{fault}").choice(["behind", "just behind", "overtakes"])
    stage.bridge_streams()
    if how == "just behind":
        with stage.supervised.paused():  # at its end record and origin are the same
            until = _take_image(primary, image)
            stage.supervised.arm("before origin:2:stop")  # the first one moves it nowhere
        how = _stop_before_the_origin(stage, until)
    else:
        until = _take_image(primary, image)
    if how != "just behind":
        _await_noted(stage, until, fault.seconds)
    with stage.clients_held():
        stage.standby.kill()  # else it would stream what the server that was set back writes
        primary.kill()
        release(primary.data)
        primary.data.rename(future)
        image.rename(primary.data)
        _cut_off(stage)
        stage.supervised.kill()  # it may stand still
        with stage.refusal(ExitCode.TIMELINE, SET_BACK) as await_refusal:
            primary.start()
            _go_on(stage, how)
            _heal_after(stage, 0)
            await_refusal(primary)
            primary.kill()
            primary.remove_data()
            future.rename(primary.data)
            primary.start()
            stage.standby.start()


def _take_image(primary: PostgresServer, image: Path) -> int:
    """Copy its volume, as a snapshot does; return where its WAL ends."""
    primary.kill()
    _copy(primary.data, image)
    primary.start()
    return wal_lsn(primary)


def _cut_off(stage: Stage) -> None:
    for proxy in stage.proxies:
        proxy.cut()


def _stop_before_the_origin(stage: Stage, until: int) -> str:
    """Kafka gets what the image lacks, and no record that notes where the origin was since.

    Returns "behind" where it has not come to that.
    """
    with contextlib.suppress(AssertionError):
        eventually(stage.supervised.stopped, what="it has stopped", timeout_s=FAILPOINT_WAIT_S)
    last = stage.progress()[-1]
    if last.origin_lsn <= until < last.end_lsn - _JUST_BEHIND_BYTES and stage.supervised.stopped():
        return "just behind"
    stage.supervised.kill()
    return "behind"


def _await_noted(stage: Stage, until: int, seconds: float) -> None:
    """The record notes an origin that the image does not have."""
    time.sleep(seconds)
    eventually(
        lambda: stage.given_up or stage.progress()[-1].origin_lsn > until,
        what="the record notes a later origin",
        timeout_s=120,
        interval_s=0.5,
    )


def _go_on(stage: Stage, how: str) -> None:
    """Ghosts are committed: none, one, or until the server is beyond Kafka's record again."""
    if how == "just behind":
        stage.faults["volume just behind"] += 1
        return
    _haunt(stage.primary, stage.dbname, segments=0)
    if how == "overtakes":
        stage.faults["volume overtakes"] += 1
        last = stage.progress()[-1]
        while wal_lsn(stage.primary) <= max(last.end_lsn, last.wal_lsn):
            _haunt(stage.primary, stage.dbname)


def _copy(source: Path, target: Path) -> None:
    """As a snapshot of the volume of a server that has been killed."""
    subprocess.run(["cp", "-a", source, target], check=True)
    (target / "postmaster.pid").unlink(missing_ok=True)


def _haunt(server: PostgresServer, dbname: str, *, segments: int = 2) -> None:
    """A server that nobody must follow commits ghosts, each after the rest of a WAL segment."""
    for name in ("synchronized_standby_slots", "synchronous_standby_names"):
        alter_system(server, name, "")
    ghost = "INSERT INTO ledger VALUES (%s || gen_random_uuid()::text, 'ghost', '{}')"
    with connect(server, dbname) as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute(ghost, [GHOST])
        for _ in range(segments):
            connection.execute("SELECT pg_switch_wal()")
            connection.execute(ghost, [GHOST])


def _rebuild_standby(stage: Stage) -> None:
    with connect(stage.primary) as connection:
        known = connection.execute(
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [STANDBY_SLOT]
        ).fetchone()
    if known is None:
        query = sql.SQL("SELECT pg_create_physical_replication_slot({}, true)")
        execute(stage.primary, query.format(STANDBY_SLOT))
    stage.standby.remove_data()
    clone(stage.primary, stage.standby, slot=STANDBY_SLOT, dbname=stage.dbname)
    stage.standby.start()
    alter_system(stage.primary, "synchronized_standby_slots", STANDBY_SLOT)
    alter_system(stage.primary, "synchronous_standby_names", stage.synchronous)
