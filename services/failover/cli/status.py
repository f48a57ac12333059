"""The command `status`: it looks, changes nothing and takes no lock."""

import contextlib

from schemas.errors import SlotbridgeError
from services.failover.cli import output
from services.failover.cli.options import Config, Json, settings_of
from services.failover.execute.history import read_history, unfinished
from services.failover.execute.lock import holder
from services.failover.execute.pair_status import status_of
from services.failover.execute.timeline_memory import recall
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import Unreachable
from services.runtime.process import exit_codes


def status(config: Config, as_json: Json = False) -> None:
    """Show on one screen the primary, its fence, lag, an unfinished run and the lock.

    Exit codes: 0 all is well; 1 a line is not; 35 two servers take writes.
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
