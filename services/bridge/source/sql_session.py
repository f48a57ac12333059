"""The bridge's SQL session, opened again where the server has ended it and nothing else.

A switchover's fence ends SQL sessions, and so may an administrator or a server that shuts down; the
walsender goes on, and what it sends is still to be confirmed. As long as the replication connection
lasts, its server is the one that the start has compared: a session with the same one may follow.
"""

import functools
import time
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

import psycopg

from schemas.errors import Retryable, SlotbridgeError
from services.bridge.source.candidates import connect
from services.bridge.source.hosts import host_name
from services.postgres import slots
from services.postgres.server import Server
from services.postgres.sessions import Session

_GOING_S: Final = 2.0
"""How long an ended session may take to release the origin."""
_LOOK_S: Final = 0.02
_OPERATION: Final = "open the SQL session again"

P = ParamSpec("P")
Answer = TypeVar("Answer")


class SqlSessionEnded(Retryable):
    """The server has ended the SQL session, and lets no other be opened; changes may still flow."""


class Reopening(Protocol):
    """The owner of an SQL session that may be opened again."""

    def reopen(self, ended: SqlSessionEnded) -> None:
        """Open another session; raise `ended` before changes flow."""


Owner = TypeVar("Owner", bound=Reopening)


def in_any_session(
    ask: Callable[Concatenate[Owner, P], Answer],
) -> Callable[Concatenate[Owner, P], Answer]:
    """Let a method that asks in SQL be called once more in a new session, where its own ended."""

    @functools.wraps(ask)
    def asked(owner: Owner, /, *args: P.args, **options: P.kwargs) -> Answer:
        try:
            return ask(owner, *args, **options)
        except SqlSessionEnded as ended:
            owner.reopen(ended)
            return ask(owner, *args, **options)

    return asked


def connect_again(conninfo: str, streamed_from: Server, slot: str, former_pid: int) -> Session:
    """Open another session with the server `streamed_from`, also a read-only one.

    Waits until the server has done with the former session, of `former_pid`. Raise SqlSessionEnded
    where none can be opened, Retryable where another server answers.
    """
    subject = host_name(conninfo)
    found = connect(conninfo)
    if isinstance(found, SlotbridgeError):
        raise SqlSessionEnded(found.message, operation=_OPERATION, subject=subject) from found
    connection, server = found.connection, found.server
    try:
        streamed = slots.read_slot(connection, slot)
        _await_end(connection, former_pid)
    except psycopg.Error as error:
        connection.close()
        raise SqlSessionEnded(str(error), operation=_OPERATION, subject=subject) from error
    identity = (server.system_identifier, server.timeline, server.in_recovery)
    same = identity == (streamed_from.system_identifier, streamed_from.timeline, False)
    if not same or streamed is None or streamed.active_pid is None:
        connection.close()
        raise Retryable("another server answers now", operation=_OPERATION, subject=subject)
    return connection


def _await_end(connection: Session, pid: int) -> None:
    """Wait until the server has ended the session `pid`, at most _GOING_S."""
    deadline = time.monotonic() + _GOING_S
    while time.monotonic() < deadline:
        row = connection.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()
        if row is None:
            break
        time.sleep(_LOOK_S)
