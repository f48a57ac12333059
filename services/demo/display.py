"""The display of the demo: stages with their times, the rate at each hop, the final table."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.demo.comparison import TableResult

_WIDTH_OF_LOGS: Final = 120


@dataclass(slots=True)
class Hop:
    """A place that changes pass, and how fast and how far behind it is right now."""

    name: str
    rows: int = 0
    rows_per_second: float = 0.0
    lag: str = ""


@dataclass(slots=True)
class Board:
    """The state of the demonstration that is drawn; `slots` maps a slot to its readiness."""

    hops: list[Hop] = field(default_factory=list)
    slots: dict[str, str] = field(default_factory=dict)


class Display:
    """Draws the board on a terminal, or a line for each stage elsewhere. Writes to stderr."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._console = Console(stderr=True)
        if not self._console.is_terminal:
            self._console.width = _WIDTH_OF_LOGS
        self._finished: list[tuple[str, float]] = []
        self._current: tuple[str, float] | None = None
        self._note = ""
        self._started = time.monotonic()
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show that `name` is being done, and how long it took."""
        started = time.monotonic()
        self._current = (name, started)
        self._note = ""
        yield
        seconds = time.monotonic() - started
        self._finished.append((name, seconds))
        self._current = None
        if not self._console.is_terminal:
            total = time.monotonic() - self._started
            hops = "  ".join(f"{hop.name} {hop.rows:,}" for hop in self._board.hops)
            self._console.print(f"{total:6.1f} s  {name} ({seconds:.1f} s)  {hops}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a detail of the current stage."""
        self._note = text

    def results(self, results: list[TableResult]) -> None:
        """Print the table of the comparison's results."""
        table = Table(title="rows in each copy", title_justify="left")
        for heading in ("table", "database", "subscriber", "Kafka", "Iceberg", "events"):
            table.add_column(heading, justify="left" if heading == "table" else "right")
        for heading in ("lost", "duplicated", "equal"):
            table.add_column(heading, justify="right")
        for r in results:
            table.add_row(
                r.table,
                f"{r.database_rows:,}",
                f"{r.subscriber_rows:,}" + ("" if r.subscriber_equal else " ≠"),
                f"{r.kafka_rows:,}",
                f"{r.iceberg_rows:,}" + ("" if r.iceberg_equal else " ≠"),
                f"{r.kafka_events:,}",
                f"{r.lost:,}",
                f"{r.duplicated:,}",
                "yes" if r.equal else "NO",
                style="green" if r.equal else "red",
            )
        self._console.print(table)

    def _draw(self) -> Group:
        """Return what the terminal shows: stages, hops, slots."""
        stages = [
            Text.assemble(("✓ ", "green"), name, (f"  {seconds:.1f} s", "dim"))
            for name, seconds in self._finished
        ]
        parts: list[Text | Table | Spinner] = list(stages)
        if self._current is not None:
            name, started = self._current
            seconds = time.monotonic() - started
            note = f"  {self._note}" if self._note else ""
            parts.append(Spinner("dots", Text(f"{name}  {seconds:.0f} s{note}")))
        parts.append(self._hops())
        slots = "   ".join(f"{slot}: {state}" for slot, state in self._board.slots.items())
        parts.append(Text(f"failover slots   {slots or '-'}", style="dim"))
        return Group(*parts)

    def _hops(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("hop", "rows", "rows/s", "lag"):
            table.add_column(heading, justify="left" if heading == "hop" else "right", min_width=9)
        for hop in self._board.hops:
            table.add_row(hop.name, f"{hop.rows:,}", f"{hop.rows_per_second:,.0f}", hop.lag)
        return table
