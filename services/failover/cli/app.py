"""The command `slotfailover`: check, the orders, and the daemon. Exit codes as in schemas.errors.

check      0 nothing is critical, 1 something is; --nagios: 0 1 2 3 as plugins do
status     0 all is as it should be, 1 something is not, 35 two primaries
the others 0 done, 1 something is left for another run, 13 15 34 35 … refused or broken off
"""

from typing import Annotated

import typer

from schemas.version import print_version
from services.failover.cli import change, check, status
from services.failover.cli.drill import drill
from services.failover.cli.watch import watch

app = typer.Typer(
    help="Fail a PostgreSQL pair over, with its logical slots and subscriptions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for order in (
    check.check,
    status.status,
    change.plan,
    change.switchover,
    change.failover,
    change.resume,
    change.repoint,
    change.rejoin,
    status.history,
    watch,
    drill,
):
    app.command()(order)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Accept options before the subcommand."""
