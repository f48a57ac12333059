"""The sessions that a fence ends: they began before it, and may be writing."""

from typing import LiteralString

from services.slots import Connection

_STRANGERS: LiteralString = """
      FROM pg_stat_activity a
     WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
       AND application_name NOT IN ('slotbridge', 'slotfailover')
       AND application_name NOT LIKE '%slotsync worker'
       AND NOT EXISTS (SELECT FROM pg_stat_replication r
                        WHERE r.application_name = a.application_name AND a.application_name <> '')
       AND backend_start <= pg_conf_load_time()
"""


def sessions_before_reload(connection: Connection) -> int:
    """How many client sessions began before the settings were last read: they may be writing.

    Not counted: our own, the bridge's, and those of standbys (slot synchronization).
    """
    row = connection.execute("SELECT count(*)" + _STRANGERS).fetchone()
    return int(row[0]) if row else 0


def end_sessions_before_reload(connection: Connection) -> None:
    """Terminate what `sessions_before_reload` counts."""
    connection.execute("SELECT pg_terminate_backend(pid)" + _STRANGERS)
