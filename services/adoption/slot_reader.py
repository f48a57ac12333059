"""Reads a slot from its confirmed position to another one, without confirming anything.

While it reads nobody else can stream from the slot.
"""

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.settings import BridgeSettings, SourceSettings
from services.adoption.last_records import OPERATION, Transaction
from services.bridge.pgoutput.decoder import POSTGRES_EPOCH_US
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import Keepalive, ReplicationConnection

_LOG_EVERY_S: Final = 1.0
_SILENCE_S: Final = 120.0
_FREED_S: Final = 10.0
_LOOK_S: Final = 0.1
_BEGIN: Final = struct.Struct("!cQqI")
_COMMIT: Final = struct.Struct("!cBQQ")
_MESSAGE: Final = struct.Struct("!cBQ")


class SlotReader:
    """Reads the slot as often as it is asked to."""

    def __init__(self, primary: Primary, source: SourceSettings, bridge: BridgeSettings) -> None:
        self._primary = primary
        self._source = source
        self._bridge = bridge

    def messages(self, start_lsn: int, until_lsn: int) -> Iterator[tuple[int, bytes]]:
        """Yield pgoutput's messages with their LSN, of all that commits in [start, until).

        Raise Retryable where something else has the slot, or the server does not get that far.
        """
        with contextlib.closing(self._connect(partial(self._start, start_lsn))) as connection:
            logged_s = 0.0
            heard, reached = time.monotonic(), 0
            while True:
                now = time.monotonic()
                if now - logged_s > _LOG_EVERY_S:
                    logged_s = now
                    connection.feedback(start_lsn, start_lsn, ask=True)
                connection.wait(0.2)
                for received in connection.read():
                    if isinstance(received, Keepalive):
                        if received.wal_end >= until_lsn:
                            return
                        if received.wal_end > reached:
                            heard, reached = time.monotonic(), received.wal_end
                        continue
                    heard = time.monotonic()
                    for index in range(len(received)):
                        lsn, payload = received[index]
                        if _begins_at(payload) >= until_lsn:
                            return
                        yield lsn, payload
                if time.monotonic() - heard > _SILENCE_S:
                    raise Retryable(
                        f"the server has sent nothing for {_SILENCE_S:.0f} s",
                        operation=OPERATION,
                        subject=f"slot {self._source.slot}",
                        lsn=reached,
                        hint="start the standbys that synchronized_standby_slots names; run this "
                        "again",
                        exit_code=ExitCode.SERVER_UNREACHABLE,
                    )

    def make_failover_slot(self) -> None:
        """Turn the slot's failover property on. Raise as `messages`."""
        self._connect(ReplicationConnection.make_failover_slot).close()

    def _start(self, start_lsn: int, connection: ReplicationConnection) -> None:
        connection.start(
            start_lsn,
            self._source.publication,
            streaming=False,
            origin=self._source.origin,
            two_phase=False,
        )

    def _connect(self, use: Callable[[ReplicationConnection], None]) -> ReplicationConnection:
        """Return a connection on which `use` has succeeded.

        The server frees a slot a moment after the connection that had it was closed.
        """
        until = time.monotonic() + _FREED_S
        while True:
            connection = ReplicationConnection(
                self._primary.conninfo,
                self._source.slot,
                wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
                sql_deadline_ms=self._bridge.sql_deadline_ms,
            )
            try:
                use(connection)
            except SlotbridgeError as error:
                connection.close()
                if error.exit_code is not ExitCode.SLOT_IN_USE or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)
            else:
                return connection

    def transactions(
        self, start_lsn: int, until_lsn: int
    ) -> tuple[dict[int, Transaction], dict[int, int]]:
        """Return the transactions by xid, and LSN of each logical message -> its end."""
        found: dict[int, Transaction] = {}
        messages: dict[int, int] = {}
        inside: list[int] = []
        commit_lsn = time_us = xid = 0
        for _, payload in self.messages(start_lsn, until_lsn):
            kind = payload[:1]
            if kind == b"B":
                _, commit_lsn, time_us, xid = _BEGIN.unpack_from(payload)
                inside.clear()
            elif kind == b"C":
                _, _, _, end_lsn = _COMMIT.unpack_from(payload)
                found[xid] = Transaction(xid, commit_lsn, end_lsn, time_us + POSTGRES_EPOCH_US)
                messages |= dict.fromkeys(inside, end_lsn)
            elif kind == b"M":
                _, transactional, lsn = _MESSAGE.unpack_from(payload)
                if transactional & 1:
                    inside.append(lsn)
                else:
                    messages[lsn] = lsn
        return found, messages


def _begins_at(payload: bytes) -> int:
    """Return where a message's transaction commits, if it tells; else 0."""
    if payload[:1] == b"B":
        return int(_BEGIN.unpack_from(payload)[1])
    if payload[:1] == b"M":
        _, transactional, lsn = _MESSAGE.unpack_from(payload)
        return 0 if transactional & 1 else int(lsn) - 1  # a commit may begin where it ends
    return 0
