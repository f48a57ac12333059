"""Whether the catalog shows the objects that a decoded transaction created.

A commit is decoded as soon as its record may be sent, which can be before other sessions see it:
its backend waits for synchronous standbys in between (PostgreSQL source, xact.c:
RecordTransactionCommit, then ProcArrayEndTransaction).
"""

import time
from typing import Final

from services.postgres.rows import one_row
from services.postgres.server import Connection
from services.waiter import Waiter

_XIDS: Final = 2**32
_INTERVAL_S: Final = 0.01


def await_visible(connection: Connection, xid: int, waiter: Waiter, *, deadline_s: float) -> bool:
    """Wait until new snapshots see the commit of `xid`, a top-level xid without epoch.

    False when they do not after `deadline_s`.
    """
    deadline = time.monotonic() + deadline_s
    while not seen_in(_snapshot(connection), xid):
        if time.monotonic() > deadline:
            return False
        waiter.pause(_INTERVAL_S)
    return True


def seen_in(snapshot: str, xid: int) -> bool:
    """Tell whether a committed `xid` is visible in `snapshot` (`xmin:xmax:xip,…`, with epochs).

    Source: PostgreSQL documentation, "Transaction ID and Snapshot Information Functions".
    """
    _, xmax, running = snapshot.split(":")
    following = int(xmax) % _XIDS
    ahead = (xid - following) % _XIDS < _XIDS // 2
    return not ahead and xid not in {int(other) % _XIDS for other in running.split(",") if other}


def _snapshot(connection: Connection) -> str:
    row = one_row(connection.execute("SELECT pg_current_snapshot()::text"))
    return str(row[0])
