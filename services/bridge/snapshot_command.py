"""`slotbridge snapshot`: what Kafka has of each table's rows, and signals that ask for rows."""

import json as json_module
import uuid
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import ExitCode, SettingsError
from schemas.events import snapshot_topic
from schemas.settings import load_settings, require
from schemas.snapshot import SnapshotProgress, SnapshotRequest
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.opening import read_known
from services.bridge.snapshot.progress import Known
from services.bridge.snapshot.requests import Signal, asked_of, check
from services.bridge.snapshot.signal_table import send
from services.bridge.snapshot.signal_topic import send_to_topic
from services.runtime.process import configure_logging, exit_codes

snapshot = typer.Typer(help="Rows that were in the tables before the bridge.", no_args_is_help=True)
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="YAML configuration file.")]
Tables = Annotated[list[str] | None, typer.Argument(help="schema.table; none: all.")]
_FINISHED = ("done", "stopped")


@snapshot.command()
def status(
    config: ConfigFile,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
) -> None:
    """Show how much of each table's rows is in Kafka. Needs no bridge and no PostgreSQL.

    Exit codes: 0 all tables that were begun or asked for are done; 1 some are not, or none was
    begun.
    """
    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        topics = Topics(kafka, settings.shaping)
        there = topics.there(snapshot_topic(kafka.topic_prefix))
        known = read_known(topics) if there else Known([], [])
        found = [one for one in known.progress if one.slot == source.slot]
        asked = [one for one in known.requests if one.slot == source.slot]
        found.sort(key=lambda one: (one.schema_, one.table))
        states = [state(one, asked) for one in found]
        if json:
            tables = [
                {**one.model_dump(by_alias=True), "state": said}
                for one, said in zip(found, states, strict=True)
            ]
            said = [one.model_dump() for one in asked]
            document = {"mode": settings.snapshot.mode, "tables": tables, "signals": said}
            typer.echo(json_module.dumps(document))
        else:
            print_tables(found, states, settings.snapshot.mode)
        names = {f"{one.schema_}.{one.table}" for one in found}
        ahead = {one.tables for one in asked if one.type == "read" and "*" not in one.tables}
        ahead -= names
        if not found or ahead or not all(said in _FINISHED for said in states):
            raise SystemExit(int(ExitCode.CHECK_FAILED))


@snapshot.command()
def start(
    config: ConfigFile,
    tables: Annotated[list[str], typer.Argument(help="schema.table (`*`: any characters).")],
    where: Annotated[str, typer.Option(help="An SQL condition for the rows of these tables.")] = "",
) -> None:
    """Ask the bridge for the rows of tables, from the beginning, beside their changes."""
    data: dict[str, object] = {"data-collections": tables, "type": "incremental"}
    if where:
        data["additional-conditions"] = [
            {"data-collection": name, "filter": where} for name in tables
        ]
    _signal(config, "execute-snapshot", data)


@snapshot.command()
def stop(config: ConfigFile, tables: Tables = None) -> None:
    """Ask the bridge to read no more rows of these tables."""
    _signal(config, "stop-snapshot", {"data-collections": tables or [], "type": "incremental"})


@snapshot.command()
def pause(config: ConfigFile, tables: Tables = None) -> None:
    """Ask the bridge to wait with rows of these tables until `resume`."""
    _signal(config, "pause-snapshot", {"data-collections": tables or [], "type": "incremental"})


@snapshot.command()
def resume(config: ConfigFile, tables: Tables = None) -> None:
    """Ask the bridge to go on with rows of these tables."""
    _signal(config, "resume-snapshot", {"data-collections": tables or [], "type": "incremental"})


def _signal(config: Path, kind: str, data: dict[str, object]) -> None:
    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        table, topic = settings.snapshot.signal_table, settings.snapshot.signal_topic
        signal = Signal(str(uuid.uuid4()), kind, json_module.dumps(data))
        check(signal)
        if table is not None:
            send(source, table, signal)
        elif topic is not None:
            send_to_topic(kafka, topic, signal)
        else:
            raise SettingsError(
                "neither snapshot.signal_table nor snapshot.signal_topic is set",
                operation="send a signal",
                hint="name a published table with the columns id, type, data, or a topic "
                "(docs/SNAPSHOTS.md)",
            )
        typer.echo(signal.id)


def state(one: SnapshotProgress, asked: list[SnapshotRequest]) -> str:
    """Return what becomes of a table whose progress is `one`."""
    request, paused = asked_of(one.schema_, one.table, asked)
    if request is not None and request.type == "stop":
        return "done" if one.done else "stopped"
    if paused and not one.done:
        return "paused"
    if request is not None and one.commit_lsn < request.commit_lsn:
        return "asked for"
    return "done" if one.done else "being read"


def print_tables(found: list[SnapshotProgress], states: list[str], mode: str) -> None:
    """One line a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"snapshot.mode is {mode}")
    if not found:
        console.print("Kafka has no rows of a snapshot of this slot")
        return
    lines = Table("table", "rows", "chunks", "state", box=None)
    for one, said in zip(found, states, strict=True):
        lines.add_row(f"{one.schema_}.{one.table}", f"{one.rows:,}", f"{one.chunks:,}", said)
    console.print(lines)
