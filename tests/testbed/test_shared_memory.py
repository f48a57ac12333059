"""A killed server leaves nothing in the kernel once its data are deleted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.providers.memory import delete_left_behind

pytestmark = pytest.mark.usefixtures("servers")

KILLED = """
import os, signal, sys
from pathlib import Path
from services.testbed.bed import Bed
with Bed(Path(sys.argv[1]), lazy=True) as bed:
    bed.start("subscriber")
    print((bed.subscriber.data / "postmaster.pid").read_text().split("\\n")[6], flush=True)
    bed.subscriber.kill()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_discarded_server_leaves_no_shared_memory(folder: Path) -> None:
    with Bed(folder / "bed", lazy=True) as bed:
        left, discarded = bed.server("left"), bed.server("discarded")
        segments = [started(server) for server in (left, discarded)]
        left.kill()
        assert set(segments) <= known()
        discarded.discard()
        assert segments[1] not in known()
        assert not discarded.data.exists()
        discarded.discard()
    assert segments[0] not in known(), "the bed's end is its servers' end"


@pytest.mark.long
def test_shared_memory_of_a_killed_owners_servers_is_removed(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, folder / "bed"],
        capture_output=True,
        text=True,
        check=False,
    )
    segment = int(done.stdout.split()[1])
    assert segment in known(), done.stderr
    with Bed(folder / "bed", lazy=True):
        assert segment not in known()


@pytest.mark.long
def test_folders_of_killed_runs_are_deleted_and_those_of_living_ones_stay(folder: Path) -> None:
    killed, living = folder / "slotbridge-killed", folder / "slotbridge-living"
    subprocess.run([sys.executable, "-c", KILLED, killed], capture_output=True, check=False)
    assert (killed / "subscriber").exists()
    with Bed(living, lazy=True):
        assert not delete_left_behind(folder), "they may be about to be locked"
        for made in (killed, living):
            os.utime(made / "lock", (0, 0))
        assert delete_left_behind(folder) == [killed]
    assert living.exists() and not killed.exists()


def started(server: PostgresServer) -> int:
    """Its segment."""
    server.create()
    server.start()
    return int((server.data / "postmaster.pid").read_text().split("\n")[6].split()[1])


def known() -> set[int]:
    """The segments that the kernel has."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {int(re.split(r"\s+", line.strip())[1]) for line in lines}
