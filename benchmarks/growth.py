"""How rows/s and memory grow with relations, transaction size, row width and outstanding WAL.

    make bench GROWTH=1    python -m benchmarks.growth [--axes relations,transaction] [--scale 0.1]

Each point is a race (benchmarks.race) of its own load between the bridge and pg_recvlogical;
medians of `--trials`. `backlog` lies before the slot when the bridge starts: up to 10 GB of WAL.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.bridge import Figures, report
from benchmarks.race import results
from benchmarks.race.contenders import RecvLogical, Slotbridge
from benchmarks.race.environment import Environment, environment, say
from benchmarks.race.plot import lines
from benchmarks.race.workload_run import WorkloadRun, warm_up
from benchmarks.race.workloads import ROWS_A_TRANSACTION, Workload, many, narrow, sized

TRIAL_S: Final = 3600.0
_WIDTH_BYTES: Final = 200_000_000


@dataclass(frozen=True, slots=True)
class Axis:
    """`points` along it, and the workload of each."""

    title: str
    points: tuple[int, ...]
    workload: Callable[[int], Workload]


AXES: Final = {
    "relations": Axis("tables", (1, 10, 100, 1_000, 5_000), lambda n: many(n, 200_000)),
    "transaction": Axis(
        "rows in a transaction",
        (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000),
        lambda n: narrow(n, max(200_000, n)),
    ),
    "width": Axis(
        "characters in a row",
        (10, 100, 1_000, 10_000, 100_000, 500_000),
        lambda n: sized(n, max(400, min(200_000, _WIDTH_BYTES // n))),
    ),
    "backlog": Axis(
        "rows outstanding",
        (500_000, 5_000_000, 50_000_000),
        lambda n: narrow(ROWS_A_TRANSACTION, n),
    ),
}


def measure(
    place: Environment, name: str, points: tuple[int, ...], scale: float, trials: int
) -> list[Figures]:
    """One line for each point of the axis and contender. `scale`: of each point's rows."""
    axis, found = AXES[name], []
    for point in points or axis.points:
        workload = axis.workload(point)
        rows = max(point if name == "transaction" else 100, int(workload.rows * scale))
        run = WorkloadRun(place, f"{name}_{point}", workload, rows)
        say(f"{name} {point:,}: {workload.title}, {rows:,} rows: loading")
        run.prepare()
        in_turns = [make for _ in range(trials) for make in (RecvLogical, Slotbridge)]
        raced = [run.trial(make(), timeout_s=TRIAL_S) for make in in_turns]
        run.drop()
        for line in results.medians(raced):
            found.append(_line(name, point, line, run.wal_bytes))
            say(str(found[-1]))
    return found


def _line(name: str, point: int, line: dict[str, Any], wal_bytes: int) -> Figures:
    return {
        "axis": name,
        "point": point,
        "contender": line["contender"],
        "WAL MB": wal_bytes / 1e6,
        "rows/s": round(line["rows_s"]),
        "MB/s": line["mb_s"],
        "CPU-s per 10⁶ rows": line["cpu_s_per_million"],
        "broker CPU-s": line["broker_cpu_s"],
        "MiB": round(line["peak_mib"]),
        "seconds": line["seconds"],
    }


def _plot(folder: Path, name: str, found: list[Figures]) -> None:
    """`growth-<axis>.svg`: rows/s of both, and our memory."""
    series = {
        f"{contender}, {what}": [
            (float(line["point"]), max(float(line[what]), 0.1))
            for line in found
            if line["contender"] == contender
        ]
        for contender, what in (
            ("slotbridge", "rows/s"),
            ("pg_recvlogical", "rows/s"),
            ("slotbridge", "MiB"),
        )
    }
    plot = lines(series, x_title=AXES[name].title, y_title="rows/s, MiB")
    (folder / f"growth-{name}.svg").write_text(plot, encoding="utf-8")


def main(
    axes: Annotated[str, typer.Option(help=", ".join(AXES))] = ",".join(AXES),
    points: Annotated[str, typer.Option(help="instead of the axis's own, by comma")] = "",
    scale: Annotated[float, typer.Option(help="of each point's rows")] = 1.0,
    trials: Annotated[int, typer.Option(min=1)] = 1,
    out: Annotated[Path, typer.Option()] = Path("bench-results"),
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Servers of its own for each axis; print, write JSON and plots."""
    names = axes.split(",")
    for wrong in (name for name in names if name not in AXES):
        raise typer.BadParameter(f"{wrong}: known are {', '.join(AXES)}")
    chosen = tuple(int(point) for point in points.split(",") if point)
    out.mkdir(parents=True, exist_ok=True)
    found: list[Figures] = []
    for name in names:
        with environment() as place:
            warm_up(place)
            of_axis = measure(place, name, chosen, scale, trials)
        _plot(out, name, of_axis)
        found += of_axis
    (out / "growth.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    report(found, as_json=as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
