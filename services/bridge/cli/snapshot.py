"""`slotbridge snapshot`: the progress of each table, and signals that ask for rows."""

import contextlib
import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode
from schemas.events import progress_topic
from schemas.settings import load_settings, require
from schemas.snapshot import SnapshotProgress, SnapshotRequest, SnapshotSettings
from services.bridge.cli.snapshot_bars import Bars
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.session_snapshot import look_for_known
from services.bridge.snapshot.signal_sending import READ_ROWS, rows_of, send_signal
from services.bridge.snapshot.table_state import FINISHED, state
from services.runtime.process import configure_logging, exit_codes, stop_on_signals

snapshot = typer.Typer(
    help="Show and control snapshots: rows older than the slot.", no_args_is_help=True
)
_STALLED_S: Final = 60.0
Tables = Annotated[list[str] | None, typer.Argument(help="Tables as schema.table; default: all.")]


@snapshot.command()
def status(
    config: ConfigFile,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until all rows are read, or Ctrl-C.")
    ] = False,
    every_s: Annotated[
        float, typer.Option(min=0.5, help="With --watch: seconds between two reports.")
    ] = 2.0,
) -> None:
    """Show how much of each table's rows is in Kafka. Needs no bridge and no PostgreSQL.

    --watch shows a bar for each table; with --json, a document a line.

    Exit codes: 0 all tables are done, also those that were asked for; 1 a table is not done or
    can't be read, no snapshot has begun, or the state is not judged.
    """
    configure_logging(json_lines=False)
    with exit_codes(), contextlib.ExitStack() as stack:
        settings = load_settings(config)
        source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
        topics = Topics(kafka, settings.shaping)
        mode = _mode(settings.snapshot, topics, source.slot)
        stop = stop_on_signals() if watch else None
        bars = stack.enter_context(Bars()) if watch and not json else None
        while True:
            seen = _look(topics, source.slot)
            if json:
                typer.echo(json_module.dumps(seen.as_json(mode)))
            elif bars is not None:
                bars.show(seen.tables, seen.states)
            else:
                print_tables(seen.tables, seen.states, mode)
                for name, reason in seen.refused.items():
                    typer.echo(f"not read: {name} {reason}")
                if stalled_s := seen.stalled_s(time.time()):
                    typer.echo(
                        f"no rows have come for {stalled_s:.0f} s: the log of the bridge says what "
                        "it waits for, and `slotbridge preflight` examines the servers"
                    )
            if stop is None or seen.finished or stop.wait(every_s):
                break
        if not seen.finished:
            raise SystemExit(int(ExitCode.CHECK_FAILED))


class Seen(NamedTuple):
    """The state of one slot's snapshot in Kafka, and of each table."""

    tables: list[SnapshotProgress]
    asked: list[SnapshotRequest]
    states: list[str]
    waiting: int
    """How many tables had rows left to read at the last chunk."""
    refused: dict[str, str]
    """`schema.table` -> why its rows could not be read then."""

    @property
    def finished(self) -> bool:
        """Whether all tables of the snapshot, and all that was asked for, are done."""
        names = {f"{one.schema_}.{one.table}" for one in self.tables}
        ahead = {one.tables for one in self.asked if one.type == "read" and "*" not in one.tables}
        done = all(said in FINISHED for said in self.states)
        none_left = self.waiting == 0 and not self.refused
        return bool(self.tables) and not ahead - names and done and none_left

    def stalled_s(self, now: float) -> float:
        """Return since when no rows have come, as seconds; 0: not for long, or none are to come.

        `now`: Unix time.
        """
        unfinished = {said for said in self.states if said not in FINISHED}
        nothing_left = self.waiting == 0 and not unfinished
        if not self.tables or self.finished or nothing_left or unfinished == {"paused"}:
            return 0.0
        seconds = now - max(one.ts_ms for one in self.tables) / 1000
        return seconds if seconds >= _STALLED_S else 0.0

    def as_json(self, mode: str) -> dict[str, Any]:
        """Return it as one document."""
        tables = [
            {
                **one.model_dump(by_alias=True),
                "state": said,
                "rows_per_second": round(one.rows_per_second, 1),
                "seconds_left": None if one.seconds_left is None else round(one.seconds_left, 1),
            }
            for one, said in zip(self.tables, self.states, strict=True)
        ]
        asked = [one.model_dump() for one in self.asked]
        return {
            "mode": mode,
            "tables": tables,
            "signals": asked,
            "refused": self.refused,
            "stalled_s": round(self.stalled_s(time.time()), 1),
        }


def _mode(snapshot: SnapshotSettings, topics: Topics, slot: str) -> str:
    """Return the mode that is in effect."""
    if snapshot.mode is not None:
        return snapshot.mode
    record = topics.last_progress(slot) if topics.there(progress_topic(topics.prefix)) else None
    return str(snapshot.in_effect(reads_rows=record is None or record.settings.reads_rows).mode)


def _look(topics: Topics, slot: str) -> Seen:
    """Return what Kafka has of the slot's snapshots: progress, requests, states, refusals."""
    known = look_for_known(topics)
    tables = [one for one in known.progress if one.slot == slot]
    asked = [one for one in known.requests if one.slot == slot]
    waiting, refused = (tables[-1].waiting, tables[-1].refused) if tables else (0, {})
    tables.sort(key=lambda one: (one.schema_, one.table))
    return Seen(tables, asked, [state(one, asked) for one in tables], waiting, refused)


@snapshot.command()
def start(
    config: ConfigFile,
    tables: Annotated[
        list[str], typer.Argument(help="Tables as schema.table; `*` stands for any characters.")
    ],
    where: Annotated[str, typer.Option(help="An SQL condition for the rows of these tables.")] = "",
) -> None:
    """Ask the bridge to read the rows of these tables from the beginning, beside their changes.

    start, stop, pause and resume need snapshot.signal_table or snapshot.signal_topic.
    """
    data = rows_of(tables)
    if where:
        data["additional-conditions"] = [
            {"data-collection": name, "filter": where} for name in tables
        ]
    _signal(config, READ_ROWS, data)


@snapshot.command()
def stop(config: ConfigFile, tables: Tables = None) -> None:
    """Ask the bridge to read no more rows of these tables."""
    _signal(config, "stop-snapshot", rows_of(tables or []))


@snapshot.command()
def pause(config: ConfigFile, tables: Tables = None) -> None:
    """Ask the bridge to pause reading rows of these tables until `resume`."""
    _signal(config, "pause-snapshot", rows_of(tables or []))


@snapshot.command()
def resume(config: ConfigFile, tables: Tables = None) -> None:
    """Ask the bridge to go on reading rows of these tables."""
    _signal(config, "resume-snapshot", rows_of(tables or []))


def _signal(config: Path, kind: str, data: dict[str, object]) -> None:
    configure_logging(json_lines=False)
    with exit_codes():
        typer.echo(send_signal(load_settings(config), kind, data))


def print_tables(found: list[SnapshotProgress], states: list[str], mode: str) -> None:
    """Print one line for each table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"snapshot.mode is {mode}")
    if not found:
        console.print(
            "Kafka has no rows of a snapshot of this slot; if a bridge runs, its log says why"
        )
        return
    names = ("table", "rows", "of about", "MB", "rows/s", "chunks", "state", "read from")
    lines = Table(*names, box=None)
    for one, said in zip(found, states, strict=True):
        about = f"{one.rows_estimate:,}" if one.rows_estimate >= 0 else "?"
        numbers = (f"{one.bytes / 1e6:,.1f}", f"{one.rows_per_second:,.0f}", f"{one.chunks:,}")
        lines.add_row(
            f"{one.schema_}.{one.table}",
            f"{one.rows:,}",
            about,
            *numbers,
            said,
            one.read_from or "?",
        )
    console.print(lines)
