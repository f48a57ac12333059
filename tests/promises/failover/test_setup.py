"""A pair that the lines of docs/start/set-up.md set up: `check` finds nothing wrong."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from services.testbed.bed import Bed
from tests.promises.failover.check.examining import set_on
from tests.promises.failover.servers import slotfailover, tell
from tests.providers.waiting import eventually

OPERATIONS = Path(__file__).parents[3] / "docs/start/set-up.md"


@pytest.mark.long
def test_the_documented_base_backup_makes_a_sound_pair(local_bed: Bed, tmp_path: Path) -> None:
    line = re.search(r"^    pg_basebackup (.*)$", OPERATIONS.read_text("utf-8"), re.MULTILINE)
    assert line is not None
    primary, standby = local_bed.server("documented-a"), local_bed.server("documented-b")
    try:
        primary.create()
        primary.start()
        tell(primary, "CREATE ROLE replicator LOGIN REPLICATION")
        standby.make_data_folder()
        given = line[1].replace("host=PRIMARY", f"host=127.0.0.1 port={primary.port}")
        given = given.replace("DATABASE", "postgres").replace("DATA", str(standby.data))
        standby.run_tool("pg_basebackup", [*shlex.split(given), "--no-sync"])
        with (standby.data / "postgresql.auto.conf").open("a") as file:
            file.write("hot_standby_feedback = on\nsync_replication_slots = on\n")
            file.write("synchronized_standby_slots = ''\n")
        standby.start()
        set_on(primary, synchronized_standby_slots="slotfailover_b")
        config = tmp_path / "failover.yaml"
        settings = {
            "nodes": {"a": primary.conninfo(), "b": standby.conninfo()},
            "machines": {name: {"stop": "false", "fence": "false"} for name in "ab"},
        }
        config.write_text(yaml.safe_dump({"failover": settings}))

        def sound() -> bool:
            return slotfailover("check", "--config", config, "--strict").code == 0

        eventually(sound, what="check finds nothing wrong", timeout_s=40, interval_s=0.5)
    finally:
        standby.discard()
        primary.discard()
