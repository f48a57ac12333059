"""A second standby, for tests with three nodes."""

import contextlib
from collections.abc import Iterator

from services.testbed.bed import Bed
from services.testbed.pair import clone
from services.testbed.postgres import PostgresServer
from tests.promises.failover.servers import tell
from tests.providers.interface import Trio
from tests.providers.slots import await_ready


@contextlib.contextmanager
def third_standby(trio: Trio, bed: Bed) -> Iterator[PostgresServer]:
    """A second standby, c, by the slot standby_2, with its slots ready."""
    third = bed.server(f"third-{trio.primary.name}")
    tell(trio.primary, "SELECT pg_create_physical_replication_slot('standby_2', true)")
    assert isinstance(trio.primary, PostgresServer)
    clone(trio.primary, third, slot="standby_2", dbname=trio.dbname)
    third.start()
    try:
        named = "ALTER SYSTEM SET synchronized_standby_slots = 'standby_1', 'standby_2'"
        await_ready(trio.primary, third, "s1")
        tell(trio.primary, named, "SELECT pg_reload_conf()")
        yield third
    finally:
        third.discard()
