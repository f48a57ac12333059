"""The steps that take writes from the old primary without losing any, or give them back. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.lsn import format_lsn
from services.failover.model import statements
from services.failover.model.topology import follows, slot_of
from services.failover.model.view import FENCE, Reach
from services.failover.plan.steps.promotion import names_of
from services.failover.plan.steps.step import Action, Step, with_state

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, NodeState, View

MINE = "by this command"
ENDED = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE … -- client sessions from before "
    "the reload, but for the bridge's between transactions"
)


def checkpoint(old: Node, new: Node) -> Step:
    """Run CHECKPOINT while writes go on, so that the later stop is short."""
    return Step(
        action=Action.CHECKPOINT,
        server=old.name,
        subject="",
        node=new.name,
        text=f"checkpoint {old.name}, so that its stop is short",
        before=f"{old.name} is writable",
        after=f"{old.name} has few changes that are not in its files",
        effect=lambda view: view,
        holds=lambda view: True,
        shown=(statements.CHECKPOINT,),
        sql=(statements.CHECKPOINT,),
    )


def wait_for_replay(old: Node, new: Node) -> Step:
    """Wait, while writes go on, until nothing holds up the standby's replay.

    A query there can, for max_standby_streaming_delay: a promotion would wait for it.
    """
    lsn = new.received
    return Step(
        action=Action.REPLAY,
        server=new.name,
        subject="",
        node=new.name,
        text=f"wait until {new.name} has replayed all WAL that it received",
        before=f"{old.name} is writable",
        after=f"{new.name} has replayed WAL up to {format_lsn(lsn)}",
        effect=lambda view: with_state(view, new.name, _all_replayed),
        holds=lambda view: replayed(view, new) >= lsn,
        progress=lambda view: (
            f"{lsn - replayed(view, new)} bytes are not replayed: a query on {new.name} may hold "
            "them up, for as long as its max_standby_streaming_delay"
        ),
    )


def replayed(view: View, node: Node) -> int:
    """Return how far a standby has replayed its WAL (bytes), 0 if it does not answer."""
    found = view.node(node.name)
    if found.state is None:
        return 0
    replication = found.state.replication
    return found.received if replication.replay_waits else replication.replayed_lsn or 0


def _all_replayed(state: NodeState) -> NodeState:
    return replace(state, replication=replace(state.replication, replay_waits=True))


def settle(old: Node, new: Node, slots: tuple[str, ...], bytes_max: int) -> Step:
    """Wait, while writes go on, until standby and consumers are near, and each confirms a marker.

    A consumer that confirms nothing would hold up the drain, with writes fenced.
    """
    sql = statements.marker(f"before the fence of {old.name}")
    return Step(
        action=Action.SETTLE,
        server=old.name,
        subject=",".join(slots),
        node=new.name,
        text=f"wait until {', '.join((new.name, *slots))}"
        f" are within {bytes_max >> 10} kB of {old.name}",
        before=f"{old.name} is writable",
        after=f"what is left to send to each is less than {bytes_max} bytes, and each slot is "
        "confirmed past a marker message",
        effect=lambda view: caught_up(view, old, new, slots, written(view, old)),
        holds=lambda view: behind(view, old, new, slots, written(view, old) - bytes_max) == (),
        shown=sql,
        sql=sql,
        slots=slots,
        progress=lambda view: in_words(
            behind(view, old, new, slots, written(view, old) - bytes_max)
        ),
    )


def fence(old: Node, new: Node) -> Step:
    """Let no transaction write on the old primary any more."""
    return Step(
        action=Action.FENCE,
        server=old.name,
        subject="",
        node=new.name,
        text=f"fence writes on {old.name}",
        before=f"{old.name} is the primary; every slot is ready on the standby",
        after=f"{FENCE} is on on {old.name}, set by this command, and earlier sessions are ended",
        effect=lambda view: with_state(view, old.name, lambda state: _fenced(state, MINE)),
        holds=lambda view: view.node(old.name).fenced and early_sessions(view, old) == 0,
        shown=(*statements.fenced("timeline … by … since …"), ENDED),
        sql=statements.fenced("timeline … by … since …"),
    )


def write_final_marker(old: Node, new: Node) -> Step:
    """Write a last message, and note the position after it: the final LSN."""
    sql = statements.marker(f"the last of {old.name}")
    return Step(
        action=Action.MARK,
        server=old.name,
        subject="",
        node=new.name,
        text=f"write a marker message on {old.name}, and note the final LSN",
        before=f"{old.name} is fenced",
        after="the final LSN is known",
        effect=lambda view: view,
        holds=lambda view: view.node(old.name).fenced and early_sessions(view, old) == 0,
        shown=sql,
        sql=sql,
    )


def drain(old: Node, new: Node, slots: tuple[str, ...], lsn: int) -> Step:
    """Wait until the standby and every connected consumer have the final LSN.

    The standby has also replayed it, as a promotion would wait for that without a way back.
    """
    return Step(
        action=Action.DRAIN,
        server=old.name,
        subject=",".join(slots),
        node=new.name,
        text=f"wait until {', '.join((new.name, *slots))} have the final LSN",
        before=f"{old.name} is fenced",
        after="the standby has replayed up to the final LSN, and each slot is confirmed past it",
        effect=lambda view: caught_up(view, old, new, slots, lsn),
        holds=lambda view: behind(view, old, new, slots, lsn) == (),
        lsn=lsn,
        slots=slots,
        progress=lambda view: in_words(behind(view, old, new, slots, lsn)),
    )


def stop_primary(old: Node, new: Node) -> Step:
    """Stop the fenced primary in order, so that it need not be rewound."""
    command = old.known_machine.command("stop", role="standby", **names_of(new))
    before = f"{old.name} is fenced; standby and consumers have the final LSN"
    step = _on_machine(Action.STOP, old, new, command, f"stop {old.name}", before)
    fed = new.known_state.provenance.fed
    slot = fed.slot if fed is not None and fed.slot else slot_of(new)
    without_slot = fed.application if fed is not None and not fed.slot else ""
    sql = statements.end_other_standbys(slot, without_slot)
    return replace(step, sql=(sql,), shown=(sql, *step.shown))


def shoot(old: Node, new: Node) -> Step:
    """Make sure by its machine's command that a primary that may be alive can't write."""
    command = old.known_machine.command("fence", role="standby", **names_of(new))
    return _on_machine(
        Action.SHOOT,
        old,
        new,
        command,
        f"fence the machine of {old.name}",
        f"{old.name} may take writes",
    )


def start_primary(old: Node) -> Step:
    """Start a primary again that a switchover has stopped and then taken back."""
    command = old.known_machine.command("start", role="primary", **names_of(old))
    return Step(
        action=Action.START,
        server=old.name,
        subject="",
        node=old.name,
        text=f"start {old.name}",
        before="no node is writable, and nothing was promoted",
        after=f"{old.name} answers as a primary",
        effect=lambda view: view,
        holds=lambda view: view.node(old.name).leading,
        shown=(shlex.join(command),),
        command=command,
    )


def unfence(old: Node) -> Step:
    """Let transactions write again."""
    return Step(
        action=Action.UNFENCE,
        server=old.name,
        subject="",
        node=old.name,
        text=f"let {old.name} take writes again",
        before=f"{old.name} is fenced, and no other node is a primary",
        after=f"{FENCE} on {old.name} is as it was before",
        effect=lambda view: with_state(view, old.name, lambda state: _fenced(state, "")),
        holds=lambda view: view.node(old.name).writable,
        shown=statements.UNFENCED,
        sql=statements.UNFENCED,
    )


def behind(
    view: View, old: Node, new: Node, slots: tuple[str, ...], lsn: int
) -> tuple[tuple[str, int], ...]:
    """Return who lacks `lsn`, and by how many bytes: the standby, its replay, slots by name."""
    reached = {
        new.name: view.node(new.name).received,
        f"the replay of {new.name}": replayed(view, new),
    }
    late = tuple((name, lsn - position) for name, position in reached.items() if position < lsn)
    return (*late, *unconfirmed(view, old.name, slots, lsn))


def unconfirmed(
    view: View, server: str, slots: tuple[str, ...], lsn: int
) -> tuple[tuple[str, int], ...]:
    """Return which slots of `server` are not confirmed up to `lsn`, and by how many bytes."""
    if lsn <= 0:  # of a step that has written nothing, maybe at a subscriber
        return ()
    state = view.node(server).state
    slotted = ((name, state.slot(name) if state is not None else None) for name in slots)
    confirmed = ((name, (slot.confirmed_flush_lsn or 0) if slot else 0) for name, slot in slotted)
    return tuple((name, lsn - position) for name, position in confirmed if position < lsn)


def in_words(lags: tuple[tuple[str, int], ...]) -> str:
    """Return who lacks how many bytes, as an operator reads it."""
    return ", ".join(f"{name} {size} bytes behind" for name, size in lags)


def caught_up(view: View, old: Node, new: Node, slots: tuple[str, ...], lsn: int) -> View:
    """Return the view in which the standby and the slots have reached `lsn`."""

    def confirmed(state: NodeState) -> NodeState:
        return replace(
            state,
            slots=tuple(
                replace(slot, confirmed_flush_lsn=max(slot.confirmed_flush_lsn or 0, lsn))
                if slot.slot_name in slots
                else slot
                for slot in state.slots
            ),
        )

    def received(state: NodeState) -> NodeState:
        reached = max(state.replication.received_lsn or 0, lsn)
        replication = replace(state.replication, received_lsn=reached, replay_waits=True)
        return replace(state, replication=replication)

    return with_state(with_state(view, old.name, confirmed), new.name, received)


def written(view: View, node: Node) -> int:
    """Return how far a primary has flushed its WAL (bytes), 0 if it does not answer."""
    state = view.node(node.name).state
    return (state.replication.written_lsn or 0) if state is not None else 0


def early_sessions(view: View, node: Node) -> int:
    """Count the client sessions from before the fence."""
    state = view.node(node.name).state
    return state.early_sessions if state is not None else 0


def _fenced(state: NodeState, by_whom: str) -> NodeState:
    mark = f"timeline {state.server.timeline} {by_whom}" if by_whom else ""
    return replace(state, fence_mark=mark, early_sessions=0)


def gone(view: View, old: Node) -> View:
    """Return the view in which a primary is down and feeds no server any more."""

    def deaf(node: Node) -> Node:
        if node.name == old.name:
            return replace(node, reach=Reach.REFUSED, detail="stopped", state=None)
        if node.state is None or not follows(node, old):
            return node
        replication = replace(node.state.replication, receiver_streaming=False)
        return replace(node, state=replace(node.state, replication=replication))

    def unfed(subscription: Subscription) -> Subscription:
        led = [n for n in view.nodes if subscription.conninfo.names(n.endpoints)]
        fed = subscription.fed and bool(led) and old.name not in {n.name for n in led}
        return replace(subscription, fed=fed)

    return replace(
        view,
        nodes=tuple(map(deaf, view.nodes)),
        subscribers=tuple(
            replace(each, subscriptions=tuple(map(unfed, each.subscriptions)))
            for each in view.subscribers
        ),
    )


def _on_machine(
    action: Action, old: Node, new: Node, command: tuple[str, ...], text: str, before: str
) -> Step:
    """Return the step that ends the old primary by a command on its machine."""
    return Step(
        action=action,
        server=old.name,
        subject="",
        node=new.name,
        text=text,
        before=before,
        after=f"nothing listens at {old.name}",
        effect=lambda view: gone(view, old),
        holds=lambda view: view.node(old.name).reach in (Reach.REFUSED, Reach.SILENT),
        shown=(shlex.join(command),),
        command=command,
    )
