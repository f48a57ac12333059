"""Whether each slot that must survive is usable on the standby. Pure.

A slot is usable after the promotion of a standby when that standby has it `synced AND NOT
temporary AND invalidation_reason IS NULL`, and has at least the WAL that the slot's consumers have.
These checks decide whether a failover is refused (`readiness`), so they need nothing but what is
observed at every step.
Source: PostgreSQL documentation 29.3 Logical Replication Failover; slotsync.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from schemas.lsn import format_lsn
from services.failover.checks import remedies
from services.failover.checks.half_moved import enabling
from services.failover.checks.model import Needs, Seen, check
from services.failover.model.statements import RELOAD
from services.postgres.identifiers import identifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemas.findings import Remedy
    from services.failover.checks.facts import Facts, Required
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View
    from services.postgres.slots import Slot

GROUP = "slots"
_PASSING = "wal_not_flushed"
LOST = "the slot is not there after the promotion: its consumer must start over"


@check(
    "slot-on-primary",
    group=GROUP,
    title="the primary has every slot that a consumer wants",
    consequence=LOST,
    needs=Needs.PRIMARY,
    wants=True,
)
def slot_on_primary(facts: Facts) -> Iterator[Seen]:
    for primary, _ in facts.above:
        for required in facts.required:
            if facts.upstream(required.slot) is None:
                wanted_by = " and ".join(required.wanted_by)
                yield Seen(
                    required.slot,
                    f"wanted by {wanted_by}, no such row in pg_replication_slots on {primary.name}",
                    f"{primary.name} has no slot {required.slot}",
                    remedies.manual(
                        "start the bridge, which makes its slot; for a subscription create the "
                        "slot, or correct its slot_name",
                        because="the data that its consumer missed must be loaded anew",
                    ),
                )


@check(
    "slot-failover-off",
    group=GROUP,
    title="every slot of a failover subscription has failover on itself",
    consequence=LOST,
    needs=Needs.PRIMARY,
    wants=True,
)
def slot_failover_off(facts: Facts) -> Iterator[Seen]:
    for primary, _ in facts.above:
        for required in facts.required:
            slot = facts.upstream(required.slot)
            if slot is not None and not slot.failover:
                who = " and ".join(required.wanted_by)
                yield Seen(
                    required.slot,
                    f"pg_replication_slots.failover = f on {primary.name}, but failover is wanted "
                    f"by {who}",
                    f"the slot's failover is off, though it is wanted by {who}",
                    _switch_on(facts, required),
                )


@check(
    "slot-on-standby",
    group=GROUP,
    title="the standby has every slot",
    consequence=LOST,
    needs=Needs.STANDBY,
    wants=True,
)
def slot_on_standby(facts: Facts) -> Iterator[Seen]:
    for standby, _ in facts.below:
        for required in facts.required:
            if facts.copy(required.slot) is None:
                last_seen = facts.view.slots_last_seen or frozenset()
                had = "; the last primary had it" if required.slot in last_seen else ""
                yield Seen(
                    required.slot,
                    f"no such row in pg_replication_slots on {standby.name}{had}",
                    f"{standby.name} does not have the slot",
                    _hasten(facts, "once nothing else is wrong, let the worker look again"),
                )


@check(
    "slot-name-clash",
    group=GROUP,
    title="no slot of the standby's own stands in a copy's way",
    consequence="synchronization stops at the first clash, for all slots after it too",
    needs=Needs.STANDBY,
    wants=True,
)
def slot_name_clash(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        if not state.server.in_recovery:
            continue
        for required in facts.required:
            slot = facts.copy(required.slot)
            if slot is None or slot.synced:
                continue
            leftover = slot.failover and slot.active_pid is None
            yield Seen(
                required.slot,
                f"synced = f, failover = {'t' if slot.failover else 'f'}, slot_type = "
                f"{slot.slot_type} in pg_replication_slots on {standby.name}",
                f"{standby.name} has a slot of its own of that name, which blocks synchronization",
                remedies.run_statements(
                    "",
                    remedies.order(standby.name, remedies.drop_slot(slot.slot_name)),
                    by_hand=""
                    if leftover
                    else "it was not left over by a former primary: somebody may use it",
                ),
                since=slot.inactive_since or "",
            )


@check(
    "slot-idle",
    group=GROUP,
    title="every copy that is not permanent yet has a consumer that advances it",
    consequence=LOST,
    needs=Needs.STANDBY,
    wants=True,
)
def slot_idle(facts: Facts) -> Iterator[Seen]:
    for standby, copy, upstream in _temporary(facts):
        if upstream is not None and upstream.active_pid is not None:
            continue
        consumer = f"; on the primary active_pid is null{_since(upstream)}" if upstream else ""
        yield Seen(
            copy.slot_name,
            f"temporary = t in pg_replication_slots on {standby.name}{consumer}{_skipped(copy)}",
            "the slot's copy is still temporary and would be dropped at promotion: no consumer is "
            "connected that could advance the slot",
            _wake_consumer(facts.view, copy.slot_name),
            since=(upstream.inactive_since or "") if upstream else "",
        )


@check(
    "slot-snapshot",
    group=GROUP,
    title="every copy whose slot is consumed has become permanent",
    consequence=LOST,
    needs=Needs.STANDBY,
    wants=True,
)
def slot_snapshot(facts: Facts) -> Iterator[Seen]:
    for standby, copy, upstream in _temporary(facts):
        if upstream is None or upstream.active_pid is None:
            continue
        yield Seen(
            copy.slot_name,
            f"temporary = t in pg_replication_slots on {standby.name}; there restart_lsn is "
            f"{_lsn(copy.restart_lsn)}, on the primary {_lsn(upstream.restart_lsn)}"
            + _skipped(copy)
            + _oldest(facts),
            "the slot's copy is still temporary and would be dropped at promotion: the slot has "
            "not yet passed the position from which the copy could continue",
            _hasten(facts, "let open transactions end, then log a snapshot to go on from"),
        )


@check(
    "slot-skipped",
    group=GROUP,
    title="no copy is left out by synchronization",
    consequence="the copy falls behind its slot, and may be lost later",
    severity=Severity.WARNING,
    needs=Needs.STANDBY,
    wants=True,
)
def slot_skipped(facts: Facts) -> Iterator[Seen]:
    """Judge copies by slotsync_skip_reason, which servers before PostgreSQL 19 do not have.

    `wal_not_flushed` passes by itself, and temporary copies have checks of their own.
    """
    for standby, _ in facts.below:
        for required in facts.required:
            copy = facts.copy(required.slot)
            reason = copy.slotsync_skip_reason if copy is not None else None
            if copy is None or copy.temporary or reason in (None, _PASSING):
                continue
            yield Seen(
                required.slot,
                f"slotsync_skip_reason = {reason} in pg_replication_slots on {standby.name}; there "
                f"restart_lsn is {_lsn(copy.restart_lsn)}",
                f"{standby.name} does not synchronize the slot's copy",
                _hasten(facts, "the worker tries again; the standby's log has more"),
                since=copy.inactive_since or "",
            )


@check(
    "slot-invalidated",
    group=GROUP,
    title="no slot is invalidated",
    consequence=LOST,
    needs=Needs.BOTH,
    wants=True,
)
def slot_invalidated(facts: Facts) -> Iterator[Seen]:
    for required in facts.required:
        for node, _ in (*facts.above, *facts.below):
            slot = node.state.slot(required.slot) if node.state is not None else None
            if slot is None or slot.invalidation_reason is None:
                continue
            copy = bool(facts.above) and facts.standby is not None and node == facts.standby
            which = "its copy" if copy else "it"
            yield Seen(
                required.slot,
                f"invalidation_reason = {slot.invalidation_reason} in pg_replication_slots on "
                f"{node.name}",
                f"{which} is invalidated on {node.name}",
                _hasten(facts, "the worker drops such a copy and makes it anew")
                if copy
                else remedies.manual(
                    "drop the slot, create it again with failover, and load its consumer anew",
                    because="the changes that its consumer missed are gone",
                ),
                since=slot.inactive_since or "",
            )


@check(
    "consumer-ahead",
    group=GROUP,
    title="the standby has all the WAL that consumers have",
    consequence="consumers have transactions that the new primary never had",
    needs=Needs.STANDBY,
    wants=True,
)
def consumer_ahead(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        if facts.view.bridge_slot is not None and not state.may_see_origins:
            why = f"how far the bridge is: our role may not see the origins of {standby.name}"
            yield Seen(facts.view.bridge_slot, "", unknown=why)
        for required in facts.required:
            for name, position in positions(facts, required):
                if position > standby.received:
                    yield Seen(
                        required.slot,
                        f"{name} is at {format_lsn(position)}, {standby.name} has WAL up to "
                        f"{format_lsn(standby.received)}",
                        f"its consumer is ahead of {standby.name} by "
                        f"{position - standby.received} bytes",
                        remedies.manual(
                            "let the standby catch up; name its physical slot in "
                            "synchronized_standby_slots on the primary so that this can't happen",
                            because="only the standby can catch up",
                        ),
                    )


GATE = (
    slot_on_primary,
    slot_failover_off,
    slot_on_standby,
    slot_name_clash,
    slot_idle,
    slot_snapshot,
    slot_invalidated,
    consumer_ahead,
)
"""The checks that decide whether a slot is ready."""
PROMOTED = (slot_on_standby, slot_idle, slot_invalidated)
"""The same on the new primary itself."""


def positions(facts: Facts, required: Required) -> tuple[tuple[str, int], ...]:
    """Return how far the slot's consumers are: by themselves, and by the slot on the primary."""
    upstream = facts.upstream(required.slot)
    if upstream is None or upstream.confirmed_flush_lsn is None:
        return required.consumers
    return (*required.consumers, ("its slot on the primary", upstream.confirmed_flush_lsn))


def _temporary(facts: Facts) -> Iterator[tuple[Node, Slot, Slot | None]]:
    """Yield (standby, copy, slot on the primary) of every copy that a promotion would drop."""
    for standby, _ in facts.below:
        for required in facts.required:
            copy = facts.copy(required.slot)
            if copy is not None and copy.temporary:
                yield standby, copy, facts.upstream(required.slot)


def _switch_on(facts: Facts, required: Required) -> Remedy:
    """Return the remedy that switches a slot's failover on.

    ALTER SUBSCRIPTION sets it at the publisher, even where it is on at the subscriber.
    """
    for subscriber, subscription in _subscriptions_of(facts.view, required.slot):
        if subscription.marked:
            return enabling(facts.view, subscriber, subscription)
    orders = tuple(
        remedies.order(
            subscriber.name,
            f"ALTER SUBSCRIPTION {identifier(subscription.name)} DISABLE",
            f"ALTER SUBSCRIPTION {identifier(subscription.name)} SET (failover = true)",
            f"ALTER SUBSCRIPTION {identifier(subscription.name)} ENABLE",
        )
        for subscriber, subscription in _subscriptions_of(facts.view, required.slot)
    )
    if not orders:
        return remedies.manual(
            "drop the slot while its consumer is stopped, and let it be made anew with failover",
            because="PostgreSQL has no SQL for it, only the replication command "
            "ALTER_REPLICATION_SLOT",
        )
    return remedies.run_statements(
        "when the slot is no longer active after the first statement",
        *orders,
        by_hand="it interrupts the subscription",
    )


def _wake_consumer(view: View, slot: str) -> Remedy:
    for subscriber, subscription in _subscriptions_of(view, slot):
        if not subscription.enabled:
            return enabling(view, subscriber, subscription)
    return remedies.manual("start its consumer", because="the consumer is another program")


def _subscriptions_of(view: View, slot: str) -> list[tuple[Subscriber, Subscription]]:
    return [
        (where, subscription)
        for where, subscription in view.ours()
        if slot == subscription.slot_name
    ]


def _hasten(facts: Facts, text: str) -> Remedy:
    """Log the snapshot that a copy needs to become consistent, and wake the worker."""
    orders = [
        remedies.order(primary.name, "SELECT pg_log_standby_snapshot()")
        for primary, _ in facts.above
    ]
    orders += [remedies.order(standby.name, RELOAD) for standby, _ in facts.below]
    if not facts.above:
        return remedies.manual(
            "create it again and load its consumer anew",
            because="no primary answers that the slot could be copied from",
        )
    return remedies.run_statements(text, *orders)


def _skipped(copy: Slot) -> str:
    """Return what PostgreSQL 19 says of a copy that was not synchronized the last time."""
    reason = copy.slotsync_skip_reason
    return f"; slotsync_skip_reason = {reason}" if reason else ""


def _oldest(facts: Facts) -> str:
    """Return words about the primary's oldest open transaction, "" if none is known."""
    for primary, state in facts.above:
        oldest = state.details.oldest if state.details is not None else None
        if oldest is not None:
            who = f"prepared transaction {oldest.gid}" if oldest.gid else f"pid {oldest.pid}"
            return f"; the oldest open transaction on {primary.name}: {who}, since {oldest.since}"
    return ""


def _since(slot: Slot | None) -> str:
    return f" since {slot.inactive_since}" if slot is not None and slot.inactive_since else ""


def _lsn(position: int | None) -> str:
    return "null" if position is None else format_lsn(position)
