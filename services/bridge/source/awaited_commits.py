"""Refuses to do without the bridge while commits wait for it (synchronous_standby_names)."""

import re

from schemas.errors import ExitCode, SetupError
from services.bridge.source.replication_connection import walsender_name
from services.postgres.server import Connection, setting


def require_no_waiting_commits(connection: Connection, slot: str, operation: str) -> None:
    """Raise SetupError where the server lists the bridge's walsender: no commit would return."""
    name = walsender_name(slot)
    if name in re.findall(r"\w+", setting(connection, "synchronous_standby_names")):
        raise SetupError(
            f"commits wait for the bridge: synchronous_standby_names lists {name}",
            operation=operation,
            subject=f"slot {slot}",
            hint="remove it from synchronous_standby_names, and reload the server",
            exit_code=ExitCode.SERVER_SETTING,
        )
