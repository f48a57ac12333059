"""Opens every session with PostgreSQL, each with the settings that its purpose needs.

A server, a database, a role, a service file, the environment and a conninfo may all set what a
query means or how it prints a value: so every session begins by setting its own, which wins over
all of these. With an empty search_path a name means pg_catalog's object, and none that somebody has
made in another schema (CVE-2018-1058).
"""

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar, cast

import psycopg
from psycopg import pq, sql
from psycopg.abc import PQGen, PQGenConn
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.waiting import Wait

from services.postgres.rows import one_row

Answer = TypeVar("Answer")
_BEGIN_S: Final = 10.0
"""How long a server may take to answer the first statement of a session."""
_WAITS: Final = {pq.PollingStatus.READING: Wait.R, pq.PollingStatus.WRITING: Wait.W}
_DEFAULT, _VERBOSE = 1, 2
"""PGVerbosity of libpq."""
_STATE: Final = re.compile(r"(?<=:  )([0-9A-Z]{5}): ")
_LOCATION: Final = re.compile(r"\nLOCATION:  .*")

_EVERY: Final = {
    "search_path": "",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "row_security": "off",
    **dict.fromkeys(("statement_timeout", "lock_timeout", "idle_session_timeout"), "0"),
    "idle_in_transaction_session_timeout": "0",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmlbinary": "base64",
    "xmloption": "content",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "jit": "off",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""Text forms are those that services.bridge.events.values needs; a half-open socket ends soon."""
_NOTICING_LOSS: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""A session that waits for an answer notices within half a minute that the network is lost."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """A use of sessions: their application_name, and what they set beside `_EVERY`."""

    application: str
    settings: Mapping[str, str] = field(default_factory=dict)
    replication: str = ""


# The commits of the bridge wait for no standby: a synchronous one, it would wait for its own
# feedback. default_transaction_read_only stays the server's: a switchover fences with it.
BRIDGE = Purpose(
    "slotbridge",
    {
        "synchronous_commit": "local",
        "statement_timeout": "15s",
        "idle_in_transaction_session_timeout": "30s",
        "tcp_user_timeout": "20s",
    },
)
STATUS = Purpose("slotbridge status", {"statement_timeout": "10s"})
STREAM = Purpose("slotbridge", replication="database")
NEW_SLOT = Purpose("slotbridge_slot", {"statement_timeout": "60s"})
LOCK_MS: Final = 200
"""How long a chunk waits for a locked table; the stream stands still meanwhile."""
SNAPSHOT_STATEMENT_MS: Final = 10_000
_CHUNK: Final = {"statement_timeout": f"{SNAPSHOT_STATEMENT_MS}ms", "lock_timeout": f"{LOCK_MS}ms"}
ROWS = Purpose("slotbridge_snapshot", _CHUNK | {"idle_in_transaction_session_timeout": "60s"})
MARKS = Purpose("slotbridge_snapshot", _CHUNK | {"synchronous_commit": "local"})
REPAIR_LOCK_S: Final = 30
_REPAIR: Final = {"lock_timeout": f"{REPAIR_LOCK_S}s", "synchronous_commit": "local"}
REPAIR = Purpose("slotbridge_recover", _REPAIR)
FAILOVER = Purpose("slotfailover", {"default_transaction_read_only": "off"})
HISTORY = Purpose("slotfailover", replication="database")
BASE_BACKUP = Purpose("slotfailover", replication="true")
TABLES = Purpose("slottables", {"default_transaction_read_only": "off"})
AUDIT = Purpose("slottables_audit", replication="database")


class Session(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose every wait ends after `deadline_s` seconds (OperationalError), if set."""

    deadline_s: float | None = _BEGIN_S
    search_path = ""
    """As it was before the session set its own: names in a user's SQL are meant by it."""

    def wait(
        self, gen: PQGen[Answer], interval: float = 0.1, timeout: float | None = None
    ) -> Answer:
        return super().wait(gen, interval, timeout or self.deadline_s)

    @classmethod
    def _connect_gen(cls, conninfo: str = "") -> PQGenConn[Self]:
        """Connect as psycopg does, but learn the SQLSTATE of a refusal.

        A server's text may be in any language, and libpq gives the state in its verbose text alone.
        """
        attempt = pq.PGconn.connect_start(conninfo.encode())
        if attempt.status != pq.ConnStatus.BAD:
            _set_verbosity(attempt, _VERBOSE)
            while wait := _WAITS.get(pq.PollingStatus(attempt.connect_poll())):
                while not (yield attempt.socket, wait):
                    pass
        if attempt.status != pq.ConnStatus.OK:
            text = attempt.get_error_message()
            raise _refusal(text, psycopg.errors.finish_pgconn(attempt))
        _set_verbosity(attempt, _DEFAULT)
        attempt.nonblocking = 1
        return cls(attempt)


def open_session(
    purpose: Purpose,
    conninfo: str,
    settings: Mapping[str, str] | None = None,
    *,
    application: str = "",
    **parameters: str | int | None,
) -> Session:
    """Connect for a purpose, in autocommit, and set what it needs; `settings`: more of these.

    Raise psycopg.Error, whose sqlstate is the server's also where it refuses the connection.
    """
    if purpose.replication:
        parameters["replication"] = purpose.replication
    parameters |= {
        "client_encoding": "UTF8",  # a database in SQL_ASCII would give bytes
        "application_name": application or purpose.application,
    }
    given = conninfo_to_dict(conninfo)
    text = make_conninfo(conninfo, **{**_NOTICING_LOSS, **given, **parameters})
    session = Session.connect(text, autocommit=True)
    try:
        if purpose.replication != "true":  # a physical walsender takes no SQL
            made = session.execute(_pins(session, {**purpose.settings, **(settings or {})}))
            made.nextset()
            session.search_path = str(one_row(made)[0])
    except BaseException:
        session.close()
        raise
    session.deadline_s = None
    return session


@contextlib.contextmanager
def names_as_meant(session: Session) -> Iterator[None]:
    """Set the user's search_path for a transaction, so that names in the user's SQL are found.

    pg_catalog comes before it. Our own SQL in the transaction names its operators in full.
    """
    path = "SELECT pg_catalog.set_config('search_path', %s, true)"
    session.execute(path, [", ".join(filter(None, ("pg_catalog", session.search_path)))])
    yield
    session.execute(path, [""])


def _pins(session: Session, settings: Mapping[str, str]) -> sql.Composed:
    """Return one statement that makes the settings; it returns the former search_path first.

    Not as a transaction of the session's default isolation, which a standby may refuse.
    """
    wanted = {**_EVERY, **settings}
    texts: list[sql.Composable] = [sql.SQL("pg_catalog.current_setting('search_path')")]
    if session.info.server_version >= 170000:
        wanted["transaction_timeout"] = "0"
        texts.append(
            sql.SQL(
                "CASE WHEN pg_catalog.has_parameter_privilege('lc_messages', 'SET')"
                " THEN pg_catalog.set_config('lc_messages', 'C', false) END"
            )
        )
    one = sql.SQL("pg_catalog.set_config({}, {}, false)")
    texts += [one.format(name, value) for name, value in wanted.items()]
    pins = sql.SQL("SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SELECT {}")
    return pins.format(sql.SQL(", ").join(texts))


def _refusal(text: str, attempt: pq.abc.PGconn) -> psycopg.Error:
    """Return the error of a connection that could not be made."""
    state = next(iter(_STATE.findall(text)), None)
    message = _STATE.sub("", _LOCATION.sub("", text))
    kind = type("Refused", (psycopg.OperationalError,), {"sqlstate": state})
    return cast("psycopg.Error", kind(f"connection failed: {message.strip()}", pgconn=attempt))


def _set_verbosity(attempt: pq.abc.PGconn, verbosity: int) -> None:
    module = sys.modules[pq.PGconn.__module__].__file__
    set_verbosity = ctypes.CDLL(module).PQsetErrorVerbosity
    set_verbosity(ctypes.c_void_p(getattr(attempt, "pgconn_ptr", None)), ctypes.c_int(verbosity))
