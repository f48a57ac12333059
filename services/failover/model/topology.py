"""Who streams from whom, and through which slots, as the view shows it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from services.failover.model.managers import is_managed
from services.postgres.slots import Slot

if TYPE_CHECKING:
    from services.failover.model.view import Node, View


def slot_of(node: Node) -> str:
    """Return the physical slot by which a standby streams: its own, or one named after it."""
    own = node.state.setting("primary_slot_name") if node.standby and node.state else ""
    return own or slot_named_after(node.name)


def slot_named_after(node: str) -> str:
    """Return the name of the physical slot that a standby of this name gets."""
    return "slotfailover_" + re.sub(r"[^a-z0-9_]", "_", node.lower())[:40]


def replaced_by(view: View, node: Node) -> str:
    """Return the node that was promoted while `node`, which is silent, may be a primary, too.

    Return "" if `node` answers or was last seen as a standby, if no node was promoted, or if
    another manager starts the nodes. While no primary answers, the last sighting and the journals
    tell which node was promoted.
    """
    if node.state is not None or node.name in view.known_standbys or is_managed(view.managed_by):
        return ""
    if view.primary is not None:
        found, promoted = view.primary, view.primary.known_state.server.timeline > 1
        return found.name if promoted else ""
    seen, ordered = view.sighting, view.promotions[-1][0] if view.promotions else ""
    name = seen.node if seen is not None and seen.timeline > max(1, view.promoted_from) else ordered
    obeyed = not any(other.name == name and other.standby for other in view.nodes)
    return name if obeyed and name != node.name else ""


def keep_off(view: View, node: Node) -> str:
    """Return what to do with a node that another has replaced, instead of a start; "" if none has.

    Its data folder is still that of a primary: started, it takes writes beside the new one.
    """
    if not replaced_by(view, node):
        return ""
    return f"do NOT start {node.name} as it is; run: slotfailover rejoin {node.name}"


def failover_slots(node: Node) -> tuple[Slot, ...]:
    """Return the primary's slots that standbys synchronize; invalid ones never become ready."""
    found = node.state.slots if node.state is not None else ()
    return tuple(
        s for s in found if s.failover and not s.temporary and s.invalidation_reason is None
    )


def has_slot(node: Node, name: str) -> bool:
    """Tell whether the node has a valid physical slot of that name."""
    found = node.state.slot(name) if node.state is not None else None
    return found is not None and found.slot_type == "physical" and found.invalidation_reason is None


def follows(node: Node, primary: Node) -> bool:
    """Tell whether a standby is led to the primary, by its primary_conninfo or by both ends.

    A standby may reach its primary by an address that the settings do not know: what both ends tell
    shows it then.
    """
    state = node.state
    if state is None or not node.standby:
        return False
    led = state.upstream is None or state.upstream.leads_to(primary.endpoints)
    return led or feeds(primary, node)


def feeds(primary: Node, standby: Node) -> bool:
    """Tell whether the primary sends WAL into the slot by which the standby receives it.

    PostgreSQL lets a standby receive only from a server of its own cluster, and one slot feeds one
    standby at a time.
    """
    if primary.state is None or standby.state is None:
        return False
    fed = standby.state.provenance.fed
    if fed is None or not fed.slot or fed.timeline != primary.state.server.timeline:
        return False
    names = {fed.application, application_name(standby)}
    return any(
        sent.slot == fed.slot and sent.application in names
        for sent in primary.state.provenance.feeds
    )


def streams_from(node: Node, primary: Node) -> bool:
    """Tell whether the node is a standby that gets WAL from the primary."""
    state = node.state
    return follows(node, primary) and state is not None and state.replication.receiver_streaming


def application_name(node: Node) -> str:
    """Return the name by which the primary sees a standby, as far as primary_conninfo tells."""
    upstream = node.state.upstream if node.state is not None else None
    return upstream.value("application_name") if upstream is not None else ""
