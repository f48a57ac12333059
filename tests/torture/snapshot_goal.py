"""One run that ends when the bridge got so many SIGKILLs, and so many failovers, within snapshots.

    make torture KILLS=200 FAILOVERS=5 SEED=1

Rows of all tables are asked for again whenever all are read, so that a snapshot is always under
way. SIGKILLs come at random moments, at each seam of a chunk, and several in a row.
"""

import random
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from services.bridge.failpoints import OF_A_SNAPSHOT
from tests.providers.databases import connect
from tests.torture import bank
from tests.torture.faults import Fault
from tests.torture.snapshot_checker import Told, unfinished
from tests.torture.torture_run import TortureRun

_WEIGHTS: Final = {"kill": 2, "seams": 5}
_CRASHES_MAX: Final = 3
_PAUSE_MAX_S: Final = 1.5


class Met(NamedTuple):
    """SIGKILLs of the bridge, and failovers: those that are wanted, or those of a run so far."""

    kills: int
    failovers: int

    def covers(self, other: "Met") -> bool:
        """Whether neither number is below that of `other`."""
        return self.kills >= other.kills and self.failovers >= other.failovers


def faults_until(seed: int, goal: Met, met: Callable[[], Met]) -> Iterator[Fault]:
    """Yield kills, and failovers evenly between them, until `met` covers the goal."""
    moments = random.Random(f"goal {seed}")
    while not (so_far := met()).covers(goal):
        due = so_far.kills >= (so_far.failovers + 1) * goal.kills // (goal.failovers + 1)
        if due and so_far.failovers < goal.failovers:
            yield _drawn("failover", moments)
        else:
            yield _drawn(moments.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0], moments)


def _drawn(name: str, moments: random.Random) -> Fault:
    crashes = moments.randint(1, _CRASHES_MAX) if name == "seams" else 1
    seams = [moments.choice(OF_A_SNAPSHOT) for _ in range(crashes)]
    return Fault(
        pause_s=moments.uniform(0, _PAUSE_MAX_S),
        name=name,
        points=tuple(f"{seam}:{moments.choice([1, 2, 3, 7])}" for seam in seams),
        seconds=moments.uniform(0.3, 2.0),
        kill_loop=name == "failover" and moments.random() < 0.5,
        revived=False,
    )


class Asking:
    """Asks for rows of all tables again."""

    def __init__(self) -> None:
        self._chunks = -1
        self._asked = 0

    def keep_reading(self, run: TortureRun, told: Told) -> None:
        """Insert the signal that is wanted into the run's database."""
        if wanted := self.wanted(told, bank.READ):
            self._asked += 1
            with connect(run.primary, run.dbname) as connection:
                bank.ask_alone(connection, f"again {self._asked}", wanted, *bank.READ)

    def wanted(self, told: Told, tables: tuple[str, ...]) -> str:
        """Return `execute` where all rows are read, `resume` where no chunk came since; else ""."""
        before, self._chunks = self._chunks, len(told.progress)
        if not unfinished(told, tables):
            return "execute"
        return "resume" if before == self._chunks else ""
