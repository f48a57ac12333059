"""How many commits a promotion may lose, by every witness that is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.acceptance import Kind
from schemas.lsn import format_lsn
from services.failover.model.standby_settings import quorum
from services.failover.model.timelines import left_at
from services.failover.model.topology import application_name, slot_of

if TYPE_CHECKING:
    from services.failover.model.loss_limit import Sighting
    from services.failover.model.view import Node, View


@dataclass(frozen=True, slots=True)
class Loss:
    """A reason for which commits may be lost, and the known bytes of their WAL."""

    lacking: int
    reason: str
    hint: str
    kind: Kind = Kind.LOST_WAL


def losses(view: View, chosen: Node) -> list[Loss]:
    """Return why the promotion of `chosen` would lose more than the limits allow."""
    found = [
        *_against_standbys(view, chosen),
        *_against_older(view, chosen),
        *_against_sighting(view, chosen),
    ]
    silent = _quorum(view, chosen)
    return [*found, *([silent] if silent is not None else [])]


def lacking(view: View, chosen: Node) -> int | None:
    """Return how many bytes of known WAL the candidate lacks, None where none is known."""
    known = [lsn for lsn, _ in _witnesses(view, chosen)]
    return max(0, *(lsn - chosen.received for lsn in known)) if known else None


def has_received_all(node: Node) -> bool:
    """Tell whether the node is known to have all that its upstream had written."""
    replication = node.state.replication if node.state is not None else None
    return (
        replication is not None
        and replication.received_all
        and replication.received_lsn is not None
    )


def last_contact(view: View, chosen: Node) -> str:
    """Say in one line which commits may be lost; every plan of a failover has this line."""
    seen = view.sighting
    behind = lacking(view, chosen)
    state = chosen.state
    replayed = state.replication.replayed_age_s if state is not None else None
    newest = f"; its newest commit is {replayed:.0f} s old" if replayed is not None else ""
    if behind is None:
        return (
            f"commits that may be lost: not judged, as neither the primary's position nor the "
            f"standbys that commits waited for are noted (with failover.journal, watch and check "
            f"note both); "
            f"{chosen.name} has WAL up to {format_lsn(chosen.received)}{newest}"
        )
    contact = ""
    if seen is not None:
        by = f" ({seen.by})" if seen.by else ""
        contact = f"; last contact with {seen.node} {seen.age_s:.0f} s ago{by}, at {_at(seen)}"
    return (
        f"commits that may be lost: {behind} bytes of WAL, and what came after the last contact"
        f"{contact}{newest}"
    )


def slots_not_judged(view: View) -> str:
    """Say which failover slots of the last primary may be lost unseen."""
    seen = view.sighting
    if seen is None or view.slots_last_seen is None:
        return (
            "not judged: failover slots that the primary had and no standby has, as nobody has "
            "noted which ones it had (with failover.journal, every command and watch note them)"
        )
    return f"not judged: failover slots that were made on {seen.node} after the last contact"


def _witnesses(view: View, chosen: Node) -> list[tuple[int, str]]:
    """Return (last primary's position, who says so), on the candidate's or a newer timeline."""
    timeline = chosen.known_state.server.timeline
    found = []
    if view.sighting is not None and view.sighting.timeline >= timeline:
        found.append((view.sighting.lsn, f"{view.sighting.node}, as last seen"))
    for node in view.standbys:
        state = node.state
        if state is not None and state.server.timeline >= timeline:
            if state.replication.upstream_lsn is not None:
                found.append((state.replication.upstream_lsn, f"the server that feeds {node.name}"))
            if node.name != chosen.name:
                found.append((node.received, node.name))
    return found


def _against_standbys(view: View, chosen: Node) -> list[Loss]:
    """Return losses because another standby that answers has more WAL, or a newer timeline."""
    mine = chosen.known_state.server.timeline
    for other in view.standbys:
        if other.name == chosen.name or other.state is None:
            continue
        theirs = other.state.server.timeline
        behind = other.received - chosen.received
        if theirs > mine:
            left = left_at(other.state.provenance.history or (), mine)
            begins = chosen.received if left is None else min(left, chosen.received)
            return [
                Loss(
                    max(0, other.received - begins),
                    f"{chosen.name} is on timeline {mine}, {other.name} on {theirs}: "
                    f"{chosen.name} lacks the commits of timeline {theirs}",
                    f"promote {other.name}: --to {other.name}",
                )
            ]
        start, other_start = _began(chosen), _began(other)
        if theirs == mine and None not in (start, other_start) and start != other_start:
            return [
                Loss(
                    max(0, behind),
                    f"{chosen.name} and {other.name} are on different timelines {mine}: one begins "
                    f"at {format_lsn(start or 0)}, the other at {format_lsn(other_start or 0)}",
                    "two primaries were promoted apart: decide whose commits stay, and rebuild the "
                    "other's standbys",
                )
            ]
        if theirs == mine and behind > 0:
            return [
                Loss(
                    behind,
                    f"{chosen.name} lacks {behind} bytes of WAL that {other.name} has",
                    f"promote {other.name} (--to {other.name}), or let {chosen.name} stream from "
                    f"{other.name} first",
                )
            ]
    return []


def branched(view: View, node: Node) -> bool:
    """Tell whether the last primary went on with a timeline after `node` had left it.

    The node was then promoted beside that primary, and made a standby again: its timeline has the
    larger number, and is not the newer one.
    """
    return any(_left_behind(view, node, *had) for had in _of_primaries(view))


def _of_primaries(view: View) -> list[tuple[int, int, str]]:
    """Return (timeline, position, who) of the primary that answers, and of the last one seen."""
    found = [(n.state.server.timeline, n.received, n.name) for n in view.writable if n.state]
    if view.sighting is not None:
        seen = view.sighting
        found.append((seen.timeline, seen.lsn, f"{seen.node}, as last seen,"))
    return found


def _left_behind(view: View, node: Node, timeline: int, lsn: int, who: str) -> Loss | None:
    """Return the loss of WAL that `who` wrote on an older timeline after `node` had left it.

    Return None where a consumer, the journal or Kafka has met a later timeline: its primary was
    promoted on purpose, and this promotion does not lose what that one lost.
    """
    history = (node.state.provenance.history if node.state is not None else None) or ()
    newest = max((met.timeline for _, met in view.met()), default=0)
    left = max((at for number, at in history if number <= timeline), default=lsn)
    if not history or newest > timeline or timeline > history[-1][0] or lsn <= left:
        return None
    return Loss(
        lsn - left,
        f"{node.name} left timeline {timeline} at {format_lsn(left)}, and {who} had it up to "
        f"{format_lsn(lsn)}: {node.name} lacks the commits between these positions",
        f"promote a standby that is on timeline {timeline} (--to NODE), or start the old primary",
    )


def _against_older(view: View, chosen: Node) -> list[Loss]:
    """Return the loss because somebody had more of an older timeline than `chosen` took from it."""
    had = [(n.state.server.timeline, n.received, n.name) for n in view.standbys if n.state]
    found = (_left_behind(view, chosen, *each) for each in (*had, *_of_primaries(view)))
    return sorted(filter(None, found), key=lambda loss: -loss.lacking)[:1]


def _began(node: Node) -> int | None:
    """Return where the node's timeline left its parent, None for the first or an unknown one."""
    history = node.state.provenance.history if node.state is not None else None
    return history[-1][1] if history else None


def _against_sighting(view: View, chosen: Node) -> list[Loss]:
    """Return the loss if `chosen` is older than the primary's last known timeline or position."""
    seen, mine = view.sighting, chosen.known_state.server.timeline
    if seen is not None and seen.timeline > mine:
        return [
            Loss(
                max(0, seen.lsn - chosen.received),
                f"{chosen.name} is on timeline {mine}; {seen.node} was the primary on timeline "
                f"{seen.timeline} {seen.age_s:.0f} s ago, at {_at(seen)}",
                f"start a standby that is on timeline {seen.timeline}, or {seen.node}",
            )
        ]
    behind = lacking(view, chosen) or 0
    if behind > view.loss_limit.bytes_max:
        return [
            Loss(
                behind,
                f"{chosen.name} lacks {behind} bytes of WAL that the primary had, more than "
                f"lag_bytes_max_on_failover ({view.loss_limit.bytes_max})",
                "start a standby that has more, or the old primary",
            )
        ]
    age_s = chosen.known_state.replication.replayed_age_s
    seconds = (age_s or 0.0) - (seen.age_s if seen is not None else 0.0)
    limit_s = view.loss_limit.seconds_max
    if behind and seen is not None and limit_s and (age_s is None or seconds > limit_s):
        how_old = f"{seconds:.0f} s older than the last sight of {seen.node}, more than"
        if age_s is None:
            how_old = "of an age that it can't tell, as it has replayed none since it was started:"
        return [
            Loss(
                behind,
                f"the newest commit of {chosen.name} is {how_old} "
                f"lag_seconds_max_on_failover ({limit_s})",
                "start a standby that has more, or the old primary",
            )
        ]
    return []


def _quorum(view: View, chosen: Node) -> Loss | None:
    """Return a loss if too few synchronous standbys answer to know that one of them has all."""
    seen = view.sighting
    wanted = quorum(seen.synchronous) if seen is not None else None
    if seen is None or wanted is None or seen.timeline < chosen.known_state.server.timeline:
        return None
    count, names = wanted
    everybody = {node.name for node in view.nodes} - {seen.node}
    answering = [n for n in view.standbys if has_received_all(n) or n.name == chosen.name]
    if "*" in names:
        members, heard = len(everybody), len(answering)
    else:
        members = len(names)
        heard = sum(not _names_of(node).isdisjoint(names) for node in answering)
    if heard + count > members:
        return None
    return Loss(
        lacking(view, chosen) or 0,
        f"commits waited for {count} of the {members} standbys in synchronous_standby_names of "
        f"{seen.node} ('{seen.synchronous}'), and only {heard} of them report their position: "
        f"the silent ones may have commits that {chosen.name} never had",
        f"start {members - count + 1 - heard} more of them",
        Kind.UNKNOWN_WAL,
    )


def _names_of(node: Node) -> set[str]:
    """Return the names by which a primary may know a standby: own, slot's and cluster's."""
    names = {application_name(node), slot_of(node)}
    if node.state is not None:
        names.add(node.state.setting("cluster_name"))
    return {name.lower() for name in names if name}


def _at(seen: Sighting) -> str:
    return format_lsn(seen.lsn)
