"""The steps that give the new primary its standbys, so that the next failover works too. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from services.failover.model import statements
from services.failover.model.conninfo import Conninfo
from services.failover.model.topology import failover_slots, has_slot, slot_of, streams_from
from services.failover.model.view import FENCE, FENCE_MARK, Reach
from services.failover.plan.steps.promotion import names_of, with_setting
from services.failover.plan.steps.step import Action, Step, with_node, with_state
from services.postgres.server import SettingValue
from services.postgres.slots import Slot

if TYPE_CHECKING:
    from services.failover.model.conninfo import Address
    from services.failover.model.view import Node, NodeState, View

OF_PRIMARIES = (FENCE, FENCE_MARK, "synchronized_standby_slots", "synchronous_standby_names")
"""The settings that a rejoin takes out of a node's own file."""
OF_STANDBYS = {"hot_standby_feedback": "on", "sync_replication_slots": "on"}
"""The settings that a rejoin writes there, beside where the node is to stream from."""
FALLBACK_DBNAME = "postgres"
"""The database of slot synchronization, if a standby's primary_conninfo never named one."""


def upstream_of(primary: Address, former: Conninfo | None, slot: str) -> Conninfo:
    """Return `former` as primary_conninfo of a standby of `primary`, with a dbname."""
    moved = (former or Conninfo(())).at(primary)
    if not moved.value("dbname"):
        moved = Conninfo((*moved.pairs, ("dbname", FALLBACK_DBNAME)))
    if not moved.value("application_name"):
        moved = Conninfo((*moved.pairs, ("application_name", slot)))
    return moved


def slot(primary: Node, name: str) -> Step:
    """Make the physical slot of a standby, so that its WAL is kept."""
    sql = statements.create_physical_slot(name)
    return Step(
        action=Action.SLOT,
        server=primary.name,
        subject=name,
        node=primary.name,
        text=f"create the physical slot {name} on {primary.name}",
        before=f"{primary.name} is the primary, and has no such slot",
        after=f"the slot {name} exists, and keeps WAL",
        effect=lambda view: with_state(view, primary.name, lambda s: _with_physical(s, name)),
        holds=lambda view: has_slot(view.node(primary.name), name),
        shown=sql,
        sql=sql,
    )


def follow_primary(standby: Node, primary: Node) -> Step:
    """Let another standby stream from the new primary."""
    name = slot_of(standby)
    given = standby.state.upstream if standby.state is not None else None
    conninfo = upstream_of(primary.address, given, name)
    return Step(
        action=Action.FOLLOW,
        server=standby.name,
        subject=name,
        node=primary.name,
        text=f"let {standby.name} stream from {primary.name}",
        before=f"{standby.name} is a standby, and has no WAL that {primary.name} never had",
        after=f"{standby.name} streams from {primary.name}",
        effect=lambda view: _attached(view, standby, primary, name),
        holds=lambda view: streams_from(view.node(standby.name), primary),
        shown=statements.primary_conninfo(conninfo.masked),
    )


def rejoin(old: Node, primary: Node, *, copies: bool) -> Step:
    """Make an old primary, or a node that fell behind, a standby of the new primary.

    `copies`: a base backup may be taken where pg_rewind can't do it.
    """
    name = slot_of(old)
    command: tuple[str, ...] = ()
    copies = copies or old.known_machine.copies
    if old.known_machine.has("rejoin"):
        copy = "--copy" if copies else ""
        words = names_of(primary)
        command = old.known_machine.command("rejoin", role="standby", slot=name, copy=copy, **words)
    return Step(
        action=Action.REJOIN,
        server=old.name,
        subject=name,
        node=primary.name,
        text=f"make {old.name} a standby of {primary.name}",
        before=f"{old.name} is down or fenced, and its slot exists on {primary.name}",
        after=f"{old.name} streams from {primary.name}",
        effect=lambda view: _attached(view, old, primary, name),
        holds=lambda view: streams_from(view.node(old.name), primary),
        shown=(shlex.join(command),) if command else _by_hand(old, primary, name, copies=copies),
        command=command,
        copies=copies,
    )


def clean(standby: Node, primary: Node, names: tuple[str, ...]) -> Step:
    """Drop the slots that a former primary still has: one clash stops all synchronization."""
    sql = statements.drop_slots(names)

    def dropped(state: NodeState) -> NodeState:
        return replace(state, slots=tuple(s for s in state.slots if s.slot_name not in names))

    def gone(view: View) -> bool:
        state = view.node(standby.name).state
        left = [] if state is None else [s for s in state.slots if s.slot_name in names]
        return state is not None and all(found.synced for found in left)

    return Step(
        action=Action.CLEAN,
        server=standby.name,
        subject=",".join(names),
        node=primary.name,
        text=f"drop the leftover slots of {standby.name}: {', '.join(names)}",
        before=f"{standby.name} is a standby; the slots are its own, from when it was the primary",
        after="the slots are gone, or come from synchronization",
        effect=lambda view: with_state(view, standby.name, dropped),
        holds=gone,
        shown=sql,
        sql=sql,
    )


def await_standby(primary: Node, items: tuple[str, ...]) -> Step:
    """Let decoding wait for the standbys again, so that no consumer gets ahead of them."""
    setting = "synchronized_standby_slots"
    return _set(primary, setting, ", ".join(items), items, "logical decoding waits for them")


def await_commits(primary: Node, value: str) -> Step:
    """Let commits wait for standbys again."""
    return _set(primary, "synchronous_standby_names", value, (value,), "commits wait for them")


def ready(standby: Node, primary: Node) -> Step:
    """Wait until every failover slot of the new primary is usable on the standby."""
    return Step(
        action=Action.READY,
        server=standby.name,
        subject="",
        node=primary.name,
        text=f"wait until every slot is ready on {standby.name}",
        before=f"{standby.name} streams from {primary.name}, and has no slots in the way",
        after=f"{standby.name} could take over",
        effect=lambda view: with_state(
            view, standby.name, lambda s: _synchronized(s, view, primary)
        ),
        holds=lambda view: not _missing(view, standby, primary),
        shown=(f"{statements.SNAPSHOT} -- on {primary.name}", statements.RELOAD),
        progress=lambda view: (
            f"not ready on {standby.name} yet: slots {', '.join(_missing(view, standby, primary))}"
        ),
    )


def unready(view: View, standby: Node, primary: Node) -> tuple[str, ...]:
    """Return the failover slots of `primary` that are not ready on `standby`."""
    state = standby.state
    if state is None:
        return tuple(found.slot_name for found in failover_slots(primary))
    copies = {copy.slot_name for copy in state.slots if copy.ready}
    names = (found.slot_name for found in failover_slots(view.node(primary.name)))
    return tuple(name for name in names if name not in copies)


def _missing(view: View, standby: Node, primary: Node) -> tuple[str, ...]:
    return unready(view, view.node(standby.name), view.node(primary.name))


def _set(primary: Node, setting: str, value: str, items: tuple[str, ...], after: str) -> Step:
    """Return the step that sets a list of standbys or slots by ALTER SYSTEM."""
    sql = statements.alter_system(setting, items)

    def holds(view: View) -> bool:
        state = view.node(primary.name).state
        return state is not None and state.setting(setting) == value

    return Step(
        action=Action.RESET,
        server=primary.name,
        subject=setting,
        node=primary.name,
        text=f"set {setting} to '{value}' on {primary.name}",
        before=f"the standbys that {setting} names stream",
        after=after,
        effect=lambda view: with_state(
            view, primary.name, lambda s: with_setting(s, setting, items)
        ),
        holds=holds,
        shown=sql,
        sql=sql,
    )


def _by_hand(old: Node, primary: Node, name: str, *, copies: bool) -> tuple[str, ...]:
    """Return, as text, what `services.failover.execute.rejoin_node` does, as far as it is known."""
    machine = old.known_machine
    given = primary.state.upstream if primary.state is not None else None
    program, data = machine.program, shlex.quote(str(machine.data_folder))
    stop = (shlex.join(machine.command("stop")),) if machine.has("stop") else ()
    source = f"the connection of failover.nodes.{primary.name}"
    rewind = f"{program('pg_rewind')} --target-pgdata={data} --source-server=… ({source})"
    copy = (
        f"or, where that can't be: {program('pg_basebackup')} -D {data}.copying -d … ({source}), "
        f"then {data} is moved to {data}.before-… and the copy takes its place"
    )
    conninfo = "as the node's own files or failover.replication say"
    if given is not None:
        conninfo = upstream_of(primary.address, _without_name(given), name).masked
    return (
        *stop,
        f"{rewind} -n; then without -n",
        *((copy,) if copies else ()),
        f"postgresql.auto.conf: primary_conninfo = {conninfo}",
        f"postgresql.auto.conf: primary_slot_name = {name}",
        *(f"postgresql.auto.conf: {setting} = {value}" for setting, value in OF_STANDBYS.items()),
        f"postgresql.auto.conf: without {', '.join(OF_PRIMARIES)}",
        "standby.signal is created",
        shlex.join(machine.command("start")),
    )


def _without_name(conninfo: Conninfo) -> Conninfo:
    """Leave out the application_name, by which another standby is known."""
    return Conninfo(tuple(pair for pair in conninfo.pairs if pair[0] != "application_name"))


def _with_physical(state: NodeState, name: str) -> NodeState:
    """Return the state with a new physical slot of this name."""
    added = Slot(
        slot_name=name,
        plugin=None,
        slot_type="physical",
        database=None,
        temporary=False,
        active_pid=None,
        restart_lsn=None,
        confirmed_flush_lsn=None,
        wal_status="reserved",
        two_phase=False,
        failover=False,
        synced=False,
        invalidation_reason=None,
    )
    others = tuple(found for found in state.slots if found.slot_name != name)
    return replace(state, slots=(*others, added))


def _attached(view: View, node: Node, primary: Node, name: str) -> View:
    """Return the view in which `node` streams from `primary` by the slot `name`."""
    above = view.node(primary.name).known_state
    here = node.state or above
    given = here.upstream if node.state is not None or here.upstream is None else None
    if given is None and here.upstream is not None:
        given = _without_name(here.upstream)
    upstream = upstream_of(primary.address, given, name)
    application = upstream.value("application_name")
    reached = max(here.replication.received_lsn or 0, above.replication.written_lsn or 0)
    settings = {
        **here.settings,
        "primary_slot_name": SettingValue(name, "configuration file"),
    }
    standby = replace(
        here,
        server=replace(here.server, in_recovery=True, timeline=above.server.timeline),
        replication=replace(
            here.replication, received_lsn=reached, written_lsn=None, receiver_streaming=True
        ),
        settings=settings,
        slots=here.slots if node.state is not None else (),
        upstream=upstream,
        switch_lsn=None,
        early_sessions=0,
        fence_mark="",
        leaks=(),
        next_xid=None,
        cut=False,
    )

    def seen(state: NodeState) -> NodeState:
        followers = (*state.replication.followers, application)
        return replace(state, replication=replace(state.replication, followers=followers))

    def answers(node: Node) -> Node:
        return replace(node, reach=Reach.ANSWERS, detail="", state=standby)

    return with_state(with_node(view, node.name, answers), primary.name, seen)


def _synchronized(state: NodeState, view: View, primary: Node) -> NodeState:
    """Return a standby's state with copies of all the primary's failover slots."""
    copies = tuple(
        replace(found, synced=True, active_pid=None)
        for found in failover_slots(view.node(primary.name))
    )
    names = {copy.slot_name for copy in copies}
    own = tuple(found for found in state.slots if found.slot_name not in names)
    return replace(state, slots=(*own, *copies))
