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
from tests.bridge.snapshot.test_progress import shape

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
    plan, narration = SnapshotPlan({"public.t": table}), Narration(lambda: 0)
    with capture_logs() as told:
        for number in range(40):
            clock.now += 5
            if number % 2:
                narration.stalls(LATE)
            else:
                narration.postponed(table, LATE)
        assert waiting_s() == 195
        narration.chunk(plan, table, {}, 0)
        assert waiting_s() == 0
        clock.now += 50
        narration.stalls(LATE)
        assert waiting_s() == 0
    loud = [one for one in told if one["event"] == "the snapshot does not advance"]
    assert [one["seconds"] for one in loud] == [60, 120, 180]
    assert {(one["log_level"], one["reason"]) for one in loud} == {("warning", str(LATE))}


def test_a_snapshot_that_has_nothing_left_to_read_does_not_wait(clock: Any) -> None:
    narration = Narration(lambda: 0)
    narration.stalls(LATE)
    clock.now += 90
    narration.stalls(LATE)
    assert waiting_s() == 90
    narration.planned(SnapshotPlan(), again=True, standby=True)
    assert waiting_s() == 0


def test_what_is_done_is_told_once_kafka_has_it() -> None:
    """Also the counts of a plan that knows of it."""
    durable = [100]
    first, second = (TableProgress(shape(f"public.{name}", "id")) for name in "ab")
    plan = SnapshotPlan({"public.a": first, "public.b": second})
    narration = Narration(lambda: durable[0])
    lines: list[list[str]] = []
    with capture_logs() as told:
        for at_lsn, table in ((110, first), (120, second)):
            table.done = True
            narration.chunk(plan, table, {}, at_lsn)
        narration.planned(plan, again=False, standby=False)
        for durable[0] in (109, 110, 120):
            narration.log_durable()
            lines.append([one["event"] for one in told])
    done = ["table is done", "snapshot is done"]
    assert lines == [[], done[:1], [done[0], *done, "snapshot"]]
