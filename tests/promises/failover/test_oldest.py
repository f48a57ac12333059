"""A failover on the oldest PostgreSQL that is supported, as the roles of sql/.

All tests of this folder run on another version with SLOTBRIDGE_POSTGRES, see CONTRIBUTING.md.
"""

from pathlib import Path

from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    write,
)
from tests.providers.interface import Provider


def test_check_and_failover_on_the_oldest_postgresql(oldest_pair: Provider, tmp_path: Path) -> None:
    with oldest_pair.new_trio(synchronous=True, settings={}) as trio:
        assert ask(trio.primary, "SHOW server_version_num") < "180000"
        subscribe(trio, "s1")
        config = configuration(tmp_path, trio, as_roles=True)
        write(trio.primary, trio.dbname, 1)
        await_equal(trio, trio.primary)
        checked = slotfailover("check", "--config", config)
        assert checked.code == 0, checked.out
        trio.primary.kill()
        ran = slotfailover("failover", "--config", config, "--yes")
        assert ran.code == 0, ran.err
        write(trio.standby, trio.dbname, 101)
        await_equal(trio, trio.standby)
