"""The Prometheus metrics of `watch`, computed from its snapshot at each scrape.

Labels are names from the settings, names of slots, and fixed states. What was not seen has no
series: a dropped slot, a server that does not answer, a lock that was freed.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from schemas.findings import Severity
from schemas.version import version
from services.failover.checks.half_moved import disabled_by_runs
from services.failover.checks.registry import CHECKS
from services.failover.model.view import Node, View
from services.failover.watch.snapshot import Snapshot, lags_of
from services.failover.watch.web.run_metrics import RUN_FAMILIES, of_runs
from services.runtime.families import Family, Samples, one_of

WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")
INVALIDATIONS: Final = ("wal_removed", "rows_removed", "wal_level_insufficient", "idle_timeout")
_SERVER: Final = ("server",)
_SLOT: Final = ("server", "slot")

BUILD: Final = Family(
    "slotfailover_build_info", "1, with the version of slotfailover.", ("version",)
)
_COUNTS: Final = {
    "observations": Family(
        "slotfailover_observations",
        "Observations of all servers since watch started.",
        kind="counter",
    ),
    "promotions": Family(
        "slotfailover_promotions",
        "Promotions that watch has seen since it started.",
        kind="counter",
    ),
    "repoints": Family(
        "slotfailover_repoints",
        "Repoints that this watch process has completed.",
        kind="counter",
    ),
    "failures": Family(
        "slotfailover_repoint_failures",
        "Repoints by this watch process that failed.",
        kind="counter",
    ),
}
LAST_OBSERVATION: Final = Family(
    "slotfailover_last_observation_timestamp_seconds", "Unix time of the last observation."
)
OBSERVATION: Final = Family(
    "slotfailover_observation_seconds", "Seconds that the last observation took."
)
JUDGED: Final = Family("slotfailover_judged", "1 if the last observation could be judged, else 0.")
LEADER: Final = Family("slotfailover_leader", "1 if this replica of watch may act, else 0.")
LEASE_HELD: Final = Family(
    "slotfailover_lease_held",
    "1 while this replica holds the Kubernetes Lease for certain, else 0; "
    "no series where no Lease elects.",
)
LEASE_HOLDER: Final = Family(
    "slotfailover_lease_holder_info",
    "1, with the pod that held the Kubernetes Lease when this replica last read it.",
    ("pod",),
)
LEASE_TRANSITIONS: Final = Family(
    "slotfailover_lease_transitions", "Changes of the Kubernetes Lease's holder."
)
AUTOMATIC: Final = Family("slotfailover_automatic", "1 if failover.watch.repoint is on, else 0.")
PAUSED: Final = Family("slotfailover_paused", "1 while automatic repoints are paused, else 0.")
PENDING: Final = Family("slotfailover_pending_steps", "Steps that a repoint would run now.")
HELD: Final = Family(
    "slotfailover_subscriptions_held",
    "Subscriptions that a run has disabled and that are not enabled again yet.",
)
AGREEING: Final = Family(
    "slotfailover_agreeing_observations", "Consecutive observations that agree."
)
DRILL_AGE: Final = Family("slotfailover_last_drill_age_seconds", "Seconds since the last drill.")
DRILL_SUCCESS: Final = Family(
    "slotfailover_last_drill_success", "1 if the last drill could use every slot, else 0."
)
UP: Final = Family("slotfailover_up", "1 if the server answers, else 0.", _SERVER)
PRIMARY: Final = Family("slotfailover_primary", "1 if the node accepts writes, else 0.", _SERVER)
FENCED: Final = Family(
    "slotfailover_fenced", "1 if slotfailover has fenced the node, else 0.", _SERVER
)
FENCED_AGE: Final = Family(
    "slotfailover_fenced_age_seconds",
    "Seconds since slotfailover fenced the node; no series while it is not fenced.",
    _SERVER,
)
TIMELINE: Final = Family("slotfailover_timeline", "Timeline of the node.", _SERVER)
POSITION: Final = Family(
    "slotfailover_wal_position_bytes",
    "WAL position that the node has written (primary) or received (standby).",
    _SERVER,
)
LAST_CONTACT: Final = Family(
    "slotfailover_last_contact_timestamp_seconds",
    "Unix time at which the server last answered this watch process.",
    _SERVER,
)
STANDBY_LAG: Final = Family(
    "slotfailover_standby_lag_seconds",
    "Seconds since the last commit that the standby has replayed, 0 if it has all of the primary's "
    "WAL.",
    _SERVER,
)
LAG: Final = Family(
    "slotfailover_lag_bytes", "Bytes of WAL that the standby or consumer lacks.", ("consumer",)
)
READY: Final = Family(
    "slotfailover_slot_ready",
    "1 if the slot would survive a promotion of the standby, else 0.",
    ("slot", "standby"),
)
AHEAD: Final = Family(
    "slotfailover_consumer_ahead_bytes",
    "Bytes of WAL that the consumer has and the standby lacks.",
    ("slot", "consumer"),
)
SYNC_AGE: Final = Family(
    "slotfailover_slot_sync_age_seconds",
    "Seconds since the standby's copy of the slot was synchronized.",
    ("slot",),
)
PROBLEMS: Final = Family(
    "slotfailover_problems", "Findings of the check, by severity.", ("check", "severity")
)
SLOT_ACTIVE: Final = Family(
    "slotfailover_slot_active", "1 while a walsender uses the slot, else 0.", _SLOT
)
RETAINED: Final = Family(
    "slotfailover_slot_retained_bytes", "Bytes of WAL that the server keeps for the slot.", _SLOT
)
SAFE: Final = Family(
    "slotfailover_slot_safe_wal_bytes",
    "Bytes of WAL that can be written before the slot may be lost; "
    "no series without max_slot_wal_keep_size.",
    _SLOT,
)
WAL_STATUS: Final = Family(
    "slotfailover_slot_wal_status",
    "1 for the present wal_status of the slot, 0 for the others.",
    (*_SLOT, "status"),
)
INVALIDATED: Final = Family(
    "slotfailover_slot_invalidated",
    "1 for the reason for which the server has invalidated the slot, 0 for the others.",
    (*_SLOT, "reason"),
)
FAMILIES: Final = (
    *(BUILD, *_COUNTS.values(), LAST_OBSERVATION, OBSERVATION, JUDGED, LEADER, AUTOMATIC, PAUSED),
    *(LEASE_HELD, LEASE_HOLDER, LEASE_TRANSITIONS),
    *(PENDING, HELD, AGREEING, DRILL_AGE, DRILL_SUCCESS, UP, PRIMARY, FENCED, FENCED_AGE, TIMELINE),
    *(POSITION, LAST_CONTACT, STANDBY_LAG, LAG, READY, AHEAD, SYNC_AGE, PROBLEMS),
    *(SLOT_ACTIVE, RETAINED, SAFE, WAL_STATUS, INVALIDATED, *RUN_FAMILIES),
)


class SnapshotCollector(Collector):
    """Collect all families from the snapshot that is current at the scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family that the snapshot can fill."""
        snapshot = self._snapshot()
        yield BUILD.of({(version(),): 1.0})
        yield from _of_watch(snapshot)
        yield from of_runs(snapshot)
        yield LAST_CONTACT.of({(name,): at_s for name, at_s in snapshot.contacts})
        if snapshot.view is not None:
            yield from _of_servers(snapshot.view, snapshot.at_s)
            yield from _of_slots(snapshot.view)
            yield from _of_copies(snapshot, snapshot.view)

    def describe(self) -> Iterator[Metric]:
        """Return no families: their labels are known only at a scrape."""
        return iter(())


def registry_of(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """Return a registry that holds only the metrics of `watch`."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    return registry


def _of_watch(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of this process: observations, the lead, the decision, the drill."""
    for name, family in _COUNTS.items():
        yield family.of(getattr(snapshot.counts, name))
    yield LAST_OBSERVATION.of(snapshot.at_s)
    yield OBSERVATION.of(snapshot.took_s)
    yield JUDGED.of(not snapshot.problem)
    yield LEADER.of(snapshot.leading)
    if snapshot.lease is not None:
        yield LEASE_HELD.of(snapshot.lease.held)
        if snapshot.lease.holder:
            yield LEASE_HOLDER.of({(snapshot.lease.holder,): 1.0})
        yield LEASE_TRANSITIONS.of(snapshot.lease.transitions)
    yield AUTOMATIC.of(snapshot.automatic)
    yield PAUSED.of(snapshot.pause.paused)
    yield PENDING.of(len(snapshot.memory.assessment.pending))
    yield AGREEING.of(snapshot.memory.agreeing)
    if snapshot.drilled is not None:
        yield DRILL_AGE.of(snapshot.drilled.age_s)
        yield DRILL_SUCCESS.of(snapshot.drilled.well)


def _of_servers(view: View, at_s: float) -> Iterator[Metric]:
    """Yield the metrics of nodes and subscribers as they were last seen."""
    answering = {node.name: node.state for node in view.nodes if node.state is not None}
    up: dict[tuple[str, ...], float] = {(n.name,): n.name in answering for n in view.nodes}
    up |= {(found.name,): found.usable for found in view.subscribers}
    yield UP.of(up)
    yield PRIMARY.of({(node.name,): node.writable for node in view.nodes})
    yield FENCED.of({(node.name,): node.fenced for node in view.nodes if node.state is not None})
    fenced = {(node.name,): _fenced_s(node) for node in view.nodes if node.fenced}
    yield FENCED_AGE.of({key: max(0.0, at_s - since) for key, since in fenced.items() if since})
    yield TIMELINE.of({(name,): state.server.timeline for name, state in answering.items()})
    yield POSITION.of({(node.name,): node.received for node in view.nodes if node.state})
    yield STANDBY_LAG.of(_standby_lags(view))
    yield HELD.of(len(disabled_by_runs(view)))
    yield LAG.of({(name,): lacking for name, lacking in lags_of(view).items()})


def _fenced_s(node: Node) -> float:
    """Return when the node was fenced (Unix time), 0 if unknown.

    Its mark tells: `timeline 3 by … since …Z`.
    """
    mark = node.state.fence_mark if node.state is not None else ""
    _, _, since = mark.rpartition(" since ")
    try:
        return datetime.fromisoformat(since).astimezone(UTC).timestamp()
    except ValueError:
        return 0.0


def _standby_lags(view: View) -> Samples:
    """Return the seconds of lag by standby, 0 for one that has all, however idle the primary."""
    primary = view.primary
    written = (
        primary.state.replication.written_lsn or 0
        if primary is not None and primary.state is not None
        else 0
    )
    lags: dict[tuple[str, ...], float] = {}
    for node in view.standbys:
        replication = node.known_state.replication
        age_s = replication.replayed_age_s
        if written and (replication.replayed_lsn or 0) >= written:
            lags[node.name,] = 0.0
        elif age_s is not None:
            lags[node.name,] = max(0.0, age_s)
    return lags


def _of_slots(view: View) -> Iterator[Metric]:
    """Yield the metrics of the slots of every node that answers."""
    found = [
        (node, (node.name, slot.slot_name), slot)
        for node in view.nodes
        if node.state is not None
        for slot in node.state.slots
    ]
    yield SLOT_ACTIVE.of({key: slot.active_pid is not None for _, key, slot in found})
    yield RETAINED.of(
        {
            key: max(0, node.received - slot.restart_lsn)
            for node, key, slot in found
            if slot.restart_lsn is not None
        }
    )
    yield SAFE.of(
        {key: slot.safe_wal_size for _, key, slot in found if slot.safe_wal_size is not None}
    )
    status: dict[tuple[str, ...], float] = {}
    invalidated: dict[tuple[str, ...], float] = {}
    for _, key, slot in found:
        status |= one_of(WAL_STATUSES, slot.wal_status, *key)
        if slot.slot_type == "logical":
            invalidated |= one_of(INVALIDATIONS, slot.invalidation_reason, *key)
    yield WAL_STATUS.of(status)
    yield INVALIDATED.of(invalidated)


def _of_copies(snapshot: Snapshot, view: View) -> Iterator[Metric]:
    """Yield metrics on whether slots would survive a promotion, and on what the check found."""
    if snapshot.checkup is None:
        return
    slots = snapshot.checkup.slots
    yield READY.of({(slot.slot, slot.standby): slot.ready for slot in slots})
    yield AHEAD.of(
        {
            (slot.slot, name): max(0, lsn - slot.received)
            for slot in slots
            for name, lsn in (slot.consumers if slot.standby else ())
        }
    )
    ages: dict[tuple[str, ...], float] = {}
    copies = {node.name: node.state for node in view.nodes}
    for slot in slots:
        state = copies.get(slot.standby)
        copy = state.slot(slot.slot) if state is not None else None
        if copy is not None and copy.inactive_since:
            synced = datetime.fromisoformat(copy.inactive_since).astimezone(UTC).timestamp()
            ages[slot.slot,] = max(0.0, snapshot.at_s - synced)
    yield SYNC_AGE.of(ages)
    problems: dict[tuple[str, ...], float] = {}
    for check in CHECKS:
        found = [f for f in snapshot.checkup.problems if f.check == check.name]
        for severity in (Severity.CRITICAL, Severity.WARNING):
            number = sum(finding.severity is severity for finding in found)
            if number or severity is check.severity:
                problems[check.name, str(severity)] = number
    yield PROBLEMS.of(problems)
