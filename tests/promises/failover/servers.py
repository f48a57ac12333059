"""A pair with subscriptions, and the command run against it as a person would run it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from psycopg import sql
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from services.failover.cli.app import app
from tests.providers.databases import connect
from tests.providers.interface import Server, Trio
from tests.providers.roles import make_roles, make_subscriber_role
from tests.providers.slots import await_ready
from tests.providers.tokens import tokens_of
from tests.providers.waiting import eventually, patient, patient_ms

AS_ROLES = os.environ.get("AS_ROLES", "") not in ("", "0")
"""Run the tests of this folder as the roles of sql/, with superusers as failover.admins."""
COMMAND = "from services.start import slotfailover; slotfailover()"
KILLED_AFTER_STEPS = """
import itertools, os, signal
from services.failover.cli import output
left = itertools.count({steps} - 1, -1)
output.print_performed = lambda *_: next(left) or os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_AFTER_A_STEP = KILLED_AFTER_STEPS.format(steps=1)
"""Put before COMMAND: the process dies by SIGKILL as soon as that many steps are done."""


_LEFT_CLIENT = "[debug    ] kafka client"


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document; a Kafka client that another test has left may log between its lines."""
        lines = self.out.splitlines()
        return json.loads("\n".join(line for line in lines if _LEFT_CLIENT not in line))


def configuration(folder: Path, trio: Trio, *, as_roles: bool = AS_ROLES, **changes: Any) -> Path:
    """The settings for a trio: nodes a and b, subscriber sub; `changes` override keys.

    `as_roles`: by the roles of sql/. A part of the tests always asks for it, one of each command.
    """
    settings = {
        "nodes": {"a": trio.primary.conninfo(), "b": trio.standby.conninfo()},
        "subscribers": {"sub": trio.subscriber.conninfo(trio.dbname)},
        "connect_timeout_s": round(patient(3)),
        "step_deadline_ms": patient_ms(20_000),
        "journal": str(folder / "journal"),
        **changes,
    }
    if as_roles:
        settings = {**settings, **_as_roles(trio, settings, changes)}
    path = folder / "failover.yaml"
    path.write_text(yaml.safe_dump({"failover": settings}))
    return path


def _as_roles(trio: Trio, settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The roles of sql/ wherever the test has not chosen its own; superusers as admins."""
    role = _roles_of(trio)
    admins = dict(settings.get("admins", {}))
    found: dict[str, Any] = {"admins": admins}
    for section in ("nodes", "subscribers"):
        if section not in changes:
            admins |= settings[section]
            found[section] = {
                name: make_conninfo(conninfo, user=role)
                for name, conninfo in settings[section].items()
            }
    return found


def _roles_of(trio: Trio) -> str:
    """Make the roles, once a trio, on whichever server is the primary."""
    role = "slotfailover"
    for server in (trio.primary, trio.standby):
        if server.running and not ask(server, "SELECT pg_is_in_recovery()"):
            known = f"SELECT count(*) FROM pg_roles WHERE rolname = '{role}'"
            if ask(server, known) == 0:
                make_roles(server, trio.dbname, publication="of_the_roles")
            break
    make_subscriber_role(trio.subscriber, trio.dbname)  # also for subscriptions made since
    for server in (trio.primary, trio.standby):
        if server.running:
            known = f"SELECT count(*) FROM pg_roles WHERE rolname = '{role}'"
            eventually(lambda s=server, q=known: ask(s, q) == 1, what="the role is there")  # type: ignore[misc]
    return role


def accepting(ran: Ran) -> list[str]:
    """The options that accept what a refusal names, as its hint prints them."""
    tokens = tokens_of(ran.err)
    assert tokens, ran.err
    return [word for token in tokens for word in ("--accept", token)]


def word_of(server: Server, *names: str) -> list[str]:
    """The options that say of these nodes of the server's cluster that they are off."""
    system = ask(server, "SELECT system_identifier::text FROM pg_control_system()")
    return [word for name in names for word in ("--accept", f"is-off:{name}:{system}")]


def losing(server: Server, slot: str, node: str) -> list[str]:
    """The option that accepts the loss of a slot on that node of the server's cluster."""
    system = ask(server, "SELECT system_identifier::text FROM pg_control_system()")
    return ["--accept", f"lost-slot:{slot}:{node}@{system}"]


def slotfailover(*arguments: str | Path) -> Ran:
    """Run the command to its end, in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


def slotfailover_process(*arguments: str | Path, before: str = "", timeout_s: float = 60.0) -> Ran:
    """Run the command to its end, in a process that `before` (Python) prepares."""
    done = subprocess.run(
        [sys.executable, "-c", before + COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


def subscribe(trio: Trio, *names: str) -> None:
    """A table `t`, and failover subscriptions to it whose slots are ready on the standby."""
    with connect(trio.primary, trio.dbname) as primary:
        primary.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        primary.execute("CREATE PUBLICATION p FOR ALL TABLES")
    tell(trio.subscriber, "CREATE TABLE t (id int PRIMARY KEY, note text)", dbname=trio.dbname)
    for name in names:
        create_subscription(trio, name)
    for name in names:
        await_ready(trio.primary, trio.standby, name)


def create_subscription(trio: Trio, name: str, publication: str = "p") -> None:
    """A failover subscription with a slot of its own name, and no initial copy."""
    statement = sql.SQL(
        "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (failover, copy_data = false)"
    ).format(
        sql.Identifier(name),
        sql.Literal(trio.primary.conninfo(trio.dbname, password="hush")),
        sql.Identifier(publication),
    )
    with connect(trio.subscriber, trio.dbname) as subscriber:
        subscriber.execute(statement)


def write(server: Server, dbname: str, first: int, count: int = 10) -> None:
    """Insert rows into t."""
    with connect(server, dbname) as connection:
        connection.execute(
            "INSERT INTO t SELECT n, 'x' FROM generate_series(%s::int, %s::int) n",
            [first, first + count - 1],
        )


def rows(server: Server, dbname: str, table: str = "t") -> list[tuple[Any, ...]]:
    """The table's rows, in order."""
    with connect(server, dbname) as connection:
        query = sql.SQL("SELECT x::text FROM {} x ORDER BY 1").format(sql.Identifier(table))
        return connection.execute(query).fetchall()


def await_equal(trio: Trio, new_primary: Server, *tables: str) -> None:
    """Wait until the subscriber has what the new primary has."""
    for table in tables or ("t",):
        expected = rows(new_primary, trio.dbname, table)
        eventually(
            lambda table=table, expected=expected: (  # type: ignore[misc]
                rows(trio.subscriber, trio.dbname, table) == expected
            ),
            what=f"{table} is the same at the subscriber",
        )


def ask(server: Server, query: str, dbname: str = "postgres") -> Any:
    """The first value of the answer."""
    with connect(server, dbname) as connection:
        row = connection.execute(query).fetchone()  # type: ignore[arg-type, unused-ignore]
    return row[0] if row else None


def tell(server: Server, *statements: str, dbname: str = "postgres") -> None:
    """Run statements, one by one."""
    with connect(server, dbname) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type, unused-ignore]
