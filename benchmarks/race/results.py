"""Trials to medians, ratios, a table, JSON, and a plot."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.race.plot import bars
from benchmarks.race.workload_run import Trial

_COLUMNS: Final = (
    "workload",
    "contender",
    "format",
    "trials",
    "rows/s",
    "MB/s",
    "CPU-s per 10⁶ rows",
    "MiB",
    "walsender busy",
    "busiest thread",
    "ours: rows/s x",
    "ours: CPU 1/x",
)
OURS: Final = "slotbridge"


def medians(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One line for each contender and format, in their order; ratios are ours in this format."""
    names = list(dict.fromkeys((trial.contender, trial.form) for trial in trials))
    found = {}
    for name in names:
        figures = [trial.figures() for trial in trials if (trial.contender, trial.form) == name]
        middle = {
            key: statistics.median(one[key] for one in figures)
            for key, value in figures[0].items()
            if isinstance(value, int | float)
        }
        contender, form = name
        head = {"contender": contender, "form": form, "trials": len(figures)}
        found[name] = {**head, **middle}
    first = next((line for (name, _), line in found.items() if name == OURS), None)
    for (_, form), line in found.items():
        ours = found.get((OURS, form)) if form else first
        if ours is not None:
            line["ours_rows_s_ratio"] = ours["rows_s"] / line["rows_s"]
            line["ours_cpu_ratio"] = line["cpu_s"] / ours["cpu_s"] if ours["cpu_s"] else 0.0
    return list(found.values())


def machine(versions: Mapping[str, str]) -> dict[str, Any]:
    """What the figures depend on."""
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory = Path("/proc/meminfo").read_text(encoding="ascii").split()[1]
    return {
        "cores": os.cpu_count(),
        "cpu": cpu[0] if cpu else platform.machine(),
        "memory_gib": round(int(memory) / 2**20),
        "python": platform.python_version(),
        **versions,
        "command": " ".join(["python -m benchmarks.race", *sys.argv[1:]]),
        "load_average": os.getloadavg()[0],
    }


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown."""
    lines = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    for key, of_workload in results.items():
        for line in of_workload:
            ratio, cpu = line.get("ours_rows_s_ratio"), line.get("ours_cpu_ratio")
            other = line["contender"] != OURS
            lines.append(
                _row(
                    [
                        key,
                        line["contender"],
                        line["form"],
                        str(line["trials"]),
                        f"{line['rows_s']:,.0f}",
                        f"{line['mb_s']:.1f}",
                        f"{line['cpu_s_per_million']:.1f}",
                        f"{line['peak_mib']:.0f}",
                        f"{line['walsender_busy']:.0%}",
                        f"{line['thread_busy']:.0%}",
                        f"{ratio:.2f}" if ratio is not None and other else "",
                        f"{cpu:.2f}" if cpu is not None and other else "",
                    ]
                )
            )
    return "\n".join(lines) + "\n"


def write(
    folder: Path,
    about: Mapping[str, Any],
    trials: Mapping[str, Sequence[Trial]],
    results: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """`race.json`, `race.md`, `race.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "about": about,
        "medians": results,
        "trials": {key: [trial.figures() for trial in of_key] for key, of_key in trials.items()},
    }
    (folder / "race.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    (folder / "race.md").write_text(table(results), encoding="utf-8")
    groups = {
        key: {_label(line): float(line["rows_s"]) for line in lines}
        for key, lines in results.items()
    }
    (folder / "race.svg").write_text(bars(groups, unit="rows/s"), encoding="utf-8")


def _label(line: Mapping[str, Any]) -> str:
    form = line["form"]
    return f"{line['contender']} {form}" if form not in ("", "json") else str(line["contender"])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
