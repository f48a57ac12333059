"""Slot synchronization without its naps: a slot is ready on the standby in well under a second."""

from services.testbed.pair import hasten_slot_sync
from tests.providers.databases import Connection, connect
from tests.providers.interface import Server
from tests.providers.waiting import eventually


def is_ready(standby: Connection, slot: str) -> bool:
    """True when `slot` would survive the promotion of the standby."""
    query = """
        SELECT synced AND NOT temporary AND invalidation_reason IS NULL
          FROM pg_replication_slots WHERE slot_name = %s
    """
    row = standby.execute(query, [slot]).fetchone()
    return row is not None and bool(row[0])


def await_ready(primary: Server, standby: Server, slot: str, *, timeout_s: float = 60.0) -> None:
    """Wait until `slot`, which its own consumer advances, is ready on the standby."""
    with connect(standby) as connection:

        def ready() -> bool:
            hasten_slot_sync(primary.conninfo(), standby.conninfo())
            return is_ready(connection, slot)

        eventually(
            ready, what=f"slot {slot} is ready on the standby", timeout_s=timeout_s, interval_s=0.1
        )


def advance_until_ready(primary: Server, standby: Server, dbname: str, slot: str) -> None:
    """Advance `slot`, which has no consumer, until it is ready on the standby."""
    with connect(primary, dbname) as writer, connect(standby) as reader:

        def ready() -> bool:
            writer.execute("SELECT pg_logical_emit_message(true, 'test', 'x')")
            hasten_slot_sync(primary.conninfo(), standby.conninfo())
            writer.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [slot])
            return is_ready(reader, slot)

        eventually(ready, what=f"slot {slot} is ready on the standby", timeout_s=60, interval_s=0.1)
