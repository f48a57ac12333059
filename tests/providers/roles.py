"""The roles of the services, made by the scripts in sql/."""

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from services.testbed.users import postgres_programs, server_user
from tests.providers.interface import Server
from tests.providers.waiting import patient

SQL = Path(__file__).parents[2] / "sql"
ODD = "'\"; drop table t; --.é😀"
"""A suffix that only survives where names are quoted."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Their names, and what the script told at last."""

    bridge: str
    failover: str
    tables: str
    snapshot: str
    told: str = ""


def make_roles(
    server: Server,
    dbname: str,
    *,
    publication: str,
    suffix: str = "",
    journal: str = "postgres",
    snapshot: bool = False,
    sequence: str = "",
) -> Roles:
    """Run sql/roles.sql on a primary, twice: it says that it can be repeated.

    `snapshot`: also for the role that reads a snapshot's rows. `sequence`: of which slot.
    """
    names = ("slotbridge", "slotfailover", "slottables", "snapshot")
    roles = Roles(*(f"{name}{suffix}" for name in names))
    variables = {
        "bridge": roles.bridge,
        "failover": roles.failover,
        "tables": roles.tables,
        **({"snapshot": roles.snapshot} if snapshot else {}),
        **({"sequence": sequence} if sequence else {}),
        "publication": publication,
        "journal_database": journal,
    }
    told = [_run(server, dbname, "roles.sql", variables) for _ in range(2)]
    return replace(roles, told=told[-1])


def remove_roles(server: Server, dbname: str, roles: Roles, *, journal: str = "postgres") -> str:
    """Run sql/remove_roles.sql on a primary; return what it says."""
    variables = {"bridge": roles.bridge, "failover": roles.failover, "tables": roles.tables}
    given = {**variables, "snapshot": roles.snapshot, "journal_database": journal}
    return _run(server, dbname, "remove_roles.sql", given)


def make_subscriber_role(server: Server, dbname: str, *, suffix: str = "") -> str:
    """Run sql/subscriber_roles.sql in a subscriber's database."""
    role = f"slotfailover{suffix}"
    _run(server, dbname, "subscriber_roles.sql", {"failover": role})
    return role


def _run(server: Server, dbname: str, script: str, variables: dict[str, str]) -> str:
    program = postgres_programs(server_user()) / "psql"
    given = [part for pair in variables.items() for part in ("-v", "=".join(pair))]
    done = subprocess.run(
        [program, "-X", "-q", "-d", server.conninfo(dbname), *given, "-f", SQL / script],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
