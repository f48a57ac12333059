"""The command `check`: it looks and judges; with --fix it repairs what a program may repair."""

import sys
from functools import partial
from typing import Annotated

import typer

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode, SettingsError
from schemas.findings import Order
from schemas.settings import FailoverSettings
from services.failover.checks.check_report import Checkup, check_up
from services.failover.cli import output
from services.failover.cli.options import Json, settings_of
from services.failover.execute.fix import Fixes, fixes_of, repair
from services.failover.execute.history import read_history
from services.failover.execute.journal import FIX
from services.failover.execute.timeline_memory import recall
from services.failover.model.managers import require_unmanaged
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.observe.kafka_progress import bridge_progress, with_published
from services.runtime.process import configure_logging, exit_codes


def check(
    config: ConfigFile,
    as_json: Json = False,
    nagios: Annotated[
        bool, typer.Option("--nagios", help="Answer as a monitoring plugin: one line, exit 0 to 3.")
    ] = False,
    problems: Annotated[
        bool,
        typer.Option("--problems", help="Print only problems, and checks that were not judged."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 also for warnings and for checks that were not judged."
        ),
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Show the remedies, ask, and perform those that are safe.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --fix.")] = False,
    standby: Annotated[
        str,
        typer.Option(
            metavar="NODE",
            help="Judge this standby instead of the one that a failover would promote.",
        ),
    ] = "",
) -> None:
    """Say of every slot whether it would survive the loss of the primary now, or why not.

    Exit codes: 0 no finding is critical; 1 one is, or you said no to --fix; others as in
    docs/reference/exit-codes.md. docs/reference/checks.md explains every check.
    """
    with output.as_plugin() if nagios else exit_codes(as_json=as_json):
        if yes and not fix:
            raise SettingsError("--yes is only for --fix", operation="check")
        if nagios and (as_json or fix):
            raise SettingsError(
                "--nagios can't be combined with --json or --fix", operation="check"
            )
        settings, bridge = settings_of(config)
        if bridge is not None and bridge.kafka is not None:
            configure_logging(json_lines=as_json)  # Kafka's client speaks, and stdout is taken
        if fix:
            require_unmanaged(settings.managed_by, FIX)
        with Cluster(settings, bridge, admin=fix) as cluster:
            memory = _Memory(cluster, settings)
            published = partial(bridge_progress, bridge)

            def look() -> Checkup:
                first = published()
                return check_up(with_published(first, memory.survey(), published), standby)

            checkup = look()
            done: list[Order] = []
            if fix and fixes_of(checkup).of:
                agree = partial(_agrees, yes=yes, printed=set())
                checkup, done, problems_of_journal = repair(cluster, settings, look, agree)
                output.print_notes(output.on_stderr(), problems_of_journal)
        if nagios:
            output.print_nagios(checkup)
        elif as_json:
            output.print_json({**checkup.as_json(), "fixed": output.orders_as_json(done)})
        else:
            output.print_check(output.on_stdout(), checkup, problems=problems)
        raise SystemExit(int(checkup.strict_exit_code if strict else checkup.exit_code))


class _Memory:
    """The cluster, surveyed with what the journals remember, which are read once."""

    def __init__(self, cluster: Cluster, settings: FailoverSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._recalled = False

    def survey(self) -> View:
        """Survey as `Cluster.survey` does."""
        view = self._cluster.survey()
        if self._recalled:
            return view
        path, database = self._settings.journal, self._settings.journal_database
        unread: list[str] = []
        entries = read_history(self._cluster, view, path, database, unread)
        recall(self._cluster, entries, None, unread)
        self._recalled = True
        return self._cluster.with_memory(view)


def _agrees(fixes: Fixes, *, yes: bool, printed: set[str]) -> bool:
    """Show what would be done, and ask; false where nothing can be done.

    `printed`: what was shown as left by earlier rounds, which one change makes possible after the
    other.
    """
    output.print_fixes(output.on_stderr(), fixes, printed)
    if yes or not fixes.orders:
        return bool(fixes.orders)
    if not sys.stdin.isatty():
        raise SettingsError(
            "the changes must be confirmed, and there is no terminal to ask on",
            operation=FIX,
            hint="pass --yes to perform what is listed as TO DO",
        )
    if not typer.confirm("Do it?", err=True):
        raise SystemExit(int(ExitCode.CHECK_FAILED))
    return True
