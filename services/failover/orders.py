"""The commands that change something."""

import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from schemas.errors import ExitCode, SettingsError
from services.failover import report
from services.failover.cluster import Cluster
from services.failover.journal import Journal
from services.failover.options import Config, Json, settings_of
from services.failover.plan.failover import plan_failover
from services.failover.plan.wish import Plan, Wish
from services.failover.runner import run
from services.process import exit_codes


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
        settings, bridge_slot = settings_of(config)
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
