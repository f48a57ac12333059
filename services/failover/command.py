"""The command `slotfailover`: check, failover. Exit codes as in schemas.errors.

check      0 all slots are ready, 1 some are not
failover   0 done, 1 something is left for another run, 13 34 35 … refused or broken off
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from schemas.errors import ExitCode, SettingsError
from schemas.settings import FailoverSettings, load_settings, require
from services.failover import report
from services.failover.cluster import Cluster
from services.failover.conditions import conditions
from services.failover.journal import Journal
from services.failover.plan import Plan, Wish, plan_failover, require_one_system
from services.failover.readiness import candidate, judge_all
from services.failover.runner import run
from services.failover.view import View
from services.process import exit_codes

app = typer.Typer(
    help="Fails a PostgreSQL pair over with its logical slots and subscriptions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Config = Annotated[Path, typer.Option("--config", help="The YAML file of settings.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout.")]


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
        settings, bridge_slot = _settings(config)
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


@app.command()
def failover(
    config: Config,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before beginning.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each step and its exact SQL; change nothing.")
    ] = False,
    as_json: Json = False,
    accept_loss_of: Annotated[
        list[str] | None,
        typer.Option(metavar="SLOT", help="Go on although this slot is not ready. Repeatable."),
    ] = None,
) -> None:
    """The primary is dead: promote its standby and let the subscriptions go on from there."""
    started = time.monotonic()
    with exit_codes(as_json=as_json):
        settings, bridge_slot = _settings(config)
        wish = Wish(frozenset(accept_loss_of or ()))
        narration = report.on_stderr()
        with Cluster(settings, bridge_slot=bridge_slot) as cluster:
            plan = plan_failover(cluster.observe(), wish)
            if dry_run:
                _show(plan, as_json=as_json)
                raise SystemExit(int(ExitCode.OK))
            _confirm(plan, narration, yes=yes)
            result = run(
                cluster,
                plan,
                wish,
                deadline_s=settings.step_deadline_ms / 1000,
                journal=Journal(settings.journal),
                narrate=lambda done: report.print_performed(narration, done),
                started=started,
            )
        if as_json:
            report.print_json(result.as_json())
        report.print_result(narration if as_json else report.on_stdout(), result)
        raise SystemExit(int(result.exit_code))


def _settings(config: Path) -> tuple[FailoverSettings, str | None]:
    """The section `failover`, and the bridge's slot where the file has a bridge."""
    settings = load_settings(config)
    bridge_slot = settings.source.slot if settings.source is not None else None
    return require(settings.failover, "failover"), bridge_slot


def _show(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        report.print_json(report.plan_as_json(plan))
    else:
        report.print_plan(report.on_stdout(), plan)


def _confirm(plan: Plan, console: Console, *, yes: bool) -> None:
    """Narrate what is about to be done; ask unless told not to."""
    if yes or not plan.steps:
        console.print(f"{plan.new_primary}: {plan.why}")
        return
    if not sys.stdin.isatty():
        raise SettingsError(
            "a failover must be confirmed, and there is no terminal to ask on",
            operation="fail over",
            hint="pass --yes, or --dry-run to see the steps first",
        )
    report.print_plan(console, plan)
    if not typer.confirm(f"Make {plan.new_primary} the primary?", err=True):
        raise SystemExit(int(ExitCode.ANSWER_IS_NO))


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
