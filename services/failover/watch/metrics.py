"""The metrics of `watch`, made from its snapshot whenever they are asked for.

Labels are names of the settings and of slots, so a slot that is gone leaves no series behind.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.failover.checks.model import Severity
from services.failover.checks.registry import CHECKS
from services.failover.view import View
from services.failover.watch.snapshot import Snapshot, lags_of

Family = CounterMetricFamily | GaugeMetricFamily


class SnapshotCollector(Collector):
    """Asks for the snapshot at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """All families."""
        snapshot = self._snapshot()
        yield from _of_watch(snapshot)
        if snapshot.view is not None:
            yield from _of_servers(snapshot.view)
            yield from _of_slots(snapshot)

    def describe(self) -> Iterator[Family]:
        """Nothing is known before the first scrape."""
        return iter(())


def registry_of(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry with these metrics alone."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    return registry


def _of_watch(snapshot: Snapshot) -> Iterator[Family]:
    counts = snapshot.counts
    for name, text, number in (
        ("observations", "Observations made.", counts.observations),
        ("promotions", "Promotions seen.", counts.promotions),
        ("repoints", "Repoints that this process has carried out.", counts.repoints),
        ("repoint_failures", "Repoints that failed.", counts.failures),
    ):
        yield CounterMetricFamily(f"slotfailover_{name}", text, value=number)
    for name, text, value in (
        ("last_observation_timestamp_seconds", "When it last looked.", snapshot.at_s),
        ("observation_seconds", "How long the last look took.", snapshot.took_s),
        ("judged", "1 where the last look could be judged.", not snapshot.problem),
        ("leader", "1 where this replica may act.", snapshot.leading),
        ("automatic", "1 where failover.watch.repoint is on.", snapshot.automatic),
        ("paused", "1 while acting is paused.", snapshot.pause.paused),
        ("pending_steps", "Steps that a repoint has to do.", len(snapshot.memory.sight.pending)),
        ("agreeing_observations", "In a row.", snapshot.memory.agreeing),
    ):
        yield GaugeMetricFamily(f"slotfailover_{name}", text, value=float(value))
    if snapshot.drilled is not None:
        age = "slotfailover_last_drill_age_seconds"
        yield GaugeMetricFamily(age, "Since the last drill.", value=snapshot.drilled.age_s)
        well = float(snapshot.drilled.well)
        yield GaugeMetricFamily("slotfailover_last_drill_success", "1: all usable.", value=well)


def _of_servers(view: View) -> Iterator[Family]:
    up = GaugeMetricFamily("slotfailover_up", "1 where it answers.", labels=["server"])
    primary = GaugeMetricFamily("slotfailover_primary", "1: takes writes.", labels=["server"])
    timeline = GaugeMetricFamily("slotfailover_timeline", "Its timeline.", labels=["server"])
    position = GaugeMetricFamily(
        "slotfailover_wal_position_bytes", "WAL written or received.", labels=["server"]
    )
    for node in view.nodes:
        up.add_metric([node.name], float(node.state is not None))
        primary.add_metric([node.name], float(node.writable))
        if node.state is not None:
            timeline.add_metric([node.name], node.state.server.timeline)
            position.add_metric([node.name], node.received)
    for subscriber in view.subscribers:
        up.add_metric([subscriber.name], float(subscriber.usable))
    lag = GaugeMetricFamily("slotfailover_lag_bytes", "WAL it lacks.", labels=["consumer"])
    for name, lacking in lags_of(view).items():
        lag.add_metric([name], lacking)
    yield from (up, primary, timeline, position, lag)


def _of_slots(snapshot: Snapshot) -> Iterator[Family]:
    if snapshot.checkup is None or snapshot.view is None:
        return
    slots = snapshot.checkup.slots
    ready = GaugeMetricFamily(
        "slotfailover_slot_ready", "1: it would survive.", labels=["slot", "standby"]
    )
    ahead = GaugeMetricFamily(
        "slotfailover_consumer_ahead_bytes",
        "WAL that a consumer has and the standby has not.",
        labels=["slot", "consumer"],
    )
    age = GaugeMetricFamily(
        "slotfailover_slot_sync_age_seconds", "Since it was synchronized.", labels=["slot"]
    )
    copies = {node.name: node.state for node in snapshot.view.nodes}
    for slot in slots:
        ready.add_metric([slot.slot, slot.standby], float(slot.ready))
        for name, lsn in slot.consumers if slot.standby else ():
            ahead.add_metric([slot.slot, name], max(0, lsn - slot.received))
        state = copies.get(slot.standby)
        copy = state.slot(slot.slot) if state is not None else None
        if copy is not None and copy.inactive_since:
            synced = datetime.fromisoformat(copy.inactive_since).astimezone(UTC).timestamp()
            age.add_metric([slot.slot], max(0.0, snapshot.at_s - synced))
    problems = GaugeMetricFamily(
        "slotfailover_problems", "What a check finds wrong.", labels=["check", "severity"]
    )
    for check in CHECKS:
        found = [f for f in snapshot.checkup.problems if f.check == check.name]
        for severity in (Severity.CRITICAL, Severity.WARNING):
            number = sum(finding.severity is severity for finding in found)
            if number or severity is check.severity:
                problems.add_metric([check.name, str(severity)], number)
    yield from (ready, ahead, age, problems)
