"""The commands that change something, and those that show what they would do or have done.

All but `plan` and --dry-run hold the lock, confirm unless --yes, and keep the journal.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from schemas.acceptance import Acceptance, Kind
from schemas.config_option import AcceptTokens, ConfigFile, acceptance_of
from schemas.errors import ExitCode, SettingsError, SlotbridgeError
from schemas.settings import FailoverSettings
from services.failover.checks.readiness import candidate
from services.failover.cli import output
from services.failover.cli.options import (
    DryRun,
    Fence,
    Json,
    RequireSubscribers,
    To,
    Yes,
    settings_of,
)
from services.failover.execute.history import read_history, unfinished
from services.failover.execute.interruption import Interruption
from services.failover.execute.journal import Entry, Journal
from services.failover.execute.lock import Lock, locked
from services.failover.execute.promotion_order import require_nothing_ordered
from services.failover.execute.rejoin_preflight import require_rejoinable
from services.failover.execute.run import Result, Run, plan_patiently
from services.failover.execute.timeline_memory import Asked, recall
from services.failover.model.managers import forgotten, is_managed, notes_on, require_unmanaged
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.plan.failover import plan_failover
from services.failover.plan.notes import merge
from services.failover.plan.rejoin import plan_rejoin, plan_repoint
from services.failover.plan.request import OPERATION, Plan, Request, plan_as_json
from services.failover.plan.resume import Intent, Planner, choose, offering_way_back, undo
from services.failover.plan.switchover import plan_switchover
from services.runtime.process import exit_codes

Chosen = tuple[Planner, Request]
_PROMOTING = frozenset({"failover", "switchover", "resume", "rejoin"})
"""Commands that promote, fence or rejoin: refused under a manager."""
_OF_ADMINS = frozenset({*_PROMOTING, "plan"})
"""Commands that log in by failover.admins, for their steps or to show them."""
Choose = Callable[[Cluster, View, Request], Chosen]


def failover(
    config: ConfigFile,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    accept: AcceptTokens = None,
    to: To = "",
    fence: Fence = False,
    require_subscribers: RequireSubscribers = False,
) -> None:
    """Replace a dead primary: promote its standby and move subscriptions and bridge to it.

    Exit codes: 0 done; 1 you said no, or something is left for another run; 13 a step took too
    long; 15 another command is at work; 34 standby or slot is not ready; 35 there may be two
    primaries; others as in docs/reference/exit-codes.md. After an interruption: slotfailover
    resume.
    """

    def choose_it(_cluster: Cluster, view: View, request: Request) -> Chosen:
        return plan_failover, replace(
            request,
            target=to,
            fence=fence,
            require_subscribers=require_subscribers,
            labels=True,
            subscribers_may_stay=True,
            revive=False,
        )

    _Order("failover", config, yes, dry_run, as_json, accept).give(choose_it, undo=True)


def switchover(
    config: ConfigFile,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    accept: AcceptTokens = None,
    to: To = "",
    no_rejoin: Annotated[
        bool, typer.Option("--no-rejoin", help="Do not make the old primary a standby at the end.")
    ] = False,
    require_subscribers: RequireSubscribers = False,
) -> None:
    """Hand over from a living primary to the standby --to NODE without losing anything.

    Exit codes as of `slotfailover failover`. After an interruption: slotfailover resume.
    """

    def choose_it(_cluster: Cluster, view: View, request: Request) -> Chosen:
        if not to:
            best = candidate(view)
            raise SettingsError(
                "the new primary is not named",
                operation="switch over",
                hint=f"--to {best.name if best is not None else 'NODE'}; without it, running the "
                "same command again would switch back",
            )
        old = {node.name for node in view.nodes if node.leading and not no_rejoin}
        return plan_switchover, replace(
            request,
            accept=request.accept.only(Kind.LOST_SLOT, Kind.NOT_PROMOTED),
            target=to,
            rejoin=frozenset(old - {to}),
            require_subscribers=require_subscribers,
            labels=True,
        )

    _Order("switchover", config, yes, dry_run, as_json, accept).give(choose_it, undo=True)


def resume(
    config: ConfigFile,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    accept: AcceptTokens = None,
    rollback: Annotated[
        bool,
        typer.Option(
            "--rollback", help="Undo the interrupted run; refused once a standby is promoted."
        ),
    ] = False,
) -> None:
    """Complete an interrupted command, by the servers' state and the journal.

    Exit codes as of `slotfailover failover`; 0 also where nothing is left to do.
    """
    order = _Order("resume", config, yes, dry_run, as_json, accept)

    def choose_it(cluster: Cluster, view: View, request: Request) -> Chosen:
        settings = order.settings
        entries = read_history(cluster, view, settings.journal, settings.journal_database)
        begun = unfinished(entries)
        request = replace(
            request,
            labels=True,
            subscribers_may_stay=True,
            revive=begun is None or begun.command != "failover",
        )
        if rollback:
            require_nothing_ordered(cluster, dict.fromkeys(node.name for node in view.standbys))
            return undo(view, request)
        intent = Intent.of(begun.command, begun.intent, _age_s(begun)) if begun else None
        planner, request = choose(view, request, intent)
        return offering_way_back(planner), request

    order.give(choose_it)


def _age_s(begun: Entry) -> float:
    """Return the age in seconds of the entry with which a run began."""
    return (datetime.now(UTC) - datetime.fromisoformat(begun.at)).total_seconds()


def repoint(
    config: ConfigFile,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    accept: AcceptTokens = None,
) -> None:
    """Move subscriptions and bridge to a standby that someone else promoted; verify them.

    Exit codes: 0 done; 1 you said no, or something is left for another run; 15 another command is
    at work; 32 there is a newer timeline; 34 no node takes writes; 35 there may be two primaries;
    others as in docs/reference/exit-codes.md.
    """

    def choose_it(_cluster: Cluster, view: View, request: Request) -> Chosen:
        return plan_repoint, request

    _Order("repoint", config, yes, dry_run, as_json, accept).give(choose_it)


def rejoin(
    config: ConfigFile,
    node: Annotated[str, typer.Argument(help="The node to make a standby again.")],
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="Take a base backup where pg_rewind can't be used.")
    ] = False,
    accept: AcceptTokens = None,
) -> None:
    """Make an old primary a standby of the new one, by pg_rewind or a base backup.

    Exit codes: 0 done; 1 you said no, or the node could not be made a standby; 15 another command
    is at work; 20 our role lacks a right; 34 no node takes writes; 35 there may be two primaries,
    or the node is the primary; others as in docs/reference/exit-codes.md.
    """
    order = _Order("rejoin", config, yes, dry_run, as_json, accept)

    def choose_it(cluster: Cluster, view: View, request: Request) -> Chosen:
        request = replace(request, rejoin=frozenset({node}), copies=copy)
        order.notes += require_rejoinable(cluster, plan_rejoin(view, request))
        return plan_rejoin, request

    order.give(choose_it)


def plan(
    config: ConfigFile,
    as_json: Json = False,
    accept: AcceptTokens = None,
    to: To = "",
    fence: Fence = False,
) -> None:
    """Print the plan of a switchover; with --fence or without a primary, that of a failover.

    It changes nothing. Exit codes: 0 there is a plan; others as the command itself would have.
    """

    def choose_it(_cluster: Cluster, view: View, request: Request) -> Chosen:
        given = replace(request, target=to, fence=fence)
        alive = view.primary
        if is_managed(view.managed_by):
            return plan_repoint, given
        if alive is None or fence:
            return plan_failover, given
        return plan_switchover, replace(given, rejoin=frozenset({alive.name} - {to}))

    _Order("plan", config, True, True, as_json, accept).give(choose_it)


@contextlib.contextmanager
def _operation(command: str, accept: Acceptance) -> Iterator[None]:
    """Let an error name the command, also where that is not a failover, and the unused tokens."""
    try:
        yield
    except SlotbridgeError as error:
        error.hint = "; ".join(filter(None, (error.hint, *_unused(accept))))
        if error.operation == OPERATION:
            error.operation = {"failover": OPERATION, "switchover": "switch over"}.get(
                command, command
            )
        raise


def _unused(accept: Acceptance) -> list[str]:
    return [f"not used, as no refusal asks for it: {token}" for token in accept.unused]


class _Order:
    """The course that all changing commands share: observe, plan, confirm, perform."""

    def __init__(
        self,
        command: str,
        config: Path,
        yes: bool,
        dry_run: bool,
        as_json: bool,
        accept: list[str] | None,
    ) -> None:
        self._command = command
        self._tokens = accept
        self._accept = Acceptance()
        self._config = config
        self._yes = yes
        self._dry_run = dry_run
        self._as_json = as_json
        self._admin = command in _OF_ADMINS
        self.notes: list[str] = []
        self.settings: FailoverSettings

    def give(self, choose_it: Choose, *, undo: bool = False) -> None:
        """Observe, plan, confirm, and carry it out. Raise SystemExit with the exit code."""
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(exit_codes(as_json=self._as_json))
            self._accept = acceptance_of(self._tokens)
            stack.enter_context(_operation(self._command, self._accept))
            self.settings, bridge = settings_of(self._config)
            if self._command in _PROMOTING:
                require_unmanaged(self.settings.managed_by, self._command)
            with Cluster(self.settings, bridge, admin=self._admin) as cluster:
                asked = Asked(bridge)
                view = cluster.observe()
                self._recall(cluster, view, asked)
                if self._dry_run:
                    view = cluster.observe()
                    planner, request = choose_it(cluster, view, self._request())
                    plan, view = plan_patiently(cluster, planner, view, request, lambda _text: None)
                    plan = self._noted(view, plan)
                    self._show(replace(plan, notes=(*plan.notes, *_unused(self._accept))))
                    raise SystemExit(int(ExitCode.OK))
                database, path = self.settings.journal_database, self.settings.journal
                with locked(cluster, view, database, path) as lock:
                    result = self._carry_out(cluster, choose_it, started, lock, undo=undo)
            if self._as_json:
                output.print_json(result.as_json())
            narration = output.on_stderr()
            output.print_result(narration if self._as_json else output.on_stdout(), result)
            raise SystemExit(int(result.exit_code))

    def _carry_out(
        self, cluster: Cluster, choose_it: Choose, started: float, lock: Lock, *, undo: bool
    ) -> Result:
        """Plan, confirm and perform a command; observe anew after the question."""
        narration = output.on_stderr()
        view = cluster.observe()
        planner, request = choose_it(cluster, view, self._request())
        plan, view = plan_patiently(cluster, planner, view, request, lambda _text: None)
        plan = self._noted(view, plan)
        self._confirm(plan, narration)
        request = replace(request, target=request.target or plan.new_primary)
        settings = self.settings
        with Interruption() as interruption:
            run = Run(
                cluster,
                Journal(settings.journal, cluster, settings.journal_database, self._command),
                settings.step_deadline_ms / 1000,
                narrate=lambda done: output.print_performed(narration, done),
                report=lambda text: output.print_progress(narration, text),
                started=started,
                interruption=interruption,
                hold=lock.hold,
            )
            view = cluster.observe() if not self._yes else view
            result = run.carry_out(view, request, planner, undo=undo)
        notes = merge(plan.notes, result.notes)
        return replace(result, notes=(*notes, *_unused(self._accept)))

    def _recall(self, cluster: Cluster, view: View, questions: Asked) -> None:
        """Have the cluster's views remember what the journals and Kafka tell."""
        settings = self.settings
        unread: list[str] = []
        database = settings.journal_database
        entries = read_history(cluster, view, settings.journal, database, unread)
        self.notes = recall(cluster, entries, questions.answer(), unread)

    def _noted(self, view: View, plan: Plan) -> Plan:
        """Return the plan with notes on what could not be judged and on who else may be at work."""
        more = (*self.notes, *(notes_on(view) if self._admin else ()))
        return replace(plan, notes=(*more, *forgotten(view, plan.new_primary), *plan.notes))

    def _request(self) -> Request:
        return Request(
            accept=self._accept,
            lag_bytes_max=self.settings.lag_bytes_max,
            synchronous_standbys=self.settings.synchronous_standbys,
        )

    def _show(self, plan: Plan) -> None:
        if self._as_json:
            output.print_json(plan_as_json(plan))
        else:
            output.print_plan(output.on_stdout(), plan)

    def _confirm(self, plan: Plan, console: Console) -> None:
        """Narrate what is about to be done; ask unless told not to."""
        if self._yes or not plan.steps:
            console.print(f"{plan.new_primary}: {plan.why}")
            return
        if not sys.stdin.isatty():
            raise SettingsError(
                f"a {self._command} must be confirmed, and there is no terminal to ask on",
                operation=self._command,
                hint="pass --yes, or --dry-run to see the steps first",
            )
        output.print_plan(console, plan)
        if not typer.confirm(f"{self._command}: {len(plan.steps)} steps. Go on?", err=True):
            raise SystemExit(int(ExitCode.CHECK_FAILED))
