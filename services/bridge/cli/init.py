"""The command `slotbridge init`: a commented configuration file, also for a pair that is there."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr, ValidationError

from schemas.errors import SettingsError
from schemas.example import SECTIONS, USUAL, Value, example_file
from schemas.settings import SourceSettings
from services.runtime.process import configure_logging, exit_codes

_OPERATION = "write a configuration file"


def init(
    file: Annotated[Path | None, typer.Argument(help="File to write; without it, stdout.")] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="Section to write: source, kafka, registry, bridge, shaping, snapshot, failover, "
            "tables, claim_check, tracing. Repeatable."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Write all sections.")] = False,
    conninfo: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="CONNINFO",
            help="Look at this pair (host=a,b dbname=… user=…) and propose its settings.",
        ),
    ] = "",
    tables: Annotated[
        str,
        typer.Option(
            help="With --from: tables to publish, separated by commas; `*` for any characters."
        ),
    ] = "",
    kafka: Annotated[
        str, typer.Option(help="With --from: `host:port` of some brokers, separated by commas.")
    ] = "",
    prefix: Annotated[
        str, typer.Option(help="With --from: the topic prefix; else the database's name.")
    ] = "",
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="With --from: ask nothing; propose all tables that have an identity."
        ),
    ] = False,
) -> None:
    """Write a commented configuration file. An existing file is not overwritten.

    Without --section and --all: every key of the sections source, kafka and bridge. --from reads
    the servers and changes nothing there; it asks for tables and brokers that no option names, and
    writes no password.
    """
    configure_logging(json_lines=False)
    with exit_codes():
        sections = SECTIONS if everything else tuple(section or USUAL)
        unknown = sorted(set(sections) - set(SECTIONS))
        if unknown:
            raise SettingsError(
                f"there is no section {unknown[0]}",
                operation=_OPERATION,
                hint=f"choose one of {', '.join(SECTIONS)}",
            )
        if file is not None and file.exists():
            raise _unwritable(file, "it exists")
        values = _look(conninfo, tables, kafka, prefix, yes=yes) if conninfo else {}
        if "failover.nodes" in values:
            sections = (*sections, "failover")
        written = example_file(sections, values)
        if file is None:
            typer.echo(written, nl=False)
            return
        _write(file, written)
        complete = "kafka.bootstrap_servers" in values
        what = "read it" if complete else "replace the examples"
        command = "preflight" if conninfo else "check-config"
        typer.echo(f"{file}: {what}, then slotbridge {command} --config {file}")


def _look(conninfo: str, tables: str, kafka: str, prefix: str, *, yes: bool) -> dict[str, Value]:
    """Return the values for a pair; ask on the terminal for what no option says."""
    from services.bridge.proposal.pair import read_pair
    from services.bridge.proposal.proposal import notes, overview, proposed, select

    try:
        source = SourceSettings(conninfo=SecretStr(conninfo))
    except ValidationError:
        raise SettingsError("--from is empty", operation=_OPERATION) from None
    pair = read_pair(source)
    for line in overview(pair):
        typer.echo(line, err=True)
    if not (tables or yes) and pair.tables:
        tables = typer.prompt("Tables to publish (a, b or public.*)", err=True)
    chosen = select(pair, [name.strip() for name in tables.split(",") if name.strip()])
    if not (kafka or yes):
        kafka = typer.prompt("Kafka's brokers (host:port, host:port)", err=True)
    for note in notes(pair):
        typer.echo(f"note: {note}", err=True)
    return proposed(pair, chosen, kafka=kafka, prefix=prefix)


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as new:
            file.chmod(0o600)
            new.write(text)
    except OSError as error:
        raise _unwritable(file, error.strerror or "") from None


def _unwritable(file: Path, reason: str) -> SettingsError:
    return SettingsError(
        f"can't write {file}: {reason}",
        operation=_OPERATION,
        hint="name a file that does not exist, in a folder that does",
    )
