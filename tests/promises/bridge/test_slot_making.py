"""How the bridge's slot is made."""

import contextlib
import os

import psycopg
import pytest

from schemas.errors import SlotbridgeError
from services.bridge.source.replication_connection import ReplicationConnection
from services.waiter import Waiter
from tests.providers.interface import Provider
from tests.providers.waiting import patient, patient_ms

SAVEPOINTS = (
    "DO $$ BEGIN FOR n IN 1 .. 2000 LOOP"
    " BEGIN INSERT INTO t VALUES (n); EXCEPTION WHEN OTHERS THEN END;"
    " END LOOP; END $$"
)


@pytest.mark.long
@pytest.mark.parametrize("export", [True, False])
def test_many_savepoints_refuse_a_database_snapshot_and_no_slot(
    export: bool, pair: Provider, fresh_database: str
) -> None:
    """The server can't export more open subtransactions than it has processes."""
    conninfo, slot = pair.primary.conninfo(fresh_database), f"s_{os.urandom(4).hex()}"
    replication = ReplicationConnection(
        *(conninfo, slot),
        wal_sender_timeout_ms=patient_ms(20_000),
        sql_deadline_ms=patient_ms(20_000),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(replication.close)
        first, second, many, last, asking = (
            stack.enter_context(psycopg.connect(conninfo)) for _ in range(5)
        )
        asking.autocommit = last.autocommit = True
        asking.execute("CREATE TABLE t (n int)")
        xids = [_xid(first)]

        def go_on() -> None:
            """Let the slot's two waits end, with a transaction of many savepoints in between."""
            waits = "SELECT FROM pg_locks WHERE NOT granted AND transactionid::text = %s"
            if asking.execute(waits, [str(xids[-1] % 2**32)]).fetchone() is None:
                return
            if len(xids) == 1:
                xids.append(_xid(second))
                first.commit()
            else:
                many.execute(SAVEPOINTS)
                last.execute("INSERT INTO t VALUES (0)")
                second.commit()

        def make() -> None:
            replication.create_slot(
                Waiter(go_on), two_phase=False, export=export, deadline_s=patient(20)
            )

        if export:
            with pytest.raises(SlotbridgeError, match="initial slot snapshot too large"):
                make()
        else:
            make()
            replication.drop_slot()


def _xid(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
    assert row is not None
    return int(row[0])
