"""What is done to the PostgreSQL servers and the network to them. Every fault ends healed."""

import json
import time
from typing import Final

from psycopg import sql
from psycopg.errors import LockNotAvailable
from typer.testing import CliRunner

from services.failover.command import app as slotfailover
from services.local.pair import STANDBY_SLOT, alter_system, clone, execute
from tests.providers.databases import connect
from tests.providers.waiting import eventually
from tests.torture.bridge_faults import FAILPOINT_WAIT_S
from tests.torture.faults import Fault
from tests.torture.stage import Stage

_ALTERED_EVERY_S: Final = 0.05
OLD_PRIMARY: Final = "it is an old primary"
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
    stage.primary.kill()
    config = stage.folder / "failover.yaml"
    nodes = {s.name: s.conninfo() for s in (stage.primary, stage.standby)}
    config.write_text(json.dumps({"failover": {"nodes": nodes, "connect_timeout_s": 2}}))
    done = CliRunner().invoke(slotfailover, ["failover", "--config", str(config), "--yes"])
    assert done.exit_code == 0, done.output + done.stderr
    stage.failovers += 1
    stage.primary, stage.standby = stage.standby, stage.primary
    if fault.revived:
        _revive_the_old_one(stage)
    _rebuild_standby(stage)


def _revive_the_old_one(stage: Stage) -> None:
    """It comes back alone, as a primary, and commits what nobody must ever see.

    Clients wait meanwhile: what they wrote there would be lost, as an operator's mistake.
    """
    stage.faults["old primary revived"] += 1
    stage.bridge_streams()
    with stage.clients_held():
        stage.note("revived")
        stage.primary.kill()
        stage.standby.start()
        refused = stage.bridge.output.count(OLD_PRIMARY)
        _haunt(stage)

        def noticed() -> bool:
            taken = stage.given_up or stage.bridge_is_on(stage.standby)
            return taken or stage.bridge.output.count(OLD_PRIMARY) > refused

        eventually(noticed, what="the bridge has met the old primary", timeout_s=60)
        time.sleep(0.5)
        stage.standby.kill()
        stage.primary.start()


def _haunt(stage: Stage) -> None:
    """The server that is not the primary commits ghosts, beyond whatever Kafka has."""
    for name in ("synchronized_standby_slots", "synchronous_standby_names"):
        alter_system(stage.standby, name, "")
    with connect(stage.standby, stage.dbname) as connection:
        connection.execute("SET synchronous_commit = local")
        for _ in range(2):
            connection.execute("SELECT pg_switch_wal()")
            connection.execute(
                "INSERT INTO ledger VALUES (%s || gen_random_uuid()::text, 'ghost', '{}')",
                [GHOST],
            )


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
