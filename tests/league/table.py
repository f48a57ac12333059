"""The league's table: one line for each contender, summed over its runs. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from tests.league.run import Run
from tests.league.verdict import Verdict

_HEAD = (
    *("contender", "runs", "faults", "SIGKILLs", "failovers", "transactions", "events"),
    *("lost", "repeated", "torn", "phantoms", "went back", "wrong rows", "stopped"),
)


def table(runs: Sequence[Run]) -> str:
    """Return the table in Markdown, contenders in the order of their first runs."""
    lines = [_line(_HEAD), _line("---" for _ in _HEAD)]
    for name in dict.fromkeys(run.contender for run in runs):
        of_it = [run for run in runs if run.contender == name]
        sums = sum((run.verdict for run in of_it), Verdict())
        counts = (
            *(len(of_it), sum(run.faults.total() for run in of_it)),
            *(sum(run.faults[fault] for run in of_it) for fault in ("kill", "failover")),
            *(sums.transactions, sums.events, sums.lost, sums.repeated, sums.torn),
            *(sums.phantoms, sums.went_back, sums.wrong_rows),
            sum(bool(run.stopped) for run in of_it),
        )
        lines.append(_line([name, *(f"{count:,}" for count in counts)]))
    return "\n".join(lines) + "\n"


def described(versions: Mapping[str, str], configuration: Mapping[str, object]) -> str:
    """Return what was run, and how it was configured, in one paragraph."""
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    set_so = "; ".join(f"{name}: {values}" for name, values in configuration.items())
    return f"{said}. Debezium besides its defaults: {set_so}.\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
