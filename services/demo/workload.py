"""pgbench as the live load: its own tables, its own TPC-B transactions, several clients."""

import re
import subprocess
from typing import Final

from schemas.errors import SlotbridgeError
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer

TABLES: Final = ("pgbench_accounts", "pgbench_branches", "pgbench_history", "pgbench_tellers")
BALANCE_TABLES: Final = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers")
"""Each transaction updates one row of each, and adds one row of history."""
ACCOUNTS_PER_SCALE: Final = 100_000
_PROCESSED = re.compile(r"number of transactions actually processed: (\d+)")


def make_tables(server: PostgresServer, dbname: str) -> None:
    """Create empty tables with primary keys; pgbench_history has none."""
    server.run_tool("pgbench", ["-i", "-q", "-I", "dtp", server.conninfo(dbname)])


def load(server: PostgresServer, dbname: str, scale: int) -> None:
    """Load pgbench's own rows, by a truncate and a COPY in one transaction."""
    server.run_tool("pgbench", ["-i", "-q", "-I", "g", "-s", str(scale), server.conninfo(dbname)])


def start_clients(
    bed: Bed, server: PostgresServer, name: str, *, clients: int, seconds: int
) -> subprocess.Popen[bytes]:
    """Start `clients` clients for `seconds`; its log is `name`."""
    return bed.spawn(
        name,
        [
            server.tool_path("pgbench"),
            *("-n", "-c", str(clients), "-j", "2", "-T", str(seconds)),
            server.conninfo(bed.dbname),
        ],
        env=server.tool_environment(),
    )


def acknowledged(bed: Bed, name: str) -> int:
    """Return how many transactions the clients of `name` saw committed, from pgbench's report."""
    text = bed.processes.log_path(name).read_text(encoding="utf-8", errors="replace")
    found = _PROCESSED.search(text)
    if found is None:
        raise SlotbridgeError(
            f"pgbench gave no report: {text.strip()[-300:]}", operation="run the load", subject=name
        )
    return int(found[1])
