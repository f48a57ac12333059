"""The metrics of `watch` from made-up snapshots, and of a real pair that is fenced and repaired."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.failover.execute.journal import DONE, Entry
from services.failover.model.view import View
from services.failover.watch.snapshot import Snapshot
from services.failover.watch.web.metrics import registry_of
from services.testbed.bed import Bed
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    KILLED_AFTER_STEPS,
    configuration,
    slotfailover_process,
    subscribe,
)
from tests.promises.failover.views import node, slot, state
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.waiting import eventually


def told(snapshot: Snapshot) -> dict[str, float]:
    """Series -> value."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for metric in registry_of(lambda: snapshot).collect()
        for sample in metric.samples
    }


def entry(step: str, *, run: str = "r1", outcome: str = DONE, seconds: float = 1.0) -> Entry:
    at = "2026-01-02T03:04:05+00:00"
    return Entry(run, 1, at, "me", "switchover", step, outcome=outcome, seconds=seconds)


def test_steps_of_the_last_run_and_only_of_that() -> None:
    first = [entry("begin"), entry("fence a", seconds=2.0), entry("end")]
    second = [
        entry("begin", run="r2"),
        entry("promote b", run="r2", outcome="started", seconds=0.0),
        entry("promote b", run="r2", seconds=3.0),
    ]
    done = told(Snapshot(at_s=time.time(), entries=tuple(first)))
    assert done["slotfailover_last_run_step_seconds switchover fence a"] == 2.0
    assert done["slotfailover_last_run_success switchover"] == 1
    assert not [name for name in done if "unfinished" in name]
    broken = told(Snapshot(at_s=time.time(), entries=(*first, *second)))
    steps = [name for name in broken if "step_seconds" in name]
    assert steps == ["slotfailover_last_run_step_seconds switchover promote b"]
    assert broken[steps[0]] == 3.0
    assert broken["slotfailover_unfinished_run switchover"] == 1
    assert broken["slotfailover_unfinished_run_age_seconds switchover"] > 0


def test_the_lock_names_its_holder_while_it_is_held() -> None:
    assert told(Snapshot())["slotfailover_lock_held "] == 0
    held = told(Snapshot(at_work="admin from 10.0.0.7 since 12:00:00"))
    assert held["slotfailover_lock_held admin from 10.0.0.7"] == 1


def test_the_lag_of_an_idle_standby_is_none_and_a_dropped_slot_has_no_series() -> None:
    primary = node("a", state(slot("s1", invalidation_reason="wal_removed"), standby=False))
    standby = node("b", state())
    assert standby.state is not None
    whole = replace(standby.state.replication, replayed_lsn=1000, replayed_age_s=900.0)
    idle = replace(standby, state=replace(standby.state, replication=whole))
    found = told(Snapshot(view=View((primary, idle), ()), at_s=1.0, contacts=(("a", 5.0),)))
    assert found["slotfailover_standby_lag_seconds b"] == 0
    assert found["slotfailover_slot_invalidated a s1 wal_removed"] == 1
    assert found["slotfailover_slot_invalidated a s1 rows_removed"] == 0
    assert found["slotfailover_last_contact_timestamp_seconds a"] == 5.0
    behind = replace(whole, replayed_lsn=10)
    late = replace(standby, state=replace(standby.state, replication=behind))
    bare = replace(primary, state=state(standby=False))
    found = told(Snapshot(view=View((bare, late), ()), at_s=1.0))
    assert found["slotfailover_standby_lag_seconds b"] == 900.0
    assert not [name for name in found if "slotfailover_slot_" in name]


@pytest.mark.long
def test_a_fence_and_an_unfinished_run_are_told_until_they_end(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(
        tmp_path,
        trio,
        machines=machines(trio, local_bed),
        watch={**SETTINGS, "repoint": False},
    )
    watching = Watching(config)
    try:
        watching.await_rounds(2)
        assert watching.metric('slotfailover_fenced{server="a"}') == 0
        assert watching.metric('slotfailover_standby_lag_seconds{server="b"}') >= 0
        assert watching.metric("slotfailover_lock_held") == 0
        seen_s = watching.metric('slotfailover_last_contact_timestamp_seconds{server="b"}')
        assert abs(time.time() - seen_s) < 86_400
        command = ("switchover", "--to", "b", "--config", str(config), "--yes")
        ended = ""
        for steps in range(1, 10):
            killed = KILLED_AFTER_STEPS.format(steps=steps)
            assert slotfailover_process(*command, before=killed).code == -9
            watching.await_rounds(2)
            ended = watching.ask("metrics").text
            if "slotfailover_fenced_age_seconds{" in ended:
                break
        assert watching.metric('slotfailover_fenced{server="a"}') == 1
        eventually(
            lambda: "slotfailover_unfinished_run{" in watching.ask("metrics").text,
            what="the unfinished run is told, though its table can't be written",
            timeout_s=60,
        )
        resumed = slotfailover_process("resume", "--config", str(config), "--yes")
        assert resumed.code == 0, resumed.err
        eventually(
            lambda: "slotfailover_unfinished_run{" not in watching.ask("metrics").text,
            what="the run is ended",
            timeout_s=60,
        )
        watching.await_rounds(2)  # which began after the run had ended
        text = watching.ask("metrics").text
        assert 'slotfailover_last_run_step_seconds{command="resume",step=' in text
        assert 'slotfailover_fenced{server="a"} 0.0' in text  # it was rejoined
        assert "slotfailover_fenced_age_seconds{" not in text
        assert 'slotfailover_last_contact_timestamp_seconds{server="a"}' in (
            watching.ask("metrics").text
        )
    finally:
        watching.end()
