"""`slotbridge snapshot status`: what Kafka has of each table's rows."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import ExitCode
from schemas.events import snapshot_topic
from schemas.settings import load_settings, require
from schemas.snapshot import SnapshotProgress
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.opening import read_progress
from services.runtime.process import configure_logging, exit_codes

snapshot = typer.Typer(help="Rows that were in the tables before the bridge.", no_args_is_help=True)


@snapshot.callback()
def _group() -> None:
    """Keep `status` a subcommand, though it is the only one."""


@snapshot.command()
def status(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML configuration file.")],
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
) -> None:
    """Show how much of each table's rows is in Kafka. Needs no bridge and no PostgreSQL.

    Exit codes: 0 all tables that were begun are done; 1 some are not, or none was begun.
    """
    configure_logging(json_lines=False)
    with exit_codes():
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        topics = Topics(kafka, settings.shaping)
        there = topics.there(snapshot_topic(kafka.topic_prefix))
        found = [one for one in read_progress(topics) if one.slot == source.slot] if there else []
        found.sort(key=lambda one: (one.schema_, one.table))
        if json:
            tables = [one.model_dump(by_alias=True) for one in found]
            typer.echo(json_module.dumps({"mode": settings.snapshot.mode, "tables": tables}))
        else:
            print_tables(found, settings.snapshot.mode)
        if not found or not all(one.done for one in found):
            raise SystemExit(int(ExitCode.CHECK_FAILED))


def print_tables(found: list[SnapshotProgress], mode: str) -> None:
    """One line a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"snapshot.mode is {mode}")
    if not found:
        console.print("Kafka has no rows of a snapshot of this slot")
        return
    lines = Table("table", "rows", "chunks", "state", box=None)
    for one in found:
        state = "done" if one.done else "being read"
        lines.add_row(f"{one.schema_}.{one.table}", f"{one.rows:,}", f"{one.chunks:,}", state)
    console.print(lines)
