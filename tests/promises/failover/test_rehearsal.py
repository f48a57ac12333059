"""`slotfailover drill`: it shows what would happen, and leaves production as it was."""

from pathlib import Path
from typing import Any

import pytest
from psycopg.errors import ObjectNotInPrerequisiteState

from services.failover.drill.clone import SLOT
from services.failover.drill.rehearsal import KEY, _synchronize
from services.postgres.sessions import FAILOVER, open_session
from services.testbed.bed import Bed
from tests.conftest import NewPair
from tests.promises.failover.check.examining import make_slot, reset_on, set_on
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    Ran,
    ask,
    configuration,
    slotfailover,
    slotfailover_process,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.databases import connect
from tests.providers.interface import Server, Trio
from tests.providers.waiting import eventually, patient

SLOTS = f"""
    SELECT json_agg(s ORDER BY slot_name) FROM (
        SELECT slot_name, plugin, slot_type, database, temporary, active, wal_status, two_phase,
               failover, synced, invalidation_reason
          FROM pg_replication_slots) s WHERE slot_name <> '{SLOT}'
"""
ACTIVE = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
SUBSCRIPTIONS = "SELECT json_agg(s ORDER BY oid) FROM pg_subscription s"
SERVER_SETTINGS = "SELECT json_agg(s ORDER BY name) FROM (SELECT name, setting FROM pg_settings) s"
STANDBYS = "SELECT json_agg(application_name ORDER BY 1) FROM pg_stat_replication"
TIMELINE = "SELECT timeline_id FROM pg_control_checkpoint()"
SIGNALLED = """
import os
from services.failover.drill import clone
start = clone.Clone.start
def and_die(self, *arguments):
    start(self, *arguments)
    os.kill(os.getpid(), {signal})
clone.Clone.start = and_die
"""


def test_a_drill_shows_which_slots_are_usable_and_leaves_production_as_it_was(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    write(trio.primary, trio.dbname, 1)
    config = configured(tmp_path, trio, local_bed)
    before = production(trio)
    ran = slotfailover("drill", "--config", config, "--json")
    assert ran.code == 0, ran.out + ran.err
    assert [(slot["slot"], slot["usable"]) for slot in ran.json["slots"]] == [("s1", True)]
    assert ran.json["slots"][0]["changes"] > 0
    parts = [part["part"] for part in ran.json["parts"]]
    assert parts == ["copy", "start", "catch up", "slots", "cut off", "promote"]
    assert_nothing_left(trio, local_bed)
    assert production(trio) == before

    make_slot(trio.primary, trio.dbname, "idle")
    within_s = round(patient(7))
    config = configured(tmp_path, trio, local_bed, slots_deadline_ms=1000 * within_s)
    ran = slotfailover("drill", "--config", config)
    assert ran.code == 1, ran.err
    assert f"NOT USABLE idle: not synchronized within {within_s} s" in ran.out
    assert "usable     s1" in ran.out
    config = configured(tmp_path, trio, local_bed)
    watch_tells_of_the_last_one(tmp_path, trio, local_bed)
    tell(trio.primary, "SELECT pg_drop_replication_slot('idle')")
    interrupted_ones(config, trio, local_bed)
    entries = slotfailover("history", "--config", config, "--json").json["entries"]
    ends = [entry["outcome"] for entry in entries if entry["step"] == "end"]
    assert (len(ends), ends[0], "idle: not synchronized" in ends[1]) == (4, "done", True)
    nothing = slotfailover("resume", "--config", config, "--yes")
    assert nothing.code == 0, nothing.err
    assert production(trio) == before


def watch_tells_of_the_last_one(where: Path, trio: Trio, bed: Bed) -> None:
    """Its age and outcome are metrics, and on the page."""
    folder = where / "watch"
    folder.mkdir()
    watching = Watching(
        configuration(
            folder, trio, machines=machines(trio, bed), watch={**SETTINGS, "repoint": False}
        )
    )
    try:
        watching.await_rounds(1)
        age_s = watching.metric("slotfailover_last_drill_age_seconds")
        assert 0 <= age_s < 86_400
        assert watching.metric("slotfailover_last_drill_success") == 0
        assert "idle: not synchronized" in watching.status["last_drill"]["outcome"]
        eventually(
            lambda: watching.metric("slotfailover_last_drill_age_seconds") > age_s,
            what="it grows older",
        )
        assert watching.stop() == 0, watching.output
    finally:
        watching.end()


def interrupted_ones(config: Path, trio: Trio, bed: Bed) -> None:
    """SIGTERM: it cleans up. SIGKILL: `--clean` does, and so does the next drill."""
    ended = drill_process(config, before=SIGNALLED.format(signal=15))
    assert ended.code == 130, ended.err
    assert_nothing_left(trio, bed)
    for cleaner in ("--clean", ""):
        killed = drill_process(config, before=SIGNALLED.format(signal=9))
        assert killed.code == -9
        assert list(bed.folder.glob("slotfailover-drill-*"))
        eventually(lambda: ask(trio.primary, ACTIVE), what="the clone is alive")
        cleaned = slotfailover("drill", "--config", config, *filter(None, [cleaner]))
        assert cleaned.code == 0, cleaned.err
        assert not cleaner or f"dropped the slot {SLOT} on a" in cleaned.out
        assert_nothing_left(trio, bed)
    again = slotfailover("drill", "--clean", "--config", config)
    assert again.out == "nothing is left of a drill\n"


@pytest.mark.long
def test_drill_refuses_clones_it_can_not_make(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    config = configured(tmp_path, trio, local_bed)

    def refused(code: int, said: str, *options: str, config: Path = config) -> None:
        ran = slotfailover("drill", "--config", config, *options)
        assert (ran.code, said in ran.err) == (code, True), ran.err
        assert ran.err.count("\n") == 1

    refused(34, "x is not a standby that answers", "--standby", "x")
    refused(34, "a is not a standby that answers", "--standby", "a")
    with connect(trio.primary, "postgres") as other:
        other.execute("SELECT pg_advisory_lock(%s)", [KEY])
        refused(15, "another drill is at work")
    set_on(trio.primary, synchronous_standby_names="'*'")
    refused(25, "contains *")
    reset_on(trio.primary, "synchronous_standby_names")
    missing = configured(tmp_path, trio, local_bed, folder="/tmp/none-such")
    refused(2, "No such file", config=missing)
    long = configured(tmp_path, trio, local_bed, folder="/tmp/" + "x" * 90)
    refused(2, "too long for a Unix-domain socket", config=long)
    bad = configured(tmp_path, trio, local_bed, settings={"wal_level": "none"})
    ran = slotfailover("drill", "--config", bad)
    assert (ran.code, "wal_level" in ran.err) == (25, True), ran.err
    assert_nothing_left(trio, local_bed)
    trio.standby.stop()
    refused(10, "no standby answers", config=configured(tmp_path, trio, local_bed))


def configured(where: Path, trio: Trio, bed: Bed, **drill: Any) -> Path:
    given = {"folder": str(bed.folder), **drill}
    return configuration(where, trio, machines=machines(trio, bed), drill=given)


def drill_process(config: Path, *, before: str) -> Ran:
    return slotfailover_process("drill", "--config", str(config), before=before)


def production(trio: Trio) -> dict[str, Any]:
    """What a drill must not change: slots, subscriptions, settings, standbys, timelines."""

    def seen(server: Server) -> list[Any]:
        queries = (SLOTS, SUBSCRIPTIONS, SERVER_SETTINGS, STANDBYS, TIMELINE)
        return [ask(server, query) for query in queries]

    servers = {"a": trio.primary, "b": trio.standby, "sub": trio.subscriber}
    return {name: seen(server) for name, server in servers.items()}


def assert_nothing_left(trio: Trio, bed: Bed) -> None:
    assert not list(bed.folder.glob("slotfailover-drill-*"))
    for server in (trio.primary, trio.standby):
        assert (
            ask(server, f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{SLOT}'")
            == 0
        )
    running = f"SELECT count(*) FROM pg_stat_replication WHERE application_name = '{SLOT}'"
    eventually(lambda: ask(trio.primary, running) == 0, what="the clone is gone")


def test_the_drills_try_leaves_the_session_as_it_was_pinned(new_pair: NewPair) -> None:
    conninfo = new_pair().primary.conninfo()
    with open_session(FAILOVER, conninfo, {"statement_timeout": "9s"}) as session:
        with pytest.raises(ObjectNotInPrerequisiteState):
            _synchronize(session)
        shown = session.execute("SHOW statement_timeout").fetchone()
    assert shown == ("9s",)
