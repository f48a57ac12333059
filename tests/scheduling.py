"""Which of several workers runs which test (pytest-xdist).

A file stays together: its servers are started once. The tests that share a Spark session are two
parts, as a session takes long to start, and a gibibyte. The first part begins at once, beside
faults, which mostly wait; the second when these are given out, so that no worker is left with Spark
alone at the end.
"""

from collections.abc import Iterable
from typing import Final

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_SPARK: Final = "tests/promises/tables/"
_SECOND_FROM: Final = f"{_SPARK}test_r"
"""The first name of the files of Spark's second part."""
_LONGEST_FIRST: Final = (
    _SPARK,
    "tests/promises/bridge/faults/",
    _SECOND_FROM,
    "tests/promises/end_to_end/",
    "tests/torture/",
    "tests/promises/failover/",
    "tests/promises/bridge/",
    "tests/promises/adoption/",
)
_OWN_SPARK: Final = tuple(
    f"{_SPARK}test_{name}.py" for name in ("drill", "cluster", "cluster_audit")
)
"""They start Spark themselves, and need the session not at all, or for one pipeline."""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Give a worker file after file, and go on after a worker has crashed."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker out; return the test that it crashed in, if it crashed.

        The others get what it had left, without the test that it crashed in. xdist 3.8 runs that
        test again, so that one which always crashes never ends, and hands work to workers that
        have not collected the tests yet, which ends the session with a KeyError.
        """
        files: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        left = [test for tests in files.values() for test, done in tests.items() if not done]
        if not left:
            return None
        for file, tests in files.items():
            again = {test: False for test, done in tests.items() if not done and test != left[0]}
            if again:
                self.workqueue[file] = again
                self.workqueue.move_to_end(file, last=False)
        self.schedule()
        return left[0]

    def schedule(self) -> None:
        """Give work to the workers that know the tests."""
        if self.collection is None:
            super().schedule()
            return
        for node in self.nodes:
            if node in self.registered_collections:
                self._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a file; a worker waits for a further test or for the end before it runs its last."""
        super()._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith(_SPARK) or file in _OWN_SPARK:
            return file
        return "spark, second part" if file >= _SECOND_FROM else "spark"


def weight(nodeid: str) -> int:
    """The less, the sooner it is to begin."""
    if nodeid.startswith(_SPARK) and nodeid >= _SECOND_FROM:
        return _LONGEST_FIRST.index(_SECOND_FROM)
    places: Iterable[int] = (n for n, room in enumerate(_LONGEST_FIRST) if nodeid.startswith(room))
    return min(places, default=len(_LONGEST_FIRST))
