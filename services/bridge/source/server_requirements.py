"""The version and settings that the bridge needs of its server. Pure but for the log."""

from typing import Final

import structlog

from schemas.errors import ExitCode, SetupError
from services.postgres.server import Server, untried_version
from services.runtime.process import warn_once

logger = structlog.get_logger(__name__)

MINIMUM_VERSION: Final = 170005
TWO_PHASE_VERSION: Final = 180000


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
    if not server.may_decode:
        raise SetupError(
            f"wal_level is {server.wal_level}",
            operation="check the server",
            hint="ALTER SYSTEM SET wal_level = logical, then restart the server",
            exit_code=ExitCode.WAL_LEVEL,
        )
    if untried := untried_version(server.version):
        warn_once(
            logger,
            f"{untried}: the bridge goes on",
            version=server.version,
            hint="try it on a copy of the database first; docs/start/set-up.md, Versions",
        )


def warn_unsynchronized(slot: str) -> None:
    """Warn that consumers can get ahead of the standbys."""
    warn_once(
        logger,
        "synchronized_standby_slots is empty: after a failover Kafka may hold transactions "
        "that the new primary never had",
        slot=slot,
    )
