"""`slotfailover switchover` on real servers."""

from pathlib import Path

from services.local.bed import Bed
from tests.failover.conftest import NewTrio, machines
from tests.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    write,
)


def test_there_and_back_again(local_trio: NewTrio, local_bed: Bed, tmp_path: Path) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    write(trio.primary, trio.dbname, 1)
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), synchronous_standbys=1
    )
    shown = slotfailover("switchover", "--config", config, "--dry-run")
    assert shown.code == 0
    for new, first in ((trio.standby, 101), (trio.primary, 201), (trio.standby, 301)):
        ran = slotfailover("switchover", "--config", config, "--yes")
        assert ran.code == 0, ran.err
        write(new, trio.dbname, first)
        await_equal(trio, new)
        ready = slotfailover("check", "--config", config)
        assert ready.code == 0, ready.out
    assert ask(trio.primary, "SELECT pg_is_in_recovery()")
