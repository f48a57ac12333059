"""What a snapshot tells while it does not advance. No servers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.bridge import metrics
from services.bridge.snapshot import narration as module
from services.bridge.snapshot.narration import Narration
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.row_reader import NotNow
from tests.bridge.test_snapshot_core import shape

LATE = NotNow("the standby h is 9 bytes of WAL behind")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock
    metrics.SNAPSHOT_WAITING_SECONDS.set(0)


def waiting_s() -> float:
    (found,) = metrics.SNAPSHOT_WAITING_SECONDS.collect()
    return found.samples[0].value


def test_a_snapshot_that_does_not_advance_is_told_by_metric_and_log(clock: Any) -> None:
    """Whether it is not begun or a chunk is put off again and again; a chunk ends it."""
    table = TableProgress(shape("public.t", "id"))
    plan, narration = SnapshotPlan({"public.t": table}), Narration()
    with capture_logs() as told:
        for number in range(40):
            clock.now += 5
            if number % 2:
                narration.stalls(LATE)
            else:
                narration.postponed(table, LATE)
        assert waiting_s() == 195
        narration.chunk(plan, table, {})
        assert waiting_s() == 0
        clock.now += 50
        narration.stalls(LATE)
        assert waiting_s() == 0
    loud = [one for one in told if one["event"] == "the snapshot does not advance"]
    assert [one["seconds"] for one in loud] == [60, 120, 180]
    assert {(one["log_level"], one["reason"]) for one in loud} == {("warning", str(LATE))}


def test_a_snapshot_that_has_nothing_left_to_read_does_not_wait(clock: Any) -> None:
    narration = Narration()
    narration.stalls(LATE)
    clock.now += 90
    narration.stalls(LATE)
    assert waiting_s() == 90
    narration.planned(SnapshotPlan(), said=True, standby=True)
    assert waiting_s() == 0
