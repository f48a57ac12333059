"""The errors a person or a supervisor can act on, and the exit code of each.

    SlotbridgeError            fields: operation, subject, lsn, hint
    ├── Retryable              10-19  the same command may succeed later; a supervisor restarts it
    ├── SetupError             20-29  a server, a privilege or a resource needs an operator first
    ├── OperatorNeeded         30-39  positions disagree; going on by itself could lose or repeat
    └── BadInput               40-49  one message, record or value is refused, and is named
    SettingsError              2      the command or its configuration is wrong

Every service raises subclasses or instances of these; foreign errors are translated at the seam.
"""

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from schemas.acceptance import Token
from schemas.lsn import format_lsn


class ExitCode(IntEnum):
    """The exit status of a command (docs/reference/exit-codes.md); values never change."""

    OK = 0
    CHECK_FAILED = 1  # the command ran; its check or comparison failed, or something is left
    SETTINGS = 2
    SERVER_UNREACHABLE = 10
    SLOT_IN_USE = 11
    KAFKA_UNREACHABLE = 12
    DEADLINE = 13
    FENCED = 14
    LOCKED = 15
    NO_DESCRIPTORS = 16
    REGISTRY_UNREACHABLE = 17
    STORAGE_UNREACHABLE = 18
    NOT_JUDGED = 19
    PRIVILEGE_MISSING = 20
    WAL_LEVEL = 21
    SERVER_VERSION = 22
    PORT_IN_USE = 23
    DISK_FULL = 24
    SERVER_SETTING = 25
    PROGRAM_MISSING = 26
    SCHEMA_REFUSED = 27
    WITNESSES_DISAGREE = 30
    WRONG_DATABASE = 31
    TIMELINE = 32
    NOT_READY = 34
    SPLIT_BRAIN = 35
    UNDECODABLE = 40
    RECORD_REFUSED = 41
    BUG = 70


ALL, NOTHING, PERHAPS = "all that it was to", "nothing, or it was taken back", "perhaps a part"


def changed_after(code: ExitCode) -> str:
    """Return what a command of slotfailover that ends so has changed, as documented."""
    refused = code is ExitCode.SETTINGS or 20 <= code < 40
    return NOTHING if refused else ALL if code is ExitCode.OK else PERHAPS


class SlotbridgeError(Exception):
    """An error with everything its reader needs to act.

    `operation` is what was tried, `subject` the slot, table, topic or server it concerned, `lsn`
    the WAL position where there is one, `hint` the remedy, `token` what accepts this refusal, None
    where nothing may; the hint offers it. Never carries row values or passwords.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        subject: str = "",
        lsn: int | None = None,
        hint: str = "",
        exit_code: ExitCode | None = None,
        token: Token | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.subject = subject
        self.lsn = lsn
        self.token = token
        self.hint = f"{hint}; {token.offer}" if token is not None else hint
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        """Return one line: ``operation: message (subject, lsn). Hint: remedy``."""
        where = ", ".join(
            part
            for part in (self.subject, "" if self.lsn is None else f"at LSN {format_lsn(self.lsn)}")
            if part
        )
        text = f"{self.operation}: {self.message}" if self.operation else self.message
        text += f" ({where})" if where else ""
        text += f". Hint: {self.hint}" if self.hint else ""
        return " ".join(text.split())


class SettingsError(SlotbridgeError):
    """The command line or the configuration is wrong; nothing was started."""

    exit_code = ExitCode.SETTINGS


class Retryable(SlotbridgeError):
    """A passing state: the same step may succeed later."""

    exit_code = ExitCode.SERVER_UNREACHABLE


class SetupError(SlotbridgeError):
    """A server, privilege or resource must be changed by an operator first."""

    exit_code = ExitCode.SERVER_SETTING


class OperatorNeeded(SlotbridgeError):
    """Positions or identities disagree: to continue could lose or repeat events."""

    exit_code = ExitCode.WITNESSES_DISAGREE


class BadInput(SlotbridgeError):
    """One message, record or value can't be processed; it is named, and nothing is skipped."""

    exit_code = ExitCode.UNDECODABLE


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the block name the file: Python does so where it opens one, and else not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
