"""The command `slotfailover`: check, and the orders. Exit codes as in schemas.errors.

check      0 all slots are ready, 1 some are not
the others 0 done, 1 something is left for another run, 13 15 34 35 … refused or broken off
"""

import typer

from schemas.errors import ExitCode
from services.failover import orders, report
from services.failover.cluster import Cluster
from services.failover.conditions import conditions
from services.failover.options import Config, Json, settings_of
from services.failover.plan.rules import require_one_system
from services.failover.readiness import candidate, judge_all
from services.failover.view import View
from services.process import exit_codes

app = typer.Typer(
    help="Fails a PostgreSQL pair over with its logical slots and subscriptions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for order in (
    orders.plan,
    orders.switchover,
    orders.failover,
    orders.resume,
    orders.repoint,
    orders.rejoin,
    orders.history,
):
    app.command()(order)


def main() -> None:
    """The entry point of `slotfailover`."""
    app()


@app.callback()
def _commands() -> None:
    """Keeps `check` and `failover` as subcommands."""


@app.command()
def check(config: Config, as_json: Json = False) -> None:
    """Say of every slot whether it would survive the loss of the primary now, or why not."""
    with exit_codes(as_json=as_json):
        settings, bridge_slot = settings_of(config)
        with Cluster(settings, bridge_slot=bridge_slot) as cluster:
            view = cluster.observe()
        require_one_system(view)
        standby = candidate(view)
        verdicts = judge_all(view, standby)
        found = conditions(view, standby)
        notes = _notes(view)
        ready = all(verdict.ready for verdict in verdicts) and standby is not None
        if as_json:
            report.print_json(
                {
                    "ready": ready,
                    "primary": view.primary.name if view.primary else None,
                    "standby": standby.name if standby else None,
                    "slots": [verdict.as_json() for verdict in verdicts],
                    "conditions": [condition.as_json() for condition in found],
                    "notes": notes,
                }
            )
        else:
            report.print_check(report.on_stdout(), verdicts, found, notes)
        raise SystemExit(int(ExitCode.OK if ready else ExitCode.ANSWER_IS_NO))


def _notes(view: View) -> list[str]:
    """What was seen beside the slots: servers that do not answer, subscriptions of others."""
    return [
        *(f"{n.name} is {n.reach}: {n.detail}" for n in view.nodes if n.state is None),
        *(f"{s.name} is {s.reach}: {s.detail}" for s in view.subscribers if not s.usable),
        *(
            f"{where.name}/{subscription.name} belongs to another cluster, it is left alone"
            for where, subscription in view.strangers()
        ),
    ]
