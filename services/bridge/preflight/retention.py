"""Slots that hold WAL, and the settings that bound or remove it. Pure."""

from collections.abc import Iterator
from typing import Final

from schemas.findings import Finding, Severity
from services.bridge.preflight.facts import Facts
from services.bridge.preflight.finding import MIB, advice, alter, amount

_DAY_S: Final = 86_400
_GRAVE: Final = ("unreserved", "lost")


def retention(facts: Facts) -> Iterator[Finding]:
    """Yield findings about slots that may fill the primary's disk, or be lost."""
    yield from _slots(facts)
    yield from _own_slot(facts)
    yield from _settings(facts)


def _slots(facts: Facts) -> Iterator[Finding]:
    """Warn of each slot that holds more WAL than max_wal_size, or has lost some."""
    primary = facts.primary
    planned = primary.number("max_wal_size", 1024) * MIB
    for slot in primary.slots:
        kept = primary.wal_lsn - slot.restart_lsn if slot.restart_lsn is not None else 0
        gone = slot.wal_status in _GRAVE or slot.invalidation_reason is not None
        if kept <= planned and not gone:
            continue
        name, used = slot.slot_name, slot.active_pid is not None
        state = f"invalidated ({slot.invalidation_reason})" if slot.invalidation_reason else "kept"
        change = (
            "let its consumer catch up; slotbridge_delivery_age_seconds tells of the bridge's"
            if used or name == facts.slot
            else f"start its consumer, or: SELECT pg_drop_replication_slot('{name}');"
        )
        yield advice(
            "slot-holds-wal",
            Severity.CRITICAL if gone else Severity.WARNING,
            f"slot {name}",
            f"{amount(kept)} of WAL since restart_lsn are {state}, wal_status = {slot.wal_status}, "
            f"{'active' if used else 'not active'}; max_wal_size = {amount(planned)}",
            "the slot has lost WAL, or is about to: its consumer must start over"
            if gone
            else "WAL fills the primary's disk until the slot moves or is dropped",
            change,
        )


def _own_slot(facts: Facts) -> Iterator[Finding]:
    """Warn where the bridge's slot would not survive a failover, or no slot is left."""
    slot, primary = facts.own_slot, facts.primary
    if slot is not None and not slot.failover:
        yield advice(
            "slot-without-failover",
            Severity.CRITICAL,
            f"slot {facts.slot}",
            "failover = f in pg_replication_slots",
            "no standby has the slot: a failover ends the stream, and the topics start over",
            "stop the bridge; then psql 'replication=database dbname=…' "
            f"-c 'ALTER_REPLICATION_SLOT {facts.slot} (FAILOVER true)'; start the bridge",
        )
    total = primary.number("max_replication_slots", 10)
    if len(primary.slots) >= total:
        yield advice(
            "slots-exhausted",
            Severity.WARNING if slot else Severity.CRITICAL,
            "primary",
            f"slots: {len(primary.slots)}, max_replication_slots: {total}",
            "no slot can be made: not for a new standby, a rejoin or another bridge"
            if slot
            else "a start can't make its slot, and ends with exit code 25",
            f"ALTER SYSTEM SET max_replication_slots = {total + 10}; then restart the server, and "
            "the standbys alike",
            refuses=slot is None,
        )


def _settings(facts: Facts) -> Iterator[Finding]:
    """Warn of settings that let slots fill the disk, invalidate slots, or drop needed WAL."""
    primary = facts.primary
    if primary.number("max_slot_wal_keep_size", -1) == -1:
        planned = max(1, 4 * primary.number("max_wal_size", 1024) // 1024)
        yield advice(
            "slot-wal-unbounded",
            Severity.WARNING,
            "primary",
            "max_slot_wal_keep_size = -1",
            "a slot whose consumer is away keeps WAL until the disk is full and the primary stops",
            "choose what the disk can spare, more than the longest outage writes: "
            + alter("max_slot_wal_keep_size", f"{planned}GB"),
        )
    idle_s = primary.number("idle_replication_slot_timeout", 0)
    if 0 < idle_s < _DAY_S:
        yield advice(
            "slot-idle-timeout",
            Severity.WARNING,
            "primary",
            f"idle_replication_slot_timeout = {idle_s} s",
            "the slot of a bridge that is away for longer is invalidated: the topics start over",
            alter("idle_replication_slot_timeout", "0"),
        )
    if primary.followers_without_slot and primary.number("wal_keep_size", 0) == 0:
        names = ", ".join(primary.followers_without_slot)
        yield advice(
            "standby-without-slot",
            Severity.WARNING,
            names,
            f"{names} streams without a slot, and wal_keep_size = 0",
            "a standby that is away past a checkpoint misses WAL and must be copied anew; nothing "
            "keeps the bridge from running ahead of it",
            "on the standby: set primary_slot_name to a physical slot of the primary "
            "(slotfailover check --fix); or on the primary: " + alter("wal_keep_size", "1GB"),
        )
