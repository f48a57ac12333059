"""`slotfailover status`: one screen, before and after a primary dies, and while a command works."""

import re
from pathlib import Path

from services.failover.observe.client_sessions import COMMAND_LOCK as KEY
from tests.conftest import NewPair
from tests.promises.failover.servers import (
    ask,
    configuration,
    slotfailover,
    subscribe,
    tell,
    word_of,
)
from tests.providers.databases import connect
from tests.providers.waiting import eventually


def test_status_says_who_leads_who_lags_and_what_is_unfinished(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair(synchronous=False)
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    ran = slotfailover("status", "--config", config)
    assert ran.code == 0, ran.out
    lines = ran.out.splitlines()
    assert len(lines) == 6, ran.out
    assert lines[0].startswith("PRIMARY    a")
    assert "takes writes" in lines[0]
    assert re.search(r"its server is up since 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$", lines[0]), lines[
        0
    ]
    assert "lacks " in lines[1]
    assert "last message" in lines[1]
    assert "sub/s1" in lines[2]
    assert "ready" in lines[3]
    assert "none unfinished" in lines[4]
    assert lines[5].endswith("free")
    planned = slotfailover("plan", "--config", config, "--fence")
    assert (planned.code, "fence writes on a" in planned.out) == (0, True), planned.err
    tell(trio.standby, "SELECT pg_wal_replay_pause()")
    paused = "SELECT pg_get_wal_replay_pause_state() <> 'not paused'"
    eventually(lambda: ask(trio.standby, paused), what="replay is paused")
    waiting = slotfailover("status", "--config", config)
    assert "NOT READY: replay is paused on b" in waiting.out
    checked = slotfailover("check", "--config", config)
    assert "; but a promotion is refused (34): replay is paused on b" in checked.out
    tell(trio.standby, "SELECT pg_wal_replay_resume()")
    with connect(trio.primary, "postgres") as other:
        other.execute("SELECT pg_advisory_lock(%s)", [KEY])
        assert "held on a by postgres" in slotfailover("status", "--config", config).out

    trio.primary.kill()
    dead = slotfailover("status", "--config", config)
    assert dead.code == 1
    assert "was the primary" in dead.out
    assert "commits that may be lost: " in dead.out
    assert "last contact with a " in dead.out
    slotfailover("failover", "--config", config, "--yes", *word_of(trio.standby, "a"))
    slotfailover("failover", "--config", config, "--yes")
    after = slotfailover("status", "--config", config, "--json").json
    assert after["primary"] == "b"
    (leader,) = [line for line in after["lines"] if line["kind"] == "PRIMARY"]
    assert "promoted 20" in leader["text"]
    assert not after["well"]  # there is no standby any more
