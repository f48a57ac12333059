"""Statements with passwords in them, kept out of the server's log and views as far as our role may.

A server logs DDL by log_statement, failed statements by log_min_error_statement, slow ones by
log_min_duration_statement, and shows the running one in pg_stat_activity (track_activities).
"""

from typing import LiteralString

from services.postgres.server import Connection

_QUIET: dict[str, str] = {
    "log_statement": "none",
    "log_min_error_statement": "panic",
    "log_min_duration_statement": "-1",
    "log_min_duration_sample": "-1",
    "log_transaction_sample_rate": "0",
    "log_duration": "off",
    "log_statement_stats": "off",
    "debug_print_parse": "off",
    "track_activities": "off",
    "pg_stat_statements.track": "none",
    "pgaudit.log": "none",
    "auto_explain.log_min_duration": "-1",
}
_CHANGE: LiteralString = """
    SELECT set_config(s.name, wanted.value, false)
      FROM unnest(%s::text[], %s::text[]) wanted (name, value)
      JOIN pg_settings s ON s.name = wanted.name
     WHERE s.setting <> wanted.value
       AND (s.context = 'user' OR has_parameter_privilege(s.name, 'SET'))
"""


def hush(connection: Connection) -> None:
    """Keep the text of the session's statements out of log and views, until `speak`."""
    connection.execute(_CHANGE, [list(_QUIET), list(_QUIET.values())])


def speak(connection: Connection) -> None:
    """Restore the settings that `hush` has changed."""
    connection.execute(
        "SELECT set_config(name, reset_val, false) FROM pg_settings"
        " WHERE name = ANY(%s) AND setting <> reset_val",
        [list(_QUIET)],
    )
