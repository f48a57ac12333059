"""Connections to servers that may be dead: every question has a deadline, every failure a kind.

A link keeps its connection between questions. A server that did not answer in time is not asked
again for a while, so that one dead server does not make every observation wait.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from schemas.errors import ExitCode, Retryable, SettingsError, SetupError
from services.failover.model.conninfo import Conninfo
from services.failover.model.view import Reach
from services.failover.observe.lock_holders import Holder, LockHolders
from services.postgres.conninfo import resolved
from services.postgres.server import Connection
from services.postgres.sessions import FAILOVER, Session, open_session

Answer = TypeVar("Answer")
_SILENT_S = 10.0
_SOCKET_FOLDERS = ("/var/run/postgresql", "/tmp")  # noqa: S108 - where libpq looks by default
_DOWN = (errno.ECONNREFUSED, errno.ENOENT)
"""Errors that mean nothing listens. A reset is not one: something took the connection first."""
LOCK_SHARE = 0.9
"""The part of a statement's time after which it waits for no lock any more: so the server tells
that it was a lock, before it ends the statement."""


class Unreachable(Exception):
    """The server gave no answer; `reach` is the kind, the text the reason in one line."""

    def __init__(self, reach: Reach, detail: str) -> None:
        super().__init__(detail)
        self.reach = reach
        self.detail = detail


class ServerLink:
    """One server by its conninfo. Not thread-safe: one question at a time."""

    def __init__(
        self,
        name: str,
        conninfo: str,
        *,
        connect_timeout_s: int,
        deadline_s: float,
        pooler_may_answer: bool = False,
    ) -> None:
        self.name = name
        self.conninfo = parse_conninfo(conninfo, subject=name)
        self._connect_timeout_s = connect_timeout_s
        self._deadline_s = deadline_s
        self._connection: Session | None = None
        self._silent: tuple[float, Unreachable] | None = None
        self._pooler_may_answer = pooler_may_answer

    def ask(self, question: Callable[[Connection], Answer]) -> Answer:
        """Return the answer to `question`, a function of an autocommit connection that only reads.

        The question has as long as a connection has to be made, so that a server that hangs is soon
        known. Raise Unreachable; SetupError (PRIVILEGE_MISSING, SERVER_SETTING).
        """
        return self._answer(question, float(self._connect_timeout_s))

    def order(self, change: Callable[[Connection], Answer]) -> Answer:
        """Run `change`, a function that changes something, until the step's deadline.

        It may be run twice, if the connection was lost. Raise as `ask` does, and Retryable
        (DEADLINE) when a statement took too long on a server that is up.
        """
        return self._answer(change, self._deadline_s)

    def order_under_lock(self, change: Callable[[Connection], Answer]) -> Answer:
        """Run `change` as `order` does, one that may wait for a lock of other sessions.

        A refusal names who holds that lock, where this can be seen.
        """

        def watched(connection: Connection) -> Answer:
            with LockHolders(self._open, connection.info.backend_pid) as holders:
                begun = time.monotonic()
                try:
                    return change(connection)
                except psycopg.errors.LockNotAvailable as error:
                    raise self._held_up(time.monotonic() - begun, holders.last) from error

        return self.order(watched)

    def ask_anew(self) -> None:
        """Ask the server again, even if it was silent a moment ago."""
        self._silent = None

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
        self._connection = None

    def _answer(self, question: Callable[[Connection], Answer], deadline_s: float) -> Answer:
        """Ask by the kept connection, by a new one if that was lost. Raise Unreachable."""
        if self._silent is not None and time.monotonic() < self._silent[0]:
            raise self._silent[1]
        kept = self._connection is not None
        try:
            return self._ask_once(question, deadline_s)
        except Unreachable:
            if not kept:
                raise
        return self._ask_once(question, deadline_s)  # the kept one was lost: what says a new one?

    def _ask_once(self, question: Callable[[Connection], Answer], deadline_s: float) -> Answer:
        """Ask by one connection; translate psycopg's errors. Raise Unreachable where it breaks."""
        begun = time.monotonic()
        try:
            connection = self._connection or self._connect()
            connection.deadline_s, begun = deadline_s, time.monotonic()
            return question(connection)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                _first_line(error),
                operation=f"ask {self.name}",
                subject=self.name,
                hint="connect as a superuser (docs/start/set-up.md lists the privileges)",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            ) from error
        except psycopg.errors.LockNotAvailable as error:
            raise self._held_up(time.monotonic() - begun, None) from error
        except psycopg.errors.QueryCanceled as error:
            raise Retryable(
                f"a statement did not end within {self._deadline_s:.0f} s",
                operation=f"ask {self.name}",
                subject=self.name,
                hint="see pg_stat_activity and pg_locks on that server, then run this command "
                "again",
                exit_code=ExitCode.DEADLINE,
            ) from error
        except UnicodeDecodeError as error:
            raise SetupError(
                "a name or text on the server is not in UTF-8",
                operation=f"ask {self.name}",
                subject=self.name,
                hint="rename the database, slot, role or subscription whose name is not in UTF-8",
            ) from error
        except psycopg.Error as error:
            if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                raise SetupError(
                    _first_line(error), operation=f"ask {self.name}", subject=self.name
                ) from error
            self.close()
            raise Unreachable(Reach.SILENT, _first_line(error)) from error

    def _held_up(self, waited_s: float, holder: Holder | None) -> Retryable:
        """Return the error of a lock that was not granted, with who holds it and what to do."""
        who = f"held by {holder}" if holder is not None else "who holds it was not seen"
        remedy = holder.remedy if holder is not None else f"see pg_locks on {self.name}"
        return Retryable(
            f"a lock was not granted within {waited_s:.0f} s: {who}",
            operation=f"change {self.name}",
            subject=self.name,
            hint=remedy,
            exit_code=ExitCode.DEADLINE,
        )

    def _open(self) -> Session:
        """Open a session whose statements and locks are bounded by the deadline."""
        milliseconds = int(self._deadline_s * 1000)
        bounds = {
            "statement_timeout": f"{milliseconds}ms",
            "lock_timeout": f"{int(milliseconds * LOCK_SHARE)}ms",
        }
        opened = open_session(
            FAILOVER,
            self.conninfo.text,
            bounds,
            connect_timeout=self._connect_timeout_s,
        )
        opened.deadline_s = float(self._connect_timeout_s)
        return opened

    def _connect(self) -> Session:
        """Connect, and keep the connection. Raise where it reaches another server than the node."""
        try:
            self._connection = self._open()
        except psycopg.errors.ConnectionTimeout as error:
            self.close()
            message = f"no answer within {self._connect_timeout_s} s"
            raise self._diagnosis(message, silent=True) from error
        except psycopg.Error as error:
            self.close()
            raise self._diagnosis(_first_line(error)) from error
        self._silent = None
        self._require_server(self._connection)
        return self._connection

    def _require_server(self, connection: Session) -> None:
        """Raise SetupError where a connection pooler answers instead of the server.

        A pooler's sessions are not the server's: a lock or a setting of ours would be somebody
        else's.
        """
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        if self._pooler_may_answer or row == (connection.pgconn.backend_pid,):
            return
        self.close()
        raise SetupError(
            f"a connection pooler answers for {self.name}",
            operation=f"ask {self.name}",
            subject=self.name,
            hint="name the server itself in its conninfo, not PgBouncer or another pooler",
            exit_code=ExitCode.SERVER_SETTING,
        )

    def _diagnosis(self, message: str, *, silent: bool = False) -> Unreachable:
        """Tell from the sockets whether the server is down, closed to us, or silent.

        libpq's messages are translated, so they can't tell. A server that is `silent` although its
        socket accepts is up: it is frozen, or full.
        """
        kinds = {
            self._knock(host, port) for names in self.conninfo.endpoints for host, port in names
        }
        if Reach.CLOSED in kinds:
            return self._stands_still(message) if silent else Unreachable(Reach.CLOSED, message)
        if Reach.SILENT in kinds:
            return self._fell_silent(message)
        return Unreachable(Reach.REFUSED, "connection refused")

    def _fell_silent(self, message: str, reach: Reach = Reach.SILENT) -> Unreachable:
        unreachable = Unreachable(reach, message)
        self._silent = (time.monotonic() + _SILENT_S, unreachable)
        return unreachable

    def _stands_still(self, message: str) -> Unreachable:
        return self._fell_silent(f"{message}, but its socket accepts connections", Reach.CLOSED)

    def _knock(self, host: str, port: str) -> Reach:
        """Tell whether anything listens at host and port."""
        local = [host] if host.startswith("/") else [] if host else list(_SOCKET_FOLDERS)
        try:
            if local:
                return _knock_local([f"{folder}/.s.PGSQL.{port}" for folder in local])
            with socket.create_connection((host, int(port)), self._connect_timeout_s):
                return Reach.CLOSED
        except OSError as error:
            return Reach.REFUSED if error.errno in _DOWN else Reach.SILENT


def runs_here(connection: Connection) -> bool:
    """Tell whether the server runs on this machine: its client's socket is then our own.

    A tunnel, a forwarded port or a pooler has a socket of its own.
    """
    try:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as ours:
            if ours.family == socket.AF_UNIX:
                return False
            host, port = ours.getsockname()[:2]
    except OSError:
        return False
    if not ipaddress.ip_address(host).is_loopback:
        return False
    row = connection.execute("SELECT host(inet_client_addr()), inet_client_port()").fetchone()
    return row == (host, port)


def parse_conninfo(text: str, *, subject: str) -> Conninfo:
    """Parse a connection string as libpq does. Raise SettingsError, which never repeats it."""
    try:
        return Conninfo.of(conninfo_to_dict(text))
    except psycopg.ProgrammingError:
        raise SettingsError(
            "the value is not a connection string",
            operation="read a conninfo",
            subject=subject,
            hint="write it as in host=… port=… dbname=… user=…",
        ) from None


def with_service(text: str, *, subject: str) -> str:
    """Return the connection string with the host and names of its service file and environment.

    Raise SettingsError for a service that no file defines.
    """
    given = parse_conninfo(text, subject=subject)
    if not given.value("service") and given.value("host") and given.value("port"):
        return text
    try:
        found = resolved(given.text)
    except psycopg.ProgrammingError:
        raise SettingsError(
            f"no service file defines the service {given.value('service')}",
            operation="read a conninfo",
            subject=subject,
            hint="define it in ~/.pg_service.conf, or name its file in PGSERVICEFILE",
        ) from None
    keys = ("host", "hostaddr", "port", "dbname", "user")
    known = ((key, found[key]) for key in keys if key in found and not given.value(key))
    return Conninfo((*given.pairs, *known)).text


def expanded(conninfo: Conninfo) -> Conninfo:
    """Return the connection string with all that its service file says, secrets too."""
    if not conninfo.value("service"):
        return conninfo
    found = resolved(conninfo.text)
    known = {key: value for key, value in found.items() if not conninfo.value(key)}
    return Conninfo((*conninfo.pairs, *known.items()))


def _knock_local(paths: list[str]) -> Reach:
    for path in paths:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knocker:
            knocker.connect(path)
            return Reach.CLOSED
    return Reach.REFUSED


def _first_line(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error)
    return next(iter(text.strip().splitlines()), type(error).__name__)
