"""Slots that keep too little WAL, or can't be failover slots at all. Pure.

Source: PostgreSQL documentation 53.20 pg_replication_slots (wal_status, safe_wal_size); slot.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import remedies
from services.failover.checks.model import Needs, Seen, check
from services.failover.checks.slots import GROUP, LOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts
    from services.failover.model.view import Node, NodeState
    from services.postgres.slots import Slot

SAFE_WAL_SHARE_MIN = 0.25
"""Of max_slot_wal_keep_size: with less left, a burst of writes may end the slot."""
TWO_PHASE_SAFE_VERSION = 180000


@check(
    "slot-wal",
    group=GROUP,
    title="the WAL of every slot is kept",
    consequence="the slot is invalidated at a checkpoint soon, and its consumer must start over",
    needs=Needs.BOTH,
    reads=("max_slot_wal_keep_size",),
    wants=True,
)
def slot_wal(facts: Facts) -> Iterator[Seen]:
    """Judge the WAL of slots that must survive, on both nodes, and of standbys' physical slots."""
    for node, state, slot in _watched(facts):
        limit_mb = int(state.setting("max_slot_wal_keep_size") or -1)
        enough = max(limit_mb, 0) * 2**20 * SAFE_WAL_SHARE_MIN
        near = slot.safe_wal_size is not None and slot.safe_wal_size < enough
        if slot.invalidation_reason or not (near or slot.wal_status in ("extended", "unreserved")):
            continue
        grave = slot.wal_status == "unreserved"
        yield Seen(
            slot.slot_name,
            f"wal_status = {slot.wal_status}, safe_wal_size = {slot.safe_wal_size}, "
            f"max_slot_wal_keep_size = {limit_mb} MB on {node.name}",
            f"{node.name} is about to lose WAL that the slot needs"
            if near or grave
            else "the slot holds back much WAL",
            remedies.manual(
                "let the slot's consumer catch up; meanwhile raise max_slot_wal_keep_size on "
                f"{node.name}",
                because="more WAL may fill the disk",
            ),
            Severity.CRITICAL if grave else Severity.WARNING,
            since=slot.inactive_since or "",
        )


@check(
    "slot-reserves-wal",
    group=GROUP,
    title="every physical slot has begun to keep WAL",
    consequence="the slot keeps nothing, and no limit of size or idleness ever ends it; a standby "
    "that connects late may miss WAL, and consumers wait for it if it is listed",
    severity=Severity.WARNING,
    needs=Needs.PRIMARY,
)
def slot_reserves_wal(facts: Facts) -> Iterator[Seen]:
    for primary, state in facts.above:
        for slot in state.slots:
            if slot.restart_lsn is not None or slot.invalidation_reason or slot.temporary:
                continue
            if slot.of_server:
                continue
            name = slot.slot_name
            physical = slot.slot_type == "physical"
            yield Seen(
                name,
                f"restart_lsn is null in pg_replication_slots on {primary.name}",
                "the slot was never used, and was created without reserving WAL",
                remedies.run_statements(
                    "",
                    remedies.order(
                        primary.name, remedies.drop_slot(name), remedies.create_physical_slot(name)
                    ),
                )
                if physical and slot.active_pid is None
                else remedies.manual(
                    "wait until the slot is created", because="the slot is being created"
                ),
                since=slot.inactive_since or "",
            )


@check(
    "slot-without-failover",
    group=GROUP,
    title="every logical slot can survive a failover",
    consequence=LOST,
    severity=Severity.WARNING,
    needs=Needs.BOTH,
)
def slot_without_failover(facts: Facts) -> Iterator[Seen]:
    """Look for slots without failover that nobody named, but whose consumer will miss them."""
    required = {r.slot for r in facts.required}
    for primary, state in facts.above:
        for slot in state.slots:
            if slot.slot_name in required or slot.of_server:
                continue
            if slot.slot_type == "logical" and not slot.failover:
                kind = "is temporary" if slot.temporary else "was made without failover"
                yield _lone(slot, primary, kind)
    for standby, state in facts.below:
        for slot in state.slots:
            own = not slot.synced and not slot.failover and slot.slot_name not in required
            if slot.slot_type == "logical" and own and state.server.in_recovery:
                yield _lone(slot, standby, "was made on a standby")


def _lone(slot: Slot, node: Node, kind: str) -> Seen:
    return Seen(
        slot.slot_name,
        f"failover = f, temporary = {'t' if slot.temporary else 'f'} in pg_replication_slots on "
        f"{node.name}",
        f"the slot {kind}, so no other node has it",
        remedies.manual(
            "let its consumer use a permanent slot that was made on the primary with failover",
            because="a slot's consumer knows it by name",
        ),
        since=slot.inactive_since or "",
    )


@check(
    "slot-two-phase",
    group=GROUP,
    title="two-phase slots survive with their prepared transactions",
    consequence="before PostgreSQL 18 the copy does not know since when two-phase decoding is on: "
    "transactions that are prepared at the failover can be lost",
    severity=Severity.WARNING,
)
def slot_two_phase(facts: Facts) -> Iterator[Seen]:
    for node, state in facts.above or facts.below:
        for required in facts.required:
            slot = state.slot(required.slot)
            old = state.server.version < TWO_PHASE_SAFE_VERSION
            if slot is not None and slot.two_phase and old:
                yield Seen(
                    slot.slot_name,
                    f"two_phase = t, failover = {'t' if slot.failover else 'f'}, server_version_num"
                    f" = {state.server.version} on {node.name}",
                    "two_phase and failover are both on, on PostgreSQL 17",
                    remedies.manual(
                        "make the slot without two_phase, or upgrade to PostgreSQL 18",
                        because="17 can't change two_phase of a slot",
                    ),
                )


def _watched(facts: Facts) -> Iterator[tuple[Node, NodeState, Slot]]:
    required = {r.slot for r in facts.required}
    for node, state in (*facts.above, *facts.below):
        for slot in state.slots:
            if slot.slot_name in required or slot.slot_type == "physical":
                yield node, state, slot
