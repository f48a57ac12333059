"""synchronized_standby_slots and synchronous_standby_names: who is waited for. Pure.

The primary hands changes of failover slots to their consumers only after all standbys of the list
have them. An empty list lets consumers get ahead; a name that can't catch up stops all of them.
Source: PostgreSQL documentation 19.6.2 Primary Server; slot.c, StandbySlotsHaveCaughtup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import remedies
from services.failover.checks.model import Needs, Seen, check
from services.failover.model.standby_settings import (
    commits_can_go_on,
    listed,
    quorum,
    slots_in_use,
    slots_that_exist,
)
from services.postgres.identifiers import identifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from schemas.findings import Remedy
    from services.failover.checks.facts import Facts
    from services.failover.model.view import Node, NodeState
    from services.postgres.slots import Slot

GROUP = "waiting"
SETTING = "synchronized_standby_slots"
STALL = (
    "decoding of every failover slot stands still now, so consumers fall behind, WAL piles up, and "
    "an orderly stop of the primary hangs"
)


@check(
    "standby-slot-listed",
    group=GROUP,
    title="synchronized_standby_slots names the standby's slot",
    consequence="consumers can get ahead of the standby: after a failover they have transactions "
    "that the new primary never had",
    severity=Severity.WARNING,
    needs=Needs.BOTH,
    reads=(SETTING, "primary_slot_name"),
)
def standby_slot_listed(facts: Facts) -> Iterator[Seen]:
    for primary, above, standby, below in facts.both:
        own = below.setting("primary_slot_name")
        names = listed(above.setting(SETTING))
        yield Seen(
            primary.name,
            f"{SETTING} = '{', '.join(names)}', primary_slot_name = '{own}' on {standby.name}",
            "" if own in names else f"{SETTING} does not name the slot of {standby.name}",
            _list_for(facts, primary, above),
        )


@check(
    "listed-slot-missing",
    group=GROUP,
    title="every slot in synchronized_standby_slots exists",
    consequence=STALL,
    needs=Needs.PRIMARY,
    reads=(SETTING,),
)
def listed_slot_missing(facts: Facts) -> Iterator[Seen]:
    yield from _listed(facts, "does not exist", lambda slot: slot is None)


@check(
    "listed-slot-logical",
    group=GROUP,
    title="every slot in synchronized_standby_slots is physical",
    consequence=STALL,
    needs=Needs.PRIMARY,
    reads=(SETTING,),
)
def listed_slot_logical(facts: Facts) -> Iterator[Seen]:
    yield from _listed(
        facts, "is a logical slot", lambda slot: slot is not None and slot.slot_type == "logical"
    )


@check(
    "listed-slot-invalidated",
    group=GROUP,
    title="no slot in synchronized_standby_slots is invalidated",
    consequence=STALL,
    needs=Needs.PRIMARY,
    reads=(SETTING,),
)
def listed_slot_invalidated(facts: Facts) -> Iterator[Seen]:
    yield from _listed(
        facts,
        "is invalidated",
        lambda slot: (
            slot is not None
            and slot.slot_type == "physical"
            and slot.invalidation_reason is not None
        ),
    )


@check(
    "listed-slot-inactive",
    group=GROUP,
    title="the standby of every slot in synchronized_standby_slots is connected",
    consequence=STALL,
    needs=Needs.PRIMARY,
    reads=(SETTING,),
)
def listed_slot_inactive(facts: Facts) -> Iterator[Seen]:
    for primary, state, slot in _slots_listed(facts):
        if slot.slot_type != "physical" or slot.invalidation_reason or slot.active_pid:
            continue
        kept = [name for name in listed(state.setting(SETTING)) if name != slot.slot_name]
        order = remedies.alter_system(primary, SETTING, *kept).orders
        yield Seen(
            primary.name,
            f"active_pid is null for {slot.slot_name} in pg_replication_slots"
            + _waited_for(state, slot.slot_name),
            f"no standby is connected to {slot.slot_name}, which {SETTING} names",
            remedies.run_statements(
                "start that standby; if it is gone for good, take it out of the list",
                *order,
                by_hand="without it consumers can get ahead of a standby that only was away",
            ),
            since=slot.inactive_since or "",
        )


@check(
    "standby-list-stale",
    group=GROUP,
    title="the standby's own synchronized_standby_slots names only slots that are in use there",
    consequence="after its promotion decoding waits for ever for standbys of the old primary "
    "(slotfailover resets the setting, other tools do not)",
    severity=Severity.WARNING,
    needs=Needs.STANDBY,
    reads=(SETTING,),
)
def standby_list_stale(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        setting = state.setting(SETTING)
        there, kept = slots_that_exist(setting, state.slots), slots_in_use(setting, state.slots)
        stale = [name for name in listed(setting) if name not in kept]
        unused = [name for name in stale if name in there]
        yield Seen(
            standby.name,
            f"{SETTING} = '{setting}' on {standby.name}"
            + (f"; no standby uses {', '.join(unused)} there" if unused else ""),
            f"{SETTING} on {standby.name} names {', '.join(stale)}, which "
            + ("no standby uses there" if unused else "it does not have")
            if stale
            else "",
            remedies.alter_system(standby, SETTING, *kept),
        )


@check(
    "synchronous-names-stale",
    group=GROUP,
    title="the standby's own synchronous_standby_names can be met",
    consequence="after its promotion every commit waits for ever for standbys of the old primary "
    "(slotfailover resets the setting, other tools do not)",
    severity=Severity.WARNING,
    needs=Needs.STANDBY,
    reads=("synchronous_standby_names",),
)
def synchronous_names_stale(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        setting = state.setting("synchronous_standby_names")
        fine = commits_can_go_on(setting, state.replication.followers)
        yield Seen(
            standby.name,
            f"synchronous_standby_names = '{setting}' on {standby.name}",
            "" if fine else f"synchronous_standby_names on {standby.name} names others' standbys",
            remedies.alter_system(standby, "synchronous_standby_names"),
        )


@check(
    "synchronous-before",
    group=GROUP,
    title="synchronous replication is on where it was on before the last failover",
    consequence="a commit is acknowledged before any standby has it: the next failover can lose it",
    severity=Severity.WARNING,
    needs=Needs.PRIMARY,
    reads=("synchronous_standby_names",),
)
def synchronous_before(facts: Facts) -> Iterator[Seen]:
    for primary, state in facts.above:
        before, now = facts.view.synchronous_before, state.setting("synchronous_standby_names")
        off = bool(before) and not now
        names = [name for name in state.replication.followers if name]
        wanted = quorum(before)
        count = min(wanted[0], len(names)) if wanted is not None else 0
        listing = ", ".join(identifier(name) for name in sorted(set(names)))
        remedy = remedies.manual(
            "set it again once a standby streams", because="no standby streams"
        )
        if count:
            value = f"ANY {count} ({listing})"
            remedy = remedies.run_statements(
                "",
                *remedies.alter_system(primary, "synchronous_standby_names", value).orders,
                by_hand="commits wait for standbys from then on; a rejoin sets it by "
                "failover.synchronous_standbys",
            )
        yield Seen(
            primary.name,
            f"synchronous_standby_names = '{now}' on {primary.name}"
            + (f"; on the primary before it was '{before}'" if before else ""),
            f"commits on {primary.name} wait for no standby, and did before the failover"
            if off
            else "",
            remedy,
        )


@check(
    "commits-wait",
    group=GROUP,
    title="the primary's synchronous_standby_names can be met",
    consequence="commits on the primary wait for ever",
    needs=Needs.PRIMARY,
    reads=("synchronous_standby_names",),
)
def commits_wait(facts: Facts) -> Iterator[Seen]:
    for primary, state in facts.above:
        setting = state.setting("synchronous_standby_names")
        followers = state.replication.followers
        yield Seen(
            primary.name,
            f"synchronous_standby_names = '{setting}', connected: {', '.join(followers) or 'none'}",
            ""
            if commits_can_go_on(setting, followers)
            else f"too few of the standbys that commits on {primary.name} wait for are connected",
            remedies.run_statements(
                "start those standbys; or let commits go on without",
                *remedies.alter_system(primary, "synchronous_standby_names").orders,
                by_hand="without it a failover can lose committed transactions",
            ),
        )


def _listed(facts: Facts, what: str, wrong: Callable[[Slot | None], bool]) -> Iterator[Seen]:
    """Yield the names of the list that are wrong, each with the list as it should be."""
    for primary, state in facts.above:
        for name in listed(state.setting(SETTING)):
            slot = state.slot(name)
            if wrong(slot):
                seen = "no such slot"
                if slot is not None:
                    seen = f"slot_type = {slot.slot_type}, wal_status = {slot.wal_status}"
                    seen += f", invalidation_reason = {slot.invalidation_reason or 'null'}"
                yield Seen(
                    primary.name,
                    f"{SETTING} = '{state.setting(SETTING)}', {name}: {seen}"
                    + _waited_for(state, name),
                    f"{name} in {SETTING} {what}",
                    _list_for(facts, primary, state),
                    since=(slot.inactive_since or "") if slot is not None else "",
                )


def _waited_for(state: NodeState, name: str) -> str:
    """Add to the evidence that a walsender waits for that slot now, if it does."""
    if name not in state.replication.withheld_by:
        return ""
    return "; a walsender waits for it now (WaitForStandbyConfirmation)"


def _slots_listed(facts: Facts) -> Iterator[tuple[Node, NodeState, Slot]]:
    for primary, state in facts.above:
        for name in listed(state.setting(SETTING)):
            slot = state.slot(name)
            if slot is not None:
                yield primary, state, slot


def _list_for(facts: Facts, primary: Node, state: NodeState) -> Remedy:
    """Return the order that sets the list to the slots of all known standbys, and others in use.

    Slots that do not exist, or can't catch up any more, are left out.
    """
    kept = list(slots_that_exist(state.setting(SETTING), state.slots))
    own = [node.state.setting("primary_slot_name") for node in facts.view.standbys if node.state]
    there = slots_that_exist(", ".join(filter(None, own)), state.slots)
    names = (*kept, *(name for name in there if name not in kept))
    if not names:
        return remedies.manual(
            "give the standby a physical slot of its own first", because="there is none to name"
        )
    return remedies.alter_system(primary, SETTING, *names)
