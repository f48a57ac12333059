"""A bar on the terminal for each table that is restored."""

import contextlib
from collections.abc import Iterator

from spark_consumers.restore.restoration import Progress


@contextlib.contextmanager
def bars() -> Iterator[Progress]:
    """Show bars on stderr where it is a terminal; yield what tells how far a table is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Shown

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    tasks = {}
    hidden = not console.is_terminal
    with Shown(*columns, TimeRemainingColumn(), console=console, disable=hidden) as shown:

        def show(table: str, rows: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = shown.add_task(table, total=total)
            shown.update(tasks[table], completed=rows, total=total)

        yield show
