"""Judges by all witnesses whether the old primary is gone: every promotion needs that. Pure.

seen                                                  then
a node answers as a primary                           refused, unless this run drained and fenced it
a node listens and does not let us in, or is frozen   refused
a standby still receives, not from another standby    refused
a subscription is still fed by another server         refused
a node does not answer at all (time-out, no route)    refused without a `fence` command that ended
                                                      with 0, a `stop` command after the drain, or
                                                      its token is-off
another node that does so, or does not let us in,     not a witness: noted, and not counted
and was a standby when it was last seen
a node refuses connections, and none of the above     it is gone
a subscriber does not answer                          not a witness: noted, and not counted

A refused connection alone is not proof: it may come from a proxy or a firewall. The proof is what
others see: no standby receives, and no subscription is fed any more. A machine that lost its power
closes no connection. So with the token, or after a `fence` command, standbys that still hold a
connection must connect anew (`to_ask`), and a subscription's connection that has been silent for
QUIET_S is dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode, OperatorNeeded
from services.failover.model.conninfo import DEFAULT_PORT
from services.failover.model.tokens import is_off
from services.failover.model.topology import feeds, follows
from services.failover.model.view import Reach
from services.failover.plan.notes import Measured
from services.failover.plan.request import OPERATION
from services.failover.plan.steps.step import active

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View
    from services.failover.plan.request import Request

QUIET_S = 3.0
"""An open connection that is silent for this long is dead, if an operator says so (`_vouched`)."""


def not_let_in(node: Node, also: str = "") -> OperatorNeeded:
    """Return the error (SPLIT_BRAIN) of a node that listens and can't be asked; `also` ends it."""
    return OperatorNeeded(
        f"{node.name} listens on its port but does not let us in, so it may be writing: "
        f"{node.detail}{also}",
        operation=OPERATION,
        subject=node.name,
        hint="stop it, or correct its conninfo in failover.nodes; or "
        + ("" if node.has_command("fence") else "add a `fence` command to failover.machines, and ")
        + "pass --fence",
        exit_code=ExitCode.SPLIT_BRAIN,
    )


class StillHeard(OperatorNeeded):
    """A server still hears a primary. Connections of a primary that just died end in a moment."""


def require_proof(view: View, request: Request, new: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) unless no primary but `new` can be alive.

    Raise StillHeard where its traces may end soon, so that the caller looks again for a moment.
    """
    for node in view.nodes:
        if node.name != new.name:
            suspect = not _no_primary(node, request, new, view)
            _require_gone(view, node, request, suspect=suspect)
    heard = (*_receiving(view, request, new), *_fed(view, request, new))
    if heard:
        raise StillHeard(
            f"a primary is still alive: {'; '.join(heard)}",
            operation=OPERATION,
            subject=new.name,
            hint="find that primary and stop or fence it, or replace it: slotfailover switchover; "
            "connections of a machine without power end after wal_receiver_timeout"
            + _counts_as_off(view, new)
            + "; name publishers of other clusters in failover.others",
            exit_code=ExitCode.SPLIT_BRAIN,
        )


def unjudged_notes(view: View, request: Request, new: Node) -> list[str]:
    """Return notes on nodes that could not be judged."""
    notes: list[str] = [
        Measured(
            f"not judged: {node.name} does not answer ({node.detail}), so nobody knows whether it "
            "sees a primary",
            about=f"witness {node.name}",
        )
        for node in view.nodes
        if node.state is None
        and node.name != new.name
        and (_no_primary(node, request, new, view) or not _may_lead(node, new, view))
    ]
    notes += [
        f"not judged: whether {where.name} is still fed by the old primary; it does not answer"
        for where in view.subscribers
        if where.reach is not Reach.ANSWERS
    ]
    said = new.state
    if view.bridge_slot is not None and said is not None and not said.may_see_origins:
        notes.append(
            f"not judged: the bridge's position; our role may not see the replication origins of "
            f"{new.name} (run sql/roles.sql)"
        )
    notes += [
        Measured(
            f"{node.name} does not answer ({node.detail}), and counts as off: an operator says so",
            about=f"word for {node.name}",
        )
        for node in view.nodes
        if node.reach is Reach.SILENT
        and request.accept.takes(is_off(view.system, node.name))
        and node.name not in request.power_fenced
    ]
    return notes


def drained(node: Node, request: Request) -> bool:
    """Tell whether this run has fenced the node, and knows its last position."""
    return node.fenced and request.final_lsn is not None


def _counts_as_off(view: View, new: Node) -> str:
    """Return how to say that nodes without an answer are off, as a part of a hint."""
    silent = [node.name for node in view.nodes if node.state is None and node.name != new.name]
    accept = options(is_off(view.system, name) for name in silent)
    return f", or count as dead once you have made sure that it is off: {accept}" if silent else ""


def _require_gone(view: View, node: Node, request: Request, *, suspect: bool) -> None:
    """Raise where the node may still be a primary. `suspect`: there are signs that it is."""
    if node.standby or node.reach is Reach.REFUSED or drained(node, request):
        return
    if node.leading:
        raise OperatorNeeded(
            f"{node.name} answers as a primary" + _fenced_by(node),
            operation=OPERATION,
            subject=node.name,
            hint=f"slotfailover switchover --to … replaces a primary that is alive; failover "
            f"--fence fences {node.name} first"
            + ("; resume completes the unfinished command, resume --rollback takes it back")
            * node.fenced,
            exit_code=ExitCode.SPLIT_BRAIN,
        )
    if not suspect:
        return
    if node.reach is not Reach.SILENT:
        shot = "; its `fence` command had ended with 0" if node.name in request.power_fenced else ""
        raise not_let_in(node, shot)
    if not _vouched(view, [node], request):
        raise OperatorNeeded(
            f"{node.name} does not answer, may be cut off from here, and may still take writes: "
            f"{node.detail}",
            operation=OPERATION,
            subject=node.name,
            hint=f"pass --fence, with a `fence` command in failover.machines.{node.name}; or make "
            f"sure that it is off, and say so: {options([is_off(view.system, node.name)])}",
            exit_code=ExitCode.SPLIT_BRAIN,
        )


def _may_lead(node: Node, new: Node, view: View) -> bool:
    """Tell whether the standbys may have followed this node; where that is unknown, they may."""
    led = _led_by(new, view)
    return not led or node in led


def _led_by(new: Node, view: View) -> list[Node]:
    """Return the nodes that the candidate's primary_conninfo names."""
    return [other for other in view.nodes if other.name != new.name and _leads(new, other)]


def _no_primary(node: Node, request: Request, new: Node, view: View) -> bool:
    """Tell whether a node without an answer is known not to be a primary.

    It was a standby when it was last seen; or this process saw the primary that it has drained take
    writes until then.
    """
    ended = [n.name for n in view.nodes if drained(n, request)] + [
        *(request.power_fenced | request.stopped)
    ]
    handed_over = request.final_lsn is not None and view.seen_writable in ended
    latest = view.promotions[-1][0] if view.promotions else ""
    silent = node.reach is Reach.SILENT and node.name != latest
    return _was_standby(node, new, view) or (silent and handed_over)


def _was_standby(node: Node, new: Node, view: View) -> bool:
    """Tell whether a silent node was a standby when last seen, and nobody promoted it since.

    The answer is false for the only node that the candidate follows, and where the node was last
    seen on an older timeline than the candidate's.
    """
    seen, mine = view.sighting, new.state.server.timeline if new.state is not None else 0
    if _led_by(new, view) == [node] or (seen is not None and seen.timeline < mine):
        return False
    return node.state is None and node.name in view.known_standbys


def _leads(standby: Node, other: Node) -> bool:
    """Tell whether a standby's primary_conninfo names the other; false where it can't be read."""
    state = standby.state
    return state is not None and state.upstream is not None and follows(standby, other)


def to_ask(view: View, request: Request, new: Node) -> list[Node]:
    """Return the standbys whose receiver may hold a connection to a server without power.

    A person says that this server is off, or a command of this run has ended it.

    An idle primary is silent for minutes, like one without power: only a new connection shows it.
    """
    streaming = _streaming(view, request, new)
    return [standby for standby, above in streaming if _vouched(view, above, request)]


def _receiving(view: View, request: Request, new: Node) -> list[str]:
    """Return words about standbys that still receive from another server than `new`."""
    found = []
    for standby, _ in _streaming(view, request, new):
        known = _sources(standby, view)
        source = " or ".join(other.name for other in known) or "a server that is not a node"
        age_s = standby.state.replication.heard_age_s if standby.state is not None else None
        found.append(f"{standby.name} receives from {source}{_since(age_s)}")
    return found


def _streaming(view: View, request: Request, new: Node) -> list[tuple[Node, list[Node]]]:
    """Return (standby, the nodes that may feed it) for each receiver not fed by a standby."""
    found = []
    for standby in view.standbys:
        if standby.state is None or not standby.state.replication.receiver_streaming:
            continue
        above = _sources(standby, view)
        if not above or not all(other.standby or drained(other, request) for other in above):
            found.append((standby, above or [n for n in view.nodes if n.name != new.name]))
    return found


def _sources(standby: Node, view: View) -> list[Node]:
    """Return the nodes that may feed a standby's receiver.

    If its primary_conninfo names several hosts, these are the connected one; all, if that is
    unknown.
    """
    state = standby.state
    others = [other for other in view.nodes if other.name != standby.name]
    led = [other for other in others if _leads(standby, other)]
    if state is None or state.upstream is None or len(state.upstream.endpoints) == 1:
        return led
    fed = state.provenance.fed
    if fed is None or not fed.host:
        return led
    endpoint = (fed.host, fed.port or DEFAULT_PORT)
    return [n for n in others if endpoint in n.endpoints] or [
        n for n in others if feeds(n, standby)
    ]


def _fed(view: View, request: Request, new: Node) -> list[str]:
    """Return words about subscriptions that another server than `new` still feeds."""
    found = []
    for where, subscription in (*view.ours(), *_perhaps_ours(view, request, new)):
        if not (subscription.fed and subscription.enabled):
            continue
        if _fed_by_itself(subscription, new):
            continue
        above = [n for n in view.nodes if n is not new and subscription.conninfo.names(n.endpoints)]
        if any(drained(other, request) for other in above or _holding(subscription, view)):
            continue
        age_s = subscription.heard_age_s
        perhaps = above or [n for n in view.nodes if n.name != new.name]
        if _vouched(view, perhaps, request) and _quiet(age_s):
            continue
        source = " or ".join(other.name for other in above) or "another server"
        name = f"{where.name}/{subscription.name}"
        found.append(f"{name} is fed by {source}{_since(age_s)}")
    return found


def _holding(subscription: Subscription, view: View) -> list[Node]:
    """Return the primaries whose slot of a subscription is in use: one of them may feed it.

    The address that the subscription names is unknown.
    """
    name = subscription.slot_name or ""
    return [node for node in view.nodes if node.leading and active(node, name)]


def _perhaps_ours(view: View, request: Request, new: Node) -> list[tuple[Subscriber, Subscription]]:
    """Return the subscriptions with an unknown address whose slot the candidate has.

    Return none once the primary was drained: it is what feeds them.
    """
    if request.final_lsn is not None or not new.standby or new.state is None:
        return []
    names = {slot.slot_name for slot in new.state.slots if slot.slot_type == "logical"}
    return [(where, found) for where, found in view.unidentified() if found.slot_name in names]


def _fed_by_itself(subscription: Subscription, new: Node) -> bool:
    """Tell whether the new primary, and no other host of the subscription, feeds it.

    A standby's copy of a slot feeds nobody, though slot synchronization makes it look active.
    """
    if not subscription.conninfo.leads_to(new.endpoints):
        return False
    if len(subscription.conninfo.endpoints) == 1 or not new.standby:
        return True
    state, name = new.state, subscription.slot_name or ""
    slot = state.slot(name) if state is not None else None
    return slot is not None and slot.active_pid is not None and not slot.synced


def _vouched(view: View, nodes: list[Node], request: Request) -> bool:
    """Tell whether none answers as a primary, and a person or a command says that one is off."""
    gone = all(node.state is None or node.standby for node in nodes)
    ended = request.power_fenced | request.stopped
    silent = [is_off(view.system, node.name) for node in nodes if node.state is None]
    off = [token for token in silent if request.accept.takes(token)]
    return gone and (bool(off) or any(node.name in ended for node in nodes))


def _quiet(age_s: float | None) -> bool:
    return age_s is not None and age_s >= QUIET_S


def _since(age_s: float | None) -> str:
    return f" (last message {age_s:.1f} s ago)" if age_s is not None else ""


def _fenced_by(node: Node) -> str:
    if not node.fenced or node.state is None:
        return ""
    return f", and is fenced by an unfinished command: {node.state.fence_mark}"
