"""The standbys of a new primary: what each still needs, so that the next failover works. Pure.

on               step     before it                              after it (by observing)
the new primary  slot     a standby's physical slot is missing   it is there
another standby  follow   it streams from elsewhere              it streams from the primary
an old primary   rejoin   it is down or fenced, and wished for   it streams from the primary
each standby     clean    slots from when it was the primary     they are gone
the new primary  reset    a standby that streams is not waited   decoding and commits wait
                          for                                    for it
each standby     ready    a slot is not usable there             all are
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import ExitCode
from services.failover.checks.blockers import Blocker
from services.failover.model.standby_settings import listed, quorum, slots_that_exist
from services.failover.model.timelines import left_at
from services.failover.model.topology import (
    application_name,
    failover_slots,
    follows,
    has_slot,
    keep_off,
    slot_of,
    streams_from,
)
from services.failover.plan.steps import topology as effects
from services.failover.plan.succession import newer_perhaps
from services.postgres.identifiers import identifier

if TYPE_CHECKING:
    from services.failover.model.view import Node
    from services.failover.plan.request import Draft


def attach_standbys(draft: Draft, primary: str) -> list[Blocker]:
    """Plan the steps that make every other node a standby of `primary`; return the blockers."""
    left: list[Blocker] = []
    others = [node for node in draft.view.nodes if node.name != primary]
    for node in sorted(others, key=lambda node: not node.standby):  # a rejoin takes its time
        left += _attach(draft, node.name, primary)
    for name in [node.name for node in draft.view.standbys]:
        _clean(draft, name, primary)
    _await(draft, primary)
    for name in [node.name for node in draft.view.standbys]:
        standby, above = draft.view.node(name), draft.view.node(primary)
        attached = streams_from(standby, above)
        if attached and effects.unready(draft.view, standby, above):
            draft.add(effects.ready(standby, above))
    return left


def _attach(draft: Draft, name: str, primary: str) -> list[Blocker]:
    """Add the step that makes a node a standby of the primary; return what prevents it.

    A standby follows by its settings; a node that has diverged must be rebuilt, if that is wished.
    """
    node, above = draft.view.node(name), draft.view.node(primary)
    wished = name in draft.request.rejoin
    diverged = node.standby and _diverged(node, above)
    if not (diverged and _ahead(node, above)):
        if streams_from(node, above) or (node.standby and follows(node, above)):
            return []
        if _cascades(draft, node, primary):
            return []
    if node.standby and not diverged:
        missing = _rights(draft, name, primary)
        if not missing and _slot(draft, name, primary):
            draft.add(effects.follow_primary(node, above))
        return missing
    if not wished:
        return _not_wished(node, primary, diverged=diverged)
    if node.writable:
        return []  # a split brain, which is refused elsewhere
    if blocker := newer_perhaps(draft.view, draft.request, node, above):
        return [blocker]
    if node.machine is None or not node.machine.may_rejoin:
        return [
            Blocker(
                name,
                f"the node is not a standby of {primary} yet, and failover.machines.{name} has "
                "neither `rejoin` nor `data_folder`",
                f"rebuild it from {primary} (pg_rewind or pg_basebackup), then slotfailover "
                f"rejoin {name}",
            )
        ]
    missing = _rights(draft, name, primary)
    if missing:
        return missing
    if _slot(draft, name, primary):
        draft.add(effects.rejoin(node, above, copies=draft.request.copies))
    return []


def kept_off(draft: Draft, primary: str) -> tuple[Blocker, ...]:
    """Return what a person must not do with the nodes that the primary's promotion has replaced."""
    view, wished = draft.view, draft.request.rejoin
    return tuple(
        Blocker(
            node.name,
            f"{primary} was promoted, and nobody has seen {node.name} as a standby since: if it is "
            f"started, it may take writes beside {primary}",
            remedy,
        )
        for node in view.nodes
        if node.name not in wished and (remedy := keep_off(view, node))
    )


def _cascades(draft: Draft, node: Node, primary: str) -> bool:
    """Tell whether the settings let a standby stream from another node, which is a standby now."""
    upstream = next((n for n in draft.view.nodes if n.name == node.follows), None)
    return upstream is not None and upstream.name != primary and upstream.standby and node.standby


def _not_wished(node: Node, primary: str, *, diverged: bool) -> list[Blocker]:
    """Return what is left of a node that must be rebuilt, which nobody has asked for."""
    if node.fenced:
        reason = "the node is fenced and still runs, on the old timeline"
    elif diverged:
        reason = f"the node has WAL that {primary} never had"
    else:
        return []
    return [Blocker(node.name, reason, f"slotfailover rejoin {node.name}")]


def _diverged(standby: Node, primary: Node) -> bool:
    """Tell whether the standby has WAL that the primary never had, by the whole of its history."""
    above, below = primary.state, standby.state
    if above is None or below is None or above.server.timeline == below.server.timeline:
        return False
    if _ahead(standby, primary):
        return True
    history = above.provenance.history
    if not history:
        return above.switch_lsn is not None and standby.received > above.switch_lsn
    left = left_at(history, below.server.timeline)
    return left is None or standby.received > left


def _ahead(standby: Node, primary: Node) -> bool:
    """Tell whether the standby is on a newer timeline, of which the primary can feed nobody."""
    return standby.known_state.server.timeline > primary.known_state.server.timeline


def _slot(draft: Draft, name: str, primary: str) -> bool:
    """Plan the standby's slot; whether it is there then: it is not where making it has failed."""
    wanted = slot_of(draft.view.node(name))
    above = draft.view.node(primary)
    if not has_slot(above, wanted):
        draft.add(effects.slot(above, wanted))
    return has_slot(draft.view.node(primary), wanted)


def _rights(draft: Draft, name: str, primary: str) -> list[Blocker]:
    """Return a blocker for the privileges that our role lacks to make the node a standby."""
    node, above = draft.view.node(name), draft.view.node(primary)
    rights, slot = above.known_state.replication, slot_of(node)
    own = node.machine is not None and node.machine.may_rejoin and not node.has_command("rejoin")
    lacking = []
    if not rights.may_replicate and not has_slot(above, slot):
        lacking.append(f"REPLICATION (to make the slot {slot})")
    if own and not node.standby and not rights.may_rewind:
        lacking.append("EXECUTE on pg_ls_dir, pg_stat_file and pg_read_binary_file (for pg_rewind)")
    if not lacking:
        return []
    return [
        Blocker(
            name,
            f"our role may not make it a standby: on {primary} it lacks {' and '.join(lacking)}",
            f"connect to {primary} as a superuser, then slotfailover rejoin {name}",
            ExitCode.PRIVILEGE_MISSING,
        )
    ]


def _clean(draft: Draft, name: str, primary: str) -> None:
    """Add the step that drops slots on a standby which it keeps from when it was the primary."""
    standby, above = draft.view.node(name), draft.view.node(primary)
    if not streams_from(standby, above) or standby.state is None:
        return
    theirs = {slot.slot_name for slot in failover_slots(above)}
    physical = _moved_on(draft, standby, above)
    names = tuple(
        slot.slot_name
        for slot in standby.state.slots
        if not slot.synced
        and slot.active_pid is None
        and not slot.temporary
        and (
            slot.slot_name in theirs
            or (slot.slot_type == "logical" and slot.failover)
            or (slot.slot_type == "physical" and slot.slot_name in physical)
        )
    )
    if names:
        draft.add(effects.clean(standby, above, names))


def _moved_on(draft: Draft, standby: Node, primary: Node) -> set[str]:
    """Return the physical slots of `standby` that nobody will use again.

    The new primary used one of them when it was a standby; the standbys that now stream from the
    new primary used the others. A standby of `standby` keeps its slot, also while it is away.
    """
    gone = {slot_of(primary), primary.known_state.setting("primary_slot_name")}
    kept = set()
    for node in draft.view.nodes:
        slot = slot_of(node)
        if node.name in (standby.name, primary.name):
            continue
        if node.follows == standby.name or not streams_from(node, primary):
            kept.add(slot)
        elif has_slot(primary, slot):
            gone.add(slot)
    return gone - kept - {""}


def _await(draft: Draft, primary: str) -> None:
    """Name the standbys that stream in the settings that wait for them; nobody is taken out."""
    above = draft.view.node(primary)
    streaming = [node for node in draft.view.standbys if streams_from(node, above)]
    names = [
        slot for node in streaming if node.synchronized and has_slot(above, slot := slot_of(node))
    ]
    setting = above.known_state.setting("synchronized_standby_slots")
    kept = slots_that_exist(setting, above.known_state.slots)
    wanted = (*kept, *(name for name in names if name not in kept))
    if wanted != listed(setting):
        draft.add(effects.await_standby(above, wanted))
    before = quorum(draft.view.synchronous_before)
    current = above.known_state.setting("synchronous_standby_names")
    remembered = before[0] if before is not None and not current else 0
    count = draft.request.synchronous_standbys or remembered
    seen = {application_name(node) for node in streaming} - {""}
    if count and len(seen & set(above.known_state.replication.followers)) >= count:
        value = _quorum(count, seen)
        if above.known_state.setting("synchronous_standby_names") != value:
            draft.add(effects.await_commits(draft.view.node(primary), value))


def _quorum(count: int, names: set[str]) -> str:
    quoted = ", ".join(identifier(name) for name in sorted(names))
    return f"ANY {count} ({quoted})"
