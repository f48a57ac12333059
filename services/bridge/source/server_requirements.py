"""The version and settings that the bridge needs of its server. Pure."""

from typing import Final

from schemas.errors import ExitCode, SetupError
from services.postgres.server import Server

MINIMUM_VERSION: Final = 170005
TWO_PHASE_VERSION: Final = 180000
MINIMUM_WAL_LEVEL: Final = "logical"


def check_server(server: Server, *, two_phase: bool = False) -> None:
    """Raise SetupError (SERVER_VERSION, WAL_LEVEL) for a server that has no failover slots."""
    if server.version < MINIMUM_VERSION:
        raise SetupError(
            f"PostgreSQL {server.version // 10000}.{server.version % 10000} is too old",
            operation="check the server",
            hint="update the server to 17.5 or newer: failover slots came with 17, and an older 17 "
            "decodes rows by the old state of a table or publication that changes while a "
            "transaction is open",
            exit_code=ExitCode.SERVER_VERSION,
        )
    if two_phase and server.version < TWO_PHASE_VERSION:
        raise SetupError(
            f"PostgreSQL {server.version // 10000} can lose prepared transactions at a failover: "
            "it does not copy a slot's two_phase_at to the standby",
            operation="check the server",
            hint="set source.two_phase to false, or use PostgreSQL 18",
            exit_code=ExitCode.SERVER_VERSION,
        )
    if server.wal_level != MINIMUM_WAL_LEVEL:
        raise SetupError(
            f"wal_level is {server.wal_level}",
            operation="check the server",
            hint="ALTER SYSTEM SET wal_level = logical, then restart the server",
            exit_code=ExitCode.WAL_LEVEL,
        )
