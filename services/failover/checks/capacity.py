"""Whether the standby's limits suffice: to replay what the primary does, and to replace it. Pure.

Source: PostgreSQL documentation 26.4.3 Administrator's Overview of Hot Standby, 19.6.1 Sending
Servers; xlogrecovery.c, RecoveryRequiresIntParameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.failover.checks import remedies
from services.failover.checks.model import Needs, Seen, check
from services.failover.model.topology import slot_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts
    from services.failover.model.view import NodeState

GROUP = "promotion"
RECOVERY_SETTINGS = (
    "max_connections",
    "max_locks_per_transaction",
    "max_prepared_transactions",
    "max_wal_senders",
    "max_worker_processes",
)
"""The limits that must not be lower on a standby than on its primary."""


def too_low(above: NodeState, below: NodeState) -> tuple[str, ...]:
    """Return the settings of which a standby has less than its primary, where both are known."""
    return tuple(
        name
        for name in RECOVERY_SETTINGS
        if above.setting(name)
        and below.setting(name)
        and int(below.setting(name)) < int(above.setting(name))
    )


def hidden_settings(above: NodeState, below: NodeState) -> tuple[tuple[str, bool], ...]:
    """Return (setting, the standby does not tell it) for each that one of the two does not tell."""
    return tuple(
        (name, not below.setting(name))
        for name in RECOVERY_SETTINGS
        if not (above.setting(name) and below.setting(name))
    )


@check(
    "recovery-settings",
    group=GROUP,
    title="the standby's limits are not lower than the primary's",
    consequence="the standby stops replaying once it learns of the primary's limits; it can't be "
    "promoted then, and does not start again",
    needs=Needs.BOTH,
    reads=RECOVERY_SETTINGS,
)
def recovery_settings(facts: Facts) -> Iterator[Seen]:
    for primary, above, standby, below in facts.both:
        lower = too_low(above, below)
        for name in lower:
            here, there = below.setting(name), above.setting(name)
            yield Seen(
                standby.name,
                f"{name} = {here} on {standby.name}, {there} on {primary.name}",
                f"{name} of {standby.name} is lower than that of {primary.name}",
                remedies.restart_with(standby, name, there),
            )
        if not lower:
            values = ", ".join(f"{name} = {below.setting(name)}" for name in RECOVERY_SETTINGS)
            yield Seen(standby.name, f"{standby.name}: {values}")


@check(
    "promotion-capacity",
    group=GROUP,
    title="the standby has room for every consumer and standby, once it is promoted",
    consequence="consumers or standbys are refused by the new primary, until it is restarted with "
    "a higher limit",
    needs=Needs.STANDBY,
    reads=("max_wal_senders", "max_replication_slots"),
)
def promotion_capacity(facts: Facts) -> Iterator[Seen]:
    """Count a walsender and a slot for each consumer, and for each node that will stream from it.

    A standby that streams from another standby is counted too: it may come to stream from here.
    """
    for standby, state in facts.below:
        others = [node for node in facts.view.nodes if node.name != standby.name]
        consumers = {required.slot for required in facts.required}
        slots = {slot.slot_name for slot in state.slots} | consumers
        needed = {
            "max_wal_senders": len(consumers) + len(others),
            "max_replication_slots": len(slots | {slot_of(node) for node in others}),
        }
        for name, count in needed.items():
            limit = int(state.setting(name))
            yield Seen(
                standby.name,
                f"{name} = {limit} on {standby.name}; as the primary it needs {count}: "
                f"{len(consumers)} consumer(s), {len(others)} standby(s)",
                f"{name} of {standby.name} is too low for a primary" if limit < count else "",
                remedies.restart_with(standby, name, str(2 * count)),
            )
