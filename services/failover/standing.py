"""The command `status`: it looks, changes nothing and takes no lock."""

import contextlib

from schemas.errors import SlotbridgeError
from services.failover import report
from services.failover.cluster import Cluster
from services.failover.history import read_history, unfinished
from services.failover.links import Unreachable
from services.failover.lock import holder
from services.failover.options import Config, Json, settings_of
from services.failover.status import status_of
from services.failover.view import View
from services.process import exit_codes


def status(config: Config, as_json: Json = False) -> None:
    """Who is the primary, since when, fenced by whom; lag, unfinished run, lock: on one screen."""
    with exit_codes(as_json=as_json):
        settings, bridge = settings_of(config)
        with Cluster(settings, bridge) as cluster:
            view, problems = cluster.observe_all()
            entries = read_history(cluster, view, settings.journal, settings.journal_database)
            holders = _holders(cluster, view, settings.journal_database)
            found = status_of(view, entries, unfinished(entries), holders)
        if as_json:
            report.print_json(found.as_json())
        else:
            report.print_status(report.on_stdout(), found)
            report.print_notes(report.on_stderr(), [str(error) for error in problems.values()])
        raise SystemExit(int(found.exit_code))


def _holders(cluster: Cluster, view: View, database: str) -> list[str]:
    """Who holds the commands' lock, by node."""
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
