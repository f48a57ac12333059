"""What a pair must have for its slots to be synchronized, each with evidence and remedy. Pure.

    on the standby   sync_replication_slots, primary_slot_name, hot_standby_feedback, dbname in
                     primary_conninfo, the slotsync worker, a streaming walreceiver
    on the primary   wal_level, that physical slot, synchronized_standby_slots that names it

A condition that does not hold explains a slot that is not ready, or warns of one that will not be.
Source: PostgreSQL documentation 47.2.3 Replication Slot Synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.failover.standby_lists import listed

if TYPE_CHECKING:
    from services.failover.view import Node, NodeState, View

SETTINGS = (
    "wal_level",
    "sync_replication_slots",
    "primary_slot_name",
    "hot_standby_feedback",
    "synchronized_standby_slots",
    "synchronous_standby_names",
)
"""What has to be read of every node."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that must hold on a server, and whether it does."""

    name: str
    server: str
    holds: bool
    evidence: str
    remedy: str

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "condition": self.name,
            "server": self.server,
            "holds": self.holds,
            "evidence": self.evidence,
            "remedy": self.remedy,
        }


def conditions(view: View, standby: Node | None) -> tuple[Condition, ...]:
    """The conditions of slot synchronization to `standby`, in the order to repair them."""
    if standby is None or standby.state is None:
        return ()
    found = _of_standby(standby, standby.state)
    primary = view.primary
    if primary is not None and primary.state is not None:
        found += _of_both(primary, primary.state, standby, standby.state)
    return tuple(found)


def _of_standby(standby: Node, state: NodeState) -> list[Condition]:
    here = standby.name
    upstream = state.upstream
    dbname = upstream.value("dbname") if upstream else ""
    return [
        Condition(
            "sync_replication_slots is on",
            here,
            state.setting("sync_replication_slots") == "on",
            f"sync_replication_slots = {state.setting('sync_replication_slots')}",
            f"on {here}: ALTER SYSTEM SET sync_replication_slots = on, and reload",
        ),
        Condition(
            "primary_slot_name is set",
            here,
            bool(state.setting("primary_slot_name")),
            f"primary_slot_name = '{state.setting('primary_slot_name')}'",
            f"on {here}: set it to a physical slot of the primary, and reload",
        ),
        Condition(
            "hot_standby_feedback is on",
            here,
            state.setting("hot_standby_feedback") == "on",
            f"hot_standby_feedback = {state.setting('hot_standby_feedback')}",
            f"on {here}: ALTER SYSTEM SET hot_standby_feedback = on, and reload",
        ),
        Condition(
            "primary_conninfo has a dbname",
            here,
            bool(dbname) or upstream is None,
            f"dbname = '{dbname}'" if upstream else "primary_conninfo is hidden from our role",
            f"on {here}: add dbname=… to primary_conninfo (pg_basebackup -R writes none), and "
            "reload",
        ),
        Condition(
            "wal_level is logical",
            here,
            state.setting("wal_level") == "logical",
            f"wal_level = {state.setting('wal_level')}",
            f"on {here}: wal_level = logical, and restart",
        ),
    ]


def _of_both(primary: Node, above: NodeState, standby: Node, below: NodeState) -> list[Condition]:
    slot_name = below.setting("primary_slot_name")
    slot = above.slot(slot_name) if slot_name else None
    named = listed(above.setting("synchronized_standby_slots"))
    return [
        Condition(
            "wal_level is logical",
            primary.name,
            above.setting("wal_level") == "logical",
            f"wal_level = {above.setting('wal_level')}",
            f"on {primary.name}: wal_level = logical, and restart",
        ),
        Condition(
            "the standby's physical slot exists",
            primary.name,
            slot is not None and slot.slot_type == "physical",
            f"'{slot_name}' is {'a ' + slot.slot_type + ' slot' if slot else 'no slot there'}",
            f"on {primary.name}: SELECT pg_create_physical_replication_slot("
            f"'{slot_name or 'NAME'}', true), with primary_slot_name on {standby.name}",
        ),
        Condition(
            "synchronized_standby_slots names the standby's slot",
            primary.name,
            bool(slot_name) and slot_name in named,
            f"synchronized_standby_slots = '{', '.join(named)}'",
            f"on {primary.name}: add {slot_name or 'the standby’s slot'} to it, and reload; "
            "without it consumers can get ahead of the standby",
        ),
        Condition(
            "the standby streams",
            standby.name,
            below.replication.receiver_streaming,
            "pg_stat_wal_receiver.status"
            f" {'=' if below.replication.receiver_streaming else '<>'} streaming",
            f"read the log of {standby.name}: its primary_conninfo must lead to {primary.name}",
        ),
        Condition(
            "the slotsync worker runs",
            standby.name,
            below.replication.slotsync_worker,
            f"{'a' if below.replication.slotsync_worker else 'no'} slotsync worker in "
            "pg_stat_activity",
            f"read the log of {standby.name}: pg_hba.conf of {primary.name} must allow its role "
            "an ordinary connection, not only replication",
        ),
    ]
