"""Bytes on the wire when a share of the transactions concerns no published table.

    python -m benchmarks.empty_transactions [--transactions 1000] [--json]

Since PostgreSQL 15 an empty transaction is not sent: its BEGIN and COMMIT are saved. Where commits
wait for the receiver, a keepalive takes their place. Every transaction inserts one row; the
receiver is the bridge's own connection class and answers as the bridge does; a relay in between
counts. `unskipped` is what the changes, BEGIN and COMMIT of the empty transactions as well, and the
keepalives of a run without empty ones would have been.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from psycopg.conninfo import make_conninfo

from benchmarks.bridge import Connection, Figures, connect, report, wait_until
from benchmarks.wire import Relay, Traffic
from schemas.lsn import parse_lsn
from services.bridge.source.replication_connection import (
    Keepalive,
    ReplicationConnection,
    walsender_name,
)
from services.testbed.bed import Bed
from services.testbed.pair import set_parameter

SLOT = "empty"
SHARES = (0, 25, 50, 75, 100)
EMPTY_BYTES = 2 * (5 + 25) + 21 + 26
"""CopyData and XLogData headers twice, Begin, Commit."""


class Receiver(threading.Thread):
    """Reads until `stop`, confirming everything that it was sent at once."""

    def __init__(self, conninfo: str) -> None:
        super().__init__(daemon=True)
        self._connection = ReplicationConnection(
            conninfo, SLOT, wal_sender_timeout_ms=60_000, sql_deadline_ms=20_000
        )
        self.confirmed = 0
        self.stop = threading.Event()

    def run(self) -> None:
        """The thread."""
        self._connection.start(0, "bench", streaming=False, origin="any", two_phase=False)
        while not self.stop.is_set():
            self._connection.wait(0.2)
            reached = self.confirmed
            for item in self._connection.read():
                if isinstance(item, Keepalive):
                    reached = max(reached, item.wal_end)
                    continue
                payloads = (item[index][1] for index in range(len(item)))
                ends = (int.from_bytes(data[10:18]) for data in payloads if data[:1] == b"C")
                reached = max(reached, *ends, 0)
            if reached > self.confirmed:
                self.confirmed = reached
                self._connection.feedback(reached, reached)
        self._connection.close()


def measure(bed: Bed, *, transactions: int) -> list[Figures]:
    """One line for each mode and share."""
    with connect(bed) as connection:
        connection.execute("CREATE TABLE published (id int)")
        connection.execute("CREATE TABLE other (id int)")
        connection.execute("CREATE PUBLICATION bench FOR TABLE published")
        lines = []
        kept = 0
        for waits in (False, True):
            names = walsender_name(SLOT) if waits else ""
            set_parameter(bed.primary, "synchronous_standby_names", names)
            for share in SHARES:
                traffic, seconds = _run(bed, connection, transactions, share, waits=waits)
                kept = kept if share else traffic.keepalive_bytes
                lines.append(_line(traffic, kept, seconds, transactions, share, waits=waits))
        set_parameter(bed.primary, "synchronous_standby_names", "")
    return lines


def _run(
    bed: Bed, connection: Connection, transactions: int, share: int, *, waits: bool
) -> tuple[Traffic, float]:
    with _receiving(bed, connection, waits=waits) as (relay, receiver):
        connection.execute("INSERT INTO published VALUES (0)")  # the relation is described here
        _caught_up(connection, receiver)
        before = relay.traffic
        since = time.monotonic()
        for number in range(transactions):
            table = "other" if _is_empty(number, share) else "published"
            connection.execute(f"INSERT INTO {table} VALUES (1)".encode())
        seconds = time.monotonic() - since
        _caught_up(connection, receiver)
        return Traffic(
            *(now - then for now, then in zip(relay.traffic, before, strict=True))
        ), seconds


def _is_empty(number: int, share: int) -> bool:
    """Whether transaction `number` is one of the `share` per cent, evenly spread."""
    return number * share % 100 + share >= 100


@contextlib.contextmanager
def _receiving(
    bed: Bed, connection: Connection, *, waits: bool
) -> Iterator[tuple[Relay, Receiver]]:
    connection.execute("SET synchronous_commit = local")
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])
    with Relay(bed.primary.port) as relay:
        conninfo = make_conninfo(
            bed.primary.conninfo(bed.dbname), port=relay.port, sslmode="disable"
        )
        receiver = Receiver(conninfo)
        receiver.start()
        state = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s"
        wanted = ("sync" if waits else "async",)
        wait_until(
            lambda: connection.execute(state, [walsender_name(SLOT)]).fetchone() == wanted,
            what=f"the receiver is {wanted[0]}",
        )
        connection.execute("RESET synchronous_commit")
        yield relay, receiver
        receiver.stop.set()
        receiver.join(timeout=30)
    active = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
    wait_until(
        lambda: connection.execute(active, [SLOT]).fetchone() is None, what="the slot is free"
    )
    connection.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])


def _caught_up(connection: Connection, receiver: Receiver) -> None:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    lsn = parse_lsn(row[0])
    wait_until(lambda: receiver.confirmed >= lsn, what="the receiver has caught up")


def _line(
    traffic: Traffic, kept: int, seconds: float, transactions: int, share: int, *, waits: bool
) -> Figures:
    empty = sum(_is_empty(number, share) for number in range(transactions))
    sent = traffic.message_bytes + traffic.keepalive_bytes
    unskipped = traffic.message_bytes + empty * EMPTY_BYTES + kept
    return {
        "commits": "wait" if waits else "don't wait",
        "empty %": share,
        "changes": traffic.messages,
        "change bytes": traffic.message_bytes,
        "pgoutput bytes": traffic.payload_bytes,
        "keepalives": traffic.keepalives,
        "keepalive bytes": traffic.keepalive_bytes,
        "total bytes": sent,
        "unskipped": unskipped,
        "saved %": round(100 - 100 * sent / unskipped, 1),
        "ms per commit": round(1000 * seconds / transactions, 2),
    }


def main(
    transactions: Annotated[int, typer.Option(min=4)] = 1000,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), lazy=True, synchronous=False) as bed:
            bed.start("pair")
            lines = measure(bed, transactions=transactions)
    report(lines, as_json=json)


if __name__ == "__main__":
    typer.run(main)
