"""The requirements of slot synchronization on the standby. Pure.

Source: PostgreSQL documentation 47.2.3 Replication Slot Synchronization; slotsync.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from schemas.lsn import format_lsn
from services.failover.checks import remedies
from services.failover.checks.capacity import too_low
from services.failover.checks.model import Needs, Seen, check
from services.failover.model.topology import keep_off
from services.postgres.server import logical_decoding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemas.findings import Remedy
    from services.failover.checks.facts import Facts
    from services.failover.model.view import Node, NodeState

GROUP = "standby"
NO_NEW_COPIES = "a slot that is made or changed from now on is not on the standby, and is lost"
EXTENSION = "pg_failover_slots"


@check(
    "standby-answers",
    group=GROUP,
    title="there is a standby to fail over to",
    consequence="nothing can take over: no slot and no data would survive the primary",
)
def standby_answers(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        timeline = state.server.timeline
        at = format_lsn(standby.received)
        yield Seen(standby.name, f"{standby.name} has WAL up to {at}, on timeline {timeline}")
    if not facts.below:
        off = filter(None, (keep_off(facts.view, node) for node in facts.view.nodes))
        yield Seen(
            "",
            "no node answers as a standby",
            "there is no standby to fail over to",
            remedies.manual("; ".join(off) or "start a standby and add it to failover.nodes"),
        )


@check(
    "sync-replication-slots",
    group=GROUP,
    title="sync_replication_slots is on",
    consequence=NO_NEW_COPIES,
    needs=Needs.STANDBY,
    reads=("sync_replication_slots",),
)
def sync_replication_slots(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        yield _must_be_on(standby, state, "sync_replication_slots")


@check(
    "hot-standby-feedback",
    group=GROUP,
    title="hot_standby_feedback is on",
    consequence="synchronization stops, and the primary removes catalog rows that the copies need: "
    "they are invalidated (rows_removed)",
    needs=Needs.STANDBY,
    reads=("hot_standby_feedback",),
)
def hot_standby_feedback(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        yield _must_be_on(standby, state, "hot_standby_feedback")


@check(
    "slotsync-worker",
    group=GROUP,
    title="the slotsync worker runs",
    consequence=NO_NEW_COPIES,
    needs=Needs.BOTH,
)
def slotsync_worker(facts: Facts) -> Iterator[Seen]:
    """Look for the slotsync worker while a primary answers: without one it can't run."""
    for _, _, standby, state in facts.both:
        runs = state.replication.slotsync_worker
        evidence = f"{'a' if runs else 'no'} slotsync worker in pg_stat_activity"
        yield Seen(
            standby.name,
            evidence,
            "" if runs else f"no slotsync worker runs on {standby.name}",
            remedies.repaired_with_cause(
                f"repair the findings of the other checks of the standby; if there are none, read "
                f"the log of {standby.name}: its role may lack a password for an ordinary "
                "connection (a .pgpass line for `replication` does not serve one)"
            ),
        )


@check(
    "wal-level",
    group=GROUP,
    title="wal_level is logical on primary and standby",
    consequence="no logical slot can be made or used; copies on the standby are invalidated "
    "(wal_level_insufficient)",
    needs=Needs.BOTH,
    reads=("wal_level",),
)
def wal_level(facts: Facts) -> Iterator[Seen]:
    for node, state in (*facts.above, *facts.below):
        level, effective = state.setting("wal_level"), state.server.effective_wal_level
        decodes = logical_decoding(level or "", effective)
        yield Seen(
            node.name,
            f"{node.name}: wal_level = {level}"
            + (f", effective_wal_level = {effective}" if effective else ""),
            "" if decodes else f"wal_level is {level} on {node.name}",
            remedies.restart_with(node, "wal_level", "logical"),
        )


@check(
    "failover-slots-extension",
    group=GROUP,
    title="only one thing synchronizes slots",
    consequence="two synchronizers drop and remake each other's copies",
    severity=Severity.WARNING,
    needs=Needs.STANDBY,
    reads=("shared_preload_libraries", "sync_replication_slots"),
)
def failover_slots_extension(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        libraries = state.setting("shared_preload_libraries")
        loaded = EXTENSION in libraries
        native = state.setting("sync_replication_slots") == "on"
        yield Seen(
            standby.name,
            f"shared_preload_libraries = '{libraries}'",
            f"{EXTENSION} and sync_replication_slots are both on" if loaded and native else "",
            remedies.manual(
                f"take {EXTENSION} out of shared_preload_libraries on {standby.name}, and restart",
                because=f"{standby.name} must be restarted",
            ),
        )


@check(
    "slot-capacity",
    group=GROUP,
    title="the standby has room for every slot",
    consequence="the slots that do not fit are lost",
    needs=Needs.STANDBY,
    reads=("max_replication_slots",),
)
def slot_capacity(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        limit = int(state.setting("max_replication_slots") or 0)
        if not limit:
            continue
        there = {slot.slot_name for slot in state.slots}
        missing = [r.slot for r in facts.required if r.slot not in there and facts.above]
        needed = len(there) + len(missing)
        yield Seen(
            standby.name,
            f"max_replication_slots = {limit}, {len(there)} used, {len(missing)} missing",
            f"{standby.name} has no room for {needed - limit} slot(s)" if needed > limit else "",
            remedies.restart_with(standby, "max_replication_slots", str(2 * needed)),
        )


@check(
    "databases",
    group=GROUP,
    title="the standby has the database of every slot",
    consequence="synchronization stops at that slot, for all slots after it too",
    needs=Needs.BOTH,
)
def databases(facts: Facts) -> Iterator[Seen]:
    for _, above, standby, below in facts.both:
        if below.details is None:
            yield Seen(standby.name, "", unknown=f"the databases of {standby.name} were not read")
            continue
        here = below.details.databases
        for slot in above.slots:
            if slot.failover and slot.database and slot.database not in here:
                yield Seen(
                    standby.name,
                    f"no row {slot.database} in pg_database on {standby.name}, wanted by the slot "
                    f"{slot.slot_name}",
                    f"{standby.name} does not have the database {slot.database} yet",
                    remedies.repaired_with_cause(
                        f"let {standby.name} replay the WAL that it has received"
                    ),
                )


@check(
    "replay",
    group=GROUP,
    title="the standby replays what it receives",
    consequence="promotion waits for the replay of all that was received, and is refused (34) "
    "while replay is paused; slots are not synchronized meanwhile either, as copies are advanced "
    "through replayed WAL only",
    severity=Severity.WARNING,
    needs=Needs.STANDBY,
    reads=("recovery_min_apply_delay",),
)
def replay(facts: Facts) -> Iterator[Seen]:
    for other in facts.view.standbys:
        if other is not facts.standby and other.state is not None and other.priority:
            what = "a failover is refused where only this standby has the newest WAL"
            yield from _pause(facts, other, other.state, f": {what}", Severity.WARNING)
    for standby, state in facts.below:
        yield from _pause(facts, standby, state, "", Severity.CRITICAL)
        delay = state.setting("recovery_min_apply_delay") or "0"
        if delay != "0" and not state.replication.replay_paused:
            yield Seen(
                standby.name,
                f"recovery_min_apply_delay = {delay} ms",
                f"{standby.name} replays later on purpose",
                remedies.manual(
                    "fail over to another standby, or reset recovery_min_apply_delay",
                    because="the delay was chosen",
                ),
            )


def _pause(
    facts: Facts, standby: Node, state: NodeState, about: str, severity: Severity
) -> Iterator[Seen]:
    """Yield that replay is paused on the standby, if it is."""
    if state.replication.replay_paused:
        yield Seen(
            standby.name,
            f"pg_get_wal_replay_pause_state() = {state.replication.replay_pause}",
            f"replay is paused on {standby.name}{about}",
            _resumption(facts, standby, state),
            severity,
        )


def _resumption(facts: Facts, standby: Node, state: NodeState) -> Remedy:
    """Return the remedy for paused replay; too low limits must be raised before it resumes."""
    if any(too_low(above, state) for _, above in facts.above):
        return remedies.repaired_with_cause(
            f"raise the settings that recovery-settings names, and restart {standby.name}: if only "
            "replay is resumed, the server ends"
        )
    return remedies.run_statements(
        "where its log tells of insufficient parameter settings, raise them and restart it instead",
        remedies.order(standby.name, "SELECT pg_wal_replay_resume()"),
        by_hand="somebody has paused it for a reason, or its limits are lower than the primary's",
    )


def _must_be_on(standby: Node, state: NodeState, setting: str) -> Seen:
    """Return whether a setting is on at a standby, with the remedy that sets it."""
    value = state.setting(setting)
    return Seen(
        standby.name,
        f"{setting} = {value}",
        "" if value == "on" else f"{setting} is {value} on {standby.name}",
        remedies.alter_system(standby, setting, "on"),
    )
