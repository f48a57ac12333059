"""The Prometheus metrics of `watch`, computed from its snapshot at each scrape.

Labels are names from the settings and names of slots, so a dropped slot leaves no series behind.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.failover.checks.model import Severity
from services.failover.checks.registry import CHECKS
from services.failover.model.view import View
from services.failover.watch.snapshot import Snapshot, lags_of

Family = CounterMetricFamily | GaugeMetricFamily


class SnapshotCollector(Collector):
    """Collect all families from the snapshot that is current at the scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """Yield every metric family that the snapshot can fill."""
        snapshot = self._snapshot()
        yield from _of_watch(snapshot)
        if snapshot.view is not None:
            yield from _of_servers(snapshot.view)
            yield from _of_slots(snapshot)

    def describe(self) -> Iterator[Family]:
        """Return no families: their labels are known only at a scrape."""
        return iter(())


def registry_of(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """Return a registry that holds only the metrics of `watch`."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    return registry


def _of_watch(snapshot: Snapshot) -> Iterator[Family]:
    counts = snapshot.counts
    for name, text, number in (
        ("observations", "Observations of all servers since watch started.", counts.observations),
        ("promotions", "Promotions that watch has seen since it started.", counts.promotions),
        ("repoints", "Repoints that this watch process has completed.", counts.repoints),
        ("repoint_failures", "Repoints by this watch process that failed.", counts.failures),
    ):
        yield CounterMetricFamily(f"slotfailover_{name}", text, value=number)
    for name, text, value in (
        ("last_observation_timestamp_seconds", "Unix time of the last observation.", snapshot.at_s),
        ("observation_seconds", "Seconds that the last observation took.", snapshot.took_s),
        ("judged", "1 if the last observation could be judged, else 0.", not snapshot.problem),
        ("leader", "1 if this replica of watch may act, else 0.", snapshot.leading),
        ("automatic", "1 if failover.watch.repoint is on, else 0.", snapshot.automatic),
        ("paused", "1 while automatic repoints are paused, else 0.", snapshot.pause.paused),
        (
            "pending_steps",
            "Steps that a repoint would run now.",
            len(snapshot.memory.assessment.pending),
        ),
        (
            "agreeing_observations",
            "Consecutive observations that agree.",
            snapshot.memory.agreeing,
        ),
    ):
        yield GaugeMetricFamily(f"slotfailover_{name}", text, value=float(value))
    if snapshot.drilled is not None:
        age = "slotfailover_last_drill_age_seconds"
        yield GaugeMetricFamily(age, "Seconds since the last drill.", value=snapshot.drilled.age_s)
        well = float(snapshot.drilled.well)
        yield GaugeMetricFamily(
            "slotfailover_last_drill_success",
            "1 if the last drill could use every slot, else 0.",
            value=well,
        )


def _of_servers(view: View) -> Iterator[Family]:
    up = GaugeMetricFamily("slotfailover_up", "1 if the server answers, else 0.", labels=["server"])
    primary = GaugeMetricFamily(
        "slotfailover_primary", "1 if the node accepts writes, else 0.", labels=["server"]
    )
    timeline = GaugeMetricFamily(
        "slotfailover_timeline", "Timeline of the node.", labels=["server"]
    )
    position = GaugeMetricFamily(
        "slotfailover_wal_position_bytes",
        "WAL position that the node has written (primary) or received (standby).",
        labels=["server"],
    )
    for node in view.nodes:
        up.add_metric([node.name], float(node.state is not None))
        primary.add_metric([node.name], float(node.writable))
        if node.state is not None:
            timeline.add_metric([node.name], node.state.server.timeline)
            position.add_metric([node.name], node.received)
    for subscriber in view.subscribers:
        up.add_metric([subscriber.name], float(subscriber.usable))
    lag = GaugeMetricFamily(
        "slotfailover_lag_bytes",
        "Bytes of WAL that the standby or consumer lacks.",
        labels=["consumer"],
    )
    for name, lacking in lags_of(view).items():
        lag.add_metric([name], lacking)
    yield from (up, primary, timeline, position, lag)


def _of_slots(snapshot: Snapshot) -> Iterator[Family]:
    if snapshot.checkup is None or snapshot.view is None:
        return
    slots = snapshot.checkup.slots
    ready = GaugeMetricFamily(
        "slotfailover_slot_ready",
        "1 if the slot would survive a promotion of the standby, else 0.",
        labels=["slot", "standby"],
    )
    ahead = GaugeMetricFamily(
        "slotfailover_consumer_ahead_bytes",
        "Bytes of WAL that the consumer has and the standby lacks.",
        labels=["slot", "consumer"],
    )
    age = GaugeMetricFamily(
        "slotfailover_slot_sync_age_seconds",
        "Seconds since the standby's copy of the slot was synchronized.",
        labels=["slot"],
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
        "slotfailover_problems", "Findings of the check, by severity.", labels=["check", "severity"]
    )
    for check in CHECKS:
        found = [f for f in snapshot.checkup.problems if f.check == check.name]
        for severity in (Severity.CRITICAL, Severity.WARNING):
            number = sum(finding.severity is severity for finding in found)
            if number or severity is check.severity:
                problems.add_metric([check.name, str(severity)], number)
    yield from (ready, ahead, age, problems)
