"""A bar on the screen for each table of a snapshot: rows, bytes, rate, and what is left."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from schemas.snapshot import SnapshotProgress


class Bars:
    """Progress bars, shown while the context is entered; call `show` with each observation."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rows]}", justify="right"),
            TextColumn("{task.fields[megabytes]} MB", justify="right"),
            TextColumn("{task.fields[rate]} rows/s", justify="right"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, tables: Sequence[SnapshotProgress], states: Sequence[str]) -> None:
        """Show the tables as they are now."""
        for one, state in zip(tables, states, strict=True):
            name = f"{one.schema_}.{one.table}"
            fields: dict[str, Any] = {
                "rows": f"{one.rows:,}",
                "megabytes": f"{one.bytes / 1e6:,.1f}",
                "rate": f"{one.rows_per_second:,.0f}",
                "state": state,
            }
            total = one.rows if one.done else max(one.rows_estimate, one.rows + 1)
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, **fields)
            self._progress.update(self._tasks[name], completed=one.rows, total=total, **fields)
        self._progress.refresh()
