"""Translates a server's refusal: retry, or an operator must change something. Pure.

Source: PostgreSQL documentation, appendix A "PostgreSQL Error Codes".
"""

import re
from typing import Final

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError

READ_THE_STREAM: Final = "read the stream"


class ServerFault(Retryable):
    """The server failed while it decoded: if it does so again and again, it always will."""


_GRANT: Final = "grant the role what `slotbridge docs set-up` lists under Privileges"

# (SQLSTATE prefix, part of the message, retry?, hint, exit code): the first that fits decides.
_BY_STATE: Final = (
    (
        "55006",
        "",
        True,
        "another process uses the slot or origin: stop it, or let this one wait as a hot standby "
        "(bridge.standby)",
        ExitCode.SLOT_IN_USE,
    ),
    ("42501", "", False, _GRANT, ExitCode.PRIVILEGE_MISSING),
    (
        "55000",
        "wal_level",
        False,
        "ALTER SYSTEM SET wal_level = logical, then restart the server",
        ExitCode.WAL_LEVEL,
    ),
    ("53100", "", False, "free disk space on the server", ExitCode.DISK_FULL),
    (
        "53400",
        "",
        False,
        "drop unused slots and origins, or raise max_replication_slots; for origins, from "
        "PostgreSQL 18 on, raise max_active_replication_origins",
        ExitCode.SERVER_SETTING,
    ),
    *(
        (
            prefix,
            "",
            True,
            "the bridge retries until bridge.connect_deadline_ms",
            ExitCode.SERVER_UNREACHABLE,
        )
        for prefix in ("08", "40", "53", "57", "25006", "25P03", "55P03", "XX000")
    ),
)

_WITH_VALUES: Final = ("22", "23", "38", "39", "P0")
"""Of data and of functions that a condition calls: the message may repeat a row's value."""
_SHUTS_DOWN: Final = ("55000", "22023")
"""With _STANDBY_SLOTS in the message of a stream's end: warnings until the server shuts down.

Source: walsender.c, NeedToWaitForStandbys; slot.c, StandbySlotsHaveCaughtup.
"""
_STANDBY_SLOTS: Final = "synchronized_standby_slots"

_FAULTS: Final = ("53200", "XX000")
"""Out of memory, internal errors: passing, unless they come each time."""
_BY_REFUSAL: Final = (
    ("28P01", "", "correct the password in source.conninfo", ExitCode.PRIVILEGE_MISSING),
    ("28", "pg_hba.conf", "allow the connection in pg_hba.conf", ExitCode.PRIVILEGE_MISSING),
    (
        "28",
        "",
        "create the role (`slotbridge sql roles`), or correct source.conninfo",
        ExitCode.PRIVILEGE_MISSING,
    ),
    ("42501", "", _GRANT, ExitCode.PRIVILEGE_MISSING),
    ("3D000", "", "create the database, or correct source.conninfo", ExitCode.SERVER_SETTING),
    ("55000", "", "ALTER DATABASE … ALLOW_CONNECTIONS true", ExitCode.SERVER_SETTING),
    ("42", "", "correct the options in source.conninfo", ExitCode.SETTINGS),
    ("22", "", "correct the options in source.conninfo", ExitCode.SETTINGS),
)
"""Of a session that a server refuses (SQLSTATE prefix, part of its message): the first that fits
decides. The server's message may be in any language: a part of it chooses a hint, nothing else."""
_BY_TEXT: Final = (
    ("no password supplied", "give a password, or a ~/.pgpass", ExitCode.PRIVILEGE_MISSING),
    (
        "certificate verify failed",
        "name the authority that signed the server's certificate in sslrootcert",
        ExitCode.SERVER_SETTING,
    ),
    (
        "does not match host name",
        "name the host in source.conninfo as the server's certificate does",
        ExitCode.SERVER_SETTING,
    ),
    ("server does not support SSL", "set ssl = on on the server", ExitCode.SERVER_SETTING),
    (" alert ", "correct sslcert, which the server refuses", ExitCode.PRIVILEGE_MISSING),
    ("root certificate", "correct sslrootcert in source.conninfo", ExitCode.SETTINGS),
    ("certificate file", "correct sslcert in source.conninfo", ExitCode.SETTINGS),
    ("private key file", "correct sslkey in source.conninfo", ExitCode.SETTINGS),
    ("invalid connection option", "correct source.conninfo", ExitCode.SETTINGS),
    ("invalid sslmode value", "correct source.conninfo", ExitCode.SETTINGS),
    ("invalid integer value", "correct source.conninfo", ExitCode.SETTINGS),
    ("bad value for", "correct source.conninfo", ExitCode.SETTINGS),
)
"""Of libpq itself, whose messages are English: Python sets no language for it."""


def server_error(state: str, message: str, operation: str, subject: str) -> SlotbridgeError:
    """Return the error for a statement that was refused with SQLSTATE `state`.

    An empty `state` means that the connection broke.
    """
    if not state:
        return Retryable(message, operation=operation, subject=subject)
    if operation == READ_THE_STREAM and state in _SHUTS_DOWN and _STANDBY_SLOTS in message:
        return _shut_down_while_waiting(message, operation, subject)
    for prefix, part, retry, hint, code in _BY_STATE:
        if state.startswith(prefix) and part in message:
            kind: type[SlotbridgeError] = Retryable if retry else SetupError
            if operation == READ_THE_STREAM and state in _FAULTS and retry:
                kind = ServerFault
            return kind(message, operation=operation, subject=subject, hint=hint, exit_code=code)
    if state.startswith(_WITH_VALUES) and state != "22023":  # of a setting, not of a value
        message = "a value or a function was refused; the server's log has the message"
    return SetupError(f"{message} (SQLSTATE {state})", operation=operation, subject=subject)


def _shut_down_while_waiting(message: str, operation: str, subject: str) -> Retryable:
    """Return the error of a walsender that waited for a standby when its server shut down.

    While the server runs, what `message` says is a warning in its log, and the walsender waits.
    """
    quoted = re.findall(r'"(\w+)"', message)
    slot = next((name for name in quoted if name != _STANDBY_SLOTS), "")
    standby = f"the standby of slot {slot}" if slot else "a standby"
    return Retryable(
        f"the primary is shutting down while it waits for {standby}: {message}",
        operation=operation,
        subject=subject,
        hint="the bridge reconnects; commits stay withheld until the standby streams through that "
        f"slot, or {_STANDBY_SLOTS} does not name it",
    )


def connect_error(
    error: Exception, subject: str, setting: str = "source.conninfo"
) -> SlotbridgeError:
    """Return the error for a session that could not be opened, by its SQLSTATE (psycopg's errors).

    What no list names may pass, or another server may answer. `setting`: the one that names it.
    """
    text, state = " ".join(str(error).split()), str(getattr(error, "sqlstate", None) or "")
    for prefix, part, hint, code in (
        *(one for one in _BY_REFUSAL if state),
        *(("", *one) for one in _BY_TEXT if not state),
    ):
        if state.startswith(prefix) and part in text:
            hint = hint.replace("source.conninfo", setting)
            return SetupError(text, operation="connect", subject=subject, hint=hint, exit_code=code)
    return Retryable(
        text,
        operation="connect",
        subject=subject,
        hint=f"check that the server runs and that {setting} names it",
        exit_code=ExitCode.SERVER_UNREACHABLE,
    )


def session_error(error: Exception, operation: str, subject: str) -> SlotbridgeError:
    """Return the error for a session or a statement that the server refused (psycopg's errors)."""
    message = getattr(getattr(error, "diag", None), "message_primary", None)
    if message is None:
        return connect_error(error, subject)
    state = str(getattr(error, "sqlstate", None) or "")
    return server_error(state, " ".join(message.split()), operation, subject)
