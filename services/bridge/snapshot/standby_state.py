"""The state of a standby, and whether rows may be read from it.

The process that tells it must be the one that reads: behind a balancer they may be two servers'.
"""

from typing import Final, LiteralString, NamedTuple

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from schemas.lsn import format_lsn
from services.bridge.snapshot.row_reader import NotNow
from services.postgres.rows import one_row
from services.postgres.server import Connection, Server

_OPERATION: Final = "read rows from a standby"
_STATE: LiteralString = """
    SELECT pg_is_in_recovery(), coalesce((pg_last_wal_replay_lsn() - '0/0')::bigint, 0),
           CASE WHEN NOT pg_is_in_recovery() THEN ''
                WHEN pg_is_wal_replay_paused() THEN '; its replay is paused'
                WHEN current_setting('recovery_min_apply_delay') <> '0'
                THEN '; its recovery_min_apply_delay is '
                     || current_setting('recovery_min_apply_delay') ELSE '' END,
           pid, received_tli, current_setting('row_security') = 'on',
           pg_backend_pid() || ' since ' || pg_postmaster_start_time()
      FROM (VALUES (1)) one LEFT JOIN pg_stat_wal_receiver ON true"""


class StandbyState(NamedTuple):
    """A standby at one moment. `kept_by`: what holds its replay back; `process`: its identity."""

    in_recovery: bool
    replayed: int
    kept_by: str
    receiver: int | None
    timeline: int | None
    row_security: bool
    process: str


def read_state(connection: Connection) -> StandbyState:
    """Ask the server for its state as a standby, in a transaction or outside one."""
    return StandbyState(*one_row(connection.execute(_STATE)))


def require_timeline(state: StandbyState, name: str, primary: Server) -> None:
    """Raise NotNow unless the standby streams the primary's timeline; SetupError where unseen."""
    if state.receiver is None:
        raise NotNow(f"{name} does not stream: which timeline it replays is not judged")
    if state.timeline is None:
        raise SetupError(
            "the role can't see which timeline the standby replays (pg_stat_wal_receiver)",
            operation=_OPERATION,
            subject=name,
            hint="on the primary, GRANT pg_read_all_stats TO the role of snapshot.conninfo: the "
            "standby replays that",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    if state.timeline != primary.timeline:
        raise NotNow(
            f"{name} replays timeline {state.timeline}, the primary writes {primary.timeline}"
        )


def require_all_rows(state: StandbyState, name: str) -> None:
    """Raise SetupError where policies may leave out rows: a pooler has dropped our options."""
    if state.row_security:
        raise SetupError(
            "the server does not take the options of the connection: row_security is on",
            operation=_OPERATION,
            subject=name,
            hint="name the standby itself in snapshot.conninfo, not a pooler before it",
            exit_code=ExitCode.SERVER_SETTING,
        )


def require_same_process(before: StandbyState | None, after: StandbyState, name: str) -> None:
    """Raise NotNow unless the process that has read the rows was judged before them."""
    if before is None or after.process != before.process:
        raise NotNow(
            f"{name} answers with several processes: name the standby itself in "
            "snapshot.conninfo, not a pooler or balancer before it"
        )


def require_written(replayed: int, written: int, name: str) -> None:
    """Raise OperatorNeeded if a standby has replayed more WAL than the primary has written."""
    if replayed > written:
        raise OperatorNeeded(
            f"{name} has replayed the WAL up to {format_lsn(replayed)}, the primary has written "
            f"it up to {format_lsn(written)}: it replays the WAL of another server",
            operation=_OPERATION,
            subject=name,
            hint="name a standby of the primary in snapshot.conninfo, and build that one anew if "
            "the primary was set back to an older state",
            exit_code=ExitCode.WRONG_DATABASE,
        )
