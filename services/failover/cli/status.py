"""The commands `status` and `history`: they look, change nothing and take no lock."""

import contextlib
from typing import Annotated

import typer

from schemas.config_option import ConfigFile
from schemas.errors import SlotbridgeError
from services.failover.cli import output
from services.failover.cli.options import Json, settings_of
from services.failover.execute.history import history_as_json, read_history, unfinished
from services.failover.execute.lock import holder
from services.failover.execute.pair_status import status_of
from services.failover.execute.timeline_memory import recall
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import Unreachable
from services.runtime.process import exit_codes


def status(config: ConfigFile, as_json: Json = False) -> None:
    """Show on one screen the primary, its fence, lag, an unfinished run and the lock.

    Exit codes: 0 all is well; 1 something is not well; 35 two servers take writes.
    """
    with exit_codes(as_json=as_json):
        settings, bridge = settings_of(config)
        with Cluster(settings, bridge) as cluster:
            view, problems = cluster.observe_all()
            unread: list[str] = []
            path, database = settings.journal, settings.journal_database
            entries = read_history(cluster, view, path, database, unread)
            notes = recall(cluster, entries, None, unread)
            view = cluster.with_memory(view)
            holders = _holders(cluster, view, settings.journal_database)
            found = status_of(view, entries, unfinished(entries), holders)
        if as_json:
            output.print_json(found.as_json())
        else:
            output.print_status(output.on_stdout(), found)
            unseen = [*(str(error) for error in problems.values()), *notes]
            output.print_notes(output.on_stderr(), unseen)
        raise SystemExit(int(found.exit_code))


def _holders(cluster: Cluster, view: View, database: str) -> list[str]:
    """Return who holds the commands' lock on which node."""
    found = []
    for node in view.nodes:
        if node.state is not None:
            with (
                contextlib.suppress(Unreachable, SlotbridgeError),
                cluster.in_database(node.name, database) as link,
            ):
                held = link.ask(holder)
                found += [f"on {node.name} by {held}"] if held else []
    return found


def history(
    config: ConfigFile,
    as_json: Json = False,
    count: Annotated[int, typer.Option("--last", help="How many runs to print.")] = 10,
) -> None:
    """Print past runs from the journals: who did what, when, and how it ended."""
    with exit_codes(as_json=as_json):
        settings, _ = settings_of(config)
        with Cluster(settings) as cluster:
            view = cluster.observe()
            entries = read_history(cluster, view, settings.journal, settings.journal_database)
        runs = list(dict.fromkeys(entry.run for entry in entries))[-count:]
        chosen = [entry for entry in entries if entry.run in runs]
        if as_json:
            output.print_json(history_as_json(chosen))
        else:
            output.print_history(output.on_stdout(), chosen)
