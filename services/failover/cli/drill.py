"""The command `drill`: a failover rehearsed on a throw-away clone, which is removed again."""

import time
from typing import Annotated

import typer

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError, SlotbridgeError
from schemas.settings import FailoverSettings
from services.failover.checks.check_report import require_single_primary
from services.failover.checks.readiness import candidate
from services.failover.cli import output
from services.failover.cli.options import Json, settings_of
from services.failover.drill.clone import Clone, Programs
from services.failover.drill.outcome import DrillPart, Outcome
from services.failover.drill.rehearsal import Rehearsal, reachable
from services.failover.execute.interruption import sigterm_interrupts
from services.failover.execute.journal import DRILL, Journal
from services.failover.model.preconditions import require_one_system
from services.failover.model.view import Node, View
from services.failover.observe.cluster import Cluster
from services.postgres.rows import one_row
from services.postgres.server import Connection
from services.runtime.process import exit_codes


def drill(
    config: ConfigFile,
    as_json: Json = False,
    standby: Annotated[
        str,
        typer.Option(metavar="NODE", help="Rehearse with this standby instead of the best one."),
    ] = "",
    clean: Annotated[
        bool, typer.Option("--clean", help="Only remove what a killed drill has left behind.")
    ] = False,
) -> None:
    """Promote a temporary clone of the standby, decode from its slots, and remove the clone.

    Exit codes: 0 all slots are usable; 1 one is not; others: the drill could not be carried out.
    """
    with exit_codes(as_json=as_json):
        settings, bridge = settings_of(config)
        with Cluster(settings, bridge, admin=True) as cluster, sigterm_interrupts():
            view = cluster.observe()
            rehearsal = _rehearsal(settings, cluster, view, standby)
            if clean:
                done = rehearsal.clean()
                _answer_cleaned(done, as_json=as_json)
                raise SystemExit(int(ExitCode.OK))
            _require_room(cluster, rehearsal)
            journal = Journal(settings.journal, cluster, settings.journal_database, DRILL)
            outcome = _recorded(rehearsal, journal, view)
        if as_json:
            output.print_json(outcome.as_json())
        else:
            output.print_drill(output.on_stdout(), outcome)
        raise SystemExit(int(outcome.exit_code))


def _rehearsal(settings: FailoverSettings, cluster: Cluster, view: View, name: str) -> Rehearsal:
    """Return the drill of a standby, the best one unless named. Raise where one is missing."""
    require_one_system(view)
    require_single_primary(view)
    primary, chosen = view.primary, view.node(name) if name in cluster.nodes else candidate(view)
    if name and (name not in cluster.nodes or not view.node(name).standby):
        raise OperatorNeeded(
            f"{name} is not a standby that answers",
            operation="drill",
            hint=f"the standbys are {', '.join(node.name for node in view.standbys) or 'none'}",
            exit_code=ExitCode.NOT_READY,
        )
    if primary is None or chosen is None:
        missing = "primary" if primary is None else "standby"
        raise Retryable(
            f"no {missing} answers",
            operation="drill",
            hint="start one: a drill needs a primary and a standby; the clone gets its slots as "
            "a standby does",
        )
    given = settings.drill
    machine = settings.machines.get(chosen.name)
    of_machine = (machine.bin_folder, machine.os_user) if machine is not None else (None, "")
    programs = Programs(given.bin_folder or of_machine[0], given.os_user or of_machine[1])
    console = output.on_stderr()
    return Rehearsal(
        cluster,
        view,
        primary,
        chosen,
        Clone(given.folder, _system(chosen), programs),
        lambda part: output.print_part(console, part),
        given.copy_deadline_ms / 1000,
        given.slots_deadline_ms / 1000,
        given.settings,
    )


def _require_room(cluster: Cluster, rehearsal: Rehearsal) -> None:
    """Raise SetupError where the clone would not fit, or could hold up the primary's commits."""
    with reachable():
        size, tablespaces = cluster.nodes[rehearsal.standby.name].ask(_size)
    state = rehearsal.primary.state
    if state is not None and "*" in state.setting("synchronous_standby_names"):
        raise SetupError(
            "synchronous_standby_names contains *, so commits could wait for the clone only",
            operation="drill",
            subject=rehearsal.primary.name,
            hint="name the standbys in synchronous_standby_names",
        )
    if tablespaces:
        raise SetupError(
            "the standby has tablespaces outside of its data folder",
            operation="drill",
            subject=rehearsal.standby.name,
            hint="a drill can't rehearse this standby: its clone can't copy such tablespaces",
        )
    rehearsal.clone.require_room(size)


def _recorded(rehearsal: Rehearsal, journal: Journal, view: View) -> Outcome:
    """Run the drill, and keep the journal whatever comes of it."""
    begun = time.monotonic()
    journal.begin(view, {"target": rehearsal.standby.name})
    report = rehearsal.report

    def note(part: DrillPart) -> None:
        report(part)
        journal.note(view, part.name, rehearsal.standby.name, part.seconds, part.detail)

    rehearsal.report = note
    try:
        outcome = rehearsal.run()
    except (SlotbridgeError, KeyboardInterrupt) as error:
        said = str(error) or "it was interrupted"
        journal.end(view, said, time.monotonic() - begun)
        raise
    journal.end(view, outcome.text, outcome.seconds)
    return outcome


def _answer_cleaned(done: list[str], *, as_json: bool) -> None:
    if as_json:
        output.print_json({"removed": done})
        return
    for text in done or ["nothing is left of a drill"]:
        output.on_stdout().print(text)


def _system(node: Node) -> str:
    return node.known_state.server.system_identifier


def _size(connection: Connection) -> tuple[int, int]:
    """Return (bytes of all databases, number of the server's own tablespaces)."""
    row = one_row(
        connection.execute(
            "SELECT (SELECT sum(pg_database_size(oid)) FROM pg_database)::bigint,"
            " (SELECT count(*) FROM pg_tablespace WHERE spcname !~ '^pg_')"
        )
    )
    return int(row[0]), int(row[1])
