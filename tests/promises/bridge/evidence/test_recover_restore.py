"""A volume was set back: `slotbridge recover` takes back what the database has lost."""

import json

import pytest

from schemas.errors import ExitCode
from schemas.recovery import RecoveryRecord
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.evidence.ground import DBNAME, Ground, await_noted, refusal, wal_lsn
from tests.promises.bridge.recover_process import recover
from tests.providers.databases import connect


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_volume_that_is_set_back(ground: Ground, *, elsewhere: bool) -> None:
    """`elsewhere`: by another server, to which the bridge is led."""
    server = ground.server()
    bridge = ground.bridge(server).start().streaming()
    load = ground.load(server)
    load.more(30)
    image = ground.image(server)
    before = wal_lsn(server)
    load.more(60)
    await_noted(bridge, before)
    load.stop()
    server.kill()
    if elsewhere:
        server = ground.copy(image)
        bridge.end()
        bridge = ground.bridge(server)
    else:
        ground.restore(server, image)
    server.start()
    if elsewhere:
        bridge.start()
    refusal(bridge, ExitCode.TIMELINE, "set back to an earlier state")
    load = ground.load(server)
    load.more(20)
    done = recover(bridge, "--json")
    assert done.returncode == 0, done.stderr
    record = RecoveryRecord.model_validate_json(done.stdout)
    assert record.tables["public.t"].deleted > 0
    bridge.start().streaming(server.conninfo(DBNAME))
    load.more(20)
    load.stop()
    bridge.caught_up(server.conninfo(DBNAME))
    assert bridge.stop() == 0, bridge.output
    folded = fold(bridge, "t")
    with connect(server, DBNAME) as connection:
        rows = connection.execute("SELECT id, note FROM t").fetchall()
    truth = {json.dumps({"id": n}, separators=(",", ":")): note for n, note in rows}
    assert {key: row["note"] for key, row in folded.by_offset.items()} == truth
    assert folded.by_offset == folded.by_position
