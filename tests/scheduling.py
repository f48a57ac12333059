"""Which of several workers runs which test (pytest-xdist).

A file stays together: its servers are started once. All that shares the Spark session stays in one
worker: a session takes long to start, and a gibibyte. What takes longest begins first, with faults,
which mostly wait, beside Spark, which needs a processor.
"""

from collections.abc import Iterable
from typing import Final

from xdist.scheduler import LoadScopeScheduling

_SPARK: Final = "tests/spark_consumers/"
_LONGEST_FIRST: Final = (
    _SPARK,
    "tests/bridge/faults/",
    "tests/end_to_end/",
    "tests/torture/",
    "tests/failover/",
    "tests/bridge/",
)
_OWN_SPARK: Final = (f"{_SPARK}test_drill.py", f"{_SPARK}test_cluster.py")
"""They start Spark themselves, so that they need no session."""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker file after file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "spark" if file.startswith(_SPARK) and file not in _OWN_SPARK else file


def weight(nodeid: str) -> int:
    """The less, the sooner it is to begin."""
    places: Iterable[int] = (n for n, room in enumerate(_LONGEST_FIRST) if nodeid.startswith(room))
    return min(places, default=len(_LONGEST_FIRST))
