"""The replication socket: COPY BOTH through libpq, one thread, no decoding.

    server -> 'w' start:u64 wal_end:u64 time:i64 payload      XLogData
              'k' wal_end:u64 time:i64 reply:u8               keepalive
    client -> 'r' write:u64 flush:u64 apply:u64 time:i64 reply:u8

Source: PostgreSQL documentation 54.4 "Streaming Replication Protocol".
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import pq

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.lsn import format_lsn, parse_lsn
from schemas.timelines import switch_points
from services.bridge import compiled
from services.bridge.compiled import Messages, new_messages
from services.bridge.pgoutput.decoder import POSTGRES_EPOCH_US
from services.bridge.source.libpq import GET_COPY_DATA, address
from services.bridge.source.readiness import wait_readable, wait_writable
from services.bridge.source.receive_batching import Gathering
from services.bridge.source.server_errors import READ_THE_STREAM, connect_error, server_error
from services.postgres.sessions import STREAM, open_session
from services.waiter import Waiter

_U64 = struct.Struct("!Q")
_KEEPALIVE = struct.Struct("!QqB")
_STATUS = struct.Struct("!cQQQqB")
_W, _K = b"w"[0], b"k"[0]
_XLOG_HEADER_BYTES: Final = 25
_FAILED: Final = -2
"""PQgetCopyData's word for an error; psycopg raises it."""
FEEDBACK_DEADLINE_S: Final = 10.0
_LOOK_S: Final = 0.2
READS_MAX: Final = 16
READ_BYTES: Final = 2**18
"""Limits of one read: how many reads of the socket, and about how many bytes."""


@contextlib.contextmanager
def cut_off_after(seconds: float, descriptor: int) -> Iterator[None]:
    """Shut the socket `descriptor` down when the block takes longer than `seconds`.

    A frozen server whose kernel still acknowledges holds a blocking call for ever otherwise: the
    server's own time-outs don't run, and TCP's see a live peer.
    """
    # A descriptor of our own, so that a late timer can't meet another socket of the same number.
    own = socket.socket(fileno=os.dup(descriptor))
    timer = threading.Timer(seconds, _shut_down, [own])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        own.close()


def _shut_down(own: socket.socket) -> None:
    with contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)


def walsender_name(slot: str) -> str:
    """Return the application_name of the walsender, for synchronous_standby_names."""
    return f"slotbridge_{slot}"


class Keepalive(NamedTuple):
    """The server has sent everything before `wal_end`; `reply`: it requests a status update."""

    wal_end: int
    reply: bool


class ReplicationConnection:
    """A walsender session for one logical slot. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        conninfo: str,
        slot: str,
        *,
        wal_sender_timeout_ms: int,
        sql_deadline_ms: int,
        name: str = "",
    ) -> None:
        """Connect to the walsender; `name`: an application_name other than the slot's."""
        self._slot = slot
        self._messages = new_messages()
        self._gathering: Gathering | None = None
        self.behind = False
        """Whether the last `read` says that the server has more to send."""
        self._deadline_s = sql_deadline_ms / 1000
        try:
            self._session = open_session(
                STREAM,
                conninfo,
                {"wal_sender_timeout": f"{wal_sender_timeout_ms}ms"},
                application=name or walsender_name(slot),
            )
        except psycopg.Error as error:
            raise connect_error(error, slot) from error
        self._conn = self._session.pgconn
        self._conn.nonblocking = 0

    def close(self) -> None:
        """End the session; the slot is free as soon as the server notices."""
        self._end_gathering()
        self._session.close()

    def identify(self) -> tuple[str, int]:
        """Return (system_identifier, timeline), by IDENTIFY_SYSTEM."""
        result = self._execute("IDENTIFY_SYSTEM")
        return _text(result, 0, 0), int(_text(result, 0, 1))

    def switch_points(self, timeline: int) -> dict[int, int]:
        """Return timeline -> LSN at which it was left, for all ancestors of `timeline`."""
        if timeline == 1:
            return {}
        content = self._execute(f"TIMELINE_HISTORY {timeline}").get_value(0, 1) or b""
        return switch_points(content.decode("utf-8", "replace"))

    def create_slot(
        self, waiter: Waiter, *, two_phase: bool, export: bool, deadline_s: float
    ) -> tuple[int, str]:
        """Make the failover slot; return the LSN where it begins, and a database snapshot's name.

        `export`: make one, else "". It has exactly what was committed before that LSN, and can be
        imported until the next command, or the end, of this connection. Very many subtransactions
        make it fail. Waits until all transactions of this moment have ended. Given up at the
        deadline, or when the waiter's work raises: the server makes no slot then.
        Sources: protocol-replication, CREATE_REPLICATION_SLOT; SnapBuildInitialSnapshot.
        """
        made = "export" if export else "nothing"
        options = f"SNAPSHOT '{made}', FAILOVER{', TWO_PHASE' if two_phase else ''}"
        command = f"CREATE_REPLICATION_SLOT {self._slot} LOGICAL pgoutput ({options})"
        until = time.monotonic() + deadline_s
        try:
            self._conn.send_query(command.encode())
            while self._conn.is_busy():
                self._require_before(until)
                waiter.turn()
                wait_readable([self._conn.socket], _LOOK_S)
                self._conn.consume_input()
            result = self._conn.get_result()
        except psycopg.Error as error:
            raise self._lost(str(error)) from error
        except BaseException:
            self._cancel()
            raise
        self._require(result, pq.ExecStatus.TUPLES_OK, command)
        return parse_lsn(_text(result, 0, 1)), _text(result, 0, 2)

    def drop_slot(self) -> None:
        """Drop the slot, which nothing streams from."""
        self._execute(f"DROP_REPLICATION_SLOT {self._slot}", pq.ExecStatus.COMMAND_OK)

    def make_failover_slot(self) -> None:
        """Turn the slot's failover property on (PostgreSQL 17)."""
        command = f"ALTER_REPLICATION_SLOT {self._slot} (FAILOVER true)"
        self._execute(command, pq.ExecStatus.COMMAND_OK)

    def read_wal(self, start: int, stop: int, timeline: int) -> bytes:
        """Return the WAL of `timeline` from `start` on, up to `stop` or farther.

        It must be flushed up to there. Of an ancestor of the server's timeline, `stop` is not
        beyond the point where the server left it.

        As for a physical standby, for which a connection with a `name` of its own is not taken.
        Then nothing else: after it, a walsender ends logical streaming at once (18.6: its
        StartLogicalReplication does not clear streamingDoneSending).
        Raise SlotbridgeError where the server has it no longer, or lets us not.
        """
        command, wal = f"START_REPLICATION PHYSICAL {format_lsn(start)} TIMELINE {timeline}", b""
        self._execute(command, pq.ExecStatus.COPY_BOTH)
        with cut_off_after(self._deadline_s, self._conn.socket):
            try:
                while len(wal) < stop - start:
                    length, raw = self._conn.get_copy_data(0)
                    if length < 0:
                        break
                    data = bytes(raw)
                    wal += data[_XLOG_HEADER_BYTES:] if data[0] == _W else b""
                else:
                    self._conn.put_copy_end()
                    while self._conn.get_copy_data(0)[0] > 0:
                        pass
                failed = self._results()
            except psycopg.Error as error:
                raise self._lost(str(error)) from error
        if failed:
            raise server_error(failed[0], failed[1], "read WAL", f"slot {self._slot}")
        return wal

    def _results(self) -> tuple[str, str] | None:
        """Take the results of a command to the last one; SQLSTATE and message of a failure."""
        failed = None
        while (result := self._conn.get_result()) is not None:
            if result.status == pq.ExecStatus.COPY_IN:  # the server has ended its side first
                self._conn.put_copy_end()
            if result.status == pq.ExecStatus.FATAL_ERROR:
                state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
                message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
                failed = (state, message or self._error())
        return failed

    def start(
        self, lsn: int, publication: str, *, streaming: bool, origin: str, two_phase: bool
    ) -> None:
        """Start to stream from `lsn`. Raise Retryable (SLOT_IN_USE) while another has the slot.

        `two_phase` makes the slot decode at PREPARE for good, from `lsn` on, where it did not.
        """
        name = publication.replace('"', '""').replace("'", "''")
        self._execute(
            f"START_REPLICATION SLOT {self._slot} LOGICAL {format_lsn(lsn)} "
            f"(proto_version '4', publication_names '\"{name}\"', messages 'true', "
            f"streaming '{'on' if streaming else 'off'}', origin '{origin}'"
            + (", two_phase 'on')" if two_phase else ")"),
            pq.ExecStatus.COPY_BOTH,
        )
        self._conn.nonblocking = 1
        self._gathering = Gathering(self._conn.socket, time.monotonic())

    def wait(self, timeout_s: float, *others: int) -> None:
        """Return when something can be read, also of the descriptors `others`, or at time-out."""
        if self._gathering is not None:
            timeout_s = min(timeout_s, self._gathering.wait_max_s)
        wait_readable([self._conn.socket, *others], timeout_s)

    def read(self) -> Iterator[Messages | Keepalive]:
        """Yield messages that have arrived, up to about READ_BYTES or READS_MAX reads.

        Raise Retryable when the server has gone. The container of the messages is reused by the
        next call. libpq takes little from the socket at once, so it is asked several times.
        """
        messages = self._messages
        messages.clear()
        count, room_bytes = 0, READ_BYTES
        for _ in range(READS_MAX):
            self._receive()
            length, data, size = self._gather(messages)
            while length > 0:
                if data[0] == _K:
                    if messages:
                        count += len(messages)
                        yield messages
                        messages.clear()
                    wal_end, _time, reply = _KEEPALIVE.unpack_from(data, 1)
                    yield Keepalive(wal_end, bool(reply))
                length, data, more = self._gather(messages)
                size += more
            room_bytes -= size
            if length < 0 or not size or room_bytes < 0:
                break
        self._reckon(count + len(messages), READ_BYTES - room_bytes)
        if messages:
            yield messages
        if length < 0:
            raise self._ended()

    def _reckon(self, messages: int, size: int) -> None:
        if self._gathering is not None:
            self._gathering.read(size, time.monotonic())
            self.behind = self._gathering.behind(messages, size)

    def _receive(self) -> None:
        try:
            self._conn.consume_input()
        except psycopg.Error as error:
            raise self._lost(str(error)) from error

    def _gather(self, messages: Messages) -> tuple[int, bytes, int]:
        """Append the messages that have arrived to `messages`, in C if built. Raise Retryable."""
        connection = address(self._conn)
        if compiled.engine is not None and GET_COPY_DATA and connection:
            found: tuple[int, bytes, int] = compiled.engine.messages.gather(
                GET_COPY_DATA, connection, messages
            )
            if found[0] == _FAILED:
                raise self._lost(self._error())
            return found
        try:
            return _gather(self._conn.get_copy_data, messages)
        except psycopg.Error as error:
            raise self._lost(str(error)) from error

    def feedback(self, write_lsn: int, flush_lsn: int, *, ask: bool = False) -> None:
        """Send a status update; `ask` for a keepalive. Raise Retryable if the stream has ended."""
        now = time.time_ns() // 1000 - POSTGRES_EPOCH_US
        status = _STATUS.pack(b"r", write_lsn, flush_lsn, flush_lsn, now, ask)
        deadline = time.monotonic() + FEEDBACK_DEADLINE_S
        try:
            self._conn.put_copy_data(status)
            while self._conn.flush() and time.monotonic() < deadline:
                wait_writable(self._conn.socket, 1.0)
        except psycopg.Error as error:
            raise self._lost(str(error)) from error
        if time.monotonic() >= deadline:
            raise self._lost("the server does not accept status updates")

    def _execute(self, command: str, expected: pq.ExecStatus = pq.ExecStatus.TUPLES_OK) -> Any:
        with cut_off_after(self._deadline_s, self._conn.socket):
            result = self._conn.exec_(command.encode())
        self._require(result, expected, command)
        return result

    def _require(self, result: Any, expected: pq.ExecStatus, command: str) -> None:
        if result is None or result.status != expected:
            field = pq.DiagnosticField
            state, message = (
                ((result and result.error_field(one)) or b"").decode()
                for one in (field.SQLSTATE, field.MESSAGE_PRIMARY)
            )
            raise server_error(
                state, message or self._error(), f"run {command.split()[0]}", f"slot {self._slot}"
            )

    def _require_before(self, until: float) -> None:
        if time.monotonic() > until:
            raise Retryable(
                "the new slot waits for open transactions, which did not end in time",
                operation="make the slot",
                subject=f"slot {self._slot}",
                hint="end them (pg_stat_activity, pg_prepared_xacts), then run the command again",
                exit_code=ExitCode.SERVER_UNREACHABLE,
            )

    def _cancel(self) -> None:
        """Ask the server to give the command up, which it would not while it waits for others."""
        with contextlib.suppress(psycopg.Error):
            self._conn.get_cancel().cancel()

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    def _ended(self) -> SlotbridgeError:
        """Return the error with which the server ended the stream."""
        self._end_gathering()
        result = self._conn.get_result()
        if result is None or not result.error_message:
            return self._lost("the server ended the stream")
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
        return server_error(state, message or self._error(), READ_THE_STREAM, f"slot {self._slot}")

    def _lost(self, reason: str) -> Retryable:
        return Retryable(
            f"the connection is lost: {' '.join(reason.split())}",
            operation="stream",
            subject=f"slot {self._slot}",
            hint="nothing to do: the bridge reconnects",
        )

    def _error(self) -> str:
        return " ".join(self._conn.get_error_message().split())


def _gather(get: Callable[[int], tuple[int, Any]], messages: Messages) -> tuple[int, bytes, int]:
    """Append XLogData; return length and bytes of the first other message (0 or -1: no more).

    And the bytes of what was appended. As services.bridge.compiled.messages.gather.
    """
    size = 0
    while True:
        length, raw = get(1)
        if length <= 0:
            return length, b"", size
        data = bytes(raw)
        if data[0] != _W:
            return length, data, size
        size += length
        messages.append((_U64.unpack_from(data, 1)[0], data[_XLOG_HEADER_BYTES:]))


def _text(result: Any, row: int, column: int) -> str:
    return (result.get_value(row, column) or b"").decode()
