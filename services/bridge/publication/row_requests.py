"""Asks for the rows that a changed publication lets through only now, and never forgets to.

    snapshot.signal_table   the transaction that changes the publication inserts the signals
    snapshot.signal_topic   that transaction notes the tables in the publication's comment; the note
                            is removed once Kafka has the signal

So no publication is changed without a trace of the rows that were asked for. A note that an
interrupted call has left is told by the next call, and `--read-rows` finishes it.

    slotbridge --read-rows: ["public.a", "public.b"]        a line of the comment
"""

import json
import shlex
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from psycopg import sql

from schemas.errors import SlotbridgeError
from schemas.settings import Settings
from services.bridge.failpoints import reach
from services.bridge.publication.plan import Changes
from services.bridge.snapshot.requests import Signal, check_signal
from services.bridge.snapshot.signal_sending import READ_ROWS, rows_of, send_signal
from services.bridge.snapshot.signal_table import DATA_MAX, insert_statement, require_published
from services.postgres.server import Connection

_NOTE: Final = "slotbridge --read-rows: "


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The tables whose rows are asked for, as `schema.table`, and how the bridge is asked.

    `asked`: the caller wants it (--read-rows). `changed`: the tables that this call changes;
    `unfinished`: those that an earlier call has noted. `comment`: the publication's, without notes.
    """

    settings: Settings
    publication: str
    asked: bool
    changed: tuple[str, ...]
    unfinished: tuple[str, ...]
    comment: str

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the tables to ask for now."""
        return tuple(dict.fromkeys((*self.unfinished, *self.changed))) if self.asked else ()

    @property
    def in_transaction(self) -> bool:
        """Tell whether the transaction that changes the publication asks by itself."""
        return self.settings.snapshot.signal_table is not None

    def statements(self) -> Iterator[sql.Composed]:
        """Yield the statements that belong behind those that change the publication."""
        table = self.settings.snapshot.signal_table
        if not self.tables or table is None:
            return
        yield sql.SQL("SET LOCAL synchronous_commit TO DEFAULT").format()
        yield insert_statement(table, signals_of(self.tables))
        if self.unfinished:
            yield self._note(())

    def keep(self, connection: Connection) -> None:
        """Leave, within the caller's transaction, a trace of what is asked for once it has ended.

        Raise SettingsError where nobody would read the signals that it has inserted.
        """
        table = self.settings.snapshot.signal_table
        if self.tables and table is not None:
            require_published(connection, self.publication, table)
        elif self.asked and self.changed:
            connection.execute(self._note(self.tables))

    def finish(self, connection: Connection) -> None:
        """Ask the bridge, if the transaction has not; then remove the note. Raise SlotbridgeError.

        Whatever happens here, the note stays until Kafka has the signal.
        """
        if not self.tables:
            return
        signal_note = ""
        if not self.in_transaction:
            reach("rows noted")
            try:
                signal = send_signal(self.settings, READ_ROWS, rows_of(self.tables))
            except SlotbridgeError:
                typer.echo(
                    "the publication is changed, but the bridge is not asked for the rows of "
                    f"{', '.join(self.tables)}: run this again with --read-rows",
                    err=True,
                )
                raise
            signal_note = f" (signal {signal})"
            reach("rows asked for")
            connection.execute(self._note(()))
        typer.echo(f"the bridge is asked for their rows{signal_note}", err=True)

    def print_notes(self, config: Path, *, dry_run: bool) -> None:
        """Print what becomes of rows that the server lets through only now."""
        start = f"slotbridge snapshot start {{}} --config {shlex.quote(str(config))}"
        if self.changed:
            names = " ".join(map(shlex.quote, self.changed))
            rows = f"are read on request alone: {start.format(names)}"
            if self.asked and not dry_run:
                rows = "are asked for at the end"
            elif self.asked and self.in_transaction:
                rows = "are asked for by the INSERT"
            elif self.asked:
                rows = f"are asked for once the statements are executed: {start.format(names)}"
            typer.echo(
                "tables with another row filter or column list: it holds for changes from now on; "
                f"rows that it lets through only now {rows}; Kafka keeps what it has",
                err=True,
            )
        if self.unfinished:
            now = "they are asked for now" if self.asked else "run this with --read-rows"
            typer.echo(
                f"an earlier call with --read-rows has changed {', '.join(self.unfinished)}, and "
                f"was interrupted before it asked the bridge for their rows: {now}",
                err=True,
            )
        elif self.asked and not self.changed:
            typer.echo(
                "--read-rows asks for the rows of tables whose row filter or column list this call "
                f"changes, and it changes none; for others: {start.format('TABLE')}",
                err=True,
            )

    def _note(self, tables: Sequence[str]) -> sql.Composed:
        """Return the statement that notes `tables` in the comment, beside what is there."""
        lines = [self.comment] if self.comment else []
        lines += [_NOTE + json.dumps([*tables])] if tables else []
        comment = sql.Literal("\n".join(lines)) if lines else sql.SQL("NULL")
        statement = sql.SQL("COMMENT ON PUBLICATION {} IS {}")
        return statement.format(sql.Identifier(self.publication), comment)


def row_request(
    connection: Connection, settings: Settings, planned: Changes, *, asked: bool
) -> RowRequest:
    """Return what is to be asked for with `planned`, and what an earlier call has left."""
    row = connection.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s",
        [planned.publication],
    ).fetchone()
    comment, unfinished = parse_comment((row and row[0]) or "")
    changed = tuple(".".join(table) for table in planned.selected_anew)
    return RowRequest(settings, planned.publication, asked, changed, unfinished, comment)


def parse_comment(comment: str) -> tuple[str, tuple[str, ...]]:
    """Return a publication's comment without our notes, and the tables of the notes."""
    kept: list[str] = []
    tables: list[str] = []
    for line in comment.split("\n"):
        try:
            noted = json.loads(line.removeprefix(_NOTE)) if line.startswith(_NOTE) else None
        except ValueError:  # somebody has edited it
            noted = None
        if isinstance(noted, list):
            tables += map(str, noted)
        else:
            kept.append(line)
    return "\n".join(kept), tuple(tables)


def signals_of(tables: Iterable[str]) -> list[Signal]:
    """Return signals that ask for the rows of `tables`, as few as a signal's length allows."""
    portions: list[list[str]] = [[]]
    for table in tables:
        if portions[-1] and len(_data([*portions[-1], table])) > DATA_MAX:
            portions.append([])
        portions[-1].append(table)
    found = [Signal(str(uuid.uuid4()), READ_ROWS, _data(one)) for one in portions if one]
    for signal in found:
        check_signal(signal)
    return found


def _data(tables: Sequence[str]) -> str:
    return json.dumps(rows_of(tables))
