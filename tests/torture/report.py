"""What a run was, what it met and found; and the sums over runs, with what they never met."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.bridge.failpoints import FAILPOINTS, OF_A_SNAPSHOT
from tests.torture.checker import Finding
from tests.torture.faults import AT_DIVERGENCE, DATABASE_AND_BROKER, VARIANTS, faults_with
from tests.torture.fork_server import STREAMS

KINDS: Final = (
    *("transfer", "items", "toast", "key", "savepoints", "large", "truncate", "shape"),
    *("renamed", "table", "routed", "outbox", "signal", "message", "empty"),
)
SEAMS: Final = (
    *(name for name in FAILPOINTS if name != AT_DIVERGENCE),
    *OF_A_SNAPSHOT,
    *STREAMS,
)
DECISIONS: Final = ("commit", "rollback", "in another session")
FULL_RUN_SEEDS: Final = 30
"""So many runs must have met everything; fewer only say what they have not met."""
_SUMMED: Final = (
    *("seconds", "transactions", "events", "acknowledged", "sigkills", "failovers"),
    *(
        "server_faults",
        "repairs",
        "chunks",
        "rows_read",
        "table_rows",
        "lost",
        "duplicated",
        "torn",
        "accepted",
    ),
)


@dataclass
class Report:
    """`seconds` with start and verdict, `fire_s` without.

    `failpoints`: kills at each; `passages`: how often each was passed, by whatever process.
    """

    seed: int
    brokers: int = 1
    seconds: float = 0.0
    fire_s: float = 0.0
    transactions: int = 0
    events: int = 0
    acknowledged: int = 0
    sigkills: int = 0
    failovers: int = 0
    starts: int = 0
    failpoints: Counter[str] = field(default_factory=Counter)
    passages: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)
    repairs: int = 0
    """By `slotbridge recover`."""
    chunks: int = 0
    rows_read: int = 0
    """By snapshots: events with op r."""
    table_rows: int = 0
    """In Iceberg, compared with the database; 0 where none were filled."""
    by_tls: int = 0
    """The bridge's connections to PostgreSQL at the end, all by TLS; 0: not all of them."""
    hidden_s_max: float = 0.0
    """How long a read_committed consumer could not see the same record, at most."""
    rss_mib_max: float = 0.0
    """The bridge's resident memory, at most."""
    findings: list[Finding] = field(default_factory=list)

    def as_json(self) -> str:
        """One line: the counts; of the findings how many."""
        found = Counter(finding.kind for finding in self.findings)
        content = vars(self) | {
            "seconds": round(self.seconds),
            "fire_s": round(self.fire_s),
            "server_faults": sum(n for f, n in self.faults.items() if f in DATABASE_AND_BROKER),
            "lost": found["lost"] + found["missing"],
            "duplicated": found["duplicated"] + found["phantom"] + found["resurrected"],
            "torn": found["torn"] + found["disordered"] + found["wrong"],
            "hidden": found["hidden"] + found["memory"],
            "accepted": found["accepted"],
            "stalled": found["stalled"],
            "findings": len(self.findings),
        }
        return json.dumps(content)

    def never(self) -> list[str]:
        """What this run did not meet, and so says nothing about."""
        return never(json.loads(self.as_json()))


def never(run: Mapping[str, Any]) -> list[str]:
    """Seams that were not passed, kinds of transactions, decisions and faults that were not."""
    faults = (*faults_with(run.get("brokers", 1)), *VARIANTS)
    return [
        *(f"failpoint {name!r} not passed" for name in SEAMS if not run["passages"].get(name)),
        *(f"no transaction of kind {name!r}" for name in KINDS if not run["kinds"].get(name)),
        *(f"nothing prepared: {name!r}" for name in DECISIONS if not run["decided"].get(name)),
        *(f"fault {name!r} not drawn" for name in faults if not run["faults"].get(name)),
    ]


def sums(lines: Iterable[str]) -> dict[str, Any]:
    """The sums over runs, each a line of `as_json`."""
    runs = [json.loads(line) for line in lines if line.strip()]
    total: dict[str, Any] = {"seeds": len({run["seed"] for run in runs}), "runs": len(runs)}
    for name in _SUMMED:
        total[name] = sum(run.get(name, 0) for run in runs)
    for name in ("brokers", "hidden_s_max", "rss_mib_max"):
        total[name] = max((run.get(name, 0) for run in runs), default=0)
    for name in ("failpoints", "passages", "faults", "kinds", "decided", "exit_codes"):
        total[name] = dict(sum((Counter(run[name]) for run in runs), Counter[str]()))
    return total


def exit_code(total: Mapping[str, Any], *, wrong: bool) -> int:
    """1 where anything was found, or enough runs have not met everything; fewer only say so."""
    return int(wrong or (total["runs"] >= FULL_RUN_SEEDS and bool(never(total))))


def table(total: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: the sums, then each failpoint's passages and kills."""
    yield "| | |\n|---|---|"
    for name in ("seeds", "runs", *_SUMMED):
        yield f"| {name.replace('_', ' ')} | {total[name]:,} |"
    for name in ("brokers", "hidden_s_max", "rss_mib_max"):
        yield f"| {name.replace('_', ' ')} | {total[name]:,} |"
    for name in ("kinds", "decided", "faults", "exit_codes"):
        yield f"| {name.replace('_', ' ')} | {_listed(total[name])} |"
    yield "\n| failpoint | passed | killed there |\n|---|---|---|"
    for name in SEAMS:
        passed, kills = total["passages"].get(name, 0), total["failpoints"].get(name, 0)
        yield f"| {name} | {passed:,} | {kills:,} |"
    killed = total["sigkills"] - sum(total["failpoints"].values())
    yield f"| (a random moment) | | {killed:,} |"
    for line in never(total):
        yield f"\nNEVER: {line}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()))
