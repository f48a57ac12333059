"""Which of several workers runs which test (pytest-xdist).

A file stays together: its servers are started once. All that needs Spark stays in one worker: a
session takes long to start, and a gibibyte. What takes longest begins first.
"""

from collections.abc import Iterable
from typing import Final

from xdist.scheduler import LoadScopeScheduling

_LONGEST_FIRST: Final = (
    "tests/spark_consumers/",
    "tests/end_to_end/",
    "tests/torture/",
    "tests/failover/",
    "tests/bridge/faults/",
    "tests/bridge/",
)
_SPARK: Final = _LONGEST_FIRST[:2]


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker file after file."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith(_SPARK) else nodeid.partition("::")[0]


def weight(nodeid: str) -> int:
    """The less, the sooner it is to begin."""
    places: Iterable[int] = (n for n, room in enumerate(_LONGEST_FIRST) if nodeid.startswith(room))
    return min(places, default=len(_LONGEST_FIRST))
