"""Reasons why a subscription or server must be left as it is, for now or for an operator. Pure.

After the promotion a subscription goes on only if its slot is there and valid, its position is not
past the WAL that the new primary kept, and nothing was skipped between its position and the slot.

The slot's confirmed_flush_lsn is often past the origin's remote_lsn without a gap: a subscriber
confirms WAL in which nothing was for it. So a slot that was synchronized (its position is one that
its consumer had confirmed) is trusted; one made anew on the new primary is not. A subscription that
has applied nothing has no position: there, only a note that this very timeline has fed it tells
that its slot was made with it, and not by hand in place of a lost one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.failover.model.timelines import left_at
from services.failover.model.tokens import lost_slot

if TYPE_CHECKING:
    from schemas.acceptance import Token
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, NodeState, Subscriber, View
    from services.postgres.slots import Slot


@dataclass(frozen=True, slots=True)
class Blocker:
    """Something that is still to do, or that an operator must do."""

    subject: str
    reason: str
    hint: str
    exit_code: ExitCode = ExitCode.CHECK_FAILED
    token: Token | None = None
    """What accepts the loss of its slot."""
    skippable: bool = False
    """Once its loss is accepted, the subscription can go on from the slot."""

    @property
    def line(self) -> str:
        """The reason and the hint as one line of text."""
        return f"{self.subject}: {self.reason}. Hint: {self.hint}"

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {"subject": self.subject, "reason": self.reason, "hint": self.hint}


def fault_of(
    subscriber: Subscriber, subscription: Subscription, node: Node, *, positions: bool
) -> Blocker | None:
    """Return why the new primary `node` must not feed the subscription, None if it may.

    `positions`: the node has not fed the subscription before, so the subscription's position must
    fit.
    """
    where = f"{subscriber.name}/{subscription.name}"
    name = subscription.slot_name
    slot = node.known_state.slot(name) if name is not None else None
    token = _lost(node, name) if name is not None else None
    if name is None or slot is None or slot.temporary:
        return Blocker(
            where,
            f"the slot {name} is not on {node.name}" if name else "the subscription has no slot",
            "changes are lost to it: create the slot, then load the subscription's tables anew "
            "(DROP SUBSCRIPTION after SET (slot_name = NONE), TRUNCATE, CREATE SUBSCRIPTION)",
            ExitCode.NOT_READY,
            token,
        )
    if slot.invalidation_reason is not None:
        return Blocker(
            where,
            f"the slot {name} is invalidated on {node.name}: {slot.invalidation_reason}",
            "drop the slot, create it again, and load the subscription's tables anew",
            ExitCode.NOT_READY,
            token,
        )
    return _misplaced(where, subscription, node, name) if positions else None


def _misplaced(where: str, subscription: Subscription, node: Node, name: str) -> Blocker | None:
    """Return why the node's slot `name` can't feed the subscription from its position."""
    state, token = node.known_state, _lost(node, name)
    slot = state.slot(name)
    position, switch = subscription.remote_lsn, state.switch_lsn
    if slot is None or (position is None and slot.synced):
        return None
    if state.server.timeline > 1 and state.provenance.history is None:
        doubt = "it has transactions that {} never had" if position is not None else "{} has fed it"
        return Blocker(
            where,
            f"nobody can tell whether {doubt.format(node.name)}: our role can't read the history "
            f"of timeline {state.server.timeline}",
            f"run sql/roles.sql on {node.name}, or connect to it as a superuser, and run this "
            "command again",
            ExitCode.PRIVILEGE_MISSING,
            token,
        )
    if position is None:
        return _without_position(where, subscription, node, slot)
    switch = _left_its_timeline(subscription, state, switch)
    if switch is not None and position > switch:
        return Blocker(
            where,
            f"it has transactions that {node.name} never had: it is at {format_lsn(position)}, "
            f"the timeline of {node.name} begins at {format_lsn(switch)}",
            "load its tables anew; set synchronized_standby_slots so that this can't happen",
            ExitCode.WITNESSES_DISAGREE,
            token,
        )
    written = state.replication.written_lsn
    if written is not None and position > written:
        return Blocker(
            where,
            f"it is at {format_lsn(position)}, {node.name} has WAL up to {format_lsn(written)}: "
            "another primary has fed it",
            f"make sure that {node.name} is not an old primary that came back; if it is not, load "
            "the subscription's tables anew",
            ExitCode.WITNESSES_DISAGREE,
            token,
        )
    flushed = slot.confirmed_flush_lsn or 0
    if not slot.synced and flushed > position and not _fed_by(subscription, node):
        return Blocker(
            where,
            f"the slot {name} on {node.name} was made after the failover and begins at "
            f"{format_lsn(flushed)}, but the subscription is at {format_lsn(position)}",
            f"load its tables anew, or go on without that part: slotfailover repoint "
            f"{options([token])}",
            ExitCode.WITNESSES_DISAGREE,
            token,
            skippable=True,
        )
    return None


def _without_position(
    where: str, subscription: Subscription, node: Node, slot: Slot
) -> Blocker | None:
    """Return why nothing proves that a slot that was not synchronized has all; None if it has."""
    timeline, name, met = node.known_state.server.timeline, slot.slot_name, subscription.milestone
    if _fed_by(subscription, node):
        return None
    token = _lost(node, name)
    noted = f"its note says {met}" if met is not None and met.timeline else "no note says so"
    return Blocker(
        where,
        f"it has no position, and the slot {name} on {node.name} was not synchronized: if it was "
        f"made after a failover, changes from before {format_lsn(slot.confirmed_flush_lsn or 0)} "
        f"are missing. Nothing proves that timeline {timeline} has fed it: {noted}",
        "load its tables anew; if the subscription was made with this slot, or can do without that "
        f"part: slotfailover repoint {options([token])}",
        ExitCode.WITNESSES_DISAGREE,
        token,
        skippable=True,
    )


def _lost(node: Node, slot: str) -> Token:
    return lost_slot(node.known_state.server.system_identifier, slot, node.name)


def _fed_by(subscription: Subscription, node: Node) -> bool:
    """Tell whether the node's own timeline is known to have fed the subscription.

    On timeline 1 nobody was promoted, so no slot was lost with a primary.
    """
    met = subscription.milestone
    known = met is not None and met == node.milestone(met.address)
    return known or node.known_state.server.timeline == 1


def _left_its_timeline(
    subscription: Subscription, state: NodeState, last: int | None
) -> int | None:
    """Return where the node's WAL left the timeline that fed the subscription, None if it did not.

    Where that timeline is not known, it may have been the one before the node's own: `last`.
    """
    met, system = subscription.milestone, state.server.system_identifier
    if met is None or not met.timeline or met.system != system:
        return last
    return left_at(state.provenance.history or (), met.timeline)


def lost_copies(
    subscriber: Subscriber, subscription: Subscription, node: Node
) -> tuple[Blocker, ...]:
    """Return the initial copies that can't be finished from `node`; the other tables go on."""
    known = {slot.slot_name for slot in node.state.slots} if node.state is not None else set()
    return tuple(
        Blocker(
            f"{subscriber.name}/{subscription.name}",
            f"a table's initial copy waits for the slot {name}, which is not on {node.name}",
            "TRUNCATE that table there, take it out of the publication, REFRESH PUBLICATION, add "
            "it again, REFRESH PUBLICATION: it is copied anew",
        )
        for name in subscription.sync_slots
        if name not in known
    )


def unreachable(view: View) -> tuple[Blocker, ...]:
    """Return the subscribers whose subscriptions can't be changed now."""
    return tuple(
        Blocker(
            subscriber.name,
            "it is a standby, its subscriptions can't be changed there"
            if subscriber.in_recovery
            else f"it can't be reached ({subscriber.detail}), its subscriptions are as they were",
            "run this command again once it can be reached as a primary",
        )
        for subscriber in view.subscribers
        if not subscriber.usable
    )


def unidentified(view: View) -> tuple[Blocker, ...]:
    """Return the subscriptions that stay untouched because nobody can tell who feeds them."""
    slots = {slot.slot_name for node in view.nodes if node.state for slot in node.state.slots}
    unknown = tuple(
        Blocker(
            f"{subscriber.name}/{found.name}",
            f"the publisher is unknown: {found.conninfo.address} is not a known address of a node, "
            "and no server that answers there can be identified",
            "where that is a node of this pair, list the address in failover.advertised and run "
            "slotfailover repoint; where it is not, list it in failover.others",
        )
        for subscriber, found in view.unidentified()
        if found.slot_name in slots  # else it can't be fed by this pair, whoever feeds it
    )
    return (*foreign(view), *unknown)


def foreign(view: View) -> tuple[Blocker, ...]:
    """Return disabled subscriptions whose mark, or whose address, is that of another cluster."""
    others = tuple(
        Blocker(
            f"{where.name}/{found.name}",
            "slotfailover disabled it for another cluster, with the system identifier "
            f"{found.destination.system if found.destination else ''}; that of this pair is "
            f"{view.system}",
            "let slotfailover of that cluster go on with it; where this pair feeds it now, take "
            "the mark out of its comment (COMMENT ON SUBSCRIPTION) before you enable it",
        )
        for where, found in view.marked_elsewhere()
    )
    astray = tuple(
        Blocker(
            f"{where.name}/{found.name}",
            f"slotfailover disabled it to lead it to {found.disabled_for}, and its connection "
            f"string leads to another cluster ({found.foreign_system}) now",
            "let its address answer as a node of this pair again; if it is to follow the other "
            "cluster, load its tables anew, and take the mark out of its comment",
        )
        for where, found in view.astray()
    )
    return (*others, *astray)
