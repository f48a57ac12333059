"""Point-in-time recovery: another server, from a backup and archived WAL, as of some moment.

It is promoted at the end: a new timeline, with the system identifier of the lost one. A base backup
has no slots. A snapshot of the volume that is recovered from the archive has.
"""

import json
from collections.abc import Callable
from pathlib import Path

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.evidence.cases import Outcome, accepted
from tests.promises.bridge.evidence.ground import (
    DBNAME,
    Compared,
    Ground,
    Load,
    in_recovery,
    refusal,
    wal_lsn,
)
from tests.promises.bridge.recover_process import recover
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.waiting import eventually


def restored(ground: Ground) -> Outcome:
    """From either kind of backup, to before what Kafka has, or behind it."""
    how = ground.rng.choice([base_backup, snapshot_before, snapshot_behind])
    return how(ground)


def base_backup(ground: Ground) -> Outcome:
    """Without a slot, whatever moment it is restored to."""
    server, archive, bridge, load = _archived(ground)
    backup = ground.named()
    backup.make_data_folder()
    options = ("--checkpoint=fast", "--wal-method=none", "--no-sync", "--no-manifest")
    backup.run_tool("pg_basebackup", ["-d", server.conninfo(), "-D", backup.data, *options])
    load.more(ground.rng.randint(20, 120))
    target = wal_lsn(server)
    load.more(ground.rng.randint(20, 120))
    _lose(server, archive, load, bridge)
    _recover(backup, archive, target)
    bridge = ground.bridge(backup)
    refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "the slot is gone")
    load = ground.load(backup)
    load.more(20)
    done = recover(bridge)
    assert done.returncode == 0, done.stderr
    bridge.start().streaming()
    load.more(20)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return "base backup: refused (30, no slot); `slotbridge recover`", _folded(backup, bridge)


def snapshot_before(ground: Ground) -> Outcome:
    """With its slot, to a moment before what Kafka has."""
    server, archive, bridge, load = _archived(ground)
    image = ground.image(server)
    load.more(ground.rng.randint(20, 120))
    target = wal_lsn(server)
    load.more(ground.rng.randint(20, 120))
    eventually(
        lambda: bridge.progress()[-1].position.end_lsn > target, what="Kafka has more than that"
    )
    _lose(server, archive, load, bridge)
    assert bridge.progress()[-1].position.end_lsn > target
    copy = ground.copy(image)
    _recover(copy, archive, target)
    bridge = ground.bridge(copy).start()
    refusal(bridge, ExitCode.TIMELINE, "left it at")
    how = "snapshot, to before Kafka's record: refused (32); accepted"
    return how, accepted(ground, bridge, copy, ground.load(copy))


def snapshot_behind(ground: Ground) -> Outcome:
    """With its slot, to a moment behind what Kafka has."""
    server, archive, bridge, load = _archived(ground)
    image = ground.image(server)
    load.more(ground.rng.randint(20, 120))
    bridge.kill()
    load.more(ground.rng.randint(20, 120))
    target = wal_lsn(server)
    load.more(ground.rng.randint(1, 20))
    _lose(server, archive, load)
    copy = ground.copy(image)
    _recover(copy, archive, target)
    bridge = ground.bridge(copy).start().streaming()
    load = ground.load(copy)
    load.more(20)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return "snapshot, to behind Kafka's record: accepted as it is", _folded(copy, bridge)


KINDS: tuple[Callable[[Ground], Outcome], ...] = (base_backup, snapshot_before, snapshot_behind)


def _archived(ground: Ground) -> tuple[PostgresServer, Path, Bridge, Load]:
    """A server whose WAL is archived, a bridge, and a load that has begun."""
    server = ground.server()
    archive = server.data.with_name(f"{server.data.name}-archive")
    archive.mkdir()
    ground.bed.run_as.own(archive)
    server.configure({"archive_mode": "on", "archive_command": f'cp "%p" "{archive}/%f"'})
    server.restart()
    bridge = ground.bridge(server).start().streaming()
    load = ground.load(server)
    load.more(ground.rng.randint(5, 60))
    return server, archive, bridge, load


def _lose(server: PostgresServer, archive: Path, load: Load, bridge: Bridge | None = None) -> None:
    """The server is gone for good, with all of its WAL in the archive; so are load and bridge."""
    load.stop()
    if bridge is not None:
        bridge.kill()
    with connect(server, DBNAME) as connection:
        row = connection.execute("SELECT pg_walfile_name(pg_current_wal_lsn())").fetchone()
        connection.execute("SELECT pg_switch_wal()")
    assert row is not None
    eventually(lambda: (archive / row[0]).exists(), what=f"{row[0]} is archived", timeout_s=60)
    server.kill()


def _recover(server: PostgresServer, archive: Path, target: int) -> None:
    """Start it on a backup and the archive, up to `target`, and promote it there."""
    server.configure(
        {
            "archive_mode": "off",
            "restore_command": f'cp "{archive}/%f" "%p"',
            "recovery_target_lsn": format_lsn(target),
            "recovery_target_action": "promote",
        }
    )
    (server.data / "recovery.signal").touch()
    server.start()
    eventually(lambda: not in_recovery(server), what="it is promoted", timeout_s=60)


def _folded(server: PostgresServer, bridge: Bridge) -> Compared:
    """Rows against what the topic's records make of them."""
    folded = fold(bridge, "t")
    assert folded.by_offset == folded.by_position
    found = {json.loads(key)["id"] for key in folded.by_offset}
    with connect(server, DBNAME) as connection:
        rows = {row[0] for row in connection.execute("SELECT id FROM t")}
    return Compared(len(rows - found), 0, len(found - rows), len(rows))
